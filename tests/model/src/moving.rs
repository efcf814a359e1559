//! Moving: `sublet move` from either of two GPUs to the other, and the next command. Another container wants a GPU whole, as this one
//! does; a process without a lease may use what is free; the engine may end the container at any moment.
//!
//! Each call of the driver's, and each change of the container's nodes, is made by a child, as in [`crate::suspending`]. A container
//! that comes back to no room there is a step that is left to the next command: that it is suspended then, the other model has.

use crate::Mutation;
use crate::checker::Model;

/// What the model starts with: the container runs on the first GPU, with all of its memory.
#[derive(Clone, Copy, Debug)]
pub struct Moving {
    /// How many crashes there may be; [`u8::MAX`]: any number.
    pub crashes: u8,
    /// The broken step.
    pub mutation: Option<Mutation>,
}

/// The container's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lease {
    /// It has ended.
    None,
    /// It has this GPU.
    On(usize),
    /// This process moves it away from that GPU: `Lease::devices` has both.
    Moving {
        /// The GPU that it is on.
        from: usize,
        /// The process.
        of: usize,
    },
}

/// Where the driver has the state of the container's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Driver {
    /// On that GPU, and its calls are made.
    Running(usize),
    /// On that GPU, and its calls wait.
    Locked(usize),
    /// In host memory, from that GPU.
    Out(usize),
    /// A restore had no room.
    Lost,
    /// The process has ended.
    Ended,
}

/// What a child does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `cuCheckpointProcessLock`
    Lock,
    /// `cuCheckpointProcessCheckpoint`
    Checkpoint,
    /// `cuCheckpointProcessRestore`, on that GPU: with pairs, where that is another than before.
    Restore(usize),
    /// `cuCheckpointProcessUnlock`
    Unlock,
    /// `set_gpus`
    Nodes([bool; 2]),
}

/// What a process does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pc {
    /// It does not run.
    Off,
    /// `give_nodes`, and then what comes next.
    Give(bool),
    /// `put_away` locks.
    Lock,
    /// `put_away` copies.
    Checkpoint,
    /// `carry_over` restores on the other GPU.
    RestoreThere,
    /// `bring_back`: restores what is out, and unlocks what is locked.
    BringBack,
    /// `end_step`: it loses the nodes of GPUs that it is not on.
    Take,
    /// `end_resumed`.
    Note,
}

/// Everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// In `ledger.json`.
    pub lease: Lease,
    /// In the driver.
    pub driver: Driver,
    /// The nodes that the container has.
    pub nodes: [bool; 2],
    /// The GPUs that the driver in its process has known.
    pub known: [bool; 2],
    /// `sublet move` and the next command.
    pub pcs: [Pc; 2],
    /// The call of a child whose parent was killed.
    pub orphan: Option<Call>,
    /// The GPU that the other container has.
    pub other: Option<usize>,
    /// The GPU whose memory a process without a lease has.
    pub stranger: Option<usize>,
    crashes: u8,
    wrong: Option<&'static str>,
}

const MOVE: usize = 0;
const NEXT: usize = 1;

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

/// These two.
const BOTH: [bool; 2] = [true; 2];

fn alone(gpu: usize) -> [bool; 2] {
    [gpu == 0, gpu == 1]
}

impl State {
    fn is_booked(&self, gpu: usize, mutation: Option<Mutation>) -> bool {
        match self.lease {
            Lease::None => false,
            Lease::On(own) => own == gpu,
            Lease::Moving { from, .. } => mutation != Some(Mutation::MoveWithOneRoom) || from != gpu,
        }
    }

    fn is_used(&self, gpu: usize) -> bool {
        self.other == Some(gpu) || self.stranger == Some(gpu)
    }

    fn place(&self) -> Option<usize> {
        if let Driver::Running(gpu) | Driver::Locked(gpu) = self.driver { Some(gpu) } else { None }
    }

    fn is_cut_short(&self) -> bool {
        matches!(self.lease, Lease::Moving { of, .. } if self.pcs[of] == Pc::Off)
    }

    fn reaches(&self, gpu: usize) -> bool {
        (0..2).all(|node| self.nodes[node] || !self.known[node] && node != gpu)
    }

    fn take_call(&mut self, call: Call, mutation: Option<Mutation>) {
        match (call, self.driver) {
            (Call::Nodes(nodes), driver) if driver != Driver::Ended => self.nodes = nodes,
            (Call::Lock, Driver::Running(gpu)) => self.driver = Driver::Locked(gpu),
            (Call::Unlock, Driver::Locked(gpu)) => self.driver = Driver::Running(gpu),
            (Call::Checkpoint, Driver::Locked(gpu)) if self.reaches(gpu) => self.driver = Driver::Out(gpu),
            // The driver refuses, and it stays where it is.
            (Call::Restore(gpu), Driver::Out(_)) if self.reaches(gpu) => {
                if self.lease != Lease::None && !self.is_booked(gpu, mutation) {
                    self.wrong = Some("a restore begins with booked room");
                }
                self.driver = if self.is_used(gpu) { Driver::Lost } else { Driver::Locked(gpu) };
                self.known[gpu] = true;
            }
            _ => {}
        }
    }
}

