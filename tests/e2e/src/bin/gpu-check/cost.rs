//! What the guard's looks cost: NVML's part on this driver, to be multiplied by GPUs, and its thread as it runs.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use nvml_wrapper::Nvml;
use sublet_e2e::{World, eventually};

use super::{PROBE, Table, nvml};

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
        let nvml = nvml(world);
        let device = nvml.device_by_index(0).expect("a GPU");
        let uuid = device.uuid().expect("it has a UUID");
        let listed = || device.mps_running_compute_processes().map_or(0, |found| found.len());
        eventually(|| listed() >= clients);
        let (wall, cpu) = calls(&nvml, &uuid);
        table.row(
            &format!("NVML calls of one look at one GPU, {} MPS clients on it: median of {TIMES}", listed()),
            "",
            format!(
                "{wall:.3} ms, {cpu:.3} ms of CPU; 8 such GPUs every 500 ms: {:.3} % of one core",
                cpu * 8.0 / 500.0 * 100.0
            ),
            true,
        );
        let spent = guard_cpu(serve);
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

/// Median milliseconds, and of CPU, of what the guard asks about one device in each look.
fn calls(nvml: &Nvml, uuid: &str) -> (f64, f64) {
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..TIMES {
        let (start, before) = (Instant::now(), thread_cpu());
        let device = nvml.device_by_uuid(uuid).expect("the GPU is there");
        let _ = device.running_compute_processes();
        let _ = device.mps_running_compute_processes();
        wall.push(start.elapsed());
        cpu.push(thread_cpu() - before);
    }
    (median(wall), median(cpu))
}

fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock of Linux").into()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Percent of one core that the thread `guard` of process `serve` takes.
fn guard_cpu(serve: u32) -> Option<f64> {
    let before = thread_nanoseconds(serve)?;
    let start = Instant::now();
    std::thread::sleep(WATCHED);
    let spent = thread_nanoseconds(serve)?.saturating_sub(before);
    Some(Duration::from_nanos(spent).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0)
}

/// Nanoseconds on a CPU: the first field of schedstat (the kernel's sched-stats.rst).
fn thread_nanoseconds(process: u32) -> Option<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).ok()?;
    let read = |task: &std::fs::DirEntry, name: &str| std::fs::read_to_string(task.path().join(name)).ok();
    let guard = tasks.flatten().find(|task| read(task, "comm").is_some_and(|comm| comm == "guard\n"))?;
    read(&guard, "schedstat")?.split_whitespace().next()?.parse().ok()
}
