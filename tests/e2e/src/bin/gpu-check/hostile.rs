//! Containers that pass their shares, the guard that ends what does, and a neighbour on the same MPS server that
//! measures its own latency all the while.

use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually};

use super::{PROBE, Table, number, nvml, up};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];

/// The rows. The compute mode is left alone, so whoever leaves MPS gets onto the GPU.
pub(super) fn table(world: &World, table: &mut Table) {
    let mut serve = world.command("sublet").arg("serve").spawn().expect("sublet serve runs");
    let watching = || world.status()["guard"]["watching"] == json!(true);
    table.row("sublet serve watches", "yes", if eventually(watching) { "yes" } else { "no" }, watching());
    let (quiet, worst) = alone(world);
    table.row("a neighbour alone: 100 small kernels", "", format!("median {quiet}, worst {worst} ms"), true);
    honest(world, table);
    attack(
        world,
        table,
        "memory",
        "a memory limit spoilt, 52000 MiB taken of 4096",
        &["/bin/env", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage", PROBE, "alloc", "52000", "60"],
        "alloc",
    );
    attack(
        world,
        table,
        "memory",
        "two processes of 2500 MiB each",
        &["/bin/sh", "-c", "cuda-probe alloc 2500 60 & sleep 1; exec cuda-probe alloc 2500 60"],
        "alloc",
    );
    attack(
        world,
        table,
        "bypass",
        "MPS left",
        &["/bin/env", "CUDA_MPS_PIPE_DIRECTORY=/nowhere", PROBE, "hold", "60"],
        "info",
    );
    clamped(world, table);
    end(&mut serve);
}

fn end(serve: &mut Child) {
    let _ = serve.kill();
    let _ = serve.wait();
}

/// Median and worst of what a container's program measures.
fn latency(bundle: &Bundle<'_>) -> (Value, Value) {
    let seen = bundle.event("lat");
    let median = if seen["p50_ms"].is_null() { &seen["mean_ms"] } else { &seen["p50_ms"] };
    (median.clone(), seen["max_ms"].clone())
}

fn alone(world: &World) -> (Value, Value) {
    let (bundle, _) = up(world, "quiet", SHARE, &[PROBE, "lat", "3"]);
    let seen = latency(&bundle);
    bundle.down();
    seen
}

fn events(world: &World) -> Vec<Value> {
    world.status()["guard"]["events"].as_array().cloned().unwrap_or_default()
}

/// Fills its share to the last MiB that the driver gives, and what NVML counts then: the guard's tolerance.
fn honest(world: &World, table: &mut Table) {
    let before = events(world).len();
    let script = "m=$1; while [ $m -gt 0 ]; do cuda-probe alloc $m 4 && break; m=$((m-8)); done; sleep 60";
    let (probe, info) = up(world, "asks", SHARE, &[PROBE, "hold", "60"]);
    let free = number(&info, "free_mib").to_string();
    probe.down();
    let full = world.bundle("full", SHARE, &["/bin/sh", "-c", script, "sh", &free]);
    full.up();
    let filled = || full.output().contains("\"mib\"") && full.output().contains("\"CUDA_SUCCESS\"");
    let _ = eventually(filled);
    let nvml = nvml(world);
    let device = nvml.device_by_index(0).expect("a GPU");
    let mut most = 0;
    for _ in 0..30 {
        let clients = device.mps_running_compute_processes().unwrap_or_default();
        for client in clients {
            if let nvml_wrapper::enums::device::UsedGpuMemory::Used(bytes) = client.used_gpu_memory {
                most = most.max(bytes >> 20);
            }
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let touched = events(world).len() - before;
    table.row(
        "an honest program that fills its 4096 MiB",
        "not touched",
        format!("{touched} actions; NVML counts {most} MiB with its context"),
        touched == 0,
    );
    full.down();
}

/// One attack beside a neighbour: how long it lasts, and what the neighbour notices.
fn attack(world: &World, table: &mut Table, offence: &str, what: &str, args: &[&str], from: &str) {
    let before = events(world).len();
    let (neighbour, _) = up(world, "neighbour", SHARE, &[PROBE, "lat", "5"]);
    let hostile = world.bundle("hostile", SHARE, args);
    hostile.up();
    let began = || hostile.output().matches(&format!("\"event\":\"{from}\"")).count();
    let needed = args.iter().filter(|word| word.contains("& sleep")).count() + 1;
    let _ = eventually(|| began() >= needed);
    let start = Instant::now();
    let ended = || events(world)[before..].iter().any(|event| event["offence"] == offence);
    let _ = eventually(ended);
    let taken = start.elapsed().as_secs_f64();
    let (median, worst) = latency(&neighbour);
    let unharmed = !neighbour.output().contains("CUDA_ERROR");
    table.row(
        &format!("{what}: until it is ended, and the neighbour on its server"),
        "within 2 s, no error",
        format!(
            "{taken:.1} s; {}, median {median} ms, worst {worst} ms",
            if unharmed { "no error" } else { "an error" }
        ),
        ended() && unharmed,
    );
    hostile.down();
    neighbour.down();
}

/// The server's ceiling holds whatever a client asks for.
fn clamped(world: &World, table: &mut Table) {
    let (bundle, info) = up(world, "greedy", SHARE, &[PROBE, "hold", "60"]);
    let asked = bundle.exec(&["/bin/env", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100", PROBE, "info"]).json();
    let seen = asked.first().map_or(0, |seen| number(seen, "sm"));
    table.row(
        "a thread percentage of 100 asked for, where the server's largest share is 25",
        format!("{} SMs", number(&info, "sm")),
        format!("{seen} SMs"),
        seen == number(&info, "sm"),
    );
    bundle.down();
}
