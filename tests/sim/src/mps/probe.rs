//! `cuda-probe`: a CUDA program that prints the resources that it sees, one JSON object a line.
//!
//! It uses only what a CUDA program in a container has: its environment, the device nodes, the MPS directory, and the
//! libcuda that the loader finds, whose trailer describes the GPUs. For tests outside containers, `SUBLET_SIM_DEV`
//! names a directory that replaces /dev.
//!
//! In front of what it does may stand that its first thread ends, `leaderless at-once` or, after its contexts are made,
//! `leaderless later`; another thread then does the rest.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write, stdout};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde_json::{Value, json};

use super::client::Client;
use super::context_mib;
use super::device::{self, Device};
use super::driver;
use super::exclusive::{Claim, claim};
use super::message::Open;
use super::pipe_directory;
use super::wire::Conn;
use crate::layout::Root;
use crate::layout::contexts::{self, Kind};
use crate::layout::trailer;

const USAGE: &str = "cuda-probe [leaderless at-once|later] info | hold SECS | alloc MIB [SECS] | fault | lat SECS [UNTIL-FILE] | noderights PATH… | silent SECS [hidden]";

/// Exit status after a CUDA error.
const CUDA_ERROR: u8 = 10;

/// Runs the program on its arguments.
#[must_use]
pub fn main() -> ExitCode {
    // Another thread may be left with them.
    let arguments: &'static [String] = Vec::leak(std::env::args().skip(1).collect());
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (leaderless, words) = match words[..] {
        ["leaderless", when, ref task @ ..] => (Some(when), task.to_vec()),
        _ => (None, words),
    };
    let (Some(task), None | Some("at-once" | "later")) = (Task::parse(&words), leaderless) else {
        eprintln!("usage: {USAGE}");
        return ExitCode::from(2);
    };
    if leaderless == Some("at-once") {
        go_on_without_first_thread(move || perform(task, false));
    }
    perform(task, leaderless.is_some())
}

fn perform(task: Task<'static>, leaderless: bool) -> ExitCode {
    if let Task::Silent(time, hidden) = task {
        silent(time, hidden);
        return ExitCode::SUCCESS;
    }
    let mut libcuda = None;
    let started = Program::start(&mut libcuda);
    say(&info(started.as_ref(), libcuda.as_deref()));
    match (task, started) {
        (Task::NodeRights(paths), _) => {
            for path in paths {
                say(&json!({"event": "node", "path": path, "result": node(Path::new(path))}));
            }
            ExitCode::SUCCESS
        }
        (_, Err(_)) => ExitCode::from(CUDA_ERROR),
        (task, Ok(mut program)) if leaderless => go_on_without_first_thread(move || program.run(&task)),
        (task, Ok(mut program)) => program.run(&task),
    }
}

/// Ends this thread alone (`exit(2)`), as any program can. Another one does the rest, and ends the process with status 0.
#[allow(unsafe_code, reason = "a system call that no library has")]
fn go_on_without_first_thread(rest: impl FnOnce() -> ExitCode + Send + 'static) -> ! {
    std::thread::spawn(|| {
        rest();
        std::process::exit(0);
    });
    loop {
        // SAFETY: nothing of this thread's is used by another one: what the rest needs was moved to it.
        unsafe { nix::libc::syscall(nix::libc::SYS_exit, 0) };
    }
}

/// The resources of a context.
#[derive(Debug)]
pub struct Got {
    /// The number of devices that the program sees.
    pub devices: usize,
    /// Multiprocessors.
    pub sm: u32,
    /// Memory that it can still allocate.
    pub free_mib: u64,
    /// Memory of the device.
    pub total_mib: u64,
    /// Whether it is an MPS client.
    pub mps: bool,
    _context: Program,
}

/// Creates a context that lives as long as the process, for programs that call libcuda's functions.
///
/// # Errors
/// The name of a `CUresult`, or what is missing.
pub fn got() -> Result<Got, String> {
    let program = Program::start(&mut None)?;
    Ok(Got {
        devices: program.count(),
        sm: program.first.sm,
        free_mib: program.first.free_mib,
        total_mib: program.first.device.total_mib,
        mps: program.mps.is_some(),
        _context: program,
    })
}

