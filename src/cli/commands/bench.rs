//! `sublet bench`: what sharing a GPU costs, measured on this machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use anyhow::bail;
use clap::Subcommand;
use rustix::fs::{Access, access};

use super::{bench_compare, bench_run, bench_show};
use crate::bench::run::Planned;
use crate::bench::{BenchResult, Settings, Sharing};
use crate::names::Names;
use crate::preview::Whose;
use crate::stack::{Fitted, NotPlaced, Outcome, Service, Stack, fit};
use sublet_core::admit::{AdmitError, confirmed_inventory};
use sublet_core::config::Config;
use sublet_core::text::safe;

/// Subcommands of `sublet bench`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure containers that share a GPU, in each mode and with each number of them
    Run(Box<bench_run::Arguments>),
    /// Show a result as a table, a picture or a page
    Show(bench_show::Arguments),
    /// Compare two results, cell by cell
    Compare(bench_compare::Arguments),
}

/// Runs one.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(arguments) => bench_run::run(arguments, config),
        Command::Show(arguments) => bench_show::run(arguments),
        Command::Compare(arguments) => bench_compare::run(arguments),
    }
}

// Whether every container of a cell gets a MIG device where `[mig] dynamic` creates those that are missing.

/// Why not all containers of `planned` would start on the GPU with this UUID; `None`: they would, or nothing would be
/// created for them.
pub fn lacking(planned: &Planned, gpu: &str, config: &Config) -> Option<String> {
    let is_made = config.mig.dynamic && planned.mode.sharing == Sharing::Mig && !planned.by_hand;
    if !is_made {
        return None;
    }
    refused(planned, gpu, config).unwrap_or_else(|error| Some(super::tables::chain(&error)))
}

fn refused(planned: &Planned, gpu: &str, config: &Config) -> anyhow::Result<Option<String>> {
    let annotations = planned.annotations(gpu);
    let stack =
        Stack { services: (0..planned.n).map(|_| service(&annotations)).collect(), ..Stack::default() };
    let world = (super::settled_ledger(config)?, confirmed_inventory(config)?);
    let (fitted, _) = fit(&stack, None, world, &Names::default(), Whose::callers(config), config)?;
    let refused = |(number, Fitted { outcome, .. }): (usize, Fitted)| match outcome {
        // The rest of that refusal is of the devices that are there.
        Outcome::Not(NotPlaced::Refused(AdmitError::Unmade { why, .. })) => {
            Some(format!("container {} gets no MIG device: {why}", number + 1))
        }
        Outcome::Not(why) => Some(format!("container {} would be refused: {why}", number + 1)),
        _ => None,
    };
    Ok((0..).zip(fitted).find_map(refused))
}

fn service(annotations: &BTreeMap<String, String>) -> Service {
    Service { annotations: annotations.clone(), runtime: Some("sublet".to_owned()), ..Service::default() }
}

// The file of `sublet bench run`: looked at before anything starts, and gone on with.

/// What the file has already, to be gone on with; `None`: there is no such file.
///
/// # Errors
/// It cannot be written, is no result, or is there although nobody said `resume`.
pub fn before(file: &Path, resume: bool) -> anyhow::Result<Option<BenchResult>> {
    let name = safe(&file.to_string_lossy());
    let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if file.is_dir() {
        bail!("--output {name}: it is a directory: name a file in it");
    }
    let shown = safe(&dir.to_string_lossy());
    if !dir.is_dir() {
        bail!("--output {name}: {shown} is no directory: create it, or name another one");
    }
    if let Err(error) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        bail!("--output {name}: nothing can be written into {shown}: {error}; name another directory");
    }
    if !file.exists() {
        return Ok(None);
    }
    if !resume {
        bail!("{name} exists: --resume goes on with it, --output names another file");
    }
    Ok(Some(BenchResult::read(file)?))
}

/// `new`, with what was measured `before`.
///
/// # Errors
/// That was measured on another GPU, by another driver or engine, or in another way.
pub fn go_on(before: BenchResult, new: BenchResult, file: &Path) -> anyhow::Result<BenchResult> {
    let same = |what: &str, same: bool| {
        if same {
            return Ok(());
        }
        let name = safe(&file.to_string_lossy());
        bail!("{name} was measured with another {what}: it cannot be gone on with")
    };
    same("GPU", before.machine.uuid == new.machine.uuid)?;
    same("driver", before.machine.driver == new.machine.driver)?;
    same("engine", before.machine.engine == new.machine.engine)?;
    let bare = |settings: &Settings| Settings { sm_overcommit: 1.0, time_slice_max: 0, ..settings.clone() };
    same("command or time", bare(&before.settings) == bare(&new.settings))?;
    let in_use_by_others = before.in_use_by_others || new.in_use_by_others;
    Ok(BenchResult { in_use_by_others, settings: new.settings, ..before })
}
