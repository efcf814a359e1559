//! The table of GPUs and MIG devices: a line each, with what is used and booked.

use super::tables::{self, Column};
use crate::shown::bars::{bar, utf8};
use crate::status::{DeviceUsed, Gpu, MigInstance, Room, Status};

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
    let rows = status.devices.iter().flat_map(|gpu| {
        let last = gpu.mig.len().wrapping_sub(1);
        let parts = gpu.mig.iter().enumerate();
        let parts = parts.map(move |(at, part)| mig_row(part, at == last, utf8)).collect::<Vec<_>>();
        std::iter::once(gpu_row(gpu, utf8)).chain(parts)
    });
    tables::fitting(&COLUMNS, &rows.collect::<Vec<_>>(), width)
}

fn gpu_row(gpu: &Gpu, utf8: bool) -> Vec<String> {
    let figures = Figures { used: gpu.used.as_ref(), booked: gpu.booked, memory_bytes: gpu.memory_bytes };
    let name = if gpu.memory_of_host { format!("{}, host memory", gpu.name) } else { gpu.name.clone() };
    // Its mode, or what keeps it from being served.
    let is_served = gpu.health.state == "ok";
    let state = if is_served { gpu.mode.to_owned() } else { gpu.health.state.to_uppercase() };
    let mut row = vec![gpu.index.to_string(), name, mode(&state, gpu.drained)];
    if gpu.mode == "mig" {
        // What is booked belongs to its MIG devices.
        row.extend([String::new(), figures.used_memory(), "-".to_owned(), tables::memory(gpu.memory_bytes)]);
        row.extend([String::new(), figures.busy(), "-".to_owned(), "-".to_owned()]);
    } else {
        row.extend(figures.cells(utf8));
        row.push(gpu.lease_count.to_string());
    }
    row
}

fn mig_row(part: &MigInstance, is_last: bool, utf8: bool) -> Vec<String> {
    let figures = Figures { used: part.used.as_ref(), booked: part.booked, memory_bytes: part.memory_bytes };
    let branch = match (utf8, is_last) {
        (true, false) => "├ ",
        (true, true) => "└ ",
        (false, false) => "|-",
        (false, true) => "`-",
    };
    let mut row = vec![
        format!("{branch}{}", part.number),
        part.profile.clone(),
        mode(if part.fault.is_some() { "unusable" } else { part.mode }, part.drained),
    ];
    let mut cells = figures.cells(utf8);
    // The memory is the GPU instance's: the first of its compute instances shows it.
    if let Some(first) = part.shares_memory_with.first().filter(|first| number(first) < number(&part.number))
    {
        cells[..4].fill(String::new());
        cells[1] = format!("as {first}");
    }
    row.extend(cells);
    row.push(part.lease_count.to_string());
    row
}

/// `0:10` comes after `0:2`.
fn number(text: &str) -> (u32, u32) {
    let mut parts = text.split(':').map(|part| part.parse().unwrap_or(u32::MAX));
    (parts.next().unwrap_or(u32::MAX), parts.next().unwrap_or(u32::MAX))
}

fn mode(mode: &str, drained: bool) -> String {
    if drained { format!("{mode}, drained") } else { mode.to_owned() }
}

struct Figures<'a> {
    used: Option<&'a DeviceUsed>,
    booked: Room,
    memory_bytes: u64,
}

impl Figures<'_> {
    /// Seven cells, from the bar of memory to the booked SMs.
    fn cells(&self, utf8: bool) -> [String; 7] {
        let used = self.used.and_then(|used| used.memory_bytes);
        let memory = |bytes| fraction(bytes, self.memory_bytes);
        let busy = self.used.and_then(|used| used.busy_percent).map(|percent| f64::from(percent) / 100.0);
        let booked = self.booked.sm_percent;
        [
            bar(used.map(memory), Some(memory(self.booked.memory_bytes)), BAR, utf8),
            self.used_memory(),
            tables::memory(self.booked.memory_bytes),
            tables::memory(self.memory_bytes),
            bar(busy, Some(booked / 100.0), BAR, utf8),
            self.busy(),
            format!("{booked} %"),
        ]
    }

    fn used_memory(&self) -> String {
        self.used.and_then(|used| used.memory_bytes).map_or_else(|| "-".to_owned(), tables::memory)
    }

    fn busy(&self) -> String {
        let busy = self.used.and_then(|used| used.busy_percent);
        busy.map_or_else(|| "-".to_owned(), |percent| format!("{percent} %"))
    }
}

#[expect(clippy::cast_precision_loss, reason = "for a bar")]
fn fraction(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
