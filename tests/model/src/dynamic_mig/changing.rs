//! `sublet mig make` and `sublet mig clear`: the fence, and `Making` behind it.

use super::{COMMAND, Call, DynamicInstance, PLACES, Pc, State, Turn};
use crate::Mutation;

/// What `sublet mig make` and `clear` do next, at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "named as the steps")]
pub enum At {
    Mark,
    Choose,
    Create(usize),
    NoteGi(usize),
    CreateCompute(usize),
    NoteUuid(usize),
    Unmake(usize),
    DestroyCompute(usize),
    DestroyInstance(usize),
    Forget(usize),
    End,
    /// It ends without an instance.
    Fail,
}

/// The process that changes instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Change {
    /// The process that waits for it; `None`: it was killed.
    pub by: Option<usize>,
    /// `mig make`, for this container.
    pub order: Option<usize>,
    /// `Making::touched`.
    pub touched: bool,
    /// What it does next.
    pub at: At,
}

impl Turn<'_> {
    /// `has_room`, before the fence: if there is none, other commands need not wait. It looks without the ledger's lock.
    pub(super) fn has_room(&mut self, container: usize) {
        let (waiter, mutation) = (self.model.waiter, self.model.mutation);
        let mut ledger = self.before.ledger;
        ledger.stop_awaiting(container);
        let may_change = ledger.has_unneeded(mutation) || ledger.under_way;
        let has_room = may_change || self.before.driver.contains(&None);
        let what = if has_room { "has_room" } else { "has_room: NotMade" };
        self.step(what, container, false, |state| {
            if has_room {
                state.pcs[container] = Pc::Raise { order: Some(container) };
            } else {
                state.ended(container, Some(false), waiter);
            }
        });
    }

    /// `Fence::raise`, which waits for other changes, for a while.
    pub(super) fn raise(&mut self, who: usize, order: Option<usize>) {
        let waiter = self.model.waiter;
        if self.before.change.is_some() {
            self.call("another change takes too long", who, false, Call::MigBusy, |state| {
                state.ended(who, order.map(|_| false), waiter);
            });
            return;
        }
        self.call("begin_mig", who, who == COMMAND, Call::BeginMig, |state| {
            state.change = Some(Change { by: Some(who), order, touched: false, at: At::Mark });
            state.pcs[who] = Pc::Waits;
        });
    }

    /// The next step of `sublet mig make` or `clear`.
    pub(super) fn change(&mut self) {
        let Some(Change { by, order, touched, at }) = self.before.change else { return };
        let of_command = by == Some(COMMAND);
        match at {
            At::Mark => {
                let call = Call::MarkUnneeded(order);
                self.call("mark_unneeded_for_removal", 0, of_command, call, |state| {
                    state.at(state.next_going(0, order));
                });
            }
            At::Choose => self.choose(of_command, order),
            At::Create(_) | At::NoteGi(_) | At::CreateCompute(_) | At::NoteUuid(_) => {
                self.make(of_command, at, order);
            }
            At::Unmake(_) | At::DestroyCompute(_) | At::DestroyInstance(_) | At::Forget(_) => {
                self.unmake(of_command, at, order);
            }
            At::End | At::Fail => {
                let waiter = self.model.waiter;
                self.call("end_mig", 0, of_command, Call::EndMig { changed: touched }, |state| {
                    state.change = None;
                    if let Some(who) = by {
                        state.ended(who, order.map(|_| at == At::End), waiter);
                    }
                });
            }
        }
    }

    /// The place for an instance, which is recorded before the driver creates anything.
    fn choose(&mut self, of_command: bool, awaited: Option<usize>) {
        let late = self.model.mutation == Some(Mutation::RecordAfterCreate);
        let free = |place: &usize| self.before.driver[*place].is_none();
        let free: Vec<usize> = (0..PLACES).filter(free).collect();
        for place in &free {
            let next = |state: &mut State| state.touched(At::Create(*place));
            if late {
                self.step("nothing is recorded", *place, of_command, next);
            } else {
                let call = Call::Record { place: *place, awaited };
                self.call("the instance is recorded", *place, of_command, call, next);
            }
        }
        if free.is_empty() {
            self.call("NotMade", 0, of_command, Call::Reclaim, |state| state.at(At::Fail));
        }
    }

    /// `Making::steps`.
    fn make(&mut self, of_command: bool, at: At, awaited: Option<usize>) {
        match at {
            At::Create(place) => self.step("create_instance", place, of_command, |state| {
                state.driver[place] = Some(false);
                state.at(At::NoteGi(place));
            }),
            // `RecordAfterCreate`.
            At::NoteGi(place) if self.before.ledger.instances[place].is_none() => {
                let call = Call::Record { place, awaited };
                self.call("the instance is recorded", place, of_command, call, |_| {});
            }
            At::NoteGi(place) => self.call("gi is noted", place, of_command, Call::NoteGi(place), |state| {
                state.at(At::CreateCompute(place));
            }),
            At::CreateCompute(place) => self.step("create_compute", place, of_command, |state| {
                state.driver[place] = Some(true);
                state.at(At::NoteUuid(place));
            }),
            At::NoteUuid(place) => {
                self.call("uuid is noted", place, of_command, Call::NoteUuid(place), |state| {
                    state.at(At::End);
                });
            }
            _ => {}
        }
    }

    /// `Making::unmake`.
    fn unmake(&mut self, of_command: bool, at: At, order: Option<usize>) {
        match at {
            At::Unmake(place) => self.look_at_it(of_command, place),
            At::DestroyCompute(place) => self.step("destroy_compute", place, of_command, |state| {
                state.driver[place] = Some(false);
                state.at(At::DestroyInstance(place));
            }),
            At::DestroyInstance(place) => self.step("destroy_instance", place, of_command, |state| {
                state.driver[place] = None;
                state.at(At::Forget(place));
            }),
            At::Forget(place) => {
                self.call("forget_destroyed", place, of_command, Call::ForgetDestroyed(place), |state| {
                    state.touched(state.next_going(place + 1, order));
                });
            }
            _ => {}
        }
    }

    /// `Making::destroy` finds the instance, and records what it has found.
    fn look_at_it(&mut self, of_command: bool, place: usize) {
        let early = self.model.mutation == Some(Mutation::ForgetBeforeDestroy);
        let ours = self.before.ledger.instances[place]
            .zip(self.before.driver[place])
            .filter(|(instance, compute)| is_recorded_instance(*instance, *compute));
        let Some((_, compute)) = ours else {
            self.call("nothing of ours is there", place, of_command, Call::NoteGoing(place), |state| {
                state.at(At::Forget(place));
            });
            return;
        };
        let call = Call::NoteSeen { place, compute };
        self.call("what is there is recorded", place, of_command, call, |state| {
            if early {
                state.ledger.instances[place] = None;
            }
            state.at(if compute { At::DestroyCompute(place) } else { At::DestroyInstance(place) });
        });
    }
}

impl State {
    pub(super) fn at(&mut self, at: At) {
        if let Some(change) = &mut self.change {
            change.at = at;
        }
    }

    /// An instance was created or destroyed.
    fn touched(&mut self, at: At) {
        if let Some(change) = &mut self.change {
            (change.touched, change.at) = (true, at);
        }
    }

    /// The next place that is to be destroyed, or what comes after that.
    fn next_going(&self, from: usize, order: Option<usize>) -> At {
        let is_going = |place: &usize| self.ledger.instances[*place].is_some_and(|instance| instance.going);
        let going = (from..PLACES).find(is_going);
        going.map_or(if order.is_some() { At::Choose } else { At::End }, At::Unmake)
    }
}

/// `making_instances::is_recorded_instance`, where only sublet creates instances.
const fn is_recorded_instance(instance: DynamicInstance, compute: bool) -> bool {
    match (compute, instance.uuid, instance.gi) {
        (false, uuid, _) => !uuid || instance.emptied,
        (true, true, _) => true,
        (true, false, gi) => gi && !instance.emptied,
    }
}
