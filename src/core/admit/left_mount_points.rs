//! Removes mount points that were left by a container whose lease is already freed, or that never started.

use std::path::Path;

use serde_json::Value;

use crate::config::Config;
use crate::ledger::{self, LEASE_RECORD_ANNOTATION, Lease};
use crate::oci::podman_storage;
use crate::oci::{self, JsonFile};

/// Removes the mount points that the runtime created in the root filesystem of a container that [`super::Leases::bind`]
/// refused. The runtime now gives the container up and runs no poststop hook, and the process that freed the lease
/// looked before the files existed. Errors are ignored, because the container does not start in any case.
pub fn clear_refused(bundle: &Path, config: &Config) {
    let spec = JsonFile::read(&bundle.join("config.json")).and_then(|file| file.parse()).unwrap_or_default();
    let Some(root) = spec.pointer("/root/path").and_then(Value::as_str) else { return };
    let Ok(root) = bundle.join(root).canonicalize() else { return };
    let rootfs = podman_storage::root_filesystem(root, &spec, bundle);
    let record = spec.pointer("/annotations").and_then(|all| all.get(LEASE_RECORD_ANNOTATION));
    let lease = record.and_then(Value::as_str).and_then(Lease::from_annotation);
    let (Ok(rootfs), Some(lease)) = (rootfs, lease) else { return };
    if may_be_in_use(&rootfs, &lease, config) {
        return;
    }
    oci::cleanup_mount_points(&rootfs, &lease.mount_points);
    clear_volumes(&lease, config);
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
    volumes.iter().filter(|volume| !used.contains(&volume.device)).for_each(|volume| {
        oci::clear_volume(volume);
    });
}

/// Whether a lease uses the root filesystem of the container that had `lease`.
pub(super) fn may_be_in_use(rootfs: &Path, lease: &Lease, config: &Config) -> bool {
    let uses = |other: &Value| other["container"]["rootfs"].as_str().map(Path::new) == Some(rootfs);
    leases_beside(lease, config).is_none_or(|leases| leases.iter().any(uses))
}

/// The leases whose containers may share the root filesystem or volumes of the container that had `lease`
/// ([`Lease::is_believed_by`]); `None`: unknown. Users who may not open the store may read the ledger's file.
fn leases_beside(lease: &Lease, config: &Config) -> Option<Vec<Value>> {
    let mut ledger: Value = serde_json::from_slice(&ledger::read_text(&config.state_dir)).ok()?;
    let Value::Array(mut leases) = ledger["leases"].take() else { return None };
    let uid = u64::from(lease.container.uid);
    leases.retain(|other| other["brokered"] != true || other["container"]["uid"] == uid);
    Some(leases)
}
