//! The MIG profiles of the simulated GPUs. The product asks a real driver through NVML; these are for tests only.
//!
//! Sources (the H200's answers are in docs/evidence):
//! - H200: a real card, driver 580 (`nvidia-smi mig -lgip -lgipp` and `nvmlDeviceGetGpuInstanceProfileInfo`).
//! - H100-80GB: `nvidia-smi mig -lgip` of a real card as published; placements as on the H200.
//! - B200-180GB: for 1g and 2g, output published in NVIDIA/mig-parted pull requests 166 and 187. For 3g, 4g and 7g,
//!   names, ids, instances and copy engines are from NVIDIA's MIG User Guide; SMs and memory are guesses.
//! - A100-40GB and A30: NVIDIA's MIG User Guide. Memory was not measured.
//! - Compute instances: ids and counts as `nvidia-smi mig -lcip` printed them for the A100 (1c.3g, 2c.3g, 3g; 1c.4g,
//!   2c.4g, 4g; …). One slice has the same number of SMs in every GPU instance; a compute instance that is the whole
//!   GPU instance has all of its SMs. A `1g` of double memory with another number of SMs has the compute profile 7
//!   (`1_SLICE_REV1`), as seen for 1g.24gb on an H100 NVL.

/// One GPU instance profile.
#[derive(Debug)]
pub struct Profile {
    /// Such as `1g.18gb`.
    pub name: &'static str,
    /// The profile's id, as nvidia-smi takes it.
    pub id: u32,
    /// NVML's profile index: `NVML_GPU_INSTANCE_PROFILE_*`.
    pub index: u32,
    /// How many fit an empty GPU.
    pub instances: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Compute slices.
    pub slices: u32,
    /// Copy engines, decoders, JPEG engines, OFA engines.
    pub engines: [u32; 4],
    /// The memory slices at which it may start.
    pub starts: &'static [u32],
    /// The number of its memory slices.
    pub size: u32,
}

/// One compute instance profile of a GPU instance profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeProfile {
    /// Such as `1c.2g.10gb`, or the GPU instance profile's name if it is the whole GPU instance.
    pub name: String,
    /// Its id, which is also NVML's index, `NVML_COMPUTE_INSTANCE_PROFILE_*`.
    pub id: u32,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// The number of its compute slices.
    pub slices: u32,
    /// The compute slices at which it may start. Their number is how many fit an empty GPU instance.
    pub starts: Vec<u32>,
}

type Row = (&'static str, u32, u32, u32, u64, u32, u32, [u32; 4], &'static [u32], u32);

const fn row(
    (name, id, index, instances, memory_mib, sm_count, slices, engines, starts, size): Row,
) -> Profile {
    Profile { name, id, index, instances, memory_mib, sm_count, slices, engines, starts, size }
}

const EVERY: &[u32] = &[0, 1, 2, 3, 4, 5, 6];
const PAIRS: &[u32] = &[0, 2, 4, 6];
const TWOS: &[u32] = &[0, 2, 4];
const HALVES: &[u32] = &[0, 4];
const FIRST: &[u32] = &[0];

const H200: &[Profile] = &[
    row(("1g.18gb", 19, 0, 7, 16384, 16, 1, [1, 1, 1, 0], EVERY, 1)),
    row(("1g.18gb+me", 20, 7, 1, 16384, 16, 1, [1, 1, 1, 1], EVERY, 1)),
    row(("1g.35gb", 15, 9, 4, 33280, 26, 1, [1, 1, 1, 0], PAIRS, 2)),
    row(("2g.35gb", 14, 1, 3, 33280, 32, 2, [2, 2, 2, 0], TWOS, 2)),
    row(("3g.71gb", 9, 2, 2, 71424, 60, 3, [3, 3, 3, 0], HALVES, 4)),
    row(("4g.71gb", 5, 3, 1, 71424, 64, 4, [4, 4, 4, 0], FIRST, 4)),
    row(("7g.141gb", 0, 4, 1, 143_360, 132, 7, [8, 7, 7, 1], FIRST, 8)),
];

const H100_80: &[Profile] = &[
    row(("1g.10gb", 19, 0, 7, 9984, 16, 1, [1, 1, 1, 0], EVERY, 1)),
    row(("1g.10gb+me", 20, 7, 1, 9984, 16, 1, [1, 1, 1, 1], EVERY, 1)),
    row(("1g.20gb", 15, 9, 4, 20096, 26, 1, [1, 1, 1, 0], PAIRS, 2)),
    row(("2g.20gb", 14, 1, 3, 20096, 32, 2, [2, 2, 2, 0], TWOS, 2)),
    row(("3g.40gb", 9, 2, 2, 40448, 60, 3, [3, 3, 3, 0], HALVES, 4)),
    row(("4g.40gb", 5, 3, 1, 40448, 64, 4, [4, 4, 4, 0], FIRST, 4)),
    row(("7g.80gb", 0, 4, 1, 81152, 132, 7, [8, 7, 7, 1], FIRST, 8)),
];

