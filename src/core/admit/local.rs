//! Leases whose state is on this host's disk: changes and frees them, and adjusts everything that depends on them:
//! MPS daemons, mount points, MIG instances. Also removes mount points that were left by a container whose lease is already
//! freed, or that never started.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::AdmitError;
use crate::config::Config;
use crate::fs::parse_json;
use crate::ledger::{
    Binding, Container, DaemonKey, Freed, LEASE_RECORD_ANNOTATION, Lease, LeaseId, Ledger, LedgerError,
    Leftover, Scan, Store,
};
use crate::mps::Lowering;
use crate::oci::{JsonFile, container_root};
use crate::process::{Process, sublet};
use crate::{ledger, log, mps, oci};

/// The time limit of `sublet mig clear`. MPS daemons and changes by other processes end first.
const CLEAR_LIMIT: Duration = Duration::from_secs(60);

/// Work that a thread which must not wait has left to another thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutOff {
    /// An instance would have to be created. This thread answered without one.
    pub make: bool,
    /// An instance has to be destroyed.
    pub clear: bool,
}

/// The state, and how this process changes it.
#[derive(Clone, Copy)]
pub struct Local<'a> {
    pub(super) config: &'a Config,
    /// Where MIG instances are not created and destroyed here, however long the driver takes, but by another thread: its
    /// orders.
    pub(super) put_off: Option<&'a Cell<PutOff>>,
    pub(super) lowering: Lowering,
}

/// The findings and changes of [`Local::reconcile`].
#[derive(Debug)]
pub struct Reconciled {
    /// Leases whose containers were gone.
    pub freed: Freed,
    /// Messages about the rest and its failures, one line each.
    pub lines: Vec<String>,
}

impl<'a> Local<'a> {
    /// With MIG instances created and destroyed at once.
    pub const fn new(config: &'a Config) -> Self {
        Self { config, put_off: None, lowering: Lowering::Now }
    }

    /// For an entry point, for which an engine waits: work that can be done later is left to another process.
    pub(super) const fn for_engine(config: &'a Config) -> Self {
        Self { config, put_off: None, lowering: Lowering::Apart }
    }

    /// Without creating or destroying MIG instances, which may take long. `put_off` records that work.
    pub const fn putting_off(config: &'a Config, put_off: &'a Cell<PutOff>) -> Self {
        Self { config, put_off: Some(put_off), lowering: Lowering::Now }
    }

    pub(super) fn store(&self) -> Result<Store, LedgerError> {
        Store::open(&self.config.state_dir)
    }

    /// Frees the leases of ended containers, applies `change` to the ledger, and repairs everything that depends on
    /// leases: restarts crashed MPS daemons, ends unneeded ones, and removes leftovers.
    pub fn reconcile(
        &self,
        change: impl FnOnce(&mut Ledger) -> std::io::Result<()>,
    ) -> Result<Reconciled, LedgerError> {
        let store = self.store()?;
        let (changed, freed) = store.update(change)?;
        self.clean_up(&freed, &store);
        let healed = mps::heal(&store, self.config);
        // Not before: what starts a daemon again frees leases, too.
        clear_leftovers(&store);
        self.destroy_unneeded(&store);
        let failed = changed.err().map(|error| error.to_string());
        Ok(Reconciled { freed, lines: failed.into_iter().chain(healed).collect() })
    }

    /// Applies `change` to the ledger, and cleans up after leases whose containers have ended.
    pub fn update<R>(&self, change: impl FnOnce(&mut Ledger) -> R) -> Result<R, LedgerError> {
        let store = self.store()?;
        let (done, freed) = store.change(change)?;
        self.clean_up(&freed, &store);
        Ok(done)
    }

