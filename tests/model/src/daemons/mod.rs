//! Leases, MPS daemons, their limits and compute modes: the shims that create and delete containers, `sublet mps start`,
//! `stop` and `rest`, `sublet serve`, and the next `sublet` command.

mod alike;
mod crashes;
mod create;
mod delete;
mod errands;
mod invariants;
mod rounds;

use crate::Mutation;
use crate::checker::{self, Model, Way};
use crate::ledger::{Answer, CONTAINERS, Call, DEVICES, DaemonState, Ledger, Life, Limits, Seen, Share};

/// What is asked for, and which processes there are.
#[derive(Clone, Debug)]
pub struct Daemons {
    /// What the containers ask for, by container. Fewer than [`CONTAINERS`]: the others do not exist.
    pub shares: Vec<Share>,
    /// How many devices there are.
    pub devices: usize,
    /// The containers with `sublet.wait`. The others are refused if there is no room.
    pub waiters: Vec<usize>,
    /// Whether the ledger has those that wait, and they are served in order. Where it has not, one waits alone.
    pub order: bool,
    /// Whether `sublet serve` may run.
    pub serve: bool,
    /// Whether processes of a container may outlive its first one.
    pub children: bool,
    /// How many crashes there may be; [`u8::MAX`]: any number.
    pub crashes: u8,
    /// The broken step.
    pub mutation: Option<Mutation>,
}

/// A process of the engine's or of sublet's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Actor {
    /// The shim that creates a container.
    Shim(usize),
    /// The shim that deletes a container.
    Delete(usize),
    /// `sublet gc`, or what every other command does first (`Local::reconcile`).
    Command,
    /// `sublet serve`.
    Serve,
    /// Who holds a daemon's lock: `sublet mps start`, `stop` or `rest`, or a process that adjusts its limits.
    Holder(usize),
    /// A container's processes.
    Container(usize),
    /// A device's MPS daemon.
    Daemon(usize),
}

/// What a process does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pc {
    /// It does not run.
    Off,
    /// `Search::look`.
    Look,
    /// `mps::end_conflicting` checks that the daemon is gone.
    MadeWay,
    /// `mps::make_ready`.
    MakeReady,
    /// config.json is written, and the shim becomes the low-level runtime, which creates the container.
    RuntimeCreates,
    /// The low-level runtime ends.
    Created,
    /// `Local::give_back`.
    GiveBack,
    /// The low-level runtime deletes the container.
    RuntimeDeletes,
    /// `State::unmark`.
    UnmarkEnding,
    /// `State::end`.
    End,
    /// `sublet serve` has nothing to do.
    Idle,
    /// `mps::settle` or `mps::heal` has come to a device.
    Round {
        /// The device.
        device: usize,
        /// Whether it is `heal`.
        heal: bool,
        /// What comes after the last device.
        then: Then,
    },
    /// It wants a daemon's lock.
    Wants {
        /// The device.
        device: usize,
        /// For what.
        errand: Errand,
        /// What comes after that.
        after: After,
    },
    /// It waits for who has the lock for it, or holds it itself.
    Waits {
        /// The device.
        device: usize,
        /// What comes after that.
        after: After,
    },
}

/// What comes after a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Then {
    /// The process ends.
    Off,
    /// The service waits.
    Idle,
    /// The shim looks again.
    Look,
    /// The shim has its lease.
    MakeWay,
}

/// What comes after an errand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum After {
    /// The next device of a round.
    Round {
        /// Whether it is `heal`.
        heal: bool,
        /// What comes after the last device.
        then: Then,
    },
    /// `end_conflicting` goes on.
    MakeWay,
    /// `make_ready` goes on.
    MakeReady,
}

/// What is done under a daemon's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Errand {
    /// `sublet mps start`.
    Start,
    /// `sublet mps stop`.
    Stop,
    /// `sublet mps rest`.
    Rest,
    /// `limits_and_state::adjust`, in the process itself.
    Adjust,
}