const B200: &[Profile] = &[
    row(("1g.23gb", 19, 0, 7, 22528, 18, 1, [2, 1, 1, 0], EVERY, 1)),
    row(("1g.23gb+me", 20, 7, 1, 22528, 18, 1, [2, 1, 1, 1], EVERY, 1)),
    row(("1g.45gb", 15, 9, 4, 45312, 30, 1, [2, 1, 1, 0], PAIRS, 2)),
    row(("2g.45gb", 14, 1, 3, 45312, 36, 2, [4, 2, 2, 0], TWOS, 2)),
    row(("3g.90gb", 9, 2, 2, 91136, 70, 3, [6, 3, 3, 0], HALVES, 4)),
    row(("4g.90gb", 5, 3, 1, 91136, 72, 4, [8, 4, 4, 0], FIRST, 4)),
    row(("7g.180gb", 0, 4, 1, 182_272, 148, 7, [16, 7, 7, 1], FIRST, 8)),
];

const A100_40: &[Profile] = &[
    row(("1g.5gb", 19, 0, 7, 4864, 14, 1, [1, 0, 0, 0], EVERY, 1)),
    row(("1g.5gb+me", 20, 7, 1, 4864, 14, 1, [1, 1, 1, 1], EVERY, 1)),
    row(("1g.10gb", 15, 9, 4, 9856, 14, 1, [1, 1, 0, 0], PAIRS, 2)),
    row(("2g.10gb", 14, 1, 3, 9984, 28, 2, [2, 1, 0, 0], TWOS, 2)),
    row(("3g.20gb", 9, 2, 2, 20096, 42, 3, [3, 2, 0, 0], HALVES, 4)),
    row(("4g.20gb", 5, 3, 1, 20096, 56, 4, [4, 2, 0, 0], FIRST, 4)),
    row(("7g.40gb", 0, 4, 1, 40448, 98, 7, [7, 5, 1, 1], FIRST, 8)),
];

const A30: &[Profile] = &[
    row(("1g.6gb", 14, 0, 4, 5952, 14, 1, [1, 0, 0, 0], &[0, 1, 2, 3], 1)),
    row(("1g.6gb+me", 21, 7, 1, 5952, 14, 1, [1, 1, 1, 1], &[0, 1, 2, 3], 1)),
    row(("2g.12gb", 5, 1, 2, 11968, 28, 2, [2, 2, 0, 0], &[0, 2], 2)),
    row(("2g.12gb+me", 6, 8, 1, 11968, 28, 2, [2, 2, 1, 1], &[0, 2], 2)),
    row(("4g.24gb", 0, 3, 1, 24000, 56, 4, [4, 4, 1, 1], FIRST, 4)),
];

/// The profiles of a GPU type, in nvidia-smi's order: `a30`, `a100-40gb`, `h100-80gb`, `h200` or `b200`.
#[must_use]
pub fn table(name: &str) -> Option<&'static [Profile]> {
    match name {
        "a30" => Some(A30),
        "a100-40gb" => Some(A100_40),
        "h100-80gb" => Some(H100_80),
        "h200" => Some(H200),
        "b200" => Some(B200),
        _ => None,
    }
}

/// The memory slices of a GPU type: those of its largest profile.
#[must_use]
pub fn memory_slices(table: &[Profile]) -> u32 {
    table.iter().map(|profile| profile.size).max().unwrap_or(1)
}

/// The id of a GPU instance. It follows from the placement, so an instance that is created again in the same place has
/// the same id. Ids number the nodes of a binary tree over the memory slices, level by level, the upper half of the
/// slices first. As `nvidia-smi mig -lgi` shows on A100: 0 is 0:8, 1 is 4:4, 2 is 0:4, 3 is 4:2, 6 is 2:2, 9 is 6:1, 11
/// is 0:1.
#[must_use]
pub const fn instance_id(slices: u32, start: u32, size: u32) -> u32 {
    slices / size - 1 + (start + slices / 2) % slices / size
}

/// The placement that has this id, the reverse of [`instance_id`]: start and size.
#[must_use]
pub fn placement(slices: u32, id: u32) -> Option<(u32, u32)> {
    let sizes = std::iter::successors(Some(slices), |size| (size % 2 == 0).then_some(size / 2));
    let every = sizes.flat_map(|size| (0..slices / size).map(move |nth| (nth * size, size)));
    let mut places = every.filter(|&(start, size)| instance_id(slices, start, size) == id);
    places.next()
}

impl Profile {
    /// Whether it has the media engine that only one instance can have (OFA).
    #[must_use]
    pub const fn takes_media(&self) -> bool {
        self.engines[3] > 0
    }

