//! Suspending CUDA processes by libcuda's `cuCheckpointProcess…`: what was measured on H100s, driver 580.

use std::collections::BTreeSet;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::signal::Signal;
use nvml_wrapper::Nvml;
use serde_json::Value;

use crate::driver::{Driver, root_or_skip};
use crate::libcuda;
use crate::mig_cuda::{hold, on, up};
use crate::rig::{H200, OTHER, Probe, Rig, signal, until};

/// `CUresult` of cuda.h.
const SUCCESS: u32 = 0;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const NOT_INITIALIZED: u32 = 3;
const DEVICE_UNAVAILABLE: u32 = 46;
const OPERATING_SYSTEM: u32 = 304;
const ILLEGAL_STATE: u32 = 401;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;
const UNKNOWN: u32 = 999;

/// `CUprocessState` of cuda.h.
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const FAILED: u32 = 3;

/// The functions, without the prefix that they have in common.
const FUNCTIONS: [&str; 6] = ["GetState", "GetRestoreThreadId", "Lock", "Checkpoint", "Restore", "Unlock"];

/// A driver's libcuda, loaded for good.
#[derive(Clone, Copy)]
struct Cuda(usize);

#[repr(C)]
struct RestoreArgs {
    pairs: *const [[u8; 16]; 2],
    count: c_uint,
    reserved: [u8; 44],
    reserved1: u64,
}

