//! What an Xid means for containers and GPUs: an error of a program's own is told as its container's; any other makes the GPU
//! sick, until a reset, a reboot or `sublet undrain --healthy`.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::probe::describe;
use crate::refresh::leave_out_sick;
use crate::sick_gpus::kernel_log::Xid;
use crate::sick_gpus::xid::{self, RECOVERY_CHANGED, Remedy, is_of_program};
use crate::sick_gpus::{self, Sick};
use sublet_core::admit::refresh;
use sublet_core::config::Config;
use sublet_core::events::{self, Event, Kind};
use sublet_core::inventory::{self, Device, Inventory};
use sublet_core::ledger::{Lease, Ledger, Store};
use sublet_core::process::Process;
use sublet_core::text::{safe, safe_long};

/// The same error of one container is told again after this time, with the number of those in between.
const TELL_AGAIN: Duration = Duration::from_secs(60);

/// NVML tells of an Xid at most this long before or after the kernel's log has it.
pub(super) const TOGETHER: Duration = Duration::from_secs(2);

/// How many Xids and errors are remembered at most.
const MOST: usize = 1000;

/// Acts on Xids.
#[derive(Default)]
pub(super) struct Teller {
    /// Those that the kernel's log had lately, with their GPUs.
    seen: VecDeque<(Instant, String, u32)>,
    /// By container or GPU and Xid: when it was told last, and how often it came since.
    told: BTreeMap<(String, u32), (Instant, u64)>,
}

impl Teller {
    /// Acts on `xid`, which the kernel's log has, or which NVML alone told of.
    pub fn act_on(&mut self, xid: &Xid, is_of_log: bool, config: &Config) {
        let Ok(inventory) = inventory::last(config).map(|inventory| inventory.with_left_out()) else {
            return;
        };
        let is_it =
            |gpu: &&Device| gpu.bus_id.strip_prefix(&xid.bus_id).is_some_and(|rest| rest.starts_with('.'));
        let Some(gpu) = inventory.gpus().find(is_it) else { return };
        if is_of_log {
            self.seen.push_back((Instant::now(), gpu.uuid.clone(), xid.number));
            self.seen.drain(..self.seen.len().saturating_sub(MOST));
        }
        let number = xid.number;
        let (what, remedy) = xid::describe(number);
        if is_of_program(number) {
            return self.tell_containers(xid, gpu, &inventory, config);
        }
        let (what, asked) = match is_asked(xid) {
            Some(false) => return note_reset(gpu, config),
            Some(true) => (safe_long(&xid.text, 200), true),
            None => (what.to_owned(), false),
        };
        mark_sick(gpu, &format!("Xid {number}: {what}"), remedy, asked, config);
    }

    /// Whether the kernel's log had this Xid of the GPU with this UUID at about `then`.
    pub fn has_seen(&self, gpu: &str, number: u32, then: Instant) -> bool {
        let is_it = |(at, uuid, seen): &(Instant, String, u32)| {
            uuid == gpu && *seen == number && at.max(&then).duration_since(*at.min(&then)) <= TOGETHER
        };
        self.seen.iter().any(is_it)
    }

