//! What an Xid means for containers and GPUs: an error of a program's own is its container's; any other makes the GPU
//! sick, until a reset, a reboot or `sublet undrain --healthy`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::probe::describe;
use crate::refresh::leave_out_sick;
use crate::sick_gpus::kernel_log::Xid;
use crate::sick_gpus::xid::{self, RECOVERY_CHANGED, Remedy, describe_recovery, is_fault, is_program_error};
use crate::sick_gpus::{self, Sick, event};
use sublet_core::config::Config;
use sublet_core::events::{self, Event, Kind};
use sublet_core::inventory::{self, Device, GpuProcess};
use sublet_core::ledger::{Lease, Ledger, MpsDaemon, Store};
use sublet_core::process::Process;
use sublet_core::text::{safe, safe_long};

/// The same event of one container is emitted again after this time.
const EMIT_AGAIN: Duration = Duration::from_secs(60);

/// How many are emitted in this time at most.
const MOST: usize = 1000;

/// Acts on Xids.
#[derive(Default)]
pub(super) struct Reporter {
    /// When each event was emitted last.
    emitted: BTreeMap<String, Instant>,
}

impl Reporter {
    /// Acts on `xid`.
    pub fn act_on(&mut self, xid: &Xid, config: &Config) {
        let Ok(known) = inventory::last(config).map(|known| known.with_left_out()) else { return };
        let is_at =
            |gpu: &Device| gpu.bus_id.strip_prefix(&xid.gpu).is_some_and(|rest| rest.starts_with('.'));
        let Some(gpu) = known.gpus().find(|gpu| gpu.uuid == xid.gpu || is_at(gpu)) else { return };
        let sick = |what: &str, remedy, asked| {
            mark_sick(gpu, &format!("Xid {}: {what}", xid.number), remedy, asked, config);
        };
        match (asked_recovery(xid), xid::describe(xid.number)) {
            _ if is_program_error(xid.number) => self.report_to_containers(xid, gpu, config),
            (None, (what, remedy)) => sick(what, remedy, false),
            (Some(action), _) if is_fault(action) => {
                sick(&safe_long(&xid.text, 200), describe_recovery(action).1, true);
            }
            (Some(_), _) => note_reset(gpu, config),
        }
    }

    fn report_to_containers(&mut self, xid: &Xid, gpu: &Device, config: &Config) {
        let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).unwrap_or_default();
        let seen = xid.pid.and_then(|pid| Some((Process::find(pid)?, describe(pid, 0)?)));
        let leases = leases_of(seen.as_ref(), &gpu.uuid, &ledger);
        let is_server = seen.as_ref().is_some_and(|(_, seen)| seen.mps_server);
        let own = seen.as_ref().and_then(|(process, seen)| ledger.certain_lease_of(*process, seen));
        // It has ended, or the log's pids are those of another PID namespace.
        let unseen = || "which is not seen here".to_owned();
        let name = seen.as_ref().map_or_else(unseen, |(_, seen)| safe(&seen.name));
        let process = xid.pid.map(|pid| format!(", process {pid} ({name})")).unwrap_or_default();
        // A neighbour's processes are nothing to the other containers of a server.
        let is_foreign = |lease: &Lease| !is_server && own.map_or(leases.len() > 1, |own| own.id != lease.id);
        let shared =
            if leases.len() > 1 { "; it ends the GPU work of all containers of its MPS server" } else { "" };
        let ((what, remedy), label) = (xid::describe(xid.number), gpu.label());
        let (number, fix) = (xid.number, remedy.words(gpu.index));
        let text = |lease: Option<&Lease>| {
            let process = if lease.is_some_and(is_foreign) { "" } else { process.as_str() };
            format!("Xid {number} on {label}{process}: {what}{shared}; fix: {fix}")
        };
        // An error of a process without a lease is the GPU's.
        let nobody = leases.is_empty().then_some(None);
        let reason = format!("xid-{number}");
        for lease in leases.iter().copied().map(Some).chain(nobody) {
            self.emit_once(event(Kind::GpuError, lease, gpu, &reason, &text(lease)), config);
        }
    }

    /// Emits it, unless the same was emitted of the same a minute ago.
    pub fn emit_once(&mut self, event: Event, config: &Config) {
        self.emitted.retain(|_, at| at.elapsed() < EMIT_AGAIN);
        let same = format!("{} {} {}", event.devices.concat(), event.lease, event.reason);
        if self.emitted.len() < MOST && !self.emitted.contains_key(&same) {
            self.emitted.insert(same, Instant::now());
            emit(&[event], config);
        }
    }
}

