//! A server that a team shares, at its full size: 16 GPUs, 200 leases of 20 users, and 100 starts in a minute, with `sublet serve`,
//! which watches health and keeps the record for reports. What a start costs beside an empty host; what the service takes of a
//! processor, thread by thread, while nothing starts and while all that starts; its memory; and a report over a year.
//!
//! `bench-team [SECONDS]`, as root (tests/bench/run team): 60 by default. The programs are those in `SUBLET_BIN_DIR`: an older
//! version's give the figures to compare with. Leases are copies of one real lease, each with a process of its own that lives and
//! has a context on its GPU. The simulated driver's answers cost what they cost, so the same NVML calls run at the same rate in
//! a process of their own (`bench-team calls LIBRARY`). It does not judge: the limits in the tables are for the reader.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::structs::device::FieldId;
use serde_json::{Value, json};
use sublet_e2e::copies::Copies;
use sublet_e2e::{Bundle, World, eventually};

const SECONDS: u64 = 60;
const GPUS: usize = 16;
const LEASES: usize = 200;
const USERS: usize = 20;
const STARTS: u32 = 100;
/// Creates that are timed on each host, in turns.
const ROUNDS: usize = 40;
const SHARE: &[(&str, &str)] = &[("sublet.mode", "time-slice")];
/// Days of the record and rows of each: as many as a day can have of root's containers.
const DAYS: u64 = 365;
const ROWS: usize = 500;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [calls, library] = &words[..]
        && calls == "calls"
    {
        return nvml_calls(library);
    }
    let seconds =
        words.first().map_or(Ok(SECONDS), |text| text.parse()).context("usage: bench-team [SECONDS]")?;
    ensure!(nix::unistd::geteuid().is_root(), "bench-team starts containers: run it as root");
    // Both are there before the first process of a lease: the simulated driver looks at every process of the machine.
    let (mut full, empty) = (Host::new()?, Host::new()?);
    full.fill()?;
    let version = full.world.sublet(&["--version"]).stdout;
    println!(
        "{}{GPUS} GPUs, {LEASES} leases of {USERS} users, simulated driver.",
        String::from_utf8_lossy(&version)
    );
    starts(&full, &empty)?;
    println!("\n| the service, % of one core over {seconds} s | all | its threads |\n|---|---|---|");
    let time = Duration::from_secs(seconds);
    let idle = || {
        sleep(time);
        Ok(())
    };
    empty.print_load("no lease, nothing starts", idle)?;
    let bare = full.print_bare_calls(time)?;
    full.print_load("200 leases, nothing starts", idle)?;
    println!("| the NVML calls of that alone, in a process of their own | {bare:.2} | |");
    let mut slowest = Duration::ZERO;
    full.print_load("200 leases, 100 starts in a minute", || {
        slowest = full.start_many()?;
        Ok(())
    })?;
    println!("\nThe slowest of the {STARTS} starts took {:.1} ms.", slowest.as_secs_f64() * 1000.0);
    println!("\n| the service's memory, KiB | resident | most | its own (anonymous) |\n|---|---|---|---|");
    for (what, host) in [("no lease", &empty), ("200 leases", &full)] {
        let cells = ["VmRSS", "VmHWM", "RssAnon"].map(|key| host.memory(key));
        println!(
            "| {what} | {} |",
            cells.map(|cell| cell.map_or_else(|| "-".into(), |kib| kib.to_string())).join(" | ")
        );
    }
    full.report_over_a_year()
}

/// A host with the service.
struct Host {
    world: World,
    serve: Child,
    copies: Copies,
    _memory: tempfile::TempDir,
}