impl Cuda {
    fn of(root: &Path) -> Self {
        let library = root.join(format!("usr/lib/{}-linux-gnu/libcuda.so.1", std::env::consts::ARCH));
        let library = CString::new(library.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the path ends in NUL; loading runs no code of the library's.
        let loaded = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
        assert!(!loaded.is_null(), "{library:?} does not load");
        Self(loaded.expose_provenance())
    }

    fn symbol(self, function: &str) -> *mut c_void {
        let name = CString::new(format!("cuCheckpointProcess{function}")).unwrap();
        // SAFETY: the library is never unloaded; the name ends in NUL.
        unsafe { libc::dlsym(std::ptr::with_exposed_provenance_mut(self.0), name.as_ptr()) }
    }

    fn call(self, function: &str, pid: i32, argument: *mut c_void) -> u32 {
        let symbol = self.symbol(function);
        assert!(!symbol.is_null(), "no cuCheckpointProcess{function}");
        // SAFETY: all six functions take an int and a pointer, and return an enumeration (cuda.h).
        let function: unsafe extern "C" fn(c_int, *mut c_void) -> c_uint =
            unsafe { std::mem::transmute(symbol) };
        // SAFETY: each caller's argument is null or what cuda.h has for the function.
        unsafe { function(pid, argument) }
    }

    fn state(self, pid: i32) -> u32 {
        let mut state = 99_u32;
        assert_eq!(self.call("GetState", pid, (&raw mut state).cast()), SUCCESS);
        state
    }

    fn lock(self, pid: i32) -> u32 {
        // CUcheckpointLockArgs: a timeout of 10 s, and reserved words.
        let mut args = [10_000_u32; 16];
        args[1..].fill(0);
        self.call("Lock", pid, args.as_mut_ptr().cast())
    }

    fn checkpoint(self, pid: i32) -> u32 {
        self.call("Checkpoint", pid, null_mut())
    }

    fn restore(self, pid: i32) -> u32 {
        self.call("Restore", pid, null_mut())
    }

    fn restore_with(self, pid: i32, pairs: &[(&str, &str)]) -> u32 {
        let pairs: Vec<_> = pairs.iter().map(|(old, new)| [uuid(old), uuid(new)]).collect();
        let count = c_uint::try_from(pairs.len()).unwrap();
        let mut args = RestoreArgs { pairs: pairs.as_ptr(), count, reserved: [0; 44], reserved1: 0 };
        self.call("Restore", pid, (&raw mut args).cast())
    }

    fn unlock(self, pid: i32) -> u32 {
        self.call("Unlock", pid, null_mut())
    }

    fn suspend(self, pid: i32) {
        assert_eq!((self.lock(pid), self.checkpoint(pid)), (SUCCESS, SUCCESS));
    }

    fn resume(self, pid: i32) {
        assert_eq!((self.restore(pid), self.unlock(pid)), (SUCCESS, SUCCESS));
    }
}

fn uuid(text: &str) -> [u8; 16] {
    let digits = text.trim_start_matches("GPU-").replace('-', "");
    let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap();
    std::array::from_fn(byte)
}

/// Two GPUs exchanged.
const SWAPPED: [(&str, &str); 2] = [(H200, OTHER), (OTHER, H200)];

const FIRST_ALONE: [(&str, &str); 1] = [("CUDA_VISIBLE_DEVICES", "0")];

/// One GPU, and its libcuda. Copies take a hundredth of their time.
fn one() -> Option<(Rig, Cuda)> {
    Rig::new().map(quick)
}

/// Two GPUs.
fn two() -> Option<(Rig, Cuda)> {
    Rig::pair().map(quick)
}

fn quick(rig: Rig) -> (Rig, Cuda) {
    fs::write(rig.path("sim/checkpoint-pace"), "1\n").unwrap();
    let cuda = Cuda::of(&rig.path(""));
    (rig, cuda)
}

/// A probe that keeps so many MiB, and has read them once.
fn keeping(rig: &Rig, mib: u64, hindrance: &str, env: &[(&str, &str)], uid: u32) -> Probe {
    let task = format!("keep {mib} 60 until {} {hindrance}", rig.path("end").display());
    let mut probe = rig.start_as(task.trim_end(), env, uid, "a");
    assert_eq!(probe.result(), "CUDA_SUCCESS");
    assert_eq!(probe.next().unwrap()["n"], 1);
    probe
}

/// Lets it end: every round, and one after this, found its memory as it was. Returns the GPUs of the last one.
fn intact(rig: &Rig, probe: &mut Probe) -> Vec<String> {
    fs::write(rig.path("end"), "").unwrap();
    let said: Vec<Value> = std::iter::from_fn(|| probe.next()).collect();
    let (end, rounds) = said.split_last().unwrap();
    assert_eq!(end["result"], "CUDA_SUCCESS", "{said:?}");
    assert!(rounds.iter().all(|round| round["equal"] == true), "{said:?}");
    serde_json::from_value(rounds.last().unwrap()["uuids"].clone()).unwrap()
}

/// The process makes no progress and has no GPU memory.
fn is_lost(rig: &Rig, cuda: Cuda, probe: &mut Probe) -> bool {
    let pid = probe.pid();
    sleep(Duration::from_millis(200));
    let holds = rig.contexts().iter().any(|held| held.pid == pid);
    probe.is_running() && !holds && cuda.state(pid) == CHECKPOINTED && cuda.unlock(pid) == ILLEGAL_STATE
}

/// Minors of the GPUs in use.
fn gpus(rig: &Rig) -> BTreeSet<u32> {
    rig.contexts().iter().map(|held| held.on.minor).collect()
}

/// MiB of host memory.
fn rss(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

#[test]
fn a_suspended_process_leaves_the_gpu_and_goes_on_with_its_memory_as_it_was() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 100, "", &[], 0);
    let pid = probe.pid();
    let held = rig.contexts();
    assert_eq!((held.len(), cuda.state(pid)), (1, RUNNING));
    assert_eq!((cuda.lock(pid), cuda.state(pid)), (SUCCESS, LOCKED));
    assert_eq!(rig.contexts(), held, "a lock moves nothing");
    assert_eq!((cuda.checkpoint(pid), cuda.state(pid)), (SUCCESS, CHECKPOINTED));
    assert_eq!(rig.contexts(), []);
    assert_eq!((cuda.restore(pid), cuda.state(pid)), (SUCCESS, LOCKED));
    assert_eq!(rig.contexts(), held);
    assert_eq!((cuda.unlock(pid), cuda.state(pid)), (SUCCESS, RUNNING));
    assert_eq!(intact(&rig, &mut probe), [H200]);
}

#[test]
fn a_locked_processs_next_call_waits_until_it_is_unlocked() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 4000, "", &[], 0);
    let pid = probe.pid();
    assert_eq!(cuda.lock(pid), SUCCESS);
    fs::write(rig.path("end"), "").unwrap();
    sleep(Duration::from_millis(500));
    assert!(probe.is_running());
    assert_eq!(cuda.unlock(pid), SUCCESS);
    intact(&rig, &mut probe);
}

