//! Leases and MPS daemons, on disk in `ledger.json`, changed only under one lock.

mod binding;
mod cgroup;
mod daemon_devices;
mod daemon_key;
mod default_limits;
mod dynamic_mig_instances;
#[cfg(test)]
mod formats;
#[cfg(fuzzing)]
pub mod fuzzing;
mod lease_state;
mod leftovers;
mod liveness;
mod lock_mark;
mod mig_changes;
mod namespaces;
mod process_owner;
mod queries;
mod rebuild;
mod remembered_leases;
mod runtime_record;
mod store;
#[cfg(test)]
mod stress;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use binding::{Binding, NotBound};
pub use daemon_key::DaemonKey;
pub use default_limits::{DefaultLimits, DefaultMemoryLimit};
#[cfg(any(test, feature = "fixtures"))]
pub use dynamic_mig_instances::fixture as dynamic_instance_fixture;
pub use dynamic_mig_instances::{Awaited, DynamicInstance};
pub use lease_state::LeaseState;
pub use mig_changes::{MigBusy, MigChange, MigChanges};
pub use namespaces::Namespaces;
pub use queries::Doubled;
#[cfg(any(test, feature = "fixtures"))]
pub use queries::fixture;
pub use runtime_record::Record;
pub use runtime_record::read_up_to;
pub use store::{Freed, LedgerError, Store};
pub use store::{is_there, written};

use crate::inventory::ComputeMode;
use crate::process::Process;
use crate::share::{Guarding, Isolation, Mode, Percent, Priority};

/// [`Ledger::schema`] of what this build writes and reads.
pub const SCHEMA: &str = "sublet.ledger/1";

/// The annotation that holds the lease's id.
pub const LEASE_ANNOTATION: &str = "sublet.lease";

/// The annotation that holds the lease itself ([`Lease::to_annotation`]), beside [`LEASE_ANNOTATION`].
///
/// Nobody reads it while the ledger is sound. runc and crun keep the annotations with their record of a
/// container, so that a lost ledger is rebuilt from what really runs.
pub const LEASE_RECORD_ANNOTATION: &str = "sublet.lease.record";
/// Where the ledger is that a lease without [`STATE_DIR`] in its annotation stands in (`state_dir` of the configuration).
const DEFAULT_STATE_DIR: &str = "/run/sublet";
/// The key in that annotation that says where the ledger is: runtimes keep the records of all of them together.
const STATE_DIR: &str = "state_dir";

/// The annotation that says what else stands in a config.json for a share: a bundle that is run anew is rid of it first.
pub(crate) const LEASE_EDITS_ANNOTATION: &str = "sublet.lease.edits";

/// `ledger.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// `sublet.ledger/1`.
    pub schema: String,
    /// A ledger of another boot holds nothing that lives.
    pub boot_id: String,
    /// Where its process ids mean what they say; nothing while it names no process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Namespaces>,
    /// Every lease that has not ended.
    pub leases: Vec<Lease>,
    /// Every MPS daemon we started and have not seen the end of.
    #[serde(rename = "servers")]
    pub daemons: Vec<MpsDaemon>,
    /// Compute modes we changed, with what was found, to be put back.
    pub compute_modes: Vec<ChangedComputeMode>,
    /// Devices that take no new lease, by UUID: `sublet drain`.
    pub drained: Vec<String>,
    /// Devices that take no new lease because a rebuild could not explain what runs there.
    pub unexplained: Vec<String>,
    /// It was rebuilt without its copy, and no inventory from before tells who has come to the devices since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// What ended containers left in their directories, until it is cleared away: a crash must not lose it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leftovers: Vec<Leftover>,
    /// Changes of MIG layouts.
    #[serde(default, skip_serializing_if = "MigChanges::are_none")]
    pub mig: MigChanges,
    /// `sublet serve`, while it runs: who ends daemons that wait for the next lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper: Option<Process>,
}

/// Files of ours in places that outlive the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leftover {
    /// May hold the temporary file of a shim that was killed.
    pub bundle: PathBuf,
    /// May be another container's too: nothing is removed before that one has ended.
    pub rootfs: PathBuf,
    /// As in [`Lease::mount_points`].
    pub mount_points: Vec<PathBuf>,
    /// As in [`Lease::volumes`], those with files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFiles>,
}

/// A directory of a volume over the image's, in which files of ours are mounted. Another container may have the same
/// volume, and a file that is unlinked takes every mount on it along.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFiles {
    /// On the host, without links.
    pub directory: PathBuf,
    /// Its file system (`st_dev`).
    pub device: u64,
    /// Which directory of it (`st_ino`).
    pub inode: u64,
    /// Files that it lacked, made by the runtime to mount over: ours to remove. Below `directory`.
    pub files: Vec<PathBuf>,
}

