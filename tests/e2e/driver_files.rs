//! Where the driver's files are placed in the root filesystem of each family of distributions. If the family's own
//! loader is available, a program of that root calls dlopen of `libcuda.so.1` by its bare name, and dladdr must name
//! sublet's file. For the other families the places are compared with literals, and they are listed as untested.

use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::entry_points::table::COMPUTE_UTILITY;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const WHOLE: &[(&str, &str)] = &[("sublet.gpu", "0")];
const TRIPLET: &str = if cfg!(target_arch = "aarch64") { "aarch64-linux-gnu" } else { "x86_64-linux-gnu" };

fn inside(bundle: &Bundle<'_>, path: &str) -> PathBuf {
    bundle.dir.join("rootfs").join(path.trim_start_matches('/'))
}

/// The host's libcuda, which every libcuda.so.1 in a container has to be.
fn host_libcuda(world: &World) -> std::fs::Metadata {
    let driver = world.driver_root.as_ref().expect("simulated");
    let file = driver.join("usr/lib").join(TRIPLET).join("libcuda.so.580.159.04");
    std::fs::metadata(file).expect("the simulated libcuda")
}

/// dlopen by bare name and dladdr, by the program in the container; then that the file is the host's.
fn loads_ours(world: &World, bundle: &Bundle<'_>, expected: &str) {
    bundle.up();
    let info = bundle.event("info");
    assert_eq!(info["libcuda"], json!(expected), "{info}");
    let host = host_libcuda(world);
    let seen = PathBuf::from(format!("/proc/{}/root{expected}", bundle.pid()));
    let seen = std::fs::metadata(seen).expect("the container's libcuda");
    assert_eq!((seen.dev(), seen.ino()), (host.dev(), host.ino()), "{expected} is another file");
    bundle.down();
    world.assert_empty();
}

#[test]
fn debian_bookworm_of_the_host() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("debian", WHOLE, HOLD);
    loads_ours(&world, &bundle, &format!("/lib/{TRIPLET}/libcuda.so.1"));
}

#[test]
fn debian_trixie_with_its_own_loader() {
    if skip_unless_root() {
        return;
    }
    let roots = std::env::var("SUBLET_ROOTS").unwrap_or_else(|_| "/var/cache/sublet-tests".to_owned());
    let root = Path::new(&roots).join("trixie");
    if !root.exists() {
        println!("skipped: no Debian 13 with its own loader in {roots} (tests/engines/root trixie)");
        return;
    }
    let world = World::simulated("h200", "");
    let _mounted = Overlay::over(&root, &world.dir.path().join("bundles/trixie"));
    let bundle = world.bundle("trixie", WHOLE, HOLD);
    let probe = world.driver_root.as_ref().expect("simulated").join("usr/bin/cuda-probe");
    std::fs::copy(probe, inside(&bundle, "/usr/bin/cuda-probe")).expect("the probe");
    // As its loader spells it: /lib is a link to /usr/lib there.
    loads_ours(&world, &bundle, &format!("/lib/{TRIPLET}/libcuda.so.1"));
}

/// A writable view of a root in `rootfs` of a bundle's directory.
struct Overlay(PathBuf);

