//! Leases and MPS daemons, on disk in `ledger.json`, changed only under one lock. Here are the states of a lease, and
//! every change from one to another.

mod binding;
mod drains;
mod error;
mod events_of_change;
#[cfg(test)]
mod formats;
#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod left_processes;
mod liveness;
mod mig;
mod queries;
mod rebuild;
mod runtime_record;
mod store;
#[cfg(test)]
mod stress;
mod suspension;
mod update;
mod waiters;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::inventory::ComputeMode;
use crate::process::Process;
use crate::share::{Guarding, Isolation, MIB, Mode, Percent, Priority, Suspend, bytes_of_process};

pub use binding::{Binding, NotBound, TooManyUnbound};
pub use drains::{Drain, LONGEST_REASON};
pub use error::LedgerError;
pub use events_of_change::{Booked, lease_event, taken_event};
pub(crate) use left_processes::IN_STATE_D;
pub(crate) use liveness::Scan;
#[cfg(any(test, feature = "fixtures"))]
pub use mig::fixture as dynamic_instance_fixture;
pub(crate) use mig::gpus_under_change;
pub use mig::{Awaited, DynamicInstance, MigBusy, MigChange, MigChanges};
pub(crate) use queries::ANOTHER_USERS;
#[cfg(any(test, feature = "fixtures"))]
pub use queries::fixture;
pub use queries::{Doubled, StartClaim, StopClaim};
pub use runtime_record::{Record, read_up_to};
pub(crate) use store::read_text;
pub use store::{Freed, MountPoints, Namespaces, Store, is_remote, is_there};
pub use suspension::{Backoff, SuspendStep, SuspendedProcess, Suspension, WrongState};
pub use waiters::{Retry, Waiter};

/// [`Ledger::schema`].
pub const SCHEMA: &str = "sublet.ledger/1";

/// The annotation that holds the lease's id.
pub const LEASE_ANNOTATION: &str = "sublet.lease";

/// The annotation that holds the lease itself ([`Lease::to_annotation`]), beside [`LEASE_ANNOTATION`].
///
/// It is not read while the ledger is intact. runc and crun keep the annotations with their record of a container, so
/// that a lost ledger can be rebuilt from the containers that run.
pub const LEASE_RECORD_ANNOTATION: &str = "sublet.lease.record";
/// The annotation with the other edits for a share in a config.json. They are removed first if the bundle is run again.
pub(crate) const LEASE_EDITS_ANNOTATION: &str = "sublet.lease.edits";

/// `ledger.json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// `sublet.ledger/1`, or `/2` while a container is suspended, or has been moved.
    pub schema: String,
    /// The boot of the ledger. No lease of another boot is alive.
    pub boot_id: String,
    /// The namespaces in which its process ids are valid; `None` while it names no process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<Namespaces>,
    /// Every lease that has not ended.
    pub leases: Vec<Lease>,
    /// Every MPS daemon that sublet started and whose end it has not seen.
    pub daemons: Vec<MpsDaemon>,
    /// Compute modes that sublet changed, with the original modes, which will be restored.
    pub compute_modes: Vec<ChangedComputeMode>,
    /// Devices that take no new lease, by UUID: `sublet drain`.
    pub drained: Vec<String>,
    /// Why, and until when.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drains: Vec<Drain>,
    /// Devices that take no new lease, because a rebuild found processes there that are not attributable to any lease.
    pub unexplained: Vec<String>,
    /// The ledger was rebuilt without its copy, so earlier inventories do not show which processes are on the devices
    /// now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost: bool,
    /// Leftovers of ended containers until they are removed. They are recorded so that a crash does not lose them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub leftovers: Vec<Leftover>,
    /// Only in the ledger's text: the lists that [`Lease::mount_points`] names by their numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mount_point_lists: Vec<MountPoints>,
    /// Changes of MIG layouts.
    #[serde(default, skip_serializing_if = "MigChanges::are_none")]
    pub mig: MigChanges,
    /// The process of `sublet serve`, while it runs. It ends daemons that wait for the next lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper: Option<Process>,
    /// Who waits for a share, in the order in which they came.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiters: Vec<Waiter>,
}

