//! The hook's stages, for engines without the shim, and for `run`, which deletes the container without another command.
//!
//! A stage trusts only its standard input, because the working directory and the environment of a hook may
//! be the image's (CVE-2025-23266). The exception is precreate in a user namespace: Podman runs it in the container's
//! bundle, and its storage beside that is read, but only if standard input names the same container.

mod allowed_commands;
pub(crate) mod container_state;
#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod journal;
mod precreate;
mod prestart;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use nix::libc::{EXIT_FAILURE, EXIT_SUCCESS};
use nix::unistd::getppid;

use crate::{bounded_input, shim};
use container_state::State;
use sublet_core::admit::{self, AdmitError, Engine, Leases};
use sublet_core::config_files::{self, ConfigFiles};
use sublet_core::ledger::{Binding, Init, LeaseId};
use sublet_core::log::{self, Level, Log};
use sublet_core::oci::cdi::{self, Asked};
use sublet_core::process::Process;
use sublet_core::process::confine::{self, Rights, Side};

/// How long the runtime may take to write the state.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// For people. Engines never ask for it.
const USAGE: &str = "\
The OCI hook of sublet. Engines run it as `sublet-hook STAGE`, with the container's state on standard input.
(`precreate` reads config.json there, and prints it with the edits.)

  precreate      Podman, before the container exists: take a lease and edit config.json
  createRuntime  any OCI runtime: bind the lease that precreate took, or do what prestart does
  prestart       any OCI runtime: take a lease and mount the share into the container
  cdi            createRuntime for a CDI device, with the share and the GPU as further arguments
  poststop       any OCI runtime: end what the container has left, free the lease

`sublet setup podman` configures Podman to run it. `sublet --help` lists the commands for people.
";

/// Runs the hook; `args` begin with the program's name. Returns its exit status.
pub fn main(args: &[OsString]) -> i32 {
    let args: Vec<String> = args.iter().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    // Neither is a stage.
    let answer = match args.first().map(String::as_str) {
        Some("--help" | "-h") => Some(USAGE),
        Some("--version" | "-V") => Some(concat!("sublet-hook ", env!("CARGO_PKG_VERSION"), "\n")),
        _ => None,
    };
    if let Some(text) = answer {
        let _ = io::stdout().write_all(text.as_bytes());
        return EXIT_SUCCESS;
    }
    confine::clean();
    let own = ConfigFiles::read().parse().runtime().ok().and_then(|runtime| runtime.log);
    let log = Log::new("sublet-hook", None, false, own.as_deref());
    log::trace_to(log.clone(), false);
    // Done here, because the process that does the work may not examine others.
    let is_start = args.first().is_some_and(|stage| stage != "poststop");
    let engine = Engine::of(getppid().as_raw()).filter(|_| is_start);
    let said = |done: anyhow::Result<()>| done.inspect_err(|error| report(&log, error)).is_ok();
    let done = match confine::fork_worker(rights(&args), allowed_commands::command) {
        Ok(Side::Worker) => said(run(&args, engine.as_ref(), &log)),
        Ok(Side::Waited(done)) => done,
        Err(error) => said(Err(anyhow!("the hook did not finish: {error}"))),
    };
    if done { EXIT_SUCCESS } else { EXIT_FAILURE }
}

fn report(log: &Log, error: &anyhow::Error) {
    log.write(Level::Error, &error.to_string());
    // Podman and crun discard the output of hooks.
    journal::write(Level::Error, &error.to_string());
}

/// The rights that the stage may need. Those that turn out to be superfluous are dropped later.
fn rights(args: &[String]) -> Rights {
    match args.first().map(String::as_str) {
        Some("createRuntime" | "prestart" | cdi::STAGE) => Rights::Container,
        Some("precreate") => Rights::Share,
        _ => Rights::Ledger,
    }
}

