//! The columns of devices and of containers, and what stands in them.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

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
    let mut shown = Device::of(row);
    if let DeviceRow::Mig(part, is_last) = row {
        shown.number.insert_str(0, branch(skin, *is_last));
        if part.fault.is_some() {
            shown.mode = state("unusable", part.drained);
        }
    }
    shown.cells(spark, skin)
}

/// What a GPU and a MIG device have both.
pub struct Device<'a> {
    pub number: String,
    pub name: String,
    pub mode: String,
    pub memory_bytes: u64,
    pub booked: Option<Room>,
    pub used: Option<&'a DeviceUsed>,
    /// The compute instance whose row shows the memory that both use.
    memory_with: Option<&'a String>,
}

impl<'a> Device<'a> {
    pub fn of(row: &DeviceRow<'a>) -> Self {
        match row {
            DeviceRow::Gpu(gpu) => Self {
                number: gpu.index.to_string(),
                name: safe(&gpu.name),
                mode: state(gpu.mode, gpu.drained),
                memory_bytes: gpu.memory_bytes,
                booked: (gpu.mode != "mig").then_some(gpu.booked),
                used: gpu.used.as_ref(),
                memory_with: None,
            },
            DeviceRow::Mig(part, _) => Self {
                number: part.number.clone(),
                name: safe(&part.profile),
                mode: state(part.mode, part.drained),
                memory_bytes: part.memory_bytes,
                booked: Some(part.booked),
                used: part.used.as_ref(),
                memory_with: part.shares_memory_with.first().filter(|first| **first < part.number),
            },
        }
    }

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

// Rows of columns that fit into a width. The least important columns are left out, and one column takes the remaining
// width.

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub title: &'static str,
    /// In characters.
    pub width: u16,
    /// How soon it is left out; 0: never.
    pub rank: u8,
    /// As wide as it may become where there is room.
    pub most: u16,
}

impl Column {
    pub const fn new(title: &'static str, width: u16, rank: u8) -> Self {
        Self { title, width, rank, most: width }
    }

    pub const fn up_to(self, most: u16) -> Self {
        Self { most, ..self }
    }
}

/// The columns that are shown: the number of each, where it begins and how wide it is.
#[derive(Clone, Debug)]
pub struct Fitted(pub Vec<(usize, u16, u16)>);

/// The columns that fit into `width` with a blank between them. Remaining width goes to the first column that may grow,
/// then to the next.
pub fn fit(columns: &[Column], width: u16) -> Fitted {
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    let total = |kept: &[usize]| {
        let widths: u16 = kept.iter().map(|&at| columns[at].width).sum();
        widths + u16::try_from(kept.len().saturating_sub(1)).unwrap_or(u16::MAX)
    };
    while total(&kept) > width {
        let least = kept.iter().copied().filter(|&at| columns[at].rank > 0);
        let Some(least) = least.max_by_key(|&at| columns[at].rank) else { break };
        kept.retain(|&at| at != least);
    }
    let mut left = width.saturating_sub(total(&kept));
    let mut x = 0;
    let place = |&at: &usize| {
        let more = left.min(columns[at].most - columns[at].width);
        left -= more;
        let placed = (at, x, columns[at].width + more);
        x += placed.2 + 1;
        placed
    };
    Fitted(kept.iter().map(place).collect())
}

impl Fitted {
    /// How wide column `number` is; 0 where it is left out.
    pub fn width(&self, number: usize) -> usize {
        self.0.iter().find(|(at, ..)| *at == number).map_or(0, |(_, _, width)| usize::from(*width))
    }

    /// Writes one row at the top of `area`.
    pub fn write(&self, cells: &[String], style: Style, area: Rect, skin: Skin, buffer: &mut Buffer) {
        if area.height == 0 {
            return;
        }
        buffer.set_style(Rect { height: 1, ..area }, style);
        for &(at, x, width) in &self.0 {
            let width = width.min(area.width.saturating_sub(x));
            if let (Some(cell), true) = (cells.get(at), width > 0) {
                skin.put(buffer, area.x + x, area.y, cell, usize::from(width), style);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_least_goes_first_and_what_is_left_is_used() {
        let columns = [Column::new("A", 4, 0), Column::new("B", 6, 1), Column::new("C", 5, 2).up_to(20)];
        let fitted = |width| fit(&columns, width).0;
        assert_eq!(fitted(17), [(0, 0, 4), (1, 5, 6), (2, 12, 5)]);
        assert_eq!(fitted(30), [(0, 0, 4), (1, 5, 6), (2, 12, 18)]);
        assert_eq!(fitted(100), [(0, 0, 4), (1, 5, 6), (2, 12, 20)]);
        assert_eq!(fitted(16), [(0, 0, 4), (1, 5, 6)]);
        assert_eq!(fitted(3), [(0, 0, 4)], "what never goes is cut when it is written");
    }
}
