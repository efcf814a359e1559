//! Containers under the guard of `sublet serve`: what they run, what the guard recorded, a neighbouring container that
//! must not be affected, and the cost of the guard's checks.

use std::ffi::c_uint;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlProcessInfo_t, nvmlReturn_t};
use serde_json::{Value, json};

use crate::bundle::Bundle;
use crate::user::Host;
use crate::world::World;

/// One invalid value makes the driver drop all limits (docs/evidence).
pub const SPOIL: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage";
/// Leaves MPS: neither the variable nor the default place leads to a server.
pub const LEAVE: &str = "CUDA_MPS_PIPE_DIRECTORY=/nowhere";
/// The share of each container; 25 % of an H200 are 32 SMs.
pub const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];
/// GPUs of the host on which the cost of looking at many containers is measured.
pub const GPUS: u32 = 8;

/// The container `number` of many on [`GPUS`], with a process on its GPU.
#[must_use]
pub fn one_of_many(world: &World, number: u32) -> Bundle<'_> {
    let gpu = (number % GPUS).to_string();
    let share = [("sublet.gpu", gpu.as_str()), ("sublet.sm", "7"), ("sublet.memory", "8GiB")];
    let bundle = world.bundle(&format!("c{number}"), &share, &["/usr/bin/cuda-probe", "hold", "86400"]);
    bundle.up();
    bundle.event("info");
    bundle
}

impl Host {
    /// A container with [`SHARE`] that runs the commands of `script` in a shell and then waits.
    #[must_use]
    pub fn waiting(&self, id: &str, script: &str) -> Bundle<'_> {
        let script = format!("{script}\nwait; exec sleep 600");
        let bundle = self.world.bundle(id, SHARE, &["/bin/sh", "-c", &script]);
        bundle.up();
        bundle
    }

    /// What the guard recorded. It is read from the file, because a sublet command would first correct the ledger.
    #[must_use]
    pub fn events(&self) -> Vec<Value> {
        let text = std::fs::read(self.world.state_dir().join("guard.json")).unwrap_or_default();
        let book: Value = serde_json::from_slice(&text).unwrap_or_default();
        book["events"].as_array().cloned().unwrap_or_default()
    }

    /// The first recorded event of `offence`.
    #[must_use]
    pub fn event(&self, offence: &str) -> Option<Value> {
        self.events().into_iter().find(|event| event["offence"] == offence)
    }

    /// A container that stays within its share all the time.
    #[must_use]
    pub fn neighbour(&self) -> Neighbour<'_> {
        let args = ["/usr/bin/cuda-probe", "hold", "120"];
        let bundle = self.world.bundle("neighbour", SHARE, &args);
        bundle.up();
        assert_eq!(bundle.event("info")["mps"], json!(true));
        Neighbour { host: self, bundle }
    }
}

/// The number of CUDA programs among a container's processes.
#[must_use]
pub fn probes(bundle: &Bundle<'_>) -> usize {
    let seen = bundle.exec(&["/bin/sh", "-c", "cat /proc/[0-9]*/comm"]);
    seen.stdout.lines().filter(|name| *name == "cuda-probe").count()
}

/// A neighbouring container that must not be affected.
pub struct Neighbour<'a> {
    host: &'a Host,
    bundle: Bundle<'a>,
}

impl Neighbour<'_> {
    /// Checks that its program still runs and that a new one gets what the first got; then removes the container.
    pub fn lives(self) {
        let Self { host, bundle } = self;
        assert!(!bundle.output().contains("\"end\""), "{}", bundle.output());
        let events = host.events();
        assert!(!events.iter().any(|event| event["container_id"] == "neighbour"), "{events:?}");
        let info = bundle.exec(&["/usr/bin/cuda-probe", "info"]).json().remove(0);
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{info}");
        bundle.down();
    }
}

/// `nvmlDeviceGet…RunningProcesses_v3` (nvml.h).
type GetList = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut nvmlProcessInfo_t) -> nvmlReturn_t;

/// The calls of a full check of one device.
pub const CALLS: [&str; 4] = ["handle", "used memory", "compute processes", "MPS clients"];

/// The median CPU time in milliseconds of each of [`CALLS`], for each of the first `gpus`, called `times` with `pause`
/// between.
#[must_use]
pub fn nvml_calls(nvml: &Nvml, gpus: u32, times: usize, pause: Duration) -> Vec<[f64; 4]> {
    let uuid = |gpu| nvml.device_by_index(gpu).and_then(|device| device.uuid()).expect("a GPU with a UUID");
    let uuids: Vec<String> = (0..gpus).map(uuid).collect();
    let mut spent = vec![[const { Vec::new() }; 4]; uuids.len()];
    for _ in 0..times {
        std::thread::sleep(pause);
        for (uuid, spent) in uuids.iter().zip(&mut spent) {
            let mut before = thread_cpu();
            let mut lap = |call: usize| {
                let now = thread_cpu();
                spent[call].push(now.saturating_sub(before));
                before = now;
            };
            let device = nvml.device_by_uuid(uuid.as_str()).expect("the GPU is there");
            lap(0);
            let _ = device.memory_info();
            lap(1);
            let library = device.nvml().lib();
            list(&device, library.nvmlDeviceGetComputeRunningProcesses_v3.as_ref());
            lap(2);
            list(&device, library.nvmlDeviceGetMPSComputeRunningProcesses_v3.as_ref());
            lap(3);
        }
    }
    spent.into_iter().map(|calls| calls.map(median)).collect()
}

/// Reads one of NVML's lists with a single call as sublet does; nvml-wrapper makes two calls.
#[allow(unsafe_code, reason = "NVML by its C ABI")]
fn list<E: std::fmt::Debug>(device: &Device<'_>, call: Result<&GetList, E>) {
    let call = call.expect("a driver since 510");
    // SAFETY: all zeros is a valid value of this struct of numbers.
    let mut list = [unsafe { std::mem::zeroed() }; 128];
    let mut count = 128;
    // SAFETY: an array of `count` elements; the handle is of the library that `device` borrows.
    let answer = unsafe { call(device.handle(), &raw mut count, list.as_mut_ptr()) };
    assert_eq!(answer, 0, "a list of {count}");
}

fn thread_cpu() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("a clock of Linux").into()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// What NVML reports now, read back from the simulated driver, as its file `sim/contexts` has it.
pub fn contexts(nvml: &Nvml) -> anyhow::Result<String> {
    let mut text = String::new();
    for index in 0..nvml.device_count()? {
        let device = nvml.device_by_index(index)?;
        let clients = device.mps_running_compute_processes()?;
        for process in device.running_compute_processes()? {
            let is_client = clients.iter().any(|client| client.pid == process.pid);
            let kind = if is_client { "M+C" } else { "M" };
            writeln!(text, "{} {}:{kind}:144", process.pid, device.minor_number()?)?;
        }
    }
    Ok(text)
}

/// The percentage of one core that the thread `guard` of process `serve` uses over this time; `None` if the kernel
/// does not report it.
#[must_use]
pub fn guard_cpu(serve: u32, watched: Duration) -> Option<f64> {
    let before = thread_nanoseconds(serve)?;
    let start = Instant::now();
    std::thread::sleep(watched);
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
