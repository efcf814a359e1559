//! `sublet bench`: what sharing a GPU costs, measured on this machine. Here is `sublet bench run`: it measures containers that
//! share a GPU, in each mode and with each number of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Subcommand, ValueEnum};
use regex_lite::Regex;

use super::stop::Stop;
use super::{bench_show, tables};
use crate::bench::containers::{Engine, Workload, sweep};
use crate::bench::measure::{Meter, Times};
use crate::bench::plan::{Gpu, grid, mode, number};
use crate::bench::runner::{Runner, before, go_on};
use crate::bench::samples::{Client, FIRST_NUMBER, Source, free_ports};
use crate::bench::{BenchResult, Cell, Mode, SCHEMA, Settings, Sharing};
use crate::load::Load;
use crate::names::Names;
use crate::own_root::{STEP_LIMIT, Scratch};
use crate::preview::Whose;
use crate::stack::{Fitted, NotPlaced, Outcome, Service, Stack, fit};
use crate::usage;
use sublet_core::admit::{AdmitError, confirmed_inventory};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::process::{child, epoch_seconds};
use sublet_core::share::parse_duration;
use sublet_core::text::{safe, safe_path, timestamp};

/// The longest of the times.
const LONGEST: Duration = Duration::from_secs(3600);

/// Subcommands of `sublet bench`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure containers that share a GPU, in each mode and with each number of them
    Run(Box<Arguments>),
    /// Show a result as a table, a picture or a page
    Show(bench_show::Arguments),
    /// Compare two results, cell by cell
    Compare(bench_show::CompareArguments),
}

/// Runs one.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(arguments) => measure(arguments, config),
        Command::Show(arguments) => bench_show::show(arguments),
        Command::Compare(arguments) => bench_show::compare(arguments),
    }
}

/// Arguments of `sublet bench run`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Built-in loads, which need no image: several with commas between them
    #[arg(long = "load", value_enum, value_delimiter = ',', default_value = "small,large")]
    loads: Vec<Load>,
    /// Your own: this image, with the command behind --; with --engine runtime a root file system
    #[arg(long, value_name = "IMAGE", conflicts_with = "loads")]
    image: Option<String>,
    /// Find a latency in each line that the command prints: the first group of this pattern, or what it matches
    #[arg(long, value_name = "REGEX", default_value = FIRST_NUMBER, hide_default_value = true)]
    parse: String,
    /// The unit of those numbers
    #[arg(long, value_enum, default_value = "ms")]
    unit: Unit,
    /// The command is a server: ask this URL all the time. {port}, also in the command, is a free port of each container
    #[arg(long, value_name = "URL", requires = "image")]
    http: Option<String>,
    /// Send this file by POST
    #[arg(long, value_name = "FILE", requires = "http")]
    post: Option<PathBuf>,
    /// The media type of that file
    #[arg(long, value_name = "TYPE", default_value = "application/json", requires = "post")]
    content_type: String,
    /// What is measured, in a few words, for the picture
    #[arg(long)]
    title: Option<String>,
    /// How many containers at once
    #[arg(short, long = "number", value_parser = number, value_delimiter = ',', default_value = "1,3,5,7")]
    numbers: Vec<u32>,
    /// exclusive, time-slice, mps, mps:equal (100 %/N), mps:20, dedicated, dedicated:20, mig, mig:PROFILE
    #[arg(long = "mode", value_parser = mode, value_delimiter = ',')]
    modes: Vec<Mode>,
    /// The GPU: an index, UUID, bus id or alias
    #[arg(long, default_value = "0")]
    gpu: String,
    /// What runs the containers; default: the first of docker, podman and runtime that is there
    #[arg(long, value_enum)]
    engine: Option<EngineName>,
    /// How long to measure
    #[arg(long, value_parser = duration, default_value = "10s")]
    time: Duration,
    /// How long the containers run before that
    #[arg(long, value_parser = duration, default_value = "3s")]
    warm_up: Duration,
    /// The longest wait for the first iteration of each container
    #[arg(long, value_parser = duration, default_value = "2m")]
    start_limit: Duration,
    /// Measure each cell so many times, and take the one in the middle
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=99))]
    repeat: u32,
    /// Measure each cell once more without sublet and without containers
    #[arg(long, value_enum)]
    baseline: Option<Baseline>,
    /// A further word for the engine's run, such as --run-option=--volume=/models:/models:ro
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    run_option: Vec<String>,
    /// Measure although others use the GPU. The result is marked
    #[arg(long)]
    in_use: bool,
    /// Measure although the driver is sublet's simulated one. The result is marked
    #[arg(long)]
    simulated: bool,
    /// Where the result is written, after each cell
    #[arg(long, short, value_name = "FILE", default_value = "sublet-bench.json")]
    output: PathBuf,
    /// Go on with the result in that file: measure what it has not got
    #[arg(long)]
    resume: bool,
    /// Your command, behind --
    #[arg(last = true, requires = "image")]
    command: Vec<String>,
}

