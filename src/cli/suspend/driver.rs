//! The driver's calls on a container's process. They are made by a child of this program, `sublet checkpoint`, which loads
//! the host's libcuda and can be killed; the target is looked at before and after each.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::alarm;

use crate::libcuda::{CheckpointCall, Checkpointer, GpuPair};
use sublet_core::fs::open_lock;
use sublet_core::inventory::{FileKind, Inventory};
use sublet_core::ledger::SuspendedProcess;
use sublet_core::process::sublet::{self, SubletError};
use sublet_core::process::{Process, pidfd_await_end};

/// How long a call may take that copies nothing. A lock waits [`CLOSING`] for the process's own calls to end.
const SHORT: Duration = Duration::from_secs(20);

/// How long the driver waits for a process to be between two CUDA calls.
const CLOSING: Duration = Duration::from_secs(10);

/// Copying takes 0.5 s for a GiB, and less back (docs/suspend.md): eight times as long is too long.
const SECONDS_FOR_A_GIB: u64 = 4;

/// The driver's state of a process (cuda.h, `CUprocessState`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessState {
    Running,
    /// Its CUDA calls wait.
    Locked,
    /// Its GPU memory is in host memory.
    Checkpointed,
    /// The driver has lost it.
    Failed,
    /// It has ended.
    Ended,
}

impl ProcessState {
    /// By its number in cuda.h.
    fn parse(number: &str) -> Option<Self> {
        Some(match number {
            "0" => Self::Running,
            "1" => Self::Locked,
            "2" => Self::Checkpointed,
            "3" => Self::Failed,
            _ => return None,
        })
    }

    /// The calls after which a process in this state runs; `None`: none does that.
    const fn calls_back(self) -> Option<&'static [CheckpointCall]> {
        match self {
            Self::Running | Self::Ended => Some(&[]),
            Self::Locked => Some(&[CheckpointCall::Unlock]),
            Self::Checkpointed => Some(&[CheckpointCall::Restore, CheckpointCall::Unlock]),
            Self::Failed => None,
        }
    }
}

/// Why a call was not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum CallError {
    /// The driver was not asked.
    #[error("{0}")]
    NotMade(String),
    /// The driver refuses, or has not answered in time.
    #[error("{0}")]
    Refused(String),
}

impl CallError {
    /// Whether the driver refuses a restore without any harm: the GPU's place is not among those that the process can open, or with
    /// `pairs`, a node or cgroup rule is missing, or they are not those of the GPUs that it could open when it was suspended. After any
    /// other error the process may be lost (docs/suspend.md).
    pub(super) fn is_harmless(&self, pairs: bool) -> bool {
        let is = |error| matches!(self, Self::Refused(why) if why.contains(error));
        is("CUDA_ERROR_NOT_SUPPORTED") || pairs && is("CUDA_ERROR_INVALID_VALUE")
    }
}

/// Where the driver is and how its calls are kept apart.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    library: PathBuf,
    /// See [`hold`].
    lock: PathBuf,
    /// For whom it is asked: its step is taken over when it has ended.
    owner: Process,
}

impl Driver {
    /// `None`: the host's libcuda is not among the driver's files.
    pub(super) fn of(inventory: &Inventory, state_dir: &Path, owner: Process) -> Option<Self> {
        let is_it =
            |kind: &FileKind| matches!(kind, FileKind::Library { soname, .. } if soname == "libcuda.so.1");
        let library = inventory.files.iter().find(|file| is_it(&file.kind))?.source.clone();
        Some(Self { library, lock: state_dir.join("suspend.lock"), owner })
    }

    pub(super) fn state(&self, target: Process) -> Result<ProcessState, CallError> {
        match self.ask("state", target, SHORT, &[])?.trim() {
            ENDED => Ok(ProcessState::Ended),
            other => ProcessState::parse(other)
                .ok_or_else(|| CallError::Refused(format!("it answers with the unknown state {other}"))),
        }
    }

    /// Carries out `call` on `target`. A process that has ended is no error. A restore is on the GPU at the same place
    /// among those that the process can open, or with `pairs` of the UUIDs of all that it could open when it was suspended: each is
    /// followed by that of the GPU that takes its place.
    pub(super) fn carry_out(
        &self,
        call: CheckpointCall,
        target: SuspendedProcess,
        pairs: &[String],
    ) -> Result<(), CallError> {
        let limit = match call {
            CheckpointCall::Checkpoint | CheckpointCall::Restore => copying(target.bytes),
            CheckpointCall::Lock | CheckpointCall::Unlock => SHORT,
        };
        self.ask(call.into(), target.process, limit, pairs).map(drop)
    }

    /// Has one child restore `target`, if its memory is in host memory, and unlock it: each start of a child costs as much as loading
    /// libcuda does. Nothing was asked of the driver where it does not tell the state first.
    pub(super) fn bring_back(&self, target: SuspendedProcess) -> Result<(), CallError> {
        self.ask(BACK, target.process, copying(target.bytes) + SHORT, &[]).map(drop)
    }

