//! `sublet mps list|start|stop|logs`.

use std::process::ExitCode;

use super::output::{self, Format};
use crate::admit::fresh_inventory;
use crate::config::Config;
use crate::ledger::Store;
use crate::mps::{self, ServerKey};

/// Subcommands of `sublet mps`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Every daemon of ours
    List {
        /// How to print it
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Start the daemon that a lease waits for, or bring it back
    Start {
        /// A device's UUID, or a lease id for a dedicated daemon
        key: String,
    },
    /// Stop a daemon that serves no lease
    Stop {
        /// A device's UUID, or a lease id for a dedicated daemon
        key: String,
    },
    /// Print a daemon's logs
    Logs {
        /// A device's UUID, or a lease id for a dedicated daemon
        key: String,
    },
}

/// Runs it.
///
/// # Errors
/// The daemon does not start, stop or exist.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    let store = Store::open(&config.state_dir)?;
    match command {
        Command::List { format } => list(*format, config)?,
        Command::Start { key } => {
            let inventory = fresh_inventory(config)?;
            for warning in mps::start(&ServerKey(key.clone()), &store, &inventory, config)? {
                eprintln!("sublet: {warning}");
            }
        }
        Command::Stop { key } => mps::stop(&ServerKey(key.clone()), &store, config)?,
        Command::Logs { key } => mps::logs(&ServerKey(key.clone()), config, &mut std::io::stdout())?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list(format: Format, config: &Config) -> anyhow::Result<()> {
    let ledger = super::settled_ledger(config)?;
    match format {
        Format::Json => output::json(&ledger.servers),
        Format::Table if ledger.servers.is_empty() => {
            println!("No MPS daemons.");
            Ok(())
        }
        Format::Table => {
            println!("{}", super::status::server_table(&fresh_inventory(config)?, &ledger));
            Ok(())
        }
    }
}
