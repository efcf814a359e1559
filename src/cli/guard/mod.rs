//! The guard: limits containers to their shares from the host, because MPS limits only honest programs.
//!
//! `sublet serve` checks every leased device a few times a second ([`guard_thread`]). NVML tells which processes
//! compute there, and with how much memory; the kernel tells which container each belongs to (`gpu_processes`).
//! [`judge`] compares that with the leases, without I/O. The guard acts on what it finds in two checks in a row
//! ([`enforce`]). It restarts an MPS daemon that died, and reports the containers that lost GPU work; it ends a server that
//! takes no new client after a fault ([`mps_servers`]), and who keeps a daemon waiting ([`silent_connections`]). What it did
//! is recorded here, so that users can see why a container's process ended and whether the guard runs. The guard holds no lock, and keeps NVML open only while there is a lease.

mod enforce;
mod guard_thread;
mod judge;
mod mps_servers;
mod silent_connections;

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use sublet_core::config::Config;
use sublet_core::events;
use sublet_core::fs::{read_history, read_if_trusted, replace};
use sublet_core::ledger::Lease;
use sublet_core::process::{self, epoch_seconds, uptime_seconds};
use sublet_core::share::Action;
use sublet_core::text::safe;

pub(crate) use guard_thread::start;
pub use judge::Offence;

/// How many events are kept.
const KEPT: usize = 64;

/// How many of these may belong to one container, so that it cannot displace the records of other containers.
const KEPT_OF_ONE: usize = 16;

/// In seconds. A guard that last checked longer ago than this counts as not running.
const LIMIT: u64 = 15;

/// The largest file read, in bytes. Texts in events are limited, so that a valid file is smaller.
const LARGEST: u64 = 1 << 20;

/// With this begins the warning that no device is guarded; otherwise a device is named.
pub(crate) const OFF: &str = "GUARD OFF";

/// `guard.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Book {
    /// Seconds since boot at the last check.
    looked_at: u64,
    boot_id: String,
    /// The devices that could not be checked then, and why.
    blind: Vec<String>,
    events: Vec<Event>,
}

/// An offence that the guard found, and what it did about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GuardEvent")]
pub struct Event<T = u64> {
    /// Seconds since the epoch; where it is shown, RFC 3339.
    #[schemars(description = "RFC 3339.")]
    pub time: T,
    /// What the process did.
    #[schemars(with = "String")]
    pub offence: Offence,
    /// What was done about it.
    #[schemars(with = "String")]
    pub action: Action,
    /// The container; null if the process belonged to no lease.
    pub container_id: Option<String>,
    /// The uid of the container's engine.
    pub uid: u32,
    /// UUID of the device.
    pub device: String,
    /// The process, on the host.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// The event in one line.
    pub text: String,
}

/// The latest events, oldest first; empty if the file cannot be read.
pub fn events(config: &Config) -> Vec<Event> {
    read(config).events
}

/// The sight of the guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Every leased device.
    All,
    /// All but these devices, each with the reason.
    Blind(Vec<String>),
    /// The guard does not run: there is no service, or it hangs.
    None,
}

/// The present sight of the guard.
pub fn sight(config: &Config) -> Sight {
    let book = read(config);
    match age(&book) {
        Some(..=LIMIT) if book.blind.is_empty() => Sight::All,
        Some(..=LIMIT) => Sight::Blind(book.blind),
        _ => Sight::None,
    }
}

/// How long ago the guard looked last, in seconds; `None`: not since boot.
pub(crate) fn last_look(config: &Config) -> Option<u64> {
    age(&read(config))
}

/// The age of the last look, if that was in this boot.
fn age(book: &Book) -> Option<u64> {
    let is_of_now = !book.boot_id.is_empty() && book.boot_id == process::read_boot_id().unwrap_or_default();
    uptime_seconds().checked_sub(book.looked_at).filter(|_| is_of_now)
}

/// Adds `new` events and records that the guard runs; `blind` are the devices that cannot be checked.
fn record(new: Vec<Event>, blind: Vec<String>, config: &Config) -> std::io::Result<()> {
    let new_events: Vec<events::Event> = new.iter().map(Event::recorded).collect();
    events::emit(&config.state_dir, &new_events);
    let mut book: Book = read_history(&path(config), LARGEST)?;
    for event in new {
        book.events.push(event);
        thin_out(&mut book.events);
    }
    book.looked_at = uptime_seconds();
    process::read_boot_id().unwrap_or_default().clone_into(&mut book.boot_id);
    book.blind = blind;
    replace(&path(config), &serde_json::to_vec(&book)?, 0o644)
}

impl Event {
    /// Of now. `whose` is the lease of the process, if it has one.
    fn new(
        (offence, action): (Offence, Action),
        whose: Option<&Lease>,
        device: &str,
        (pid, name): (i32, &str),
        text: String,
    ) -> Self {
        Self {
            time: epoch_seconds(),
            offence,
            action,
            container_id: whose.map(|lease| safe(&lease.container.name())),
            uid: whose.map_or(0, |lease| lease.container.uid),
            device: device.to_owned(),
            pid,
            name: safe(name),
            text,
        }
    }

    /// As one of all that happens, now.
    pub(crate) fn recorded(&self) -> events::Event {
        events::Event {
            uid: self.uid,
            container_id: self.container_id.clone().unwrap_or_default(),
            devices: vec![self.device.clone()],
            reason: self.offence.to_string(),
            action: self.action.to_string(),
            text: self.text.clone(),
            ..events::Event::now(events::Kind::Guard)
        }
    }
}

/// Drops the oldest events. Events of the latest event's container go first if they exceed its part.
fn thin_out(events: &mut Vec<Event>) {
    let Some(last) = events.last().map(|event| event.container_id.clone()) else { return };
    let of_last = |event: &Event| event.container_id == last;
    if events.iter().filter(|event| of_last(event)).count() > KEPT_OF_ONE {
        let oldest = events.iter().position(of_last).unwrap_or(0);
        events.remove(oldest);
    }
    events.drain(..events.len().saturating_sub(KEPT));
}

fn read(config: &Config) -> Book {
    let text = read_if_trusted(&path(config), LARGEST).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("guard.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(container: &str, number: i32) -> Event {
        Event {
            time: 1,
            offence: Offence::Memory,
            action: Action::Terminate,
            container_id: Some(container.to_owned()),
            uid: 0,
            device: "GPU-1".to_owned(),
            pid: number,
            name: "x".to_owned(),
            text: "x".to_owned(),
        }
    }

    #[test]
    fn a_stored_book_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/guard.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Book = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn many_events_of_one_container_displace_only_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        assert_eq!(sight(&config), Sight::None);
        record(vec![event("quiet", 1)], Vec::new(), &config).unwrap();
        assert_eq!(sight(&config), Sight::All);
        record((0..100).map(|number| event("forks", number)).collect(), vec!["GPU-1: lost".into()], &config)
            .unwrap();
        let kept = events(&config);
        assert_eq!((kept.len(), kept[0].container_id.as_deref(), kept[16].pid), (17, Some("quiet"), 99));
        assert_eq!(sight(&config), Sight::Blind(vec!["GPU-1: lost".into()]));
        for number in 0..100 {
            record(vec![event(&number.to_string(), 1)], Vec::new(), &config).unwrap();
        }
        assert_eq!(events(&config).len(), 64);
    }
}
