//! MPS servers and daemons that leases need: containers that lost work when a server ended, daemons that died, and servers
//! that take no new client after a fault. Such a server waits until every process that was its client then
//! has ended, and one of them may go on for days with a context that can do nothing any more: a notebook, a web server
//! (docs/evidence/2026-11-24-h100-cycles.md). The guard ends the server; the daemon starts another for its next client.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::Event;
use super::judge::Offence;
use crate::gpu_processes::Look;
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, DaemonState, Lease, LeaseId, Ledger, MpsDaemon, Store};
use sublet_core::mps::control::Control;
use sublet_core::mps::{self, dirs};
use sublet_core::process::{Process, pidfd_kill, pidfd_open};
use sublet_core::share::Action;
use sublet_core::text::safe;

/// A daemon that cannot be started is tried again after this long.
const AGAIN: Duration = Duration::from_secs(5);

/// A server as the last check found it.
struct Known {
    device: String,
    name: String,
    key: DaemonKey,
    /// The leases that had clients of this server.
    clients: BTreeSet<LeaseId>,
}

/// Programs that check their CUDA calls end by themselves after a fault, and have so long.
const PATIENCE: Duration = Duration::from_secs(3);

/// Asking a daemon takes a process and 3 ms, so a busy one is not asked more often.
const PAUSE: Duration = Duration::from_secs(1);

/// The state of one daemon, whose server may take no new client.
struct Watched {
    /// The length of its server's log when it was last asked. A server that logs nothing takes and refuses no clients.
    log_length: u64,
    asked: Instant,
    /// Its server after a fault, and since when.
    faulted: Option<(i32, Instant)>,
    /// The thread that asks it for that server now. It may hang, and the looks at other devices must not wait for it.
    asking: Option<JoinHandle<Option<i32>>>,
}

/// The state between two checks.
#[derive(Default)]
pub(super) struct Servers {
    known: BTreeMap<Process, Known>,
    healing: Option<(JoinHandle<()>, Instant)>,
    watched: BTreeMap<DaemonKey, Watched>,
}

