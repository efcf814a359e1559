//! A container's end, and the shim that deletes it.

use super::{Actor, Pc, Then, Turn};
use crate::Mutation;
use crate::ledger::{Call, Life};

impl Turn<'_> {
    /// The container's processes end.
    pub(super) fn live(&mut self, container: usize) {
        let who = Actor::Container(container);
        let life = self.before.lives[container];
        if life == Life::Running && self.model.children {
            self.step(who, "its first process ends", |state| state.lives[container] = Life::FirstGone);
        }
        if matches!(life, Life::Running | Life::FirstGone) {
            self.step(who, "its last process ends", |state| state.lives[container] = Life::Gone);
        }
    }

    pub(super) fn delete(&mut self, container: usize) {
        let who = Actor::Delete(container);
        let (life, shim) = (self.before.lives[container], self.before.shims[container]);
        match self.before.deletes[container] {
            Pc::Off if !self.before.records[container] || shim != Pc::Off => {}
            Pc::Off => self.call(who, "mark_ending", Call::MarkEnding(container), |state, answer| {
                // Without a lease the call is passed on. Who freed it tidies up, or the next command does.
                if answer.done {
                    state.deletes[container] = Pc::RuntimeDeletes;
                } else {
                    state.deletes[container] = Pc::Off;
                    state.records[container] &= life != Life::Gone;
                }
            }),
            Pc::RuntimeDeletes if life == Life::Running => {
                self.step(who, "the runtime refuses to delete it", |state| {
                    state.deletes[container] = Pc::UnmarkEnding;
                });
            }
            Pc::RuntimeDeletes => self.step(who, "the runtime deletes the container", |state| {
                (state.records[container], state.deletes[container]) = (false, Pc::End);
            }),
            Pc::UnmarkEnding => self.call(who, "unmark_ending", Call::UnmarkEnding(container), |state, _| {
                state.deletes[container] = Pc::Off;
            }),
            Pc::End => self.end(container),
            pc => self.work(who, pc),
        }
    }

    /// `State::end`: waits until the cgroup is empty, for a while.
    fn end(&mut self, container: usize) {
        let who = Actor::Delete(container);
        let full = self.before.lives[container] == Life::FirstGone;
        if self.before.ledger.leases[container].is_none() {
            self.step(who, "end: it is free already", |state| state.deletes[container] = Pc::Off);
        } else if full && self.model.mutation != Some(Mutation::FreeBeforeEmpty) {
            self.step(who, "end: StillRunning", |state| state.deletes[container] = Pc::Off);
        } else {
            let model = self.model;
            self.call(who, "end", Call::Remove(container), |state, _| {
                state.round(model, who, 0, false, Then::Off);
            });
        }
    }
}
