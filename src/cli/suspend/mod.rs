//! `sublet suspend`, `resume` and `move`: puts the GPU state of a container's processes into host memory, and back, or onto
//! another GPU (docs/suspend.md).
//!
//! Each step is in the ledger before the driver is asked for it, and no lock is held while it works. What has been locked is
//! unlocked where a step fails, and what was suspended comes back. A restore is tried only with room that is booked and
//! that NVML confirms, and once: where it fails, the driver has lost the process, and its container is ended.
//!
//! A container that moves keeps its room where it was until its state is on the other GPU. Wherever a move ends before, each
//! process is first restored where the driver has it: NVML then says which GPU that is ([`Work::gather`]).
//!
//! [`suspend`], [`resume`] and [`move_to`] take one lease. Which, and when, their callers say.

mod checks;
mod driver;
mod error;
mod new;
mod nodes;
mod nvml;

use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nvml_wrapper::Device as NvmlDevice;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use nvml_wrapper::error::NvmlError;

use crate::libcuda::CheckpointCall;
use crate::peer::{end_container, has_user_namespace, is_theirs, owns};
use crate::probe;
use checks::{CudaProcess, CudaProcesses};
pub use driver::{Arguments as CheckpointArguments, run as checkpoint};
use driver::{CallError, Driver, ProcessState, lost};
pub use error::SuspendError;
pub(crate) use new::have_suspended;
pub use new::{Arguments as NewArguments, run as suspend_new_process};
pub use nodes::{NodesArguments, run as change_nodes};
use nvml::{Asked, HOST};
use sublet_core::admit::{Local, confirmed_inventory, refresh};
use sublet_core::config::Config;
use sublet_core::events::{self, Event, Kind};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{
    Init, Lease, LeaseId, Ledger, Store, SuspendStep, SuspendedProcess, Suspension, WrongState, lease_event,
};
use sublet_core::place::{check_resume, meant};
use sublet_core::process::{Process, pidfd_kill};
use sublet_core::text::safe;

/// A step that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Done {
    /// GPU memory that is in host memory, or was.
    pub bytes: u64,
    pub took: Duration,
}

/// Suspends the container of lease `id`; one that was suspended for another stays so until it is resumed. `force` takes away that its share does not allow it.
///
/// # Errors
/// Nothing was locked, or all is as it was before, or the container was lost.
pub(crate) fn suspend(id: &LeaseId, force: bool, config: &Config) -> Result<Done, SuspendError> {
    if let Some(bytes) = Local::new(config).update(|ledger| ledger.keep_suspended(id))? {
        return Ok(Done { bytes, took: Duration::ZERO });
    }
    suspend_for(id, force, false, config)
}

/// [`suspend`], to make room for another container: it then waits for its own room in the order of those who wait.
///
/// # Errors
/// As [`suspend`].
pub(crate) fn suspend_on_demand(id: &LeaseId, config: &Config) -> Result<Done, SuspendError> {
    suspend_for(id, false, true, config)
}

fn suspend_for(id: &LeaseId, force: bool, on_demand: bool, config: &Config) -> Result<Done, SuspendError> {
    let began = Instant::now();
    let ledger = Store::open(&config.state_dir)?.read()?;
    let lease = ledger.suspendable(id)?;
    let mut work = Work::begin(lease.clone(), config)?;
    checks::check_lease(lease, &work.inventory, force)?;
    let processes = work.check_processes(&ledger)?;
    let bytes = sum(&processes);
    work.lease = work.change(|ledger| {
        // One that another command suspends by now is refused for that, and not for the memory that it takes.
        ledger.suspendable(id)?;
        checks::check_host_memory(&processes, ledger.bytes_on_their_way_out(id))?;
        ledger.begin_suspending(id, work.owner, processes.clone(), None)?;
        if on_demand {
            ledger.note_on_demand(id);
        }
        ledger.lease(id).cloned().ok_or(SuspendError::Ended)
    })??;
    match work.give_nodes().and_then(|()| work.put_away(&processes)) {
        Ok(()) => {
            let noted = work.end_step(work.gpu(), |ledger| ledger.end_suspended(id, work.owner))?;
            work.finish(noted, bytes, began)
        }
        Err(why) => Err(work.undo(SuspendStep::Suspending, &processes, why)),
    }
}

/// Suspends `new`, too, a process that began to use the GPU while the container of lease `id` is suspended. Whether it used the
/// GPU still.
///
/// # Errors
/// It was ended, or the step could not begin.
fn suspend_new(id: &LeaseId, new: Process, config: &Config) -> Result<bool, SuspendError> {
    let mut ledger = Store::open(&config.state_dir)?.read()?;
    ledger.forget_ended();
    let (lease, own) = ledger.resumable(id)?;
    let work = Work::begin(lease.clone(), config)?;
    let checked = work.check_new(own, new);
    if matches!(checked, Err(SuspendError::NoProcess)) {
        return Ok(false);
    }
    let found = *checked.as_ref().unwrap_or(&SuspendedProcess { process: new, bytes: 0 });
    let add = |ledger: &mut Ledger| {
        ledger.forget_ended();
        ledger.begin_adding(id, work.owner, found)
    };
    match work.change(add)? {
        // Another had it suspended with the rest.
        Err(WrongState::Suspended) => return Ok(false),
        begun => begun?,
    }
    match checked.map_err(|error| error.to_string()).and_then(|new| work.put_new_away(own, new)) {
        Ok(()) => work.end_adding(found, true).map(|()| true),
        Err(why) => work.end_adding(found, false).and(Err(SuspendError::NewEnded(why))),
    }
}

