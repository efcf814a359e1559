//! `sublet suspend`, `sublet resume` and `sublet move`.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use schemars::JsonSchema;
use serde::Serialize;

use super::status::label;
use super::tables::{self, Format, Output};
use crate::mig::uninterrupted;
use crate::names::{Names, lease_of};
use crate::suspend::{Done, SuspendError, move_to, resume, suspend};
use sublet_core::admit::{AdmitError, is_remote};
use sublet_core::broker::client::Broker;
use sublet_core::broker::protocol::{Answer, Ask};
use sublet_core::config::Config;
use sublet_core::ledger::LeaseId;

/// Between two attempts of a resume that waits for room.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Arguments of `sublet suspend`.
#[derive(Debug, clap::Args)]
pub struct SuspendArguments {
    /// The containers: each by its name or id, its lease's id, or the beginning of one that no other has
    #[arg(required = true, value_name = "CONTAINER")]
    names: Vec<String>,
    /// Also one whose share does not allow it; only root, and never an MPS share
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `sublet resume`.
#[derive(Debug, clap::Args)]
pub struct ResumeArguments {
    /// The containers: each by its name or id, its lease's id, or the beginning of one that no other has
    #[arg(required = true, value_name = "CONTAINER")]
    names: Vec<String>,
    /// Another GPU than the one that it was on: an index, a UUID or its beginning, a PCI bus id, an alias
    #[arg(long)]
    gpu: Option<String>,
    /// Wait so long for room: 0, 30s, 2m, up to a day
    #[arg(long, default_value = "0", value_parser = super::wait::timeout, value_name = "TIME")]
    wait: Duration,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `sublet move`.
#[derive(Debug, clap::Args)]
pub struct MoveArguments {
    /// The container: its name or id, its lease's id, or the beginning of one that no other has
    #[arg(value_name = "CONTAINER")]
    name: String,
    /// The GPU that it goes to: an index, a UUID or its beginning, a PCI bus id, an alias
    #[arg(long)]
    gpu: String,
    #[command(flatten)]
    output: Output,
}

/// What was done with a container.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Stepped {
    /// As it is called.
    name: String,
    /// Its lease.
    lease: String,
    /// `suspended`, or `active`: resumed, or moved.
    state: &'static str,
    /// Its GPU memory that was copied.
    bytes: u64,
    /// How long it took, with all checks.
    seconds: f64,
}

impl Stepped {
    fn line(&self, verb: &str) -> String {
        let Self { name, bytes, seconds, .. } = self;
        let (done, place) = match verb {
            "suspend" => ("Suspended", "in host memory"),
            "resume" => ("Resumed", "in GPU memory"),
            _ => ("Moved", "on the other GPU"),
        };
        format!("{done} {name}: {} MiB are {place} after {seconds:.1} s.", bytes >> 20)
    }
}

/// Suspends each.
///
/// # Errors
/// The first that is not suspended; those before are.
pub fn run_suspend(arguments: &SuspendArguments, config: &Config) -> anyhow::Result<()> {
    let force = arguments.force;
    let step = |lease: &LeaseId| {
        if is_remote(config) {
            return ask(&Ask::Suspend { lease: lease.clone(), force }, config);
        }
        Ok(uninterrupted(|| suspend(lease, force, config))?)
    };
    each(&arguments.names, &arguments.output, ("suspend", "suspended"), config, step)
}

/// Resumes each, and waits for its room.
///
/// # Errors
/// The first that is not resumed; those before are.
pub fn run_resume(arguments: &ResumeArguments, config: &Config) -> anyhow::Result<()> {
    let deadline = Instant::now() + arguments.wait;
    let gpu = arguments.gpu.as_deref();
    let step = |lease: &LeaseId| loop {
        let done = if is_remote(config) {
            let gpu = gpu.map(str::to_owned);
            ask(&Ask::Resume { lease: lease.clone(), gpu }, config)
        } else {
            uninterrupted(|| resume(lease, gpu, config)).map_err(Into::into)
        };
        match done {
            Err(error) if is_temporary(&error) && Instant::now() < deadline => std::thread::sleep(LOOK_AGAIN),
            done => return done,
        }
    };
    each(&arguments.names, &arguments.output, ("resume", "active"), config, step)
}

/// Moves it.
///
/// # Errors
/// It is where it was, or was lost.
pub fn run_move(arguments: &MoveArguments, config: &Config) -> anyhow::Result<()> {
    let MoveArguments { name, gpu, output } = arguments;
    let step = |lease: &LeaseId| {
        if is_remote(config) {
            return ask(&Ask::Move { lease: lease.clone(), gpu: gpu.clone() }, config);
        }
        Ok(uninterrupted(|| move_to(lease, gpu, config))?)
    };
    each(std::slice::from_ref(name), output, ("move", "active"), config, step)
}

fn is_temporary(error: &anyhow::Error) -> bool {
    let own = error.downcast_ref().is_some_and(SuspendError::is_temporary);
    own || error.downcast_ref().is_some_and(AdmitError::is_temporary)
}

fn each(
    names: &[String],
    Output { format }: &Output,
    (verb, state): (&str, &'static str),
    config: &Config,
    step: impl Fn(&LeaseId) -> anyhow::Result<Done>,
) -> anyhow::Result<()> {
    let mut all = Vec::new();
    for text in names {
        let ledger = super::settled_ledger(config)?;
        let known = Names::learn(&ledger, config);
        let lease = lease_of(text, &ledger, &known)?;
        let name = label(lease, known.of(lease));
        let done = step(&lease.id).with_context(|| format!("container {name}: cannot {verb} it"))?;
        let (lease, seconds) = (lease.id.to_string(), done.took.as_secs_f64());
        let stepped = Stepped { name, lease, state, bytes: done.bytes, seconds };
        if *format == Format::Table {
            println!("{}", stepped.line(verb));
        }
        all.push(stepped);
    }
    if *format == Format::Json { tables::json(&all) } else { Ok(()) }
}

/// Has `sublet serve` do it, for a user's own container.
fn ask(ask: &Ask, config: &Config) -> anyhow::Result<Done> {
    match Broker::new(config).ask(ask).map_err(AdmitError::from)? {
        Answer::Stepped { bytes, took_ms } => Ok(Done { bytes, took: Duration::from_millis(took_ms) }),
        _ => Err(AdmitError::from(sublet_core::broker::client::BrokerError::UnexpectedAnswer).into()),
    }
}
