//! What sublet adds to a container's start: medians of programs run in turns, in one table.
//!
//! `bench [ROUNDS]`, as root; `make bench` builds what it times. The driver is the simulated one, and on the timed
//! path only the MPS daemon's socket is used. It does not judge: machines are noisy, and the limits in the table are
//! for the reader.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually};
use tempfile::TempDir;

const ROUNDS: usize = 200;
const WARM_UP: usize = 2;

/// As long as Docker's ids are.
const ID: &str = "5c2a0f7d9e31b84c6a1d0e92f7b35846c0d9a1e27f6b8354d1c0e9f2a7b36845";

/// A spec as Docker 26 writes it for a CUDA image: its mounts, capabilities, masked paths and environment, and a
/// seccomp list as long as its default one.
const DOCKER_CONFIG: &str = include_str!("docker-config.json");

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];

fn main() -> Result<()> {
    let rounds = match std::env::args().nth(1) {
        Some(rounds) => rounds.parse().context("usage: bench [ROUNDS]")?,
        None => ROUNDS,
    };
    ensure!(rounds > 0, "usage: bench [ROUNDS], at least 1");
    ensure!(nix::unistd::geteuid().is_root(), "bench starts containers: run it as root");
    let bench = Bench::new()?;
    let holder = bench.world.bundle("holder", SHARE, &["/bin/sleep", "86400"]);
    holder.up();
    let calls = bench.calls(rounds)?;
    let cycles = bench.cycles(rounds)?;
    holder.down();
    print(rounds, &calls, &cycles)
}

/// What was timed, and the row of its table to compare it with.
struct Row {
    what: &'static str,
    limit: &'static str,
    times: Vec<Duration>,
}

impl Row {
    fn new(what: &'static str, limit: &'static str) -> Self {
        Self { what, limit, times: Vec::new() }
    }

    fn median(&self) -> f64 {
        let mut sorted = self.times[WARM_UP..].to_vec();
        sorted.sort_unstable();
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2 };
        median.as_secs_f64() * 1000.0
    }
}

struct Bench {
    world: World,
    /// What engines and sublet keep in /run, in memory as /run is: bundles, the ledger, daemons.
    memory: TempDir,
    /// sublet's configuration with `/bin/true` in runc's place.
    instant: PathBuf,
    /// Where all programs write their errors.
    errors: PathBuf,
}

