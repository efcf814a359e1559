//! Who held how much of the GPUs, and for how long: the record for `sublet report`. `sublet serve` looks at the ledger and at
//! what happened since every half a minute, and so does each report; nothing of this is done where a container starts or ends.

mod picture;
mod record;
mod report;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};

use crate::cached_files::Kept;
use crate::events::{Position, Reader};
use crate::names::{self, Name, Names, Owner};
use crate::usage::{self, Usage};
use record::{Key, Moment, Open, Part, Record, Sums};
use sublet_core::admit::is_remote;
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::events::{Event, Kind};
use sublet_core::fs::{make_trusted_directory, open_lock};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Booked, Lease, Ledger, Store};
use sublet_core::process::{read_boot_id, uptime_milliseconds};
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::short_id;

pub use picture::svg;
pub use report::{By, Group, Report, Wanted};

/// Between two looks of the service. What the driver tells of each is averaged over as long.
const PERIOD: Duration = Duration::from_secs(30);

/// Beyond this, in milliseconds, nobody has looked.
const GAP: u64 = 300_000;

/// What the driver tells stands for no longer than this, in milliseconds.
const SAMPLED: u64 = 120_000;

/// A host on which nothing happens has a sign of life this often, in milliseconds: its disk may sleep.
const IDLE: u64 = 240_000;

/// The event of an end is there at most this long after the ledger has it, in milliseconds.
const LATE: u64 = 5000;

/// A lease that was waited for as long as this, in milliseconds, counts as a wait.
const WAIT: u64 = 1000;

/// The longest name of a container, image or owner, in characters.
const LONGEST: usize = 64;

/// Where the record is.
fn directory(config: &Config) -> PathBuf {
    config.lasting_dir().join("usage")
}

/// Starts the thread of `sublet serve`; it ends with the process.
pub fn start() -> io::Result<()> {
    let run = || {
        let mut ledger = Kept::default();
        loop {
            if let Ok(config) = config_files::load() {
                look_by_service(&mut ledger, &config);
            }
            std::thread::sleep(PERIOD);
        }
    };
    std::thread::Builder::new().name("accounting".to_owned()).spawn(run).map(drop)
}

/// A disk that is full stays so for a while.
static TOLD: AtomicBool = AtomicBool::new(false);

/// The journal is read only when the ledger has changed: that starts a program.
fn look_by_service(kept: &mut Kept<Ledger>, config: &Config) {
    let (mut has_changed, path) = (false, config.state_dir.join("ledger.json"));
    let read = || {
        has_changed = true;
        Store::open(&config.state_dir)?.read()
    };
    let Ok(ledger) = kept.get(&path, read) else { return };
    // An open NVML would prevent a reset.
    let may_ask = !ledger.leases.is_empty() && ledger.mig.under_way.is_none();
    let inventory = inventory::last(config).ok().filter(|_| may_ask);
    let usage = inventory.map(|inventory| usage::of_host(&ledger, &inventory, PERIOD, config));
    match look(has_changed, usage.as_ref(), config) {
        Ok(()) => TOLD.store(false, Relaxed),
        Err(error) if !TOLD.swap(true, Relaxed) => tracing::warn!("use cannot be recorded: {error}"),
        Err(error) => tracing::debug!("use cannot be recorded: {error}"),
    }
}

/// Adds to the record what was held since the last look; `with_events`: also what happened.
///
/// # Errors
/// The record or the ledger cannot be read, or the record cannot be written. Nothing is lost then: the next look does it.
pub fn look(with_events: bool, usage: Option<&Usage>, config: &Config) -> io::Result<()> {
    if is_remote(config) {
        return Ok(());
    }
    let dir = directory(config);
    for dir in [dir.parent().unwrap_or(&dir), &dir] {
        make_trusted_directory(dir).map_err(|why| io::Error::other(format!("{} {why}", dir.display())))?;
    }
    let lock = open_lock(&dir.join("lock"))?;
    let _held = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let mut look = Look::begin(&dir)?;
    let events = if with_events { look.events(config)? } else { Vec::new() };
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).map_err(io::Error::other)?;
    let is_known = |lease: &Lease| look.record.now.open.contains_key(lease.id.as_str());
    let names =
        if ledger.leases.iter().all(is_known) { Names::known(config) } else { Names::learn(&ledger, config) };
    // Beside a driver that does not answer, the last inventory still tells what was held.
    let inventory = inventory::last(config).ok();
    let sources = Sources { ledger: &ledger, names: &names, inventory: inventory.as_ref(), usage };
    look.add(&events, &sources)?;
    look.end(!events.is_empty())
}

/// The report that is wanted; `own`: of this user's containers alone.
pub fn report(wanted: &Wanted, own: Option<u32>, config: &Config) -> Report {
    wanted.report(&directory(config), own)
}

