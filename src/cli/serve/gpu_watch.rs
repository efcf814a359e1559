//! Notices GPUs that stop answering beside running containers, those that answer again, and MIG devices that come and go.
//! Programs that start containers read the inventory, and ask NVML only where that finds no place.
//!
//! NVML is loaded for each check and closed again. While a program has it open, other tools cannot reset a GPU, so they
//! cannot switch MIG mode, nor unload the driver; and a GPU that was reset answers only to who has opened NVML since.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use crate::known_faults::KnownFaults;
use crate::probe;
use crate::sick_gpus::{self, Records};
use sublet_core::admit;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Inventory, LeftOut, MigGpus, can_do_mig};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::process::uptime_seconds;
use sublet_core::text::safe;

/// Seconds between two checks.
const PERIOD: u64 = 5;

/// When it was last checked, in seconds since boot.
static LOOKED: AtomicU64 = AtomicU64::new(0);

/// Refreshes the inventory if other GPUs than its own are to be left out. An idle host's GPUs are not woken for that.
pub(super) fn watch_gpus(store: &Store, config: &Config) {
    if !is_time(&LOOKED, PERIOD) {
        return;
    }
    let (Ok(known), Ok(ledger), Ok(sick)) = (inventory::last(config), store.read(), sick_gpus::read(config))
    else {
        return;
    };
    let silent = silent_gpus(&known.left_out, &sick);
    // An open NVML would prevent the reset that a change of the layout may need.
    if ledger.leases.is_empty() && silent.is_empty() || ledger.mig.under_way.is_some() {
        return;
    }
    LOOKED.store(uptime_seconds(), Relaxed);
    let look = || -> anyhow::Result<()> {
        let mut returned = RETURNED.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, at) = (probe::left_out(config)?, uptime_seconds());
        let (known, now) = (addresses(&silent), addresses(&silent_gpus(&now, &sick)));
        if !refresh_on_news(&known, &now, at, &mut returned, || Ok(admit::refresh(config).map(drop)?))? {
            KEPT_OUT.warn(kept_out(&silent, &returned), "no GPU that came and went is kept out any more");
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

/// GPUs that are not served again because of that: a warning says so once.
static KEPT_OUT: KnownFaults = KnownFaults::none();

/// Refreshes where, at `at`, there is reason for it: `known` are left out, and `now` would be. Returns whether there was. A GPU that
/// is lost always is one; one that answers again is none if it has `returned` too often.
fn refresh_on_news(
    known: &[&str],
    now: &[&str],
    at: u64,
    returned: &mut Vec<(String, u64)>,
    refresh: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    returned.retain(|(_, before)| at < before + RETURNS);
    let back = known.iter().filter(|gpu| !now.contains(gpu));
    let is_lost = now.iter().any(|gpu| !known.contains(gpu));
    let is_news = is_lost || back.clone().any(|gpu| may_return(gpu, returned));
    if is_news {
        refresh()?;
        returned.extend(back.map(|gpu| ((*gpu).to_owned(), at)));
    }
    Ok(is_news)
}

/// Whether the GPU at this address has not `returned` too often.
fn may_return(gpu: &str, returned: &[(String, u64)]) -> bool {
    returned.iter().filter(|(known, _)| known == gpu).count() < MOST_RETURNS
}

/// The address and a line for each of the `silent` GPUs that is not served again.
fn kept_out(silent: &[&LeftOut], returned: &[(String, u64)]) -> Vec<(String, String)> {
    let kept = silent.iter().filter(|gone| !may_return(&gone.gpu.bus_id, returned));
    let line = |gpu: String| {
        let minutes = RETURNS / 60;
        format!(
            "{gpu} came and went {MOST_RETURNS} times in {minutes} minutes, and is left out for as long: see `dmesg | grep -i xid`"
        )
    };
    kept.map(|gone| (gone.gpu.bus_id.clone(), line(gone.gpu.label()))).collect()
}

/// Whether `period` seconds have passed since `last`.
fn is_time(last: &AtomicU64, period: u64) -> bool {
    let before = last.load(Relaxed);
    before == 0 || uptime_seconds() >= before + period
}

/// Those that do not answer. A GPU that only reported a fault does, and its reset is looked for elsewhere.
fn silent_gpus<'l>(left_out: &'l [LeftOut], sick: &Records) -> Vec<&'l LeftOut> {
    left_out.iter().filter(|gone| sick.fault(&gone.gpu.uuid).is_none()).collect()
}

