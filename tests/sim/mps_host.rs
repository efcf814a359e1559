//! A simulated host whose ledger and leases a test holds itself.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, unshare};
use sublet_core::config::Config;
use sublet_core::inventory::ComputeMode;
use sublet_core::ledger::{Container, DaemonKey, Lease, LeaseId, LeaseState, Ledger, MpsDaemon, Store};
use sublet_core::mps;
use sublet_core::process::Process;
use sublet_core::share::{Isolation, Mode, Percent, Priority, Suspend};

/// The GPU of topologies/h200.toml.
pub const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";

/// A host with one simulated GPU.
pub struct Host {
    pub root: PathBuf,
    pub config: Config,
    pub store: Store,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = Command::new(built("sublet-sim")).args(["down", "--root"]).arg(&self.root).status();
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn built(program: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_sublet")).with_file_name(program)
}

impl Host {
    /// A simulated H200, or `None` if it cannot be set up.
    pub fn up(name: &str) -> Option<Self> {
        let can = nix::unistd::geteuid().is_root()
            && built("sublet-sim").exists()
            && built("nvidia-cuda-mps-control").exists();
        if !can {
            eprintln!("SKIPPED: needs root and the simulator (cargo build --workspace)");
            return None;
        }
        // Daemons move to the root of their cgroup namespace, so the test needs a separate one.
        unshare(CloneFlags::CLONE_NEWCGROUP).unwrap();
        let root = PathBuf::from(format!("/tmp/sublet-mps-{}-{name}", std::process::id()));
        let topology = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/sim/topologies/h200.toml");
        let up = Command::new(built("sublet-sim"))
            .args(["up", "--topology"])
            .arg(topology)
            .arg("--root")
            .arg(&root)
            .stdout(Stdio::null())
            .status();
        assert!(up.unwrap().success());
        // sublet looks for the program `sublet` beside the running program, which is this test.
        let beside = std::env::current_exe().unwrap().with_file_name("sublet");
        let _ = symlink(env!("CARGO_BIN_EXE_sublet"), beside);
        let mut config = Config { state_dir: root.join("run"), ..Config::default() };
        config.driver.root.clone_from(&root);
        let library = format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH);
        config.driver.nvml = Some(root.join(library));
        let store = Store::open(&config.state_dir).unwrap();
        let host = Self { root, config, store };
        assert!(host.sublet(&["refresh"]).0);
        Some(host)
    }

    pub fn sublet(&self, arguments: &[&str]) -> (bool, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_sublet"))
            .args(arguments)
            .env_clear()
            .env("SUBLET_CONFIG", self.root.join("config.toml"))
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    }

    pub fn take(&self, id: &str, key: &str, sm: Option<u32>, memory: Option<u64>) -> Lease {
        let lease = Lease {
            id: LeaseId::parse(id).unwrap(),
            container: Container {
                uid: 0,
                id: format!("container-{id}"),
                bundle: "/nowhere".into(),
                rootfs: "/nowhere/rootfs".into(),
                record: "/nowhere/record".into(),
            },
            devices: vec![GPU.into()],
            mode: Mode::Mps,
            isolation: Isolation::Shared,
            daemon: Some(DaemonKey(key.into())),
            sm: sm.map(|percent| Percent::from_thousandths(percent * 1000)),
            memory_bytes: memory,
            processes: 1,
            priority: Priority::Normal,
            guard: None,
            suspend: Suspend::Never,
            suspension: None,
            known: Vec::new(),
            resumed_ms: None,
            backoff: None,
            state: LeaseState::Pending,
            owner: Process::current().unwrap(),
            init: None,
            bind_by: None,
            since: 0,
            mount_points: Vec::new().into(),
            volumes: Vec::new(),
            library_dir: None,
            brokered: false,
            job: None,
            within: None,
            claimed_owner: None,
            mig_devices: Vec::new(),
        };
        self.edit(|ledger| ledger.leases.push(lease.clone()));
        lease
    }

    pub fn give_back(&self, lease: &Lease) {
        self.edit(|ledger| ledger.leases.retain(|held| held.id != lease.id));
    }

    pub fn edit(&self, change: impl FnOnce(&mut Ledger)) {
        let edited = self.store.update(|ledger| {
            change(ledger);
            Ok::<(), std::convert::Infallible>(())
        });
        edited.unwrap().0.unwrap();
    }

    pub fn ready(&self, lease: &Lease) -> Result<Vec<String>, String> {
        // The child gets this test's SUBLET_CONFIG, which is set for the whole process.
        mps::make_ready(lease, &self.store, &self.config).map_err(|error| error.to_string())
    }

    pub fn server(&self, key: &str) -> Option<MpsDaemon> {
        self.store.read().unwrap().daemons.into_iter().find(|server| server.key.0 == key)
    }

    /// The daemon's own answer to another copy of the control program, because the host's may have been moved.
    pub fn ask(&self, key: &str, command: &str) -> String {
        let script = format!("echo {command} | {}", built("nvidia-cuda-mps-control").display());
        let output = Command::new("/bin/sh")
            .args(["-c", &script])
            .env("CUDA_MPS_PIPE_DIRECTORY", self.root.join("run/mps").join(key).join("pipe"))
            .output();
        String::from_utf8(output.unwrap().stdout).unwrap().trim().to_owned()
    }

    pub fn names(&self, directory: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join("run").join(directory)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub fn compute_mode(&self) -> ComputeMode {
        sublet::probe::probe(&self.config).unwrap().devices[0].compute_mode
    }
}