#[test]
fn nvml_sees_nothing_of_a_suspended_process_and_another_has_its_memory() {
    let Some(driver) = up("h200") else { return };
    let cuda = Cuda::of(driver.root.dir());
    fs::write(driver.root.join("sim/checkpoint-pace"), "1\n").unwrap();
    let nvml = Nvml::builder().lib_path(driver.root.libraries().join("libnvidia-ml.so.1").as_os_str()).init();
    let nvml = nvml.unwrap();
    let gpu = nvml.device_by_index(0).unwrap();
    let seen = || (gpu.memory_info().unwrap().used >> 20, gpu.running_compute_processes().unwrap().len());
    let held = hold(&driver, "alloc 100000 60", &[], 2);
    let pid = pid_of(&held.0);
    assert_eq!(seen(), (100_000 + 514, 1));
    cuda.suspend(pid);
    assert_eq!(seen(), (0, 0));
    let other = hold(&driver, "alloc 120000 60", &[], 2);
    assert_eq!(other.1[1]["result"], "CUDA_SUCCESS");
    drop(other);
    until("the other has left", || seen() == (0, 0));
    cuda.resume(pid);
    assert_eq!(seen(), (100_000 + 514, 1));
}

fn pid_of(child: &std::process::Child) -> i32 {
    i32::try_from(child.id()).unwrap()
}

#[test]
fn its_memory_is_memory_of_the_process_meanwhile() {
    let Some((rig, cuda)) = one() else { return };
    let probe = keeping(&rig, 4000, "", &[], 0);
    let pid = probe.pid();
    let before = rss(pid);
    cuda.suspend(pid);
    assert!(rss(pid) >= before + 100, "{before} MiB, then {}", rss(pid));
    cuda.resume(pid);
    assert!(rss(pid) < before + 50, "{before} MiB, at last {}", rss(pid));
}

/// A small context: 0.4 and 0.35 s. Each GiB more: 0.43 and 0.17 s.
#[test]
fn copies_take_their_time() {
    let Some((rig, cuda)) = one() else { return };
    let timed = |pace: &str, mib| {
        fs::write(rig.path("sim/checkpoint-pace"), pace).unwrap();
        let probe = keeping(&rig, mib, "", &[], 0);
        let pid = probe.pid();
        assert_eq!(cuda.lock(pid), SUCCESS);
        let start = Instant::now();
        assert_eq!(cuda.checkpoint(pid), SUCCESS);
        let copied = start.elapsed();
        let start = Instant::now();
        assert_eq!(cuda.restore(pid), SUCCESS);
        (copied.as_millis(), start.elapsed().as_millis())
    };
    let (out, back) = timed("100", 0);
    assert!(out >= 395 && back >= 345, "{out} and {back} ms");
    let (out, back) = timed("10", 20_480);
    assert!(out >= 880 && back >= 350, "{out} and {back} ms");
}

#[test]
fn a_call_in_another_state_changes_nothing() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 10, "", &[], 0);
    let pid = probe.pid();
    let refused = |calls: &[&str], state| {
        for call in calls {
            assert_eq!(cuda.call(call, pid, null_mut()), ILLEGAL_STATE, "{call} in state {state}");
            assert_eq!(cuda.state(pid), state);
        }
    };
    refused(&["Checkpoint", "Restore", "Unlock"], RUNNING);
    assert_eq!(cuda.lock(pid), SUCCESS);
    refused(&["Lock", "Restore"], LOCKED);
    assert_eq!(cuda.checkpoint(pid), SUCCESS);
    refused(&["Lock", "Checkpoint", "Unlock"], CHECKPOINTED);
    cuda.resume(pid);
    intact(&rig, &mut probe);
}

#[test]
fn a_process_without_cuda_and_none_at_all_have_errors_of_their_own() {
    let Some((_rig, cuda)) = one() else { return };
    let mut sleeping = Command::new("sleep").arg("60").spawn().unwrap();
    for function in FUNCTIONS {
        // As long as the longest of what cuda.h has there.
        let mut argument = [0_u64; 8];
        let mut call = |pid| cuda.call(function, pid, argument.as_mut_ptr().cast());
        assert_eq!(call(pid_of(&sleeping)), NOT_INITIALIZED, "{function}");
        assert_eq!(call(i32::MAX), OPERATING_SYSTEM, "{function}");
    }
    sleeping.kill().unwrap();
    sleeping.wait().unwrap();
}

