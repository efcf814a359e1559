//! Who held how much of the GPUs, and for how long: the record for `sublet report`. `sublet serve` looks at the ledger and at
//! what happened since every half a minute, and so does each report; nothing of this is done where a container starts or ends.

mod picture;
mod record;
mod report;

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};

use crate::events::{DISORDER, Reader};
use crate::known_faults::KnownFaults;
use crate::names::{Name, Names, Owner, is_another, user};
use crate::usage::{self, Usage};
use record::{DIRECTORY, Key, Moment, Open, Part, Record, Sums};
use sublet_core::admit::is_remote;
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::events::{Event, Kind};
use sublet_core::fs::{make_trusted_directory, open_lock};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Booked, Lease, Ledger, Store, taken_event};
use sublet_core::process::{read_boot_id, uptime_milliseconds};
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::short_id;

pub use picture::svg;
pub use report::{By, Group, Report, Wanted};

/// Between two looks of the service. What the driver tells of each is averaged over as long.
const PERIOD: Duration = Duration::from_secs(30);

/// What the driver tells stands for no longer than this, in milliseconds.
const SAMPLED: u64 = 120_000;

/// The event of an end is there at most this long after the ledger has it, in milliseconds.
const LATE: u64 = 5000;

/// A lease that was waited for as long as this, in milliseconds, counts as a wait.
const WAIT: u64 = 1000;

/// The journal alone may take 20 s, and the service's unit gives 75 s for the end, of which 60 s are for last answers.
const LAST_LOOK: Duration = Duration::from_secs(5);

/// The longest name of a container, image or owner, in characters.
const LONGEST: usize = 64;

/// Starts the thread of `sublet serve`; it ends with the process.
pub fn start() -> io::Result<()> {
    // A disk that is full stays so for a while.
    static KNOWN: KnownFaults = KnownFaults::none();
    let run = || loop {
        let looked = config_files::load().map_err(io::Error::other).and_then(|config| look_with_use(&config));
        let fault = looked.err().map(|error| format!("use cannot be recorded: {error}"));
        KNOWN.warn(fault.map(|line| (line.clone(), line)), "use is recorded again");
        std::thread::sleep(PERIOD);
    };
    std::thread::Builder::new().name("accounting".to_owned()).spawn(run).map(drop)
}

/// The last look of a service that ends, and so waits [`LAST_LOOK`] at most: the thread ends with the process, and what it did
/// not write is for the next service.
pub fn finish(config: &Config) {
    let (config, (done, looked)) = (config.clone(), mpsc::channel::<()>());
    let run = move || {
        let _done = done;
        let _ = look(true, None, &config).inspect_err(|error| tracing::debug!("{error}"));
    };
    let _ = std::thread::Builder::new().name("last look".to_owned()).spawn(run);
    let _ = looked.recv_timeout(LAST_LOOK);
}

/// With what the driver tells of the leases.
fn look_with_use(config: &Config) -> io::Result<()> {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).map_err(io::Error::other)?;
    // An open NVML would prevent a reset.
    let may_ask = !ledger.leases.is_empty() && ledger.mig.under_way.is_none();
    let inventory = inventory::last(config).ok().filter(|_| may_ask);
    let usage = inventory.map(|inventory| usage::of_host(&ledger, &inventory, PERIOD, config));
    look(false, usage.as_ref(), config)
}

