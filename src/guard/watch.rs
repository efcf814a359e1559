//! The guard's own thread: looks, judges, acts, a few times a second while there are leases.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

use super::act::act;
use super::book;
use super::judge::{Judge, Offence, Verdict};
use super::look::Looker;
use crate::config::{self, Action, Config};
use crate::inventory;
use crate::ledger::{Ledger, Store};
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

#[derive(Default)]
struct Guard {
    nvml: Option<Nvml>,
    looker: Looker,
    judge: Judge,
    /// When each process was acted upon for what.
    acted: BTreeMap<(Offence, Process), Instant>,
    /// What was in the way of the last look: told once.
    told: BTreeSet<String>,
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
            self.nvml = None;
            return REREAD;
        }
        let store = Store::open(&config.state_dir).and_then(|store| Ok((store.read()?, store)));
        let (ledger, store) = match store {
            Ok(opened) => opened,
            Err(error) => return self.blind(&error.to_string()),
        };
        // NVML in use would be in the way of whoever changes a MIG layout.
        if ledger.leases.is_empty() || ledger.mig.under_way.is_some() {
            *self = Self { last_sign: self.last_sign, ..Self::default() };
            self.sign(Vec::new(), config);
            return IDLE;
        }
        match self.look(&ledger, config) {
            Ok(verdicts) => self.act(&verdicts, &store, config),
            Err(error) => return self.blind(&error),
        }
        config.guard.period
    }

    fn look(&mut self, ledger: &Ledger, config: &Config) -> Result<Vec<Verdict>, String> {
        let nvml = match self.nvml.take() {
            Some(nvml) => nvml,
            None => inventory::connect(config).map_err(|error| error.to_string())?.0,
        };
        let known = inventory::last(config).map_err(|error| error.to_string())?;
        let (looks, failures) = self.looker.look(&nvml, ledger, &known);
        // A driver that was unloaded or a GPU that was lost: NVML is opened anew.
        self.nvml = failures.is_empty().then_some(nvml);
        let failures: BTreeSet<String> = failures.into_iter().collect();
        for failure in failures.difference(&self.told) {
            tracing::warn!("not guarded: {failure}");
        }
        self.told = failures;
        Ok(self.judge.judge(&looks, ledger, &config.guard))
    }

    fn act(&mut self, verdicts: &[Verdict], store: &Store, config: &Config) {
        let of = |verdict: &Verdict| (verdict.offence, verdict.holder.process);
        let current: BTreeSet<_> = verdicts.iter().map(of).collect();
        self.acted.retain(|key, _| current.contains(key));
        let mut events = Vec::new();
        for verdict in verdicts {
            let again = |at: &Instant| verdict.action != Action::Report && at.elapsed() >= AGAIN;
            if self.acted.get(&of(verdict)).is_none_or(again) {
                self.acted.insert(of(verdict), Instant::now());
                events.extend(act(verdict, store, config));
            }
        }
        for event in &events {
            tracing::warn!(
                offence = ?event.offence, action = ?event.action, pid = event.pid, device = event.device,
                container = event.container_id.as_deref().unwrap_or("-"), "guard: {}", event.text
            );
        }
        self.sign(events, config);
    }

    /// Writes events down at once, and a sign of life now and then.
    fn sign(&mut self, events: Vec<book::Event>, config: &Config) {
        if events.is_empty() && self.last_sign.is_some_and(|at| at.elapsed() < REREAD) {
            return;
        }
        self.last_sign = Some(Instant::now());
        if let Err(error) = book::write(events, config) {
            tracing::warn!("guard.json is not written: {error}");
        }
    }

    /// Nothing can be seen: it is told once, and there is no sign of life.
    fn blind(&mut self, why: &str) -> Duration {
        if self.told.insert(why.to_owned()) {
            tracing::warn!("nothing is guarded: {why}");
        }
        REREAD
    }
}
