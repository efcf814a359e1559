//! How a container's start grows with the number of leases and devices: medians of one create in ledgers of 1 to 1,000
//! leases and on 1 to 16 GPUs with seven MIG instances each, how long the ledger's lock is held, many creates at once,
//! creates that wait, creates with a `--root` of their own, and how much memory the shim takes at most.
//!
//! `bench-growth [ROUNDS [leases|gpus|at-once|waiting|roots]…]`, as root (tests/bench/run growth): 40 rounds by default, in turns. The low-level runtime is
//! `/bin/true`, so that only sublet is timed. Leases are copies of one real lease, each with a process of its own that
//! lives. It does not judge: machines are noisy, and the limits in the tables are for the reader.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use serde_json::{Value, json};
use sublet_e2e::copies::Copies;
use sublet_e2e::{Bundle, World, eventually};
use tempfile::TempDir;

const ROUNDS: usize = 40;
const LEASES: [usize; 5] = [1, 10, 100, 768, 1000];
const GPUS: [usize; 5] = [1, 2, 4, 8, 16];
/// Creates before the timed ones.
const WARM_UP: usize = 2;
/// Leases while the number of GPUs changes.
const BESIDE: usize = 100;
const SHARE: &[(&str, &str)] = &[("sublet.mig", "1g.18gb"), ("sublet.mode", "time-slice")];

fn main() -> Result<()> {
    let mut words = std::env::args().skip(1);
    let first = words.next();
    if first.as_deref() == Some("--peak") {
        return peak(&words.collect::<Vec<_>>());
    }
    let rounds = first.map_or(Ok(ROUNDS), |rounds| rounds.parse()).context("usage: bench-growth [ROUNDS]")?;
    ensure!(rounds > 0, "usage: bench-growth [ROUNDS], at least 1");
    ensure!(nix::unistd::geteuid().is_root(), "bench-growth starts containers: run it as root");
    let cores = std::thread::available_parallelism()?;
    println!("Medians of {rounds} rounds, {cores} cores.");
    let parts: Vec<String> = words.collect();
    let wanted = |part: &str| parts.is_empty() || parts.iter().any(|asked| asked == part);
    if wanted("leases") {
        by_leases(rounds)?;
    }
    if wanted("gpus") {
        by_gpus(rounds)?;
    }
    if wanted("at-once") {
        at_once()?;
    }
    if wanted("waiting") {
        beside_waiting(rounds)?;
    }
    if wanted("roots") {
        by_roots(rounds)?;
    }
    Ok(())
}

/// Becomes the parent of a command, and prints the most memory that it took, in KiB. As a process begins with the memory
/// of its parent, it is at least this program's own at its start.
fn peak(words: &[String]) -> Result<()> {
    let (program, arguments) = words.split_first().context("a command")?;
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).status()?;
    ensure!(status.success(), "{program} failed");
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN)?.max_rss());
    Ok(())
}

/// A host whose ledger is full of leases of live processes.
struct Host {
    world: World,
    serve: Child,
    copies: Copies,
    devices: Vec<Value>,
    _memory: TempDir,
}

