//! The configuration and its defaults. The file with the documentation is `config/config.toml`. [`crate::config_files`]
//! finds and reads the files.

mod values;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray};

use crate::share::{Action, Capability, Isolation, MigCapability, Mode, Percent};

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
    /// The defaults for requests.
    pub defaults: Defaults,
    /// Rules for single devices. The first one that matches counts.
    pub device: Vec<DeviceRule>,
    /// The limits on bookings.
    pub limits: Limits,
    /// Which device is chosen if several fit.
    pub placement: Placement,
    /// MPS daemons.
    pub mps: Mps,
    /// Additions to containers' devices.
    pub grant: Grant,
    /// MIG layouts.
    pub mig: Mig,
    /// Named shares as CDI devices.
    pub cdi: Cdi,
    /// The actions of `sublet serve` on processes that exceed their container's share.
    pub guard: Guard,
    /// Refused containers that are started again.
    pub retry: Retry,
    /// Room that `sublet serve` makes by suspending containers.
    pub suspend: Suspend,
    /// The shares of Slurm's jobs.
    pub slurm: Slurm,
    /// Whom containers are for.
    pub accounting: Accounting,
    /// The limits of users without root. The first rule that matches counts.
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
            retry: Retry::default(),
            suspend: Suspend::default(),
            slurm: Slurm::default(),
            accounting: Accounting::default(),
            policy: Vec::new(),
            share: BTreeMap::new(),
        }
    }
}

/// `[retry]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Retry {
    /// Whether `sublet serve` starts containers of Docker's again that have a restart policy.
    pub docker: bool,
    /// Where dockerd of root listens.
    pub socket: PathBuf,
}

impl Default for Retry {
    fn default() -> Self {
        Self { docker: true, socket: PathBuf::from("/var/run/docker.sock") }
    }
}

/// `[suspend]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Suspend {
    /// Whether a start that finds no room has others suspended that allow it, which come back when there is room.
    pub on_demand: bool,
    /// How long a container may have its GPU while one waits that was suspended for it; 0: until it ends.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub turns: Duration,
    /// How long a container is on its GPU before it is suspended without a command.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub at_least: Duration,
    /// How long a start waits for others to be suspended, whatever its `sublet.wait`.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub limit: Duration,
}

impl Default for Suspend {
    fn default() -> Self {
        let [at_least, limit] = [30, 120].map(Duration::from_secs);
        Self { on_demand: true, turns: Duration::ZERO, at_least, limit }
    }
}

/// `[accounting]`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Accounting {
    /// Labels that say whom a container of root's Docker is for, the first that it has.
    pub owner_labels: Vec<String>,
}

/// `[slurm]`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Slurm {
    /// How many shards each GPU has in gres.conf.
    pub shards: u32,
}

impl Default for Slurm {
    fn default() -> Self {
        Self { shards: 8 }
    }
}

/// `[runtime]`: the only part of the configuration that containers without annotations need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Low-level runtimes in order of preference: names looked up in PATH, or absolute paths.
    pub low_level: Vec<String>,
    /// A file for sublet's log lines.
    pub log: Option<PathBuf>,
    /// For a container that asks for no share; not given: [`WithoutShare::Warn`].
    pub without_share: Option<WithoutShare>,
}

/// `[runtime] without_share`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WithoutShare {
    /// It runs, without a GPU.
    Run,
    /// It does so with a line in the engine's log.
    Warn,
    /// It does not start.
    Refuse,
}

impl Default for Runtime {
    fn default() -> Self {
        Self { low_level: vec!["runc".into(), "crun".into()], log: None, without_share: None }
    }
}

/// `[driver]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Driver {
    /// The directory below which the driver's files are looked up: /dev, /proc, /sys, libraries.
    pub root: PathBuf,
    /// Further installations of the driver below `root`, each with `lib64` or `lib`, `bin` and `share`.
    pub search: Vec<String>,
    /// Whether sublet mounts the driver's files into containers.
    pub inject: Inject,
    /// The NVML library, if it is not found by its name.
    pub nvml: Option<PathBuf>,
}

impl Default for Driver {
    fn default() -> Self {
        Self { root: PathBuf::from("/"), search: Vec::new(), inject: Inject::Builtin, nvml: None }
    }
}

/// `[driver] inject`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Inject {
    /// sublet mounts the driver's files.
    Builtin,
    /// Another program mounts them, or the image contains them.
    None,
}

/// `[defaults]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// The mode if neither the request nor the device sets it.
    pub mode: Mode,
    /// Where the request does not say.
    pub isolation: Isolation,
    /// Where the request does not say.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub wait: Duration,
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
    /// Fixes the device's use, so that it does not depend on which container starts first.
    #[serde(rename = "use")]
    pub fixed_use: Option<Use>,
    /// The length of the driver's time slice.
    pub time_slice: Option<TimeSlice>,
}

