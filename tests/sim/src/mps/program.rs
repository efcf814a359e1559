//! A CUDA program: a context on each device that it sees, with and without MPS.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::client::Client;
use super::context_mib;
use super::device::{self, Device};
use super::driver;
use super::exclusive::{Claim, claim};
use super::message::Open;
use super::nodes;
use super::wire::Conn;
use crate::checkpoint::door::Door;
use crate::checkpoint::rules::State;
use crate::checkpoint::{Ask, Suspension, THREAD};
use crate::layout::Root;
use crate::layout::contexts::{self, Kind};
use crate::layout::trailer;

/// The resources of a context.
#[derive(Debug)]
pub struct Got {
    /// The number of devices that the program sees.
    pub devices: usize,
    /// Multiprocessors.
    pub sm: u32,
    /// Memory that it can still allocate.
    pub free_mib: u64,
    /// Memory of the device.
    pub total_mib: u64,
    /// Whether it is an MPS client.
    pub mps: bool,
    program: Program,
}

impl Got {
    /// Waits while the process is locked, as every CUDA call does.
    pub fn wait(&self) {
        drop(self.program.call());
    }
}

/// Creates a context that lives as long as the process, for programs that call libcuda's functions.
///
/// # Errors
/// The name of a `CUresult`, or what is missing.
pub fn got() -> Result<Got, String> {
    let program = Program::start(&mut None)?;
    let held = program.call();
    let (sm, free_mib) = (held.first.sm, held.first.free_mib);
    let (devices, total_mib) = (held.count(), held.first.device.total_mib);
    drop(held);
    Ok(Got { devices, sm, free_mib, total_mib, mps: program.mps.is_some(), program })
}

/// A program with contexts.
#[derive(Debug)]
pub(crate) struct Program {
    shared: Arc<Shared>,
    /// `None` if it runs without MPS.
    pub mps: Option<Client>,
    /// Open as long as the process is to be found by other processes.
    _door: Option<Door>,
}

/// What the program has in common with its driver's thread.
#[derive(Debug)]
struct Shared {
    held: Mutex<Held>,
    changed: Condvar,
}

/// What a program has of the GPUs.
#[derive(Debug)]
pub(crate) struct Held {
    pub tag: String,
    /// The libcuda that it uses.
    pub libcuda: PathBuf,
    pub mps: bool,
    /// The context on the first device, which does the work.
    pub first: Made,
    /// Contexts on the other devices. `Err` says why there is none.
    pub further: Vec<(Device, Result<Made, String>)>,
    pub suspension: Suspension,
}

/// A context.
#[derive(Debug)]
pub(crate) struct Made {
    pub device: Device,
    pub sm: u32,
    pub free_mib: u64,
    pub used_mib: u64,
    /// What NVML sees. `None`: it is in host memory.
    pub shown: Option<OwnedFd>,
    pub claim: Option<Claim>,
}

impl Program {
    /// Loads libcuda, finds the devices, connects to MPS and creates contexts.
    pub fn start(libcuda: &mut Option<PathBuf>) -> Result<Self, String> {
        let file = libcuda.insert(driver::load()?).clone();
        let topology = trailer::read(&file).ok_or("libcuda has no trailer of the simulated driver")?;
        let devices = usable(&device::all(&topology))?;
        let named = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let mps = Client::connect();
        let devices = match &mps {
            Some(client) => of_server(&devices, &client.devices),
            None => devices,
        };
        let visible = device::visible(&devices, named.as_deref());
        let open = Open {
            visible: visible.iter().map(|device| device.uuid.clone()).collect(),
            percentage: std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok(),
            pinned: std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").ok(),
            ..Open::default()
        };
        let make = |device: &Device| match &mps {
            Some(client) => Made::with_mps(&topology.tag, device, client, &open),
            None => Made::alone(&topology.tag, device, &file),
        };
        let (first, rest) = visible.split_first().ok_or("CUDA_ERROR_NO_DEVICE")?;
        let first = make(first)?;
        let further = rest.iter().map(|device| (device.clone(), make(device))).collect();
        let suspension = Suspension::default();
        let held = Held { tag: topology.tag, libcuda: file, mps: mps.is_some(), first, further, suspension };
        Ok(Self::of(held, mps))
    }

    fn of(held: Held, mps: Option<Client>) -> Self {
        let opened = Door::open(&held.tag);
        let shared = Arc::new(Shared { held: Mutex::new(held), changed: Condvar::new() });
        let door = opened.ok().and_then(|(door, asks)| {
            let driver = Arc::clone(&shared);
            let thread = thread::Builder::new().name(THREAD.to_owned());
            thread.spawn(move || driver.serve(&asks)).ok().map(|_| door)
        });
        Self { shared, mps, _door: door }
    }