fn run(args: &[String], engine: Option<&Engine>, log: &Log) -> anyhow::Result<()> {
    let stage = args.first().map(String::as_str).unwrap_or_default();
    let asked = || Asked::parse(args[1..].iter().map(String::as_str));
    match stage {
        "precreate" => precreate::precreate(engine, log),
        "createRuntime" => create_runtime(&read_state()?, engine, log),
        "prestart" => prestart::prestart(&read_state()?, None, engine, log),
        cdi::STAGE => {
            let container = read_state()?;
            let asked = asked().map_err(|error| anyhow!("container {}: {error}", safe_id(&container)))?;
            prestart::prestart(&container, Some(&asked), engine, log)
        }
        // For containers with CDI devices, with the same arguments as before their start.
        "poststop" => poststop(&read_state()?, asked().is_ok()),
        _ => bail!(
            "unknown stage {}: the first argument has to be precreate, prestart, createRuntime, poststop or cdi",
            sublet_core::text::safe(stage)
        ),
    }
}

/// The container exists. Binds the lease that was taken for it before, or gives it its share now.
fn create_runtime(state: &State, engine: Option<&Engine>, log: &Log) -> anyhow::Result<()> {
    match parse_lease(state)? {
        Some(lease) => {
            confine::drop_rights(Rights::Ledger);
            bind(state, &lease)
        }
        None => prestart::prestart(state, None, engine, log),
    }
}

/// The container's state from standard input.
fn read_state() -> anyhow::Result<State> {
    let deadline = Instant::now() + INPUT_TIMEOUT;
    let text = bounded_input::read(std::io::stdin(), container_state::LONGEST, deadline);
    let state = text.map_err(anyhow::Error::from).and_then(|text| State::parse(&text));
    state.map_err(|error| anyhow!("the container's state on standard input: {error}"))
}

fn safe_id(state: &State) -> String {
    sublet_core::text::safe(&state.id)
}

/// The lease that the container's annotation names.
fn parse_lease(state: &State) -> anyhow::Result<Option<LeaseId>> {
    state.lease().map_err(|lease| {
        anyhow!("container {}: sublet.lease={lease} is not a lease id of 16 hex digits", safe_id(state))
    })
}

fn not_ended(state: &State, error: &AdmitError) -> anyhow::Error {
    let advice = "the next sublet command after its end frees its lease";
    anyhow!("container {}: {error}; {advice}", safe_id(state))
}

/// Frees the lease of the ended container: the one that its annotation names, or that a hook took for it (prestart,
/// `by_cdi`).
fn poststop(state: &State, by_cdi: bool) -> anyhow::Result<()> {
    match parse_lease(state)? {
        Some(lease) => {
            let config = config_files::load()?;
            let leases = Leases::of(&config);
            leases.end(&lease).map_err(|error| not_ended(state, &error))?;
            leases.clear_after(state.lease_record());
            Ok(())
        }
        None if by_cdi || state.has_sublet_annotations() => prestart::free_lease(state),
        None => Ok(()),
    }
}

/// Binds `lease` to the container of `state`. A failure keeps the container from starting, because without a lease its
/// GPU use would not be booked.
fn bind(state: &State, lease: &LeaseId) -> anyhow::Result<()> {
    let config = config_files::load()?;
    let id = safe_id(state);
    let process = state.pid.filter(|pid| *pid > 0).and_then(Process::find).filter(Process::is_alive);
    let unbound = "so the lease cannot be bound to it";
    let process = process
        .with_context(|| format!("container {id}: its state names no process that runs (pid), {unbound}"))?;
    let bundle = state.bundle.as_ref().and_then(|bundle| bundle.canonicalize().ok());
    let bundle = bundle
        .with_context(|| format!("container {id}: its state names no bundle that exists, {unbound}"))?;
    let record = shim::find_record(confine::engine(), &state.id).unwrap_or_default();
    let init = Init::of(process).map_err(|error| {
        anyhow!("container {id}: the cgroup of its process cannot be read, {unbound}: {error}")
    })?;
    let binding = Binding { id: state.id.clone(), bundle, record, init };
    Leases::of(&config).bind(lease, &binding).map_err(|error| {
        admit::clear_refused(&binding.bundle, &config);
        anyhow!("container {id}: {error}")
    })
}