impl Servers {
    /// One event for each container that lost its work with an MPS server since the check before.
    pub fn lost(&mut self, looks: &[Look], ledger: &Ledger) -> Vec<Event> {
        let mut now: BTreeMap<Process, Known> = BTreeMap::new();
        for (process, found) in looks.iter().flat_map(|look| known(look, ledger)) {
            match now.get_mut(&process) {
                // A server of several devices: a lease may have clients on only some of them.
                Some(server) => server.clients.extend(found.clients),
                None => drop(now.insert(process, found)),
            }
        }
        let before = std::mem::replace(&mut self.known, now);
        let (alive, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
            before.into_iter().partition(|(process, _)| process.is_alive());
        // Without its daemon a server lives on for a moment, as nobody's.
        for (process, known) in alive {
            self.known.entry(process).or_insert(known);
        }
        ended.into_iter().flat_map(|(process, known)| events(process, &known, ledger)).collect()
    }

    /// Restarts daemons that died under live leases, in a thread of its own because that takes time.
    pub fn heal(&mut self, ledger: &Ledger, config: &Config) {
        let dead = |server: &MpsDaemon| {
            let ran = matches!(server.state, DaemonState::Serving | DaemonState::Fault);
            ran && server.process.is_some_and(|daemon| !daemon.is_alive())
                && ledger.wanted_default_limits(&server.key).is_some()
        };
        let busy =
            |(thread, began): &(JoinHandle<()>, Instant)| !thread.is_finished() || began.elapsed() < AGAIN;
        if !ledger.daemons.iter().any(dead) || self.healing.as_ref().is_some_and(busy) {
            return;
        }
        let config = config.clone();
        let started = thread::Builder::new().name("heal".to_owned()).spawn(move || {
            let healed = Store::open(&config.state_dir).map(|store| mps::heal(&store, &config));
            sublet_core::log::warn(healed.unwrap_or_else(|error| vec![error.to_string()]));
        });
        self.healing = started.ok().map(|thread| (thread, Instant::now()));
    }

    /// Ends servers that have taken no new client for a while; one event for each.
    pub fn end_faulted(&mut self, ledger: &Ledger, config: &Config) -> Vec<Event> {
        self.watched.retain(|key, _| ledger.daemons.iter().any(|daemon| daemon.key == *key));
        let serves = |daemon: &&MpsDaemon| daemon.state == DaemonState::Serving;
        ledger.daemons.iter().filter(serves).filter_map(|daemon| self.end_one(daemon, config)).collect()
    }

    fn end_one(&mut self, daemon: &MpsDaemon, config: &Config) -> Option<Event> {
        let log = dirs::log(&daemon.key, &config.state_dir).join("server.log");
        let log_length = std::fs::metadata(log).map_or(0, |log| log.len());
        let mut faulted = None;
        if let Some(before) = self.watched.get_mut(&daemon.key) {
            if before.asking.as_ref().is_some_and(|asking| !asking.is_finished()) {
                return None;
            }
            if let Some(asking) = before.asking.take() {
                let server = asking.join().ok().flatten();
                let since = before.faulted.filter(|(same, _)| Some(*same) == server).map(|(_, since)| since);
                before.faulted = server.map(|server| (server, since.unwrap_or(before.asked)));
                let due = before.faulted.filter(|(_, since)| since.elapsed() >= PATIENCE);
                return kill(due?.0, daemon);
            }
            let quiet = before.log_length == log_length && before.faulted.is_none();
            if quiet || before.asked.elapsed() < PAUSE {
                return None;
            }
            faulted = before.faulted;
        }
        let (key, config) = (daemon.key.clone(), config.clone());
        // The server that takes no new client. A daemon that does not answer is found elsewhere.
        let faulted_server = move || {
            let control = Control::new(&key, &config).ok()?;
            control.servers().ok()?.into_iter().find(|server| control.is_faulted(*server).unwrap_or(false))
        };
        let asking = thread::Builder::new().name("faulted".to_owned()).spawn(faulted_server);
        let asking = asking.inspect_err(|error| tracing::warn!("threads: {error}")).ok();
        self.watched
            .insert(daemon.key.clone(), Watched { log_length, asked: Instant::now(), faulted, asking });
        None
    }
}

/// The MPS servers on one device, each found by its parent, the daemon.
fn known(look: &Look, ledger: &Ledger) -> Vec<(Process, Known)> {
    let known = look.holders.iter().filter(|holder| holder.is_server).filter_map(|holder| {
        let parent = holder.process.parent()?;
        let is_its = |server: &&MpsDaemon| server.process.is_some_and(|daemon| daemon.pid == parent);
        let key = ledger.daemons.iter().find(is_its)?.key.clone();
        let of_server: BTreeSet<&LeaseId> = ledger.on_daemon(&key).map(|lease| &lease.id).collect();
        let clients = look.holders.iter().filter(|holder| holder.is_client);
        let clients = clients.filter_map(|holder| holder.lease.clone()).filter(|id| of_server.contains(id));
        let (device, name, clients) = (look.device.clone(), holder.name.clone(), clients.collect());
        Some((holder.process, Known { device, name, key, clients }))
    });
    known.collect()
}

fn events(process: Process, known: &Known, ledger: &Ledger) -> Vec<Event> {
    let hit = ledger.on_daemon(&known.key).filter(|lease| known.clients.contains(&lease.id));
    let event = |lease: &Lease| {
        let (pid, device, name) = (process.pid, safe(&known.device), safe(&lease.container.name()));
        let text = format!(
            "the MPS server (pid {pid}) of {device} ended, and with it the GPU work of container {name}; new GPU \
             processes of the container work again"
        );
        Event::new((Offence::Server, Action::Report), Some(lease), &known.device, (pid, &known.name), text)
    };
    hit.map(event).collect()
}

/// Ends the server, if it still is the daemon's: pids are reused.
fn kill(server: i32, daemon: &MpsDaemon) -> Option<Event> {
    let pidfd = pidfd_open(server).ok()?;
    let process = Process::find(server)?;
    (process.parent() == Some(daemon.process?.pid)).then_some(())?;
    let device = daemon.devices.join(", ");
    let done = match pidfd_kill(&pidfd) {
        Ok(()) => "it was ended, and new GPU processes work again".to_owned(),
        Err(error) => format!("it cannot be ended: {error}"),
    };
    let text = format!(
        "the MPS server (pid {server}) of {} took no new client after a GPU fault, because processes that it ended \
         the GPU work of still run: {done}. Those processes have to be started again",
        safe(&device)
    );
    let what = (Offence::Server, Action::Terminate);
    Some(Event::new(what, None, &device, (server, "nvidia-cuda-mps-server"), text))
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use sublet_core::ledger::{DefaultLimits, fixture};

    /// A host where no daemon answers: the control program writes its pid to `asked` and goes on until it is killed.
    pub(in super::super) fn never_answered() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("usr/bin/nvidia-cuda-mps-control");
        fs::create_dir_all(program.parent().unwrap()).unwrap();
        let asked = dir.path().join("asked");
        fs::write(&program, format!("#!/bin/sh\necho $$ >>{}; exec sleep 600\n", asked.display())).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let mut config = Config { state_dir: dir.path().join("state"), ..Config::default() };
        config.driver.root = dir.path().to_owned();
        (dir, config)
    }

