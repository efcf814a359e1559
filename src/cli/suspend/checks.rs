//! What is checked before anything of a container is locked.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};

use super::driver::{Driver, ProcessState};
use super::error::BESIDE_OTHERS;
use super::{SuspendError, sum};
use crate::probe::memory_of_host;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Lease, SuspendedProcess, Suspension};
use sublet_core::process::{Process, cgroups};
use sublet_core::share::{Mode, Suspend};
use sublet_core::text::safe;

/// The first driver branch with the calls (CUDA 12.8).
const OLDEST_BRANCH: u32 = 570;

/// The first one that restores on another GPU (`gpuPairs` of CUDA 13).
const OLDEST_TO_MOVE: u32 = 580;

/// The libraries of the video engines, whose work the driver does not bring back: pictures decoded after a resume were wrong, or the
/// decoder failed (docs/evidence/2026-11-28-h200-suspend.md).
const CODECS: [&str; 2] = ["/libnvcuvid.so", "/libnvidia-encode.so"];

/// In bytes, of what a process has mapped: more than any library's, whose path has 4096 at most.
const LONGEST_LINE: u64 = 8192;

/// So much of the host's memory is left to other programs, in bytes.
const HOST_RESERVE: u64 = 512 << 20;

/// A CUDA process of the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CudaProcess {
    pub process: Process,
    /// On the GPU, in bytes; `None`: the driver does not tell.
    pub bytes: Option<u64>,
}

/// The lease and the version of the driver. `force` takes away that its share does not allow it.
pub(super) fn check_lease(lease: &Lease, inventory: &Inventory, force: bool) -> Result<(), SuspendError> {
    let why = match lease.mode {
        _ if lease.job.is_some() => Some("it belongs to a job of Slurm's"),
        Mode::Mig => Some("it has a MIG device, and the driver suspends only what has a whole GPU"),
        _ if lease.daemon.is_some() => Some("it is served by MPS, where the driver suspends nothing"),
        _ if lease.devices.len() != 1 => {
            Some("it has several GPUs, and the driver loses a process that uses several")
        }
        _ if lease.known.iter().filter_map(|uuid| inventory.device(uuid)).any(|gpu| gpu.mig_enabled) => Some(
            "it was moved from a GPU that is in MIG mode now, and what the driver does then is not known",
        ),
        _ => None,
    };
    if let Some(why) = why {
        return Err(SuspendError::Cannot(why));
    }
    check_driver("suspend", OLDEST_BRANCH, inventory)?;
    if lease.suspend.is_never() && !force {
        return Err(SuspendError::NotAllowed(", or root suspends it with --force"));
    }
    Ok(())
}

fn check_driver(what: &'static str, oldest: u32, inventory: &Inventory) -> Result<(), SuspendError> {
    let version = &inventory.driver.version;
    let branch: u32 = version.split('.').next().and_then(|branch| branch.parse().ok()).unwrap_or(0);
    if branch >= oldest {
        return Ok(());
    }
    Err(SuspendError::OldDriver { version: safe(version), what, branch: oldest })
}

/// Whether the lease may be moved from one of these GPUs to the other: they are whole GPUs of one model.
pub(super) fn check_move(
    lease: &Lease,
    (here, there): (&inventory::Device, &inventory::Device),
    inventory: &Inventory,
) -> Result<(), SuspendError> {
    check_lease(lease, inventory, false).map_err(|error| match error {
        SuspendError::NotAllowed(_) => SuspendError::NotAllowed(""),
        error => error,
    })?;
    check_driver("move", OLDEST_TO_MOVE, inventory)?;
    let label = there.label();
    let kind = |device: &inventory::Device| (device.name.clone(), device.memory_bytes >> 30);
    let why = if there.uuid == here.uuid {
        "why: it is there".to_owned()
    } else if there.is_mig() || there.mig_enabled {
        "why: the driver moves nothing to MIG devices".to_owned()
    } else if kind(here) != kind(there) {
        let [there, here] = [there, here].map(|device| safe(&device.name));
        format!("why: that is a {there}, it is on a {here}, and the driver moves between GPUs of one model")
    } else {
        return Ok(());
    };
    Err(SuspendError::OtherGpu(format!("{label}; {why}")))
}