/// What a look sees.
struct Sources<'a> {
    ledger: &'a Ledger,
    names: &'a Names,
    inventory: Option<&'a Inventory>,
    usage: Option<&'a Usage>,
}

/// One look.
struct Look {
    record: Record,
    now: Moment,
    /// How long ago the last look was, in milliseconds; `None`: there was none in this boot.
    since_last: Option<u64>,
    /// Whether nothing was held then.
    was_idle: bool,
}

impl Look {
    fn begin(dir: &Path) -> io::Result<Self> {
        let record = Record::open(dir)?;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let now = Moment { uptime: uptime_milliseconds(), time: u64::try_from(time).unwrap_or(u64::MAX) };
        Self::at(record, now, read_boot_id()?)
    }

    /// What an earlier boot left open has ended with it.
    fn at(mut record: Record, now: Moment, boot_id: &str) -> io::Result<Self> {
        let is_same = record.now.boot_id == boot_id;
        let last = record.now.looked;
        let since_last = last.filter(|_| is_same).map(|last| now.uptime.saturating_sub(last.uptime));
        let gap = since_last.or_else(|| last.map(|last| now.time.saturating_sub(last.time)));
        if let Some(gap) = gap.filter(|gap| *gap > GAP) {
            record.note_gap(gap, now)?;
        }
        if !is_same {
            // On the clock of that boot.
            let then = last.unwrap_or(now);
            for open in std::mem::take(&mut record.now.open).into_values() {
                record.close_unseen(&open, then)?;
            }
            (record.now.boot_id, record.now.position) = (boot_id.to_owned(), Position::default());
        }
        let was_idle = record.now.open.is_empty();
        Ok(Self { record, now, since_last, was_idle })
    }

    fn events(&mut self, config: &Config) -> io::Result<Vec<Event>> {
        let position = self.record.now.position.clone();
        let mut reader = Reader { position, this_boot: true, dockers: false };
        let (events, unread) = reader.new_events(config);
        if let Some(why) = unread {
            tracing::debug!("{why}");
        }
        self.record.now.position = reader.position;
        Ok(events)
    }

    fn add(&mut self, events: &[Event], sources: &Sources<'_>) -> io::Result<()> {
        for event in events {
            self.add_event(event, sources)?;
        }
        let is_counted = |lease: &&Lease| !sources.ledger.is_booked_with_job(lease);
        let held: BTreeMap<&str, &Lease> =
            sources.ledger.leases.iter().filter(is_counted).map(|lease| (lease.id.as_str(), lease)).collect();
        let mut open = std::mem::take(&mut self.record.now.open);
        for (id, lease) in &held {
            if !open.contains_key(*id) {
                open.insert((*id).to_owned(), self.open_found(lease, sources)?);
            }
        }
        for (id, mut one) in open {
            match held.get(id.as_str()) {
                Some(lease) => {
                    self.tell_use(&mut one, lease, sources);
                    self.record.count(&mut one, self.now.uptime, self.now)?;
                    (one.parts, one.missing) =
                        (parts(&Booked::of(lease), &lease.devices, sources.inventory), None);
                }
                // Its event may be on its way.
                None if self.now.uptime.saturating_sub(*one.missing.get_or_insert(self.now.uptime))
                    <= LATE => {}
                None => {
                    self.record.close_unseen(&one, self.now)?;
                    continue;
                }
            }
            self.record.now.open.insert(id, one);
        }
        Ok(())
    }