impl Host {
    /// So many H200, each with seven 1g.18gb.
    fn new(gpus: usize) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let topology = dir.path().join("topology.toml");
        std::fs::write(&topology, topology_of(gpus, true))?;
        let extra = "[limits]\ntime_slice_max = 2000\n";
        let world = World::simulated(topology.to_str().context("UTF-8")?, extra);
        let memory = state_in_memory(&world)?;
        let serve = serve(&world)?;
        let first = world.bundle("first", SHARE, &["/bin/sleep", "86400"]);
        first.up();
        // Binds it to its first process.
        ensure!(world.sublet(&["gc"]).status.success(), "gc");
        let copies = Copies::of(&world);
        first.down();
        let inventory: Value =
            serde_json::from_slice(&std::fs::read(world.state_dir().join("inventory.json"))?)?;
        let all = inventory["devices"].as_array().context("devices")?;
        let devices: Vec<Value> = all
            .iter()
            .filter(|one| one["uuid"].as_str().is_some_and(|uuid| uuid.starts_with("MIG-")))
            .cloned()
            .collect();
        ensure!(devices.len() == 7 * gpus, "{} MIG devices", devices.len());
        time_sublet_alone(&world, &world.config)?;
        Ok(Self { world, serve, copies, devices, _memory: memory })
    }

    /// Fills the ledger up to so many leases.
    fn fill(&mut self, leases: usize) -> Result<()> {
        let devices = &self.devices;
        self.copies.fill(&self.world, leases, |number, lease| {
            let device = &devices[number % devices.len()];
            lease["devices"] = json!([device["uuid"]]);
            let part = &mut lease["mig_devices"][0];
            part["uuid"] = device["uuid"].clone();
            for (member, value) in device["mig_device"].as_object().into_iter().flatten() {
                if part.get(member).is_some() && ["gpu", "gi", "ci", "placement"].contains(&member.as_str()) {
                    part[member] = value.clone();
                }
            }
        })
    }

    fn gc(&self) -> Result<()> {
        let gc = self.world.sublet(&["gc"]);
        ensure!(gc.status.success(), "gc: {gc:?}");
        Ok(())
    }

    fn command(&self, bundle: &Bundle<'_>) -> Command {
        let mut command = self.world.runtime();
        command.args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// One create, whose lease the next `gc` frees, because `/bin/true` creates no container.
    fn create(&self, bundle: &Bundle<'_>) -> Result<Took> {
        bundle.write();
        let took = Took::by(&mut self.command(bundle))?;
        self.gc()?;
        Ok(took)
    }

    /// The longest that one create holds the ledger's lock at once, by strace(1), which stops the shim only where it
    /// locks: the least and the median of `rounds`, in milliseconds. It counts strace's own stop at both ends, and on a
    /// busy machine the time that the shim was not running.
    fn held(&self, rounds: usize) -> Result<Option<(f64, f64)>> {
        let bundle = self.world.bundle("locked", SHARE, &["/bin/true"]);
        let log = self.world.dir.path().join("strace");
        let mut longest = Vec::new();
        for _ in 0..rounds {
            bundle.write();
            let mut traced = Command::new("strace");
            traced.args(["-f", "--seccomp-bpf", "-ttt", "-e", "trace=flock", "-o"]).arg(&log);
            let command = self.command(&bundle);
            traced
                .arg(command.get_program())
                .args(command.get_args())
                .env("SUBLET_CONFIG", &self.world.config);
            match traced.stdout(Stdio::null()).stderr(Stdio::null()).status() {
                Ok(status) if status.success() => {}
                _ => return Ok(None),
            }
            longest.push(longest_hold(&std::fs::read_to_string(&log)?));
            self.gc()?;
        }
        longest.sort_by(f64::total_cmp);
        Ok(Some((longest[0], longest[longest.len() / 2])))
    }

    /// KiB.
    fn peak(&self) -> Result<u64> {
        let bundle = self.world.bundle("peak", SHARE, &["/bin/true"]);
        bundle.write();
        let mut command = Command::new(std::env::current_exe()?);
        let create = self.command(&bundle);
        command.arg("--peak").arg(create.get_program()).args(create.get_args());
        let output = command.env("SUBLET_CONFIG", &self.world.config).output()?;
        self.gc()?;
        String::from_utf8_lossy(&output.stdout).trim().parse().with_context(|| format!("{output:?}"))
    }
}

/// Hosts with so many GPUs and leases. All are there before the first process of a lease: the simulated driver looks at
/// every process of the machine.
fn hosts<const N: usize>(sizes: [(usize, usize); N]) -> Result<Vec<Host>> {
    let mut hosts: Vec<Host> = sizes.iter().map(|(gpus, _)| Host::new(*gpus)).collect::<Result<_>>()?;
    for (host, (_, leases)) in hosts.iter_mut().zip(sizes) {
        host.fill(leases)?;
    }
    Ok(hosts)
}

/// Of one create on each host, in turns: a processor's clock changes while a bench runs.
fn medians(hosts: &[Host], rounds: usize) -> Result<Vec<Median>> {
    let warm_up = |host: &Host| {
        // Until the service watches MIG devices, every create asks the driver for them.
        ensure!(eventually(|| host.world.state_dir().join("mig-watched").exists()), "MIG is not watched");
        let bundle = host.world.bundle("timed", SHARE, &["/bin/true"]);
        (0..WARM_UP).try_for_each(|_| host.create(&bundle).map(drop))
    };
    hosts.iter().try_for_each(warm_up)?;
    let mut times: Vec<Vec<Took>> = hosts.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (host, times) in hosts.iter().zip(&mut times) {
            times.push(host.create(&host.world.bundle("timed", SHARE, &["/bin/true"]))?);
        }
    }
    Ok(times.iter().map(|times| Median::of(times)).collect())
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

