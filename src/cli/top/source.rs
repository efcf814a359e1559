//! The data of `sublet top`, read again and again, and the last minutes of it. NVML stays open between two looks. The
//! ledger and the inventory are parsed again when their files are replaced, the containers' names when the ledger is, or
//! after a while.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::cached_files::Kept;
use crate::names::Names;
use crate::shown::{Device, memory_used};
use crate::status::{LeaseOnDevice, Sources, Status};
use crate::usage::{Meter, SAMPLED, Usage};
use crate::{mps_daemons, probe};
use sublet_core::admit::{Local, confirmed_inventory, is_remote};
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Ledger, Store};

/// How often leases of ended containers are freed, as other commands do before they show leases.
const SETTLE: Duration = Duration::from_secs(10);

/// An engine may rename a container; its record is read again after this long.
const RENAMED: Duration = Duration::from_secs(30);

/// NVML is closed within this time when a MIG layout is to be changed: an open NVML prevents a reset.
const STEP: Duration = Duration::from_millis(500);

/// The state of this host at one moment.
#[derive(Clone, Debug)]
pub struct Look {
    pub status: Status,
    pub at: Instant,
}

/// A look, or why there is none.
pub type LookResult = Result<Look, String>;

/// Looks every `interval` until `tell` returns false. A driver that is lost is looked for again.
pub fn watch(config: &Config, interval: Duration, tell: &mut dyn FnMut(LookResult) -> bool) {
    let mut source = Source {
        config,
        interval,
        tell,
        ledger: Kept::default(),
        inventory: Kept::default(),
        names: None,
        settled: Instant::now(),
    };
    let mut was_lost = false;
    loop {
        let began = Instant::now();
        let opened = if source.resets() {
            Err("a MIG layout is being changed".to_owned())
        } else {
            probe::connect(config).map_err(|error| error.to_string())
        };
        match opened {
            Ok((nvml, _)) => {
                if was_lost {
                    // The devices may have changed. Where that fails, the last inventory is shown, and what the driver
                    // says of it.
                    drop(confirmed_inventory(config));
                }
                if !source.watch_by(Meter::new(&nvml, SAMPLED)) {
                    return;
                }
            }
            Err(error) => {
                let result = source.look(&mut |_, _| Usage::failed(error.clone()));
                if !(source.tell)(result) {
                    return;
                }
                sleep(interval.saturating_sub(began.elapsed()).max(interval / 4));
            }
        }
        was_lost = true;
    }
}

struct Source<'a> {
    config: &'a Config,
    interval: Duration,
    tell: &'a mut dyn FnMut(LookResult) -> bool,
    ledger: Kept<Ledger>,
    inventory: Kept<Inventory>,
    /// The names of the containers in one ledger, and when they were learnt.
    names: Option<(Rc<Ledger>, Names, Instant)>,
    settled: Instant,
}

impl Source<'_> {
    /// Looks until the driver is lost, a layout is changed, or nobody listens: then false.
    fn watch_by(&mut self, mut meter: Meter<'_>) -> bool {
        loop {
            let began = Instant::now();
            let result = self.look(&mut |ledger, inventory| meter.read(ledger, inventory));
            let lost = result.as_ref().is_ok_and(is_blind);
            if !(self.tell)(result) {
                return false;
            }
            let until = began + self.interval.max(began.elapsed() + self.interval / 4);
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                sleep(left.min(STEP));
                if self.resets() {
                    return true;
                }
            }
            if lost {
                return true;
            }
        }
    }

    /// Whether GPUs are about to be reset.
    fn resets(&mut self) -> bool {
        let ledger = self.read_ledger();
        ledger.is_ok_and(|ledger| ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty()))
    }

    fn read_ledger(&mut self) -> Result<Rc<Ledger>, String> {
        let config = self.config;
        let read = || Store::open(&config.state_dir)?.peek();
        self.ledger.get(&config.state_dir.join("ledger.json"), read).map_err(|error| error.to_string())
    }

    fn look(&mut self, ask: &mut dyn FnMut(&Rc<Ledger>, &Inventory) -> Usage) -> LookResult {
        let config = self.config;
        if self.settled.elapsed() >= SETTLE && !is_remote(config) {
            self.settled = Instant::now();
            // Its changes show in the next read.
            drop(Local::new(config).reconcile(|_| Ok(())));
        }
        let ledger = self.read_ledger()?;
        let file = inventory::cache_path(config);
        let inventory =
            self.inventory.get(&file, || inventory::last(config)).map_err(|error| error.to_string())?;
        let usage = ask(&ledger, &inventory);
        self.names.take_if(|(of, _, at)| !Rc::ptr_eq(of, &ledger) || at.elapsed() >= RENAMED);
        let learn = || (Rc::clone(&ledger), Names::learn(&ledger, config), Instant::now());
        let (_, names, _) = self.names.get_or_insert_with(learn);
        let mps = mps_daemons::list_unasked(&ledger, config);
        let sources = Sources { inventory: &inventory, ledger: &ledger, names, usage: &usage, config };
        Ok(Look { status: Status::of(&sources, mps), at: Instant::now() })
    }
}