impl Host {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let topology = dir.path().join("topology.toml");
        std::fs::write(&topology, topology_of(GPUS))?;
        let world =
            World::simulated(topology.to_str().context("UTF-8")?, "[limits]\ntime_slice_max = 2000\n");
        // As /run is one.
        let memory = tempfile::Builder::new().prefix("sublet").tempdir_in("/dev/shm")?;
        let text = std::fs::read_to_string(&world.config)?;
        let state = |path: PathBuf| format!("state_dir = \"{}\"", path.display());
        let text = text.replacen(&state(world.state_dir()), &state(memory.path().join("run")), 1);
        std::fs::write(&world.config, &text)?;
        let serve = world.command("sublet").arg("serve").stderr(Stdio::null()).spawn()?;
        let socket = world.state_dir().join("sublet.sock");
        ensure!(
            eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()),
            "serve does not answer"
        );
        let first = world.bundle("first", SHARE, &["/bin/sleep", "86400"]);
        first.up();
        // Binds it to its first process.
        ensure!(world.sublet(&["gc"]).status.success(), "gc");
        let copies = Copies::of(&world);
        first.down();
        let named = format!("low_level = [\"{}\"]", world.engine.program());
        std::fs::write(&world.config, text.replace(&named, "low_level = [\"/bin/true\"]"))?;
        Ok(Self { world, serve, copies, _memory: memory })
    }

    /// Fills the ledger, and the GPUs with the contexts of the leases' processes.
    fn fill(&mut self) -> Result<()> {
        let mut contexts = String::new();
        self.copies.fill(&self.world, LEASES, |number, lease| {
            lease["container"]["uid"] = json!(20_000 + number % USERS);
            lease["devices"] = json!([uuid(number % GPUS)]);
            let _ = writeln!(contexts, "{} {}:C:512", lease["owner"]["pid"], number % GPUS);
        })?;
        let root = self.world.driver_root.as_ref().context("simulated")?;
        Ok(std::fs::write(root.join("sim/contexts"), contexts)?)
    }

    fn gc(&self) -> Result<()> {
        let gc = self.world.sublet(&["gc"]);
        ensure!(gc.status.success(), "gc: {gc:?}");
        Ok(())
    }

    /// One create, whose lease the next `gc` frees, because `/bin/true` creates no container.
    fn create(&self, bundle: &Bundle<'_>) -> Result<Took> {
        bundle.write();
        let mut command = self.world.runtime();
        command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id).stdout(Stdio::null());
        let (used, began) = (processor_time()?, Instant::now());
        let output = command.stderr(Stdio::piped()).output()?;
        let took = Took { time: began.elapsed(), processor: processor_time()?.saturating_sub(used) };
        ensure!(output.status.success(), "create: {}", String::from_utf8_lossy(&output.stderr));
        Ok(took)
    }

    /// [`STARTS`] in a minute, each for one of the users, where this version knows owners. Returns what the slowest took.
    fn start_many(&self) -> Result<Duration> {
        let knows_owners = self.world.sublet(&["report"]).status.success();
        let (began, pause) = (Instant::now(), Duration::from_secs(60) / STARTS);
        let mut slowest = Duration::ZERO;
        for number in 0..STARTS {
            let owner = format!("user{}", number as usize % USERS);
            let claim = knows_owners.then_some(("sublet.owner", owner.as_str()));
            let share: Vec<(&str, &str)> = SHARE.iter().copied().chain(claim).collect();
            let bundle = self.world.bundle(&format!("s{number}"), &share, &["/bin/true"]);
            slowest = slowest.max(self.create(&bundle)?.time);
            sleep((pause * (number + 1)).saturating_sub(began.elapsed()));
        }
        self.gc()?;
        Ok(slowest)
    }

    /// What the service takes of a processor while `meanwhile` runs.
    fn print_load(&self, what: &str, meanwhile: impl FnOnce() -> Result<()>) -> Result<()> {
        let (before, began) = (threads(self.serve.id())?, Instant::now());
        meanwhile()?;
        let (after, seconds) = (threads(self.serve.id())?, began.elapsed().as_secs_f64());
        let percent = |name: &String, spent: &Duration| {
            spent.saturating_sub(before.get(name).copied().unwrap_or_default()).as_secs_f64() / seconds
                * 100.0
        };
        let mut all: Vec<(String, f64)> =
            after.iter().map(|(name, spent)| (name.clone(), percent(name, spent))).collect();
        all.sort_by(|one, other| other.1.total_cmp(&one.1));
        let sum: f64 = all.iter().map(|(_, percent)| percent).sum();
        let parts: Vec<String> = all.iter().map(|(name, percent)| format!("{name} {percent:.2}")).collect();
        println!("| {what} | {sum:.2} | {} |", parts.join(", "));
        Ok(())
    }

    /// What the NVML calls of the service alone take of a processor, in percent.
    fn print_bare_calls(&self, time: Duration) -> Result<f64> {
        let root = self.world.driver_root.as_ref().context("simulated")?;
        let library = root.join(format!("usr/lib/{}-linux-gnu/libnvidia-ml.so.1", std::env::consts::ARCH));
        let mut bare = Command::new(std::env::current_exe()?).arg("calls").arg(library).spawn()?;
        sleep(Duration::from_secs(3));
        let spent = |child: &Child| Ok::<_, anyhow::Error>(threads(child.id())?.values().sum::<Duration>());
        let (before, began) = (spent(&bare)?, Instant::now());
        sleep(time);
        let percent =
            spent(&bare)?.saturating_sub(before).as_secs_f64() / began.elapsed().as_secs_f64() * 100.0;
        bare.kill()?;
        bare.wait()?;
        Ok(percent)
    }

    /// In KiB, as `/proc/PID/status` has it.
    fn memory(&self, key: &str) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.serve.id())).ok()?;
        let line = status.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// A record with a year of full days.
    fn report_over_a_year(&self) -> Result<()> {
        let usage = self.world.state_dir().join("lasting/usage");
        let Ok(now) = std::fs::read(usage.join("now.json")) else {
            println!("\nThis version keeps no record of use.");
            return Ok(());
        };
        let now: Value = serde_json::from_slice(&now)?;
        let day = now["days"].as_object().and_then(|days| days.values().next_back()).context("a day")?;
        let row = |number: usize| {
            let mut row = day["rows"][0].clone();
            row[0]["container"] = json!(format!("container-{number:06}"));
            row[1]["leases"] = json!(6);
            row
        };
        let mut full = day.clone();
        full["rows"] = (0..ROWS).map(row).collect();
        let text = full.to_string();
        for day in 1..=DAYS {
            let date = Command::new("date").arg(format!("--date={day} days ago")).arg("+%F").output()?;
            std::fs::write(
                usage.join(format!("{}.json", String::from_utf8_lossy(&date.stdout).trim())),
                &text,
            )?;
        }
        let (used, began) = (processor_time()?, Instant::now());
        let output =
            self.world.sublet(&["report", "--since", "365d", "--by", "container", "--format", "json"]);
        let (time, processor) = (began.elapsed(), processor_time()?.saturating_sub(used));
        let report: Value = serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))?;
        println!(
            "\nA report over {DAYS} days of {ROWS} rows, {} leases, {} MiB: {:.2} s, of a processor {:.2} s.",
            report["total"]["leases"],
            (text.len() * usize::try_from(DAYS)?) >> 20,
            time.as_secs_f64(),
            processor.as_secs_f64()
        );
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.serve.kill();
        let _ = self.serve.wait();
    }
}

