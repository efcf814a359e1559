//! A container's request: annotations and configuration in, [`Request`] out. No I/O, and nothing
//! about the devices of this host.

pub mod annotations;
mod error;
mod keys;
mod misspelt;
mod rules;

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::config::{Config, VisibleDevices};
use crate::share::{
    Capabilities, Devices, Guarding, Isolation, Memory, MigCapability, Mode, Percent, Priority,
};

pub use annotations::{has_sublet_annotations, is_podman_infra, is_sandbox, parse};
pub use error::{RequestError, Setting};
pub(crate) use misspelt::split_container_name;

/// One container's request, complete and free of contradictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which devices may serve it.
    pub devices: Devices,
    /// The mode asked for, or `None`: the device's configured `use`, else [`Request::default_mode`].
    pub mode: Option<Mode>,
    /// The mode where neither the container nor the device's configuration names one.
    pub default_mode: Mode,
    /// The device's shared MPS server, or a dedicated one.
    pub isolation: Isolation,
    /// The limit on the share of the streaming multiprocessors, for the whole container.
    pub sm: Option<Percent>,
    /// Device memory for the whole container.
    pub memory: Option<Memory>,
    /// MIG profile, as `1g.18gb` or `1c.2g.35gb`.
    pub mig: Option<String>,
    /// Which access it gets to all MIG instances, in addition to its own.
    pub mig_caps: Vec<MigCapability>,
    /// MPS client priority.
    pub priority: Priority,
    /// CUDA processes expected at once. MPS limits are per process, so each process gets its part.
    pub processes: NonZeroU32,
    /// Which driver files the container gets.
    pub capabilities: Capabilities,
    /// Words of the image's `NVIDIA_DRIVER_CAPABILITIES` that are not granted, if the image chooses.
    pub not_served: Vec<String>,
    /// How long to wait for a free share before refusing.
    pub wait: Duration,
    /// The guard's action on this container's processes, if the container or its named share sets it.
    pub guard: Option<Guarding>,
    /// How `CUDA_VISIBLE_DEVICES` names the devices, if the named share sets it.
    pub visible_devices: Option<VisibleDevices>,
    /// Whether the MPS directory is also at CUDA's default place.
    pub default_directory: bool,
}

impl Request {
    /// `config` with the named share's settings.
    #[must_use]
    pub fn over<'c>(&self, config: &'c Config) -> Cow<'c, Config> {
        let Some(visible) = self.visible_devices else { return Cow::Borrowed(config) };
        let mut config = config.clone();
        config.grant.visible_devices = Some(visible);
        Cow::Owned(config)
    }
}
