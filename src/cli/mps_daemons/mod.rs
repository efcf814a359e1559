//! Starts, stops and lists MPS control daemons, for `sublet mps` and `sublet serve`. The shim runs these commands when
//! it needs them; its own part is in [`sublet_core::mps`].

mod below_runtime;
mod compute_mode;
mod daemon_list;
mod detach;
mod launch;
mod logs;
mod service_defaults;
mod service_syscalls;
mod start;
mod stop;

use std::path::PathBuf;

use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, DaemonState, Store};
use sublet_core::mps::{MpsError, dirs, limits_and_state};

pub(crate) use below_runtime::await_end;
pub use daemon_list::{Listed, list, logs};
pub(crate) use daemon_list::{list_unasked, terminate_client};
pub use start::start;
pub use stop::{exists, rest, stop};

/// Warnings, one line each.
type Warnings = Result<Vec<String>, MpsError>;

/// A daemon that is started or stopped, the ledger that records it, and what is configured.
#[derive(Clone, Copy)]
struct Daemon<'a> {
    key: &'a DaemonKey,
    store: &'a Store,
    config: &'a Config,
}

impl Daemon<'_> {
    fn pipe(self) -> PathBuf {
        dirs::pipe(self.key, &self.config.state_dir)
    }

    /// Records that it does not run.
    fn note_down(self) -> Result<(), MpsError> {
        limits_and_state::note(self.store, self.key, |daemon| {
            daemon.state = DaemonState::Down;
            daemon.process = None;
        })
    }
}
