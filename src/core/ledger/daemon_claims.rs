//! What a start and a stop of an MPS daemon record, under the ledger's lock, before they begin. Pure.

use super::{DaemonKey, DaemonState, Ledger, MpsDaemon};

/// A daemon to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartClaim {
    /// The devices that the daemon serves, in the order in which its clients count them.
    pub devices: Vec<String>,
    /// The record of an earlier daemon, whose containers may still live.
    pub before: Option<MpsDaemon>,
}

/// A daemon to stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopClaim {
    /// The record, as it was.
    pub before: Option<MpsDaemon>,
    /// How many leases lose their daemon.
    pub leases: usize,
    /// Whether the ledger was rebuilt and no lease of this daemon was found.
    pub unexplained: bool,
}

impl Ledger {
    /// Records the daemon `key` as starting. `None`: no lease needs it.
    pub fn claim_start(&mut self, key: &DaemonKey) -> Option<StartClaim> {
        // All leases on a device's shared server have that one device.
        let devices = self.on_daemon(key).next()?.devices.clone();
        let before = self.daemons.iter().find(|daemon| daemon.key == *key).cloned();
        self.forget_daemon(key);
        self.daemons.push(MpsDaemon::starting(key.clone(), devices.clone()));
        Some(StartClaim { devices, before })
    }

    /// Records the daemon `key` as stopping. With `force`, leases may lose it.
    pub fn claim_stop(&mut self, key: &DaemonKey, force: bool) -> Result<StopClaim, usize> {
        let leases = self.on_daemon(key).count();
        if leases > 0 && !force {
            return Err(leases);
        }
        let known = self.daemons.iter_mut().find(|daemon| daemon.key == *key);
        let before = known.map(|daemon| {
            let state = std::mem::replace(&mut daemon.state, DaemonState::Stopping);
            MpsDaemon { state, ..daemon.clone() }
        });
        let unexplained = before.as_ref().is_some_and(|daemon| self.is_unexplained(daemon));
        Ok(StopClaim { before, leases, unexplained })
    }

    /// Removes the record of the daemon `key`.
    pub fn forget_daemon(&mut self, key: &DaemonKey) {
        self.daemons.retain(|daemon| daemon.key != *key);
    }
}
