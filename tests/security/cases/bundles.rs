//! The stage of plain bundles: the shim is called at a prompt as an engine would call it.

use std::path::PathBuf;
use std::process::Command;

use serde_json::json;
use sublet_e2e::{Finished, World, bin_dir, programs};

use super::frame::{NEIGHBOUR, Seen, Stage};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];

/// Prints the device nodes, and then what CUDA sees.
pub const PROBE: &str = "echo nodes: $(ls /dev | grep nvidia)\nexec cuda-probe \"$@\"\n";

const PRELUDE: &str = r#"`$DIR` has all: the bundle `$BUNDLE` of a container that asks for `sublet.sm=25` and `sublet.memory=8GiB`, the runtime's
records `$ROOT`, sublet's `$STATE` and `$CONFIG`, and the driver `$DRIVER`. The container's program prints the nodes it
sees, then what CUDA has, and holds on. A neighbour with the same share runs beside it all the time.

```sh
runtime() { sublet-runtime --root "$ROOT" "$@"; }
create() { runtime create --bundle "$BUNDLE" "${1:-c}" </dev/null >"$BUNDLE/out" 2>"$BUNDLE/err"; local rc=$?; cat "$BUNDLE/err" >&2; return $rc; }
said() { for i in {1..100}; do grep -q '"event":"info"' "$BUNDLE/out" && break; sleep 0.05; done; cat "$BUNDLE/out"; }
up() { create "$@" && runtime start "${1:-c}" && said; }
swap() { local f=${3:-$BUNDLE/config.json} t; t=$(<"$f"); [[ $t == *"$1"* ]] && printf %s "${t/"$1"/"$2"}" >"$f"; }
annotate() { swap '"sublet.sm":"25"' "$1"; }
mounted() { swap '"mounts":[' "\"mounts\":[$1,"; }
variables() { swap '"env":[' "\"env\":[$1,"; }
aside() { mv "$1" "$1.aside"; }
alone() { unshare --mount --propagation private bash -c "$1"; }
daemons() { for p in /proc/[0-9]*; do [[ $(cat $p/comm 2>/dev/null) == nvidia-cuda-mps* ]] && grep -qz "$DIR" $p/environ 2>/dev/null && echo "${p#/proc/}"; done; }
end_daemons() { kill -9 $(daemons) 2>/dev/null; while [ -n "$(daemons)" ]; do sleep 0.01; done; }
stop_daemons() { local p; for p in $(daemons); do kill -STOP $p; until grep -q '^State:.T' /proc/$p/status; do sleep 0.01; done; done; }
export -f runtime create said up swap annotate mounted variables aside alone daemons end_daemons stop_daemons
```"#;

/// The functions of the prelude that other stages have too.
pub fn functions(names: &[&str]) -> String {
    let is_one = |line: &&str| names.iter().any(|name| line.starts_with(&format!("{name}() ")));
    PRELUDE.split_inclusive('\n').filter(is_one).collect()
}

/// Further functions for the hook's entry point.
const BY_HAND: &str = r#"state() { printf '{"ociVersion":"1.0.2","id":"%s","status":"%s","pid":%s,"bundle":"%s"}' "$1" "$2" "$3" "${4-$BUNDLE}"; }
neighbours() { sed -n 's/.*"init":{"process":{"pid":\([0-9]*\).*/\1/p' $STATE/ledger.json; }
"#;