/// Who holds a daemon's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// For whom; `None`: that process was killed.
    pub by: Option<Actor>,
    /// Whether it is that process itself.
    pub own: bool,
    /// What it does next.
    pub at: errands::At,
}

/// What is outside the ledger on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// The limits in force in the daemon that runs.
    pub daemon: Option<Limits>,
    /// The daemon that containers used was killed, and no other has begun to serve.
    pub lost: bool,
    /// Whether its compute mode is `EXCLUSIVE_PROCESS`.
    pub exclusive: bool,
}

/// Everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State {
    /// `ledger.json`.
    pub ledger: Ledger,
    /// By container.
    pub shims: [Pc; CONTAINERS],
    /// By container.
    pub deletes: [Pc; CONTAINERS],
    /// The next command.
    pub command: Pc,
    /// The service.
    pub serve: Pc,
    /// The daemons' locks.
    pub locks: [Option<Holder>; DEVICES],
    /// The devices.
    pub gpus: [Gpu; DEVICES],
    /// The containers' processes.
    pub lives: [Life; CONTAINERS],
    /// Whether the runtime has a record of them.
    pub records: [bool; CONTAINERS],
    /// Whether the engine has asked for the container. It does so once.
    pub asked: [bool; CONTAINERS],
    /// Crashes that may still come.
    pub crashes: u8,
    /// For the invariants: the daemon was killed since `make_ready` saw it.
    pub excused: [bool; CONTAINERS],
    /// For the invariants: a command runs, and nothing else has happened since it began.
    pub alone: bool,
    /// For the invariants: what a step has found wrong.
    pub wrong: Option<&'static str>,
}

/// What happened.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Who did it.
    pub who: Actor,
    /// What, in the code's words.
    pub what: &'static str,
    /// The change of the ledger in it, and whether that did what it says.
    pub call: Option<(Call, bool)>,
    /// Whether a process was killed.
    pub crash: bool,
}

impl Daemons {
    /// A shortest way to each step that differs from others in who takes it, what it does and what it finds. `may` says
    /// which steps may be taken.
    #[must_use]
    pub fn ways(&self, may: fn(&State, &Step, &State) -> bool) -> Vec<Way<Self>> {
        checker::ways(self, 200_000, |before, step, after| {
            let done = step.call.map(|(_, done)| done);
            may(before, step, after).then_some((step.who.kind(), step.what, done))
        })
    }
}

impl Actor {
    const fn kind(self) -> u8 {
        match self {
            Self::Shim(_) => 0,
            Self::Delete(_) => 1,
            Self::Command => 2,
            Self::Serve => 3,
            Self::Holder(_) => 4,
            Self::Container(_) => 5,
            Self::Daemon(_) => 6,
        }
    }
}

/// The possible steps in one state.
struct Turn<'a> {
    model: &'a Daemons,
    before: &'a State,
    found: &'a mut Vec<(Step, State)>,
}

impl Turn<'_> {
    /// A step without the ledger.
    fn step(&mut self, who: Actor, what: &'static str, change: impl FnOnce(&mut State)) {
        let mut after = self.still(who);
        change(&mut after);
        self.found.push((Step { who, what, call: None, crash: false }, after));
    }

    /// A step that is one change of the ledger; `change` is what the process does with the answer.
    fn call(&mut self, who: Actor, what: &'static str, call: Call, change: impl FnOnce(&mut State, Answer)) {
        let mut after = self.still(who);
        let seen = self.before.seen();
        let of = (&self.model.shares[..], self.model.devices);
        let answer = after.ledger.call(call, &seen, of, self.model.mutation);
        change(&mut after, answer);
        self.found.push((Step { who, what, call: Some((call, answer.done)), crash: false }, after));
    }

    /// The state before; the command is no longer alone if `who` is not of it.
    fn still(&self, who: Actor) -> State {
        let its_own = match who {
            Actor::Holder(device) => {
                self.before.locks[device].is_some_and(|holder| holder.by == Some(Actor::Command))
            }
            who => who == Actor::Command,
        };
        State { alone: self.before.alone && its_own, ..*self.before }
    }
}

