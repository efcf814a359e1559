//! `sublet gc`: frees leases of containers that have ended, as every command does first.

use std::process::ExitCode;

use crate::mps;
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::ledger::Store;

/// Frees what is gone, brings back daemons that died under live leases, and says what it did.
///
/// # Errors
/// The ledger cannot be read or written.
pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let store = Store::open(&config.state_dir)?;
    let (done, freed) = store.update(|_| Ok::<_, std::convert::Infallible>(()))?;
    let Ok(()) = done;
    for lease in &freed {
        println!("Freed lease {} of container {}.", lease.id, super::output::short(&lease.container.id));
    }
    admit::tidy(&freed, &store, config);
    admit::clear_leftovers(&store);
    admit::clear_made(&store);
    for line in mps::heal(&store, config) {
        println!("{line}");
    }
    Ok(ExitCode::SUCCESS)
}
