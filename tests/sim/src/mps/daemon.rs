//! The control daemon: its five entries in the pipe directory, and the connections to them.

use std::fs::{self, DirBuilder, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::{geteuid, mkfifo};

use super::command::{Outcome, run};
use super::device;
use super::limits;
use super::log::Log;
use super::message::{Answer, Command, Hello, Settings};
use super::pipe_directory;
use super::servers::Servers;
use super::wire::{Conn, Listener};
use crate::layout::Root;
use crate::layout::state_file::State;
use crate::layout::topology::Topology;

/// The message of a second daemon in the same directory.
const RUNNING: &str = "An instance of this daemon is already running";
/// The message of every program that finds no daemon, and of a daemon that could not bind its socket.
pub const NOT_FOUND: &str = "Cannot find MPS control daemon process";

const PID_FILE: &str = "nvidia-cuda-mps-control.pid";

/// A daemon that owns its directory and listens.
#[derive(Debug)]
pub struct Daemon {
    servers: Arc<Servers>,
    control: Listener,
    privileged: Listener,
    lock: Flock<File>,
}

impl Daemon {
    /// Takes the pipe directory.
    ///
    /// # Errors
    /// The directory cannot be written, or another daemon uses it.
    pub fn new(multiuser: bool) -> Result<Self> {
        if multiuser && !geteuid().is_root() {
            bail!("Multiuser server mode needs root privileges");
        }
        let directory = pipe_directory();
        make_directory(&directory)?;
        let lock = File::create(directory.join("control_lock")).context("control_lock")?;
        let lock =
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|_| anyhow::anyhow!(RUNNING))?;
        let log = Log::new("control.log", "Control");
        let bind = |name, mode| Listener::bind(&directory.join(name), mode).context(NOT_FOUND);
        let (control, privileged) = (bind("control", 0o666)?, bind("control_privileged", 0o755)?);
        let fifo = directory.join("log");
        let _ = fs::remove_file(&fifo);
        mkfifo(&fifo, Mode::from_bits_truncate(0o644)).context("log")?;
        fs::write(directory.join(PID_FILE), std::process::id().to_string()).context(PID_FILE)?;
        log.line(&format!("Starting control daemon using socket {}/control", directory.display()));
        log.line(&format!(
            "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={}",
            directory.display()
        ));
        let root = Root::of_program().context("not below the root of a simulated driver")?;
        let devices = host_devices(&root)?;
        let uuids: Vec<String> = devices.iter().map(|device| device.uuid.clone()).collect();
        let servers = Servers::new(&devices, multiuser, defaults(&uuids), log);
        Ok(Self { servers, control, privileged, lock })
    }

    /// Serves until a client sends `quit`. The socket `control` is not removed.
    pub fn run(self) {
        let Ok((bell, rung)) = Conn::pair() else { return };
        let quit = Arc::new(Quit { asker: Mutex::default(), bell });
        let door = Arc::new(Door::default());
        while let Some((conn, privileged)) = self.next(&rung) {
            take(conn, privileged, &self.servers, &quit, &door);
        }
        self.servers.log.line("Exiting");
        self.control.shut();
        self.privileged.shut();
        let _ = fs::remove_file(pipe_directory().join(PID_FILE));
        drop(self.lock);
        let asker = quit.asker.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = asker.as_ref().map(|asker| asker.send(&Answer(String::new())));
    }

    /// The next connection, and whether it is one to `control_privileged`; `None` once `rung` has something to read.
    fn next(&self, rung: &Conn) -> Option<(Conn, bool)> {
        let watched = [rung.as_fd(), self.control.as_fd(), self.privileged.as_fd()];
        let mut watched = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        while poll(&mut watched, PollTimeout::NONE) == Err(Errno::EINTR) {}
        let is_ready = |at: usize| watched[at].any().unwrap_or(false);
        match () {
            () if is_ready(0) => None,
            () if is_ready(1) => self.control.accept().map(|conn| (conn, false)),
            () => self.privileged.accept().map(|conn| (conn, true)),
        }
    }
}

