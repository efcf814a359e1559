//! The values with which a share is requested and configured: modes, amounts, selectors. They do not depend on where
//! they were written.

pub mod glob;
mod of_process;
mod selector;
pub mod units;

use std::num::NonZeroU32;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use of_process::bytes_of_process;
pub(crate) use of_process::sm_of_process;
pub(crate) use selector::{SELECTORS_ALLOWED, parse_devices};
pub use units::{Memory, Percent};

/// Longest `sublet.wait`: engines and users give up a start that takes longer.
pub const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// `sublet.gpu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Devices {
    /// This many devices, whichever they are.
    Any(NonZeroU32),
    /// Every device of the host.
    All,
    /// These devices, all or none of them.
    These(Vec<Selector>),
}

/// One device as a user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selector {
    /// NVML's index.
    Index(u32),
    /// `GPU-…`, whole or an unambiguous beginning.
    Uuid(String),
    /// A PCI bus id, in any of the usual widths.
    BusId(String),
    /// `MIG-…`, also in the old form `MIG-GPU-<uuid>/<gi>/<ci>`.
    MigUuid(String),
    /// `G:M`: the M-th MIG device of GPU index G.
    MigIndex(u32, u32),
    /// `name:<alias>` from `[[device]]`.
    Name(String),
    /// `model:<glob>` on the device's name. Any one device that matches.
    Model(String),
}

/// How a device is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The driver's round robin. With a memory limit, the container also has a dedicated MPS server.
    TimeSlice,
    /// CUDA Multi-Process Service.
    Mps,
    /// A MIG instance.
    Mig,
    /// The whole device for one container.
    Exclusive,
}

impl Mode {
    /// The word used in annotations, configuration and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TimeSlice => "time-slice",
            Self::Mps => "mps",
            Self::Mig => "mig",
            Self::Exclusive => "exclusive",
        }
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// `sublet.isolation`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// The device's shared MPS server. It costs little, but a fault in one client ends all of them.
    #[default]
    Shared,
    /// An MPS server for this container only. Its faults do not reach other containers, and servers take turns.
    Dedicated,
}

/// `sublet.priority`: MPS client priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    /// `CUDA_MPS_CLIENT_PRIORITY=0`.
    #[default]
    Normal,
    /// `CUDA_MPS_CLIENT_PRIORITY=1`.
    Low,
}

/// `sublet.guard`: the guard's action on a container's own processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Guarding {
    /// Set by the container: the stricter of this and `[guard]`.
    AtLeast(Action),
    /// Set by a `[share]` of the configuration, and so by root: this applies instead of `[guard]`.
    Exactly(Action),
}

impl Guarding {
    /// The action if `[guard]` says `configured`.
    #[must_use]
    pub fn over(self, configured: Action) -> Action {
        match self {
            Self::AtLeast(action) => action.max(configured),
            Self::Exactly(action) => action,
        }
    }
}

/// `sublet.mig-caps`: access beyond the container's own MIG device (MIG User Guide, "Device nodes and capabilities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MigCapability {
    /// Monitoring all instances of all GPUs.
    Monitor,
    /// Creating and destroying instances.
    Config,
}

impl MigCapability {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Monitor, Self::Config];

    /// The word that annotations, the configuration and the driver use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Monitor => "monitor",
            Self::Config => "config",
        }
    }
}

/// One class of driver files, as `NVIDIA_DRIVER_CAPABILITIES` names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Capability {
    /// CUDA and `OpenCL`.
    Compute,
    /// NVML and nvidia-smi.
    Utility,
    /// OpenGL, EGL, Vulkan, with nvidia-modeset and the GPU's own /dev/dri nodes.
    Graphics,
    /// Video codecs and optical flow.
    Video,
}

impl Capability {
    /// Every class there is.
    pub const ALL: [Self; 4] = [Self::Compute, Self::Utility, Self::Graphics, Self::Video];
}

/// A set of [`Capability`], sorted, each one once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities(pub Vec<Capability>);

impl Capabilities {
    /// Whether `capability` is in the set.
    #[must_use]
    pub fn has(&self, capability: Capability) -> bool {
        self.0.contains(&capability)
    }
}

impl Default for Capabilities {
    /// `compute,utility`.
    fn default() -> Self {
        Self(vec![Capability::Compute, Capability::Utility])
    }
}

/// The guard's action on a process, the mildest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It is reported in the journal and in `sublet status`.
    Report,
    /// The process is ended.
    Terminate,
    /// Its container is ended.
    Container,
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Report => "report",
            Self::Terminate => "terminate",
            Self::Container => "container",
        })
    }
}