/// Moves the container of lease `id` to `gpu`, as people name it.
///
/// # Errors
/// Nothing was locked, or it is where it was, or the container was lost.
pub(crate) fn move_to(id: &LeaseId, gpu: &str, config: &Config) -> Result<Done, SuspendError> {
    let began = Instant::now();
    let ledger = Store::open(&config.state_dir)?.read()?;
    let lease = ledger.suspendable(id)?;
    let mut work = Work::begin(lease.clone(), config)?;
    let there = work.find_named(gpu)?.uuid.clone();
    work.check_move(&there)?;
    let processes = work.check_processes(&ledger)?;
    let bytes = sum(&processes);
    work.lease = work.change(|ledger| {
        check_resume(ledger.suspendable(id)?, &there, bytes, &work.inventory, ledger, config)?;
        checks::check_host_memory(&processes, ledger.bytes_on_their_way_out(id))?;
        ledger.begin_suspending(id, work.owner, processes.clone(), Some(&there))?;
        ledger.lease(id).cloned().ok_or(SuspendError::Ended)
    })??;
    let why = work.carry_over(&there, &processes).err();
    match work.come_back(&processes, 0, why.as_deref())? {
        (gpu, noted) if gpu == there => work.finish(noted, bytes, began),
        _ => Err(work.tell_undone(why.unwrap_or_else(|| "the driver left it where it was".to_owned()))),
    }
}

/// Resumes the container of lease `id`, on the GPU where it was, or on `gpu`, as people name it.
///
/// # Errors
/// It is suspended still, or the container was lost.
pub(crate) fn resume(id: &LeaseId, gpu: Option<&str>, config: &Config) -> Result<Done, SuspendError> {
    let began = Instant::now();
    let ledger = Store::open(&config.state_dir)?.read()?;
    let (lease, own) = ledger.resumable(id)?;
    let mut work = Work::begin(lease.clone(), config)?;
    let named = gpu.map(|gpu| Ok::<_, SuspendError>(work.find_named(gpu)?.uuid.clone())).transpose()?;
    named.as_deref().filter(|named| *named != work.gpu()).map_or(Ok(()), |there| work.check_move(there))?;
    checks::check_awake(&own.processes)?;
    // It may have been resumed and suspended again meanwhile, with other processes, and elsewhere.
    work.lease = work.change(|ledger| {
        ledger.forget_ended();
        let (lease, own) = ledger.resumable(id)?;
        let here = lease.devices.first().map_or(work.gpu(), String::as_str);
        if named.is_some() && here != work.gpu() {
            return Err(WrongState::Busy(own.owner.pid).into());
        }
        let to = named.as_deref().filter(|named| *named != here);
        check_resume(lease, to.unwrap_or(here), own.bytes(), &work.inventory, ledger, config)?;
        ledger.begin_resuming(id, work.owner, to)?;
        ledger.lease(id).cloned().ok_or(SuspendError::Ended)
    })??;
    let own = work.lease.suspension.clone().ok_or(SuspendError::Ended)?;
    let (_, noted) = work.come_back(&own.processes, config.limits.reserve, None)?;
    work.finish(noted, own.bytes(), began)
}

/// Whether there is a step that [`put_right`] would put right.
pub(crate) fn is_cut_short(config: &Config) -> bool {
    let read = || Some((Store::open(&config.state_dir).ok()?.read().ok()?, Process::current().ok()?));
    read().is_some_and(|(ledger, us)| ledger.cut_short(us).next().is_some())
}

/// Puts right every step that nobody takes any more, from where this process takes none: what was locked is unlocked, what
/// was suspended comes back. Copying may take minutes, which is `announced` first. Returns the leases that could not be put right,
/// with one line each; `None`: what there is to put right is not known.
pub(crate) fn put_right(config: &Config, announced: impl Fn(&str)) -> Option<Vec<(String, String)>> {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).ok()?;
    let put = |lease: &Lease| {
        let name = safe(&lease.container.name());
        announced(&announce(lease));
        let error = put_one_right(lease, config).err()?;
        let line = format!("container {name}: a step of its suspension was cut short: {error}");
        Some((format!("{} {}", lease.id, error.reason()), line))
    };
    Some(ledger.cut_short(Process::current().ok()?).filter_map(put).collect())
}

/// What is said before the step of `lease` is put right.
fn announce(lease: &Lease) -> String {
    let mib = lease.suspension.as_ref().map_or(0, Suspension::bytes) >> 20;
    let name = safe(&lease.container.name());
    format!("container {name}: putting its suspension right first: {mib} MiB")
}