impl Overlay {
    fn over(root: &Path, bundle: &Path) -> Self {
        let [upper, work, rootfs] = ["upper", "work", "rootfs"].map(|name| bundle.join(name));
        for dir in [&upper, &work, &rootfs] {
            std::fs::create_dir_all(dir).expect("a bundle");
        }
        let [root, upper, work] = [root, &upper, &work].map(|dir| dir.display().to_string());
        let options = format!("lowerdir={root},upperdir={upper},workdir={work}");
        let mounted =
            Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&rootfs).status();
        assert!(mounted.expect("mount runs").success(), "{options}");
        Self(rootfs)
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A root filesystem of another layout: the C library in `libc`, links as (link, target).
struct Layout {
    family: &'static str,
    libc: &'static str,
    links: &'static [(&'static str, &'static str)],
    /// Where the libraries have to be.
    expected: &'static str,
}

/// Fedora 42 and RHEL 9, openSUSE Leap 15, Tumbleweed, Arch: `filesystem` packages of each.
const LAYOUTS: [Layout; 4] = [
    Layout {
        family: "Red Hat",
        libc: "usr/lib64",
        links: &[("lib64", "usr/lib64"), ("lib", "usr/lib"), ("bin", "usr/bin")],
        expected: "/usr/lib64",
    },
    Layout { family: "SUSE Leap", libc: "lib64", links: &[], expected: "/lib64" },
    Layout {
        family: "SUSE Tumbleweed",
        libc: "usr/lib64",
        links: &[("lib64", "usr/lib64"), ("lib", "usr/lib"), ("bin", "usr/bin")],
        expected: "/usr/lib64",
    },
    Layout {
        family: "Arch",
        libc: "usr/lib",
        links: &[("usr/lib64", "lib"), ("lib64", "usr/lib"), ("lib", "usr/lib"), ("bin", "usr/bin")],
        expected: "/usr/lib",
    },
];

/// Moves the Debian libraries of the bundle to the layout's places.
fn lay(bundle: &Bundle<'_>, layout: &Layout) {
    let debian = inside(bundle, &format!("/lib/{TRIPLET}"));
    let aside = bundle.dir.join("libraries");
    std::fs::rename(debian, &aside).expect("moved aside");
    for gone in ["lib", "lib64"] {
        let _ = std::fs::remove_dir_all(inside(bundle, gone));
    }
    let busybox = inside(bundle, "bin");
    if layout.links.iter().any(|(link, _)| *link == "bin") {
        for entry in std::fs::read_dir(&busybox).expect("bin").flatten() {
            let to = inside(bundle, "usr/bin").join(entry.file_name());
            std::fs::rename(entry.path(), to).expect("moved");
        }
        std::fs::remove_dir(&busybox).expect("empty");
    }
    std::fs::create_dir_all(inside(bundle, layout.libc)).expect("a library directory");
    for entry in std::fs::read_dir(&aside).expect("libraries").flatten() {
        let to = inside(bundle, layout.libc).join(entry.file_name());
        std::fs::rename(entry.path(), to).expect("moved");
    }
    for (link, target) in layout.links {
        symlink(target, inside(bundle, link)).expect("a link");
    }
}

/// A C library of another word size or machine, as multilib systems have beside the real one: an ELF
/// header of 20 bytes says so (elf(5): class at 4, `e_machine` at 18).
fn decoy(bundle: &Bundle<'_>, path: &str, class: u8, machine: u8) {
    let file = inside(bundle, path);
    std::fs::create_dir_all(file.parent().expect("a directory")).expect("directories");
    let mut header = *b"\x7fELF\x00\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00";
    (header[4], header[18]) = (class, machine);
    std::fs::write(file, header).expect("a decoy");
}

#[test]
fn other_families_have_the_files_where_their_loader_looks() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for layout in &LAYOUTS {
        let bundle = world.bundle(&layout.family.replace(' ', "-"), WHOLE, SLEEP);
        lay(&bundle, layout);
        if layout.libc != "usr/lib" {
            decoy(&bundle, "usr/lib/libc.so.6", 1, 3);
        }
        bundle.up();
        let libraries = COMPUTE_UTILITY.iter().filter(|name| name.starts_with("lib"));
        let expected: Vec<_> = libraries.map(|name| format!("{}/{name}", layout.expected)).collect();
        assert_eq!(libraries_of(&bundle), expected, "{}", layout.family);
        let seen = PathBuf::from(format!("/proc/{}/root{}/libcuda.so.1", bundle.pid(), layout.expected));
        assert_eq!(std::fs::metadata(seen).expect("libcuda").ino(), host_libcuda(&world).ino());
        bundle.down();
    }
    world.assert_empty();
    println!("untested loader: Red Hat, SUSE, Arch, Nix (places compared with literals only)");
}

