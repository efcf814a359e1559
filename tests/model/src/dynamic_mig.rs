//! Dynamic MIG: `sublet mig make` creates an instance for a container that finds none, `sublet mig clear` destroys those
//! that no lease needs. Three containers, two places on one GPU.

use crate::Mutation;
use crate::checker::Model;
use crate::ledger::Life;

/// Containers.
const CONTAINERS: usize = 3;
/// Places for instances.
const PLACES: usize = 2;

/// What the model starts with.
#[derive(Clone, Copy, Debug)]
pub struct DynamicMig {
    /// How many containers there are.
    pub containers: usize,
    /// The container with `sublet.wait`. The others are refused if there is no room.
    pub waiter: Option<usize>,
    /// How many crashes there may be; [`u8::MAX`]: any number.
    pub crashes: u8,
    /// The broken step.
    pub mutation: Option<Mutation>,
}

/// `ledger::DynamicInstance` at one place.
#[expect(clippy::struct_excessive_bools, reason = "so many are in the ledger")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DynamicInstance {
    gi: bool,
    uuid: bool,
    /// The container for which it is kept.
    awaited: Option<usize>,
    going: bool,
    emptied: bool,
}

/// What a shim, a delete or a command does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pc {
    /// It does not run.
    Off,
    /// `Search::look` reads the inventory.
    Look {
        /// Whether an instance was created for it.
        made: bool,
    },
    /// `Search::look` looks for a place among the MIG devices of that inventory.
    Take {
        /// Whether an instance was created for it.
        made: bool,
        /// The devices that were there.
        seen: [bool; PLACES],
        /// Whether `mig.count` still is that of the inventory.
        fresh: bool,
    },
    /// It wants `sublet mig make`.
    Make,
    /// It waits for `sublet mig make` or `clear`.
    Waits,
    /// `dynamic_mig::give_up`.
    GiveUp,
    /// The shim becomes the low-level runtime, which creates the container.
    RuntimeCreates,
    /// The low-level runtime ends.
    Created,
    /// `dynamic_mig::destroy_unneeded`.
    Clear,
}

/// What `sublet mig make` and `clear` do next, at a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum At {
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
    by: Option<usize>,
    /// `mig make`, for this container.
    order: Option<usize>,
    at: At,
}

/// Everything. Processes are numbered: shims, then deletes, then the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// The place on which each container has a lease.
    leases: [Option<usize>; CONTAINERS],
    /// `mig.made`.
    made: [Option<DynamicInstance>; PLACES],
    /// Whether `mig.under_way` is there.
    under_way: bool,
    /// In the driver: whether the GPU instance has a compute instance.
    driver: [Option<bool>; PLACES],
    pcs: [Pc; 2 * CONTAINERS + 1],
    change: Option<Change>,
    lives: [Life; CONTAINERS],
    asked: [bool; CONTAINERS],
    crashes: u8,
    alone: bool,
    wrong: Option<&'static str>,
}

/// The number of the next command.
const COMMAND: usize = 2 * CONTAINERS;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// In the code's words.
    pub what: &'static str,
    /// The container or the place.
    pub of: usize,
    /// Whether a process was killed.
    pub crash: bool,
}

struct Turn<'a> {
    model: &'a DynamicMig,
    before: &'a State,
    found: &'a mut Vec<(Step, State)>,
}

impl State {
    /// `Store::update`, before the change: ended containers, a dead process's change, dead waiters.
    fn reclaim(&mut self, mutation: Option<Mutation>) {
        for container in 0..CONTAINERS {
            let never = self.lives[container] == Life::Never && self.pcs[container] == Pc::Off;
            if never || self.lives[container] == Life::Gone {
                self.leases[container] = None;
            }
        }
        if self.under_way && self.change.is_none() {
            self.end_mig();
        }
        for made in self.made.iter_mut().flatten() {
            let dead = |container: &usize| self.pcs[*container] == Pc::Off;
            if mutation != Some(Mutation::AwaitDead) && made.awaited.as_ref().is_some_and(dead) {
                made.awaited = None;
            }
        }
    }

    /// `Ledger::end_mig`: earlier inventories are out of date.
    fn end_mig(&mut self) {
        self.under_way = false;
        self.outdate();
    }

