//! MPS servers and daemons that leases need: containers that lost work when a server ended, and daemons that died.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::history::Event;
use super::judge::Offence;
use crate::gpu_processes::Look;
use sublet_core::config::Config;
use sublet_core::ledger::{DaemonKey, DaemonState, Lease, LeaseId, Ledger, MpsDaemon, Store};
use sublet_core::mps;
use sublet_core::process::Process;
use sublet_core::share::Action;
use sublet_core::text::safe;

/// A daemon that cannot be started is tried again after this long.
const AGAIN: Duration = Duration::from_secs(5);

/// A server as the last check found it.
#[derive(Debug)]
struct Known {
    device: String,
    name: String,
    key: DaemonKey,
    /// The leases that had clients of this server.
    clients: BTreeSet<LeaseId>,
}

/// What has to be remembered from one check to the next.
#[derive(Debug, Default)]
pub(super) struct Served {
    servers: BTreeMap<Process, Known>,
    healing: Option<(JoinHandle<()>, Instant)>,
}

impl Served {
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
        let before = std::mem::replace(&mut self.servers, now);
        let ended = before.into_iter().filter(|(process, _)| !process.is_alive());
        ended.flat_map(|(process, known)| events(process, &known, ledger)).collect()
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
            for line in healed.unwrap_or_else(|error| vec![error.to_string()]) {
                tracing::warn!("{line}");
            }
        });
        self.healing = started.ok().map(|thread| (thread, Instant::now()));
    }
}

/// The MPS servers on one device, each found by its parent, the daemon.
fn known(look: &Look, ledger: &Ledger) -> Vec<(Process, Known)> {
    let servers = look.holders.iter().filter(|holder| holder.is_server);
    let known = servers.filter_map(|holder| {
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
        let text = format!(
            "the MPS server (pid {}) of {} ended, and with it the GPU work of container {}; new GPU processes of \
             the container work again",
            process.pid,
            safe(&known.device),
            safe(&lease.container.name())
        );
        let what = (Offence::Server, Action::Report);
        Event::new(what, Some(lease), &known.device, (process.pid, &known.name), text)
    };
    hit.map(event).collect()
}