/// Whether the driver reports nothing of any device: it was unloaded, or all GPUs are lost.
fn is_blind(look: &Look) -> bool {
    !look.status.devices.is_empty() && look.status.devices.iter().all(|gpu| gpu.unknown.is_some())
}

// Sparklines. Times are of the monotonic clock: a clock that is set back changes nothing here.

/// The time that one character of a sparkline stands for.
const CELL: Duration = Duration::from_secs(5);

/// How many of them are kept: ten minutes.
const KEPT: usize = 120;

/// Marks from least to most, and one for a time of which nothing is known.
const MARKS: [([char; 8], char); 2] =
    [(['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'], '·'), (['_', '.', ':', '-', '=', '+', '*', '#'], ' ')];

/// The value in a sparkline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// The load.
    Load,
    /// Memory in use.
    Memory,
}

/// The sum and the number of each cell's values, each a part of 1, by [`Trace`]; the newest cell at the end.
type Past = VecDeque<[(f32, u16); 2]>;

/// By a device's UUID and by [`lease_key`].
#[derive(Debug, Default)]
pub struct History {
    began: Option<Instant>,
    /// Cells that are over.
    over: u64,
    past: BTreeMap<String, Past>,
}

/// The key of a container on a device.
pub fn lease_key(lease: &LeaseOnDevice) -> String {
    format!("{} {}", lease.id, lease.device)
}

impl History {
    /// Adds `look`. Devices and containers that are gone are forgotten.
    pub fn note(&mut self, look: &Look) {
        let began = *self.began.get_or_insert(look.at);
        let now = u64::try_from(look.at.duration_since(began).as_millis() / CELL.as_millis()).unwrap_or(0);
        for _ in self.over..now.min(self.over + KEPT as u64) {
            self.past.values_mut().for_each(|past| past.push_back(Default::default()));
        }
        self.over = now;
        let mut before = std::mem::take(&mut self.past);
        let mut note = |key: String, values: [Option<f64>; 2]| {
            let mut past = before.remove(&key).unwrap_or_else(|| Past::from([Default::default()]));
            past.drain(..past.len().saturating_sub(KEPT));
            for ((sum, count), value) in past.back_mut().into_iter().flatten().zip(values) {
                if let Some(value) = value.filter(|value| value.is_finite()) {
                    #[expect(clippy::cast_possible_truncation, reason = "for a mark out of eight")]
                    let value = value.clamp(0.0, 1.0) as f32;
                    (*sum, *count) = (*sum + value, count.saturating_add(1));
                }
            }
            self.past.insert(key, past);
        };
        for device in Device::all(&look.status.devices) {
            let load = device.load().map(|percent| percent / 100.0);
            note(device.uuid.to_owned(), [load, device.memory_used()]);
        }
        for lease in &look.status.leases {
            let load = lease.used.sm_percent.map(|percent| f64::from(percent) / 100.0);
            note(lease_key(lease), [load, memory_used(lease, &look.status)]);
        }
    }

    /// The mean of each of the latest `most` cells of `key`, the newest at the end.
    fn means(&self, key: &str, trace: Trace, most: usize) -> impl Iterator<Item = Option<f32>> {
        let past = self.past.get(key);
        let skipped = past.map_or(0, |past| past.len().saturating_sub(most));
        past.into_iter().flatten().skip(skipped).map(move |cell| {
            let (sum, count) = cell[trace as usize];
            (count > 0).then(|| sum / f32::from(count))
        })
    }

    /// The latest `width` cells of `key`, the newest at the end.
    pub fn sparkline(&self, key: &str, trace: Trace, width: usize, utf8: bool) -> String {
        let (marks, unknown) = MARKS[usize::from(!utf8)];
        self.means(key, trace, width).map(|part| part.map_or(unknown, |part| marks[level(part)])).collect()
    }

    /// The latest `most` values of `key` in percent, the newest at the end.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 100")]
    pub fn past(&self, key: &str, trace: Trace, most: usize) -> Vec<Option<u8>> {
        let percent = |part: f32| (part.clamp(0.0, 1.0) * 100.0).round() as u8;
        self.means(key, trace, most).map(|part| part.map(percent)).collect()
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 7")]
fn level(part: f32) -> usize {
    ((part.clamp(0.0, 1.0) * 8.0) as usize).min(7)
}
