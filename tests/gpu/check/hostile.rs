//! `sublet serve` with its guard as shipped: what it leaves alone, what it costs, and what it ends.

use std::process::Child;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, is_alive};

use super::{PROBE, Table, attacks, cost, number, up};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];

/// The rows. The compute mode is not changed, so a process that leaves MPS still gets the GPU.
pub(super) fn table(world: &World, table: &mut Table) {
    let serve = serve(world, table);
    let (quiet, worst) = alone(world);
    table.row("a neighbour alone: 100 small kernels", "", format!("median {quiet}, worst {worst} ms"), true);
    honest(world, table);
    after_fault(world, table);
    cost::table(world, table, serve.0.id());
    attacks::table(world, table);
}

/// What the guard's looks cost, alone.
pub(super) fn cost(world: &World, table: &mut Table) {
    let serve = serve(world, table);
    cost::table(world, table, serve.0.id());
}

fn serve(world: &World, table: &mut Table) -> Serve {
    let serve = Serve(world.command("sublet").arg("serve").spawn().expect("sublet serve runs"));
    let watching = || world.status()["guard"]["watching"] == json!(true);
    table.row("sublet serve watches", "yes", if eventually(watching) { "yes" } else { "no" }, watching());
    serve
}

/// Ended when dropped.
struct Serve(Child);

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Median and worst of what a container's program measures.
fn latency(bundle: &Bundle<'_>) -> (Value, Value) {
    let seen = bundle.event("lat");
    (seen["p50_ms"].clone(), seen["max_ms"].clone())
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

/// A program that does not look at its errors after a neighbour's fault keeps the server from taking new clients, until
/// the guard ends the server.
fn after_fault(world: &World, table: &mut Table) {
    let (stays, _) = up(world, "stays", SHARE, &[PROBE, "alloc", "100", "60"]);
    stays.event("alloc");
    let (next, _) = up(world, "next", SHARE, &["/bin/sh", "-c", "cuda-probe info; exec sleep 60"]);
    let (faulty, _) = up(world, "faulty", SHARE, &[PROBE, "fault"]);
    faulty.event("fault");
    let began = Instant::now();
    let client = || next.exec(&[PROBE, "info"]).json().into_iter().next().unwrap_or(Value::Null);
    let first = client()["error"].clone();
    let again = eventually(|| client()["error"].is_null());
    let took = began.elapsed().as_secs_f64();
    let lives = is_alive(Pid::from_raw(stays.pid()));
    table.row(
        "a program stays after a neighbour's fault; the next one on that server",
        "not ready, then works; the first program lives",
        format!("{first}, works after {took:.1} s; {}", if lives { "it lives" } else { "it has ended" }),
        first == json!("CUDA_ERROR_MPS_SERVER_NOT_READY") && again && lives,
    );
    for bundle in [stays, next, faulty] {
        bundle.down();
    }
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
    let nvml = world.nvml();
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