impl Took {
    fn by(command: &mut Command) -> Result<Self> {
        let (used, began) = (processor_time()?, Instant::now());
        let output = command.stderr(Stdio::piped()).output()?;
        let time = began.elapsed();
        ensure!(output.status.success(), "create: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self { time, processor: processor_time()?.saturating_sub(used) })
    }
}

/// Of all processes that this one has waited for.
fn processor_time() -> Result<Duration> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = [used.user_time(), used.system_time()].map(|time| time.num_microseconds());
    Ok(Duration::from_micros(u64::try_from(micros[0] + micros[1])?))
}

/// Milliseconds.
#[derive(Clone, Copy)]
struct Median {
    time: f64,
    processor: f64,
}

impl Median {
    fn of(times: &[Took]) -> Self {
        let middle_of = |which: fn(&Took) -> Duration| middle(&times.iter().map(which).collect::<Vec<_>>());
        Self { time: middle_of(|took| took.time), processor: middle_of(|took| took.processor) }
    }

    /// Cells of a table, with the ratios to `first`.
    fn cells(self, first: Self) -> String {
        let (time, processor) = (self.time / first.time, self.processor / first.processor);
        format!("{:.2} | {time:.2} | {:.2} | {processor:.2}", self.time, self.processor)
    }
}

/// Writes `config`: the world's configuration with `/bin/true` for the low-level runtime.
fn time_sublet_alone(world: &World, config: &Path) -> Result<()> {
    let text = std::fs::read_to_string(&world.config)?;
    let named = format!("low_level = [\"{}\"]", world.engine.program());
    Ok(std::fs::write(config, text.replace(&named, "low_level = [\"/bin/true\"]"))?)
}

/// The state directory on a tmpfs, as /run is one.
fn state_in_memory(world: &World) -> Result<TempDir> {
    let memory = tempfile::Builder::new().prefix("sublet").tempdir_in("/dev/shm")?;
    let text = std::fs::read_to_string(&world.config)?;
    let old = format!("state_dir = \"{}\"", world.state_dir().display());
    let new = format!("state_dir = \"{}\"", memory.path().join("run").display());
    ensure!(text.contains(&old), "config.toml names no state_dir");
    std::fs::write(&world.config, text.replacen(&old, &new, 1))?;
    Ok(memory)
}

/// With the service, which watches MIG devices, as on any host with them.
fn serve(world: &World) -> Result<Child> {
    let serve = world.command("sublet").arg("serve").stderr(Stdio::null()).spawn()?;
    let socket = world.state_dir().join("sublet.sock");
    ensure!(eventually(|| std::os::unix::net::UnixStream::connect(&socket).is_ok()), "serve does not answer");
    Ok(serve)
}

/// The GPU instance ids that seven 1g.18gb have on an H200.
const SEVEN: [usize; 7] = [7, 8, 9, 11, 12, 13, 14];

fn topology_of(gpus: usize, mig: bool) -> String {
    let mig_mode = if mig { "enabled" } else { "disabled" };
    let mut text = "driver = \"580.159.04\"\ncuda = \"13.0\"\n".to_owned();
    for gpu in 0..gpus {
        let _ = write!(
            text,
            "\n[[gpu]]\nindex = {gpu}\nminor = {gpu}\nuuid = \"GPU-5b1e7000-0000-4000-8000-00000000c0{gpu:02x}\"\n\
             name = \"NVIDIA H200\"\nbus_id = \"0000:{:02x}:00.0\"\nmemory_mib = 143771\ncuda_total_mib = 143155\n\
             sm_count = 132\ncompute_capability = \"9.0\"\narch = \"hopper\"\nmig_mode = \"{mig_mode}\"\nmig_table = \"h200\"\n",
            16 + 8 * gpu
        );
        for gi in SEVEN.iter().filter(|_| mig) {
            let _ = write!(
                text,
                "\n[[gpu.mig]]\nuuid = \"MIG-5b1e7000-0000-5000-8000-000000{gpu:03}{gi:03}\"\nprofile = \"1g.18gb\"\n\
                 gi = {gi}\nci = 0\n"
            );
        }
    }
    text
}

