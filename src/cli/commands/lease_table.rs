//! Leases and the containers that hold them: the table for people, the elements for machines.

use serde_json::{Value, json};

use super::tables::{self, Column};
use crate::names::{self, Name, Names};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Lease, LeaseState, Ledger};
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::safe;

/// The longest name and the longest image in the table, in characters.
const LONGEST: usize = 32;

/// The columns. Those with the highest number go first where a terminal is too narrow for all of them.
const COLUMNS: [Column; 11] = [
    Column("CONTAINER", 0),
    Column("IMAGE", 6),
    Column("USER", 4),
    Column("GPU", 0),
    Column("MODE", 1),
    Column("SM", 0),
    Column("MEMORY", 0),
    Column("STATE", 2),
    Column("PID", 5),
    Column("AGE", 3),
    Column("LEASE", 4),
];

/// One element per container and device, with the same lease id.
pub fn json(inventory: &Inventory, ledger: &Ledger, names: &Names) -> Value {
    let each = |lease: &Lease| -> Vec<Value> {
        lease.devices.iter().map(|device| element(lease, device, inventory, names.of(lease))).collect()
    };
    ledger.leases.iter().flat_map(each).collect()
}

fn element(lease: &Lease, device: &str, inventory: &Inventory, name: Option<&Name>) -> Value {
    let text = |of: fn(&Name) -> &String| name.map(of).filter(|text| !text.is_empty());
    json!({
        "id": lease.id,
        "container_id": lease.container.id,
        "device": device,
        "mode": lease.mode,
        "isolation": lease.isolation,
        "sm_percent": lease.sm.map(Percent::as_f64),
        "memory_bytes": lease.memory_bytes,
        "state": state(lease, device, inventory),
        "pid": lease.init.as_ref().map(|init| init.process.pid),
        "since": tables::timestamp(lease.since),
        "engine": name.and_then(|name| name.engine),
        "name": text(|name| &name.name),
        "image": text(|name| &name.image),
        "part_of": text(|name| &name.part_of),
        "unit": text(|name| &name.unit),
        "user": names::user(lease.container.uid),
    })
}

/// The table, no wider than `width` characters as far as columns can be left out; a line where there is no lease.
pub fn table(inventory: &Inventory, ledger: &Ledger, names: &Names, width: Option<usize>) -> String {
    if ledger.leases.is_empty() {
        return "No leases.".to_owned();
    }
    let each = |lease: &Lease| -> Vec<Vec<String>> {
        lease.devices.iter().map(|device| row(lease, device, inventory, names.of(lease))).collect()
    };
    tables::fitting(&COLUMNS, &ledger.leases.iter().flat_map(each).collect::<Vec<_>>(), width)
}

fn row(lease: &Lease, device: &str, inventory: &Inventory, name: Option<&Name>) -> Vec<String> {
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    vec![
        label(lease, name),
        or_dash(tables::end_of(&safe(name.map_or("", |name| &name.image)), LONGEST)),
        names::user(lease.container.uid),
        inventory.device(device).map_or_else(|| device.to_owned(), Device::number),
        mode(lease, inventory.device(device)),
        lease.sm.map_or_else(|| whole(lease, "no limit"), |sm| format!("{sm} %")),
        lease.memory_bytes.map_or_else(|| whole(lease, "no limit"), tables::memory),
        word(&state(lease, device, inventory)),
        lease.init.as_ref().map_or_else(|| "-".to_owned(), |init| init.process.pid.to_string()),
        tables::ago(lease.since),
        lease.id.to_string(),
    ]
}

/// What people call the container: its name; its service or unit where it has none; else its id.
pub fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(
        || tables::short(&lease.container.name()),
        |called| safe(&called.chars().take(LONGEST).collect::<String>()),
    )
}

/// The mode, with what of the device is the container's alone.
fn mode(lease: &Lease, device: Option<&Device>) -> String {
    match (lease.mode, lease.isolation) {
        (Mode::Mig, _) => device.map_or_else(|| "mig".to_owned(), |device| format!("mig {}", device.kind())),
        (mode, Isolation::Dedicated) if lease.daemon.is_some() => format!("{mode}, own MPS"),
        (mode, _) => mode.to_string(),
    }
}

/// What a container without a limit has: all of a device that nobody shares with it, else `shared`.
fn whole(lease: &Lease, shared: &str) -> String {
    let is_alone = matches!(lease.mode, Mode::Exclusive | Mode::Mig);
    if is_alone { "all".to_owned() } else { shared.to_owned() }
}

/// A lease whose device is gone is lost, whatever else it is.
fn state(lease: &Lease, device: &str, inventory: &Inventory) -> LeaseState {
    if inventory.device(device).is_some() { lease.state } else { LeaseState::Lost }
}

/// The word that stands for `value` in JSON.
pub fn word(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(str::to_owned)).unwrap_or_default()
}