/// Units of a user's numbers, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Unit {
    S = 1_000_000_000,
    Ms = 1_000_000,
    Us = 1_000,
}

/// The program that runs the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EngineName {
    /// With the runtime sublet
    Docker,
    /// With the precreate hook
    Podman,
    /// sublet-runtime itself, above runc or crun as configured: needs root
    Runtime,
}

/// With what the containers are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Baseline {
    /// The same programs as plain processes, with MPS and its limits set by hand
    ByHand,
}

fn duration(text: &str) -> Result<Duration, String> {
    let allowed = || "a time such as 500ms, 10s or 2m, at most an hour".to_owned();
    let time = parse_duration(text, LONGEST).map_err(|hint| hint.unwrap_or_else(allowed))?;
    if time.is_zero() { Err(allowed()) } else { Ok(time) }
}

/// Runs `sublet bench run`. The exit code is 1 if a cell could not be measured.
///
/// # Errors
/// There is no GPU, it is in use, the engine does not work, the file is there already or cannot be written, or a signal.
fn measure(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let pattern = Regex::new(&arguments.parse).map_err(|error| anyhow::anyhow!("--parse: {error}"))?;
    let its_own = (&arguments.image, &arguments.command[..], arguments.engine);
    if let (Some(_), [], Some(EngineName::Runtime)) = its_own {
        bail!("a root file system has no command of its own: write it behind `--`");
    }
    // Before anything is created, so that a signal still lets everything be removed.
    let stop = Stop::listen()?;
    let stop = || stop.is_wanted();
    let before = before(&arguments.output, arguments.resume)?;
    let inventory = confirmed_inventory(config)?;
    let gpu = the_gpu(&arguments.gpu, &inventory, config)?;
    if inventory.driver.simulated && !arguments.simulated {
        bail!(
            "the driver is sublet's simulated one, whose times mean nothing: --simulated measures all the same"
        );
    }
    let used = users(gpu, &inventory, config)?;
    if let Some(users) = used.as_ref().filter(|_| !arguments.in_use) {
        bail!("{users}; wait until it is free, or measure beside them with --in-use, which marks the result");
    }
    let engine = engine(arguments.engine)?;
    sweep(&engine);
    let makes_image = if let Engine::Program(program) = engine { Some(program) } else { None };
    let scratch = Scratch::new(&format!("sublet-bench-{}", process::id()), makes_image)?;
    let client = client(arguments, arguments.numbers.iter().copied().max().unwrap_or(1))?;
    let workload = Workload {
        engine: engine.clone(),
        image: image(arguments.image.as_deref(), makes_image.is_some(), &scratch)?,
        command: arguments.command.clone(),
        options: arguments.run_option.clone(),
        ports: client.as_ref().map(|client| client.ports.clone()).unwrap_or_default(),
        dir: scratch.dir.clone(),
    };
    let meter = Meter::new(&gpu.uuid, config);
    let result = BenchResult {
        schema: SCHEMA.to_owned(),
        title: title(arguments),
        simulated: inventory.driver.simulated,
        in_use_by_others: used.is_some(),
        time: timestamp(epoch_seconds()),
        source: None,
        machine: meter.machine(gpu, &inventory, Some(version(&engine))),
        settings: settings(arguments, config),
        cells: Vec::new(),
    };
    let mut result = match before {
        Some(before) => go_on(before, result, &arguments.output)?,
        None => result,
    };
    let modes = modes(arguments, gpu);
    let loads = loads(arguments);
    let grid = grid(&loads, &modes, &arguments.numbers, arguments.baseline.is_some());
    let source = match &client {
        Some(client) => Source::Http(client.clone()),
        None if arguments.image.is_some() => Source::Pattern(pattern, f64::from(arguments.unit as u32)),
        None => Source::BuiltIn,
    };
    let mig_devices = inventory.mig_devices_of(&gpu.uuid);
    let Arguments { start_limit, warm_up, time: window, .. } = *arguments;
    let runner = Runner {
        workload,
        source,
        times: Times { start_limit, warm_up, window },
        repeat: arguments.repeat,
        uuid: gpu.uuid.clone(),
        gpu: Gpu {
            mig_devices: mig_devices.map(|(device, _)| device.kind().to_owned()).collect(),
            in_mig_mode: gpu.mig_enabled,
            dynamic: config.mig.dynamic,
        },
        lacking: &|planned| lacking(planned, &gpu.uuid, config),
        meter,
        inventory: &inventory,
        config,
        stop: &stop,
        tell: &|line| eprintln!("{line}"),
    };
    runner.run(&grid, &mut result, &arguments.output)?;
    println!("{}", bench_show::shown(&result, &result.loads(), false, tables::terminal_width()));
    let file = safe_path(&arguments.output);
    println!("\nWritten to {file}: sublet bench show {file} --html page.html");
    let failed = result.cells.iter().any(|cell| cell.measured.is_none());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The GPU that is meant, and not one of its MIG devices.
fn the_gpu<'a>(text: &str, inventory: &'a Inventory, config: &Config) -> anyhow::Result<&'a Device> {
    let found = sublet_core::place::meant(text, inventory, config).map_err(anyhow::Error::msg)?;
    match found[..] {
        [gpu] if !gpu.is_mig() => Ok(gpu),
        [] => bail!("this host has no GPU {}: see `sublet status`", safe(text)),
        _ => bail!("{} is not one GPU: see `sublet status`", safe(text)),
    }
}