/// Emits `events`, also for users without root.
fn emit(events: &[Event], config: &Config) {
    events::emit(&config.state_dir, events);
    let kept = sick_gpus::keep_events(events, config);
    let _ = kept.inspect_err(|error| tracing::warn!("health.json: {error}"));
}

/// Of an Xid by which the driver asks for another recovery than before, as `GPU recovery action changed from 0x0 (None) to 0x2
/// (Node Reboot Required)`: the action; one that nobody knows, where the text has none.
fn asked_recovery(xid: &Xid) -> Option<u64> {
    let action = || u64::from_str_radix(xid.text.rsplit_once(" to 0x")?.1.split(' ').next()?, 16).ok();
    (xid.number == RECOVERY_CHANGED).then(|| action().unwrap_or(u64::MAX))
}

/// The leases to which an error of the process `seen` on `gpu` belongs: its container's, or all those of its shared MPS server.
/// Of a process that is not seen, the only one on the GPU, or those of the GPU's MPS server where all use that.
fn leases_of<'l>(seen: Option<&(Process, GpuProcess)>, gpu: &str, ledger: &'l Ledger) -> Vec<&'l Lease> {
    let Some((process, seen)) = seen else {
        let all: Vec<&Lease> = ledger.on_gpu(gpu).collect();
        let shares = |lease: &&Lease| lease.daemon.is_some() && lease.daemon == all[0].daemon;
        return if all.len() == 1 || all.iter().all(shares) { all } else { Vec::new() };
    };
    let own = ledger.certain_lease_of(*process, seen);
    let parent = process.parent().filter(|_| seen.mps_server);
    let is_its = |daemon: &&MpsDaemon| daemon.process.is_some_and(|own| Some(own.pid) == parent);
    let server = ledger.daemons.iter().find(is_its).map(|daemon| &daemon.key);
    match own.and_then(|lease| lease.daemon.as_ref()).or(server) {
        Some(daemon) => ledger.on_daemon(daemon).collect(),
        None => own.into_iter().collect(),
    }
}

/// From now on the GPU takes no new lease. Its containers get an event.
pub(super) fn mark_sick(gpu: &Device, what: &str, remedy: Remedy, asked: bool, config: &Config) {
    let fault = Sick::now(what.to_owned(), remedy.words(gpu.index), asked);
    let text = format!("{} takes no new lease: {what}; fix: {}", gpu.label(), fault.fix);
    match sick_gpus::mark(&gpu.uuid, fault, config) {
        Ok(true) => {}
        Ok(false) => return,
        // It is reported all the same.
        Err(error) => tracing::warn!("health.json: {error}"),
    }
    let _ = leave_out_sick(config).inspect_err(|error| tracing::warn!("inventory.json: {error}"));
    let ledger = Store::open(&config.state_dir).and_then(|store| store.read()).unwrap_or_default();
    let warning = |lease| event(Kind::Warned, Some(lease), gpu, "unhealthy", &text);
    emit(&ledger.on_gpu(&gpu.uuid).map(warning).collect::<Vec<_>>(), config);
}

