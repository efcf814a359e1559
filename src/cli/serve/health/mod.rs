//! Watches the health of GPUs: Xids in the kernel's log, NVML's events of GPUs with leases, and the driver's answers about those
//! when it is asked ([`gpu_state`]). The log alone names the process that an Xid is about, and has each; of several, NVML tells
//! the last one (nvml.h, `nvmlEventSetWait_v2`).
//!
//! Without leases NVML is closed, so that idle GPUs are not kept awake; and while a MIG layout is changed, because an open NVML
//! prevents a reset. The log is read first: the driver may hang with a sick GPU.

mod gpu_state;
mod reporter;

use std::collections::BTreeMap;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, EventSet, Nvml};

use crate::cached_files::Kept;
use crate::probe;
use crate::sick_gpus::kernel_log::{KernelLog, Xid};
use crate::sick_gpus::xid::{RECOVERY_CHANGED, is_program_error};
use crate::sick_gpus::{self, Records};
use gpu_state::GpuState;
use reporter::{Reporter, event, mark_sick, note_reset, on_gpu};
use sublet_core::config::Config;
use sublet_core::events::Kind;
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Ledger, Store};

/// The longest wait for the kernel's log, and so between two looks at NVML's events.
const ROUND: Duration = Duration::from_millis(500);

/// How many of NVML's events are taken in a round. A stream that never stops gets no more attention than that.
const MOST_EVENTS: usize = 64;

/// The time between two looks at a GPU's state.
const PERIOD: Duration = Duration::from_secs(10);

/// Starts the thread; it ends with the process.
///
/// # Errors
/// There are too many threads.
pub(super) fn start(config: &Config) -> io::Result<()> {
    let config = config.clone();
    let watch = move || {
        let mut watcher = Watcher::new(config);
        loop {
            watcher.watch();
        }
    };
    thread::Builder::new().name("health".to_owned()).spawn(watch).map(drop)
}

#[derive(Default)]
struct Watcher {
    config: Config,
    /// The kernel's log, where it can be read.
    log: Option<KernelLog>,
    reporter: Reporter,
    ledger: Kept<Ledger>,
    inventory: Kept<Inventory>,
    /// The last state of each GPU, and when it was asked for.
    states: BTreeMap<String, (Instant, GpuState)>,
    /// When a GPU without leases was asked whether it was reset.
    asked: Option<Instant>,
}

impl Watcher {
    fn new(config: Config) -> Self {
        let log = KernelLog::open(&config.driver.root);
        let log =
            log.inspect_err(|error| tracing::warn!("/dev/kmsg: {error}: no process is named with an Xid"));
        Self { config, log: log.ok(), ..Self::default() }
    }

