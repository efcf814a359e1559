//! What follows from the rules of docs/modes.md alone, without a measurement.

use super::candidate::{asked, own_memory};
use super::{Candidate, Host, Question, Trust};
use crate::bench::{Mode, Sharing, Sm};
use sublet_core::inventory::Device;
use sublet_core::place::bookings;
use sublet_core::text::safe;

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
    if question.trust != Trust::Not && unlimited_suits(question, gpu, host) {
        // What is left without MPS programs: turns without a limit on memory.
        found.extend(candidate(&plain(Sharing::TimeSlice)).map(Candidate::without_memory));
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
        question.trust.word()
    )
}

const fn plain(sharing: Sharing) -> Mode {
    Mode { sharing, sm: None, profile: None }
}

fn equal(sharing: Sharing) -> Mode {
    Mode { sm: Some(Sm::Equal), ..plain(sharing) }
}

/// A crash of one ends no other. The limit on SMs is for hosts that require one.
fn in_turns() -> [Mode; 2] {
    [plain(Sharing::TimeSlice), equal(Sharing::Dedicated)]
}

/// At the same time. Only a limit keeps one tenant from making the others late.
fn together(question: &Question) -> [Mode; 2] {
    let modes = [plain(Sharing::Mps), equal(Sharing::Mps)];
    if question.p99_ms.is_some() {
        let [free, limited] = modes;
        return [limited, free];
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

/// Whether tenants without a limit would all have what they need if they keep to it.
fn unlimited_suits(question: &Question, gpu: &Device, host: Host<'_>) -> bool {
    let free = bookings(gpu, host.ledger, host.config).memory_free;
    asked(question, gpu).is_none_or(|each| each.saturating_mul(question.tenants.into()) <= free)
}