fn addresses<'l>(left_out: &[&'l LeftOut]) -> Vec<&'l str> {
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
    if !known.gpus().any(|gpu| gpu.mig_enabled) {
        if !is_time(&LOOKED_FOR_MIG, SELDOM) || !can_do_mig(&config.driver.root) {
            return Ok(false);
        }
        LOOKED_FOR_MIG.store(uptime_seconds(), Relaxed);
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
    let seen = without_left_out(probe::mig_gpus(config)?, known, &sick_gpus::read(config)?);
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

/// Those of the GPUs `seen` that are to be in the inventory: neither one that reported a fault, nor one that is left out. Whether
/// that is served again, [`watch_gpus`] says.
fn without_left_out(mut seen: MigGpus, known: &Inventory, sick: &Records) -> MigGpus {
    let is_left_out = |uuid: &str| known.left_out.iter().any(|gone| gone.gpu.uuid == uuid);
    seen.retain(|uuid, _| sick.fault(uuid).is_none() && !is_left_out(uuid));
    seen
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
        let mut is_news = |known: &[&str], now: &[&str], at| {
            refresh_on_news(known, now, at, &mut returned, || Ok(())).unwrap()
        };
        for at in 0..10 {
            assert!(is_news(&[], &["a"], at) && is_news(&["a"], &[], at), "{at}");
        }
        assert!(is_news(&[], &["a"], 10), "it is lost");
        assert!(!is_news(&["a"], &["a"], 20) && !is_news(&["a"], &[], 599));
        assert!(is_news(&["a", "b"], &["a"], 599), "another one answers again");
        assert!(is_news(&["a"], &[], 600) && !is_news(&[], &[], 601));
    }

    #[test]
    fn a_return_counts_when_the_gpu_is_served_and_who_is_kept_out_is_named() {
        let mut returned = Vec::new();
        for at in 0..20 {
            let failed = refresh_on_news(&["a"], &[], at, &mut returned, || Err(anyhow::anyhow!("hangs")));
            assert!(failed.is_err() && returned.is_empty());
        }
        let gpu = Device { bus_id: "a".into(), ..device(0) };
        let gone = LeftOut { gpu, mig: Vec::new(), lost: true, why: String::new() };
        let mut returned = vec![("a".to_owned(), 0); MOST_RETURNS - 1];
        assert_eq!(kept_out(&[&gone], &returned), []);
        assert!(refresh_on_news(&["a"], &[], 1, &mut returned, || Ok(())).unwrap());
        let kept = kept_out(&[&gone], &returned).remove(0);
        assert!(
            kept.0 == "a" && kept.1.starts_with("GPU 0 came and went 10 times in 10 minutes"),
            "{kept:?}"
        );
    }

    #[test]
    fn a_gpu_in_mig_mode_that_is_left_out_and_answers_is_no_change() {
        let on = |number| Device { mig_enabled: true, ..device(number) };
        let mut known = host(vec![on(0), on(1)]);
        let seen = known.mig_gpus();
        assert_eq!(without_left_out(seen.clone(), &known, &Records::default()), seen);
        let gpu = known.devices.pop().unwrap();
        known.left_out.push(LeftOut { gpu, mig: Vec::new(), lost: true, why: String::new() });
        assert_eq!(without_left_out(seen, &known, &Records::default()), known.mig_gpus());
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
