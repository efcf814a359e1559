//! `sublet serve` with its guard as shipped: what it leaves alone, what it costs, and what it ends.

use std::process::Child;
use std::time::Duration;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually};

use super::{PROBE, Table, attacks, cost, number, up};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];

/// The rows. The compute mode is not changed, so a process that leaves MPS still gets the GPU.
pub(super) fn table(world: &World, table: &mut Table) {
    let serve = serve(world, table);
    let (quiet, worst) = alone(world);
    table.row("a neighbour alone: 100 small kernels", "", format!("median {quiet}, worst {worst} ms"), true);
    honest(world, table);
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
