//! `nvidia-cuda-mps-server`: it has the contexts on the devices and counts its clients' memory. A fault of one client
//! ends all of them, and until their processes have gone the server takes no new client (docs/evidence).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::daemon::host_devices;
use super::device::Device;
use super::exclusive::{Claim, claim};
use super::log::Log;
use super::message::{Ask, Open, Order, Report, Say, Settings};
use super::wire::Conn;
use super::{SERVER_MIB, context_mib, limits};
use crate::layout::Root;
use crate::layout::contexts::{self, Kind};
use crate::layout::topology::Topology;

/// The pause between two checks of the compute modes.
const MODES: Duration = Duration::from_millis(50);

/// One server, shared by the threads of its clients.
#[derive(Debug)]
struct Server {
    root: Root,
    tag: String,
    devices: Vec<Device>,
    daemon: Conn,
    log: Log,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The server's own contexts, by device UUID.
    contexts: BTreeMap<String, (Claim, OwnedFd)>,
    /// By the daemon's number for them.
    clients: BTreeMap<u64, Client>,
    /// The clients at the last fault whose processes are still connected.
    faulted: BTreeSet<u64>,
}

#[derive(Debug)]
struct Client {
    pid: i32,
    conn: Arc<Conn>,
    /// Its contexts, one on each device that it uses.
    contexts: Vec<Share>,
}

/// A context: its device, its memory in MiB and its limit.
#[derive(Clone, Debug)]
struct Share {
    device: Device,
    used_mib: u64,
    limit_mib: Option<u64>,
}