    fn outdate(&mut self) {
        for pc in &mut self.pcs {
            if let Pc::Take { fresh, .. } = pc {
                *fresh = false;
            }
        }
    }

    /// `Ledger::needs`.
    fn needs(&self, place: usize, made: DynamicInstance, mutation: Option<Mutation>) -> bool {
        let known = made.uuid || mutation != Some(Mutation::NeedByUuid);
        let leased = known && self.leases.contains(&Some(place));
        leased && mutation != Some(Mutation::DestroyLeased) || made.awaited.is_some()
    }

    /// `Ledger::has_unneeded`.
    fn has_unneeded(&self, mutation: Option<Mutation>) -> bool {
        let unneeded = |place: usize| self.made[place].is_some_and(|made| !self.needs(place, made, mutation));
        (0..PLACES).any(unneeded)
    }

    /// `Ledger::await_no_more`.
    fn await_no_more(&mut self, container: usize) {
        for made in self.made.iter_mut().flatten() {
            made.awaited = made.awaited.filter(|awaited| *awaited != container);
        }
    }

    /// `Ledger::kept_from`.
    fn is_kept_from(&self, container: usize, place: usize, mutation: Option<Mutation>) -> bool {
        let Some(made) = self.made[place] else { return false };
        let going = made.going && mutation != Some(Mutation::LeaseGoing);
        going || made.awaited.map_or(!made.uuid, |awaited| awaited != container)
    }

    /// The next place that is to be destroyed, or what comes after that.
    fn next_going(&self, from: usize, order: Option<usize>) -> At {
        let going = (from..PLACES).find(|place| self.made[*place].is_some_and(|made| made.going));
        going.map_or(if order.is_some() { At::Choose } else { At::End }, At::Unmake)
    }

    fn is_quiet(&self) -> bool {
        self.pcs == [Pc::Off; 2 * CONTAINERS + 1] && self.change.is_none()
    }

    /// What a command that ran alone has left.
    fn unsettled(&self) -> Option<&'static str> {
        let ended = (0..CONTAINERS).any(|container| {
            self.leases[container].is_some() && matches!(self.lives[container], Life::Never | Life::Gone)
        });
        let left = (0..PLACES).any(|place| {
            (self.made[place].is_some() || self.driver[place].is_some())
                && !self.leases.contains(&Some(place))
        });
        if ended {
            Some("after a command, no lease is left of a container that has ended")
        } else if left {
            Some("after a command, no instance is left without a lease")
        } else {
            self.under_way.then_some("after a command, no change is under way")
        }
    }
}

