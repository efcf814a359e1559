//! `sublet lease list|release`.

use std::process::ExitCode;

use anyhow::bail;

use super::status::Host;
use super::tables::{self, Column, Format};
use crate::names::{Name, Names, lease_of};
use crate::shown::lease::{busy, called, cut, memory, mode, whole};
use crate::shown::word;
use crate::status::{LeaseOnDevice, Status};
use sublet_core::admit::Leases;
use sublet_core::config::Config;
use sublet_core::ledger::Lease;
use sublet_core::text::{LONGEST_NAME, safe, short_id};

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
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { format } => list(*format, config),
        Command::Release { id, force } => release(id, *force, config),
    }
}

fn list(format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let status = Host::read(config)?.status;
    tables::print(format, &status.leases, || table(&status, tables::terminal_width()))
}

fn release(text: &str, force: bool, config: &Config) -> anyhow::Result<ExitCode> {
    let ledger = super::settled_ledger(config)?;
    let names = Names::learn(&ledger, config);
    let lease = lease_of(text, &ledger, &names)?;
    let id = &lease.id;
    if !force {
        let (container, signs) = (label(lease, names.of(lease)), lease.signs_of_life());
        let unended = ledger.unended(lease, &config.state_dir);
        let signs = if signs.is_empty() { "it has just been started".to_owned() } else { signs.join("; ") };
        let signs = unended.unwrap_or(signs);
        bail!(
            "lease {id} is held by container {container}: {signs}; end the container, or use --force if it \
             has ended"
        );
    }
    Leases::of(config).withdraw(id)?;
    println!("Lease {id} released.");
    Ok(ExitCode::SUCCESS)
}

// The table of leases and the containers that hold them.

/// The columns. Those with the highest number go first where a terminal is too narrow for all of them.
const COLUMNS: [Column; 13] = [
    Column("CONTAINER", 0),
    Column("IMAGE", 8),
    Column("USER", 6),
    Column("GPU", 0),
    Column("MODE", 1),
    Column("SM", 0),
    Column("BUSY", 2),
    Column("MEMORY", 0),
    Column("PROCESSES", 7),
    Column("STATE", 3),
    Column("PID", 9),
    Column("AGE", 5),
    Column("LEASE", 4),
];

/// The table, no wider than `width` characters as far as columns can be left out; a line where there is no lease.
pub fn table(status: &Status, width: Option<usize>) -> String {
    if status.leases.is_empty() {
        return "No leases.".to_owned();
    }
    let rows: Vec<_> = status.leases.iter().map(|lease| row(lease, status)).collect();
    tables::fitting(&COLUMNS, &rows, width)
}

fn row(lease: &LeaseOnDevice, status: &Status) -> Vec<String> {
    let or_dash =
        |text: Option<String>| text.filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    let image = lease.image.as_deref().map(|image| tables::end_of(&safe(image), LONGEST_NAME));
    vec![
        called(lease),
        or_dash(image),
        lease.user.clone(),
        status.number(&lease.device).into_owned(),
        mode(lease, status),
        lease.sm_percent.map_or_else(|| whole(lease), |sm| format!("{sm} %")),
        busy(lease),
        memory(lease),
        or_dash(lease.used.processes.map(|processes| processes.to_string())),
        word(&lease.state),
        or_dash(lease.pid.map(|pid| pid.to_string())),
        tables::ago(lease.taken),
        lease.id.clone(),
    ]
}

/// The same of a lease in the ledger.
pub fn label(lease: &Lease, name: Option<&Name>) -> String {
    let called = name
        .and_then(|name| [&name.name, &name.part_of, &name.unit].into_iter().find(|text| !text.is_empty()));
    called.map_or_else(|| short_id(&lease.container.name()), |called| cut(called))
}
