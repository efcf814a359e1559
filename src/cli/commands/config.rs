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

/// Runs it.
///
/// # Errors
/// The first error in the files, with file and line.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let etc = if let Command::Check { etc } = command { etc.as_deref() } else { None };
    // The files of the configuration itself, the weakest first, and `containers.toml`, whether or not it exists.
    let (mut sources, beside) = match etc {
        None => (config_files::sources()?, config_files::containers_path()),
        Some(etc) => {
            // A misspelt directory would have no errors in it.
            std::fs::read_dir(etc)
                .with_context(|| format!("cannot read {}", safe(&etc.to_string_lossy())))?;
            (config_files::sources_with(etc)?, etc.join("containers.toml"))
        }
    };
    let loaded = config_files::load_files(&sources)?;
    let containers = config_files::read_containers(&beside)?;
    let each = config_files::each(&sources)?;
    sources.extend(containers.is_some().then(|| beside.clone()));
    if let Command::Show = command {
        show(&loaded, containers.as_ref(), &sources)?;
        return Ok(ExitCode::SUCCESS);
    }
    // A container whose mapped share does not exist is refused at its start, so it is reported here.
    let unknown = containers.as_ref().and_then(|containers| containers.unknown_share(&loaded)).map(|share| {
        let (path, share) = (beside.display(), safe(share));
        format!(
            "configuration {path}: the configuration has no [share.{share}]: add it, or name another share"
        )
    });
    Ok(check(&each, etc, unknown, &sources))
}

/// `containers` are shown as comments, because the rest of the output is one configuration file and they are another.
fn show(config: &Config, containers: Option<&Containers>, sources: &[PathBuf]) -> anyhow::Result<()> {
    for source in sources {
        println!("# from {}", source.display());
    }
    print!("{}", toml::to_string(&config::written_out(config))?);
    let Some(containers) = containers else { return Ok(()) };
    println!("\n# {}:", config_files::containers_path().display());
    for line in toml::to_string(containers)?.lines() {
        println!("{}", format!("# {line}").trim_end());
    }
    Ok(())
}

// The part of `sublet config check` that looks at more than the files: at the layout, the host's users, and rules of
// several files together.

/// Reports what works, but perhaps not as it is meant, then what can never work as it is written, and which files are in
/// order if there is nothing of that. `etc`: the directory that stands for `/etc/sublet`, if another one does.
fn check(files: &[OneFile], etc: Option<&Path>, unknown: Option<String>, sources: &[PathBuf]) -> ExitCode {
    let mut errors = Vec::new();
    let mut aliases: Vec<&String> = Vec::new();
    for file in files {
        errors.extend(layout(file, etc));
        errors.extend(unknown_users(file));
        for (index, rule) in file.config.device.iter().enumerate() {
            let Some(name) = &rule.name else { continue };
            if aliases.contains(&name) {
                // It may be meant: the name then stands for any of the devices.
                let message = format!(
                    "another [[device]] is called {0} too: sublet.gpu=name:{0} takes any of their devices",
                    safe(name)
                );
                let key = ["device", &index.to_string(), "name"];
                eprintln!("sublet: warning: {}", file.about(&key, &message));
            }
            aliases.push(name);
        }
    }
    errors.extend(unknown);
    for error in &errors {
        eprintln!("sublet: {error}");
    }
    if !errors.is_empty() {
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
