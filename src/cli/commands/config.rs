//! `sublet config check|show`.

use std::process::ExitCode;

use anyhow::bail;

use sublet_core::config::{self, Config};
use sublet_core::config_files;
use sublet_core::config_files::Containers;
use sublet_core::text::safe;

/// Subcommands of `sublet config`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the configuration files for errors
    Check,
    /// Show the configuration in force, defaults included
    Show,
}

/// Runs it.
///
/// # Errors
/// The first error in the files, with file and line.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let loaded = config_files::load()?;
    for warning in loaded.warnings() {
        eprintln!("sublet: warning: {warning}");
    }
    let containers = config_files::load_containers()?;
    let mut sources = config_files::sources()?;
    if let Some(containers) = &containers {
        check_shares(containers, &loaded)?;
        sources.push(config_files::containers_path());
    }
    match command {
        Command::Check if sources.is_empty() => {
            println!("No configuration file: built-in defaults are in force.");
        }
        Command::Check => {
            for source in sources {
                println!("{}: ok", source.display());
            }
        }
        Command::Show => {
            for source in sources {
                println!("# from {}", source.display());
            }
            print!("{}", toml::to_string(&config::written_out(&loaded))?);
            show_containers(containers.as_ref())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A container whose mapped share does not exist is refused at its start, so the check reports it here.
fn check_shares(containers: &Containers, config: &Config) -> anyhow::Result<()> {
    let Some(share) = containers.unknown_share(config) else { return Ok(()) };
    bail!(
        "configuration {}: the configuration has no [share.{share}]: add it, or name another share",
        config_files::containers_path().display(),
        share = safe(share)
    )
}

/// Shown as comments, because the rest of the output is one configuration file and this is another.
fn show_containers(containers: Option<&Containers>) -> anyhow::Result<()> {
    let Some(containers) = containers else { return Ok(()) };
    println!("\n# {}:", config_files::containers_path().display());
    for line in toml::to_string(containers)?.lines() {
        println!("{}", format!("# {line}").trim_end());
    }
    Ok(())
}
