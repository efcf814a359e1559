//! `sublet doctor`: checks what keeps containers on this host from their shares. `--run` runs a test container, and in it
//! `sublet probe`, which reports what the container got. It needs no image and no network: its root filesystem is this
//! program and the C library that it runs with.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::stop::Stop;
use super::tables::{self, Format};
use crate::doctor::{self, Check, Host, Seen, Verdict};
use crate::own_root::{Scratch, answer, remove};
use crate::shown::{name_of, word};
use sublet_core::config_files;
use sublet_core::inventory::Inventory;
use sublet_core::parse_errors::plain;
use sublet_core::process::child::{self, ChildError};
use sublet_core::process::sublet::PATH;
use sublet_core::request::{self, Request};
use sublet_core::share::{Mode, bytes_of_process};

/// A program, such as an engine's, that does not answer within this time is given up.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long one of two engines may take where a person waits for a container's name.
const ENGINE_LIMIT: Duration = Duration::from_millis(800);

/// A sleeping driver is woken within seconds; one that hangs does not answer at all.
const NVML_LIMIT: Duration = Duration::from_secs(60);

/// In bytes: more than the inventory of 16 GPUs full of processes takes.
const LONGEST: usize = 8 << 20;

/// Arguments of `sublet doctor`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Read files only: takes under a second, and asks neither NVML, nor engines, nor processes
    #[arg(long)]
    quick: bool,
    /// Run a test container instead, which reports what it got; needs no image and no network
    #[arg(long, value_enum, value_name = "ENGINE", conflicts_with = "quick")]
    run: Option<Engine>,
    /// An annotation of the test container; default: sublet.sm=25 and sublet.memory=2GiB
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE", requires = "run")]
    annotations: Vec<(String, String)>,
    /// Fail on warnings too: exit code 1, as for a failed check
    #[arg(long, conflicts_with = "run")]
    strict: bool,
    /// Print what NVML reports; another sublet doctor calls this
    #[arg(long, hide = true, conflicts_with_all = ["quick", "run", "strict"])]
    inventory: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What is printed as JSON.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Doctor")]
pub struct Document<'a> {
    /// `sublet.doctor/1`.
    schema: &'static str,
    checks: &'a [Check],
}

