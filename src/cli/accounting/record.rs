//! The record of what leases held, in the lasting directory: a file for each day that is over, and one with what goes on, which
//! is replaced whole. Everything is a sum of integers over time on the boot's clock: however often it is added to, and however
//! the clock is set meanwhile, it comes to the same. Only to which day a time belongs does the clock say.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::AddAssign;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::events::Position;
use crate::names::{KnownBy, Owner};
use sublet_core::fs::{read_history, read_if_trusted, replace_durably};
use sublet_core::text::timestamp;

/// Milliseconds of a day.
pub(super) const DAY: u64 = 86_400_000;

/// Days that are kept.
const KEPT: usize = 400;

/// Rows that a day has before containers, and then owners and users, are counted together.
const MOST: usize = 500;

/// What stands for those that are counted together.
const OTHERS: &str = "(others)";

/// More than a file ever has, in bytes: a row has at most some 600.
const LARGEST: u64 = 4 << 20;

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
    #[serde(skip_serializing_if = "is_zero")]
    pub leases: u64,
    /// Leases whose end nobody saw: they are counted up to the last sign of life.
    #[serde(skip_serializing_if = "is_zero")]
    pub unseen_ends: u64,
    /// How long GPUs were held, whatever the share.
    #[serde(skip_serializing_if = "is_zero")]
    pub held: u64,
    /// The same times the share of the SMs.
    #[serde(skip_serializing_if = "is_zero")]
    pub sm: u64,
    /// The same times the share of the memory.
    #[serde(skip_serializing_if = "is_zero")]
    pub memory: u64,
    /// How long the driver told what was computed.
    #[serde(skip_serializing_if = "is_zero")]
    pub told: u64,
    /// The same times the part of the GPU's time.
    #[serde(skip_serializing_if = "is_zero")]
    pub used: u64,
    /// Containers that were refused.
    #[serde(skip_serializing_if = "is_zero")]
    pub refusals: u64,
    /// Leases that were waited for, a second or longer.
    #[serde(skip_serializing_if = "is_zero")]
    pub waits: u64,
    /// How long.
    #[serde(skip_serializing_if = "is_zero")]
    pub waited: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        let add = |sum: &mut u64, more: u64| *sum = sum.saturating_add(more);
        add(&mut self.leases, other.leases);
        add(&mut self.unseen_ends, other.unseen_ends);
        add(&mut self.held, other.held);
        add(&mut self.sm, other.sm);
        add(&mut self.memory, other.memory);
        add(&mut self.told, other.told);
        add(&mut self.used, other.used);
        add(&mut self.refusals, other.refusals);
        add(&mut self.waits, other.waits);
        add(&mut self.waited, other.waited);
    }
}

/// One line of a day.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub key: Key,
    #[serde(flatten)]
    pub sums: Sums,
}

/// A day, in UTC.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Day {
    schema: Schema,
    /// How long nobody looked: what began and ended then may be missing, and what was used is.
    pub unwatched: u64,
    /// By their keys.
    pub rows: Vec<Row>,
}

