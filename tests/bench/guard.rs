//! What the guard's checks cost with 8 GPUs and 100 leases, as one table: the guard's own work (/proc, the ledger,
//! judging) as CPU time of its thread, with a driver whose answers cost next to nothing. What a real driver costs is
//! measured by `gpu-check` and has to be added.
//!
//! `bench-guard [SECONDS]`, as root: 30 by default. All programs must be built, and are found in `SUBLET_BIN_DIR` and
//! `SUBLET_SIM_DIR`. It does not judge: the limit in the table is for the reader.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use sublet_e2e::guarded::{GPUS, contexts, guard_cpu, nvml_calls, one_of_many};
use sublet_e2e::{Bundle, World, eventually};

const SECONDS: u64 = 30;
const LEASES: u32 = 100;

/// Checks per second.
const LOOKS: f64 = 2.0;

fn main() -> Result<()> {
    let seconds = match std::env::args().nth(1) {
        Some(seconds) => seconds.parse().context("usage: bench-guard [SECONDS]")?,
        None => SECONDS,
    };
    ensure!(nix::unistd::geteuid().is_root(), "bench-guard starts containers: run it as root");
    let world = World::simulated("h200x8", "");
    let bundles: Vec<Bundle<'_>> = (0..LEASES).map(|number| one_of_many(&world, number)).collect();
    let nvml = world.nvml();
    let root = world.driver_root.as_ref().context("simulated")?;
    std::fs::write(root.join("sim/contexts"), contexts(&nvml)?)?;
    let mut serve = world.command("sublet").arg("serve").spawn()?;
    let watching = || world.status()["guard"]["watching"] == serde_json::json!(true);
    ensure!(eventually(watching), "the guard does not watch: {}", world.status()["guard"]);
    let percent = guard_cpu(serve.id(), Duration::from_secs(seconds)).context("no schedstat in /proc")?;
    let calls = nvml_calls(&nvml, 1, 200, Duration::ZERO);
    let [handle, used, compute, clients] = calls.first().copied().context("a GPU")?;
    // The lists every two seconds, the clients every second time (src/cli/gpu_processes/mod.rs).
    let simulated = handle + used + (compute + clients / 2.0) / 4.0;
    serve.kill()?;
    serve.wait()?;
    std::fs::remove_file(root.join("sim/contexts"))?;
    bundles.iter().for_each(Bundle::down);
    print(seconds, percent, simulated * f64::from(GPUS));
    Ok(())
}

/// `simulated`: the milliseconds that the simulated driver's own answers take in a check.
fn print(seconds: u64, percent: f64, simulated: f64) {
    let look = percent / 100.0 * 1000.0 / LOOKS;
    println!("{GPUS} GPUs, {LEASES} leases with a process each, a look every 500 ms, over {seconds} s:\n");
    println!("| what | CPU ms in a look | % of one core | limit |");
    println!("|---|---|---|---|");
    println!("| the guard's thread | {look:.2} | {percent:.3} | |");
    println!("| of it the simulated driver's answers | {simulated:.2} | {:.3} | |", simulated * LOOKS / 10.0);
    let own = look - simulated;
    println!(
        "| the rest: /proc, ledger, judging | {own:.2} | {:.3} | 0.5 with a real driver's answers |",
        own * LOOKS / 10.0
    );
}
