//! `sublet advise`: which way of sharing suits so many tenants. Candidates come from a measurement or from rules, best
//! first, and each is placed for all tenants as it would be when they start: the first that fits is the advice.

use std::io;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::Serialize;

use crate::bench::{ResultError, Sharing};
use crate::mig::Foreseen;
use crate::names::Names;
use crate::preview::Whose;
use crate::shown::name_of;
use crate::stack::{Fitted, NotPlaced, Outcome, Service, Stack, fit};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::Ledger;
use sublet_core::place::Placement;
use sublet_core::share::Memory;
use sublet_core::text::safe;

mod candidate;
mod measured;
#[cfg(test)]
mod tests;
mod words;

pub use candidate::Candidate;
pub use measured::{Found, Measurements, Verdict};
pub use words::Paste;
pub use words::{concluded, each_gets, measure_with, sentence, what_it_cost};

/// More tenants are a mistake.
pub const MOST: u32 = 1000;

/// How far the tenants trust each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, JsonSchema)]
pub enum Trust {
    /// Not at all: only what the hardware separates
    #[value(name = "none")]
    #[serde(rename = "none")]
    Not,
    /// One may crash without ending the others; none attacks them
    #[default]
    #[value(name = "some")]
    #[serde(rename = "some")]
    Partly,
    /// They may end together
    #[value(name = "all")]
    #[serde(rename = "all")]
    Fully,
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// How many containers share.
    pub tenants: u32,
    /// What each of them needs.
    pub memory: Option<Memory>,
    /// How long an iteration may take, 99 times of 100, in milliseconds.
    pub p99_ms: Option<f64>,
    /// How far they trust each other.
    pub trust: Trust,
    /// Whether the user named the GPU.
    pub named: bool,
}

/// The host on which they are to run.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// Its devices.
    pub inventory: &'a Inventory,
    /// What is booked.
    pub ledger: &'a Ledger,
    /// For whose containers.
    pub whose: Whose,
    /// Its configuration.
    pub config: &'a Config,
}

/// A candidate that all tenants get.
#[derive(Debug)]
pub struct Advice {
    /// How to share.
    pub candidate: Candidate,
    /// One for each tenant whose device exists.
    pub placements: Vec<Placement>,
    /// The MIG instances that are created for the others, and their shares of them.
    pub made: Vec<(Foreseen, Placement)>,
}

impl Advice {
    /// The shares of all tenants.
    pub fn shares(&self) -> impl Iterator<Item = &Placement> {
        self.placements.iter().chain(self.made.iter().map(|(_, placement)| placement))
    }
}

/// Why there is no advice, and what would help.
#[derive(Debug, PartialEq, Eq)]
pub struct NoAdvice {
    /// In one line.
    pub why: String,
    /// One line each.
    pub help: Vec<String>,
}

/// The advice for one GPU.
///
/// # Errors
/// There is no random number, or no /proc. The inner error: nothing that would do fits.
pub fn advise(
    question: &Question,
    gpu: &Device,
    measurements: Option<&Measurements<'_>>,
    host: Host<'_>,
) -> io::Result<Result<Advice, NoAdvice>> {
    let mut candidates = Vec::new();
    // Whether only what was measured may do.
    let mut only = false;
    match measurements.map(|found| found.verdict(question)) {
        Some(Verdict::NotKept(why)) => {
            let help = vec!["fewer tenants, a longer --p99, or another --trust".to_owned()];
            return Ok(Err(NoAdvice { why, help }));
        }
        Some(Verdict::Modes(modes)) => {
            let candidate = |(mode, found)| Candidate::new(&mode, Some(found), question, gpu, host);
            candidates.extend(modes.into_iter().filter_map(candidate));
            only = question.p99_ms.is_some() && measurements.is_some_and(Measurements::judge_times);
        }
        Some(Verdict::NotMeasured) | None => {}
    }
    if !only {
        candidates.extend(candidate::candidates(question, gpu, host));
    }
    let mut best = None;
    for candidate in candidates {
        match placed(&candidate, question.tenants, host)? {
            Ok((placements, made)) => return Ok(Ok(Advice { candidate, placements, made })),
            Err(refused) => drop(best.get_or_insert((candidate, refused))),
        }
    }
    Ok(Err(match best {
        Some((candidate, (number, why))) => {
            let mode = candidate.mode.title();
            let why = format!("the best way is {mode}, and container {number} would be refused: {why}");
            NoAdvice { why, help: help(&candidate, question, gpu, host)? }
        }
        None => NoAdvice { why: candidate::none(question, gpu), help: laxer(question, gpu, host)? },
    }))
}

/// The placements of tenants, and the MIG instances that would be created for others.
type Placed = (Vec<Placement>, Vec<(Foreseen, Placement)>);