fn put_one_right(lease: &Lease, config: &Config) -> Result<(), SuspendError> {
    let mut work = Work::begin(lease.clone(), config)?;
    let taken = work.change(|ledger| {
        let own = ledger.take_over(&lease.id, work.owner)?;
        Some((ledger.lease(&lease.id)?.clone(), own))
    })?;
    let Some((lease, Suspension { step, processes, .. })) = taken else { return Ok(()) };
    work.lease = lease;
    if let (SuspendStep::Adding, Some(new)) = (step, processes.last()) {
        let is_out = work.state_of(new.process) == Some(ProcessState::Checkpointed);
        if !is_out {
            let pid = new.process.pid;
            let why = format!(
                "process {pid}, which began to use the GPU meanwhile, was ended: its step was cut short"
            );
            work.tell(Kind::SuspendUndone, &why);
        }
        return work.end_adding(*new, is_out);
    }
    match work.undo(step, &processes, "the process that took the step has ended".to_owned()) {
        SuspendError::Undone(_) => Ok(()),
        error => Err(error),
    }
}

/// Their memory, in bytes.
fn sum(processes: &[SuspendedProcess]) -> u64 {
    processes.iter().map(|one| one.bytes).sum()
}

fn named(one: SuspendedProcess, done: Result<(), CallError>) -> Result<(), String> {
    done.map_err(|error| format!("process {}: {error}", one.process.pid))
}

/// Each of the GPUs that a process could open when it was suspended, followed by the one that takes its place: `here` and `there` change
/// places. The driver wants these exactly, and without any it restores a process by its GPU's place among those that can be opened
/// then, which may be another (docs/evidence/2026-11-28-h200x4.md).
fn pairs(opened: &BTreeSet<&str>, here: &str, there: &str) -> Vec<String> {
    let replaced = |uuid| match uuid {
        uuid if uuid == here => there,
        uuid if uuid == there => here,
        uuid => uuid,
    };
    opened.iter().flat_map(|uuid| [*uuid, replaced(*uuid)]).map(str::to_owned).collect()
}

/// What becomes of a process after a call that failed and should have left it in the state `wanted`.
fn aftermath(
    failed: CallError,
    now: Option<ProcessState>,
    wanted: ProcessState,
    is_awake: bool,
) -> Result<(), Stuck> {
    // A copy that was given up for its time has ended after all.
    let is_out_again = (wanted, now) == (ProcessState::Running, Some(ProcessState::Checkpointed));
    match failed {
        // It ended meanwhile, or the answer alone was late.
        _ if now == Some(ProcessState::Ended) || now == Some(wanted) => Ok(()),
        CallError::Refused(why) if is_awake && !is_out_again => Err(Stuck::Lost(why)),
        CallError::Refused(why) | CallError::NotMade(why) => Err(Stuck::NotNow { why, all_out: false }),
    }
}

/// What keeps a state from coming back.
#[derive(Debug)]
enum Stuck {
    /// There is no room, or a process cannot be asked. Whether all of it is in host memory.
    NotNow { why: String, all_out: bool },
    /// The driver has lost it.
    Lost(String),
}

/// One container, and what works on it.
struct Work<'a> {
    config: &'a Config,
    /// As it is while the step is taken.
    lease: Lease,
    inventory: Inventory,
    driver: Driver,
    nvml: Asked,
    owner: Process,
    /// Whether its nodes were given already.
    has_nodes: Cell<bool>,
}

impl<'a> Work<'a> {
    fn begin(lease: Lease, config: &'a Config) -> Result<Self, SuspendError> {
        let (nvml, known) = (Asked::connect(config)?, confirmed_inventory(config)?);
        let before = known.clone();
        let now = nvml.ask(HOST, move |nvml| probe::renew(&before, nvml)).ok();
        // A refresh starts a child, which initialises NVML once more. It says which GPUs are left out now. A step that is put right
        // does not wait for that: a container is locked meanwhile, and a GPU that is not its own may hang.
        let is_in_step = lease.suspension.as_ref().is_some_and(|own| own.step != SuspendStep::Suspended);
        let inventory = match now.filter(|now| now.left_out.is_empty()) {
            Some(now) => now,
            None if is_in_step => known,
            None => refresh(config)?,
        };
        let unknown = |error| SuspendError::Unknown(format!("what runs on its GPU ({error})"));
        let owner = Process::current().map_err(unknown)?;
        let driver = Driver::of(&inventory, &config.state_dir, owner);
        let driver =
            driver.ok_or_else(|| SuspendError::Unknown("where the host's libcuda.so.1 is".to_owned()))?;
        Ok(Self { config, lease, inventory, driver, nvml, owner, has_nodes: Cell::new(false) })
    }

    fn gpu(&self) -> &str {
        self.lease.devices.first().map(String::as_str).unwrap_or_default()
    }