/// `[[device]] use`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Use {
    /// Only this mode, as are the next three.
    TimeSlice,
    /// Shares of an MPS server.
    Mps,
    /// MIG devices.
    Mig,
    /// One container at a time.
    Exclusive,
    /// No container gets it.
    None,
}

impl Use {
    /// The one mode that it allows.
    pub(crate) const fn mode(self) -> Option<Mode> {
        match self {
            Self::TimeSlice => Some(Mode::TimeSlice),
            Self::Mps => Some(Mode::Mps),
            Self::Mig => Some(Mode::Mig),
            Self::Exclusive => Some(Mode::Exclusive),
            Self::None => None,
        }
    }
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
    /// How many containers may take turns on one device.
    pub time_slice_max: u32,
    /// Device memory that is never booked, in bytes.
    #[serde(deserialize_with = "values::memory", serialize_with = "values::write_memory")]
    pub reserve: u64,
    /// Keys that a request must have, but for a whole device or a MIG instance.
    pub require: Vec<Required>,
    /// The longest `sublet.wait`.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub wait_max: Duration,
    /// The driver capabilities that an image's `NVIDIA_DRIVER_CAPABILITIES` may select.
    pub capabilities: Vec<Capability>,
    /// Whether containers that may open every device get a share all the same.
    pub allow_privileged: bool,
    /// Nodes of `GPUDirect` Storage and IMEX channels, and directories of such, that containers may have beside their share.
    pub allow_devices: Vec<PathBuf>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sm_overcommit: 1.0,
            memory_overcommit: 1.0,
            time_slice_max: 8,
            reserve: 512 << 20,
            require: Vec::new(),
            wait_max: Duration::from_secs(60),
            capabilities: Capability::VARIANTS.to_vec(),
            allow_privileged: false,
            allow_devices: Vec::new(),
        }
    }
}

/// Drivers whose nodes give no access to a GPU: `GPUDirect` Storage, and IMEX channels.
pub(crate) const NOT_OF_GPUS: [&str; 2] = ["nvidia-fs", "nvidia-caps-imex-channels"];

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
    /// Which of several fitting devices is chosen.
    pub policy: Policy,
}

/// `[placement] policy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The fullest device that fits, so that large shares remain possible on the other devices.
    #[default]
    Binpack,
    /// The emptiest device, so that containers have few neighbours.
    Spread,
}

/// `[mps]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mps {
    /// How long a shared daemon outlives its last lease while `sublet serve` runs, which ends it.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub idle: Duration,
    /// For a process that joins a container whose daemon does not answer and cannot be restarted.
    pub exec_without_daemon: WithoutDaemon,
    /// Compute mode `EXCLUSIVE_PROCESS` under shared servers of whole GPUs.
    pub exclusive_compute_mode: ExclusiveComputeMode,
    /// How long a daemon may take to answer after its start.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub start_timeout: Duration,
    /// Whether to try MPS in vGPU guests. NVIDIA supports it there only for some profiles.
    pub allow_vgpu: bool,
}

impl Default for Mps {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(60),
            exec_without_daemon: WithoutDaemon::Refuse,
            exclusive_compute_mode: ExclusiveComputeMode::Auto,
            start_timeout: Duration::from_secs(10),
            allow_vgpu: false,
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
    /// Unless the GPU drives a display, a process without a lease has a context on it, or this is unknown.
    Auto,
    /// Always. The container is refused if the mode cannot be set.
    Always,
    /// The compute mode is not changed.
    Never,
}

/// `[grant]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Grant {
    /// How `CUDA_VISIBLE_DEVICES` names whole GPUs.
    pub visible_devices: Option<VisibleDevices>,
    /// How `NVIDIA_VISIBLE_DEVICES` names all devices; `None`: `void`, for which NVIDIA's own hooks do nothing.
    pub nvidia_visible_devices: Option<VisibleDevices>,
    /// Variables of frameworks: name → template with `${SUBLET_…}`. They never replace the user's value.
    pub env: BTreeMap<String, String>,
    /// Whether a container is given the number of other leases on its devices when it starts.
    pub tell_neighbours: bool,
}

impl Default for Grant {
    fn default() -> Self {
        // JAX has two names for this. Every version reads this one (docs/recipes.md, "What the frameworks read").
        let jax = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "${SUBLET_MEMORY_FRACTION}");
        Self {
            visible_devices: None,
            nvidia_visible_devices: None,
            env: BTreeMap::from([(jax.0.to_owned(), jax.1.to_owned())]),
            tell_neighbours: false,
        }
    }
}

/// Prefixes of names that only sublet may set: a value from the image or the user would contradict the lease. This holds
/// also without an MPS server, because a stray `CUDA_MPS_*` could connect the container to another daemon.
pub const OWN_PREFIXES: [&str; 4] = ["CUDA_MPS_", "SUBLET_MEMORY_", "SUBLET_NEIGHBOURS", "SUBLET_SM_"];