impl State {
    /// What `reclaim` can see.
    #[must_use]
    pub fn seen(&self) -> Seen {
        Seen {
            lives: self.lives,
            records: self.records,
            shims: self.shims.map(|pc| pc != Pc::Off),
            deletes: self.deletes.map(|pc| pc != Pc::Off),
            daemons: self.gpus.map(|gpu| gpu.daemon.is_some()),
        }
    }

    fn pc(&mut self, who: Actor) -> &mut Pc {
        match who {
            Actor::Shim(container) | Actor::Container(container) => &mut self.shims[container],
            Actor::Delete(container) => &mut self.deletes[container],
            Actor::Serve => &mut self.serve,
            Actor::Command | Actor::Holder(_) | Actor::Daemon(_) => &mut self.command,
        }
    }

    /// `limits_and_state::is_alive`.
    fn is_alive(&self, device: usize) -> bool {
        self.ledger.daemons[device].is_some_and(|daemon| daemon.process) && self.gpus[device].daemon.is_some()
    }

    /// It is recorded as serving, and runs.
    fn serves(&self, device: usize) -> bool {
        let serving = |state| state == DaemonState::Serving;
        self.ledger.daemons[device].is_some_and(|daemon| serving(daemon.state)) && self.is_alive(device)
    }

    /// `idle::waits`, before its time is over.
    #[must_use]
    pub fn waits(&self, device: usize, model: &Daemons) -> bool {
        let closed = self.ledger.on(device, &model.shares).next().is_some();
        let kept = self.serve != Pc::Off || model.mutation == Some(Mutation::TrustDeadKeeper);
        !closed && self.serves(device) && self.ledger.keeper && kept
    }

    /// Whether no process of sublet's runs, except the service that waits.
    fn is_quiet(&self) -> bool {
        let off = |pcs: &[Pc]| pcs.iter().all(|pc| *pc == Pc::Off);
        off(&self.shims)
            && off(&self.deletes)
            && self.command == Pc::Off
            && matches!(self.serve, Pc::Off | Pc::Idle)
            && self.locks == [None; DEVICES]
    }
}

impl Model for Daemons {
    type State = State;
    type Step = Step;

    fn initial(&self) -> State {
        State {
            ledger: Ledger::EMPTY,
            shims: [Pc::Off; CONTAINERS],
            deletes: [Pc::Off; CONTAINERS],
            command: Pc::Off,
            serve: Pc::Off,
            locks: [None; DEVICES],
            gpus: [Gpu { daemon: None, lost: false, exclusive: false }; DEVICES],
            lives: [Life::Never; CONTAINERS],
            records: [false; CONTAINERS],
            asked: [false; CONTAINERS],
            crashes: self.crashes,
            excused: [false; CONTAINERS],
            alone: false,
            wrong: None,
        }
    }

    fn steps(&self, state: &State, found: &mut Vec<(Step, State)>) {
        let mut turn = Turn { model: self, before: state, found };
        for container in 0..self.shares.len() {
            turn.create(container);
            turn.live(container);
            turn.delete(container);
        }
        turn.command();
        if self.serve {
            turn.serve();
        }
        for device in 0..self.devices {
            turn.hold(device);
        }
        turn.crashes();
    }

    fn broken(&self, state: &State) -> Option<&'static str> {
        invariants::broken(self, state)
    }

    fn is_crash(&self, step: &Step) -> bool {
        step.crash
    }

    fn is_end(&self, state: &State) -> bool {
        let ended = |life: &Life| matches!(life, Life::Never | Life::Gone);
        let gone = |gpu: &Gpu| gpu.daemon.is_none() && !gpu.exclusive;
        state.is_quiet()
            && state.serve == Pc::Off
            && state.lives.iter().all(ended)
            && Ledger { keeper: false, ..state.ledger } == Ledger::EMPTY
            && state.gpus.iter().all(gone)
    }
}