    fn tell_containers(&mut self, xid: &Xid, gpu: &Device, inventory: &Inventory, config: &Config) {
        let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).unwrap_or_default();
        let leases = leases_of(xid.pid, gpu, &ledger, inventory);
        let name = xid.pid.and_then(|pid| Some((pid, describe(pid, 0)?.name)));
        let process = name.map(|(pid, name)| format!(", process {pid} ({})", safe(&name)));
        let process =
            process.or_else(|| Some(format!(", process {}, which has ended", xid.pid?))).unwrap_or_default();
        let (what, remedy) = xid::describe(xid.number);
        let shared =
            if leases.len() > 1 { "; it ends the GPU work of all containers of its MPS server" } else { "" };
        let event = |lease: Option<&Lease>, before: u64| Event {
            uid: lease.map_or(0, |lease| lease.container.uid),
            container_id: lease.map(|lease| lease.container.name().into_owned()).unwrap_or_default(),
            lease: lease.map(|lease| lease.id.to_string()).unwrap_or_default(),
            devices: vec![gpu.uuid.clone()],
            reason: format!("xid-{}", xid.number),
            text: format!(
                "Xid {} on {}{process}: {what}{}{shared}; fix: {}",
                xid.number,
                gpu.label(),
                if before > 0 { format!(" ({before} more since the last line)") } else { String::new() },
                remedy.words(gpu.index)
            ),
            ..Event::now(Kind::GpuError)
        };
        let whose: Vec<Option<&Lease>> =
            if leases.is_empty() { vec![None] } else { leases.iter().map(|lease| Some(*lease)).collect() };
        let mut told = Vec::new();
        for lease in whose {
            let key = lease.map_or_else(|| gpu.uuid.clone(), |lease| lease.id.to_string());
            told.extend(self.is_due(key, xid.number).map(|before| event(lease, before)));
        }
        for event in &told {
            tracing::warn!(container = event.container_id, device = gpu.uuid, "health: {}", event.text);
        }
        events::emit(&config.state_dir, &told);
    }

    /// Whether an error is to be told now, and how many were not told before it.
    fn is_due(&mut self, whose: String, number: u32) -> Option<u64> {
        let now = Instant::now();
        if self.told.len() >= MOST {
            self.told.retain(|_, (at, _)| at.elapsed() < TELL_AGAIN);
        }
        let is_full = self.told.len() >= MOST;
        match self.told.get_mut(&(whose.clone(), number)) {
            Some((at, untold)) if at.elapsed() < TELL_AGAIN => {
                *untold += 1;
                None
            }
            Some((at, untold)) => {
                *at = now;
                Some(std::mem::take(untold))
            }
            None if is_full => None,
            None => self.told.insert((whose, number), (now, 0)).map_or(Some(0), |_| Some(0)),
        }
    }
}

/// Of an Xid by which the driver asks for another recovery than before: whether it asks for one.
fn is_asked(xid: &Xid) -> Option<bool> {
    (xid.number == RECOVERY_CHANGED).then(|| !xid.text.contains("to 0x0 (None)"))
}

/// The leases to which an error of process `pid` on `gpu` belongs: its container's, or all those of its shared MPS server. Of a
/// process that has ended, the only one on the GPU.
fn leases_of<'l>(
    pid: Option<i32>,
    gpu: &Device,
    ledger: &'l Ledger,
    inventory: &Inventory,
) -> Vec<&'l Lease> {
    let seen = pid.and_then(|pid| Some((Process::find(pid)?, describe(pid, 0)?)));
    let own = seen.as_ref().and_then(|(process, seen)| ledger.certain_lease_of(*process, seen));
    let parent = seen.as_ref().filter(|(_, seen)| seen.mps_server).and_then(|(process, _)| process.parent());
    let is_its =
        |pid: i32| ledger.daemons.iter().find(|daemon| daemon.process.is_some_and(|own| own.pid == pid));
    let server = parent.and_then(is_its).map(|daemon| &daemon.key);
    if let Some(daemon) = own.and_then(|lease| lease.daemon.as_ref()).or(server) {
        return ledger.on_daemon(daemon).collect();
    }
    match (own, seen) {
        (Some(lease), _) => vec![lease],
        // A process without a lease.
        (None, Some(_)) => Vec::new(),
        (None, None) => {
            let mut all = on_gpu(gpu, ledger, inventory);
            all.next().filter(|_| all.next().is_none()).into_iter().collect()
        }
    }
}

