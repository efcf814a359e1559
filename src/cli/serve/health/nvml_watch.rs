//! Asks NVML about GPUs with leases, and waits for its events of them. Without leases NVML is closed, so that idle GPUs are not
//! kept awake; and while a MIG layout is changed, because an open NVML prevents a reset.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device as NvmlDevice, EventSet, Nvml};

use super::AGAIN;
use super::gpu_state::GpuState;
use super::teller::{TOGETHER, Teller, mark_sick, note_reset};
use crate::cached_files::Kept;
use crate::probe;
use crate::sick_gpus;
use crate::sick_gpus::kernel_log::Xid;
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::events::{self, Event, Kind};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Ledger, Store};

/// How long events are waited for in one round, and the pause after one that had some.
const ROUND: Duration = Duration::from_millis(500);

/// How many events are taken in a round. A stream that never stops gets no more attention than that.
const MOST_EVENTS: usize = 64;

/// The time between two looks at a GPU's state.
const PERIOD: Duration = Duration::from_secs(10);

/// A warning ends when its cause was not seen for so long.
const CALM: Duration = Duration::from_secs(300);

/// The Xid that goes with an uncorrectable memory error.
const DOUBLE_BIT_XID: u32 = 48;

/// PCI addresses by UUIDs of GPUs.
type Gpus = BTreeMap<String, String>;

/// Watches until it is to stop.
pub(super) fn run(stop: &AtomicBool, teller: &Mutex<Teller>) {
    let mut watch = NvmlWatch::default();
    while !stop.load(Relaxed) {
        let Ok(config) = config_files::load() else {
            thread::park_timeout(AGAIN);
            continue;
        };
        let gpus = watch.leased(&config);
        let looked = match &gpus {
            gpus if gpus.is_empty() => watch.rest(&config),
            gpus => probe::connect(&config)
                .map_err(anyhow::Error::from)
                .and_then(|(nvml, _)| watch.watch(&nvml, gpus, (stop, teller), &config)),
        };
        if let Err(error) = looked {
            tracing::debug!("the health of GPUs cannot be watched: {error}");
            thread::park_timeout(AGAIN);
        }
    }
}

#[derive(Default)]
struct NvmlWatch {
    ledger: Kept<Ledger>,
    inventory: Kept<Inventory>,
    /// Xids of which NVML told and the kernel's log may tell, by GPU, and when NVML did.
    pending: BTreeMap<(String, u32), Instant>,
    /// What GPUs told last, and when.
    states: BTreeMap<String, (Instant, GpuState)>,
    /// Warnings by GPU, and when the cause was seen last.
    warnings: BTreeMap<(String, &'static str), Instant>,
    /// When a reset was looked for.
    looked: Option<Instant>,
}

impl NvmlWatch {
    /// The GPUs with leases; none while a MIG layout is changed.
    fn leased(&mut self, config: &Config) -> Gpus {
        let ledger_file = config.state_dir.join("ledger.json");
        let read = || Store::open(&config.state_dir).and_then(|store| store.read());
        let Ok(ledger) = self.ledger.get(&ledger_file, read) else { return Gpus::new() };
        let file = inventory::cache_path(config);
        let Ok(known) = self.inventory.get(&file, || inventory::last(config)) else { return Gpus::new() };
        if ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty()) {
            return Gpus::new();
        }
        let is_leased = |device: &Device| ledger.on_device(&device.uuid).next().is_some();
        let gone = known.left_out.iter().filter(|gone| !gone.lost);
        let gone =
            gone.filter(|gone| is_leased(&gone.gpu) || gone.mig.iter().any(is_leased)).map(|gone| &gone.gpu);
        let has_lease = |gpu: &&Device| {
            is_leased(gpu) || known.mig_devices_of(&gpu.uuid).any(|(device, _)| is_leased(device))
        };
        let gpus = known.gpus().filter(has_lease).chain(gone);
        gpus.map(|gpu| (gpu.uuid.clone(), gpu.bus_id.clone())).collect()
    }

    /// Without leases: looks whether a GPU that asked for a reset was reset.
    fn rest(&mut self, config: &Config) -> anyhow::Result<()> {
        self.note_warnings(config)?;
        let is_due = self.looked.is_none_or(|at| at.elapsed() >= PERIOD);
        let records = sick_gpus::read(config);
        if is_due && records.asked().next().is_some() {
            self.looked = Some(Instant::now());
            let (nvml, _) = probe::connect(config)?;
            let known = inventory::last(config)?.with_left_out();
            for gpu in records.asked().filter_map(|uuid| known.device(uuid)) {
                let asked = nvml.device_by_pci_bus_id(&*gpu.bus_id).map(|device| GpuState::of(&device));
                if asked.is_ok_and(|state| state.needs_no_reset()) {
                    note_reset(gpu, config);
                }
            }
        }
        thread::park_timeout(2 * ROUND);
        Ok(())
    }