/// Milliseconds.
fn middle(times: &[Duration]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2].as_secs_f64() * 1000.0
}

/// From each flock(2) that locks to the one that unlocks, in milliseconds: lines as
/// `PID 1700000000.000001 flock(5, LOCK_EX|LOCK_NB) = 0`.
fn longest_hold(log: &str) -> f64 {
    let (mut since, mut longest) = (None, 0.0_f64);
    for line in log.lines() {
        let Some(time) = line.split_whitespace().nth(1).and_then(|time| time.parse::<f64>().ok()) else {
            continue;
        };
        if line.contains("LOCK_UN") {
            longest = since.take().map_or(longest, |since: f64| longest.max((time - since) * 1000.0));
        } else if line.contains("LOCK_EX") && line.ends_with("= 0") {
            since = Some(time);
        }
    }
    longest
}

fn by_leases(rounds: usize) -> Result<()> {
    let hosts = hosts(LEASES.map(|leases| (4, leases)))?;
    let medians = medians(&hosts, rounds)?;
    println!(
        "\n4 GPUs with 7 MIG instances each (limits at 100 leases: ratio 1.50, lock 1 ms; memory 6144 KiB):\n"
    );
    println!(
        "| leases | one create, ms | ratio | of the processors, ms | ratio | lock held, ms: least | median | \
         shim's memory, KiB, at most |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for ((leases, host), median) in LEASES.iter().zip(&hosts).zip(&medians) {
        let (held, peak) = (host.held(rounds)?, host.peak()?);
        let cells = median.cells(medians[0]);
        let held = held
            .map_or_else(|| "no strace |".to_owned(), |(least, median)| format!("{least:.2} | {median:.2}"));
        println!("| {leases} | {cells} | {held} | {peak} |");
    }
    Ok(())
}

fn by_gpus(rounds: usize) -> Result<()> {
    println!("\n{BESIDE} leases:\n");
    println!("| GPUs with 7 MIG instances each | one create, ms | ratio | of the processors, ms | ratio |");
    println!("|---|---|---|---|---|");
    let hosts = hosts(GPUS.map(|gpus| (gpus, BESIDE)))?;
    let medians = medians(&hosts, rounds)?;
    for (gpus, median) in GPUS.iter().zip(&medians) {
        println!("| {gpus} | {} |", median.cells(medians[0]));
    }
    Ok(())
}

/// Creates at once on 16 GPUs, none of which is refused.
fn at_once() -> Result<()> {
    let host = Host::new(16)?;
    println!("\n| creates at once, 16 GPUs | failed | all done after, ms | the slowest, ms | each, ms |");
    println!("|---|---|---|---|---|");
    for count in [1, 64, 500] {
        let bundles: Vec<Bundle<'_>> =
            (0..count).map(|n| host.world.bundle(&format!("c{n}"), SHARE, &["/bin/true"])).collect();
        bundles.iter().for_each(Bundle::write);
        let began = Instant::now();
        let children: Vec<Child> =
            bundles.iter().map(|bundle| host.command(bundle).spawn()).collect::<Result<_, _>>()?;
        let (mut failed, mut slowest) = (0, Duration::ZERO);
        for mut child in children {
            failed += usize::from(!child.wait()?.success());
            slowest = slowest.max(began.elapsed());
        }
        let all = began.elapsed().as_secs_f64() * 1000.0;
        let slowest = slowest.as_secs_f64() * 1000.0;
        println!(
            "| {count} | {failed} | {all:.0} | {slowest:.0} | {:.2} |",
            all / f64::from(u32::try_from(count)?)
        );
        host.gc()?;
    }
    Ok(())
}

