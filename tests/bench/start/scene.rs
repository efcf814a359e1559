//! What is timed: bundles as Docker writes them, the builds of sublet, and how a command is run.

use std::cell::Cell;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, bin_dir, eventually};
use tempfile::TempDir;

/// More than the tenth of a second takes after which a change is no longer new.
const MOST_REFRESHES: usize = 100;

/// As long as Docker's ids are.
pub const ID: &str = "5c2a0f7d9e31b84c6a1d0e92f7b35846c0d9a1e27f6b8354d1c0e9f2a7b36845";

/// A spec as Docker 26 writes it for a CUDA image: its mounts, capabilities, masked paths and environment, and a
/// seccomp list as long as its default one.
pub const DOCKER_CONFIG: &str = include_str!("../docker-config.json");

/// A share of time alone, which needs no daemon.
pub const TIME_SLICE: &[(&str, &str)] = &[("sublet.gpu", "0")];
/// What the holder has, too: the daemon's limits already allow it.
pub const WARM: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
/// More than the holder has: the daemon's limits rise before the start and fall after the end.
pub const HIGHER: &[(&str, &str)] = &[("sublet.sm", "50"), ("sublet.memory", "16GiB")];

/// The compute mode of a real GPU is left alone. With the simulated driver the same, so that the rows compare.
const CONFIG: &str = "[mps]\nexclusive_compute_mode = \"never\"\n";

/// A built sublet.
pub struct Build {
    /// For the table; empty for the one that is looked at.
    pub name: &'static str,
    pub directory: PathBuf,
}

/// The driver: this host's own, or the simulated one.
pub fn world(real: bool) -> World {
    // The image needs a C library, as every image has in which CUDA runs: that of any dynamic program.
    if real { World::real(Path::new("/usr/bin/env"), CONFIG) } else { World::simulated("h200", CONFIG) }
}

/// Everything around the commands.
pub struct Scene {
    pub world: World,
    /// What engines and sublet keep in /run, in memory as /run is: bundles, the ledger, daemons.
    pub memory: TempDir,
    /// sublet's configuration with `/bin/true` in the low-level runtime's place.
    pub instant: PathBuf,
    pub builds: Vec<Build>,
    /// Mounts that a time-slice share has.
    pub mounts: Cell<usize>,
    /// Where all programs write their errors.
    errors: PathBuf,
}

