//! The guard's thread: while there are leases it checks the devices and acts a few times a second.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::cached_files::{Changes, Kept};
use crate::gpu_processes::{Look, Looker};

use super::enforce::{Acting, Awaited};
use super::judge::{Judge, Offence, Verdict};
use super::mps_servers::Servers;
use super::silent_connections::Silent;
use super::{Event, OFF};
use sublet_core::admit::Local;
use sublet_core::config::{self, Config};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Ledger, LedgerError, Store};
use sublet_core::process::Process;
use sublet_core::share::Action;
use sublet_core::text::safe;

/// How often the configuration is read again and the guard records that it runs.
const REREAD: Duration = Duration::from_secs(5);

/// A process that is still there this long after an action is acted on again.
const AGAIN: Duration = Duration::from_secs(5);

/// A file that is being replaced exists again after this long.
const MOMENT: Duration = Duration::from_millis(50);

/// The pause between two checks for a lease if the kernel does not report changes of the ledger.
const IDLE: Duration = Duration::from_millis(500);

/// Starts the thread; it ends with the process.
pub(crate) fn start() -> std::io::Result<()> {
    thread::Builder::new().name("guard".to_owned()).spawn(|| Guard::default().run()).map(drop)
}

/// The verdicts, the events, and the devices that could not be checked.
type Seen = (Vec<Verdict>, Vec<Event>, BTreeSet<String>);

/// The findings of earlier checks, as long as there are leases.
#[derive(Default)]
struct Earlier {
    /// NVML, opened when this was the inventory: to who opened it before, a GPU that comes back does not answer.
    nvml: Option<(nvml_wrapper::Nvml, Rc<Inventory>)>,
    inventory: Kept<Inventory>,
    looker: Looker,
    judge: Judge,
    /// What was judged last, and by which rules, if that need not be judged again: an idle host's looks are all the same.
    judged: Option<(Vec<Look>, Rc<Ledger>, config::Guard)>,
    servers: Servers,
    silent: Silent,
    /// When each process was last acted on, for which offence and with which action.
    acted: BTreeMap<(Offence, Action, Process), Instant>,
}

#[derive(Default)]
struct Guard {
    earlier: Earlier,
    ledger: Kept<Ledger>,
    changes: Changes,
    /// What is waited for where verdicts are carried out, each in a thread. The looks at devices never wait for it.
    acting: BTreeSet<Awaited>,
    finished: Finished,
    /// The thread that records the first processes of containers.
    recording: Option<JoinHandle<()>>,
    /// The devices that the last check could not read.
    blind: BTreeSet<String>,
    last_sign: Option<Instant>,
}

/// What was waited for where verdicts have been carried out, and the actions.
struct Finished {
    sender: Sender<(Awaited, Vec<Event>)>,
    receiver: Receiver<(Awaited, Vec<Event>)>,
}

impl Default for Finished {
    fn default() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }
}

impl Guard {
    fn run(mut self) {
        let mut config = None;
        let mut read_at = Instant::now();
        loop {
            if config.is_none() || read_at.elapsed() >= REREAD {
                (config, read_at) = (sublet_core::config_files::load().ok().or(config), Instant::now());
            }
            match config.as_ref().map_or(Some(REREAD), |config| self.tick(config)) {
                Some(time) => self.pause(time, config.as_ref()),
                None => self.changes.wait(REREAD, IDLE),
            }
        }
    }

    /// Waits until the next check, and reports finished actions meanwhile.
    fn pause(&mut self, time: Duration, config: Option<&Config>) {
        let until = Instant::now() + time;
        let left = || until.saturating_duration_since(Instant::now());
        let Some(config) = config else { return thread::sleep(left()) };
        while let Ok((awaited, events)) = self.finished.receiver.recv_timeout(left()) {
            self.acting.remove(&awaited);
            self.sign(events, self.blind.clone(), config);
        }
    }