/// Files of sublet's in places that outlive the container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leftover {
    /// The bundle, which may hold the temporary file of a killed shim.
    pub bundle: PathBuf,
    /// The root filesystem. If another container uses it too, nothing is removed before that one has ended.
    pub rootfs: PathBuf,
    /// As in [`Lease::mount_points`].
    pub mount_points: Vec<PathBuf>,
    /// As in [`Lease::volumes`], only those with files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFiles>,
}

/// A directory in a volume of the container, in which sublet mounts files. Another container may have the same volume,
/// and unlinking a file there also removes every mount on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeFiles {
    /// Its path on the host, without links.
    pub directory: PathBuf,
    /// Its file system (`st_dev`).
    pub device: u64,
    /// Its inode (`st_ino`).
    pub inode: u64,
    /// Files below `directory` that were missing, so the runtime created them as mount points. sublet removes them.
    pub files: Vec<PathBuf>,
}

/// One container's share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Sixteen random hex digits. config.json has it as `sublet.lease`.
    pub id: LeaseId,
    /// The container that has it.
    pub container: Container,
    /// Device UUIDs, taken and freed together.
    pub devices: Vec<String>,
    /// The MIG devices as they were when they were leased. Later instances may get the same ids.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_devices: Vec<LeasedMigDevice>,
    /// How the devices are shared.
    pub mode: Mode,
    /// Whether the MPS server is shared or dedicated, if mode or memory needs one.
    pub isolation: Isolation,
    /// The MPS server that serves it.
    pub daemon: Option<DaemonKey>,
    /// SM limit of the whole container; `None`: no limit.
    pub sm: Option<Percent>,
    /// Device memory of the whole container on each device, in bytes; `None`: no limit.
    pub memory_bytes: Option<u64>,
    /// CUDA processes expected at once.
    pub processes: u32,
    /// MPS client priority.
    pub priority: Priority,
    /// The guard's action on its processes, if the container or its named share sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guarding>,
    /// Whether its container's GPU state may be put into host memory.
    #[serde(default, skip_serializing_if = "Suspend::is_never")]
    pub suspend: Suspend,
    /// That it is there, or on its way there or back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension: Option<Suspension>,
    /// GPUs other than its own that its processes have been on, or may have. The driver in them opens these again whenever it
    /// suspends or restores them, so that for as long the container has their nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known: Vec<String>,
    /// When it was last resumed, in milliseconds since boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed_ms: Option<u64>,
    /// `sublet serve` has failed to suspend or resume it, and leaves it alone for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backoff: Option<Backoff>,
    /// Where it is in its life.
    pub state: LeaseState,
    /// While pending, the process that is starting the container. While ending, the process that deletes it.
    pub owner: Process,
    /// Once active, the container's first process with its namespace and cgroup.
    pub init: Option<Init>,
    /// While it waits to be bound to its container, because the hook that took it does not know the container, or a user
    /// took it: the time, in seconds since boot, until which a running owner keeps it. A service that starts containers
    /// outlives those that fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bind_by: Option<u64>,
    /// Seconds since the epoch.
    pub since: u64,
    /// Where the container finds the driver's libraries. Processes started by exec need it, too.
    pub library_dir: Option<PathBuf>,
    /// Files that were missing in the rootfs, so the runtime created them as mount points. sublet removes them if the
    /// rootfs persists.
    pub mount_points: MountPoints,
    /// The same in volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeFiles>,
    /// Whether it was taken through `sublet serve`. The paths in it then come from a user, and root neither reads nor
    /// removes anything there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub brokered: bool,
    /// The job of Slurm's for which it was taken, or in which its container runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
    /// The lease of that job. The part of this container is booked there, as long as that lease exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub within: Option<LeaseId>,
    /// Whom `sublet.owner` names: a claim of whoever may start containers by root's engine. Of a user's own lease and of a
    /// job's the user is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_owner: Option<String>,
}

