//! The columns of devices and of containers, and what stands in them.

use super::columns::Column;
use super::history::{self, Trace, fraction, memory_of};
use super::skin::Skin;
use super::view::{DeviceRow, Sort};
use crate::shown::lease::{busy, called, cut, memory, mode, whole};
use crate::shown::{self, end_of};
use crate::status::{DeviceUsed, LeaseOnDevice, Room, Status};
use sublet_core::text::{LONGEST_NAME, safe};

/// The length of a bar.
const BAR: usize = 10;

/// The column of the sparkline.
pub const DEVICE_TRACE: usize = 11;
pub const LEASE_TRACE: usize = 11;

const DEVICE_COLUMNS: [Column; 12] = [
    Column::new("GPU", 6, 0),
    Column::new("NAME", 12, 7).up_to(24),
    Column::new("MODE", 10, 6),
    Column::new("MEMORY", 10, 4),
    Column::new("USED", 9, 0),
    Column::new("OF", 9, 3),
    Column::new("BUSY", 5, 0),
    Column::new("SM", 5, 8),
    Column::new("POWER", 9, 1),
    Column::new("PCIE/S", 17, 9),
    Column::new("NVLINK/S", 17, 10),
    Column::new("", 9, 2).up_to(120),
];

pub const LEASE_COLUMNS: [Column; 12] = [
    Column::new("CONTAINER", 12, 0).up_to(32),
    Column::new("GPU", 5, 0),
    Column::new("MODE", 12, 6),
    Column::new("SM", 8, 3),
    Column::new("BUSY", 12, 1),
    Column::new("", 10, 4),
    Column::new("MEMORY", 21, 0),
    Column::new("PROC", 4, 7),
    Column::new("USER", 8, 8).up_to(16),
    Column::new("IMAGE", 20, 10).up_to(32),
    Column::new("STATE", 7, 9),
    Column::new("", 9, 2).up_to(120),
];

/// The columns by which a click on the title sorts.
pub const LEASE_SORTS: [(usize, Sort); 4] =
    [(0, Sort::Name), (1, Sort::Gpu), (4, Sort::Load), (6, Sort::Memory)];

pub fn device_columns(trace: Trace) -> [Column; 12] {
    with_trace(DEVICE_COLUMNS, DEVICE_TRACE, trace)
}

/// `columns` with a title for the sparkline, which is number `at`.
pub fn with_trace(mut columns: [Column; 12], at: usize, trace: Trace) -> [Column; 12] {
    columns[at].title = if trace == Trace::Load { "PAST BUSY" } else { "PAST MEM" };
    columns
}

/// The cells of a device.
pub fn device(row: &DeviceRow<'_>, spark: String, skin: Skin) -> Vec<String> {
    let shown = match row {
        DeviceRow::Gpu(gpu) => Device {
            number: gpu.index.to_string(),
            name: safe(&gpu.name),
            mode: state(gpu.mode, gpu.drained),
            memory_bytes: gpu.memory_bytes,
            booked: (gpu.mode != "mig").then_some(gpu.booked),
            used: gpu.used.as_ref(),
            memory_with: None,
        },
        DeviceRow::Mig(part, is_last) => Device {
            number: format!("{}{}", branch(skin, *is_last), part.number),
            name: safe(&part.profile),
            mode: state(if part.fault.is_some() { "unusable" } else { part.mode }, part.drained),
            memory_bytes: part.memory_bytes,
            booked: Some(part.booked),
            used: part.used.as_ref(),
            memory_with: part.shares_memory_with.first().filter(|first| **first < part.number),
        },
    };
    shown.cells(spark, skin)
}

struct Device<'a> {
    number: String,
    name: String,
    mode: String,
    memory_bytes: u64,
    booked: Option<Room>,
    used: Option<&'a DeviceUsed>,
    /// The compute instance whose row shows the memory that both use.
    memory_with: Option<&'a String>,
}

