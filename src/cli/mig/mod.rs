//! MIG layouts: which instances a GPU is to have, the steps to that, and the change itself.
//!
//! ```text
//! file → Layout → Target ─┐
//!      layout    target   │→ Plan → changes, or everything as it was
//! NVML → Gpu ─────────────┘  plan     apply
//! ```
//!
//! Planning does no I/O. Profiles and placements come from the driver; there is no table of them.

mod apply;
#[cfg(any(test, feature = "fixtures"))]
#[cfg_attr(feature = "fixtures", allow(dead_code, reason = "the fuzz targets need a part of it"))]
mod fake_driver;
#[cfg(feature = "fixtures")]
pub mod fuzzing;
mod layout;
mod layout_target;
mod making_instances;
mod nvml;
mod plan;
mod profile_choice;

use nix::unistd::geteuid;

pub use crate::nvml_mig::{ComputeProfile, Profile, Span};
pub use apply::{ApplyError, apply};
pub(crate) use apply::{Fence, uninterrupted};
pub use layout::{Layout, export};
pub(crate) use layout_target::silent;
pub use layout_target::{Target, Want, targets};
pub(crate) use making_instances::Making;
pub use nvml::Nvml;
pub use plan::{Plan, Step, plan};
pub(crate) use profile_choice::{Foreseen, NotMade, foresee};
use sublet_core::ledger::{DynamicInstance, Ledger};
use sublet_core::log::warn_once;
use sublet_core::text::{safe, short_id};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[schemars(rename = "ListedMode")]
pub struct Mode {
    /// Whether it is on.
    #[serde(rename = "enabled")]
    pub current: bool,
    /// Whether it is on after the next reset.
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

    /// Records which leases and processes use it and its instances, and which instances are being created or destroyed
    /// for a container: all of those stay where they are.
    pub fn mark(&mut self, ledger: &Ledger) {
        for lease in &ledger.leases {
            let out = if lease.suspension.is_some() { "suspended " } else { "" };
            let who = || format!("{out}lease {} of container {}", lease.id, short_id(&lease.container.id));
            // The driver opens those that a suspended one has known as it brings it back.
            let known = lease.known.iter().filter(|_| lease.suspension.is_some());
            for device in lease.devices.iter().chain(known) {
                if *device == self.uuid {
                    self.held.push(who());
                }
                let parts = self.instances.iter_mut().flat_map(|one| &mut one.compute);
                for part in parts.filter(|part| part.uuid == *device) {
                    part.held = Some(who());
                }
            }
        }
        for made in ledger.mig.dynamic_instances.iter().filter(|made| made.gpu == self.uuid) {
            let at = |one: &&mut Instance| one.span == Span::at(made.placement);
            if let Some(one) = self.instances.iter_mut().find(at).filter(|one| one.holder().is_none()) {
                one.held = kept(made);
            }
        }
        for running in self.running.clone() {
            let who = || format!("process {}", running.pid);
            let instance = self.instances.iter_mut().find(|one| Some(one.gi) == running.gi);
            let Some(instance) = instance else {
                self.held.push(who());
                continue;
            };
            match instance.compute.iter_mut().find(|part| Some(part.ci) == running.ci) {
                Some(part) => _ = part.held.get_or_insert_with(who),
                None => _ = instance.held.get_or_insert_with(who),
            }
        }
    }

    /// The places of its instances that were created for containers.
    pub fn made(&self, ledger: &Ledger) -> Vec<Span> {
        let is = |made: &DynamicInstance, one: &Instance| {
            let same = made.gpu == self.uuid && one.span == Span::at(made.placement);
            same && one.compute.iter().any(|part| Some(&part.uuid) == made.uuid.as_ref())
        };
        let ours = |one: &&Instance| ledger.mig.dynamic_instances.iter().any(|made| is(made, one));
        self.instances.iter().filter(ours).map(|one| one.span).collect()
    }
}

/// Why an instance created for a container stays although no lease has it.
fn kept(made: &DynamicInstance) -> Option<String> {
    if let Some(awaited) = &made.awaited {
        return Some(format!("created for container {}, which is being started", safe(&awaited.container)));
    }
    made.going.then(|| "sublet, which is destroying it: `sublet gc` tries again".to_owned())
}

/// The name of a compute instance: `1c.2g.35gb` for a part of a `2g.35gb`, the profile's own name for the whole.
pub(crate) fn device_name(profile: &Profile, slices: u32) -> String {
    if slices == profile.slices { profile.name.clone() } else { format!("{slices}c.{}", profile.name) }
}

/// The answer of the driver, or the failed call, such as `NVML, creating a GPU instance`, and the driver's message.
pub type Answer<T> = anyhow::Result<T>;

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

/// Those of `gpus` (UUIDs) that tell their profiles and instances. The others are passed over, each with one warning.
///
/// # Errors
/// There is none of them; or one tells nothing to a user without root, whom the driver lets see no GPU instance.
fn answering<'u>(gpus: impl Iterator<Item = &'u str>, driver: &mut dyn Driver) -> Answer<Vec<Gpu>> {
    let (found, silent): (Vec<_>, Vec<_>) = gpus.map(|uuid| driver.gpu(uuid)).partition(Result::is_ok);
    let mut silent: Vec<_> = silent.into_iter().filter_map(Result::err).collect();
    if !silent.is_empty() && (found.is_empty() || !geteuid().is_root()) {
        return Err(silent.remove(0));
    }
    for why in silent {
        // A change of the layout looks twice.
        warn_once(format!("{why}; this GPU is passed over"));
    }
    Ok(found.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::fake_driver::{Double, profile};
    use super::*;
    use sublet_core::ledger::fixture;

    #[test]
    fn leases_hold_their_instance_and_processes_theirs() {
        let mut gpu =
            Double::with(&[(profile("2g.35gb"), 0), (profile("2g.35gb"), 2), (profile("3g.71gb"), 4)])
                .gpus
                .remove(0);
        let mut ledger = Ledger::empty("boot");
        let mut lease = fixture::lease(0xaa, "GPU-9");
        lease.devices = vec![gpu.instances[1].compute[0].uuid.clone()];
        ledger.leases.push(lease);
        let in_part = Running { pid: 7, gi: Some(gpu.instances[0].gi), ci: Some(0) };
        let in_none = Running { pid: 8, gi: Some(gpu.instances[2].gi), ci: None };
        let nowhere = Running { pid: 9, gi: None, ci: None };
        gpu.running = vec![in_part, in_none, nowhere];
        gpu.mark(&ledger);
        let holders: Vec<_> = gpu.instances.iter().map(|one| one.holder().unwrap_or("")).collect();
        assert_eq!(holders[0], "process 7");
        assert!(holders[1].starts_with("lease 00000000000000aa of container "), "{holders:?}");
        assert_eq!(holders[2], "process 8");
        assert_eq!(gpu.held, ["process 9"]);
    }
}
