//! Checks that the inventory has the driver's GPUs in MIG mode and MIG devices. Ids of destroyed instances are
//! reused, so only UUIDs identify an instance, and /proc does not show MIG mode on a GPU without instances.
//!
//! NVML is loaded for each check and closed again. While a program has it open, other tools cannot reset a GPU, so
//! they cannot switch MIG mode, nor unload the driver.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use crate::probe::mig_gpus;
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory, can_do_mig};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::process::uptime_seconds;
use sublet_core::text::safe;

/// Whether the last failure was logged: the next one, two seconds later, is the same.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Seconds between two checks if no GPU is in MIG mode. No lease is at risk then, and each check wakes a GPU that is
/// neither used nor kept initialized.
const SELDOM: u64 = 30;

/// When such a host was last checked, in seconds since boot.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// Compares the two on a host with GPUs that support MIG, and refreshes the inventory if they differ.
pub(super) fn watch() {
    let watched = sublet_core::config_files::load().map_err(|error| error.to_string()).and_then(|config| {
        // Before the first refresh there is nothing to compare.
        let Ok(known) = inventory::last(&config) else { return Ok(()) };
        if !known.gpus().any(|gpu| gpu.mig_enabled) && !is_due(&config) {
            return Ok(());
        }
        compare(&known, &config).inspect_err(|_| inventory::unwatch(&config))
    });
    match watched {
        Ok(()) => TOLD.store(false, Relaxed),
        Err(error) if !TOLD.swap(true, Relaxed) => {
            tracing::warn!("MIG devices cannot be watched: {error}");
        }
        Err(error) => tracing::debug!("MIG devices cannot be watched: {error}"),
    }
}

fn is_due(config: &Config) -> bool {
    let (now, last) = (uptime_seconds(), LOOKED.load(Relaxed));
    let due = (last == 0 || now >= last + SELDOM) && can_do_mig(&config.driver.root);
    if due {
        LOOKED.store(now, Relaxed);
    }
    due
}

fn compare(known: &Inventory, config: &Config) -> Result<(), String> {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read());
    let ledger = ledger.map_err(|error| error.to_string())?;
    // The process that changes the layout refreshes the inventory itself, and an open NVML would prevent a reset.
    if ledger.mig.under_way.is_some() {
        inventory::unwatch(config);
        return Ok(());
    }
    let since = uptime_seconds();
    let seen = mig_gpus(config).map_err(|error| error.to_string())?;
    let stale = inventory::load(config).is_err_and(|error| error.wants_refresh());
    if stale || seen != known.mig_gpus() {
        inventory::unwatch(config);
        let now = admit::refresh(config).map_err(|error| error.to_string())?;
        for line in lost(&ledger, known, &now) {
            tracing::warn!("{line}");
        }
        return Ok(());
    }
    inventory::watch(config, since).map_err(|error| error.to_string())
}

/// One line for each lease that lost its MIG device between `before` and `now`.
fn lost(ledger: &Ledger, before: &Inventory, now: &Inventory) -> Vec<String> {
    let left_out = |gpu: &str| now.left_out.iter().any(|gone| gone.gpu.uuid == gpu);
    let went = |uuid: &&String| {
        before.device(uuid).is_some_and(|device| !left_out(device.gpu())) && now.device(uuid).is_none()
    };
    let lines = ledger.leases.iter().flat_map(|lease| {
        lease.devices.iter().filter(went).map(move |uuid| {
            format!(
                "container {}: MIG device {} was destroyed, so its lease {} is lost: end the container",
                safe(&lease.container.id),
                safe(uuid),
                lease.id
            )
        })
    });
    lines.collect()
}
