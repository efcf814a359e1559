//! Notices GPUs that stop answering beside running containers, those that answer again, and MIG devices that come and go.
//! Programs that start containers read the inventory, and ask NVML only where that finds no place.
//!
//! NVML is loaded for each check and closed again. While a program has it open, other tools cannot reset a GPU, so they
//! cannot switch MIG mode, nor unload the driver; and a GPU that was reset answers only to who has opened NVML since.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::known_faults::KnownFaults;
use crate::probe;
use crate::sick_gpus;
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory, LeftOut, can_do_mig};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::process::uptime_seconds;
use sublet_core::text::safe;

/// Seconds between two checks.
const PERIOD: u64 = 5;

/// When it was last checked, in seconds since boot.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// Refreshes the inventory if other GPUs than its own are to be left out. An idle host's GPUs are not woken for that.
pub(super) fn watch_gpus(config: &Config) {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read());
    let (Ok(known), Ok(ledger), Ok(sick)) = (inventory::last(config), ledger, sick_gpus::read(config)) else {
        return;
    };
    // An open NVML would prevent the reset that a change of the layout may need.
    // A GPU that only reported a fault answers, and its reset is looked for elsewhere.
    let is_silent = |gone: &LeftOut| sick.fault(&gone.gpu.uuid).is_none();
    let wanted =
        (!ledger.leases.is_empty() || known.left_out.iter().any(is_silent)) && ledger.mig.under_way.is_none();
    if !is_due(&LOOKED, PERIOD, || wanted) {
        return;
    }
    let look = || -> anyhow::Result<()> {
        let mut returned = RETURNED.lock().unwrap_or_else(PoisonError::into_inner);
        let now = probe::left_out(config)?;
        if is_news(&addresses(&known.left_out), &addresses(&now), uptime_seconds(), &mut returned) {
            admit::refresh(config)?;
        }
        Ok(())
    };
    let _ = look().inspect_err(|error| tracing::debug!("GPUs cannot be watched: {error}"));
}

/// How often a GPU is served again in so many seconds: one that comes and goes would be told of each time.
const MOST_RETURNS: usize = 10;
const RETURNS: u64 = 600;

/// Which GPUs were seen to answer again, by their addresses, and when, in seconds since boot.
static RETURNED: Mutex<Vec<(String, u64)>> = Mutex::new(Vec::new());

/// Whether, at `at`, there is reason for a refresh where `known` are left out and `now` would be. A GPU that is lost always is one;
/// one that answers again is none if it has `returned` too often.
fn is_news(known: &[&str], now: &[&str], at: u64, returned: &mut Vec<(String, u64)>) -> bool {
    returned.retain(|(_, before)| at < before + RETURNS);
    let back = known.iter().filter(|gpu| !now.contains(gpu));
    let returns = |gpu: &&str| returned.iter().filter(|(known, _)| known == gpu).count();
    let is_lost = now.iter().any(|gpu| !known.contains(gpu));
    let is_news = is_lost || back.clone().any(|gpu| returns(gpu) < MOST_RETURNS);
    if is_news {
        returned.extend(back.map(|gpu| ((*gpu).to_owned(), at)));
    }
    is_news
}

/// Whether `period` seconds have passed since `last` and a check is wanted; it is noted then.
fn is_due(last: &AtomicU64, period: u64, is_wanted: impl FnOnce() -> bool) -> bool {
    let (now, before) = (uptime_seconds(), last.load(Relaxed));
    let due = (before == 0 || now >= before + period) && is_wanted();
    if due {
        last.store(now, Relaxed);
    }
    due
}

fn addresses(left_out: &[LeftOut]) -> Vec<&str> {
    left_out.iter().map(|gone| gone.gpu.bus_id.as_str()).collect()
}

/// Why MIG devices could not be watched: two seconds later it is the same.
static FAULTS: KnownFaults = KnownFaults::none();

/// Seconds between two checks if no GPU is in MIG mode. No lease is at risk then, and each check wakes a GPU that is
/// neither used nor kept initialized.
const SELDOM: u64 = 30;

/// When such a host was last checked, in seconds since boot.
static LOOKED_FOR_MIG: AtomicU64 = AtomicU64::new(0);

/// Compares the driver's GPUs in MIG mode and MIG devices with the inventory's on a host with GPUs that support MIG, and
/// refreshes it if they differ. Ids of destroyed instances are reused, so only UUIDs identify an instance, and /proc does
/// not show MIG mode on a GPU without instances.
pub(super) fn watch_mig(config: &Config) {
    let looked = look_at_mig(config);
    // Where nobody looked, a fault may be there still.
    if !matches!(looked, Ok(false)) {
        let fault = looked.err().map(|error| format!("MIG devices cannot be watched: {error}"));
        FAULTS.warn(fault.map(|line| (line.clone(), line)), "MIG devices are watched again");
    }
}