/// Adds to the record what was held since the last look, and what happened: always if that is `asked` for, else where
/// something is held, or nothing was written for a while, because to read the journal starts a program.
///
/// # Errors
/// The record or the ledger cannot be read, or the record cannot be written. Nothing is lost then: the next look does it.
pub fn look(asked: bool, usage: Option<&Usage>, config: &Config) -> io::Result<()> {
    if is_remote(config) {
        return Ok(());
    }
    let dir = config.lasting_dir().join(DIRECTORY);
    make_trusted_directory(&dir).map_err(|why| io::Error::other(format!("{} {why}", dir.display())))?;
    let _held =
        Flock::lock(open_lock(&dir.join("lock"))?, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let at = Moment { uptime: uptime_milliseconds(), time: u64::try_from(time).unwrap_or(u64::MAX) };
    let mut record = Record::open(&dir, at)?;
    let last = record.begin(read_boot_id()?)?;
    let mut reader = Reader { position: record.now.position.clone(), this_boot: true, dockers: false };
    let is_wanted = asked || !record.now.open.is_empty() || record.is_due();
    let (mut events, unread) = if is_wanted { reader.new_events(config) } else { Default::default() };
    unread.map_or(Ok(()), |why| Err(io::Error::other(why)))?;
    events.retain(|event| last.is_none_or(|last| event.uptime_ms.saturating_add(DISORDER) >= last));
    record.now.position = reader.position;
    let ledger = &Store::open(&config.state_dir).and_then(|store| store.read()).map_err(io::Error::other)?;
    let is_known = |lease: &Lease| record.now.open.contains_key(lease.id.as_str());
    let is_new = !events.is_empty() || !ledger.leases.iter().all(is_known);
    let names = &if is_new { Names::learn(ledger, config) } else { Names::default() };
    // Beside a driver that does not answer, the last inventory still tells what was held.
    let inventory = inventory::last(config).ok();
    let mut look = Look { record, last, ledger, names, inventory: inventory.as_ref(), usage };
    look.add(&events)?;
    look.record.write()
}

/// One look, and what it sees.
struct Look<'a> {
    record: Record,
    /// When the last look was, in milliseconds since boot; `None`: there was none in this boot.
    last: Option<u64>,
    ledger: &'a Ledger,
    names: &'a Names,
    inventory: Option<&'a Inventory>,
    usage: Option<&'a Usage>,
}