/// A create on one GPU while 50 wait for another.
fn beside_waiting(rounds: usize) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let topology: PathBuf = dir.path().join("topology.toml");
    std::fs::write(&topology, topology_of(2, false))?;
    let world = World::simulated(topology.to_str().context("UTF-8")?, "");
    let _memory = state_in_memory(&world)?;
    let mut serve = serve(&world)?;
    let holder = world.bundle(
        "holder",
        &[("sublet.gpu", "0"), ("sublet.mode", "exclusive")],
        &["/bin/sleep", "86400"],
    );
    holder.up();
    let instant = dir.path().join("instant.toml");
    time_sublet_alone(&world, &instant)?;
    let normal = world.bundle("normal", &[("sublet.gpu", "1")], &["/bin/true"]);
    let mut alone = creates(&world, &instant, &normal, rounds)?;
    let wait = [("sublet.gpu", "0"), ("sublet.mode", "exclusive"), ("sublet.wait", "60s")];
    let waiting: Vec<Bundle<'_>> =
        (0..50).map(|n| world.bundle(&format!("w{n}"), &wait, &["/bin/true"])).collect();
    waiting.iter().for_each(Bundle::write);
    let mut children: Vec<Child> =
        waiting.iter().map(|bundle| command(&world, &instant, bundle).spawn()).collect::<Result<_, _>>()?;
    std::thread::sleep(Duration::from_secs(2));
    let beside = Median::of(&creates(&world, &instant, &normal, rounds)?);
    for child in &mut children {
        ensure!(child.try_wait()?.is_none(), "one does not wait any more");
        child.kill()?;
        child.wait()?;
    }
    // Half of it before and half after.
    alone.extend(creates(&world, &instant, &normal, rounds)?);
    let alone = Median::of(&alone);
    holder.down();
    let _ = serve.kill();
    let _ = serve.wait();
    println!(
        "\n| a create on GPU 1 | ms | ratio (limit 1.10) | of the processors, ms | ratio |\n|---|---|---|---|---|"
    );
    println!("| alone | {} |", alone.cells(alone));
    println!("| while 50 wait for GPU 0 | {} |", beside.cells(alone));
    Ok(())
}

/// A create with a new `--root`: where no other is known, where 30,000 are that are gone, and after `sublet gc`, which forgets them.
fn by_roots(rounds: usize) -> Result<()> {
    let world = World::simulated("h200", "");
    let _memory = state_in_memory(&world)?;
    time_sublet_alone(&world, &world.config)?;
    let bundle = world.bundle("timed", &[("sublet.mode", "time-slice")], &["/bin/true"]);
    let gone: Vec<String> = (0..30_000).map(|n| format!("/run/growth/gone/{n}")).collect();
    let (gone, known) = (gone.join("\n"), world.state_dir().join("roots"));
    std::fs::create_dir_all(world.state_dir())?;
    let rows = [("none", Some("")), ("30,000, all gone", Some(&*gone)), ("after `sublet gc`", None)];
    let mut times = rows.map(|_| Vec::new());
    for round in 0..rounds + WARM_UP {
        for (number, (row, times)) in rows.iter().zip(&mut times).enumerate() {
            row.1.map_or(Ok(()), |text| std::fs::write(&known, text))?;
            bundle.write();
            let mut command = world.command("sublet-runtime");
            command.args(["--root", &format!("/run/growth/{round}-{number}"), "create", "--bundle"]);
            times.push(Took::by(command.arg(&bundle.dir).arg(&bundle.id))?);
            let gc = world.sublet(&["gc"]);
            ensure!(gc.status.success(), "gc: {gc:?}");
        }
    }
    let medians = times.map(|times| Median::of(&times[WARM_UP..]));
    println!(
        "\n| other `--root` directories known | one create, ms | ratio | of the processors, ms | ratio |"
    );
    println!("|---|---|---|---|---|");
    for ((row, _), median) in rows.iter().zip(&medians) {
        println!("| {row} | {} |", median.cells(medians[0]));
    }
    Ok(())
}

fn command(world: &World, config: &Path, bundle: &Bundle<'_>) -> Command {
    let mut command = world.runtime();
    command.env("SUBLET_CONFIG", config).args(["create", "--bundle"]).arg(&bundle.dir).arg(&bundle.id);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn creates(world: &World, config: &Path, bundle: &Bundle<'_>, rounds: usize) -> Result<Vec<Took>> {
    let mut times = Vec::new();
    for _ in 0..rounds + WARM_UP {
        bundle.write();
        times.push(Took::by(&mut command(world, config, bundle))?);
        let gc = world.sublet(&["gc"]);
        ensure!(gc.status.success(), "gc: {gc:?}");
    }
    times.drain(..WARM_UP);
    Ok(times)
}