/// Returns whether it looked.
fn look_at_mig(config: &Config) -> anyhow::Result<bool> {
    // Before the first refresh there is nothing to compare.
    let Ok(known) = inventory::last(config) else { return Ok(false) };
    let seldom = || is_due(&LOOKED_FOR_MIG, SELDOM, || can_do_mig(&config.driver.root));
    if !known.gpus().any(|gpu| gpu.mig_enabled) && !seldom() {
        return Ok(false);
    }
    compare(&known, config).inspect_err(|_| inventory::unwatch(config))
}

/// Returns whether it did.
fn compare(known: &Inventory, config: &Config) -> anyhow::Result<bool> {
    let ledger = Store::open(&config.state_dir)?.read()?;
    // The process that changes the layout refreshes the inventory itself, and an open NVML would prevent a reset.
    if ledger.mig.under_way.is_some() {
        inventory::unwatch(config);
        return Ok(false);
    }
    let since = uptime_seconds();
    let (mut seen, sick) = (probe::mig_gpus(config)?, sick_gpus::read(config)?);
    // One that reported a fault is not in the inventory.
    seen.retain(|uuid, _| sick.fault(uuid).is_none());
    let stale = inventory::load(config).is_err_and(|error| error.wants_refresh());
    if stale || seen != known.mig_gpus() {
        inventory::unwatch(config);
        let now = admit::refresh(config)?;
        for line in lost(&ledger, known, &now) {
            tracing::warn!("{line}");
        }
        return Ok(true);
    }
    Ok(inventory::watch(config, since).map(|()| true)?)
}

/// One line for each lease that lost its MIG device between `before` and `now`.
fn lost(ledger: &Ledger, before: &Inventory, now: &Inventory) -> Vec<String> {
    let left_out = |gpu: &str| now.left_out.iter().any(|gone| gone.gpu.uuid == gpu);
    let went = |uuid: &&String| {
        before.device(uuid).is_some_and(|device| !left_out(device.gpu())) && now.device(uuid).is_none()
    };
    let lines = ledger.leases.iter().flat_map(|lease| {
        lease.devices.iter().filter(went).map(move |uuid| {
            let (container, uuid, id) = (safe(&lease.container.id), safe(uuid), &lease.id);
            format!("container {container}: MIG device {uuid} was destroyed, so its lease {id} is lost: end the container")
        })
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use sublet_core::inventory::Device;
    use sublet_core::ledger::MigChange;
    use sublet_core::place::fixture::{device, host};
    use sublet_core::process::Process;

    use super::*;

    #[test]
    fn a_gpu_that_comes_and_goes_is_left_out_each_time_and_served_again_not_too_often() {
        let mut returned = Vec::new();
        let mut is_news = |known: &[&str], now: &[&str], at| is_news(known, now, at, &mut returned);
        for at in 0..10 {
            assert!(is_news(&[], &["a"], at) && is_news(&["a"], &[], at), "{at}");
        }
        assert!(is_news(&[], &["a"], 10), "it is lost");
        assert!(!is_news(&["a"], &["a"], 20) && !is_news(&["a"], &[], 599));
        assert!(is_news(&["a", "b"], &["a"], 599), "another one answers again");
        assert!(is_news(&["a"], &[], 600) && !is_news(&[], &[], 601));
    }

    #[test]
    fn where_mig_devices_are_not_looked_at_nothing_is_said_of_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { state_dir: dir.path().join("run"), ..Config::default() };
        config.driver.root = dir.path().to_owned();
        let looked = || look_at_mig(&config).ok();
        assert_eq!(looked(), Some(false), "there is no inventory");
        let store = |mig_enabled| {
            inventory::store(&config, &host(vec![Device { mig_enabled, ..device(0) }]), SystemTime::now())
                .unwrap();
        };
        store(false);
        assert_eq!(looked(), Some(false), "no GPU has MIG");
        store(true);
        assert_eq!(looked(), None, "it looks, and there is no driver");
        let owner = Process::current().unwrap();
        let change = |ledger: &mut Ledger| ledger.mig.under_way = Some(MigChange { gpus: vec![], owner });
        Store::open(&config.state_dir).unwrap().change(change).unwrap();
        assert_eq!(looked(), Some(false), "the layout is being changed");
    }
}