impl Device<'_> {
    fn cells(self, spark: String, skin: Skin) -> Vec<String> {
        let used = self.used.and_then(|used| used.memory_bytes);
        let memory = |bytes| fraction(bytes, self.memory_bytes);
        let (bar, amount, of) = match self.memory_with {
            Some(first) => (String::new(), format!("as {first}"), String::new()),
            None => (
                skin.bar(used.map(memory), self.booked.map(|booked| memory(booked.memory_bytes)), BAR),
                used.map_or_else(|| "-".to_owned(), shown::memory),
                shown::memory(self.memory_bytes),
            ),
        };
        let percent =
            |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} %"));
        let rates = |of: fn(&DeviceUsed) -> [Option<f64>; 2]| {
            self.used.map_or_else(|| "-".to_owned(), |used| both(of(used)))
        };
        vec![
            self.number,
            self.name,
            self.mode,
            bar,
            amount,
            of,
            percent(self.used.and_then(|used| used.busy_percent).map(f64::from)),
            percent(self.used.and_then(|used| used.sm_percent)),
            self.used.map_or_else(|| "-".to_owned(), power),
            rates(|used| used.pcie_bytes_per_second),
            rates(|used| used.nvlink_bytes_per_second),
            spark,
        ]
    }
}

fn branch(skin: Skin, is_last: bool) -> &'static str {
    match (skin.utf8, is_last) {
        (true, false) => "├ ",
        (true, true) => "└ ",
        (false, false) => "|-",
        (false, true) => "`-",
    }
}

fn state(mode: &str, drained: bool) -> String {
    if drained { format!("{mode}, drained") } else { mode.to_owned() }
}

/// Watts, and the limit.
pub fn power(used: &DeviceUsed) -> String {
    match (used.power_watts, used.power_limit_watts) {
        (Some(watts), Some(limit)) => format!("{watts:.0}/{limit:.0} W"),
        (Some(watts), None) => format!("{watts:.0} W"),
        (None, _) => "-".to_owned(),
    }
}

/// Transmitted and received, as `1.2 GB + 3 MB`.
pub fn both([out, into]: [Option<f64>; 2]) -> String {
    match (out, into) {
        (None, None) => "-".to_owned(),
        (out, into) => format!("{} + {}", rate(out), rate(into)),
    }
}

fn rate(bytes: Option<f64>) -> String {
    match bytes {
        None => "-".to_owned(),
        Some(bytes) if bytes >= 1e9 => format!("{:.1} GB", bytes / 1e9),
        Some(bytes) if bytes >= 1e6 => format!("{:.0} MB", bytes / 1e6),
        Some(bytes) => format!("{:.0} kB", bytes / 1e3),
    }
}

/// How full a device is.
pub fn pressure_of_device(row: &DeviceRow<'_>) -> Option<f64> {
    let (used, memory) = match row {
        DeviceRow::Gpu(gpu) => (gpu.used.as_ref(), gpu.memory_bytes),
        DeviceRow::Mig(part, _) => (part.used.as_ref(), part.memory_bytes),
    };
    used.and_then(|used| used.memory_bytes).map(|used| fraction(used, memory))
}

/// How near a container is to its limit.
pub fn pressure_of_lease(lease: &LeaseOnDevice, status: &Status) -> Option<f64> {
    lease.used.memory_bytes.zip(memory_of(status, lease)).map(|(used, whole)| fraction(used, whole))
}

/// The cells of a container.
pub fn lease(lease: &LeaseOnDevice, status: &Status, spark: String, skin: Skin) -> Vec<String> {
    let image = lease.image.as_deref().map(|image| end_of(&safe(image), LONGEST_NAME));
    vec![
        called(lease),
        status.number(&lease.device).into_owned(),
        mode(lease, status),
        lease.sm_percent.map_or_else(|| whole(lease), |percent| format!("{percent} %")),
        busy(lease),
        skin.bar(pressure_of_lease(lease, status), None, BAR),
        memory(lease),
        lease.used.processes.map_or_else(|| "-".to_owned(), |processes| processes.to_string()),
        cut(&lease.user),
        image.unwrap_or_else(|| "-".to_owned()),
        shown::word(&lease.state),
        spark,
    ]
}

/// Percent, or a dash.
pub fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} %"))
}

/// What a device computes, for its details.
pub fn load(used: &DeviceUsed) -> String {
    percent(history::load(used))
}
