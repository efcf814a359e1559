//! `sublet lease list|release`.

use anyhow::bail;

use super::status::{self, Host};
use super::tables::{self, Output};
use crate::names::{Names, Of, lease_of};
use sublet_core::admit::Leases;
use sublet_core::config::Config;

/// Subcommands of `sublet lease`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List leases and their containers
    List {
        #[command(flatten)]
        output: Output,
        #[command(flatten)]
        of: Of,
    },
    /// Release the lease of a container that has ended
    Release {
        /// The container's name or id, the lease's id, or the beginning of one that no other has
        #[arg(value_name = "CONTAINER")]
        id: String,
        /// Release it even if its container runs, or may run. Its processes keep the GPU, and are not counted any more
        #[arg(long)]
        force: bool,
    },
}

/// Runs it.
///
/// # Errors
/// There is no such lease, or its container still runs.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<()> {
    match command {
        Command::List { output: Output { format }, of } => {
            let mut status = Host::read(config)?.status;
            status.leases.retain(|held| of.has(&held.user, held.owner.as_ref()));
            tables::print(*format, &status.leases, || status::lease_table(&status, tables::terminal_width()))
        }
        Command::Release { id, force } => release(id, *force, config),
    }
}

fn release(text: &str, force: bool, config: &Config) -> anyhow::Result<()> {
    let ledger = super::settled_ledger(config)?;
    let names = Names::learn(&ledger, config);
    let lease = lease_of(text, &ledger, &names)?;
    let id = &lease.id;
    if !force {
        let container = status::label(lease, names.of(lease));
        let signs = ledger.describe_unended(lease, &config.state_dir).unwrap_or_else(|| {
            let signs = lease.signs_of_life();
            if signs.is_empty() { "it has just been started".to_owned() } else { signs.join("; ") }
        });
        bail!(
            "lease {id} is held by container {container}: {signs}; end the container, or use --force if it \
             has ended"
        );
    }
    Leases::of(config).withdraw(id)?;
    println!("Lease {id} released.");
    Ok(())
}
