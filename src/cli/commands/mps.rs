//! `sublet mps list|start|stop|logs`.

use std::process::ExitCode;

use super::tables::{self, Format};
use crate::mps_daemons;
use sublet_core::admit::fresh_inventory;
use sublet_core::config::Config;
use sublet_core::ledger::DaemonKey;
use sublet_core::ledger::Store;
use sublet_core::mps::MpsError;

/// Subcommands of `sublet mps`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the MPS daemons that sublet runs
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Start an MPS daemon that a lease needs, or restart it
    Start {
        /// A device's UUID, or a lease id for a dedicated daemon
        key: String,
    },
    /// Stop an MPS daemon that serves no lease
    Stop {
        /// A device's UUID, or a lease id for a dedicated daemon
        key: String,
        /// Stop it even if it serves leases or does not answer; the GPU work of its clients ends
        #[arg(long)]
        force: bool,
        /// Succeed if there is no such daemon; sublet's own programs use this
        #[arg(long = "if-there", hide = true)]
        if_there: bool,
    },
    /// Restore the compute mode under a daemon that waits for its next lease; sublet's own programs call this
    #[command(hide = true)]
    Rest {
        /// A device's UUID
        key: String,
    },
    /// Print the logs of an MPS daemon and its server
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
        Command::List { format } => list(*format, &store, config)?,
        Command::Start { key } => warn(mps_daemons::start(&DaemonKey(key.clone()), &store, config)?),
        Command::Stop { key, force, if_there } => {
            let key = DaemonKey(key.clone());
            if !if_there && !mps_daemons::exists(&key, &store, config)? {
                return Err(MpsError::NoDaemon { key: key.to_string() }.into());
            }
            warn(mps_daemons::stop(&key, *force, &store, config)?);
        }
        Command::Rest { key } => warn(mps_daemons::rest(&DaemonKey(key.clone()), &store, config)?),
        Command::Logs { key } => {
            for (file, text) in mps_daemons::logs(&DaemonKey(key.clone()), config)? {
                println!("== {file}\n{}", text.trim_end());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes one warning per line to standard error, which sublet's own programs read.
fn warn(warnings: Vec<String>) {
    for warning in warnings {
        eprintln!("sublet: warning: {warning}");
    }
}

fn list(format: Format, store: &Store, config: &Config) -> anyhow::Result<()> {
    super::settled_ledger(config)?;
    let daemons = mps_daemons::list(store, config)?;
    match format {
        Format::Json => tables::json(&daemons)?,
        Format::Table if daemons.is_empty() => println!("No MPS daemons."),
        Format::Table => println!("{}", super::status::daemon_table(&daemons, &fresh_inventory(config)?)),
    }
    Ok(())
}
