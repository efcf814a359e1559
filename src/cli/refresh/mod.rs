//! Reads the driver again and writes the inventory, one refresh at a time.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};

use crate::probe;
use crate::sick_gpus::{self, Records, event};
use crate::terminal::warn;
use sublet_core::config::Config;
use sublet_core::events::{self, Event, Kind};
use sublet_core::fs::{make_trusted_directory, open_lock};
use sublet_core::inventory::{self, Device, Inventory, InventoryError, LeftOut, Node};
use sublet_core::ledger::{Lease, Ledger, MigChanges, Store};
use sublet_core::process::child::{self, ChildError};
use sublet_core::text::safe;

/// How long the driver is asked again while MIG instances are created and destroyed.
const SETTLING: Duration = Duration::from_secs(10);

/// The pause between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Creates the missing nodes that CUDA does without, probes and stores, one refresh at a time. A process that waited for
/// another refresh takes its result if that refresh began after the process asked. So many containers starting on a stale
/// inventory query NVML twice at most.
///
/// # Errors
/// The driver cannot be read (see `ProbeError`), or the state directory cannot be written.
pub fn refresh(config: &Config) -> anyhow::Result<Inventory> {
    // In another PID namespace it would list none of the processes with contexts.
    Store::open(&config.state_dir)?.is_of_here()?;
    refresh_asked(config, SystemTime::now(), |config| {
        // A start that needs one which cannot be created says so.
        for failure in probe::make_nodes(&config.driver.root, Node::is_optional) {
            tracing::debug!("{failure}");
        }
        let began = Instant::now();
        loop {
            // Read before NVML is asked: a change that ends in between makes the result out of date.
            let before = mig_changes(config);
            let probed = probe::probe(config);
            // An instance that disappears while it is read, or is incomplete, is no driver error.
            let is_faulty =
                |device: &Device| device.mig_device.as_ref().is_some_and(|part| part.fault.is_some());
            let halfway = probed.as_ref().map_or(true, |probed| probed.devices.iter().any(is_faulty));
            // For containers, or by `sublet mig apply`.
            let changes = || before.under_way.is_some() || mig_changes(config) != before;
            if !halfway || !changes() || began.elapsed() >= SETTLING {
                return Ok(Inventory { mig_changes: before.count, ..probed? });
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    })
}

/// A ledger that cannot be read has count zero, and so has the one that is rebuilt from it.
fn mig_changes(config: &Config) -> MigChanges {
    read_ledger(config).mig
}

/// One that cannot be read counts as empty.
fn read_ledger(config: &Config) -> Ledger {
    Store::open(&config.state_dir).and_then(|store| store.read()).unwrap_or_default()
}

fn refresh_asked(
    config: &Config,
    asked: SystemTime,
    probe: impl FnOnce(&Config) -> anyhow::Result<Inventory>,
) -> anyhow::Result<Inventory> {
    let _lock = lock(&config.state_dir)?;
    let path = inventory::cache_path(config);
    let there = std::fs::symlink_metadata(&path).and_then(|there| there.modified());
    if there.is_ok_and(|began| began > asked && began <= SystemTime::now()) {
        if let Ok(inventory) = inventory::load(config) {
            return Ok(inventory);
        }
    }
    let began = SystemTime::now();
    let inventory = probe(config)?;
    // Before the inventory, without which nobody takes a lease after a reboot.
    let uuids: Vec<String> =
        inventory.with_left_out().devices.into_iter().map(|device| device.uuid).collect();
    Store::open(&config.state_dir)?.restore_drains(&config.lasting_dir(), &uuids)?;
    sick_gpus::change(config, |sick| store(inventory, sick, began, config)).context("health.json")?
}

/// Writes `inventory`, whose probe began then, without the `sick` GPUs. Their records are locked meanwhile, so that who does not
/// wait for a refresh may write, too: the later one leaves out what is sick by then, and loses nothing of the earlier one's.
fn store(
    mut inventory: Inventory,
    sick: &mut Records,
    began: SystemTime,
    config: &Config,
) -> anyhow::Result<Inventory> {
    let before = inventory::last(config).map(|before| before.left_out).unwrap_or_default();
    (inventory.devices, inventory.left_out) = sick.leave_out(inventory.devices, inventory.left_out);
    inventory::store(config, &inventory, began)?;
    tell(&before, &inventory, sick, config);
    Ok(inventory)
}

/// Leaves the GPUs that reported a fault out of the inventory as it is. Neither the driver is asked nor a refresh waited for:
/// both may hang with them.
///
/// # Errors
/// The inventory cannot be written.
pub(crate) fn leave_out_sick(config: &Config) -> anyhow::Result<()> {
    sick_gpus::change(config, |sick| -> anyhow::Result<()> {
        // The first refresh leaves them out.
        let Ok(known) = inventory::last(config) else { return Ok(()) };
        // It is no refresh for which another process may have waited.
        let probed = std::fs::symlink_metadata(inventory::cache_path(config))?.modified()?;
        store(known, sick, probed, config).map(drop)
    })?
}

/// Tells which GPUs are left out since `before`, and which are served again. Containers on one that is lost or does not answer are
/// warned; those on one of the `sick` are by whoever marked it.
fn tell(before: &[LeftOut], now: &Inventory, sick: &mut Records, config: &Config) {
    let is_in =
        |list: &[LeftOut], gone: &LeftOut| list.iter().any(|other| other.gpu.bus_id == gone.gpu.bus_id);
    let of = |kind, lease: Option<&Lease>, gone: &LeftOut| {
        event(kind, lease, &gone.gpu, gone.state(), &gone.sentence())
    };
    let lost: Vec<&LeftOut> = now.left_out.iter().filter(|gone| !is_in(before, gone)).collect();
    let silent: Vec<&LeftOut> =
        lost.iter().copied().filter(|gone| sick.fault(&gone.gpu.uuid).is_none()).collect();
    let ledger = if silent.is_empty() { Ledger::default() } else { read_ledger(config) };
    let leases = silent.iter().flat_map(|gone| ledger.on_gpu(&gone.gpu.uuid).map(move |lease| (lease, gone)));
    let warned: Vec<Event> = leases.map(|(lease, gone)| of(Kind::Warned, Some(lease), gone)).collect();
    // Also for users without root.
    sick.keep(&warned);
    let lost = lost.into_iter().map(|gone| of(Kind::GpuLost, None, gone));
    let back = before.iter().filter(|gone| !is_in(&now.left_out, gone)).map(|gone| {
        event(Kind::GpuBack, None, &gone.gpu, "", &format!("{} is served again", gone.gpu.label()))
    });
    events::emit(&config.state_dir, &lost.chain(warned).chain(back).collect::<Vec<_>>());
}

/// Waits for a running refresh.
fn lock(state_dir: &Path) -> anyhow::Result<Flock<File>> {
    let path = state_dir.join("refresh.lock");
    let made = make_trusted_directory(state_dir)
        .map_err(|why| std::io::Error::other(format!("its directory {why}")));
    let file = made
        .and_then(|_| open_lock(&path))
        .map_err(|source| InventoryError::Unwritable { path: path.clone(), source })?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, error)| error)
        .with_context(|| format!("cannot lock {}", path.display()))
}