/// What one create took: by the clock, and of the processors. On a busy machine only the second says much.
struct Took {
    time: Duration,
    processor: Duration,
}

/// A start on the full host beside one on the empty host, in turns: a processor's clock changes while a bench runs.
fn starts(full: &Host, empty: &Host) -> Result<()> {
    let hosts = [empty, full];
    let mut times: [Vec<Took>; 2] = Default::default();
    for round in 0..ROUNDS + 2 {
        for (host, times) in hosts.iter().zip(&mut times) {
            let took = host.create(&host.world.bundle("timed", SHARE, &["/bin/true"]))?;
            host.gc()?;
            // The first ones read what later ones find in caches.
            times.extend((round >= 2).then_some(took));
        }
    }
    println!("\n| one start, median of {ROUNDS} | ms | of the processors, ms | ratio |\n|---|---|---|---|");
    let middle = |times: &[Took], which: fn(&Took) -> Duration| {
        let mut all: Vec<Duration> = times.iter().map(which).collect();
        all.sort_unstable();
        all[all.len() / 2].as_secs_f64() * 1000.0
    };
    let first = middle(&times[0], |took| took.processor);
    for (what, times) in ["no lease", "200 leases"].iter().zip(&times) {
        let processor = middle(times, |took| took.processor);
        println!(
            "| {what} | {:.2} | {processor:.2} | {:.2} |",
            middle(times, |took| took.time),
            processor / first
        );
    }
    Ok(())
}

