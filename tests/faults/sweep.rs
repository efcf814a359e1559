//! One path: an undisturbed run, and then one run for each fault.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::injector::{Call, Fault, Key, Seen};
use crate::table::Table;

/// A command, what stands before it and what must hold after it.
pub trait Path {
    /// Everything as before a run.
    fn prepare(&mut self) -> Result<(), String>;
    /// The command.
    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen;
    /// What must hold. `fault` is what befell it; `None`: nothing.
    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String>;
    /// The first call that fails when they do so in turn: those before it are another path's.
    fn first(&self, _calls: &[Call]) -> usize {
        0
    }
    /// Which part of the calls fail in turn: 1 of so many.
    fn part(&self) -> usize {
        1
    }
    /// A host of its own, after one that a fault left wrong.
    fn renew(&mut self);
}

/// What came of a path.
#[derive(Default)]
pub struct Outcome {
    pub calls: usize,
    pub faults: usize,
    pub passed: usize,
    /// Runs in which the call did not come, three times.
    pub missed: usize,
    pub failures: Vec<String>,
    pub took: Duration,
}

/// Which faults are tried.
pub enum Choice {
    /// Each call with each of its errors, and a kill.
    All,
    /// Each call with one of them in turn, by its position; of calls of one name on one file the first three.
    InTurn,
    /// One fault.
    Only(Key, Fault),
}

impl Choice {
    fn of(&self, table: &Table, calls: &[Call]) -> Vec<(Call, Fault)> {
        let mut turns = BTreeMap::<&str, usize>::new();
        let mut alike = BTreeMap::<(&str, &str), usize>::new();
        let mut chosen = Vec::new();
        for call in calls {
            let errors = call.only.unwrap_or(&table.named(call.key.name).errors);
            let errors = errors.iter().map(|errno| Fault::Error(*errno));
            let faults: Vec<Fault> = errors.chain([Fault::Kill]).collect();
            match self {
                Self::All => chosen.extend(faults.into_iter().map(|fault| (call.clone(), fault))),
                Self::InTurn => {
                    let before = alike.entry((call.key.name, &call.path)).or_default();
                    *before += 1;
                    if *before > ALIKE && !call.path.is_empty() {
                        continue;
                    }
                    let turn = turns.entry(call.key.name).or_default();
                    chosen.push((call.clone(), faults[*turn % faults.len()]));
                    *turn += 1;
                }
                Self::Only(key, fault) if *key == call.key => chosen.push((call.clone(), *fault)),
                Self::Only(..) => {}
            }
        }
        chosen
    }
}

/// How many calls of one name on one file fail when they do so in turn.
const ALIKE: usize = 3;

/// The name by which one fault can be repeated.
pub fn word(key: &Key, fault: Fault) -> String {
    let process = if key.process == "0" { String::new() } else { format!("{}/", key.process) };
    let fault = match fault {
        Fault::Error(errno) => format!("{errno:?}"),
        Fault::Kill => "KILL".to_owned(),
    };
    format!("{process}{}:{}:{fault}", key.name, key.nth)
}

/// How often a run is tried in which the call did not come.
const TRIES: usize = 3;

pub fn sweep(name: &str, path: &mut dyn Path, table: &Table, choice: &Choice) -> Outcome {
    let start = Instant::now();
    let mut result = Outcome::default();
    let seen = match undisturbed(path, table) {
        Ok(seen) => seen,
        Err(why) => {
            result.failures.push(format!("{name}: without a fault: {why}"));
            println!("FAILED {}", result.failures.last().expect("one"));
            return result;
        }
    };
    result.calls = seen.calls.len();
    let (first, part) = match choice {
        Choice::InTurn => (path.first(&seen.calls), path.part()),
        _ => (0, 1),
    };
    let calls: Vec<Call> = seen.calls[first..].iter().step_by(part).cloned().collect();
    for (call, fault) in choice.of(table, &calls) {
        result.faults += 1;
        match one(path, table, &call, fault) {
            Ok(true) => result.passed += 1,
            Ok(false) => {
                result.missed += 1;
                println!("missed {name}:{} ({})", word(&call.key, fault), call.path);
            }
            Err(why) => {
                let word = word(&call.key, fault);
                result.failures.push(format!("{name}:{word} ({}): {why}", call.path));
                println!("FAILED {}", result.failures.last().expect("one"));
                path.renew();
                if let Err(why) = undisturbed(path, table) {
                    result.failures.push(format!("{name}: on a new host without a fault: {why}"));
                    break;
                }
            }
        }
    }
    result.took = start.elapsed();
    result
}

fn undisturbed(path: &mut dyn Path, table: &Table) -> Result<Seen, String> {
    path.prepare()?;
    let seen = path.run(table, None);
    path.judge(&seen, None).map(|()| seen)
}

/// One fault; whether its call came.
fn one(path: &mut dyn Path, table: &Table, call: &Call, fault: Fault) -> Result<bool, String> {
    for _ in 0..TRIES {
        path.prepare().map_err(|why| format!("before it: {why}"))?;
        let seen = path.run(table, Some((&call.key, fault)));
        let hit = seen.hit.is_some();
        path.judge(&seen, hit.then_some(fault))?;
        if hit {
            return Ok(true);
        }
    }
    Ok(false)
}