/// The leases on `gpu` and on its MIG devices.
fn on_gpu<'l>(gpu: &Device, ledger: &'l Ledger, inventory: &Inventory) -> impl Iterator<Item = &'l Lease> {
    let gone = inventory.left_out.iter().flat_map(|gone| &gone.mig);
    let parts = inventory.devices.iter().chain(gone).filter(|part| part.gpu() == gpu.uuid);
    let uuids: Vec<String> = parts.map(|part| part.uuid.clone()).collect();
    ledger.leases.iter().filter(move |lease| lease.devices.iter().any(|uuid| uuids.contains(uuid)))
}

/// From now on the GPU takes no new lease. Its containers are told.
pub(super) fn mark_sick(gpu: &Device, what: &str, remedy: Remedy, asked: bool, config: &Config) {
    let fault = Sick::now(what.to_owned(), remedy.words(gpu.index), asked);
    let text = format!("{} takes no new lease: {what}; fix: {}", gpu.label(), fault.fix);
    match sick_gpus::mark(&gpu.uuid, fault, config) {
        Ok(true) => {}
        Ok(false) => return,
        // It is told all the same.
        Err(error) => tracing::warn!("health.json: {error}"),
    }
    tracing::warn!(device = gpu.uuid, "health: {text}");
    let _ = leave_out_sick(config).inspect_err(|error| tracing::warn!("inventory.json: {error}"));
    let read = Store::open(&config.state_dir).and_then(|store| store.read());
    let (Ok(ledger), Ok(inventory)) = (read, inventory::last(config)) else { return };
    let inventory = inventory.with_left_out();
    let event = |lease: &Lease| Event {
        uid: lease.container.uid,
        container_id: lease.container.name().into_owned(),
        lease: lease.id.to_string(),
        devices: vec![gpu.uuid.clone()],
        reason: "unhealthy".to_owned(),
        text: text.clone(),
        ..Event::now(Kind::Warned)
    };
    events::emit(&config.state_dir, &on_gpu(gpu, &ledger, &inventory).map(event).collect::<Vec<_>>());
}