/// Serves until the daemon is gone.
///
/// # Errors
/// The program was not started by a daemon below a root.
pub fn main() -> Result<()> {
    let daemon = Conn::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let root = Root::of_program().context("not below the root of a simulated driver")?;
    let (tag, devices) = (Topology::load(&root)?.tag, host_devices(&root)?);
    let log = Log::new("server.log", "Server");
    if let Ok(reason) = std::fs::read_to_string(root.server_fault()) {
        if !reason.trim().is_empty() {
            log.line("Startup");
            log.line(&format!("Failed to start : {}", reason.trim()));
        }
        std::process::exit(1);
    }
    let server = Arc::new(Server { root, tag, devices, daemon, log, state: Mutex::default() });
    server.log.line("Startup");
    for device in &server.devices {
        server.hold(&mut server.state(), device);
    }
    server.report(&Report::Ready);
    let watching = Arc::clone(&server);
    thread::spawn(move || watching.watch_modes());
    while let Some((order, conn)) = server.daemon.recv() {
        match (order, conn) {
            (Order::Attach { id, pid, settings }, Some(conn)) => server.attach(id, pid, settings, conn),
            (Order::Attach { .. }, None) => {}
            (Order::Terminate { id }, _) => server.end(&[id], "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
        }
    }
    Ok(())
}

impl Server {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, report: &Report) {
        // The loop that reads the daemon's messages notices when the daemon is gone.
        let _ = self.daemon.send(report);
    }

    /// Creates the server's context on a device if it has none. Returns whether it may have one.
    fn hold(&self, state: &mut State, device: &Device) -> bool {
        if let Some((claim, _)) = state.contexts.get(&device.uuid) {
            claim.refresh(device, Some(&self.root));
            return true;
        }
        let libcuda: PathBuf = self.root.libraries().join("libcuda.so.1");
        let claim = claim(device, Some(&self.root), &libcuda);
        let made = claim.zip(contexts::announce(&self.tag, device.on, Kind::Server, SERVER_MIB).ok());
        let held = made.is_some();
        if let Some(context) = made {
            state.contexts.insert(device.uuid.clone(), context);
        } else {
            self.log.line(&format!("Failed to create context on {}", device.uuid));
        }
        held
    }

    /// A new compute mode takes effect at once (NVML, `nvmlDeviceSetComputeMode`), also while contexts exist.
    fn watch_modes(&self) -> ! {
        loop {
            thread::sleep(MODES);
            for (uuid, (claim, _)) in &self.state().contexts {
                if let Some(device) = self.devices.iter().find(|device| device.uuid == *uuid) {
                    claim.refresh(device, Some(&self.root));
                }
            }
        }
    }

    fn attach(self: &Arc<Self>, id: u64, pid: i32, settings: Settings, conn: Conn) {
        let conn = Arc::new(conn);
        let client = Client { pid, conn: Arc::clone(&conn), contexts: Vec::new() };
        self.state().clients.insert(id, client);
        self.log.line(&format!("Received new client connection from {pid}"));
        let server = Arc::clone(self);
        thread::spawn(move || server.follow(id, &settings, &conn));
    }

    fn follow(&self, id: u64, settings: &Settings, conn: &Conn) {
        while let Some((ask, _)) = conn.recv() {
            let answer = match ask {
                Ask::Open(open) => {
                    self.open(id, settings, &open).unwrap_or_else(|error| Say::Ended(error.into()))
                }
                Ask::Alloc { device, mib } => Say::Memory { granted: self.alloc(id, &device, mib) },
                Ask::Fault => {
                    self.fault();
                    continue;
                }
            };
            if conn.send(&answer).is_err() {
                break;
            }
        }
        let mut state = self.state();
        state.clients.remove(&id);
        if state.faulted.remove(&id) && state.faulted.is_empty() {
            self.report(&Report::Faulted(false));
        }
    }

    fn open(&self, id: u64, settings: &Settings, open: &Open) -> Result<Say, &'static str> {
        let found = self.devices.iter().find(|device| device.uuid == open.device);
        let device = found.ok_or("CUDA_ERROR_NO_DEVICE")?.clone();
        let mut state = self.state();
        if !state.faulted.is_empty() {
            self.log.line("Server teardown in progress. Refusing to accept new client");
            return Err("CUDA_ERROR_MPS_SERVER_NOT_READY");
        }
        if !self.hold(&mut state, &device) {
            return Err("CUDA_ERROR_DEVICE_UNAVAILABLE");
        }
        if state.on(&device).count() >= device.clients {
            return Err("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED");
        }
        let (sm, limit_mib) = if device.limits {
            (limits::sm(device.sm, settings, open.percentage.as_deref()), limits::memory(settings, open))
        } else {
            (device.sm, None)
        };
        let used_mib = context_mib(sm);
        let context = Share { device, used_mib: 0, limit_mib };
        let free_mib = self.free(&state, &context).checked_sub(used_mib).ok_or("CUDA_ERROR_OUT_OF_MEMORY")?;
        self.report(&Report::Opened { id, device: open.device.clone() });
        let client = state.clients.get_mut(&id).ok_or("CUDA_ERROR_MPS_CLIENT_TERMINATED")?;
        client.contexts.push(Share { used_mib, ..context });
        Ok(Say::Context { sm, free_mib })
    }

    fn alloc(&self, id: u64, device: &str, mib: u64) -> bool {
        let mut state = self.state();
        let context =
            state.clients.get(&id).and_then(|client| client.contexts.iter().find(|one| one.is_on(device)));
        let granted = context.is_some_and(|context| self.free(&state, context) >= mib);
        let context = state
            .clients
            .get_mut(&id)
            .and_then(|client| client.contexts.iter_mut().find(|one| one.is_on(device)));
        if let Some(context) = context {
            context.used_mib += if granted { mib } else { 0 };
        }
        granted
    }

    /// The memory that a client can still allocate, by its limit and on the device.
    fn free(&self, state: &State, context: &Share) -> u64 {
        let device = &context.device;
        let own: u64 = state.on(device).map(|(_, context)| context.used_mib).sum();
        let pids: Vec<i32> = state.on(device).map(|(pid, _)| pid).collect();
        let others: u64 = contexts::list(&self.tag)
            .iter()
            .filter(|held| held.on.memory() == device.on.memory() && !pids.contains(&held.pid))
            .map(|held| held.mib)
            .sum();
        let of_device = device.total_mib.saturating_sub(own + others);
        context.limit_mib.map_or(of_device, |limit| of_device.min(limit.saturating_sub(context.used_mib)))
    }

    fn fault(&self) {
        let clients: Vec<u64> = self.state().clients.keys().copied().collect();
        self.log.line("Fatal fault on a client: all clients end");
        self.state().faulted.extend(&clients);
        self.report(&Report::Faulted(true));
        self.end(&clients, "CUDA_ERROR_ILLEGAL_ADDRESS");
    }

    fn end(&self, clients: &[u64], error: &str) {
        for id in clients {
            let client = self.state().clients.remove(id);
            if let Some(client) = client {
                let _ = client.conn.send(&Say::Ended(error.to_owned()));
            }
            self.report(&Report::Closed { id: *id });
        }
    }
}

impl Share {
    fn is_on(&self, device: &str) -> bool {
        self.device.uuid == device
    }
}

impl State {
    /// Pid and context of every client on this device.
    fn on<'a>(&'a self, device: &'a Device) -> impl Iterator<Item = (i32, &'a Share)> {
        let of = |client: &'a Client| client.contexts.iter().map(|context| (client.pid, context));
        self.clients.values().flat_map(of).filter(|(_, context)| context.is_on(&device.uuid))
    }
}