/// Further functions for the entry point of criu. (The runtimes' own sleep ends when it is stopped. To make an image of
/// a container with a share, the settings that stop criu are left empty, and criu is asked again where it meets a process that is
/// just being made.)
const CRIU: &str = r#"below() { (runtime() { "$(sed -n 's/^low_level = \["\(.*\)"\]/\1/p' $CONFIG)" --root "$ROOT" "$@"; }; "$@"); }
runs() { swap '"/bin/sleep","60"' '"/bin/sh","-c","while :; do sleep 1; done"' $DIR/bundles/$1/config.json; runtime create --bundle $DIR/bundles/$1 $1 </dev/null >/dev/null 2>&1 && runtime start $1; }
save() { runtime checkpoint --image-path $PWD/i --work-path $PWD/w "$@"; }
restore() { runtime restore --image-path $PWD/i --work-path $PWD/w --bundle $DIR/bundles/$1 --detach $2 </dev/null >/dev/null 2>said; local rc=$?; cat said >&2; return $rc; }
imaged() { : >$STATE/no-checkpoint.conf; runs q && for try in 1 2 3 4 5; do below save q 2>/dev/null && break; done; sublet refresh >/dev/null; sublet gc >/dev/null; }
alive() { runtime state $1 | grep -o running; }
leases() { sublet lease list --format json | grep -c container_id; }
"#;

/// Further functions for the entry point of clocks. `clock.so` is compiled from [`CLOCK`].
const CLOCKS: &str = r#"at() { local years=$1; shift; SHIFT=$((years * 31557600)) LD_PRELOAD=$DIR/clock.so "$@"; }
aged() { sed -i -E "s/\"(since|answered_at)\":([0-9]+)/\"\1\":@\2$1@/g" $STATE/ledger.json; while read -r n; do swap "@$n@" $(($n)) $STATE/ledger.json; done < <(grep -oE '@[0-9+-]+@' $STATE/ledger.json | tr -d @); cp $STATE/ledger.json $STATE/ledger.json.copy; }
since() { sed -i "s/\"since\":[0-9]*/\"since\":$1/" $STATE/ledger.json $STATE/ledger.json.copy; }
first() { runtime state c | sed -n 's/.*"pid": *\([0-9]*\).*/\1/p'; }
key() { sublet status --format json | grep -o '"key": *"[^"]*' | grep -o '[^"]*$'; }
leases() { sublet lease list --format json | grep -c container_id; }
"#;

/// Further functions for the entry point of faketime.
const FAKETIME: &str = r#"fake() { local clock=$1; shift; faketime -m -f "$clock" "$@"; }
"#;

/// Gives dynamic programs a wall clock that is `$SHIFT` seconds off.
const CLOCK: &str = r#"#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(clock, now);
    const char *shift = getenv("SHIFT");
    if (clock == CLOCK_REALTIME && shift) now->tv_sec += atoll(shift);
    return done;
}
"#;

/// The state of the container when a case starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It does not exist yet.
    Empty,
    /// It runs.
    Standing,
    /// It does not exist yet. It will be created without the shim, and its config.json names sublet's hook.
    Hooked,
}

/// One GPU, a neighbour on it, and room for a container.
struct Bundles {
    world: World,
    kind: Kind,
    prelude: String,
}

pub fn empty() -> Box<dyn Stage> {
    Box::new(Bundles::new(Kind::Empty))
}

pub fn with_container() -> Box<dyn Stage> {
    Box::new(Bundles::new(Kind::Standing))
}