    fn device(&self, uuid: &str) -> Result<&Device, SuspendError> {
        let device = self.inventory.device(uuid);
        device.ok_or_else(|| SuspendError::Unknown(format!("anything of GPU {}", safe(uuid))))
    }

    /// The one GPU that `text` names.
    fn find_named(&self, text: &str) -> Result<&Device, SuspendError> {
        let named = meant(text, &self.inventory, self.config).map_err(SuspendError::Gpu)?;
        let word = safe(text);
        let message = match named[..] {
            [one] => return Ok(one),
            [] => format!("there is no GPU {word}: `sublet status` lists them"),
            _ => format!("{word} names several GPUs: name one"),
        };
        Err(SuspendError::Gpu(message))
    }

    /// Whether it may go to the GPU `there`.
    fn check_move(&self, there: &str) -> Result<(), SuspendError> {
        // Of a lease without root, the user names its first process: root makes nodes only where the user is root.
        let is_bound = |init: &Init| has_user_namespace(init.process.pid);
        if self.lease.brokered && !self.lease.init.as_ref().is_some_and(is_bound) {
            return Err(SuspendError::Cannot("its first process is in no user namespace of its own"));
        }
        let (here, there) = (self.device(self.gpu())?, self.device(there)?);
        checks::check_move(&self.lease, (here, there), &self.inventory)
    }

    /// Its CUDA processes, of which everything is checked before one is locked. One that another command works on since `ledger`
    /// was read is refused for that: what it looks like meanwhile is no reason.
    fn check_processes(&self, ledger: &Ledger) -> Result<Vec<SuspendedProcess>, SuspendError> {
        let checked = self.check_each(ledger);
        if checked.is_err() {
            Store::open(&self.config.state_dir)?.read()?.suspendable(&self.lease.id)?;
        }
        checked
    }

    fn check_each(&self, ledger: &Ledger) -> Result<Vec<SuspendedProcess>, SuspendError> {
        let processes = checks::check_processes(&self.lease, &self.cuda_processes(ledger)?)?;
        checks::check_awake(&processes)?;
        checks::check_codecs(&processes)?;
        self.check_room(&processes, 0)?;
        checks::check_running(&self.driver, &processes)?;
        Ok(processes)
    }

    /// Whether these have room in host memory, and on their way back beside so many bytes that have gone before.
    fn check_room(&self, processes: &[SuspendedProcess], before: u64) -> Result<(), SuspendError> {
        let all = sum(processes).saturating_add(before);
        checks::check_way_back(all, self.device(self.gpu())?, self.config.limits.reserve)?;
        checks::check_host_memory(processes, 0)?;
        checks::check_memory_limits(processes)
    }

    /// Process `new`, as it is now, if it may be suspended with the rest, which is `own`.
    fn check_new(&self, own: &Suspension, new: Process) -> Result<SuspendedProcess, SuspendError> {
        let ledger = Store::open(&self.config.state_dir)?.read()?;
        let new = checks::check_new(&self.lease, own, new, &self.cuda_processes(&ledger)?)?;
        self.check_room(&[new], own.bytes()).map(|()| new)
    }

    /// A change of the ledger.
    fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<T, SuspendError> {
        Ok(Local::new(self.config).update(change)?)
    }

    /// The step has been taken, and was written down unless the lease has ended.
    fn finish(&self, is_noted: bool, bytes: u64, began: Instant) -> Result<Done, SuspendError> {
        let took = began.elapsed();
        // What is free now is known to the next start.
        let _ = refresh(self.config);
        if is_noted { Ok(Done { bytes, took }) } else { Err(SuspendError::Ended) }
    }

    /// The container's processes with contexts now, by NVML. A GPU that does not answer runs none, but for its own.
    fn cuda_processes(&self, ledger: &Ledger) -> Result<CudaProcesses, SuspendError> {
        let gpus = self.inventory.devices.iter().filter(|device| !device.is_mig());
        let mut uuids = gpus.map(|gpu| gpu.uuid.as_str()).filter(|uuid| *uuid != self.gpu());
        let here = self.processes_on(self.gpu(), ledger)?;
        let elsewhere = uuids.any(|uuid| self.processes_on(uuid, ledger).is_ok_and(|on| !on.is_empty()));
        Ok(CudaProcesses { here, elsewhere })
    }

    /// What NVML answers to `ask` about a GPU, by its place on the bus: a search by UUID would open other GPUs, too.
    fn ask_gpu<T: Send + 'static>(
        &self,
        uuid: &str,
        ask: impl FnOnce(&NvmlDevice<'_>) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, String> {
        let bus_id = self.device(uuid).map_err(|error| error.to_string())?.bus_id.clone();
        self.nvml.ask(uuid, move |nvml| ask(&nvml.device_by_pci_bus_id(&*bus_id)?))
    }