/// Destinations of the driver's libraries, sorted.
fn libraries_of(bundle: &Bundle<'_>) -> Vec<String> {
    let mut found = bundle.destinations();
    found.retain(|path| path.contains(".so"));
    found.sort();
    found
}

fn warning(bundle: &Bundle<'_>) -> String {
    let created = bundle.create();
    assert!(created.ok, "{created:?}");
    assert!(bundle.start().ok);
    assert_eq!(created.stderr.lines().count(), 1, "{created:?}");
    created.stderr.trim_end().to_owned()
}

/// musl has one directory list for libraries and no use for glibc's: nodes and environment are all it gets.
#[test]
fn alpine_gets_nodes_and_environment() {
    if skip_unless_root() {
        return;
    }
    let arch = std::env::consts::ARCH;
    let loader = format!("/lib/ld-musl-{arch}.so.1");
    let world = World::simulated("h200", "");
    let bundle = world.bundle("alpine", WHOLE, SLEEP);
    std::fs::remove_dir_all(inside(&bundle, "lib")).expect("no glibc");
    let _ = std::fs::remove_dir_all(inside(&bundle, "lib64"));
    std::fs::create_dir_all(inside(&bundle, "lib")).expect("lib");
    let real = std::fs::canonicalize(&loader).and_then(|real| std::fs::copy(real, inside(&bundle, &loader)));
    match real {
        Ok(_) => symlink(&loader, inside(&bundle, &format!("/lib/libc.musl-{arch}.so.1"))).expect("a link"),
        Err(_) => println!("untested loader: Alpine (Debian: apt install musl)"),
    }
    assert_eq!(
        warning(&bundle),
        "sublet-runtime: container alpine: the image has no glibc for the driver's libraries (it uses \
         musl, or is static), so it gets the device nodes and the environment, but no driver libraries; \
         use a glibc image for CUDA"
    );
    if real.is_ok() {
        let version = bundle.exec(&[&loader]);
        assert!(version.stderr.starts_with("musl libc"), "it is the container's loader: {version:?}");
    }
    let seen = bundle.exec(&["/bin/sh", "-c", "ls /dev | grep nvidia; echo $CUDA_VISIBLE_DEVICES"]);
    assert_eq!(seen.stdout, "nvidia-uvm\nnvidia-uvm-tools\nnvidia0\nnvidiactl\n0\n");
    assert_eq!(libraries_of(&bundle), Vec::<String>::new());
    bundle.down();
    world.assert_empty();
}

#[test]
fn images_of_another_machine_get_no_library() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("foreign", WHOLE, SLEEP);
    std::fs::remove_dir_all(inside(&bundle, "lib")).expect("no libc of the host's");
    // 243: RISC-V.
    decoy(&bundle, &format!("/usr/lib/{TRIPLET}/libc.so.6"), 2, 243);
    decoy(&bundle, "/usr/lib64/libc.so.6", 1, 62);
    decoy(&bundle, "/usr/lib/libc.so.6", 1, 3);
    assert_eq!(
        warning(&bundle),
        "sublet-runtime: container foreign: the image has no glibc for the driver's libraries (it uses \
         musl, or is static), so it gets the device nodes and the environment, but no driver libraries; \
         use a glibc image for CUDA"
    );
    assert_eq!(libraries_of(&bundle), Vec::<String>::new());
    bundle.down();
    world.assert_empty();
}

