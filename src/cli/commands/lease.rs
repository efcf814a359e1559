//! `sublet lease list|release`.

use std::process::ExitCode;

use anyhow::bail;

use super::tables::{self, Format};
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::ledger::LeaseId;
use sublet_core::text::safe;

/// Subcommands of `sublet lease`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List leases and their containers
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Release the lease of a container that has ended
    Release {
        /// The lease id
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
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { format } => list(*format, config),
        Command::Release { id, force } => release(id, *force, config),
    }
}

fn list(format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let ledger = super::settled_ledger(config)?;
    let inventory = admit::fresh_inventory(config)?;
    match format {
        Format::Json => tables::json(&super::status::leases_json(&inventory, &ledger))?,
        Format::Table => println!("{}", super::status::lease_table(&inventory, &ledger)),
    }
    Ok(ExitCode::SUCCESS)
}

fn release(text: &str, force: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let Some(id) = LeaseId::parse(text) else {
        bail!(
            "{} is not a lease id: 16 hex digits are expected (`sublet lease list` shows the ids)",
            safe(text)
        )
    };
    let ledger = super::settled_ledger(config)?;
    let Some(lease) = ledger.lease(&id) else {
        bail!("there is no lease {id}: `sublet lease list` shows the leases")
    };
    if !force {
        let (container, signs) = (tables::short(&lease.container.name()), lease.signs_of_life());
        let signs = if signs.is_empty() { "it has just been started".to_owned() } else { signs.join("; ") };
        bail!(
            "lease {id} is held by container {container}: {signs}; end the container, or use --force if it \
             has ended"
        );
    }
    admit::withdraw(&id, config)?;
    println!("Lease {id} released.");
    Ok(ExitCode::SUCCESS)
}
