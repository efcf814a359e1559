//! The stage of a real dockerd with the shim as one of its runtimes. The neighbour is one of its containers.

use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use sublet_e2e::docker::Docker;
use sublet_e2e::{World, bin_dir, programs};

use super::bundles::{PROBE, functions};
use super::frame::{NEIGHBOUR, OF_H200, Seen, Share, Stage};
use super::mig;

const INTRO: &str = "A dockerd of its own (`live-restore`, CDI, the runtimes `sublet` and `low`, which is runc), with its files in `$DIR` and
`$RUN`; sublet's `$STATE` and `$CONFIG`, and the driver `$DRIVER`. The image `probe` prints the nodes it sees, then what CUDA
has, and holds on. A neighbour with a share of the same GPU, a container of the same dockerd, runs beside it all the time.";

const ASK: &str =
    r#"ask() { run --runtime sublet --annotation sublet.sm=25 --annotation sublet.memory=8GiB "$@"; }"#;

const ASK_CDI: &str = r#"SPEC=$DIR/cdi/sublet.json
ask() { run --runtime low --device "${DEVICE:-sublet/share=small}" "$@"; }
last() { local rc=$?; sublet status --last-error >&2; return $rc; }"#;

const ASK_MIG: &str = r#"of() { printf -- '--annotation sublet.%s ' "$@"; }
QUARTER=$(of mig=4g.20gb sm=25 memory=4GiB)
ask() { run --runtime sublet "$@"; }
smi() { $DRIVER/usr/bin/nvidia-smi "$@" >/dev/null; }
destroy() { smi mig -i 0 -dci -gi 9 -ci 0 && smi mig -i 0 -dgi -gi 9; }
make() { smi mig -i 0 -cgi 1g.5gb -C; }
instances() { ls -d $DRIVER/proc/driver/nvidia/capabilities/gpu0/mig/gi* | wc -l; }
sees() { up "$@" >o3 || return; echo $(docker exec job ls /dev/nvidia-caps) $(sed -n 's/.*"error":null,"count":\([0-9]*\),"sm":\([0-9]*\),.*"mps":\([a-z]*\).*/with \1 device of \2 SMs, MPS \3/p' o3); }"#;

