//! The base line: the same programs as plain processes, with MPS daemons of their own and the limits set by hand, as one
//! does without sublet.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use super::result::{Cell, Sharing, Sm};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, FileKind, Inventory, MpsPrograms};
use sublet_core::process::child::{self, ChildError};

/// How long a daemon may take to start or to quit.
const LIMIT: Duration = Duration::from_secs(20);

/// The environments of a cell's processes, and the daemons behind them, which end with this.
pub struct ByHand {
    daemons: Vec<Daemon>,
    /// UUIDs of the MIG devices, one for each process; none in other modes.
    mig_devices: Vec<String>,
    /// The device, as CUDA is told; the driver's directories.
    common: BTreeMap<String, String>,
    percent: Option<f64>,
}

impl ByHand {
    /// Starts what the cell needs: no daemon, one, or one for each process. `dir` is for their pipes.
    ///
    /// # Errors
    /// MPS is not installed or does not start, or there are not enough MIG devices.
    pub fn new(
        planned: &Cell,
        gpu: &str,
        dir: &Path,
        inventory: &Inventory,
        config: &Config,
    ) -> anyhow::Result<Self> {
        let count = match planned.mode.sharing {
            Sharing::Exclusive | Sharing::TimeSlice | Sharing::Mig => 0,
            Sharing::Mps => 1,
            Sharing::Dedicated => planned.n,
        };
        let mig_devices = mig_devices(planned, gpu, inventory);
        if planned.mode.sharing == Sharing::Mig && mig_devices.len() < planned.n as usize {
            bail!("the GPU has {} MIG devices for {} processes", mig_devices.len(), planned.n);
        }
        let start = |number: u32| Daemon::start(gpu, &dir.join(format!("mps-{number}")), config);
        Ok(Self {
            daemons: (0..count).map(start).collect::<Result<_, _>>()?,
            mig_devices,
            common: common(gpu, inventory),
            percent: planned.mode.sm.map(|sm: Sm| sm.percent(planned.n)),
        })
    }

    /// What process `number` gets beside this program's own environment.
    pub fn environment(&self, number: u32) -> BTreeMap<String, String> {
        let mut environment = self.common.clone();
        if let Some(uuid) = self.mig_devices.get(number as usize) {
            environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), uuid.clone());
        }
        // Servers of their own: one each; a shared one: the only one.
        let Some(daemon) = self.daemons.get(number as usize).or(self.daemons.first()) else {
            return environment;
        };
        environment.insert("CUDA_MPS_PIPE_DIRECTORY".to_owned(), daemon.dir.display().to_string());
        // The server knows one GPU, and calls it 0.
        environment.insert("CUDA_VISIBLE_DEVICES".to_owned(), "0".to_owned());
        if let Some(percent) = self.percent {
            environment.insert("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE".to_owned(), percent.to_string());
        }
        environment
    }
}

/// The MIG devices of the profile that is wanted, the smallest first: containers get them so.
fn mig_devices(planned: &Cell, gpu: &str, inventory: &Inventory) -> Vec<String> {
    if planned.mode.sharing != Sharing::Mig {
        return Vec::new();
    }
    let wanted = planned.mode.profile.as_deref();
    let fits = |device: &Device| wanted.is_none_or(|wanted| wanted == device.kind());
    let devices = inventory.mig_devices_of(gpu).map(|(device, _)| device);
    let mut devices: Vec<&Device> = devices.filter(|device| fits(device)).collect();
    devices.sort_by_key(|device| (device.memory_bytes, device.sm_count));
    devices.into_iter().map(|device| device.uuid.clone()).collect()
}

/// The driver's libraries may lie where only containers of sublet's find them.
fn common(gpu: &str, inventory: &Inventory) -> BTreeMap<String, String> {
    let libraries = inventory.files.iter().filter(|file| matches!(file.kind, FileKind::Library { .. }));
    let directories: BTreeSet<&str> = libraries.filter_map(|file| file.source.parent()?.to_str()).collect();
    let own = std::env::var("LD_LIBRARY_PATH").ok().filter(|path| !path.is_empty());
    let path: Vec<&str> = own.as_deref().into_iter().chain(directories).collect();
    BTreeMap::from([
        ("CUDA_VISIBLE_DEVICES".to_owned(), gpu.to_owned()),
        ("LD_LIBRARY_PATH".to_owned(), path.join(":")),
        // No daemon of the host's: where this directory has none, CUDA works without MPS.
        ("CUDA_MPS_PIPE_DIRECTORY".to_owned(), "/nonexistent".to_owned()),
    ])
}

/// An MPS control daemon, which quits when this is dropped.
struct Daemon {
    control: PathBuf,
    dir: PathBuf,
    path: String,
}

impl Daemon {
    fn start(gpu: &str, dir: &Path, config: &Config) -> anyhow::Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let programs = MpsPrograms::find(&config.driver);
        let (control, _) = programs.both(&config.driver)?;
        let daemon = Self { control: control.to_owned(), dir: dir.to_owned(), path: programs.path() };
        let mut command = daemon.command();
        command.arg("-d").env("CUDA_VISIBLE_DEVICES", gpu);
        match child::run_without_output(&mut command, LIMIT) {
            Ok(status) if status.success() => Ok(daemon),
            Ok(status) => bail!("nvidia-cuda-mps-control -d ended with {status}"),
            Err(ChildError::Io(error)) => Err(error).context("cannot run nvidia-cuda-mps-control"),
            Err(ChildError::Timeout) => {
                bail!("nvidia-cuda-mps-control -d did not end within {} s", LIMIT.as_secs())
            }
        }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.control);
        let dir = [("CUDA_MPS_PIPE_DIRECTORY", &self.dir), ("CUDA_MPS_LOG_DIRECTORY", &self.dir)];
        command.envs(dir).env("PATH", &self.path);
        command
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Its processes have ended, so it quits at once.
        let _ = child::run(&mut self.command(), "quit\n", LIMIT);
    }
}