    /// The order in which the driver tries placements if none is requested. It follows from published instance numbers
    /// of A100 and H100: the first of seven 1g is at 6.
    #[must_use]
    pub const fn order(&self) -> &'static [u32] {
        match self.starts.len() {
            7 => &[6, 4, 5, 0, 1, 2, 3],
            3 => &[4, 0, 2],
            _ => self.starts,
        }
    }

    /// The compute instance profiles of a GPU instance of this profile.
    #[must_use]
    pub fn compute(&self, table: &[Self]) -> Vec<ComputeProfile> {
        let one = table.iter().find(|profile| profile.index == 0).map_or(self.sm_count, |one| one.sm_count);
        // 4g has no 3c.
        let parts = [1, 2, 3, 4, 7].into_iter();
        let parts = parts.filter(|&part| part <= self.slices && !(part == 3 && self.slices == 4));
        parts.map(|part| self.part(part, one)).collect()
    }

    fn part(&self, slices: u32, one: u32) -> ComputeProfile {
        let whole = slices == self.slices;
        let step = if slices == 3 { 4 } else { slices };
        ComputeProfile {
            name: if whole { self.name.to_owned() } else { format!("{slices}c.{}", self.name) },
            id: match slices {
                1 if self.slices == 1 && self.sm_count != one => 7,
                7 => 4,
                _ => slices - 1,
            },
            sm_count: if whole { self.sm_count } else { slices * one },
            slices,
            starts: (0..=self.slices - slices).step_by(step as usize).collect(),
        }
    }
}

/// The GPU instance profile and compute instance profile of a name such as `2g.10gb` or `1c.2g.10gb`.
#[must_use]
pub fn find<'t>(table: &'t [Profile], name: &str) -> Option<(&'t Profile, ComputeProfile)> {
    let whole = name.split_once("c.").map_or(name, |(_, whole)| whole);
    let profile = table.iter().find(|profile| profile.name == whole)?;
    let compute = profile.compute(table).into_iter().find(|compute| compute.name == name)?;
    Some((profile, compute))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compute_instance_has_part_of_the_sms_and_all_the_memory() {
        let shape =
            |name| find(A100_40, name).map(|(profile, compute)| (compute.sm_count, profile.memory_mib));
        assert_eq!(shape("2g.10gb"), Some((28, 9984)));
        assert_eq!(shape("1c.2g.10gb"), Some((14, 9984)));
        assert_eq!(shape("3c.2g.10gb"), None);
        assert_eq!(shape("9g.80gb"), None);
        assert_eq!(find(H200, "7g.141gb").map(|(_, compute)| compute.sm_count), Some(132));
    }

    #[test]
    fn compute_profiles_are_those_that_nvidia_smi_lists() {
        let listed = |name| -> Vec<(String, u32, usize, u32)> {
            let (profile, _) = find(A100_40, name).unwrap();
            let every = profile.compute(A100_40).into_iter();
            every.map(|one| (one.name, one.id, one.starts.len(), one.sm_count)).collect()
        };
        let line = |name: &str, id, instances, sm| (name.to_owned(), id, instances, sm);
        assert_eq!(listed("2g.10gb"), [line("1c.2g.10gb", 0, 2, 14), line("2g.10gb", 1, 1, 28)]);
        assert_eq!(
            listed("3g.20gb"),
            [line("1c.3g.20gb", 0, 3, 14), line("2c.3g.20gb", 1, 1, 28), line("3g.20gb", 2, 1, 42)]
        );
        assert_eq!(
            listed("4g.20gb"),
            [line("1c.4g.20gb", 0, 4, 14), line("2c.4g.20gb", 1, 2, 28), line("4g.20gb", 3, 1, 56)]
        );
        assert_eq!(find(H200, "1g.35gb").map(|(_, compute)| compute.id), Some(7));
    }

    #[test]
    fn instance_ids_are_those_seen_on_an_a100() {
        let seen = [(0, 8, 0), (4, 4, 1), (0, 4, 2), (4, 2, 3), (2, 2, 6), (4, 1, 7), (6, 1, 9), (0, 1, 11)];
        for (start, size, id) in seen {
            assert_eq!(instance_id(8, start, size), id, "{start}:{size}");
            assert_eq!(placement(8, id), Some((start, size)));
        }
        assert_eq!((placement(8, 15), placement(4, 1), placement(4, 5)), (None, Some((2, 2)), Some((0, 1))));
    }

    #[test]
    fn the_driver_tries_placements_in_its_own_order() {
        let order = |name| find(A100_40, name).unwrap().0.order();
        assert_eq!(order("1g.5gb"), [6, 4, 5, 0, 1, 2, 3]);
        assert_eq!(order("2g.10gb"), [4, 0, 2]);
        assert_eq!(order("3g.20gb"), [0, 4]);
    }
}
