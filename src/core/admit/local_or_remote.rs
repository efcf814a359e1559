//! Which leases an entry point is about: those on this host's disk, which this process changes itself ([`Local`]), or
//! those of `sublet serve`, which is asked to do so ([`super::remote`]).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde_json::Value;

use super::local::{Local, read};
use super::remote::Remote;
use super::{Admission, AdmitError, Candidate, RequestSource, last_refusals, refresh};
use crate::broker::protocol::Ask;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Binding, Container, Lease, LeaseId, Ledger};
use crate::oci::container_root;
use crate::process::Process;
use crate::process::inheritance::effective_user;
use crate::{ledger, mps, oci, process};

/// Whether this process may not change the state. Root of the initial user namespace may, and so may the owner of the
/// state directory (tests; root in a system container). Under rootless engines this process seems to be root, and files
/// of the real root seem to belong to the overflow uid.
pub fn is_remote(config: &Config) -> bool {
    let us = effective_user();
    if us == 0 && !process::is_nested() {
        return false;
    }
    // Links are followed: rootless Docker's /run is a file system of its own, with links to what was in the host's.
    let owner = match config.state_dir.metadata() {
        Ok(dir) => Some(dir),
        // A user's /run of their own is no place for a state beside the host's.
        Err(_) if process::is_nested() && !process::is_of_a_system() => None,
        // The owner of the directory above it would create it.
        Err(_) => config.state_dir.ancestors().find_map(|dir| dir.symlink_metadata().ok()),
    };
    owner.is_none_or(|dir| dir.uid() != us)
}

/// The leases of a configuration, for an entry point. Whether they are local is decided once, by [`Leases::of`].
pub struct Leases<'a> {
    local: Local<'a>,
    /// Who is asked instead, if this process does not change the ledger itself.
    remote: Option<Remote<'a>>,
}

impl<'a> Leases<'a> {
    /// Decides whether this process changes the ledger itself.
    pub fn of(config: &'a Config) -> Self {
        Self { local: Local::for_engine(config), remote: is_remote(config).then_some(Remote { config }) }
    }

    /// Whether `sublet serve` has them.
    pub const fn are_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// `container` with the path at which its root filesystem can be read now. config.json may name a place where it is
    /// mounted only later.
    ///
    /// # Errors
    /// The root filesystem cannot be found. `sublet status --last-error` shows this.
    pub fn locate_rootfs(
        &self,
        container: Container,
        spec: &Value,
        bundle: &Path,
    ) -> Result<Container, AdmitError> {
        let rootfs = container_root::podman_root_filesystem(container.rootfs.clone(), spec, bundle)
            .map_err(AdmitError::from)
            .inspect_err(|error| self.record_refusal(&container.name(), error))?;
        Ok(Container { rootfs, ..container })
    }

    /// Takes a share for the container and edits `spec` for it.
    ///
    /// # Errors
    /// Any reason not to start the container. Nothing is then left behind, and `sublet status --last-error` shows the
    /// reason.
    pub fn admit(
        &self,
        candidate: &Candidate<'_>,
        source: &RequestSource,
        spec: &mut Value,
    ) -> Result<Admission, AdmitError> {
        let container = &candidate.container;
        let checked = oci::check_mount_namespace(spec).map_err(AdmitError::from);
        // It can see what another entry point has mounted.
        let state_dir = &self.local.config.state_dir;
        let checked = checked.and_then(|()| Ok(oci::check_uncovered(spec, &container.rootfs, state_dir)?));
        let admitted = checked.and_then(|()| match &self.remote {
            None => self.local.admit(candidate, source, spec),
            Some(remote) => remote.admit(candidate, source, spec),
        });
        admitted.inspect_err(|error| self.record_refusal(&container.name(), error))
    }

