//! Suspension: `sublet suspend`, `sublet resume`, the next command, and the start of another container, which wants the GPU
//! whole, as the first one does, and may have `sublet serve` suspend that. The first one's engine may end it at any moment.
//!
//! Each call of the driver's is made by a child, which finishes its call where the process that started it is killed. Others'
//! calls on the same process wait for it.

use crate::Mutation;
use crate::checker::Model;

/// What the model starts with: the first container runs, with all of the GPU's memory.
#[derive(Clone, Copy, Debug)]
pub struct Suspending {
    /// How many crashes there may be; [`u8::MAX`]: any number.
    pub crashes: u8,
    /// The broken step.
    pub mutation: Option<Mutation>,
}

/// The first container's lease: `Lease::suspension`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lease {
    /// It has ended.
    None,
    /// It is not suspended.
    OnGpu,
    /// `SuspendStep::Suspending`, by this process.
    Suspending(usize),
    /// `SuspendStep::Suspended`: it books nothing.
    Suspended,
    /// `SuspendStep::Resuming`, by this process.
    Resuming(usize),
}

/// Where the driver has the state of the first container's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Driver {
    /// On the GPU, and its calls are made.
    Running,
    /// On the GPU, and its calls wait.
    Locked,
    /// In host memory.
    Out,
    /// A restore had no room.
    Lost,
    /// The process has ended.
    Ended,
}

/// A call of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `cuCheckpointProcessLock`
    Lock,
    /// `cuCheckpointProcessCheckpoint`
    Checkpoint,
    /// `cuCheckpointProcessRestore`
    Restore,
    /// `cuCheckpointProcessUnlock`
    Unlock,
}

/// What a process does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pc {
    /// It does not run.
    Off,
    /// `put_away` locks.
    Lock,
    /// `put_away` copies.
    Checkpoint,
    /// `end_suspended`.
    NoteOut,
    /// `bring_back`: restores what is out, unlocks what is locked, and `end_resumed`.
    BringBack,
}

/// Everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// In `ledger.json`.
    pub lease: Lease,
    /// In the driver.
    pub driver: Driver,
    /// `sublet suspend`, `sublet resume` and the next command.
    pub pcs: [Pc; 3],
    /// The call of a child whose parent was killed.
    pub orphan: Option<Call>,
    /// Whether the other container has its lease, and whether its process has the GPU's memory.
    pub other: (bool, bool),
    /// Whether the other's start waits for `sublet serve` to suspend the first one.
    pub waits: bool,
    /// Whether that has suspended it, so that it has to come back by itself; and whether anybody still knows that.
    pub on_demand: (bool, bool),
    /// Crashes that may still come.
    crashes: u8,
    /// For the invariants: what a step has found wrong.
    wrong: Option<&'static str>,
}

const SUSPEND: usize = 0;
const RESUME: usize = 1;
const NEXT: usize = 2;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// In the code's words.
    pub what: &'static str,
    /// The process.
    pub of: usize,
    /// Whether a process was killed.
    pub crash: bool,
}

impl State {
    /// What the first container books of the GPU, which is all or nothing.
    fn is_booked(&self) -> bool {
        !matches!(self.lease, Lease::None | Lease::Suspended)
    }

    /// Whose step it is, if that process has ended.
    fn is_cut_short(&self) -> bool {
        matches!(self.lease, Lease::Suspending(of) | Lease::Resuming(of) if self.pcs[of] == Pc::Off)
    }

    fn take_call(&mut self, call: Call) {
        self.driver = match (call, self.driver) {
            (Call::Lock, Driver::Running) | (Call::Restore, Driver::Out) => Driver::Locked,
            (Call::Checkpoint, Driver::Locked) => Driver::Out,
            (Call::Unlock, Driver::Locked) => Driver::Running,
            (_, driver) => driver,
        };
        if call == Call::Restore && self.driver == Driver::Locked {
            if !self.is_booked() && self.lease != Lease::None {
                self.wrong = Some("a restore begins with booked room");
            }
            if self.other.1 {
                self.driver = Driver::Lost;
            }
        }
    }

    /// Whether nothing waits for anything: no step is under way, and driver and ledger say the same.
    fn is_settled(&self) -> bool {
        let same = match self.lease {
            Lease::None => self.driver == Driver::Ended,
            Lease::OnGpu => self.driver == Driver::Running,
            Lease::Suspended => self.driver == Driver::Out,
            Lease::Suspending(_) | Lease::Resuming(_) => false,
        };
        let is_out_for_another = self.lease == Lease::Suspended && self.on_demand.0;
        let is_quiet = self.pcs == [Pc::Off; 3] && self.orphan.is_none() && !self.waits;
        same && is_quiet && !is_out_for_another && self.other == (false, false)
    }
}

