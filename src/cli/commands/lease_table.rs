//! The table of leases and the containers that hold them.

use super::tables::{self, Column};
use crate::names::Name;
use crate::status::{LeaseOnDevice, Status};
use sublet_core::ledger::Lease;
use sublet_core::share::Mode;
use sublet_core::text::safe;

/// The longest name and the longest image in the table, in characters.
const LONGEST: usize = 32;

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
    let image = lease.image.as_deref().map(|image| tables::end_of(&safe(image), LONGEST));
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

/// What people call the container: its name; its service or unit where it has none; else its id.
fn called(lease: &LeaseOnDevice) -> String {
    let names = [&lease.name, &lease.part_of, &lease.unit];
    names.into_iter().flatten().next().map_or_else(|| tables::short(&lease.called), |name| cut(name))
}

/// The same of a lease in the ledger.
pub fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(|| tables::short(&lease.container.name()), |called| cut(called))
}

fn cut(name: &str) -> String {
    safe(&name.chars().take(LONGEST).collect::<String>())
}

/// The mode, with what of the device is the container's alone.
fn mode(lease: &LeaseOnDevice, status: &Status) -> String {
    let mut parts = status.devices.iter().flat_map(|gpu| &gpu.mig);
    match lease.mode {
        Mode::Mig => parts
            .find(|part| part.uuid == lease.device)
            .map_or_else(|| "mig".to_owned(), |part| format!("mig {}", part.profile)),
        mode if lease.own_server => format!("{mode}, own MPS"),
        mode => mode.to_string(),
    }
}

/// What a container without a limit may have: all of a device that nobody shares with it, else as much as it takes.
fn whole(lease: &LeaseOnDevice) -> String {
    let is_alone = matches!(lease.mode, Mode::Exclusive | Mode::Mig);
    if is_alone { "all".to_owned() } else { "no limit".to_owned() }
}

/// Used memory and its limit.
fn memory(lease: &LeaseOnDevice) -> String {
    let used = lease.used.memory_bytes.map_or_else(|| "-".to_owned(), tables::memory);
    format!("{used} / {}", lease.memory_bytes.map_or_else(|| whole(lease), tables::memory))
}

/// What it computes. The driver tells only what a shared MPS server's containers compute together.
fn busy(lease: &LeaseOnDevice) -> String {
    match (lease.used.sm_percent, lease.used.server_sm_percent) {
        (Some(own), _) => format!("{own} %"),
        (None, Some(all)) => format!("n/a of {all} %"),
        (None, None) => "-".to_owned(),
    }
}

/// The word that stands for `value` in JSON.
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}
