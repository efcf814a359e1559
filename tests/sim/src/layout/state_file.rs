//! The changing state of the simulated driver, shared by all its processes: `DIR/sim/state.json`.

use std::collections::BTreeMap;
use std::fs::{self, File};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::instances::Partition;
use super::topology::{Gpu, Mig, MigMode, Topology};
use super::{Root, capabilities, trailer};

/// The driver's state, each map by GPU UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// `nvmlComputeMode_t`; absent is 0, DEFAULT.
    pub compute_mode: BTreeMap<String, u32>,
    /// Slice length, 0 to 3; absent is 0, default.
    pub timeslice: BTreeMap<String, u32>,
    /// MIG mode and instances, of GPUs that can do MIG.
    pub mig: BTreeMap<String, Partition>,
    /// How often the GPU was reset.
    #[serde(default)]
    pub resets: BTreeMap<String, u32>,
    /// The number of instances created since the driver was loaded.
    #[serde(default)]
    pub made: u32,
}

impl State {
    /// The state right after the driver was loaded.
    #[must_use]
    pub fn initial(topology: &Topology) -> Self {
        let capable = topology.gpu.iter().filter(|gpu| gpu.mig_mode != MigMode::None);
        let mig = capable.map(|gpu| (gpu.uuid.clone(), Partition::initial(gpu))).collect();
        Self { mig, ..Self::default() }
    }

    /// The current state. It needs no lock, because the file is replaced by a rename.
    ///
    /// # Errors
    /// The file is missing, or was not written by [`State::update`].
    pub fn read(root: &Root) -> Result<Self> {
        let file = root.join("sim/state.json");
        let text = fs::read(&file).with_context(|| format!("{}", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{}", file.display()))
    }

    /// Changes the state under the lock.
    pub fn update<T>(root: &Root, change: impl FnOnce(&mut Self) -> T) -> Result<T> {
        let _lock = Self::lock(root)?;
        let mut state = Self::read(root)?;
        let result = change(&mut state);
        state.write(root)?;
        Ok(result)
    }

    /// Changes MIG under the lock, and everything that shows it: the kernel module's files and nodes, and the
    /// libraries' trailers, which a container sees. If `change` refuses, nothing changes.
    ///
    /// # Errors
    /// The lock, the state or a file cannot be used. The inner error is `change`'s.
    pub fn change_mig<T, E>(
        root: &Root,
        topology: &Topology,
        change: impl FnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<Result<T, E>> {
        let _lock = Self::lock(root)?;
        let old = Self::read(root)?;
        let mut state = old.clone();
        let made = match change(&mut state) {
            Ok(made) => made,
            Err(refused) => return Ok(Err(refused)),
        };
        for gpu in &topology.gpu {
            if let Some(partition) =
                state.mig.get(&gpu.uuid).filter(|new| old.mig.get(&gpu.uuid) != Some(new))
            {
                capabilities::sync(root, topology, gpu, partition)?;
            }
        }
        trailer::replace_all(root, &state.applied(topology))?;
        state.write(root)?;
        Ok(Ok(made))
    }

    fn lock(root: &Root) -> Result<Flock<File>> {
        let lock = File::create(root.join("sim/lock")).context("sim/lock")?;
        Ok(Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?)
    }

    /// The topology with the current MIG state.
    #[must_use]
    pub fn applied(&self, topology: &Topology) -> Topology {
        let mut now = topology.clone();
        for gpu in &mut now.gpu {
            if let Some(partition) = self.mig.get(&gpu.uuid) {
                gpu.mig_mode = if partition.enabled { MigMode::Enabled } else { MigMode::Disabled };
                gpu.mig = partition.devices(gpu);
            }
        }
        now
    }

    /// The MIG devices of a GPU, in NVML's order.
    #[must_use]
    pub fn devices(&self, gpu: &Gpu) -> Vec<Mig> {
        self.mig.get(&gpu.uuid).map(|partition| partition.devices(gpu)).unwrap_or_default()
    }

    /// A number that no instance had before.
    pub const fn serial(&mut self) -> u32 {
        self.made += 1;
        self.made
    }

    /// Resets a GPU: a pending MIG mode takes effect, and settings and instances are lost.
    pub fn reset(&mut self, gpu: &Gpu) {
        self.compute_mode.remove(&gpu.uuid);
        self.timeslice.remove(&gpu.uuid);
        *self.resets.entry(gpu.uuid.clone()).or_default() += 1;
        if let Some(partition) = self.mig.get_mut(&gpu.uuid) {
            *partition =
                Partition { enabled: partition.pending, pending: partition.pending, instances: vec![] };
        }
    }

    /// The state after a reboot of the host: A100 and A30 keep MIG mode, later GPUs lose it, and all instances are lost
    /// (NVIDIA's MIG User Guide, "MIG mode").
    #[must_use]
    pub fn after_reboot(&self, topology: &Topology) -> Self {
        let mut state = Self { made: self.made, ..Self::initial(topology) };
        for gpu in &topology.gpu {
            if let Some(partition) = state.mig.get_mut(&gpu.uuid) {
                let before = self.mig.get(&gpu.uuid).is_some_and(|before| before.pending);
                let enabled = before && gpu.keeps_mig_mode();
                *partition = Partition { enabled, pending: enabled, instances: Vec::new() };
            }
        }
        state
    }

    /// Writes the state. The caller holds the lock, or no other process uses the root yet.
    pub fn write(&self, root: &Root) -> Result<()> {
        let new = root.join("sim/state.json.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        Ok(fs::rename(new, root.join("sim/state.json"))?)
    }
}