    fn ask(
        &self,
        call: &str,
        target: Process,
        limit: Duration,
        pairs: &[String],
    ) -> Result<String, CallError> {
        let began = Instant::now();
        let paths = [&self.library, &self.lock].map(|path| path.to_string_lossy());
        let mut words = vec!["checkpoint".to_owned(), call.to_owned()];
        words.extend(paths.map(String::from));
        words.extend(
            [target, self.owner].iter().flat_map(|one| [one.pid.to_string(), one.start_time.to_string()]),
        );
        words.push(limit.as_secs().to_string());
        words.extend(pairs.iter().cloned());
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match sublet::ask(&words, "", limit) {
            Ok((answer, _)) => match answer.strip_prefix(REFUSED) {
                Some(why) => Err(CallError::Refused(why.trim().to_owned())),
                None => Ok(answer),
            },
            Err(_) if began.elapsed() >= limit => {
                Err(CallError::Refused(format!("the driver did not do it within {} s", limit.as_secs())))
            }
            Err(error) => Err(CallError::NotMade(reason(call, error))),
        }
    }
}

/// Why a child made no call: what it said, or that it was ended before the driver had told the state ([`bound_child`]).
fn reason(call: &str, error: SubletError) -> String {
    if call == BACK && error.0.ends_with("(SIGALRM)") {
        return format!("the driver was not ready within {} s", SHORT.as_secs());
    }
    error.0
}

pub(super) fn copying(bytes: u64) -> Duration {
    SHORT + Duration::from_secs((bytes >> 30) * SECONDS_FOR_A_GIB)
}

/// The word for [`Driver::bring_back`].
const BACK: &str = "back";

/// What the child says of a process that has ended.
const ENDED: &str = "ended";

/// What stands before the driver's reason in the child's answer.
const REFUSED: &str = "refused: ";

/// Arguments of `sublet checkpoint`, which is no command for people.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Which: state, lock, checkpoint, restore, unlock, or back: what makes it run
    call: String,
    library: PathBuf,
    lock: PathBuf,
    pid: i32,
    start_time: u64,
    owner_pid: i32,
    owner_start_time: u64,
    seconds: u32,
    /// For a restore: the UUID of each GPU, and of the one that takes its place
    pairs: Vec<String>,
}

/// The child: calls on one process. Says the state, that the process has ended, or why the driver refuses.
///
/// # Errors
/// The driver was not asked.
pub fn run(arguments: &Arguments) -> anyhow::Result<Option<String>> {
    // One that ends here has changed nothing: it is not the driver that refuses.
    let before_a_change = u32::try_from(SHORT.as_secs())?;
    bound_child(if arguments.call == BACK { before_a_change } else { arguments.seconds })?;
    make_call(arguments)
}

/// Bounds a child that makes one change.
pub(super) fn bound_child(seconds: u32) -> anyhow::Result<()> {
    // Whoever started this may have been killed. Then nobody else ends a call that hangs.
    alarm::set(seconds.max(1));
    // A call that was begun is finished, and the next command finds a state that is whole.
    Ok(SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]).thread_block()?)
}

fn make_call(arguments: &Arguments) -> anyhow::Result<Option<String>> {
    let target = Process { pid: arguments.pid, start_time: arguments.start_time };
    let owner = Process { pid: arguments.owner_pid, start_time: arguments.owner_start_time };
    let ended = Ok(Some(ENDED.to_owned()));
    let held = hold(&arguments.lock, target.pid)?;
    // Another may have put its step right before this one held the lock: nobody would undo what comes after that.
    ensure!(owner.is_alive(), "the process that asks for it has ended");
    let Some(pidfd) = target.hold()? else { return ended };
    let driver = Checkpointer::load(&arguments.library).map_err(anyhow::Error::msg)?;
    let has_ended = || pidfd_await_end(pidfd.as_fd(), Duration::ZERO);
    let done = match &*arguments.call {
        "state" => driver.state(target.pid).map(|state| Some(state.to_string())),
        // As before the first call: of one that was killed, the next command does the rest.
        BACK => {
            let may_go_on = || owner.is_alive() && !has_ended();
            bring_back(driver, target.pid, arguments.seconds, may_go_on)?.map(|()| None)
        }
        call => {
            let call = call.parse().context("no such call")?;
            driver.carry_out(call, target.pid, CLOSING, &parse_pairs(&arguments.pairs)?).map(|()| None)
        }
    };
    drop(held);
    // What was answered is of this process only if it has not ended since.
    if has_ended() {
        return ended;
    }
    Ok(done.unwrap_or_else(|why| Some(format!("{REFUSED}{why}"))))
}

fn parse_pairs(uuids: &[String]) -> anyhow::Result<Vec<GpuPair>> {
    let pairs = uuids.chunks(2).map(|pair| match pair {
        [old, new] => GpuPair::parse(old, new),
        _ => None,
    });
    pairs.collect::<Option<_>>().context("no pairs of GPUs")
}

