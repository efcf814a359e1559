//! Bringing a daemon to what its leases want: the one place that starts, adjusts or stops it.

use super::ServerKey;
use crate::config::Config;
use crate::ledger::{Lease, Store};

/// Why an MPS daemon does not serve; every message says what would help.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {}

/// Makes sure that the daemon of `lease` (already in the ledger) answers and admits its SM share.
///
/// A warm daemon costs a connect() and no process; a cold one is started by `sublet mps start`.
/// Returns warnings, one line each.
///
/// # Errors
/// The daemon cannot be started or does not answer in `[mps] start_timeout`.
pub fn ready(_lease: &Lease, _store: &Store, _config: &Config) -> Result<Vec<String>, MpsError> {
    todo!()
}

/// After leases of `key` ended: lowers the ceiling, or stops a daemon that serves nobody any more.
///
/// # Errors
/// The daemon does not answer or does not stop; it is then recorded as in fault.
pub fn settle(_key: &ServerKey, _store: &Store, _config: &Config) -> Result<(), MpsError> {
    todo!()
}
