//! The last refusals, for `sublet status --last-error`. Engines do not always show the output of a hook.

use std::path::PathBuf;

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use super::AdmitError;
use crate::config::Config;
use crate::events::{self, Event, Kind};
use crate::fs::{parse_json, read_history, read_if_trusted, replace};
use crate::ledger::{Container, Lease};
use crate::names::{Names, REFUSED};
use crate::process::epoch_seconds;
use crate::text::{safe, safe_long};

/// Far more than [`KEPT`] have, in bytes.
const LARGEST: u64 = 4 << 20;

/// How many are kept.
const KEPT: usize = 32;

/// How many of these may be of one user without root, so that no user can displace the records of another.
const KEPT_OF_ONE: usize = 8;

/// Longest reason of a user's that is kept, in characters.
const LONGEST: usize = 2000;

/// How many devices are kept of one: as many as eight GPUs in MIG mode have.
pub(super) const MOST_CANDIDATES: usize = 64;

/// A container that was not started, or one that was started with a warning about its image or its runtime.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusalRecord {
    /// Seconds since the epoch.
    pub time: u64,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    pub container_id: String,
    /// The reason, one line.
    pub reason: String,
    /// The container's user.
    pub uid: u32,
    /// It was started: the reason is a warning. Engines do not show warnings of a start that succeeds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub started: bool,
    /// Each device that could have served it, and why it did not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<String>,
}

/// The last refusals, oldest first; none if the file cannot be read.
pub fn refusals(config: &Config) -> Vec<RefusalRecord> {
    let text = read_if_trusted(&path(config), LARGEST).unwrap_or_default();
    parse_json(&text).unwrap_or_default()
}

/// Adds a refusal by this process of a container for `owner`, if one is named, and keeps the container's name. A lost record is
/// no reason to fail, because the caller reports the error itself.
pub(super) fn record(container: &Container, error: &AdmitError, owner: Option<String>, config: &Config) {
    let refused = Event {
        reason: error.reason().to_owned(),
        owner: owner.unwrap_or_default(),
        ..event_of(Kind::Refused, geteuid().as_raw(), &container.name(), error.to_string())
    };
    add(refused, error.candidates().to_vec(), config);
    REFUSED.get_or_init(|| Names::now(Some(container), config));
}

/// Adds a refusal that user `uid` reports or, of a container that `started`, a warning.
pub fn record_reported(uid: u32, id: &str, why: &str, candidates: &[String], started: bool, config: &Config) {
    let candidates = candidates.iter().map(|text| safe_long(text, LONGEST / 4)).collect();
    let kind = if started { Kind::Warned } else { Kind::Refused };
    // The user's program gives no word of [`Event::reason`].
    add(event_of(kind, uid, id, safe_long(why, LONGEST)), candidates, config);
}

fn event_of(kind: Kind, uid: u32, container_id: &str, text: String) -> Event {
    Event { uid, container_id: container_id.to_owned(), text, ..Event::now(kind) }
}

fn add(said: Event, candidates: Vec<String>, config: &Config) {
    events::emit(&config.state_dir, std::slice::from_ref(&said));
    store(said.uid, &said.container_id, (said.text, candidates), said.kind == Kind::Warned, config);
}

/// Records the warnings of a started container as events, because engines do not show warnings of their runtime. Keeps the
/// ones `of_image`, too; of equal warnings, the last one.
pub(super) fn record_warnings(lease: &Lease, warnings: &[String], of_image: &[String], config: &Config) {
    let (name, uid) = (lease.container.name(), lease.container.uid);
    let event = |text: &String| Event {
        lease: lease.id.to_string(),
        ..event_of(Kind::Warned, uid, &name, text.clone())
    };
    events::emit(&config.state_dir, &warnings.iter().take(KEPT).map(event).collect::<Vec<_>>());
    for reason in of_image.iter().take(KEPT_OF_ONE) {
        store(uid, &name, (safe_long(reason, LONGEST), Vec::new()), true, config);
    }
}

fn store(uid: u32, container_id: &str, said: (String, Vec<String>), started: bool, config: &Config) {
    let (path, (reason, mut candidates)) = (path(config), said);
    candidates.truncate(MOST_CANDIDATES);
    let stored = read_history(&path, LARGEST).and_then(|mut all: Vec<RefusalRecord>| {
        all.retain(|old| !(started && old.started && old.uid == uid && old.reason == reason));
        let (time, container_id) = (epoch_seconds(), safe(container_id));
        all.push(RefusalRecord { time, container_id, reason, uid, started, candidates });
        thin_out(&mut all, uid);
        replace(&path, &serde_json::to_vec(&all)?, 0o644)
    });
    if let Err(error) = stored {
        tracing::debug!("cannot write refusals.json: {error}");
    }
}

/// Drops the oldest records, first the records of `uid` beyond its quota.
fn thin_out(all: &mut Vec<RefusalRecord>, uid: u32) {
    let of_one = all.iter().filter(|record| record.uid == uid).count();
    let mut surplus = if uid == 0 { 0 } else { of_one.saturating_sub(KEPT_OF_ONE) };
    all.retain(|record| {
        let drops = surplus > 0 && record.uid == uid;
        surplus -= usize::from(drops);
        !drops
    });
    all.drain(..all.len().saturating_sub(KEPT));
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("refusals.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_refusals_are_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/mig/refusals.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Vec<RefusalRecord> = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn a_user_who_is_refused_again_and_again_drives_out_only_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        add(event_of(Kind::Refused, 0, "root", "no".to_owned()), vec![], &config);
        let many = vec!["y".repeat(9000); 100];
        for number in 0..20 {
            record_reported(1000, &format!("c{number}\u{1b}"), &"x".repeat(9000), &many, false, &config);
        }
        let all = refusals(&config);
        assert_eq!((all.len(), all[0].uid), (9, 0));
        assert_eq!((all[8].container_id.as_str(), all[8].reason.len()), ("c19\\u{1b}", 2000));
        assert_eq!((all[8].candidates.len(), all[8].candidates[0].len()), (64, 500));
        for number in 0..40 {
            add(event_of(Kind::Refused, 0, &number.to_string(), "no".to_owned()), vec![], &config);
        }
        assert_eq!(refusals(&config).len(), 32);
    }

    #[test]
    fn a_newer_versions_refusals_are_not_lost() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        let newer = r#"[{"at":{"seconds":1},"container":"c","reason":["a","b"]}]"#;
        std::fs::write(path(&config), newer).unwrap();
        assert!(refusals(&config).is_empty());
        assert!(path(&config).exists(), "to look changes nothing");
        add(event_of(Kind::Refused, 0, "c", "no".to_owned()), vec![], &config);
        assert_eq!(refusals(&config).len(), 1);
        assert_eq!(std::fs::read_to_string(dir.path().join("refusals.json.aside")).unwrap(), newer);
    }
}
