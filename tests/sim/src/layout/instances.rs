//! The GPU instances of one GPU and their compute instances: which can be created, where, and what room is left.
//! Plain values. `nvml` uses them and returns NVML's errors.

use serde::{Deserialize, Serialize};

use super::topology::{COMPUTE_INSTANCES, Gpu, Mig, MigMode, caps};
use crate::nvml::profiles::{self, ComputeProfile, Profile};

/// MIG on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// Whether MIG mode is on.
    pub enabled: bool,
    /// Whether it will be on after the next activation.
    pub pending: bool,
    /// The instances, by id.
    pub instances: Vec<GpuInstance>,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// The id, which follows from the placement.
    pub id: u32,
    /// A number that distinguishes it from earlier instances with the same id.
    pub serial: u32,
    /// Its profile's id.
    pub profile: u32,
    /// First memory slice.
    pub start: u32,
    /// The instances, by id.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance: a MIG device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    /// The id: the lowest free one when it was created.
    pub id: u32,
    /// A number that distinguishes it from earlier instances with the same id.
    pub serial: u32,
    /// Its profile's id.
    pub profile: u32,
    /// First compute slice.
    pub start: u32,
    /// `MIG-…`.
    pub uuid: String,
}

/// The profiles of a GPU; none where it cannot do MIG.
#[must_use]
pub fn table(gpu: &Gpu) -> &'static [Profile] {
    gpu.mig_table.as_deref().and_then(profiles::table).unwrap_or_default()
}

impl Partition {
    /// The initial MIG state, from the topology. A topology cannot describe GPU instances without a compute instance.
    #[must_use]
    pub fn initial(gpu: &Gpu) -> Self {
        let enabled = gpu.mig_mode == MigMode::Enabled;
        let mut partition = Self { enabled, pending: enabled, instances: Vec::new() };
        for mig in &gpu.mig {
            partition.place(gpu, mig);
        }
        partition
    }

    fn place(&mut self, gpu: &Gpu, mig: &Mig) {
        let table = table(gpu);
        let Some((profile, compute)) = profiles::find(table, &mig.profile) else { return };
        if self.instance(mig.gi).is_none() {
            let start =
                profiles::placement(profiles::memory_slices(table), mig.gi).map_or(0, |place| place.0);
            self.instances.push(GpuInstance::new(mig.gi, 0, profile.id, start));
            self.instances.sort_by_key(|instance| instance.id);
        }
        let Some(instance) = self.instances.iter_mut().find(|instance| instance.id == mig.gi) else { return };
        let start = instance.free_starts(&compute, table).first().copied().unwrap_or_default();
        let uuid = mig.uuid.clone();
        instance.add(ComputeInstance { id: mig.ci, serial: 0, profile: compute.id, start, uuid });
    }

    /// The GPU instance with an id.
    #[must_use]
    pub fn instance(&self, id: u32) -> Option<&GpuInstance> {
        self.instances.iter().find(|instance| instance.id == id)
    }

    /// The free placements of this profile, in the profile's order. Instances may not overlap, and only one may have
    /// the media engines.
    #[must_use]
    pub fn free_starts(&self, profile: &Profile, table: &[Profile]) -> Vec<u32> {
        let others: Vec<_> =
            self.instances.iter().filter_map(|one| Some((one.start, by_id(table, one.profile)?))).collect();
        let media = profile.takes_media() && others.iter().any(|(_, other)| other.takes_media());
        let free = |start: &u32| {
            others.iter().all(|(at, other)| start + profile.size <= *at || at + other.size <= *start)
        };
        if media { Vec::new() } else { profile.order().iter().copied().filter(free).collect() }
    }

    /// How many more GPU instances of this profile fit.
    #[must_use]
    pub fn remaining(&self, profile: &Profile, table: &[Profile]) -> u32 {
        let free = self.free_starts(profile, table).len();
        u32::try_from(free).map_or(profile.instances, |free| free.min(profile.instances))
    }

    /// Creates a GPU instance at a free placement.
    pub fn add(&mut self, profile: &Profile, start: u32, serial: u32, table: &[Profile]) -> u32 {
        let id = profiles::instance_id(profiles::memory_slices(table), start, profile.size);
        self.instances.push(GpuInstance::new(id, serial, profile.id, start));
        self.instances.sort_by_key(|instance| instance.id);
        id
    }

    /// The MIG devices, in NVML's order: by GPU instance, then by compute instance.
    #[must_use]
    pub fn devices(&self, gpu: &Gpu) -> Vec<Mig> {
        let of = |instance: &GpuInstance| {
            let compute = instance.compute.iter();
            compute.filter_map(|one| device(gpu, instance, one)).collect::<Vec<_>>()
        };
        self.instances.iter().flat_map(of).collect()
    }
}

fn device(gpu: &Gpu, instance: &GpuInstance, compute: &ComputeInstance) -> Option<Mig> {
    let table = table(gpu);
    let profile = by_id(table, instance.profile)?;
    let part = profile.compute(table).into_iter().find(|part| part.id == compute.profile)?;
    let (gi_cap, ci_cap) = caps(gpu.minor, instance.id, compute.id);
    Some(Mig {
        uuid: compute.uuid.clone(),
        profile: part.name,
        gi: instance.id,
        ci: compute.id,
        gi_cap,
        ci_cap,
        sm_count: part.sm_count,
        memory_mib: profile.memory_mib,
    })
}

