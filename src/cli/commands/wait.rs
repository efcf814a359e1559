//! `sublet wait`: waits until the driver is up and, with annotations, until their share is free.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use crate::preview::{Whose, preview, seen_ledger};
use sublet_core::admit::{AdmitError, Local, fresh_inventory, is_remote};
use sublet_core::broker::client::{Broker, BrokerError};
use sublet_core::broker::protocol::{Answer, Ask};
use sublet_core::config::Config;
use sublet_core::ledger::{Container, LeaseId, Waiter};
use sublet_core::names::replace_ids;
use sublet_core::place::place_of;
use sublet_core::process::Process;
use sublet_core::request::{self, Request};
use sublet_core::share::{DURATION_ALLOWED, parse_duration};
use sublet_core::text::first_line;

/// A day. The clock can represent this far ahead.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The pause between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(250);

/// How often `sublet serve` is asked to keep a place.
const KEEP_AGAIN: Duration = Duration::from_secs(10);

/// The pause between two lines for a terminal.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// Arguments of `sublet wait`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The share to wait for, such as sm=25 memory=8GiB. With none, and no --annotation, wait for the driver alone
    #[arg(value_parser = super::share, value_name = "KEY=VALUE")]
    share: Vec<(String, String)>,
    /// The same, as an annotation: sublet.sm=25
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE")]
    annotations: Vec<(String, String)>,
    /// The longest wait, such as 30s or 2m; at most a day
    #[arg(long, default_value = "60s", value_parser = timeout)]
    timeout: Duration,
}

/// A time to wait, up to a day.
pub fn timeout(text: &str) -> Result<Duration, String> {
    let allowed = || format!("must be {DURATION_ALLOWED}, at most a day");
    parse_duration(text, LONGEST).map_err(|hint| hint.unwrap_or_else(allowed))
}

/// Runs it.
///
/// # Errors
/// The time is up; the message is the last refusal.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let annotations: BTreeMap<_, _> = arguments.annotations.iter().chain(&arguments.share).cloned().collect();
    let request =
        if annotations.is_empty() { None } else { Some(request::parse(&annotations, None, None, config)?) };
    let deadline = Instant::now() + arguments.timeout;
    let (mut said, mut entry, mut place) = (None, None, None);
    loop {
        let found = look(request.as_ref(), &mut entry, &mut place, config);
        let may_change = found.as_ref().is_err_and(|error| may_change(error, entry.as_ref(), config));
        // Asked once, also where there is no time to wait.
        let is_over = Instant::now() >= deadline && !(may_change && entry.is_none());
        match found {
            // An instance would be created.
            Ok(()) | Err(AdmitError::WouldMake { .. }) => return Ok(()),
            Err(
                error @ (AdmitError::Refused(_) | AdmitError::PolicyLimit(_) | AdmitError::Unmade { .. }),
            ) if !error.is_temporary() && !may_change => {
                return Err(error.into());
            }
            Err(error) if is_over => return Err(error.into()),
            Err(error) => {
                if let (Some(request), None) = (&request, &entry) {
                    let (id, us) = (LeaseId::random()?, Process::current()?);
                    let (none, request) = (Container::default(), request.clone());
                    let request = Request { wait: arguments.timeout, ..request };
                    let waiter = Waiter::new(&id, &none, &request, &error.to_string(), Some(us));
                    let ask = Ask::Wait { annotations: annotations.clone() };
                    entry = Some(Entry { waiter, ask, asked: None, has_answer: false });
                    // Its place is known once it has one.
                    continue;
                }
                let place = place.map(|place| format!("place {place}: ")).unwrap_or_default();
                let why = place + first_line(&error.to_string());
                say(&mut said, why, deadline.saturating_duration_since(Instant::now()));
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }
}

/// Shows the reason for the wait on a terminal: at once, and then every [`SAY_AGAIN`] or when the reason changes.
fn say(said: &mut Option<(Instant, String)>, why: String, left: Duration) {
    let is_new = said.as_ref().is_none_or(|(at, said)| *said != why || at.elapsed() >= SAY_AGAIN);
    if is_new && std::io::stderr().is_terminal() {
        let left = Duration::from_secs(left.as_secs() + u64::from(left.subsec_nanos() > 0));
        eprintln!("sublet: waiting for up to {}: {}", humantime::format_duration(left), replace_ids(&why));
        *said = Some((Instant::now(), why));
    }
}

/// One among those who wait.
struct Entry {
    waiter: Waiter,
    /// What `sublet serve` is asked where this process does not change the ledger itself, and when it was.
    ask: Ask,
    asked: Option<Instant>,
    /// Whether it has answered in this look: it has the driver asked before it says no.
    has_answer: bool,
}

impl Entry {
    /// Has `sublet serve` keep its place. Where it does not, being another version or stopped, this process waits without one.
    fn keep(&mut self, config: &Config) {
        self.has_answer = false;
        if self.asked.is_some_and(|at| at.elapsed() < KEEP_AGAIN) {
            return;
        }
        let answer = Broker::new(config).ask(&self.ask);
        // One that is late may have the driver asked still. Where none runs, nobody has.
        let is_late = matches!(answer, Err(BrokerError::Late(_) | BrokerError::Broken(_)));
        self.has_answer = !is_late && !matches!(answer, Err(BrokerError::Refused { temporary: true, .. }));
        match answer {
            Ok(Answer::Lease(Some(id))) => self.waiter.id = id,
            answer => tracing::debug!("no place among those who wait: {answer:?}"),
        }
        self.asked = Some(Instant::now());
    }
}

/// Whether what the driver says now, which `sublet serve` has not asked in this look, could change `error`.
fn may_change(error: &AdmitError, entry: Option<&Entry>, config: &Config) -> bool {
    entry.is_none_or(|entry| !entry.has_answer) && error.wants_refresh() && is_remote(config)
}

/// Whether there is room. The `entry` is put into the order of those who wait, until its process ends, in which `place` is its
/// own among those who want the same devices.
fn look(
    request: Option<&Request>,
    entry: &mut Option<Entry>,
    place: &mut Option<usize>,
    config: &Config,
) -> Result<(), AdmitError> {
    if let Some(entry) = entry.as_mut().filter(|_| is_remote(config)) {
        // It may have the driver asked.
        entry.keep(config);
    }
    let mut inventory = fresh_inventory(config)?;
    let Some(request) = request else { return Ok(()) };
    if !is_remote(config) {
        // Elsewhere nothing more can be known than what the error says.
        let waiter = entry.as_ref().map(|entry| entry.waiter.clone());
        let updated = Local::new(config).update(|ledger| waiter.map(|one| ledger.add_waiter(one)));
        updated.or_else(|error| if error.is_elsewhere() { Ok(None) } else { Err(error) })?;
    }
    let id = entry.as_ref().map_or_else(LeaseId::random, |entry| Ok(entry.waiter.id.clone()));
    let id = id.map_err(AdmitError::Random)?;
    let ledger = seen_ledger(config)?;
    *place = place_of(&id, &ledger.waiters, &inventory, config);
    preview(request, &id, (&mut inventory, &ledger, false), Whose::callers(config), config).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_written_as_a_wait_is() {
        assert_eq!(timeout("0"), Ok(Duration::ZERO));
        assert_eq!(timeout("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(timeout("10").unwrap_err(), "the unit is missing: write 10s");
        for text in ["soon", "1m 30s", "1441m", "18446744073709551615s"] {
            let why = timeout(text).unwrap_err();
            assert_eq!(
                why, "must be 0 or a whole number of ms, s or m, such as 10s, at most a day",
                "{text}"
            );
        }
    }
}
