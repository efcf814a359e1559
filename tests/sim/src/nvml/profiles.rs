//! The MIG profiles of the simulated parts. Real ones are asked through NVML; these are for tests only.
//!
//! The H200's table was read from a real card (`nvidia-smi mig -lgip -lgipp`). Those of the A100-40GB and the
//! A30 follow NVIDIA's MIG User Guide; their memory sizes were not measured.

/// One GPU instance profile.
#[derive(Debug)]
pub struct Profile {
    /// As `1g.18gb`.
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
    /// First memory slices it may begin at.
    pub starts: &'static [u32],
    /// Memory slices it takes.
    pub size: u32,
}

type Row = (&'static str, u32, u32, u32, u64, u32, u32, &'static [u32], u32);

const fn row((name, id, index, instances, memory_mib, sm_count, slices, starts, size): Row) -> Profile {
    Profile { name, id, index, instances, memory_mib, sm_count, slices, starts, size }
}

const EVERY: &[u32] = &[0, 1, 2, 3, 4, 5, 6];

const H200: &[Profile] = &[
    row(("1g.18gb", 19, 0, 7, 16384, 16, 1, EVERY, 1)),
    row(("1g.18gb+me", 20, 7, 1, 16384, 16, 1, EVERY, 1)),
    row(("1g.35gb", 15, 9, 4, 33280, 26, 1, &[0, 2, 4, 6], 2)),
    row(("2g.35gb", 14, 1, 3, 33280, 32, 2, &[0, 2, 4], 2)),
    row(("3g.71gb", 9, 2, 2, 71424, 60, 3, &[0, 4], 4)),
    row(("4g.71gb", 5, 3, 1, 71424, 64, 4, &[0], 4)),
    row(("7g.141gb", 0, 4, 1, 143_360, 132, 7, &[0], 8)),
];

const A100_40: &[Profile] = &[
    row(("1g.5gb", 19, 0, 7, 4864, 14, 1, EVERY, 1)),
    row(("1g.5gb+me", 20, 7, 1, 4864, 14, 1, EVERY, 1)),
    row(("1g.10gb", 15, 9, 4, 9856, 14, 1, &[0, 2, 4, 6], 2)),
    row(("2g.10gb", 14, 1, 3, 9984, 28, 2, &[0, 2, 4], 2)),
    row(("3g.20gb", 9, 2, 2, 20096, 42, 3, &[0, 4], 4)),
    row(("4g.20gb", 5, 3, 1, 20096, 56, 4, &[0], 4)),
    row(("7g.40gb", 0, 4, 1, 40448, 98, 7, &[0], 8)),
];

const A30: &[Profile] = &[
    row(("1g.6gb", 14, 0, 4, 5952, 14, 1, &[0, 1, 2, 3], 1)),
    row(("1g.6gb+me", 21, 7, 1, 5952, 14, 1, &[0, 1, 2, 3], 1)),
    row(("2g.12gb", 5, 1, 2, 11968, 28, 2, &[0, 2], 2)),
    row(("4g.24gb", 0, 3, 1, 24000, 56, 4, &[0], 4)),
];

/// The profiles of a part: `h200`, `a100-40gb` or `a30`.
#[must_use]
pub fn table(name: &str) -> Option<&'static [Profile]> {
    match name {
        "h200" => Some(H200),
        "a100-40gb" => Some(A100_40),
        "a30" => Some(A30),
        _ => None,
    }
}

/// What a MIG device of some profile has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Streaming multiprocessors of the compute instance.
    pub sm_count: u32,
    /// Memory in MiB, the GPU instance's: its compute instances share it.
    pub memory_mib: u64,
    /// Compute slices of the GPU instance.
    pub gpu_slices: u32,
    /// Compute slices of the compute instance.
    pub compute_slices: u32,
}

/// The shape of `2g.10gb` or, for part of it, `1c.2g.10gb`.
#[must_use]
pub fn shape(table: &[Profile], name: &str) -> Option<Shape> {
    let (part, whole) = match name.split_once("c.") {
        Some((slices, rest)) => (Some(slices.parse::<u32>().ok()?), rest),
        None => (None, name),
    };
    let profile = table.iter().find(|profile| profile.name == whole)?;
    let compute_slices = part.unwrap_or(profile.slices);
    (1..=profile.slices).contains(&compute_slices).then_some(Shape {
        sm_count: part.map_or(profile.sm_count, |part| profile.sm_count / profile.slices * part),
        memory_mib: profile.memory_mib,
        gpu_slices: profile.slices,
        compute_slices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compute_instance_has_part_of_the_sms_and_all_the_memory() {
        let shape = |name| shape(A100_40, name).map(|shape| (shape.sm_count, shape.memory_mib));
        assert_eq!(shape("2g.10gb"), Some((28, 9984)));
        assert_eq!(shape("1c.2g.10gb"), Some((14, 9984)));
        assert_eq!(shape("3c.2g.10gb"), None);
        assert_eq!(shape("9g.80gb"), None);
        assert_eq!(super::shape(H200, "7g.141gb").map(|shape| shape.sm_count), Some(132));
    }
}
