//! A simulated driver that is up, with NVML called as C would.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::ptr::null_mut;

use nvidia_ml::layout::Root;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t};

pub const SUCCESS: u32 = 0;
pub const UNINITIALIZED: u32 = 1;
pub const INVALID_ARGUMENT: u32 = 2;
pub const NOT_SUPPORTED: u32 = 3;
pub const NOT_FOUND: u32 = 6;
pub const INSUFFICIENT_SIZE: u32 = 7;
pub const RESET_REQUIRED: u32 = 16;
pub const IN_USE: u32 = 19;
pub const INSUFFICIENT_RESOURCES: u32 = 23;
pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;

/// Ended when dropped.
pub struct Driver {
    pub root: Root,
    pub lib: NvmlLib,
    _parent: tempfile::TempDir,
}

impl Driver {
    pub fn up(topology: &str) -> Self {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("topologies/{topology}.toml"));
        Self::up_with(&std::fs::read_to_string(file).unwrap())
    }

    /// From a topology's text.
    pub fn up_with(topology: &str) -> Self {
        let parent = tempfile::tempdir_in("/var/tmp").unwrap();
        // Other users must get through, and a checkout may be in a directory of root's alone.
        std::fs::set_permissions(parent.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let (dir, file) = (parent.path().join("root"), parent.path().join("topology.toml"));
        std::fs::write(&file, topology).unwrap();
        sim(&["up".as_ref(), "--topology".as_ref(), &file, "--root".as_ref(), &dir]);
        let root = Root::new(dir);
        // SAFETY: loading runs no code of the library's.
        let lib = unsafe { NvmlLib::new(root.libraries().join("libnvidia-ml.so.1")) }.unwrap();
        Self { root, lib, _parent: parent }
    }

    pub fn first(&self) -> nvmlDevice_t {
        let mut device = null_mut();
        // SAFETY: `device` is valid.
        unsafe {
            assert_eq!(self.lib.nvmlInit_v2(), SUCCESS);
            assert_eq!(self.lib.nvmlDeviceGetHandleByIndex_v2(0, &raw mut device), SUCCESS);
        }
        device
    }

    /// nvidia-smi of this driver.
    pub fn smi(&self, arguments: &str) -> Output {
        let mut command = Command::new(self.root.join("usr/bin/nvidia-smi"));
        command.args(arguments.split_whitespace()).output().unwrap()
    }

    /// What nvidia-smi says when it succeeds.
    pub fn said(&self, arguments: &str) -> String {
        let output = self.smi(arguments);
        assert!(output.status.success(), "{arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn reboot(&self) {
        sim(&["reboot".as_ref(), "--root".as_ref(), self.root.dir()]);
    }

    pub fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.root.join(file)).unwrap()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        sim(&["down".as_ref(), "--root".as_ref(), self.root.dir()]);
    }
}

fn sim(arguments: &[&Path]) {
    let output = Command::new(env!("CARGO_BIN_EXE_sublet-sim")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

pub fn root_or_skip(what: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: {what}: needs root");
    }
    root
}