    fn processes_on(&self, uuid: &str, ledger: &Ledger) -> Result<Vec<CudaProcess>, SuspendError> {
        let unknown = |why| SuspendError::Unknown(format!("what runs on GPU {} ({why})", safe(uuid)));
        let listed = self.ask_gpu(uuid, probe::compute_processes).map_err(unknown)?;
        let mut found = Vec::new();
        for (pid, bytes) in probe::joined(listed.iter()) {
            let pid = i32::try_from(pid).unwrap_or(0);
            let Some((process, seen)) = Process::find(pid).zip(probe::describe(pid, 0)) else { continue };
            if ledger.certain_lease_of(process, &seen).is_none_or(|lease| lease.id != self.lease.id) {
                continue;
            }
            // Of a lease without root, the user names the container's processes.
            if self.lease.brokered && !owns(pid, self.lease.container.uid) {
                return Err(SuspendError::Cannot("one of its processes does not belong to its user"));
            }
            found.push(CudaProcess { process, bytes });
        }
        Ok(found)
    }

    /// Gives the container the nodes of every GPU that its processes know, or are to know, for the time of a step: the driver in
    /// them opens all of these. Most have one GPU all their life, and its node.
    fn give_nodes(&self) -> Result<(), String> {
        if !self.has_nodes.get() {
            self.set_nodes(&Vec::from_iter(nodes::all_gpus(&self.lease)))?;
        }
        self.has_nodes.set(true);
        Ok(())
    }

    fn knows_one_gpu(&self) -> bool {
        nodes::all_gpus(&self.lease).len() == 1
    }

    fn set_nodes(&self, gpus: &[&str]) -> Result<(), String> {
        let Some(init) = self.lease.init.as_ref().filter(|_| !self.knows_one_gpu()) else { return Ok(()) };
        // Of a lease without root, the user names the container's first process.
        if !is_theirs(init.process, Some(&self.lease)) {
            return Err("its first process does not belong to its user".to_owned());
        }
        nodes::set_nodes(&self.lease.id, gpus, self.owner)
    }

    /// Locks `new` and suspends it. One that has just begun may have grown until it was locked: what it has then is checked again.
    fn put_new_away(&self, own: &Suspension, new: SuspendedProcess) -> Result<(), String> {
        let text = |error: SuspendError| error.to_string();
        checks::check_awake(&[new])
            .and_then(|()| checks::check_codecs(&[new]))
            .and_then(|()| checks::check_running(&self.driver, &[new]))
            .map_err(text)?;
        self.give_nodes()?;
        let carry_out = |call, new| self.driver.carry_out(call, new, &[]).map_err(|error| error.to_string());
        carry_out(CheckpointCall::Lock, new)?;
        let new = self.check_new(own, new.process).map_err(text)?;
        self.change(|ledger| ledger.resize_added(&self.lease.id, self.owner, new.bytes)).map_err(text)?;
        carry_out(CheckpointCall::Checkpoint, new)
    }

    /// Ends the step with process `new`, which is ended if it is not out: there is no room that it could go back to.
    fn end_adding(&self, new: SuspendedProcess, is_out: bool) -> Result<(), SuspendError> {
        if !is_out && is_theirs(new.process, Some(&self.lease)) {
            let _ = new.process.hold().ok().flatten().map(pidfd_kill);
        }
        self.end_step(self.gpu(), |ledger| ledger.end_adding(&self.lease.id, self.owner, is_out)).map(drop)
    }

    /// Its state is on `gpu`, or came from there: it loses the nodes of others, and `end` writes down that the step has ended.
    fn end_step(&self, gpu: &str, end: impl FnOnce(&mut Ledger) -> bool) -> Result<bool, SuspendError> {
        let lives = self.lease.init.as_ref().is_some_and(|init| init.process.is_alive());
        if let Err(why) = self.set_nodes(&[gpu]) {
            if lives {
                self.change(|ledger| ledger.leave_step(&self.lease.id, self.owner))?;
                return Err(SuspendError::Stuck(why));
            }
        }
        self.change(end)
    }

    /// Puts its processes away, and restores them on the GPU `there`.
    fn carry_over(&self, there: &str, processes: &[SuspendedProcess]) -> Result<(), String> {
        let bytes = sum(processes);
        let reserve = self.config.limits.reserve;
        self.make_ready(there, bytes, reserve)?;
        self.put_away(processes)?;
        let noted = self.change(|ledger| ledger.begin_restoring(&self.lease.id, self.owner));
        noted.map_err(|error| error.to_string())?;
        self.check_gpu(there, bytes, reserve)?;
        processes.iter().try_for_each(|one| named(*one, self.restore_one(*one, there)))
    }

    fn carry_out(&self, call: CheckpointCall, one: SuspendedProcess) -> Result<(), String> {
        named(one, self.driver.carry_out(call, one, &[]))
    }

    /// Before a restore on GPU `uuid`: its nodes, no MPS server in the way, and room as NVML tells.
    fn make_ready(&self, uuid: &str, bytes: u64, reserve: u64) -> Result<(), String> {
        self.give_nodes()?;
        self.end_idle_servers()?;
        self.check_gpu(uuid, bytes, reserve)
    }

