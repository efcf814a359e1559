//! `cuda-probe`: a CUDA program that prints the resources that it sees, one JSON object a line.
//!
//! It uses only what a CUDA program in a container has: its environment, the device nodes, the MPS directory, and the
//! libcuda that the loader finds, whose trailer describes the GPUs. For tests outside containers, `SUBLET_SIM_DEV`
//! names a directory that replaces /dev.
//!
//! `keep` holds memory and says in each round whether that is still what it wrote, and on which GPUs it is. Its last words
//! make it a process that cannot be suspended, or not be restored: at once, or when a file exists. `shares FILE`, a program
//! of two that have memory in common by CUDA IPC, for which the file stands.
//!
//! In front of what it does may stand that its first thread ends, `leaderless at-once` or, after its contexts are made,
//! `leaderless later`; another thread then does the rest.

use std::fs::OpenOptions;
use std::io::{Write, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::client::Client;
use super::device::Device;
use super::nodes;
use super::pipe_directory;
use super::program::{Held, Made, Program};
use super::wire::Conn;

const USAGE: &str = "cuda-probe [leaderless at-once|later] info | hold SECS | alloc MIB [SECS] | keep MIB SECS [until FILE] [[when FILE] managed|peers|shares FILE] | fault | lat SECS [UNTIL-FILE] | noderights PATH… | silent SECS [hidden]";

/// Exit status after a CUDA error.
const CUDA_ERROR: u8 = 10;

/// The pause between two rounds of `keep`.
const ROUND: Duration = Duration::from_millis(50);

/// How much of its memory `keep` writes and reads, in words of 4 bytes.
const PATTERN_WORDS: usize = 1 << 14;

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
                say(&json!({"event": "node", "path": path, "result": nodes::open(Path::new(path))}));
            }
            ExitCode::SUCCESS
        }
        (_, Err(_)) => ExitCode::from(CUDA_ERROR),
        (task, Ok(program)) if leaderless => go_on_without_first_thread(move || program.run(&task)),
        (task, Ok(program)) => program.run(&task),
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
    Keep(Keep<'a>),
    Fault,
    Latency(Duration, Option<&'a Path>),
    NodeRights(Vec<&'a str>),
    /// Connects to the MPS daemon, and says nothing; the connection may be hidden in a socket of its own.
    Silent(Duration, bool),
}

/// Holds this many MiB for a time.
struct Keep<'a> {
    mib: u64,
    time: Duration,
    /// Before this file exists there is no hindrance.
    when: Option<&'a Path>,
    /// It ends before its time when this file exists.
    until: Option<&'a Path>,
    hindrance: Option<Hindrance<'a>>,
}

/// What keeps a process from being suspended or restored.
enum Hindrance<'a> {
    /// Managed memory.
    Managed,
    /// Copies between its GPUs.
    Peers,
    /// Memory that it has in common with another process by CUDA IPC.
    Shares(&'a Path),
}

impl<'a> Task<'a> {
    fn parse(words: &[&'a str]) -> Option<Self> {
        Some(match words {
            ["info"] => Self::Info,
            ["hold", secs] => Self::Hold(time(secs)?),
            ["alloc", mib] => Self::Alloc(mib.parse().ok()?, Duration::ZERO),
            ["alloc", mib, secs] => Self::Alloc(mib.parse().ok()?, time(secs)?),
            ["keep", mib, secs, rest @ ..] => Self::Keep(Keep::parse(mib, secs, rest)?),
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

fn time(secs: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(secs.parse().ok()?).ok()
}

impl<'a> Keep<'a> {
    fn parse(mib: &str, secs: &str, rest: &[&'a str]) -> Option<Self> {
        let (until, rest) = Self::named("until", rest);
        let (when, words) = Self::named("when", rest);
        let hindrance = match *words {
            [] if when.is_none() => None,
            ["managed"] => Some(Hindrance::Managed),
            ["peers"] => Some(Hindrance::Peers),
            ["shares", file] => Some(Hindrance::Shares(Path::new(file))),
            _ => return None,
        };
        Some(Self { mib: mib.parse().ok()?, time: time(secs)?, until, when, hindrance })
    }

    /// The file behind this word, if the words begin with it, and the rest of them.
    fn named<'w>(word: &str, words: &'w [&'a str]) -> (Option<&'a Path>, &'w [&'a str]) {
        match words {
            [first, file, rest @ ..] if *first == word => (Some(Path::new(*file)), rest),
            _ => (None, words),
        }
    }
}

impl Hindrance<'_> {
    fn begin(&self, held: &mut Held) -> Result<(), String> {
        match self {
            Self::Managed => held.suspension.managed = true,
            Self::Peers if held.contexts().count() < 2 => return Err("CUDA_ERROR_INVALID_DEVICE".into()),
            Self::Peers => held.suspension.peers = true,
            Self::Shares(file) => {
                let made = OpenOptions::new().append(true).create(true).open(file);
                made.map_err(|error| format!("{}: {error}", file.display()))?;
                held.suspension.shared = Some(file.to_path_buf());
            }
        }
        Ok(())
    }
}

impl Program {
    fn run(&self, task: &Task) -> ExitCode {
        let result = match *task {
            Task::Info | Task::NodeRights(_) | Task::Silent(..) => return ExitCode::SUCCESS,
            Task::Hold(time) => self.hold(time),
            Task::Latency(time, until) => self.latency(time, until),
            Task::Fault => return self.fault(),
            Task::Keep(ref keep) => self.keep(keep),
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
        drop(self.call());
        Ok(())
    }

    /// Writes a pattern into the memory, and reads it in every round.
    fn keep(&self, keep: &Keep) -> Result<(), String> {
        let allocated = self.alloc(keep.mib);
        say(&json!({"event": "alloc", "mib": keep.mib, "result": text(&allocated)}));
        allocated?;
        let pattern = pattern(std::process::id());
        self.call().suspension.content.clone_from(&pattern);
        let (start, mut rounds) = (Instant::now(), 0);
        loop {
            // Looked at before the round: one that began when it was over is always told.
            let is_last = start.elapsed() >= keep.time || keep.until.is_some_and(Path::exists);
            let mut held = self.call();
            if let Some(hindrance) = keep.hindrance.as_ref().filter(|_| keep.when.is_none_or(Path::exists)) {
                hindrance.begin(&mut held)?;
            }
            rounds += 1;
            let uuids: Vec<&str> = held.contexts().map(|made| made.device.uuid.as_str()).collect();
            let equal = held.suspension.content == pattern;
            let round = json!({"event": "round", "n": rounds, "equal": equal, "uuids": uuids});
            drop(held);
            say(&round);
            if is_last {
                return Ok(());
            }
            std::thread::sleep(ROUND);
        }
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

    fn alloc(&self, mib: u64) -> Result<(), String> {
        let mut held = self.call();
        let granted = match &self.mps {
            Some(client) => client.alloc(&held.first.device.uuid, mib)?,
            None => mib <= held.first.free_mib,
        };
        if !granted {
            return Err("CUDA_ERROR_OUT_OF_MEMORY".into());
        }
        held.add(mib)
    }

    fn fault(&self) -> ExitCode {
        let illegal = || "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
        let error = self.mps.as_ref().map_or_else(illegal, Client::fault);
        say(&json!({"event": "fault", "result": error}));
        ExitCode::from(CUDA_ERROR)
    }
}

impl Made {
    fn json(&self) -> Value {
        let Device { uuid, total_mib, .. } = &self.device;
        json!({"uuid": uuid, "sm": self.sm, "free_mib": self.free_mib, "total_mib": total_mib, "error": null})
    }
}

/// Bytes that neither another seed would make nor memory that nobody wrote.
fn pattern(seed: u32) -> Vec<u8> {
    let step = |word: &u32| Some(word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(seed), step).take(PATTERN_WORDS).flat_map(u32::to_ne_bytes).collect()
}

fn text(result: &Result<(), String>) -> &str {
    result.as_ref().map_or_else(String::as_str, |()| "CUDA_SUCCESS")
}

fn info(program: Result<&Program, &String>, libcuda: Option<&Path>) -> Value {
    let held = program.map(Program::call);
    let found = held.as_deref().ok();
    json!({
        "event": "info",
        "error": program.err(),
        "count": found.map_or(0, Held::count),
        "sm": found.map(|held| held.first.sm),
        "free_mib": found.map(|held| held.first.free_mib),
        "total_mib": found.map(|held| held.first.device.total_mib),
        "uuid": found.map(|held| held.first.device.uuid.as_str()),
        "devices": found.map_or_else(Vec::new, devices),
        "mps": found.is_some_and(|held| held.mps),
        "libcuda": libcuda,
        "pid": std::process::id(),
    })
}

/// The resources on each device, in its order.
fn devices(held: &Held) -> Vec<Value> {
    let other = |(device, made): &(Device, Result<Made, String>)| match made {
        Ok(made) => made.json(),
        Err(error) => json!({"uuid": device.uuid, "error": error}),
    };
    std::iter::once(held.first.json()).chain(held.further.iter().map(other)).collect()
}