    /// The ledger. The first process of a container that has started is recorded, because the shim no longer exists then;
    /// in a thread of its own, because that also adjusts MPS daemons if a container has ended.
    fn read(&mut self, config: &Config) -> Result<(Rc<Ledger>, Store), LedgerError> {
        let store = Store::open(&config.state_dir)?;
        let file = config.state_dir.join("ledger.json");
        let ledger = self.ledger.get(&file, || store.read())?;
        // Leases of rootless users are bound to a process by their hooks only.
        let unknown = ledger.leases.iter().any(|lease| lease.init.is_none() && !lease.brokered);
        if unknown && self.recording.as_ref().is_none_or(JoinHandle::is_finished) {
            let config = config.clone();
            let record = move || {
                let _ = Local::new(&config).update(|_| ()).inspect_err(|error| tracing::debug!("{error}"));
            };
            self.recording = thread::Builder::new().name("record".to_owned()).spawn(record).ok();
        }
        Ok((ledger, store))
    }

    /// One check. Returns how long to wait before the next one; `None`: until a lease is taken.
    fn tick(&mut self, config: &Config) -> Option<Duration> {
        if !config.guard.enabled {
            *self = Self::default();
            return Some(REREAD);
        }
        self.changes.follow(&config.state_dir);
        // The first ledger is written after its copy, and seems to be missing in between.
        let opened = self.read(config).or_else(|_| {
            thread::sleep(MOMENT);
            self.read(config)
        });
        let (ledger, store) = match opened {
            Ok(opened) => opened,
            Err(error) => return Some(self.sees_nothing(Vec::new(), &error.to_string(), config)),
        };
        // A layout is being changed. NVML is closed, because an open NVML prevents a reset.
        if ledger.mig.under_way.as_ref().is_some_and(|change| !change.gpus.is_empty()) {
            self.earlier = Earlier::default();
            return Some(IDLE);
        }
        if ledger.leases.is_empty() {
            self.earlier = Earlier::default();
            self.sign(Vec::new(), BTreeSet::new(), config);
            return (!self.acting.is_empty()).then_some(config.guard.period);
        }
        self.earlier.servers.heal(&ledger, config);
        let mut events = self.earlier.servers.end_faulted(&ledger, config);
        match self.look(&ledger, config) {
            Ok((mut verdicts, lost, blind)) => {
                events.extend(lost);
                verdicts.extend(self.earlier.silent.find(&ledger, &config.guard));
                events.extend(self.act(&verdicts, &store, config));
                self.sign(events, blind, config);
                Some(config.guard.period)
            }
            Err(error) => Some(self.sees_nothing(events, &error.to_string(), config)),
        }
    }

    fn look(&mut self, ledger: &Rc<Ledger>, config: &Config) -> anyhow::Result<Seen> {
        let file = inventory::cache_path(config);
        let known = self.earlier.inventory.get(&file, || inventory::last(config))?;
        let nvml = match self.earlier.nvml.take() {
            Some((nvml, then)) if Rc::ptr_eq(&then, &known) => nvml,
            _ => crate::probe::connect(config)?.0,
        };
        let is_here = |uuid: &&String| known.device(uuid).is_some();
        let all = ledger.leases.iter();
        let watched = all.flat_map(|lease| lease.devices.iter().chain(lease.known.iter().filter(is_here)));
        let leased: BTreeSet<&str> = watched.map(String::as_str).collect();
        let tolerance = config.guard.memory_tolerance;
        let (looks, failures) = self.earlier.looker.look(&nvml, &leased, ledger, &known, tolerance);
        let blind: BTreeSet<String> = failures
            .iter()
            .map(|(device, error)| format!("{} is not guarded: {error}", called(device, &known)))
            .collect();
        // If the driver was unloaded or all its GPUs were lost, NVML is opened again.
        self.earlier.nvml = (!looks.is_empty() || blind.is_empty()).then_some((nvml, known));
        let lost = self.earlier.servers.lost(&looks, ledger);
        Ok((self.judge(looks, ledger, &config.guard), lost, blind))
    }