#[test]
fn the_restore_thread_is_one_of_the_process() {
    let Some((rig, cuda)) = one() else { return };
    let probe = rig.start("hold 60", &[]);
    let mut thread = 0_i32;
    assert_eq!(cuda.call("GetRestoreThreadId", probe.pid(), (&raw mut thread).cast()), SUCCESS);
    assert_ne!(thread, probe.pid());
    assert!(Path::new(&format!("/proc/{}/task/{thread}", probe.pid())).exists());
}

#[test]
fn sigterm_ends_a_suspended_process() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 100, "", &[], 0);
    cuda.suspend(probe.pid());
    signal(probe.pid(), Signal::SIGTERM);
    assert_eq!(probe.child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
}

#[test]
fn an_mps_client_is_not_locked_and_goes_on() {
    let Some((rig, cuda)) = Rig::with_daemon().map(quick) else { return };
    let mut probe = keeping(&rig, 100, "", &[], 0);
    assert_eq!(probe.info["mps"], true);
    assert_eq!((cuda.lock(probe.pid()), cuda.state(probe.pid())), (NOT_SUPPORTED, RUNNING));
    intact(&rig, &mut probe);
}

#[test]
fn a_process_on_a_mig_device_is_not_locked() {
    let Some(driver) = up("a100x2-mig") else { return };
    let cuda = Cuda::of(driver.root.dir());
    let held = hold(&driver, "hold 60", &on("MIG-5b1e7000-0000-5000-8000-000000000a01"), 1);
    assert_eq!((cuda.lock(pid_of(&held.0)), cuda.state(pid_of(&held.0))), (NOT_SUPPORTED, RUNNING));
}

#[test]
fn managed_memory_is_not_copied_and_the_unlocked_process_goes_on() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 100, "managed", &[], 0);
    let pid = probe.pid();
    assert_eq!(cuda.lock(pid), SUCCESS);
    assert_eq!((cuda.checkpoint(pid), cuda.state(pid)), (NOT_SUPPORTED, LOCKED));
    assert_eq!(rig.contexts().len(), 1);
    assert_eq!(cuda.unlock(pid), SUCCESS);
    assert_eq!(intact(&rig, &mut probe), [H200]);
}

#[test]
fn a_hindrance_may_begin_later() {
    let Some((rig, cuda)) = one() else { return };
    let go = rig.path("go");
    let mut probe = keeping(&rig, 100, &format!("when {} managed", go.display()), &[], 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    cuda.resume(pid);
    fs::write(&go, "").unwrap();
    // Those of before are in the pipe: the one after them has begun with the file there.
    let now = Instant::now();
    while now.elapsed() < Duration::from_millis(300) {
        probe.next();
    }
    assert_eq!((cuda.lock(pid), cuda.checkpoint(pid)), (SUCCESS, NOT_SUPPORTED));
}

#[test]
fn a_restore_without_room_is_the_end() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 20_000, "", &[], 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    let mut other = rig.start("alloc 130000 60", &[]);
    assert_eq!(other.result(), "CUDA_SUCCESS");
    assert_eq!(cuda.restore(pid), OUT_OF_MEMORY);
    other.child.kill().unwrap();
    until("there is room again", || rig.contexts().is_empty());
    assert_eq!((cuda.restore(pid), cuda.restore(pid)), (OPERATING_SYSTEM, OPERATING_SYSTEM));
    assert!(is_lost(&rig, cuda, &mut probe));
}

#[test]
fn a_gpu_that_lets_no_context_be_made_is_the_end_too() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 100, "", &[], 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    rig.compute_mode(3);
    cuda.resume(pid);
    cuda.suspend(pid);
    let _other = rig.start("hold 60", &[]);
    assert_eq!((cuda.restore(pid), cuda.restore(pid)), (DEVICE_UNAVAILABLE, OPERATING_SYSTEM));
    assert!(is_lost(&rig, cuda, &mut probe));
}