impl Turn<'_> {
    fn step(&mut self, what: &'static str, of: usize, of_command: bool, change: impl FnOnce(&mut State)) {
        let mut after = State { alone: self.before.alone && of_command, ..*self.before };
        change(&mut after);
        self.found.push((Step { what, of, crash: false }, after));
    }

    fn shim(&mut self, container: usize) {
        let mutation = self.model.mutation;
        match self.before.pcs[container] {
            Pc::Off if !self.before.asked[container] => self.step("create", container, false, |state| {
                state.asked[container] = true;
                state.pcs[container] = Pc::Look { made: false };
            }),
            Pc::Look { made } => self.step("look: the inventory", container, false, |state| {
                let seen = state.driver.map(|compute| compute == Some(true));
                state.pcs[container] = Pc::Take { made, seen, fresh: true };
            }),
            Pc::Take { made, fresh: false, .. } if mutation != Some(Mutation::TrustOldInventory) => {
                self.step("look: LayoutChanged", container, false, |state| {
                    state.pcs[container] = Pc::Look { made };
                });
            }
            Pc::Take { made, seen, .. } => self.take(container, made, seen),
            Pc::Make => self.begin(container, Some(container)),
            Pc::GiveUp => self.step("give_up", container, false, |state| {
                state.reclaim(mutation);
                state.await_no_more(container);
                state.pcs[container] = Pc::Clear;
            }),
            Pc::RuntimeCreates => self.step("the runtime creates the container", container, false, |state| {
                (state.lives[container], state.pcs[container]) = (Life::Running, Pc::Created);
            }),
            Pc::Created => {
                self.step("the runtime ends", container, false, |state| state.pcs[container] = Pc::Off);
            }
            Pc::Clear => self.clear(container),
            _ => {}
        }
        if self.before.lives[container] == Life::Running {
            self.step("the container ends", container, false, |state| state.lives[container] = Life::Gone);
        }
    }

    fn take(&mut self, container: usize, made: bool, seen: [bool; PLACES]) {
        let (mutation, waits) = (self.model.mutation, self.model.waiter == Some(container));
        let mut ledger = *self.before;
        ledger.reclaim(mutation);
        // The command's reclaim may have ended a dead process's change, so the inventory is out of date.
        let fresh = mutation == Some(Mutation::TrustOldInventory)
            || matches!(ledger.pcs[container], Pc::Take { fresh: true, .. });
        if !fresh {
            self.step("look: LayoutChanged", container, false, |state| {
                state.reclaim(mutation);
                state.pcs[container] = Pc::Look { made };
            });
            return;
        }
        let is_free = |place: usize| {
            seen[place]
                && !ledger.leases.contains(&Some(place))
                && !ledger.is_kept_from(container, place, mutation)
        };
        let free: Vec<usize> = (0..PLACES).filter(|place| is_free(*place)).collect();
        for place in &free {
            self.step("take_lease", container, false, |state| {
                state.reclaim(mutation);
                state.leases[container] = Some(*place);
                state.await_no_more(container);
                state.pcs[container] = Pc::RuntimeCreates;
            });
        }
        if free.is_empty() {
            self.step("look: no MIG device", container, false, |state| {
                state.reclaim(mutation);
                state.pcs[container] = match made {
                    false => Pc::Make,
                    true if waits => Pc::Look { made },
                    true => Pc::GiveUp,
                };
            });
        }
    }

    /// `State::end` of a container that has ended, and then `destroy_unneeded`.
    fn delete(&mut self, container: usize) {
        let (who, mutation) = (CONTAINERS + container, self.model.mutation);
        match self.before.pcs[who] {
            Pc::Off
                if self.before.lives[container] == Life::Gone && self.before.leases[container].is_some() =>
            {
                self.step("end", container, false, |state| {
                    state.leases[container] = None;
                    state.reclaim(mutation);
                    state.pcs[who] = Pc::Clear;
                });
            }
            Pc::Clear => self.clear(who),
            _ => {}
        }
    }

    fn command(&mut self) {
        let mutation = self.model.mutation;
        match self.before.pcs[COMMAND] {
            Pc::Off => {
                let alone = self.before.is_quiet();
                self.step("reconcile", COMMAND, true, |state| {
                    state.reclaim(mutation);
                    (state.alone, state.pcs[COMMAND]) = (alone, Pc::Clear);
                });
            }
            Pc::Clear => self.clear(COMMAND),
            _ => {}
        }
    }

    fn clear(&mut self, who: usize) {
        if self.before.has_unneeded(self.model.mutation) {
            self.begin(who, None);
            return;
        }
        self.step("nothing is to be destroyed", who, who == COMMAND, |state| state.ended(who, None, None));
    }

    /// `Fence::raise`, which waits for other changes.
    fn begin(&mut self, who: usize, order: Option<usize>) {
        let mutation = self.model.mutation;
        if self.before.change.is_some() {
            if order.is_none() {
                self.step("another change takes too long", who, false, |state| state.ended(who, None, None));
            }
            return;
        }
        self.step("begin_mig", who, who == COMMAND, |state| {
            state.reclaim(mutation);
            state.under_way = true;
            state.change = Some(Change { by: Some(who), order, at: At::Mark });
            state.pcs[who] = Pc::Waits;
        });
    }

    /// The next step of `sublet mig make` or `clear`.
    fn change(&mut self) {
        let Some(change) = self.before.change else { return };
        let (by, mutation) = (change.by == Some(COMMAND), self.model.mutation);
        let order = change.order;
        match change.at {
            At::Mark => self.step("mark_unneeded_for_removal", 0, by, |state| {
                state.reclaim(mutation);
                if let Some(container) = order.filter(|_| mutation != Some(Mutation::AwaitFailed)) {
                    state.await_no_more(container);
                }
                for place in 0..PLACES {
                    let unneeded = |made: &DynamicInstance| !state.needs(place, *made, mutation);
                    if let Some(made) = state.made[place].filter(unneeded) {
                        state.made[place] = Some(DynamicInstance { going: true, ..made });
                    }
                }
                state.at(state.next_going(0, order));
            }),
            At::Choose => self.choose(by, order),
            At::Create(place) => self.step("create_instance", place, by, |state| {
                state.driver[place] = Some(false);
                if mutation == Some(Mutation::RecordAfterCreate) {
                    state.made[place] = None;
                }
                state.at(At::NoteGi(place));
            }),
            At::NoteGi(place) => {
                self.note(place, by, "gi is noted", At::CreateCompute(place), |made| made.gi = true);
            }
            At::CreateCompute(place) => self.step("create_compute", place, by, |state| {
                state.driver[place] = Some(true);
                state.at(At::NoteUuid(place));
            }),
            At::NoteUuid(place) => self.note(place, by, "uuid is noted", At::End, |made| made.uuid = true),
            At::Unmake(_) | At::DestroyCompute(_) | At::DestroyInstance(_) | At::Forget(_) => {
                self.unmake(by, change.at, order);
            }
            At::End | At::Fail => {
                let waiter = self.model.waiter;
                self.step("end_mig", 0, by, |state| {
                    state.reclaim(mutation);
                    state.end_mig();
                    state.change = None;
                    if let Some(who) = change.by {
                        state.ended(who, order.map(|_| change.at == At::End), waiter);
                    }
                });
            }
        }
    }

    /// The place for an instance, which is recorded before the driver creates anything.
    fn choose(&mut self, by: bool, order: Option<usize>) {
        let mutation = self.model.mutation;
        let free: Vec<usize> = (0..PLACES).filter(|place| self.before.driver[*place].is_none()).collect();
        for place in &free {
            self.step("the instance is recorded", *place, by, |state| {
                state.reclaim(mutation);
                let (gi, uuid, going, emptied) = (false, false, false, false);
                state.made[*place] = Some(DynamicInstance { gi, uuid, awaited: order, going, emptied });
                state.at(At::Create(*place));
            });
        }
        if free.is_empty() {
            self.step("NotMade", 0, by, |state| state.at(At::Fail));
        }
    }

    fn note(
        &mut self,
        place: usize,
        by: bool,
        what: &'static str,
        next: At,
        note: impl FnOnce(&mut DynamicInstance),
    ) {
        let (mutation, order) = (self.model.mutation, self.before.change.and_then(|change| change.order));
        self.step(what, place, by, |state| {
            state.reclaim(mutation);
            if mutation == Some(Mutation::RecordAfterCreate) && state.made[place].is_none() {
                let (gi, uuid, going, emptied) = (false, false, false, false);
                state.made[place] = Some(DynamicInstance { gi, uuid, awaited: order, going, emptied });
            }
            if let Some(made) = &mut state.made[place] {
                note(made);
            }
            state.at(next);
        });
    }

    /// `Making::unmake`.
    fn unmake(&mut self, by: bool, at: At, order: Option<usize>) {
        let mutation = self.model.mutation;
        match at {
            At::Unmake(place) => self.step("what is there is recorded", place, by, |state| {
                state.reclaim(mutation);
                let next = match (state.driver[place], &mut state.made[place]) {
                    (Some(compute), Some(made)) if is_recorded_instance(*made, compute) => {
                        // Its compute instance tells its UUID.
                        (made.gi, made.emptied) = (true, true);
                        made.uuid |= compute;
                        if compute { At::DestroyCompute(place) } else { At::DestroyInstance(place) }
                    }
                    _ => At::Forget(place),
                };
                if mutation == Some(Mutation::ForgetBeforeDestroy) {
                    state.made[place] = None;
                }
                state.at(next);
            }),
            At::DestroyCompute(place) => self.step("destroy_compute", place, by, |state| {
                state.driver[place] = Some(false);
                state.at(At::DestroyInstance(place));
            }),
            At::DestroyInstance(place) => self.step("destroy_instance", place, by, |state| {
                state.driver[place] = None;
                state.at(At::Forget(place));
            }),
            At::Forget(place) => self.step("forget_dynamic_instance", place, by, |state| {
                state.reclaim(mutation);
                state.made[place] = None;
                if mutation != Some(Mutation::ForgetQuietly) {
                    state.outdate();
                }
                state.at(state.next_going(place + 1, order));
            }),
            _ => {}
        }
    }

    fn crashes(&mut self) {
        if self.before.crashes == 0 {
            return;
        }
        for who in 0..self.before.pcs.len() {
            if self.before.pcs[who] == Pc::Off {
                continue;
            }
            self.crash("it is killed", who, |state| {
                state.pcs[who] = Pc::Off;
                if let Some(change) = state.change.as_mut().filter(|change| change.by == Some(who)) {
                    change.by = None;
                }
            });
        }
        let waiter = self.model.waiter;
        if self.before.change.is_some() {
            self.crash("`sublet mig` is killed", 0, |state| {
                if let Some(Change { by: Some(who), order, .. }) = state.change.take() {
                    state.ended(who, order.map(|_| false), waiter);
                }
            });
        }
    }

    fn crash(&mut self, what: &'static str, of: usize, change: impl FnOnce(&mut State)) {
        let mut after = State { alone: false, ..*self.before };
        if after.crashes != u8::MAX {
            after.crashes -= 1;
        }
        change(&mut after);
        self.found.push((Step { what, of, crash: true }, after));
    }
}

