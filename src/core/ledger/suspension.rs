//! Leases whose containers' GPU state is in host memory, or on its way there or back: active, suspending, suspended,
//! resuming, active. Each step is in the ledger before it is taken, and no lock is held while it is. A step whose process
//! has ended was cut short: the next command, or `sublet serve`, takes it over.
//!
//! While a container moves, its lease has two devices, and books both: the one that it was on, and then the one that it goes to.
//! Which of them it keeps is written down when its state is there ([`Ledger::end_resumed`]).

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::waiters::LONGEST;
use super::{Lease, LeaseId, LeaseState, Ledger, Waiter};
use crate::config::Config;
use crate::process::{Process, epoch_seconds, uptime_milliseconds, uptime_seconds};
use crate::request::{Request, RequestError, parse};
use crate::share::{Devices, MIB, Memory, Mode, Selector, Suspend};

/// Milliseconds of a tick of a process's start time (proc(5); `USER_HZ` is 100 on all of sublet's architectures).
pub(super) const TICK_MILLISECONDS: u64 = 10;

/// Why a container waits that was suspended for another.
const MADE_ROOM: &str =
    "suspended to make room for another container; it comes back by itself when there is room";

/// How long `sublet serve` leaves a lease alone with which a step failed, in seconds.
const SHORTEST_BACKOFF: u64 = 5;
const LONGEST_BACKOFF: u64 = 3600;

/// Where the GPU state of a lease's container is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspension {
    /// The step that is being taken, or was taken last.
    pub step: SuspendStep,
    /// The process that takes it.
    pub owner: Process,
    /// The container's CUDA processes, whose state it is.
    pub processes: Vec<SuspendedProcess>,
    /// When the step began, in milliseconds since boot.
    pub since_ms: u64,
    /// Whether it makes room for others, so that the container comes back by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_demand: bool,
}

/// A CUDA process with its GPU state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendedProcess {
    /// The process.
    #[serde(flatten)]
    pub process: Process,
    /// Its memory on the GPU, in bytes: as much is in host memory, and as much room does it need again.
    pub bytes: u64,
}

/// A step of a suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SuspendStep {
    /// GPU memory is being copied into host memory. What the lease books is kept: until the last process is out, the
    /// other ones may have to go back.
    Suspending,
    /// It is in host memory, and the lease books nothing.
    Suspended,
    /// As suspended. The last of its processes began to use the GPU meanwhile, and is being suspended, too.
    Adding,
    /// It is being copied back. The room is booked.
    Resuming,
    /// It was suspended, and is being copied to the second device of its lease. Only there is its room booked.
    Arriving,
}

/// Steps that `sublet serve` took with a lease by itself, and that failed one after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backoff {
    /// How many.
    failures: u32,
    /// Until when the lease is left alone, in seconds since boot.
    until: u64,
    /// Why the last one failed: one line.
    why: String,
}

/// Why a lease is in no state to be suspended or resumed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WrongState {
    /// Its container has ended.
    #[error("it has ended")]
    Gone,
    /// Its container is being started.
    #[error("it is being started; fix: try again when it runs")]
    Starting,
    /// Its container is ending.
    #[error("it is ending")]
    Ending,
    /// It is suspended.
    #[error("it is suspended already; fix: `sublet resume` brings it back, with --gpu to another GPU")]
    Suspended,
    /// It is not suspended.
    #[error("it is not suspended")]
    NotSuspended,
    /// Another process takes a step.
    #[error("process {0} suspends or resumes it now; fix: try again when that has ended")]
    Busy(i32),
    /// The process that took a step has ended, and nobody has put that right yet.
    #[error("a step was cut short, and is put right by `sublet gc`; fix: try again then")]
    CutShort,
}

impl WrongState {
    /// Whether waiting may help.
    pub const fn is_temporary(&self) -> bool {
        matches!(self, Self::Starting | Self::Busy(_) | Self::CutShort)
    }
}

impl Lease {
    /// Whether a step of it was cut short: its process has ended, or is `asking`, which takes one step after the other and
    /// could not write down how an earlier one ended.
    pub fn is_cut_short(&self, asking: Process) -> bool {
        let is_left = |owner: Process| owner == asking || !owner.is_alive();
        self.suspension.as_ref().is_some_and(|own| own.step != SuspendStep::Suspended && is_left(own.owner))
    }

    /// When its container came to its GPU, or was last resumed there, in milliseconds since boot.
    pub fn on_gpu_since_ms(&self) -> u64 {
        let start =
            || self.init.as_ref().map(|init| init.process.start_time.saturating_mul(TICK_MILLISECONDS));
        self.resumed_ms.or_else(start).unwrap_or(u64::MAX)
    }

    /// Whether the driver may suspend it, and its share allows that.
    pub fn may_be_suspended(&self) -> bool {
        let is_alone = self.daemon.is_none() && self.devices.len() == 1 && self.job.is_none();
        !self.suspend.is_never() && is_alone && matches!(self.mode, Mode::TimeSlice | Mode::Exclusive)
    }

