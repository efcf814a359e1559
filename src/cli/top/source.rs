//! What `sublet top` shows, read again and again. NVML stays open between two looks. The ledger and the inventory are
//! parsed again when their files are replaced, the containers' names when the ledger is, or after a while.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::cached_files::Kept;
use crate::mps_daemons;
use crate::names::Names;
use crate::probe;
use crate::status::{Sources, Status};
use crate::usage::{Meter, ProcessUse, Usage};
use sublet_core::admit::{Local, confirmed_inventory, is_remote};
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store};

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
    /// The processes of each lease, by its id and the device.
    pub processes: BTreeMap<(String, String), Vec<ProcessUse>>,
}

/// A look, or why there is none.
pub type Told = Result<Look, String>;

/// Looks every `interval` until `tell` returns false. A driver that is lost is looked for again.
pub fn watch(config: &Config, interval: Duration, tell: &mut dyn FnMut(Told) -> bool) {
    let mut source = Source {
        config,
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
                    // The devices may be others. Where that fails, the last inventory is shown, and what the driver
                    // says of it.
                    drop(confirmed_inventory(config));
                }
                if !source.watch_by(&mut Meter::new(&nvml), interval, tell) {
                    return;
                }
                was_lost = true;
            }
            Err(error) => {
                was_lost = true;
                let told = source.look(&mut |_, _| Usage::failed(error.clone()));
                if !tell(told) {
                    return;
                }
                sleep(interval.saturating_sub(began.elapsed()).max(interval / 4));
            }
        }
    }
}

struct Source<'a> {
    config: &'a Config,
    ledger: Kept<Ledger>,
    inventory: Kept<Inventory>,
    names: Option<Known>,
    settled: Instant,
}

/// The names of the containers in one ledger.
struct Known {
    ledger: Rc<Ledger>,
    names: Names,
    at: Instant,
}

impl Source<'_> {
    /// Looks until the driver is lost, a layout is changed, or nobody listens: then false.
    fn watch_by(
        &mut self,
        meter: &mut Meter<'_>,
        interval: Duration,
        tell: &mut dyn FnMut(Told) -> bool,
    ) -> bool {
        loop {
            let began = Instant::now();
            let told = self.look(&mut |ledger, inventory| meter.read(ledger, inventory));
            let lost = told.as_ref().is_ok_and(is_blind);
            if !tell(told) {
                return false;
            }
            let until = began + interval.max(began.elapsed() + interval / 4);
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

    fn look(&mut self, ask: &mut dyn FnMut(&Rc<Ledger>, &Inventory) -> Usage) -> Told {
        let config = self.config;
        if self.settled.elapsed() >= SETTLE && !is_remote(config) {
            self.settled = Instant::now();
            // What it did shows in what is read next.
            drop(Local::new(config).reconcile(|_| Ok(())));
        }
        let ledger = self.read_ledger()?;
        let file = inventory::cache_path(config);
        let inventory =
            self.inventory.get(&file, || inventory::last(config)).map_err(|error| error.to_string())?;
        let usage = ask(&ledger, &inventory);
        let is_known = |known: &Known| Rc::ptr_eq(&known.ledger, &ledger) && known.at.elapsed() < RENAMED;
        let known = self.names.take().filter(is_known).unwrap_or_else(|| Known {
            ledger: Rc::clone(&ledger),
            names: Names::learn(&ledger, config),
            at: Instant::now(),
        });
        let mps = mps_daemons::list_unasked(&ledger, config);
        let sources =
            Sources { inventory: &inventory, ledger: &ledger, names: &known.names, usage: &usage, config };
        let status = Status::of(&sources, mps);
        self.names = Some(known);
        Ok(Look { status, at: Instant::now(), processes: processes(&usage, &ledger) })
    }
}

/// Whether the driver reports nothing of any device: it was unloaded, or all GPUs are lost.
fn is_blind(look: &Look) -> bool {
    let mut gpus = look.status.devices.iter();
    !look.status.devices.is_empty() && gpus.all(|gpu| gpu.unknown.is_some())
}

fn processes(usage: &Usage, ledger: &Ledger) -> BTreeMap<(String, String), Vec<ProcessUse>> {
    let leases =
        ledger.leases.iter().flat_map(|lease| lease.devices.iter().map(move |device| (lease, device)));
    let of_lease = |(lease, device): (&Lease, &String)| {
        let own: Vec<ProcessUse> = usage.devices.get(device)?.of_lease(lease).cloned().collect();
        Some(((lease.id.to_string(), device.clone()), own))
    };
    leases.filter_map(of_lease).collect()
}