#[test]
fn a_process_with_copies_between_two_gpus_is_not_restored() {
    let Some((rig, cuda)) = two() else { return };
    let mut probe = keeping(&rig, 100, "peers", &[], 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    assert_eq!((cuda.restore(pid), cuda.restore(pid)), (INVALID_VALUE, INVALID_VALUE));
    assert!(is_lost(&rig, cuda, &mut probe));
    let mut without = keeping(&rig, 100, "", &[], 0);
    cuda.suspend(without.pid());
    assert_eq!(rig.contexts(), []);
    cuda.resume(without.pid());
    assert_eq!(gpus(&rig), [3, 4].into());
    assert_eq!(intact(&rig, &mut without), [H200, OTHER]);
}

#[test]
fn of_two_processes_with_common_memory_the_second_is_not_restored() {
    let Some((rig, cuda)) = one() else { return };
    for (number, first_back) in [0, 1].into_iter().enumerate() {
        let shares = format!("shares {}", rig.path(&format!("memory{number}")).display());
        let mut both = [keeping(&rig, 100, &shares, &[], 0), keeping(&rig, 100, &shares, &[], 0)];
        let pids = [both[0].pid(), both[1].pid()];
        for pid in pids {
            cuda.suspend(pid);
        }
        cuda.resume(pids[first_back]);
        let second = 1 - first_back;
        assert_eq!(cuda.restore(pids[second]), INVALID_VALUE);
        assert!(is_lost(&rig, cuda, &mut both[second]));
        // Alone it comes back again.
        cuda.suspend(pids[first_back]);
        cuda.resume(pids[first_back]);
    }
}

/// A new cgroup with a limit of so many MiB, of v1 or of v2, if memory can be limited here.
fn limited(mib: u64) -> Option<PathBuf> {
    let old = Path::new("/sys/fs/cgroup/memory");
    let (mounted, limit) =
        if old.exists() { (old, "memory.limit_in_bytes") } else { (old.parent()?, "memory.max") };
    let group = mounted.join(format!("sublet-sim-{}", std::process::id()));
    fs::create_dir(&group).unwrap();
    match fs::OpenOptions::new().write(true).open(group.join(limit)) {
        Ok(_) => fs::write(group.join(limit), (mib << 20).to_string()).unwrap(),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound);
            fs::remove_dir(&group).unwrap();
            eprintln!("SKIPPED: no memory controller in cgroup2 here (SUBLET_CGROUPS=v1)");
            return None;
        }
    }
    Some(group)
}