    /// Why the last step that `sublet serve` took with it failed, while that leaves it alone.
    pub fn why_left_alone(&self) -> Option<&str> {
        self.backoff.as_ref().filter(|own| uptime_seconds() < own.until).map(|own| own.why.as_str())
    }

    /// What its container asks for when it comes back with `bytes` of memory to the GPU where it was.
    ///
    /// # Errors
    /// Its mode is none that a request may name.
    pub(crate) fn request_of_return(&self, bytes: u64) -> Result<Request, RequestError> {
        let mode = [("sublet.mode".to_owned(), self.mode.to_string())].into();
        let whole = bytes.max(self.memory_bytes.unwrap_or(0)).div_ceil(MIB) * MIB;
        let gpus = self.devices.iter().map(|uuid| Selector::Uuid(uuid.clone()));
        Ok(Request {
            devices: Devices::These(gpus.collect()),
            memory: (self.mode != Mode::Exclusive).then_some(Memory::Bytes(whole)),
            suspend: Suspend::Allow,
            // As long as it takes.
            wait: Duration::from_secs(u32::MAX.into()),
            ..parse(&mode, None, None, &Config::default())?
        })
    }

    /// Its place in the order of those who wait.
    fn waiter(&self) -> Option<Waiter> {
        let own = self.suspension.as_ref().filter(|own| own.on_demand)?;
        let process = self.init.as_ref().map_or(self.owner, |init| init.process);
        let request = self.request_of_return(own.bytes()).ok()?;
        Some(Waiter::new(&self.id, &self.container, &request, MADE_ROOM, Some(process)))
    }

    /// Its state as it is shown, with the step of its suspension.
    pub fn shown_state(&self) -> LeaseState {
        match (self.state, &self.suspension) {
            (LeaseState::Active, Some(suspension)) => match suspension.step {
                SuspendStep::Suspending => LeaseState::Suspending,
                SuspendStep::Suspended | SuspendStep::Adding => LeaseState::Suspended,
                SuspendStep::Resuming | SuspendStep::Arriving => LeaseState::Resuming,
            },
            (state, _) => state,
        }
    }

    /// The device to which it moves.
    pub fn destination(&self) -> Option<&str> {
        let moves = self.suspension.is_some() && self.devices.len() == 2;
        self.devices.get(1).map(String::as_str).filter(|_| moves)
    }

    /// It keeps the device with this number. Its processes know the other one from now on.
    fn stay_on(&mut self, number: usize) {
        let all = std::mem::take(&mut self.devices);
        self.devices.extend(all.get(number).cloned());
        self.known.extend(all);
        self.known.sort();
        self.known.dedup();
        self.known.retain(|known| !self.devices.contains(known));
    }
}

impl Ledger {
    /// Lease `id`, to be suspended.
    ///
    /// # Errors
    /// Its container does not run, or it is suspended.
    pub fn suspendable(&self, id: &LeaseId) -> Result<&Lease, WrongState> {
        let lease = self.running(id)?;
        match &lease.suspension {
            None => Ok(lease),
            Some(own) if own.step == SuspendStep::Suspended => Err(WrongState::Suspended),
            Some(own) => Err(own.under_way()),
        }
    }

    /// Lease `id` with its suspension, to be resumed.
    ///
    /// # Errors
    /// Its container does not run, or it is not suspended.
    pub fn resumable(&self, id: &LeaseId) -> Result<(&Lease, &Suspension), WrongState> {
        let lease = self.running(id)?;
        match &lease.suspension {
            None => Err(WrongState::NotSuspended),
            Some(own) if own.step == SuspendStep::Suspended => Ok((lease, own)),
            Some(own) => Err(own.under_way()),
        }
    }

    fn running(&self, id: &LeaseId) -> Result<&Lease, WrongState> {
        let lease = self.lease(id).ok_or(WrongState::Gone)?;
        match lease.state {
            LeaseState::Pending => Err(WrongState::Starting),
            LeaseState::Ending => Err(WrongState::Ending),
            _ => Ok(lease),
        }
    }

    /// `owner` begins to suspend lease `id`, which has these `processes` on the GPU, or to move it `to` another device, which has
    /// room for them: that is asked under the same lock.
    ///
    /// # Errors
    /// As [`Ledger::suspendable`].
    pub fn begin_suspending(
        &mut self,
        id: &LeaseId,
        owner: Process,
        processes: Vec<SuspendedProcess>,
        to: Option<&str>,
    ) -> Result<(), WrongState> {
        self.suspendable(id)?;
        let (step, since_ms) = (SuspendStep::Suspending, uptime_milliseconds());
        if let Some(lease) = self.lease_mut(id) {
            lease.suspension = Some(Suspension { step, owner, processes, since_ms, on_demand: false });
            lease.devices.extend(to.map(str::to_owned));
        }
        Ok(())
    }