    /// MPS servers that wait for a share may hold the compute mode of a GPU that it is to be restored on.
    fn end_idle_servers(&self) -> Result<(), String> {
        Local::new(self.config).end_conflicting(&self.lease).map_err(|error| error.to_string())
    }

    /// Locks all of its processes, and then suspends them. At least one of them is there still.
    fn put_away(&self, processes: &[SuspendedProcess]) -> Result<(), String> {
        processes.iter().try_for_each(|one| self.carry_out(CheckpointCall::Lock, *one))?;
        let ledger = Store::open(&self.config.state_dir).and_then(|store| store.read());
        let now = self.cuda_processes(&ledger.map_err(|error| error.to_string())?);
        checks::check_unchanged(processes, &now.map_err(|error| error.to_string())?)?;
        checks::check_codecs(processes).map_err(|error| error.to_string())?;
        processes.iter().try_for_each(|one| self.carry_out(CheckpointCall::Checkpoint, *one))?;
        checks::check_some_alive(processes).map_err(|error| error.to_string())
    }

    /// Brings back what is in host memory, where the ledger has its room, and unlocks what is locked. So much memory of the
    /// GPU stays free. Returns the GPU on which it is.
    fn bring_back(&self, processes: &[SuspendedProcess], reserve: u64) -> Result<String, Stuck> {
        let not_now = |why, all_out| Stuck::NotNow { why, all_out };
        checks::check_awake(processes).map_err(|error| not_now(error.to_string(), false))?;
        if self.bring_alone_back(processes, reserve)? {
            return Ok(self.gpu().to_owned());
        }
        let mut states = Vec::new();
        for one in processes {
            let state = self.driver.state(one.process).map_err(|error| not_now(error.to_string(), false))?;
            states.push((*one, state));
        }
        states.retain(|(_, state)| *state != ProcessState::Ended);
        if let Some((one, _)) = states.iter().find(|(_, state)| *state == ProcessState::Failed) {
            return Err(Stuck::Lost(lost(one.process.pid)));
        }
        let is_out = |(_, state): &&(SuspendedProcess, ProcessState)| *state == ProcessState::Checkpointed;
        let out: Vec<SuspendedProcess> = states.iter().filter(is_out).map(|(one, _)| *one).collect();
        if !out.is_empty() {
            // Of several that were moving, one may be out on its way back.
            let all_out = out.len() == states.len() && (processes.len() == 1 || !self.is_moving());
            self.restore(&out, reserve, all_out)?;
        }
        let alive: Vec<SuspendedProcess> = states.iter().map(|(one, _)| *one).collect();
        let gpu = self.gather(&alive)?;
        for (one, _) in states.iter().filter(|(_, state)| *state != ProcessState::Running) {
            self.unlock(*one)?;
        }
        Ok(gpu)
    }

    /// Brings back a container with one process, which is resumed where it was, as most are: by one child of the driver's. `false`:
    /// it is another one, or there is no room as far as that is known before its state is.
    fn bring_alone_back(&self, processes: &[SuspendedProcess], reserve: u64) -> Result<bool, Stuck> {
        let resumes = self.lease.suspension.as_ref().is_some_and(|own| own.step == SuspendStep::Resuming);
        let ([one], true) = (processes, resumes && self.knows_one_gpu()) else { return Ok(false) };
        if self.make_ready(self.gpu(), one.bytes, reserve).is_err() {
            return Ok(false);
        }
        let Err(failed) = self.driver.bring_back(*one) else { return Ok(true) };
        let now = self.state_of(one.process);
        if now == Some(ProcessState::Checkpointed) && failed.is_harmless(false) {
            return Err(Stuck::NotNow { why: failed.to_string(), all_out: true });
        }
        if now != Some(ProcessState::Running) {
            // Locked, it is on the GPU: the answer was late.
            aftermath(failed, now, ProcessState::Locked, checks::check_awake(&[*one]).is_ok())?;
            self.unlock(*one)?;
        }
        Ok(true)
    }

    /// Whether it has room on two GPUs.
    fn is_moving(&self) -> bool {
        self.lease.destination().is_some() && !self.lease.is_arriving()
    }

    /// Restores what is `out`, each process where it was; one that arrives, on its new GPU.
    fn restore(&self, out: &[SuspendedProcess], reserve: u64, all_out: bool) -> Result<(), Stuck> {
        let not_now = |why| Stuck::NotNow { why, all_out };
        let there = self.lease.destination().filter(|_| self.lease.is_arriving());
        let there = there.unwrap_or_else(|| self.gpu());
        self.make_ready(there, sum(out), reserve).map_err(not_now)?;
        for (count, one) in out.iter().enumerate() {
            let Err(failed) = self.restore_one(*one, there) else { continue };
            let now = self.state_of(one.process);
            if now == Some(ProcessState::Checkpointed) && failed.is_harmless(!self.knows_one_gpu()) {
                // One that was moved before it is on the GPU.
                let all_out = all_out && count == 0;
                return Err(Stuck::NotNow { why: failed.to_string(), all_out });
            }
            aftermath(failed, now, ProcessState::Locked, checks::check_awake(&[*one]).is_ok())?;
        }
        Ok(())
    }

