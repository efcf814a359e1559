//! What a start and a stop of an MPS daemon record, under the ledger's lock, before they begin. Pure.

use super::{DaemonKey, DaemonState, DefaultLimits, Ledger, MpsDaemon};

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
        self.daemons.push(MpsDaemon {
            key: key.clone(),
            devices: devices.clone(),
            process: None,
            state: DaemonState::Starting,
            default_limits: DefaultLimits::default(),
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        });
        Some(StartClaim { devices, before })
    }

    /// Records the daemon `key` as stopping. With `force`, leases may lose it.
    pub fn claim_stop(&mut self, key: &DaemonKey, force: bool) -> Result<StopClaim, usize> {
        let leases = self.on_daemon(key).count();
        if leases > 0 && !force {
            return Err(leases);
        }
        let at = self.daemons.iter().position(|daemon| daemon.key == *key);
        let before = at.map(|at| self.daemons[at].clone());
        if let Some(at) = at {
            self.daemons[at].state = DaemonState::Stopping;
        }
        let unexplained = before.as_ref().is_some_and(|daemon| self.is_unexplained(daemon));
        Ok(StopClaim { before, leases, unexplained })
    }

    /// Removes the record of the daemon `key`.
    pub fn forget_daemon(&mut self, key: &DaemonKey) {
        self.daemons.retain(|daemon| daemon.key != *key);
    }
}
