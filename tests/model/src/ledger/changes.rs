//! The changes that the code makes to the ledger, each under one lock.

use super::{
    CONTAINERS, DEVICES, Daemon, DaemonState, Lease, LeaseState, Ledger, Life, Limits, Owner, Seen, Share,
};
use crate::Mutation;

/// A change of the ledger: one [`Ledger::call`] is one `Store::update`. Numbers are containers or devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `reclaim` of `ledger::liveness`.
    Reclaim,
    /// `take_lease`: the container's share on a device.
    Take(usize, usize),
    /// `take_lease` that finds no room on any device.
    TakeNone(usize),
    /// `Ledger::add_waiter`.
    Wait(usize),
    /// `Ledger::mark_ending`.
    MarkEnding(usize),
    /// `Ledger::unmark_ending`.
    UnmarkEnding(usize),
    /// `Ledger::remove`.
    Remove(usize),
    /// `mps start`: a lease needs the daemon, and it is recorded as starting.
    ClaimStart(usize),
    /// `mps start`: it serves, with these limits.
    NoteServing(usize, Limits),
    /// `mps start`: it could not be started.
    NoteDown(usize),
    /// `limits_and_state::note_answer`.
    NoteAnswer(usize),
    /// `mps stop`: no lease is left, and it is recorded as stopping.
    ClaimStop(usize),
    /// `mps stop`: the record is removed.
    ForgetDaemon(usize),
    /// `mps rest`: without a lease, the mode is left.
    LeaveMode(usize),
    /// `mps start`: the mode was set again under a daemon that waited.
    ModeEntered(usize),
    /// `compute_mode::enter`: the mode found is recorded.
    RecordMode(usize),
    /// `compute_mode::restore`: the record of it is removed.
    ForgetMode(usize),
    /// `limits_and_state::adjust` begins.
    AdjustBegin(usize),
    /// `limits_and_state::adjust` ends.
    AdjustEnd(usize, Limits),
    /// `mps::keep`.
    Keep,
    /// `mps::keep_no_more`.
    KeepNoMore,
}

/// What a call answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether it did what it says: there was room, a lease, a record, or something to do.
    pub done: bool,
    /// The devices on which leases were freed.
    pub freed: [bool; DEVICES],
}

impl Ledger {
    /// `Store::update`: reclaims, makes the change, notes which daemons are idle.
    pub fn call(
        &mut self,
        call: Call,
        seen: &Seen,
        (shares, devices): (&[Share], usize),
        mutation: Option<Mutation>,
    ) -> Answer {
        let looks = matches!(call, Call::Take(..) | Call::TakeNone(_))
            && mutation == Some(Mutation::LookWithoutReclaim);
        let mut freed = if looks { [false; DEVICES] } else { self.reclaim(seen, mutation) };
        let done = self.change(call, seen, (shares, devices), mutation, &mut freed);
        self.note_idle(shares);
        Answer { done, freed }
    }

    /// `ledger::liveness::reclaim`.
    fn reclaim(&mut self, seen: &Seen, mutation: Option<Mutation>) -> [bool; DEVICES] {
        let mut freed = [false; DEVICES];
        for container in 0..CONTAINERS {
            let Some(lease) = &mut self.leases[container] else { continue };
            let owned = match lease.owner {
                Owner::Shim => seen.shims[container],
                Owner::Delete => seen.deletes[container],
            };
            let life = match seen.lives[container] {
                Life::FirstGone if mutation == Some(Mutation::FreeBeforeEmpty) => Life::Gone,
                life => life,
            };
            let gone = match (lease.init, life) {
                (true, Life::Running) => {
                    if lease.state == LeaseState::Ending && !owned && seen.records[container] {
                        lease.state = LeaseState::Active;
                    }
                    false
                }
                (true, Life::FirstGone) => {
                    lease.state = LeaseState::Ending;
                    false
                }
                (false, _) if !seen.records[container] => !owned && life != Life::FirstGone,
                (false, Life::Running) => {
                    lease.init = true;
                    if lease.state == LeaseState::Pending {
                        lease.state = LeaseState::Active;
                    }
                    false
                }
                (false, _) if owned => false,
                (false, Life::FirstGone) => {
                    lease.init = true;
                    lease.state = LeaseState::Ending;
                    false
                }
                (_, Life::Never | Life::Gone) => true,
            };
            if gone {
                freed[usize::from(lease.device)] = true;
                self.leases[container] = None;
            }
        }
        for container in 0..CONTAINERS {
            if !seen.shims[container] && mutation != Some(Mutation::KeepDeadWaiters) {
                self.leave(container);
            }
        }
        freed
    }

