//! `sublet advise`: which way of sharing suits so many tenants. Candidates come from a measurement or from rules, best
//! first, and each is placed for all tenants as it would be when they start: the first that fits is the advice.

use std::collections::BTreeMap;
use std::io;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::Serialize;

use crate::bench::{Mode, ResultError, Sharing};
use crate::mig::Foreseen;
use crate::names::Names;
use crate::preview::Whose;
use crate::shown::{memory, name_of};
use crate::stack::{Fitted, NotPlaced, Outcome, Service, Stack, fit};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::Ledger;
use sublet_core::place::Placement;
use sublet_core::share::Memory;
use sublet_core::text::safe;

mod candidate;
#[cfg(test)]
mod tests;

pub use candidate::{Candidate, Found, Measurements, Verdict};

/// More tenants are a mistake.
pub const MOST: u32 = 1000;

/// How far the tenants trust each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Trust {
    /// Not at all: only what the hardware separates
    None,
    /// One may crash without ending the others; none attacks them
    #[default]
    Some,
    /// They may end together
    All,
}

/// The question of a user.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// How many containers share.
    pub tenants: u32,
    /// The need of each.
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
    /// Its leases, which are booked.
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
    /// The MIG instances that are created for the rest, and their shares of them.
    pub made: Vec<(Foreseen, Placement)>,
}

impl Advice {
    /// The shares of all tenants.
    pub fn shares(&self) -> impl Iterator<Item = &Placement> {
        self.placements.iter().chain(self.made.iter().map(|(_, placement)| placement))
    }
}

/// Why there is no advice, and remedies.
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
    // Whether only measured modes may do.
    let mut only = false;
    match measurements.map(|found| found.verdict(question)) {
        Some(Verdict::NotKept(why)) => {
            let help = vec!["fewer tenants, a longer --p99, or another --trust".to_owned()];
            return Ok(Err(NoAdvice { why, help }));
        }
        Some(Verdict::Modes(modes)) => {
            let candidate = |(mode, found)| Candidate::new(&mode, Some(found), question, gpu, host);
            candidates.extend(modes.into_iter().filter_map(candidate));
            only = question.p99_ms.is_some() && measurements.is_some_and(|found| found.same_gpu);
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

/// The placements of tenants, and the MIG instances that would be created for the rest; or the number of the first that
/// gets nothing, counted from 1, and why.
type Placed = Result<(Vec<Placement>, Vec<(Foreseen, Placement)>), (usize, Box<NotPlaced>)>;

fn placed(candidate: &Candidate, tenants: u32, host: Host<'_>) -> io::Result<Placed> {
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
            Outcome::Fits(placement) | Outcome::InTurns(placement) => placements.push(*placement),
            Outcome::Made(one) => made.push(*one),
            Outcome::AsksForNone => {}
            Outcome::Not(why) => return Ok(Err((number, Box::new(why)))),
        }
    }
    Ok(Ok((placements, made)))
}

