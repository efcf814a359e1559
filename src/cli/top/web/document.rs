//! The document that the page's script fetches. Its texts are those of the terminal's tables, and the script only
//! places them. It belongs to the page and may change with it. Other programs read `sublet status --format json`.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::history::{History, Trace, lease_key};
use super::super::rows::{both, percent, power};
use super::super::source::Look;
use super::super::view::View;
use crate::shown::lease::{Words, cut};
use crate::shown::{self, device};
use crate::status::{DeviceUsed, LeaseOnDevice, OutsideProcess};
use crate::usage::ProcessUse;
use sublet_core::text::safe;

/// Values of a sparkline: five minutes.
const TRACE: usize = 60;

/// The longest image that is shown, in characters.
const LONGEST_IMAGE: usize = 96;

/// Processes that are listed for a container or a device.
const PROCESSES: usize = 32;

#[derive(Default, Serialize)]
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
    #[serde(flatten)]
    words: Words,
    process_list: Vec<Process>,
    age: String,
    past: Vec<Option<u8>>,
}

#[derive(Serialize)]
struct Process {
    key: String,
    text: String,
}

impl<'a> Document<'a> {
    pub fn of(view: &'a View, interval: Duration, now: Instant) -> Self {
        let bare = Self {
            host: safe(&nix::unistd::gethostname().unwrap_or_default().to_string_lossy()),
            interval_milliseconds: interval.as_millis(),
            error: view.error.as_deref().map(safe),
            ..Self::default()
        };
        let Some(look) = &view.look else { return bare };
        let status = &look.status;
        let gpu = |gpu| Device::of(&device::Device::of(gpu), &view.history);
        let containers = view.containers().into_iter();
        Self {
            time: &status.time,
            age_seconds: Some(now.saturating_duration_since(look.at).as_secs()),
            driver: safe(&status.driver.version),
            simulated: status.driver.simulated,
            guard: status.guard.words(),
            warnings: &status.warnings,
            gpus: status.devices.iter().map(gpu).collect(),
            containers: containers.map(|lease| Container::of(lease, look, &view.history)).collect(),
            ..bare
        }
    }
}

impl Device {
    fn of(device: &device::Device<'_>, history: &History) -> Self {
        let siblings = device.part.map_or(&[][..], |part| &part.shares_memory_with);
        let fault = device.part.and_then(|part| part.fault.as_deref()).map(safe);
        let parts = device::Device::parts(device.gpu).filter(|_| device.part.is_none());
        let unknown = || device.unknown.map(|why| format!("what is used is not known: {}", safe(why)));
        let mut memory = memory_bar(device);
        if !siblings.is_empty() {
            let _ = write!(memory.text, ", shared with {}", siblings.join(", "));
        }
        let outside = device.used.into_iter().flat_map(|used| &used.outside).take(PROCESSES);
        let process = |process: &OutsideProcess| {
            Process::of(process.pid, &format!("No lease: {}", cut(&process.name)), process.memory_bytes, None)
        };
        Self {
            key: device.uuid.to_owned(),
            number: device.number.clone(),
            name: safe(device.name),
            mode: device.state(None),
            memory,
            sm: sm_bar(device),
            facts: device.used.filter(|_| device.part.is_none()).map(facts).unwrap_or_default(),
            fault: fault.or_else(unknown),
            outside: outside.map(process).collect(),
            past: history.past(device.uuid, Trace::Load, TRACE),
            parts: parts.map(|part| Self::of(&part, history)).collect(),
        }
    }
}

impl Container {
    fn of(lease: &LeaseOnDevice, look: &Look, history: &History) -> Self {
        let processes = look.processes.get(&(lease.id.clone(), lease.device.clone()));
        let process = |ProcessUse { holder, sm_percent }: &ProcessUse| {
            Process::of(holder.process.pid, &cut(&safe(&holder.name)), holder.memory_bytes, *sm_percent)
        };
        let key = lease_key(lease);
        Self {
            words: Words::of(lease, &look.status, LONGEST_IMAGE),
            process_list: processes.into_iter().flatten().take(PROCESSES).map(process).collect(),
            age: shown::ago(lease.taken),
            past: history.past(&key, Trace::Memory, TRACE),
            key,
        }
    }
}

impl Process {
    fn of(pid: i32, name: &str, memory_bytes: Option<u64>, sm_percent: Option<u32>) -> Self {
        let memory = memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        let busy = sm_percent.map(|percent| format!(", {percent} % busy")).unwrap_or_default();
        Self { key: pid.to_string(), text: format!("{name} (pid {pid}) {memory}{busy}") }
    }
}

fn memory_bar(device: &device::Device<'_>) -> Bar {
    let used = device.used.and_then(|used| used.memory_bytes);
    let used = used.map_or_else(|| "-".to_owned(), shown::memory);
    let mut text = format!("{used} of {}", shown::memory(device.memory_bytes));
    let booked = device.own_bookings().map(|booked| booked.memory_bytes);
    if let Some(booked) = booked.filter(|booked| *booked > 0) {
        let _ = write!(text, ", {} booked", shown::memory(booked));
    }
    let booked = booked.map(|booked| device::fraction(booked, device.memory_bytes));
    Bar { used: device.memory_used(), booked, text }
}

fn sm_bar(device: &device::Device<'_>) -> Bar {
    let (load, booked) = (device.load(), device.own_bookings().map(|booked| booked.sm_percent));
    let busy = load.map_or_else(|| "busy: not reported".to_owned(), |_| format!("{} busy", percent(load)));
    let text = booked.map_or_else(|| busy.clone(), |booked| format!("{busy}, {booked} % booked"));
    Bar { used: load.map(|load| load / 100.0), booked: booked.map(|booked| booked / 100.0), text }
}

fn facts(used: &DeviceUsed) -> Vec<(&'static str, String)> {
    let celsius = used.temperature_celsius.map_or_else(|| "-".to_owned(), |celsius| format!("{celsius} °C"));
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
