//! Hundreds of containers' lives with real CUDA from seven workers at once, in mixed shares and modes, with kills and
//! faults among them; then how long a container takes to its first CUDA call in each mode.
//!
//!   gpu-cycles --probe PATH | --simulated [CYCLES [SEED]]      as root, below tests/e2e/enter
//!
//! A program's error is expected only where its own cycle causes it, or where a neighbour on the same MPS server had a
//! fault or lost that server meanwhile: docs/modes.md says that this ends all of a server's clients. The seed is printed.

mod first_call;
mod judge;
mod plan;
mod worker;

use std::path::PathBuf;
use std::process::{Child, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sublet_e2e::{World, eventually};

use judge::Life;
use plan::{USES, Use};

/// The GPU's compute mode is left alone.
const CONFIG: &str = "[mps]\nexclusive_compute_mode = \"never\"\n";
const WORKERS: u64 = 7;
const CYCLES: u64 = 500;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (world, rest) = match arguments[..] {
        ["--simulated", ref rest @ ..] => (World::simulated("h200", CONFIG), rest),
        ["--probe", probe, ref rest @ ..] => (World::real(&PathBuf::from(probe), CONFIG), rest),
        _ => return usage(),
    };
    let numbers: Option<Vec<u64>> = rest.iter().map(|number| number.parse().ok()).collect();
    let (cycles, seed) = match numbers.as_deref() {
        Some([]) => (CYCLES, u64::from(std::process::id())),
        Some([cycles]) => (*cycles, u64::from(std::process::id())),
        Some([cycles, seed]) => (*cycles, *seed),
        _ => return usage(),
    };
    let ok = lives(&world, cycles, seed);
    first_call::table(&world);
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage() -> ExitCode {
    eprintln!("usage: gpu-cycles --simulated | --probe PATH [CYCLES [SEED]]");
    ExitCode::from(2)
}

/// All lives, and whether all that was seen was to be expected.
fn lives(world: &World, cycles: u64, seed: u64) -> bool {
    let status = world.status();
    println!(
        "{}, driver {}, {}: {cycles} containers by {WORKERS} workers, seed {seed}\n",
        status["devices"][0]["name"],
        status["driver"]["version"],
        world.engine.program()
    );
    let before = memory_used(world);
    let serve = Serve(world.command("sublet").arg("serve").spawn().expect("sublet serve runs"));
    assert!(eventually(|| world.status()["guard"]["watching"] == json!(true)), "sublet serve does not watch");
    println!("{}", judge::HEADING);
    let mut ok = true;
    let mut first = 0;
    for usage in &USES {
        let last = first + cycles * usage.percent / 100;
        let began = Instant::now();
        let lives = by_workers(world, seed, first..last, usage);
        ok &= judge::row(usage, &lives, began.elapsed());
        first = last;
    }
    let left = eventually(|| is_empty(&world.status()["leases"]));
    world.stop_waiting();
    let daemons = eventually(|| world.daemons().is_empty());
    let after = settled(world, before);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.matches(&*world.dir.path().to_string_lossy()).count();
    let directories = directories(world);
    let told = world.status()["guard"]["events"].as_array().cloned().unwrap_or_default();
    let guard: Vec<&Value> = told.iter().filter(|event| event["offence"] != "server").collect();
    println!(
        "\nAt the end: {} leases, {} MPS processes, {directories} directories of MPS \
         daemons, {mounts} mounts; GPU memory {before} MiB before, {after} MiB after; \
         the guard ended {} processes, and told of {} lost servers",
        world.status()["leases"].as_array().map_or(0, Vec::len),
        world.daemons().len(),
        guard.len(),
        told.len() - guard.len(),
    );
    for event in &guard {
        println!("guard: {event}");
    }
    drop(serve);
    ok && left && daemons && directories == 0 && mounts == 0 && after <= before && guard.is_empty()
}

/// Each worker takes the next number until all are taken.
fn by_workers(world: &World, seed: u64, numbers: std::ops::Range<u64>, usage: &Use) -> Vec<Life> {
    let next = AtomicU64::new(numbers.start);
    let (next, end) = (&next, numbers.end);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS)
            .map(|_| {
                scope.spawn(move || {
                    let numbers = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)));
                    let numbers = numbers.take_while(|number| *number < end);
                    numbers.map(|number| worker::live(world, seed, number, usage)).collect::<Vec<_>>()
                })
            })
            .collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a worker ends")).collect()
    })
}

/// Directories of dedicated MPS daemons; that of the shared one stays.
fn directories(world: &World) -> usize {
    let Ok(entries) = std::fs::read_dir(world.state_dir().join("mps")) else { return 0 };
    entries.flatten().filter(|entry| !entry.file_name().to_string_lossy().contains('-')).count()
}

/// Memory of the GPU in use, in MiB.
fn memory_used(world: &World) -> u64 {
    let nvml = world.nvml();
    nvml.device_by_index(0)
        .and_then(|device| device.memory_info())
        .map_or(u64::MAX, |memory| memory.used >> 20)
}

/// The same once it is no more than `before`, or after ten seconds.
fn settled(world: &World, before: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(10);
    while memory_used(world) > before && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(100));
    }
    memory_used(world)
}

fn is_empty(value: &Value) -> bool {
    value.as_array().is_some_and(Vec::is_empty)
}

/// `sublet serve`, ended when dropped.
struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