    fn change(
        &mut self,
        call: Call,
        seen: &Seen,
        (shares, devices): (&[Share], usize),
        mutation: Option<Mutation>,
        freed: &mut [bool; DEVICES],
    ) -> bool {
        match call {
            Call::Reclaim => true,
            Call::Take(container, device) => {
                let books = mutation == Some(Mutation::BookWithoutLooking)
                    || self.may_take(container, device, (shares, devices), mutation);
                if books {
                    self.leave(container);
                    let device = u8::try_from(device).unwrap_or_default();
                    let (state, owner) = (LeaseState::Pending, Owner::Shim);
                    self.leases[container] = Some(Lease { device, state, owner, init: false });
                }
                books
            }
            Call::TakeNone(container) => {
                (0..devices).all(|device| !self.may_take(container, device, (shares, devices), mutation))
            }
            Call::Wait(container) => {
                self.waiting[container] = 1 + self.waiting.iter().max().copied().unwrap_or_default();
                true
            }
            Call::MarkEnding(container) => {
                let Some(lease) = &mut self.leases[container] else { return false };
                lease.state = LeaseState::Ending;
                if lease.init {
                    lease.owner = Owner::Delete;
                }
                true
            }
            Call::UnmarkEnding(container) => {
                let Some(lease) = &mut self.leases[container] else { return false };
                lease.state = if lease.init { LeaseState::Active } else { LeaseState::Pending };
                true
            }
            Call::Remove(container) => {
                let Some(lease) = self.leases[container].take() else { return false };
                freed[usize::from(lease.device)] = true;
                true
            }
            Call::ClaimStart(device) => self.claim_start(device, shares),
            Call::ClaimStop(device) => {
                if self.is_wanted(device, shares) && mutation != Some(Mutation::StopWithoutLooking) {
                    return false;
                }
                if let Some(daemon) = &mut self.daemons[device] {
                    daemon.state = DaemonState::Stopping;
                }
                true
            }
            Call::ForgetDaemon(device) => {
                self.daemons[device] = None;
                true
            }
            Call::RecordMode(device) => {
                self.compute_modes[device] = true;
                true
            }
            Call::ForgetMode(device) => {
                self.compute_modes[device] = false;
                true
            }
            Call::Keep => {
                self.keeper = true;
                true
            }
            Call::KeepNoMore => {
                self.keeper = false;
                true
            }
            Call::NoteServing(device, _)
            | Call::NoteDown(device)
            | Call::NoteAnswer(device)
            | Call::LeaveMode(device)
            | Call::ModeEntered(device)
            | Call::AdjustBegin(device)
            | Call::AdjustEnd(device, _) => self.note(call, device, seen, shares, mutation),
        }
    }

    /// There is room, and it is its turn.
    fn may_take(
        &self,
        container: usize,
        device: usize,
        of: (&[Share], usize),
        mutation: Option<Mutation>,
    ) -> bool {
        let before = self.before(container);
        self.has_room(of.0[container], device, of.0, mutation)
            && (before.is_empty()
                || mutation == Some(Mutation::PassWaiters)
                || self.is_turn_of(container, device, &before, of))
    }

    /// `mps_daemons::start::claim`.
    fn claim_start(&mut self, device: usize, shares: &[Share]) -> bool {
        if !self.is_wanted(device, shares) {
            return false;
        }
        self.daemons[device] = Some(Daemon {
            state: DaemonState::Starting,
            process: false,
            limits: Limits::default(),
            answered: false,
            idle: false,
            mode_left: false,
        });
        true
    }

    /// Changes of a daemon's record, if there is one.
    fn note(
        &mut self,
        call: Call,
        device: usize,
        seen: &Seen,
        shares: &[Share],
        mutation: Option<Mutation>,
    ) -> bool {
        let wanted = self.wanted(device, shares);
        let Some(daemon) = &mut self.daemons[device] else { return false };
        match call {
            Call::NoteServing(_, limits) => {
                (daemon.process, daemon.state) = (true, DaemonState::Serving);
                (daemon.limits, daemon.answered) = (limits, true);
            }
            Call::NoteDown(_) => (daemon.state, daemon.process) = (DaemonState::Down, false),
            Call::NoteAnswer(_) => daemon.state = DaemonState::Serving,
            Call::LeaveMode(_) if wanted.is_some() => return false,
            Call::LeaveMode(_) => daemon.mode_left = true,
            Call::ModeEntered(_) if wanted.is_none() => return false,
            Call::ModeEntered(_) => daemon.mode_left = false,
            Call::AdjustBegin(_) => {
                let Some(wanted) = wanted else { return false };
                let runs = daemon.state == DaemonState::Serving && daemon.process && seen.daemons[device];
                if !runs && mutation != Some(Mutation::AdjustAnyRecord) {
                    return false;
                }
                if daemon.limits == wanted && daemon.answered && daemon.state == DaemonState::Serving {
                    return false;
                }
                let recorded = if mutation == Some(Mutation::RecordBeforeAdjust) {
                    wanted
                } else {
                    daemon.limits.and(wanted)
                };
                (daemon.limits, daemon.answered) = (recorded, false);
            }
            Call::AdjustEnd(_, limits) => {
                (daemon.limits, daemon.answered, daemon.state) = (limits, true, DaemonState::Serving);
            }
            _ => {}
        }
        true
    }

    /// `Ledger::note_idle`.
    fn note_idle(&mut self, shares: &[Share]) {
        for device in 0..DEVICES {
            let idle = !self.is_wanted(device, shares);
            let Some(daemon) = &mut self.daemons[device] else { continue };
            if idle && !daemon.idle {
                (daemon.idle, daemon.mode_left) = (true, true);
            } else if !idle {
                daemon.idle = false;
            }
        }
    }
}