/// The variables that every share sets.
const OWN_NAMES: [&str; 5] =
    ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SUBLET_DEVICES", "SUBLET_MODE", "SUBLET_PROCESSES"];

/// Whether only shares set the variable `name`.
pub fn is_own_name(name: &str) -> bool {
    OWN_NAMES.contains(&name) || OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// `[grant] visible_devices`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr, VariantArray)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum VisibleDevices {
    /// `0`, `0,1`: many programs expect an integer.
    Ordinal,
    /// `GPU-…`.
    Uuid,
}

/// `[mig]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mig {
    /// Whether to create an instance for a request that finds none, and to destroy it when its last lease ends.
    pub dynamic: bool,
    /// The MIG capabilities that `sublet.mig-caps` may request.
    pub allow_caps: Vec<MigCapability>,
    /// The layout file that `sublet mig apply` uses if none is given.
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
    /// The directory in which engines look for specifications that are generated anew after each boot (CDI SPEC.md,
    /// "CDI JSON Specification").
    fn default() -> Self {
        Self { spec: PathBuf::from("/var/run/cdi/sublet.json") }
    }
}

impl Config {
    /// Where what outlives a reboot is kept: `/var/lib/sublet`, for the state in `/run/sublet`.
    pub fn lasting_dir(&self) -> PathBuf {
        let below_run = self.state_dir.strip_prefix("/run");
        below_run.map_or_else(|_| self.state_dir.join("lasting"), |own| Path::new("/var/lib").join(own))
    }

    /// The limit on the sum of SM shares on one MPS device.
    pub(crate) fn sm_bookable(&self) -> Percent {
        // Loading a file checks that the factor is at most 100.
        Percent::nearest(self.limits.sm_overcommit * 100.0)
    }
}

/// `config` with every key, so that reading it back gives the same configuration.
pub fn written_out(config: &Config) -> Config {
    let mut config = config.clone();
    // An empty value removes a built-in variable. If the variable were only left out, it would come back.
    for name in Grant::default().env.into_keys() {
        config.grant.env.entry(name).or_default();
    }
    config
}

/// `[guard]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Guard {
    /// Whether the guard runs.
    pub enabled: bool,
    /// The time between two checks. The guard acts on an excess in two of them.
    #[serde(deserialize_with = "values::duration", serialize_with = "values::write_duration")]
    pub period: Duration,
    /// Device memory that a container may use beyond its share, in bytes.
    #[serde(deserialize_with = "values::memory", serialize_with = "values::write_memory")]
    pub memory_tolerance: u64,
    /// The action for the process with which a container exceeds `sublet.memory`.
    pub memory: Action,
    /// The action for a process that uses the GPU without its MPS server.
    pub bypass: Action,
    /// The action for MPS clients beyond `sublet.processes`, if other containers need their places. Otherwise they are
    /// reported.
    pub clients: Action,
    /// The same if no other container needs them. Each client has an SM limit of its own.
    pub strict_clients: bool,
    /// The action for a process whose container has ended.
    pub left: Action,
    /// The action for a process that has connected to an MPS daemon and says nothing, so that the daemon waits.
    pub silent: Action,
    /// The action for a process that is not attributable to any lease. There is no container to end.
    pub strangers: Action,
}

impl Default for Guard {
    fn default() -> Self {
        Self {
            enabled: true,
            period: Duration::from_millis(500),
            memory_tolerance: 128 << 20,
            memory: Action::Terminate,
            bypass: Action::Terminate,
            clients: Action::Terminate,
            strict_clients: false,
            left: Action::Terminate,
            silent: Action::Terminate,
            strangers: Action::Report,
        }
    }
}

/// One rule. The first rule whose user or group matches counts. A key that is absent limits nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyRule {
    /// A user's name or uid, or `*` for every user in the host's user database.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A group's name or gid, for each of its members.
    #[serde(deserialize_with = "values::some_word", skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The modes they may use.
    pub modes: Option<Vec<Mode>>,
    /// The SM shares of one user's leases may add up to this. A request must then name its share.
    #[serde(deserialize_with = "values::percent_sum", serialize_with = "values::write_percent")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// The memory of one user's leases may add up to this, in bytes. A request must then name its amount.
    #[serde(deserialize_with = "values::some_memory", serialize_with = "values::write_some_memory")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Selectors as in `sublet.gpu`: the devices that they may use. By default any.
    pub devices: Option<Vec<values::Word>>,
    /// How many leases one user may hold at once.
    pub leases: Option<u32>,
    /// Whether MIG instances are created for them, if `[mig] dynamic` is on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
    /// Whether they may suspend, resume and move their containers.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub suspend: bool,
    /// Whether their starts may have containers of others suspended that allow it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub displace: bool,
}
