//! What the guard did, for whoever asks why a container's process ended; and that it watches at all.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::judge::Offence;
use crate::config::{Action, Config};
use crate::process::{epoch_seconds, uptime_seconds};
use crate::replace::replace;

/// How many events are kept.
const KEPT: usize = 64;

/// A sign of life older than this, in seconds, is none.
const LIMIT: u64 = 15;

/// `guard.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Book {
    /// Seconds since boot at the last look.
    looked_at: u64,
    boot_id: String,
    events: Vec<Event>,
}

/// One thing that the guard found and did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Seconds since the epoch.
    pub time: u64,
    /// What the process did.
    pub offence: Offence,
    /// What was done about it.
    pub action: Action,
    /// Whose it was; `None`: no lease's.
    pub container_id: Option<String>,
    /// The uid of the container's engine.
    pub uid: u32,
    /// The device's UUID.
    pub device: String,
    /// The process on the host.
    pub pid: i32,
    /// Its command name.
    pub name: String,
    /// The same for people, in one line.
    pub text: String,
}

/// The last events, oldest first; none where the file cannot be read.
#[must_use]
pub fn events(config: &Config) -> Vec<Event> {
    read(config).events
}

/// Whether the guard has looked just now, or would have, had there been a lease.
#[must_use]
pub fn is_watching(config: &Config) -> bool {
    let book = read(config);
    let now = uptime_seconds();
    !book.boot_id.is_empty()
        && book.boot_id == crate::inventory::boot_id()
        && book.looked_at <= now
        && now - book.looked_at <= LIMIT
}

/// Adds `new` events and says that the guard watches.
pub(super) fn write(new: Vec<Event>, config: &Config) -> std::io::Result<()> {
    let mut book = read(config);
    book.events.extend(new);
    book.events.drain(..book.events.len().saturating_sub(KEPT));
    book.looked_at = uptime_seconds();
    book.boot_id = crate::inventory::boot_id();
    replace(&path(config), &serde_json::to_vec(&book)?, 0o644)
}

fn read(config: &Config) -> Book {
    serde_json::from_slice(&std::fs::read(path(config)).unwrap_or_default()).unwrap_or_default()
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("guard.json")
}

/// Now, as events have it.
pub(super) fn now() -> u64 {
    epoch_seconds()
}