    /// Removes `lease` from the ledger and cleans up after it.
    pub(super) fn free(&self, lease: &LeaseId, store: &Store) -> Result<(), AdmitError> {
        let (cleared, _) = clear_before_freeing(lease, store, true);
        let (removed, mut freed) = store.change_with_scan(Scan::None, |ledger| {
            let removed = ledger.remove(lease);
            ledger.forget(&cleared);
            removed
        })?;
        freed.extend(removed);
        self.clean_up(&freed, store);
        if freed.is_empty() {
            self.finish_pending(&read(store)?, store);
        }
        Ok(())
    }

    /// [`Local::clear_pending`], and ends unneeded daemons: not every command that frees a lease does so.
    pub(super) fn finish_pending(&self, ledger: &Ledger, store: &Store) {
        self.clear_pending(ledger, store);
        log::warn(mps::end_overdue(store, self.config));
    }

    /// [`Local::free`] for when another error is already being reported to the user.
    pub(super) fn free_or_warn(&self, lease: &Lease, store: &Store) {
        if let Err(error) = self.free(&lease.id, store) {
            tracing::warn!(
                "lease {} could not be freed yet: {error}; the next sublet command frees it",
                lease.id
            );
        }
    }

    /// Clears the leftovers and instances in `ledger`. The command that freed their lease may be too late for that, or be
    /// killed.
    pub(super) fn clear_pending(&self, ledger: &Ledger, store: &Store) {
        if !ledger.clearable().is_empty() {
            clear_leftovers(store);
        }
        if ledger.has_unneeded() {
            self.destroy_unneeded(store);
        }
    }

    /// After leases were freed: adjusts or ends their MPS servers, removes the mount points that they left in a rootfs
    /// and the files that a killed shim left in a bundle, and destroys MIG instances that were created for them.
    pub(super) fn clean_up(&self, freed: &Freed, store: &Store) {
        if freed.is_empty() {
            return;
        }
        self.settle(freed, store);
        self.destroy_unneeded(store);
    }

    /// [`Local::clean_up`] without changes of the MIG layout.
    pub fn settle(&self, freed: &Freed, store: &Store) {
        clear_leftovers(store);
        let served: BTreeSet<&DaemonKey> = freed.iter().filter_map(|lease| lease.daemon.as_ref()).collect();
        for key in served {
            let settled = mps::settle(key, store, self.config, self.lowering);
            let _ = settled.inspect_err(|error| tracing::warn!("{error}"));
        }
    }

    /// Whether the work is put off. `note` then records it.
    pub(super) fn puts_off(&self, note: impl FnOnce(&mut PutOff)) -> bool {
        let Some(cell) = self.put_off else { return false };
        let mut put_off = cell.get();
        note(&mut put_off);
        cell.set(put_off);
        true
    }

    /// Destroys dynamic instances that no lease needs any more. The next command tries again with the rest.
    pub fn destroy_unneeded(&self, store: &Store) {
        let has_unneeded = store.read().is_ok_and(|ledger| ledger.has_unneeded());
        if !has_unneeded || self.puts_off(|put_off| put_off.clear = true) {
            return;
        }
        match sublet::run(&["mig", "clear"], CLEAR_LIMIT) {
            Ok(warnings) => log::warn(warnings),
            Err(error) => tracing::warn!("{error}"),
        }
    }

    /// As [`super::Leases::mark_ending`], where `deleter` deletes the container.
    pub fn mark_ending(
        &self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
    ) -> Result<Option<LeaseId>, AdmitError> {
        let store = self.store()?;
        // This is read in any namespace, because containers without a share must not fail. With a share, the change below is
        // refused.
        let ledger = store.peek().or_else(|_| read(&store))?;
        let Some(lease) = ledger.find_by_record(uid, id, record) else {
            self.clear_pending(&ledger, &store);
            return Ok(None);
        };
        let lease = &lease.id;
        // In other namespaces the container may only seem to have ended.
        let cleared = ledger.is_of_here().then(|| clear_before_freeing(lease, &store, false));
        let (cleared, has_ended) = cleared.unwrap_or_default();
        // Leftovers of the lease that were removed already are forgotten. That its container has ended need not be seen twice.
        let scan = if has_ended { Scan::None } else { Scan::Brief };
        let ((marked, gone), mut freed) = store.change_with_scan(scan, |ledger| {
            let gone = if has_ended { ledger.remove(lease) } else { None };
            ledger.forget(&cleared);
            (ledger.mark_ending(uid, id, record, deleter), gone)
        })?;
        freed.extend(gone);
        if marked.is_none() && freed.is_empty() {
            // Another command has freed the lease meanwhile, and may still have to clear.
            self.clear_pending(&read(&store)?, &store);
        }
        self.clean_up(&freed, &store);
        Ok(marked)
    }

