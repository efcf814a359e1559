//! The document that the page's script fetches. Its texts are those of the terminal's tables, and the script only
//! places them. It belongs to the page and may change with it. Other programs read `sublet status --format json`.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::history::{self, History, Trace, fraction, lease_key};
use super::super::rows::{self, both, percent, power, pressure_of_lease};
use super::super::source::{Look, ProcessLine};
use super::super::view::{DeviceRow, View};
use crate::shown::lease::{busy, called, cut, memory, mode, whole};
use crate::shown::{self, end_of, word};
use crate::status::{DeviceUsed, LeaseOnDevice, Room, Status};
use sublet_core::text::safe;

/// Values of a sparkline: five minutes.
const TRACE: usize = 60;

/// The longest image that is shown, in characters: its tag stands at its end.
const LONGEST_IMAGE: usize = 96;

/// Processes that are listed for a container or a device.
const PROCESSES: usize = 32;

#[derive(Serialize)]
pub struct Document<'a> {
    host: String,
    /// When the last look was taken; empty: there is none yet.
    time: &'a str,
    /// How old it is; null: there is none yet.
    age_seconds: Option<u64>,
    interval_milliseconds: u128,
    /// Why there is no newer look.
    error: Option<String>,
    driver: String,
    simulated: bool,
    guard: &'static str,
    warnings: &'a [String],
    gpus: Vec<Device>,
    containers: Vec<Container>,
}

/// A GPU or a MIG device.
#[derive(Serialize)]
struct Device {
    key: String,
    number: String,
    name: String,
    mode: String,
    memory: Bar,
    sm: Bar,
    /// Words and values of what else is known.
    facts: Vec<(&'static str, String)>,
    /// Why no container can use it, or nothing is known of it.
    fault: Option<String>,
    outside: Vec<Process>,
    past: Vec<Option<u8>>,
    parts: Vec<Device>,
}

/// What is used and booked, each a part of 1; null: not known, or nothing can be booked.
#[derive(Serialize)]
struct Bar {
    used: Option<f64>,
    booked: Option<f64>,
    text: String,
}

#[derive(Serialize)]
struct Container {
    key: String,
    name: String,
    image: String,
    user: String,
    gpu: String,
    mode: String,
    state: String,
    sm: String,
    busy: String,
    memory: String,
    /// Used of the limit, a part of 1.
    memory_used: Option<f64>,
    process_count: String,
    processes: Vec<Process>,
    age: String,
    past: Vec<Option<u8>>,
}

#[derive(Serialize)]
struct Process {
    pid: i32,
    name: String,
    memory: String,
    busy: String,
}

impl<'a> Document<'a> {
    pub fn of(view: &'a View, interval: Duration, now: Instant) -> Self {
        let look = view.look.as_ref();
        let status = look.map(|look| &look.status);
        let gpus = status.iter().flat_map(|status| &status.devices);
        let of_lease = |look: &'a Look| {
            let leases = view.containers();
            leases.into_iter().map(|lease| Container::of(lease, look, &view.history)).collect()
        };
        let host = nix::unistd::gethostname().unwrap_or_default();
        Self {
            host: safe(&host.to_string_lossy()),
            time: status.map_or("", |status| &status.time),
            age_seconds: look.map(|look| now.saturating_duration_since(look.at).as_secs()),
            interval_milliseconds: interval.as_millis(),
            error: view.error.as_deref().map(safe),
            driver: status.map(|status| safe(&status.driver.version)).unwrap_or_default(),
            simulated: status.is_some_and(|status| status.driver.simulated),
            guard: status.map_or("", |status| status.guard.words()),
            warnings: status.map_or(&[], |status| &status.warnings),
            gpus: gpus.map(|gpu| Device::of(DeviceRow::Gpu(gpu), &view.history)).collect(),
            containers: look.map(of_lease).unwrap_or_default(),
        }
    }
}

