//! NVML's state between `nvmlInit` and `nvmlShutdown`, and its device handles.
#![allow(unsafe_code, reason = "dladdr")]

use std::ffi::{CStr, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::libc;
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED as DRIVER_NOT_LOADED,
    nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST as GPU_IS_LOST,
    nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT as INVALID_ARGUMENT,
    nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH as LIB_RM_VERSION_MISMATCH,
    nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED as NOT_SUPPORTED,
    nvmlReturn_enum_NVML_ERROR_UNINITIALIZED as UNINITIALIZED, nvmlReturn_enum_NVML_ERROR_UNKNOWN as UNKNOWN,
};

use super::faults::{self, Call};
use super::out::{Answer, code};
use crate::layout::instances::Partition;
use crate::layout::state_file::State;
use crate::layout::topology::{Gpu, Mig, Topology};
use crate::layout::{Root, trailer};

/// The simulated driver as this process sees it.
pub struct Session {
    /// Its root. A container has none: there the library has only its trailer.
    pub root: Option<Root>,
    /// Its GPUs.
    pub topology: Topology,
    users: u32,
}

static SESSION: Mutex<Option<Session>> = Mutex::new(None);

/// The device of a handle.
pub struct Target<'s> {
    /// The GPU.
    pub gpu: &'s Gpu,
    /// The MIG device on it.
    pub mig: Option<Mig>,
    /// The session.
    pub session: &'s Session,
}

fn lock() -> MutexGuard<'static, Option<Session>> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a user of NVML.
pub fn open() -> Answer {
    let mut slot = lock();
    let session = match slot.take() {
        Some(session) => session,
        None => Session::find()?,
    };
    let opened = session.unless_failing("nvmlInit_v2", None, || Ok(()));
    if opened.is_ok() || session.users > 0 {
        let users = session.users + u32::from(opened.is_ok());
        *slot = Some(Session { users, ..session });
    }
    opened
}

/// Removes a user. The last one ends the session.
pub fn close() -> Answer {
    let mut slot = lock();
    let session = slot.as_mut().ok_or(UNINITIALIZED)?;
    session.users -= 1;
    if session.users == 0 {
        *slot = None;
    }
    Ok(())
}

/// Answers from the session.
pub fn ask<A: FnOnce(&Session) -> Answer>(answer: A) -> u32 {
    ask_as(faults::function_of::<A>(), answer)
}

/// Answers from the session, for the exported function of this name.
pub fn ask_as(function: &str, answer: impl FnOnce(&Session) -> Answer) -> u32 {
    let slot = lock();
    let asked = slot.as_ref().ok_or(UNINITIALIZED);
    code(asked.and_then(|session| session.unless_failing(function, None, || answer(session))))
}

/// Answers about the device behind a handle.
pub fn device<A: FnOnce(&Target<'_>) -> Answer>(handle: nvmlDevice_t, answer: A) -> u32 {
    about(handle, faults::function_of::<A>(), answer)
}

/// Answers about the GPU with this index, for the exported function that finds it.
pub fn find<A: FnOnce(&Session) -> Answer>(index: u32, answer: A) -> u32 {
    let slot = lock();
    let asked = slot.as_ref().ok_or(UNINITIALIZED);
    let function = faults::function_of::<A>();
    code(asked.and_then(|session| session.unless_failing(function, Some(index), || answer(session))))
}

/// Answers about the GPU behind a handle. Not supported for a MIG device.
pub fn gpu<A: FnOnce(&Target<'_>) -> Answer>(handle: nvmlDevice_t, answer: A) -> u32 {
    about(handle, faults::function_of::<A>(), |target| {
        if target.mig.is_some() { Err(NOT_SUPPORTED) } else { answer(target) }
    })
}