/// A job of Slurm's on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// Its id, as in `squeue`.
    pub id: u64,
    /// The step: `0`, `batch`; `None` for the lease of the whole job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The job's user.
    pub uid: u32,
    /// The inode of the job's cgroup, which is [`Init::cgroup`] of the job's lease. A job that is requeued gets another
    /// cgroup of the same name.
    pub cgroup_inode: u64,
}

/// A MIG device as it was when it was leased. Later instances may get its ids, but never its UUID.
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
    /// First memory slice of the GPU instance, and how many; `None` if NVML did not report it.
    pub placement: Option<(u32, u32)>,
    /// Its part of the GPU's SMs, if NVML reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm: Option<Percent>,
    /// Its memory, or its part of the memory that compute instances share, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// Sixteen lower-case hex digits.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(String);

impl LeaseId {
    /// A random id. It comes from getrandom(2) and not from /dev/urandom, which `SELinux` denies to some engines'
    /// domains (docs/evidence/2026-11-22-selinux-apparmor.md).
    ///
    /// # Errors
    /// getrandom(2) fails, for example because the engine runs under a seccomp filter that does not know this call.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0_u8; 8];
        // A request for up to 256 bytes is never answered in part (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        Ok(Self(format!("{:016x}", u64::from_ne_bytes(bytes))))
    }

    /// `text`, if it is a lease id.
    pub fn parse(text: &str) -> Option<Self> {
        let hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        (text.len() == 16 && text.bytes().all(hex)).then(|| Self(text.to_owned()))
    }

    /// The digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for LeaseId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// The container to which a lease belongs, and where its runtime keeps its record of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// The engine's uid. Container ids are unique only for each user.
    pub uid: u32,
    /// The container id. It may be empty until the lease is bound.
    pub id: String,
    /// The bundle, canonical. Empty until the lease is bound.
    pub bundle: PathBuf,
    /// The root filesystem, canonical.
    pub rootfs: PathBuf,
    /// The directory of the low-level runtime's own state of this container, `ROOT/ID`: runc keeps `state.json` there,
    /// crun `status`. Empty if it is unknown: `init` then shows whether the container is alive.
    pub record: PathBuf,
}

impl Container {
    /// Its name in messages: its id, otherwise its bundle, otherwise its root filesystem.
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
    /// Inode of its PID namespace; 0 if that is the host's, which identifies no container.
    pub pid_namespace: u64,
    /// Its cgroup directory, absolute; `None` if it has none of its own.
    pub cgroup: Option<PathBuf>,
    /// The inode of that directory, by which it is distinguished from a later one of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup_inode: Option<u64>,
}

/// A daemon's name: the device's UUID (shared) or the lease id (dedicated).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DaemonKey(pub String);

impl DaemonKey {
    /// The daemon's own directory. Other users can only pass through it to `public/`.
    pub fn dir(&self, state_dir: &Path) -> PathBuf {
        state_dir.join("mps").join(&self.0)
    }

    /// Whether it may become part of a path: it has only letters, digits and `-`, as UUIDs and lease ids do.
    pub(crate) fn is_well_formed(&self) -> bool {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !self.0.is_empty() && self.0.len() <= 80 && !self.0.starts_with('-') && self.0.bytes().all(plain)
    }

    /// The directory that containers see. It holds a hard link to `control` and nothing else.
    pub fn public(&self, state_dir: &Path) -> PathBuf {
        self.dir(state_dir).join("public")
    }
}

impl std::fmt::Display for DaemonKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}

/// One MPS control daemon that sublet started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MpsDaemon {
    /// Its directory's name under `mps/`: the device's UUID, or the lease id.
    pub key: DaemonKey,
    /// The devices that it serves, in the order in which its clients count them: one, or all devices of a lease that
    /// has several. Empty if a rebuild could not find out.
    pub devices: Vec<String>,
    /// The control daemon.
    pub process: Option<Process>,
    /// Its state.
    pub state: DaemonState,
    /// The limits for new clients. Never more than the limits really in force.
    pub default_limits: DefaultLimits,
    /// When it last gave a real answer, in seconds since the epoch.
    pub answered_at: u64,
    /// Since when it has served no lease, in seconds since boot. [`Store::update`] maintains it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since: Option<u64>,
    /// It has been without a lease since the compute mode was checked, so the mode must be checked again before it
    /// serves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mode_left: bool,
}