    pub(super) fn end(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let store = self.store()?;
        let ledger = read(&store)?;
        let Some(held) = ledger.lease(lease).cloned() else {
            self.finish_pending(&ledger, &store);
            return Ok(());
        };
        self.await_end(&held, &store)?;
        self.free(lease, &store)
    }

    /// As [`super::Leases::abandon`].
    pub fn abandon(&self, uid: u32, id: &str, owner: Process) -> Result<(), AdmitError> {
        let store = self.store()?;
        if read(&store)?.abandon(uid, id, owner).is_empty() {
            return Ok(());
        }
        let (abandoned, mut freed) =
            store.change_with_scan(Scan::Brief, |ledger| ledger.abandon(uid, id, owner))?;
        freed.extend(abandoned);
        self.clean_up(&freed, &store);
        Ok(())
    }

    /// As [`super::Leases::hand_over`].
    pub fn hand_over(&self, lease: &LeaseId, owner: Process) -> Result<(), AdmitError> {
        self.store()?.change_with_scan(Scan::None, |ledger| ledger.hand_over(lease, owner))?;
        Ok(())
    }

    pub(super) fn bind(&self, lease: &LeaseId, binding: &Binding) -> Result<(), AdmitError> {
        Ok(self.store()?.update_with_scan(Scan::None, |ledger| ledger.bind(lease, binding))?.0?)
    }

    /// As [`super::Leases::unmark`].
    pub fn unmark(&self, lease: &LeaseId) -> Result<(), AdmitError> {
        let store = self.store()?;
        let ((), freed) = store.change_with_scan(Scan::Brief, |ledger| ledger.unmark_ending(lease))?;
        self.clean_up(&freed, &store);
        Ok(())
    }
}

pub(super) fn is_same_container(a: &Container, b: &Container) -> bool {
    (a.uid, &a.id, &a.bundle) == (b.uid, &b.id, &b.bundle)
}

/// Removes the mount points that the runtime created in the root filesystem of a container that [`super::Leases::bind`]
/// refused. The runtime now gives the container up and runs no poststop hook, and the process that freed the lease
/// looked before the files existed. Errors are ignored, because the container does not start in any case.
pub fn clear_refused(bundle: &Path, config: &Config) {
    let spec = JsonFile::read(&bundle.join("config.json")).and_then(|file| file.parse()).unwrap_or_default();
    let Some(root) = spec.pointer("/root/path").and_then(Value::as_str) else { return };
    let Ok(root) = bundle.join(root).canonicalize() else { return };
    let rootfs = container_root::podman_root_filesystem(root, &spec, bundle);
    let lease = spec["annotations"][LEASE_RECORD_ANNOTATION].as_str().and_then(Lease::from_annotation);
    let (Ok(rootfs), Some(lease)) = (rootfs, lease) else { return };
    if !may_be_in_use(&rootfs, &lease, config) {
        oci::cleanup_mount_points(&rootfs, &lease.mount_points);
        clear_volumes(&lease, config);
    }
}

/// Removes the mount points that the runtime created in volumes of the container that had `lease`, unless another lease
/// has a volume on the same file system.
pub(super) fn clear_volumes(lease: &Lease, config: &Config) {
    let volumes = lease.volumes_with_files();
    if volumes.is_empty() {
        return;
    }
    let Some(leases) = leases_beside(lease, config) else { return };
    let used: Vec<u64> = leases
        .iter()
        .flat_map(|lease| lease["volumes"].as_array().into_iter().flatten())
        .filter_map(|volume| volume["device"].as_u64())
        .collect();
    for volume in volumes.iter().filter(|volume| !used.contains(&volume.device)) {
        oci::clear_volume(volume);
    }
}

