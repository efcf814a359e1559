//! A Slurm cluster of tests/slurm/nodes: slurmctld on a login node, slurmd on nodes n1, n2…, all of them real.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::{Finished, bin_dir, eventually};

/// Takes the whole cluster down when dropped.
pub struct Cluster {
    dir: TempDir,
}

impl Cluster {
    /// A cluster of two nodes with four GPUs each. `nodes` is what the nodes have, as in slurm.conf
    /// (`gpu:4,shard:16`), `gres` the lines of gres.conf beside that for `gpu`, and `slurm` lines for slurm.conf.
    #[must_use]
    pub fn up(nodes: &str, gres: &str, slurm: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("slurm").tempdir_in("/var/tmp").expect("a directory");
        let cluster = Self { dir };
        let setup = cluster.dir.path().join("setup");
        let script = format!(
            "cd \"$1/etc\" || exit\nsed -i 's/Gres=[^ ]*/Gres={nodes}/' nodes.conf\n\
             cat >>gres.conf <<'END'\n{gres}\nEND\ncat >>slurm.conf <<'END'\n{slurm}\nEND\n"
        );
        crate::programs::script(&setup, &script);
        let mut up = cluster.script("up");
        let up = up.env("SLURM_SETUP", &setup).env("SUBLET_BIN_DIR", bin_dir()).output().expect("it runs");
        assert!(up.status.success(), "tests/slurm/nodes up: {up:?}");
        cluster
    }

    /// A directory that all nodes see at the same path, as they do /home.
    #[must_use]
    pub fn shared(&self) -> &Path {
        self.dir.path()
    }

    fn script(&self, verb: &str) -> Command {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../slurm/nodes");
        let mut command = Command::new(script.canonicalize().expect("the script"));
        command.arg(verb).arg(self.dir.path()).current_dir(self.dir.path()).stdin(Stdio::null());
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

    /// Runs a command of a user (`tester`, `other`) in the login node, such as `srun`.
    #[must_use]
    pub fn by(&self, user: &str, args: &[&str]) -> Finished {
        self.on("login", &[&["runuser", "-u", user, "--"], args].concat())
    }

    /// [`Self::by`] in the background.
    #[must_use]
    pub fn spawn(&self, user: &str, args: &[&str]) -> Child {
        let mut command = self.command("login", &[&["runuser", "-u", user, "--"], args].concat());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
    }

    /// `lose`, `boot`, `start` of a node, as tests/slurm/nodes has them.
    pub fn tell(&self, verb: &str, node: &str) {
        let output = self.script(verb).arg(node).output().expect("it runs");
        assert!(output.status.success(), "{verb} {node}: {output:?}");
    }

    /// SIGKILL for `slurmd` or `slurmctld`.
    pub fn kill(&self, node: &str, daemon: &str) {
        let output = self.script("kill").args([node, daemon]).output().expect("it runs");
        assert!(output.status.success(), "kill {daemon} on {node}: {output:?}");
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
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.script("down").output();
    }
}
