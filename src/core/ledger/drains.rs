//! Devices that take no new lease, by `sublet drain`: in the ledger, where starts see them, and in a file that outlives a
//! reboot. The file is written under the ledger's lock only.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::failed;
use super::{Ledger, LedgerError, Scan, Store};
use crate::fs::{make_trusted_directory, parse_json, read_trusted, replace_durably};
use crate::process::epoch_seconds;
use crate::text::{safe, safe_long, safe_path, timestamp};

/// The longest reason, in characters.
pub const LONGEST_REASON: usize = 200;

/// The file, in the lasting directory ([`Config::lasting_dir`](crate::config::Config::lasting_dir)).
const FILE: &str = "drains.json";

/// `schema` of the file.
const SCHEMA: &str = "sublet.drains/1";

/// Far more than 16 GPUs with all their MIG devices need, in bytes.
const LARGEST: u64 = 1 << 20;

/// Why a device takes no new lease, and until when.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Its UUID.
    pub device: String,
    /// What the administrator wrote, not made safe to print.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// Who did it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub by: String,
    /// Since when, in seconds since the epoch.
    pub since: u64,
    /// It ends by itself then, in seconds since the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
}

/// The file.
#[derive(Serialize, Deserialize)]
struct Lasting {
    schema: String,
    drains: Vec<Drain>,
}

impl Drain {
    /// As `by alice since 2026-11-27T21:00:00Z until 2026-11-28T06:00:00Z: a fan is replaced`.
    pub fn words(&self) -> String {
        let by = if self.by.is_empty() { String::new() } else { format!("by {} ", safe(&self.by)) };
        let until = self.until.map(|until| format!(" until {}", timestamp(until))).unwrap_or_default();
        let reason = safe_long(&self.reason, LONGEST_REASON);
        let reason = if reason.is_empty() { reason } else { format!(": {reason}") };
        format!("{by}since {}{until}{reason}", timestamp(self.since))
    }

    fn has_ended(&self, now: u64) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

impl Ledger {
    /// Why `device` is drained, where that is known.
    pub fn drain_of(&self, device: &str) -> Option<&Drain> {
        self.drains.iter().find(|drain| drain.device == device)
    }

    /// Ends those whose time has come.
    pub(super) fn end_drains(&mut self) {
        let now = epoch_seconds();
        let ended = |uuid: &str| self.drains.iter().any(|drain| drain.device == uuid && drain.has_ended(now));
        self.drained.retain(|uuid| !ended(uuid));
        self.drains.retain(|drain| !drain.has_ended(now));
    }

    /// Ends the drains of `devices` and begins the `new` ones, also in the lasting directory `dir`. `all` are the devices of the
    /// host.
    ///
    /// # Errors
    /// The file cannot be read or written. Nothing has changed then.
    pub fn drain(&mut self, dir: &Path, [all, devices]: [&[String]; 2], new: Vec<Drain>) -> io::Result<()> {
        let mut after = self.clone();
        after.add_drains(read_lasting(dir, all)?);
        after.drained.retain(|uuid| !devices.contains(uuid));
        after.drains.retain(|drain| !devices.contains(&drain.device));
        after.add_drains(new);
        write_lasting(dir, after.drains.clone())?;
        (self.drained, self.drains) = (after.drained, after.drains);
        Ok(())
    }

