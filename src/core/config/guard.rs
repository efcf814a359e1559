//! `[guard]`: the actions of `sublet serve` on processes that exceed their container's share.

use std::time::Duration;

use crate::share::Action;
use serde::{Deserialize, Serialize};

use super::values;

/// `[guard]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// Whether the guard runs.
    pub enabled: bool,
    /// The time between two checks. The guard acts on an excess in two of them.
    #[serde(with = "values::duration")]
    pub period: Duration,
    /// Device memory that a container may use beyond its share, in bytes.
    #[serde(with = "values::memory")]
    pub memory_tolerance: u64,
    /// The action for the process with which a container exceeds `sublet.memory`.
    pub memory: Action,
    /// The action for a process that uses the GPU without its MPS server.
    pub bypass: Action,
    /// The action for MPS clients beyond `sublet.processes`, if other containers need their places. Otherwise they are
    /// reported.
    pub clients: Action,
    /// The same if no other container needs them. Each client has an SM limit of its own.
    pub strict_clients: bool,
    /// The action for a process whose container has ended.
    pub left: Action,
    /// The action for a process that has connected to an MPS daemon and says nothing, so that the daemon waits.
    pub silent: Action,
    /// The action for a process that is not attributable to any lease. There is no container to end.
    pub strangers: Action,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            enabled: true,
            period: Duration::from_millis(500),
            memory_tolerance: 128 << 20,
            memory: Action::Terminate,
            bypass: Action::Terminate,
            clients: Action::Terminate,
            strict_clients: false,
            left: Action::Terminate,
            silent: Action::Terminate,
            strangers: Action::Report,
        }
    }
}