/// Who uses the GPU already, in a sentence.
fn users(gpu: &Device, inventory: &Inventory, config: &Config) -> anyhow::Result<Option<String>> {
    let ledger = super::settled_ledger(config)?;
    let own: Vec<&str> = std::iter::once(gpu.uuid.as_str())
        .chain(inventory.mig_devices_of(&gpu.uuid).map(|(device, _)| device.uuid.as_str()))
        .collect();
    let is_own = |uuid: &String| own.contains(&uuid.as_str());
    let leases = ledger.leases.iter().filter(|lease| lease.devices.iter().any(is_own)).count();
    let usage = usage::of_host(&ledger, inventory, usage::SAMPLED, config);
    if let Some(error) = usage.error {
        bail!("whether the GPU is in use is not known: {error}");
    }
    let devices = usage.devices.iter().filter(|(uuid, _)| is_own(uuid));
    let processes = devices.flat_map(|(_, device)| &device.processes);
    let programs = processes.filter(|process| !process.holder.is_server).count();
    Ok((leases + programs > 0)
        .then(|| format!("the GPU is in use: {leases} containers with a share, {programs} processes")))
}

fn engine(wanted: Option<EngineName>) -> anyhow::Result<Engine> {
    let runtime = || runtime_program().map(Engine::Runtime);
    let works = |program: &'static str| {
        let mut command = process::Command::new(program);
        let answer = child::run_without_output(command.arg("info"), STEP_LIMIT);
        answer.is_ok_and(|status| status.success()).then_some(Engine::Program(program))
    };
    let found = match wanted {
        Some(EngineName::Docker) => works("docker"),
        Some(EngineName::Podman) => works("podman"),
        Some(EngineName::Runtime) => runtime(),
        None => works("docker").or_else(|| works("podman")).or_else(runtime),
    };
    found.context("no container engine answers: `docker info`, `podman info`, and sublet-runtime for root")
}

/// `sublet-runtime` beside this program, or in PATH.
fn runtime_program() -> Option<PathBuf> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    let own = std::env::current_exe().ok()?.with_file_name("sublet-runtime");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path = std::env::split_paths(&path).map(|dir| dir.join("sublet-runtime"));
    std::iter::once(own).chain(in_path).find(|path| path.is_file())
}

fn version(engine: &Engine) -> String {
    let mut command = process::Command::new(engine.program());
    let output = child::run_until(command.arg("--version"), STEP_LIMIT, &|| false);
    let line = output.ok().and_then(|output| output.stdout.lines().next().map(safe));
    let name = || engine.program().file_name().unwrap_or_default().to_string_lossy().into_owned();
    line.filter(|line| !line.is_empty()).unwrap_or_else(name)
}