    fn add_drains(&mut self, drains: impl IntoIterator<Item = Drain>) {
        for drain in drains {
            if !self.drained.contains(&drain.device) {
                self.drained.push(drain.device.clone());
            }
            if self.drain_of(&drain.device).is_none() {
                self.drains.push(drain);
            }
        }
    }
}

impl Store {
    /// Brings drains that were made before a reboot, or before the ledger was lost, from the lasting directory `dir` into the
    /// ledger. `all` are the devices of the host: if nobody can make sense of the file, none of them takes a lease.
    ///
    /// # Errors
    /// The system does not give the file, or the ledger cannot be changed.
    pub fn restore_drains(&self, dir: &Path, all: &[String]) -> Result<(), LedgerError> {
        let lasting = || read_lasting(dir, all).map_err(|source| failed("read", &dir.join(FILE), source));
        let drains = lasting()?;
        let has = |ledger: &Ledger| drains.iter().all(|drain| ledger.drained.contains(&drain.device));
        if drains.is_empty() || self.peek().is_ok_and(|ledger| has(&ledger)) {
            return Ok(());
        }
        // Read again under the lock: one may have been ended meanwhile.
        let restore = |ledger: &mut Ledger| lasting().map(|drains| ledger.add_drains(drains));
        self.update_with_scan(Scan::None, restore)?.0
    }
}

/// Those that have not ended. If nobody can make sense of the file, one for each device of the host, which says so.
///
/// # Errors
/// The system does not give the file, and may do so another time.
fn read_lasting(dir: &Path, all: &[String]) -> io::Result<Vec<Drain>> {
    let (path, now) = (dir.join(FILE), epoch_seconds());
    let text = match read_trusted(&path, LARGEST) {
        // Something else is where the directory would be: there is no file.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => None,
        text => text?,
    };
    let parse = |text: Result<Vec<u8>, String>| {
        let lasting: Lasting = parse_json(&text?).map_err(|error| error.to_string())?;
        if lasting.schema == SCHEMA { Ok(lasting.drains) } else { Err(format!("schema {}", lasting.schema)) }
    };
    let unreadable = |why: String| {
        let why = format!("{} cannot be read ({})", safe_path(&path), safe(&why));
        let drain = Drain {
            reason: format!("{why}; `sublet undrain all` begins anew"),
            since: now,
            ..Drain::default()
        };
        all.iter().map(|device| Drain { device: device.clone(), ..drain.clone() }).collect()
    };
    let mut drains = text.map_or_else(|| Ok(Vec::new()), parse).unwrap_or_else(unreadable);
    drains.retain(|drain| !drain.has_ended(now));
    Ok(drains)
}

fn write_lasting(dir: &Path, drains: Vec<Drain>) -> io::Result<()> {
    let path = dir.join(FILE);
    let failed = |why: String| io::Error::other(format!("cannot write {}: {why}", safe_path(&path)));
    if drains.is_empty() && !path.exists() {
        return Ok(());
    }
    make_trusted_directory(dir).map_err(|why| failed(format!("its directory {why}")))?;
    let text = serde_json::to_vec(&Lasting { schema: SCHEMA.to_owned(), drains })?;
    replace_durably(&path, &text, 0o644).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    const GPU: &str = "GPU-1";

    fn all() -> Vec<String> {
        [GPU, "GPU-2"].map(str::to_owned).to_vec()
    }

    fn host() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let state_dir = dir.path().join("run");
        (dir, state_dir)
    }

    fn lasting(state_dir: &Path) -> PathBuf {
        state_dir.join("lasting")
    }

    fn fan(uuid: &str, until: Option<u64>) -> Drain {
        Drain {
            reason: "fan\u{1b}[2J".to_owned(),
            by: "alice".to_owned(),
            since: 0,
            until,
            device: uuid.to_owned(),
        }
    }

    /// What a new ledger has of them after a reboot.
    fn drained_after_reboot(state_dir: &Path) -> Vec<String> {
        for name in ["ledger.json", "ledger.json.copy", "lock"] {
            let _ = fs::remove_file(state_dir.join(name));
        }
        let store = Store::open(state_dir).unwrap();
        store.restore_drains(&lasting(state_dir), &all()).unwrap();
        store.read().unwrap().drained
    }