impl Look<'_> {
    fn add(&mut self, events: &[Event]) -> io::Result<()> {
        for event in events {
            self.add_event(event)?;
        }
        let (now, last) = (self.record.at, self.last.unwrap_or_default());
        // What a job's containers have is booked with the job's lease.
        let held = self.ledger.leases.iter().filter(|lease| lease.within.is_none());
        let held: BTreeMap<&str, &Lease> = held.map(|lease| (lease.id.as_str(), lease)).collect();
        let is_new = |lease: &&&Lease| !self.record.now.open.contains_key(lease.id.as_str());
        for lease in held.values().filter(is_new).collect::<Vec<_>>() {
            // No event tells of its taking: it was there since it says, but not before the last look.
            let age = now.time.saturating_sub(lease.since.saturating_mul(1000));
            let began = now.uptime.saturating_sub(age).max(last);
            self.add_event(&Event { uptime_ms: began, ..taken_event(lease) })?;
        }
        let passed = now.uptime.saturating_sub(last);
        let usage = self.usage.filter(|_| self.last.is_some() && passed <= SAMPLED);
        for (id, mut open) in std::mem::take(&mut self.record.now.open) {
            if let Some(lease) = held.get(id.as_str()) {
                for (part, device) in open.parts.iter_mut().zip(&booked_devices(lease)) {
                    let percent =
                        usage.and_then(|usage| usage.of_lease(lease, device, self.ledger).sm_percent);
                    part.used = percent.map(|percent| percent.min(100) * 1000);
                }
                self.record.count(&mut open, now.uptime)?;
                let parts = parts(&Booked::of(lease), &booked_devices(lease), self.inventory);
                (open.parts, open.missing) = (parts, None);
            } else if now.uptime.saturating_sub(*open.missing.get_or_insert(now.uptime)) > LATE {
                self.record.close_unseen(&open, now)?;
                continue;
            }
            self.record.now.open.insert(id, open);
        }
        Ok(())
    }

    fn add_event(&mut self, event: &Event) -> io::Result<()> {
        let at = event.uptime_ms.min(self.record.at.uptime);
        let time = self.record.at.time_at(at);
        match (event.kind, Booked::of_event(event).filter(|booked| booked.job.is_none())) {
            (Kind::LeaseTaken, Some(booked)) => {
                let known = self.record.now.open.get(&event.lease).cloned();
                let leases = u64::from(known.is_none());
                let open = known.unwrap_or_else(|| Open {
                    key: key(event, &event.lease, booked.mode.into(), self.names),
                    parts: parts(&booked, &event.devices, self.inventory),
                    counted: at,
                    missing: None,
                });
                let waited = event.took_ms.filter(|waited| *waited >= WAIT).unwrap_or_default();
                let sums = Sums { leases, waits: u64::from(waited > 0), waited, ..Sums::default() };
                self.record.note(&open, sums, time)?;
                self.record.now.open.entry(event.lease.clone()).or_insert(open);
            }
            (Kind::LeaseEnded, _) => {
                if let Some(mut open) = self.record.now.open.remove(&event.lease) {
                    self.record.count(&mut open, at)?;
                }
            }
            (Kind::Suspended | Kind::Resumed | Kind::Moved, _) => {
                if let Some(mut open) = self.record.now.open.remove(&event.lease) {
                    self.record.count(&mut open, at)?;
                    let held = self.ledger.leases.iter().find(|lease| lease.id.as_str() == event.lease);
                    let booked = held.map(Booked::of).filter(|_| event.kind != Kind::Suspended);
                    open.parts =
                        booked.map_or_else(Vec::new, |booked| parts(&booked, &event.devices, self.inventory));
                    self.record.now.open.insert(event.lease.clone(), open);
                }
            }
            (Kind::Refused, _) => {
                let key = key(event, &event.container_id, "", self.names);
                let open = Open { key, ..Open::default() };
                self.record.note(&open, Sums { refusals: 1, ..Sums::default() }, time)?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// What `event` is counted with; `id` is that of the lease, or of the container that was refused. Texts are cut here, and made
/// safe where they are shown.
fn key(event: &Event, id: &str, mode: &str, names: &Names) -> Key {
    let cut = |text: &str| text.chars().take(LONGEST).collect::<String>();
    let name = names.of_id(id).filter(|_| !mode.is_empty() || !is_another(event.uid));
    Key {
        uid: event.uid,
        user: user(event.uid),
        owner: Owner::known(event.uid, &event.owner, name)
            .map(|owner| Owner { name: cut(&owner.name), ..owner }),
        container: name.and_then(Name::called).map_or_else(|| short_id(&event.container_id), cut),
        image: name.map_or_else(String::new, |name| cut(&name.image)),
        gpu: String::new(),
        mode: mode.to_owned(),
    }
}

/// Those on which it books room: none while it is suspended, both while it moves.
fn booked_devices(lease: &Lease) -> Vec<String> {
    lease.devices.iter().filter(|device| lease.books(device)).cloned().collect()
}

/// What is held of each device, as a part of its GPU.
fn parts(booked: &Booked, devices: &[String], inventory: Option<&Inventory>) -> Vec<Part> {
    let part = |uuid: &String| match inventory.and_then(|inventory| inventory.device(uuid)) {
        Some(device) => part_of(booked, device),
        // Of a device that is gone, nothing but that it is held is known.
        None => Part { gpu: uuid.clone(), ..Part::default() },
    };
    devices.iter().map(part).collect()
}

fn part_of(booked: &Booked, device: &Device) -> Part {
    let Booked { mode, isolation, sm, memory_bytes, .. } = *booked;
    let (mut own_sm, mut own_memory, mut total) = (Percent::WHOLE, device.memory_bytes, device.memory_bytes);
    if let Some(mig) = &device.mig_device {
        own_sm = Percent::of_all(device.sm_count.unwrap_or_default(), mig.gpu_sm_count.unwrap_or_default());
        // Compute instances of one GPU instance share its memory.
        (own_memory, total) = (own_memory / (mig.siblings.len() as u64 + 1), mig.gpu_memory_bytes);
    }
    let is_whole = matches!(mode, Mode::Exclusive | Mode::Mig);
    // With an MPS server of its own it takes turns on the whole device.
    let sm = sm.filter(|_| mode == Mode::Mps && isolation == Isolation::Shared).unwrap_or_default();
    let sm = if is_whole { own_sm.thousandths().into() } else { sm.of(own_sm.thousandths().into()) };
    let memory = memory_bytes.or(is_whole.then_some(own_memory)).unwrap_or_default();
    let memory = Percent::nearest(100.0 * crate::shown::fraction(memory, total)).min(Percent::WHOLE);
    let sm = u32::try_from(sm).unwrap_or_default();
    Part { gpu: device.gpu().to_owned(), sm, memory: memory.thousandths(), used: None }
}

#[cfg(test)]
mod tests;