    /// Watches `gpus` until they are not those with leases any more.
    fn watch(
        &mut self,
        nvml: &Nvml,
        gpus: &Gpus,
        (stop, teller): (&AtomicBool, &Mutex<Teller>),
        config: &Config,
    ) -> anyhow::Result<()> {
        // By their addresses: a search by UUID would open other GPUs, too.
        let handle = |(uuid, bus_id): (&String, &String)| {
            Some((uuid.clone(), nvml.device_by_pci_bus_id(&**bus_id).ok()?))
        };
        let devices: Vec<(String, NvmlDevice<'_>)> = gpus.iter().filter_map(handle).collect();
        let set = register(nvml, &devices);
        while !stop.load(Relaxed) && self.leased(config) == *gpus {
            for told in take_events(set.as_ref())? {
                self.pending.entry(told).or_insert_with(Instant::now);
            }
            self.act_on_pending(gpus, teller, config);
            for (uuid, device) in &devices {
                if self.states.get(uuid).is_none_or(|(at, _)| at.elapsed() >= PERIOD) {
                    self.judge(uuid, device, config);
                    self.note_warnings(config)?;
                }
            }
        }
        Ok(())
    }

    /// Acts on Xids that the kernel's log does not have.
    fn act_on_pending(&mut self, gpus: &Gpus, teller: &Mutex<Teller>, config: &Config) {
        let is_due = |(_, at): &(&(String, u32), &Instant)| at.elapsed() > TOGETHER;
        let due: Vec<_> = self.pending.iter().filter(is_due).map(|(key, at)| (key.clone(), *at)).collect();
        for ((uuid, number), at) in due {
            self.pending.remove(&(uuid.clone(), number));
            let mut teller = teller.lock().unwrap_or_else(PoisonError::into_inner);
            let bus_id = gpus.get(&uuid).and_then(|bus_id| bus_id.rsplit_once('.'));
            if let Some((bus_id, _)) = bus_id.filter(|_| !teller.has_seen(&uuid, number, at)) {
                let xid =
                    Xid { sequence: 0, bus_id: bus_id.to_owned(), number, pid: None, text: String::new() };
                teller.act_on(&xid, false, config);
            }
        }
    }

    fn judge(&mut self, uuid: &str, device: &NvmlDevice<'_>, config: &Config) {
        // Before the driver is asked: it may ask for a reset just now.
        let was_asked = sick_gpus::read(config).asked().any(|asked| asked == uuid);
        let state = GpuState::of(device);
        let before = self.states.insert(uuid.to_owned(), (Instant::now(), state));
        for text in state.warnings(before.as_ref().map(|(_, before)| before)) {
            let is_new = self.warnings.insert((uuid.to_owned(), text), Instant::now()).is_none();
            if is_new {
                warn(uuid, text, config);
            }
        }
        let Ok(known) = inventory::last(config).map(|known| known.with_left_out()) else { return };
        let Some(gpu) = known.device(uuid) else { return };
        match state.fault() {
            Some((what, remedy, asked)) => mark_sick(gpu, &what, remedy, asked, config),
            None if was_asked && state.needs_no_reset() => note_reset(gpu, config),
            None => {}
        }
    }

    /// Records the warnings of the last time where `sublet status` finds them.
    fn note_warnings(&mut self, config: &Config) -> anyhow::Result<()> {
        self.warnings.retain(|_, at| at.elapsed() < CALM);
        let mut all = BTreeMap::new();
        for (uuid, text) in self.warnings.keys() {
            let of_gpu: &mut Vec<String> = all.entry(uuid.clone()).or_default();
            of_gpu.push((*text).to_owned());
        }
        if sick_gpus::read(config).warnings != all {
            sick_gpus::change(config, |records| records.warnings = all)?;
        }
        Ok(())
    }
}

fn warn(uuid: &str, text: &str, config: &Config) {
    tracing::warn!(device = uuid, "health: {text}");
    let event = Event { devices: vec![uuid.to_owned()], text: text.to_owned(), ..Event::now(Kind::Warned) };
    events::emit(&config.state_dir, &[event]);
}

/// A set for the events of all devices that have such; `None`: there are none.
fn register<'n>(nvml: &'n Nvml, devices: &[(String, NvmlDevice<'n>)]) -> Option<EventSet<'n>> {
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let mut set = nvml.create_event_set().ok()?;
    for (uuid, device) in devices {
        let types = device.supported_event_types().unwrap_or(EventTypes::empty()) & wanted;
        if types.is_empty() {
            continue;
        }
        // The set is lost with a device that refuses. The kernel's log remains.
        set = device
            .register_events(types, set)
            .inspect_err(|error| tracing::warn!("{uuid}: NVML tells of no events: {error}"))
            .ok()?;
    }
    Some(set)
}

/// The Xids of a round, with their GPUs' UUIDs.
fn take_events(set: Option<&EventSet<'_>>) -> Result<Vec<(String, u32)>, NvmlError> {
    let mut found = Vec::new();
    let mut wait = ROUND;
    for set in set.into_iter().cycle().take(MOST_EVENTS) {
        let event = match set.wait(u32::try_from(wait.as_millis()).unwrap_or(0)) {
            Ok(event) => event,
            Err(NvmlError::Timeout) => break,
            Err(error) => return Err(error),
        };
        wait = Duration::ZERO;
        let number = match event.event_data {
            Some(XidError::Value(number)) => u32::try_from(number).unwrap_or(u32::MAX),
            Some(XidError::Unknown) => 999,
            None => DOUBLE_BIT_XID,
        };
        // One that does not tell its name any more is found by other means.
        found.extend(event.device.uuid().map(|uuid| (uuid, number)));
    }
    if set.is_none() || !found.is_empty() {
        thread::park_timeout(ROUND);
    }
    Ok(found)
}