impl Device {
    fn of(row: DeviceRow<'_>, history: &History) -> Self {
        let rows::Device { number, name, mode, memory_bytes, booked, used, .. } = rows::Device::of(&row);
        let mut memory = memory_bar(used, booked, memory_bytes);
        let (unknown_of, facts, parts) = match row {
            DeviceRow::Gpu(gpu) => {
                let parts = gpu.mig.iter().map(|part| Self::of(DeviceRow::Mig(part, false), history));
                (&gpu.unknown, facts(used), parts.collect())
            }
            DeviceRow::Mig(part, _) => {
                if !part.shares_memory_with.is_empty() {
                    let _ = write!(memory.text, ", shared with {}", part.shares_memory_with.join(", "));
                }
                (&part.unknown, Vec::new(), Vec::new())
            }
        };
        let fault = if let DeviceRow::Mig(part, _) = row { part.fault.as_deref().map(safe) } else { None };
        let unknown = |why: &String| format!("what is used is not known: {}", safe(why));
        Self {
            key: row.uuid().to_owned(),
            number,
            name,
            mode,
            memory,
            sm: sm_bar(used, booked),
            facts,
            fault: fault.or_else(|| unknown_of.as_ref().map(unknown)),
            outside: outside(used),
            past: history.past(row.uuid(), Trace::Load, TRACE),
            parts,
        }
    }
}

impl Container {
    fn of(lease: &LeaseOnDevice, look: &Look, history: &History) -> Self {
        let status: &Status = &look.status;
        let processes = look.processes.get(&(lease.id.clone(), lease.device.clone()));
        let count = lease.used.processes.map(|count| count.to_string());
        Self {
            key: lease_key(lease),
            name: called(lease),
            image: lease.image.as_deref().map_or_else(dash, |image| end_of(&safe(image), LONGEST_IMAGE)),
            user: cut(&lease.user),
            gpu: safe(&status.number(&lease.device)),
            mode: mode(lease, status),
            state: word(&lease.state),
            sm: lease.sm_percent.map_or_else(|| whole(lease), |percent| format!("{percent} %")),
            busy: busy(lease),
            memory: memory(lease),
            memory_used: pressure_of_lease(lease, status),
            process_count: count.unwrap_or_else(dash),
            processes: processes.into_iter().flatten().take(PROCESSES).map(Process::of).collect(),
            age: shown::ago(lease.taken),
            past: history.past(&lease_key(lease), Trace::Memory, TRACE),
        }
    }
}

impl Process {
    fn of(line: &ProcessLine) -> Self {
        Self {
            pid: line.pid,
            name: cut(&line.name),
            memory: line.memory_bytes.map_or_else(dash, shown::memory),
            busy: line.sm_percent.map_or_else(dash, |percent| format!("{percent} %")),
        }
    }
}

fn dash() -> String {
    "-".to_owned()
}

fn memory_bar(used: Option<&DeviceUsed>, booked: Option<Room>, bytes: u64) -> Bar {
    let used = used.and_then(|used| used.memory_bytes);
    let mut text = format!("{} of {}", used.map_or_else(dash, shown::memory), shown::memory(bytes));
    if let Some(booked) = booked.filter(|booked| booked.memory_bytes > 0) {
        text = format!("{text}, {} booked", shown::memory(booked.memory_bytes));
    }
    let booked = booked.map(|booked| fraction(booked.memory_bytes, bytes));
    Bar { used: used.map(|used| fraction(used, bytes)), booked, text }
}

fn sm_bar(used: Option<&DeviceUsed>, booked: Option<Room>) -> Bar {
    let load = used.and_then(history::load);
    let busy = load.map_or_else(|| "busy: not reported".to_owned(), |_| format!("{} busy", percent(load)));
    let booked_words = |booked: Room| format!("{} % booked", booked.sm_percent);
    let text = booked.map_or_else(|| busy.clone(), |booked| format!("{busy}, {}", booked_words(booked)));
    Bar { used: load.map(|load| load / 100.0), booked: booked.map(|booked| booked.sm_percent / 100.0), text }
}

fn facts(used: Option<&DeviceUsed>) -> Vec<(&'static str, String)> {
    let Some(used) = used else { return Vec::new() };
    let celsius = used.temperature_celsius.map_or_else(dash, |celsius| format!("{celsius} °C"));
    let all = [
        ("Power", power(used)),
        ("Temperature", celsius),
        ("SMs with work", percent(used.sm_percent)),
        ("Tensor cores", percent(used.tensor_percent)),
        ("Memory bandwidth", percent(used.dram_percent)),
        ("PCIe out + in", both(used.pcie_bytes_per_second)),
        ("NVLink out + in", both(used.nvlink_bytes_per_second)),
    ];
    all.into_iter().filter(|(_, value)| value != "-").collect()
}

fn outside(used: Option<&DeviceUsed>) -> Vec<Process> {
    let all = used.iter().flat_map(|used| &used.outside).take(PROCESSES);
    all.map(|process| Process {
        pid: process.pid,
        name: cut(&process.name),
        memory: process.memory_bytes.map_or_else(dash, shown::memory),
        busy: dash(),
    })
    .collect()
}