    fn judge(&mut self, looks: Vec<Look>, ledger: &Rc<Ledger>, rules: &config::Guard) -> Vec<Verdict> {
        let Earlier { judge, judged, looker, .. } = &mut self.earlier;
        let is_same =
            |(before, of, by): &(_, _, _)| *before == looks && Rc::ptr_eq(of, ledger) && by == rules;
        if judged.as_ref().is_some_and(is_same) {
            return Vec::new();
        }
        let verdicts = judge.judge(&looks, ledger, rules);
        judge.unsure.iter().for_each(|device| looker.forget_lists(device));
        *judged = judge.is_quiet().then(|| (looks, Rc::clone(ledger), rules.clone()));
        verdicts
    }

    fn act(&mut self, verdicts: &[Verdict], store: &Store, config: &Config) -> Vec<Event> {
        let of = |verdict: &Verdict| (verdict.offence, verdict.action, verdict.holder.process);
        let current: BTreeSet<_> = verdicts.iter().map(of).collect();
        self.earlier.acted.retain(|key, _| current.contains(key));
        let again =
            |at: &Instant, verdict: &Verdict| verdict.action != Action::Report && at.elapsed() >= AGAIN;
        let is_due =
            |verdict: &&Verdict| self.earlier.acted.get(&of(verdict)).is_none_or(|at| again(at, verdict));
        let due: Vec<&Verdict> = verdicts.iter().filter(is_due).collect();
        if due.is_empty() {
            return Vec::new();
        }
        let Some(acting) = Acting::begin(store, config) else { return Vec::new() };
        let mut waiting: BTreeMap<Option<Awaited>, Vec<Verdict>> = BTreeMap::new();
        for verdict in due {
            let key = acting.awaited(verdict);
            // It has not yet come for what was to be done before.
            if key.as_ref().is_some_and(|key| self.acting.contains(key)) {
                continue;
            }
            self.earlier.acted.insert(of(verdict), Instant::now());
            waiting.entry(key).or_default().push(verdict.clone());
        }
        let mut events = Vec::new();
        for (key, verdicts) in waiting {
            let acting = acting.clone();
            let Some(key) = key else {
                events.extend(acting.act_on(&verdicts));
                continue;
            };
            let (sender, of) = (self.finished.sender.clone(), key.clone());
            let act = move || _ = sender.send((of, acting.act_on(&verdicts)));
            match thread::Builder::new().name("act".to_owned()).spawn(act) {
                Ok(_) => _ = self.acting.insert(key),
                Err(error) => tracing::warn!("threads: {error}"),
            }
        }
        events
    }

    /// Logs events and devices that cannot be checked, and records both at once. Without any, records from time to
    /// time that the guard runs.
    fn sign(&mut self, events: Vec<Event>, blind: BTreeSet<String>, config: &Config) {
        for event in &events {
            tracing::warn!(
                offence = ?event.offence, action = ?event.action, pid = event.pid, device = event.device,
                container = event.container_id.as_deref().unwrap_or("-"), "guard: {}", event.text
            );
        }
        for why in blind.difference(&self.blind) {
            tracing::warn!("{why}");
        }
        let changed = !events.is_empty() || blind != self.blind;
        if !changed && self.last_sign.is_some_and(|at| at.elapsed() < REREAD) {
            return;
        }
        self.last_sign = Some(Instant::now());
        self.blind = blind;
        let recorded = super::record(events, self.blind.iter().cloned().collect(), config);
        let _ = recorded.inspect_err(|error| tracing::warn!("cannot write guard.json: {error}"));
    }

    fn sees_nothing(&mut self, events: Vec<Event>, why: &str, config: &Config) -> Duration {
        self.sign(events, BTreeSet::from([format!("{OFF}: no device can be watched: {why}")]), config);
        REREAD
    }
}

