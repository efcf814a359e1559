//! What the guard's looks cost: NVML's part on this driver, to be multiplied by GPUs, and its thread as it runs, with
//! one GPU and with as many as this host has.

use std::time::Duration;

use sublet_e2e::guarded::{guard_cpu, nvml_calls};
use sublet_e2e::{Bundle, World, eventually};

use super::{PROBE, Table};

/// NVML calls are timed so many times.
const TIMES: usize = 200;

/// The guard's thread is watched for so long, which is ten looks.
const WATCHED: Duration = Duration::from_secs(5);

/// As many as each of eight GPUs has where 100 containers share them.
const CONTAINERS: usize = 13;

/// Of these, as many whose processes come and go all the time.
const RESTLESS: usize = 3;

pub(super) fn table(world: &World, table: &mut Table, serve: u32) {
    one_client(world, table);
    for gpus in 1..=world.nvml().device_count().expect("NVML answers") {
        for restless in [0, RESTLESS] {
            let containers = up(world, gpus, CONTAINERS, restless);
            eventually(|| (0..gpus).all(|gpu| clients(world, gpu) >= CONTAINERS - restless));
            if gpus == 1 && restless == 0 {
                calls(world, table);
            }
            let spent = guard_cpu(serve, WATCHED);
            let goings =
                if restless == 0 { "" } else { ", processes of three of them come and go all the time" };
            table.row(
                &format!("the guard's thread, {gpus} GPU(s) with {CONTAINERS} containers each{goings}"),
                "",
                spent.map_or_else(
                    || "this kernel does not tell".to_owned(),
                    |spent| format!("{spent:.3} % of one core"),
                ),
                true,
            );
            containers.iter().for_each(Bundle::down);
        }
    }
}

/// Containers of one client each on each of the first `gpus`.
fn up(world: &World, gpus: u32, each: usize, restless: usize) -> Vec<Bundle<'_>> {
    let mut containers = Vec::new();
    for (gpu, number) in (0..gpus).flat_map(|gpu| (0..each).map(move |number| (gpu, number))) {
        let share =
            [("sublet.gpu", gpu.to_string()), ("sublet.sm", "7".into()), ("sublet.memory", "8GiB".into())];
        let share: Vec<(&str, &str)> = share.iter().map(|(key, value)| (*key, value.as_str())).collect();
        let script = if number < restless {
            format!("while :; do {PROBE} alloc 64 0.5; done")
        } else {
            format!("exec {PROBE} hold 300")
        };
        let container = world.bundle(&format!("busy-{gpu}-{number}"), &share, &["/bin/sh", "-c", &script]);
        container.up();
        containers.push(container);
    }
    containers
}

fn one_client(world: &World, table: &mut Table) {
    let containers = up(world, 1, 1, 0);
    eventually(|| clients(world, 0) >= 1);
    calls(world, table);
    containers.iter().for_each(Bundle::down);
}

/// What NVML takes for one look at one GPU with the clients that are there.
fn calls(world: &World, table: &mut Table) {
    let nvml = world.nvml();
    let uuid = nvml.device_by_index(0).and_then(|device| device.uuid()).expect("a GPU with a UUID");
    let (wall, cpu) = nvml_calls(&nvml, &uuid, TIMES);
    table.row(
        &format!(
            "NVML calls of one look at one GPU, {} MPS clients on it: median of {TIMES}",
            clients(world, 0)
        ),
        "",
        format!(
            "{wall:.3} ms, {cpu:.3} ms of CPU; 8 such GPUs every 500 ms: {:.3} % of one core",
            cpu * 8.0 / 500.0 * 100.0
        ),
        true,
    );
}

fn clients(world: &World, gpu: u32) -> usize {
    let nvml = world.nvml();
    let listed = nvml.device_by_index(gpu).and_then(|device| device.mps_running_compute_processes());
    listed.map_or(0, |found| found.len())
}
