//! The table of GPUs and MIG devices: a line each, with what is used and booked.

use super::tables::{self, Column};
use crate::shown::bars::{bar, utf8};
use crate::shown::device::{Device, fraction};
use crate::status::{Room, Status};

/// The length of a bar, in characters.
const BAR: usize = 10;

/// The columns. Those with the highest number go first where a terminal is too narrow for all of them.
const COLUMNS: [Column; 11] = [
    Column("GPU", 0),
    Column("NAME", 3),
    Column("MODE", 1),
    Column("MEMORY", 4),
    Column("USED", 0),
    Column("BOOKED", 1),
    Column("OF", 2),
    Column("SM", 5),
    Column("BUSY", 1),
    Column("BOOKED", 2),
    Column("LEASES", 6),
];

/// The table, no wider than `width` characters as far as columns can be left out.
pub fn table(status: &Status, width: Option<usize>) -> String {
    let utf8 = utf8();
    let rows: Vec<_> = Device::all(&status.devices).map(|device| row(&device, utf8)).collect();
    tables::fitting(&COLUMNS, &rows, width)
}

fn row(device: &Device<'_>, utf8: bool) -> Vec<String> {
    let host = if device.part.is_none() && device.gpu.memory_of_host { ", host memory" } else { "" };
    // What keeps it from being served.
    let obstacle = match device.part {
        None => Some(device.gpu.health.state).filter(|state| *state != "ok").map(str::to_uppercase),
        Some(part) => part.fault.as_ref().map(|_| "unusable".to_owned()),
    };
    let dash = || "-".to_owned();
    let busy = device.used.and_then(|used| used.busy_percent);
    let used = device.used.and_then(|used| used.memory_bytes).map_or_else(dash, tables::memory);
    let of = tables::memory(device.memory_bytes);
    let [memory_bar, used, booked_memory, of] = match (device.memory_with(), device.own_bookings()) {
        (Some(first), _) => [String::new(), format!("as {first}"), String::new(), String::new()],
        (None, None) => [String::new(), used, dash(), of],
        (None, Some(booked)) => {
            let part = fraction(booked.memory_bytes, device.memory_bytes);
            let memory_bar = bar(device.memory_used(), Some(part), BAR, utf8);
            [memory_bar, used, tables::memory(booked.memory_bytes), of]
        }
    };
    let [sm_bar, booked_sm, leases] = match device.own_bookings() {
        None => [String::new(), dash(), dash()],
        Some(Room { sm_percent, .. }) => {
            let sm_bar = bar(busy.map(|busy| f64::from(busy) / 100.0), Some(sm_percent / 100.0), BAR, utf8);
            [sm_bar, format!("{sm_percent} %"), device.lease_count.to_string()]
        }
    };
    vec![
        format!("{}{}", device.branch(utf8), device.number),
        format!("{}{host}", device.name),
        device.state(obstacle.as_deref()),
        memory_bar,
        used,
        booked_memory,
        of,
        sm_bar,
        busy.map_or_else(dash, |busy| format!("{busy} %")),
        booked_sm,
        leases,
    ]
}
