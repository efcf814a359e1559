//! A way to share, as annotations of each tenant.

use std::collections::BTreeMap;

use super::{Found, Host, Question, Trust};
use crate::bench::{Mode, Sharing, Sm};
use crate::shown::name_of;
use sublet_core::inventory::Device;
use sublet_core::place::{SERVER_BYTES, bookings};
use sublet_core::share::{Isolation, MIB, Percent};
use sublet_core::text::safe;

/// Equal parts of the memory are rounded down to this, in bytes.
const STEP: u64 = 256 * MIB;

/// A way to share.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The mode.
    pub mode: Mode,
    /// The same for each tenant.
    pub annotations: BTreeMap<String, String>,
    /// The memory of each that the annotations limit.
    pub memory_bytes: Option<u64>,
    /// What was measured of it.
    pub found: Option<Found>,
}

impl Candidate {
    /// `mode` for the tenants of `question` on `gpu`; `None` if the memory that they need is not in it.
    pub fn new(
        mode: &Mode,
        found: Option<Found>,
        question: &Question,
        gpu: &Device,
        host: Host<'_>,
    ) -> Option<Self> {
        if mode.sharing == Sharing::Mig && !mig_suits(mode, question, gpu, host) {
            return None;
        }
        let memory_bytes = memory(mode, question, gpu, host);
        let mut annotations = shape(mode, host);
        if let Some(bytes) = memory_bytes {
            annotations.insert("sublet.memory".to_owned(), amount(bytes));
        }
        if let Some(sm) = mode.sm.filter(|_| matches!(mode.sharing, Sharing::Mps | Sharing::Dedicated)) {
            annotations.insert("sublet.sm".to_owned(), percent(sm.percent(question.tenants)));
        }
        // Whole GPUs for several tenants are several GPUs.
        let any = mode.sharing == Sharing::Exclusive && !question.named;
        if host.inventory.gpus().count() > 1 && !any {
            annotations.insert("sublet.gpu".to_owned(), gpu.number());
        }
        Some(Self { mode: mode.clone(), annotations, memory_bytes, found })
    }
}

/// The annotations of a mode without its amounts.
fn shape(mode: &Mode, host: Host<'_>) -> BTreeMap<String, String> {
    let dedicated_is_default = host.config.defaults.isolation == Isolation::Dedicated;
    let pairs: &[(&str, &str)] = match (mode.sharing, &mode.profile) {
        (Sharing::Exclusive, _) => &[("mode", "exclusive")],
        (Sharing::TimeSlice, _) => &[("mode", "time-slice")],
        (Sharing::Mps, _) if dedicated_is_default => &[("mode", "mps"), ("isolation", "shared")],
        (Sharing::Mps, _) => &[("mode", "mps")],
        (Sharing::Dedicated, _) => &[("mode", "mps"), ("isolation", "dedicated")],
        (Sharing::Mig, Some(profile)) => &[("mig", profile.as_str())],
        (Sharing::Mig, None) => &[("mode", "mig")],
    };
    pairs.iter().map(|(key, value)| (format!("sublet.{key}"), (*value).to_owned())).collect()
}

/// What each tenant is limited to.
fn memory(mode: &Mode, question: &Question, gpu: &Device, host: Host<'_>) -> Option<u64> {
    let servers = match mode.sharing {
        Sharing::Exclusive => return None,
        // A profile has its own; without one the size chooses an instance.
        Sharing::Mig => return asked(question, gpu).filter(|_| mode.profile.is_none()),
        Sharing::Mps => 1,
        Sharing::TimeSlice | Sharing::Dedicated => u64::from(question.tenants),
    };
    Some(asked(question, gpu).unwrap_or_else(|| {
        // An equal part of what may be booked now. Less is for the placing to refuse.
        let free = bookings(gpu, host.ledger, host.config).memory_free;
        let each = free.saturating_sub(servers * SERVER_BYTES) / u64::from(question.tenants.max(1));
        (each / STEP * STEP).max(STEP)
    }))
}

/// What each tenant needs, in bytes.
pub fn asked(question: &Question, gpu: &Device) -> Option<u64> {
    question.memory.map(|memory| memory.on(gpu.memory_bytes))
}

/// Whether MIG devices of this kind have the memory, and share none of it where nobody is trusted.
fn mig_suits(mode: &Mode, question: &Question, gpu: &Device, host: Host<'_>) -> bool {
    let of_kind = |device: &Device| mode.profile.as_deref().is_none_or(|profile| profile == device.kind());
    let devices: Vec<_> =
        host.inventory.mig_devices_of(&gpu.uuid).filter(|(device, _)| of_kind(device)).collect();
    let alone = devices.iter().all(|(_, part)| part.siblings.is_empty());
    let needs = asked(question, gpu).filter(|_| mode.profile.is_some()).unwrap_or_default();
    let enough = devices.iter().all(|(device, _)| own_memory(device) >= needs);
    enough && (alone || question.trust != Trust::Not)
}

