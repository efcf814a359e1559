//! The record of what leases held, in the lasting directory: a file for each day that is over, and one with what goes on, which
//! is replaced whole. Everything is a sum of integers over time on the boot's clock: however often it is added to, and however
//! the clock is set meanwhile, it comes to the same. Only to which day a time belongs does the clock say.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::events::Position;
use crate::names::{KnownBy, Owner};
use sublet_core::fs::{read_history, read_if_trusted, replace_durably, sweep};
use sublet_core::text::timestamp;

/// Milliseconds of a day.
pub(super) const DAY: u64 = 86_400_000;

/// Days that are kept.
const KEPT: usize = 400;

/// Rows that a day has of root's engines, and as many of users', before containers, and then owners and users, are counted
/// together. Names in refusals are a user's own words: many of them take no room from root's containers, nor from other users'.
const MOST: usize = 500;

/// Rows of one user before that user's containers are counted together.
const MOST_OF_A_USER: usize = 100;

/// Beyond this, in milliseconds, nobody has looked.
const GAP: u64 = 300_000;

/// A host on which nothing happens has a sign of life this often, in milliseconds: its disk may sleep.
const IDLE: u64 = 240_000;

/// What stands for those that are counted together.
pub(super) const OTHERS: &str = "(others)";

/// More than a file ever has, in bytes: a row has at most some 600.
const LARGEST: u64 = 4 << 20;

/// Where the record is, in the lasting directory.
pub(super) const DIRECTORY: &str = "usage";

/// The file with what goes on.
const NOW: &str = "now.json";

/// The schema of both kinds of files. Another one is left to the version that wrote it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Schema {
    #[default]
    #[serde(rename = "sublet.usage/1")]
    One,
}

/// What is counted together.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    /// Of the container's engine.
    pub uid: u32,
    pub user: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// What people call the container, else its id.
    pub container: String,
    pub image: String,
    /// UUID of the GPU; empty for refusals.
    pub gpu: String,
    /// Empty for refusals.
    pub mode: String,
}

/// Times are in milliseconds, shares of a GPU in thousandths of a percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Sums {
    /// Leases that began. One on several GPUs counts on its first.
    pub leases: u64,
    /// Leases whose end nobody saw: they are counted up to the last sign of life.
    pub unseen_ends: u64,
    /// How long GPUs were held, whatever the share.
    pub held: u64,
    /// The same times the share of the SMs.
    pub sm: u64,
    /// The same times the share of the memory.
    pub memory: u64,
    /// How long the driver measured the part that was computed.
    pub measured: u64,
    /// The same times the part of the GPU's time.
    pub used: u64,
    /// Containers that were refused.
    pub refusals: u64,
    /// Leases that were waited for, a second or longer.
    pub waits: u64,
    /// How long.
    pub waited: u64,
}

impl Sums {
    fn all(&mut self) -> [&mut u64; 10] {
        let Self { leases, unseen_ends, held, sm, memory, measured, used, refusals, waits, waited } = self;
        [leases, unseen_ends, held, sm, memory, measured, used, refusals, waits, waited]
    }

    pub fn add(&mut self, mut more: Self) {
        self.all().into_iter().zip(more.all()).for_each(|(sum, more)| *sum = sum.saturating_add(*more));
    }
}

/// A day, in UTC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Day {
    schema: Schema,
    /// How long nobody looked: what began and ended then may be missing, and what was used is.
    pub unwatched: u64,
    /// By their keys.
    pub rows: Vec<(Key, Sums)>,
}

impl Day {
    pub fn add(&mut self, key: Key, more: Sums) {
        let rest = || OTHERS.to_owned();
        let containers = Key { container: rest(), image: rest(), ..key.clone() };
        let owner = Some(Owner { name: rest(), known_by: KnownBy::User });
        // No user has this uid (`chown(2)`: it stands for none).
        let all = Key { uid: u32::MAX, user: rest(), owner, ..containers.clone() };
        let count = |is_like: &dyn Fn(u32) -> bool| self.rows.iter().filter(|row| is_like(row.0.uid)).count();
        let has = count(&|uid| (uid == 0) == (key.uid == 0));
        let is_over = key.uid != 0 && count(&|uid| uid == key.uid) >= MOST_OF_A_USER;
        let own = if is_over { 0 } else { MOST };
        for (key, most) in [(key, own), (containers, 2 * MOST), (all, usize::MAX)] {
            match self.rows.binary_search_by(|(known, _)| known.cmp(&key)) {
                Ok(at) => return self.rows[at].1.add(more),
                Err(at) if has < most => return self.rows.insert(at, (key, more)),
                Err(_) => {}
            }
        }
    }
}