    /// Watches until other GPUs are to be watched. NVML is open no longer than that.
    fn watch(&mut self) {
        let (gpus, began) = (self.wanted(), Instant::now());
        self.note(|records| records.warnings.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid)));
        let nvml = if gpus.is_empty() { None } else { probe::connect(&self.config).ok() };
        // By their addresses: a search by UUID would open other GPUs, too.
        let devices: Vec<(&Device, NvmlDevice<'_>)> = gpus
            .iter()
            .filter_map(|gpu| Some((gpu, nvml.as_ref()?.0.device_by_pci_bus_id(&*gpu.bus_id).ok()?)))
            .collect();
        let set = nvml.as_ref().and_then(|(nvml, _)| register(nvml, &devices));
        loop {
            self.read_log();
            let events = set.as_ref().map_or_else(|| Ok(Vec::new()), take_events);
            for xid in events.as_ref().into_iter().flatten() {
                // Whose an error of a program's is, the log says.
                if self.log.is_none() || !is_program_error(xid.number) {
                    self.reporter.act_on(xid, &self.config);
                }
            }
            for (gpu, device) in &devices {
                self.look(gpu, device);
            }
            let failed = events.is_err() || devices.len() < gpus.len();
            // A look for a reset is over after a round.
            self.asked = if gpus.is_empty() { self.asked } else { Some(Instant::now()) };
            let (now, is_late) = (self.wanted(), began.elapsed() > PERIOD);
            if now.is_empty() != gpus.is_empty() || is_late && (failed || now != gpus) {
                return;
            }
        }
    }

    /// The GPUs with leases; while there is none, from time to time those that wait for a reset. None while a MIG layout is
    /// changed.
    fn wanted(&mut self) -> Vec<Device> {
        let config = &self.config;
        let read = || Store::open(&config.state_dir).and_then(|store| store.read());
        let ledger = self.ledger.get(&config.state_dir.join("ledger.json"), read);
        let last = || inventory::last(config).map(|known| known.with_left_out());
        let known = self.inventory.get(&inventory::cache_path(config), last);
        let (Ok(ledger), Ok(known)) = (ledger, known) else { return Vec::new() };
        if ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty()) {
            return Vec::new();
        }
        let is_leased = |gpu: &&Device| on_gpu(&gpu.uuid, &ledger).next().is_some();
        let leased: Vec<Device> = known.gpus().filter(is_leased).cloned().collect();
        let is_due = leased.is_empty() && self.asked.is_none_or(|at| at.elapsed() >= PERIOD);
        if !is_due {
            return leased;
        }
        let sick = sick_gpus::read(config).unwrap_or_default();
        sick.asked().filter_map(|uuid| known.device(uuid)).cloned().collect()
    }

    /// Acts on the Xids that the kernel's log has by now; waits for it if it has none.
    fn read_log(&mut self) {
        let Some(log) = &mut self.log else { return thread::sleep(ROUND) };
        log.wait(ROUND);
        for xid in log.read() {
            self.reporter.act_on(&xid, &self.config);
        }
    }

    /// Asks for a GPU's state, where it is due.
    fn look(&mut self, gpu: &Device, device: &NvmlDevice<'_>) {
        let before = self.states.get(&gpu.uuid).copied();
        if before.is_some_and(|(at, _)| at.elapsed() < PERIOD) {
            return;
        }
        // Before the driver is asked: it may ask for a reset just now.
        let sick = sick_gpus::read(&self.config).unwrap_or_default();
        let was_asked = sick.asked().any(|asked| *asked == gpu.uuid);
        let state = GpuState::of(device);
        self.states.insert(gpu.uuid.clone(), (Instant::now(), state));
        let warnings = state.warnings(before.map(|(_, before)| before));
        for (word, text) in &warnings {
            self.reporter.emit_once(event(Kind::Warned, None, gpu, word, text), &self.config);
        }
        let warnings = warnings.into_iter().map(|(_, text)| text.to_owned()).collect();
        self.note(|records| _ = records.warnings.insert(gpu.uuid.clone(), warnings));
        match state.fault() {
            Some((what, remedy, asked)) => mark_sick(gpu, what, remedy, asked, &self.config),
            None if was_asked && state.needs_no_reset() => note_reset(gpu, &self.config),
            None => {}
        }
    }

    fn note(&self, change: impl FnOnce(&mut Records)) {
        let noted = sick_gpus::change(&self.config, change);
        let _ = noted.inspect_err(|error| tracing::warn!("health.json: {error}"));
    }
}

/// A set for the events of all devices that have such; `None`: there are none.
fn register<'n>(nvml: &'n Nvml, devices: &[(&Device, NvmlDevice<'n>)]) -> Option<EventSet<'n>> {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    devices.iter().try_fold(nvml.create_event_set().ok()?, |set, (_, device)| {
        let types = device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
        // The set is lost with a device that refuses. The kernel's log remains.
        if types.is_empty() { Some(set) } else { device.register_events(types, set).ok() }
    })
}

/// The Xids of NVML's events.
fn take_events(set: &EventSet<'_>) -> Result<Vec<Xid>, NvmlError> {
    let mut found = Vec::new();
    for _ in 0..MOST_EVENTS {
        let event = match set.wait(0) {
            Ok(event) => event,
            Err(NvmlError::Timeout) => break,
            Err(error) => return Err(error),
        };
        let number = match event.event_data {
            Some(XidError::Value(number)) => u32::try_from(number).unwrap_or(u32::MAX),
            Some(XidError::Unknown) => 999,
            // The event of an uncorrectable memory error, which has this Xid.
            None => 48,
        };
        // One that does not tell its name any more is found by other means, and which recovery the driver asks for, too.
        found.extend(event.device.uuid().ok().filter(|_| number != RECOVERY_CHANGED).map(|gpu| Xid {
            gpu,
            number,
            pid: None,
            text: String::new(),
        }));
    }
    Ok(found)
}