    /// Restores one on the GPU `there`, which may be where it was. Which GPUs it could open when it was suspended is tried, the likeliest
    /// first: the driver refuses others without harm. Beside those that the lease knows these are its own alone, as if it had not been
    /// moved, and all of the host's, as of a privileged container.
    fn restore_one(&self, one: SuspendedProcess, there: &str) -> Result<(), CallError> {
        let restore = |pairs: &[String]| self.driver.carry_out(CheckpointCall::Restore, one, pairs);
        if self.knows_one_gpu() {
            return restore(&[]);
        }
        let (here, all) = (self.gpu(), nodes::all_gpus(&self.lease));
        let before = self.lease.known.iter().map(String::as_str).chain([here]).collect();
        let [first, second] = if self.lease.is_arriving() { [before, all] } else { [all, before] };
        let host = self.inventory.with_left_out();
        let host = host.gpus().map(|gpu| gpu.uuid.as_str()).collect();
        let mut tried = Vec::new();
        let mut failed = None;
        for opened in [first, second, BTreeSet::from([here]), host] {
            if tried.contains(&opened) {
                continue;
            }
            let Err(error) = restore(&pairs(&opened, here, there)) else { return Ok(()) };
            if !error.is_harmless(true) || self.state_of(one.process) != Some(ProcessState::Checkpointed) {
                return Err(error);
            }
            failed.get_or_insert(error);
            tried.push(opened);
        }
        failed.map_or(Ok(()), Err)
    }

    /// The GPU on which its processes are, none of which is in host memory. Where a move has ended in the middle of several, those
    /// that were moved go back.
    fn gather(&self, processes: &[SuspendedProcess]) -> Result<String, Stuck> {
        let here = self.gpu().to_owned();
        let Some(there) = self.lease.destination() else { return Ok(here) };
        let not_now = |why| Stuck::NotNow { why, all_out: false };
        let of_gpu = |uuid: &str| {
            let ledger = Store::open(&self.config.state_dir)?.read()?;
            let found = self.processes_on(uuid, &ledger)?;
            Ok::<_, SuspendError>(found.iter().map(|one| one.process).collect::<Vec<_>>())
        };
        let on = |uuid| of_gpu(uuid).map_err(|error| not_now(error.to_string()));
        let (staying, arrived) = (on(&here)?, on(there)?);
        let (moved, rest): (Vec<SuspendedProcess>, Vec<SuspendedProcess>) = processes
            .iter()
            .filter(|one| one.process.is_alive())
            .partition(|one| arrived.contains(&one.process));
        if let Some(lost) = rest.iter().find(|one| !staying.contains(&one.process)) {
            return Err(not_now(format!("NVML does not say where process {} is", lost.process.pid)));
        }
        if rest.is_empty() && (!moved.is_empty() || self.lease.is_arriving()) {
            return Ok(there.to_owned());
        }
        if moved.is_empty() {
            return Ok(here);
        }
        self.give_nodes().map_err(not_now)?;
        for one in moved {
            let away = self.carry_out(CheckpointCall::Checkpoint, one);
            away.and_then(|()| named(one, self.restore_one(one, there))).map_err(not_now)?;
        }
        Ok(here)
    }

    /// Ends the step that is under way: its processes run, where the driver has them. `why` it did not go as planned. The GPU on
    /// which they are, and whether the lease was there still.
    fn come_back(
        &self,
        processes: &[SuspendedProcess],
        reserve: u64,
        why: Option<&str>,
    ) -> Result<(String, bool), SuspendError> {
        let gpu = self.bring_back(processes, reserve).map_err(|stuck| self.settle(stuck, processes, why))?;
        let noted = self.end_step(&gpu, |ledger| ledger.end_resumed(&self.lease.id, self.owner, &gpu))?;
        Ok((gpu, noted))
    }

    fn unlock(&self, one: SuspendedProcess) -> Result<(), Stuck> {
        let Err(failed) = self.driver.carry_out(CheckpointCall::Unlock, one, &[]) else { return Ok(()) };
        let now = self.state_of(one.process);
        aftermath(failed, now, ProcessState::Running, checks::check_awake(&[one]).is_ok())
    }

    fn state_of(&self, process: Process) -> Option<ProcessState> {
        if process.is_alive() { self.driver.state(process).ok() } else { Some(ProcessState::Ended) }
    }

    /// What NVML says of a GPU, just before a restore.
    fn check_gpu(&self, uuid: &str, bytes: u64, reserve: u64) -> Result<(), String> {
        let ask = |device: &NvmlDevice<'_>| Ok((device.compute_mode()?, device.memory_info()?.free));
        let (mode, free) = self.ask_gpu(uuid, ask).map_err(|why| format!("NVML: {why}"))?;
        if mode != ComputeMode::Default {
            let mode = probe::compute_mode(mode);
            return Err(format!(
                "its GPU has compute mode {mode}; fix: end the MPS shares there, or set it to DEFAULT (nvidia-smi -c)"
            ));
        }
        let needed = bytes.saturating_add(reserve);
        if free < needed {
            let [free, needed] = [free, needed].map(|bytes| bytes >> 20);
            return Err(format!(
                "its GPU has {free} MiB free, and {needed} MiB are needed; fix: end what uses it, or wait (--wait)"
            ));
        }
        Ok(())
    }

