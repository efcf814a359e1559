//! Admission, for every entry point: from a container's spec to a lease and an edited spec, and back.
//!
//! [`Leases::admit`] takes a lease when a container starts, [`Leases::end`] frees it when the container ends. A step
//! that fails undoes those before it. After a crash the next command cleans up,
//! because a lease is on disk before anything that depends on it exists.
//!
//! In a rootless engine, which may not change the state, each of them asks `sublet serve` instead. Here it only
//! does the part that concerns the container itself: reading its root filesystem, editing its spec.
//!
//! Taking a lease may last as long as `sublet.wait` says. If the engine that asked for the container has ended meanwhile
//! ([`Engine`]), the container must not be created, because nothing would end it.

pub mod dynamic_mig;
mod end_left;
mod error;
mod grant_at_prestart;
mod in_job;
mod job_share;
mod last_refusals;
mod local;
mod local_or_remote;
mod remote;
mod request_of_spec;
mod room;
pub mod take_lease;

use std::cell::Cell;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::Value;

use crate::config::Config;
use crate::inventory::{Inventory, InventoryError};
pub use crate::ledger::is_remote;
use crate::ledger::{Container, LeaseId};
use crate::oci::{ImageError, Tree};
use crate::process::{Process, Stat, sublet};
use crate::{inventory, ledger, log};
use take_lease::SHORTEST_PAUSE;

pub use dynamic_mig::{Answer as MakeAnswer, Ask as MakeAsk};
pub use end_left::Owns;
pub use error::{AdmitError, of_broker, of_inventory, of_mps};
pub use grant_at_prestart::{admit_late, end_late};
pub use in_job::job_share;
pub use job_share::JobError;
pub use last_refusals::{RefusalRecord, record_reported, refusals};
pub use local::{Local, PutOff, clear_refused, read};
pub use local_or_remote::Leases;
pub use remote::{enter_remotely, own_status};
pub use request_of_spec::{
    RequestSource, asks_for_a_share, asks_for_job_share, remove_earlier_grant, request_by_cdi, request_of,
};
pub use room::{Room, RoomStep, Sight};
pub use take_lease::{Asks, book_for, book_waiter, lease_for, place_in_order};

/// The time limit for the end of an ended container's last processes.
const EMPTY_CGROUP: Duration = Duration::from_secs(5);

/// A container that an entry point wants to admit.
#[derive(Debug)]
pub struct Candidate<'a> {
    /// The container.
    pub container: Container,
    /// Its root filesystem, if the entry point has it open.
    pub rootfs: Option<Rc<OwnedFd>>,
    /// The low-level runtime's process. If it ends and there is no container, the lease is freed.
    pub owner: Process,
    /// The engine that waits for it, if known.
    pub engine: Option<&'a Engine>,
}

impl Candidate<'_> {
    /// Whether the engine still waits for it.
    pub fn check_wanted(&self) -> Result<(), AdmitError> {
        if self.engine.is_some_and(Engine::is_gone) { Err(AdmitError::NoEngine) } else { Ok(()) }
    }

    /// The file tree of the container of `spec`.
    fn open_tree(&self, spec: &Value) -> Result<Tree, ImageError> {
        let path = &self.container.rootfs;
        match &self.rootfs {
            Some(opened) => Tree::of_opened(spec, Rc::clone(opened), path),
            None => Tree::open(spec, path),
        }
    }

    /// Waits before the next attempt.
    fn wait(&self, pause: Duration) {
        match self.engine {
            Some(engine) => engine.wait(pause),
            None => std::thread::sleep(pause),
        }
    }
}

/// The result.
#[derive(Debug)]
pub enum Admission {
    /// It already has a live lease. Nothing was changed.
    AlreadyGranted(LeaseId),
    /// It asks for no share, or for that of its job of Slurm's, which asked for no GPU. Nothing was changed.
    NoShare,
    /// `spec` was edited and must be written. If that fails, call [`Leases::withdraw`].
    Granted {
        /// The new lease.
        lease: LeaseId,
        /// For stderr and the log, one line each.
        warnings: Vec<String>,
    },
}

/// The time limit of a refresh. NVML may have to load firmware on a machine without the persistence daemon.
const REFRESH_LIMIT: Duration = Duration::from_secs(60);

/// How long to repeat a refresh if the inventory is out of date as soon as it is written.
const SETTLING: Duration = Duration::from_secs(10);

/// The cached inventory if it is up to date, otherwise a refreshed one.
pub fn fresh_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    refresh_if_stale(inventory::load(config), config)
}

/// The `loaded` inventory if it is up to date, otherwise a refreshed one.
fn refresh_if_stale(
    loaded: Result<Inventory, InventoryError>,
    config: &Config,
) -> Result<Inventory, AdmitError> {
    match check_layout(loaded, config) {
        Err(error) if error.wants_refresh() => Leases::of(config).new_inventory(),
        loaded => Ok(loaded?),
    }
}

/// The `loaded` inventory. While a MIG layout changes, the instances of its GPUs may differ from the ones in it: these GPUs
/// take no lease, and a lease that is taken after the change needs a newer inventory ([`crate::ledger::MigChanges::count`]).
fn check_layout(
    loaded: Result<Inventory, InventoryError>,
    config: &Config,
) -> Result<Inventory, InventoryError> {
    if matches!(loaded, Err(InventoryError::Stale { .. })) {
        let changing = ledger::gpus_under_change(&config.state_dir);
        if !changing.is_empty() {
            return inventory::load_beside(config, &changing);
        }
    }
    loaded
}

