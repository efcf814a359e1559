//! The stored ledger and the lease in a container's annotation, as in tests/formats: reading and writing them gives the
//! same text.

use serde_json::Value;

use super::{LEASE_RECORD_ANNOTATION, Lease, Ledger};

fn again<T: serde::Serialize + serde::de::DeserializeOwned>(stored: &Value) -> Value {
    serde_json::to_value(serde_json::from_value::<T>(stored.clone()).unwrap()).unwrap()
}

#[test]
fn stored_ledgers_are_read_and_written_again_alike() {
    for stored in [
        include_str!("../../../tests/formats/gpus/ledger.json"),
        include_str!("../../../tests/formats/mig/ledger.json"),
        include_str!("../../../tests/formats/every-key/ledger.json"),
    ] {
        let stored: Value = serde_json::from_str(stored).unwrap();
        assert_eq!(again::<Ledger>(&stored), stored);
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
        // The annotation also names the ledger's directory.
        let mut lease_alone = record.clone();
        lease_alone.as_object_mut().unwrap().remove("state_dir");
        assert_eq!(again::<Lease>(&lease_alone), lease_alone);
    }
}