    fn add_event(&mut self, event: &Event, sources: &Sources<'_>) -> io::Result<()> {
        match event.kind {
            Kind::LeaseTaken => {
                let Some(booked) = Booked::of_event(event).filter(|booked| booked.job.is_none()) else {
                    return Ok(());
                };
                if !self.record.now.open.contains_key(&event.lease) {
                    let name = sources.names.of_id(&event.lease);
                    let key =
                        key(event.uid, Owner::of_event(event, name), &event.container_id, name, booked.mode);
                    let parts = parts(&booked, &event.devices, sources.inventory);
                    let open =
                        Open { key, parts, counted: event.uptime_ms.min(self.now.uptime), missing: None };
                    self.note(&open, Sums { leases: 1, ..Sums::default() }, event.uptime_ms)?;
                    self.record.now.open.insert(event.lease.clone(), open);
                }
                let (waited, open) =
                    (event.took_ms.unwrap_or_default(), self.record.now.open.get(&event.lease).cloned());
                if let Some(open) = open.filter(|_| waited >= WAIT) {
                    self.note(&open, Sums { waits: 1, waited, ..Sums::default() }, event.uptime_ms)?;
                }
            }
            Kind::LeaseEnded => {
                if let Some(mut open) = self.record.now.open.remove(&event.lease) {
                    self.record.count(&mut open, event.uptime_ms.min(self.now.uptime), self.now)?;
                }
            }
            Kind::Refused => {
                let name = sources.names.of_id(&event.container_id).filter(|_| !names::is_another(event.uid));
                let mut key =
                    key(event.uid, Owner::of_event(event, name), &event.container_id, name, Mode::default());
                key.mode.clear();
                let open = Open { key, ..Open::default() };
                self.note(&open, Sums { refusals: 1, ..Sums::default() }, event.uptime_ms)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn note(&mut self, open: &Open, more: Sums, uptime: u64) -> io::Result<()> {
        // A user's refusals have no time since boot.
        let uptime = if uptime == 0 { self.now.uptime } else { uptime.min(self.now.uptime) };
        self.record.note(open, more, uptime, self.now)
    }

    /// A lease of whose taking no event tells: it was there since it says, but not before the last look.
    fn open_found(&mut self, lease: &Lease, sources: &Sources<'_>) -> io::Result<Open> {
        let name = sources.names.of(lease);
        let key = key(lease.container.uid, Owner::of(lease, name), &lease.container.name(), name, lease.mode);
        let age = self.now.time.saturating_sub(lease.since.saturating_mul(1000));
        let age = age.min(self.since_last.unwrap_or(u64::MAX)).min(self.now.uptime);
        let parts = parts(&Booked::of(lease), &lease.devices, sources.inventory);
        let open = Open { key, parts, counted: self.now.uptime - age, missing: None };
        self.note(&open, Sums { leases: 1, ..Sums::default() }, open.counted)?;
        Ok(open)
    }

    /// What the driver tells of a lease stands for the time since the last look.
    fn tell_use(&self, open: &mut Open, lease: &Lease, sources: &Sources<'_>) {
        let is_fresh = self.since_last.is_some_and(|since| since <= SAMPLED);
        let Some(usage) = sources.usage.filter(|_| is_fresh) else { return };
        for (part, device) in open.parts.iter_mut().zip(&lease.devices) {
            let percent = usage.of_lease(lease, device, sources.ledger).sm_percent;
            part.used = percent.map(|percent| percent.min(100) * 1000);
        }
    }

    /// Writes the record, where there is something to write.
    fn end(mut self, has_events: bool) -> io::Result<()> {
        let is_idle = self.was_idle && self.record.now.open.is_empty() && !has_events;
        if is_idle && self.since_last.is_some_and(|since| since < IDLE) {
            return Ok(());
        }
        self.record.now.looked = Some(self.now);
        self.record.write(self.now)
    }
}

/// Texts are cut here, and made safe where they are shown.
fn key(uid: u32, owner: Option<Owner>, id: &str, name: Option<&Name>, mode: Mode) -> Key {
    let cut = |text: &str| text.chars().take(LONGEST).collect::<String>();
    Key {
        uid,
        user: names::user(uid),
        owner: owner.map(|owner| Owner { name: cut(&owner.name), ..owner }),
        container: name.and_then(Name::called).map_or_else(|| short_id(id), cut),
        image: name.map_or_else(String::new, |name| cut(&name.image)),
        gpu: String::new(),
        mode: mode.to_string(),
    }
}

/// What is held of each device, as a part of its GPU.
fn parts(booked: &Booked, devices: &[String], inventory: Option<&Inventory>) -> Vec<Part> {
    let part = |uuid: &String| {
        let device = inventory.and_then(|inventory| inventory.device(uuid));
        // Of a device that is gone, nothing but that it is held is known.
        let gone = || Part { gpu: uuid.chars().take(LONGEST).collect(), ..Part::default() };
        device.map_or_else(gone, |device| part_of(booked, device))
    };
    devices.iter().map(part).collect()
}

fn part_of(booked: &Booked, device: &Device) -> Part {
    let (own_sm, own_memory, total) = match &device.mig_device {
        None => (Percent::WHOLE, device.memory_bytes, device.memory_bytes),
        Some(mig) => {
            let sms = device.sm_count.zip(mig.gpu_sm_count);
            let sm = sms.map_or_else(Percent::default, |(own, all)| Percent::of_all(own, all));
            // Compute instances of one GPU instance share its memory.
            (sm, device.memory_bytes / (mig.siblings.len() as u64 + 1), mig.gpu_memory_bytes)
        }
    };
    let is_whole = matches!(booked.mode, Mode::Exclusive | Mode::Mig);
    let sm = match (booked.mode, booked.isolation) {
        _ if is_whole => own_sm.thousandths(),
        (Mode::Mps, Isolation::Shared) => {
            let part = booked.sm.unwrap_or_default().of(u64::from(own_sm.thousandths()));
            u32::try_from(part).unwrap_or_default()
        }
        // It takes turns on the whole device.
        _ => 0,
    };
    let memory = booked.memory_bytes.or(is_whole.then_some(own_memory)).unwrap_or_default();
    let memory = Percent::nearest(100.0 * crate::shown::fraction(memory, total)).min(Percent::WHOLE);
    Part { gpu: device.gpu().to_owned(), sm, memory: memory.thousandths(), used: None }
}

#[cfg(test)]
mod tests;
