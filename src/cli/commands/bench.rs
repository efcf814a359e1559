//! `sublet bench`: what sharing a GPU costs, measured on this machine.

use std::process::ExitCode;

use clap::Subcommand;

use super::{bench_compare, bench_run, bench_show};
use sublet_core::config::Config;

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
