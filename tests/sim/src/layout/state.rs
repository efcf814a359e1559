//! What changes while the simulated driver is up, shared by all its processes: `DIR/sim/state.json`.

use std::collections::BTreeMap;
use std::fs::{self, File};

use anyhow::{Context, Result};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use super::Root;
use super::topology::{Mig, Topology};

/// The driver's state, each map by GPU UUID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// `nvmlComputeMode_t`; absent is 0, DEFAULT.
    pub compute_mode: BTreeMap<String, u32>,
    /// Slice length, 0 to 3; absent is 0, default.
    pub timeslice: BTreeMap<String, u32>,
    /// MIG devices that exist.
    pub mig: BTreeMap<String, Vec<Mig>>,
}

impl State {
    /// The state right after the driver was loaded.
    #[must_use]
    pub fn initial(topology: &Topology) -> Self {
        let mig = topology.gpu.iter().map(|gpu| (gpu.uuid.clone(), gpu.mig.clone())).collect();
        Self { mig, ..Self::default() }
    }

    /// The state as it is. Takes no lock: it is replaced by a rename.
    ///
    /// # Errors
    /// The file is missing or is not what [`State::update`] wrote.
    pub fn read(root: &Root) -> Result<Self> {
        let file = root.join("sim/state.json");
        let text = fs::read(&file).with_context(|| format!("{}", file.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{}", file.display()))
    }

    /// Changes the state under the lock.
    ///
    /// # Errors
    /// It cannot be locked, read or written.
    pub fn update<T>(root: &Root, change: impl FnOnce(&mut Self) -> T) -> Result<T> {
        let lock = File::create(root.join("sim/lock")).context("sim/lock")?;
        let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        let mut state = Self::read(root)?;
        let result = change(&mut state);
        state.write(root)?;
        Ok(result)
    }

    /// Writes the state; with the lock held, or before anybody else knows the root.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, root: &Root) -> Result<()> {
        let new = root.join("sim/state.json.new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        Ok(fs::rename(new, root.join("sim/state.json"))?)
    }
}
