//! GPUs that reported a fault and get no new lease until they are well: `health.json` in the state directory. A refresh leaves
//! them out of the inventory, and so starts see them nowhere else. What else is amiss with a GPU that is served stands there, too,
//! and events of containers, for users without root.

pub(crate) mod kernel_log;
pub(crate) mod xid;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use sublet_core::config::Config;
use sublet_core::events::{Event, Kind};
use sublet_core::fs::{open_lock, put_aside, read_trusted, replace};
use sublet_core::inventory::{Device, LeftOut};
use sublet_core::ledger::{Lease, lease_event};
use sublet_core::process;
use sublet_core::text::{safe, safe_path, timestamp};

/// A GPU that is sick again this soon after it became well by itself does not become well by itself again; seconds.
const FLAPPING: u64 = 3600;

/// How many events are kept, and how many of one user.
const EVENTS: usize = 64;
const EVENTS_OF_ONE: usize = 16;

/// More than 16 GPUs and [`EVENTS`] need, in bytes: a container without an id is named by a path of 4 KiB, of which each byte may
/// take six.
const LARGEST: u64 = 4 << 20;

/// `health.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Records {
    /// Of another boot nothing counts.
    boot_id: String,
    /// Those that are sick, by UUID.
    pub gpus: BTreeMap<String, Sick>,
    /// All others, where nobody could make sense of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    every: Option<Sick>,
    /// GPUs that became well by themselves, by UUID, and when, in seconds since boot.
    #[serde(default)]
    healed: BTreeMap<String, u64>,
    /// What is amiss with GPUs that are served, by UUID.
    #[serde(default)]
    pub warnings: BTreeMap<String, Vec<String>>,
    /// Events of containers, the oldest first: users without root cannot read the journal.
    #[serde(default)]
    pub events: Vec<Event>,
}

/// A GPU's fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sick {
    /// As `Xid 79: the GPU has fallen off the bus`.
    pub fault: String,
    /// What to do about it.
    pub fix: String,
    /// In seconds since the epoch.
    pub since: u64,
    /// Whether the driver asks for a reset: when it does not any more, the GPU was reset.
    pub asked: bool,
    /// Whether it stays sick until somebody says that it is well, or a reboot.
    stays: bool,
}

impl Sick {
    /// From now on.
    pub fn now(fault: String, fix: String, asked: bool) -> Self {
        Self { fault, fix, since: process::epoch_seconds(), asked, stays: false }
    }

    /// As [`LeftOut::why`] of GPU `index`.
    fn why(&self, index: u32) -> String {
        let (since, fix) = (timestamp(self.since), &self.fix);
        format!("{}, at {since}; fix: {fix}; once it is well, `sublet undrain {index} --healthy`", self.fault)
    }
}

impl Records {
    /// The fault of the GPU with this UUID; `None`: it is well.
    pub fn fault(&self, gpu: &str) -> Option<&Sick> {
        self.gpus.get(gpu).or(self.every.as_ref())
    }

    /// UUIDs of sick GPUs that a reset makes well.
    pub fn asked(&self) -> impl Iterator<Item = &String> {
        self.gpus.iter().filter(|(_, sick)| sick.asked && !sick.stays).map(|(uuid, _)| uuid)
    }

    /// Moves sick GPUs, with their MIG devices, from `devices` to those that are left out. Those that are there already may have
    /// another fix by now.
    pub fn leave_out(&self, devices: Vec<Device>, mut left_out: Vec<LeftOut>) -> (Vec<Device>, Vec<LeftOut>) {
        for LeftOut { gpu, why, .. } in &mut left_out {
            if let Some(same) = self.gpus.get(&gpu.uuid).filter(|sick| why.starts_with(&sick.fault)) {
                *why = same.why(gpu.index);
            }
        }
        let (sick, devices): (Vec<_>, Vec<_>) =
            devices.into_iter().partition(|device| self.fault(device.gpu()).is_some());
        let (parts, gpus): (Vec<_>, Vec<_>) = sick.into_iter().partition(Device::is_mig);
        left_out.extend(gpus.into_iter().filter_map(|gpu| {
            let why = self.fault(&gpu.uuid)?.why(gpu.index);
            let mig = parts.iter().filter(|part| part.gpu() == gpu.uuid).cloned().collect();
            Some(LeftOut { mig, gpu, lost: false, why })
        }));
        left_out.sort_by_key(|gone| gone.gpu.index);
        (devices, left_out)
    }