/// Makes process `pid` run, as long as it `may_go_on`, within so many `seconds` from when its state is known. Why the driver
/// refuses, inside.
fn bring_back(
    driver: Checkpointer,
    pid: i32,
    seconds: u32,
    may_go_on: impl Fn() -> bool,
) -> anyhow::Result<Result<(), String>> {
    let state = driver.state(pid).map_err(anyhow::Error::msg)?;
    let state = ProcessState::parse(&state.to_string()).context("it answers with an unknown state")?;
    let Some(calls) = state.calls_back() else { return Ok(Err(lost(pid))) };
    alarm::set(seconds.max(1));
    let mut calls = calls.iter().take_while(|_| may_go_on());
    Ok(calls.try_for_each(|call| driver.carry_out(*call, pid, CLOSING, &[])))
}

/// What is said of a process that the driver has lost.
pub(super) fn lost(pid: i32) -> String {
    format!("the driver has lost process {pid}")
}

/// Keeps calls of other programs off process `pid`, and changes of its nodes, until it is dropped: a child whose parent was killed finishes its call. It is a
/// lock of one byte of one file, at the process's number (`fcntl(2)`, open file description locks).
pub(super) fn hold(path: &Path, pid: i32) -> anyhow::Result<std::fs::File> {
    let file = open_lock(path).with_context(|| format!("{} cannot be opened", path.display()))?;
    let range = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK)?,
        l_whence: i16::try_from(libc::SEEK_SET)?,
        l_start: i64::from(pid),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLKW(&range))
        .with_context(|| format!("{} cannot be locked", path.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;

    use super::*;
    use sublet_core::inventory::DriverFile;
    use sublet_core::share::Capability;

    #[test]
    fn the_hosts_own_libcuda_is_loaded() {
        let mut inventory = sublet_core::place::fixture::host(vec![]);
        let (state, owner) = (Path::new("/run/sublet"), Process::current().unwrap());
        assert!(Driver::of(&inventory, state, owner).is_none());
        let source = PathBuf::from("/usr/lib/libcuda.so.580.159.04");
        let kind = FileKind::Library { soname: "libcuda.so.1".into(), also: vec!["libcuda.so".into()] };
        let file = DriverFile { source: source.clone(), kind, capability: Capability::Compute, needs: None };
        inventory.files.push(file);
        let driver = Driver::of(&inventory, state, owner).unwrap();
        assert_eq!((driver.library, driver.lock), (source, PathBuf::from("/run/sublet/suspend.lock")));
    }

    #[test]
    fn a_process_is_restored_before_it_is_unlocked_and_left_alone_where_it_runs() {
        let calls = |number: &str| ProcessState::parse(number).map(ProcessState::calls_back);
        assert_eq!(calls("0"), Some(Some(&[][..])));
        assert_eq!(calls("1"), Some(Some(&[CheckpointCall::Unlock][..])));
        assert_eq!(calls("2"), Some(Some(&[CheckpointCall::Restore, CheckpointCall::Unlock][..])));
        assert_eq!((calls("3"), calls("4")), (Some(None), None));
    }

    #[test]
    fn only_a_child_whose_time_was_over_says_that_the_driver_was_not_ready() {
        let why = |call, signal| {
            let status = std::process::ExitStatus::from_raw(signal);
            reason(call, SubletError(format!("`sublet checkpoint {call}`: {status}")))
        };
        assert_eq!(why(BACK, libc::SIGALRM), "the driver was not ready within 20 s");
        assert!(why(BACK, libc::SIGKILL).contains("SIGKILL"));
        assert!(why("state", libc::SIGALRM).contains("SIGALRM"));
        let said = SubletError("the process that asks for it has ended".to_owned());
        assert_eq!(reason(BACK, said), "the process that asks for it has ended");
    }

    #[test]
    fn a_child_makes_no_call_for_a_process_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let me = Process::current().unwrap();
        let call = |call: &str, target: Process, owner: Process| {
            let arguments = Arguments {
                call: call.into(),
                library: dir.path().join("libcuda.so.1"),
                lock: dir.path().join("suspend.lock"),
                pid: target.pid,
                start_time: target.start_time,
                owner_pid: owner.pid,
                owner_start_time: owner.start_time,
                seconds: 1,
                pairs: Vec::new(),
            };
            make_call(&arguments).map_err(|error| error.to_string())
        };
        let gone = Process { pid: i32::MAX, start_time: 1 };
        let of_another = Process { start_time: me.start_time + 1, ..me };
        for word in ["lock", BACK] {
            assert!(call(word, me, me).unwrap_err().contains("cannot be loaded"));
            assert!(call(word, me, gone).unwrap_err().contains("has ended"));
            for target in [gone, of_another] {
                assert_eq!(call(word, target, me), Ok(Some(ENDED.to_owned())));
            }
        }
    }

    #[test]
    fn calls_on_one_process_wait_for_each_other_and_those_on_two_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("suspend.lock");
        let held = hold(&path, 7).unwrap();
        hold(&path, 8).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waits = {
            let path = path.clone();
            std::thread::spawn(move || {
                hold(&path, 7).unwrap();
                sender.send(()).unwrap();
            })
        };
        assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err());
        drop(held);
        receiver.recv().unwrap();
        waits.join().unwrap();
    }
}