impl Bench {
    fn new() -> Result<Self> {
        let world = World::simulated("h200", "");
        let memory = tempfile::Builder::new().prefix("sublet-bench").tempdir_in(memory_dir()?)?;
        let text = std::fs::read_to_string(&world.config)?;
        let state = format!("state_dir = \"{}\"", memory.path().join("state").display());
        let text = text.replacen(&format!("state_dir = \"{}\"", world.state_dir().display()), &state, 1);
        ensure!(text.contains(&state), "the simulated driver's config.toml names no state_dir");
        std::fs::write(&world.config, &text)?;
        let named = format!(r#"low_level = ["{}"]"#, world.engine.program());
        let replaced = text.replace(&named, r#"low_level = ["/bin/true"]"#);
        ensure!(text != replaced, "the simulated driver's config.toml names no low-level runtime");
        let instant = world.dir.path().join("instant.toml");
        std::fs::write(&instant, replaced)?;
        let errors = world.dir.path().join("errors");
        Ok(Self { world, memory, instant, errors })
    }

    /// Single calls, each of which ends in `/bin/true`.
    fn calls(&self, rounds: usize) -> Result<[Row; 6]> {
        let plain = self.bundle("plain", &[]);
        let shared = self.bundle("shared", SHARE);
        let mut rows = [
            Row::new("`/bin/true` alone", ""),
            Row::new("`busybox env /bin/true`: a static C program that only execs", ""),
            Row::new("`sublet-runtime state`, passed through", "+0.5 ms"),
            Row::new("`sublet-runtime create`, no annotation, passed through", "+0.5 ms"),
            Row::new("`sublet-runtime create`, sm=25 memory=8GiB, daemon warm", "+1.5 ms"),
            Row::new("the same, right after a create whose container never came to be", ""),
        ];
        for round in 0..rounds + WARM_UP {
            plain.write();
            shared.write();
            // Each create leaves its lease to a process that has ended, because `/bin/true` creates no container.
            let mut gc = Command::new(sublet_e2e::bin_dir().join("sublet"));
            self.timed(self.quiet(gc.arg("gc"))?)?;
            let commands = [
                self.quiet(&mut Command::new("/bin/true"))?,
                self.quiet(Command::new("busybox").args(["env", "/bin/true"]))?,
                self.shim(&["state", ID])?,
                self.shim(&create(&plain))?,
                self.shim(&create(&shared))?,
            ];
            // Each takes its turn to be first in a round, because the first finds the caches full of other data.
            let mut turns: Vec<_> = rows.iter_mut().zip(commands).collect();
            turns.rotate_left(round % 5);
            for (row, command) in turns {
                row.times.push(self.timed(command)?);
            }
            ensure!(shared.config() != shared.spec, "no share was given");
            shared.write();
            // It releases the lease of the previous call.
            rows[5].times.push(self.timed(self.shim(&create(&shared))?)?);
        }
        ensure!(plain.config() == plain.spec, "the container without annotations was touched");
        Ok(rows)
    }

    /// Containers of `/bin/true`, from create to delete.
    fn cycles(&self, rounds: usize) -> Result<[Row; 2]> {
        let bundles = [self.bundle("bare", &[]), self.bundle("leased", SHARE)];
        let mut rows = [
            Row::new("create + start + delete of `/bin/true` by runc", ""),
            Row::new("the same by `sublet-runtime` and runc, sm=25 memory=8GiB", "1.10 x"),
        ];
        let programs = [PathBuf::from("runc"), sublet_e2e::bin_dir().join("sublet-runtime")];
        for _ in 0..rounds + WARM_UP {
            for ((row, bundle), program) in rows.iter_mut().zip(&bundles).zip(&programs) {
                bundle.write();
                row.times.push(self.cycle(program, bundle)?);
            }
        }
        Ok(rows)
    }

    /// The three commands. The wait for the container's own end between them does not count.
    fn cycle(&self, program: &Path, bundle: &Bundle<'_>) -> Result<Duration> {
        let pid_file = bundle.dir.join("pid");
        let run = |arguments: &[&str]| {
            let mut command = Command::new(program);
            command.arg("--root").arg(self.world.runtime_root()).args(arguments);
            command.env("SUBLET_CONFIG", &self.world.config);
            self.timed(self.quiet(&mut command)?)
        };
        let pid_file_text = pid_file.to_string_lossy();
        let dir = bundle.dir.to_string_lossy();
        let mut took = run(&["create", "--bundle", &dir, "--pid-file", &pid_file_text, &bundle.id])?;
        took += run(&["start", &bundle.id])?;
        let pid = std::fs::read_to_string(&pid_file)?;
        ensure!(eventually(|| has_ended(pid.trim())), "/bin/true in container {} does not end", bundle.id);
        took += run(&["delete", &bundle.id])?;
        Ok(took)
    }

    /// A bundle with a configuration as Docker writes it.
    fn bundle(&self, name: &str, annotations: &[(&str, &str)]) -> Bundle<'_> {
        let id = format!("{name}{}", &ID[name.len()..]);
        let mut bundle = self.world.bundle(&id, &[], &[]);
        for file in ["resolv.conf", "hostname", "hosts"] {
            let mounted = bundle.dir.join("rootfs/etc").join(file);
            for path in [&bundle.dir.join(file), &mounted] {
                std::fs::write(path, "").expect("a file to mount");
            }
        }
        let text = DOCKER_CONFIG.replace("@DIR@", &bundle.dir.to_string_lossy()).replace("@ID@", &id);
        bundle.dir = self.memory.path().join(&id);
        std::fs::create_dir(&bundle.dir).expect("a bundle directory");
        bundle.spec = serde_json::from_str(&text).expect("docker-config.json is JSON");
        for (key, value) in annotations {
            bundle.spec["annotations"][*key] = json!(value);
        }
        bundle
    }

    /// `sublet-runtime` before `/bin/true`, with the options dockerd gives.
    fn shim(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(sublet_e2e::bin_dir().join("sublet-runtime"));
        command.arg("--root").arg(self.world.runtime_root());
        command.arg("--log").arg(self.world.dir.path().join("log.json")).args(["--log-format", "json"]);
        self.quiet(command.args(arguments))
    }

    /// All commands get an explicit environment; those without one would start faster.
    fn quiet(&self, command: &mut Command) -> Result<Command> {
        let errors = File::options().append(true).create(true).open(&self.errors)?;
        if !command.get_envs().any(|(name, _)| name == "SUBLET_CONFIG") {
            command.env("SUBLET_CONFIG", &self.instant);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        Ok(std::mem::replace(command, Command::new("")))
    }

    /// From before the process is spawned until it has been waited for, by the monotonic clock.
    fn timed(&self, mut command: Command) -> Result<Duration> {
        let start = Instant::now();
        let status = command.status();
        let took = start.elapsed();
        if !status.with_context(|| format!("{command:?}"))?.success() {
            bail!("{command:?} failed: {}", std::fs::read_to_string(&self.errors)?);
        }
        Ok(took)
    }
}

/// A directory whose files are in memory.
fn memory_dir() -> Result<&'static str> {
    let in_memory = |dir: &&str| statfs(*dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC);
    ["/run", "/dev/shm"].into_iter().find(in_memory).context("neither /run nor /dev/shm is a tmpfs")
}

fn create<'b>(bundle: &'b Bundle<'_>) -> [&'b str; 4] {
    ["create", "--bundle", bundle.dir.to_str().expect("a path of ours"), &bundle.id]
}

/// A process that was not waited for yet has ended too.
fn has_ended(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z"))
}

fn print(rounds: usize, calls: &[Row], cycles: &[Row]) -> Result<()> {
    let bytes = serde_json::from_str::<Value>(DOCKER_CONFIG)?.to_string().len();
    let cores = std::thread::available_parallelism()?;
    println!("Medians of {rounds} rounds in turns, {cores} cores, config.json of about {} KB:", bytes / 1000);
    println!();
    println!("| what | median ms | more, ms | limit | ratio |");
    println!("|---|---|---|---|---|");
    for rows in [calls, cycles] {
        let base = rows[0].median();
        for row in rows {
            let median = row.median();
            let (more, ratio) = (median - base, median / base);
            println!("| {} | {median:.2} | {more:+.2} | {} | {ratio:.2} |", row.what, row.limit);
        }
    }
    Ok(())
}