/// Remedies where `candidate`, the best, does not fit.
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
    if candidate::fits_in_turns(question, gpu, host) {
        let turns = "sublet.suspend=allow would: who finds no room has others suspended, and with [suspend] turns each \
                     comes back in turn (docs/suspend.md)";
        help.push(turns.to_owned());
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
    for trust in [Trust::Some, Trust::All].into_iter().filter(|trust| *trust > question.trust) {
        for candidate in candidate::candidates(&Question { trust, ..*question }, gpu, host) {
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

// The advice in words.

/// The advice in one sentence.
pub fn sentence(advice: &Advice, question: &Question, gpu: &Device) -> String {
    let (mode, tenants) = (&advice.candidate.mode, question.tenants);
    let gpu = format!("{} ({})", gpu.label(), safe(&gpu.name));
    match mode.sharing {
        Sharing::Exclusive if tenants == 1 && question.named => format!("Give the tenant {gpu} alone."),
        Sharing::Exclusive if tenants == 1 => "Give the tenant a GPU alone.".to_owned(),
        Sharing::Exclusive => format!("Give each of {tenants} tenants a GPU alone."),
        Sharing::Mig => {
            let of = mode.profile.as_ref().map(|profile| format!(": {}", safe(profile))).unwrap_or_default();
            format!("Give {} a MIG device each, of {gpu}{of}.", people(tenants))
        }
        _ => format!("Share {gpu} among {} by {}.", people(tenants), by(mode, tenants)),
    }
}

fn people(tenants: u32) -> String {
    if tenants == 1 { "1 tenant".to_owned() } else { format!("{tenants} tenants") }
}

fn by(mode: &Mode, tenants: u32) -> String {
    let name = match mode.sharing {
        Sharing::Mps => "MPS, on one server that they share",
        Sharing::Dedicated => "turns, each on an MPS server of its own",
        _ => "turns (time-slice)",
    };
    let limit = mode.sm.map(|sm| format!(", each with at most {} % of the SMs", sm.percent(tenants)));
    format!("{name}{}", limit.unwrap_or_default())
}

/// The share of each tenant, a line for each different size.
pub fn each_gets(advice: &Advice, inventory: &Inventory) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let there = advice.placements.iter().map(|placement| gets(placement, advice, inventory));
    let made = advice.made.iter().map(|(instance, _)| {
        let (name, Foreseen { sms, memory_bytes, .. }) = (safe(instance.name()), instance);
        format!("a {name}, which is created when it starts: {sms} SMs, {} of memory", memory(*memory_bytes))
    });
    for line in there.chain(made) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    lines
}

fn gets(placement: &Placement, advice: &Advice, inventory: &Inventory) -> String {
    let device = placement.devices.first().and_then(|uuid| inventory.device(uuid));
    let Some(device) = device else { return String::new() };
    let sms = sms(placement, device);
    let turns = match advice.candidate.mode.sharing {
        Sharing::TimeSlice | Sharing::Dedicated => " while its turn lasts",
        _ => "",
    };
    let limit = match (placement.memory_bytes, advice.candidate.mode.sharing) {
        (Some(bytes), _) => format!("{} of memory", memory(bytes)),
        (None, Sharing::Exclusive | Sharing::Mig) => {
            format!("all its {} of memory", memory(device.memory_bytes))
        }
        (None, _) => "no limit on memory".to_owned(),
    };
    let part = if device.is_mig() { format!("a {}, ", safe(device.kind())) } else { String::new() };
    format!("{part}{sms}{turns}, {limit}")
}

fn sms(placement: &Placement, device: &Device) -> String {
    let all = device.sm_count.map(u64::from);
    let own = placement.sm.map_or(all, |sm| device.sms_at(sm));
    match (own, all) {
        (Some(own), Some(all)) if own < all => format!("{own} of {all} SMs"),
        (_, Some(all)) => format!("all {all} SMs"),
        _ => "its SMs".to_owned(),
    }
}

/// The cost of sharing, as it was measured.
pub fn measured_cost(found: &Found, tenants: u32) -> String {
    let together = if found.n == 1 { "alone".to_owned() } else { format!("with {} at once", found.n) };
    let other = (found.n != tenants).then(|| format!(" ({tenants} were not measured; fewer wait less)"));
    let other = other.unwrap_or_default();
    let at = |mean: f64, p99: Option<f64>| {
        let p99 = p99.map(|p99| format!(", p99 {p99:.1} ms")).unwrap_or_default();
        format!("mean {mean:.1} ms{p99}")
    };
    let ratio = found.alone.map(|(mean, _)| found.mean_ms / mean);
    if !found.same_gpu {
        let ratio = ratio.map_or_else(
            || "an iteration alone was not measured".to_owned(),
            |ratio| format!("an iteration took {ratio:.1} times as long as alone"),
        );
        return format!("{together}{other}, {ratio}, on another GPU ({})", safe(&found.gpu));
    }
    let alone = found.alone.filter(|_| found.n > 1).map_or_else(String::new, |(mean, p99)| {
        format!("; alone {}: {:.1} times as long", at(mean, p99), found.mean_ms / mean)
    });
    format!(
        "{} {together}{other}{alone}; {:.1} iterations a second together",
        at(found.mean_ms, found.p99_ms),
        found.per_second
    )
}

/// The cost of sharing by the rules: nothing that depends on the load.
pub fn concluded(advice: &Advice, question: &Question, gpu: &Device, inventory: &Inventory) -> String {
    let tenants = question.tenants;
    let Advice { candidate, placements, made } = advice;
    match candidate.mode.sharing {
        Sharing::Exclusive => "nothing: it is alone".to_owned(),
        Sharing::TimeSlice | Sharing::Dedicated => format!(
            "turns: while all {tenants} are busy, each has 1/{tenants} of the time, so an iteration takes about \
             {tenants} times as long as alone; while the others idle, as long as alone"
        ),
        Sharing::Mps if candidate.mode.sm.is_some() => format!(
            "each computes with at most 1/{tenants} of the SMs, also while the others idle; kernels that need fewer \
             lose least"
        ),
        Sharing::Mps => {
            "kernels run at the same time: nothing while they leave SMs free, up to turns where one \
                         kernel fills the GPU"
                .to_owned()
        }
        Sharing::Mig => {
            let devices = placements.iter().flat_map(|one| &one.devices);
            let devices = devices.filter_map(|uuid| inventory.device(uuid)?.sm_count);
            let least = devices.chain(made.iter().map(|(instance, _)| instance.sms)).min();
            least.zip(gpu.sm_count).map_or_else(
                || "the instance's SMs instead of the GPU's".to_owned(),
                |(least, all)| {
                    format!("{least} of the GPU's {all} SMs, also while the others idle; no waiting for them")
                },
            )
        }
    }
}

/// The command that measures the case of `question`; `None`: whole GPUs cost nothing.
pub fn measure_with(question: &Question, gpu: &Device) -> Option<String> {
    let (modes, tenants) = match (question.trust, gpu.mig_enabled) {
        (_, true) => ("mig", question.tenants),
        // Only a time has to be measured then, and that of one container.
        (Trust::None, _) => (question.p99_ms.map(|_| "exclusive")?, 1),
        (Trust::Some, _) => ("exclusive,time-slice,dedicated", question.tenants),
        (Trust::All, _) => ("exclusive,time-slice,dedicated,mps,mps:equal", question.tenants),
    };
    let numbers = if tenants == 1 { "1".to_owned() } else { format!("1,{tenants}") };
    let on = gpu.number();
    let on = if on == "0" { String::new() } else { format!(" --gpu {on}") };
    Some(format!("sublet bench run -n {numbers} --mode {modes}{on}"))
}

/// Texts that give a share to a container. `IMAGE` stands for the tenant's own.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Paste {
    /// A command, for one tenant.
    pub docker_run: String,
    /// A Compose file with all tenants.
    pub compose: String,
    /// A `.container` file, for one tenant.
    pub quadlet: String,
}

impl Paste {
    /// The texts for so many tenants with these annotations.
    pub fn new(annotations: &BTreeMap<String, String>, tenants: u32) -> Self {
        let each = |line: fn((&String, &String)) -> String| annotations.iter().map(line).collect::<String>();
        let options = each(|(key, value)| format!("--annotation {key}={value} "));
        let in_compose = each(|(key, value)| format!("      {key}: \"{value}\"\n"));
        let scale = if tenants == 1 { String::new() } else { format!("    scale: {tenants}\n") };
        // systemd reads % as the beginning of a specifier.
        let in_quadlet = each(|(key, value)| format!("Annotation={key}={value}\n")).replace('%', "%%");
        let waits = options.trim_end().replace('%', "%%");
        Self {
            docker_run: format!("docker run --runtime sublet {options}IMAGE\n"),
            compose: format!(
                "services:\n  tenant:\n    image: IMAGE\n    runtime: sublet\n{scale}    annotations:\n{in_compose}"
            ),
            quadlet: format!(
                "[Unit]\nStartLimitIntervalSec=0\n\n[Container]\nImage=IMAGE\n{in_quadlet}\n[Service]\n\
                 ExecStartPre=/usr/bin/sublet wait {waits}\nRestart=always\nRestartSec=5\n"
            ),
        }
    }
}
