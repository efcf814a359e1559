//! The `sublet` command: one file per subcommand.

#[macro_use]
mod closed_output;

mod advise;
mod bench;
mod bench_show;
mod cdi;
mod config;
mod doctor;
mod drain;
mod events;
mod explain;
mod gc;
mod lease;
mod metrics;
mod mig;
mod mig_list;
mod mps;
mod reason;
mod refresh;
mod report;
#[cfg(test)]
mod schemas;
mod setup;
mod slurm;
mod status;
mod stop;
mod suspend;
mod tables;
mod top;
mod wait;

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{ArgMatches, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use crate::suspend::put_right;
use sublet_core::admit::{AdmitError, Local, is_remote, own_status};
use sublet_core::broker::protocol::Ask;
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::log::{self, Log};
use sublet_core::names::replace_ids;
use sublet_core::text::{in_lines, safe};

/// Share NVIDIA GPUs among plain Docker and Podman containers.
#[derive(Debug, Parser)]
#[command(name = "sublet", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show devices, leases and MPS daemons
    Status(status::Arguments),
    /// Show GPUs and containers live: memory against limits, load, power, sparklines; its key ? shows the others
    Top(top::Arguments),
    /// Ask the driver for its devices and write the inventory
    Refresh(refresh::Arguments),
    /// Show what a share, a stack of services or a container gets, what that protects and what not; changes nothing
    Explain(explain::Arguments),
    /// Advise how many containers share a GPU best, as text to paste; each advice is one that would be placed
    Advise(advise::Arguments),
    /// Wait until the driver is up and a share is free, in order with all who wait; nobody is suspended for it
    Wait(wait::Arguments),
    /// List leases, or release one
    #[command(subcommand)]
    Lease(lease::Command),
    /// Release leases of containers that have ended, end what deleted ones have left, and restart crashed MPS daemons
    Gc(gc::Arguments),
    /// Show what happened: leases taken and ended, refusals, the guard's actions, MPS daemons, MIG instances
    Events(events::Arguments),
    /// Show who held how much of the GPUs, for how long, and what was used of it
    Report(report::Arguments),
    /// Print limits, use and counts for Prometheus
    Metrics(metrics::Arguments),
    /// Stop giving new leases on a device; leases that exist stay, or are moved to other GPUs
    Drain(drain::DrainArguments),
    /// Let a drained device take leases again
    Undrain(drain::UndrainArguments),
    /// Put containers' GPU memory into host memory: they stop computing, and their GPU has room for others
    Suspend(suspend::SuspendArguments),
    /// Bring suspended containers' GPU memory back: they go on where they were
    Resume(suspend::ResumeArguments),
    /// Move a container to another GPU of the same model while it runs: it goes on there, with the same data
    Move(suspend::MoveArguments),
    /// Make one call of the driver's on one process; sublet suspend, resume and move run it
    #[command(hide = true)]
    Checkpoint(crate::suspend::CheckpointArguments),
    /// Suspend one more process of a suspended container; the guard runs it
    #[command(hide = true)]
    SuspendNew(crate::suspend::NewArguments),
    /// Give one container the device nodes of these GPUs; sublet suspend, resume and move run it
    #[command(hide = true)]
    Nodes(crate::suspend::NodesArguments),
    /// List, start and stop MPS daemons, show their logs
    #[command(subcommand)]
    Mps(mps::Command),
    /// Offer named shares as CDI devices: docker run --device sublet/share=small.0
    #[command(subcommand)]
    Cdi(cdi::Command),
    /// List, plan and change the MIG instances of GPUs
    #[command(subcommand)]
    Mig(mig::Command),
    /// Measure what sharing a GPU costs, with built-in loads or your own image
    #[command(subcommand)]
    Bench(bench::Command),
    /// Use the GPU in this container again and again; sublet bench runs it there
    #[command(hide = true)]
    Load {
        /// What one iteration does
        load: crate::load::Load,
    },
    /// Check this host; each failed check comes with its fix. Exit code 1 if a check fails
    Doctor(doctor::Arguments),
    /// Report what this container got; sublet doctor --run runs it in a container
    #[command(hide = true)]
    Probe,
    /// Configure an engine to use sublet, or undo that
    Setup(setup::Arguments),
    /// Share GPUs among Slurm's jobs: lines for gres.conf, and what slurm.conf names as prolog and epilog
    #[command(subcommand)]
    Slurm(slurm::Command),
    /// Run the service, by systemd: the guard, leases for users, CDI devices, Docker's refused containers once there is room
    Serve,
    /// Check or show the configuration
    #[command(subcommand)]
    Config(config::Command),
}

