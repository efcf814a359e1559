//! The columns of devices and of containers, and what stands in them.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::history::Trace;
use super::skin::Skin;
use super::view::Sort;
use crate::shown::{self, Device, Words, bar, fraction};
use crate::status::DeviceUsed;
use sublet_core::text::safe;

/// The length of a bar.
const BAR: usize = 10;

/// The column of the sparkline, of devices and of containers.
pub const TRACE: usize = 11;

pub const DEVICE_COLUMNS: [Column; 12] = [
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
    [(0, Sort::Name), (1, Sort::Gpu), (4, Sort::Busy), (6, Sort::Memory)];

/// `columns` with a title for the sparkline.
pub fn with_trace(mut columns: [Column; 12], trace: Trace) -> [Column; 12] {
    columns[TRACE].title = if trace == Trace::Load { "PAST BUSY" } else { "PAST MEM" };
    columns
}

/// The cells of a device.
pub fn device(device: &Device<'_>, spark: String, skin: Skin) -> Vec<String> {
    let used = device.used.and_then(|used| used.memory_bytes);
    let booked = device.own_bookings().map(|booked| fraction(booked.memory_bytes, device.memory_bytes));
    let (bar, amount, of) = match device.memory_with() {
        Some(first) => (String::new(), format!("as {first}"), String::new()),
        None => (
            bar(device.memory_used(), booked, BAR, skin.utf8),
            used.map_or_else(|| "-".to_owned(), shown::memory),
            shown::memory(device.memory_bytes),
        ),
    };
    let told = |of: fn(&DeviceUsed) -> String| device.used.map_or_else(|| "-".to_owned(), of);
    vec![
        format!("{}{}", device.branch(skin.utf8), device.number),
        safe(device.name),
        device.state(device.part.and_then(|part| part.fault.as_ref()).map(|_| "unusable")),
        bar,
        amount,
        of,
        told(|used| percent(used.busy_percent.map(f64::from))),
        told(|used| percent(used.sm_percent)),
        told(power),
        told(|used| both(used.pcie_bytes_per_second)),
        told(|used| both(used.nvlink_bytes_per_second)),
        spark,
    ]
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

/// The cells of a container.
pub fn container(words: Words, spark: String, skin: Skin) -> Vec<String> {
    let Words { name, gpu, mode, sm, busy, memory_used, memory, processes, user, image, state } = words;
    let bar = bar(memory_used, None, BAR, skin.utf8);
    vec![name, gpu, mode, sm, busy, bar, memory, processes, user, image, state, spark]
}

/// Percent, or a dash.
pub fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} %"))
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