// `sublet refresh --boot`: the work of sublet-refresh.service before the first container.

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
        warn(probe::make_nodes(root, |_| true));
        match refresh(config) {
            // A driver that has just been loaded may not answer for any GPU yet.
            Ok(inventory) if inventory.devices.is_empty() && Instant::now() < deadline => {}
            Ok(inventory) => {
                warn(probe::link_nodes(root, &inventory));
                return Ok(Some(inventory));
            }
            Err(error) if !probe::is_loaded(root) || Instant::now() >= deadline => return Err(error),
            Err(_) => {}
        }
        std::thread::sleep(AGAIN);
    }
}

/// nvidia-uvm loads the rest too. If the module or modprobe is missing, the refresh reports it.
fn load_modules() {
    let mut modprobe = std::process::Command::new("modprobe");
    modprobe.env_clear().env("PATH", sublet_core::process::sublet::PATH).arg("nvidia-uvm");
    match child::run(&mut modprobe, "", MODPROBE_LIMIT) {
        Ok(done) if done.status.success() => {}
        Ok(done) => warn(vec![safe(done.stderr.trim())]),
        Err(ChildError::Timeout) => warn(vec!["modprobe nvidia-uvm takes too long".to_owned()]),
        Err(ChildError::Io(error)) => warn(vec![format!("modprobe nvidia-uvm: {error}")]),
    }
}

