//! A driver root in a temporary directory, for this module's tests.
#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::new_without_default,
    reason = "for tests: the names say it, and a panic is what they are for"
)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::TempDir;

use crate::config::{Config, Driver};

pub struct Root(TempDir);

impl Root {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn with_driver(version: &str) -> Self {
        let root = Self::new();
        root.file(
            "/proc/driver/nvidia/version",
            format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  SIMULATED\n"),
        );
        root
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A configuration with the state below `run`, the driver below this root, and defaults otherwise.
    pub fn config(&self) -> Config {
        Config {
            state_dir: self.path().join("run"),
            driver: Driver { root: self.path().to_owned(), ..Driver::default() },
            ..Config::default()
        }
    }

    pub fn file(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = crate::fs::under(self.path(), path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// An empty file that can be run.
    pub fn program(&self, path: &str) -> &Self {
        self.program_of(path, "")
    }

    /// A file that can be run.
    pub fn program_of(&self, path: &str, content: impl AsRef<[u8]>) -> &Self {
        self.file(path, content);
        fs::set_permissions(crate::fs::under(self.path(), path), fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    pub fn link(&self, path: &str, target: &str) -> &Self {
        let path = crate::fs::under(self.path(), path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
        self
    }

    /// A GPU that the driver lists, with the first two bytes of its PCI configuration.
    pub fn gpu(&self, bus_id: &str, vendor: [u8; 2]) -> &Self {
        self.file(&format!("/proc/driver/nvidia/gpus/{bus_id}/information"), "Model: NVIDIA H200\n");
        self.file(&format!("/sys/bus/pci/devices/{bus_id}/config"), [&vendor[..], &[0; 254]].concat())
    }
}