    #[test]
    fn a_stored_file_is_read_and_written_again_alike() {
        let (_dir, state_dir) = host();
        let stored = include_str!("../../../tests/formats/every-key/drains.json");
        let file = lasting(&state_dir).join(FILE);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, stored).unwrap();
        let read = read_lasting(&lasting(&state_dir), &[]).unwrap();
        assert!(read.iter().any(|drain| drain.until.is_some()), "every key");
        write_lasting(&lasting(&state_dir), read).unwrap();
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(&fs::read_to_string(&file).unwrap()), value(stored));
    }

    #[test]
    fn a_drain_lasts_until_it_is_ended() {
        let (_dir, state_dir) = host();
        let mut ledger = Ledger::empty("boot");
        ledger.drain(&lasting(&state_dir), [&all(), &[GPU.to_owned()]], vec![fan(GPU, None)]).unwrap();
        assert_eq!(ledger.drained, [GPU]);
        let words = ledger.drain_of(GPU).map(Drain::words);
        assert_eq!(words.as_deref(), Some("by alice since 1970-01-01T00:00:00Z: fan\\u{1b}[2J"));
        assert_eq!(drained_after_reboot(&state_dir), [GPU]);
        ledger.drain(&lasting(&state_dir), [&all(), &[GPU.to_owned()]], vec![]).unwrap();
        assert_eq!((ledger.drained.len(), ledger.drains.len()), (0, 0));
        assert_eq!(drained_after_reboot(&state_dir), [""; 0]);
    }

    #[test]
    fn a_time_ends_it_with_and_without_a_reboot() {
        let (_dir, state_dir) = host();
        let store = Store::open(&state_dir).unwrap();
        let both = |until| all().iter().map(|uuid| fan(uuid, Some(until))).collect();
        let drain = |until| {
            let change =
                |ledger: &mut Ledger| ledger.drain(&lasting(&state_dir), [&all(), &all()], both(until));
            store.update(change).unwrap().0.unwrap();
            store.change(|_| ()).unwrap();
            store.read().unwrap().drained.len()
        };
        assert_eq!(drain(epoch_seconds() + 600), 2);
        assert_eq!(drained_after_reboot(&state_dir), all());
        assert_eq!(drain(1), 0);
        assert_eq!(drained_after_reboot(&state_dir), [""; 0]);
    }

    #[test]
    fn a_file_that_cannot_be_read_drains_all_until_they_are_undrained() {
        for text in ["", "{", "{\"schema\":\"sublet.drains/2\",\"drains\":[]}", "[]"] {
            let (_dir, state_dir) = host();
            let file = lasting(&state_dir).join(FILE);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, text).unwrap();
            assert_eq!(drained_after_reboot(&state_dir), all(), "{text}");
            let store = Store::open(&state_dir).unwrap();
            let read = store.read().unwrap();
            let why = read.drain_of(GPU).map(Drain::words).unwrap();
            assert!(why.contains("drains.json cannot be read"), "{why}");
            let one = [GPU.to_owned()];
            store
                .update(|ledger| ledger.drain(&lasting(&state_dir), [&all(), &one], vec![]))
                .unwrap()
                .0
                .unwrap();
            assert_eq!(drained_after_reboot(&state_dir), ["GPU-2"], "{text}");
        }
    }

    #[test]
    fn a_file_that_the_system_does_not_give_drains_nothing_for_good() {
        let (_dir, state_dir) = host();
        let store = Store::open(&state_dir).unwrap();
        // No directory has so long a name: ENAMETOOLONG.
        assert!(store.restore_drains(&state_dir.join("x".repeat(300)), &all()).is_err());
        assert_eq!(store.read().unwrap().drained, [""; 0]);
    }

    #[test]
    fn a_file_that_cannot_be_written_changes_nothing() {
        let (_dir, state_dir) = host();
        fs::create_dir_all(&state_dir).unwrap();
        fs::write(lasting(&state_dir), "in its place").unwrap();
        let mut ledger = Ledger::empty("boot");
        let error = ledger
            .drain(&lasting(&state_dir), [&all(), &all()], vec![fan(GPU, None)])
            .unwrap_err()
            .to_string();
        assert!(error.contains("lasting/drains.json: its directory is no directory"), "{error}");
        assert_eq!(ledger, Ledger::empty("boot"));
    }
}
