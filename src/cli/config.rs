//! `sublet config check|show`.

use std::process::ExitCode;

use crate::config;

/// Subcommands of `sublet config`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Whether the files can be used; the pre-flight before containers start
    Check,
    /// The configuration in force, defaults included
    Show,
}

/// Runs it.
///
/// # Errors
/// The first error in the files, with file and line.
pub fn run(command: &Command) -> anyhow::Result<ExitCode> {
    let loaded = config::load()?;
    let sources = config::sources()?;
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
            print!("{}", config::to_toml(&loaded)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}
