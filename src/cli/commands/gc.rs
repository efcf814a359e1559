//! `sublet gc`: ends what deleted containers have left, and frees leases of containers that have ended, as every command
//! does first.

use anyhow::Context as _;

use crate::suspend::put_right;
use sublet_core::admit::{Leases, Local};
use sublet_core::config::Config;
use sublet_core::ledger::{Freed, LeaseId, Store};
use sublet_core::text::short_id;

/// Arguments of `sublet gc`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Where the ledger is lost for ever, because the state directory was emptied or replaced, or its file system
    /// unmounted, or because nothing is left in the PID namespace that it names: make it anew from what runs
    #[arg(long)]
    rebuild: bool,
    /// The container of this lease was deleted: end what it has left, and free it. For sublet's hook
    #[arg(long, value_name = "LEASE", hide = true, conflicts_with = "rebuild")]
    deleted: Option<String>,
}

/// Releases leases of exited containers, restarts crashed MPS daemons, and says what it did.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    if let Some(lease) = &arguments.deleted {
        let lease = LeaseId::parse(lease).context("--deleted: not a lease id of 16 hex digits")?;
        return Ok(Leases::of(config).end(&lease)?);
    }
    if arguments.rebuild {
        let ((), freed) = Store::open(&config.state_dir)?.rebuilding().change(|_| ())?;
        say_freed(&freed);
    }
    // First, because it rebuilds a ledger that is lost.
    settle(config)?;
    let left = Local::new(config).kill_left_processes(&Store::open(&config.state_dir)?, crate::peer::OWNS)?;
    if !left.is_empty() {
        for line in left {
            println!("{line}");
        }
        settle(config)?;
    }
    Ok(())
}

fn settle(config: &Config) -> anyhow::Result<()> {
    let done = Local::new(config).reconcile(|_| Ok(()))?;
    say_freed(&done.freed);
    let stuck = put_right(config, |line| eprintln!("sublet: {line}")).unwrap_or_default();
    for line in done.lines.iter().chain(stuck.iter().map(|(_, line)| line)) {
        println!("{line}");
    }
    Ok(())
}

fn say_freed(freed: &Freed) {
    for lease in freed {
        println!("Freed lease {} of container {}.", lease.id, short_id(&lease.container.id));
    }
}