impl Scene {
    pub fn new(real: bool, beside: Option<PathBuf>) -> Result<Self> {
        let world = world(real);
        let memory = tempfile::Builder::new().prefix("sublet-bench").tempdir_in(memory_dir()?)?;
        let text = std::fs::read_to_string(&world.config)?;
        let state = format!("state_dir = \"{}\"", memory.path().join("state").display());
        let text = text.replacen(&format!("state_dir = \"{}\"", world.state_dir().display()), &state, 1);
        ensure!(text.contains(&state), "config.toml names no state_dir");
        std::fs::write(&world.config, &text)?;
        let named = format!(r#"low_level = ["{}"]"#, world.engine.program());
        let replaced = text.replace(&named, r#"low_level = ["/bin/true"]"#);
        ensure!(text != replaced, "config.toml names no low-level runtime");
        let instant = world.dir.path().join("instant.toml");
        std::fs::write(&instant, replaced)?;
        let errors = world.dir.path().join("errors");
        let mut builds = vec![Build { name: "", directory: bin_dir().canonicalize()? }];
        builds.extend(beside.map(|directory| Build { name: ", the build beside", directory }));
        let scene = Self { world, memory, instant, builds, mounts: Cell::new(0), errors };
        // Directories that were changed just now are not in the inventory. The simulated driver's are new; on a host they are
        // as old as the driver.
        let mut before = scene.refresh()?;
        for _ in 0..MOST_REFRESHES {
            let now = scene.refresh()?;
            if !now.is_null() && now == before {
                break;
            }
            before = now;
        }
        Ok(scene)
    }

    /// Makes the inventory anew. Returns its directories of the driver's files.
    fn refresh(&self) -> Result<Value> {
        let refreshed = self.world.sublet(&["refresh"]);
        ensure!(refreshed.status.success(), "sublet refresh: {}", String::from_utf8_lossy(&refreshed.stderr));
        let text = std::fs::read(self.memory.path().join("state/inventory.json"))?;
        let mut inventory: Value = serde_json::from_slice(&text)?;
        Ok(inventory["directories"].take())
    }

    /// A container that keeps the MPS daemon warm.
    pub fn holder(&self) -> Bundle<'_> {
        let holder = self.world.bundle("holder", WARM, &["/bin/sleep", "86400"]);
        holder.up();
        holder
    }

    /// `sublet serve`, which is ended with the value.
    pub fn serve(&self) -> Result<Service> {
        let mut command = self.world.command("sublet");
        let socket = self.memory.path().join("sock");
        let child = command.args(["serve", "--socket"]).arg(&socket).stderr(Stdio::null()).spawn()?;
        let service = Service(child);
        ensure!(eventually(|| socket.exists()), "sublet serve does not listen");
        Ok(service)
    }

    /// A bundle with a configuration as Docker writes it.
    pub fn bundle(&self, name: &str, annotations: &[(&str, &str)]) -> Bundle<'_> {
        let id = format!("{name}{}", &ID[name.len()..]);
        let mut bundle = self.world.bundle(&id, &[], &[]);
        for file in ["resolv.conf", "hostname", "hosts"] {
            let mounted = bundle.dir.join("rootfs/etc").join(file);
            for path in [&bundle.dir.join(file), &mounted] {
                std::fs::write(path, "").expect("a file to mount");
            }
        }
        let text = DOCKER_CONFIG.replace("@DIR@", &bundle.dir.to_string_lossy()).replace("@ID@", &id);
        let cgroup = bundle.spec["linux"]["cgroupsPath"].take();
        bundle.dir = self.memory.path().join(&id);
        std::fs::create_dir(&bundle.dir).expect("a bundle directory");
        bundle.spec = serde_json::from_str(&text).expect("docker-config.json is JSON");
        // Two benches may run at once.
        bundle.spec["linux"]["cgroupsPath"] = cgroup;
        for (key, value) in annotations {
            bundle.spec["annotations"][*key] = json!(value);
        }
        bundle
    }

    /// `sublet-runtime` of `build` before `/bin/true`, with the options dockerd gives.
    pub fn shim(&self, build: &Build, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(build.directory.join("sublet-runtime"));
        command.arg("--root").arg(self.world.runtime_root());
        command.arg("--log").arg(self.world.dir.path().join("log.json")).args(["--log-format", "json"]);
        self.quiet(command.args(arguments))
    }

    /// All commands get an explicit environment; those without one would start faster.
    pub fn quiet(&self, command: &mut Command) -> Result<Command> {
        let errors = File::options().append(true).create(true).open(&self.errors)?;
        if !command.get_envs().any(|(name, _)| name == "SUBLET_CONFIG") {
            command.env("SUBLET_CONFIG", &self.instant);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        Ok(std::mem::replace(command, Command::new("")))
    }

    /// From before the process is spawned until it has been waited for, by the monotonic clock.
    pub fn timed(&self, mut command: Command) -> Result<Duration> {
        let start = Instant::now();
        let status = command.status();
        let took = start.elapsed();
        if !status.with_context(|| format!("{command:?}"))?.success() {
            bail!("{command:?} failed: {}", std::fs::read_to_string(&self.errors)?);
        }
        Ok(took)
    }

    /// Frees leases of containers that never came to be, as `/bin/true` creates none.
    pub fn collect(&self) -> Result<()> {
        let mut gc = Command::new(bin_dir().join("sublet"));
        self.timed(self.quiet(gc.arg("gc"))?).map(drop)
    }
}

/// `sublet serve` while it runs.
pub struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        let pid = i32::try_from(self.0.id()).map(Pid::from_raw);
        let _ = pid.map(|pid| kill(pid, Signal::SIGTERM));
        let _ = self.0.wait();
    }
}

/// A directory whose files are in memory.
fn memory_dir() -> Result<&'static str> {
    let in_memory = |dir: &&str| statfs(*dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC);
    ["/run", "/dev/shm"].into_iter().find(in_memory).context("neither /run nor /dev/shm is a tmpfs")
}

pub fn create<'b>(bundle: &'b Bundle<'_>) -> [&'b str; 4] {
    ["create", "--bundle", bundle.dir.to_str().expect("a path of ours"), &bundle.id]
}