const FUNCTIONS: &str = r#"brief() { grep -v -e '^$' -e "^See 'docker" -e "^Run 'docker" | sed -E 's/([0-9a-f]{12})[0-9a-f]{52}/\1…/g; s/failed to create task for container: failed to create shim task: /… /'; }
run() { docker run -d --name "${NAME:-job}" --network none "$@" >o 2>e && return; local rc=$?; brief <e >&2; docker rm -f "${NAME:-job}" >/dev/null 2>&1; return $rc; }
said() { for i in {1..60}; do docker logs job 2>/dev/null | grep -q '"event":"info"' && break; sleep 0.1; done; docker logs job; }
up() { ask "$@" "${IMAGE:-probe}" probe hold 60 && said; }
info() { docker exec "$@" probe info >i 2>&1; local rc=$?; grep -E '^(nodes:|\{)' i; [ $rc = 0 ] || brief <i >&2; return $rc; }
pid() { docker inspect -f '{{.State.Pid}}' job; }
leases() { sublet lease list --format json | grep -c container_id; }
shim() { for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline 2>/dev/null | grep -q "^/usr/bin/containerd-shim.* $(docker inspect -f '{{.Id}}' job) " && echo ${p#/proc/}; done; }
dockerd_ends() { local p=$(<$RUN/pid) c=$(<$RUN/containerd/containerd.pid); kill -9 $p; while [ -d /proc/$c ]; do sleep 0.02; done; rm -f $RUN/pid; }
dockerd_begins() { env -u SUBLET_CASE PATH=$DIR/bin:$PATH dockerd --config-file $DIR/daemon.json >>$DIR/dockerd.log 2>&1 & until docker version >/dev/null 2>&1; do sleep 0.05; done; }
image() { docker create --name tmp probe true >/dev/null && eval "$1" && docker commit "${@:2}" tmp own >/dev/null && docker rm tmp >/dev/null; }
"#;

/// Options of `docker run` for the container of a case, and for the neighbour.
const SHARE: &[&str] = &["--runtime=sublet", "--annotation=sublet.sm=25", "--annotation=sublet.memory=8GiB"];

/// The named shares of the CDI devices.
const SHARES: &str = "[share.small]\nsm = 25\nmemory = \"8GiB\"\n[share.large]\nsm = 60\n";

const MIG_SHARES: &str =
    "[share.one]\nmig = \"1g.5gb\"\n[share.quarter]\ngpu = \"0:0\"\nsm = 25\nmemory = \"4GiB\"\n";

/// One dockerd, a neighbour, and room for a container.
struct Engine {
    docker: Docker,
    prelude: String,
    neighbour: String,
    /// The neighbour's container.
    share: Share,
    /// Whether the stage has CDI devices.
    cdi: bool,
    /// The running dockerd. A case may have started another one.
    pid: String,
}

pub fn docker() -> Box<dyn Stage> {
    Box::new(Engine::new(World::simulated("h200", ""), ASK, SHARE, false))
}

pub fn cdi() -> Box<dyn Stage> {
    let share = &["--runtime=sublet", "--device=sublet/share=small"];
    Box::new(Engine::new(World::simulated("h200", SHARES), ASK_CDI, share, true))
}

/// The neighbour has a share of the 4g.20gb. There are also two compute instances of a 2g.10gb, and a 1g.5gb.
pub fn mig() -> Box<dyn Stage> {
    let share = ["--runtime=sublet", "--annotation=sublet.mig=4g.20gb", "--annotation=sublet.sm=25"];
    let share = [&share[..], &["--annotation=sublet.memory=4GiB"]].concat();
    let mut stage = Engine::new(World::simulated("a100x2-mig", MIG_SHARES), ASK_MIG, &share, true);
    stage.share = mig::QUARTER;
    Box::new(stage)
}

impl Engine {
    fn new(world: World, ask: &str, share: &[&str], cdi: bool) -> Self {
        programs::script(&world.dir.path().join("rootfs/usr/bin/probe"), PROBE);
        // dockerd offers --gpus if it finds this program.
        let bin = world.dir.path().join("bin");
        std::fs::create_dir_all(&bin).expect("a directory");
        programs::copy("/bin/true".as_ref(), &bin.join("nvidia-container-runtime-hook"));
        let low = format!("/usr/bin/{}", world.engine.program());
        let name = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        let docker = Docker::up(
            world,
            &json!({
                "live-restore": true,
                // The cgroups of its containers contain the world's name.
                "cgroup-parent": format!("/{name}"),
                "runtimes": {"sublet": {"path": bin_dir().join("sublet-runtime")}, "low": {"path": low}},
            }),
        );
        if cdi {
            docker.world.generate_cdi();
        }
        let run = ["run", "-d", "--name", NEIGHBOUR, "--network=none"];
        let neighbour = docker.ask(&[&run, share, &["probe", "sleep", "3600"]].concat());
        let shared = functions(&["aside", "daemons", "end_daemons", "stop_daemons"]);
        let prelude = format!("{INTRO}\n\n```sh\n{ask}\n{FUNCTIONS}{shared}```");
        let mut stage = Self { docker, prelude, neighbour, share: OF_H200, cdi, pid: String::new() };
        stage.pid = stage.pid_file();
        stage
    }

    fn run_dir(&self) -> PathBuf {
        Path::new("/var/run").join(self.world().dir.path().file_name().expect("a name"))
    }

    fn pid_file(&self) -> String {
        std::fs::read_to_string(self.run_dir().join("pid")).unwrap_or_default().trim().to_owned()
    }
}

impl Stage for Engine {
    fn world(&self) -> &World {
        &self.docker.world
    }

    fn prelude(&self) -> &str {
        &self.prelude
    }

    fn variables(&self) -> Vec<(&'static str, PathBuf)> {
        let dir = self.world().dir.path();
        let path = std::env::var("PATH").expect("PATH");
        let socket = format!("unix://{}", self.run_dir().join("docker.sock").display());
        vec![
            ("DIR", dir.to_owned()),
            ("RUN", self.run_dir()),
            ("DOCKER_HOST", PathBuf::from(socket)),
            ("STATE", self.world().state_dir()),
            ("CONFIG", self.world().config.clone()),
            ("SUBLET_CONFIG", self.world().config.clone()),
            ("DRIVER", self.world().driver_root.clone().expect("a simulated driver")),
            ("PATH", PathBuf::from(format!("{}:{path}", bin_dir().display()))),
        ]
    }

    fn before(&self) {
        let scratch = self.world().dir.path().join("scratch");
        let _ = std::fs::remove_dir_all(&scratch);
        std::fs::create_dir(&scratch).expect("a directory");
        if self.cdi {
            let dir = self.world().dir.path().join("cdi");
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                let _ = std::fs::remove_file(entry.path());
            }
            self.world().generate_cdi();
        }
    }

    fn mend(&mut self) {
        if self.pid_file() == self.pid && self.docker.cli(&["version"]).ok {
            return;
        }
        if let Ok(pid) = self.pid_file().parse() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        self.docker.end_daemon(Signal::SIGKILL);
        let _ = std::fs::remove_file(self.run_dir().join("pid"));
        self.docker.start_daemon();
        self.pid = self.pid_file();
    }

    fn containers(&self) -> Vec<String> {
        let listed = self.docker.ask(&["ps", "-aq", "--no-trunc"]);
        let mut ids: Vec<_> = listed.split_whitespace().map(str::to_owned).collect();
        ids.sort();
        ids
    }

    fn remove(&self, id: &str) -> Result<(), String> {
        let removed = self.docker.cli(&["rm", "-f", id]);
        if removed.ok { Ok(()) } else { Err(format!("docker rm -f: {}", removed.stderr.trim())) }
    }

    fn neighbour(&self) -> Seen {
        let finished = self.docker.cli(&["exec", NEIGHBOUR, "probe", "info"]);
        Seen { code: finished.code, stdout: finished.stdout, stderr: finished.stderr }
    }

    fn neighbour_share(&self) -> Share {
        self.share
    }

    fn neighbour_id(&self) -> String {
        self.neighbour.clone()
    }

    fn neighbour_cgroup(&self) -> String {
        self.neighbour.clone()
    }
}