/// Errors are ignored: the reader has gone.
fn say(line: &Value) {
    let mut out = stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn silent(time: Duration, hidden: bool) {
    let daemon = Conn::connect(&pipe_directory().join("control")).ok();
    say(&json!({"event": "connected"}));
    let pair = Conn::pair().ok().filter(|_| hidden);
    if let (Some(daemon), Some((one, _))) = (&daemon, &pair) {
        // Nobody receives it.
        let _ = one.send_with(&(), daemon);
    }
    let _open = daemon.filter(|_| !hidden);
    std::thread::sleep(time);
    drop(pair);
}

enum Task<'a> {
    Info,
    Hold(Duration),
    Alloc(u64, Duration),
    Fault,
    Latency(Duration, Option<&'a Path>),
    NodeRights(Vec<&'a str>),
    /// Connects to the MPS daemon, and says nothing; the connection may be hidden in a socket of its own.
    Silent(Duration, bool),
}

impl<'a> Task<'a> {
    fn parse(words: &[&'a str]) -> Option<Self> {
        let time = |text: &str| text.parse().ok().and_then(|secs| Duration::try_from_secs_f64(secs).ok());
        Some(match words {
            ["info"] => Self::Info,
            ["hold", secs] => Self::Hold(time(secs)?),
            ["alloc", mib] => Self::Alloc(mib.parse().ok()?, Duration::ZERO),
            ["alloc", mib, secs] => Self::Alloc(mib.parse().ok()?, time(secs)?),
            ["fault"] => Self::Fault,
            ["lat", secs] => Self::Latency(time(secs)?, None),
            &["lat", secs, until] => Self::Latency(time(secs)?, Some(Path::new(until))),
            ["silent", secs] => Self::Silent(time(secs)?, false),
            ["silent", secs, "hidden"] => Self::Silent(time(secs)?, true),
            ["noderights", paths @ ..] => Self::NodeRights(paths.to_vec()),
            _ => return None,
        })
    }
}

/// A program with a context on each device that it sees.
#[derive(Debug)]
struct Program {
    tag: String,
    /// The context on the first device, which does the work.
    first: Made,
    /// Contexts on the other devices. `Err` says why there is none.
    others: Vec<(Device, Result<Made, String>)>,
    /// `None` if it runs without MPS.
    mps: Option<Client>,
}

/// A context.
#[derive(Debug)]
struct Made {
    device: Device,
    sm: u32,
    free_mib: u64,
    used_mib: u64,
    shown: OwnedFd,
    _claim: Option<Claim>,
}

impl Program {
    /// Loads libcuda, finds the devices, connects to MPS and creates a context.
    fn start(libcuda: &mut Option<PathBuf>) -> Result<Self, String> {
        let file = libcuda.insert(driver::load()?).clone();
        let topology = trailer::read(&file).ok_or("libcuda has no trailer of the simulated driver")?;
        let devices = usable(&device::all(&topology))?;
        let named = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let mps = Client::connect();
        let devices = match &mps {
            Some(client) => of_server(&devices, &client.devices),
            None => devices,
        };
        let visible = device::visible(&devices, named.as_deref());
        let open = Open {
            visible: visible.iter().map(|device| device.uuid.clone()).collect(),
            percentage: std::env::var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").ok(),
            pinned: std::env::var("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").ok(),
            ..Open::default()
        };
        let make = |device: &Device| match &mps {
            Some(client) => Made::with_mps(&topology.tag, device, client, &open),
            None => Made::alone(&topology.tag, device, &file),
        };
        let (first, others) = visible.split_first().ok_or("CUDA_ERROR_NO_DEVICE")?;
        let first = make(first)?;
        let others = others.iter().map(|device| (device.clone(), make(device))).collect();
        Ok(Self { tag: topology.tag, first, others, mps })
    }

    /// The number of devices that it sees.
    fn count(&self) -> usize {
        1 + self.others.len()
    }

    fn run(&mut self, task: &Task) -> ExitCode {
        let result = match *task {
            Task::Info | Task::NodeRights(_) | Task::Silent(..) => return ExitCode::SUCCESS,
            Task::Hold(time) => self.hold(time),
            Task::Latency(time, until) => self.latency(time, until),
            Task::Fault => return self.fault(),
            Task::Alloc(mib, time) => {
                let result = self.alloc(mib);
                say(&json!({"event": "alloc", "mib": mib, "result": text(&result)}));
                match result {
                    Ok(()) if time.is_zero() => return ExitCode::SUCCESS,
                    // It makes no call meanwhile, so it does not learn of its context's end.
                    Ok(()) => {
                        std::thread::sleep(time);
                        self.hold(Duration::ZERO)
                    }
                    Err(_) => return ExitCode::from(CUDA_ERROR),
                }
            }
        };
        say(&json!({"event": "end", "result": text(&result)}));
        if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(CUDA_ERROR) }
    }

    fn hold(&self, time: Duration) -> Result<(), String> {
        if let Some(client) = &self.mps {
            return client.hold(time);
        }
        std::thread::sleep(time);
        Ok(())
    }

    /// Simulates launches of kernels of a millisecond each, for a time or until a file exists.
    fn latency(&self, time: Duration, until: Option<&Path>) -> Result<(), String> {
        let (start, mut rounds) = (Instant::now(), Vec::new());
        let mut result = Ok(());
        while result.is_ok() && start.elapsed() < time && !until.is_some_and(Path::exists) {
            let round = Instant::now();
            result = self.hold(Duration::from_millis(1));
            rounds.push(round.elapsed().as_secs_f64() * 1000.0);
        }
        rounds.sort_by(f64::total_cmp);
        if let Some(worst) = rounds.last() {
            let at = |percent: usize| rounds[rounds.len() * percent / 100];
            say(
                &json!({"event": "lat", "n": rounds.len(), "p50_ms": at(50), "p99_ms": at(99), "max_ms": worst}),
            );
        }
        result
    }

    fn alloc(&mut self, mib: u64) -> Result<(), String> {
        let granted = match &self.mps {
            Some(client) => client.alloc(&self.first.device.uuid, mib)?,
            None => mib <= self.first.free_mib,
        };
        if !granted {
            return Err("CUDA_ERROR_OUT_OF_MEMORY".into());
        }
        let kind = if self.mps.is_some() { Kind::Client } else { Kind::Compute };
        self.first.free_mib = self.first.free_mib.saturating_sub(mib);
        self.first.used_mib += mib;
        self.first.shown = show(&self.tag, &self.first.device, kind, self.first.used_mib)?;
        Ok(())
    }

    fn fault(&self) -> ExitCode {
        let illegal = || "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
        let error = self.mps.as_ref().map_or_else(illegal, Client::fault);
        say(&json!({"event": "fault", "result": error}));
        ExitCode::from(CUDA_ERROR)
    }
}

impl Made {
    fn with_mps(tag: &str, device: &Device, client: &Client, open: &Open) -> Result<Self, String> {
        let (sm, free_mib) = client.open(Open { device: device.uuid.clone(), ..open.clone() })?;
        let used_mib = context_mib(sm);
        let shown = show(tag, device, Kind::Client, used_mib)?;
        Ok(Self { device: device.clone(), sm, free_mib, used_mib, shown, _claim: None })
    }

    fn alone(tag: &str, device: &Device, libcuda: &Path) -> Result<Self, String> {
        let root = Root::of_library(libcuda).map_err(|error| format!("{}: {error}", libcuda.display()))?;
        let claim = claim(device, root.as_ref(), libcuda).ok_or("CUDA_ERROR_DEVICE_UNAVAILABLE")?;
        let (sm, used_mib) = (device.sm, context_mib(device.sm));
        let all = contexts::list(tag);
        let held =
            all.iter().filter(|held| held.on.memory() == device.on.memory()).map(|held| held.mib).sum();
        let free_mib = device.total_mib.saturating_sub(held);
        let free_mib = free_mib.checked_sub(used_mib).ok_or("CUDA_ERROR_OUT_OF_MEMORY")?;
        let shown = show(tag, device, Kind::Compute, used_mib)?;
        Ok(Self { device: device.clone(), sm, free_mib, used_mib, shown, _claim: Some(claim) })
    }

    fn json(&self) -> Value {
        let Device { uuid, total_mib, .. } = &self.device;
        json!({"uuid": uuid, "sm": self.sm, "free_mib": self.free_mib, "total_mib": total_mib, "error": null})
    }
}

fn show(tag: &str, device: &Device, kind: Kind, mib: u64) -> Result<OwnedFd, String> {
    contexts::announce(tag, device.on, kind, mib).map_err(|error| format!("memfd: {error}"))
}

fn text(result: &Result<(), String>) -> &str {
    result.as_ref().map_or_else(String::as_str, |()| "CUDA_SUCCESS")
}

fn info(program: Result<&Program, &String>, libcuda: Option<&Path>) -> Value {
    let found = program.ok();
    json!({
        "event": "info",
        "error": program.err(),
        "count": found.map_or(0, Program::count),
        "sm": found.map(|program| program.first.sm),
        "free_mib": found.map(|program| program.first.free_mib),
        "total_mib": found.map(|program| program.first.device.total_mib),
        "uuid": found.map(|program| program.first.device.uuid.as_str()),
        "devices": found.map_or_else(Vec::new, devices),
        "mps": found.is_some_and(|program| program.mps.is_some()),
        "libcuda": libcuda,
        "pid": std::process::id(),
    })
}

/// The resources on each device, in its order.
fn devices(program: &Program) -> Vec<Value> {
    let other = |(device, made): &(Device, Result<Made, String>)| match made {
        Ok(made) => made.json(),
        Err(error) => json!({"uuid": device.uuid, "error": error}),
    };
    std::iter::once(program.first.json()).chain(program.others.iter().map(other)).collect()
}

/// The devices whose nodes can be opened, which cuInit finds.
fn usable(devices: &[Device]) -> Result<Vec<Device>, String> {
    let dev = std::env::var_os("SUBLET_SIM_DEV").map_or_else(|| "/dev".into(), PathBuf::from);
    let opens = |name: &str| matches!(node(&dev.join(name)).as_str(), "ok" | "ENXIO");
    let found: Vec<Device> =
        devices.iter().filter(|device| device.nodes.iter().all(|name| opens(name))).cloned().collect();
    if !opens("nvidiactl") || found.is_empty() {
        return Err("CUDA_ERROR_NO_DEVICE".into());
    }
    if !opens("nvidia-uvm") {
        return Err("CUDA_ERROR_UNKNOWN".into());
    }
    if driver::is_out_of_reach() {
        return Err("CUDA_ERROR_NO_DEVICE".into());
    }
    Ok(found)
}

/// Under MPS a client sees those of the server's devices whose nodes it has, in the server's order.
fn of_server(devices: &[Device], served: &[String]) -> Vec<Device> {
    served.iter().filter_map(|uuid| devices.iter().find(|device| device.uuid == *uuid)).cloned().collect()
}

/// The result of opening a node: `ok`, or the name of the error. ENXIO counts as `ok`: the node may be opened, and
/// there is no driver. Capability nodes are opened read-only, because nobody may write to them.
fn node(path: &Path) -> String {
    let capability = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("nvidia-cap"));
    match OpenOptions::new().read(true).write(!capability).open(path) {
        Ok(_) => "ok".into(),
        Err(error) if error.kind() == ErrorKind::NotFound => "ENOENT".into(),
        Err(error) => error
            .raw_os_error()
            .map_or_else(|| error.to_string(), |number| format!("{:?}", Errno::from_raw(number))),
    }
}
