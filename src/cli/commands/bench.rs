//! `sublet bench`: what sharing a GPU costs, measured on this machine.

use std::process::ExitCode;

use clap::Subcommand;

use super::bench_run;
use sublet_core::config::Config;

/// Subcommands of `sublet bench`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure containers that share a GPU, in each mode and with each number of them
    Run(bench_run::Arguments),
}

/// Runs one.
///
/// # Errors
/// As its own.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(arguments) => bench_run::run(arguments, config),
    }
}
