//! `sublet doctor --run`: runs a test container that reports what it got. It needs no image and no
//! network: its root filesystem is this program and the C library that it runs with.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;

use super::probe::Probed;
use super::stop::Stop;
use super::tables::{self, Format};
use crate::own_root::{STEP_LIMIT, answer, import};
use sublet_core::process::child;
use sublet_core::request::{self, Request};
use sublet_core::share::{Mode, bytes_of_process};

/// The longest `sublet.wait`, the creation of a MIG instance, and the engine's container start together.
const RUN_LIMIT: Duration = Duration::from_secs(240);

/// An engine that can run the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// With the runtime sublet
    Docker,
    /// With the precreate hook
    Podman,
}

impl Engine {
    /// Its program, and the options of `run` that make the container use sublet.
    const fn program(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Self::Docker => ("docker", &["--runtime=sublet"]),
            Self::Podman => ("podman", &[]),
        }
    }
}

/// Runs the probe with `annotations`. It fails if the container gets no GPU or sees another container's GPU. A share
/// in MPS mode also fails without an MPS server, or with more memory than its limit.
///
/// # Errors
/// The engine's message, or the probe's.
pub fn run(engine: Engine, annotations: &[(String, String)], format: Format) -> anyhow::Result<ExitCode> {
    // Before anything is created, so that a signal still lets everything be removed.
    let stop = Stop::listen()?;
    let (program, options) = engine.program();
    let made = ProbeContainer::new(program, &stop)?;
    import(program, &made.dir, &made.image)?;
    let probed = made.probe(options, annotations, RUN_LIMIT)?;
    tables::print(format, &probed, || table(&probed))?;
    // The request, if this host's configuration can be read.
    let config = sublet_core::config_files::load().ok();
    let understood = |config| {
        request::parse(&annotations.iter().cloned().collect(), None, None, &config).ok().filter(is_of_mps)
    };
    let request = config.and_then(understood);
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

fn table(probed: &Probed) -> String {
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

/// The image, the directory it is built in, and the container. All are removed on drop.
struct ProbeContainer<'a> {
    stop: &'a Stop,
    engine: &'a str,
    container: String,
    image: String,
    dir: PathBuf,
}

impl<'a> ProbeContainer<'a> {
    fn new(engine: &'a str, stop: &'a Stop) -> anyhow::Result<Self> {
        let container = format!("sublet-doctor-{}", std::process::id());
        let dir = std::env::temp_dir().join(&container);
        // An existing directory is refused: it may be another user's link.
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Self { stop, engine, image: format!("{container}:probe"), container, dir })
    }

    fn probe(
        &self,
        options: &[&str],
        annotations: &[(String, String)],
        limit: Duration,
    ) -> anyhow::Result<Probed> {
        let mut command = Command::new(self.engine);
        command.args(["run", "--rm", "--network=none", "--name", &self.container]).args(options);
        for (key, value) in annotations {
            command.arg("--annotation").arg(format!("{key}={value}"));
        }
        let stop = || self.stop.is_wanted();
        let told = answer(command.args([&self.image, "/sublet", "probe"]), limit, &stop)?;
        serde_json::from_str(&told).context("the probe's answer")
    }
}

impl Drop for ProbeContainer<'_> {
    fn drop(&mut self) {
        // An engine that was interrupted has not removed its container.
        for [verb, what] in [["rm", &self.container], ["rmi", &self.image]] {
            let mut clear = Command::new(self.engine);
            let _ =
                child::run_without_output(clear.args([verb, "--force", what]).process_group(0), STEP_LIMIT);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::signal::Signal;
    use sublet_core::config::Config;

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
        let made = ProbeContainer::new(engine.to_str().unwrap(), stop).unwrap();
        let (name, left) = (made.container.clone(), made.dir.clone());
        let Err(error) = made.probe(&["--x"], &[], limit) else { panic!() };
        assert!(error.to_string().contains(expected), "{error}");
        drop(made);
        let told = fs::read_to_string(log).unwrap();
        let run = format!("run --rm --network=none --name {name} --x {name}:probe /sublet probe\n");
        // On a busy machine the program is stopped before it has written anything.
        let told = told.strip_prefix(&run).unwrap_or(&told);
        assert_eq!(told, format!("rm --force {name}\nrmi --force {name}:probe\n"));
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
}
