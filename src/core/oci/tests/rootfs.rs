//! Root filesystems to be looked into, and the paths that are looked for.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::Config;
use crate::grant::{Grant, Image, MPS_DEFAULT_DIR, MPS_DIR, Mount};
use crate::inventory::{DriverFile, FileKind, Inventory};
use crate::oci::rootfs::Tree;
use crate::oci::{ImageError, check_mps_directories, inspect};
use crate::place::fixture;
use crate::request::Request;
use crate::share::{Capability, Mode};

#[cfg(target_arch = "x86_64")]
pub(super) const TRIPLET: &str = "x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
pub(super) const TRIPLET: &str = "aarch64-linux-gnu";

/// A rootfs to be filled.
pub(super) struct Root(tempfile::TempDir);

impl Root {
    pub fn new() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        root.dir("rootfs");
        root
    }

    /// Debian with merged /usr.
    pub fn debian() -> Self {
        let root = Self::new();
        root.libc(&format!("rootfs/usr/lib/{TRIPLET}"));
        root.link("usr/lib", "rootfs/lib");
        root.dir("rootfs/usr/bin");
        root.dir("rootfs/tmp");
        root
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub fn dir(&self, path: &str) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn link(&self, target: &str, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    pub fn fifo(&self, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    }

    pub fn libc(&self, dir: &str) {
        self.file(&format!("{dir}/libc.so.6"), elf(2, machine()));
    }

    pub fn inspect_as(&self, spec: &Value, request: &Request, config: &Config) -> Result<Image, ImageError> {
        inspect_in(&self.path("rootfs"), spec, request, &inventory(), config)
    }

    /// As [`Self::inspect`], for a container whose placement has an MPS daemon.
    pub fn inspect_with_mps(&self, spec: &Value) -> Result<(), ImageError> {
        let image = self.inspect(spec)?;
        let default = image.takes_default_directory().then_some(MPS_DEFAULT_DIR);
        let directories = [MPS_DIR].into_iter().chain(default);
        let mounts =
            directories.map(|path| Mount { source: "/run/sublet/mps/x".into(), destination: path.into() });
        let grant = Grant { mounts: mounts.collect(), ..Grant::default() };
        check_mps_directories(spec, &Tree::open(spec, &self.path("rootfs"))?, &grant)
    }

    pub fn inspect(&self, spec: &Value) -> Result<Image, ImageError> {
        self.inspect_as(spec, &time_slice(), &Config::default())
    }

    pub fn library_dir(&self) -> Option<PathBuf> {
        self.inspect(&json!({})).unwrap().library_dir
    }
}

/// [`inspect`] of the root filesystem `rootfs`.
pub(super) fn inspect_in(
    rootfs: &Path,
    spec: &Value,
    request: &Request,
    inventory: &Inventory,
    config: &Config,
) -> Result<Image, ImageError> {
    inspect(spec, &Tree::open(spec, rootfs)?, request, inventory, config)
}

pub(super) fn machine() -> u16 {
    if cfg!(target_arch = "x86_64") { 62 } else { 183 }
}

pub(super) fn elf(class: u8, machine: u16) -> Vec<u8> {
    let mut header = vec![0x7f, b'E', b'L', b'F', class, 1, 1];
    header.resize(64, 0);
    header[18..20].copy_from_slice(&machine.to_le_bytes());
    header
}

pub(super) fn time_slice() -> Request {
    fixture::request(Mode::TimeSlice)
}

pub(super) fn inventory() -> Inventory {
    let library = FileKind::Library { soname: "libcuda.so.1".to_owned(), also: Vec::new() };
    let program = FileKind::Program { name: "nvidia-smi".to_owned() };
    let file =
        |source: &str, kind, capability| DriverFile { source: source.into(), kind, capability, needs: None };
    let files = vec![
        file("/host/libcuda.so.580", library, Capability::Compute),
        file("/host/nvidia-smi", program, Capability::Utility),
    ];
    Inventory { files, ..fixture::host(Vec::new()) }
}

pub(super) fn in_triplet(name: &str) -> PathBuf {
    Path::new("/usr/lib").join(TRIPLET).join(name)
}
