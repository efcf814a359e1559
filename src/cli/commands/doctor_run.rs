//! `sublet doctor --run`: runs a test container that reports what it got. It needs no image and no
//! network: its root filesystem is this program and the C library that it runs with.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::probe::Probed;
use super::tables::{self, Format};
use sublet_core::process::child::{self, ChildError};
use sublet_core::request::{self, Request};
use sublet_core::share::{Mode, bytes_of_process};
use sublet_core::text::safe;

/// The longest `sublet.wait`, the creation of a MIG instance, and the engine's container start together.
const RUN_LIMIT: Duration = Duration::from_secs(240);

/// Limit for packing a few files with tar, importing them, or removing the image.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// An engine that can run the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// With the runtime sublet
    Docker,
    /// With the precreate hook
    Podman,
}

impl Engine {
    const fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// The options of `run` that make the container use sublet.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Docker => &["--runtime=sublet"],
            Self::Podman => &[],
        }
    }
}

/// The libraries of glibc that libcuda needs (glibc before 2.34 is split into several files).
const LIBRARIES: [&str; 5] = ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"];

/// The path of the loader, as programs name it (the psABI of each machine).
const LOADER: &str =
    if cfg!(target_arch = "x86_64") { "lib64/ld-linux-x86-64.so.2" } else { "lib/ld-linux-aarch64.so.1" };

/// Runs the probe with `annotations`. It fails if the container gets no GPU or sees another container's GPU. A share
/// in MPS mode also fails without an MPS server, or with more memory than its limit.
///
/// # Errors
/// The engine's message, or the probe's.
pub fn run(engine: Engine, annotations: &[(String, String)], format: Format) -> anyhow::Result<ExitCode> {
    // Before anything is created, so that a signal still lets everything be removed.
    let stop = Stop::listen()?;
    let made = ProbeContainer::with_image(engine.program(), &stop)?;
    let probed = made.probe(engine.options(), annotations, RUN_LIMIT)?;
    match format {
        Format::Json => tables::json(&probed)?,
        Format::Table => println!("{}", table(&probed)),
    }
    let request = understood(annotations).filter(is_of_mps);
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

/// The request, if this host's configuration can be read.
fn understood(annotations: &[(String, String)]) -> Option<Request> {
    let config = sublet_core::config_files::load().ok()?;
    request::parse(&annotations.iter().cloned().collect(), None, None, &config).ok()
}

/// The memory limit of one process on a device of `total` bytes.
fn memory_limit(request: &Request, total: u64) -> Option<u64> {
    Some(bytes_of_process(request.memory?.on(total), request.processes.get()))
}

/// Whether the share uses MPS on every device that can serve it.
fn is_of_mps(request: &Request) -> bool {
    match request.mode {
        Some(Mode::Mps) => true,
        Some(Mode::TimeSlice) => request.memory.is_some(),
        Some(Mode::Mig | Mode::Exclusive) | None => false,
    }
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

/// Records a signal that asks this program to end (Ctrl-C, `systemctl stop`, a closed terminal).
struct Stop(SignalFd);

impl Stop {
    /// From here on these signals are recorded and do not end the program.
    fn listen() -> anyhow::Result<Self> {
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        signals.thread_block()?;
        Ok(Self(SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?))
    }

    fn is_wanted(&self) -> bool {
        matches!(self.0.read_signal(), Ok(Some(_)))
    }
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

    fn with_image(engine: &'a str, stop: &'a Stop) -> anyhow::Result<Self> {
        let made = Self::new(engine, stop)?;
        let (root, archive) = (made.dir.join("root"), made.dir.join("root.tar"));
        lay_out(&root)?;
        // Neither command is interrupted: an engine stopped during an import may finish it after the clean-up.
        let whole = || false;
        let mut tar = Command::new("tar");
        answer(tar.arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."), STEP_LIMIT, &whole)?;
        answer(Command::new(engine).arg("import").arg(&archive).arg(&made.image), STEP_LIMIT, &whole)?;
        Ok(made)
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
            let _ = child::run_deaf(clear.args([verb, "--force", what]).process_group(0), STEP_LIMIT);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Copies this program to /sublet, and each library to the path at which the loader finds it on this host.
fn lay_out(root: &Path) -> anyhow::Result<()> {
    for name in ["dev", "proc", "sys", "tmp", "run", "etc"] {
        fs::create_dir_all(root.join(name))?;
    }
    let copy = |from: &Path, to: &Path| {
        fs::create_dir_all(to.parent().unwrap_or(root))?;
        fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
    };
    copy(Path::new("/proc/self/exe"), &root.join("sublet"))?;
    let mapped = mapped(&fs::read_to_string("/proc/self/maps")?);
    let libc = mapped.iter().find(|path| path.ends_with("libc.so.6")).and_then(|path| path.parent());
    let Some(directory) = libc else {
        bail!(
            "this sublet is linked statically, so it cannot load libcuda in a container: use a sublet that is \
         linked dynamically"
        )
    };
    let others = LIBRARIES.iter().map(|name| directory.join(name)).filter(|path| path.is_file());
    let all: BTreeSet<PathBuf> = others.chain(mapped.iter().cloned()).collect();
    for path in &all {
        copy(path, &root.join(path.strip_prefix("/").unwrap_or(path)))?;
    }
    copy(&Path::new("/").join(LOADER), &root.join(LOADER))?;
    Ok(())
}

/// The paths of the libraries in the text of `/proc/self/maps`.
fn mapped(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    let library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains(".so.") && path.is_file()
    };
    paths.filter(library).collect()
}

/// The output of a program; if it fails, an error with its message.
fn answer(command: &mut Command, limit: Duration, stop: &dyn Fn() -> bool) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // A process group of its own: Ctrl-C at a terminal signals the whole group, and only this program should receive
    // it.
    let finished = match child::run_until(command.process_group(0), limit, stop) {
        Ok(finished) => finished,
        Err(ChildError::Io(error)) if error.kind() == ErrorKind::Interrupted => {
            bail!("interrupted; the container and its image were removed")
        }
        Err(ChildError::Io(error)) => return Err(error).with_context(|| format!("cannot run {name}")),
        Err(ChildError::Timeout) => {
            bail!("{name} took longer than {} s and was killed: does `{name} ps` answer?", limit.as_secs())
        }
    };
    if !finished.status.success() {
        let words = finished.stderr.trim().replace('\n', " ");
        let pieces: Vec<char> = words.chars().take(1000).collect();
        let words: String = pieces.chunks(100).map(|piece| safe(&piece.iter().collect::<String>())).collect();
        bail!("{name}: {words}");
    }
    Ok(finished.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;
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
