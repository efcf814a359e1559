//! The hook's stages, for engines without the shim and for `run`, which deletes by itself.
//!
//! Standard input is all that a stage believes: the working directory and the environment of a hook may
//! be the image's (CVE-2025-23266).

mod prestart;
mod state;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::admit::{self, AdmitError};
use crate::config::{self, ConfigError};
use crate::runtime::Global;
use crate::runtime::log::{self, Level, Log};
use state::{State, StateError};

/// How long the runtime may take to write the state.
const INPUT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a stage failed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// The first argument.
    #[error("no stage {0}: the first argument is prestart, createRuntime or poststop")]
    UnknownStage(String),
    /// A stage that will come.
    #[error("stage {0} is not yet in this version")]
    NotYet(String),
    /// Standard input.
    #[error("the container's state on standard input: {0}")]
    State(#[from] StateError),
    /// Its annotation.
    #[error("container {id}: sublet.lease={lease} is no lease id of 16 hex digits")]
    Lease {
        /// The container.
        id: String,
        /// What it has instead.
        lease: String,
    },
    /// No share for it.
    #[error("container {id}: {why}")]
    Start {
        /// The container.
        id: String,
        /// Why not.
        why: String,
    },
    /// Not root on the host.
    #[error(
        "container {id}: a prestart hook cannot give a rootless container its share: it may neither open \
         devices nor enter other namespaces; use Podman's precreate hook or sublet-runtime"
    )]
    Rootless {
        /// The container.
        id: String,
    },
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The lease cannot be freed.
    #[error("container {id}: {source}; the next sublet command frees its lease once it is gone")]
    End {
        /// The container.
        id: String,
        /// Why not.
        source: AdmitError,
    },
}

/// Runs the hook; `args` begin with the program's name.
pub fn main(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let own = config::load_runtime().ok().and_then(|runtime| runtime.log);
    let log = Log::new("sublet-hook", &Global::default(), own.as_deref());
    log::trace_to(log.clone(), false);
    let stage = args.nth(1).unwrap_or_default();
    match run(&stage.to_string_lossy(), &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.write(Level::Error, &error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run(stage: &str, log: &Log) -> Result<(), HookError> {
    match stage {
        "prestart" | "createRuntime" => prestart::prestart(&read_state()?, log),
        "poststop" => poststop(&read_state()?),
        "precreate" => Err(HookError::NotYet(stage.to_owned())),
        _ => Err(HookError::UnknownStage(crate::text::safe(stage))),
    }
}

fn read_state() -> Result<State, StateError> {
    State::parse(&state::read(std::io::stdin(), Instant::now() + INPUT_TIMEOUT)?)
}

/// The container is gone: frees the lease that its annotation names, or that a hook took for it.
fn poststop(state: &State) -> Result<(), HookError> {
    let id = crate::text::safe(&state.id);
    let lease = state.lease().map_err(|lease| HookError::Lease { id: id.clone(), lease })?;
    match lease {
        Some(lease) => {
            let config = config::load()?;
            admit::end(&lease, &config).map_err(|source| HookError::End { id, source })
        }
        None if state.is_ours() => prestart::ended(state),
        None => Ok(()),
    }
}
