//! `sublet config check|show`.

use std::path::PathBuf;
use std::process::ExitCode;

use super::config_check;
use sublet_core::config::{self, Config};
use sublet_core::config_files;
use sublet_core::config_files::Containers;

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
    if containers.is_some() {
        sources.push(config_files::containers_path());
    }
    match command {
        Command::Check => check(&loaded, containers.as_ref(), &sources),
        Command::Show => {
            for source in sources {
                println!("# from {}", source.display());
            }
            print!("{}", toml::to_string(&config::written_out(&loaded))?);
            show_containers(containers.as_ref())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Reports everything that is found, and which files are in order if nothing is.
fn check(config: &Config, containers: Option<&Containers>, sources: &[PathBuf]) -> anyhow::Result<ExitCode> {
    let mut found = config_check::found(&config_files::each()?);
    found.errors.extend(containers.and_then(|containers| config_check::unknown_share(containers, config)));
    for warning in found.warnings {
        eprintln!("sublet: warning: {warning}");
    }
    for error in &found.errors {
        eprintln!("sublet: {error}");
    }
    if !found.errors.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    if sources.is_empty() {
        println!("No configuration file: built-in defaults are in force.");
    }
    for source in sources {
        println!("{}: ok", source.display());
    }
    Ok(ExitCode::SUCCESS)
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
