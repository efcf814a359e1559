//! `sublet serve`: the broker for users without root; systemd starts it (`sublet.socket`).

use std::process::ExitCode;

use anyhow::bail;

use sublet_core::config::Config;

/// Serves until it is told to end.
///
/// # Errors
/// Not root; the socket or the state directory cannot be had.
pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "`sublet serve` manages the ledger and the MPS daemons for other users: run it as root, or by \
         systemd"
        );
    }
    for warning in config.warnings() {
        tracing::warn!("{warning}");
    }
    crate::serve::serve(config)?;
    Ok(ExitCode::SUCCESS)
}
