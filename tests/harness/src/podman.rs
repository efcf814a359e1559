//! A Podman with its own storage and hooks for one test, in the root that tests/engines/enter provides.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard};

use serde_json::{Value, json};

use crate::bundle::{Finished, by_systemd, logged};
use crate::killing::assert_no_daemons;
use crate::programs;
use crate::world::{World, bin_dir, eventually};

/// The only image, made from the world's minimal root filesystem.
pub const IMAGE: &str = "probe";

/// Podman as root, with sublet's hook.
pub struct Podman {
    /// The driver, configuration and leases.
    pub world: World,
    /// The low-level runtime, by name or path.
    pub runtime: PathBuf,
    /// The storage driver for root filesystems.
    storage: &'static str,
}

/// The lock of [`CdiOffer`].
static CDI: Mutex<()> = Mutex::new(());

/// A CDI specification that Podman finds until this value is dropped.
pub struct CdiOffer {
    _alone: MutexGuard<'static, ()>,
}

impl CdiOffer {
    const PATH: &str = "/var/run/cdi/sublet.json";
}

impl Drop for CdiOffer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(Self::PATH);
    }
}

impl Podman {
    /// Sets up Podman with the hook and the image.
    #[must_use]
    pub fn up(world: World) -> Self {
        Self::up_on(world, "vfs")
    }

    /// [`Self::up`] with the storage driver `storage`.
    #[must_use]
    pub fn up_on(world: World, storage: &'static str) -> Self {
        let runtime = PathBuf::from(world.engine.program());
        let podman = Self { world, runtime, storage };
        let dir = podman.world.dir.path();
        std::fs::create_dir_all(dir.join("hooks")).expect("a directory");
        std::fs::write(dir.join("hooks/sublet.json"), podman.hook().to_string())
            .expect("the hook is written");
        std::fs::write(dir.join("containers.conf"), podman.configuration()).expect("containers.conf");
        podman.write_shim();
        let tar = podman.tar();
        podman.done(&["import", "--quiet", tar.to_str().expect("UTF-8"), IMAGE]);
        podman
    }

    /// `hooks/sublet.json` for the programs under test.
    #[must_use]
    pub fn hook(&self) -> Value {
        // Benchmarks also run from a copy of the checkout, elsewhere than where they were built.
        let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../hooks/sublet.json");
        let shipped = if built.is_file() { built } else { "hooks/sublet.json".into() };
        let text = std::fs::read_to_string(shipped).expect("hooks/sublet.json is there");
        let mut hook: Value = serde_json::from_str(&text).expect("it is JSON");
        hook["hook"]["path"] = json!(bin_dir().join("sublet-hook"));
        let env = hook["hook"]["env"].as_array_mut().expect("an array");
        env.push(json!(format!("SUBLET_CONFIG={}", self.world.config.display())));
        hook
    }

    /// The content of `hooks/containers.conf`, and settings for a machine without systemd or rights to raise limits.
    fn configuration(&self) -> String {
        let dir = self.world.dir.path();
        format!(
            "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=4096:4096\"]\npids_limit = 0\n\
             netns = \"none\"\nlog_driver = \"k8s-file\"\n\
             [engine]\ncgroup_manager = \"{}\"\nevents_logger = \"file\"\nlock_type = \"file\"\nruntime = \"{}\"\n\
             hooks_dir = [\"/usr/share/containers/oci/hooks.d\", \"{}\"]\n\
             runtime_supports_json = [\"crun\", \"runc\", \"sublet-runtime\"]\n\
             [engine.runtimes]\nsublet = [\"{}\"]\n",
            if by_systemd() { "systemd" } else { "cgroupfs" },
            self.runtime.display(),
            dir.join("hooks").display(),
            dir.join("bin/sublet-runtime").display(),
        )
    }

    /// Writes the world's CDI specification where Podman looks for it, so that `--device sublet/share=…` works in
    /// [`Self::run`]. The place belongs to the whole machine, so only one world at a time has it.
    #[must_use]
    pub fn offer_cdi(&self) -> CdiOffer {
        let alone = CDI.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let directory = std::path::Path::new(CdiOffer::PATH).parent().expect("a directory");
        std::fs::create_dir_all(directory).expect("a directory");
        let output = self.world.sublet(&["cdi", "generate", "--output", CdiOffer::PATH]);
        assert!(output.status.success(), "cdi generate: {}", String::from_utf8_lossy(&output.stderr));
        CdiOffer { _alone: alone }
    }

    /// The shim with this world's configuration. Podman passes only PATH and `XDG_RUNTIME_DIR` to `start` and
    /// `delete`.
    fn write_shim(&self) {
        let dir = self.world.dir.path().join("bin");
        std::fs::create_dir_all(&dir).expect("a directory");
        let script = format!(
            "SUBLET_CONFIG={} exec {} \"$@\"\n",
            self.world.config.display(),
            bin_dir().join("sublet-runtime").display()
        );
        programs::script(&dir.join("sublet-runtime"), &script);
    }

    /// The image as an archive.
    fn tar(&self) -> PathBuf {
        let tar = self.world.dir.path().join("image.tar");
        self.world.rootfs.archive(&tar);
        tar
    }

