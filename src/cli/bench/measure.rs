//! Measures one cell: starts all its programs, waits until each of them works, lets them warm up, measures all for the same
//! seconds, and ends them.

use std::io::{BufRead as _, BufReader, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;
use nvml_wrapper::enum_wrappers::device::Clock;

use super::containers::Running;
use super::result::{Machine, Measured};
use super::samples::{self, Sample, Source};
use crate::load::monotonic_nanoseconds;
use crate::probe::{connect, device_by_uuid};
use crate::shown::{end_of, float};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::text::safe;

/// How much of the last line of a program that has failed is shown, in characters.
const SHOWN: usize = 151;

/// Longer lines are no latencies.
const LONGEST_LINE: u64 = 64 << 10;

/// More iterations of one container are not kept. An hour of the shortest that were seen is less.
const MOST_SAMPLES: usize = 20_000_000;

/// How often ends, signals and the time are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// The last output of a program that has ended is read within this time, also on busy processors.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Built-in loads write their samples ten times a second, so the last lines of the window come later.
const LAST_LINES: Duration = Duration::from_millis(300);

/// How long each part takes.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// The first latency must have come by then.
    pub start_limit: Duration,
    pub warm_up: Duration,
    pub window: Duration,
}

/// A signal has asked this program to end.
#[derive(Debug, thiserror::Error)]
#[error("interrupted; all its containers were removed")]
pub struct Interrupted;

/// The output of one program so far.
#[derive(Default)]
struct Heard {
    samples: Vec<Sample>,
    /// The end of its standard error.
    words: Vec<u8>,
    /// The last request that it did not answer, and when that was.
    refused: Option<(u64, String)>,
    /// Nobody listens any more.
    over: bool,
}

type Shared = Arc<Mutex<Heard>>;

/// A program and its output.
struct Tenant {
    running: Running,
    heard: Shared,
    /// Reads its standard error to its end.
    errors: Option<std::thread::JoinHandle<()>>,
    /// Why it does not count any more.
    lost: Option<String>,
}

impl Tenant {
    fn new(mut running: Running, number: u32, source: &Source) -> Self {
        let heard = Shared::default();
        let errors = running.child.stderr.take().map(|errors| {
            let heard = Arc::clone(&heard);
            std::thread::spawn(move || keep_end(errors, &heard))
        });
        let output = running.child.stdout.take();
        let tell = Arc::clone(&heard);
        match source {
            Source::Http(client) => {
                let client = client.clone();
                std::thread::spawn(move || {
                    let fail = |why| lock(&tell).refused = Some((monotonic_nanoseconds(), why));
                    client.ask_until(number, || lock(&tell).over, |sample| keep(&tell, sample), fail);
                });
                let heard = Arc::clone(&heard);
                std::thread::spawn(move || output.map(|output| keep_end(output, &heard)));
            }
            lines => {
                let lines = lines.clone();
                std::thread::spawn(move || output.map(|output| read_lines(output, &lines, &tell)));
            }
        }
        Self { running, heard, errors, lost: None }
    }

    fn has_begun(&self) -> bool {
        !lock(&self.heard).samples.is_empty()
    }

    /// Why it ended, or its last failure to answer since then.
    fn trouble(&self, since: u64) -> Option<String> {
        let refused = || {
            let heard = lock(&self.heard);
            let (_, why) = heard.refused.as_ref().filter(|(when, _)| *when >= since)?;
            Some(format!("not every request was answered: {}", safe(why)))
        };
        self.lost.clone().or_else(refused)
    }

