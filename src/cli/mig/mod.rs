//! MIG layouts: which instances a GPU is to have, what has to change for that, and the change itself.
//!
//! ```text
//! file → Layout → Target ─┐
//!  layout, parted  target │→ Plan → changes, or everything as it was
//! NVML → Gpu ─────────────┘  plan     apply
//! ```
//!
//! Planning does no I/O. Profiles and placements come from the driver; there is no table of them.

mod apply;
mod export;
#[cfg(any(test, feature = "fixtures"))]
#[cfg_attr(feature = "fixtures", allow(dead_code, reason = "the fuzz targets need a part of it"))]
mod fake_driver;
mod fence;
#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod layout;
mod layout_entry;
mod layout_target;
mod making_instances;
mod nvml;
mod occupied;
mod packing;
mod parted;
mod plan;
mod profile_choice;

pub use crate::nvml_mig::{Profile, Span};
pub use apply::{ApplyError, apply};
pub use export::export;
pub(crate) use fence::{Fence, Uninterrupted};
pub use layout::{Layout, LayoutError};
pub use layout_target::{Target, Want, targets};
pub(crate) use making_instances::Making;
pub use nvml::Nvml;
pub use occupied::{made, mark, seen};
pub use plan::{Obstacle, Plan, Step, plan};
pub(crate) use profile_choice::{Foreseen, NotMade, foresee};

/// A kind of compute instance that a GPU instance can have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// Compute slices.
    pub slices: u32,
    /// Where one may lie in the GPU instance.
    pub placements: Vec<Span>,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its id. The driver gives it to another instance later.
    pub gi: u32,
    /// Id of its profile.
    pub profile: u32,
    /// Where it lies.
    pub span: Span,
    /// The user of the instance, if the compute instance is not known.
    pub held: Option<String>,
    /// The kinds of compute instance that it can have.
    pub kinds: Vec<ComputeProfile>,
    /// Its compute instances: each is a MIG device.
    pub compute: Vec<Compute>,
}

impl Instance {
    /// The lease or process that keeps it where it is.
    pub fn holder(&self) -> Option<&str> {
        self.held.as_deref().or_else(|| self.compute.iter().find_map(|compute| compute.held.as_deref()))
    }
}

/// A compute instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Its id in the GPU instance.
    pub ci: u32,
    /// Compute slices.
    pub slices: u32,
    /// The compute slices of the GPU instance that it has.
    pub span: Span,
    /// `MIG-…`.
    pub uuid: String,
    /// The user of it: a lease or a process.
    pub held: Option<String>,
}

/// MIG mode: the current one, and the one after the next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Now.
    pub current: bool,
    /// After a reset.
    pub pending: bool,
}

/// A process with a context on the GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Host pid.
    pub pid: u32,
    /// The GPU instance it is in, if any.
    pub gi: Option<u32>,
    /// The compute instance.
    pub ci: Option<u32>,
}

/// One GPU, as far as MIG is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// NVML's index.
    pub index: u32,
    /// As `NVIDIA H200`.
    pub name: String,
    /// PCI device and vendor id, device in the upper half.
    pub pci_device: u32,
    /// `None` if the GPU does not support MIG.
    pub mode: Option<Mode>,
    /// Whether changing the mode needs a reset of the GPU.
    pub resets: bool,
    /// The profiles that it supports, largest first.
    pub profiles: Vec<Profile>,
    /// Its instances, in order of placement.
    pub instances: Vec<Instance>,
    /// The processes with contexts.
    pub running: Vec<Running>,
    /// Users of the GPU as a whole, or of an unknown part of it.
    pub held: Vec<String>,
}

impl Gpu {
    /// The profile with this id.
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// The profile's name for messages; its id if the driver gives it no name.
    pub(crate) fn profile_name(&self, id: u32) -> String {
        self.profile(id).map_or_else(|| format!("profile {id}"), |profile| profile.name.clone())
    }

    /// The name of a compute instance of a GPU instance with this profile.
    pub(crate) fn device_name(&self, id: u32, slices: u32) -> String {
        self.profile(id).map_or_else(|| self.profile_name(id), |profile| device_name(profile, slices))
    }

    /// The GPU in messages, such as `GPU 0`.
    pub fn label(&self) -> String {
        format!("GPU {}", self.index)
    }
}

/// The name of a compute instance: `1c.2g.35gb` for a part of a `2g.35gb`, the profile's own name for the whole.
pub(crate) fn device_name(profile: &Profile, slices: u32) -> String {
    if slices == profile.slices { profile.name.clone() } else { format!("{slices}c.{}", profile.name) }
}

/// A call to the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct DriverError {
    /// What was tried, such as `GPU 0: destroying GPU instance 3`.
    pub what: String,
    /// The driver's message.
    pub why: String,
}

/// What the driver answers.
pub type Answer<T> = Result<T, DriverError>;

/// The driver functions that MIG changes need. GPUs are named by UUID, because their order may change with a reset.
pub trait Driver {
    /// One GPU as it is now.
    fn gpu(&mut self, gpu: &str) -> Answer<Gpu>;
    /// Only its GPU instances.
    fn instances(&mut self, gpu: &str) -> Answer<Vec<Instance>>;
    /// Its MIG mode, if it has one.
    fn mode(&mut self, gpu: &str) -> Answer<Option<Mode>>;
    /// Requests another MIG mode. If that needs a reset, the mode is pending afterwards.
    ///
    /// # Errors
    /// No permission, or instances or processes are in the way.
    fn set_mode(&mut self, gpu: &str, on: bool) -> Answer<()>;
    /// Resets the GPU.
    ///
    /// # Errors
    /// The GPU cannot be reset here, or is in use.
    fn reset(&mut self, gpu: &str) -> Answer<()>;
    /// Creates a GPU instance without compute instances and returns its id.
    fn create_instance(&mut self, gpu: &str, profile: u32, span: Span) -> Answer<u32>;
    /// Destroys a GPU instance that has no compute instances left.
    fn destroy_instance(&mut self, gpu: &str, gi: u32) -> Answer<()>;
    /// Creates a compute instance, at `span` or where the driver chooses.
    fn create_compute(&mut self, gpu: &str, gi: u32, slices: u32, span: Option<Span>) -> Answer<()>;
    /// Destroys a compute instance.
    fn destroy_compute(&mut self, gpu: &str, gi: u32, ci: u32) -> Answer<()>;
}
