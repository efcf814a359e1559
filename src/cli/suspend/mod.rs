//! `sublet suspend` and `resume`: puts the GPU state of a container's processes into host memory, and back
//! (docs/suspend.md).
//!
//! Each step is in the ledger before the driver is asked for it, and no lock is held while it works. What has been locked is
//! unlocked where a step fails, and what was suspended comes back. A restore is tried only with room that is booked and
//! that NVML confirms, and once: where it fails, the driver has lost the process, and its container is ended.
//!
//! [`suspend`] and [`resume`] take one lease. Which, and when, their callers say.

mod checks;
mod driver;
mod error;

use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::ComputeMode;

use crate::libcuda::CheckpointCall;
use crate::peer::{end_container, is_theirs, owns};
use crate::probe;
use checks::{CudaProcess, CudaProcesses};
pub use driver::{Arguments as CheckpointArguments, run as checkpoint};
use driver::{CallError, Driver, ProcessState};
pub use error::SuspendError;
use sublet_core::admit::{Local, refresh};
use sublet_core::config::Config;
use sublet_core::events::{self, Event, Kind};
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{
    Lease, LeaseId, Ledger, Store, SuspendStep, SuspendedProcess, Suspension, lease_event,
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
    let work = Work::begin(lease, config)?;
    checks::check_lease(lease, &work.inventory, force)?;
    let found = work.cuda_processes(&ledger)?;
    let processes = checks::check_processes(lease, &found)?;
    let bytes = sum(&processes);
    checks::check_awake(&processes)?;
    checks::check_way_back(bytes, work.device()?, config.limits.reserve)?;
    checks::check_host_memory(&processes, bytes)?;
    checks::check_running(&work.driver, &processes)?;
    work.change(|ledger| {
        ledger.begin_suspending(id, work.owner, processes.clone())?;
        if on_demand {
            ledger.note_on_demand(id);
        }
        Ok::<_, SuspendError>(())
    })??;
    match work.put_away(&processes) {
        Ok(()) => work.finish(Ledger::end_suspended, bytes, began),
        Err(why) => Err(work.undo(SuspendStep::Suspending, &processes, why)),
    }
}

/// Resumes the container of lease `id`, on the GPU where it was. `gpu` is that GPU, as people name it.
///
/// # Errors
/// It is suspended still, or the container was lost.
pub(crate) fn resume(id: &LeaseId, gpu: Option<&str>, config: &Config) -> Result<Done, SuspendError> {
    let began = Instant::now();
    let ledger = Store::open(&config.state_dir)?.read()?;
    let (lease, own) = ledger.resumable(id)?;
    let work = Work::begin(lease, config)?;
    work.check_named(gpu)?;
    checks::check_awake(&own.processes)?;
    // It may have been resumed and suspended again meanwhile, with other processes.
    let own = work.change(|ledger| {
        let (lease, own) = ledger.resumable(id)?;
        let own = own.clone();
        check_resume(lease, own.bytes(), &work.inventory, ledger, config)?;
        ledger.begin_resuming(id, work.owner)?;
        Ok::<_, SuspendError>(own)
    })??;
    match work.bring_back(&own.processes, config.limits.reserve) {
        Ok(()) => work.finish(Ledger::end_resumed, own.bytes(), began),
        Err(stuck) => Err(work.settle(stuck, &own.processes, None)),
    }
}

/// Whether there is a step that [`put_right`] would put right.
pub(crate) fn is_cut_short(config: &Config) -> bool {
    let read = || Some((Store::open(&config.state_dir).ok()?.read().ok()?, Process::current().ok()?));
    read().is_some_and(|(ledger, us)| ledger.cut_short(us).next().is_some())
}

/// Puts right every step that nobody takes any more, from where this process takes none: what was locked is unlocked, what
/// was suspended comes back. Returns what could not be put right, one line each.
pub(crate) fn put_right(config: &Config) -> Vec<String> {
    let read = Store::open(&config.state_dir).and_then(|store| store.read());
    let (Ok(ledger), Ok(us)) = (read, Process::current()) else { return Vec::new() };
    let put = |lease: &Lease| {
        let name = safe(&lease.container.name());
        let put = put_one_right(lease, config);
        put.err().map(|error| format!("container {name}: a step of its suspension was cut short: {error}"))
    };
    ledger.cut_short(us).filter_map(put).collect()
}

fn put_one_right(lease: &Lease, config: &Config) -> Result<(), SuspendError> {
    let work = Work::begin(lease, config)?;
    let Some(own) = work.change(|ledger| ledger.take_over(&lease.id, work.owner))? else { return Ok(()) };
    let Suspension { step, processes, .. } = own;
    match work.undo(step, &processes, "the process that took the step has ended".to_owned()) {
        SuspendError::Undone(_) => Ok(()),
        error => Err(error),
    }
}

/// Their memory, in bytes.
fn sum(processes: &[SuspendedProcess]) -> u64 {
    processes.iter().map(|one| one.bytes).sum()
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
    lease: &'a Lease,
    inventory: Inventory,
    driver: Driver,
    nvml: Nvml,
    owner: Process,
}