/// The driver asks for no reset any more. If that makes the GPU well, it is served again.
pub(super) fn note_reset(gpu: &Device, config: &Config) {
    match sick_gpus::note_reset(&gpu.uuid, config) {
        Ok(true) => {
            tracing::info!(device = gpu.uuid, "health: {} was reset", gpu.label());
            let _ = refresh(config).inspect_err(|error| tracing::warn!("{error}"));
        }
        Ok(false) => {}
        Err(error) => tracing::warn!("health.json: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use sublet_core::inventory::{Driver, Fingerprint, Majors, SCHEMA};
    use sublet_core::ledger::fixture::lease;
    use sublet_core::ledger::{DaemonKey, Init};

    use super::*;

    const GPU: &str = "GPU-1";

    /// A host with one GPU.
    fn host(leases: Vec<Lease>) -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { state_dir: dir.path().join("run"), ..Config::default() };
        config.driver.root = dir.path().to_owned();
        let gpu = Device { uuid: GPU.into(), bus_id: "0000:3b:00.0".into(), ..Device::default() };
        inventory::store(&config, &inventory_of(vec![gpu])).unwrap();
        let store = Store::open(&config.state_dir).unwrap();
        store.change(|ledger| ledger.leases = leases).unwrap();
        (dir, config)
    }

    fn inventory_of(devices: Vec<Device>) -> Inventory {
        let none =
            Fingerprint { boot_id: String::new(), driver_version: String::new(), gpus: vec![], mig: vec![] };
        let driver = Driver {
            version: String::new(),
            cuda: (13, 0),
            simulated: true,
            mps_control: None,
            mps_missing: None,
            smi: None,
            majors: Majors::default(),
            mig_caps: [None, None],
        };
        Inventory {
            schema: SCHEMA.into(),
            fingerprint: none,
            probed_at: 0,
            mig_changes: 0,
            driver,
            devices,
            left_out: vec![],
            files: vec![],
            directories: vec![],
        }
    }

    fn xid(number: u32, pid: Option<i32>, text: &str) -> Xid {
        Xid { sequence: 1, bus_id: "0000:3b:00".into(), number, pid, text: text.into() }
    }

    fn told(config: &Config) -> Vec<(Kind, String)> {
        let events = events::read_ring(&config.state_dir).into_iter();
        let of_health = |event: &Event| [Kind::GpuError, Kind::GpuLost, Kind::Warned].contains(&event.kind);
        events.filter(of_health).map(|event| (event.kind, event.container_id)).collect()
    }

    /// A lease whose container's first process is this one.
    fn ours(number: u64) -> Lease {
        let process = Process::current().unwrap();
        let init = Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None };
        Lease { init: Some(init), ..lease(number, GPU) }
    }

    fn pid() -> Option<i32> {
        Some(Process::current().unwrap().pid)
    }

    #[test]
    fn an_error_of_a_programs_own_is_its_containers_and_told_once_a_minute() {
        let (_dir, config) = host(vec![ours(1)]);
        let name = ours(1).container.name().into_owned();
        let mut teller = Teller::default();
        for _ in 0..1000 {
            teller.act_on(&xid(31, pid(), "pid=1"), true, &config);
        }
        assert_eq!(told(&config), [(Kind::GpuError, name)]);
        assert!(inventory::last(&config).unwrap().left_out.is_empty(), "the GPU is well");
        assert!(teller.has_seen(GPU, 31, Instant::now()) && !teller.has_seen(GPU, 13, Instant::now()));
    }

    #[test]
    fn under_a_shared_server_all_its_containers_are_told() {
        let key = Some(DaemonKey(GPU.to_owned()));
        let own = Lease { daemon: key.clone(), ..ours(1) };
        let other = Lease { daemon: key, ..lease(2, GPU) };
        let ledger = Ledger { leases: vec![own, other, lease(3, GPU)], ..Ledger::empty("boot") };
        let gpu = Device { uuid: GPU.into(), ..Device::default() };
        let inventory = inventory_of(vec![gpu.clone()]);
        let ids = |pid| -> Vec<String> {
            leases_of(pid, &gpu, &ledger, &inventory).iter().map(|lease| lease.id.to_string()).collect()
        };
        assert_eq!(ids(pid()), ["0000000000000001", "0000000000000002"]);
        assert_eq!(ids(Some(i32::MAX)), [""; 0], "it has ended, and may have been any of three");
        assert_eq!(ids(Some(1)), [""; 0], "it has no lease");
    }

    #[test]
    fn any_other_xid_makes_the_gpu_sick_and_a_reset_that_is_asked_for_makes_it_well() {
        let (_dir, config) = host(vec![ours(1)]);
        let mut teller = Teller::default();
        for _ in 0..3 {
            teller.act_on(&xid(4242, None, ""), true, &config);
        }
        let left_out = inventory::last(&config).unwrap().left_out;
        assert!(
            left_out[0].why.starts_with("Xid 4242: an error that this version does not know, at "),
            "{left_out:?}"
        );
        assert_eq!(
            told(&config).iter().map(|(kind, _)| *kind).collect::<Vec<_>>(),
            [Kind::GpuLost, Kind::Warned]
        );
        let changed = |to: &str| format!("GPU recovery action changed from 0x0 (None) to {to}");
        teller.act_on(&xid(154, None, &changed("0x1 (GPU Reset Required)")), true, &config);
        assert_eq!(sick_gpus::read(&config).asked().collect::<Vec<_>>(), [GPU]);
        assert_eq!(is_asked(&xid(154, None, &changed("0x0 (None)"))), Some(false));
    }

    #[test]
    fn an_xid_of_an_unknown_gpu_is_nobodys() {
        let (_dir, config) = host(vec![]);
        let other = Xid { bus_id: "0000:3b:0".into(), ..xid(79, None, "") };
        Teller::default().act_on(&other, true, &config);
        assert_eq!((told(&config).len(), sick_gpus::read(&config)), (0, sick_gpus::Records::default()));
    }
}
