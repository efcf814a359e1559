//! The columns of devices and of containers, what stands in them and in the details of one, and what a terminal
//! can show of that.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};

use super::source::{Trace, lease_key};
use super::view::{Pane, Sort, View};
use crate::shown::{self, Device, Words, bar, busy, called, fraction, memory_of, whole, word};
use crate::status::{DeviceUsed, GuardEvent, LeaseOnDevice, Status};
use crate::terminal::wrapped;
use crate::usage::ProcessUse;
use sublet_core::text::{LONGEST_NAME, safe};

/// The length of a bar.
const BAR: usize = 10;

/// The column of a device's mode.
pub const MODE: usize = 2;

/// The column of a container's owner.
pub const OWNER: usize = 9;

/// The column of a lease's state.
pub const STATE: usize = 11;

pub const DEVICE_COLUMNS: [Column; 12] = [
    Column::new("GPU", 6, 0),
    Column::new("NAME", 12, 7).up_to(24),
    Column::new("MODE", 10, 3),
    Column::new("MEMORY", 10, 4),
    Column::new("USED", 9, 0),
    Column::new("OF", 9, 6),
    Column::new("BUSY", 5, 0),
    Column::new("SM", 5, 8),
    Column::new("POWER", 9, 1),
    Column::new("PCIE/S", 17, 9),
    Column::new("NVLINK/S", 17, 10),
    Column::new("", 9, 2).up_to(120),
];

pub const LEASE_COLUMNS: [Column; 13] = [
    Column::new("CONTAINER", 12, 0).up_to(32),
    Column::new("GPU", 5, 0),
    Column::new("MODE", 19, 6),
    Column::new("SM", 8, 3),
    Column::new("BUSY", 12, 1),
    Column::new("", 10, 4),
    Column::new("MEMORY", 21, 0),
    Column::new("PROC", 4, 7),
    Column::new("USER", 8, 8).up_to(16),
    Column::new("OWNER", 16, 5).up_to(24),
    Column::new("IMAGE", 20, 10).up_to(32),
    Column::new("STATE", 7, 9),
    Column::new("", 9, 2).up_to(120),
];

/// The columns by which a click on the title sorts.
pub const LEASE_SORTS: [(usize, Sort); 4] =
    [(0, Sort::Name), (1, Sort::Gpu), (4, Sort::Busy), (6, Sort::Memory)];