/// The NVML calls that the service makes of GPUs with leases, as often, and nothing else: every half a second the guard's (handle
/// and memory; both lists every two and every four seconds) and a look at the events, every five seconds with NVML opened anew
/// what a GPU is, every ten its state, every half a minute what processes computed.
fn nvml_calls(library: &str) -> Result<()> {
    const ROUND: Duration = Duration::from_millis(500);
    // Recovery action, remapped rows, errors of NVLinks: as many as src/cli/serve/health/gpu_state.rs asks for (nvml-wrapper
    // knows link 0 alone).
    const OF_GPU: [u32; 6] = [230, 145, 144, 38, 52, 59];
    const OF_LINK: [u32; 3] = [163, 161, 162];
    let nvml = Nvml::builder().lib_path(library.as_ref()).init()?;
    let gpus = nvml.device_count()?;
    let uuids: Vec<String> =
        (0..gpus).map(|gpu| nvml.device_by_index(gpu)?.uuid()).collect::<Result<_, _>>()?;
    let types = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let mut sets = Vec::new();
    for gpu in 0..gpus {
        sets.push(nvml.device_by_index(gpu)?.register_events(types, nvml.create_event_set()?)?);
    }
    let fields: Vec<FieldId> = OF_GPU.into_iter().chain(OF_LINK.repeat(18)).map(FieldId).collect();
    for look in 0_u64.. {
        let began = Instant::now();
        for set in &sets {
            let _ = set.wait(0);
        }
        if look % 10 == 0 {
            describe(library)?;
        }
        for uuid in &uuids {
            let device = nvml.device_by_uuid(uuid.as_str())?;
            device.memory_info()?;
            if look % 4 == 0 {
                device.running_compute_processes()?;
            }
            if look % 8 == 0 {
                device.mps_running_compute_processes()?;
            }
            if look % 20 == 0 {
                let _ = device.field_values_for(&fields);
                let _ = device.current_throttle_reasons();
            }
            if look % 60 == 0 {
                let _ = device.process_utilization_stats(0_u64);
                device.utilization_rates()?;
                device.power_usage()?;
                device.temperature(TemperatureSensor::Gpu)?;
            }
        }
        sleep(ROUND.saturating_sub(began.elapsed()));
    }
    Ok(())
}

/// What src/cli/probe/nvml.rs asks of each GPU, but for its processes, to find those that do not answer.
fn describe(library: &str) -> Result<()> {
    let nvml = Nvml::builder().lib_path(library.as_ref()).init()?;
    for gpu in 0..nvml.device_count()? {
        let device = nvml.device_by_index(gpu)?;
        device.pci_info()?;
        device.pci_info()?;
        device.minor_number()?;
        device.uuid()?;
        let _ = device.mig_mode();
        device.cuda_compute_capability()?;
        device.num_cores()?;
        device.memory_info()?;
        device.compute_mode()?;
        let _ = device.virtualization_mode();
        device.name()?;
        let _ = device.is_display_active();
    }
    Ok(())
}

/// What each kind of threads of a process has taken of processors: the first field of schedstat (the kernel's sched-stats.rst).
fn threads(pid: u32) -> Result<BTreeMap<String, Duration>> {
    let mut found = BTreeMap::<String, Duration>::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).ok();
        let spent = || read("schedstat")?.split_whitespace().next()?.parse().ok();
        if let (Some(name), Some(spent)) = (read("comm"), spent()) {
            *found.entry(name.trim().to_owned()).or_default() += Duration::from_nanos(spent);
        }
    }
    Ok(found)
}

/// Of all processes that this one has waited for.
fn processor_time() -> Result<Duration> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = [used.user_time(), used.system_time()].map(|time| time.num_microseconds());
    Ok(Duration::from_micros(u64::try_from(micros[0] + micros[1])?))
}

fn uuid(gpu: usize) -> String {
    format!("GPU-5b1e7000-0000-4000-8000-00000000d0{gpu:02x}")
}

fn topology_of(gpus: usize) -> String {
    let mut text = "driver = \"580.159.04\"\ncuda = \"13.0\"\n".to_owned();
    for gpu in 0..gpus {
        let _ = write!(
            text,
            "\n[[gpu]]\nindex = {gpu}\nminor = {gpu}\nuuid = \"{}\"\nname = \"NVIDIA H200\"\nbus_id = \"0000:{:02x}:00.0\"\n\
             memory_mib = 143771\ncuda_total_mib = 143155\nsm_count = 132\ncompute_capability = \"9.0\"\narch = \"hopper\"\n\
             mig_mode = \"disabled\"\nmig_table = \"h200\"\n",
            uuid(gpu),
            16 + 8 * gpu
        );
    }
    text
}
