//! What a thousand hanging connections cost other users: how long rootless creates take with them and without them, in
//! turns, in one table, and how much memory `sublet serve` took at most.
//!
//! `bench-hanging [ROUNDS]`, as root: 100 rounds of each by default. All programs must be built, and are found in
//! `SUBLET_BIN_DIR` and `SUBLET_SIM_DIR`, `speak` beside this program. It does not judge: machines are noisy, and the
//! limits in the table are for the reader.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use sublet_e2e::user::{Bundle, Holder, Host};

const ROUNDS: usize = 100;

/// Rounds are done in turns of this many, without and with the connections.
const TURN: usize = 25;

const ALICE: u32 = 1000;
const BOB: u32 = 1001;
/// Users with sixteen connections each. One more user sends its line slowly.
const HANGING: std::ops::Range<u32> = 20_000..20_063;
const POLICY: &str = "[[policy]]\nuser = 1000\n[[policy]]\nuser = 1001\n";
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];

fn main() -> Result<()> {
    let rounds = match std::env::args().nth(1) {
        Some(rounds) => rounds.parse().context("usage: bench-hanging [ROUNDS]")?,
        None => ROUNDS,
    };
    ensure!(rounds > 0, "usage: bench-hanging [ROUNDS], at least 1");
    ensure!(nix::unistd::geteuid().is_root(), "bench-hanging starts containers: run it as root");
    let speak = std::env::current_exe()?.with_file_name("speak");
    let mut host = Host::new("h200", POLICY, &speak);
    host.start();
    let (idle, hanging, connections) = measure(&host, rounds)?;
    let mut tries = host.hold(BOB, "hold", 20);
    let turned_away = tries.turned_away().0;
    let peak = peak(&host)?;
    drop(tries);
    host.stop();
    print(rounds, connections, &idle, &hanging);
    println!("\nsublet serve's peak memory: {peak} KiB (limit 32 MiB).");
    println!("Of 20 connections of one uid {turned_away} were turned away (limit 16 held).");
    Ok(())
}

/// Times of creates, with a share and without one.
#[derive(Default)]
struct Times {
    shared: Vec<Duration>,
    plain: Vec<Duration>,
}

/// Times without and with hanging connections, and the smallest number of these.
fn measure(host: &Host, rounds: usize) -> Result<(Times, Times, usize)> {
    // Keeps the MPS daemon running, so that only the service is timed.
    let warm = host.bundle(BOB, "warm", &[("sublet.mode", "mps")], &["/usr/bin/cuda-probe", "hold", "86400"]);
    warm.up();
    let shared = host.bundle(ALICE, "shared", SHARE, &["/bin/true"]);
    let plain = host.bundle(ALICE, "plain", &[], &["/bin/true"]);
    for bundle in [&shared, &plain] {
        create(bundle)?;
    }
    let (mut idle, mut hanging, mut connections) = (Times::default(), Times::default(), usize::MAX);
    while idle.shared.len() < rounds {
        let turn = TURN.min(rounds - idle.shared.len());
        turns(turn, &shared, &plain, &mut idle)?;
        let mut holders: Vec<Holder> = HANGING.map(|uid| host.hold(uid, "hang", 16)).collect();
        holders.push(host.hold(HANGING.end, "drip", 1));
        for holder in &mut holders {
            ensure!(holder.turned_away().0 == 0, "a connection was turned away");
        }
        turns(turn, &shared, &plain, &mut hanging)?;
        connections = connections.min(descriptors(host)?);
    }
    warm.down();
    Ok((idle, hanging, connections))
}

fn turns(count: usize, shared: &Bundle<'_>, plain: &Bundle<'_>, times: &mut Times) -> Result<()> {
    for _ in 0..count {
        times.shared.push(create(shared)?);
        times.plain.push(create(plain)?);
    }
    Ok(())
}

/// How long a create took; the container is deleted again.
fn create(bundle: &Bundle<'_>) -> Result<Duration> {
    let begun = Instant::now();
    let created = bundle.create();
    let took = begun.elapsed();
    ensure!(created.ok, "create {}: {}", bundle.id, created.stderr);
    bundle.down();
    Ok(took)
}

fn proc(host: &Host, name: &str) -> Result<std::path::PathBuf> {
    let serve = host.serve.as_ref().context("sublet serve is not running")?;
    Ok(Path::new("/proc").join(serve.id().to_string()).join(name))
}

fn descriptors(host: &Host) -> Result<usize> {
    Ok(std::fs::read_dir(proc(host, "fd")?)?.count())
}

/// KiB.
fn peak(host: &Host) -> Result<u64> {
    let status = std::fs::read_to_string(proc(host, "status")?)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// The time in milliseconds that this percentage of them does not exceed.
fn quantile(times: &[Duration], percent: usize) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[(sorted.len() - 1) * percent / 100].as_secs_f64() * 1000.0
}

fn print(rounds: usize, connections: usize, idle: &Times, hanging: &Times) {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!(
        "{rounds} rounds of each by turns, {cores} cores, at least {connections} descriptors open in serve:\n"
    );
    println!("| create as uid {ALICE} | idle, ms | beside hanging connections, ms | ratio | limit |");
    println!("|---|---|---|---|---|");
    let rows = [
        ("sm=25 memory=8GiB, median", &idle.shared, &hanging.shared, 50, "2.00"),
        ("sm=25 memory=8GiB, 95th percentile", &idle.shared, &hanging.shared, 95, ""),
        ("no annotation, median", &idle.plain, &hanging.plain, 50, ""),
        ("no annotation, 95th percentile", &idle.plain, &hanging.plain, 95, ""),
    ];
    for (what, idle, hanging, percent, limit) in rows {
        let (idle, hanging) = (quantile(idle, percent), quantile(hanging, percent));
        println!("| {what} | {idle:.1} | {hanging:.1} | {:.2} | {limit} |", hanging / idle);
    }
}
