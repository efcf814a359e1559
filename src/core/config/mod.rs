//! What can be configured, and the defaults: the documented file is `config/config.toml`. Where the files are and how they
//! are read: [`crate::config_files`].

mod guard;
mod policy;
mod values;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use guard::Guard;
pub use policy::PolicyRule;

use crate::share::units::show_duration;
use crate::share::{Capability, Isolation, MigCapability, Mode, Percent};

/// The whole configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where state is kept.
    pub state_dir: PathBuf,
    /// The low-level runtime and the log.
    pub runtime: Runtime,
    /// Where the driver is.
    pub driver: Driver,
    /// For requests that do not say.
    pub defaults: Defaults,
    /// Rules for single devices; the first that matches counts.
    pub device: Vec<DeviceRule>,
    /// What may be taken in all.
    pub limits: Limits,
    /// Which device is taken where several would do.
    pub placement: Placement,
    /// MPS daemons.
    pub mps: Mps,
    /// What containers are given beside their devices.
    pub grant: Grant,
    /// MIG layouts.
    pub mig: Mig,
    /// Named shares as CDI devices.
    pub cdi: Cdi,
    /// What `sublet serve` does to processes that pass their container's share.
    pub guard: Guard,
    /// What users without root may take; the first rule that fits counts.
    pub policy: Vec<PolicyRule>,
    /// Named shares: each a set of annotation keys without the `sublet.` prefix.
    #[serde(deserialize_with = "values::shares")]
    pub share: BTreeMap<String, BTreeMap<String, String>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            state_dir: PathBuf::from("/run/sublet"),
            runtime: Runtime::default(),
            driver: Driver::default(),
            defaults: Defaults::default(),
            device: Vec::new(),
            limits: Limits::default(),
            placement: Placement::default(),
            mps: Mps::default(),
            grant: Grant::default(),
            mig: Mig::default(),
            cdi: Cdi::default(),
            guard: Guard::default(),
            policy: Vec::new(),
            share: BTreeMap::new(),
        }
    }
}

/// `[runtime]`: all that containers without annotations need of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Low-level runtimes in order of preference: names looked up in PATH, or absolute paths.
    pub low_level: Vec<String>,
    /// A file that gets our own log lines.
    pub log: Option<PathBuf>,
}

impl Default for Runtime {
    fn default() -> Self {
        Self { low_level: vec!["runc".into(), "crun".into()], log: None }
    }
}

/// `[driver]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Driver {
    /// Everything of the driver's is looked up below this directory: /dev, /proc, /sys, libraries.
    pub root: PathBuf,
    /// Whether we mount the driver's files into containers.
    pub inject: Inject,
    /// The NVML library, where it is not found by its name.
    pub nvml: Option<PathBuf>,
}

impl Default for Driver {
    fn default() -> Self {
        Self { root: PathBuf::from("/"), inject: Inject::Builtin, nvml: None }
    }
}

/// `[driver] inject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Inject {
    /// We mount the driver's files.
    Builtin,
    /// Something else does, or the image brings them.
    None,
}

/// `[defaults]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Where neither the request nor the device says.
    pub mode: Mode,
    /// Where the request does not say.
    pub isolation: Isolation,
    /// Where the request does not say.
    #[serde(with = "values::duration")]
    pub wait: Duration,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { mode: Mode::TimeSlice, isolation: Isolation::Shared, wait: Duration::ZERO }
    }
}

/// `[[device]]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRule {
    /// A selector as in `sublet.gpu`, or `all`.
    #[serde(rename = "match", deserialize_with = "values::word")]
    pub matches: String,
    /// The alias for `sublet.gpu=name:<alias>`.
    pub name: Option<String>,
    /// Fixes the device's use whoever starts first.
    #[serde(rename = "use")]
    pub fixed_use: Option<Mode>,
    /// Length of the driver's time slice.
    pub time_slice: Option<TimeSlice>,
}

/// `[[device]] time_slice`, in the order of `nvidia-smi compute-policy --set-timeslice`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TimeSlice {
    /// 0
    Default,
    /// 1
    Short,
    /// 2
    Medium,
    /// 3
    Long,
}

/// `[limits]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// The sum of SM shares on an MPS device may reach 100 % times this.
    pub sm_overcommit: f64,
    /// The sum of booked memory may reach (total − reserve) times this.
    pub memory_overcommit: f64,
    /// Containers that may take turns on one device.
    pub time_slice_max: u32,
    /// Device memory that is never booked, in bytes.
    #[serde(with = "values::memory")]
    pub reserve: u64,
    /// Keys that every request must carry.
    pub require: Vec<Required>,
    /// What an image's `NVIDIA_DRIVER_CAPABILITIES` may choose from.
    pub capabilities: Vec<Capability>,
    /// Whether containers that may open every device are served all the same.
    pub allow_privileged: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sm_overcommit: 1.0,
            memory_overcommit: 1.0,
            time_slice_max: 8,
            reserve: 512 << 20,
            require: Vec::new(),
            capabilities: Capability::ALL.to_vec(),
            allow_privileged: false,
        }
    }
}

/// `[limits] require`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Required {
    /// `sublet.memory`
    Memory,
    /// `sublet.sm`
    Sm,
}

/// `[placement]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Placement {
    /// Which of several devices that fit.
    pub policy: Policy,
}

/// `[placement] policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The fullest that fits: large shares stay possible elsewhere.
    #[default]
    Binpack,
    /// The emptiest: neighbours are few.
    Spread,
}