/// Answers about the device behind a handle, for the exported function of this name.
pub fn about(handle: nvmlDevice_t, function: &str, answer: impl FnOnce(&Target<'_>) -> Answer) -> u32 {
    let slot = lock();
    let gpu = u32::try_from((handle.addr() & 0xffff).wrapping_sub(1)).ok();
    let asked = slot.as_ref().ok_or(UNINITIALIZED);
    code(asked.and_then(|session| session.unless_failing(function, gpu, || answer(&session.target(handle)?))))
}

/// A handle: the GPU's position plus one, and for a MIG device its ids in the higher bits.
#[must_use]
pub fn handle(gpu: &Gpu, mig: Option<&Mig>) -> nvmlDevice_t {
    let mig = mig.map_or(0, |mig| 1 << 16 | (mig.gi as usize) << 24 | (mig.ci as usize) << 32);
    ptr::without_provenance_mut((gpu.index as usize + 1) | mig)
}

impl Target<'_> {
    /// The GPU's current MIG state, or `None` if it does not support MIG.
    pub fn partition(&self) -> Answer<Option<Partition>> {
        Ok(self.session.state()?.mig.remove(&self.gpu.uuid))
    }
}

impl Session {
    fn find() -> Answer<Self> {
        let library = own_file().ok_or(DRIVER_NOT_LOADED)?;
        let root = Root::of_library(&library).map_err(|_| UNKNOWN)?;
        let topology = match &root {
            Some(root) => Topology::load(root).ok(),
            None => trailer::read(&library),
        };
        let topology = topology.ok_or(DRIVER_NOT_LOADED)?;
        if topology.files() != topology.driver {
            return Err(LIB_RM_VERSION_MISMATCH);
        }
        Ok(Self { root, topology, users: 0 })
    }

    /// Answers, unless a failure of `function` is due, for this GPU or for none.
    fn unless_failing(&self, function: &str, gpu: Option<u32>, answer: impl FnOnce() -> Answer) -> Answer {
        faults::around(self.root.as_ref(), Call { function, gpu }, answer)
    }

    /// Searching for a GPU fails at one that is sick or lost (nvml.h, `nvmlDeviceGetHandleByUUID`).
    pub fn search(&self, gpu: &Gpu) -> Answer {
        if self.lost(gpu) {
            return Err(GPU_IS_LOST);
        }
        self.root.as_ref().map_or(Ok(()), |root| faults::sick(root, gpu.index))
    }

    /// The state shared by all processes, or in a container the initial state.
    pub fn state(&self) -> Answer<State> {
        match &self.root {
            Some(root) => State::read(root).map_err(|_| UNKNOWN),
            None => Ok(State::initial(&self.topology)),
        }
    }

    /// The MIG devices of a GPU.
    pub fn mig_devices(&self, gpu: &Gpu) -> Answer<Vec<Mig>> {
        Ok(self.state()?.devices(gpu))
    }

    /// The device of a handle.
    pub fn target(&self, handle: nvmlDevice_t) -> Answer<Target<'_>> {
        let position = (handle.addr() & 0xffff).wrapping_sub(1);
        let gpu = self.topology.gpu.get(position).ok_or(INVALID_ARGUMENT)?;
        let mig = match handle.addr() >> 16 {
            0 => None,
            _ => Some(self.mig_behind(gpu, handle)?),
        };
        if self.lost(gpu) {
            return Err(GPU_IS_LOST);
        }
        Ok(Target { gpu, mig, session: self })
    }

    /// The MIG device of a handle. If it is destroyed, the handle is an invalid argument.
    fn mig_behind(&self, gpu: &Gpu, wanted: nvmlDevice_t) -> Answer<Mig> {
        let devices = self.mig_devices(gpu)?;
        devices.into_iter().find(|mig| handle(gpu, Some(mig)) == wanted).ok_or(INVALID_ARGUMENT)
    }

    /// It reads ffff, or has left /sys.
    fn lost(&self, gpu: &Gpu) -> bool {
        let Some(root) = &self.root else { return false };
        let config = fs::read(root.join("sys/bus/pci/devices").join(&gpu.bus_id).join("config"));
        config.map_or(true, |bytes| bytes.starts_with(&[0xff, 0xff]))
    }
}

/// The file that this code was loaded from.
pub(crate) fn own_file() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: the address is that of a function of this very object, `info` outlives the call.
    let found = unsafe { libc::dladdr(own_file as *const libc::c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr succeeded: the name is a NUL-terminated string that lives as long as the object.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
