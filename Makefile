# sublet: two commands to begin with, as root on Debian 12 or 13 with git, make, curl and Rust:
#   make demo    containers sharing a GPU (a simulated one where there is none); make demo-shell to go on there
#   make test    the tests, in 12 minutes: real runc; Docker, Podman and containerd in a Debian 13 of their own
# The rest: test-all, before a release: `make test` and everything else, of a clean checkout; test-GROUP (one group of
# tests/jobs, all of it: unit, model, sim, e2e-runc, e2e-crun, docker, podman, containerd, systemd, security, slurm, real, packages,
# kubernetes, ansible, people, metrics, web, faults, soak, lint, fuzz, cases; enforcing, packages on kernels that enforce, and
# model-unlike, a large model, which nothing else runs); soak (longer), check (needs no root, network, engine or GPU), build,
# bench, fuzz (fuzz/README.md), gpu-test, install; test-teeth (docs/security.md); deb, rpm, dist, repo and advisories
# (docs/packaging.md); real-test, frameworks in Docker and Podman on this machine's GPUs. CONTRIBUTING.md: which after what.

SHELL := /bin/bash
HOST := $(shell rustc -vV | sed -n 's/^host: //p')
# What is built for; make TARGET=aarch64-unknown-linux-gnu takes Debian's cross compiler for the linker.
TARGET ?= $(HOST)
STATIC ?= 1
PREFIX ?= /usr
LIBEXECDIR ?= $(PREFIX)/libexec
UNITDIR ?= $(PREFIX)/lib/systemd/system
DESTDIR ?=
CARGO ?= cargo
CARGO_HOME ?= $(HOME)/.cargo
CARGO_FLAGS ?= --locked
VERSION := $(shell sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

# The shim and the hook start for every container: static, they load nothing, and relocate themselves from a packed table
# (GNU ld 2.38, glibc 2.36; an older linker ignores it with a warning). `sublet` loads NVML.
ifeq ($(STATIC),1)
static_flags = -C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs
endif
# The same bytes wherever they are built, an id by which a core dump finds its symbols, and no unwind tables.
release_flags = -C llvm-args=-enable-machine-outliner=always -C link-arg=-Wl,--build-id=sha1 -C link-arg=-Wl,-T,packaging/no-unwind.ld \
    -C link-arg=-Wl,--no-eh-frame-hdr --remap-path-prefix=$(CURDIR)=/sublet \
    --remap-path-prefix=$(CARGO_HOME)=/cargo --remap-path-prefix=$(shell rustc --print sysroot)=/rust
ifneq ($(TARGET),$(HOST))
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER ?= aarch64-linux-gnu-gcc
TARGET_CC ?= $(CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER)
endif
TARGET_CC ?= cc
# sublet-share runs inside containers, with whatever C library they have, or none: always static.
share_flags = -C target-feature=+crt-static
hot_program = -p sublet-runtime

# The programs under test: dynamic, or static as packages have them.
SHIPPED ?=
TEST_BIN := $(CURDIR)/target/$(if $(SHIPPED),shipped,test)-bin
# Where cargo builds what tests run.
TEST_TARGET := $(CURDIR)/target
BIN := $(CURDIR)/target/bin
ifneq ($(TARGET),$(HOST))
BIN := $(CURDIR)/target/bin-$(TARGET)
endif
GENERATED := $(CURDIR)/target/generated

# Those of tests/jobs.
test_groups := $(addprefix test-,unit lint fuzz model model-unlike sim e2e-runc e2e-crun docker podman containerd systemd security cases \
    slurm real packages enforcing kubernetes ansible people metrics web faults soak)

# Endurance: tests/soak/README.md.
MINUTES ?= 10
CYCLES ?=

.PHONY: all build test-build tested-build demo-build put-programs put-driver check lint unit test test-all book demo demo-shell bench soak fuzz gpu-test real-test \
    install deb rpm named dist repo advisories \
    test-teeth generate clean needs $(test_groups)

all: build

build:
	@echo "== Building sublet, and beside it sublet-runtime, which is sublet-hook too, and sublet-share (release)"
	@# Side by side: each ends in minutes of link-time optimisation, on one processor.
	@export RUSTFLAGS="$(release_flags)"; \
	$(CARGO) build $(CARGO_FLAGS) --release --target $(TARGET) -p sublet & \
	export RUSTFLAGS="$(release_flags) $(static_flags)"; status=0; \
	$(CARGO) build $(CARGO_FLAGS) --release --target $(TARGET) $(hot_program) --target-dir target/hot || status=$$?; \
	wait $$! && exit $$status
	RUSTFLAGS="$(release_flags) $(share_flags)" \
	    $(CARGO) build $(CARGO_FLAGS) --release --target $(TARGET) -p sublet-share --target-dir target/share
	@mkdir -p $(BIN)
	install -m 0755 target/$(TARGET)/release/sublet target/hot/$(TARGET)/release/sublet-runtime \
	    target/share/$(TARGET)/release/sublet-share $(BIN)/
	ln -sf sublet-runtime $(BIN)/sublet-hook

# Man pages and completions, for the packages. tests/run gives the program that it has built.
GENERATE ?= $(CARGO) run $(CARGO_FLAGS) -p sublet-generate --
$(GENERATED)/man/sublet.1: $(shell find src/cli/commands packaging/generate -name '*.rs') \
    $(addprefix docs/,annotations.md configuration.md containers.md) $(addprefix config/,config.toml containers.toml)
	@echo "== Man pages and shell completions"
	$(GENERATE) docs $(GENERATED)

# What the programs beside it are made of (CycloneDX).
SBOM := $(BIN)/sublet.cdx.json
.PHONY: $(SBOM)
$(SBOM):
	@echo "== The SBOM"
	@mkdir -p $(BIN)
	$(GENERATE) sbom $(TARGET) \
	    "$$(grep -ao 'GNU C Library (.*) stable release version [0-9.]*[0-9]' "$$($(TARGET_CC) -print-file-name=libc.a)" | head -1)" >$@.new
	mv $@.new $@

# What the tests run: the same programs without optimisation, the simulated driver, and the tests, all by one call and so
# with one set of dependencies. The shim and the hook are dynamic in target/test-bin; SHIPPED=1 makes static ones, as
# packages have them, in target/shipped-bin.
test-build:
	@echo "== Building the programs, the simulated driver and the tests"
	cargo build $(CARGO_FLAGS) --workspace --lib --bins --tests
	@$(MAKE) --no-print-directory put-programs put-driver

# Of these the programs under test alone: for tests/security/teeth.
tested-build:
	@echo "== Building the programs under test"
	cargo build $(CARGO_FLAGS) -p sublet -p sublet-runtime --target-dir $(TEST_TARGET)
	@$(MAKE) --no-print-directory put-programs

# And what the demo and the benchmark need: by one call, for one set of dependencies.
demo-build:
	@echo "== Building sublet and the simulated driver"
	cargo build $(CARGO_FLAGS) -p sublet -p sublet-runtime -p sublet-sim -p sublet-sim-libcuda
	@$(MAKE) --no-print-directory put-programs put-driver

put-programs:
	RUSTFLAGS="$(if $(SHIPPED),$(static_flags),$(share_flags))" cargo build $(CARGO_FLAGS) --target $(HOST) -p sublet-share $(if $(SHIPPED),$(hot_program)) --target-dir $(TEST_TARGET)
	@mkdir -p $(TEST_BIN)
	cp --remove-destination $(TEST_TARGET)/debug/sublet $(TEST_TARGET)/$(if $(SHIPPED),$(HOST)/)debug/sublet-runtime \
	    $(TEST_TARGET)/$(HOST)/debug/sublet-share $(TEST_BIN)/
	ln -sf sublet-runtime $(TEST_BIN)/sublet-hook

put-driver:
	@mkdir -p $(TEST_BIN)
	cp --remove-destination target/debug/{sublet-sim,nvidia-smi,nvidia-cuda-mps-control,nvidia-cuda-mps-server,cuda-probe} $(TEST_BIN)/
	cp --remove-destination target/debug/{libnvidia_ml,libcuda}.so $(TEST_BIN)/
	@# Engines copy them with every image and container.
	strip --strip-debug $(TEST_BIN)/{cuda-probe,nvidia-*,*.so}

needs:
	@tests/install-needs

lint:
	@echo "== Formatting, lints, dependencies, and the patches of tests/security/without"
	cargo fmt --all --check
	tests/lint/dependencies
	cargo clippy --workspace --all-targets -- -D warnings
	@echo "== Layers of modules, what is exported for nobody, and names"
	cargo run --quiet -p sublet-lint
	@tests/security/teeth --check
	@tests/lint/links
	@tests/lint/size

unit:
	@echo "== Unit and property tests; the shim with a low-level runtime that only writes down its call"
	cargo test $(CARGO_FLAGS) --workspace --exclude sublet-sim --exclude sublet-sim-libcuda --lib --bins \
	    --test runtime --test programs_alone --test corpora

check: lint unit
	@echo "Skipped, because they need root and engines (make test): the simulated driver's tests and the"
	@echo "end-to-end tests with runc and crun. Skipped, because they need a GPU (make gpu-test): tests/gpu."

# tests/run builds, and runs jobs of tests/jobs side by side.
test:
	@tests/run

test-all:
	@tests/run all

# `make test-faults ALL=1` has each call fail with each of its errors, which takes long; ONLY=create:openat:12:EMFILE
# repeats one (tests/faults/main.rs).
$(test_groups):
	@SHIPPED=$(SHIPPED) tests/run $(@:test-%=%)

# The tests of tests/security against builds that lack one defence each: are they able to fail? SWITCHES: some.
SWITCHES ?=
test-teeth: needs test-build
	@tests/security/teeth $(SWITCHES)

# The docs and the README as one book in target/book; mdBook is `cargo install mdbook`.
book:
	@command -v mdbook >/dev/null || { echo "book: mdbook is missing: cargo install mdbook" >&2; exit 1; }
	rm -rf target/book target/book-source
	cp -r docs target/book-source
	cp -r config hooks target/book-source
	sed 's|](docs/|](|g' README.md >target/book-source/readme.md
	sed -i 's|](\.\./|](|g' target/book-source/*.md
	mdbook build target/book-source

demo:
	@tests/install-needs --demo
	@tests/demo/run

demo-shell:
	@tests/install-needs --demo
	@tests/demo/run shell

bench: needs build demo-build
	@tests/bench/run

soak: needs test-build
	@tests/soak/run --minutes $(MINUTES) $(if $(CYCLES),--cycles $(CYCLES))

# Fuzzes the parsers of untrusted input; `make fuzz FUZZ_TARGETS=all` fuzzes the others too.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= annotations argv config_json hook_state layout_toml layout_yaml ledger
FUZZ_ALL := $(basename $(notdir $(wildcard fuzz/targets/*.rs)))
fuzz:
	@fuzz/run $(FUZZ_SECONDS) $(patsubst all,$(FUZZ_ALL),$(FUZZ_TARGETS))

gpu-test: build
	@tests/gpu/run

# Real engines and frameworks in containers on this machine's GPUs, as root: tests/real/README.md.
real-test:
	@tests/real/run

install: build $(GENERATED)/man/sublet.1 $(SBOM)
	@packaging/install "$(DESTDIR)" "$(PREFIX)" "$(LIBEXECDIR)" "$(UNITDIR)" "$(BIN)" "$(GENERATED)"

# Packages by debhelper and rpmbuild, and archives for distributions: docs/packaging.md.
deb rpm: named build $(GENERATED)/man/sublet.1 $(SBOM)
	@packaging/$@ "$(TARGET)" "$(BIN)" "$(GENERATED)"

dist: named
	@packaging/dist "$(VERSION)"

# Before the minutes of a build: is it known whose packages these are?
named:
	@packaging/identify

# Signed apt and dnf repositories of the packages that were made: docs/packaging.md, "Signing".
KEY ?=
repo:
	@packaging/repo "$(KEY)"

# RustSec's database, which is on GitHub: the other checks of cargo-deny (tests/lint/deny) need no network.
advisories:
	cargo deny check advisories

# Man pages, completions and the SBOM alone.
generate: $(GENERATED)/man/sublet.1 $(SBOM)

clean:
	cargo clean
