//! `ledger.json`, the lease in a container's annotation, and low-level runtimes' records of containers.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use sublet_core::ledger::{Lease, LeaseId, fuzzing};

fuzz_target!(|content: &[u8]| {
    fuzzing::records(content);
    let lease = std::str::from_utf8(content).ok().and_then(Lease::from_annotation);
    if let Some(lease) = lease {
        for state_dir in ["/run/sublet", "/elsewhere"].map(Path::new) {
            let text = lease.to_annotation(state_dir);
            assert_eq!(Lease::from_annotation(&text).as_ref(), Some(&lease));
        }
    }
    let Some(ledger) = sublet_fuzz::ok(fuzzing::ledger(content)) else { return };
    assert!(ledger.leases.iter().all(|lease| LeaseId::parse(lease.id.as_str()).is_some()));
    let written = serde_json::to_vec(&ledger).expect("it can be written");
    assert_eq!(fuzzing::ledger(&written), Ok(ledger));
});