/// The driver asks for no reset any more. If that makes the GPU well, it is served again from the next look for GPUs that answer
/// on ([`super::super::gpu_watch`]): a refresh may hang with another one.
pub(super) fn note_reset(gpu: &Device, config: &Config) {
    let noted = sick_gpus::note_reset(&gpu.uuid, config);
    let _ = noted.inspect_err(|error| tracing::warn!("{} may be well again: {error}", gpu.label()));
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use sublet_core::inventory::{Driver, Fingerprint, Inventory, Majors, SCHEMA};
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
        inventory::store(&config, &inventory_of(vec![gpu]), SystemTime::now()).unwrap();
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
            links: vec![],
            files: vec![],
            directories: vec![],
        }
    }

    fn xid(number: u32, pid: Option<i32>, text: &str) -> Xid {
        Xid { gpu: "0000:3b:00".into(), number, pid, text: text.into() }
    }

    fn emitted(config: &Config) -> Vec<(Kind, String)> {
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

    fn pid() -> i32 {
        Process::current().unwrap().pid
    }

    #[test]
    fn an_error_of_a_programs_own_is_its_containers_and_emitted_once_a_minute() {
        let (_dir, config) = host(vec![ours(1)]);
        let name = ours(1).container.name().into_owned();
        let mut reporter = Reporter::default();
        for _ in 0..1000 {
            reporter.act_on(&xid(31, Some(pid()), "pid=1"), &config);
        }
        assert_eq!(emitted(&config), [(Kind::GpuError, name)]);
        assert!(inventory::last(&config).unwrap().left_out.is_empty(), "the GPU is well");
        reporter.act_on(&xid(13, Some(i32::MAX), ""), &config);
        let text = events::read_ring(&config.state_dir).pop().unwrap().text;
        assert!(text.contains(", process 2147483647 (which is not seen here): "), "{text}");
    }

    #[test]
    fn under_a_shared_server_all_its_containers_get_an_event() {
        let key = Some(DaemonKey(GPU.to_owned()));
        let own = Lease { daemon: key.clone(), ..ours(1) };
        let other = Lease { daemon: key, ..lease(2, GPU) };
        let mut ledger = Ledger { leases: vec![own, other, lease(3, GPU)], ..Ledger::empty("boot") };
        let ids = |pid: i32, ledger: &Ledger| -> Vec<String> {
            let seen = Process::find(pid).zip(describe(pid, 0));
            let leases = leases_of(seen.as_ref(), GPU, ledger);
            leases.iter().map(|lease| lease.id.to_string()).collect()
        };
        let both = ["0000000000000001", "0000000000000002"];
        assert_eq!(ids(pid(), &ledger), both);
        assert_eq!(ids(i32::MAX, &ledger), [""; 0], "it has ended, and may have been any of three");
        assert_eq!(ids(1, &ledger), [""; 0], "it has no lease");
        ledger.leases.truncate(2);
        assert_eq!(ids(i32::MAX, &ledger), both, "whichever it was, its server is theirs");
    }

    #[test]
    fn a_neighbour_on_a_shared_server_learns_of_the_error_and_not_of_the_process() {
        let key = Some(DaemonKey(GPU.to_owned()));
        let other = Lease { daemon: key.clone(), ..lease(2, GPU) };
        let (_dir, config) = host(vec![Lease { daemon: key, ..ours(1) }, other]);
        Reporter::default().act_on(&xid(31, Some(pid()), ""), &config);
        let events = events::read_ring(&config.state_dir).into_iter();
        let errors: Vec<Event> = events.filter(|event| event.kind == Kind::GpuError).collect();
        let names = |event: &Event| event.text.contains(", process ");
        assert_eq!(errors.iter().map(names).collect::<Vec<_>>(), [true, false], "{errors:?}");
        assert_eq!(sick_gpus::read(&config).unwrap().events, errors, "users see them there");
    }

    #[test]
    fn any_other_xid_makes_the_gpu_sick_and_a_reset_that_is_asked_for_makes_it_well() {
        let (_dir, config) = host(vec![ours(1)]);
        let mut reporter = Reporter::default();
        for _ in 0..3 {
            reporter.act_on(&xid(4242, None, ""), &config);
        }
        let left_out = inventory::last(&config).unwrap().left_out;
        assert!(
            left_out[0].why.starts_with("Xid 4242: an error that this version does not know, at "),
            "{left_out:?}"
        );
        assert_eq!(
            emitted(&config).iter().map(|(kind, _)| *kind).collect::<Vec<_>>(),
            [Kind::GpuLost, Kind::Warned]
        );
        let changed = |to: &str| format!("GPU recovery action changed from 0x0 (None) to {to}");
        reporter.act_on(&xid(154, None, &changed("0x1 (GPU Reset Required)")), &config);
        assert_eq!(sick_gpus::read(&config).unwrap().asked().collect::<Vec<_>>(), [GPU]);
        assert_eq!(asked_recovery(&xid(154, None, &changed("0x0 (None)"))), Some(0));
        assert_eq!(asked_recovery(&xid(154, None, "")), Some(u64::MAX), "none says what is asked for");
    }

    #[test]
    fn a_drain_of_peer_to_peer_traffic_that_is_asked_for_is_no_fault() {
        let (_dir, config) = host(vec![ours(1)]);
        let text = "GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)";
        Reporter::default().act_on(&xid(RECOVERY_CHANGED, None, text), &config);
        assert_eq!(sick_gpus::read(&config).unwrap(), sick_gpus::Records::default());
        assert_eq!(emitted(&config), []);
        for to in ["0x1 (GPU Reset Required)", "0x3 (Drain P2P)"] {
            let text = format!("GPU recovery action changed from 0x0 (None) to {to}");
            Reporter::default().act_on(&xid(RECOVERY_CHANGED, None, &text), &config);
        }
        assert!(sick_gpus::read(&config).unwrap().fault(GPU).is_none(), "it needs no reset any more");
    }

    #[test]
    fn the_fix_of_a_sick_gpu_is_the_recovery_that_the_driver_asks_for_last() {
        let (_dir, config) = host(vec![ours(1)]);
        let mut reporter = Reporter::default();
        let why = || inventory::last(&config).unwrap().left_out.remove(0).why;
        reporter.act_on(&xid(48, None, ""), &config);
        assert!(why().contains("; fix: end what uses it, then `nvidia-smi --gpu-reset"), "{}", why());
        let text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)";
        for _ in 0..3 {
            reporter.act_on(&xid(154, None, text), &config);
            assert!(why().starts_with("Xid 48: ") && why().contains("; fix: reboot the host"), "{}", why());
        }
        let warned = emitted(&config).into_iter().filter(|(kind, _)| *kind == Kind::Warned).count();
        assert_eq!(warned, 2, "its container is told of either fix once");
    }

    #[test]
    fn a_gpu_that_flaps_becomes_well_once_and_then_stays_sick() {
        let (_dir, config) = host(vec![ours(1)]);
        let mut reporter = Reporter::default();
        for _ in 0..50 {
            for to in ["0x1 (GPU Reset Required)", "0x0 (None)"] {
                let text = format!("GPU recovery action changed from 0x2 (Other) to {to}");
                reporter.act_on(&xid(RECOVERY_CHANGED, None, &text), &config);
            }
        }
        let records = sick_gpus::read(&config).unwrap();
        assert!(records.fault(GPU).is_some() && records.asked().count() == 0, "{records:?}");
        let warned = emitted(&config).into_iter().filter(|(kind, _)| *kind == Kind::Warned).count();
        assert_eq!(warned, 2, "its container is told of each fault, and not of each change");
    }

    #[test]
    fn an_xid_of_an_unknown_gpu_is_nobodys() {
        let (_dir, config) = host(vec![]);
        let other = Xid { gpu: "0000:3b:0".into(), ..xid(79, None, "") };
        Reporter::default().act_on(&other, &config);
        assert_eq!(
            (emitted(&config).len(), sick_gpus::read(&config).unwrap()),
            (0, sick_gpus::Records::default())
        );
    }
}
