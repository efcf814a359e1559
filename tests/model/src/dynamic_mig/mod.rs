//! Dynamic MIG: `sublet mig make` creates an instance for a container that finds none, `sublet mig clear` destroys those
//! that no lease needs. Three containers, two places on one GPU.
//!
//! Whoever frees a lease or gives up also runs `sublet mig clear`. The model has that for deletes, for shims that give up
//! and for the next command, which may come at any time: one more beside them could do nothing new.

mod changing;
mod crashes;
mod ledger;
mod searching;

use crate::Mutation;
use crate::checker::{self, Model, Way};
use crate::ledger::Life;
pub use changing::{At, Change};
pub use ledger::{Call, DynamicInstance, Lease, Ledger, Seen};

/// Containers.
pub const CONTAINERS: usize = 3;
/// Places for instances.
pub const PLACES: usize = 2;

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
    /// `sublet mig make` asks whether there is room (`has_room`).
    Make,
    /// `Fence::raise` in `sublet mig make` or `clear`, which waits for other changes.
    Raise {
        /// `mig make`, for this container.
        order: Option<usize>,
    },
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

/// Everything. Processes are numbered: shims, then deletes, then the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// `ledger.json`.
    pub ledger: Ledger,
    /// In the driver: whether the GPU instance has a compute instance.
    pub driver: [Option<bool>; PLACES],
    /// What the processes do next.
    pub pcs: [Pc; PROCESSES],
    /// `sublet mig make` or `clear` behind its fence.
    pub change: Option<Change>,
    /// The containers' processes.
    pub lives: [Life; CONTAINERS],
    /// Whether the engine has asked for the container. It does so once.
    pub asked: [bool; CONTAINERS],
    /// Crashes that may still come.
    crashes: u8,
    /// For the invariants: a command runs, and nothing else has happened since it began.
    alone: bool,
    /// For the invariants: what a step has found wrong.
    wrong: Option<&'static str>,
}

const PROCESSES: usize = 2 * CONTAINERS + 1;
/// The number of the next command.
const COMMAND: usize = 2 * CONTAINERS;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// In the code's words.
    pub what: &'static str,
    /// The process, or the place of an instance that is changed.
    pub of: usize,
    /// The change of the ledger in it, and whether earlier inventories are out of date by it.
    pub call: Option<(Call, bool)>,
    /// Whether a process was killed.
    pub crash: bool,
}

/// The possible steps in one state.
struct Turn<'a> {
    model: &'a DynamicMig,
    before: &'a State,
    found: &'a mut Vec<(Step, State)>,
}

impl Turn<'_> {
    /// A step of process `who`, or at a place, without the ledger.
    fn step(&mut self, what: &'static str, of: usize, of_command: bool, change: impl FnOnce(&mut State)) {
        let mut after = State { alone: self.before.alone && of_command, ..*self.before };
        change(&mut after);
        self.found.push((Step { what, of, call: None, crash: false }, after));
    }

    /// A step that is one change of the ledger; `change` is what the process does then.
    fn call(
        &mut self,
        what: &'static str,
        of: usize,
        of_command: bool,
        call: Call,
        change: impl FnOnce(&mut State),
    ) {
        let mut after = State { alone: self.before.alone && of_command, ..*self.before };
        let seen = self.before.seen();
        let outdates = after.ledger.call(call, seen, self.model.mutation);
        if outdates {
            after.outdate();
        }
        change(&mut after);
        self.found.push((Step { what, of, call: Some((call, outdates)), crash: false }, after));
    }
}

impl State {
    /// What `reclaim` can see.
    #[must_use]
    pub fn seen(&self) -> Seen {
        let runs = |container: usize| self.pcs[container] != Pc::Off;
        Seen { lives: self.lives, shims: std::array::from_fn(runs), change: self.change.is_some() }
    }

    /// Earlier inventories are out of date.
    fn outdate(&mut self) {
        for pc in &mut self.pcs {
            if let Pc::Take { fresh, .. } = pc {
                *fresh = false;
            }
        }
    }

    fn is_quiet(&self) -> bool {
        self.pcs == [Pc::Off; PROCESSES] && self.change.is_none()
    }

    /// What a command that ran alone has left.
    fn unsettled(&self) -> Option<&'static str> {
        let ended = (0..CONTAINERS).any(|container| {
            self.ledger.leases[container].is_some()
                && matches!(self.lives[container], Life::Never | Life::Gone)
        });
        let left = (0..PLACES).any(|place| {
            let there = self.ledger.instances[place].is_some() || self.driver[place].is_some();
            there && !self.ledger.is_leased(place)
        });
        if ended {
            Some("after a command, no lease is left of a container that has ended")
        } else if left {
            Some("after a command, no instance is left without a lease")
        } else {
            self.ledger.under_way.then_some("after a command, no change is under way")
        }
    }
}

impl DynamicMig {
    /// A shortest way to each step that differs from others in what it does, who does it, and how it finds the instance
    /// that it concerns.
    #[must_use]
    pub fn ways(&self) -> Vec<Way<Self>> {
        checker::ways(self, 20_000, |before, step, _| {
            let place = step.call.and_then(|(call, _)| call.place());
            let found = place.map(|place| (before.ledger.instances[place], before.driver[place]));
            let outdates = step.call.is_some_and(|(_, outdates)| outdates);
            Some((step.what, step.of, found, outdates))
        })
    }

    /// The next steps of `sublet mig make` or `clear`: several, if it may choose.
    #[must_use]
    pub fn changes(&self, state: &State) -> Vec<(Step, State)> {
        let mut found = Vec::new();
        Turn { model: self, before: state, found: &mut found }.change();
        found
    }
}

impl Model for DynamicMig {
    type State = State;
    type Step = Step;

    fn initial(&self) -> State {
        State {
            ledger: Ledger::EMPTY,
            driver: [None; PLACES],
            pcs: [Pc::Off; PROCESSES],
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
            let holders = state.ledger.leases.iter().flatten().filter(|lease| lease.place == place).count();
            if state.driver[place].is_some() && state.ledger.instances[place].is_none() {
                return Some("every instance is recorded");
            }
            if holders > 0 && state.driver[place] != Some(true) {
                return Some("an instance is not destroyed under its lease");
            }
            if holders > 1 {
                return Some("an instance has one lease");
            }
        }
        let lives = (0..CONTAINERS).any(|container| {
            state.lives[container] == Life::Running && state.ledger.leases[container].is_none()
        });
        lives.then_some("a lease stays while its container lives")
    }

    fn is_crash(&self, step: &Step) -> bool {
        step.crash
    }

    fn is_end(&self, state: &State) -> bool {
        state.is_quiet()
            && state.ledger == Ledger::EMPTY
            && state.driver == [None; PLACES]
            && state.lives.iter().all(|life| matches!(life, Life::Never | Life::Gone))
    }
}
