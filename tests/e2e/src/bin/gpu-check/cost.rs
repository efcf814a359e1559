//! What the guard's looks cost: NVML's part on this driver, to be multiplied by GPUs, and its thread as it runs.

use std::time::Duration;

use sublet_e2e::guarded::{guard_cpu, nvml_calls};
use sublet_e2e::{World, eventually};

use super::{PROBE, Table};

/// NVML calls are timed so many times.
const TIMES: usize = 200;

/// The guard's thread is watched for so long, which is ten looks.
const WATCHED: Duration = Duration::from_secs(5);

/// One client, and as many as each of eight GPUs has where 100 containers share them.
pub(super) fn table(world: &World, table: &mut Table, serve: u32) {
    for clients in [1, 13] {
        let script = format!("n=0; while [ $n -lt {clients} ]; do {PROBE} hold 120 & n=$((n+1)); done; wait");
        let busy = world.bundle("busy", &[("sublet.sm", "25")], &["/bin/sh", "-c", &script]);
        busy.up();
        let nvml = world.nvml();
        let device = nvml.device_by_index(0).expect("a GPU");
        let uuid = device.uuid().expect("it has a UUID");
        let listed = || device.mps_running_compute_processes().map_or(0, |found| found.len());
        eventually(|| listed() >= clients);
        let (wall, cpu) = nvml_calls(&nvml, &uuid, TIMES);
        table.row(
            &format!("NVML calls of one look at one GPU, {} MPS clients on it: median of {TIMES}", listed()),
            "",
            format!(
                "{wall:.3} ms, {cpu:.3} ms of CPU; 8 such GPUs every 500 ms: {:.3} % of one core",
                cpu * 8.0 / 500.0 * 100.0
            ),
            true,
        );
        let spent = guard_cpu(serve, WATCHED);
        table.row(
            &format!("the guard's thread, one GPU, {} MPS clients, a look every 500 ms", listed()),
            "",
            spent.map_or_else(
                || "this kernel does not tell".to_owned(),
                |spent| format!("{spent:.3} % of one core"),
            ),
            true,
        );
        busy.down();
    }
}