    /// Frees `lease`, whose container was never created.
    pub fn withdraw(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.free(lease, &self.local.store()?) };
        remote.ask_free(&Ask::Withdraw { lease: lease.clone() })
    }

    /// Frees the lease of an ended container once its cgroup is empty, then adjusts or ends its MPS server. Unknown ids are
    /// no error, because an end may be reported twice.
    ///
    /// # Errors
    /// The ledger cannot be read or written, or the container's processes do not end.
    pub fn end(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        self.remote.as_ref().map_or_else(|| self.local.end(lease), |remote| remote.end(lease))
    }

    /// Removes the leftovers of an ended container of a rootless user whose annotation has the lease `record`, whichever
    /// process has freed the lease. Those of root's containers are removed when their lease is freed.
    pub fn clear_after(&self, record: &str) {
        if let (Some(remote), Some(lease)) = (&self.remote, Lease::from_annotation(record)) {
            remote.clear_after(&lease);
        }
    }

    /// Frees the lease that `owner`, an engine that starts container `id` of `uid` again, still holds from a failed start.
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.abandon(uid, id, owner) };
        remote.abandon(id, owner)
    }

    /// Makes `owner` responsible for `lease` until it is bound. If `owner` ends without a container, or binding takes too
    /// long, the lease is freed.
    pub fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.hand_over(lease, owner) };
        remote.ask_done(&Ask::HandOver { lease: lease.clone(), owner: owner.pid })
    }

    /// Binds `lease` to its container, which now exists.
    ///
    /// # Errors
    /// The lease was freed or belongs to another container, so this container must not start. Or the ledger cannot be
    /// written.
    pub fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError> {
        let bound = match &self.remote {
            None => self.local.bind(lease, binding),
            Some(remote) => remote.bind(lease, binding),
        };
        bound.inspect_err(|error| self.record_refusal(&binding.id, error))
    }

    /// Marks the lease of container `id` (of `uid`) as ending. [`Leases::unmark`] restores its earlier state.
    pub fn mark_ending(&self, uid: u32, id: &str, record: &Path) -> Result<Option<LeaseId>, AdmitError> {
        match &self.remote {
            None => self.local.mark_ending(uid, id, record, Process::current().ok()),
            Some(remote) => remote.mark_ending(id, record),
        }
    }

    /// A failed delete leaves the lease as it was.
    pub fn unmark(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let Some(remote) = &self.remote else { return self.local.unmark(lease) };
        remote.ask_done(&Ask::Unmark { lease: lease.clone() })
    }

    /// Makes sure that the MPS daemon of which the container sees `public` answers.
    ///
    /// # Errors
    /// It does not answer and cannot be restarted at once.
    pub(super) fn enter(&self, public: &Path, id: &str, record: &Path) -> Result<(), AdmitError> {
        match &self.remote {
            None => Ok(mps::ensure_answering(public, self.local.config)?),
            Some(remote) => remote.enter(public, id, record),
        }
    }

    /// A new inventory, if the cached one is out of date.
    pub(super) fn new_inventory(&self) -> Result<Inventory, AdmitError> {
        self.remote.as_ref().map_or_else(|| refresh(self.local.config), Remote::new_inventory)
    }

    /// The ledger, if it may have leases that no config.json names; `None` if there cannot be any. No hook gives a share to
    /// a rootless container that already exists.
    pub(super) fn ledger_of_hooks(&self) -> Result<Option<Ledger>, AdmitError> {
        let may_be_there = self.remote.is_none() && ledger::is_there(&self.local.config.state_dir);
        if may_be_there { Ok(Some(read(&self.local.store()?)?)) } else { Ok(None) }
    }

    /// Records that `container` was refused, for `sublet status --last-error`. A lost record is no reason to fail,
    /// because the caller reports the error itself.
    pub(super) fn record_refusal(&self, container: &str, error: &AdmitError) {
        match &self.remote {
            None => last_refusals::record(container, error, self.local.config),
            Some(remote) => remote.record_refusal(container, error),
        }
    }
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
