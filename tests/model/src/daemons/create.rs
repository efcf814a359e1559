//! The shim that creates a container: `admit::take_lease`, `mps::end_conflicting`, `mps::make_ready`, the runtime.

use super::{Actor, After, Daemons, Errand, Pc, State, Then, Turn};
use crate::Mutation;
use crate::ledger::{Call, DEVICES, Ledger, Life, Limits, fits};

impl Turn<'_> {
    pub(super) fn create(&mut self, container: usize) {
        let who = Actor::Shim(container);
        match self.before.shims[container] {
            Pc::Off if !self.before.asked[container] => self.look(container),
            Pc::Look if self.model.mutation == Some(Mutation::LookOnce) => {}
            Pc::Look if self.model.order && self.before.ledger.waiting[container] == 0 => {
                self.call(who, "note_waiter", Call::Wait(container), |_, _| {});
            }
            Pc::Look => self.look(container),
            Pc::MadeWay => self.made_way(container),
            Pc::MakeReady => self.make_ready(container),
            Pc::RuntimeCreates => self.runtime_creates(container),
            Pc::Created => self.step(who, "the runtime has created it, and ends", |state| {
                (state.shims[container], state.excused[container]) = (Pc::Off, false);
            }),
            Pc::GiveBack => {
                let model = self.model;
                self.call(who, "give_back", Call::Remove(container), |state, _| {
                    state.round(model, who, 0, false, Then::Off);
                });
            }
            pc => self.work(who, pc),
        }
    }

    /// `Search::look`: the device is chosen under the ledger's lock. The model tries each.
    fn look(&mut self, container: usize) {
        let (who, model) = (Actor::Shim(container), self.model);
        let waits = model.waiters.contains(&container);
        let before = self.before.ledger.before(container);
        let mut booked = false;
        for device in 0..model.devices {
            self.call(who, "take_lease", Call::Take(container, device), |state, answer| {
                booked |= answer.done;
                if answer.done && state.has_passed_first(container, &before, model) {
                    state.wrong = Some("who waits longest is not passed while it could start");
                }
                state.asked[container] = true;
                if answer.freed == [false; DEVICES] {
                    state.end_conflicting(model, container);
                } else {
                    state.round(model, who, 0, false, Then::MakeWay);
                }
            });
            if self.found.last().is_some_and(|(step, _)| step.call.is_some_and(|(_, done)| !done)) {
                self.found.pop();
            }
        }
        if booked {
            return;
        }
        let starved = self.is_starved(container);
        self.call(who, "take_lease: no room", Call::TakeNone(container), |state, answer| {
            if starved {
                state.wrong = Some("a waiter gets the room that there is");
            }
            state.asked[container] = true;
            let then = if waits { Then::Look } else { Then::Off };
            if answer.freed == [false; DEVICES] {
                state.shims[container] = if waits { Pc::Look } else { Pc::Off };
            } else {
                state.round(model, who, 0, false, then);
            }
        });
        // Looking again in vain changes nothing.
        if self.found.last().is_some_and(|(_, after)| State { alone: after.alone, ..*self.before } == *after)
        {
            self.found.pop();
        }
    }

    /// Whether the containers that run leave room for `container`, and nothing else goes on.
    fn is_starved(&self, container: usize) -> bool {
        let mut others = *self.before;
        others.shims[container] = Pc::Off;
        let runs = |of: usize| matches!(self.before.lives[of], Life::Running | Life::FirstGone);
        let on = |device: usize| {
            (0..self.model.shares.len()).filter(move |of| {
                let lease = self.before.ledger.leases[*of];
                runs(*of) && lease.is_some_and(|lease| usize::from(lease.device) == device)
            })
        };
        let has_room = |device: usize| {
            fits(on(device).map(|of| self.model.shares[of]), self.model.shares[container], None)
        };
        others.is_quiet() && (0..self.model.devices).any(has_room)
    }

    fn made_way(&mut self, container: usize) {
        let Some(lease) = self.before.ledger.leases[container] else { return };
        let stays = self.before.ledger.daemons[usize::from(lease.device)].is_some();
        self.step(Actor::Shim(container), "end_conflicting: is it gone?", |state| {
            state.shims[container] = if stays { Pc::GiveBack } else { Pc::RuntimeCreates };
        });
    }

    /// `mps::make_ready`: `serve_if_running`, or else `sublet mps start`.
    fn make_ready(&mut self, container: usize) {
        let Some(lease) = self.before.ledger.leases[container] else { return };
        let device = usize::from(lease.device);
        let (before, mutation) = (self.before, self.model.mutation);
        let could_serve = before.ledger.daemons[device].filter(|daemon| {
            let stopping = mutation == Some(Mutation::TrustStopping) && before.is_alive(device);
            stopping || before.serves(device) && !daemon.mode_left
        });
        let needed = self.model.shares[container].limits();
        let next = could_serve.map_or(Some(Errand::Start), |daemon| {
            let known = if daemon.answered { daemon.limits } else { Limits::default() };
            let admits = known.admits(needed) || mutation == Some(Mutation::RaiseAfterStart);
            (!admits).then_some(Errand::Adjust)
        });
        self.step(Actor::Shim(container), "make_ready", |state| {
            state.shims[container] = next.map_or(Pc::RuntimeCreates, |errand| {
                let after = After::MakeReady;
                Pc::Wants { device, errand, after }
            });
        });
    }

    fn runtime_creates(&mut self, container: usize) {
        let wrong = self.unserved(container);
        self.step(Actor::Shim(container), "the runtime creates the container", |state| {
            (state.lives[container], state.records[container]) = (Life::Running, true);
            state.shims[container] = Pc::Created;
            state.wrong = wrong.or(state.wrong);
        });
    }

    /// What is wrong if the container starts now.
    fn unserved(&self, container: usize) -> Option<&'static str> {
        let share = self.model.shares[container];
        let Some(lease) = self.before.ledger.leases[container] else {
            return Some("a container starts with its lease in the ledger");
        };
        let gpu = self.before.gpus[usize::from(lease.device)];
        if !share.is_mps() {
            let alone = gpu.daemon.is_none() && !gpu.exclusive;
            return (!alone).then_some("an exclusive container starts with the daemon and its mode gone");
        }
        if self.before.excused[container] {
            return None;
        }
        match gpu.daemon {
            None => Some("a container starts with its daemon serving"),
            Some(limits) if !limits.admits(share.limits()) => {
                Some("a container starts with its limits in force")
            }
            Some(_) => None,
        }
    }
}

impl State {
    /// Whether the first of those `before` that still waits has no room any more, because `container` has its lease.
    fn has_passed_first(&self, container: usize, before: &[usize], model: &Daemons) -> bool {
        let Some(first) = before.iter().find(|other| self.ledger.waiting[**other] > 0) else { return false };
        let has_room = |ledger: &Ledger| {
            (0..model.devices).any(|on| ledger.has_room(model.shares[*first], on, &model.shares, None))
        };
        let mut without = self.ledger;
        without.leases[container] = None;
        has_room(&without) && !has_room(&self.ledger)
    }

    /// `Local::ready` begins: `end_conflicting` knows since the lease was taken which daemon is in its way.
    pub(super) fn end_conflicting(&mut self, model: &Daemons, container: usize) {
        self.shims[container] = match self.ledger.conflicting_daemons(container, &model.shares) {
            Some(device) => Pc::Wants { device, errand: Errand::Stop, after: After::MakeWay },
            None if model.shares[container].is_mps() => Pc::MakeReady,
            None => Pc::RuntimeCreates,
        };
    }
}
