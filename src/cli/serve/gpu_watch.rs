//! Notices GPUs that stop answering beside running containers, and those that answer again. Programs that start containers
//! read the inventory, and ask NVML only where that finds no place.
//!
//! As in [`super::mig_watch`], NVML is loaded for each check and closed again: a GPU that was reset answers only to who has
//! opened NVML since.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::probe;
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory, LeftOut};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::process::uptime_seconds;

/// Seconds between two checks.
const PERIOD: u64 = 5;

/// When it was last checked, in seconds since boot.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// Refreshes the inventory if other GPUs than its own are to be left out. An idle host's GPUs are not woken for that.
pub(super) fn watch(config: &Config) {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read());
    let (Ok(known), Ok(ledger)) = (inventory::last(config), ledger) else { return };
    if !is_due(&known, &ledger) {
        return;
    }
    let changed = probe::left_out(config).map_err(|error| error.to_string()).and_then(|now| {
        let differs = addresses(&now) != addresses(&known.left_out);
        if differs { admit::refresh(config).map(drop).map_err(|error| error.to_string()) } else { Ok(()) }
    });
    if let Err(error) = changed {
        tracing::debug!("GPUs cannot be watched: {error}");
    }
}

fn is_due(known: &Inventory, ledger: &Ledger) -> bool {
    let (now, last) = (uptime_seconds(), LOOKED.load(Relaxed));
    let wanted = !ledger.leases.is_empty() || !known.left_out.is_empty();
    // An open NVML would prevent the reset that a change of the layout may need.
    let due = wanted && ledger.mig.under_way.is_none() && (last == 0 || now >= last + PERIOD);
    if due {
        LOOKED.store(now, Relaxed);
    }
    due
}

fn addresses(left_out: &[LeftOut]) -> Vec<&str> {
    left_out.iter().map(|gone| gone.gpu.bus_id.as_str()).collect()
}