/// The command line, for the generators of man pages and completions.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program; exit codes: 0 done, 1 failed, 2 bad usage (clap's).
pub fn main() -> ExitCode {
    sublet_core::process::inheritance::handle_sigxfsz();
    // In more than 100 characters, clap's default, a line of options is hard to read.
    let command = Arguments::command().term_width(tables::terminal_width().unwrap_or(100));
    let code = command.try_get_matches().map_or_else(|answer| tell(&answer), |matches| run_matched(&matches));
    if closed_output::finish() { code } else { ExitCode::FAILURE }
}

fn run_matched(matches: &ArgMatches) -> ExitCode {
    let arguments = Arguments::from_arg_matches(matches).unwrap_or_else(|error| error.exit());
    // The library's warnings, such as that of a rebuilt ledger, are shown to the user who ran the command.
    log::trace_to(Log::new("sublet", None, false, None), false);
    run(arguments.command).unwrap_or_else(|error| {
        report(&error, wants_json(matches));
        ExitCode::FAILURE
    })
}

/// Prints clap's answer: help, the version, or the fault in the command line.
fn tell(answer: &clap::Error) -> ExitCode {
    let print = if answer.use_stderr() { closed_output::err } else { closed_output::line };
    print(format_args!("{}", answer.render().to_string().trim_end()));
    u8::try_from(answer.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Whether the subcommand was given `--format json`.
fn wants_json(matches: &ArgMatches) -> bool {
    let given = matches.try_get_raw("format").ok().flatten();
    let here = given.into_iter().flatten().any(|format| format == "json");
    here || matches.subcommand().is_some_and(|(_, arguments)| wants_json(arguments))
}

/// What a command that fails prints as JSON.
#[derive(serde::Serialize, schemars::JsonSchema)]
struct ErrorObject<'a> {
    /// As on standard error, in one line.
    error: &'a str,
    /// A word that is never renamed; docs/explain.md lists them all.
    reason: &'static str,
    /// Each device that could have served it, and why it does not.
    candidates: &'a [String],
}

/// A message on standard error. A reader of JSON gets an object on standard output too, if nothing is there yet.
fn report(error: &anyhow::Error, as_json: bool) {
    let line = replace_ids(&tables::chain(error));
    if as_json && !closed_output::has_begun() {
        let refused = error.downcast_ref::<AdmitError>();
        let candidates = refused.map(AdmitError::candidates).unwrap_or_default();
        let object = ErrorObject { error: &line, reason: reason::reason(error), candidates };
        // Serializing fails only for maps whose keys are not strings.
        print!("{}\n", serde_json::to_string(&object).unwrap_or_default());
    }
    eprintln!("sublet: {}", in_lines(&line));
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    // Some commands run although the configuration is not valid.
    let config = sublet_core::config_files::load;
    match command {
        Command::Config(command) => return config::run(&command),
        Command::Doctor(arguments) => return doctor::run(&arguments),
        Command::Top(arguments) => return top::run(&arguments, &config()?),
        Command::Explain(arguments) => return explain::run(&arguments, &config()?),
        Command::Advise(arguments) => return advise::run(&arguments, &config()?),
        Command::Metrics(arguments) => return metrics::run(&arguments, &config()?),
        Command::Mig(command) => return mig::run(&command, &config()?),
        Command::Setup(arguments) => return setup::run(&arguments, &config()?),
        Command::Slurm(command) => return slurm::run(&command, &config()?),
        Command::Bench(command) => return bench::run(&command, &config()?),
        Command::Probe => doctor::probe()?,
        Command::Load { load } => crate::load::run(load).map_err(anyhow::Error::msg)?,
        Command::Status(arguments) => status::run(&arguments, &config()?)?,
        Command::Refresh(arguments) => refresh::run(&arguments, &config()?)?,
        Command::Wait(arguments) => wait::run(&arguments, &config()?)?,
        Command::Lease(command) => lease::run(&command, &config()?)?,
        Command::Gc(arguments) => gc::run(&arguments, &config()?)?,
        Command::Events(arguments) => events::run(&arguments, &config()?)?,
        Command::Report(arguments) => report::run(&arguments, &config()?)?,
        Command::Drain(arguments) => drain::drain(&arguments, &config()?)?,
        Command::Undrain(arguments) => drain::undrain(&arguments, &config()?)?,
        Command::Suspend(arguments) => suspend::run_suspend(&arguments, &config()?)?,
        Command::Resume(arguments) => suspend::run_resume(&arguments, &config()?)?,
        Command::Move(arguments) => suspend::run_move(&arguments, &config()?)?,
        Command::SuspendNew(arguments) => {
            if let Some(answer) = crate::suspend::suspend_new_process(&arguments)? {
                println!("{answer}");
            }
        }
        Command::Nodes(arguments) => crate::suspend::change_nodes(&arguments)?,
        Command::Checkpoint(arguments) => {
            if let Some(answer) = crate::suspend::checkpoint(&arguments)? {
                println!("{answer}");
            }
        }
        Command::Mps(command) => mps::run(&command, &config()?)?,
        Command::Cdi(command) => cdi::run(&command, &config()?)?,
        Command::Serve => serve(&config()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves until it receives SIGTERM or SIGINT.
fn serve(config: &Config) -> anyhow::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "`sublet serve` manages the ledger and the MPS daemons for other users: run it as root, or by \
         systemd"
        );
    }
    crate::serve::serve(config)
}

/// Parses the `K=V` of `--annotation`.
fn annotation(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{}: write KEY=VALUE", safe(text)))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// `sm=25`, short for the annotation `sublet.sm=25`.
fn share(text: &str) -> Result<(String, String), String> {
    let (key, value) = annotation(text)?;
    let key = if key.starts_with("sublet.") { key } else { format!("sublet.{key}") };
    Ok((key, value))
}

/// The ledger after leases of ended containers have been freed and crashed MPS daemons restarted. Every command that
/// reports shows this state. Its actions are written to standard error.
fn settled_ledger(config: &Config) -> anyhow::Result<Ledger> {
    let is_remote = is_remote(config);
    if is_remote && !config.state_dir.exists() {
        // No command has created it yet with root's rights.
        own_status(&Ask::Status, config)?;
    }
    let store = Store::open(&config.state_dir)?;
    if is_remote {
        // The part of the ledger that a user without root may see. `sublet serve` frees leases of ended containers.
        return Ok(store.peek()?);
    }
    match Local::new(config).reconcile(|_| Ok(())) {
        Err(error) if error.is_elsewhere() => {
            eprintln!("sublet: {error}; the ledger is shown as it is");
            return Ok(store.peek()?);
        }
        done => done?.lines.iter().for_each(|line| eprintln!("sublet: {line}")),
    }
    let say = |line: &str| eprintln!("sublet: {line}");
    put_right(config, say).iter().flatten().for_each(|(_, line)| say(line));
    store.read().context("after freeing leases of containers that have ended")
}

/// The devices that `text` names, at least one.
fn devices<'i>(text: &str, inventory: &'i Inventory, config: &Config) -> anyhow::Result<Vec<&'i Device>> {
    let found = sublet_core::place::meant(text, inventory, config).map_err(anyhow::Error::msg)?;
    if found.is_empty() { Err(no_device(text)) } else { Ok(found) }
}