    /// Keeps those of `events` that are of leases: the newest, of each user and of all.
    pub fn keep(&mut self, events: &[Event]) {
        for event in events.iter().filter(|event| !event.lease.is_empty()) {
            self.events.push(event.clone());
            let own: Vec<usize> =
                (0..self.events.len()).filter(|at| self.events[*at].uid == event.uid).collect();
            if own.len() > EVENTS_OF_ONE {
                self.events.remove(own[0]);
            } else if self.events.len() > EVENTS {
                self.events.remove(0);
            }
        }
    }
}

/// That a GPU, or a lease on it, has something.
pub(crate) fn event(kind: Kind, lease: Option<&Lease>, gpu: &Device, reason: &str, text: &str) -> Event {
    let own = lease.map_or_else(|| Event::now(kind), |lease| lease_event(kind, lease));
    Event { devices: vec![gpu.uuid.clone()], reason: reason.to_owned(), text: text.to_owned(), ..own }
}

/// The records of this boot; empty if there are none. If nobody can make sense of the file, every GPU is sick.
///
/// # Errors
/// The system does not give the file, and may do so another time.
pub(crate) fn read(config: &Config) -> io::Result<Records> {
    let path = file(config);
    let Some(text) = read_trusted(&path, LARGEST)? else { return Ok(Records::default()) };
    let parsed = text.and_then(|text| serde_json::from_slice(&text).map_err(|error| error.to_string()));
    let unknown = |why: String| {
        let fault = format!("{} cannot be read ({})", safe_path(&path), safe(&why));
        let fix = "`sublet doctor` and the kernel's log say what the GPU has".to_owned();
        Records { every: Some(Sick::now(fault, fix, false)), ..Records::default() }
    };
    Ok(parsed.map_or_else(unknown, of_this_boot))
}

/// Changes the records. A file with garbage is put aside.
///
/// # Errors
/// The file cannot be read or written.
pub(crate) fn change<T>(config: &Config, change: impl FnOnce(&mut Records) -> T) -> io::Result<T> {
    let lock = open_lock(&config.state_dir.join("health.lock"))?;
    let _held = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, error)| error)?;
    let before = read(config)?;
    let mut after = before.clone();
    let done = change(&mut after);
    if after != before {
        if before.every.is_some() && before.boot_id.is_empty() {
            put_aside(&file(config))?;
        }
        process::read_boot_id()?.clone_into(&mut after.boot_id);
        replace(&file(config), &serde_json::to_vec(&after)?, 0o644)?;
    }
    Ok(done)
}

/// Notes the fault of a GPU. Returns whether it was well until then, or what the driver asks for is something else to do.
///
/// # Errors
/// As [`change`].
pub(crate) fn mark(uuid: &str, fault: Sick, config: &Config) -> io::Result<bool> {
    change(config, |records| {
        if let Some(sick) = records.gpus.get_mut(uuid) {
            let is_news = fault.asked && sick.fix != fault.fix;
            if fault.asked {
                (sick.asked, sick.fix) = (true, fault.fix);
            }
            return is_news;
        }
        let is_soon = |at: &u64| process::uptime_seconds() < at.saturating_add(FLAPPING);
        let stays = records.healed.get(uuid).is_some_and(is_soon);
        records.gpus.insert(uuid.to_owned(), Sick { stays, ..fault }).is_none()
    })
}

