//! What `sublet status` says is used, beside what NVML itself says, while three containers compute: by time-slicing, on
//! a shared MPS server, each on one of its own.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvml_wrapper::enums::device::UsedGpuMemory;
use serde_json::Value;
use sublet_e2e::terminal::Terminal;
use sublet_e2e::{Bundle, World};

use super::{PROBE, Table};

/// Longer than the samples that count.
const SETTLED: Duration = Duration::from_secs(6);

const SHARES: [(&str, &[(&str, &str)]); 3] = [
    ("time-slice", &[("sublet.mode", "time-slice")]),
    ("shared MPS", &[("sublet.sm", "30"), ("sublet.memory", "8GiB")]),
    ("an MPS server of its own", &[("sublet.sm", "30"), ("sublet.isolation", "dedicated")]),
];

pub(super) fn table(world: &World, table: &mut Table) {
    for (mode, share) in SHARES {
        let command = if world.driver_root.is_some() { "hold" } else { "lat" };
        let containers: Vec<Bundle<'_>> = ["one", "two", "three"]
            .into_iter()
            .map(|name| {
                let bundle = world.bundle(&format!("used-{name}"), share, &[PROBE, command, "120"]);
                bundle.up();
                bundle.event("info");
                bundle
            })
            .collect();
        std::thread::sleep(SETTLED);
        let status = world.status();
        let (memory, samples) = nvml(world);
        let leases = status["leases"].as_array().expect("leases").clone();
        for lease in &leases {
            row(table, mode, lease, &memory, &samples);
        }
        let gpu = &status["devices"][0]["used"];
        table.row(
            &format!("{mode}: the GPU"),
            "NVML's samples of processes",
            format!(
                "busy {} %, {} W, {} °C; {samples:?}",
                gpu["busy_percent"], gpu["power_watts"], gpu["temperature_celsius"]
            ),
            gpu["busy_percent"].is_u64() && gpu["outside"] == serde_json::json!([]),
        );
        top(world, table, mode);
        containers.iter().for_each(Bundle::down);
    }
}

fn row(
    table: &mut Table,
    mode: &str,
    lease: &Value,
    memory: &BTreeMap<u32, Option<u64>>,
    samples: &BTreeMap<u32, u32>,
) {
    let pid = lease["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a pid");
    let (used, listed) = (&lease["used"], memory.get(&pid).copied().flatten());
    let own = samples.get(&pid);
    // A shared server's containers have no figure of their own; a server of its own has one.
    let is_right = match mode {
        "time-slice" => used["sm_percent"].is_u64() == own.is_some() && used["server_sm_percent"].is_null(),
        "shared MPS" => used["sm_percent"].is_null() && used["server_sm_percent"].is_u64() && own.is_none(),
        _ => used["sm_percent"].is_u64() && own.is_none(),
    };
    table.row(
        &format!("{mode}: {}", lease["container_id"].as_str().unwrap_or_default()),
        format!("{listed:?} bytes, SM {own:?} by NVML"),
        format!(
            "{} bytes, SM {}, of its server {}",
            used["memory_bytes"], used["sm_percent"], used["server_sm_percent"]
        ),
        used["memory_bytes"].as_u64() == listed && listed.is_some() && is_right,
    );
}

/// Each process's memory, and the latest sample of those that the driver has samples of.
fn nvml(world: &World) -> (BTreeMap<u32, Option<u64>>, BTreeMap<u32, u32>) {
    let nvml = world.nvml();
    let device = nvml.device_by_index(0).expect("a GPU");
    let lists = [device.running_compute_processes(), device.mps_running_compute_processes()];
    let mut memory: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for process in lists.into_iter().flatten().flatten() {
        let bytes = if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory { Some(bytes) } else { None };
        let known = memory.entry(process.pid).or_default();
        *known = bytes.max(*known);
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let since = u64::try_from(now).unwrap_or_default().saturating_sub(5_000_000);
    let mut samples = device.process_utilization_stats(since).unwrap_or_default();
    samples.sort_by_key(|sample| sample.timestamp);
    (memory, samples.into_iter().map(|sample| (sample.pid, sample.sm_util)).collect())
}

/// What `sublet top` shows after some looks, GPM's figures too.
fn top(world: &World, table: &mut Table, mode: &str) {
    let mut command = world.command("sublet");
    command.args(["top", "--interval", "500ms"]).env("NO_COLOR", "1");
    let mut terminal = Terminal::start(&command, 200, 24);
    std::thread::sleep(SETTLED);
    let screen = terminal.screen();
    terminal.keys("q");
    terminal.ended();
    for line in screen.lines().filter(|line| !line.trim().is_empty()) {
        eprintln!("     {}", line.trim_end());
    }
    let shown = ["used-one", "used-two", "used-three"].iter().filter(|name| screen.contains(**name)).count();
    table.row(
        &format!("{mode}: `sublet top`"),
        "three containers",
        format!("{shown} containers"),
        shown == 3,
    );
}
