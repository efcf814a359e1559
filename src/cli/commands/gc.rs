//! `sublet gc`: frees leases of containers that have ended, as every command does first.

use std::process::ExitCode;

use sublet_core::admit::Local;
use sublet_core::config::Config;
use sublet_core::ledger::{Freed, Store};

/// Arguments of `sublet gc`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Where another file system with a ledger was mounted at the state directory and is lost for ever: put the
    /// containers that run into the one that is there now
    #[arg(long)]
    rebuild: bool,
}

/// Releases leases of exited containers, restarts crashed MPS daemons, and says what it did.
///
/// # Errors
/// The ledger cannot be read or written.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if arguments.rebuild {
        let ((), freed) = Store::open(&config.state_dir)?.giving_up().change(|_| ())?;
        say_freed(&freed);
    }
    let done = Local::new(config).reconcile(|_| Ok(()))?;
    say_freed(&done.freed);
    for line in &done.lines {
        println!("{line}");
    }
    Ok(ExitCode::SUCCESS)
}

fn say_freed(freed: &Freed) {
    for lease in freed {
        println!(
            "Freed lease {} of container {}.",
            lease.id,
            sublet_core::text::short_id(&lease.container.id)
        );
    }
}