/// A part of a GPU that a lease holds, in thousandths of a percent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    /// UUID of the GPU.
    pub gpu: String,
    pub sm: u32,
    pub memory: u32,
    /// What it computed of the GPU's time, since the last look; `None`: the driver does not tell.
    #[serde(skip)]
    pub used: Option<u32>,
}

/// A lease that has not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Open {
    /// Without a GPU.
    pub key: Key,
    pub parts: Vec<Part>,
    /// Up to when it is counted, in milliseconds since boot: there was a sign of life then.
    pub counted: u64,
    /// Since when the ledger does not have it, in milliseconds since boot.
    pub missing: Option<u64>,
}

/// A moment on both clocks, in milliseconds: since boot, and since the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Moment {
    pub uptime: u64,
    pub time: u64,
}

impl Moment {
    /// What the clock would have said at `uptime`, as it is set now.
    pub fn time_at(self, uptime: u64) -> u64 {
        self.time.saturating_add(uptime).saturating_sub(self.uptime)
    }
}

/// What goes on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Now {
    schema: Schema,
    /// The boot of all its times since boot.
    pub boot_id: String,
    /// When somebody looked last; `None`: never.
    pub looked: Option<Moment>,
    /// Events that were read.
    pub position: Position,
    /// By lease id.
    pub open: BTreeMap<String, Open>,
    /// Today, and days that are not in files of their own yet.
    pub days: BTreeMap<String, Day>,
}

/// The record, to be added to.
pub(super) struct Record {
    dir: PathBuf,
    /// When it was opened.
    pub at: Moment,
    pub now: Now,
    /// What was read.
    before: Now,
}

impl Record {
    /// Reads what goes on. A file that this version cannot read is put aside, and the record begins anew.
    pub fn open(dir: &Path, at: Moment) -> io::Result<Self> {
        let now: Now = read_history(&dir.join(NOW), LARGEST)?;
        Ok(Self { dir: dir.to_owned(), at, before: now.clone(), now })
    }

    /// Begins a look. What an earlier boot left open has ended with it. Returns when somebody looked last in this boot, in
    /// milliseconds since boot.
    pub fn begin(&mut self, boot_id: &str) -> io::Result<Option<u64>> {
        let (at, looked) = (self.at, self.now.looked.unwrap_or(self.at));
        let is_same = self.now.boot_id == boot_id;
        let is_anew = self.now.boot_id.is_empty() && !dates(&self.dir).is_empty();
        let (now, last) = if is_same { (at.uptime, looked.uptime) } else { (at.time, looked.time) };
        let gap = now.saturating_sub(last);
        for (date, part) in by_day(at.time.saturating_sub(gap), at.time).filter(|_| gap > GAP) {
            let unwatched = &mut self.day(date)?.unwatched;
            *unwatched = unwatched.saturating_add(part);
        }
        if is_same {
            return Ok(Some(last));
        }
        for open in std::mem::take(&mut self.now.open).into_values() {
            // By the clock as it was.
            self.close_unseen(&open, looked)?;
        }
        (self.now.boot_id, self.now.position) = (boot_id.to_owned(), Position::default());
        sweep(&self.dir);
        // Without what went on, what has a file is counted already.
        Ok(is_anew.then_some(at.uptime))
    }

    /// Whether there was no sign of life for a while.
    pub fn is_due(&self) -> bool {
        self.now.looked.is_none_or(|looked| self.at.uptime.saturating_sub(looked.uptime) >= IDLE)
    }