/// `[mps]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mps {
    /// How long a shared daemon outlives its last lease while `sublet serve` runs; see [`Mps::after_last_lease`].
    /// `None` once loaded: `stop_when_idle = false` says so.
    #[serde(default, with = "values::some_duration", skip_serializing_if = "Option::is_none")]
    pub idle: Option<Duration>,
    /// What `idle` replaces: still read, with a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_when_idle: Option<bool>,
    /// What becomes of a process that comes to a container whose daemon cannot be had.
    pub exec_without_daemon: WithoutDaemon,
    /// Compute mode `EXCLUSIVE_PROCESS` under shared servers of whole GPUs.
    pub exclusive_compute_mode: ExclusiveComputeMode,
    /// How long a daemon may take to answer after its start.
    #[serde(with = "values::duration")]
    pub start_timeout: Duration,
    /// Try MPS in vGPU guests, where NVIDIA supports it for some profiles only.
    pub allow_vgpu: bool,
}

impl Default for Mps {
    fn default() -> Self {
        Self {
            idle: Some(Self::IDLE),
            stop_when_idle: None,
            exec_without_daemon: WithoutDaemon::Refuse,
            exclusive_compute_mode: ExclusiveComputeMode::Auto,
            start_timeout: Duration::from_secs(10),
            allow_vgpu: false,
        }
    }
}

/// How long a shared daemon waits for the next lease after its last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stay {
    /// So long, and only while `sublet serve` runs to end it.
    For(Duration),
    /// Until somebody stops it: `stop_when_idle = false`.
    Always,
}

impl Mps {
    /// Where `[mps]` says nothing.
    const IDLE: Duration = Duration::from_secs(60);

    /// What `idle` and, without it, `stop_when_idle` say.
    #[must_use]
    pub(crate) fn after_last_lease(&self) -> Stay {
        match (self.idle, self.stop_when_idle) {
            (Some(idle), _) => Stay::For(idle),
            (None, Some(true)) => Stay::For(Duration::ZERO),
            (None, Some(false)) => Stay::Always,
            (None, None) => Stay::For(Self::IDLE),
        }
    }
}

/// `[mps] exec_without_daemon`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WithoutDaemon {
    /// It is not started.
    Refuse,
    /// It is started without a way to the GPU.
    NoGpu,
}

/// `[mps] exclusive_compute_mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExclusiveComputeMode {
    /// Unless the GPU drives a display or a process without a lease holds a context, or nobody can tell.
    Auto,
    /// Always; the container is refused where it cannot be had.
    Always,
    /// Compute mode is left alone.
    Never,
}

/// `[grant]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grant {
    /// What `CUDA_VISIBLE_DEVICES` names whole GPUs by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub visible_devices: Option<VisibleDevices>,
    /// Frameworks' own variables: name → template with `${SUBLET_…}`; never over the user's value.
    pub env: BTreeMap<String, String>,
}

impl Default for Grant {
    fn default() -> Self {
        // The one of JAX's two names that every version reads (docs/recipes.md, "What the frameworks read").
        let jax = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "${SUBLET_MEMORY_FRACTION}");
        Self { visible_devices: None, env: BTreeMap::from([(jax.0.to_owned(), jax.1.to_owned())]) }
    }
}

/// `[grant] visible_devices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VisibleDevices {
    /// `0`, `0,1`: many programs parse an integer.
    Ordinal,
    /// `GPU-…`.
    Uuid,
}

/// `[mig]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mig {
    /// Make an instance for a request that finds none, and destroy it when its last lease ends.
    pub dynamic: bool,
    /// What `sublet.mig-caps` may ask for.
    pub allow_caps: Vec<MigCapability>,
    /// The layout file that `sublet mig apply` takes where none is named.
    pub layout: Option<PathBuf>,
}

/// `[cdi]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Cdi {
    /// The specification that `sublet cdi generate` writes and `sublet serve` keeps current.
    pub spec: PathBuf,
}

impl Default for Cdi {
    /// Where engines look for what is made anew after each boot (CDI SPEC.md, "CDI JSON Specification").
    fn default() -> Self {
        Self { spec: PathBuf::from("/var/run/cdi/sublet.json") }
    }
}

impl Config {
    /// What is read and should be written otherwise, one line each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let advice = match (self.mps.stop_when_idle, self.mps.after_last_lease()) {
            (None, _) => return Vec::new(),
            (Some(_), Stay::For(idle)) => {
                format!("remove it; idle = \"{}\" is in force", show_duration(idle))
            }
            (Some(_), Stay::Always) => {
                "daemons now run until they are stopped by hand; set a time instead, such as idle = \"10m\""
                    .to_owned()
            }
        };
        vec![format!("configuration: [mps] stop_when_idle was replaced by [mps] idle: {advice}")]
    }

    /// The ceiling on the sum of SM shares on one MPS device.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from over 0 to 100 times")]
    pub(crate) fn sm_bookable(&self) -> Percent {
        // Rounded, for 1.15 × 100 000 is 114 999.999…; loading a file keeps it within 100 times.
        Percent::from_thousandths((self.limits.sm_overcommit * 100_000.0).round() as u32)
    }
}

/// `config` with every key in it, so that a file of it gives the same again.
#[must_use]
pub fn written_out(config: &Config) -> Config {
    let mut config = config.clone();
    // An empty value takes a shipped variable out; one that is only left out would come back.
    for name in Grant::default().env.into_keys() {
        config.grant.env.entry(name).or_default();
    }
    // What it says stands in `idle`.
    config.mps.stop_when_idle = config.mps.stop_when_idle.filter(|_| config.mps.idle.is_none());
    config
}