impl MpsDaemon {
    /// The record of one that is being started for `devices`. Its default limits are unknown.
    pub(crate) fn starting(key: DaemonKey, devices: Vec<String>) -> Self {
        Self { key, devices, ..Self::default() }
    }

    /// Whether it serves `device`, a UUID.
    pub fn serves(&self, device: &str) -> bool {
        self.devices.iter().any(|own| own == device)
    }
}

/// States of a daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonState {
    /// Being started. No client may rely on it yet.
    #[default]
    Starting,
    /// Answers.
    Serving,
    /// Being stopped. A new lease waits for the daemon's lock and starts it again.
    Stopping,
    /// Runs and does not answer, or reports a fault.
    Fault,
    /// Not running although a lease wants it.
    Down,
}

/// A compute mode that sublet changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedComputeMode {
    /// The device.
    pub device: String,
    /// The original mode.
    pub found: ComputeMode,
}

/// States of a lease. `lost` is shown for leases whose device is no longer in the inventory, and the steps of a suspension
/// for active ones ([`Lease::shown_state`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaseState {
    /// Taken; the container is being created.
    Pending,
    /// The container exists.
    Active,
    /// Its GPU state is on its way into host memory.
    Suspending,
    /// Its GPU state is in host memory.
    Suspended,
    /// Its GPU state is on its way back.
    Resuming,
    /// Its processes are ending.
    Ending,
    /// Its device no longer exists.
    Lost,
}

impl Lease {
    /// Its container exists, with `init` as its first process. A lease that a `delete` has marked as ending meanwhile
    /// keeps that state.
    fn note_container(&mut self, init: Init) {
        self.init = Some(init);
        if self.state == LeaseState::Pending {
            self.state = LeaseState::Active;
        }
    }

    /// The first process of its container has ended, and other ones have not. `init` is given if only the record names it.
    fn note_first_process_gone(&mut self, init: Option<Init>) {
        self.init = init.or(self.init.take());
        self.state = LeaseState::Ending;
    }

    /// The `delete` that had marked it as ending was killed.
    fn note_not_deleted(&mut self) {
        self.state = LeaseState::Active;
    }

    /// Binds it to the container whose first process is `init`.
    fn bind_to(&mut self, init: Init) {
        self.init = Some(init);
        self.state = LeaseState::Active;
        self.bind_by = None;
    }

    /// Its container was found after a loss of the ledger: its first process, `init`, `runs`, or other processes of it do.
    fn restore(&mut self, init: Init, runs: bool) {
        self.init = Some(init);
        self.state = if runs { LeaseState::Active } else { LeaseState::Ending };
    }
}

impl Ledger {
    /// The record of the daemon `key`.
    pub fn daemon(&self, key: &DaemonKey) -> Option<&MpsDaemon> {
        self.daemons.iter().find(|daemon| daemon.key == *key)
    }

    /// Marks the lease of container `id` of `uid` as ending. The container's record is in `record`, and `deleter`
    /// deletes it.
    pub(crate) fn mark_ending(
        &mut self,
        uid: u32,
        id: &str,
        record: &Path,
        deleter: Option<Process>,
    ) -> Option<LeaseId> {
        let id = self.find_by_record(uid, id, record).map(|lease| lease.id.clone())?;
        let lease = self.lease_mut(&id)?;
        lease.state = LeaseState::Ending;
        // If `deleter` is killed, the container is not ending after all. The end of the owner shows that.
        if let (Some(_), Some(deleter)) = (&lease.init, deleter) {
            lease.owner = deleter;
        }
        Some(id)
    }

    /// The container of lease `id` was deleted, and `ender` ends the processes that it has left.
    pub(crate) fn mark_deleted(&mut self, id: &LeaseId, ender: Process) {
        if let Some(lease) = self.lease_mut(id) {
            lease.state = LeaseState::Ending;
            lease.owner = ender;
        }
    }

    /// A failed delete leaves the lease as it was.
    pub(crate) fn unmark_ending(&mut self, id: &LeaseId) {
        if let Some(lease) = self.lease_mut(id) {
            lease.state = if lease.init.is_some() { LeaseState::Active } else { LeaseState::Pending };
        }
    }

