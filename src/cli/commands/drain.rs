//! `sublet drain|undrain`: whether a device takes new leases.

use sublet_core::admit::{Local, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::ledger::Store;

/// Arguments of both.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Devices: an index, a UUID or its beginning, a PCI bus id, G:M (MIG device M of GPU G), an alias, all
    #[arg(required = true)]
    devices: Vec<String>,
}

/// Runs it.
pub fn run(arguments: &Arguments, drain: bool, config: &Config) -> anyhow::Result<()> {
    let inventory = fresh_inventory(config)?.with_left_out();
    let mut uuids = Vec::new();
    for name in &arguments.devices {
        uuids.extend(super::devices(name, &inventory, config)?.into_iter().map(|device| device.uuid.clone()));
    }
    Local::new(config).update(|ledger| {
        ledger.drained.retain(|uuid| !uuids.contains(uuid));
        if drain {
            ledger.drained.extend(uuids.iter().cloned());
        }
    })?;
    // A daemon that waits for a lease on a drained device has no reason to wait.
    crate::terminal::warn(sublet_core::mps::end_overdue(&Store::open(&config.state_dir)?, config));
    let now = if drain { "takes no new lease; its containers go on running" } else { "takes leases again" };
    for uuid in &uuids {
        println!("{uuid} {now}.");
    }
    Ok(())
}
