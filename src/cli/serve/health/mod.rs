//! Watches the health of GPUs: Xids in the kernel's log, NVML's events of GPUs with leases, and the driver's answers about those
//! when it is asked ([`gpu_state`]): every GPU once when the service starts and after a refresh, and from time to time those with
//! leases. The log alone names the process that an Xid is about, and has each; of several, NVML tells the last one (nvml.h,
//! `nvmlEventSetWait_v2`).
//!
//! Else, without leases, NVML is closed, so that idle GPUs are not kept awake; and while a MIG layout is changed, because an open
//! NVML prevents a reset. The log is read by a thread of its own, which asks NVML nothing: the driver may hang with a sick GPU, and
//! then it says so.

mod gpu_state;
mod reporter;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, EventSet, Nvml};

use crate::cached_files::Kept;
use crate::probe;
use crate::sick_gpus::kernel_log::{KernelLog, Xid};
use crate::sick_gpus::xid::{RECOVERY_CHANGED, is_program_error};
use crate::sick_gpus::{self, Records, event};
use gpu_state::GpuState;
use reporter::{Reporter, mark_sick, note_reset};
use sublet_core::config::Config;
use sublet_core::events::Kind;
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::text::safe;

/// The longest wait for the kernel's log, and the time between two looks at NVML's events.
const ROUND: Duration = Duration::from_millis(500);

/// How many of NVML's events are taken in a round. A stream that never stops gets no more attention than that.
const MOST_EVENTS: usize = 64;

/// The time between two looks at a GPU's state.
const PERIOD: Duration = Duration::from_secs(10);

/// How long the service's start waits at most until every GPU has been asked: the engines, which wait for that, start no container
/// on one that had a fault before. A driver that hangs keeps them no longer.
const FIRST_LOOK: Duration = Duration::from_secs(20);

/// NVML that answers nothing for so long is told of.
const SILENT: Duration = Duration::from_secs(60);

/// Said of each GPU that it is then asked about.
const SILENCE: &str =
    "the driver has not answered for a minute, so its health is not looked at; see the kernel's log";

/// Starts the threads, which end with the process, and waits until every GPU has been asked, for [`FIRST_LOOK`] at most.
///
/// # Errors
/// There are too many threads.
pub(super) fn start(config: &Config) -> io::Result<()> {
    let mut log = LogReader::new(config.clone());
    let (config, has_log, asking) = (config.clone(), log.log.is_some(), Arc::clone(&log.asking));
    let (starting, asked) = mpsc::channel();
    let watch = move || {
        let mut watcher = Watcher { config, has_log, asking, starting: Some(starting), ..Watcher::default() };
        loop {
            watcher.watch();
        }
    };
    let read = move || loop {
        log.read();
    };
    let named = |name: &str| thread::Builder::new().name(name.to_owned());
    named("kernel-log").spawn(read)?;
    named("health").spawn(watch)?;
    // Nothing is sent: the watcher drops its end.
    let _ = asked.recv_timeout(FIRST_LOOK);
    Ok(())
}

/// What NVML is asked.
#[derive(Clone, Default)]
struct Asking {
    /// About these, by UUID.
    gpus: Vec<String>,
    /// When it answered last.
    answered: Option<Instant>,
}

/// Reads the kernel's log, and looks whether NVML answers the other thread.
#[derive(Default)]
struct LogReader {
    config: Config,
    /// Where it can be read.
    log: Option<KernelLog>,
    reporter: Reporter,
    asking: Arc<Mutex<Asking>>,
    /// The last answer before a silence that is noted.
    noted: Option<Instant>,
}

impl LogReader {
    fn new(config: Config) -> Self {
        let log = KernelLog::open(&config.driver.root);
        let log =
            log.inspect_err(|error| tracing::warn!("/dev/kmsg: {error}: no process is named with an Xid"));
        Self { config, log: log.ok(), ..Self::default() }
    }

    /// Acts on the Xids that the log has by now; waits for it if it has none.
    fn read(&mut self) {
        self.log.as_ref().map_or_else(|| thread::sleep(ROUND), |log| log.wait(ROUND));
        for xid in self.log.as_mut().map(KernelLog::read).unwrap_or_default() {
            self.reporter.act_on(&xid, &self.config);
        }
        let Asking { gpus, answered } = self.asking.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let silent = answered.filter(|at| at.elapsed() >= SILENT);
        if silent != self.noted {
            self.noted = silent;
            let warnings = gpus.into_iter().map(|gpu| (gpu, vec![SILENCE.to_owned()]));
            note(&self.config, |records| {
                records.warnings.retain(|_, texts| *texts != [SILENCE]);
                records.warnings.extend(warnings.filter(|_| silent.is_some()));
            });
        }
    }
}

