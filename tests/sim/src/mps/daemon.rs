//! The control daemon: its five entries in the pipe directory, and the connections to them.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
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
    control: Arc<Listener>,
    privileged: Arc<Listener>,
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
        Ok(Self { servers, control: Arc::new(control), privileged: Arc::new(privileged), lock })
    }

    /// Serves until a client sends `quit`. The socket `control` is not removed.
    pub fn run(self) {
        let (quit, told) = mpsc::channel();
        let door = Arc::new(Door::default());
        for (listener, privileged) in [(&self.control, false), (&self.privileged, true)] {
            let (listener, servers, quit) = (Arc::clone(listener), Arc::clone(&self.servers), quit.clone());
            let door = Arc::clone(&door);
            thread::spawn(move || accept(&listener, &servers, privileged, &quit, &door));
        }
        let Ok(asker) = told.recv() else { return };
        self.servers.log.line("Exiting");
        self.control.shut();
        self.privileged.shut();
        let _ = fs::remove_file(pipe_directory().join(PID_FILE));
        drop(self.lock);
        let _ = asker.send(&Answer(String::new()));
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

/// How the daemon takes connections (docs/evidence/2026-11-25-mps-control.md).
#[derive(Debug, Default)]
struct Door {
    /// It waits for what a connection says first, and for nothing else meanwhile.
    greeting: Mutex<()>,
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

fn accept(
    listener: &Listener,
    servers: &Arc<Servers>,
    privileged: bool,
    quit: &mpsc::Sender<Arc<Conn>>,
    door: &Arc<Door>,
) {
    while let Some(conn) = listener.accept() {
        let greeting = door.greeting.lock().unwrap_or_else(PoisonError::into_inner);
        servers.log.line("Accepting connection...");
        let Ok(peer) = conn.peer() else { continue };
        let said = conn.recv();
        drop(greeting);
        let (servers, quit, door) = (Arc::clone(servers), quit.clone(), Arc::clone(door));
        match said {
            None => {}
            Some((Hello::Client, _)) => {
                servers.log.line(&format!("NEW CLIENT {} from user {}", peer.pid, peer.uid));
                thread::spawn(move || servers.serve(&conn, peer));
            }
            Some((Hello::Program, _)) => {
                let conn = Arc::new(conn);
                if door.takes(&conn) {
                    thread::spawn(move || {
                        speak(&conn, &servers, privileged, &quit);
                        door.forgets(&conn);
                    });
                }
            }
        }
    }
}

/// Answers one program's commands.
fn speak(conn: &Arc<Conn>, servers: &Arc<Servers>, privileged: bool, quit: &mpsc::Sender<Arc<Conn>>) {
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
                // `run` of the daemon answers it, at its end.
                let _ = quit.send(Arc::clone(conn));
                return;
            }
        }
    }
}
