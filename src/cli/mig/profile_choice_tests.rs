use super::super::fake_driver::{Double, h200, profile};
use super::*;
use sublet_core::place::Most;

/// Profiles and their starts.
type Layout<'a> = &'a [(&'a str, u32)];

fn order(profile: Option<&str>, mib: u64, sms: u64) -> Order {
    let site = |gpu: &str| Site { gpu: gpu.into(), memory_bytes: mib * MIB, sms, most: None };
    Order { sites: vec![site("GPU-0"), site("GPU-1")], profile: profile.map(str::to_owned) }
}

fn gpu(layout: Layout<'_>) -> Gpu {
    let layout: Vec<(u32, u32)> = layout.iter().map(|&(name, start)| (profile(name), start)).collect();
    Double::with(&layout).gpus.remove(0)
}

/// The name and start of the best choice on one GPU with `layout`.
fn best(layout: Layout<'_>, order: &Order) -> Result<(String, u32), String> {
    let found = choices(order, &[gpu(layout)], Policy::Binpack).map_err(|none| none.reason)?;
    Ok((found[0].name.clone(), found[0].placement.0))
}

#[test]
fn the_place_is_that_which_leaves_room_for_the_largest() {
    let cases: [(Layout, &str, u32); 10] = [
        (&[], "1g.18gb", 6),
        (&[], "1g.35gb", 6),
        (&[], "2g.35gb", 4),
        (&[], "3g.71gb", 4),
        (&[], "4g.71gb", 0),
        (&[], "7g.141gb", 0),
        (&[("1g.18gb", 6)], "1g.18gb", 4),
        (&[("1g.18gb", 0)], "1g.18gb", 1),
        (&[("3g.71gb", 0)], "2g.35gb", 4),
        (&[("4g.71gb", 0), ("1g.18gb", 4)], "1g.18gb", 5),
    ];
    for (layout, name, start) in cases {
        assert_eq!(best(layout, &order(Some(name), 0, 0)), Ok((name.to_owned(), start)), "{layout:?}");
    }
}

#[test]
fn small_ones_one_after_the_other_keep_the_large_place_to_the_last() {
    let mut double = Double::new(vec![h200()]);
    let mut starts = Vec::new();
    for _ in 0..7 {
        let choice = choices(&order(Some("1g.18gb"), 0, 0), &double.gpus, Policy::Binpack).unwrap().remove(0);
        let gi = super::super::Driver::create_instance(
            &mut double,
            "GPU-0",
            choice.profile,
            Span::at(choice.placement),
        );
        super::super::Driver::create_compute(&mut double, "GPU-0", gi.unwrap(), 1, None).unwrap();
        starts.push(choice.placement.0);
        if starts.len() == 3 {
            assert_eq!(best_of(&double, "4g.71gb"), Some(0));
        }
    }
    starts.sort_unstable();
    assert_eq!(starts, [0, 1, 2, 3, 4, 5, 6]);
    let none = choices(&order(Some("1g.18gb"), 0, 0), &double.gpus, Policy::Binpack).unwrap_err();
    assert!(none.temporary);
    assert_eq!(
        none.reason,
        "GPU 0 has no room for a 1g.18gb beside 1g.18gb at 0, 1g.18gb at 1, 1g.18gb at 2, 1g.18gb at 3, 3 more"
    );
}

fn best_of(double: &Double, name: &str) -> Option<u32> {
    choices(&order(Some(name), 0, 0), &double.gpus, Policy::Binpack).ok().map(|found| found[0].placement.0)
}

#[test]
fn without_a_profile_it_is_the_smallest_that_will_do() {
    let best = |mib, sms| best(&[], &order(None, mib, sms)).unwrap().0;
    assert_eq!(best(0, 0), "1g.18gb");
    assert_eq!(best(16_385, 0), "1g.35gb");
    assert_eq!(best(0, 17), "1g.35gb");
    assert_eq!(best(0, 27), "2g.35gb");
    assert_eq!(best(40_000, 61), "4g.71gb");
    let none = choices(&order(None, 1 << 20, 0), &[h200()], Policy::Binpack).unwrap_err();
    assert!(!none.temporary);
    assert_eq!(none.reason, "GPU 0 (NVIDIA H200) has no profile with 1048576 MiB and 0 SMs");
}

#[test]
fn a_part_has_its_slices_and_unknown_ones_are_named() {
    let found = choices(&order(Some("1c.2g.35gb"), 0, 0), &[h200()], Policy::Binpack).unwrap();
    assert_eq!((found[0].profile, found[0].slices), (profile("2g.35gb"), 1));
    let none = choices(&order(Some("1g.5gb"), 0, 0), &[h200()], Policy::Binpack).unwrap_err();
    assert!(
        !none.temporary && none.reason.starts_with("GPU 0 (NVIDIA H200) has no profile 1g.5gb"),
        "{none:?}"
    );
    let mut off = h200();
    off.mode = None;
    let none = choices(&order(Some("1g.18gb"), 0, 0), &[off], Policy::Binpack).unwrap_err();
    assert_eq!(none.reason, "MIG mode is off on every GPU that the request allows");
}

#[test]
fn the_fuller_gpu_or_the_emptier_by_policy() {
    let second = Gpu { uuid: "GPU-1".into(), index: 1, ..gpu(&[("4g.71gb", 0)]) };
    let gpus = [gpu(&[]), second];
    let first = |policy| choices(&order(Some("1g.18gb"), 0, 0), &gpus, policy).unwrap().remove(0).gpu;
    assert_eq!(first(Policy::Binpack), "GPU-1");
    assert_eq!(first(Policy::Spread), "GPU-0");
}

#[test]
fn engines_that_are_taken_are_no_place() {
    let layout = [("1g.18gb+me", 0)];
    let none = best(&layout, &order(Some("1g.18gb+me"), 0, 0)).unwrap_err();
    assert!(none.starts_with("GPU 0 has no room for a 1g.18gb+me beside 1g.18gb+me at 0"), "{none}");
}

#[test]
fn no_more_is_made_than_a_policy_allows() {
    let size = |sms, mib: u64| Size { sms, memory_bytes: mib.saturating_mul(MIB) };
    let capped = |name, now, ever| {
        let mut order = order(name, 0, 0);
        order.sites[0].most = Some(Most { now, ever });
        choices(&order, &[gpu(&[])], Policy::Binpack).map(|found| found[0].name.clone())
    };
    let (none, all) = (size(16, 16_383), size(u64::MAX, u64::MAX));
    assert_eq!(capped(None, all, all).unwrap(), "1g.18gb");
    assert_eq!(capped(Some("1g.18gb"), size(16, 16_384), all).unwrap(), "1g.18gb");
    assert_eq!(capped(Some("1c.3g.71gb"), size(16, 71_424), all).unwrap(), "1c.3g.71gb");
    let refused = |name, now, ever| {
        let none = capped(name, now, ever).unwrap_err();
        (none.reason, none.temporary)
    };
    let memory = "your policy leaves you 16383 MiB of GPU 0, and a 1g.18gb has 16384";
    assert_eq!(refused(None, none, none), (memory.to_owned(), false));
    let sms = "your policy leaves you 16 SMs of GPU 0, and a 3g.71gb has 60";
    assert_eq!(refused(Some("3g.71gb"), size(16, 16_384), all), (sms.to_owned(), true));
}

#[test]
fn instances_that_come_before_take_their_places() {
    let mut double = Double::new(vec![h200()]);
    let mut order = order(Some("1g.18gb"), 0, 0);
    order.sites.truncate(1);
    let ledger = Ledger::empty("boot");
    let mut before: Vec<Foreseen> = Vec::new();
    for number in 0..8 {
        match foresee(&order, &mut double, &ledger, Policy::Binpack, &before).unwrap() {
            Ok(foreseen) => before.push(foreseen),
            Err(none) => {
                assert!(
                    number == 7 && none.reason.contains("(created for a container before it)"),
                    "{none:?}"
                );
            }
        }
    }
    let mut starts: Vec<u32> = before.iter().map(|one| one.choice.placement.0).collect();
    assert_eq!(
        (starts[0], starts[1], starts.len()),
        (6, 4, 7),
        "as they would be created one after the other"
    );
    starts.sort_unstable();
    assert_eq!(starts, [0, 1, 2, 3, 4, 5, 6]);
    let mut gpu = sublet_core::place::fixture::device(0);
    gpu.sm_count = Some(132);
    let leased: Vec<_> =
        before.iter().map(|one| one.leased(&sublet_core::place::fixture::host(vec![gpu.clone()]))).collect();
    assert_ne!((&leased[0].uuid, leased[0].gi), (&leased[1].uuid, leased[1].gi));
    assert_eq!(leased[0].sm.map(Percent::as_f64), Some(12.122));
    assert_eq!(leased[0].memory_bytes, Some(16 << 30));
    // Half of a 2g.35gb, where another profile with one slice has 16 SMs.
    order.profile = Some("1c.2g.35gb".to_owned());
    let part = foresee(&order, &mut double, &ledger, Policy::Binpack, &[]).unwrap().unwrap();
    assert_eq!((part.name(), part.sms, part.memory_bytes), ("1c.2g.35gb", 16, 16_640 * MIB));
}