/// `columns` with a title for the sparkline, which is the last.
pub fn with_trace<const N: usize>(mut columns: [Column; N], trace: Trace) -> [Column; N] {
    columns[N - 1].title = if trace == Trace::Load { "PAST BUSY" } else { "PAST MEM" };
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
    let reading = |of: fn(&DeviceUsed) -> String| device.used.map_or_else(|| "-".to_owned(), of);
    vec![
        format!("{}{}", device.branch(skin.utf8), device.number),
        safe(device.name),
        device.state(),
        bar,
        amount,
        of,
        reading(|used| percent(used.busy_percent.map(f64::from))),
        reading(|used| percent(used.sm_percent)),
        reading(power),
        reading(|used| both(used.pcie_bytes_per_second)),
        reading(|used| both(used.nvlink_bytes_per_second)),
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
    let Words { name, gpu, mode, sm, busy, memory_used, memory, processes, user, owner, image, state } =
        words;
    let bar = bar(memory_used, None, BAR, skin.utf8);
    vec![name, gpu, mode, sm, busy, bar, memory, processes, user, owner, image, state, spark]
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
    /// In characters; 0: it is not shown.
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

    /// So wide that none of `words` is cut.
    pub fn for_words(self, words: impl Iterator<Item = String>) -> Self {
        let width = words.filter_map(|word| u16::try_from(word.len()).ok()).max().unwrap_or_default();
        Self { width: width.max(self.width), most: width.max(self.most), ..self }
    }
}

/// The columns that are shown: the number of each, where it begins and how wide it is.
#[derive(Clone, Debug)]
pub struct Fitted(pub Vec<(usize, u16, u16)>);

/// The columns that fit into `width` with a blank between them. Remaining width goes to the first column that may grow,
/// then to the next.
pub fn fit(columns: &[Column], width: u16) -> Fitted {
    let mut kept: Vec<usize> = (0..columns.len()).filter(|&at| columns[at].width > 0).collect();
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

/// Titles.
pub const TITLE: Style = Style::new().add_modifier(Modifier::BOLD);

/// The row that the cursor is on.
pub const CURSOR: Style = Style::new().add_modifier(Modifier::REVERSED);

/// The abilities of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skin {
    pub utf8: bool,
    pub colour: bool,
}

impl Skin {
    /// Writes `text` into at most `width` columns. A character that the terminal cannot show becomes `?`.
    pub fn put(self, buffer: &mut Buffer, x: u16, y: u16, text: &str, width: usize, style: Style) {
        if !buffer.area.contains((x, y).into()) {
            return;
        }
        let shown = |c: char| if self.utf8 || c.is_ascii() { c } else { '?' };
        buffer.set_stringn(x, y, text.chars().map(shown).collect::<String>(), width, style);
    }

    /// For text that needs attention.
    pub fn warning(self) -> Style {
        if self.colour { Style::new().fg(Color::Yellow) } else { Style::new().add_modifier(Modifier::BOLD) }
    }

    /// For text in the background.
    pub fn faint(self) -> Style {
        if self.colour { Style::new().add_modifier(Modifier::DIM) } else { Style::new() }
    }

    /// For a resource that is used up to this part of 1.
    pub fn part(self, part: Option<f64>) -> Style {
        match part {
            Some(part) if self.colour && part >= 0.95 => Style::new().fg(Color::Red),
            Some(part) if self.colour && part >= 0.8 => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        }
    }
}

// The details of one container or device, as lines.

/// Of guard events the latest of these.
const EVENTS: usize = 8;

/// Details of what the cursor is on.
pub fn details(view: &View, width: usize, skin: Skin) -> Vec<String> {
    let Some(look) = &view.look else { return Vec::new() };
    let at = view.selected(view.pane);
    let spark = |key: &str, trace| view.history.sparkline(key, trace, width.saturating_sub(11), skin.utf8);
    let lines = match view.pane {
        Pane::Gpus => view.devices().get(at).map(|row| device_details(row, &look.status, width, &spark)),
        Pane::Containers => {
            view.containers().get(at).map(|lease| container_details(lease, &look.status, &spark))
        }
    };
    lines.unwrap_or_default()
}

type Spark<'a> = dyn Fn(&str, Trace) -> String + 'a;

fn row(title: &str, text: impl std::fmt::Display) -> String {
    format!("  {title:<10} {text}")
}

fn container_details(lease: &LeaseOnDevice, status: &Status, spark: &Spark<'_>) -> Vec<String> {
    let or_dash = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), safe);
    let engine = lease.engine.as_ref().map_or_else(|| "-".to_owned(), word);
    let (part_of, unit) = (or_dash(&lease.part_of), or_dash(&lease.unit));
    let shown = Words::of(lease, status, LONGEST_NAME);
    let owner = lease.owner.as_ref().map_or_else(String::new, |owner| format!("   for {}", owner.words()));
    let most = lease.memory_bytes.map_or_else(|| whole(lease), shown::memory);
    let key = lease_key(lease);
    let mut lines = vec![
        format!("Container {}", shown.name),
        row("image", format!("{}   user {}{owner}", or_dash(&lease.image), safe(&lease.user))),
        row("engine", format!("{engine}   part of {part_of}   unit {unit}")),
        row("id", safe(&lease.container_id)),
        "Grant".to_owned(),
        row("lease", format!("{}, {}, since {}", lease.id, shown.state, lease.since)),
        row("device", format!("{} ({}), {}", shown.gpu, safe(&lease.device), shown.mode)),
        row("limits", format!("SM {}, memory {most}", shown.sm)),
        "Use".to_owned(),
        row("memory", shown.memory),
        row("busy", shown.busy),
        row("memory", spark(&key, Trace::Memory)),
        row("busy", spark(&key, Trace::Load)),
    ];
    lines.extend(processes(lease));
    lines.push("Guard events".to_owned());
    let its = |event: &&GuardEvent| event.container_id.as_ref() == Some(&lease.container_id);
    let events: Vec<&GuardEvent> = status.guard.events.iter().filter(its).collect();
    let latest = &events[events.len().saturating_sub(EVENTS)..];
    lines.extend(latest.iter().map(|event| format!("  {}  {}", event.time, safe(&event.text))));
    if latest.is_empty() {
        lines.push("  none".to_owned());
    }
    lines.extend(with_server(lease, status));
    lines
}

fn processes(lease: &LeaseOnDevice) -> Vec<String> {
    let Some(count) = lease.used.processes else {
        return vec!["Processes".to_owned(), "  the driver does not list them".to_owned()];
    };
    let line = |ProcessUse { holder, sm_percent }: &ProcessUse| {
        let memory = holder.memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        let busy = percent(sm_percent.map(f64::from));
        format!("  {:<10} {memory:>10} {busy:>6}  {}", holder.process.pid, safe(&holder.name))
    };
    let lines = lease.processes.iter().map(line);
    std::iter::once(format!("Processes on this device: {count}")).chain(lines).collect()
}

