//! `sublet doctor --run`: a container that gets a share and tells what it got. It needs no image and no
//! network: its root filesystem is this program and the C library that it runs with.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};

use anyhow::{Context as _, bail};
use clap::ValueEnum;

use super::output::{self, Format};
use super::probe::Probed;
use crate::text::safe;

/// An engine that a probe can be run by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// By the runtime sublet
    Docker,
    /// By the hook
    Podman,
}

impl Engine {
    const fn program(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// Options that lead to sublet.
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Docker => &["--runtime=sublet"],
            Self::Podman => &[],
        }
    }
}

/// What libcuda wants of the C library (glibc before 2.34 has it in several files).
const LIBRARIES: [&str; 5] = ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"];

/// Where programs name their loader (the psABI of each machine).
const LOADER: &str =
    if cfg!(target_arch = "x86_64") { "lib64/ld-linux-x86-64.so.2" } else { "lib/ld-linux-aarch64.so.1" };

/// Runs the probe with `annotations`; it fails where the container gets no GPU, or sees a neighbour's.
///
/// # Errors
/// The engine's words, or the probe's.
pub fn run(engine: Engine, annotations: &[(String, String)], format: Format) -> anyhow::Result<ExitCode> {
    let made = Made::image(engine)?;
    let annotations: Vec<String> = annotations.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let mut command = Command::new(engine.program());
    command.args(["run", "--rm", "--network=none"]).args(engine.options());
    for annotation in &annotations {
        command.args(["--annotation", annotation]);
    }
    let told = answer(command.args([&made.image, "/sublet", "probe"]))?;
    let probed: Probed = serde_json::from_slice(&told.stdout).context("the probe's answer")?;
    match format {
        Format::Json => output::json(&probed)?,
        Format::Table => println!("{}", table(&probed)),
    }
    Ok(if probed.neighbours_hidden { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(probed: &Probed) -> String {
    let seen = &probed.seen;
    let memory =
        format!("{} of {}", output::memory(seen.memory_free_bytes), output::memory(seen.memory_total_bytes));
    let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
    let rows = [
        ("devices", seen.devices.to_string()),
        ("SMs seen", seen.sms.to_string()),
        ("memory free", memory),
        ("MPS", yes(seen.mps)),
        ("neighbours hidden", yes(probed.neighbours_hidden)),
    ];
    output::table(&["PROBE", "SAW"], rows.map(|(name, value)| vec![name.to_owned(), value]).to_vec())
}

/// The image, and the directory that it is made in; gone with this.
struct Made {
    engine: Engine,
    image: String,
    dir: PathBuf,
}

impl Made {
    fn image(engine: Engine) -> anyhow::Result<Self> {
        let unique = format!("sublet-doctor-{}", std::process::id());
        let dir = std::env::temp_dir().join(&unique);
        // Not one that is there: it may be somebody's link.
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let made = Self { engine, image: format!("{unique}:probe"), dir };
        let (root, archive) = (made.dir.join("root"), made.dir.join("root.tar"));
        lay_out(&root)?;
        answer(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
        answer(Command::new(engine.program()).arg("import").arg(&archive).arg(&made.image))?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let mut remove = Command::new(self.engine.program());
        let _ =
            remove.args(["rmi", "--force", &self.image]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// This program at /sublet, and each library where the loader has it here.
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
        bail!("this sublet is static: a program without a loader cannot load libcuda")
    };
    let others = LIBRARIES.iter().map(|name| directory.join(name)).filter(|path| path.is_file());
    let all: BTreeSet<PathBuf> = others.chain(mapped.iter().cloned()).collect();
    for path in &all {
        copy(path, &root.join(path.strip_prefix("/").unwrap_or(path)))?;
    }
    copy(&Path::new("/").join(LOADER), &root.join(LOADER))?;
    Ok(())
}

/// The libraries in the text of `/proc/self/maps`.
fn mapped(maps: &str) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    let library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.contains(".so.") && path.is_file()
    };
    paths.filter(library).collect()
}

/// Runs a program; where it fails, its words.
fn answer(command: &mut Command) -> anyhow::Result<Output> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().replace('\n', " ");
        let pieces: Vec<char> = words.chars().take(1000).collect();
        let words: String = pieces.chunks(100).map(|piece| safe(&piece.iter().collect::<String>())).collect();
        bail!("{name}: {words}");
    }
    Ok(output)
}
