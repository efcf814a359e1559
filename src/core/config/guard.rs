//! `[guard]`: what `sublet serve` does to processes that exceed their container's share.

use std::time::Duration;

use crate::share::Action;
use serde::{Deserialize, Serialize};

use super::values;

/// `[guard]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// Whether there is one.
    pub enabled: bool,
    /// Between two looks; what is seen in two of them is acted upon.
    #[serde(with = "values::duration")]
    pub period: Duration,
    /// Device memory that a container may have beyond its share, in bytes.
    #[serde(with = "values::memory")]
    pub memory_tolerance: u64,
    /// For the process with which a container passes `sublet.memory`.
    pub memory: Action,
    /// For one that computes beside its MPS server.
    pub bypass: Action,
    /// For MPS clients beyond `sublet.processes`, where others need their places; elsewhere they are reported.
    pub clients: Action,
    /// The same where nobody needs them: each client has an SM ceiling of its own.
    pub strict_clients: bool,
    /// For one whose container is gone.
    pub left: Action,
    /// For one that no lease explains; there is no container to end.
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
            strangers: Action::Report,
        }
    }
}