/// Whether a lease uses the root filesystem of the container that had `lease`.
pub(super) fn may_be_in_use(rootfs: &Path, lease: &Lease, config: &Config) -> bool {
    let uses = |other: &Value| other["container"]["rootfs"].as_str().map(Path::new) == Some(rootfs);
    leases_beside(lease, config).is_none_or(|leases| leases.iter().any(uses))
}

/// The leases whose containers may share the root filesystem or volumes of the container that had `lease`
/// ([`Lease::is_believed_by`]); `None`: unknown. Users who may not open the store may read the ledger's file.
fn leases_beside(lease: &Lease, config: &Config) -> Option<Vec<Value>> {
    let mut ledger: Value = parse_json(&ledger::read_text(&config.state_dir)).ok()?;
    let Value::Array(mut leases) = ledger["leases"].take() else { return None };
    let uid = u64::from(lease.container.uid);
    leases.retain(|other| other["brokered"] != true || other["container"]["uid"] == uid);
    Some(leases)
}

/// Removes the leftovers of `lease`'s container before the lease is freed, if the container has ended or `has_ended`, and
/// the leftovers that waited for it. Returns those that one change of the ledger can forget with the lease, and whether
/// the container is known to have ended. If this process is killed in between, the lease is still there, and the next
/// command does it again.
pub(super) fn clear_before_freeing(lease: &LeaseId, store: &Store, has_ended: bool) -> (Vec<Leftover>, bool) {
    let ended = Cell::new(has_ended);
    let left = |ledger: &Ledger| {
        let held = ledger.lease(lease);
        let left = held.map(|held| ledger.leftovers_of(held, ended.get())).unwrap_or_default();
        ended.set(ended.get() || !left.is_empty());
        left
    };
    (clear_locked(store, left).unwrap_or_default(), ended.get())
}

/// Removes the leftovers that `select` finds in the ledger, and returns those that may be forgotten; `None`: there are none.
///
/// The ledger is read again under `clearing.lock`: no file is removed where a container has got a lease meanwhile. (A start
/// waits for that lock once it has its lease.)
fn clear_locked(store: &Store, select: impl Fn(&Ledger) -> Vec<Leftover>) -> Option<Vec<Leftover>> {
    let read = || store.read().map(|ledger| select(&ledger)).unwrap_or_default();
    if read().is_empty() {
        return None;
    }
    let _alone = store
        .clearing()
        .inspect_err(|error| {
            tracing::warn!("what ended containers left is not removed yet: clearing.lock: {error}");
        })
        .ok()?;
    let clear = |left: Leftover| {
        crate::fs::sweep(&left.bundle);
        oci::clear(&left)
    };
    Some(read().into_iter().map(clear).collect())
}

/// Removes the leftovers of ended containers, and only then forgets them. If this process is killed in between, the next
/// `sublet` command or the next end of a container does the rest. A start does not, because it must be fast.
///
/// Some engines (containerd) unmount the root filesystem once the runtime has deleted the container, and then the files
/// can no longer be reached. So this is done before anything that takes time. A delete does it even if another command
/// has just freed the container's lease.
fn clear_leftovers(store: &Store) {
    let Some(clearable) = clear_locked(store, Ledger::clearable) else { return };
    let forgotten = store.change_with_scan(Scan::Brief, |ledger| ledger.forget(&clearable));
    let _ = forgotten.inspect_err(|error| tracing::warn!("{error}"));
}

/// Reads the ledger, after rebuilding it if it is unreadable.
pub fn read(store: &Store) -> Result<Ledger, LedgerError> {
    match store.read() {
        Err(LedgerError::Corrupt { .. }) => {
            store.change(|_| ())?;
            store.read()
        }
        read => read,
    }
}
