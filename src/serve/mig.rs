//! Whether the MIG devices of the inventory are those of the driver: destroyed instances' ids are given to new
//! ones, and only their UUIDs tell.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::admit;
use crate::config::Config;
use crate::inventory::{self, Inventory, mig_devices};
use crate::ledger::{Ledger, Store};
use crate::process::uptime_seconds;
use crate::text::safe;

/// Whether the last failure was told: the next one, two seconds later, is the same.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Compares them, on a host with GPUs in MIG mode, and refreshes the inventory where they differ.
pub(super) fn watch() {
    let watched = crate::config::load().map_err(|error| error.to_string()).and_then(|config| {
        // Before the first refresh there is nothing to compare.
        let Ok(known) = inventory::last(&config) else { return Ok(()) };
        if !known.gpus().any(|gpu| gpu.mig_enabled) {
            return Ok(());
        }
        compare(&known, &config).inspect_err(|_| inventory::unwatch(&config))
    });
    match watched {
        Ok(()) => TOLD.store(false, Relaxed),
        Err(error) if !TOLD.swap(true, Relaxed) => {
            tracing::warn!("MIG devices are not looked after: {error}");
        }
        Err(error) => tracing::debug!("MIG devices are not looked after: {error}"),
    }
}

fn compare(known: &Inventory, config: &Config) -> Result<(), String> {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read());
    let ledger = ledger.map_err(|error| error.to_string())?;
    // Who changes the layout tells the others; and NVML would be in the way of a reset.
    if ledger.mig.under_way.is_some() {
        inventory::unwatch(config);
        return Ok(());
    }
    let since = uptime_seconds();
    let seen = mig_devices(config).map_err(|error| error.to_string())?;
    let stale = inventory::load(config).is_err_and(|error| error.wants_refresh());
    if stale || seen != listed(known) {
        inventory::unwatch(config);
        let now = admit::refresh(config).map_err(|error| error.to_string())?;
        for line in lost(&ledger, known, &now) {
            tracing::warn!("{line}");
        }
        return Ok(());
    }
    inventory::watch(config, since).map_err(|error| error.to_string())
}

/// (UUID, GPU, GPU instance, compute instance) of each MIG device of `inventory`.
fn listed(inventory: &Inventory) -> BTreeSet<(String, String, u32, u32)> {
    let one = |device: &inventory::Device| {
        let part = device.part.as_ref()?;
        Some((device.uuid.clone(), part.gpu.clone(), part.gi, part.ci))
    };
    inventory.devices.iter().filter_map(one).collect()
}

/// A line for each lease that has lost its MIG device between `before` and `now`.
fn lost(ledger: &Ledger, before: &Inventory, now: &Inventory) -> Vec<String> {
    let went = |uuid: &&String| before.device(uuid).is_some() && now.device(uuid).is_none();
    let lines = ledger.leases.iter().flat_map(|lease| {
        lease.devices.iter().filter(went).map(move |uuid| {
            format!(
                "container {}: MIG device {} was destroyed, its lease {} is lost: end the container",
                safe(&lease.container.id),
                safe(uuid),
                lease.id
            )
        })
    });
    lines.collect()
}
