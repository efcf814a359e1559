//! The shims that create and delete containers, and the next command: `take_lease`, `dynamic_mig`, `reconcile`.

use super::{COMMAND, CONTAINERS, Call, PLACES, Pc, State, Turn};
use crate::Mutation;
use crate::ledger::Life;

impl Turn<'_> {
    pub(super) fn shim(&mut self, container: usize) {
        match self.before.pcs[container] {
            Pc::Off if !self.before.asked[container] => self.step("create", container, false, |state| {
                state.asked[container] = true;
                state.pcs[container] = Pc::Look { made: false };
            }),
            Pc::Look { made } => self.step("look: the inventory", container, false, |state| {
                let seen = state.driver.map(|compute| compute == Some(true));
                state.pcs[container] = Pc::Take { made, seen, fresh: true };
            }),
            Pc::Take { made, seen, fresh } => self.take(container, made, seen, fresh),
            Pc::Make => self.has_room(container),
            Pc::Raise { order } => self.raise(container, order),
            Pc::GiveUp => self.give_up(container),
            Pc::RuntimeCreates => self.step("the runtime creates the container", container, false, |state| {
                (state.lives[container], state.pcs[container]) = (Life::Running, Pc::Created);
            }),
            Pc::Created => {
                self.step("the runtime ends", container, false, |state| state.pcs[container] = Pc::Off);
            }
            Pc::Clear => self.clear(container),
            Pc::Off | Pc::Waits => {}
        }
        if self.before.lives[container] == Life::Running {
            self.step("the container ends", container, false, |state| state.lives[container] = Life::Gone);
        }
    }

    fn take(&mut self, container: usize, made: bool, seen: [bool; PLACES], fresh: bool) {
        let (mutation, waits) = (self.model.mutation, self.model.waiter == Some(container));
        // What is decided under the ledger's lock, is decided after the reclaim.
        let mut ledger = self.before.ledger;
        let outdated = ledger.reclaim(self.before.seen(), mutation);
        if (!fresh || outdated) && mutation != Some(Mutation::TrustOldInventory) {
            self.call("look: LayoutChanged", container, false, Call::LayoutChanged(container), |state| {
                state.pcs[container] = Pc::Look { made };
            });
            return;
        }
        let is_free = |place: &usize| {
            seen[*place] && !ledger.is_leased(*place) && !ledger.is_kept_from(container, *place, mutation)
        };
        let free: Vec<usize> = (0..PLACES).filter(is_free).collect();
        for place in &free {
            let call = Call::Take { container, place: *place };
            self.call("take_lease", container, false, call, |state| {
                state.pcs[container] = Pc::RuntimeCreates;
            });
        }
        if free.is_empty() {
            self.call("look: no MIG device", container, false, Call::TakeNone(container), |state| {
                state.pcs[container] = match made {
                    false => Pc::Make,
                    true if waits => Pc::Look { made },
                    true => Pc::GiveUp,
                };
            });
        }
    }

    /// `give_up`: looks whether anything is kept for the lease. Only its own `mig make`, which has ended, keeps something.
    fn give_up(&mut self, container: usize) {
        if !self.before.ledger.is_kept_for(container) {
            self.step("give_up: nothing is kept", container, false, |state| state.pcs[container] = Pc::Off);
            return;
        }
        self.call("give_up", container, false, Call::AwaitNoMore(container), |state| {
            state.pcs[container] = Pc::Clear;
        });
    }

    /// `State::end` of a container that has ended, and then `destroy_unneeded`.
    pub(super) fn delete(&mut self, container: usize) {
        let who = CONTAINERS + container;
        let ended = self.before.lives[container] == Life::Gone && self.before.pcs[container] == Pc::Off;
        match self.before.pcs[who] {
            Pc::Off if ended && self.before.ledger.leases[container].is_some() => {
                self.call("end", who, false, Call::Remove(container), |state| state.pcs[who] = Pc::Clear);
            }
            pc => self.clearing(who, pc),
        }
    }

    pub(super) fn command(&mut self) {
        match self.before.pcs[COMMAND] {
            Pc::Off => {
                let alone = self.before.is_quiet();
                self.call("reconcile", COMMAND, true, Call::Reclaim, |state| {
                    (state.alone, state.pcs[COMMAND]) = (alone, Pc::Clear);
                });
            }
            pc => self.clearing(COMMAND, pc),
        }
    }

    fn clearing(&mut self, who: usize, pc: Pc) {
        match pc {
            Pc::Clear => self.clear(who),
            Pc::Raise { order } => self.raise(who, order),
            _ => {}
        }
    }

    fn clear(&mut self, who: usize) {
        let unneeded = self.before.ledger.has_unneeded(self.model.mutation);
        let what = if unneeded { "destroy_unneeded" } else { "nothing is to be destroyed" };
        self.step(what, who, who == COMMAND, |state| {
            if unneeded {
                state.pcs[who] = Pc::Raise { order: None };
            } else {
                state.ended(who, None, None);
            }
        });
    }
}

impl State {
    /// `who` no longer waits for a change. After `mig make` a shim looks again, and only the waiter if that failed.
    pub(super) fn ended(&mut self, who: usize, made: Option<bool>, waiter: Option<usize>) {
        self.pcs[who] = match made {
            Some(false) if waiter != Some(who) => Pc::GiveUp,
            Some(made) => Pc::Look { made },
            None => Pc::Off,
        };
        if who == COMMAND && self.alone {
            self.wrong = self.unsettled().or(self.wrong);
            self.alone = false;
        }
    }
}
