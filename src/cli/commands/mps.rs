//! `sublet mps list|start|stop|logs`.

use anyhow::{Context as _, bail};

use super::tables::{self, Format, Output};
use crate::mps_daemons;
use crate::names::{Names, NoLease, lease_of};
use crate::terminal::warn;
use sublet_core::admit::{Local, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::inventory::Device;
use sublet_core::ledger::{DaemonKey, LeaseId, Store};
use sublet_core::mps::{self, MpsError};
use sublet_core::place;
use sublet_core::text::safe;

/// The length of `GPU-` or `MIG-` and a UUID.
const UUID: usize = 40;

/// Subcommands of `sublet mps`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the MPS daemons that sublet runs
    List(Output),
    /// Start an MPS daemon that a lease needs, or restart it
    Start {
        /// A device (index, UUID or its beginning, PCI bus id, alias; G:M: MIG device M of GPU G), or a container
        /// with a daemon of its own
        #[arg(value_name = "DEVICE|CONTAINER")]
        key: String,
    },
    /// Stop an MPS daemon that serves no lease
    Stop {
        /// As for start
        #[arg(value_name = "DEVICE|CONTAINER")]
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
    /// Lower the limits of a daemon to what its remaining leases need; sublet's own programs call this
    #[command(hide = true)]
    Lower {
        /// A device's UUID, or a lease
        key: String,
    },
    /// Free a lease when its container ends, and end its daemon; sublet's own programs call this
    #[command(hide = true)]
    Await {
        /// The lease's id
        lease: String,
    },
    /// Print the logs of an MPS daemon and its server
    Logs {
        /// As for start
        #[arg(value_name = "DEVICE|CONTAINER")]
        key: String,
    },
}

/// Runs it.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<()> {
    let store = Store::open(&config.state_dir)?;
    match command {
        Command::List(Output { format }) => return list(*format, &store, config),
        Command::Start { key } => warn(mps_daemons::start(&key_of(key, &store, config)?, &store, config)?),
        Command::Stop { key, force, if_there } => {
            let key = key_of(key, &store, config)?;
            if !if_there && !mps_daemons::exists(&key, &store, config)? {
                return Err(MpsError::NoDaemon { key: key.to_string() }.into());
            }
            warn(mps_daemons::stop(&key, *force, &store, config)?);
        }
        Command::Rest { key } => warn(mps_daemons::rest(&DaemonKey(key.clone()), &store, config)?),
        Command::Lower { key } => {
            let lowered = mps::lower(&DaemonKey(key.clone()), &store, config);
            // Its changes of the ledger free leases of containers that have ended meanwhile, before their `delete` does.
            Local::new(config).reconcile(|_| Ok(()))?;
            lowered?;
        }
        Command::Await { lease } => {
            let id = LeaseId::parse(lease).with_context(|| format!("{} is no lease id", safe(lease)))?;
            mps_daemons::await_end(&id, &store, config)?;
        }
        Command::Logs { key } => {
            for (file, text) in mps_daemons::logs(&key_of(key, &store, config)?, config)? {
                print!("== {file}\n{}\n", text.trim_end());
            }
        }
    }
    Ok(())
}

/// The daemon that `text` means: by its key, which sublet's own programs give, by its device, or by its container. That
/// there is none is an error of the command that uses it.
fn key_of(text: &str, store: &Store, config: &Config) -> anyhow::Result<DaemonKey> {
    let is_uuid = text.len() >= UUID && (text.starts_with("GPU-") || text.starts_with("MIG-"));
    if is_uuid || LeaseId::parse(text).is_some() {
        return Ok(DaemonKey(text.to_owned()));
    }
    let inventory = fresh_inventory(config)?.with_left_out();
    match place::meant(text, &inventory, config).map_err(anyhow::Error::msg)?[..] {
        [] => {}
        [device] => return Ok(DaemonKey(device.uuid.clone())),
        ref found => bail!("{}", place::ambiguous(text, found)),
    }
    let ledger = store.peek()?;
    let lease = match lease_of(text, &ledger, &Names::learn(&ledger, config)) {
        Err(NoLease::None(text)) => return Err(MpsError::NoDaemon { key: text }.into()),
        found => found?,
    };
    lease.daemon.clone().with_context(|| {
        format!("container {} has no MPS daemon: its mode is {}", safe(&lease.container.name()), lease.mode)
    })
}

fn list(format: Format, store: &Store, config: &Config) -> anyhow::Result<()> {
    super::settled_ledger(config)?;
    let daemons = mps_daemons::list(store, config)?;
    match format {
        Format::Json => tables::json(&daemons)?,
        Format::Table if daemons.is_empty() => println!("No MPS daemons."),
        Format::Table => {
            let inventory = fresh_inventory(config)?.with_left_out();
            let label = |uuid: &str| inventory.device(uuid).map_or_else(|| "gone".to_owned(), Device::number);
            println!("{}", super::status::daemon_table(&daemons, label, tables::terminal_width()));
        }
    }
    Ok(())
}
