//! MPS servers that take no new client after a fault. Such a server waits until every process that was its client then
//! has ended, and one of them may go on for days with a context that can do nothing any more: a notebook, a web server
//! (docs/evidence/2026-11-24-h100-cycles.md). The guard ends the server; the daemon starts another for its next client.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::history::{Event, now};
use super::judge::Offence;
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, DaemonState, Ledger, MpsDaemon};
use sublet_core::mps::control::Control;
use sublet_core::mps::dirs;
use sublet_core::process::{Process, pidfd_kill, pidfd_open};
use sublet_core::share::Action;
use sublet_core::text::safe;

/// Programs that check their CUDA calls end by themselves after a fault, and have so long.
const PATIENCE: Duration = Duration::from_secs(3);

/// Asking a daemon takes a process and 3 ms, so a busy one is not asked more often.
const PAUSE: Duration = Duration::from_secs(1);

/// What is known of one daemon.
#[derive(Debug)]
struct Watched {
    /// The length of its server's log when it was last asked. A server that logs nothing takes and refuses no clients.
    log_length: u64,
    asked: Instant,
    /// Its server after a fault, and since when.
    faulted: Option<(i32, Instant)>,
}

/// What has to be remembered from one check to the next.
#[derive(Debug, Default)]
pub(super) struct Faulted(BTreeMap<DaemonKey, Watched>);

impl Faulted {
    /// Ends servers that have taken no new client for a while; one event for each.
    pub fn end(&mut self, ledger: &Ledger, config: &Config) -> Vec<Event> {
        self.0.retain(|key, _| ledger.daemons.iter().any(|daemon| daemon.key == *key));
        let serves = |daemon: &&MpsDaemon| daemon.state == DaemonState::Serving;
        ledger.daemons.iter().filter(serves).filter_map(|daemon| self.end_one(daemon, config)).collect()
    }

    fn end_one(&mut self, daemon: &MpsDaemon, config: &Config) -> Option<Event> {
        let log_length = server_log_length(&daemon.key, config);
        let before = self.0.get(&daemon.key);
        let quiet = before.is_some_and(|before| {
            (before.log_length == log_length && before.faulted.is_none()) || before.asked.elapsed() < PAUSE
        });
        if quiet {
            return None;
        }
        let since = before.and_then(|before| before.faulted);
        let server = faulted_server(daemon, config);
        let faulted = server.map(|server| match since {
            Some((same, since)) if same == server => (server, since),
            _ => (server, Instant::now()),
        });
        let due = faulted.filter(|(_, since)| since.elapsed() >= PATIENCE);
        self.0.insert(daemon.key.clone(), Watched { log_length, asked: Instant::now(), faulted });
        kill(due?.0, daemon)
    }
}

fn server_log_length(key: &DaemonKey, config: &Config) -> u64 {
    std::fs::metadata(dirs::log(key, &config.state_dir).join("server.log")).map_or(0, |log| log.len())
}

/// The daemon's server that takes no new client. A daemon that does not answer is found elsewhere.
fn faulted_server(daemon: &MpsDaemon, config: &Config) -> Option<i32> {
    let control = Control::new(&daemon.key, config).ok()?;
    control.servers().ok()?.into_iter().find(|server| control.is_faulted(*server).unwrap_or(false))
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
    Some(Event {
        time: now(),
        offence: Offence::Server,
        action: Action::Terminate,
        container_id: None,
        uid: 0,
        text: format!(
            "the MPS server (pid {server}) of {} took no new client after a GPU fault, because processes that \
             it ended the GPU work of still run: {done}. Those processes have to be started again",
            safe(&device)
        ),
        device,
        pid: server,
        name: "nvidia-cuda-mps-server".to_owned(),
    })
}
