//! `sublet refresh --boot`: what sublet-refresh.service does before the first container.

use crate::probe;
use std::process::Command;
use std::time::{Duration, Instant};

use sublet_core::config::Config;
use sublet_core::inventory::Inventory;
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;
use sublet_core::text::safe;

/// modprobe waits until the driver has found its GPUs.
const MODPROBE_LIMIT: Duration = Duration::from_secs(30);
/// systemd ends the unit after 60 s; the last attempt must be over by then.
const LIMIT: Duration = Duration::from_secs(50);
/// The pause between two attempts.
const AGAIN: Duration = Duration::from_secs(1);

/// Loads the driver's modules, creates its nodes and their links in /dev/char, and writes the inventory. `None` if the
/// host has no GPU.
///
/// # Errors
/// The driver is not loaded, or does not answer within [`LIMIT`].
pub fn boot(config: &Config) -> anyhow::Result<Option<Inventory>> {
    let root = &config.driver.root;
    let deadline = Instant::now() + LIMIT;
    if !probe::has_gpu(root) {
        return Ok(None);
    }
    if root.as_os_str() == "/" {
        load_modules();
    }
    loop {
        warn(probe::make_nodes(root));
        match super::refresh(config) {
            // A driver that has just been loaded may not answer for any GPU yet.
            Ok(inventory) if inventory.devices.is_empty() && Instant::now() < deadline => {
                std::thread::sleep(AGAIN);
            }
            Ok(inventory) => {
                warn(probe::link_nodes(root, &inventory));
                return Ok(Some(inventory));
            }
            Err(error) if !probe::is_loaded(root) || Instant::now() >= deadline => return Err(error),
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}

/// nvidia-uvm loads the others too. If the module or modprobe is missing, the refresh reports what is missing.
fn load_modules() {
    let mut modprobe = Command::new("modprobe");
    modprobe.env_clear().env("PATH", PATH).arg("nvidia-uvm");
    match child::run(&mut modprobe, "", MODPROBE_LIMIT) {
        Ok(done) if done.status.success() => {}
        Ok(done) => warn(vec![safe(done.stderr.trim())]),
        Err(ChildError::Timeout) => warn(vec!["modprobe nvidia-uvm takes too long".to_owned()]),
        Err(ChildError::Io(error)) => warn(vec![format!("modprobe nvidia-uvm: {error}")]),
    }
}

fn warn(warnings: Vec<String>) {
    for warning in warnings {
        eprintln!("sublet: warning: {warning}");
    }
}
