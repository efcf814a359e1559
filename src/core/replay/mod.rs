//! Walks through the models of tests/model, step by step with the real ledger: after each change both say the same.

mod daemons;
mod dynamic_mig;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use std::process::{Child, Command};

use sublet_model::checker::{Model, Way};

use crate::ledger::{LeaseId, Store};
use crate::process::Process;

/// How often each change of the ledger was made, by name and success.
type Made = BTreeMap<(String, bool), usize>;

/// A real ledger and real processes beside a model's.
trait Replay: Sized {
    type Model: Model;

    fn new(model: &Self::Model) -> Self;

    /// Takes `step` from `before` to `after`, and compares.
    fn step(
        &mut self,
        before: &<Self::Model as Model>::State,
        step: &<Self::Model as Model>::Step,
        after: &<Self::Model as Model>::State,
        made: &mut Made,
    );
}

/// Takes all of `way`.
fn walk<R: Replay>(model: &R::Model, way: &Way<R::Model>, made: &mut Made) {
    let (mut real, mut before) = (R::new(model), model.initial());
    for (at, (step, after)) in way.iter().enumerate() {
        let taken = std::panic::AssertUnwindSafe(|| real.step(&before, step, after, made));
        if std::panic::catch_unwind(taken).is_err() {
            let shown: Vec<_> = way[..=at].iter().map(|(step, _)| format!("{step:?}")).collect();
            panic!("the model and the ledger differ after {shown:#?}");
        }
        before = *after;
    }
}

fn note(made: &mut Made, call: impl Debug, done: bool) {
    let name: String = format!("{call:?}").chars().take_while(char::is_ascii_alphanumeric).collect();
    *made.entry((name, done)).or_insert(0) += 1;
}

fn print<T>(what: &str, ways: &[Vec<T>], made: &Made) {
    let steps: usize = ways.iter().map(Vec::len).sum();
    let changes: usize = made.values().sum();
    println!("{} {what}, {steps} steps, {changes} changes of the ledger", ways.len());
}

/// A walk by dice until `has_ended`, or 150 steps. `may` says which steps may be taken.
fn at_random<M: Model>(
    model: &M,
    seed: usize,
    may: fn(&M::State, &M::Step, &M::State) -> bool,
    has_ended: impl Fn(&M::State) -> bool,
) -> Way<M> {
    let mut dice = Dice((seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (mut state, mut way, mut found) = (model.initial(), Vec::new(), Vec::new());
    for _ in 0..150 {
        found.clear();
        model.steps(&state, &mut found);
        let crashes = dice.below(10) == 0;
        found.retain(|(step, after)| model.is_crash(step) == crashes && may(&state, step, after));
        let Some((step, after)) = found.get(dice.below(found.len().max(1))) else { continue };
        way.push((*step, *after));
        state = *after;
        if has_ended(&state) {
            break;
        }
    }
    way
}

/// Numbers that look random (xorshift64*).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        usize::try_from(self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % limit
    }
}

/// A process of the model's, as a real one that sleeps.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").spawn().unwrap())
    }

    fn process(&self) -> Process {
        Process::find(i32::try_from(self.0.id()).unwrap()).unwrap()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The real processes by owner.
struct Processes<Who> {
    running: BTreeMap<Who, Sleeper>,
    /// Also after their ends.
    known: BTreeMap<Who, Process>,
}

impl<Who: Ord + Copy + Debug> Processes<Who> {
    const fn new() -> Self {
        Self { running: BTreeMap::new(), known: BTreeMap::new() }
    }

    /// Starts and ends processes until exactly `alive` run.
    fn follow(&mut self, alive: &[Who]) {
        self.running.retain(|who, _| alive.contains(who));
        for who in alive {
            self.start(*who);
        }
    }

    fn start(&mut self, who: Who) {
        if !self.running.contains_key(&who) {
            let sleeper = Sleeper::start();
            self.known.insert(who, sleeper.process());
            self.running.insert(who, sleeper);
        }
    }

    fn find(&self, who: Who) -> Option<Process> {
        self.running.contains_key(&who).then(|| self.known[&who])
    }

    fn of(&self, who: Who) -> Process {
        self.find(who).unwrap_or_else(|| panic!("{who:?} does not run"))
    }
}

/// Each change is synchronized to the disk, which takes no time in memory.
fn new_dir() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let store = Store::open(&dir.path().join("state")).unwrap();
    (dir, store)
}

/// The lease that `container` has.
fn id(container: usize) -> LeaseId {
    LeaseId::parse(&format!("{:016x}", container + 1)).unwrap()
}

fn container_of(lease: &LeaseId) -> usize {
    usize::from_str_radix(lease.as_str(), 16).unwrap() - 1
}

/// Writes `container`'s record as runc does.
fn write_record(container: usize, init: Process, record: &Path) {
    fs::create_dir(record).unwrap();
    let state = format!(
        r#"{{"init_process_pid":{},"init_process_start":{},"config":{{"labels":["sublet.lease={}"]}}}}"#,
        init.pid,
        init.start_time,
        id(container)
    );
    fs::write(record.join("state.json"), state).unwrap();
}
