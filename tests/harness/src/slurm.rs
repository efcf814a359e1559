//! A Slurm cluster of tests/slurm/nodes: slurmctld on a login node, slurmd and sublet on nodes n1 and n2, all of them real,
//! and four simulated GPUs in each.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use serde_json::Value;
use tempfile::TempDir;

use crate::bundle::Finished;
use crate::world::{bin_dir, eventually};

/// The user who submits jobs, uid 1000.
pub const TESTER: &str = "tester";
/// Another one, uid 1001.
pub const OTHER: &str = "other";

/// Shards of a GPU.
const SHARDS: u32 = 8;

/// Takes the whole cluster down when dropped.
pub struct Cluster {
    dir: TempDir,
}

/// The cluster that the tests of a program share, for one of them alone. Its GPUs are shared in `unit`s: `shard`, eight of
/// each GPU, or `mps`. It ends with the namespaces that tests/engines/enter gave.
pub fn cluster(unit: &str) -> MutexGuard<'static, Cluster> {
    static CLUSTER: OnceLock<Mutex<Cluster>> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(|| Mutex::new(Cluster::with_sublet(unit)));
    let cluster = cluster.lock().unwrap_or_else(PoisonError::into_inner);
    // Of a test that failed.
    cluster.done("login", &["scancel", "--user", TESTER]);
    cluster.done("login", &["scancel", "--user", OTHER]);
    cluster
}

/// Whether the Debian with Slurm is missing here; says so.
#[must_use]
pub fn skip_unless_slurm() -> bool {
    let missing = !Path::new("/usr/sbin/slurmctld").exists();
    if missing {
        eprintln!("skipped: needs Slurm (make test-slurm)");
    }
    missing
}

impl Cluster {
    /// A cluster whose jobs have shares by sublet's prolog, task prolog and epilog.
    #[must_use]
    pub fn with_sublet(unit: &str) -> Self {
        let each = if unit == "mps" { 100 } else { SHARDS };
        let lines: Vec<String> =
            (0..4).map(|gpu| format!("Name={unit} Count={each} File=/dev/nvidia{gpu}")).collect();
        let programs = [("Prolog", "prolog"), ("TaskProlog", "task-prolog"), ("Epilog", "epilog")]
            .map(|(key, program)| format!("{key}=/usr/libexec/sublet/slurm/{program}"));
        Self::up(&format!("gpu:4,{unit}:{}", each * 4), &lines.join("\n"), &programs.join("\n"))
    }

    /// A cluster of two nodes with four GPUs each. `nodes` is what the nodes have, as in slurm.conf
    /// (`gpu:4,shard:16`), `gres` the lines of gres.conf beside that for `gpu`, and `slurm` lines for slurm.conf.
    #[must_use]
    pub fn up(nodes: &str, gres: &str, slurm: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("slurm").tempdir_in("/var/tmp").expect("a directory");
        let cluster = Self { dir };
        let setup = cluster.shared().join("setup");
        let script = format!(
            "mkdir -m 1777 \"$1/work\"\ncd \"$1/etc\" || exit\nsed -i 's/Gres=[^ ]*/Gres={nodes}/' nodes.conf\n\
             cat >>gres.conf <<'END'\n{gres}\nEND\ncat >>slurm.conf <<'END'\n{slurm}\nEND\n"
        );
        crate::programs::script(&setup, &script);
        let mut up = cluster.script("up");
        let up = up.env("SLURM_SETUP", &setup).output().expect("it runs");
        assert!(up.status.success(), "tests/slurm/nodes up: {up:?}");
        cluster
    }

    /// A directory that all nodes see at the same path, as they do /home.
    #[must_use]
    pub fn shared(&self) -> &Path {
        self.dir.path()
    }