/// The possible steps in one state.
struct Turn<'a> {
    model: &'a Moving,
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

    /// A child's call, which may be refused, and what the process does then.
    fn call(&mut self, what: &'static str, of: usize, call: Call, then: Pc, refused: Option<Pc>) {
        let mutation = self.model.mutation;
        self.step(what, of, |state| {
            state.take_call(call, mutation);
            state.pcs[of] = then;
        });
        if let Some(refused) = refused {
            self.step("it is refused", of, |state| state.pcs[of] = refused);
        }
    }

    /// `move_to` and `put_right` begin.
    fn begin(&mut self) {
        if let (Lease::On(from), Pc::Off) = (self.before.lease, self.before.pcs[MOVE]) {
            if self.before.other != Some(1 - from) {
                self.step("begin_suspending", MOVE, |state| {
                    state.lease = Lease::Moving { from, of: MOVE };
                    state.pcs[MOVE] = Pc::Give(true);
                });
            }
        }
        if let (Lease::Moving { from, .. }, Pc::Off, true) =
            (self.before.lease, self.before.pcs[NEXT], self.before.is_cut_short())
        {
            self.step("take_over", NEXT, |state| {
                state.lease = Lease::Moving { from, of: NEXT };
                state.pcs[NEXT] = Pc::Give(false);
            });
        }
    }

    fn go_on(&mut self, of: usize) {
        let State { driver, orphan, lease, .. } = *self.before;
        if orphan.is_some() {
            return;
        }
        let from = if let Lease::Moving { from, .. } = lease { from } else { 0 };
        let there = 1 - from;
        match (self.before.pcs[of], driver) {
            (Pc::Off, _) => {}
            (Pc::Give(true), _) => {
                self.call("give_nodes", of, Call::Nodes(BOTH), Pc::Lock, Some(Pc::BringBack));
            }
            (Pc::Give(false), _) => self.call("give_nodes", of, Call::Nodes(BOTH), Pc::BringBack, None),
            (Pc::Lock, _) => self.call("lock", of, Call::Lock, Pc::Checkpoint, Some(Pc::BringBack)),
            (Pc::Checkpoint, _) => {
                self.call("checkpoint", of, Call::Checkpoint, Pc::RestoreThere, Some(Pc::BringBack));
            }
            (Pc::RestoreThere, Driver::Out(_)) if !self.before.is_used(there) => {
                self.call("restore there", of, Call::Restore(there), Pc::BringBack, Some(Pc::BringBack));
            }
            (Pc::RestoreThere, _) => self.step("check_gpu", of, |state| state.pcs[of] = Pc::BringBack),
            (Pc::BringBack, Driver::Out(gpu)) if self.before.is_used(gpu) => {
                self.step("leave_step: no room", of, |state| state.pcs[of] = Pc::Off);
            }
            (Pc::BringBack, Driver::Out(gpu)) => {
                self.call("restore", of, Call::Restore(gpu), Pc::BringBack, None);
            }
            (Pc::BringBack, Driver::Locked(_)) => self.call("unlock", of, Call::Unlock, Pc::BringBack, None),
            (Pc::BringBack, _) => {
                let late = self.is(Mutation::NodesAfterNote);
                self.step("gather", of, |state| state.pcs[of] = if late { Pc::Note } else { Pc::Take });
            }
            (Pc::Take, _) => {
                let nodes = alone(self.before.place().unwrap_or(from));
                let then = if self.is(Mutation::NodesAfterNote) { Pc::Off } else { Pc::Note };
                self.call("take nodes", of, Call::Nodes(nodes), then, None);
            }
            (Pc::Note, _) => {
                let found = if self.is(Mutation::PlaceByLedger) { None } else { self.before.place() };
                let then = if self.is(Mutation::NodesAfterNote) { Pc::Take } else { Pc::Off };
                self.step("end_resumed", of, |state| {
                    if state.lease != Lease::None {
                        state.lease = Lease::On(found.unwrap_or(from));
                    }
                    state.pcs[of] = then;
                });
            }
        }
    }

    fn others(&mut self) {
        for gpu in 0..2 {
            let is_free = self.before.place() != Some(gpu) && self.before.orphan != Some(Call::Restore(gpu));
            if self.before.other.is_none() && !self.before.is_booked(gpu, self.model.mutation) {
                self.step("the other takes its lease", NEXT, |state| state.other = Some(gpu));
            }
            if self.before.stranger.is_none() && !self.before.is_used(gpu) && is_free {
                self.step("a process without a lease uses a GPU", NEXT, |state| state.stranger = Some(gpu));
            }
        }
        if self.before.other.is_some() {
            self.step("the other ends", NEXT, |state| state.other = None);
        }
        if self.before.stranger.is_some() {
            self.step("the process without a lease ends", NEXT, |state| state.stranger = None);
        }
    }

    fn engine(&mut self) {
        if self.before.driver != Driver::Ended {
            let after = State { driver: Driver::Ended, nodes: [false; 2], ..*self.before };
            self.found.push((Step { what: "the engine ends it", of: NEXT, crash: true }, after));
        } else if self.before.lease != Lease::None {
            self.step("reclaim", NEXT, |state| state.lease = Lease::None);
        }
        if let Some(call) = self.before.orphan {
            let mutation = self.model.mutation;
            self.step("the child ends its call", NEXT, |state| {
                state.orphan = None;
                state.take_call(call, mutation);
            });
        }
    }

    fn crashes(&mut self) {
        if self.before.crashes == 0 {
            return;
        }
        for of in 0..self.before.pcs.len() {
            if self.before.pcs[of] == Pc::Off {
                continue;
            }
            for orphan in [None, self.call_of(of).filter(|_| self.before.orphan.is_none())] {
                let mut after = *self.before;
                after.crashes = if after.crashes == u8::MAX { u8::MAX } else { after.crashes - 1 };
                after.pcs[of] = Pc::Off;
                after.orphan = orphan.or(after.orphan);
                self.found.push((Step { what: "it is killed", of, crash: true }, after));
            }
        }
    }

    /// What the child of that process does.
    fn call_of(&self, of: usize) -> Option<Call> {
        let Lease::Moving { from, .. } = self.before.lease else { return None };
        match (self.before.pcs[of], self.before.driver) {
            (Pc::Give(_), _) => Some(Call::Nodes(BOTH)),
            (Pc::Lock, _) => Some(Call::Lock),
            (Pc::Checkpoint, _) => Some(Call::Checkpoint),
            (Pc::RestoreThere, Driver::Out(_)) if !self.before.is_used(1 - from) => {
                Some(Call::Restore(1 - from))
            }
            (Pc::BringBack, Driver::Out(gpu)) if !self.before.is_used(gpu) => Some(Call::Restore(gpu)),
            (Pc::BringBack, Driver::Locked(_)) => Some(Call::Unlock),
            (Pc::Take, _) => Some(Call::Nodes(alone(self.before.place().unwrap_or(from)))),
            _ => None,
        }
    }
}