#[test]
fn the_copy_counts_in_the_processs_cgroup() {
    let Some((rig, cuda)) = one() else { return };
    let Some(group) = limited(1_200) else { return };
    let join = |probe: &Probe| fs::write(group.join("cgroup.procs"), probe.pid().to_string()).unwrap();
    let mut fits = keeping(&rig, 500, "", &[], 0);
    join(&fits);
    cuda.suspend(fits.pid());
    let mut killed = keeping(&rig, 1000, "", &[], 0);
    join(&killed);
    assert_eq!((cuda.lock(killed.pid()), cuda.checkpoint(killed.pid())), (SUCCESS, OPERATING_SYSTEM));
    assert_eq!(killed.child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
    assert!(fits.is_running());
    fits.child.kill().unwrap();
    fits.child.wait().unwrap();
    until("the cgroup is empty", || fs::remove_dir(&group).is_ok());
}

#[test]
fn a_permutation_of_the_gpus_that_it_can_open_moves_a_process_and_other_pairs_do_no_harm() {
    let Some((rig, cuda)) = two() else { return };
    let mut probe = keeping(&rig, 100, "", &FIRST_ALONE, 0);
    let pid = probe.pid();
    assert_eq!(gpus(&rig), [3].into());
    cuda.suspend(pid);
    for pairs in [&SWAPPED[..1], &[(H200, OTHER), (OTHER, OTHER)], &[(H200, OTHER), (H200, H200)]] {
        assert_eq!((cuda.restore_with(pid, pairs), cuda.state(pid)), (INVALID_VALUE, CHECKPOINTED));
    }
    assert_eq!(cuda.restore_with(pid, &SWAPPED), SUCCESS);
    assert_eq!(gpus(&rig), [4].into());
    assert_eq!(cuda.unlock(pid), SUCCESS);
    assert_eq!(intact(&rig, &mut probe), [OTHER]);
}

#[test]
fn a_moved_process_comes_back_without_pairs_where_it_is() {
    let Some((rig, cuda)) = two() else { return };
    let mut probe = keeping(&rig, 100, "", &FIRST_ALONE, 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    assert_eq!((cuda.restore_with(pid, &SWAPPED), cuda.unlock(pid)), (SUCCESS, SUCCESS));
    cuda.suspend(pid);
    assert_eq!(gpus(&rig), [].into());
    cuda.resume(pid);
    assert_eq!(gpus(&rig), [4].into());
    assert_eq!(intact(&rig, &mut probe), [OTHER]);
}

#[test]
fn a_move_needs_room_on_the_new_gpu() {
    let Some((rig, cuda)) = two() else { return };
    let mut probe = keeping(&rig, 20_000, "", &FIRST_ALONE, 0);
    cuda.suspend(probe.pid());
    let mut other = rig.start("alloc 130000 60", &[("CUDA_VISIBLE_DEVICES", "1")]);
    assert_eq!(other.result(), "CUDA_SUCCESS");
    assert_eq!(cuda.restore_with(probe.pid(), &SWAPPED), OUT_OF_MEMORY);
    assert!(is_lost(&rig, cuda, &mut probe));
}

#[test]
fn without_the_new_gpus_node_a_move_does_no_harm() {
    let Some((rig, cuda)) = two() else { return };
    fs::remove_file(rig.path("dev/nvidia4")).unwrap();
    let mut probe = keeping(&rig, 100, "", &[], 1000);
    let pid = probe.pid();
    cuda.suspend(pid);
    assert_eq!((cuda.restore_with(pid, &SWAPPED), cuda.state(pid)), (INVALID_VALUE, CHECKPOINTED));
    cuda.resume(pid);
    assert_eq!(gpus(&rig), [3].into());
    cuda.suspend(pid);
    let open = [(H200, H200)];
    assert_eq!((cuda.restore_with(pid, &open), cuda.unlock(pid)), (SUCCESS, SUCCESS));
    assert_eq!(intact(&rig, &mut probe), [H200]);
}

#[test]
fn the_driver_makes_the_new_gpus_node_where_the_process_may() {
    let Some((rig, cuda)) = two() else { return };
    let node = rig.path("dev/nvidia4");
    fs::remove_file(&node).unwrap();
    let probe = keeping(&rig, 100, "", &[], 0);
    cuda.suspend(probe.pid());
    assert_eq!(cuda.restore_with(probe.pid(), &SWAPPED), SUCCESS);
    assert_eq!(fs::metadata(&node).unwrap().permissions().mode() & 0o777, 0o666);
    assert_eq!(gpus(&rig), [4].into());
}

#[test]
fn a_moved_process_needs_its_old_gpus_node_for_the_next_checkpoint() {
    let Some((rig, cuda)) = two() else { return };
    let (node, away) = (rig.path("dev/nvidia3"), rig.path("dev/away"));
    let mut probe = keeping(&rig, 100, "", &FIRST_ALONE, 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    assert_eq!((cuda.restore_with(pid, &SWAPPED), cuda.unlock(pid)), (SUCCESS, SUCCESS));
    fs::rename(&node, &away).unwrap();
    assert_eq!(cuda.lock(pid), SUCCESS);
    assert_eq!((cuda.checkpoint(pid), cuda.state(pid)), (OUT_OF_MEMORY, LOCKED));
    assert!(!node.exists());
    fs::rename(&away, &node).unwrap();
    assert_eq!(cuda.checkpoint(pid), SUCCESS);
    cuda.resume(pid);
    assert_eq!(intact(&rig, &mut probe), [OTHER]);
}

#[test]
fn a_process_moves_between_gpus_of_one_model() {
    let Some(driver) = up("h200-h100") else { return };
    let cuda = Cuda::of(driver.root.dir());
    let held = hold(&driver, "hold 60", &on("0"), 1);
    let pid = pid_of(&held.0);
    let both = ["GPU-5b1e7000-0000-4000-8000-000000000900", "GPU-5b1e7000-0000-4000-8000-000000000901"];
    cuda.suspend(pid);
    let swapped = [(both[0], both[1]), (both[1], both[0])];
    assert_eq!((cuda.restore_with(pid, &swapped), cuda.state(pid)), (INVALID_VALUE, CHECKPOINTED));
    let same = [(both[0], both[0]), (both[1], both[1])];
    assert_eq!(cuda.restore_with(pid, &same), SUCCESS);
}

/// A driver of that version with two H100s.
fn of_version(version: &str) -> Option<(Driver, Cuda)> {
    libcuda::built();
    if !root_or_skip("device nodes") {
        return None;
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/h100x2-mig-off.toml");
    let driver = Driver::up_with(&fs::read_to_string(file).unwrap().replace("580.159.04", version));
    let cuda = Cuda::of(driver.root.dir());
    Some((driver, cuda))
}

#[test]
fn a_driver_before_570_has_no_such_functions() {
    let Some((_old, cuda)) = of_version("565.57.01") else { return };
    assert!(FUNCTIONS.iter().all(|function| cuda.symbol(function).is_null()));
    let Some((_new, cuda)) = of_version("570.86.15") else { return };
    assert!(FUNCTIONS.iter().all(|function| !cuda.symbol(function).is_null()));
}

#[test]
fn a_driver_before_580_takes_no_pairs() {
    let Some((driver, cuda)) = of_version("570.86.15") else { return };
    let held = hold(&driver, "hold 60", &on("0"), 1);
    let pid = pid_of(&held.0);
    let topology = nvidia_ml::layout::topology::Topology::load(&driver.root).unwrap();
    let uuids: Vec<&str> = topology.gpu.iter().map(|gpu| gpu.uuid.as_str()).collect();
    cuda.suspend(pid);
    let swapped = [(uuids[0], uuids[1]), (uuids[1], uuids[0])];
    assert_eq!((cuda.restore_with(pid, &swapped), cuda.state(pid)), (INVALID_VALUE, CHECKPOINTED));
    cuda.resume(pid);
}

#[test]
fn a_test_lets_a_call_fail() {
    let Some((rig, cuda)) = one() else { return };
    let mut probe = keeping(&rig, 100, "", &[], 0);
    let pid = probe.pid();
    let fail = |line: &str| fs::write(rig.path("sim/fail"), line).unwrap();
    fs::write(rig.path("sim/trace"), "").unwrap();
    fail("cuCheckpointProcessLock 1 600\n");
    assert_eq!((cuda.lock(pid), cuda.state(pid)), (NOT_READY, RUNNING));
    assert_eq!(cuda.lock(pid), SUCCESS);
    fail("cuCheckpointProcessCheckpoint 1 304 done\n");
    assert_eq!((cuda.checkpoint(pid), cuda.state(pid)), (OPERATING_SYSTEM, CHECKPOINTED));
    cuda.resume(pid);
    intact(&rig, &mut probe);
    let calls = fs::read_to_string(rig.path("sim/trace")).unwrap();
    let calls: Vec<&str> =
        calls.lines().map(|line| line.strip_prefix("cuCheckpointProcess").unwrap()).collect();
    assert_eq!(calls, ["Lock", "GetState", "Lock", "Checkpoint", "GetState", "Restore", "Unlock"]);
}

#[test]
fn a_test_lets_a_process_fail_for_good() {
    let Some((rig, cuda)) = one() else { return };
    let probe = keeping(&rig, 100, "", &[], 0);
    let pid = probe.pid();
    cuda.suspend(pid);
    fs::write(rig.path("sim/fail"), "cuCheckpointProcessRestore 1 999\n").unwrap();
    assert_eq!((cuda.restore(pid), cuda.state(pid)), (UNKNOWN, FAILED));
    for call in ["Lock", "Checkpoint", "Restore", "Unlock"] {
        assert_eq!(cuda.call(call, pid, null_mut()), ILLEGAL_STATE, "{call}");
    }
}

#[test]
fn a_test_lets_a_call_hang() {
    let Some((rig, cuda)) = one() else { return };
    let probe = keeping(&rig, 100, "", &[], 0);
    let pid = probe.pid();
    let hangs = |call: fn(Cuda, i32) -> u32| {
        let (sender, receiver) = mpsc::channel();
        // It ends with this process.
        thread::spawn(move || sender.send(call(cuda, pid)));
        receiver.recv_timeout(Duration::from_millis(300)).is_err()
    };
    fs::write(rig.path("sim/fail"), "cuCheckpointProcessLock 1 hang\n").unwrap();
    assert!(hangs(Cuda::lock));
    assert_eq!(cuda.state(pid), RUNNING);
    assert_eq!(cuda.lock(pid), SUCCESS);
    fs::write(rig.path("sim/fail"), "cuCheckpointProcessCheckpoint 1 hang done\n").unwrap();
    assert!(hangs(Cuda::checkpoint));
    assert_eq!(cuda.state(pid), CHECKPOINTED);
}
