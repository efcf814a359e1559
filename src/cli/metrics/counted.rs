//! Counts of events since boot. The number of stored events is limited, so the counts are kept in `metrics.json` beside
//! the ledger, and each scrape by root adds the new events.

use std::collections::BTreeMap;
use std::path::PathBuf;

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use super::{Families, Family, Sample, Type};
use crate::events::{Position, Reader};
use crate::guard::Offence;
use crate::shown::float;
use sublet_core::config::Config;
use sublet_core::events::{Event, Kind};
use sublet_core::fs::{open_lock, read_history, replace};
use sublet_core::share::Action;

/// Upper bounds of the durations of leases, in seconds.
const HELD: [f64; 8] = [10.0, 60.0, 300.0, 1800.0, 3600.0, 21_600.0, 86_400.0, 604_800.0];

/// Upper bounds of how long a start takes, and the wait for a lease in it, in seconds.
const STARTED: [f64; 10] = [0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0, 120.0, 600.0];

/// Words for refusals (docs/explain.md), which begin with 0: a query sees no increase in a count that begins with 1.
const WORDS_FOR_REFUSALS: [&str; 15] = [
    "no-room",
    "never-fits",
    "bad-request",
    "conflict",
    "bad-image",
    "bad-bundle",
    "cdi",
    "mps",
    "no-driver",
    "gpu-lost",
    "policy",
    "job",
    "busy",
    "state",
    "of-a-user",
];

/// The most reasons, in case that words are added.
const WORDS: usize = 64;

/// Far more than the file has, in bytes.
const LARGEST: u64 = 1 << 20;

/// `metrics.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Totals {
    /// Of events, by kind.
    events: BTreeMap<String, u64>,
    /// Of refusals, by the word for the reason.
    refusals: BTreeMap<String, u64>,
    /// Of findings of the guard, by offence and then by its action.
    guard: BTreeMap<String, BTreeMap<String, u64>>,
    /// How long leases lasted.
    held: Durations,
    /// How long containers waited for their leases.
    waited: Durations,
    /// How long containers took to their first process.
    started: Durations,
    /// How long the last suspension took, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    suspended_ms: Option<u64>,
    /// The same of the last return.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    resumed_ms: Option<u64>,
    /// The same of the last move to another GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    moved_ms: Option<u64>,
    /// The part of the events that was counted already.
    position: Position,
}

/// A histogram.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Durations {
    /// How many lasted at most as long as each bound, and not as long as the one before.
    counts: Vec<u64>,
    count: u64,
    sum_seconds: f64,
}

impl Durations {
    fn add(&mut self, milliseconds: u64, bounds: &[f64]) {
        let seconds = float(milliseconds) / 1000.0;
        self.counts.resize(bounds.len(), 0);
        if let Some(at) = bounds.iter().position(|bound| seconds <= *bound) {
            self.counts[at] += 1;
        }
        self.count += 1;
        self.sum_seconds += seconds;
    }

    fn family(&self, (name, help): (&'static str, &'static str), bounds: &[f64]) -> Family {
        let sample = |suffix, bound: Option<String>, value| Sample {
            suffix,
            labels: bound.map(|bound| ("le", bound)).into_iter().collect(),
            value,
        };
        let mut below = 0;
        let mut samples = Vec::new();
        for (at, bound) in bounds.iter().enumerate() {
            below += self.counts.get(at).copied().unwrap_or_default();
            samples.push(sample("_bucket", Some(format!("{bound:?}")), float(below)));
        }
        samples.push(sample("_bucket", Some("+Inf".to_owned()), float(self.count)));
        samples.push(sample("_count", None, float(self.count)));
        samples.push(sample("_sum", None, self.sum_seconds));
        Family { name, kind: Type::Histogram, help, samples }
    }
}

impl Totals {
    fn add(&mut self, event: &Event) {
        *self.events.entry(event.kind.to_string()).or_default() += 1;
        match event.kind {
            Kind::Refused => {
                let word = if event.reason.is_empty() { "of-a-user" } else { &event.reason };
                if self.refusals.len() < WORDS || self.refusals.contains_key(word) {
                    *self.refusals.entry(word.to_owned()).or_default() += 1;
                }
            }
            Kind::Guard if self.guard.len() < WORDS && !event.reason.is_empty() => {
                let actions = self.guard.entry(event.reason.clone()).or_default();
                *actions.entry(event.action.clone()).or_default() += 1;
            }
            Kind::LeaseEnded => event.took_ms.iter().for_each(|took| self.held.add(*took, &HELD)),
            Kind::LeaseTaken => event.took_ms.iter().for_each(|took| self.waited.add(*took, &STARTED)),
            Kind::LeaseBound => event.took_ms.iter().for_each(|took| self.started.add(*took, &STARTED)),
            Kind::Suspended => self.suspended_ms = event.took_ms,
            Kind::Resumed => self.resumed_ms = event.took_ms,
            Kind::Moved => self.moved_ms = event.took_ms,
            _ => {}
        }
    }