    /// Notes whether it has ended.
    fn look(&mut self) {
        let ended = if self.lost.is_some() { None } else { self.running.ended() };
        let Some(how) = ended else { return };
        let deadline = Instant::now() + LAST_WORDS;
        while self.errors.as_ref().is_some_and(|errors| !errors.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.lost = Some(with_words(format!("it ended ({how})"), &self.heard));
    }
}

/// Starts and measures `n` programs.
///
/// # Errors
/// [`Interrupted`], or no program worked: the reason of the first.
pub fn measure(
    n: u32,
    start: &dyn Fn(u32) -> anyhow::Result<Running>,
    source: &Source,
    times: Times,
    meter: &Meter,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<Measured> {
    let before = meter.memory();
    let mut tenants = Tenants(Vec::new());
    for number in 0..n {
        tenants.0.push(Tenant::new(start(number)?, number, source));
    }
    tenants.wait_for_first_latencies(times.start_limit, stop)?;
    tenants.rest(times.warm_up, stop)?;
    let (from, energy) = (monotonic_nanoseconds(), meter.energy());
    tenants.rest(times.window / 2, stop)?;
    let (sm_mhz, memory) = (meter.sm_mhz(), meter.memory());
    tenants.rest(times.window / 2, stop)?;
    let (to, energy_after) = (monotonic_nanoseconds(), meter.energy());
    std::thread::sleep(LAST_LINES);
    let measurements = tenants.0.iter().map(|one| {
        let samples = lock(&one.heard).samples.clone();
        (samples, one.trouble(from))
    });
    let Some(measured) = samples::measured(&measurements.collect::<Vec<_>>(), (from, to)) else {
        bail!("no iteration ended within {} s; measure for longer", times.window.as_secs_f64())
    };
    let iterations: u64 = measured.containers.iter().map(|one| one.iterations).sum();
    let used = energy.zip(energy_after).map(|(from, to)| to.saturating_sub(from)).filter(|used| *used > 0);
    let energy_millijoules = used.map(|used| samples::rounded(float(used) / float(iterations)));
    let memory_bytes = before.zip(memory).map(|(before, now)| now.saturating_sub(before));
    Ok(Measured { memory_bytes, energy_millijoules, sm_mhz, ..measured })
}

/// Ends all of them at once when it is dropped.
struct Tenants(Vec<Tenant>);

impl Tenants {
    /// Until each works, or does not work any more.
    fn wait_for_first_latencies(&mut self, limit: Duration, stop: &dyn Fn() -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            self.0.iter_mut().filter(|one| !one.has_begun()).for_each(Tenant::look);
            if self.0.iter().all(|one| one.has_begun() || one.lost.is_some()) {
                break;
            }
            if stop() {
                return Err(Interrupted.into());
            }
            if Instant::now() >= deadline {
                for one in self.0.iter_mut().filter(|one| !one.has_begun() && one.lost.is_none()) {
                    let why = format!("no latency came from it within {} s", limit.as_secs());
                    one.lost = Some(with_words(why, &one.heard));
                }
                break;
            }
            std::thread::sleep(LOOK);
        }
        if let Some(why) = self.0.iter().all(|one| one.lost.is_some()).then(|| self.0[0].lost.clone()) {
            bail!("no container worked; the first: {}", why.unwrap_or_default());
        }
        Ok(())
    }

    /// Lets them work for this time.
    fn rest(&mut self, time: Duration, stop: &dyn Fn() -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + time;
        loop {
            self.0.iter_mut().for_each(Tenant::look);
            if stop() {
                return Err(Interrupted.into());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK));
        }
    }
}

impl Drop for Tenants {
    fn drop(&mut self) {
        self.0.iter().for_each(|one| lock(&one.heard).over = true);
        // An engine takes a while for each.
        std::thread::scope(|scope| {
            for one in self.0.drain(..) {
                scope.spawn(move || drop(one));
            }
        });
    }
}

fn read_lines(output: impl Read, source: &Source, heard: &Shared) {
    let mut output = BufReader::new(output);
    let mut line = Vec::new();
    while output.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let now = monotonic_nanoseconds();
        if let Some(sample) = source.sample(&String::from_utf8_lossy(&line), now) {
            keep(heard, sample);
        }
        line.clear();
    }
}

fn keep(heard: &Shared, sample: Sample) {
    let mut heard = lock(heard);
    if heard.samples.len() < MOST_SAMPLES {
        heard.samples.push(sample);
    }
}

/// Keeps the last bytes of a stream.
fn keep_end(mut stream: impl Read, heard: &Shared) {
    const KEPT: usize = 2048;
    let mut piece = [0; 1024];
    while let Ok(read @ 1..) = stream.read(&mut piece) {
        let words = &mut lock(heard).words;
        words.extend_from_slice(&piece[..read]);
        words.drain(..words.len().saturating_sub(KEPT));
    }
}

/// The reason, and the request that was not answered, or the last line that the program wrote to standard error.
fn with_words(why: String, heard: &Shared) -> String {
    let heard = lock(heard);
    if let Some((_, refused)) = &heard.refused {
        return format!("{why}: {}", safe(refused));
    }
    let words = String::from_utf8_lossy(&heard.words);
    // Docker's own message ends with `See 'docker run --help'.`
    let says_why = |line: &&str| !line.is_empty() && !line.contains("docker run --help");
    match words.lines().rev().map(str::trim).find(says_why) {
        // At the end of a long line stands the report of an engine's low-level runtime.
        Some(last) => format!("{why}: {}", safe(&end_of(last, SHOWN))),
        None => why,
    }
}

fn lock(heard: &Shared) -> std::sync::MutexGuard<'_, Heard> {
    // A reader that panicked has left whole samples.
    heard.lock().unwrap_or_else(PoisonError::into_inner)
}

// NVML's readings of the GPU while a cell runs: energy, clock, memory.

/// Asks about one GPU. Whatever the driver does not tell is `None`.
pub struct Meter {
    nvml: Option<nvml_wrapper::Nvml>,
    uuid: String,
}