#[cfg(test)]
mod tests {
    use sublet_core::inventory::{Driver, Majors, SCHEMA};
    use sublet_core::ledger::fixture::lease;

    use super::*;

    /// A driver root without GPUs, and the inventory that a probe would make of it.
    fn root() -> (tempfile::TempDir, Config) {
        let root = tempfile::tempdir().unwrap();
        let version = root.path().join("proc/driver/nvidia/version");
        std::fs::create_dir_all(version.parent().unwrap()).unwrap();
        std::fs::write(version, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  x\n").unwrap();
        let driver = sublet_core::config::Driver { root: root.path().to_owned(), ..Default::default() };
        let config = Config { state_dir: root.path().join("run"), driver, ..Config::default() };
        (root, config)
    }

    fn probed(config: &Config, probed_at: u64) -> anyhow::Result<Inventory> {
        Ok(Inventory {
            schema: SCHEMA.into(),
            fingerprint: inventory::fingerprint(config)?,
            probed_at,
            mig_changes: 0,
            driver: Driver {
                version: "580.159.04".into(),
                cuda: (13, 0),
                simulated: false,
                mps_control: None,
                mps_missing: None,
                smi: None,
                majors: Majors::default(),
                mig_caps: [None, None],
            },
            devices: Vec::new(),
            left_out: Vec::new(),
            links: Vec::new(),
            directories: Vec::new(),
            files: Vec::new(),
        })
    }

    #[test]
    fn a_refresh_that_began_after_asking_is_joined() {
        let (_root, config) = root();
        let asked = SystemTime::now();
        assert_eq!(refresh_asked(&config, asked, |config| probed(config, 1)).unwrap().probed_at, 1);
        let joined = refresh_asked(&config, asked, |_| panic!("asked again")).unwrap();
        assert_eq!(joined.probed_at, 1);
        let later = refresh_asked(&config, SystemTime::now(), |config| probed(config, 2)).unwrap();
        assert_eq!(later.probed_at, 2);
        assert_eq!(inventory::load(&config).unwrap().probed_at, 2);
    }

    #[test]
    fn a_refresh_that_began_before_asking_is_not_enough() {
        let (_root, config) = root();
        let began_before = |config: &Config| {
            let inventory = probed(config, 1);
            std::thread::sleep(std::time::Duration::from_millis(2));
            inventory
        };
        refresh_asked(&config, SystemTime::now(), began_before).unwrap();
        let asked = SystemTime::now() - std::time::Duration::from_millis(1);
        assert_eq!(refresh_asked(&config, asked, |config| probed(config, 2)).unwrap().probed_at, 2);
    }

    #[test]
    fn a_gpu_that_becomes_sick_during_a_refresh_waits_for_no_end_of_it_and_stays_left_out() {
        let (_root, config) = root();
        let with_gpu = |config: &Config| -> anyhow::Result<Inventory> {
            let gpu = Device { uuid: "GPU-1".into(), ..Device::default() };
            Ok(Inventory { devices: vec![gpu], ..probed(config, 1)? })
        };
        refresh_asked(&config, SystemTime::now(), with_gpu).unwrap();
        let served = || inventory::last(&config).unwrap().devices.len();
        assert_eq!(served(), 1);
        let probed = || std::fs::metadata(inventory::cache_path(&config)).unwrap().modified().unwrap();
        let before = probed();
        let during = |config: &Config| -> anyhow::Result<Inventory> {
            let found = with_gpu(config);
            let fault = sick_gpus::Sick::now("Xid 95".into(), "reset it".into(), false);
            sick_gpus::mark("GPU-1", fault, config)?;
            let (config, (done, left_out)) = (config.clone(), std::sync::mpsc::channel());
            std::thread::spawn(move || done.send(leave_out_sick(&config)));
            left_out.recv_timeout(Duration::from_secs(60)).expect("it waits for this refresh")?;
            assert_eq!((served(), probed()), (0, before), "nobody has waited for that");
            found
        };
        refresh_asked(&config, SystemTime::now(), during).unwrap();
        assert_eq!(served(), 0);
        let emitted = events::read_ring(&config.state_dir);
        assert_eq!(emitted.iter().filter(|event| event.kind == Kind::GpuLost).count(), 1, "{emitted:?}");
    }

    #[test]
    fn the_containers_of_a_gpu_that_is_lost_are_warned_once_and_their_users_see_it() {
        let (_root, config) = root();
        let refresh = |is_lost| {
            let found = |config: &Config| -> anyhow::Result<Inventory> {
                let gpu = |number: u32| Device {
                    uuid: format!("GPU-{number}"),
                    bus_id: number.to_string(),
                    index: number,
                    ..Device::default()
                };
                let gone = LeftOut { gpu: gpu(1), mig: Vec::new(), lost: true, why: "it fell off".into() };
                let (devices, left_out) =
                    if is_lost { (vec![gpu(0)], vec![gone]) } else { (vec![gpu(0), gpu(1)], Vec::new()) };
                Ok(Inventory { devices, left_out, ..probed(config, 1)? })
            };
            refresh_asked(&config, SystemTime::now(), found).unwrap();
        };
        refresh(false);
        let leases = vec![lease(1, "GPU-0"), lease(2, "GPU-1"), lease(3, "GPU-1")];
        Store::open(&config.state_dir).unwrap().change(|ledger| ledger.leases = leases).unwrap();
        refresh(true);
        refresh(true);
        let is_warning = |event: &Event| event.kind == Kind::Warned;
        let warned: Vec<Event> =
            events::read_ring(&config.state_dir).into_iter().filter(is_warning).collect();
        let seen: Vec<_> = warned.iter().map(|event| (&*event.container_id, &*event.reason)).collect();
        assert_eq!(seen, [("container-2", "lost"), ("container-3", "lost")]);
        assert_eq!(warned[0].text, "GPU 1 is left out: it fell off");
        assert_eq!(sick_gpus::read(&config).unwrap().events, warned);
    }

    #[test]
    fn a_probe_that_fails_keeps_the_last_inventory() {
        let (_root, config) = root();
        refresh_asked(&config, SystemTime::now(), |config| probed(config, 1)).unwrap();
        let failed = refresh_asked(&config, SystemTime::now(), |_| anyhow::bail!("no driver"));
        assert_eq!(failed.unwrap_err().to_string(), "no driver");
        assert_eq!(inventory::load(&config).unwrap().probed_at, 1);
    }

    #[test]
    fn an_inventory_gone_stale_meanwhile_is_not_joined() {
        let (root, config) = root();
        let asked = SystemTime::now();
        refresh_asked(&config, asked, |config| probed(config, 1)).unwrap();
        std::fs::create_dir_all(root.path().join("proc/driver/nvidia/gpus/0000:3b:00.0")).unwrap();
        assert_eq!(refresh_asked(&config, asked, |config| probed(config, 2)).unwrap().probed_at, 2);
    }

    #[test]
    fn a_state_directory_that_cannot_be_made_is_named() {
        let (root, mut config) = root();
        std::fs::write(root.path().join("file"), "").unwrap();
        config.state_dir = root.path().join("file/run");
        let error = refresh_asked(&config, SystemTime::now(), |config| probed(config, 1)).unwrap_err();
        assert!(format!("{error:#}").contains("file/run/refresh.lock: "), "{error:#}");
    }
}