/// How a thread that speaks with a program ends the daemon.
#[derive(Debug)]
struct Quit {
    /// Who said `quit`. The daemon answers at its end.
    asker: Mutex<Option<Arc<Conn>>>,
    bell: Conn,
}

impl Quit {
    fn ask(&self, conn: &Arc<Conn>) {
        *self.asker.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(conn));
        let _ = self.bell.send(&());
    }
}

fn make_directory(directory: &Path) -> Result<()> {
    if directory.is_dir() {
        return Ok(());
    }
    DirBuilder::new().mode(0o755).create(directory).with_context(|| format!("{}", directory.display()))
}

/// The devices that a program on the host sees.
///
/// # Errors
/// The root is not one of a simulated driver.
pub fn host_devices(root: &Root) -> Result<Vec<device::Device>> {
    let topology = Topology::load(root)?;
    let state = State::read(root).unwrap_or_else(|_| State::initial(&topology));
    let all = device::all(&state.applied(&topology));
    Ok(device::visible(&all, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref()))
}

/// The daemon's own environment sets its defaults.
fn defaults(devices: &[String]) -> Settings {
    let mut settings = Settings::default();
    let own = std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok();
    if let Some(percentage) = own.and_then(|value| limits::percentage(&value)) {
        settings.percentage = percentage;
    }
    let pinned = std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").unwrap_or_default();
    for (device, value) in pinned.split(',').filter_map(|entry| entry.split_once('=')) {
        if let (Some(ordinal), Some(_)) = (limits::ordinal(device, devices), limits::size(value)) {
            settings.pinned.insert(ordinal, value.to_owned());
        }
    }
    settings
}

/// How the daemon takes connections (docs/evidence/2026-11-25-mps-control.md): its main thread waits for what each says
/// first, and for nothing else meanwhile.
#[derive(Debug, Default)]
struct Door {
    /// The command line program with which it speaks: one at a time.
    program: Mutex<Option<Arc<Conn>>>,
}

impl Door {
    /// Whether it speaks with `conn` from now on. One that has just ended is forgotten first.
    fn takes(&self, conn: &Arc<Conn>) -> bool {
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        if program.as_ref().is_some_and(|other| !other.is_over()) {
            return false;
        }
        *program = Some(Arc::clone(conn));
        true
    }

    fn forgets(&self, conn: &Arc<Conn>) {
        let mut program = self.program.lock().unwrap_or_else(PoisonError::into_inner);
        *program = program.take().filter(|other| !Arc::ptr_eq(other, conn));
    }
}

fn take(conn: Conn, privileged: bool, servers: &Arc<Servers>, quit: &Arc<Quit>, door: &Arc<Door>) {
    servers.log.line("Accepting connection...");
    let Ok(peer) = conn.peer() else { return };
    let (said, servers) = (conn.recv(), Arc::clone(servers));
    match said {
        None => {}
        Some((Hello::Client, _)) => {
            servers.log.line(&format!("NEW CLIENT {} from user {}", peer.pid, peer.uid));
            thread::spawn(move || servers.serve(&conn, peer));
        }
        Some((Hello::Program, _)) => {
            let conn = Arc::new(conn);
            if door.takes(&conn) {
                let (quit, door) = (Arc::clone(quit), Arc::clone(door));
                thread::spawn(move || {
                    speak(&conn, &servers, privileged, &quit);
                    door.forgets(&conn);
                });
            }
        }
    }
}

/// Answers one program's commands.
fn speak(conn: &Arc<Conn>, servers: &Arc<Servers>, privileged: bool, quit: &Quit) {
    if conn.send(&Answer(String::new())).is_err() {
        return;
    }
    while let Some((Command(line), _)) = conn.recv() {
        match run(servers, &line, privileged) {
            Outcome::Say(text) => {
                if conn.send(&Answer(text)).is_err() {
                    return;
                }
            }
            Outcome::Quit => {
                quit.ask(conn);
                return;
            }
        }
    }
}