/// As [`Records::keep`].
///
/// # Errors
/// As [`change`].
pub(crate) fn keep_events(events: &[Event], config: &Config) -> io::Result<()> {
    change(config, |records| records.keep(events))
}

/// Notes that a GPU was reset. Returns whether that makes it well.
///
/// # Errors
/// As [`change`].
pub(crate) fn note_reset(uuid: &str, config: &Config) -> io::Result<bool> {
    change(config, |records| {
        let heals = records.asked().any(|asked| asked == uuid);
        if heals {
            records.gpus.remove(uuid);
            records.healed.insert(uuid.to_owned(), process::uptime_seconds());
        }
        heals
    })
}

/// Forgets the faults of the GPUs `uuids`, of `all`. Returns those that were sick.
///
/// # Errors
/// As [`change`].
pub(crate) fn declare_healthy(uuids: &[String], all: &[String], config: &Config) -> io::Result<Vec<String>> {
    let forget = |records: &mut Records| {
        let each = records
            .every
            .take()
            .into_iter()
            .flat_map(|fault| all.iter().map(move |gpu| (gpu, fault.clone())));
        each.for_each(|(gpu, fault)| _ = records.gpus.entry(gpu.clone()).or_insert(fault));
        uuids.iter().filter(|uuid| records.gpus.remove(*uuid).is_some()).cloned().collect()
    };
    change(config, forget)
}

fn of_this_boot(records: Records) -> Records {
    let is_now = process::read_boot_id().is_ok_and(|boot| boot == records.boot_id);
    if is_now { records } else { Records::default() }
}

pub(crate) fn file(config: &Config) -> PathBuf {
    config.state_dir.join("health.json")
}

#[cfg(test)]
mod tests {
    use sublet_core::inventory::MigDevice;

    use super::*;

    fn fault(asked: bool) -> Sick {
        Sick { since: 0, ..Sick::now("Xid 95: bad".to_owned(), "reset it".to_owned(), asked) }
    }

