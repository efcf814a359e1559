//! What `sublet top` costs beside the bare NVML calls that it needs: two looks a second, 8 GPUs and 100 leases. Both
//! run at the same time for the same time, on the same simulated driver, whose answers cost next to nothing: with a
//! real one the calls cost more, and the rest the same.
//!
//! `bench-top [SECONDS]`, as root: 20 by default. `bench-top calls` is the program that makes the calls alone. All
//! programs must be built, and are found in `SUBLET_BIN_DIR` and `SUBLET_SIM_DIR`.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use sublet_e2e::guarded::{GPUS, contexts, one_of_many};
use sublet_e2e::terminal::Terminal;
use sublet_e2e::{Bundle, World};

const SECONDS: u64 = 20;
const LEASES: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(500);

fn main() -> Result<()> {
    let argument = std::env::args().nth(1);
    if argument.as_deref() == Some("calls") {
        return calls(&std::env::args().nth(2).context("the path of NVML")?);
    }
    let seconds = argument.map_or(Ok(SECONDS), |text| text.parse()).context("usage: bench-top [SECONDS]")?;
    ensure!(nix::unistd::geteuid().is_root(), "bench-top starts containers: run it as root");
    let world = World::simulated("h200x8", "");
    let bundles: Vec<Bundle<'_>> = (0..LEASES).map(|number| one_of_many(&world, number)).collect();
    let root = world.driver_root.as_ref().context("simulated")?;
    std::fs::write(root.join("sim/contexts"), contexts(&world.nvml())?)?;
    let library = root.join(format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH));
    let mut bare = Command::new(std::env::current_exe()?).arg("calls").arg(library).spawn()?;
    let mut top = world.command("sublet");
    top.args(["top", "--interval", "500ms"]);
    let mut terminal = Terminal::start(&top, 80, 24);
    terminal.until("its containers", |screen| screen.contains("c1"));
    sleep(Duration::from_secs(3));
    let spent = || Some((cpu(terminal.pid())?, cpu(bare.id())?));
    let (top_before, bare_before) = spent().context("no schedstat in /proc")?;
    sleep(Duration::from_secs(seconds));
    let (top_after, bare_after) = spent().context("no schedstat in /proc")?;
    terminal.keys("q");
    terminal.ended();
    bare.kill()?;
    bare.wait()?;
    std::fs::remove_file(root.join("sim/contexts"))?;
    bundles.iter().for_each(Bundle::down);
    print(seconds, top_after.saturating_sub(top_before), bare_after.saturating_sub(bare_before));
    Ok(())
}

/// The calls of a look as `sublet top` shows it, and nothing else: of each GPU its memory, both lists of processes, the
/// load of the GPU and of its processes, power, temperature and GPM. The lists as often as `sublet top` asks for them:
/// every two and every four seconds (`src/cli/gpu_processes/mod.rs`).
fn calls(library: &str) -> Result<()> {
    const METRICS: [GpmMetricId; 8] = [
        GpmMetricId::SmUtil,
        GpmMetricId::SmOccupancy,
        GpmMetricId::AnyTensorUtil,
        GpmMetricId::DramBwUtil,
        GpmMetricId::PcieTxPerSec,
        GpmMetricId::PcieRxPerSec,
        GpmMetricId::NvlinkTotalTxPerSec,
        GpmMetricId::NvlinkTotalRxPerSec,
    ];
    let nvml = Nvml::builder().lib_path(library.as_ref()).init()?;
    let uuids: Vec<String> =
        (0..GPUS).map(|gpu| nvml.device_by_index(gpu)?.uuid()).collect::<Result<_, _>>()?;
    let mut samples: Vec<Option<GpmSample<'_>>> = uuids.iter().map(|_| None).collect();
    for look in 0_u64.. {
        let began = Instant::now();
        for (uuid, before) in uuids.iter().zip(&mut samples) {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            device.memory_info()?;
            if look % 4 == 0 {
                device.running_compute_processes()?;
            }
            if look % 8 == 0 {
                device.mps_running_compute_processes()?;
            }
            device.utilization_rates()?;
            let _ = device.process_utilization_stats(0_u64);
            device.power_usage()?;
            device.enforced_power_limit()?;
            device.temperature(TemperatureSensor::Gpu)?;
            let now = device.gpm_sample()?;
            if let Some(before) = before {
                gpm_metrics_get(&nvml, before, &now, &METRICS)?;
            }
            *before = Some(now);
        }
        sleep(INTERVAL.saturating_sub(began.elapsed()));
    }
    Ok(())
}

/// What all threads of a process have taken: the first field of each schedstat (the kernel's sched-stats.rst).
fn cpu(pid: u32) -> Option<Duration> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let of_task = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    Some(Duration::from_nanos(tasks.flatten().filter_map(of_task).sum()))
}

fn print(seconds: u64, top: Duration, bare: Duration) {
    let looks = Duration::from_secs(seconds).as_secs_f64() / INTERVAL.as_secs_f64();
    let row = |what: &str, spent: Duration| {
        let spent = spent.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "seconds")]
        let percent = spent / seconds as f64 * 100.0;
        println!("| {what} | {:.2} | {percent:.2} |", spent * 1000.0 / looks);
    };
    println!("{GPUS} GPUs, {LEASES} leases with a process each, a look every 500 ms, over {seconds} s:\n");
    println!("| what | CPU ms in a look | % of one core |");
    println!("|---|---|---|");
    row("`sublet top`, 80x24", top);
    row("the bare NVML calls", bare);
    println!("\nratio: {:.2}", top.as_secs_f64() / bare.as_secs_f64().max(1e-9));
}