    /// A command of this Podman, or of buildah with its storage.
    #[must_use]
    pub fn command_of(&self, program: &str) -> Command {
        let dir = self.world.dir.path();
        let mut command = Command::new(program);
        command
            .arg("--storage-driver")
            .arg(self.storage)
            .arg("--root")
            .arg(dir.join("storage"))
            .arg("--runroot")
            .arg(dir.join("run"))
            .env("CONTAINERS_CONF", dir.join("containers.conf"))
            .env("PODMAN_IGNORE_CGROUPSV1_WARNING", "1")
            .stdin(Stdio::null());
        command
    }

    /// A `podman` command.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = self.command_of("podman");
        // Locks and databases belong to the directory for temporary files, and tests run at the same time.
        command.arg("--tmpdir").arg(self.world.dir.path().join("tmp"));
        command
    }

    /// Runs `podman ARGUMENTS`.
    #[must_use]
    pub fn cli(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.command().args(arguments).output().expect("podman is installed"))
    }

    /// Runs `podman --remote ARGUMENTS` against the service at `url`.
    #[must_use]
    pub fn command_remote(&self, url: &str, arguments: &[&str]) -> Finished {
        let conf = self.world.dir.path().join("containers.conf");
        let mut command = Command::new("podman");
        command.env("CONTAINERS_CONF", conf).args(["--remote", "--url", url]).args(arguments);
        Finished::of(&command.stdin(Stdio::null()).output().expect("podman is installed"))
    }

    /// [`Self::cli`], which must succeed; its standard output without the newline.
    #[allow(clippy::must_use_candidate, reason = "often only done")]
    pub fn done(&self, arguments: &[&str]) -> String {
        let finished = self.cli(arguments);
        assert!(finished.ok, "podman {}: {}", arguments.join(" "), finished.stderr);
        finished.stdout.trim_end().to_owned()
    }

    /// The arguments of `podman run` or `create` of the image.
    #[must_use]
    pub fn arguments<'a>(
        verb: &[&'a str],
        name: &'a str,
        annotations: &[&'a str],
        options: &[&'a str],
        args: &[&'a str],
    ) -> Vec<&'a str> {
        let mut all = [verb, &["--name", name]].concat();
        all.extend(annotations.iter().flat_map(|annotation| ["--annotation", annotation]));
        all.extend(options);
        all.push(IMAGE);
        all.extend(args);
        all
    }

    /// `podman run -d`, which may fail.
    #[must_use]
    pub fn run(&self, name: &str, annotations: &[&str], options: &[&str], args: &[&str]) -> Finished {
        self.cli(&Self::arguments(&["run", "-d"], name, annotations, options, args))
    }

    /// [`Self::run`] in the background.
    #[must_use]
    pub fn spawn(&self, name: &str, annotations: &[&str], args: &[&str]) -> Child {
        let all = Self::arguments(&["run", "-d"], name, annotations, &[], args);
        self.command()
            .args(all)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("podman is installed")
    }

    /// [`Self::run`] of a process that holds a context. It must succeed. Returns the container's id.
    #[must_use]
    pub fn hold(&self, name: &str, annotations: &[&str], options: &[&str]) -> String {
        let started = self.run(name, annotations, options, &["cuda-probe", "hold", "600"]);
        assert!(started.ok, "podman run {name}: {}", started.stderr);
        started.stdout.trim_end().to_owned()
    }

    /// The output of `cuda-probe info` in a process started by `podman exec`, with the prefix command `before`.
    #[must_use]
    pub fn exec_info(&self, name: &str, before: &[&str]) -> Value {
        self.cli(&[&["exec", name], before, &["cuda-probe", "info"]].concat()).info()
    }

    /// Waits for the first line with this `event` in the container's log.
    #[must_use]
    pub fn event(&self, name: &str, event: &str) -> Value {
        logged(name, event, || self.cli(&["logs", name]))
    }

    /// A member of `podman inspect`, such as `.State.Pid`.
    #[must_use]
    pub fn inspect(&self, name: &str, member: &str) -> String {
        self.done(&["inspect", "--format", &format!("{{{{{member}}}}}"), name])
    }

    /// The lease of the container `id`, if it has one.
    #[must_use]
    pub fn lease(&self, id: &str) -> Option<Value> {
        self.world.leases().into_iter().find(|lease| lease["container_id"] == id)
    }

    /// The lease as recorded in the ledger, without a sublet command that would first correct it.
    #[must_use]
    pub fn ledger(&self) -> Value {
        let text = std::fs::read(self.world.state_dir().join("ledger.json")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Checks that nothing is left: no lease, no daemon, and no mount point of sublet's in any root filesystem.
    pub fn assert_empty(&self) {
        let leases = || self.world.leases();
        assert!(eventually(|| leases().is_empty()), "leases are left: {:?}", leases());
        assert_no_daemons(&self.world, "at the end");
        self.world.assert_empty();
        let storage = self.world.dir.path().join("storage");
        let found = Command::new("find")
            .arg(storage)
            .args(["-type", "f", "-size", "0", "(", "-name", "libcuda*", "-o", "-name", "libnvidia*", ")"])
            .output()
            .expect("find runs");
        assert_eq!(String::from_utf8_lossy(&found.stdout), "", "mount points are left");
        let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
        let ours = self.world.driver_root.as_ref().expect("simulated").display().to_string();
        assert!(!mounts.lines().any(|line| line.contains(&ours)), "mounts are left: {mounts}");
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        for _ in 0..2 {
            let _ = self.cli(&["pod", "rm", "--all", "--force", "--time=0"]);
            let _ = self.cli(&["rm", "--all", "--force", "--time=0"]);
        }
        let _ = self.cli(&["unmount", "--all", "--force"]);
    }
}