/// As `GPU 3`; the UUID of a device that is not known.
fn called(uuid: &str, known: &Inventory) -> String {
    let left_out = known.left_out.iter().map(|gone| &gone.gpu).find(|gpu| gpu.uuid == uuid);
    known.device(uuid).or(left_out).map_or_else(|| safe(uuid), Device::label)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::mps_servers::tests::{is_still_asked, never_answered};
    use super::*;
    use crate::gpu_processes::Holder;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::ledger::{DaemonKey, Init, Lease};

    #[test]
    fn looks_are_judged_again_while_anybody_is_suspected_or_spared() {
        let process = Process::current().unwrap();
        let init = Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None };
        let with = |init: Option<Init>| {
            let mut ledger = Ledger::empty("");
            ledger.leases = vec![Lease { init, ..lease(1, "GPU-1") }];
            Rc::new(ledger)
        };
        let stranger = || Holder {
            process,
            name: "x".to_owned(),
            memory_bytes: Some(1),
            is_server: false,
            is_client: false,
            lease: None,
        };
        let look = |holders: Vec<Holder>| {
            let device = "GPU-1".to_owned();
            vec![Look { device, most_clients: None, knows_clients: true, gone: BTreeSet::new(), holders }]
        };
        let rules = config::Guard::default();
        let is_judged = |ledger: &Rc<Ledger>, holders: Vec<Holder>| {
            let mut guard = Guard::default();
            guard.judge(look(holders), ledger, &rules);
            guard.earlier.judged.is_some()
        };
        assert!(is_judged(&with(Some(init.clone())), Vec::new()));
        assert!(!is_judged(&with(None), Vec::new()), "a container that starts is spared for a time");
        let (ledger, mut guard) = (with(Some(init)), Guard::default());
        assert!(guard.judge(look(Vec::new()), &ledger, &rules).is_empty());
        for found in [0, 1, 1] {
            let verdicts = guard.judge(look(vec![stranger()]), &ledger, &rules);
            assert_eq!(verdicts.len(), found, "suspected first: {verdicts:?}");
        }
        let strict = config::Guard { strict_clients: !rules.strict_clients, ..rules.clone() };
        guard.judge(look(Vec::new()), &ledger, &rules);
        guard.judge(look(Vec::new()), &ledger, &strict);
        assert!(guard.earlier.judged.is_some_and(|(.., by)| by == strict));
    }

    #[test]
    fn a_client_of_a_daemon_that_does_not_answer_is_ended_and_no_look_waits_for_it() {
        let (dir, config) = never_answered();
        let store = Store::open(&config.state_dir).unwrap();
        let ended_meanwhile = || {
            let mut client = Command::new("sleep").arg("600").spawn().unwrap();
            let process = Process::find(i32::try_from(client.id()).unwrap()).unwrap();
            let init = Some(Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None });
            let lease = Lease { init, daemon: Some(DaemonKey("GPU-1".to_owned())), ..lease(1, "GPU-1") };
            let insert = |ledger: &mut Ledger| {
                ledger.leases = vec![lease.clone()];
                Ok::<_, String>(())
            };
            store.update(insert).unwrap().0.unwrap();
            let holder = Holder {
                process,
                name: "sleep".to_owned(),
                memory_bytes: None,
                is_server: false,
                is_client: true,
                lease: Some(lease.id.clone()),
            };
            let verdict = Verdict {
                offence: Offence::Memory,
                action: Action::Terminate,
                device: "GPU-1".to_owned(),
                holder,
                used: 2,
                allowed: 1,
            };
            let mut guard = Guard::default();
            let mut events = guard.act(&[verdict], &store, &config);
            let goes_on = is_still_asked(&dir);
            if events.is_empty() {
                events = guard.finished.receiver.recv().unwrap().1;
            }
            assert!(events[0].text.ends_with("it was ended"), "{}", events[0].text);
            client.wait().unwrap();
            goes_on
        };
        // A machine may be so busy that it has been ended before it is looked at, but not each time.
        assert!((0..20).any(|_| ended_meanwhile()), "the look waited for the daemon's answer");
    }
}