/// The possible steps in one state.
struct Turn<'a> {
    model: &'a Suspending,
    before: &'a State,
    found: &'a mut Vec<(Step, State)>,
}

impl Turn<'_> {
    fn is(&self, mutation: Mutation) -> bool {
        self.model.mutation == Some(mutation)
    }

    fn step(&mut self, what: &'static str, of: usize, change: impl FnOnce(&mut State)) {
        let mut after = *self.before;
        change(&mut after);
        self.found.push((Step { what, of, crash: false }, after));
    }

    /// A call of the driver's, which may refuse it, and what the process does then.
    fn call(&mut self, what: &'static str, of: usize, call: Call, then: Pc, refused: Option<Pc>) {
        self.step(what, of, |state| {
            state.take_call(call);
            state.pcs[of] = then;
        });
        if let Some(refused) = refused {
            self.step("the driver refuses", of, |state| state.pcs[of] = refused);
        }
    }

    /// `suspend`, `resume` and `put_right` begin.
    fn begin(&mut self) {
        let State { lease, other, waits, on_demand, .. } = *self.before;
        if self.before.pcs[SUSPEND] == Pc::Off && lease == Lease::OnGpu {
            let early = self.is(Mutation::FreeBeforeOut);
            for by_itself in [false, true].into_iter().take(1 + usize::from(waits)) {
                self.step("begin_suspending", SUSPEND, |state| {
                    state.lease = if early { Lease::Suspended } else { Lease::Suspending(SUSPEND) };
                    state.pcs[SUSPEND] = Pc::Lock;
                    state.on_demand = (by_itself, by_itself);
                });
            }
        }
        // No command is needed for one that made room.
        let comes_back = !on_demand.0 || on_demand.1;
        if self.before.pcs[RESUME] == Pc::Off && lease == Lease::Suspended && !other.0 && comes_back {
            let late = self.is(Mutation::BookAfterRestore);
            self.step("begin_resuming", RESUME, |state| {
                if !late {
                    state.lease = Lease::Resuming(RESUME);
                }
                state.pcs[RESUME] = Pc::BringBack;
            });
        }
        if self.before.pcs[NEXT] == Pc::Off && self.before.is_cut_short() && !self.is(Mutation::LeaveCutShort)
        {
            self.step("take_over", NEXT, |state| {
                state.lease = match state.lease {
                    Lease::Suspending(_) => Lease::Suspending(NEXT),
                    _ => Lease::Resuming(NEXT),
                };
                state.pcs[NEXT] = Pc::BringBack;
            });
        }
    }

    fn go_on(&mut self, of: usize) {
        let State { driver, other, orphan, .. } = *self.before;
        if orphan.is_some() && !self.is(Mutation::CallBesideOrphan) {
            // Also to ask for the state waits.
            return;
        }
        match (self.before.pcs[of], driver) {
            (Pc::Off, _) => {}
            (Pc::Lock, _) => self.call("put_away: lock", of, Call::Lock, Pc::Checkpoint, Some(Pc::BringBack)),
            (Pc::Checkpoint, _) => {
                self.call("put_away: checkpoint", of, Call::Checkpoint, Pc::NoteOut, Some(Pc::BringBack));
            }
            (Pc::NoteOut, _) => self.step("end_suspended", of, |state| {
                if matches!(state.lease, Lease::Suspending(owner) if owner == of) {
                    state.lease = Lease::Suspended;
                }
                state.pcs[of] = Pc::Off;
            }),
            (Pc::BringBack, Driver::Out) if other.1 && !self.is(Mutation::TrustBookings) => {
                self.step("check_gpu: no room", of, |state| {
                    state.lease = Lease::Suspended;
                    state.pcs[of] = Pc::Off;
                });
            }
            (Pc::BringBack, Driver::Out) => {
                self.call("bring_back: restore", of, Call::Restore, Pc::BringBack, None);
            }
            (Pc::BringBack, Driver::Locked) => {
                self.call("bring_back: unlock", of, Call::Unlock, Pc::BringBack, None);
            }
            (Pc::BringBack, Driver::Running | Driver::Lost | Driver::Ended) => {
                self.step("end_resumed", of, |state| {
                    if state.lease != Lease::None {
                        state.lease = Lease::OnGpu;
                    }
                    state.on_demand = (false, false);
                    state.pcs[of] = Pc::Off;
                });
            }
        }
    }

    /// The other container, whose process may also have memory that no lease has booked.
    fn other(&mut self) {
        if self.before.waits {
            self.step("its time is over, or it is killed", NEXT, |state| state.waits = false);
        }
        match self.before.other {
            (false, false) if !self.before.is_booked() => {
                self.step("the other takes its lease", NEXT, |state| {
                    (state.other.0, state.waits) = (true, false);
                });
            }
            (false, false) if !self.before.waits => {
                self.step("the other waits for room", NEXT, |state| state.waits = true);
            }
            (true, false) => self.step("the other uses the GPU", NEXT, |state| {
                let there = matches!(state.driver, Driver::Running | Driver::Locked);
                state.other.1 = !there;
            }),
            _ => {}
        }
        // Not while a restore is under way: the driver has given it the memory.
        let free = self.before.driver == Driver::Out && self.before.orphan != Some(Call::Restore);
        if free && self.before.other == (false, false) {
            self.step("a process without a lease uses the GPU", NEXT, |state| state.other.1 = true);
        }
        if self.before.other != (false, false) {
            self.step("the other ends", NEXT, |state| state.other = (false, false));
        }
    }

    fn engine(&mut self) {
        if self.before.driver != Driver::Ended {
            // Nobody needs that to come to an end.
            let after = State { driver: Driver::Ended, ..*self.before };
            self.found.push((Step { what: "the engine ends it", of: NEXT, crash: true }, after));
        } else if self.before.lease != Lease::None {
            self.step("reclaim", NEXT, |state| {
                (state.lease, state.on_demand) = (Lease::None, (false, false));
            });
        }
        if let Some(call) = self.before.orphan {
            self.step("the child ends its call", NEXT, |state| {
                state.orphan = None;
                state.take_call(call);
            });
        }
    }

    fn crashes(&mut self) {
        if self.before.crashes == 0 {
            return;
        }
        for of in 0..self.before.pcs.len() {
            let call = match (self.before.pcs[of], self.before.driver) {
                (Pc::Off, _) => continue,
                (Pc::Lock, _) => Some(Call::Lock),
                (Pc::Checkpoint, _) => Some(Call::Checkpoint),
                (Pc::BringBack, Driver::Out) if !self.before.other.1 => Some(Call::Restore),
                (Pc::BringBack, Driver::Locked) => Some(Call::Unlock),
                _ => None,
            };
            let orphans = [None, call.filter(|_| self.before.orphan.is_none())];
            for orphan in orphans.into_iter().take(1 + usize::from(orphans[1].is_some())) {
                let mut after = *self.before;
                after.crashes = if after.crashes == u8::MAX { u8::MAX } else { after.crashes - 1 };
                after.pcs[of] = Pc::Off;
                after.on_demand.1 &= !self.is(Mutation::RememberOnDemand);
                after.orphan = orphan.or(after.orphan);
                self.found.push((Step { what: "it is killed", of, crash: true }, after));
            }
        }
    }
}