impl<'a> Work<'a> {
    fn begin(lease: &'a Lease, config: &'a Config) -> Result<Self, SuspendError> {
        let unknown =
            |error: &dyn std::fmt::Display| SuspendError::Unknown(format!("what runs on its GPU ({error})"));
        let inventory = refresh(config)?;
        let owner = Process::current().map_err(|error| unknown(&error))?;
        let driver = Driver::of(&inventory, &config.state_dir, owner);
        let driver =
            driver.ok_or_else(|| SuspendError::Unknown("where the host's libcuda.so.1 is".to_owned()))?;
        let (nvml, _) = probe::connect(config).map_err(|error| unknown(&error))?;
        Ok(Self { config, lease, inventory, driver, nvml, owner })
    }

    fn gpu(&self) -> &str {
        self.lease.devices.first().map(String::as_str).unwrap_or_default()
    }

    fn device(&self) -> Result<&sublet_core::inventory::Device, SuspendError> {
        let device = self.inventory.device(self.gpu());
        device.ok_or_else(|| SuspendError::Unknown(format!("anything of GPU {}", safe(self.gpu()))))
    }

    /// Whether `gpu` is the one that it was on. Another one is a move.
    fn check_named(&self, gpu: Option<&str>) -> Result<(), SuspendError> {
        let Some(text) = gpu else { return Ok(()) };
        let named = meant(text, &self.inventory, self.config).map_err(SuspendError::Gpu)?;
        match named[..] {
            [] => {
                Err(SuspendError::Gpu(format!("there is no GPU {}: `sublet status` lists them", safe(text))))
            }
            [one] if one.uuid == self.gpu() => Ok(()),
            _ => Err(SuspendError::OtherGpu { here: safe(self.gpu()) }),
        }
    }

    /// A change of the ledger.
    fn change<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> Result<T, SuspendError> {
        Ok(Local::new(self.config).update(change)?)
    }

    /// The step has been taken, which `end` writes down.
    fn finish(
        &self,
        end: fn(&mut Ledger, &LeaseId, Process) -> bool,
        bytes: u64,
        began: Instant,
    ) -> Result<Done, SuspendError> {
        let is_noted = self.change(|ledger| end(ledger, &self.lease.id, self.owner))?;
        let took = began.elapsed();
        // What is free now is known to the next start.
        let _ = refresh(self.config);
        if is_noted { Ok(Done { bytes, took }) } else { Err(SuspendError::Ended) }
    }

    /// The container's processes with contexts now, by NVML. A GPU that does not answer runs none, but for its own.
    fn cuda_processes(&self, ledger: &Ledger) -> Result<CudaProcesses, SuspendError> {
        let gpus = self.inventory.devices.iter().filter(|device| !device.is_mig());
        let mut uuids = gpus.map(|gpu| gpu.uuid.as_str()).filter(|uuid| *uuid != self.gpu());
        let elsewhere = uuids.any(|uuid| self.processes_on(uuid, ledger).is_ok_and(|on| !on.is_empty()));
        Ok(CudaProcesses { here: self.processes_on(self.gpu(), ledger)?, elsewhere })
    }