    /// Memory that other leases than `id` are copying into host memory now, in bytes. A step that nobody takes copies nothing.
    pub fn bytes_on_their_way_out(&self, id: &LeaseId) -> u64 {
        let rest = self.leases.iter().filter(|lease| lease.id != *id);
        let steps = rest.filter_map(|lease| lease.suspension.as_ref()).filter(|own| own.owner.pid != 0);
        let bytes = steps.map(|own| match own.step {
            SuspendStep::Suspending => own.bytes(),
            SuspendStep::Adding => own.processes.last().map_or(0, |new| new.bytes),
            _ => 0,
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// The state of lease `id`, which `owner` moves, is in host memory, and goes to its second device now.
    pub fn begin_restoring(&mut self, id: &LeaseId, owner: Process) -> bool {
        self.is_owned(id, owner) && self.change_step(id, |own| own.step = SuspendStep::Resuming)
    }

    /// The step with lease `id` that has just begun makes room for others.
    pub fn note_on_demand(&mut self, id: &LeaseId) {
        self.change_step(id, |own| own.on_demand = true);
    }

    /// `owner` begins to resume lease `id`, which books its room again, where it was or `to` another device. Whether there is room is
    /// asked under the same lock ([`crate::place::check_resume`]).
    ///
    /// # Errors
    /// As [`Ledger::resumable`].
    pub fn begin_resuming(
        &mut self,
        id: &LeaseId,
        owner: Process,
        to: Option<&str>,
    ) -> Result<(), WrongState> {
        self.resumable(id)?;
        let step = if to.is_some() { SuspendStep::Arriving } else { SuspendStep::Resuming };
        self.change_step(id, |own| own.begin(step, owner));
        self.lease_mut(id).into_iter().for_each(|lease| lease.devices.extend(to.map(str::to_owned)));
        Ok(())
    }

    /// Lease `id`, whose container made room for another, comes back by a command alone from now on. Its memory that is in host
    /// memory, in bytes; `None`: it is not one of these.
    pub fn keep_suspended(&mut self, id: &LeaseId) -> Option<u64> {
        let (_, own) = self.resumable(id).ok().filter(|(_, own)| own.on_demand)?;
        let bytes = own.bytes();
        self.change_step(id, |own| own.on_demand = false);
        self.lease_mut(id).into_iter().for_each(|lease| lease.backoff = None);
        self.waiters.retain(|waiter| waiter.id != *id);
        Some(bytes)
    }

    /// A step that `sublet serve` took with lease `id` by itself has failed. It leaves that alone for `at_least`, and for twice as
    /// long each time.
    pub fn back_off(&mut self, id: &LeaseId, at_least: Duration, why: &str) {
        let Some(lease) = self.lease_mut(id) else { return };
        let before = lease.backoff.as_ref().map_or(0, |own| own.failures);
        let time = at_least.as_secs().max(SHORTEST_BACKOFF).saturating_mul(1 << before.min(6));
        let until = uptime_seconds() + time.min(LONGEST_BACKOFF);
        let why = why.chars().take(LONGEST).collect();
        lease.backoff = Some(Backoff { failures: before.saturating_add(1), until, why });
    }

    /// `owner` takes over a step of lease `id` that was cut short. The suspension as it is then; `None`: there is nothing
    /// to take over any more.
    pub fn take_over(&mut self, id: &LeaseId, owner: Process) -> Option<Suspension> {
        self.lease(id).filter(|lease| lease.is_cut_short(owner))?;
        self.change_step(id, |own| own.owner = owner);
        self.lease(id)?.suspension.clone()
    }

    /// The step that `owner` takes with lease `id` has ended: the state is in host memory, from its first device. One that makes
    /// room for others waits from now on, in their order, for that device. `false`: the lease has ended.
    pub fn end_suspended(&mut self, id: &LeaseId, owner: Process) -> bool {
        let was_running = self.lease(id).is_some_and(|lease| lease.shown_state() == LeaseState::Suspending);
        let was_arriving = self.lease(id).is_some_and(Lease::is_arriving);
        let out = |own: &mut Suspension| own.begin(SuspendStep::Suspended, owner);
        let ended = self.is_owned(id, owner) && self.change_step(id, out);
        if let Some(lease) = self.lease_mut(id).filter(|_| ended) {
            if was_arriving {
                // Where it has not come to, it knows nothing of: the driver counts what a process could open when it was suspended.
                lease.devices.truncate(1);
            }
            lease.stay_on(0);
            // What failed before was to suspend it.
            lease.backoff.take_if(|_| was_running);
            self.wait_for_room(id);
        }
        ended
    }

    /// Processes that have ended while their container is suspended need no room any more, and it waits for none of theirs. They
    /// stay in the list: others may have shared memory with them.
    pub fn forget_ended(&mut self) {
        let has_ended = |one: &SuspendedProcess| one.bytes > 0 && !one.process.is_alive();
        let forgets = |lease: &&Lease| {
            self.resumable(&lease.id).is_ok_and(|(_, own)| own.processes.iter().any(has_ended))
        };
        let ids: Vec<LeaseId> = self.leases.iter().filter(forgets).map(|lease| lease.id.clone()).collect();
        for id in ids {
            self.change_step(&id, |own| {
                own.processes.iter_mut().filter(|one| has_ended(one)).for_each(|one| one.bytes = 0);
            });
            self.wait_for_room(&id);
        }
    }

    /// `owner` begins to suspend `new` with the rest of lease `id`, which is suspended.
    ///
    /// # Errors
    /// As [`Ledger::resumable`], or it is suspended already.
    pub fn begin_adding(
        &mut self,
        id: &LeaseId,
        owner: Process,
        new: SuspendedProcess,
    ) -> Result<(), WrongState> {
        if self.resumable(id)?.1.has(new.process) {
            return Err(WrongState::Suspended);
        }
        self.change_step(id, |own| {
            own.processes.push(new);
            // It is suspended since the same time as before.
            (own.step, own.owner) = (SuspendStep::Adding, owner);
        });
        Ok(())
    }

    /// The process that `owner` adds to lease `id` has so many bytes.
    pub fn resize_added(&mut self, id: &LeaseId, owner: Process, bytes: u64) {
        let adds = self.adds(id, owner);
        self.change_step(id, |own| {
            if let Some(new) = own.processes.last_mut().filter(|_| adds) {
                new.bytes = bytes;
            }
        });
    }

    /// The step that `owner` takes with lease `id` has ended: its last process is in host memory, too, or has ended. One that waits
    /// for its room now waits for that of all. `false`: the lease has ended.
    pub fn end_adding(&mut self, id: &LeaseId, owner: Process, is_out: bool) -> bool {
        let many = self.lease(id).is_some_and(|lease| lease.suspend == Suspend::AllowMany);
        let note = |own: &mut Suspension| {
            match &mut own.processes[..] {
                _ if is_out => {}
                // Later ones may share memory with it: the first stays in the list, so that they are known not to be alone.
                [_, ended] if !many => ended.bytes = 0,
                _ => drop(own.processes.pop()),
            }
            own.step = SuspendStep::Suspended;
        };
        let ended = self.adds(id, owner) && self.change_step(id, note);
        if ended {
            self.wait_for_room(id);
        }
        ended
    }

    /// The step that `owner` takes with lease `id` has ended: the state is on `device`. `false`: the lease has ended.
    pub fn end_resumed(&mut self, id: &LeaseId, owner: Process, device: &str) -> bool {
        let lease = if self.is_owned(id, owner) { self.lease_mut(id) } else { None };
        let Some(lease) = lease else { return false };
        let number = lease.devices.iter().position(|own| own == device);
        lease.stay_on(number.unwrap_or(0));
        // A step that was undone has not taken it from its GPU.
        if lease.suspension.take().is_some_and(|own| own.step != SuspendStep::Suspending) {
            (lease.resumed_ms, lease.backoff) = (Some(uptime_milliseconds()), None);
        }
        self.waiters.retain(|waiter| waiter.id != *id);
        true
    }

    fn adds(&self, id: &LeaseId, owner: Process) -> bool {
        let is_adding =
            |lease: &Lease| lease.suspension.as_ref().map(|own| own.step) == Some(SuspendStep::Adding);
        self.is_owned(id, owner) && self.lease(id).is_some_and(is_adding)
    }

    /// `owner` leaves its step with lease `id` to the next command.
    pub fn leave_step(&mut self, id: &LeaseId, owner: Process) {
        // No process has this pid.
        let nobody = Process { pid: 0, start_time: 0 };
        if self.is_owned(id, owner) {
            self.change_step(id, |own| own.owner = nobody);
        }
    }

    fn is_owned(&self, id: &LeaseId, owner: Process) -> bool {
        let own = self.lease(id).and_then(|lease| lease.suspension.as_ref());
        own.is_some_and(|own| own.owner == owner && own.step != SuspendStep::Suspended)
    }

    /// Whether it has one.
    fn change_step(&mut self, id: &LeaseId, change: impl FnOnce(&mut Suspension)) -> bool {
        self.lease_mut(id).and_then(|lease| lease.suspension.as_mut()).map(change).is_some()
    }

    /// Lease `id` waits in the order of those who wait, if it makes room for others: for what it needs by now.
    fn wait_for_room(&mut self, id: &LeaseId) {
        if let Some(waiter) = self.lease(id).and_then(Lease::waiter) {
            self.add_waiter(waiter);
        }
    }

    /// Leases with a step that was cut short, as [`Lease::is_cut_short`].
    pub fn cut_short(&self, asking: Process) -> impl Iterator<Item = &Lease> {
        self.leases.iter().filter(move |lease| lease.is_cut_short(asking))
    }
}

impl Suspension {
    /// The memory of all its processes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.processes.iter().map(|one| one.bytes).fold(0, u64::saturating_add)
    }

    /// Whether `process` is of those whose state it is.
    pub fn has(&self, process: Process) -> bool {
        self.processes.iter().any(|one| one.process == process)
    }

    /// Whether `process` started after all of it was in host memory, so that it can never have had a handle of that memory.
    pub fn is_before(&self, process: Process) -> bool {
        process.start_time.saturating_mul(TICK_MILLISECONDS) > self.since_ms
    }

    /// When its step began, in seconds since the epoch.
    pub fn began(&self) -> u64 {
        epoch_seconds().saturating_sub(uptime_milliseconds().saturating_sub(self.since_ms) / 1000)
    }

    fn under_way(&self) -> WrongState {
        if self.owner.is_alive() { WrongState::Busy(self.owner.pid) } else { WrongState::CutShort }
    }

    fn begin(&mut self, step: SuspendStep, owner: Process) {
        (self.step, self.owner, self.since_ms) = (step, owner, uptime_milliseconds());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Container;
    use super::super::fixture::lease;
    use super::*;
    use crate::process::Process;

    const BYTES: u64 = 20 << 30;

    fn me() -> Process {
        Process::current().unwrap()
    }

    fn held(bytes: u64) -> Vec<SuspendedProcess> {
        vec![SuspendedProcess { process: dead(), bytes }]
    }

    fn dead() -> Process {
        Process { pid: i32::MAX, start_time: 1 }
    }

    fn ledger() -> (Ledger, LeaseId) {
        let one = Lease { state: LeaseState::Active, memory_bytes: Some(BYTES / 2), ..lease(1, "GPU-0") };
        let id = one.id.clone();
        (Ledger { leases: vec![one], ..Ledger::empty("boot") }, id)
    }

    #[test]
    fn a_lease_books_its_room_until_it_is_suspended_and_again_before_it_is_back() {
        let (mut ledger, id) = ledger();
        let booked = |ledger: &Ledger| ledger.leases[0].booked_memory();
        let shown = |ledger: &Ledger| ledger.leases[0].shown_state();
        assert_eq!(ledger.begin_resuming(&id, me(), None), Err(WrongState::NotSuspended));
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert_eq!((booked(&ledger), shown(&ledger)), (Some(BYTES), LeaseState::Suspending));
        let twice = ledger.begin_suspending(&id, me(), vec![], None).unwrap_err();
        assert_eq!((twice.clone(), twice.is_temporary()), (WrongState::Busy(me().pid), true));
        assert!(!ledger.end_suspended(&id, dead()), "another's step");
        assert!(ledger.end_suspended(&id, me()));
        assert_eq!((booked(&ledger), shown(&ledger)), (None, LeaseState::Suspended));
        assert_eq!(ledger.begin_suspending(&id, me(), vec![], None), Err(WrongState::Suspended));
        assert!(!ledger.end_resumed(&id, me(), "GPU-0"), "no step is under way");
        ledger.begin_resuming(&id, me(), None).unwrap();
        assert_eq!((booked(&ledger), shown(&ledger)), (Some(BYTES), LeaseState::Resuming));
        assert!(ledger.end_resumed(&id, me(), "GPU-0"));
        assert_eq!((booked(&ledger), shown(&ledger)), (Some(BYTES / 2), LeaseState::Active));
        assert!(ledger.leases[0].known.is_empty());
    }

    #[test]
    fn a_container_that_is_being_started_is_refused_as_that() {
        let (mut ledger, id) = ledger();
        ledger.leases[0].state = LeaseState::Pending;
        let refused = [
            ledger.begin_suspending(&id, me(), held(BYTES), None),
            ledger.begin_suspending(&id, me(), held(BYTES), Some("GPU-1")),
            ledger.begin_resuming(&id, me(), None),
            ledger.begin_resuming(&id, me(), Some("GPU-1")),
        ];
        for error in refused {
            let error = error.unwrap_err();
            assert!(error == WrongState::Starting && error.is_temporary());
            assert_eq!(error.to_string(), "it is being started; fix: try again when it runs");
        }
        assert_eq!((&ledger.leases[0].suspension, ledger.leases[0].devices.len()), (&None, 1));
    }

    #[test]
    fn host_memory_that_leases_are_copied_into_is_known_until_they_are_there() {
        let (mut ledger, id) = ledger();
        let other = lease(2, "GPU-1").id;
        let out =
            |ledger: &Ledger| [ledger.bytes_on_their_way_out(&id), ledger.bytes_on_their_way_out(&other)];
        assert_eq!(out(&ledger), [0, 0]);
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert_eq!(out(&ledger), [0, BYTES], "its own bytes are not in its own way");
        let mut left = ledger.clone();
        left.leave_step(&id, me());
        assert_eq!(out(&left), [0, 0], "nobody copies");
        ledger.end_suspended(&id, me());
        assert_eq!(out(&ledger), [0, 0]);
        ledger.begin_adding(&id, me(), SuspendedProcess { process: me(), bytes: 7 }).unwrap();
        assert_eq!(out(&ledger), [0, 7]);
        ledger.end_adding(&id, me(), true);
        ledger.begin_resuming(&id, me(), None).unwrap();
        assert_eq!(out(&ledger), [0, 0]);
    }

    #[test]
    fn a_lease_that_moves_books_both_devices_until_its_state_is_on_one() {
        let places = |ledger: &Ledger| ["GPU-0", "GPU-1"].map(|device| ledger.leases[0].books(device));
        let (mut start, id) = ledger();
        start.begin_suspending(&id, me(), held(BYTES), Some("GPU-1")).unwrap();
        assert_eq!((places(&start), start.leases[0].destination()), ([true, true], Some("GPU-1")));
        assert!(
            start.begin_suspending(&id, me(), vec![], Some("GPU-2")).is_err()
                && start.leases[0].devices.len() == 2
        );
        assert!(!start.begin_restoring(&id, dead()) && start.begin_restoring(&id, me()));
        assert_eq!((places(&start), start.leases[0].shown_state()), ([true, true], LeaseState::Resuming));
        for (device, other, booked) in [("GPU-1", "GPU-0", [false, true]), ("GPU-0", "GPU-1", [true, false])]
        {
            let mut ledger = start.clone();
            assert!(ledger.end_resumed(&id, me(), device));
            assert_eq!((places(&ledger), &ledger.leases[0].known), (booked, &vec![other.to_owned()]));
            assert_eq!(ledger.leases[0].destination(), None);
            // Back again: it has known both.
            ledger.begin_suspending(&id, me(), held(BYTES), Some(other)).unwrap();
            ledger.end_resumed(&id, me(), other);
            assert_eq!(ledger.leases[0].known, [device]);
        }
        assert!(start.end_suspended(&id, me()));
        assert_eq!(
            (places(&start), &start.leases[0].devices[..]),
            ([false, false], &["GPU-0".to_owned()][..])
        );
    }

    #[test]
    fn one_that_comes_back_elsewhere_books_nothing_where_it_was() {
        let (mut ledger, id) = ledger();
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert_eq!(ledger.begin_resuming(&id, me(), Some("GPU-1")), Err(WrongState::Busy(me().pid)));
        ledger.end_suspended(&id, me());
        ledger.begin_resuming(&id, me(), Some("GPU-1")).unwrap();
        let lease = &ledger.leases[0];
        assert_eq!((lease.books("GPU-0"), lease.books("GPU-1")), (false, true));
        assert_eq!((lease.booked_memory(), lease.shown_state()), (Some(BYTES), LeaseState::Resuming));
        // The driver has refused it.
        ledger.end_suspended(&id, me());
        assert_eq!((ledger.leases[0].devices.len(), ledger.leases[0].is_suspended()), (1, true));
    }

    #[test]
    fn one_that_made_room_waits_for_the_gpu_that_it_was_on_last() {
        let (mut ledger, id) = ledger();
        for (from, to) in [("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")] {
            let waits_for = |ledger: &Ledger| ledger.waiters[0].request().unwrap().devices;
            let its_own = Devices::These(vec![Selector::Uuid(from.to_owned())]);
            ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
            ledger.note_on_demand(&id);
            assert!(ledger.end_suspended(&id, me()));
            assert_eq!(waits_for(&ledger), its_own);
            // It could not be resumed elsewhere.
            ledger.begin_resuming(&id, me(), Some(to)).unwrap();
            assert!(ledger.end_suspended(&id, me()));
            assert_eq!((ledger.waiters.len(), waits_for(&ledger)), (1, its_own));
            ledger.begin_resuming(&id, me(), Some(to)).unwrap();
            assert!(ledger.end_resumed(&id, me(), to));
            assert!(ledger.waiters.is_empty() && ledger.leases[0].resumed_ms.is_some());
        }
    }

    #[test]
    fn who_made_room_has_an_entry_however_many_wait() {
        let (mut ledger, id) = ledger();
        let request = ledger.leases[0].request_of_return(0).unwrap();
        for n in 100..400 {
            let other = LeaseId::parse(&format!("{n:016x}")).unwrap();
            ledger.add_waiter(Waiter::new(&other, &Container::default(), &request, "no room", Some(me())));
        }
        let before = ledger.waiters.len();
        assert!(before < 300, "the others are bounded");
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        ledger.note_on_demand(&id);
        assert!(ledger.end_suspended(&id, me()));
        assert_eq!((ledger.waiters.len(), &ledger.waiters[before].id), (before + 1, &id));
    }

    #[test]
    fn a_lease_is_left_alone_after_a_failure_for_twice_as_long_each_time() {
        let (mut ledger, id) = ledger();
        let time = |ledger: &Ledger| ledger.leases[0].backoff.as_ref().unwrap().until - uptime_seconds();
        let fail = |ledger: &mut Ledger| ledger.back_off(&id, Duration::from_secs(30), "it is paused");
        assert_eq!(ledger.leases[0].why_left_alone(), None);
        let mut all = Vec::new();
        for _ in 0..9 {
            fail(&mut ledger);
            all.push(time(&ledger).div_ceil(30) * 30);
        }
        assert_eq!(all, [30, 60, 120, 240, 480, 960, 1920, 1920, 1920]);
        assert_eq!(ledger.leases[0].why_left_alone(), Some("it is paused"));
        ledger.back_off(&id, Duration::MAX, "it is paused");
        assert!(time(&ledger) <= LONGEST_BACKOFF);
        ledger.leases[0].backoff.as_mut().unwrap().until = 0;
        assert_eq!(ledger.leases[0].why_left_alone(), None, "that time is over");

        // One that was undone counts still, one that is taken begins anew.
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert!(ledger.end_resumed(&id, me(), "GPU-0") && ledger.leases[0].backoff.is_some());
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert!(ledger.end_suspended(&id, me()) && ledger.leases[0].backoff.is_none());
        fail(&mut ledger);
        ledger.begin_resuming(&id, me(), None).unwrap();
        assert!(ledger.end_suspended(&id, me()) && ledger.leases[0].backoff.is_some());
        ledger.begin_resuming(&id, me(), None).unwrap();
        assert!(ledger.end_resumed(&id, me(), "GPU-0") && ledger.leases[0].backoff.is_none());
    }

    #[test]
    fn a_process_that_is_added_comes_back_with_the_rest_and_its_room_is_waited_for() {
        let (mut ledger, id) = ledger();
        let new = |pid| SuspendedProcess { process: Process { pid, start_time: 1 }, bytes: BYTES };
        assert_eq!(ledger.begin_adding(&id, me(), new(7)), Err(WrongState::NotSuspended));
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        assert_eq!(ledger.begin_adding(&id, me(), new(7)), Err(WrongState::Busy(me().pid)));
        ledger.note_on_demand(&id);
        ledger.end_suspended(&id, me());
        let since = ledger.leases[0].suspension.clone().unwrap().since_ms;
        let bytes = |ledger: &Ledger| ledger.leases[0].suspension.as_ref().unwrap().bytes();
        let waits_for = |ledger: &Ledger| ledger.waiters[0].request().unwrap().memory;
        ledger.begin_adding(&id, me(), new(7)).unwrap();
        let lease = &ledger.leases[0];
        assert_eq!((lease.shown_state(), lease.booked_memory()), (LeaseState::Suspended, None));
        assert!(lease.is_suspended() && !lease.books("GPU-0"));
        assert_eq!(ledger.begin_resuming(&id, me(), None), Err(WrongState::Busy(me().pid)));
        ledger.resize_added(&id, me(), BYTES + MIB);
        ledger.resize_added(&id, dead(), 0);
        assert_eq!(bytes(&ledger), 2 * BYTES + MIB);
        ledger.resize_added(&id, me(), BYTES);
        assert!(!ledger.end_adding(&id, dead(), true), "another's step");
        assert!(ledger.end_adding(&id, me(), true) && !ledger.end_adding(&id, me(), true));
        assert_eq!((bytes(&ledger), waits_for(&ledger)), (2 * BYTES, Some(Memory::Bytes(2 * BYTES))));
        assert_eq!(ledger.leases[0].suspension.as_ref().unwrap().since_ms, since);
        assert_eq!(ledger.begin_adding(&id, me(), new(7)), Err(WrongState::Suspended));

        // One that was ended needs no room.
        ledger.begin_adding(&id, me(), new(8)).unwrap();
        ledger.leases[0].suspension.as_mut().unwrap().owner = dead();
        assert_eq!(ledger.begin_resuming(&id, me(), None), Err(WrongState::CutShort));
        assert_eq!(ledger.take_over(&id, me()).unwrap().processes.last(), Some(&new(8)));
        assert!(ledger.end_adding(&id, me(), false));
        assert_eq!((bytes(&ledger), waits_for(&ledger)), (2 * BYTES, Some(Memory::Bytes(2 * BYTES))));
        assert_eq!(ledger.waiters.len(), 1);
        ledger.begin_resuming(&id, me(), None).unwrap();
    }

    #[test]
    fn a_process_that_has_ended_while_it_is_suspended_needs_no_room_and_stays_known() {
        let (mut ledger, id) = ledger();
        let alive = SuspendedProcess { process: me(), bytes: 7 };
        ledger.begin_suspending(&id, me(), [held(BYTES), vec![alive]].concat(), None).unwrap();
        let bytes = |ledger: &mut Ledger| {
            ledger.forget_ended();
            let own = ledger.leases[0].suspension.as_ref().unwrap();
            assert!(own.has(dead()) && own.has(me()));
            own.bytes()
        };
        assert_eq!(bytes(&mut ledger), BYTES + 7, "a step keeps what it began with");
        ledger.note_on_demand(&id);
        ledger.end_suspended(&id, me());
        let waits_for = |ledger: &Ledger| ledger.waiters[0].request().unwrap().memory;
        assert_eq!(waits_for(&ledger), Some(Memory::Bytes(BYTES + MIB)));
        assert_eq!(bytes(&mut ledger), 7);
        assert_eq!(waits_for(&ledger), Some(Memory::Bytes(BYTES / 2)), "what its share books");
        ledger.begin_resuming(&id, me(), None).unwrap();
        assert_eq!(ledger.leases[0].booked_memory(), Some(BYTES / 2));
    }

    #[test]
    fn one_that_was_ended_stays_known_where_later_ones_may_share_its_memory() {
        let number = |suspend, times| {
            let (mut ledger, id) = ledger();
            ledger.leases[0].suspend = suspend;
            ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
            ledger.end_suspended(&id, me());
            for pid in 0..times {
                let new = SuspendedProcess { process: Process { pid, start_time: 1 }, bytes: BYTES };
                ledger.begin_adding(&id, me(), new).unwrap();
                assert!(ledger.end_adding(&id, me(), false));
            }
            let own = ledger.leases[0].suspension.clone().unwrap();
            assert_eq!(own.bytes(), BYTES);
            own.processes.len()
        };
        assert_eq!((number(Suspend::Allow, 1), number(Suspend::Allow, 9)), (2, 2));
        assert_eq!(number(Suspend::AllowMany, 9), 1);
    }

    #[test]
    fn a_delete_that_fails_leaves_it_suspended() {
        let (mut ledger, id) = ledger();
        ledger.begin_suspending(&id, me(), held(BYTES), None).unwrap();
        ledger.end_suspended(&id, me());
        let before = ledger.clone();
        ledger.leases[0].init =
            Some(super::super::Init { process: me(), pid_namespace: 0, cgroup: None, cgroup_inode: None });
        ledger.mark_deleted(&id, me());
        assert_eq!(ledger.leases[0].shown_state(), LeaseState::Ending);
        assert_eq!(ledger.begin_resuming(&id, me(), None), Err(WrongState::Ending));
        assert!(ledger.leases[0].is_suspended(), "its room is another's meanwhile");
        ledger.unmark_ending(&id);
        assert_eq!(ledger.leases[0].suspension, before.leases[0].suspension);
        assert_eq!(ledger.leases[0].shown_state(), LeaseState::Suspended);
    }

    #[test]
    fn only_a_step_that_nobody_takes_any_more_is_taken_over_and_once() {
        let (mut ledger, id) = ledger();
        let parent = Process::find(me().parent().unwrap()).unwrap();
        assert_eq!(ledger.take_over(&id, me()), None);
        ledger.begin_suspending(&id, parent, vec![], None).unwrap();
        assert_eq!((ledger.cut_short(me()).count(), ledger.take_over(&id, me())), (0, None));
        ledger.leases[0].suspension.as_mut().unwrap().owner = dead();
        assert_eq!(ledger.cut_short(me()).count(), 1);
        assert_eq!(ledger.take_over(&id, parent).unwrap().owner, parent);
        assert_eq!(ledger.take_over(&id, me()), None);
        ledger.leave_step(&id, parent);
        assert_eq!(ledger.begin_resuming(&id, me(), None), Err(WrongState::CutShort));
        assert_eq!(ledger.take_over(&id, me()).unwrap().owner, me());
        // How that ended was not written down, as on a full disk.
        assert_eq!((ledger.cut_short(parent).count(), ledger.cut_short(me()).count()), (0, 1));
        assert_eq!(ledger.take_over(&id, me()).unwrap().owner, me());
    }

    proptest! {
        /// Whoever calls what, in any order: a state on its way back has its room, and one that is out has none.
        #[test]
        fn no_order_of_calls_lets_a_state_come_back_without_room(
            calls in prop::collection::vec((0_u8..13, prop::bool::ANY), 1..40),
        ) {
            let (mut ledger, id) = ledger();
            for (call, mine) in calls {
                let owner = if mine { me() } else { dead() };
                match call {
                    0 => _ = ledger.begin_suspending(&id, owner, held(BYTES), None),
                    1 => _ = ledger.end_suspended(&id, owner),
                    2 => _ = ledger.begin_resuming(&id, owner, None),
                    3 => _ = ledger.end_resumed(&id, owner, if mine { "GPU-0" } else { "GPU-1" }),
                    4 => _ = ledger.take_over(&id, owner),
                    5 => ledger.mark_deleted(&id, owner),
                    6 => ledger.unmark_ending(&id),
                    7 => _ = ledger.begin_suspending(&id, owner, held(BYTES), Some("GPU-1")),
                    8 => _ = ledger.begin_restoring(&id, owner),
                    9 => _ = ledger.begin_resuming(&id, owner, Some("GPU-1")),
                    10 => _ = ledger.begin_adding(&id, owner, SuspendedProcess { process: me(), bytes: 0 }),
                    11 => _ = ledger.end_adding(&id, owner, mine),
                    _ => ledger.leases[0].state = LeaseState::Active,
                }
                let lease = &ledger.leases[0];
                let expected = match lease.suspension.as_ref().map(|own| own.step) {
                    None => Some(BYTES / 2),
                    Some(SuspendStep::Suspended | SuspendStep::Adding) => None,
                    Some(_) => Some(BYTES),
                };
                prop_assert_eq!(lease.booked_memory(), expected);
                let moves = lease.suspension.is_some() && !lease.is_suspended();
                prop_assert!(lease.devices.len() == 1 || lease.devices.len() == 2 && moves);
            }
        }
    }
}
