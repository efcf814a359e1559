//! Any process may be killed between any two steps.

use super::{Actor, Pc, State, Step, Turn};
use crate::ledger::DEVICES;

impl Turn<'_> {
    pub(super) fn crashes(&mut self) {
        let model = self.model;
        if self.before.crashes == 0 {
            return;
        }
        for container in 0..self.model.shares.len() {
            self.kill_if(self.before.shims[container], Actor::Shim(container), "the shim is killed");
            self.kill_if(
                self.before.deletes[container],
                Actor::Delete(container),
                "the shim that deletes is killed",
            );
        }
        self.kill_if(self.before.command, Actor::Command, "the command is killed");
        self.kill_if(self.before.serve, Actor::Serve, "serve is killed");
        for device in 0..self.model.devices {
            if self.before.locks[device].is_some_and(|holder| !holder.own) {
                self.crash(Actor::Holder(device), "who holds the daemon's lock is killed", |state| {
                    state.unlock(model, device, false);
                });
            }
            if self.before.gpus[device].daemon.is_some() {
                self.crash(Actor::Daemon(device), "the daemon is killed", |state| state.lose(device));
            }
        }
    }

    fn kill_if(&mut self, pc: Pc, who: Actor, what: &'static str) {
        if pc == Pc::Off {
            return;
        }
        self.crash(who, what, |state| {
            *state.pc(who) = Pc::Off;
            if let Actor::Shim(container) = who {
                state.excused[container] = false;
            }
            for device in 0..DEVICES {
                let Some(holder) = &mut state.locks[device] else { continue };
                if holder.by != Some(who) {
                    continue;
                }
                // `sublet mps start` and the like go on without it.
                if holder.own {
                    state.locks[device] = None;
                } else {
                    holder.by = None;
                }
            }
        });
    }

    fn crash(&mut self, who: Actor, what: &'static str, change: impl FnOnce(&mut State)) {
        let mut after = State { alone: false, ..*self.before };
        if after.crashes != u8::MAX {
            after.crashes -= 1;
        }
        change(&mut after);
        self.found.push((Step { who, what, call: None, crash: true }, after));
    }
}

impl State {
    fn lose(&mut self, device: usize) {
        self.gpus[device].daemon = None;
        self.gpus[device].lost |= self.is_up(device);
        let on = |lease: Option<crate::ledger::Lease>| {
            lease.is_some_and(|lease| usize::from(lease.device) == device)
        };
        for (container, pc) in self.shims.iter().enumerate() {
            self.excused[container] |= *pc == Pc::RuntimeCreates && on(self.ledger.leases[container]);
        }
    }
}