    fn processes_on(&self, uuid: &str, ledger: &Ledger) -> Result<Vec<CudaProcess>, SuspendError> {
        let unknown = |error| SuspendError::Unknown(format!("what runs on GPU {} ({error})", safe(uuid)));
        let device = probe::device_by_uuid(&self.nvml, uuid).map_err(unknown)?;
        let listed = probe::compute_processes(&device).map_err(unknown)?;
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

    /// Locks all of its processes, and then suspends them.
    fn put_away(&self, processes: &[SuspendedProcess]) -> Result<(), String> {
        let carry_out = |call, one: &SuspendedProcess| {
            let done = self.driver.carry_out(call, one.process, one.bytes);
            done.map_err(|error| format!("process {}: {error}", one.process.pid))
        };
        processes.iter().try_for_each(|one| carry_out(CheckpointCall::Lock, one))?;
        let ledger = Store::open(&self.config.state_dir).and_then(|store| store.read());
        let now = self.cuda_processes(&ledger.map_err(|error| error.to_string())?);
        checks::check_unchanged(processes, &now.map_err(|error| error.to_string())?)?;
        processes.iter().try_for_each(|one| carry_out(CheckpointCall::Checkpoint, one))
    }

    /// Brings back what is in host memory, where the ledger has its room, and unlocks what is locked. So much memory of the
    /// GPU stays free.
    fn bring_back(&self, processes: &[SuspendedProcess], reserve: u64) -> Result<(), Stuck> {
        let not_now = |why, all_out| Stuck::NotNow { why, all_out };
        checks::check_awake(processes).map_err(|error| not_now(error.to_string(), false))?;
        let mut states = Vec::new();
        for one in processes {
            let state = self.driver.state(one.process).map_err(|error| not_now(error.to_string(), false))?;
            states.push((*one, state));
        }
        states.retain(|(_, state)| *state != ProcessState::Ended);
        if let Some((one, _)) = states.iter().find(|(_, state)| *state == ProcessState::Failed) {
            return Err(Stuck::Lost(format!("the driver has lost process {}", one.process.pid)));
        }
        let is_out = |(_, state): &&(SuspendedProcess, ProcessState)| *state == ProcessState::Checkpointed;
        let out: Vec<SuspendedProcess> = states.iter().filter(is_out).map(|(one, _)| *one).collect();
        if !out.is_empty() {
            let all_out = out.len() == states.len();
            self.check_gpu(sum(&out), reserve).map_err(|why| not_now(why, all_out))?;
        }
        for one in &out {
            self.carry_out_or_lose(CheckpointCall::Restore, *one, ProcessState::Locked)?;
        }
        for (one, _) in states.iter().filter(|(_, state)| *state != ProcessState::Running) {
            self.carry_out_or_lose(CheckpointCall::Unlock, *one, ProcessState::Running)?;
        }
        Ok(())
    }

    /// Carries out `call`, which leads to the state `wanted`.
    fn carry_out_or_lose(
        &self,
        call: CheckpointCall,
        one: SuspendedProcess,
        wanted: ProcessState,
    ) -> Result<(), Stuck> {
        let Err(failed) = self.driver.carry_out(call, one.process, one.bytes) else { return Ok(()) };
        let now = if one.process.is_alive() {
            self.driver.state(one.process).ok()
        } else {
            Some(ProcessState::Ended)
        };
        aftermath(failed, now, wanted, checks::check_awake(&[one]).is_ok())
    }

    /// What NVML says of the GPU, just before a restore.
    fn check_gpu(&self, bytes: u64, reserve: u64) -> Result<(), String> {
        let device =
            probe::device_by_uuid(&self.nvml, self.gpu()).map_err(|error| format!("NVML: {error}"))?;
        let mode = device.compute_mode().map_err(|error| format!("NVML, of its compute mode: {error}"))?;
        if mode != ComputeMode::Default {
            let mode = probe::compute_mode(mode);
            return Err(format!(
                "its GPU has compute mode {mode}; fix: end the MPS shares there, or set it to DEFAULT (nvidia-smi -c)"
            ));
        }
        let memory = device.memory_info().map_err(|error| format!("NVML, of its memory: {error}"))?;
        let needed = bytes.saturating_add(reserve);
        if memory.free < needed {
            let [free, needed] = [memory.free, needed].map(|bytes| bytes >> 20);
            return Err(format!(
                "its GPU has {free} MiB free, and {needed} MiB are needed; fix: end what uses it, or wait (--wait)"
            ));
        }
        Ok(())
    }

    /// All is to be as it was before a step that failed for the reason `why`, whose room is booked still.
    fn undo(&self, step: SuspendStep, processes: &[SuspendedProcess], why: String) -> SuspendError {
        // What it had, it may have again, with the reserve or without.
        let reserve = if step == SuspendStep::Suspending { 0 } else { self.config.limits.reserve };
        match self.bring_back(processes, reserve) {
            Ok(()) => {
                let ended = self.change(|ledger| ledger.end_resumed(&self.lease.id, self.owner));
                // Of one on its way back, the ledger's change tells.
                if step == SuspendStep::Suspending {
                    self.tell(Kind::SuspendUndone, &why);
                }
                ended.map_or_else(|error| error, |_| SuspendError::Undone(why))
            }
            Err(stuck) => self.settle(stuck, processes, Some(&why)),
        }
    }

    /// Writes down what did not come back, and ends the container of what never will.
    fn settle(&self, stuck: Stuck, processes: &[SuspendedProcess], why: Option<&str>) -> SuspendError {
        let because = |more: String| match why {
            Some(why) => format!("{why}; {more}"),
            None => more,
        };
        let id = &self.lease.id;
        match stuck {
            Stuck::NotNow { why, all_out } => {
                let left = self.change(|ledger| {
                    // Nothing of it is on the GPU: it needs no room there.
                    if all_out {
                        ledger.end_suspended(id, self.owner);
                    } else {
                        ledger.leave_step(id, self.owner);
                    }
                });
                let stays: fn(String) -> SuspendError =
                    if all_out { SuspendError::NoRoom } else { SuspendError::Stuck };
                left.map_or_else(|error| error, |()| stays(because(why)))
            }
            Stuck::Lost(lost) => {
                let ended = end_container(self.lease).unwrap_or_else(|| "its container has ended".to_owned());
                // In the host's PID namespace they outlive its first process.
                for SuspendedProcess { process, .. } in
                    processes.iter().filter(|one| is_theirs(one.process, Some(self.lease)))
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
        let event = Event { text: text.to_owned(), ..lease_event(kind, self.lease) };
        events::emit(&self.config.state_dir, &[event]);
    }
}

#[cfg(test)]
mod tests {
    use super::ProcessState::{Checkpointed, Ended, Failed, Locked, Running};
    use super::*;

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
