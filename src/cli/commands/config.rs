//! `sublet config check|show`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::doctor;
use crate::mig::Layout;
use sublet_core::config::{self, Config, PolicyRule};
use sublet_core::config_files::{self, Containers, OneFile};
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
    let unknown =
        containers.as_ref().and_then(|containers| unknown_share(containers, &sources.containers, &loaded));
    let each = config_files::each(&sources.files)?;
    if containers.is_some() {
        sources.files.push(sources.containers);
    }
    match command {
        Command::Check { .. } => {
            let mut found = found(&each, etc);
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

// The part of `sublet config check` that looks at more than the files: at the layout, the host's users, and rules of
// several files together.

/// What was found, one line each.
#[derive(Debug, Default)]
pub struct Found {
    /// What can never work as it is written.
    pub errors: Vec<String>,
    /// What works, but perhaps not as it is meant.
    pub warnings: Vec<String>,
}

/// Looks at all files. `etc`: the directory that stands for `/etc/sublet`, if another one does.
pub fn found(files: &[OneFile], etc: Option<&Path>) -> Found {
    let mut found = Found::default();
    let mut aliases: Vec<String> = Vec::new();
    for file in files {
        found.errors.extend(layout(file, etc));
        found.errors.extend(unknown_users(file));
        for (index, rule) in file.config.device.iter().enumerate() {
            let Some(name) = &rule.name else { continue };
            if aliases.contains(name) {
                found.warnings.push(same_alias(file, index, name));
            }
            aliases.push(name.clone());
        }
    }
    found
}

/// sublet-mig.service would fail at boot.
fn layout(file: &OneFile, etc: Option<&Path>) -> Option<String> {
    let path = file.config.mig.layout.as_deref()?;
    let instead = etc.and_then(|etc| Some(etc.join(path.strip_prefix("/etc/sublet").ok()?)));
    let error = Layout::read(instead.as_deref().unwrap_or(path), None).err()?;
    Some(file.about(&["mig", "layout"], &error.to_string()).to_string())
}

/// The rules of a user or group that this host does not have. They never apply.
fn unknown_users(file: &OneFile) -> Vec<String> {
    let problem = |(index, rule): (usize, &PolicyRule)| {
        let name = doctor::unknown(rule)?;
        let key = if rule.user.is_some() { "user" } else { "group" };
        let message = format!("this host has no {name}, so the rule never applies");
        Some(file.about(&["policy", &index.to_string(), key], &message).to_string())
    };
    file.config.policy.iter().enumerate().filter_map(problem).collect()
}

/// It may be meant: the name then stands for any of the devices.
fn same_alias(file: &OneFile, index: usize, name: &str) -> String {
    let name = safe(name);
    let message =
        format!("another [[device]] is called {name} too: sublet.gpu=name:{name} takes any of their devices");
    file.about(&["device", &index.to_string(), "name"], &message).to_string()
}

/// A container whose mapped share does not exist is refused at its start, so the check reports it here. `path`: where
/// `containers` is.
pub fn unknown_share(containers: &Containers, path: &Path, config: &Config) -> Option<String> {
    let share = containers.unknown_share(config)?;
    Some(format!(
        "configuration {}: the configuration has no [share.{share}]: add it, or name another share",
        path.display(),
        share = safe(share)
    ))
}
