//! The stage of a real containerd with `ctr`. The neighbour is one of its containers.

use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_e2e::containerd::{Containerd, IMAGE};
use sublet_e2e::{World, bin_dir, eventually, programs};

use super::bundles::{PROBE, functions};
use super::frame::{NEIGHBOUR, Seen, Stage};

const PRELUDE: &str = r#"A containerd of its own, with its files in `$DIR` and `$RUN`; sublet's `$STATE` and `$CONFIG`, and the driver `$DRIVER`. The
image `$IMAGE` has `probe`, which prints the nodes it sees, then what CUDA has, and holds on. `up OPTIONS` is `ctr run` of it
with `sublet.sm=25` and `sublet.memory=8GiB`. A neighbour with the same share, a container of the same containerd and
namespace, runs beside it all the time; the namespace `k8s.io` has the image too.

```sh
run() { ctr run --detach --snapshotter native --cpu-shares 0 --log-uri file://$PWD/out --runc-binary "${SHIM:-$(command -v sublet-runtime)}" "$@" $IMAGE "${NAME-job}" ${DO:-probe hold 60} </dev/null && return; local rc=$?; [ -n "$KEEP" ] || ctr containers rm "${NAME-job}" 2>/dev/null; return $rc; }
ask() { run --annotation sublet.sm=25 --annotation sublet.memory=8GiB "$@"; }
said() { for i in {1..60}; do grep -q '"event":"info"' out && break; sleep 0.1; done; cat out; }
up() { ask "$@" && said; }
try() { for i in {1..5}; do ctr tasks exec --exec-id e$RANDOM "$@" >x; rc=$?; [ $rc = 0 ] && ! [ -s x ] || break; done; cat x; return $rc; }
info() { try "$@" "${NAME-job}" probe info; }
remove() { ctr tasks rm --force "${NAME-job}" >/dev/null 2>&1; ctr containers rm "${NAME-job}"; }
pid() { ctr tasks ls | grep "^${NAME-job} " | tr -s ' ' | cut -d' ' -f2; }
leases() { sublet lease list --format json | grep -c container_id; }
ends() { kill -9 $1; while [ -d /proc/$1 ] && ! grep -q '^State:.Z' /proc/$1/status 2>/dev/null; do sleep 0.02; done; }
having() { for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -qe "$1" && echo ${p#/proc/}; done; }
shim() { having "^/usr/bin/containerd-shim.* -id ${NAME-job} .*$RUN"; }
containerd_ends() { ends $(having "^containerd --config $DIR/"); }
containerd_begins() { env -u SUBLET_CASE containerd --config $DIR/containerd.toml >>$DIR/containerd.log 2>&1 & echo $! >$DIR/containerd.pid; until ctr version >/dev/null 2>&1; do sleep 0.05; done; }
"#;

/// The CRI sees images of this namespace.
const ANOTHER: &str = "k8s.io";

/// One containerd, a neighbour, and room for a container.
struct Ctr {
    containerd: Containerd,
    prelude: String,
}

pub fn containerd() -> Box<dyn Stage> {
    let world = World::simulated("h200", "");
    programs::script(&world.dir.path().join("rootfs/usr/bin/probe"), PROBE);
    // `ctr run --gpus` needs this program.
    let bin = world.dir.path().join("bin");
    std::fs::create_dir_all(&bin).expect("a directory");
    programs::copy("/bin/true".as_ref(), &bin.join("nvidia-container-cli"));
    let containerd = Containerd::up(world);
    let share = ["sublet.sm=25", "sublet.memory=8GiB"];
    let started = containerd.run(NEIGHBOUR, &share, &[], &["sleep", "3600"]);
    assert!(started.ok, "{started:?}");
    let shared = functions(&["aside", "daemons", "end_daemons", "stop_daemons"]);
    Box::new(Ctr { containerd, prelude: format!("{PRELUDE}{shared}```") })
}

impl Ctr {
    fn ctr(&self, namespace: &str, arguments: &[&str]) -> Seen {
        let output = self.containerd.command().args(["--namespace", namespace]).args(arguments).output();
        let output = output.expect("ctr is installed");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Seen { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }

    /// A container that a case created in the other namespace is called `NAMESPACE/ID` here.
    fn place<'a>(&'a self, id: &'a str) -> (&'a str, &'a str) {
        id.split_once('/').unwrap_or((&self.containerd.namespace, id))
    }
}

impl Stage for Ctr {
    fn world(&self) -> &World {
        &self.containerd.world
    }

    fn prelude(&self) -> &str {
        &self.prelude
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let dir = self.world().dir.path();
        let path = std::env::var("PATH").expect("PATH");
        let path = format!("{}:{}:{path}", dir.join("bin").display(), bin_dir().display());
        vec![
            ("DIR", dir.to_owned()),
            ("RUN", Path::new("/run").join(&self.containerd.namespace)),
            ("IMAGE", PathBuf::from(IMAGE)),
            ("CONTAINERD_ADDRESS", self.containerd.socket()),
            ("CONTAINERD_NAMESPACE", PathBuf::from(&self.containerd.namespace)),
            ("STATE", self.world().state_dir()),
            ("CONFIG", self.world().config.clone()),
            ("SUBLET_CONFIG", self.world().config.clone()),
            ("DRIVER", self.world().driver_root.clone().expect("a simulated driver")),
            ("PATH", PathBuf::from(path)),
        ]
    }

    fn before(&self) {
        let scratch = self.world().dir.path().join("scratch");
        let _ = std::fs::remove_dir_all(&scratch);
        std::fs::create_dir(&scratch).expect("a directory");
    }

    fn mend(&mut self) {
        let file = self.world().dir.path().join("containerd.pid");
        let others = std::fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
        if others.is_none() && self.containerd.cli(&["version"]).ok {
            return;
        }
        if let Some(pid) = others {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            let _ = std::fs::remove_file(file);
        }
        self.containerd.end_daemon(Signal::SIGKILL);
        self.containerd.start_daemon();
    }

    fn containers(&self) -> Vec<String> {
        let listed = |namespace: &str| self.ctr(namespace, &["containers", "ls", "--quiet"]).stdout;
        let own = listed(&self.containerd.namespace);
        let other = listed(ANOTHER);
        let other = other.split_whitespace().map(|id| format!("{ANOTHER}/{id}"));
        let mut ids: Vec<_> = own.split_whitespace().map(str::to_owned).chain(other).collect();
        ids.sort();
        ids
    }

    /// containerd may still be cleaning up after a killed shim, so this waits and tries again.
    fn remove(&self, id: &str) -> Result<(), String> {
        let (namespace, name) = self.place(id);
        let mut said = String::new();
        let done = eventually(|| {
            let _ = self.ctr(namespace, &["tasks", "rm", "--force", name]);
            let removed = self.ctr(namespace, &["containers", "rm", name]);
            said = removed.stderr;
            removed.code == Some(0)
        });
        if done { Ok(()) } else { Err(format!("ctr containers rm: {}", said.trim())) }
    }

    fn neighbour(&self) -> Seen {
        let finished = self.containerd.exec_heard(NEIGHBOUR, &["probe", "info"]);
        Seen { code: finished.code, stdout: finished.stdout, stderr: finished.stderr }
    }

    fn neighbour_cgroup(&self) -> String {
        format!("{}/{NEIGHBOUR}", self.containerd.namespace)
    }
}