/// The CUDA processes of a container.
#[derive(Clone, Debug, Default)]
pub(super) struct CudaProcesses {
    /// Those on its GPU.
    pub here: Vec<CudaProcess>,
    /// Whether one is on another GPU, which only a container with more nodes than its share's can be.
    pub elsewhere: bool,
}

/// Their number, their GPUs and what the driver tells of them.
pub(super) fn check_processes(
    lease: &Lease,
    CudaProcesses { here: found, elsewhere }: &CudaProcesses,
) -> Result<Vec<SuspendedProcess>, SuspendError> {
    if *elsewhere {
        return Err(SuspendError::Cannot(
            "it uses a GPU that is not its share's, and the driver loses a process that uses several",
        ));
    }
    let pids = || found.iter().map(|one| one.process.pid.to_string()).collect::<Vec<_>>().join(", ");
    match found.len() {
        0 => return Err(SuspendError::NoProcess),
        1 => {}
        count if lease.suspend != Suspend::AllowMany => {
            return Err(SuspendError::Processes { count, pids: pids() });
        }
        _ => {}
    }
    let with = |one: &CudaProcess| Some(SuspendedProcess { process: one.process, bytes: one.bytes? });
    let all: Option<Vec<_>> = found.iter().map(with).collect();
    all.ok_or_else(|| SuspendError::Unknown(format!("how much GPU memory process {} has", pids())))
}

/// Process `new` began to use the GPU of the suspended `lease`: whether it may be suspended with the rest, and come back with it
/// to what the lease books.
///
/// Memory that it shares with another process would be lost. It can have none of those that are out: it has started after all of
/// their memory had left the GPU. Two such processes may share with each other: without `allow-many` there is one, and no more.
pub(super) fn check_new(
    lease: &Lease,
    own: &Suspension,
    new: Process,
    CudaProcesses { here, elsewhere }: &CudaProcesses,
) -> Result<SuspendedProcess, SuspendError> {
    // NVML's lists may be from before.
    let all: Vec<&CudaProcess> = here.iter().filter(|one| !own.has(one.process)).collect();
    let found = all.iter().find(|one| one.process == new).ok_or(SuspendError::NoProcess)?;
    let many = lease.suspend == Suspend::AllowMany;
    let why = if *elsewhere {
        Some("its container uses another GPU, too")
    } else if !many && (own.processes.len() > 1 || all.len() > 1) {
        Some(
            "it is not the only one that began meanwhile, and memory that they share would be lost; fix: \
             sublet.suspend=allow-many says that they share none",
        )
    } else if !many && !own.is_before(new) {
        Some(
            "it was there before the first one was suspended, and memory that they share would be lost; fix: \
             sublet.suspend=allow-many says that they share none",
        )
    } else {
        None
    };
    if let Some(why) = why {
        return Err(SuspendError::Cannot(why));
    }
    let unknown = || SuspendError::Unknown(format!("how much GPU memory process {} has", new.pid));
    let bytes = found.bytes.ok_or_else(unknown)?;
    match lease.memory_bytes {
        Some(booked) if own.bytes().saturating_add(bytes) > booked => {
            Err(SuspendError::Booked { bytes, own: own.bytes(), booked })
        }
        _ => Ok(SuspendedProcess { process: new, bytes }),
    }
}

/// Locked, they are the ones that were found before, and have no more memory than was planned with.
pub(super) fn check_unchanged(planned: &[SuspendedProcess], now: &CudaProcesses) -> Result<(), String> {
    let is_planned = |new: &&CudaProcess| {
        let bytes = planned.iter().find(|one| one.process == new.process).map(|one| one.bytes);
        new.bytes.is_some_and(|now| bytes.is_some_and(|bytes| now <= bytes))
    };
    match now.here.iter().find(|new| !is_planned(new)) {
        _ if now.elsewhere => Err("it began to use another GPU meanwhile".to_owned()),
        Some(new) => Err(format!("process {} took GPU memory meanwhile; fix: try again", new.process.pid)),
        None => Ok(()),
    }
}

