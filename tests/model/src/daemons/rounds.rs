//! `mps::settle` and `mps::heal`, `sublet serve` and the next command, and how they get a daemon's lock.

use super::errands::At;
use super::{Actor, After, Daemons, Errand, Holder, Pc, State, Then, Turn, invariants};
use crate::Mutation;
use crate::ledger::Call;

impl Turn<'_> {
    /// `Local::reconcile`.
    pub(super) fn command(&mut self) {
        let (who, model) = (Actor::Command, self.model);
        match self.before.command {
            Pc::Off => {
                let alone = self.before.is_quiet();
                self.call(who, "reconcile", Call::Reclaim, |state, _| {
                    state.alone = alone;
                    state.round(model, who, 0, true, Then::Off);
                });
                // A command that finds nothing to do changes nothing.
                if self.found.last().is_some_and(|(_, after)| after == self.before) {
                    self.found.pop();
                }
            }
            pc => self.work(who, pc),
        }
    }

    /// `sublet serve`.
    pub(super) fn serve(&mut self) {
        let (who, model) = (Actor::Serve, self.model);
        match self.before.serve {
            Pc::Off => self.call(who, "keep", Call::Keep, |state, _| {
                state.serve = Pc::Idle;
                state.round(model, who, 0, true, Then::Idle);
            }),
            Pc::Idle => {
                self.call(who, "reclaim", Call::Reclaim, |state, _| {
                    state.round(model, who, 0, true, Then::Idle);
                });
                self.call(who, "keep_no_more", Call::KeepNoMore, |state, _| {
                    state.round(model, who, 0, false, Then::Off);
                });
            }
            pc => self.work(who, pc),
        }
    }

    /// The steps that all processes have in common.
    pub(super) fn work(&mut self, who: Actor, pc: Pc) {
        match pc {
            // Its time may be over, or not.
            Pc::Round { device, heal, then } => {
                let (changed, model) = (self.before.ledger.compute_modes[device], self.model);
                let after = After::Round { heal, then };
                let wants = |errand| Pc::Wants { device, errand, after };
                self.step(who, "its idle time is over", |state| *state.pc(who) = wants(Errand::Stop));
                self.step(who, "it waits", |state| {
                    if changed {
                        *state.pc(who) = wants(Errand::Rest);
                    } else {
                        state.round(model, who, device + 1, heal, then);
                    }
                });
            }
            Pc::Wants { device, errand, after } => self.lock(who, device, errand, after),
            _ => {}
        }
    }

    /// Takes the daemon's lock, and takes the first step under it. Who does not get it in time gives up.
    fn lock(&mut self, who: Actor, device: usize, errand: Errand, after: After) {
        let model = self.model;
        if self.before.locks[device].is_some() {
            self.step(who, "the daemon's lock is not free in time", |state| {
                state.resume(model, who, device, after, false);
            });
            return;
        }
        let at = match errand {
            Errand::Start => At::ServesAlready,
            Errand::Stop => At::ClaimStop { start: None },
            Errand::Rest => At::LeaveMode { start: None },
            Errand::Adjust if after == After::MakeReady => At::ServesStill,
            Errand::Adjust => At::AdjustBegin,
        };
        let mut locked = self.still(who);
        *locked.pc(who) = Pc::Waits { device, after };
        locked.locks[device] = Some(Holder { by: Some(who), own: errand == Errand::Adjust, at });
        Turn { model, before: &locked, found: self.found }.hold(device);
    }
}

impl State {
    /// The errand of `who` has ended, well or not.
    pub(super) fn resume(&mut self, model: &Daemons, who: Actor, device: usize, after: After, well: bool) {
        // `make_ready` looks whether somebody listens on the socket.
        let listens = self.gpus[device].daemon.is_some();
        *self.pc(who) = match after {
            After::Round { heal, then } => return self.round(model, who, device + 1, heal, then),
            After::MakeWay if well => Pc::MadeWay,
            After::MakeReady if well && listens => Pc::RuntimeCreates,
            After::MakeWay | After::MakeReady => Pc::GiveBack,
        };
    }

    /// `settle` or `heal` looks at the ledger, without its lock, and goes on from `device` to the first for which
    /// something is due. Not before it has the daemon's lock does it do that.
    pub(super) fn round(&mut self, model: &Daemons, who: Actor, device: usize, heal: bool, then: Then) {
        let after = After::Round { heal, then };
        for device in device..model.devices {
            *self.pc(who) = match self.due(model, device, heal) {
                Due::Nothing => continue,
                Due::Errand(errand) => Pc::Wants { device, errand, after },
                Due::Waits => Pc::Round { device, heal, then },
            };
            return;
        }
        match (who, then) {
            (Actor::Shim(container), Then::MakeWay) => self.end_conflicting(model, container),
            (_, Then::Idle) => *self.pc(who) = Pc::Idle,
            (_, Then::Look) => *self.pc(who) = Pc::Look,
            (_, Then::Off | Then::MakeWay) => *self.pc(who) = Pc::Off,
        }
        if who == Actor::Command && self.alone {
            self.wrong = invariants::unsettled(model, self).or(self.wrong);
            self.alone = false;
        }
    }

    fn due(&self, model: &Daemons, device: usize, heal: bool) -> Due {
        let changed = self.ledger.compute_modes[device];
        match (self.ledger.wanted(device, &model.shares), self.ledger.daemons[device]) {
            (Some(wanted), Some(daemon)) if self.serves(device) => {
                let lower = model.mutation != Some(Mutation::NeverLower);
                let settled = daemon.limits == wanted && daemon.answered;
                if settled || !lower { Due::Nothing } else { Due::Errand(Errand::Adjust) }
            }
            (Some(_), Some(_)) if heal && model.mutation != Some(Mutation::NeverHeal) => {
                Due::Errand(Errand::Start)
            }
            (None, Some(_)) if self.waits(device, model) => Due::Waits,
            (None, recorded) if recorded.is_some() || changed => Due::Errand(Errand::Stop),
            _ => Due::Nothing,
        }
    }
}

/// What is due for a device.
enum Due {
    Nothing,
    Errand(Errand),
    /// Its daemon waits for the next lease, unless its time is over.
    Waits,
}