#[derive(Default)]
struct Watcher {
    config: Config,
    /// Whether the kernel's log can be read.
    has_log: bool,
    asking: Arc<Mutex<Asking>>,
    reporter: Reporter,
    ledger: Kept<Ledger>,
    inventory: Kept<Inventory>,
    sick: Kept<Records>,
    /// The last state of each GPU, and when it was asked for.
    states: BTreeMap<String, (Instant, GpuState)>,
    /// The GPUs of which NVML registers no events. Each is reported once.
    without_events: BTreeSet<String>,
    /// The inventory (`probed_at`) of which each GPU was asked last, by UUID: after a refresh, each is asked once.
    asked: BTreeMap<String, u64>,
    /// When a GPU without leases was asked last.
    looked: Option<Instant>,
    /// Until every GPU has been asked for the first time.
    starting: Option<Sender<()>>,
}

impl Watcher {
    /// Watches until other GPUs are to be watched. NVML is open no longer than that.
    fn watch(&mut self) {
        let ((gpus, is_look, probed_at), began) = (self.wanted(), Instant::now());
        note(&self.config, |records| {
            records.warnings.retain(|uuid, _| gpus.iter().any(|gpu| gpu.uuid == *uuid));
        });
        self.note_answer(&gpus);
        let nvml = if gpus.is_empty() { None } else { probe::connect(&self.config).ok() };
        // By their addresses: a search by UUID would open other GPUs, too.
        let devices: Vec<(&Device, NvmlDevice<'_>)> = gpus
            .iter()
            .filter_map(|gpu| Some((gpu, nvml.as_ref()?.0.device_by_pci_bus_id(&*gpu.bus_id).ok()?)))
            .collect();
        // Where NVML cannot be opened, nobody was asked. One that it does not find is left out by who looks for such.
        let answers = if nvml.is_some() { &gpus[..] } else { &[] };
        self.asked.extend(answers.iter().map(|gpu| (gpu.uuid.clone(), probed_at)));
        let watched = nvml.as_ref().filter(|_| !is_look);
        let sets = watched.map(|(nvml, _)| self.register(nvml, &devices)).unwrap_or_default();
        loop {
            for (gpu, device) in &devices {
                self.look(gpu, device);
            }
            self.note_answer(&gpus);
            self.starting = None;
            // A look is over at once: an open NVML prevents a reset.
            if is_look {
                self.looked = Some(Instant::now());
                return;
            }
            thread::sleep(ROUND);
            let events: Vec<_> = sets.iter().map(take_events).collect();
            for xid in events.iter().flatten().flatten() {
                // Whose an error of a program's is, the log says.
                if !self.has_log || !is_program_error(xid.number) {
                    self.reporter.act_on(xid, &self.config);
                }
            }
            let failed = events.iter().any(Result::is_err) || devices.len() < gpus.len();
            let ((now, ..), is_late) = (self.wanted(), began.elapsed() > PERIOD);
            if now.is_empty() != gpus.is_empty() || is_late && (failed || now != gpus) {
                return;
            }
        }
    }

    /// A set for the events of each device that has such: with a device that refuses, its set is lost (nvml-wrapper).
    fn register<'n>(&mut self, nvml: &'n Nvml, devices: &[(&Device, NvmlDevice<'n>)]) -> Vec<EventSet<'n>> {
        let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        let mut sets = Vec::new();
        for (gpu, device) in devices {
            let types = device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
            if types.is_empty() {
                continue;
            }
            let set = nvml.create_event_set().map_err(Into::into);
            match set.and_then(|set| device.register_events(types, set)) {
                Ok(set) => sets.push(set),
                Err(error) if self.without_events.insert(gpu.uuid.clone()) => {
                    let text = describe_no_events(&gpu.label(), &error.to_string(), self.has_log);
                    self.reporter.emit_once(event(Kind::Warned, None, gpu, "no-events", &text), &self.config);
                }
                Err(_) => {}
            }
        }
        sets
    }

    fn note_answer(&self, gpus: &[Device]) {
        let gpus = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let answered = Some(Instant::now());
        *self.asking.lock().unwrap_or_else(PoisonError::into_inner) = Asking { gpus, answered };
    }

    /// The GPUs with leases and, from time to time, those that wait for a reset or were not asked since the last refresh; whether
    /// there is one of these; and the inventory that they are of (`probed_at`). None while a MIG layout is changed.
    fn wanted(&mut self) -> (Vec<Device>, bool, u64) {
        let config = &self.config;
        let read = || Store::open(&config.state_dir).and_then(|store| store.read());
        let ledger = self.ledger.get(&config.state_dir.join("ledger.json"), read);
        let last = || inventory::last(config).map(|known| known.with_left_out());
        let known = self.inventory.get(&inventory::cache_path(config), last);
        let (Ok(ledger), Ok(known)) = (ledger, known) else { return Default::default() };
        if ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty()) {
            return Default::default();
        }
        let sick = self.sick.get(&sick_gpus::file(config), || sick_gpus::read(config)).unwrap_or_default();
        // A look opens NVML anew, and without the log the Xids of leased GPUs would be lost meanwhile.
        let may_look = self.has_log || ledger.leases.is_empty();
        let is_due = may_look && self.looked.is_none_or(|at| at.elapsed() >= PERIOD);
        let is_leased = |gpu: &Device| ledger.on_gpu(&gpu.uuid).next().is_some();
        let is_new = |gpu: &Device| self.asked.get(&gpu.uuid) != Some(&known.probed_at);
        let waits = |gpu: &Device| is_new(gpu) || sick.asked().any(|uuid| *uuid == gpu.uuid);
        let is_wanted = |gpu: &&Device| is_leased(gpu) || is_due && waits(gpu);
        let gpus: Vec<Device> = known.gpus().filter(is_wanted).cloned().collect();
        let is_look = !gpus.iter().all(is_leased);
        (gpus, is_look, known.probed_at)
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
        let warnings: Vec<String> = warnings.into_iter().map(|(_, text)| text.to_owned()).collect();
        // Of a GPU that is well nothing is written.
        note(&self.config, |records| {
            records.warnings.remove(&gpu.uuid);
            records.warnings.extend((!warnings.is_empty()).then(|| (gpu.uuid.clone(), warnings)));
        });
        match state.fault() {
            Some((what, remedy, asked)) => mark_sick(gpu, what, remedy, asked, &self.config),
            None if was_asked && state.needs_no_reset() => note_reset(gpu, &self.config),
            None => {}
        }
    }
}

fn note(config: &Config, change: impl FnOnce(&mut Records)) {
    let noted = sick_gpus::change(config, change);
    let _ = noted.inspect_err(|error| tracing::warn!("health.json: {error}"));
}

/// What is said of a GPU of which NVML registers no events.
fn describe_no_events(label: &str, why: &str, has_log: bool) -> String {
    let log = if has_log { "only the kernel's log does" } else { "nor can the kernel's log be read" };
    format!("NVML tells of no error of {label} ({}): {log}", safe(why))
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

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write as _;
    use std::time::SystemTime;

    use sublet_core::ledger::MigChange;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::place::fixture::{device, host};
    use sublet_core::process::Process;

    use super::*;

    /// GPUs 0 and 1, the first with a lease, and an empty log.
    fn of_two() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { state_dir: dir.path().join("run"), ..Config::default() };
        config.driver.root = dir.path().to_owned();
        fs::create_dir(dir.path().join("dev")).unwrap();
        File::create(dir.path().join("dev/kmsg")).unwrap();
        inventory::store(&config, &host(vec![device(0), device(1)]), SystemTime::now()).unwrap();
        let store = Store::open(&config.state_dir).unwrap();
        store.change(|ledger| ledger.leases = vec![lease(1, "GPU-0")]).unwrap();
        (dir, config)
    }

    #[test]
    fn xids_are_acted_on_beside_an_nvml_that_does_not_answer_and_that_is_said() {
        let (dir, config) = of_two();
        let mut reader = LogReader::new(config.clone());
        // Not on a machine that was booted just now.
        let Some(long_ago) = Instant::now().checked_sub(SILENT) else { return };
        let answered = |at| Asking { gpus: vec!["GPU-0".to_owned()], answered: Some(at) };
        let warnings = || sick_gpus::read(&config).unwrap().warnings.remove("GPU-0").unwrap_or_default();
        *reader.asking.lock().unwrap() = answered(Instant::now());
        reader.read();
        assert_eq!(warnings(), [""; 0]);
        let mut log = File::options().append(true).open(dir.path().join("dev/kmsg")).unwrap();
        writeln!(log, "4,1,9,-;NVRM: Xid (PCI:0000:11:00): 79, GPU has fallen off the bus.").unwrap();
        *reader.asking.lock().unwrap() = answered(long_ago);
        reader.read();
        assert_eq!(warnings(), [SILENCE]);
        sick_gpus::change(&config, |records| records.warnings.clear()).unwrap();
        reader.read();
        assert_eq!(warnings(), [""; 0], "it is noted once");
        let noted =
            |records: &mut Records| records.warnings = [("GPU-0".into(), vec![SILENCE.into()])].into();
        sick_gpus::change(&config, noted).unwrap();
        *reader.asking.lock().unwrap() = answered(Instant::now());
        reader.read();
        assert_eq!(warnings(), [""; 0], "it answers again");
        assert_eq!(inventory::last(&config).unwrap().left_out[0].gpu.uuid, "GPU-1");
    }

    #[test]
    fn the_log_is_named_only_where_it_can_be_read() {
        let said = |has_log| describe_no_events("GPU 0", "it is busy", has_log);
        assert_eq!(said(true), "NVML tells of no error of GPU 0 (it is busy): only the kernel's log does");
        assert!(said(false).ends_with(": nor can the kernel's log be read"), "{}", said(false));
    }

    #[test]
    fn every_gpu_is_asked_once_when_the_service_starts_and_after_a_refresh() {
        let (_dir, config) = of_two();
        let (starting, asked) = mpsc::channel();
        let mut watcher =
            Watcher { config: config.clone(), has_log: true, starting: Some(starting), ..Watcher::default() };
        watcher.watch();
        assert_eq!(asked.try_recv(), Err(mpsc::TryRecvError::Disconnected), "the start goes on");
        let asked = std::mem::take(&mut watcher.asked);
        assert!(asked.is_empty(), "there is no NVML here: {asked:?}");
        let mut wanted = || {
            watcher.looked = None;
            let (gpus, is_look, _) = watcher.wanted();
            (gpus.len(), is_look)
        };
        assert_eq!(wanted(), (2, true));
        watcher.asked = ["GPU-0", "GPU-1"].map(|gpu| (gpu.to_owned(), 0_u64)).into();
        let mut wanted = || {
            watcher.looked = None;
            let (gpus, is_look, _) = watcher.wanted();
            (gpus.len(), is_look)
        };
        assert_eq!(wanted(), (1, false), "the one with a lease");
        let later = Inventory { probed_at: 1, ..host(vec![device(0), device(1)]) };
        inventory::store(&config, &later, SystemTime::now()).unwrap();
        assert_eq!(wanted(), (2, true));
        Store::open(&config.state_dir).unwrap().change(|ledger| ledger.leases.clear()).unwrap();
        assert_eq!(wanted(), (2, true));
        watcher.watch();
        assert_eq!(watcher.wanted(), (Vec::new(), false, 1), "NVML is closed");
    }

    #[test]
    fn one_that_waits_for_a_reset_is_asked_from_time_to_time_beside_leases() {
        let (_dir, config) = of_two();
        let fault = sick_gpus::Sick::now("bad".to_owned(), "reset it".to_owned(), true);
        sick_gpus::mark("GPU-1", fault, &config).unwrap();
        let asked = ["GPU-0", "GPU-1"].map(|gpu| (gpu.to_owned(), 0_u64)).into();
        let mut watcher = Watcher { config, asked, ..Watcher::default() };
        let mut wanted = |looked, has_log| {
            (watcher.looked, watcher.has_log) = (looked, has_log);
            let (gpus, is_look, _) = watcher.wanted();
            (gpus.into_iter().map(|gpu| gpu.index).collect::<Vec<_>>(), is_look)
        };
        assert_eq!(wanted(None, true), (vec![0, 1], true));
        assert_eq!(wanted(Some(Instant::now()), true), (vec![0], false));
        assert_eq!(wanted(None, false), (vec![0], false), "an Xid of GPU 0 would be lost meanwhile");
    }

    #[test]
    fn nvml_is_closed_while_a_mig_layout_is_changed() {
        let (_dir, config) = of_two();
        let wanted = |changed: &[&str]| {
            let gpus = changed.iter().map(|gpu| (*gpu).to_owned()).collect();
            let change = |ledger: &mut Ledger| {
                ledger.leases = vec![lease(1, "GPU-0")];
                ledger.mig.under_way = Some(MigChange { gpus, owner: Process::current().unwrap() });
            };
            Store::open(&config.state_dir).unwrap().change(change).unwrap();
            Watcher { config: config.clone(), ..Watcher::default() }.wanted().0.len()
        };
        assert_eq!(wanted(&["GPU-1"]), 0);
        assert_eq!(wanted(&[]), 1, "an instance is made for a container, which needs no reset");
    }
}