impl Meter {
    /// For the GPU with this UUID.
    pub fn new(uuid: &str, config: &Config) -> Self {
        Self { nvml: connect(config).ok().map(|(nvml, _)| nvml), uuid: uuid.to_owned() }
    }

    fn device(&self) -> Option<nvml_wrapper::Device<'_>> {
        device_by_uuid(self.nvml.as_ref()?, &self.uuid).ok()
    }

    /// Since the driver was loaded, in millijoules.
    pub fn energy(&self) -> Option<u64> {
        self.device()?.total_energy_consumption().ok()
    }

    /// Memory in use on the whole GPU, in bytes.
    pub fn memory(&self) -> Option<u64> {
        self.device()?.memory_info().ok().map(|memory| memory.used)
    }

    /// The clock of the SMs, in MHz.
    pub fn sm_mhz(&self) -> Option<u32> {
        self.device()?.clock_info(Clock::SM).ok()
    }

    /// The machine, as far as this host tells.
    pub fn machine(&self, gpu: &Device, inventory: &Inventory, engine: Option<String>) -> Machine {
        let device = self.device();
        Machine {
            gpu: gpu.name.clone(),
            uuid: Some(gpu.uuid.clone()),
            memory_bytes: Some(gpu.memory_bytes),
            sms: gpu.sm_count,
            driver: Some(inventory.driver.version.clone()),
            max_sm_mhz: device.as_ref().and_then(|device| device.max_clock_info(Clock::SM).ok()),
            power_limit_milliwatts: device.as_ref().and_then(|device| device.enforced_power_limit().ok()),
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")
                .ok()
                .map(|text| text.trim().to_owned()),
            processors: std::thread::available_parallelism().ok().map(usize::from),
            sublet: Some(env!("CARGO_PKG_VERSION").to_owned()),
            engine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::containers::{Engine, Workload};
    use std::collections::BTreeMap;

    fn measured(scripts: [&str; 2], stop: &dyn Fn() -> bool) -> anyhow::Result<Measured> {
        let start = |number: u32| {
            let command = ["sh", "-c", scripts[number as usize]].map(str::to_owned).to_vec();
            let workload = Workload {
                engine: Engine::Program("docker"),
                image: String::new(),
                command,
                options: Vec::new(),
                ports: Vec::new(),
                dir: std::env::temp_dir(),
            };
            workload.by_hand(number, &BTreeMap::new())
        };
        let pattern = regex_lite::Regex::new(samples::FIRST_NUMBER).unwrap();
        let source = Source::Pattern(pattern, 1e6);
        let times = Times {
            start_limit: Duration::from_secs(2),
            warm_up: Duration::from_millis(100),
            window: Duration::from_millis(400),
        };
        measure(2, &start, &source, times, &Meter::new("GPU-none", &Config::default()), stop)
    }

    const WORKS: &str = "while sleep 0.02; do echo 20 ms; done";

    #[test]
    fn a_tenant_that_ends_is_reported_and_the_rest_goes_on() {
        let found = measured([WORKS, "echo 1; echo out of memory >&2; exit 3"], &|| false).unwrap();
        assert!(found.containers[0].iterations > 2 && found.containers[0].error.is_none(), "{found:?}");
        assert_eq!(found.containers[1].iterations, 0);
        let why = found.containers[1].error.as_deref().unwrap();
        assert!(why.contains("exit status: 3") && why.contains("out of memory"), "{why}");
        assert!((found.mean_ms - 20.0).abs() < 1e-9);
    }

    /// An engine's client that gets little of a processor says why after it was seen to have ended.
    #[test]
    fn last_words_that_come_late_are_reported() {
        let late = "(sleep 0.3; echo no such program >&2) & exit 127";
        let why = measured([late, late], &|| false).unwrap_err().to_string();
        assert!(why.contains("exit status: 127") && why.contains("no such program"), "{why}");
    }

    #[test]
    fn without_a_latency_there_is_no_cell() {
        let why = measured(["echo hello >&2; sleep 60", "exit 1"], &|| false).unwrap_err().to_string();
        assert!(why.contains("no latency came from it within 2 s: hello"), "{why}");
    }

    #[test]
    fn the_end_of_a_long_line_is_shown() {
        let long = format!("docker: {} no such file: \u{e9}", "x".repeat(500));
        assert!(
            end_of(&long, SHOWN).ends_with("x no such file: \u{e9}")
                && end_of(&long, SHOWN).chars().count() == 151
        );
        assert_eq!(end_of("short", SHOWN), "short");
    }

    #[test]
    fn a_signal_ends_everything() {
        let error = measured([WORKS, WORKS], &|| true).unwrap_err();
        assert!(error.is::<Interrupted>());
    }
}
