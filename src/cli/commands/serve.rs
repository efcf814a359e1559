//! `sublet serve`: the broker for users without root; systemd starts it (`sublet.socket`).

use std::process::ExitCode;

use anyhow::bail;

use sublet_core::config::Config;

/// Serves until it receives SIGTERM or SIGINT.
///
/// # Errors
/// Not running as root, or the socket or state directory is not available.
pub fn run(config: &Config) -> anyhow::Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "`sublet serve` manages the ledger and the MPS daemons for other users: run it as root, or by \
         systemd"
        );
    }
    crate::serve::serve(config)?;
    Ok(ExitCode::SUCCESS)
}
