//! Where the state is: on this host's disk and ours to change ([`super::local`]), or `sublet serve`'s, which is asked to
//! change it ([`super::remote`]).

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::unistd::geteuid;
use serde_json::Value;

use super::{Admission, AdmitError, Candidate};
use crate::config::Config;
use crate::host::user_namespace;
use crate::inventory::Inventory;
use crate::ledger::{Binding, Lease, LeaseId, Ledger};
use crate::process::Process;

/// Whether the state is not ours to change: root of the first user namespace may, and whoever the state
/// directory belongs to (tests; root in a system container). Under rootless engines we seem to be root
/// and see what is really root's as the overflow uid's.
#[must_use]
pub fn is_remote(config: &Config) -> bool {
    let us = geteuid();
    if us.is_root() && !user_namespace::is_nested() {
        return false;
    }
    // One that is not there yet would have to be made by whoever owns what it is made in.
    let owner = config.state_dir.ancestors().find_map(|dir| dir.symlink_metadata().ok());
    owner.is_none_or(|dir| dir.uid() != us.as_raw())
}

/// What becomes of a container's lease, wherever the state is.
pub(super) trait State {
    /// As [`super::admit`], for a container that asks for a share and has a place for its mounts.
    fn admit(
        &self,
        candidate: &Candidate<'_>,
        annotations: &BTreeMap<String, String>,
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

    /// A new inventory, where the cached one does not hold any more.
    fn new_inventory(&self) -> Result<Inventory, AdmitError>;

    /// The ledger, where it may have leases that no config.json names; `None`: there are none such.
    fn ledger_of_hooks(&self) -> Result<Option<Ledger>, AdmitError>;

    /// Writes down that `container` was refused, for `sublet status --last-error`. A lost record is no reason to fail:
    /// the caller reports the error itself.
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