impl Model for Suspending {
    type State = State;
    type Step = Step;

    fn initial(&self) -> State {
        State {
            lease: Lease::OnGpu,
            driver: Driver::Running,
            pcs: [Pc::Off; 3],
            orphan: None,
            other: (false, false),
            waits: false,
            on_demand: (false, false),
            crashes: self.crashes,
            wrong: None,
        }
    }

    fn steps(&self, state: &State, found: &mut Vec<(Step, State)>) {
        let mut turn = Turn { model: self, before: state, found };
        turn.begin();
        (0..state.pcs.len()).for_each(|of| turn.go_on(of));
        turn.other();
        turn.engine();
        turn.crashes();
    }

    fn broken(&self, state: &State) -> Option<&'static str> {
        let on_gpu = matches!(state.driver, Driver::Running | Driver::Locked);
        let is_quiet = state.pcs == [Pc::Off; 3] && state.orphan.is_none();
        let waits = state.lease == Lease::OnGpu && matches!(state.driver, Driver::Locked | Driver::Out);
        let checks = [
            (is_quiet && waits, "no container is left waiting"),
            (state.driver == Driver::Lost, "no state is lost"),
            (on_gpu && state.lease == Lease::Suspended, "what is on the GPU is booked"),
            (state.is_booked() && state.other.0, "no more is booked than there is"),
        ];
        state.wrong.or_else(|| checks.into_iter().find_map(|(is, what)| is.then_some(what)))
    }

    fn is_crash(&self, step: &Step) -> bool {
        step.crash
    }

    fn is_end(&self, state: &State) -> bool {
        state.is_settled()
    }
}
