//! The hook's stages, for engines without the shim, and for `run`, which deletes the container without another command.
//!
//! A stage trusts only its standard input, because the working directory and the environment of a hook may
//! be the image's (CVE-2025-23266). The exception is precreate in a user namespace: Podman runs it in the container's
//! bundle, and its storage beside that is read, but only if standard input names the same container.

mod allowed_commands;
pub(crate) mod container_state;
mod create_runtime;
#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod journal;
mod precreate;
mod prestart;

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::time::{Duration, Instant};

use nix::unistd::getppid;

use container_state::{State, StateError};

use crate::bounded_input;
use crate::status::{FAILURE, SUCCESS};
use sublet_core::admit::Engine;
use sublet_core::admit::{AdmitError, Leases};
use sublet_core::config_files;
use sublet_core::config_files::{ConfigError, ConfigFiles};
use sublet_core::ledger::LeaseId;
use sublet_core::log::{self, Level, Log};
use sublet_core::oci::FileError;
use sublet_core::oci::cdi::{self, Asked, CdiError};
use sublet_core::oci::hooks::BadHooks;
use sublet_core::process::confine::{self, Rights, Side};

/// How long the runtime may take to write the state.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a stage failed, or why it refuses the container.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HookError {
    /// The first argument.
    #[error(
        "unknown stage {0}: the first argument has to be precreate, prestart, createRuntime, poststop or \
         cdi"
    )]
    UnknownStage(String),
    /// Standard input.
    #[error("the container's state on standard input: {0}")]
    State(#[from] StateError),
    /// Standard input of precreate.
    #[error("config.json on standard input: {0}")]
    Spec(StateError),
    /// Its content.
    #[error(transparent)]
    File(#[from] FileError),
    /// Its hooks.
    #[error(transparent)]
    Hooks(#[from] BadHooks),
    /// Its root filesystem.
    #[error("root.path in config.json is not the absolute path of a directory")]
    NoRootfs,
    /// An annotation.
    #[error("container {id}: sublet.lease={lease} is not a lease id of 16 hex digits")]
    Lease {
        /// The container.
        id: String,
        /// The annotation's text.
        lease: String,
    },
    /// The state names no running process.
    #[error("container {0}: its state names no process that runs (pid), so the lease cannot be bound to it")]
    NoPid(String),
    /// /proc/PID/cgroup of its process.
    #[error(
        "container {id}: the cgroup of its process cannot be read, so the lease cannot be bound to it: {source}"
    )]
    NoCgroup {
        /// The container.
        id: String,
        /// Why not.
        source: io::Error,
    },
    /// The state names no bundle.
    #[error("container {0}: its state names no bundle that exists, so the lease cannot be bound to it")]
    NoBundle(String),
    /// No share for it.
    #[error("container {id}: {why}")]
    Start {
        /// The container.
        id: String,
        /// Why not.
        why: String,
    },
    /// A CDI device.
    #[error("container {id}: {source}")]
    Cdi {
        /// The container.
        id: String,
        /// Why not.
        source: CdiError,
    },
    /// Not root on the host.
    #[error(
        "container {id}: a prestart hook or CDI device cannot give a rootless container its share, because \
         the hook may neither open devices nor enter other namespaces; use annotations, with Podman's \
         precreate hook or sublet-runtime"
    )]
    Rootless {
        /// The container.
        id: String,
    },
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No share for it.
    #[error(transparent)]
    Admit(#[from] AdmitError),
    /// The process that started the hook has ended.
    #[error("the engine that ran this hook has ended")]
    NoEngine,
    /// The hook's own program.
    #[error("sublet-hook cannot find its own program file; install it as /usr/libexec/sublet/sublet-hook")]
    NoProgram,
    /// The hook's own /proc entry.
    #[error("cannot read when this process started (is /proc mounted?): {0}")]
    Process(io::Error),
    /// The process that does the work.
    #[error("the hook did not finish: {0}")]
    Work(io::Error),
    /// Standard output.
    #[error("cannot return config.json to Podman: {0}")]
    Output(io::Error),
    /// The lease cannot be bound.
    #[error("container {id}: {source}")]
    Bind {
        /// The container.
        id: String,
        /// Why not.
        source: AdmitError,
    },
    /// The lease cannot be freed.
    #[error("container {id}: {source}; the next sublet command after its end frees its lease")]
    End {
        /// The container.
        id: String,
        /// Why not.
        source: AdmitError,
    },
}

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