    /// The container of lease `id` already existed when the lease was taken, with `init` as its first process.
    pub(crate) fn activate(&mut self, id: &LeaseId, init: Init) {
        if let Some(lease) = self.lease_mut(id) {
            lease.note_container(init);
        }
    }
}

/// A server's default limits, or those that a lease needs. The `Default` value means that the limits are unknown, and
/// admits no lease.
///
/// They apply to clients that connect from now on, including those without the environment of a share (docs/evidence).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefaultLimits {
    /// Share of the SMs.
    pub sm: Percent,
    /// Memory of a client on each device.
    pub memory: DefaultMemoryLimit,
}

/// Memory that one client may have on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DefaultMemoryLimit {
    /// In MiB. No server has the limit 0: it means that the limit in force is unknown.
    Mebibytes(u64),
    /// As much as there is.
    Unlimited,
}

impl Default for DefaultMemoryLimit {
    fn default() -> Self {
        Self::Mebibytes(0)
    }
}

impl DefaultMemoryLimit {
    /// The part of each of `processes`, which have `bytes` together, in whole MiB.
    pub(crate) fn of_each(bytes: Option<u64>, processes: u32) -> Self {
        // 0 would remove the limit (docs/evidence). So a part below 1 MiB, in which no context fits, becomes 1 MiB.
        bytes.map_or(Self::Unlimited, |bytes| {
            Self::Mebibytes((bytes_of_process(bytes, processes) / MIB).max(1))
        })
    }

    /// In bytes; `None`: unlimited.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Mebibytes(amount) => Some(amount.saturating_mul(MIB)),
            Self::Unlimited => None,
        }
    }
}

impl DefaultLimits {
    /// The limits of a new server: the whole device.
    pub const NONE: Self = Self { sm: Percent::WHOLE, memory: DefaultMemoryLimit::Unlimited };

    /// Whether a client that needs `needed` gets that much.
    pub(crate) fn admits(self, needed: Self) -> bool {
        needed.sm <= self.sm && needed.memory <= self.memory
    }

    /// The limits that admit a client if either of them does.
    pub fn or(self, other: Self) -> Self {
        Self { sm: self.sm.max(other.sm), memory: self.memory.max(other.memory) }
    }

    /// The limits that admit a client only if both do.
    pub fn and(self, other: Self) -> Self {
        Self { sm: self.sm.min(other.sm), memory: self.memory.min(other.memory) }
    }
}

#[cfg(test)]
mod default_limits_tests {
    use super::*;

    fn default_limits(sm: u32, memory: DefaultMemoryLimit) -> DefaultLimits {
        DefaultLimits { sm: Percent::from_thousandths(sm * 1000), memory }
    }

    #[test]
    fn each_part_is_compared_and_merged_by_itself() {
        use DefaultMemoryLimit::{Mebibytes, Unlimited};
        let (wide, deep) = (default_limits(60, Mebibytes(2048)), default_limits(25, Unlimited));
        assert!(wide.admits(wide) && !wide.admits(deep) && !deep.admits(wide));
        assert_eq!(wide.or(deep), default_limits(60, Unlimited));
        assert_eq!(wide.and(deep), default_limits(25, Mebibytes(2048)));
        assert!(
            DefaultLimits::NONE.admits(wide)
                && !DefaultLimits::default().admits(default_limits(0, Mebibytes(1)))
        );
    }

    #[test]
    fn a_part_is_in_whole_mebibytes_and_never_the_0_that_lifts_a_limit() {
        let each = |bytes, processes| DefaultMemoryLimit::of_each(bytes, processes);
        assert_eq!(each(Some(8 << 30), 3), DefaultMemoryLimit::Mebibytes(2730));
        assert_eq!(each(Some(8 << 30), 0), DefaultMemoryLimit::Mebibytes(8192));
        assert_eq!(each(Some(MIB), 2), DefaultMemoryLimit::Mebibytes(1));
        assert_eq!(each(None, 2), DefaultMemoryLimit::Unlimited);
    }
}
