//! The stored ledger and the lease in a container's annotation, as in tests/formats: reading and writing them gives the
//! same text.

use std::path::Path;

use serde_json::Value;

use super::store::{ledger_text, parse_ledger};
use super::{Job, LEASE_RECORD_ANNOTATION, Lease, Ledger, MigChanges, MpsDaemon, Waiter};

#[test]
fn stored_ledgers_are_read_and_written_again_alike() {
    for stored in [
        include_str!("../../../tests/formats/gpus/ledger.json"),
        include_str!("../../../tests/formats/mig/ledger.json"),
        include_str!("../../../tests/formats/every-key/ledger.json"),
    ] {
        let mut ledger = parse_ledger(stored.as_bytes(), Path::new("")).unwrap();
        let again: Value = serde_json::from_slice(&ledger_text(&mut ledger).unwrap()).unwrap();
        assert_eq!(again, serde_json::from_str::<Value>(stored).unwrap());
    }
}

#[test]
fn leases_in_annotations_are_read_and_written_again_alike() {
    for stored in [
        include_str!("../../../tests/formats/gpus/annotations.json"),
        include_str!("../../../tests/formats/mig/annotations.json"),
    ] {
        let stored: Value = serde_json::from_str(stored).unwrap();
        let record = &stored[LEASE_RECORD_ANNOTATION];
        let lease = Lease::from_annotation(&record.to_string()).unwrap();
        assert_eq!(lease.id.as_str(), stored["sublet.lease"]);
        // The annotation also names the ledger's directory and its file system.
        let mut lease_alone = record.clone();
        for key in ["state_dir", "state_fs"] {
            lease_alone.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(serde_json::to_value(lease).unwrap(), lease_alone);
    }
}

/// Whether something in the fixture has the key, for every key that may be missing.
fn has_all(keys: &[bool]) {
    assert!(keys.iter().all(|has| *has), "{keys:?}");
}

/// Which keys of a lease that may be missing it has.
fn lease_keys(lease: Lease) -> [bool; 21] {
    let Lease {
        id: _,
        container: _,
        devices: _,
        mig_devices,
        mode: _,
        isolation: _,
        daemon,
        sm,
        memory_bytes,
        processes: _,
        priority: _,
        guard,
        suspend,
        suspension,
        known,
        resumed_ms,
        backoff,
        state: _,
        owner: _,
        init,
        bind_by,
        since: _,
        library_dir,
        mount_points,
        volumes,
        brokered,
        job,
        within,
        claimed_owner,
    } = lease;
    let step = job.as_ref().and_then(|Job { id: _, step, uid: _, cgroup_inode: _ }| step.as_ref());
    [
        !mig_devices.is_empty(),
        daemon.is_some(),
        sm.is_some(),
        memory_bytes.is_some(),
        guard.is_some(),
        !suspend.is_never(),
        suspension.is_some(),
        !known.is_empty(),
        suspension.as_ref().is_some_and(|own| own.on_demand),
        resumed_ms.is_some(),
        backoff.is_some(),
        init.is_some(),
        bind_by.is_some(),
        library_dir.is_some(),
        !mount_points.is_empty(),
        !volumes.is_empty(),
        brokered,
        step.is_some(),
        job.is_some(),
        within.is_some(),
        claimed_owner.is_some(),
    ]
}

/// A key that is missing here does not compile. Before you add one: tests/formats/README.md, "A new key".
#[test]
fn every_key_is_in_the_fixture() {
    let text = include_str!("../../../tests/formats/every-key/ledger.json");
    let Ledger {
        schema: _,
        boot_id: _,
        namespaces,
        leases,
        daemons,
        compute_modes,
        drained,
        drains,
        unexplained,
        lost,
        leftovers,
        mount_point_lists: _,
        mig: MigChanges { count: _, under_way, dynamic_instances },
        keeper,
        waiters,
    } = parse_ledger(text.as_bytes(), Path::new("")).unwrap();
    has_all(&[namespaces.is_some(), lost, under_way.is_some(), keeper.is_some()]);
    has_all(&[
        !compute_modes.is_empty(),
        !drained.is_empty(),
        drains.iter().any(|drain| !drain.reason.is_empty() && !drain.by.is_empty() && drain.until.is_some()),
        !unexplained.is_empty(),
        !leftovers.is_empty(),
    ]);
    assert!(!dynamic_instances.is_empty());
    let has = |seen: fn(&Waiter) -> bool| waiters.iter().any(seen);
    has_all(&[has(|waiter| waiter.process.is_some()), has(|waiter| waiter.retry.is_some())]);
    has_all(&[has(|waiter| waiter.until.is_some()), has(|waiter| waiter.rule.is_some())]);
    let mut seen = [false; 21];
    for lease in leases {
        seen.iter_mut().zip(lease_keys(lease)).for_each(|(seen, has)| *seen |= has);
    }
    has_all(&seen);
    let (mut idle, mut left) = (false, false);
    for daemon in daemons {
        let MpsDaemon {
            key: _,
            devices: _,
            process: _,
            state: _,
            default_limits: _,
            answered_at: _,
            idle_since,
            mode_left,
        } = daemon;
        idle |= idle_since.is_some();
        left |= mode_left;
    }
    has_all(&[idle, left]);
}
