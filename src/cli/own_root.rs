//! A root filesystem that holds this program and the C library that it runs with, for containers that need no image and no
//! network; and the engines that are asked to make an image of it.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail};

use sublet_core::process::child::{self, ChildError};
use sublet_core::text::safe_long;

/// The libraries of glibc that libcuda needs (glibc before 2.34 is split into several files).
const LIBRARIES: [&str; 5] = ["libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1"];

/// The path of the loader, as programs name it (the psABI of each machine).
const LOADER: &str =
    if cfg!(target_arch = "x86_64") { "lib64/ld-linux-x86-64.so.2" } else { "lib/ld-linux-aarch64.so.1" };

/// Where this program is in that root.
pub const PROGRAM: &str = "/sublet";

/// Limit for packing a few files with tar, importing them, or removing the image.
pub const STEP_LIMIT: Duration = Duration::from_secs(60);

/// A directory of this process's own, and the image that an engine makes in it. Both are removed on drop.
pub struct Scratch {
    /// The directory.
    pub dir: PathBuf,
    image: String,
    engine: Option<String>,
}

impl Scratch {
    /// A directory called `name`; `None` for the engine: there will be no image.
    ///
    /// # Errors
    /// It cannot be made. An existing one is refused: it may be another user's link.
    pub fn new(name: &str, engine: Option<&str>) -> anyhow::Result<Self> {
        let dir = std::env::temp_dir().join(name);
        DirBuilder::new()
            .mode(0o700)
            .create(&dir)
            .with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Self { dir, image: format!("{name}:own"), engine: engine.map(str::to_owned) })
    }

    /// The start of containers with this program: the engine's image, else the root filesystem.
    ///
    /// # Errors
    /// This program is linked statically, the files cannot be copied, or the engine's message.
    pub fn own_root(&self) -> anyhow::Result<String> {
        let (root, archive) = (self.dir.join("root"), self.dir.join("root.tar"));
        lay_out(&root)?;
        let Some(engine) = &self.engine else { return Ok(root.display().to_string()) };
        // Neither command is interrupted: an engine stopped during an import may finish it after the clean-up.
        let whole = || false;
        let mut tar = Command::new("tar");
        answer(tar.arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."), STEP_LIMIT, &whole)?;
        answer(Command::new(engine).arg("import").arg(&archive).arg(&self.image), STEP_LIMIT, &whole)?;
        Ok(self.image.clone())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(engine) = &self.engine {
            remove(engine, "rmi", &self.image);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Has the engine remove a container (`rm`) or an image (`rmi`), if it is there.
pub fn remove(engine: &str, verb: &str, name: &str) {
    let mut command = Command::new(engine);
    let _ = child::run_without_output(command.args([verb, "--force", name]).process_group(0), STEP_LIMIT);
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
    let maps = fs::read_to_string("/proc/self/maps")?;
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])));
    let is_library = |path: &PathBuf| {
        path.file_name().unwrap_or_default().to_string_lossy().contains(".so.") && path.is_file()
    };
    let mapped: BTreeSet<PathBuf> = paths.filter(is_library).collect();
    let libc = mapped.iter().find(|path| path.ends_with("libc.so.6")).and_then(|path| path.parent());
    let Some(directory) = libc else {
        bail!(
            "this sublet is linked statically, so it cannot load libcuda in a container: use a sublet that is \
         linked dynamically"
        )
    };
    let libraries = LIBRARIES.iter().map(|name| directory.join(name)).filter(|path| path.is_file());
    for path in &libraries.chain(mapped.iter().cloned()).collect::<BTreeSet<_>>() {
        copy(path, &root.join(path.strip_prefix("/").unwrap_or(path)))?;
    }
    copy(&Path::new("/").join(LOADER), &root.join(LOADER)).map(drop)
}

/// The output of a program; if it fails, an error with its message.
pub fn answer(command: &mut Command, limit: Duration, stop: &dyn Fn() -> bool) -> anyhow::Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    // A process group of its own: Ctrl-C at a terminal signals the whole group, and only this program should receive
    // it.
    let finished = match child::run_until(command.process_group(0), limit, stop) {
        Ok(finished) => finished,
        Err(ChildError::Io(error)) if error.kind() == std::io::ErrorKind::Interrupted => {
            bail!("interrupted; the container and its image were removed")
        }
        Err(ChildError::Io(error)) => return Err(error).with_context(|| format!("cannot run {name}")),
        Err(ChildError::Timeout) => {
            bail!("{name} took longer than {} s and was killed: does `{name} ps` answer?", limit.as_secs())
        }
    };
    if !finished.status.success() {
        bail!("{name}: {}", safe_long(&finished.stderr.trim().replace('\n', " "), 1000));
    }
    Ok(finished.stdout)
}
