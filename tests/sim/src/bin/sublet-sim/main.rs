//! `sublet-sim up --topology FILE --root DIR` creates a simulated driver, `sublet-sim down --root DIR` removes it, and
//! `sublet-sim reboot --root DIR` puts it into the state after a reboot. `sublet-sim xid GPU NUMBER PID TEXT --root DIR` makes a
//! GPU (NVML's index) report an Xid, in the kernel's log and by NVML's events; PID is `-` where the driver names no process.

mod driver_files;
mod elf;
mod kernel;
mod processes;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use nvidia_ml::layout::state_file::State;
use nvidia_ml::layout::topology::Topology;
use nvidia_ml::layout::{Root, health};

const USAGE: &str = "usage: sublet-sim up --topology FILE --root DIR | sublet-sim down --root DIR \
                     | sublet-sim reboot --root DIR | sublet-sim xid GPU NUMBER PID TEXT --root DIR";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["up", "--topology", topology, "--root", dir] | ["up", "--root", dir, "--topology", topology] => {
            up(Path::new(topology), Path::new(dir))
        }
        ["down", "--root", dir] => down(Path::new(dir)),
        ["reboot", "--root", dir] => reboot(Path::new(dir)),
        ["xid", gpu, number, pid, text, "--root", dir] => xid([gpu, number, pid, text], Path::new(dir)),
        ["hold", tag, minor, mib] => processes::hold(tag, minor, mib),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sublet-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The last line it prints is the path of the config file.
fn up(topology: &Path, dir: &Path) -> Result<()> {
    let root = new_root(dir)?;
    let topology = Topology::from_toml(topology, root.dir())?;
    for sub in ["usr/bin", "sim", "run"] {
        directory(&root.join(sub))?;
    }
    println!("sublet-sim: {} simulated GPUs, driver {}", topology.gpu.len(), topology.driver);
    kernel::files(&root, &topology)?;
    kernel::nodes(&root, &topology)?;
    driver_files::make(&root, &topology)?;
    State::initial(&topology).write(&root)?;
    let config = driver_files::config(&root)?;
    // This file is written last. With it the root is complete.
    write(root.topology(), serde_json::to_string(&topology)?)?;
    processes::start(&root, &topology)?;
    println!("sublet-sim: laid out below {}", root.dir().display());
    println!("{}", config.display());
    Ok(())
}

/// Simulates a reboot of the host: processes end, and settings and MIG instances are lost. The caller removes the
/// product's state in `DIR/run`.
fn reboot(dir: &Path) -> Result<()> {
    let root = Root::new(dir.canonicalize()?);
    let topology = Topology::load(&root)?;
    processes::end(&root)?;
    State::change_mig(&root, &topology, |state| {
        *state = state.after_reboot(&topology);
        Ok::<_, anyhow::Error>(())
    })??;
    processes::start(&root, &topology)
}

fn xid([gpu, number, pid, text]: [&str; 4], dir: &Path) -> Result<()> {
    let root = Root::new(dir.canonicalize()?);
    let (topology, index) = (Topology::load(&root)?, gpu.parse::<u32>()?);
    let gpu = topology.gpu.iter().find(|gpu| gpu.index == index).context("no such GPU")?;
    let pid = if pid == "-" { None } else { Some(pid.parse()?) };
    Ok(health::report(&root, gpu, number.parse()?, pid, text)?)
}

fn new_root(dir: &Path) -> Result<Root> {
    let taken = dir.exists() && fs::read_dir(dir)?.next().is_some();
    ensure!(!taken, "{} is not empty: end it first with sublet-sim down --root", dir.display());
    directory(dir)?;
    Ok(Root::new(dir.canonicalize()?))
}

fn down(dir: &Path) -> Result<()> {
    if !dir.exists() {
        println!("sublet-sim: nothing at {}", dir.display());
        return Ok(());
    }
    let root = Root::new(dir.canonicalize()?);
    // An incomplete `up` has no topology yet.
    ensure!(root.join("sim").is_dir(), "{} is no simulated driver: left as it is", root.dir().display());
    processes::end(&root)?;
    let mounts = mounts_below(root.dir())?;
    if !mounts.is_empty() {
        bail!("still mounted: {mounts:?}; unmount and run down again");
    }
    fs::remove_dir_all(root.dir()).with_context(|| format!("{}", root.dir().display()))
}

/// Removing the tree must not reach through a mount.
fn mounts_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    Ok(points.filter(|point| point.starts_with(dir) && point != dir).collect())
}

/// Mode 0755, independent of the umask: containers' users must be able to pass through.
fn directory(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
    fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).with_context(|| format!("{}", dir.display()))
}

fn write(file: impl AsRef<Path>, content: impl AsRef<[u8]>) -> Result<()> {
    let file = file.as_ref();
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent).with_context(|| format!("{}", parent.display()))?;
    }
    fs::write(file, content).with_context(|| format!("{}", file.display()))
}
