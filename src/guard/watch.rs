//! The guard's own thread: looks, judges, acts, a few times a second while there are leases.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

use super::act::Acting;
use super::book::{self, Event};
use super::judge::{Judge, Offence, Verdict};
use super::look::Looker;
use crate::admit;
use crate::config::{self, Action, Config};
use crate::inventory;
use crate::ledger::{Ledger, LedgerError, Store};
use crate::process::Process;

/// How often the configuration is read again, and a sign of life given.
const REREAD: Duration = Duration::from_secs(5);

/// What was acted upon and is still there is acted upon again after this long.
const AGAIN: Duration = Duration::from_secs(5);

/// Between two looks where nothing is leased.
const IDLE: Duration = Duration::from_millis(500);

/// Starts the thread; it ends with the process.
///
/// # Errors
/// There can be no more threads.
pub(crate) fn start() -> io::Result<()> {
    thread::Builder::new().name("guard".to_owned()).spawn(|| Guard::default().run()).map(drop)
}

/// The ledger, in which every container that has started has its first process: the shim is gone by then, so it
/// is the next command that learns of it.
fn read(config: &Config) -> Result<(Ledger, Store), LedgerError> {
    let store = Store::open(&config.state_dir)?;
    let ledger = store.read()?;
    // Those of rootless users are bound by their hooks or not at all.
    if ledger.leases.iter().all(|lease| lease.init.is_some() || lease.brokered) {
        return Ok((ledger, store));
    }
    let (_, freed) = store.update(|_| Ok::<_, Infallible>(()))?;
    admit::tidy(&freed, &store, config);
    Ok((store.read()?, store))
}

#[derive(Default)]
struct Guard {
    nvml: Option<Nvml>,
    looker: Looker,
    judge: Judge,
    /// When each process was acted upon for what.
    acted: BTreeMap<(Offence, Process), Instant>,
    /// What could not be looked at in the last look.
    blind: BTreeSet<String>,
    last_sign: Option<Instant>,
}

impl Guard {
    fn run(mut self) {
        let mut config = None;
        let mut read_at = Instant::now();
        loop {
            if config.is_none() || read_at.elapsed() >= REREAD {
                (config, read_at) = (config::load().ok().or(config), Instant::now());
            }
            let pause = config.as_ref().map_or(REREAD, |config| self.tick(config));
            thread::sleep(pause);
        }
    }

    /// One look; how long to wait until the next.
    fn tick(&mut self, config: &Config) -> Duration {
        if !config.guard.enabled {
            *self = Self::default();
            return REREAD;
        }
        let (ledger, store) = match read(config) {
            Ok(opened) => opened,
            Err(error) => return self.sees_nothing(&error.to_string(), config),
        };
        // A layout is changed: NVML in use would be in the way of a reset.
        let resets = ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty());
        if ledger.leases.is_empty() || resets {
            *self =
                Self { last_sign: self.last_sign, blind: std::mem::take(&mut self.blind), ..Self::default() };
            if !resets {
                self.sign(Vec::new(), BTreeSet::new(), config);
            }
            return IDLE;
        }
        match self.look(&ledger, config) {
            Ok((verdicts, blind)) => {
                let events = self.act(&verdicts, &store, config);
                self.sign(events, blind, config);
                config.guard.period
            }
            Err(error) => self.sees_nothing(&error, config),
        }
    }

    fn look(&mut self, ledger: &Ledger, config: &Config) -> Result<(Vec<Verdict>, BTreeSet<String>), String> {
        let known = inventory::last(config).map_err(|error| error.to_string())?;
        let nvml = match self.nvml.take() {
            Some(nvml) => nvml,
            None => inventory::connect(config).map_err(|error| error.to_string())?.0,
        };
        let (looks, blind) = self.looker.look(&nvml, ledger, &known);
        // The driver was unloaded, or all its GPUs were lost: NVML is opened anew.
        self.nvml = (!looks.is_empty() || blind.is_empty()).then_some(nvml);
        Ok((self.judge.judge(&looks, ledger, &config.guard), blind))
    }

    fn act(&mut self, verdicts: &[Verdict], store: &Store, config: &Config) -> Vec<Event> {
        let of = |verdict: &Verdict| (verdict.offence, verdict.holder.process);
        let current: BTreeSet<_> = verdicts.iter().map(of).collect();
        self.acted.retain(|key, _| current.contains(key));
        let again =
            |at: &Instant, verdict: &Verdict| verdict.action != Action::Report && at.elapsed() >= AGAIN;
        let due: Vec<&Verdict> = verdicts
            .iter()
            .filter(|verdict| self.acted.get(&of(verdict)).is_none_or(|at| again(at, verdict)))
            .collect();
        if due.is_empty() {
            return Vec::new();
        }
        let Some(mut acting) = Acting::begin(store, config) else { return Vec::new() };
        self.acted.extend(due.iter().map(|verdict| (of(verdict), Instant::now())));
        due.into_iter().filter_map(|verdict| acting.act(verdict)).collect()
    }

    /// Tells events and what cannot be seen, and writes both down at once; else a sign of life now and then.
    fn sign(&mut self, events: Vec<Event>, blind: BTreeSet<String>, config: &Config) {
        for event in &events {
            tracing::warn!(
                offence = ?event.offence, action = ?event.action, pid = event.pid, device = event.device,
                container = event.container_id.as_deref().unwrap_or("-"), "guard: {}", event.text
            );
        }
        for why in blind.difference(&self.blind) {
            tracing::warn!("not guarded: {why}");
        }
        let changed = !events.is_empty() || blind != self.blind;
        if !changed && self.last_sign.is_some_and(|at| at.elapsed() < REREAD) {
            return;
        }
        self.last_sign = Some(Instant::now());
        self.blind = blind;
        if let Err(error) = book::write(events, self.blind.iter().cloned().collect(), config) {
            tracing::warn!("guard.json is not written: {error}");
        }
    }

    fn sees_nothing(&mut self, why: &str, config: &Config) -> Duration {
        self.sign(Vec::new(), BTreeSet::from([format!("nothing can be looked at: {why}")]), config);
        REREAD
    }
}