    fn host() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        config.driver.root = dir.path().to_owned();
        (dir, config)
    }

    #[test]
    fn a_fault_lasts_until_a_reset_or_a_word() {
        let (_dir, config) = host();
        assert!(mark("GPU-1", fault(false), &config).unwrap());
        assert!(!mark("GPU-1", fault(false), &config).unwrap(), "it is sick already");
        assert!(!note_reset("GPU-1", &config).unwrap(), "the driver did not ask for one");
        assert!(!mark("GPU-1", fault(true), &config).unwrap());
        assert!(note_reset("GPU-1", &config).unwrap());
        assert!(read(&config).unwrap().gpus.is_empty());
        // It flaps: from now on somebody has to look at it.
        assert!(mark("GPU-1", fault(true), &config).unwrap());
        assert!(!note_reset("GPU-1", &config).unwrap());
        let both = ["GPU-1", "GPU-2"].map(str::to_owned);
        assert_eq!(declare_healthy(&both, &both, &config).unwrap(), ["GPU-1"]);
        assert!(read(&config).unwrap().gpus.is_empty());
    }

    #[test]
    fn events_of_leases_are_kept_and_one_user_drives_out_only_their_own() {
        let (_dir, config) = host();
        let event =
            |uid: u32, lease: &str| Event { uid, lease: lease.to_owned(), ..Event::now(Kind::GpuError) };
        keep_events(&[event(1, "a"), event(0, "")], &config).unwrap();
        for number in 0..100 {
            keep_events(&[event(2, &number.to_string())], &config).unwrap();
        }
        let kept = read(&config).unwrap().events;
        assert_eq!((kept.len(), &*kept[0].lease), (1 + EVENTS_OF_ONE, "a"));
        assert_eq!(kept.last().map(|event| &*event.lease), Some("99"));
        let long = |uid| {
            let (text, container_id) = ("\u{1}".repeat(2000), "\u{1}".repeat(4096));
            Event { text, container_id, ..event(uid, "b") }
        };
        keep_events(&(3..100).map(long).collect::<Vec<_>>(), &config).unwrap();
        assert_eq!(read(&config).unwrap().events.len(), EVENTS, "the longest ones make no GPU sick");
    }

    #[test]
    fn a_stored_file_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/health.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Records = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn a_reboot_ends_it_and_garbage_is_put_aside() {
        let (dir, config) = host();
        mark("GPU-1", fault(false), &config).unwrap();
        let path = dir.path().join("health.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let boot = process::read_boot_id().unwrap();
        std::fs::write(&path, text.replace(boot, "another")).unwrap();
        assert_eq!(read(&config).unwrap(), Records::default());
        std::fs::write(&path, "{").unwrap();
        assert!(mark("GPU-1", fault(false), &config).unwrap());
        assert!(dir.path().join("health.json.aside").exists());
    }

    #[test]
    fn a_file_that_cannot_be_read_makes_every_gpu_sick() {
        let (_dir, config) = host();
        std::fs::write(file(&config), "{").unwrap();
        let all = ["GPU-0", "GPU-1", "GPU-2"].map(str::to_owned);
        let sick = || {
            let gpu = |index: u32| Device { uuid: format!("GPU-{index}"), index, ..Device::default() };
            let (_, left_out) = read(&config).unwrap().leave_out(vec![gpu(0), gpu(1), gpu(2)], Vec::new());
            left_out.into_iter().map(|gone| (gone.gpu.index, gone.why)).collect::<Vec<_>>()
        };
        assert_eq!(sick().len(), 3);
        assert!(sick()[0].1.contains("health.json cannot be read (EOF while parsing"), "{:?}", sick());
        assert!(mark("GPU-1", fault(false), &config).unwrap(), "its own fault counts");
        assert_eq!((sick().len(), sick()[1].1.starts_with("Xid 95: bad")), (3, true));
        declare_healthy(&all[..1], &all, &config).unwrap();
        assert_eq!(sick().iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 2]);
        declare_healthy(&all, &all, &config).unwrap();
        assert_eq!(sick(), []);
        // No directory has so long a name: ENAMETOOLONG. It says nothing of the GPUs.
        let nowhere = Config { state_dir: config.state_dir.join("x".repeat(300)), ..config.clone() };
        assert!(read(&nowhere).is_err());
    }

    #[test]
    fn a_sick_gpu_is_left_out_with_its_mig_devices_and_the_rest_stay() {
        let mut records = Records::default();
        records.gpus.insert("GPU-1".to_owned(), fault(false));
        let gpu = |index: u32| Device { uuid: format!("GPU-{index}"), index, ..Device::default() };
        let mut part = gpu(1);
        part.uuid = "MIG-1".to_owned();
        part.mig_device = Some(MigDevice { gpu: "GPU-1".to_owned(), ..mig_device() });
        let (devices, left_out) = records.leave_out(vec![gpu(0), gpu(1), part, gpu(2)], Vec::new());
        let uuids: Vec<_> = devices.iter().map(|device| &*device.uuid).collect();
        assert_eq!(uuids, ["GPU-0", "GPU-2"]);
        let [gone] = &left_out[..] else { panic!("{left_out:?}") };
        assert_eq!((gone.mig.len(), gone.state()), (1, "unhealthy"));
        assert_eq!(
            gone.sentence(),
            "GPU 1 is left out: Xid 95: bad, at 1970-01-01T00:00:00Z; fix: reset it; once it is well, `sublet \
             undrain 1 --healthy`"
        );
    }

    fn mig_device() -> MigDevice {
        MigDevice {
            gpu: String::new(),
            index: 0,
            profile: String::new(),
            gi: 0,
            ci: 0,
            placement: None,
            slices: (1, 1),
            gpu_sm_count: None,
            gpu_memory_bytes: 0,
            siblings: Vec::new(),
            sibling_processes: Vec::new(),
            fault: None,
        }
    }
}
