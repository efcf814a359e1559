//! The table of leases and the containers that hold them.

use super::tables::{self, Cell};
use crate::names::Name;
use crate::shown::lease::{busy, called, cut, memory, mode, whole};
use crate::shown::word;
use crate::status::{LeaseOnDevice, Status};
use sublet_core::ledger::Lease;
use sublet_core::text::{LONGEST_NAME, safe, short_id};

/// The table, no wider than `width` characters as far as columns can be left out; a line where there is no lease.
pub fn table(status: &Status, width: Option<usize>) -> String {
    if status.leases.is_empty() {
        return "No leases.".to_owned();
    }
    tables::fitting_rows(status.leases.iter().map(|lease| row(lease, status)).collect(), width)
}

/// Those with the highest number go first where a terminal is too narrow for all of them.
fn row(lease: &LeaseOnDevice, status: &Status) -> [Cell; 13] {
    let or_dash =
        |text: Option<String>| text.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    let image = lease.image.as_deref().map(|image| tables::end_of(&safe(image), LONGEST_NAME));
    [
        ("CONTAINER", 0, called(lease)),
        ("IMAGE", 8, or_dash(image)),
        ("USER", 6, lease.user.clone()),
        ("GPU", 0, status.number(&lease.device).into_owned()),
        ("MODE", 1, mode(lease, status)),
        ("SM", 0, lease.sm_percent.map_or_else(|| whole(lease), |sm| format!("{sm} %"))),
        ("BUSY", 2, busy(lease)),
        ("MEMORY", 0, memory(lease)),
        ("PROCESSES", 7, or_dash(lease.used.processes.map(|processes| processes.to_string()))),
        ("STATE", 3, word(&lease.state)),
        ("PID", 9, or_dash(lease.pid.map(|pid| pid.to_string()))),
        ("AGE", 5, tables::ago(lease.taken)),
        ("LEASE", 4, lease.id.clone()),
    ]
}

/// The same of a lease in the ledger.
pub fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(|| short_id(&lease.container.name()), |called| cut(called))
}