    /// Writes it, where there is something to write. Days that are over get files of their own, and the oldest ones go.
    pub fn write(mut self) -> io::Result<()> {
        if self.now == self.before && self.now.open.is_empty() && !self.is_due() {
            return Ok(());
        }
        self.now.looked = Some(self.at);
        let (today, path) = (date(self.at.time), |date: &str| self.dir.join(format!("{date}.json")));
        // The day that a clock is set back to, or forth from, is not over.
        let over: Vec<String> = self.now.days.keys().filter(|date| **date != today).cloned().collect();
        for date in &over {
            replace_durably(&path(date), &serde_json::to_vec(&self.now.days[date])?, 0o600)?;
        }
        self.now.days.retain(|date, _| *date == today);
        replace_durably(&self.dir.join(NOW), &serde_json::to_vec(&self.now)?, 0o600)?;
        let dates = if over.is_empty() { Vec::new() } else { dates(&self.dir) };
        dates.iter().take(dates.len().saturating_sub(KEPT)).try_for_each(|date| fs::remove_file(path(date)))
    }

    /// The day `date`, as far as it is recorded.
    fn day(&mut self, date: String) -> io::Result<&mut Day> {
        if !self.now.days.contains_key(&date) {
            let stored = read_history(&self.dir.join(format!("{date}.json")), LARGEST)?;
            self.now.days.insert(date.clone(), stored);
        }
        Ok(self.now.days.entry(date).or_default())
    }

    /// Counts `open` up to `uptime`.
    pub fn count(&mut self, open: &mut Open, uptime: u64) -> io::Result<()> {
        let until = uptime.max(open.counted);
        for (date, held) in by_day(self.at.time_at(open.counted), self.at.time_at(until)) {
            let day = self.day(date)?;
            for Part { gpu, sm, memory, used } in &open.parts {
                let times = |share: u32| held.saturating_mul(u64::from(share));
                let (measured, used) = (used.map_or(0, |_| held), times(used.unwrap_or_default()));
                let more =
                    Sums { held, sm: times(*sm), memory: times(*memory), measured, used, ..Sums::default() };
                day.add(Key { gpu: gpu.clone(), ..open.key.clone() }, more);
            }
        }
        open.counted = until;
        Ok(())
    }

    /// The end of `open` was not seen: it is counted already, up to the last sign of life.
    pub fn close_unseen(&mut self, open: &Open, by: Moment) -> io::Result<()> {
        self.note(open, Sums { unseen_ends: 1, ..Sums::default() }, by.time_at(open.counted))
    }

    /// Counts what happened once to `open`, on its first GPU.
    pub fn note(&mut self, open: &Open, more: Sums, time: u64) -> io::Result<()> {
        let gpu = open.parts.first().map(|part| part.gpu.clone()).unwrap_or_default();
        self.day(date(time))?.add(Key { gpu, ..open.key.clone() }, more);
        Ok(())
    }
}

/// The day of `time`, in milliseconds since the epoch.
pub(super) fn date(time: u64) -> String {
    timestamp(time / 1000).chars().take(10).collect()
}

/// The days from one time to another, and the milliseconds of each. What a clock makes of a year is cut.
fn by_day(from: u64, to: u64) -> impl Iterator<Item = (String, u64)> {
    let from = from.max(to.saturating_sub(KEPT as u64 * DAY));
    let days = from / DAY..=to / DAY;
    let piece = move |day: u64| to.min((day + 1).saturating_mul(DAY)).saturating_sub(from.max(day * DAY));
    days.map(move |day| (date(day * DAY), piece(day))).filter(|(_, milliseconds)| *milliseconds > 0)
}

/// The days that have files, the oldest first.
fn dates(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let dates = names.filter_map(|name| name.strip_suffix(".json").map(str::to_owned));
    let mut dates: Vec<String> = dates.filter(|date| date.len() == 10).collect();
    dates.sort();
    dates
}

/// The days from `since` to `until`, as they are recorded, one after the other; `Err`: the date of one that cannot be read.
pub(super) fn days(dir: &Path, since: &str, until: &str) -> impl Iterator<Item = Result<Day, String>> {
    let now: Option<Now> = parsed(&dir.join(NOW));
    let unread = (now.is_none() && dir.join(NOW).exists()).then(|| Err("today".to_owned()));
    let mut current = now.map(|now| now.days).unwrap_or_default();
    let mut dates = dates(dir);
    dates.extend(current.keys().cloned());
    dates.retain(|date| *since <= **date && **date <= *until);
    dates.sort();
    dates.dedup();
    let read = move |date: String| {
        current.remove(&date).or_else(|| parsed(&dir.join(format!("{date}.json")))).ok_or(date)
    };
    dates.into_iter().map(read).chain(unread)
}

fn parsed<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read_if_trusted(path, LARGEST)?).ok()
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
