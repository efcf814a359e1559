//! Compute mode: which processes may create a context on a whole GPU.
//!
//! A container sees neither the driver's state nor other containers' processes, but its libcuda is the host's file. A
//! process with a context holds a read lock on one byte of that file. A process that knows that the GPU is in
//! `EXCLUSIVE_PROCESS` mode holds a read lock on a second byte. So a program in a container can find out that a GPU is
//! in use. It cannot find out the mode of a GPU without contexts.

use std::fs::File;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::device::Device;
use crate::layout::Root;
use crate::layout::state_file::State;

/// `nvmlComputeMode_t`.
const PROHIBITED: u32 = 2;
/// `nvmlComputeMode_t`.
const EXCLUSIVE_PROCESS: u32 = 3;

/// The right to have a context on one device, until dropped.
#[derive(Debug)]
pub struct Claim(Option<File>);

/// Takes the right to a context, if the compute mode and the existing contexts allow it. `libcuda` is any path of the
/// driver's libcuda. If it cannot be opened, the mode is unknown.
#[must_use]
pub fn claim(device: &Device, root: Option<&Root>, libcuda: &Path) -> Option<Claim> {
    let file = if device.on.instance.is_none() { File::open(libcuda).ok() } else { None };
    let Some(file) = file else { return Some(Claim(None)) };
    let mode = mode(device, root);
    let (held, exclusive) = bytes(device);
    let refused = mode == PROHIBITED
        || is_locked(&file, exclusive)
        || (mode == EXCLUSIVE_PROCESS && is_locked(&file, held));
    if refused || !lock(&file, libc::F_RDLCK, held) {
        return None;
    }
    let claim = Claim(Some(file));
    claim.refresh(device, root);
    Some(claim)
}

impl Claim {
    /// Announces the current mode, which may change while a context exists.
    pub fn refresh(&self, device: &Device, root: Option<&Root>) {
        let Some(file) = &self.0 else { return };
        let kind = if mode(device, root) == EXCLUSIVE_PROCESS { libc::F_RDLCK } else { libc::F_UNLCK };
        lock(file, kind, bytes(device).1);
    }
}

fn mode(device: &Device, root: Option<&Root>) -> u32 {
    let state = root.and_then(|root| State::read(root).ok());
    state.and_then(|state| state.compute_mode.get(&device.uuid).copied()).unwrap_or(0)
}

/// The bytes locked by processes with a context, and by processes that know that no other process may have one.
const fn bytes(device: &Device) -> (u32, u32) {
    (device.on.minor * 2, device.on.minor * 2 + 1)
}

fn lock(file: &File, kind: i32, byte: u32) -> bool {
    fcntl(file, FcntlArg::F_OFD_SETLK(&range(kind, byte))).is_ok()
}

fn is_locked(file: &File, byte: u32) -> bool {
    let mut range = range(libc::F_WRLCK, byte);
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut range));
    asked.is_ok() && i32::from(range.l_type) != libc::F_UNLCK
}

#[expect(clippy::cast_possible_truncation, reason = "two constants of fcntl.h that fit")]
fn range(kind: i32, byte: u32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: libc::off_t::from(byte),
        l_len: 1,
        l_pid: 0,
    }
}