/// What all tenants get, or the number of the first that gets nothing, counted from 1, and why.
fn placed(
    candidate: &Candidate,
    tenants: u32,
    host: Host<'_>,
) -> io::Result<Result<Placed, (usize, Box<NotPlaced>)>> {
    let service = |number| Service {
        name: format!("tenant-{number}"),
        annotations: candidate.annotations.clone(),
        runtime: Some("sublet".to_owned()),
        ..Service::default()
    };
    let stack = Stack { services: (1..=tenants).map(service).collect(), ..Stack::default() };
    let world = (host.ledger.clone(), host.inventory.clone());
    let (fitted, _) = fit(&stack, None, world, &Names::default(), host.whose, host.config)?;
    let (mut placements, mut made) = (Vec::new(), Vec::new());
    for (number, Fitted { outcome, .. }) in (1..).zip(fitted) {
        match outcome {
            Outcome::Fits(placement) => placements.push(*placement),
            Outcome::Made(one) => made.push(*one),
            Outcome::AsksForNone => {}
            Outcome::Not(why) => return Ok(Err((number, Box::new(why)))),
        }
    }
    Ok(Ok((placements, made)))
}

/// What would help where `candidate`, the best, does not fit.
fn help(candidate: &Candidate, question: &Question, gpu: &Device, host: Host<'_>) -> io::Result<Vec<String>> {
    let mut help = Vec::new();
    let most = most(candidate, question, gpu, host)?;
    if most > 0 {
        help.push(format!("--tenants {most} would fit"));
    }
    if question.memory.is_some() {
        let without = Question { memory: None, ..*question };
        let less = Candidate::new(&candidate.mode, None, &without, gpu, host);
        if let Some((less, bytes)) = less.and_then(|less| less.memory_bytes.map(|bytes| (less, bytes))) {
            if placed(&less, question.tenants, host)?.is_ok() {
                help.push(format!("--memory {} would fit", candidate::amount(bytes)));
            }
        }
    }
    // With dynamic, those for which there is room were counted.
    if candidate.mode.sharing == Sharing::Mig && !host.config.mig.dynamic {
        let more =
            "more MIG devices would, if the GPU has room for them: `sublet mig plan`, `sublet mig apply`";
        help.push(more.to_owned());
    }
    help.extend(laxer(question, gpu, host)?);
    Ok(help)
}

/// The largest number of tenants, fewer than asked about, that `candidate` fits; 0: none.
fn most(candidate: &Candidate, question: &Question, gpu: &Device, host: Host<'_>) -> io::Result<u32> {
    let (mut fits, mut too_many) = (0, question.tenants);
    while fits + 1 < too_many {
        let tenants = fits.midpoint(too_many);
        let fewer = Candidate::new(&candidate.mode, None, &Question { tenants, ..*question }, gpu, host);
        match fewer.map(|fewer| placed(&fewer, tenants, host)).transpose()? {
            Some(Ok(_)) => fits = tenants,
            _ => too_many = tenants,
        }
    }
    Ok(fits)
}

/// The least trust beyond that of `question` with which something fits.
fn laxer(question: &Question, gpu: &Device, host: Host<'_>) -> io::Result<Vec<String>> {
    for trust in [Trust::Partly, Trust::Fully].into_iter().filter(|trust| *trust > question.trust) {
        let asked = Question { trust, ..*question };
        for candidate in candidate::candidates(&asked, gpu, host) {
            if placed(&candidate, question.tenants, host)?.is_ok() {
                let mode = candidate.mode.title();
                return Ok(vec![format!("--trust {} would fit: {mode}", name_of(&trust))]);
            }
        }
    }
    Ok(Vec::new())
}

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    /// The driver has no GPU.
    #[error("this host has no GPU")]
    NoGpu,
    /// `--gpu` names none.
    #[error("--gpu {}: {why}", safe(asked))]
    NotThatGpu { asked: String, why: String },
    /// A number of tenants that is none.
    #[error("--tenants {0}: a number from 1 to {MOST}")]
    Tenants(u32),
    /// More memory than a GPU has.
    #[error("--memory {asked}: the largest GPU in question has {has}, so not even one tenant gets that much")]
    Memory { asked: String, has: String },
    /// A target that is none.
    #[error("--p99 0s: a time over 0, such as 20ms")]
    P99,
    /// The result has several loads, or not this one.
    #[error("the result has the loads {}: choose one with --load", .0.join(", "))]
    Load(Vec<String>),
    /// `--load` without a result.
    #[error("--load chooses among the loads of a result: give one with --from")]
    LoadOfNothing,
    /// The result cannot be used.
    #[error(transparent)]
    Result(#[from] ResultError),
}
