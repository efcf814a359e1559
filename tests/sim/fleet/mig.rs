//! A GPU in MIG mode: instances are created for each job and destroyed after it, where the driver's placements allow.

use nvidia_ml::nvml::profiles::{self, Profile};

use crate::jobs::Job;

/// A profile serves a job if it has this part of the SMs that the job asks for, in percent: MIG has no profile of exactly a
/// quarter or a half.
const ENOUGH: u64 = 90;

/// SMs of an H200.
const SMS: u64 = 132;

/// The memory slices of an instance: the first, and how many.
pub type Span = (u32, u32);

/// The profiles that serve `job`, the smallest first.
pub fn serving(job: &Job) -> Vec<&'static Profile> {
    let table = profiles::table("h200").unwrap();
    let serves = |profile: &&Profile| {
        let whole = job.sm < 100 || profile.size == profiles::memory_slices(table);
        let sms = u64::from(profile.sm_count) * 100 * 100 >= u64::from(job.sm) * SMS * ENOUGH;
        // `+me` differs only in media engines.
        whole && sms && profile.memory_mib >= job.gib * 1024 && !profile.name.contains('+')
    };
    let mut found: Vec<&Profile> = table.iter().filter(serves).collect();
    found.sort_by_key(|profile| (profile.size, profile.slices));
    found
}

fn free(taken: &[Span], (start, size): Span) -> bool {
    taken.iter().all(|(at, of)| start + size <= *at || at + of <= start)
}

/// Places that are left for every profile, the large ones counting for more.
fn room(taken: &[Span]) -> u32 {
    let table = profiles::table("h200").unwrap();
    let places = |one: &Profile| {
        let open = one.starts.iter().filter(|start| free(taken, (**start, one.size))).count();
        one.size * one.size * u32::try_from(open).unwrap()
    };
    table.iter().map(places).sum()
}

/// Whether an instance of `profile` has a place beside those `taken`.
pub fn fits(taken: &[Span], profile: &Profile) -> bool {
    profile.starts.iter().any(|start| free(taken, (*start, profile.size)))
}

/// Where an instance of `profile` goes beside those `taken`: the place that leaves the most room. None: nowhere.
pub fn spot(taken: &[Span], profile: &Profile) -> Option<Span> {
    let spans = profile.starts.iter().map(|start| (*start, profile.size)).filter(|span| free(taken, *span));
    spans.max_by_key(|span| (room(&[taken, &[*span]].concat()), span.0))
}

#[test]
fn profiles_and_places_are_those_of_an_h200() {
    let names = |sm, gib| serving(&Job { sm, gib, minutes: 1 })[0].name;
    assert_eq!([names(10, 8), names(20, 24), names(25, 32)], ["1g.18gb", "1g.35gb", "2g.35gb"]);
    assert_eq!([names(50, 64), names(100, 120)], ["3g.71gb", "7g.141gb"]);
    let one = serving(&Job { sm: 10, gib: 8, minutes: 1 })[0];
    let mut taken = Vec::new();
    while let Some(span) = spot(&taken, one) {
        taken.push(span);
    }
    assert_eq!(taken.len(), 7, "{taken:?}");
    assert_eq!(spot(&[(0, 1)], serving(&Job { sm: 50, gib: 64, minutes: 1 })[0]), Some((4, 4)));
}
