//! The table of leases and the containers that hold them.

use super::tables::{self, Column};
use crate::names::Name;
use crate::shown::lease::{busy, called, cut, memory, mode, whole};
use crate::shown::word;
use crate::status::{LeaseOnDevice, Status};
use sublet_core::ledger::Lease;
use sublet_core::text::{LONGEST_NAME, safe, short_id};

/// The columns. Those with the highest number go first where a terminal is too narrow for all of them.
const COLUMNS: [Column; 13] = [
    Column("CONTAINER", 0),
    Column("IMAGE", 8),
    Column("USER", 6),
    Column("GPU", 0),
    Column("MODE", 1),
    Column("SM", 0),
    Column("BUSY", 2),
    Column("MEMORY", 0),
    Column("PROCESSES", 7),
    Column("STATE", 3),
    Column("PID", 9),
    Column("AGE", 5),
    Column("LEASE", 4),
];

/// The table, no wider than `width` characters as far as columns can be left out; a line where there is no lease.
pub fn table(status: &Status, width: Option<usize>) -> String {
    if status.leases.is_empty() {
        return "No leases.".to_owned();
    }
    let rows: Vec<_> = status.leases.iter().map(|lease| row(lease, status)).collect();
    tables::fitting(&COLUMNS, &rows, width)
}

fn row(lease: &LeaseOnDevice, status: &Status) -> Vec<String> {
    let or_dash =
        |text: Option<String>| text.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    let image = lease.image.as_deref().map(|image| tables::end_of(&safe(image), LONGEST_NAME));
    vec![
        called(lease),
        or_dash(image),
        lease.user.clone(),
        status.number(&lease.device).into_owned(),
        mode(lease, status),
        lease.sm_percent.map_or_else(|| whole(lease), |sm| format!("{sm} %")),
        busy(lease),
        memory(lease),
        or_dash(lease.used.processes.map(|processes| processes.to_string())),
        word(&lease.state),
        or_dash(lease.pid.map(|pid| pid.to_string())),
        tables::ago(lease.taken),
        lease.id.clone(),
    ]
}

/// The same of a lease in the ledger.
pub fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(|| short_id(&lease.container.name()), |called| cut(called))
}