impl Day {
    pub fn add(&mut self, key: Key, more: Sums) {
        let others = || OTHERS.to_owned();
        let containers = Key { container: others(), image: others(), ..key.clone() };
        let owner = Some(Owner { name: others(), known_by: KnownBy::User });
        // No user has this uid (`chown(2)`: it stands for none).
        let all = Key { uid: u32::MAX, user: others(), owner, ..containers.clone() };
        for (key, most) in [(key, MOST), (containers, 2 * MOST), (all, usize::MAX)] {
            match self.rows.binary_search_by(|row| row.key.cmp(&key)) {
                Ok(at) => self.rows[at].sums += more,
                Err(at) if self.rows.len() < most => self.rows.insert(at, Row { key, sums: more }),
                Err(_) => continue,
            }
            return;
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
    fn time_at(self, uptime: u64) -> u64 {
        (self.time + uptime).saturating_sub(self.uptime)
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
    pub now: Now,
}

impl Record {
    /// Reads what goes on. A file that this version cannot read is put aside, and the record begins anew.
    pub fn open(dir: &Path) -> io::Result<Self> {
        Ok(Self { dir: dir.to_owned(), now: read_history(&dir.join(NOW), LARGEST)? })
    }

    /// Writes it. Days that are over get files of their own, and the oldest ones go.
    pub fn write(&mut self, now: Moment) -> io::Result<()> {
        let (today, path) = (date(now.time), |date: &str| self.dir.join(format!("{date}.json")));
        // The day that a clock is set back to, or forth from, is not over.
        let over: Vec<String> = self.now.days.keys().filter(|date| **date != today).cloned().collect();
        for date in &over {
            replace_durably(&path(date), &serde_json::to_vec(&self.now.days[date])?, 0o600)?;
        }
        self.now.days.retain(|date, _| *date == today);
        replace_durably(&self.dir.join(NOW), &serde_json::to_vec(&self.now)?, 0o600)?;
        if !over.is_empty() {
            let dates = dates(&self.dir);
            dates.iter().take(dates.len().saturating_sub(KEPT)).for_each(|date| {
                let _ = fs::remove_file(path(date)).inspect_err(|error| tracing::debug!("{error}"));
            });
        }
        Ok(())
    }

    /// The day `date`, as far as it is recorded.
    pub fn day(&mut self, date: String) -> io::Result<&mut Day> {
        if !self.now.days.contains_key(&date) {
            let stored = read_history(&self.dir.join(format!("{date}.json")), LARGEST)?;
            self.now.days.insert(date.clone(), stored);
        }
        Ok(self.now.days.entry(date).or_default())
    }

    /// Counts `open` up to `uptime`.
    pub fn count(&mut self, open: &mut Open, uptime: u64, now: Moment) -> io::Result<()> {
        for (date, milliseconds) in by_day(now.time_at(open.counted), now.time_at(uptime.max(open.counted))) {
            let day = self.day(date)?;
            for part in &open.parts {
                let times = |share: u32| milliseconds.saturating_mul(u64::from(share));
                let more = Sums {
                    held: milliseconds,
                    sm: times(part.sm),
                    memory: times(part.memory),
                    told: part.used.map_or(0, |_| milliseconds),
                    used: times(part.used.unwrap_or_default()),
                    ..Sums::default()
                };
                day.add(Key { gpu: part.gpu.clone(), ..open.key.clone() }, more);
            }
        }
        open.counted = open.counted.max(uptime);
        Ok(())
    }

    /// Counts what happened once to `open` at `uptime`, on its first GPU.
    pub fn note(&mut self, open: &Open, more: Sums, uptime: u64, now: Moment) -> io::Result<()> {
        let gpu = open.parts.first().map(|part| part.gpu.clone()).unwrap_or_default();
        self.day(date(now.time_at(uptime)))?.add(Key { gpu, ..open.key.clone() }, more);
        Ok(())
    }

    /// The end of `open` was not seen: it is counted already, up to the last sign of life.
    pub fn close_unseen(&mut self, open: &Open, now: Moment) -> io::Result<()> {
        self.note(open, Sums { unseen_ends: 1, ..Sums::default() }, open.counted, now)
    }

    /// Nobody looked for so long, up to now.
    pub fn note_gap(&mut self, milliseconds: u64, now: Moment) -> io::Result<()> {
        for (date, part) in by_day(now.time.saturating_sub(milliseconds), now.time) {
            let unwatched = &mut self.day(date)?.unwatched;
            *unwatched = unwatched.saturating_add(part).min(DAY);
        }
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
    let piece = move |day: u64| (to.min((day + 1) * DAY)).saturating_sub(from.max(day * DAY));
    days.map(move |day| (date(day * DAY), piece(day))).filter(|(_, milliseconds)| *milliseconds > 0)
}

/// The days that have files, the oldest first.
fn dates(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_date =
        |date: &str| date.len() == 10 && date.bytes().all(|byte| byte.is_ascii_digit() || byte == b'-');
    let mut dates: Vec<String> = names
        .filter_map(|name| name.strip_suffix(".json").filter(|date| is_date(date)).map(str::to_owned))
        .collect();
    dates.sort();
    dates
}

/// The days from `since` to `until`, as they are recorded, one after the other; `Err`: the date of one that cannot be read.
pub(super) fn days(dir: &Path, since: &str, until: &str) -> impl Iterator<Item = Result<Day, String>> {
    let now: Option<Now> = parsed(&dir.join(NOW));
    let unread = (now.is_none() && dir.join(NOW).exists()).then(|| Err("today".to_owned()));
    let now = now.map(|now| now.days).unwrap_or_default();
    let mut wanted: Vec<String> = dates(dir).into_iter().filter(|date| !now.contains_key(date)).collect();
    wanted.retain(|date| *since <= **date && **date <= *until);
    let of_now =
        now.into_iter().filter(|(date, _)| *since <= **date && **date <= *until).map(|(_, day)| Ok(day));
    let of_now: Vec<_> = of_now.chain(unread).collect();
    let dir = dir.to_owned();
    let stored = move |date: String| parsed(&dir.join(format!("{date}.json"))).ok_or(date);
    wanted.into_iter().map(stored).chain(of_now)
}

fn parsed<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read_if_trusted(path, LARGEST)?).ok()
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
