//! For hooks that take a lease before the container exists: which process owns the lease until then, and
//! how it is bound.

use std::convert::Infallible;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{AdmitError, read, rootless, tidy};
use crate::apply::{self, JsonFile};
use crate::config::Config;
use crate::inventory;
use crate::ledger::{Binding, LEASE_RECORD_ANNOTATION, Lease, LeaseId, Store};
use crate::process::Process;
use crate::storage;

/// Gives up what `owner`, an engine that starts container `id` of `uid` anew, holds for it from a start
/// that came to nothing.
///
/// # Errors
/// The ledger cannot be read or written.
pub fn abandon(uid: u32, id: &str, owner: Process, config: &Config) -> Result<(), AdmitError> {
    if rootless::applies(config) {
        return rootless::abandon(id, owner, config);
    }
    let store = Store::open(&config.state_dir)?;
    if read(&store)?.abandon(uid, id, owner).is_empty() {
        return Ok(());
    }
    let (Ok(abandoned), mut freed) =
        store.update(|ledger| Ok::<_, Infallible>(ledger.abandon(uid, id, owner)))?;
    freed.extend(abandoned);
    tidy(&freed, &store, config);
    Ok(())
}

/// Makes `owner` answer for `lease` until it is bound: its end without a container, or too long a wait,
/// means that the lease is gone.
///
/// # Errors
/// The ledger cannot be written.
pub fn hand_over(lease: &LeaseId, owner: Process, config: &Config) -> Result<(), AdmitError> {
    if rootless::applies(config) {
        return rootless::hand_over(lease, owner, config);
    }
    let store = Store::open(&config.state_dir)?;
    let (Ok(()), freed) = store.update(|ledger| {
        ledger.hand_over(lease, owner);
        Ok::<_, Infallible>(())
    })?;
    tidy(&freed, &store, config);
    Ok(())
}

/// Binds `lease` to its container, which exists now.
///
/// # Errors
/// The lease is gone or another container's: this one must not start. Or the ledger cannot be written.
pub fn bind(lease: &LeaseId, binding: &Binding, config: &Config) -> Result<(), AdmitError> {
    let bound = if rootless::applies(config) {
        rootless::bind(lease, binding, config)
    } else {
        bind_here(lease, binding, config)
    };
    if let Err(error) = &bound {
        super::refusals::record(&binding.id, error, config);
    }
    bound
}

/// [`bind`] where the state is ours.
pub(super) fn bind_here(lease: &LeaseId, binding: &Binding, config: &Config) -> Result<(), AdmitError> {
    let store = Store::open(&config.state_dir)?;
    let (bound, freed) = store.update(|ledger| ledger.bind(lease, binding))?;
    tidy(&freed, &store, config);
    Ok(bound?)
}

/// Takes away what the runtime has made for our mounts in the root filesystem of a container that [`bind`]
/// stopped: it gives the container up now and runs no poststop hook, and whoever freed the lease looked
/// before the files were there. Trouble is passed over: the container does not start in any case.
pub fn clear_unbound(bundle: &Path, config: &Config) {
    let spec = JsonFile::read(&bundle.join("config.json")).and_then(|file| file.parse()).unwrap_or_default();
    let Some(root) = spec.pointer("/root/path").and_then(Value::as_str) else { return };
    let Ok(root) = bundle.join(root).canonicalize() else { return };
    let rootfs = storage::root_filesystem(root, &spec, bundle);
    let (Ok(rootfs), Ok(inventory)) = (rootfs, inventory::last(config)) else { return };
    if may_be_in_use(&rootfs, config) {
        return;
    }
    let ours = |mount: &&Value| {
        let source = mount["source"].as_str().map(Path::new);
        inventory.files.iter().any(|file| Some(file.source.as_path()) == source)
    };
    let mounts = spec["mounts"].as_array().into_iter().flatten().filter(ours);
    let points: Vec<PathBuf> =
        mounts.filter_map(|mount| mount["destination"].as_str().map(PathBuf::from)).collect();
    apply::cleanup_mount_points(&rootfs, &points);
    let record = spec.pointer("/annotations").and_then(|all| all.get(LEASE_RECORD_ANNOTATION));
    if let Some(lease) = record.and_then(Value::as_str).and_then(Lease::from_annotation) {
        clear_volumes(&lease, config);
    }
}

/// Takes away what the runtime has made for our mounts in volumes of the container that had `lease`, where no lease
/// has one of the same file system.
pub(super) fn clear_volumes(lease: &Lease, config: &Config) {
    let volumes = lease.made_in_volumes();
    if volumes.is_empty() {
        return;
    }
    let ledger: Value =
        serde_json::from_slice(&crate::ledger::written(&config.state_dir)).unwrap_or_default();
    let Some(leases) = ledger["leases"].as_array() else { return };
    let others: Vec<u64> = leases
        .iter()
        .flat_map(|lease| lease["volumes"].as_array().into_iter().flatten())
        .filter_map(|volume| volume["device"].as_u64())
        .collect();
    volumes.iter().filter(|volume| !others.contains(&volume.device)).for_each(apply::clear_volume);
}

/// Whether a lease has that root filesystem. Everybody may read the ledger, those too who may not open the
/// store.
fn may_be_in_use(rootfs: &Path, config: &Config) -> bool {
    let ledger: Value =
        serde_json::from_slice(&crate::ledger::written(&config.state_dir)).unwrap_or_default();
    let Some(leases) = ledger["leases"].as_array() else { return true };
    leases.iter().any(|lease| lease["container"]["rootfs"].as_str().map(Path::new) == Some(rootfs))
}