/// The containers whose work would end with this one's if its MPS server failed.
fn with_server(lease: &LeaseOnDevice, status: &Status) -> Vec<String> {
    let title = "If its MPS server fails".to_owned();
    let Some(daemon) = &lease.daemon else {
        return vec![title, "  it has none: a fault in another container does not end its work".to_owned()];
    };
    let is_other = |other: &&LeaseOnDevice| other.daemon.as_ref() == Some(daemon) && other.id != lease.id;
    let mut names: Vec<String> = status.leases.iter().filter(is_other).map(called).collect();
    names.dedup();
    let mut lines = vec![title, format!("  its GPU work ends (MPS daemon {})", safe(daemon))];
    if names.is_empty() {
        lines.push("  and no other container's".to_owned());
    } else {
        lines.push(format!("  and that of {} more:", names.len()));
        lines.extend(names.into_iter().map(|name| format!("    {name}")));
    }
    lines
}

fn device_details(device: &Device<'_>, status: &Status, width: usize, spark: &Spark<'_>) -> Vec<String> {
    let Device { uuid, number, mode, booked, .. } = device;
    let (kind, place) = match device.part {
        None => ("GPU", device.gpu.bus_id.clone()),
        Some(part) => ("MIG device", format!("GPU instance {}, compute instance {}", part.gi, part.ci)),
    };
    let memory_booked = shown::memory(booked.memory_bytes);
    let whole = shown::memory(device.memory_bytes);
    let mut lines = vec![
        format!("{kind} {number}: {}", safe(device.name)),
        row("id", safe(uuid)),
        row("at", format!("{}, {mode}", safe(&place))),
        row("booked", format!("SM {} %, memory {memory_booked} of {whole}", booked.sm_percent)),
    ];
    let drained = device.drain().map(|words| wrapped(&row("drained", words), Some(width)));
    lines.extend(drained.iter().flat_map(|text| text.lines()).map(str::to_owned));
    lines.extend(device.unknown.map(|why| format!("  the driver tells nothing: {}", safe(why))));
    lines.extend(figures(device));
    lines.push(row("memory", spark(uuid, Trace::Memory)));
    lines.push(row("busy", spark(uuid, Trace::Load)));
    lines.push("Containers".to_owned());
    let on_it: Vec<_> = status.leases.iter().filter(|lease| lease.device == *uuid).collect();
    let line =
        |lease: &&LeaseOnDevice| format!("  {:<32} {:<14} {}", called(lease), busy(lease), memory_of(lease));
    lines.extend(on_it.iter().map(line));
    if on_it.is_empty() {
        lines.push("  none".to_owned());
    }
    lines
}

fn figures(device: &Device<'_>) -> Vec<String> {
    let Some(used) = device.used else { return Vec::new() };
    let memory = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), shown::memory);
    let celsius = used.temperature_celsius.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees} C"));
    let (in_use, load, power) = (memory(used.memory_bytes), percent(device.load()), power(used));
    let [sms, occupancy, tensor, dram] =
        [used.sm_percent, used.occupancy_percent, used.tensor_percent, used.dram_percent].map(percent);
    let [pcie, nvlink] = [used.pcie_bytes_per_second, used.nvlink_bytes_per_second].map(both);
    let gpm = format!("SMs {sms}, occupancy {occupancy}, tensor cores {tensor}, memory bandwidth {dram}");
    let mut lines = vec![
        row("used", format!("memory {in_use}, busy {load}, {power}, {celsius}")),
        row("GPM", gpm),
        row("out + in", format!("PCIe {pcie} /s, NVLink {nvlink} /s")),
    ];
    lines.extend(used.outside.iter().map(|process| {
        row("no lease", format!("{} (pid {}), {}", process.name, process.pid, memory(process.memory_bytes)))
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_important_column_goes_first_and_the_rest_gets_its_width() {
        let columns = [Column::new("A", 4, 0), Column::new("B", 6, 1), Column::new("C", 5, 2).up_to(20)];
        let fitted = |width| fit(&columns, width).0;
        assert_eq!(fitted(17), [(0, 0, 4), (1, 5, 6), (2, 12, 5)]);
        assert_eq!(fitted(30), [(0, 0, 4), (1, 5, 6), (2, 12, 18)]);
        assert_eq!(fitted(100), [(0, 0, 4), (1, 5, 6), (2, 12, 20)]);
        assert_eq!(fitted(16), [(0, 0, 4), (1, 5, 6)]);
        assert_eq!(fitted(3), [(0, 0, 4)], "what never goes is cut when it is written");
    }
}
