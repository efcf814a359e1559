//! `sublet gc`: frees leases of containers that have ended, as every command does first.

use std::process::ExitCode;

use sublet_core::admit::Local;
use sublet_core::config::Config;

/// Releases leases of exited containers, restarts crashed MPS daemons, and says what it did.
///
/// # Errors
/// The ledger cannot be read or written.
pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let done = Local::new(config).reconcile(|_| Ok(()))?;
    for lease in &done.freed {
        println!(
            "Freed lease {} of container {}.",
            lease.id,
            sublet_core::text::short_id(&lease.container.id)
        );
    }
    for line in &done.lines {
        println!("{line}");
    }
    Ok(ExitCode::SUCCESS)
}