    /// Whether the daemon is asked, or was: waits for that.
    pub(in super::super) fn is_still_asked(dir: &tempfile::TempDir) -> bool {
        let (asked, begun) = (dir.path().join("asked"), Instant::now());
        // It is there before its line is.
        let pids = loop {
            match fs::read_to_string(&asked) {
                Ok(pids) if pids.ends_with('\n') => break pids,
                _ => assert!(begun.elapsed() < Duration::from_secs(60), "nobody asks"),
            }
            thread::sleep(Duration::from_millis(1));
        };
        fs::remove_file(&asked).unwrap();
        let last = pids.lines().last().unwrap().parse().unwrap();
        Process::find(last).is_some_and(|asking| asking.is_alive())
    }

    #[test]
    fn a_server_that_outlives_its_daemon_is_missed_when_it_ends() {
        let mut server = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::find(server.id().try_into().unwrap()).unwrap();
        let key = DaemonKey("GPU-1".to_owned());
        let lease = Lease { daemon: Some(key.clone()), ..fixture::lease(1, "GPU-1") };
        let (device, name) = ("GPU-1".to_owned(), "nvidia-cuda-mps-server".to_owned());
        let known = Known { device, name, key, clients: BTreeSet::from([lease.id.clone()]) };
        let ledger = Ledger { leases: vec![lease], ..Ledger::empty("boot") };
        let mut servers = Servers { known: BTreeMap::from([(process, known)]), ..Servers::default() };
        assert!(servers.lost(&[], &ledger).is_empty(), "it lives, as nobody's");
        server.kill().unwrap();
        server.wait().unwrap();
        assert_eq!(servers.lost(&[], &ledger).len(), 1);
        assert!(servers.lost(&[], &ledger).is_empty(), "told once");
    }

    #[test]
    fn no_look_waits_for_a_daemons_answer() {
        let (dir, config) = never_answered();
        let daemon = MpsDaemon {
            key: DaemonKey("GPU-1".to_owned()),
            devices: vec!["GPU-1".to_owned()],
            process: None,
            state: DaemonState::Serving,
            default_limits: DefaultLimits::default(),
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        };
        let ledger = Ledger { daemons: vec![daemon], ..Ledger::empty("boot") };
        let still_asked = || {
            assert!(Servers::default().end_faulted(&ledger, &config).is_empty());
            is_still_asked(&dir)
        };
        // A machine may be so busy that it is killed before it is looked at, but not each time.
        assert!((0..20).any(|_| still_asked()), "the look was over when the daemon was asked no more");
    }
}