    /// All is to be as it was before a step that failed for the reason `why`, whose room is booked still.
    fn undo(&self, step: SuspendStep, processes: &[SuspendedProcess], why: String) -> SuspendError {
        // What it had, it may have again, with the reserve or without.
        let had_it = step == SuspendStep::Suspending || self.is_moving();
        let reserve = if had_it { 0 } else { self.config.limits.reserve };
        match self.come_back(processes, reserve, Some(&why)) {
            // Of one on its way back, or at the end of its move, the ledger's change tells.
            Ok((gpu, _)) if had_it && gpu == self.gpu() => self.tell_undone(why),
            Ok(_) => SuspendError::Undone(why),
            Err(error) => error,
        }
    }

    /// It is where it was, and goes on.
    fn tell_undone(&self, why: String) -> SuspendError {
        self.tell(Kind::SuspendUndone, &why);
        SuspendError::Undone(why)
    }

    /// Writes down what did not come back, and ends the container of what never will.
    fn settle(&self, stuck: Stuck, processes: &[SuspendedProcess], why: Option<&str>) -> SuspendError {
        let because = |more: String| match why {
            Some(why) => format!("{why}; {more}"),
            None => more,
        };
        let id = &self.lease.id;
        match stuck {
            // Nothing of it is on a GPU: it needs no room there.
            Stuck::NotNow { why, all_out: true } => {
                let left = self.end_step(self.gpu(), |ledger| ledger.end_suspended(id, self.owner));
                left.map_or_else(|error| error, |_| SuspendError::NoRoom(because(why)))
            }
            Stuck::NotNow { why, all_out: false } => {
                let left = self.change(|ledger| ledger.leave_step(id, self.owner));
                left.map_or_else(|error| error, |()| SuspendError::Stuck(because(why)))
            }
            Stuck::Lost(lost) => {
                let ended =
                    end_container(&self.lease).unwrap_or_else(|| "its container has ended".to_owned());
                // In the host's PID namespace they outlive its first process.
                for SuspendedProcess { process, .. } in
                    processes.iter().filter(|one| is_theirs(one.process, Some(&self.lease)))
                {
                    let _ = process.hold().ok().flatten().map(pidfd_kill);
                }
                let why = because(format!("{lost}: {ended}"));
                let left = self.change(|ledger| ledger.leave_step(id, self.owner));
                self.tell(Kind::SuspendLost, &why);
                left.map_or_else(|error| error, |()| SuspendError::Lost(why))
            }
        }
    }

    fn tell(&self, kind: Kind, text: &str) {
        let event = Event { text: text.to_owned(), ..lease_event(kind, &self.lease) };
        events::emit(&self.config.state_dir, &[event]);
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessState::{Checkpointed, Ended, Failed, Locked, Running};
    use super::*;
    use sublet_core::ledger::fixture::lease;

    #[test]
    fn a_step_that_may_take_long_is_announced_with_its_size() {
        let process = Process { pid: 7, start_time: 1 };
        let own = Suspension {
            step: SuspendStep::Resuming,
            owner: process,
            processes: vec![SuspendedProcess { process, bytes: 20 << 30 }],
            since_ms: 1000,
            on_demand: false,
        };
        let line = announce(&Lease { suspension: Some(own), ..lease(1, "GPU-0") });
        assert!(line.ends_with(": putting its suspension right first: 20480 MiB"), "{line}");
    }

    #[test]
    fn only_a_process_that_the_driver_refuses_to_bring_back_is_lost() {
        let becomes = |failed: fn(String) -> CallError, now, is_awake| {
            let after = aftermath(failed("why".to_owned()), now, Locked, is_awake);
            after.map_err(|stuck| matches!(stuck, Stuck::Lost(_)))
        };
        let (lost, not_now) = (Err(true), Err(false));
        for now in [None, Some(Checkpointed), Some(Failed), Some(Running)] {
            assert_eq!(becomes(CallError::Refused, now, true), lost, "{now:?}");
            assert_eq!(becomes(CallError::Refused, now, false), not_now, "{now:?}: it is paused");
            assert_eq!(becomes(CallError::NotMade, now, true), not_now, "{now:?}: no child could be started");
        }
        for now in [Locked, Ended] {
            assert_eq!(becomes(CallError::Refused, Some(now), true), Ok(()), "{now:?}");
        }
        let unlocked = |now| aftermath(CallError::Refused("why".to_owned()), Some(now), Running, true);
        assert!(matches!(unlocked(Checkpointed), Err(Stuck::NotNow { all_out: false, .. })));
        assert!(matches!(unlocked(Locked), Err(Stuck::Lost(_))));
    }
}