/// The memory of a MIG device; of one that shares it with other compute instances, its part.
pub fn own_memory(device: &Device) -> u64 {
    let part = device.mig_device.as_ref().filter(|part| !part.siblings.is_empty());
    part.map_or(device.memory_bytes, |part| {
        let (own, all) = part.slices;
        device.memory_bytes / u64::from(all.max(1)) * u64::from(own)
    })
}

/// As an annotation: `8GiB`, or in MiB, rounded down.
pub fn amount(bytes: u64) -> String {
    const GIB: u64 = 1 << 30;
    if bytes % GIB == 0 { format!("{}GiB", bytes / GIB) } else { format!("{}MiB", bytes / MIB) }
}

/// As an annotation. Under 1, the sign says that no fraction of the whole is meant.
fn percent(percent: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a percentage in thousandths, and `as` saturates"
    )]
    let exact = Percent::from_thousandths((percent * 1000.0).round() as u32);
    let sign = if exact.thousandths() < 1000 { "%" } else { "" };
    format!("{exact}{sign}")
}

// What follows from the rules of docs/modes.md alone, without a measurement.

/// The candidates, best first.
pub fn candidates(question: &Question, gpu: &Device, host: Host<'_>) -> Vec<Candidate> {
    let mut modes = Vec::new();
    if question.tenants == 1 {
        modes.push(plain(Sharing::Exclusive));
    }
    modes.extend(mig(question, gpu, host));
    match question.trust {
        Trust::Not if question.tenants > 1 => modes.push(plain(Sharing::Exclusive)),
        Trust::Not => {}
        Trust::Partly => modes.extend(in_turns()),
        Trust::Fully => modes.extend(together(question).into_iter().chain(in_turns())),
    }
    let candidate = |mode: &Mode| Candidate::new(mode, None, question, gpu, host);
    let mut found: Vec<Candidate> = modes.iter().filter_map(candidate).collect();
    // Whether tenants without a limit would all have what they need if they keep to it.
    let free = bookings(gpu, host.ledger, host.config).memory_free;
    let tenants = u64::from(question.tenants);
    let suits = asked(question, gpu).is_none_or(|each| each.saturating_mul(tenants) <= free);
    if question.trust != Trust::Not && suits {
        // What is left without MPS programs: turns without a limit on memory.
        found.extend(candidate(&plain(Sharing::TimeSlice)).map(|mut turns| {
            turns.annotations.remove("sublet.memory");
            Candidate { memory_bytes: None, ..turns }
        }));
    }
    found
}

/// Said where there is no candidate.
pub fn none(question: &Question, gpu: &Device) -> String {
    format!(
        "nothing on {} ({}) separates {} tenants as --trust {} asks",
        gpu.label(),
        safe(&gpu.name),
        question.tenants,
        name_of(&question.trust)
    )
}

const fn plain(sharing: Sharing) -> Mode {
    Mode { sharing, sm: None, profile: None }
}

const fn equal(sharing: Sharing) -> Mode {
    Mode { sharing, sm: Some(Sm::Equal), profile: None }
}

/// A crash of one ends no other. The limit on SMs is for hosts that require one.
fn in_turns() -> [Mode; 2] {
    [plain(Sharing::TimeSlice), equal(Sharing::Dedicated)]
}

/// At the same time. Only a limit keeps one tenant from making the others late.
fn together(question: &Question) -> [Mode; 2] {
    let mut modes = [plain(Sharing::Mps), equal(Sharing::Mps)];
    if question.p99_ms.is_some() {
        modes.reverse();
    }
    modes
}

/// Profiles of the GPU's MIG devices: the smallest that is large enough, or, where nobody says what is enough, the
/// largest first. Then devices of any profile.
fn mig(question: &Question, gpu: &Device, host: Host<'_>) -> Vec<Mode> {
    if !gpu.mig_enabled {
        return Vec::new();
    }
    let mut sizes: Vec<(u64, String)> = Vec::new();
    for (device, part) in host.inventory.mig_devices_of(&gpu.uuid) {
        if !sizes.iter().any(|(_, known)| *known == part.profile) {
            sizes.push((own_memory(device), part.profile.clone()));
        }
    }
    sizes.sort();
    if question.memory.is_none() {
        sizes.reverse();
    }
    let of = |(_, profile): (u64, String)| Mode { profile: Some(profile), ..plain(Sharing::Mig) };
    sizes.into_iter().map(of).chain([plain(Sharing::Mig)]).collect()
}
