//! A real Slurm cluster of two nodes with four simulated GPUs each (tests/slurm/cluster). There is one for a test
//! program; it ends with the namespaces that tests/engines/enter gave.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use serde_json::Value;

use crate::bundle::Finished;
use crate::world::{bin_dir, eventually};

/// The user who submits jobs.
pub const TESTER: u32 = 1000;
/// Another one.
pub const OTHER: u32 = 1001;

/// Where the cluster keeps its logs.
const LOGS: &str = "/var/tmp/slurm";

/// What a GPU's parts are counted in: `shard`, eight for each, or `mps`, 100.
pub struct Cluster(());

/// The cluster for this test alone. It is started with the first.
///
/// `unit` is the same for all tests of a program.
pub fn cluster(unit: &'static str) -> MutexGuard<'static, Cluster> {
    static CLUSTER: OnceLock<Mutex<Cluster>> = OnceLock::new();
    let cluster = CLUSTER.get_or_init(|| {
        start(unit);
        Mutex::new(Cluster(()))
    });
    cluster.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the Debian with Slurm is missing here; says so.
pub fn skip_unless_slurm() -> bool {
    let missing = !Path::new("/usr/sbin/slurmctld").exists() || !Path::new("/sys/fs/cgroup/freezer").exists();
    if missing {
        eprintln!("skipped: needs Slurm and cgroup v1 in tests/engines/enter (make test-slurm)");
    }
    missing
}

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn start(unit: &str) {
    let each = if unit == "mps" { 100 } else { 8 };
    let lines = (0..4).map(|gpu| format!("\nName={unit} Count={each} File=/dev/nvidia{gpu}"));
    let gres = format!("Name=gpu File=/dev/nvidia[0-3]{}", lines.collect::<String>());
    let programs = [
        "Prolog=/usr/libexec/sublet/slurm/prolog",
        "TaskProlog=/usr/libexec/sublet/slurm/task-prolog",
        "Epilog=/usr/libexec/sublet/slurm/epilog",
    ];
    let mut child = Command::new(checkout().join("tests/slurm/cluster"))
        .args(["sh", "-c", "echo up; exec sleep infinity"])
        .env("SUBLET_BIN_DIR", bin_dir().canonicalize().expect("the programs under test"))
        .env("AT_NODE", checkout().join("tests/slurm/prepare"))
        .envs([
            ("GRES", gres),
            ("NODE_GRES", format!("gpu:4,{unit}:{}", each * 4)),
            ("CONF", programs.join("\n")),
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("tests/slurm/cluster");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let up = lines.any(|line| line.expect("text") == "up");
    assert!(up, "the cluster does not come up: {:?}", child.wait());
}

impl Cluster {
    /// A program of `uid`, on the machine from which jobs are submitted.
    #[must_use]
    pub fn command(&self, uid: u32, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("60").args(words).uid(uid).gid(uid).current_dir("/tmp").stdin(Stdio::null());
        command.env_clear().envs([
            ("PATH", "/usr/bin:/usr/sbin:/bin"),
            ("HOME", "/tmp"),
            ("LC_ALL", "C.UTF-8"),
        ]);
        // Where the nodes have the driver's libraries.
        command.env("LD_LIBRARY_PATH", "/run/sim/usr/lib/x86_64-linux-gnu");
        command
    }

    /// Runs it to its end.
    #[must_use]
    pub fn run(&self, uid: u32, words: &[&str]) -> Finished {
        Finished::of(&self.command(uid, words).output().expect("it runs"))
    }

    /// `srun` on node n1 as the tester, with `script` for a shell.
    #[must_use]
    pub fn srun(&self, gres: &str, script: &str) -> Finished {
        let mut words = vec!["srun", "--quiet", "--nodelist=n1"];
        let gres = format!("--gres={gres}");
        words.extend((gres != "--gres=").then_some(gres.as_str()));
        words.extend(["bash", "-c", script]);
        self.run(TESTER, &words)
    }

    /// The id of the job that `sbatch` with these options submits, which runs `script`.
    #[must_use]
    pub fn sbatch(&self, uid: u32, options: &[&str], script: &str) -> String {
        let mut words = vec!["sbatch", "--parsable", "--output=/tmp/job-%j.out"];
        words.extend(options);
        let wrapped = format!("--wrap={script}");
        words.push(&wrapped);
        let done = self.run(uid, &words);
        assert!(done.ok, "{done:?}");
        done.stdout.trim().to_owned()
    }

    /// Runs a program as root in the namespaces of `node`.
    #[must_use]
    pub fn on(&self, node: &str, words: &[&str]) -> Finished {
        let shim = std::fs::read_to_string(format!("{LOGS}/{node}.pid")).expect("the node's pid");
        // Its parent is outside of the node's PID namespace.
        let below = Command::new("pgrep").args(["--parent", shim.trim()]).output().expect("pgrep");
        let first = String::from_utf8_lossy(&below.stdout).split_whitespace().next().map(str::to_owned);
        let first = first.expect("the node's first process");
        let mut command = Command::new("nsenter");
        command.args(["--all", "--target", &first]).args(words).stdin(Stdio::null());
        Finished::of(&command.output().expect("nsenter"))
    }

    /// `sublet status` of a node.
    #[must_use]
    pub fn status(&self, node: &str) -> Value {
        let done = self.on(node, &["sublet", "status", "--format", "json"]);
        assert!(done.ok, "{done:?}");
        serde_json::from_str(&done.stdout).expect("JSON")
    }

    /// The leases on a node.
    #[must_use]
    pub fn leases(&self, node: &str) -> Vec<Value> {
        self.status(node)["leases"].as_array().expect("leases").clone()
    }

    /// The state of a job, as `squeue` calls it.
    #[must_use]
    pub fn state(&self, job: &str) -> String {
        let done = self.run(TESTER, &["squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job]);
        done.stdout.trim().to_owned()
    }

    /// Checks that no job, lease or record is left, and that both nodes take jobs.
    pub fn assert_empty(&self) {
        let idle = || {
            let states = self.run(TESTER, &["sinfo", "--noheader", "--Node", "--format=%T"]).stdout;
            states.split_whitespace().eq(["idle", "idle"])
        };
        assert!(eventually(idle), "{:?}", self.run(TESTER, &["sinfo", "--Node", "--long"]));
        for node in ["n1", "n2"] {
            assert!(eventually(|| self.leases(node).is_empty()), "{node}: {:?}", self.leases(node));
            let records = self.on(node, &["find", "/run/sublet/slurm", "-type", "f"]).stdout;
            assert_eq!(records, "", "{node}");
        }
    }
}