    fn families(&self, families: &mut Families) {
        let mut counter = |name, help, counts: &BTreeMap<String, u64>, label: &'static str, all: &[&str]| {
            // A count that begins with its first event has no increase that a query could see.
            let none = all.iter().map(|word| ((*word).to_owned(), 0));
            for (word, count) in none.chain(counts.clone()).collect::<BTreeMap<_, _>>() {
                families.add(Type::Counter, (name, help), &[(label, word)], Some(float(count)));
            }
        };
        let kinds: Vec<&str> = Kind::ALL.iter().map(Into::into).collect();
        counter("sublet_events", "What happened since boot, by kind.", &self.events, "kind", &kinds);
        let refused = "Containers that were refused, by reason.";
        counter("sublet_refusals", refused, &self.refusals, "reason", &WORDS_FOR_REFUSALS);
        let restarts = self.events.get(<&str>::from(Kind::MpsRestarted)).copied().unwrap_or_default();
        let family = ("sublet_mps_restarts", "MPS daemons that were restarted under running containers.");
        families.add(Type::Counter, family, &[], Some(float(restarts)));
        let seconds = |milliseconds: Option<u64>| milliseconds.map(|one| float(one) / 1000.0);
        let last = [
            (
                "sublet_last_suspend_seconds",
                "How long the last copy of a container's GPU memory into host memory took.",
                self.suspended_ms,
            ),
            ("sublet_last_resume_seconds", "How long the last copy back took.", self.resumed_ms),
            (
                "sublet_last_move_seconds",
                "How long the last move of a container to another GPU took.",
                self.moved_ms,
            ),
        ];
        for (name, help, milliseconds) in last {
            families.gauge(name, help, seconds(milliseconds));
        }
        // Pairs that did not occur begin with 0, like other counts.
        for offence in Offence::VARIANTS.iter().map(ToString::to_string) {
            for action in [Action::Report, Action::Terminate, Action::Container] {
                let action = action.to_string();
                let count = self.guard.get(&offence).and_then(|actions| actions.get(&action)).copied();
                let labels = [("offence", offence.clone()), ("action", action)];
                let family = ("sublet_guard_actions", "What the guard found, by offence and by what it did.");
                families.add(Type::Counter, family, &labels, Some(float(count.unwrap_or_default())));
            }
        }
        let held = ("sublet_lease_duration_seconds", "How long leases that have ended lasted.");
        let waited = "From the start of the process that takes the lease to its taking: the wait for room.";
        let started = "From the start of the process that takes the lease to the container's first process.";
        families.0.extend([
            self.held.family(held, &HELD),
            self.waited.family(("sublet_wait_duration_seconds", waited), &STARTED),
            self.started.family(("sublet_start_duration_seconds", started), &STARTED),
        ]);
    }
}

/// Adds the counts, with new events. None for users without root, and where the file cannot be kept.
pub(super) fn add(config: &Config, families: &mut Families) {
    if !nix::unistd::geteuid().is_root() || !config.state_dir.is_dir() {
        return;
    }
    match counted(config) {
        Ok(totals) => totals.families(families),
        Err(error) => {
            tracing::warn!("counts of what happened are left out: {}: {error}", path(config).display());
        }
    }
}

fn counted(config: &Config) -> std::io::Result<Totals> {
    let lock = open_lock(&config.state_dir.join("metrics.lock"))?;
    let _held = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let mut totals: Totals = read_history(&path(config), LARGEST)?;
    let mut reader = Reader { position: totals.position.clone(), this_boot: true, dockers: false };
    let (events, unread) = reader.new_events(config);
    if let Some(why) = unread {
        return Err(std::io::Error::other(why));
    }
    for event in &events {
        totals.add(event);
    }
    totals.position = reader.position;
    replace(&path(config), &serde_json::to_vec(&totals)?, 0o600)?;
    Ok(totals)
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("metrics.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_counts_are_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/metrics.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Totals = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn each_event_counts_once_and_durations_in_their_buckets() {
        let mut totals = Totals::default();
        let refused = |reason: &str| Event { reason: reason.to_owned(), ..Event::now(Kind::Refused) };
        for event in [
            refused("no-room"),
            refused("no-room"),
            refused(""),
            Event { took_ms: Some(90_000), ..Event::now(Kind::LeaseEnded) },
            Event { took_ms: Some(900_000_000_000), ..Event::now(Kind::LeaseEnded) },
            Event { took_ms: Some(120), ..Event::now(Kind::LeaseBound) },
            Event { took_ms: Some(40), ..Event::now(Kind::LeaseTaken) },
            Event::now(Kind::LeaseBound),
            Event { took_ms: Some(9600), ..Event::now(Kind::Suspended) },
            Event { took_ms: Some(4400), ..Event::now(Kind::Resumed) },
            Event { took_ms: Some(6700), ..Event::now(Kind::Moved) },
            Event { reason: "memory".into(), action: "terminate".into(), ..Event::now(Kind::Guard) },
        ] {
            totals.add(&event);
        }
        assert_eq!(totals.refusals, [("no-room".to_owned(), 2), ("of-a-user".to_owned(), 1)].into());
        assert_eq!((totals.held.count, totals.held.counts[2]), (2, 1));
        assert_eq!((totals.suspended_ms, totals.resumed_ms), (Some(9600), Some(4400)));
        assert_eq!(totals.moved_ms, Some(6700));
        assert_eq!((totals.started.count, totals.events["lease-bound"]), (1, 2));
        let mut families = Families::default();
        totals.families(&mut families);
        let guard = families.0.iter().find(|family| family.name == "sublet_guard_actions").unwrap();
        let acted: Vec<_> = guard.samples.iter().filter(|sample| sample.value > 0.0).collect();
        assert_eq!(acted[0].labels, [("offence", "memory".to_owned()), ("action", "terminate".to_owned())]);
        assert_eq!(
            (acted.len(), guard.samples.len()),
            (1, 3 * Offence::VARIANTS.len()),
            "each of three actions"
        );
        let held = families.0.iter().find(|family| family.name == "sublet_lease_duration_seconds").unwrap();
        let buckets: Vec<f64> = held.samples.iter().map(|sample| sample.value).collect();
        assert_eq!(buckets[..10], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
        assert_eq!((totals.waited.count, totals.waited.counts[0]), (1, 1));
        let stored = serde_json::to_vec(&totals).unwrap();
        assert_eq!(serde_json::from_slice::<Totals>(&stored).unwrap(), totals);
    }
}