impl State {
    fn at(&mut self, at: At) {
        if let Some(change) = &mut self.change {
            change.at = at;
        }
    }

    /// `who` no longer waits for a change. After `mig make` a shim looks again, and only the waiter if that failed.
    fn ended(&mut self, who: usize, made: Option<bool>, waiter: Option<usize>) {
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

/// `making_instances::is_recorded_instance`, where only sublet creates instances.
const fn is_recorded_instance(made: DynamicInstance, compute: bool) -> bool {
    match (compute, made.uuid, made.gi) {
        (false, uuid, _) => !uuid || made.emptied,
        (true, true, _) => true,
        (true, false, gi) => gi && !made.emptied,
    }
}

impl Model for DynamicMig {
    type State = State;
    type Step = Step;

    fn initial(&self) -> State {
        State {
            leases: [None; CONTAINERS],
            made: [None; PLACES],
            under_way: false,
            driver: [None; PLACES],
            pcs: [Pc::Off; 2 * CONTAINERS + 1],
            change: None,
            lives: [Life::Never; CONTAINERS],
            asked: [false; CONTAINERS],
            crashes: self.crashes,
            alone: false,
            wrong: None,
        }
    }

    fn steps(&self, state: &State, found: &mut Vec<(Step, State)>) {
        let mut turn = Turn { model: self, before: state, found };
        for container in 0..self.containers {
            turn.shim(container);
            turn.delete(container);
        }
        turn.command();
        turn.change();
        turn.crashes();
    }

    fn broken(&self, state: &State) -> Option<&'static str> {
        if state.wrong.is_some() {
            return state.wrong;
        }
        for place in 0..PLACES {
            let holders = state.leases.iter().filter(|lease| **lease == Some(place)).count();
            if state.driver[place].is_some() && state.made[place].is_none() {
                return Some("every instance is recorded");
            }
            if holders > 0 && state.driver[place] != Some(true) {
                return Some("an instance is not destroyed under its lease");
            }
            if holders > 1 {
                return Some("an instance has one lease");
            }
        }
        let lives = (0..CONTAINERS)
            .any(|container| state.lives[container] == Life::Running && state.leases[container].is_none());
        lives.then_some("a lease stays while its container lives")
    }

    fn is_crash(&self, step: &Step) -> bool {
        step.crash
    }

    fn is_end(&self, state: &State) -> bool {
        state.is_quiet()
            && state.leases == [None; CONTAINERS]
            && state.made == [None; PLACES]
            && state.driver == [None; PLACES]
            && !state.under_way
            && state.lives.iter().all(|life| matches!(life, Life::Never | Life::Gone))
    }
}
