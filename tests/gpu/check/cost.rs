//! What the guard's looks cost: NVML's calls on this driver, and its thread as it runs, with one GPU and with as many
//! as this host has.

use std::time::Duration;

use sublet_e2e::guarded::{CALLS, guard_cpu, nvml_calls};
use sublet_e2e::{Bundle, World, eventually};

use super::{PROBE, Table};

/// NVML is asked so many times, as the guard does it: what it touches is in no cache then.
const LOOKS: usize = 10;
const PERIOD: Duration = Duration::from_millis(500);

/// And so many times at once.
const TIMES: usize = 200;

/// The guard's thread is watched for so long, which is sixteen looks, once it knows the processes.
const WATCHED: Duration = Duration::from_secs(8);
const SETTLED: Duration = Duration::from_secs(2);

/// As many as each of eight GPUs has where 100 containers share them.
const CONTAINERS: usize = 13;

/// Of these, as many whose processes come and go all the time.
const RESTLESS: usize = 3;

pub(super) fn table(world: &World, table: &mut Table, serve: u32) {
    let most = world.nvml().device_count().expect("NVML answers");
    for gpus in 1..=most {
        for restless in [0, RESTLESS] {
            let containers = up(world, gpus, restless);
            eventually(|| (0..gpus).all(|gpu| clients(world, gpu) >= CONTAINERS - restless));
            let goings =
                if restless == 0 { "" } else { ", processes of three of them come and go all the time" };
            std::thread::sleep(SETTLED);
            let spent = guard_cpu(serve, WATCHED).map(|spent| format!("{spent:.3} % of one core"));
            table.row(
                &format!("the guard's thread, {gpus} GPU(s) with {CONTAINERS} containers each{goings}"),
                "",
                spent.unwrap_or_else(|| "this kernel does not tell".to_owned()),
                true,
            );
            if gpus == most && restless == 0 {
                calls(world, table, gpus);
            }
            containers.iter().for_each(Bundle::down);
        }
    }
}

/// Containers of one client each on each of the first `gpus`.
fn up(world: &World, gpus: u32, restless: usize) -> Vec<Bundle<'_>> {
    let mut containers = Vec::new();
    for (gpu, number) in (0..gpus).flat_map(|gpu| (0..CONTAINERS).map(move |number| (gpu, number))) {
        let gpu = gpu.to_string();
        let share = [("sublet.gpu", gpu.as_str()), ("sublet.sm", "7"), ("sublet.memory", "8GiB")];
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

/// What each call takes.
fn calls(world: &World, table: &mut Table, gpus: u32) {
    let nvml = world.nvml();
    for (when, times, pause) in [("every 500 ms", LOOKS, PERIOD), ("at once", TIMES, Duration::ZERO)] {
        for (gpu, each) in (0..gpus).zip(nvml_calls(&nvml, gpus, times, pause)) {
            let told: Vec<String> =
                CALLS.iter().zip(each).map(|(call, cpu)| format!("{call} {cpu:.3}")).collect();
            table.row(
                &format!("NVML asked {times} times, {when}, GPU {gpu}, {} MPS clients", clients(world, gpu)),
                "",
                format!("ms of CPU, median: {}", told.join(", ")),
                true,
            );
        }
    }
}

fn clients(world: &World, gpu: u32) -> usize {
    let nvml = world.nvml();
    let listed = nvml.device_by_index(gpu).and_then(|device| device.mps_running_compute_processes());
    listed.map_or(0, |found| found.len())
}
