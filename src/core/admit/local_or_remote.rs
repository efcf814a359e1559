//! Whether this process changes the state on this host's disk itself ([`super::local`]), or asks `sublet serve` to do
//! so ([`super::remote`]).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde_json::Value;

use super::{Admission, AdmitError, Candidate, RequestSource};
use crate::config::Config;
use crate::host::user_namespace;
use crate::inventory::Inventory;
use crate::ledger::{Binding, Lease, LeaseId, Ledger};
use crate::process::Process;
use crate::process::auxiliary_vector::effective_user;

/// Whether this process may not change the state. Root of the initial user namespace may, and so may the owner of the
/// state directory (tests; root in a system container). Under rootless engines this process seems to be root, and files
/// of the real root seem to belong to the overflow uid.
#[must_use]
pub fn is_remote(config: &Config) -> bool {
    let us = effective_user();
    if us == 0 && !user_namespace::is_nested() {
        return false;
    }
    // Links are followed: rootless Docker's /run is a file system of its own, with links to what was in the host's.
    let owner = match config.state_dir.metadata() {
        Ok(dir) => Some(dir),
        // A user's /run of their own is no place for a state beside the host's.
        Err(_) if user_namespace::is_nested() && !user_namespace::is_of_a_system() => None,
        // The owner of the directory above it would create it.
        Err(_) => config.state_dir.ancestors().find_map(|dir| dir.symlink_metadata().ok()),
    };
    owner.is_none_or(|dir| dir.uid() != us)
}

/// The operations on a container's lease, the same for both places of the state.
pub(super) trait State {
    /// As [`super::admit`], for a container that asks for a share and has a place for its mounts.
    fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError>;

    /// As [`super::withdraw`].
    fn withdraw(&self, lease: &LeaseId) -> Result<(), AdmitError>;

    /// As [`super::end`].
    fn end(&self, lease: &LeaseId) -> Result<(), AdmitError>;

    /// As [`super::clear_after`].
    fn clear_after(&self, lease: &Lease);

    /// As [`super::abandon`].
    fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<(), AdmitError>;

    /// As [`super::hand_over`].
    fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), AdmitError>;

    /// As [`super::bind`].
    fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError>;

    /// As [`super::mark_ending`].
    fn mark_ending(&self, uid: u32, id: &str, record: &Path) -> Result<Option<LeaseId>, AdmitError>;

    /// As [`super::unmark`].
    fn unmark(&self, lease: &LeaseId) -> Result<(), AdmitError>;

    /// As [`super::enter`], for the MPS daemon of which the container sees `public`.
    fn enter(&self, public: &Path, id: &str, record: &Path) -> Result<(), AdmitError>;

    /// A new inventory, if the cached one is out of date.
    fn new_inventory(&self) -> Result<Inventory, AdmitError>;

    /// The ledger, if it may have leases that no config.json names; `None` if there cannot be any.
    fn ledger_of_hooks(&self) -> Result<Option<Ledger>, AdmitError>;

    /// Records that `container` was refused, for `sublet status --last-error`. A lost record is no reason to fail,
    /// because the caller reports the error itself.
    fn record_refusal(&self, container: &str, error: &AdmitError);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_our_own_is_ours_to_change() {
        let dir = tempfile::tempdir().unwrap();
        let config = |dir: &Path| Config { state_dir: dir.to_owned(), ..Config::default() };
        assert!(!is_remote(&config(dir.path())));
        assert!(!is_remote(&config(&dir.path().join("not/yet"))));
    }
}
