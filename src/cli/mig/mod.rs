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
#[cfg(any(test, fuzzing))]
#[cfg_attr(fuzzing, allow(dead_code, reason = "the fuzz targets need a part of it"))]
mod fake_driver;
mod fence;
#[cfg(fuzzing)]
pub mod fuzzing;
mod layout;
mod layout_entry;
mod making_instances;
mod nvml;
mod occupied;
mod packing;
mod parted;
mod plan;
mod profile_choice;
mod signals_held;
mod target;

pub use crate::nvml_mig::{Profile, Span};
pub use apply::{ApplyError, apply};
pub use export::export;
pub(crate) use fence::Fence;
pub use layout::{Layout, LayoutError};
pub(crate) use making_instances::Making;
pub(crate) use making_instances::NotMade;
pub use nvml::Nvml;
pub use occupied::{made, mark, seen};
pub use plan::{Obstacle, Plan, Step, plan};
pub(crate) use profile_choice::foresee;
pub(crate) use signals_held::Uninterrupted;
pub use target::{Target, Want, targets};

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
    /// Its id, which the driver gives to another one after this.
    pub gi: u32,
    /// Id of its profile.
    pub profile: u32,
    /// Where it lies.
    pub span: Span,
    /// Who keeps it where it is, if the compute instance is not known.
    pub held: Option<String>,
    /// What its compute can be cut into.
    pub kinds: Vec<ComputeProfile>,
    /// Its compute instances: each is a MIG device.
    pub compute: Vec<Compute>,
}

impl Instance {
    /// Who keeps it where it is.
    #[must_use]
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
    /// Which of the GPU instance's.
    pub span: Span,
    /// `MIG-…`.
    pub uuid: String,
    /// Who keeps it: a lease, or a process.
    pub held: Option<String>,
}

/// MIG mode: what is, and what will be after the next reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Now.
    pub current: bool,
    /// After a reset.
    pub pending: bool,
}

/// A process with a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Host pid.
    pub pid: u32,
    /// The GPU instance it is in, where there are any.
    pub gi: Option<u32>,
    /// The compute instance.
    pub ci: Option<u32>,
}

/// One GPU as far as MIG goes.
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
    /// `None` where it cannot do MIG.
    pub mode: Option<Mode>,
    /// Whether a change of mode takes a reset of the GPU.
    pub resets: bool,
    /// What it can have, largest first.
    pub profiles: Vec<Profile>,
    /// What it has, by placement.
    pub instances: Vec<Instance>,
    /// Who has contexts.
    pub running: Vec<Running>,
    /// Who uses it as a whole, or uses an unknown part of it.
    pub held: Vec<String>,
}

impl Gpu {
    /// The profile with this id.
    #[must_use]
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Its name for people: the profile's, or its id where the driver has no name for it.
    #[must_use]
    pub(crate) fn profile_name(&self, id: u32) -> String {
        self.profile(id).map_or_else(|| format!("profile {id}"), |profile| profile.name.clone())
    }

    /// As `GPU 0`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("GPU {}", self.index)
    }
}

/// `1c.2g.35gb` for a part of a `2g.35gb`, its own name for the whole.
#[must_use]
pub(crate) fn device_name(profile: &Profile, slices: u32) -> String {
    if slices == profile.slices { profile.name.clone() } else { format!("{slices}c.{}", profile.name) }
}

/// A call to the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {why}")]
pub struct DriverError {
    /// What was tried, as `GPU 0: destroying GPU instance 3`.
    pub what: String,
    /// In the driver's words.
    pub why: String,
}

/// What is needed of the driver. GPUs are named by UUID: their order may change with a reset.
pub trait Driver {
    /// One GPU as it is now.
    ///
    /// # Errors
    /// The driver does not answer.
    fn gpu(&mut self, gpu: &str) -> Result<Gpu, DriverError>;
    /// Its GPU instances alone.
    ///
    /// # Errors
    /// The driver does not answer.
    fn instances(&mut self, gpu: &str) -> Result<Vec<Instance>, DriverError>;
    /// Its MIG mode, where it has one.
    ///
    /// # Errors
    /// The driver does not answer.
    fn mode(&mut self, gpu: &str) -> Result<Option<Mode>, DriverError>;
    /// Asks for another MIG mode. Where that takes a reset it is pending afterwards.
    ///
    /// # Errors
    /// No permission; instances or processes are in the way.
    fn set_mode(&mut self, gpu: &str, on: bool) -> Result<(), DriverError>;
    /// Resets the GPU.
    ///
    /// # Errors
    /// It cannot be reset here, or is in use.
    fn reset(&mut self, gpu: &str) -> Result<(), DriverError>;
    /// Makes a GPU instance without compute instances and returns its id.
    ///
    /// # Errors
    /// No permission, no room.
    fn create_instance(&mut self, gpu: &str, profile: u32, span: Span) -> Result<u32, DriverError>;
    /// Destroys a GPU instance, which has no compute instances any more.
    ///
    /// # Errors
    /// No permission, or it is in use.
    fn destroy_instance(&mut self, gpu: &str, gi: u32) -> Result<(), DriverError>;
    /// Makes a compute instance, where the driver sees fit or at `span`.
    ///
    /// # Errors
    /// No permission, no room.
    fn create_compute(
        &mut self,
        gpu: &str,
        gi: u32,
        slices: u32,
        span: Option<Span>,
    ) -> Result<(), DriverError>;
    /// Destroys a compute instance.
    ///
    /// # Errors
    /// No permission, or it is in use.
    fn destroy_compute(&mut self, gpu: &str, gi: u32, ci: u32) -> Result<(), DriverError>;
}
