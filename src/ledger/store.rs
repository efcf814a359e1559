//! The file, its lock, and the one way to change it.

use std::path::Path;

use super::{Lease, Ledger};

/// Why the ledger could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {}

/// The ledger of one state directory.
#[derive(Debug)]
pub struct Store {}

/// Leases that an update found gone and freed: their servers may have to be settled.
pub type Freed = Vec<Lease>;

impl Store {
    /// The ledger in `state_dir`, which is created if need be (0755).
    ///
    /// # Errors
    /// The directory cannot be made or is not ours.
    pub fn open(_state_dir: &Path) -> Result<Self, LedgerError> {
        todo!()
    }

    /// The ledger as it stands, without the lock.
    ///
    /// # Errors
    /// It cannot be read or parsed.
    pub fn read(&self) -> Result<Ledger, LedgerError> {
        todo!()
    }

    /// Takes the lock, frees what is gone, lets `change` work and writes the ledger if it differs.
    ///
    /// When `change` fails its changes are dropped, what was freed stays freed, and its error is the
    /// inner one. `change` must not start, ask or wait for a process: everybody waits meanwhile.
    ///
    /// # Errors
    /// The lock is not to be had in 5 s, or the file cannot be read or written.
    pub fn update<T, E>(
        &self,
        _change: impl FnOnce(&mut Ledger) -> Result<T, E>,
    ) -> Result<(Result<T, E>, Freed), LedgerError> {
        todo!()
    }
}