/// One container's share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Sixteen random hex digits; stands in config.json as `sublet.lease`.
    pub id: LeaseId,
    /// Whose it is.
    pub container: Container,
    /// Device UUIDs, taken and freed together.
    pub devices: Vec<String>,
    /// Of MIG devices: what they were, which other instances may be once these are gone.
    #[serde(rename = "parts", default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<LeasedMigDevice>,
    /// How the devices are shared.
    pub mode: Mode,
    /// Which MPS server, where mode or memory needs one.
    pub isolation: Isolation,
    /// The MPS server that serves it.
    #[serde(rename = "server")]
    pub daemon: Option<DaemonKey>,
    /// SM ceiling of the whole container; `None`: no ceiling.
    pub sm: Option<Percent>,
    /// Device memory of the whole container on each device, in bytes; `None`: no limit.
    pub memory_bytes: Option<u64>,
    /// CUDA processes expected at once.
    pub processes: u32,
    /// MPS client priority.
    pub priority: Priority,
    /// What the guard does about its processes, where that is not for `[guard]` alone to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guarding>,
    /// Where it is in its life.
    pub state: LeaseState,
    /// While pending: the process that is starting the container; while ending: the one that deletes it.
    pub owner: Process,
    /// Once active: the container's first process and where it lives.
    pub init: Option<Init>,
    /// While it waits to be bound to its container, taken by a hook that does not know it: seconds since
    /// boot after which a living owner keeps it no longer. A service that starts containers outlives
    /// those that fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind_by: Option<u64>,
    /// Seconds since the epoch.
    pub since: u64,
    /// Where the container finds the driver's libraries: exec'd processes are told as well.
    #[serde(default)]
    pub library_dir: Option<PathBuf>,
    /// Files the rootfs lacked, made by the runtime to mount over; ours to remove where it persists.
    #[serde(default)]
    pub mount_points: Vec<PathBuf>,
    /// The same in volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFiles>,
    /// Taken by way of `sublet serve`: paths in it are a user's word, which root neither reads nor cleans.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub brokered: bool,
}

/// A MIG device as it was when it was leased: its ids are given to other instances after it, its UUID never.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeasedMigDevice {
    /// `MIG-…`.
    pub uuid: String,
    /// `GPU-…` of the GPU.
    pub gpu: String,
    /// GPU instance id.
    pub gi: u32,
    /// Compute instance id.
    pub ci: u32,
    /// First memory slice of the GPU instance, and how many; `None` where NVML did not tell.
    pub placement: Option<(u32, u32)>,
    /// Its part of the GPU's SMs, where NVML says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// Its memory, or its part of what compute instances have together, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// Sixteen lower-case hex digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(String);

impl LeaseId {
    /// A random one. The kernel is asked, not /dev/urandom, which `SELinux` keeps from some engines' domains
    /// (docs/evidence/2026-11-22-selinux-apparmor.md).
    ///
    /// # Errors
    /// getrandom(2) fails, as where a seccomp filter of whoever started the engine has not heard of it.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0_u8; 8];
        // Up to 256 bytes come whole (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self(format!("{:016x}", u64::from_ne_bytes(bytes))))
    }

    /// `text`, if it is one.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (text.len() == 16 && text.bytes().all(hex)).then(|| Self(text.to_owned()))
    }

    /// The digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for LeaseId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// Which container a lease belongs to, and where its runtime keeps record of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The engine's uid: ids are unique for each user only.
    pub uid: u32,
    /// The container id; may be empty until the lease is bound.
    pub id: String,
    /// The bundle, canonical; empty until the lease is bound.
    pub bundle: PathBuf,
    /// The root filesystem, canonical.
    pub rootfs: PathBuf,
    /// Directory of the low-level runtime's own state of this container, `ROOT/ID`: runc keeps `state.json`
    /// there, crun `status`. Empty where nobody could tell: `init` then says whether the container lives.
    pub record: PathBuf,
}

impl Container {
    /// What people may know it by: its id, else its bundle, else its root filesystem.
    #[must_use]
    pub fn name(&self) -> std::borrow::Cow<'_, str> {
        let place = if self.bundle.as_os_str().is_empty() { &self.rootfs } else { &self.bundle };
        if self.id.is_empty() { place.to_string_lossy() } else { self.id.as_str().into() }
    }
}

/// The container's first process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Init {
    /// Pid and start time.
    pub process: Process,
    /// Inode of its PID namespace; 0 where that is the host's, which tells nothing.
    pub pid_namespace: u64,
    /// Its cgroup directory, absolute; `None` where it has none of its own.
    pub cgroup: Option<PathBuf>,
}

/// One MPS control daemon of ours.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsDaemon {
    /// Its directory's name under `mps/`: the device's UUID, or the lease id.
    pub key: DaemonKey,
    /// The devices it serves, in the order its clients count them: one, or all of a lease that has several. None
    /// where a rebuild could not tell.
    #[serde(rename = "device", with = "daemon_devices")]
    pub devices: Vec<String>,
    /// The control daemon.
    #[serde(rename = "daemon")]
    pub process: Option<Process>,
    /// Its state.
    pub state: DaemonState,
    /// In force for new clients: never more than is.
    #[serde(flatten)]
    pub default_limits: DefaultLimits,
    /// When it last gave a real answer, in seconds since the epoch.
    pub answered_at: u64,
    /// Since when it serves no lease, in seconds since boot: [`Store::update`] keeps it so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since: Option<u64>,
    /// It has been without a lease since the compute mode was looked at: that is to be done again before it serves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mode_left: bool,
}

impl MpsDaemon {
    /// Whether it serves `device`, a UUID.
    #[must_use]
    pub fn serves(&self, device: &str) -> bool {
        self.devices.iter().any(|own| own == device)
    }
}

/// States of a daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonState {
    /// Being started; no client may count on it.
    Starting,
    /// Answers.
    Serving,
    /// Being stopped; a new lease waits for the daemon's lock and starts it anew.
    Stopping,
    /// Runs and does not answer, or reports a fault.
    Fault,
    /// Not running although a lease wants it.
    Down,
}

/// A compute mode we changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedComputeMode {
    /// The device.
    pub device: String,
    /// What it was before.
    pub found: ComputeMode,
}