pub fn clocks() -> Box<dyn Stage> {
    let mut stage = Bundles::new(Kind::Empty);
    let dir = stage.world.dir.path();
    std::fs::write(dir.join("clock.c"), CLOCK).expect("clock.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).args([dir.join("clock.so"), dir.join("clock.c")]);
    assert!(cc.status().expect("cc runs").success());
    stage.prelude = stage.prelude.replace("runtime() {", &format!("{CLOCKS}runtime() {{"));
    Box::new(stage)
}

pub fn criu() -> Box<dyn Stage> {
    let mut stage = Bundles::new(Kind::Standing);
    stage.prelude = stage.prelude.replace("runtime() {", &format!("{CRIU}runtime() {{"));
    Box::new(stage)
}

pub fn faketime() -> Box<dyn Stage> {
    let mut stage = Bundles::new(Kind::Empty);
    stage.prelude = stage.prelude.replace("runtime() {", &format!("{CLOCKS}{FAKETIME}runtime() {{"));
    Box::new(stage)
}

pub fn hooked() -> Box<dyn Stage> {
    Box::new(Bundles::new(Kind::Hooked))
}

impl Bundles {
    fn new(kind: Kind) -> Self {
        let world = World::simulated("h200", "");
        programs::script(&world.dir.path().join("rootfs/usr/bin/probe"), PROBE);
        let stages = ["createRuntime", "poststop"];
        let mut neighbour = world.bundle(NEIGHBOUR, SHARE, &["/bin/sleep", "3600"]);
        let mut prelude = PRELUDE.to_owned();
        if kind == Kind::Hooked {
            neighbour.hook(&stages);
            let low = format!("runtime() {{ {} --root", world.engine.program());
            prelude = prelude.replace("runtime() { sublet-runtime --root", &format!("{BY_HAND}{low}"));
        }
        neighbour.up();
        Self { world, kind, prelude }
    }

    /// The runtime that creates the containers.
    fn runtime(&self) -> Command {
        if self.kind != Kind::Hooked {
            return self.world.runtime();
        }
        let mut command = Command::new(self.world.engine.program());
        command.arg("--root").arg(self.world.runtime_root());
        command
    }

    fn scratch(&self) -> PathBuf {
        self.world.dir.path().join("scratch")
    }
}

impl Stage for Bundles {
    fn world(&self) -> &World {
        &self.world
    }

    fn prelude(&self) -> &str {
        &self.prelude
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let dir = self.world.dir.path();
        let path = std::env::var("PATH").expect("PATH");
        vec![
            ("DIR", dir.to_owned()),
            ("BUNDLE", dir.join("bundles/c")),
            ("ROOT", self.world.runtime_root()),
            ("STATE", self.world.state_dir()),
            ("CONFIG", self.world.config.clone()),
            ("SUBLET_CONFIG", self.world.config.clone()),
            ("DRIVER", self.world.driver_root.clone().expect("a simulated driver")),
            ("PATH", PathBuf::from(format!("{}:{path}", bin_dir().display()))),
        ]
    }

    fn before(&self) {
        for dir in [self.scratch(), self.world.dir.path().join("bundles/c")] {
            let _ = std::fs::remove_dir_all(&dir);
        }
        std::fs::create_dir(self.scratch()).expect("a directory");
        let mut bundle = self.world.bundle("c", SHARE, &["/usr/bin/probe", "hold", "60"]);
        if self.kind == Kind::Hooked {
            bundle.hook(&["createRuntime", "poststop"]);
        }
        if self.kind != Kind::Standing {
            return bundle.write();
        }
        self.world.bundle("p", &[], &["/bin/sleep", "60"]).write();
        self.world.bundle("q", SHARE, &["/bin/sleep", "60"]).write();
        // This program outlives the daemon. A program that computes on the GPU would not.
        bundle.spec["process"]["args"] = json!(["/bin/sleep", "60"]);
        bundle.up();
        let process = json!({"cwd": "/", "args": ["/usr/bin/probe", "info"], "env": ["PATH=/usr/bin:/bin"],
            "user": {"uid": 0, "gid": 0}, "capabilities": bundle.spec["process"]["capabilities"]});
        std::fs::write(self.scratch().join("p.json"), process.to_string()).expect("p.json");
    }

    fn containers(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.world.runtime_root()).into_iter().flatten().flatten();
        let mut ids: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        ids.sort();
        ids
    }

    fn remove(&self, id: &str) -> Result<(), String> {
        let output = self.runtime().args(["delete", "--force", id]).output().expect("it runs");
        let why = || format!("delete --force: {}", String::from_utf8_lossy(&output.stderr).trim());
        if output.status.success() { Ok(()) } else { Err(why()) }
    }

    fn neighbour(&self) -> Seen {
        let mut command = self.runtime();
        let finished = Finished::of(
            &command.args(["exec", NEIGHBOUR, "/usr/bin/probe", "info"]).output().expect("it runs"),
        );
        Seen { code: finished.code, stdout: finished.stdout, stderr: finished.stderr }
    }
}