    /// The users' working directory, in which they may write.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.shared().join("work")
    }

    /// What a job wrote there.
    #[must_use]
    pub fn written(&self, name: &str) -> String {
        std::fs::read_to_string(self.work().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    fn script(&self, verb: &str) -> Command {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../slurm/nodes");
        let mut command = Command::new(script.canonicalize().expect("the script"));
        command.arg(verb).arg(self.shared()).current_dir(self.shared()).stdin(Stdio::null());
        command.env("SUBLET_BIN_DIR", bin_dir());
        command
    }

    /// A command in a node, or in `login`, as root.
    #[must_use]
    pub fn command(&self, node: &str, args: &[&str]) -> Command {
        let mut command = self.script("on");
        command.arg(node).args(args);
        command
    }

    /// Runs it.
    #[must_use]
    pub fn on(&self, node: &str, args: &[&str]) -> Finished {
        Finished::of(&self.command(node, args).output().expect("it runs"))
    }

    /// [`Self::on`], which must succeed; its standard output.
    #[allow(clippy::must_use_candidate, reason = "often only done")]
    pub fn done(&self, node: &str, args: &[&str]) -> String {
        let finished = self.on(node, args);
        assert!(finished.ok, "{args:?} on {node}: {finished:?}");
        finished.stdout
    }

    /// A command of a user in the login node, such as `srun`, for at most a minute.
    fn command_by(&self, user: &str, args: &[&str]) -> Command {
        let mut command =
            self.command("login", &[&["timeout", "60", "runuser", "-u", user, "--"], args].concat());
        if self.work().exists() {
            command.current_dir(self.work());
        }
        command
    }

    /// Runs it.
    #[must_use]
    pub fn by(&self, user: &str, args: &[&str]) -> Finished {
        Finished::of(&self.command_by(user, args).output().expect("it runs"))
    }

    /// [`Self::by`] in the background.
    #[must_use]
    pub fn spawn(&self, user: &str, args: &[&str]) -> Child {
        let mut command = self.command_by(user, args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    /// `srun` of the tester on node n1, with `script` for a shell.
    #[must_use]
    pub fn srun(&self, gres: &str, script: &str) -> Finished {
        let gres = format!("--gres={gres}");
        let gres: &[&str] = if gres == "--gres=" { &[] } else { &[&gres] };
        let words = [&["srun", "--quiet", "--nodelist=n1"], gres, &["bash", "-c", script]].concat();
        self.by(TESTER, &words)
    }

    /// A bundle of the tester's, as `runc spec --rootless` makes it. `annotations` are JSON.
    #[must_use]
    pub fn bundle(&self, name: &str, annotations: &str) -> String {
        let dir = format!("{}/{name}", self.work().display());
        let library = "rootfs/usr/lib/x86_64-linux-gnu";
        let script = format!(
            "rm -rf {dir}; mkdir -p {dir}; cd {dir}; mkdir -p rootfs/bin rootfs/usr/bin rootfs/lib64 {library} \
             rootfs/proc rootfs/sys rootfs/dev rootfs/tmp rootfs/run rootfs/etc; cp /bin/busybox rootfs/bin/; \
             for a in sh env ls sleep; do ln -s busybox rootfs/bin/$a; done; cp /usr/bin/cuda-probe rootfs/usr/bin/; \
             ln -s usr/lib rootfs/lib; cp /lib64/ld-linux-x86-64.so.2 rootfs/lib64/; cd {library}; \
             for l in libc libm libgcc_s; do cp /lib/x86_64-linux-gnu/$l.so.[0-9] .; done; cd {dir}; runc spec --rootless; \
             sed -i 's/\"terminal\": true/\"terminal\": false/; s/\"readonly\": true/\"readonly\": false/; \
             s|\"ociVersion\"|\"annotations\": {annotations}, &|' config.json"
        );
        self.done("n1", &["runuser", "-u", TESTER, "--", "bash", "-ec", &script]);
        dir
    }

    /// The id of the job that `sbatch` with these options submits, which runs `script`.
    #[must_use]
    pub fn sbatch(&self, user: &str, options: &[&str], script: &str) -> String {
        let wrapped = format!("--wrap={script}");
        let words = [&["sbatch", "--parsable", "--output=job-%j.out"], options, &[&wrapped]].concat();
        let done = self.by(user, &words);
        assert!(done.ok, "{done:?}");
        done.stdout.trim().to_owned()
    }

    /// `lose`, `boot`, `start` of a node, as tests/slurm/nodes has them.
    pub fn tell(&self, verb: &str, node: &str) {
        let output = self.script(verb).arg(node).output().expect("it runs");
        assert!(output.status.success(), "{verb} {node}: {output:?}");
    }

    /// SIGKILL for `slurmd`, `slurmctld` or `sublet`.
    pub fn kill(&self, node: &str, daemon: &str) {
        let output = self.script("kill").args([node, daemon]).output().expect("it runs");
        assert!(output.status.success(), "kill {daemon} on {node}: {output:?}");
    }

    /// `sublet status` of a node.
    #[must_use]
    pub fn status(&self, node: &str) -> Value {
        serde_json::from_str(&self.done(node, &["sublet", "status", "--format", "json"])).expect("JSON")
    }

    /// The leases on a node.
    #[must_use]
    pub fn leases(&self, node: &str) -> Vec<Value> {
        self.status(node)["leases"].as_array().expect("leases").clone()
    }

    /// The state of a job, as `squeue` calls it.
    #[must_use]
    pub fn state(&self, job: &str) -> String {
        let words = ["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job];
        self.on("login", &words).stdout.trim().to_owned()
    }

    /// Whether this Slurm is 22.05. That gives a job that wants a whole GPU one that shards or mps jobs are on, and a job
    /// that is started again within 3 s after its epilog no prolog.
    #[must_use]
    pub fn is_2205(&self) -> bool {
        self.done("login", &["sinfo", "--version"]).contains(" 22.05")
    }

    /// Waits until no job is there, not even one that Slurm is completing.
    pub fn assert_no_jobs(&self) {
        let queue = || self.done("login", &["squeue", "--noheader"]);
        assert!(eventually(|| queue().is_empty()), "jobs are left: {}", queue());
    }

    /// The nodes' states, as `n1 idle`, with Slurm's reason if it has one.
    #[must_use]
    pub fn nodes(&self) -> Vec<String> {
        let text = self.done("login", &["sinfo", "--noheader", "-N", "-o", "%N %T %E"]);
        text.lines().map(|line| line.trim_end_matches(" none").trim().to_owned()).collect()
    }

    /// Checks that no job, lease, record or directory of a job is left, and that both nodes take jobs.
    pub fn assert_empty(&self) {
        self.assert_no_jobs();
        let idle = || self.nodes().iter().all(|node| node[2..].starts_with(" idle"));
        assert!(eventually(idle), "{:?}", self.nodes());
        for node in ["n1", "n2"] {
            assert!(eventually(|| self.leases(node).is_empty()), "{node}: {:?}", self.leases(node));
            // slurmstepd may end a container after the epilog; the empty directory of root's goes with a later job's.
            let script = "find /run/sublet/slurm -mindepth 1 ! '(' -type d -user root -empty ')' -ls";
            let records = || self.on(node, &["sh", "-c", script]).stdout;
            assert!(eventually(|| records().is_empty()), "{node}: {}", records());
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.script("down").output();
    }
}