impl Model for Moving {
    type State = State;
    type Step = Step;

    fn initial(&self) -> State {
        State {
            lease: Lease::On(0),
            driver: Driver::Running(0),
            nodes: alone(0),
            known: alone(0),
            pcs: [Pc::Off; 2],
            orphan: None,
            other: None,
            stranger: None,
            crashes: self.crashes,
            wrong: None,
        }
    }

    fn steps(&self, state: &State, found: &mut Vec<(Step, State)>) {
        let mut turn = Turn { model: self, before: state, found };
        turn.begin();
        (0..state.pcs.len()).for_each(|of| turn.go_on(of));
        turn.others();
        turn.engine();
        turn.crashes();
    }

    fn broken(&self, state: &State) -> Option<&'static str> {
        let is_quiet = state.pcs == [Pc::Off; 2] && state.orphan.is_none();
        let is_booked = |gpu| state.is_booked(gpu, self.mutation);
        let (own, lives) =
            (if let Lease::On(gpu) = state.lease { Some(gpu) } else { None }, state.driver != Driver::Ended);
        let waits = own.is_some_and(|gpu| lives && state.driver != Driver::Running(gpu));
        let unbooked = state.lease != Lease::None && state.place().is_some_and(|gpu| !is_booked(gpu));
        let checks = [
            (unbooked, "what is on the GPU is booked"),
            (is_quiet && waits, "no container is left waiting"),
            (state.driver == Driver::Lost, "no state is lost"),
            (state.other.is_some_and(is_booked), "no more is booked than there is"),
            (
                is_quiet && lives && own.is_some_and(|gpu| state.nodes != alone(gpu)),
                "it has its own GPU's node alone",
            ),
        ];
        state.wrong.or_else(|| checks.into_iter().find_map(|(is, what)| is.then_some(what)))
    }

    fn is_crash(&self, step: &Step) -> bool {
        step.crash
    }

    fn is_end(&self, state: &State) -> bool {
        let is_settled = match state.lease {
            Lease::None => state.driver == Driver::Ended,
            Lease::On(gpu) => state.driver == Driver::Running(gpu),
            Lease::Moving { .. } => false,
        };
        let alone = (state.other, state.stranger) == (None, None);
        is_settled && alone && state.pcs == [Pc::Off; 2] && state.orphan.is_none()
    }
}