fn no_device(text: &str) -> anyhow::Error {
    anyhow::anyhow!("there is no device {}: `sublet status` lists the devices", safe(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Helps of `command` and of all below it, as a terminal of 80 shows them.
    fn helps(command: &mut clap::Command) -> Vec<String> {
        let own = tables::wrapped(&command.render_long_help().to_string(), Some(80));
        [own].into_iter().chain(command.get_subcommands_mut().flat_map(helps)).collect()
    }

    #[test]
    fn help_fits_its_terminal_and_explains_its_words() {
        let mut command = Arguments::command().term_width(80);
        command.build();
        let all = helps(&mut command);
        assert!(all.len() > 30, "{}", all.len());
        for help in all {
            assert!(help.lines().all(|line| line.chars().count() <= 80) && !help.contains('`'), "{help}");
            let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(!words.contains("G:M") || words.contains("MIG device M of GPU G"), "{help}");
        }
    }

    #[test]
    fn any_command_may_be_asked_for_json() {
        let wants = |line: &str| wants_json(&Arguments::command().get_matches_from(line.split(' ')));
        for line in [
            "sublet status --format json",
            "sublet lease list --format=json",
            "sublet explain sm=1 --format json",
            "sublet report --format json",
        ] {
            assert!(wants(line), "{line}");
        }
        for line in
            ["sublet status", "sublet lease list --format table", "sublet report --format csv", "sublet gc"]
        {
            assert!(!wants(line), "{line}");
        }
    }
}