/// The image of the containers: the user's image or root file system, or this program's own.
fn image(given: Option<&str>, is_image: bool, scratch: &Scratch) -> anyhow::Result<String> {
    match given {
        None => scratch.own_root(),
        Some(image) if is_image => Ok(image.to_owned()),
        Some(root) => {
            let path = Path::new(root).canonicalize();
            Ok(path.with_context(|| format!("--image {}", safe(root)))?.display().to_string())
        }
    }
}

fn title(arguments: &Arguments) -> String {
    let own = || match &arguments.image {
        Some(image) => format!("{image} {}", arguments.command.join(" ")).trim().to_owned(),
        None => "built-in loads".to_owned(),
    };
    arguments.title.clone().unwrap_or_else(own)
}

fn settings(arguments: &Arguments, config: &Config) -> Settings {
    Settings {
        seconds: arguments.time.as_secs_f64(),
        warm_up_seconds: arguments.warm_up.as_secs_f64(),
        repeat: arguments.repeat,
        image: arguments.image.clone().unwrap_or_default(),
        command: arguments.command.clone(),
        parse: arguments.image.as_ref().map(|_| arguments.parse.clone()).unwrap_or_default(),
        http: arguments.http.clone().unwrap_or_default(),
        run_options: arguments.run_option.clone(),
        sm_overcommit: config.limits.sm_overcommit,
        time_slice_max: config.limits.time_slice_max,
    }
}

fn modes(arguments: &Arguments, gpu: &Device) -> Vec<Mode> {
    if !arguments.modes.is_empty() {
        return arguments.modes.clone();
    }
    let all: &[&str] = if gpu.mig_enabled {
        &["mig"]
    } else {
        &["exclusive", "time-slice", "mps", "mps:equal", "dedicated"]
    };
    all.iter().filter_map(|text| mode(text).ok()).collect()
}

fn loads(arguments: &Arguments) -> Vec<String> {
    match (&arguments.image, &arguments.http) {
        (Some(_), Some(_)) => vec!["http".to_owned()],
        (Some(_), None) => vec!["command".to_owned()],
        (None, _) => arguments.loads.iter().map(crate::shown::name_of).collect(),
    }
}

fn client(arguments: &Arguments, most: u32) -> anyhow::Result<Option<Client>> {
    let Some(url) = &arguments.http else { return Ok(None) };
    let read = |path: &PathBuf| fs::read(path).with_context(|| format!("--post {}", path.display()));
    let body = arguments.post.as_ref().map(read);
    Ok(Some(Client {
        url: url.clone(),
        body: body.transpose()?,
        content_type: arguments.content_type.clone(),
        ports: free_ports(most)?,
    }))
}

/// Why not all containers of `planned` would start on the GPU with this UUID; `None`: they would, or nothing would be
/// created for them.
fn lacking(planned: &Cell, gpu: &str, config: &Config) -> Option<String> {
    let is_made = config.mig.dynamic && planned.mode.sharing == Sharing::Mig && !planned.by_hand;
    if !is_made {
        return None;
    }
    refused(planned, gpu, config).unwrap_or_else(|error| Some(super::tables::chain(&error)))
}

fn refused(planned: &Cell, gpu: &str, config: &Config) -> anyhow::Result<Option<String>> {
    let (annotations, runtime) = (planned.annotations(gpu), Some("sublet".to_owned()));
    let service = Service { annotations, runtime, ..Service::default() };
    let stack = Stack { services: vec![service; planned.n as usize], ..Stack::default() };
    let world = (super::settled_ledger(config)?, confirmed_inventory(config)?);
    let (fitted, _) = fit(&stack, None, world, &Names::default(), Whose::callers(config), config)?;
    let refused = |(number, Fitted { outcome, .. }): (usize, Fitted)| match outcome {
        // The rest of that refusal is of the devices that are there.
        Outcome::Not(NotPlaced::Refused(AdmitError::Unmade { why, .. })) => {
            Some(format!("container {} gets no MIG device: {why}", number + 1))
        }
        Outcome::Not(why) => Some(format!("container {} would be refused: {why}", number + 1)),
        _ => None,
    };
    Ok((0..).zip(fitted).find_map(refused))
}