    /// Begins a CUDA call, which lasts as long as the guard. It waits while the process is not running.
    pub fn call(&self) -> MutexGuard<'_, Held> {
        let stopped = |held: &mut Held| held.suspension.state != State::Running;
        self.shared.changed.wait_while(self.shared.held(), stopped).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers other processes' calls for this one, one after the other.
    fn serve(&self, asks: &Conn) {
        while let Some((ask, Some(asker))) = asks.recv::<Ask>() {
            let mut held = self.held();
            let reply = held.answer(&ask);
            // Before the program goes on, which may be its end. Who asked may have gone: what it asked for is done all the same.
            let _ = asker.send(&reply);
            drop(held);
            self.changed.notify_all();
        }
    }
}

impl Held {
    /// The number of devices that the program sees.
    pub fn count(&self) -> usize {
        1 + self.further.len()
    }

    pub fn contexts(&self) -> impl Iterator<Item = &Made> {
        let further = self.further.iter().filter_map(|(_, made)| made.as_ref().ok());
        std::iter::once(&self.first).chain(further)
    }

    pub fn contexts_mut(&mut self) -> impl Iterator<Item = &mut Made> {
        let further = self.further.iter_mut().filter_map(|(_, made)| made.as_mut().ok());
        std::iter::once(&mut self.first).chain(further)
    }

    /// Counts memory that was allocated on the first device.
    pub fn add(&mut self, mib: u64) -> Result<(), String> {
        let kind = if self.mps { Kind::Client } else { Kind::Compute };
        self.first.free_mib = self.first.free_mib.saturating_sub(mib);
        self.first.used_mib += mib;
        self.first.shown = Some(show(&self.tag, &self.first.device, kind, self.first.used_mib)?);
        Ok(())
    }
}

impl Made {
    fn with_mps(tag: &str, device: &Device, client: &Client, open: &Open) -> Result<Self, String> {
        let (sm, free_mib) = client.open(Open { device: device.uuid.clone(), ..open.clone() })?;
        let used_mib = context_mib(sm);
        let shown = Some(show(tag, device, Kind::Client, used_mib)?);
        Ok(Self { device: device.clone(), sm, free_mib, used_mib, shown, claim: None })
    }

    fn alone(tag: &str, device: &Device, libcuda: &Path) -> Result<Self, String> {
        let root = Root::of_library(libcuda).map_err(|error| format!("{}: {error}", libcuda.display()))?;
        let claim = claim(device, root.as_ref(), libcuda).ok_or("CUDA_ERROR_DEVICE_UNAVAILABLE")?;
        let (sm, used_mib) = (device.sm, context_mib(device.sm));
        let all = contexts::list(tag);
        let held =
            all.iter().filter(|held| held.on.memory() == device.on.memory()).map(|held| held.mib).sum();
        let free_mib = device.total_mib.saturating_sub(held);
        let free_mib = free_mib.checked_sub(used_mib).ok_or("CUDA_ERROR_OUT_OF_MEMORY")?;
        let shown = Some(show(tag, device, Kind::Compute, used_mib)?);
        Ok(Self { device: device.clone(), sm, free_mib, used_mib, shown, claim: Some(claim) })
    }
}

fn show(tag: &str, device: &Device, kind: Kind, mib: u64) -> Result<OwnedFd, String> {
    contexts::announce(tag, device.on, kind, mib).map_err(|error| format!("memfd: {error}"))
}

/// The devices whose nodes can be opened, which cuInit finds.
fn usable(devices: &[Device]) -> Result<Vec<Device>, String> {
    let found: Vec<Device> =
        devices.iter().filter(|device| device.nodes.iter().all(|name| nodes::opens(name))).cloned().collect();
    if !nodes::opens("nvidiactl") || found.is_empty() {
        return Err("CUDA_ERROR_NO_DEVICE".into());
    }
    if !nodes::opens("nvidia-uvm") {
        return Err("CUDA_ERROR_UNKNOWN".into());
    }
    if driver::is_out_of_reach() {
        return Err("CUDA_ERROR_NO_DEVICE".into());
    }
    Ok(found)
}

/// Under MPS a client sees those of the server's devices whose nodes it has, in the server's order.
fn of_server(devices: &[Device], served: &[String]) -> Vec<Device> {
    served.iter().filter_map(|uuid| devices.iter().find(|device| device.uuid == *uuid)).cloned().collect()
}
