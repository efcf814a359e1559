//! `sublet config check|show`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use super::config_check::{self, Found};
use sublet_core::config;
use sublet_core::config_files;
use sublet_core::config_files::Containers;
use sublet_core::text::safe;

/// Subcommands of `sublet config`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Check the configuration files for errors
    Check {
        /// Check the files of this directory as if it were /etc/sublet, before they are put there
        #[arg(long, value_name = "DIR")]
        etc: Option<PathBuf>,
    },
    /// Show the configuration in force, defaults included
    Show,
}

/// The files to look at.
struct Sources {
    /// Those of the configuration itself, the weakest first.
    files: Vec<PathBuf>,
    /// `containers.toml`, whether or not it exists.
    containers: PathBuf,
}

impl Sources {
    /// Those in force, or those that would be if `etc` were `/etc/sublet`.
    fn find(etc: Option<&Path>) -> anyhow::Result<Self> {
        let Some(etc) = etc else {
            let (files, containers) = (config_files::sources()?, config_files::containers_path());
            return Ok(Self { files, containers });
        };
        // A misspelt directory would have no errors in it.
        std::fs::read_dir(etc).with_context(|| format!("cannot read {}", safe(&etc.to_string_lossy())))?;
        Ok(Self { files: config_files::sources_with(etc)?, containers: etc.join("containers.toml") })
    }
}

/// Runs it.
///
/// # Errors
/// The first error in the files, with file and line.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let etc = match command {
        Command::Check { etc } => etc.as_deref(),
        Command::Show => None,
    };
    let mut sources = Sources::find(etc)?;
    let loaded = config_files::load_files(&sources.files)?;
    let containers = config_files::read_containers(&sources.containers)?;
    let unknown = containers
        .as_ref()
        .and_then(|containers| config_check::unknown_share(containers, &sources.containers, &loaded));
    let each = config_files::each(&sources.files)?;
    if containers.is_some() {
        sources.files.push(sources.containers);
    }
    match command {
        Command::Check { .. } => {
            let mut found = config_check::found(&each, etc);
            found.errors.extend(unknown);
            Ok(check(found, &sources.files))
        }
        Command::Show => {
            for source in sources.files {
                println!("# from {}", source.display());
            }
            print!("{}", toml::to_string(&config::written_out(&loaded))?);
            show_containers(containers.as_ref())?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Reports everything that was found, and which files are in order if nothing was.
fn check(found: Found, sources: &[PathBuf]) -> ExitCode {
    for warning in found.warnings {
        eprintln!("sublet: warning: {warning}");
    }
    for error in &found.errors {
        eprintln!("sublet: {error}");
    }
    if !found.errors.is_empty() {
        return ExitCode::FAILURE;
    }
    if sources.is_empty() {
        println!("No configuration file: built-in defaults are in force.");
    }
    for source in sources {
        println!("{}: ok", source.display());
    }
    ExitCode::SUCCESS
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