/// No process of it is stopped, frozen or held by another program: it could not do its part.
pub(super) fn check_awake(processes: &[SuspendedProcess]) -> Result<(), SuspendError> {
    for process in processes.iter().map(|one| one.process).filter(Process::is_alive) {
        let frozen =
            cgroups::is_frozen(process.pid).map_err(|error| unknown("whether it is paused", &error))?;
        if frozen || process.is_stopped() {
            return Err(SuspendError::Paused(process.pid));
        }
    }
    Ok(())
}

/// None of them decodes or encodes video on the GPU. One that ends meanwhile does not.
pub(super) fn check_codecs(processes: &[SuspendedProcess]) -> Result<(), SuspendError> {
    for SuspendedProcess { process, .. } in processes {
        let maps = File::open(format!("/proc/{}/maps", process.pid));
        match maps.and_then(|maps| has_codec(BufReader::new(maps))) {
            Ok(true) => {
                return Err(SuspendError::Cannot(
                    "it has loaded libnvcuvid or libnvidia-encode, and the driver does not bring back what the video engines work on",
                ));
            }
            Err(error) if process.is_alive() => {
                return Err(unknown(&format!("which libraries process {} has loaded", process.pid), &error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether one of [`CODECS`] is mapped by these lines (proc(5), `/proc/pid/maps`). A name may be any bytes; a longer line than
/// [`LONGEST_LINE`] is taken as several.
fn has_codec(mut maps: impl BufRead) -> io::Result<bool> {
    let mut line = Vec::new();
    while maps.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? > 0 {
        let has = |library: &&str| line.windows(library.len()).any(|part| part == library.as_bytes());
        if CODECS.iter().any(has) {
            return Ok(true);
        }
        line.clear();
    }
    Ok(false)
}

/// The driver has none of them locked or suspended already, as NVIDIA's cuda-checkpoint does.
pub(super) fn check_running(driver: &Driver, processes: &[SuspendedProcess]) -> Result<(), SuspendError> {
    for SuspendedProcess { process, .. } in processes {
        match driver.state(*process).map_err(|error| SuspendError::Driver(error.to_string()))? {
            ProcessState::Running => {}
            ProcessState::Ended => return Err(SuspendError::NoProcess),
            state => {
                let state = format!("{state:?}").to_lowercase();
                return Err(SuspendError::Held { pid: process.pid, state });
            }
        }
    }
    Ok(())
}

/// Not all of them have ended meanwhile: one that has is no error of a step.
pub(super) fn check_some_alive(processes: &[SuspendedProcess]) -> Result<(), SuspendError> {
    let is_there = processes.iter().any(|one| one.process.is_alive());
    if is_there { Ok(()) } else { Err(SuspendError::NoProcess) }
}

/// The host's memory has room for as many bytes as the processes have on the GPU, beside so many that others are copying there. It
/// is asked under the ledger's lock with the step that begins: two at once do not both count on the same memory. What others
/// have copied already is counted twice.
pub(super) fn check_host_memory(processes: &[SuspendedProcess], beside: u64) -> Result<(), SuspendError> {
    let (_, available) =
        memory_of_host().ok_or_else(|| SuspendError::Unknown("the host's memory".to_owned()))?;
    check_fits(sum(processes), &[left_of_host(available, beside)])
}

/// The container's limits have that room. A process that has ended has none.
pub(super) fn check_memory_limits(processes: &[SuspendedProcess]) -> Result<(), SuspendError> {
    let mut left = Vec::new();
    for one in processes.iter().filter(|one| one.process.is_alive()) {
        let limit = cgroups::memory_left(one.process.pid);
        let limit = limit.map_err(|error| unknown("the container's memory limit", &error))?;
        left.extend(limit.map(|limit| ("the container's memory limit", limit)));
    }
    check_fits(sum(processes), &left)
}

fn left_of_host(available: u64, beside: u64) -> (&'static str, u64) {
    let of = if beside == 0 { "the host" } else { BESIDE_OTHERS };
    (of, available.saturating_sub(HOST_RESERVE).saturating_sub(beside))
}

fn check_fits(bytes: u64, left: &[(&'static str, u64)]) -> Result<(), SuspendError> {
    match left.iter().min_by_key(|(_, left)| left) {
        Some(&(of, left)) if left < bytes => Err(SuspendError::HostMemory { needed: bytes, of, left }),
        _ => Ok(()),
    }
}

/// What it has could be booked when it comes back.
pub(super) fn check_way_back(
    bytes: u64,
    device: &inventory::Device,
    reserve: u64,
) -> Result<(), SuspendError> {
    let most = device.memory_bytes.saturating_sub(reserve);
    if bytes > most { Err(SuspendError::TooLarge { bytes, most }) } else { Ok(()) }
}

fn unknown(what: &str, error: &io::Error) -> SuspendError {
    SuspendError::Unknown(format!("{what} ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::ledger::{DaemonKey, SuspendStep};
    use sublet_core::place::fixture::{GIB, device, host};

    fn word(checked: Result<(), SuspendError>) -> &'static str {
        checked.map_or_else(|error| error.reason(), |()| "")
    }

    fn allowed() -> Lease {
        Lease { suspend: Suspend::Allow, ..lease(1, "GPU-0") }
    }

    #[test]
    fn each_kind_of_share_that_the_driver_would_lose_or_refuse_is_refused_first() {
        let inventory = host(vec![device(0)]);
        let checked = |lease: Lease, force| word(check_lease(&lease, &inventory, force));
        assert_eq!(checked(allowed(), false), "");
        assert_eq!(checked(lease(1, "GPU-0"), false), "suspend-not-allowed");
        assert_eq!(checked(lease(1, "GPU-0"), true), "");
        assert_eq!(checked(Lease { mode: Mode::Mig, ..allowed() }, true), "cannot-suspend");
        let server = Some(DaemonKey("GPU-0".into()));
        assert_eq!(checked(Lease { daemon: server, ..allowed() }, true), "cannot-suspend");
        let two = vec!["GPU-0".into(), "GPU-1".into()];
        assert_eq!(checked(Lease { devices: two, ..allowed() }, true), "cannot-suspend");
        let mut mig = host(vec![device(0), device(1)]);
        mig.devices[1].mig_enabled = true;
        let moved = Lease { known: vec!["GPU-1".into()], ..allowed() };
        assert_eq!(word(check_lease(&moved, &mig, true)), "cannot-suspend");
        assert_eq!(word(check_lease(&moved, &inventory, true)), "", "one that is gone");
        let mut old = inventory.clone();
        old.driver.version = "565.57.01".into();
        let error = check_lease(&allowed(), &old, true).unwrap_err();
        assert_eq!(error.reason(), "driver-too-old");
        assert!(error.to_string().contains("565.57.01") && error.to_string().contains("570"), "{error}");
    }

    #[test]
    fn a_move_is_to_another_whole_gpu_of_the_same_model() {
        let (here, mut there, mut inventory) = (device(0), device(1), host(vec![device(0), device(1)]));
        let check = |there: &inventory::Device, inventory: &Inventory| {
            check_move(&allowed(), (&here, there), inventory)
        };
        assert_eq!((word(check(&there, &inventory)), word(check(&here, &inventory))), ("", "cannot-move"));
        let never = check_move(&lease(1, "GPU-0"), (&here, &there), &inventory).unwrap_err();
        assert!(never.reason() == "suspend-not-allowed" && !never.to_string().contains("--force"), "{never}");
        let why = |there: &inventory::Device| check(there, &inventory).unwrap_err().to_string();
        there.mig_enabled = true;
        assert!(why(&there).ends_with("the driver moves nothing to MIG devices"), "{}", why(&there));
        there = inventory::Device { name: "NVIDIA A30".into(), ..device(1) };
        assert!(
            why(&there)
                .starts_with("it cannot go to GPU 1; why: that is a NVIDIA A30, it is on a NVIDIA H200")
        );
        there = inventory::Device { memory_bytes: 141 * GIB, ..device(1) };
        assert_eq!(word(check(&there, &inventory)), "cannot-move", "one of another size");
        inventory.driver.version = "570.133.20".into();
        let error = check(&device(1), &inventory).unwrap_err().to_string();
        assert!(error.contains("570.133.20 cannot move") && error.contains("R580"), "{error}");
    }

    #[test]
    fn several_processes_need_to_be_said_to_share_nothing() {
        let one = |pid, bytes| CudaProcess { process: Process { pid, start_time: 1 }, bytes };
        let found = |here: &[CudaProcess]| CudaProcesses { here: here.to_vec(), elsewhere: false };
        let two = [one(7, Some(GIB)), one(8, Some(GIB))];
        assert_eq!(check_processes(&allowed(), &found(&two[..1])).unwrap()[0].bytes, GIB);
        let error = check_processes(&allowed(), &found(&two)).unwrap_err();
        assert!(error.to_string().contains("7, 8"), "{error}");
        let many = Lease { suspend: Suspend::AllowMany, ..allowed() };
        assert_eq!(check_processes(&many, &found(&two)).unwrap().len(), 2);
        assert_eq!(check_processes(&many, &found(&[])).unwrap_err().reason(), "no-process");
        assert_eq!(check_processes(&many, &found(&[one(7, None)])).unwrap_err().reason(), "driver");
        let elsewhere = CudaProcesses { elsewhere: true, ..found(&two) };
        assert_eq!(check_processes(&many, &elsewhere).unwrap_err().reason(), "cannot-suspend");
    }

    #[test]
    fn a_new_process_is_suspended_where_it_comes_back_with_the_rest() {
        let began = Process { pid: 8, start_time: 101 };
        let one = |process, bytes| CudaProcess { process, bytes };
        let own = |count| Suspension {
            step: SuspendStep::Suspended,
            owner: began,
            processes: (0..count)
                .map(|pid| SuspendedProcess { process: Process { pid, start_time: 1 }, bytes: GIB })
                .collect(),
            since_ms: 1000,
            on_demand: false,
        };
        let share = |suspend, gib: u64| Lease { suspend, memory_bytes: Some(gib * GIB), ..lease(1, "GPU-0") };
        let (allow, many) = (share(Suspend::Allow, 4), share(Suspend::AllowMany, 4));
        let check = |lease: &Lease, own: &Suspension, new, here: &[CudaProcess]| {
            let found = CudaProcesses { here: here.to_vec(), elsewhere: false };
            check_new(lease, own, new, &found).map(|new| new.bytes).map_err(|error| error.to_string())
        };
        let alone = [one(began, Some(3 * GIB))];
        assert_eq!(check(&allow, &own(1), began, &alone), Ok(3 * GIB));
        // NVML's list may be from before.
        let late = [alone[0], one(Process { pid: 0, start_time: 1 }, Some(GIB))];
        assert_eq!(check(&allow, &own(1), began, &late), Ok(3 * GIB));
        let large = [one(began, Some(3 * GIB + 1))];
        for lease in [&allow, &many] {
            let why = check(lease, &own(1), began, &large).unwrap_err();
            assert!(why.contains("3072 MiB, 1024 MiB are in host memory, and 4096 MiB are booked"), "{why}");
        }
        let whole = Lease { memory_bytes: None, ..allow.clone() };
        assert_eq!(check(&whole, &own(1), began, &large), Ok(3 * GIB + 1));

        // What may share memory with another.
        let before = Process { start_time: 100, ..began };
        let old = [one(before, Some(GIB))];
        assert!(check(&allow, &own(1), before, &old).unwrap_err().contains("before the first one"));
        let two = [one(began, Some(GIB)), one(Process { pid: 9, start_time: 102 }, Some(GIB))];
        for (own, here) in [(own(2), &alone[..]), (own(1), &two[..])] {
            assert!(check(&allow, &own, began, here).unwrap_err().contains("not the only one"));
        }
        assert_eq!(check(&many, &own(1), before, &old), Ok(GIB));
        assert_eq!(check(&many, &own(2), began, &two), Ok(GIB));

        assert_eq!(check(&allow, &own(1), began, &[]), Err(SuspendError::NoProcess.to_string()));
        assert!(check(&allow, &own(1), began, &[one(began, None)]).is_err());
        let elsewhere = CudaProcesses { here: alone.to_vec(), elsewhere: true };
        assert_eq!(check_new(&many, &own(1), began, &elsewhere).unwrap_err().reason(), "cannot-suspend");
    }

    #[test]
    fn locked_processes_are_those_that_were_planned_with_and_no_larger() {
        let one = |pid, bytes| CudaProcess { process: Process { pid, start_time: 1 }, bytes };
        let planned = [SuspendedProcess { process: one(7, None).process, bytes: GIB }];
        let check = |here, elsewhere| check_unchanged(&planned, &CudaProcesses { here, elsewhere });
        assert_eq!(check(vec![one(7, Some(GIB))], false), Ok(()));
        assert_eq!(check(vec![one(7, Some(GIB - 1))], false), Ok(()));
        assert_eq!(check(vec![], false), Ok(()), "it has ended");
        for here in
            [vec![one(7, Some(GIB + 1))], vec![one(7, None)], vec![one(7, Some(GIB)), one(8, Some(1))]]
        {
            assert!(check(here.clone(), false).is_err(), "{here:?}");
        }
        assert!(check(vec![one(7, Some(GIB))], true).unwrap_err().contains("another GPU"));
    }

    #[test]
    fn of_several_processes_all_but_one_may_end_meanwhile() {
        let one = |process| SuspendedProcess { process, bytes: GIB };
        let (ended, alive) =
            (one(Process { pid: i32::MAX, start_time: 1 }), one(Process::current().unwrap()));
        assert_eq!(word(check_some_alive(&[ended, alive])), "");
        assert_eq!(word(check_some_alive(&[ended])), "no-process");
    }

    #[test]
    fn a_codec_is_seen_beside_whatever_else_is_mapped() {
        let maps = |name: &[u8]| [b"7f00-7f01 r-xp 0 08:01 7 ".as_slice(), name, b"\n"].concat();
        let [codec, cuda] = ["libnvidia-encode.so.580.159", "libcuda.so.1"]
            .map(|name| maps(format!("/lib/{name}").as_bytes()));
        assert!(!has_codec(&cuda[..]).unwrap() && has_codec(&codec[..]).unwrap());
        for other in [b"/tmp/\xff\xfe".to_vec(), vec![b'/'; 1 << 20]] {
            assert!(!has_codec(&maps(&other)[..]).unwrap());
            assert!(has_codec(&[maps(&other), codec.clone()].concat()[..]).unwrap());
        }
        let mut unread = Process::current().unwrap();
        assert!(check_codecs(&[SuspendedProcess { process: unread, bytes: 1 }]).is_ok());
        unread.pid = i32::MAX;
        assert!(check_codecs(&[SuspendedProcess { process: unread, bytes: 1 }]).is_ok(), "it has ended");
    }

    #[test]
    fn the_smallest_room_decides_and_is_reported() {
        assert_eq!(word(check_fits(GIB, &[("the host", GIB)])), "");
        let left = [("the host", 9 * GIB), ("the container's memory limit", GIB - 1)];
        let error = check_fits(GIB, &left).unwrap_err().to_string();
        assert!(error.contains("1024 MiB") && error.contains("1023 MiB of the container's"), "{error}");
    }

    #[test]
    fn the_later_of_two_at_once_has_the_memory_that_the_earlier_leaves_and_may_wait_for_the_rest() {
        let check = |beside, available| check_fits(GIB, &[left_of_host(HOST_RESERVE + available, beside)]);
        assert_eq!(word(check(0, GIB)), "");
        assert_eq!(word(check(2 * GIB, 3 * GIB)), "");
        let error = check(2 * GIB, 3 * GIB - 1).unwrap_err();
        assert!(error.to_string().contains("1023 MiB of the host, beside what others copy there now, left"));
        assert!(error.is_temporary() && !check(0, GIB - 1).unwrap_err().is_temporary());
        let error = check(4 * GIB, GIB).unwrap_err().to_string();
        assert!(error.contains("there are 0 MiB"), "{error}");
    }

    #[test]
    fn memory_that_could_never_be_booked_again_is_refused() {
        let device = device(0);
        assert_eq!(word(check_way_back(99 * GIB, &device, GIB)), "");
        assert_eq!(word(check_way_back(99 * GIB + 1, &device, GIB)), "no-room");
    }
}