#[test]
fn nix_has_the_files_where_nixos_has_them() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("nix", WHOLE, SLEEP);
    let store = inside(&bundle, "/nix/store/00000000000000000000000000000000-glibc-2.40-66");
    std::fs::create_dir_all(&store).expect("a store");
    std::fs::rename(inside(&bundle, &format!("/lib/{TRIPLET}")), store.join("lib")).expect("moved");
    bundle.up();
    let libraries = libraries_of(&bundle);
    assert_eq!(libraries[1], "/run/opengl-driver/lib/libcuda.so.1");
    assert!(libraries.iter().all(|path| path.starts_with("/run/opengl-driver/lib/")), "{libraries:?}");
    let env = bundle.config()["process"]["env"].clone();
    let triton = json!("TRITON_LIBCUDA_PATH=/run/opengl-driver/lib");
    assert!(env.as_array().is_some_and(|env| env.contains(&triton)), "{env}");
    let _: Value = env;
    bundle.down();
    world.assert_empty();
}

/// Talos, Container-Optimized OS, GKE, Flatcar, a host as measured, where `[driver] search` says, and NixOS, whose directories are
/// links into its store. None of them has NVML where a loader looks.
#[test]
fn a_host_may_have_its_driver_elsewhere() {
    if skip_unless_root() {
        return;
    }
    for (libraries, programs, links) in [
        ("usr/local/glibc/usr/lib", "usr/local/bin", [""; 2]),
        ("var/lib/nvidia/lib64", "var/lib/nvidia/bin", [""; 2]),
        ("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin", [""; 2]),
        ("opt/nvidia/lib64", "opt/bin", [""; 2]),
        ("usr/local/nvidia/lib64", "usr/local/nvidia/bin", [""; 2]),
        ("srv/driver/lib64", "srv/driver/bin", [""; 2]),
        (
            "nix/store/a-x11/lib",
            "nix/store/b-bin/bin",
            ["run/opengl-driver/lib", "run/current-system/sw/bin"],
        ),
    ] {
        let world = World::simulated("h200", "");
        let root = world.driver_root.as_ref().expect("simulated");
        // Descriptions, as of Vulkan's driver, are beside the libraries.
        let data = Path::new(libraries).with_file_name("share");
        let data = data.to_str().expect("UTF-8");
        for (from, to, link) in [
            (format!("usr/lib/{TRIPLET}").as_str(), libraries, links[0]),
            ("usr/bin", programs, links[1]),
            ("usr/share", data, ""),
        ] {
            let parent = |path: &str| std::fs::create_dir_all(root.join(path).parent().expect("one"));
            parent(to).and_then(|()| std::fs::rename(root.join(from), root.join(to))).expect(to);
            if !link.is_empty() {
                parent(link).and_then(|()| symlink(format!("/{to}"), root.join(link))).expect(link);
            }
        }
        let text = std::fs::read_to_string(&world.config).expect("config.toml");
        let named = if libraries.starts_with("srv/") { "search = [\"/srv/driver\"]" } else { "" };
        let lines = text.lines().map(|line| if line.starts_with("nvml = ") { named } else { line });
        std::fs::write(&world.config, lines.collect::<Vec<_>>().join("\n")).expect("config.toml");
        let refreshed = world.sublet(&["refresh"]);
        assert!(refreshed.status.success(), "{libraries}: {}", String::from_utf8_lossy(&refreshed.stderr));
        let bundle = world.bundle("elsewhere", &[("sublet.sm", "25"), ("sublet.capabilities", "all")], HOLD);
        let (info, warned) = bundle.up_heard();
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{libraries}: {info}");
        assert!(!warned.contains("sublet"), "{libraries}: {warned}");
        for path in ["/usr/bin/nvidia-smi", "/usr/share/vulkan/icd.d/nvidia_icd.json"] {
            assert!(bundle.destinations().contains(&path.to_owned()), "{libraries}: {path}");
        }
        let nvml =
            Nvml::builder().lib_path(root.join(libraries).join("libnvidia-ml.so.1").as_os_str()).init();
        let nvml = nvml.expect("NVML loads");
        let mode = nvml.device_by_index(0).and_then(|gpu| gpu.compute_mode()).expect("a compute mode");
        assert_eq!(mode, ComputeMode::ExclusiveProcess, "{libraries}");
        bundle.down();
        world.assert_empty();
    }
}