/// The profile with an id.
#[must_use]
pub fn by_id(table: &[Profile], id: u32) -> Option<&Profile> {
    table.iter().find(|profile| profile.id == id)
}

impl GpuInstance {
    const fn new(id: u32, serial: u32, profile: u32, start: u32) -> Self {
        Self { id, serial, profile, start, compute: Vec::new() }
    }

    /// Its compute instance profiles.
    #[must_use]
    pub fn compute_profiles(&self, table: &[Profile]) -> Vec<ComputeProfile> {
        by_id(table, self.profile).map(|profile| profile.compute(table)).unwrap_or_default()
    }

    /// The free placements of this compute instance profile.
    #[must_use]
    pub fn free_starts(&self, profile: &ComputeProfile, table: &[Profile]) -> Vec<u32> {
        let profiles = self.compute_profiles(table);
        let slices = |id: u32| profiles.iter().find(|one| one.id == id).map_or(0, |one| one.slices);
        let free = |start: &&u32| {
            let apart = |one: &ComputeInstance| {
                **start + profile.slices <= one.start || one.start + slices(one.profile) <= **start
            };
            self.compute.iter().all(apart)
        };
        profile.starts.iter().filter(free).copied().collect()
    }

    /// The lowest free compute instance id.
    #[must_use]
    pub fn free_id(&self) -> u32 {
        (0..COMPUTE_INSTANCES).find(|id| self.compute.iter().all(|one| one.id != *id)).unwrap_or_default()
    }

    /// Adds a compute instance.
    pub fn add(&mut self, compute: ComputeInstance) {
        self.compute.push(compute);
        self.compute.sort_by_key(|one| one.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Partition {
        Partition { enabled: true, pending: true, instances: Vec::new() }
    }

    fn profile(name: &str) -> &'static Profile {
        profiles::find(a100(), name).unwrap().0
    }

    fn a100() -> &'static [Profile] {
        profiles::table("a100-40gb").unwrap()
    }

    #[test]
    fn what_is_left_follows_from_what_is_there() {
        let mut partition = empty();
        let left = |partition: &Partition| -> Vec<u32> {
            a100().iter().map(|profile| partition.remaining(profile, a100())).collect()
        };
        assert_eq!(left(&partition), [7, 1, 4, 3, 2, 1, 1]);
        assert_eq!(partition.add(profile("3g.20gb"), 0, 1, a100()), 2);
        assert_eq!(left(&partition), [3, 1, 2, 1, 1, 0, 0]);
        assert_eq!(partition.add(profile("1g.5gb+me"), 6, 2, a100()), 9);
        assert_eq!(left(&partition), [2, 0, 1, 1, 0, 0, 0]);
    }

    #[test]
    fn compute_slices_are_filled_from_the_bottom() {
        let mut instance = GpuInstance::new(1, 1, 9, 4);
        let parts = instance.compute_profiles(a100());
        assert_eq!(instance.free_starts(&parts[1], a100()), [0]);
        instance.add(ComputeInstance { id: 0, serial: 2, profile: 0, start: 0, uuid: String::new() });
        assert_eq!((instance.free_starts(&parts[0], a100()), instance.free_id()), (vec![1, 2], 1));
        assert!(instance.free_starts(&parts[1], a100()).is_empty());
    }

    /// Every layout of an A100, an A30 and an H200 that can be reached by creating one instance at a time.
    #[test]
    fn no_layout_has_more_than_the_gpu() {
        for (name, layouts) in [("a100-40gb", 2319), ("a30", 76), ("h200", 2319)] {
            let table = profiles::table(name).unwrap();
            let mut seen = vec![empty()];
            let mut next = 0;
            while let Some(partition) = seen.get(next).cloned() {
                next += 1;
                check(&partition, table);
                for profile in table {
                    let free = partition.free_starts(profile, table);
                    assert_eq!(free.is_empty(), partition.remaining(profile, table) == 0);
                    for start in free {
                        let mut larger = partition.clone();
                        larger.add(profile, start, 0, table);
                        if !seen.contains(&larger) {
                            seen.push(larger);
                        }
                    }
                }
            }
            assert_eq!(seen.len(), layouts, "{name}");
        }
    }

    fn check(partition: &Partition, table: &[Profile]) {
        let whole = table.last().unwrap();
        let profiles: Vec<_> =
            partition.instances.iter().map(|one| by_id(table, one.profile).unwrap()).collect();
        assert!(profiles.iter().map(|one| one.slices).sum::<u32>() <= whole.slices, "{partition:?}");
        assert!(profiles.iter().map(|one| one.memory_mib).sum::<u64>() <= whole.memory_mib, "{partition:?}");
        assert!(profiles.iter().map(|one| one.sm_count).sum::<u32>() <= whole.sm_count, "{partition:?}");
        assert!(partition.instances.windows(2).all(|pair| pair[0].id < pair[1].id), "{partition:?}");
    }
}