/// [`fresh_inventory`] for commands that show the devices. Only NVML knows of MIG devices that another tool has
/// destroyed and created again.
pub fn confirmed_inventory(config: &Config) -> Result<Inventory, AdmitError> {
    let inventory = fresh_inventory(config)?;
    let mig = inventory.gpus().any(|gpu| gpu.mig_enabled);
    if !mig || inventory::is_watched(config) || is_remote(config) { Ok(inventory) } else { refresh(config) }
}

/// Runs `sublet refresh` by absolute path with a clean environment, and reads the result.
pub fn refresh(config: &Config) -> Result<Inventory, AdmitError> {
    let began = Instant::now();
    loop {
        log::warn(sublet::run(&["refresh", "--quiet"], REFRESH_LIMIT)?);
        match check_layout(inventory::load(config), config) {
            // MIG instances are being created or destroyed, for other containers or by `sublet mig apply`.
            Err(InventoryError::Stale { .. }) if began.elapsed() < SETTLING => {
                std::thread::sleep(SHORTEST_PAUSE);
            }
            loaded => return Ok(loaded?),
        }
    }
}

/// The variable with which conmon gets its end of a socket pair or pipe (conmon, `src/conmon.c`). Podman and CRI-O wait
/// at the other end for the container's pid, and no other process has that end.
const SYNC_PIPE: &[u8] = b"_OCI_SYNCPIPE=";

/// The process that started this program, and the engine behind it if a monitor is in between.
///
/// A monitor outlives its engine: Podman's conmon goes on creating the container of a `podman run` that was killed.
#[derive(Debug)]
pub struct Engine {
    caller: Process,
    /// It hangs up once the engine has ended.
    pipe: Option<OwnedFd>,
    waited: Cell<bool>,
}

impl Engine {
    /// The engine behind process `caller`, which started this process; `None` if `caller` has already ended.
    ///
    /// If the kernel (`pidfd_getfd(2)`, Linux 5.6) or missing rights prevent the check, the engine counts as running.
    pub fn of(caller: i32) -> Option<Self> {
        let caller = Stat::of(caller).ok()??;
        let pipe = sync_pipe(&caller).or_else(|| sync_pipe(&Stat::of(caller.parent).ok()??));
        Some(Self { caller: caller.process, pipe, waited: Cell::new(false) })
    }

    /// Waits before the next look for a share.
    pub fn wait(&self, pause: Duration) {
        self.waited.set(true);
        std::thread::sleep(pause);
    }

    /// Whether the engine has ended, or has given the container up. The caller's own end counts where the share had to
    /// be waited for: a shell that puts a container into the background ends at once.
    pub fn is_gone(&self) -> bool {
        self.waited.get() && !self.caller.is_alive() || self.pipe.as_ref().is_some_and(is_hung_up)
    }
}

/// The end of the sync pipe that a process has, if it is conmon.
fn sync_pipe(process: &Stat) -> Option<OwnedFd> {
    let pid = process.process.pid;
    if process.name != "conmon" {
        return None;
    }
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let number = environment.split(|byte| *byte == 0).find_map(|entry| entry.strip_prefix(SYNC_PIPE))?;
    let number = std::str::from_utf8(number).ok()?.parse().ok()?;
    let conmon = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(conmon, number, PidfdGetfdFlags::empty()).ok()
}

/// Whether no process has the other end: a socket pair hangs up, and a pipe without a reader is broken.
fn is_hung_up(pipe: &OwnedFd) -> bool {
    let mut pipe = [PollFd::new(pipe.as_fd(), PollFlags::empty())];
    let ended = PollFlags::POLLHUP | PollFlags::POLLERR;
    poll(&mut pipe, PollTimeout::ZERO).is_ok() && pipe[0].revents().is_some_and(|seen| seen.intersects(ended))
}

#[cfg(test)]
mod engine_tests {
    use std::process::{Child, Command};

    use super::*;

    /// A program that is called conmon, with `pipe` as its end.
    fn conmon(dir: &std::path::Path, pipe: OwnedFd) -> Child {
        let program = dir.join("conmon");
        if !program.exists() {
            std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        }
        // The standard library hands down the file that becomes standard input.
        let mut command = Command::new(program);
        command.arg("60").env("_OCI_SYNCPIPE", "0").stdin(pipe);
        command.spawn().unwrap()
    }

    fn eventually(holds: impl Fn() -> bool) -> bool {
        (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            holds()
        })
    }

    #[test]
    fn an_engine_is_gone_when_nobody_has_the_other_end_of_its_monitors_pipe() {
        let dir = tempfile::tempdir().unwrap();
        let socket = |kind| {
            let flags = nix::sys::socket::SockFlag::SOCK_CLOEXEC;
            nix::sys::socket::socketpair(nix::sys::socket::AddressFamily::Unix, kind, None, flags).unwrap()
        };
        for (engines, monitors) in [
            socket(nix::sys::socket::SockType::SeqPacket),
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap(),
        ] {
            let mut monitor = conmon(dir.path(), monitors);
            let pid = i32::try_from(monitor.id()).unwrap();
            assert!(eventually(|| sync_pipe(&Stat::of(pid).unwrap().unwrap()).is_some()));
            let engine = Engine::of(pid).unwrap();
            assert!(!engine.is_gone());
            drop(engines);
            assert!(eventually(|| engine.is_gone()));
            monitor.kill().unwrap();
            monitor.wait().unwrap();
        }
    }

    #[test]
    fn a_callers_end_counts_where_it_was_waited() {
        let mut caller = Command::new("sleep").arg("60").spawn().unwrap();
        let engine = Engine::of(i32::try_from(caller.id()).unwrap()).unwrap();
        engine.waited.set(true);
        assert!(!engine.is_gone());
        caller.kill().unwrap();
        assert!(eventually(|| engine.is_gone()), "a zombie waits for nobody");
        engine.waited.set(false);
        assert!(!engine.is_gone());
        caller.wait().unwrap();
    }
}