/// Runs the hook; `args` begin with the program's name.
pub fn main(args: impl Iterator<Item = OsString>) -> u8 {
    let args: Vec<String> = args.skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    if let Some(text) = usage_or_version(&args) {
        let _ = io::stdout().write_all(text.as_bytes());
        return SUCCESS;
    }
    confine::clean();
    let own = ConfigFiles::read().parse().runtime().ok().and_then(|runtime| runtime.log);
    let log = Log::new("sublet-hook", None, false, own.as_deref());
    log::trace_to(log.clone(), false);
    // Done here, because the process that does the work may not examine others.
    let is_start = args.first().is_some_and(|stage| stage != "poststop");
    let engine = Engine::of(getppid().as_raw()).filter(|_| is_start);
    let said = |done: Result<(), HookError>| done.inspect_err(|error| report(&log, error)).is_ok();
    let done = match confine::fork_worker(rights(&args), allowed_commands::command) {
        Ok(Side::Worker) => said(run(&args, engine.as_ref(), &log)),
        Ok(Side::Waited(done)) => done,
        Err(error) => said(Err(HookError::Work(error))),
    };
    if done { SUCCESS } else { FAILURE }
}

fn report(log: &Log, error: &HookError) {
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

/// The answer to `--help` and `--version`, which are no stages.
fn usage_or_version(args: &[String]) -> Option<String> {
    match args.first()?.as_str() {
        "--help" | "-h" => Some(USAGE.to_owned()),
        "--version" | "-V" => Some(format!("sublet-hook {}\n", env!("CARGO_PKG_VERSION"))),
        _ => None,
    }
}

fn run(args: &[String], engine: Option<&Engine>, log: &Log) -> Result<(), HookError> {
    let stage = args.first().map(String::as_str).unwrap_or_default();
    let asked = || Asked::parse(args[1..].iter().map(String::as_str));
    match stage {
        "precreate" => precreate::precreate(engine, log),
        "createRuntime" => create_runtime(&read_state()?, engine, log),
        "prestart" => prestart::prestart(&read_state()?, None, engine, log),
        cdi::STAGE => {
            let container = read_state()?;
            let asked = asked().map_err(|source| HookError::Cdi { id: safe_id(&container), source })?;
            prestart::prestart(&container, Some(&asked), engine, log)
        }
        // For containers with CDI devices, with the same arguments as before their start.
        "poststop" => poststop(&read_state()?, asked().is_ok()),
        _ => Err(HookError::UnknownStage(sublet_core::text::safe(stage))),
    }
}

/// The container exists. Binds the lease that was taken for it before, or gives it its share now.
fn create_runtime(state: &State, engine: Option<&Engine>, log: &Log) -> Result<(), HookError> {
    match parse_lease(state)? {
        Some(lease) => {
            confine::drop_rights(Rights::Ledger);
            create_runtime::bind(state, &lease)
        }
        None => prestart::prestart(state, None, engine, log),
    }
}

/// The container's state from standard input.
fn read_state() -> Result<State, HookError> {
    let text =
        bounded_input::read(std::io::stdin(), container_state::LONGEST, Instant::now() + INPUT_TIMEOUT)
            .map_err(StateError::from)?;
    Ok(State::parse(&text)?)
}

fn safe_id(state: &State) -> String {
    sublet_core::text::safe(&state.id)
}

/// The lease that the container's annotation names.
fn parse_lease(state: &State) -> Result<Option<LeaseId>, HookError> {
    state.lease().map_err(|lease| HookError::Lease { id: safe_id(state), lease })
}

/// Frees the lease of the ended container: the one that its annotation names, or that a hook took for it (prestart,
/// `by_cdi`).
fn poststop(state: &State, by_cdi: bool) -> Result<(), HookError> {
    match parse_lease(state)? {
        Some(lease) => {
            let config = config_files::load()?;
            let leases = Leases::of(&config);
            leases.end(&lease).map_err(|source| HookError::End { id: safe_id(state), source })?;
            leases.clear_after(state.lease_record());
            Ok(())
        }
        None if by_cdi || state.has_sublet_annotations() => prestart::free_lease(state),
        None => Ok(()),
    }
}