/// Runs it; it fails where a check does, and with `--strict` where one warns.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    if let Some(engine) = arguments.run {
        // A limit of each kind, small enough for any GPU.
        let small = [("sublet.sm", "25"), ("sublet.memory", "2GiB")];
        let small = small.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let given = &arguments.annotations;
        return run_probe(engine, if given.is_empty() { &small } else { given }, arguments.format);
    }
    let loaded = config_files::load();
    if arguments.inventory {
        tables::json(&crate::probe::probe(&loaded.unwrap_or_default())?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let fix = "correct it, then run `sublet config check`".to_owned();
    let (result, found, fix) = match &loaded {
        Ok(_) => (Verdict::Pass, "valid".to_owned(), None),
        Err(error) => (Verdict::Fail, error.to_string(), Some(fix)),
    };
    let mut checks = vec![Check { check: "configuration", result, found, fix }];
    let config = loaded.unwrap_or_default();
    checks.extend(doctor::run(&Host::of(&config, arguments.quick, ask, ask_nvml)));
    let text = || format!("{}\n\n{}", table(&checks), summary(&checks));
    tables::print(arguments.format, &Document { schema: "sublet.doctor/1", checks: &checks }, text)?;
    let worst = if arguments.strict { Verdict::Warn } else { Verdict::Fail };
    Ok(if checks.iter().any(|check| check.result >= worst) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One line per check, with its fix at the end.
fn table(checks: &[Check]) -> String {
    let row = |check: &Check| {
        let fix = check.fix.as_ref().map(|fix| format!("  -> {fix}")).unwrap_or_default();
        vec![word(&check.result), check.check.to_owned(), format!("{}{fix}", check.found)]
    };
    tables::table(&["RESULT", "CHECK", "FOUND  -> FIX"], checks.iter().map(row).collect())
}

/// How many checks there were, and how they went.
fn summary(checks: &[Check]) -> String {
    let each = [Verdict::Fail, Verdict::Warn, Verdict::Pass, Verdict::Skip].map(|verdict| {
        let count = checks.iter().filter(|check| check.result == verdict).count();
        format!("{count} {}", word(&verdict))
    });
    format!("{} checks: {}", checks.len(), each.join(", "))
}

/// The inventory by NVML, read in a child process. A child that hangs with the driver is left behind.
fn ask_nvml() -> Result<Inventory, String> {
    let mut command = Command::new("/proc/self/exe");
    answered(command.args(["doctor", "--inventory", "--format=json"]), NVML_LIMIT)
}

fn answered(command: &mut Command, limit: Duration) -> Result<Inventory, String> {
    match child::run_whole(command, limit, LONGEST) {
        Ok(finished) if finished.status.success() => serde_json::from_str(&finished.stdout)
            .map_err(|error| format!("NVML's answer: {}", plain(&error.to_string(), None))),
        Ok(finished) => {
            let words = finished.stderr.lines().last().unwrap_or("the process that asks NVML ended");
            Err(words.strip_prefix("sublet: ").unwrap_or(words).to_owned())
        }
        Err(ChildError::Timeout) => Err(format!("NVML gave no answer in {} s", limit.as_secs())),
        Err(ChildError::Io(error)) => Err(format!("NVML cannot be asked: {error}")),
    }
}

/// The standard output of a program of this host, if it succeeds.
pub fn ask(argv: &[&str]) -> Option<String> {
    ask_within(ANSWER_LIMIT, argv).ok().flatten()
}

/// Docker's or Podman's answer about the container `text`, by a Go template. One whose socket hangs is not waited for.
pub fn ask_engines(template: &str, text: &str) -> Option<String> {
    let of = |engine| {
        let argv = [engine, "container", "inspect", "--format", template, "--", text];
        let said = ask_within(ENGINE_LIMIT, &argv);
        if matches!(said, Err(ChildError::Timeout)) {
            eprintln!("sublet: note: {engine} was asked for the container and gave no answer");
        }
        // Docker's names begin with a slash.
        Some(said.ok().flatten()?.trim().trim_start_matches('/').to_owned())
    };
    ["docker", "podman"].into_iter().find_map(of)
}

fn ask_within(limit: Duration, argv: &[&str]) -> Result<Option<String>, ChildError> {
    let Some((program, arguments)) = argv.split_first() else { return Ok(None) };
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).env("LC_ALL", "C.UTF-8").args(arguments);
    let kept = ["HOME", "DOCKER_HOST", "XDG_RUNTIME_DIR"];
    command.envs(kept.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    let finished = child::run(&mut command, "", limit)?;
    Ok(finished.status.success().then_some(finished.stdout))
}

// `sublet doctor --run`.

/// What the creation of a MIG instance and the engine's container start take beside `sublet.wait`, together.
const BESIDE_WAIT: Duration = Duration::from_secs(180);

/// An engine that can run the probe: its program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Engine {
    /// With the runtime sublet
    Docker,
    /// With the precreate hook
    Podman,
}

/// Runs the probe with `annotations`. It fails if the container gets no GPU or sees another container's GPU. A share
/// in MPS mode also fails without an MPS server, or with more memory than its limit.
///
/// # Errors
/// The engine's message, or the probe's.
fn run_probe(engine: Engine, annotations: &[(String, String)], format: Format) -> anyhow::Result<ExitCode> {
    // Before anything is created, so that a signal still lets everything be removed.
    let stop = Stop::listen()?;
    let limit = BESIDE_WAIT + config_files::load().unwrap_or_default().limits.wait_max;
    let program = name_of(&engine);
    let options: &[&str] = if engine == Engine::Docker { &["--runtime=sublet"] } else { &[] };
    let made = ProbeContainer::new(&program, limit, &stop)?;
    let probed = made.probe(&made.scratch.own_root()?, options, annotations)?;
    tables::print(format, &probed, || table_of_seen(&probed))?;
    // The request, if this host's configuration can be read.
    let request = config_files::load().ok().and_then(|config| {
        request::parse(&annotations.iter().cloned().collect(), None, None, &config).ok().filter(is_of_mps)
    });
    if !probed.seen.mps && request.is_some() {
        bail!(
            "the container is not connected to an MPS server, so the limits of its share are not in force: \
             see `sublet status`"
        );
    }
    let limit = request.and_then(|request| memory_limit(&request, probed.seen.memory_total_bytes));
    if let Some(limit) = limit.filter(|limit| probed.seen.memory_free_bytes > *limit) {
        bail!(
            "the container may allocate {}, but the limit of its share is {}, so the limit is not in \
             force: see `sublet status`",
            tables::memory(probed.seen.memory_free_bytes),
            tables::memory(limit)
        );
    }
    Ok(if probed.neighbours_hidden { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The memory limit of one process on a device of `total` bytes.
fn memory_limit(request: &Request, total: u64) -> Option<u64> {
    Some(bytes_of_process(request.memory?.on(total), request.processes.get()))
}

/// Whether the share uses MPS on every device that can serve it.
fn is_of_mps(request: &Request) -> bool {
    request.mode == Some(Mode::Mps) || request.mode == Some(Mode::TimeSlice) && request.memory.is_some()
}

fn table_of_seen(probed: &Probed) -> String {
    let seen = &probed.seen;
    let memory =
        format!("{} of {}", tables::memory(seen.memory_free_bytes), tables::memory(seen.memory_total_bytes));
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let rows = [
        ("devices", seen.devices.to_string()),
        ("SMs seen", seen.sms.to_string()),
        ("memory free", memory),
        ("MPS", yes(seen.mps)),
        ("neighbours hidden", yes(probed.neighbours_hidden)),
    ];
    tables::table(&["PROBE", "SAW"], rows.map(|(name, value)| vec![name.to_owned(), value]).to_vec())
}

/// The container, and what its image is built in. Both are removed on drop.
struct ProbeContainer<'a> {
    stop: &'a Stop,
    engine: &'a str,
    /// How long it may run.
    limit: Duration,
    container: String,
    scratch: Scratch,
}

impl<'a> ProbeContainer<'a> {
    fn new(engine: &'a str, limit: Duration, stop: &'a Stop) -> anyhow::Result<Self> {
        let container = format!("sublet-doctor-{}", std::process::id());
        Ok(Self { stop, engine, limit, scratch: Scratch::new(&container, Some(engine))?, container })
    }

    fn probe(
        &self,
        image: &str,
        options: &[&str],
        annotations: &[(String, String)],
    ) -> anyhow::Result<Probed> {
        let mut command = Command::new(self.engine);
        command.args(["run", "--rm", "--network=none", "--name", &self.container]).args(options);
        let given = annotations.iter().map(|(key, value)| format!("{key}={value}"));
        command.args(given.flat_map(|text| ["--annotation".to_owned(), text]));
        let stop = || self.stop.is_wanted();
        let output = answer(command.args([image, "/sublet", "probe"]), self.limit, &stop)?;
        serde_json::from_str(&output).context("the probe's answer")
    }
}

impl Drop for ProbeContainer<'_> {
    fn drop(&mut self) {
        // An engine that was interrupted has not removed its container.
        remove(self.engine, "rm", &self.container);
    }
}

// `sublet probe`, in the container.

/// The probe's output, one line.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "DoctorRun")]
pub struct Probed {
    /// What a CUDA program sees.
    #[serde(flatten)]
    seen: Seen,
    /// Whether /dev and /proc show no GPU but the container's own.
    neighbours_hidden: bool,
}

/// `sublet probe`.
pub fn probe() -> anyhow::Result<()> {
    // Read before CUDA starts: the container as it was given.
    let shown = shown(Path::new("/"));
    let seen = doctor::look().map_err(anyhow::Error::msg)?;
    let neighbours_hidden = shown <= seen.devices;
    tables::json(&Probed { seen, neighbours_hidden })
}

/// The number of visible GPUs, by device nodes or by the driver's /proc files. For a hidden GPU the directory is
/// empty, or its file is empty or cannot be read.
fn shown(root: &Path) -> usize {
    let names = |path: &str| {
        let entries = fs::read_dir(root.join(path)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let minor = |name: &String| name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u32>().is_ok());
    let nodes = names("dev").iter().filter(|name| minor(name)).count();
    let gpus = "proc/driver/nvidia/gpus";
    let has_text = |bus: &&String| {
        fs::read(root.join(gpus).join(bus).join("information")).is_ok_and(|text| !text.is_empty())
    };
    nodes.max(names(gpus).iter().filter(has_text).count())
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;
    use sublet_core::config::Config;

    use super::*;

    #[test]
    fn a_driver_that_hangs_is_said() {
        let asked =
            |script: &str, limit| answered(Command::new("sh").args(["-c", script]), limit).unwrap_err();
        let brief = Duration::from_millis(200);
        assert_eq!(asked("exec sleep 60", brief), "NVML gave no answer in 0 s");
        let long = Duration::from_secs(10);
        assert_eq!(asked("echo sublet: it is missing >&2; exit 1", long), "it is missing");
        assert!(asked("echo {}", long).starts_with("NVML's answer: missing key"));
    }

    #[test]
    fn a_finding_stands_in_its_column() {
        let found = "NVIDIA's container toolkit rewrites what engines start";
        let fix = Some("set mode = \"cdi\" in its config.toml".to_owned());
        let check = Check { check: "toolkit", result: Verdict::Warn, found: found.to_owned(), fix };
        assert_eq!(
            tables::wrapped(&table(&[check]), Some(80)).lines().collect::<Vec<_>>(),
            [
                "RESULT  CHECK    FOUND  -> FIX",
                "warn    toolkit  NVIDIA's container toolkit rewrites what engines start  -> set",
                "                 mode = \"cdi\" in its config.toml",
            ]
        );
    }

    /// Checks the error `expected` and the clean-up commands when the engine's `run` never ends.
    fn cut_off(limit: Duration, stop: &Stop, expected: &str) {
        let dir = tempfile::tempdir().unwrap();
        let (engine, log) = (dir.path().join("engine"), dir.path().join("log"));
        let script = format!(
            "cat > {0} <<'E' && chmod 755 {0}\n#!/bin/sh\necho \"$@\" >> {1}\n[ $1 != run ] || exec sleep 60\nE\n",
            engine.display(),
            log.display()
        );
        // Another process writes the file. A child forked for another test would otherwise hold it open for writing.
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        let made = ProbeContainer::new(engine.to_str().unwrap(), limit, stop).unwrap();
        let (name, left) = (made.container.clone(), made.scratch.dir.clone());
        let Err(error) = made.probe("image", &["--x"], &[]) else { panic!() };
        assert!(error.to_string().contains(expected), "{error}");
        drop(made);
        let calls = fs::read_to_string(log).unwrap();
        let run = format!("run --rm --network=none --name {name} --x image /sublet probe\n");
        // On a busy machine the program is stopped before it has written anything.
        let calls = calls.strip_prefix(&run).unwrap_or(&calls);
        assert_eq!(calls, format!("rm --force {name}\nrmi --force {name}:own\n"));
        assert!(!left.exists());
    }

    /// One test, because the directory is named after this process's pid.
    #[test]
    fn an_engine_that_hangs_or_is_interrupted_is_ended_and_nothing_is_left() {
        let stop = Stop::listen().unwrap();
        cut_off(Duration::from_millis(300), &stop, "took longer than");
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            // Sent to this thread, in which the signals are blocked.
            nix::sys::signal::raise(signal).unwrap();
            cut_off(Duration::from_secs(60), &stop, "interrupted");
        }
    }

    #[test]
    fn the_limit_of_one_process() {
        let limit = |memory: &str, processes: &str| {
            let annotations = [("sublet.memory", memory), ("sublet.processes", processes)];
            let annotations = annotations.into_iter().map(|(key, value)| (key.into(), value.into()));
            let request = request::parse(&annotations.collect(), None, None, &Config::default()).unwrap();
            memory_limit(&request, 80 << 30)
        };
        assert_eq!(limit("8GiB", "1"), Some(8 << 30));
        assert_eq!(limit("8GiB", "4"), Some(2 << 30));
        assert_eq!(limit("25%", "2"), Some(10 << 30));
    }

    #[test]
    fn a_share_of_mps_is_known() {
        let of_mps = |annotations: &[(&str, &str)]| {
            let annotations = annotations.iter().map(|(key, value)| ((*key).into(), (*value).into()));
            is_of_mps(&request::parse(&annotations.collect(), None, None, &Config::default()).unwrap())
        };
        assert!(of_mps(&[("sublet.sm", "25")]));
        assert!(of_mps(&[("sublet.mode", "time-slice"), ("sublet.memory", "8GiB")]));
        assert!(!of_mps(&[("sublet.mode", "exclusive")]));
        assert!(!of_mps(&[("sublet.gpu", "any:2")]));
    }

    #[test]
    fn a_neighbour_shows_by_its_node_or_its_information() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let gpus = "proc/driver/nvidia/gpus";
        assert_eq!(shown(root.path()), 0);
        file("dev/nvidia0", "");
        file("dev/nvidiactl", "");
        file("dev/nvidia-caps/nvidia-cap1", "");
        file(&format!("{gpus}/0000:10:00.0/information"), "Model: NVIDIA H200\n");
        // Hides the other GPUs: a tmpfs over the directory, or /dev/null over the file.
        fs::create_dir_all(root.path().join(gpus).join("0000:11:00.0")).unwrap();
        file(&format!("{gpus}/0000:12:00.0/information"), "");
        assert_eq!(shown(root.path()), 1);
        file(&format!("{gpus}/0000:11:00.0/information"), "Model: NVIDIA H200\n");
        assert_eq!(shown(root.path()), 2);
        file("dev/nvidia1", "");
        file("dev/nvidia2", "");
        assert_eq!(shown(root.path()), 3);
    }
}
