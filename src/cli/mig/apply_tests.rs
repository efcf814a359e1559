//! Changes on a driver in memory: from every layout to every other, around instances in use, and back after a failure.

use std::collections::BTreeSet;

use super::super::fake_driver::{Double, h200, profile, shape};
use super::super::{Driver, Gpu, Mode, Target, Want, plan};
use super::*;

/// Whole instances: (profile, start).
type Layout = Vec<(u32, u32)>;

/// Every set of whole instances that the placement rules allow, the empty one too.
fn every_layout() -> Vec<Layout> {
    fn grow(gpu: &Gpu, from: u32, layout: &mut Layout, all: &mut Vec<Layout>) {
        all.push(layout.clone());
        for profile in &gpu.profiles {
            let same = layout.iter().filter(|(id, _)| *id == profile.id).count();
            if same >= profile.instances as usize {
                continue;
            }
            for span in profile.placements.iter().filter(|span| span.start >= from) {
                layout.push((profile.id, span.start));
                grow(gpu, span.end(), layout, all);
                layout.pop();
            }
        }
    }
    let mut all = Vec::new();
    grow(&h200(), 0, &mut Vec::new(), &mut all);
    all
}

fn want(gpu: &Gpu, id: u32, start: Option<u32>) -> Want {
    Want { profile: id, start, compute: vec![gpu.profile(id).unwrap().slices] }
}

/// The target with the profiles of a layout, in any place.
fn target(gpu: &Gpu, layout: &Layout) -> Target {
    let want = layout.iter().map(|&(id, _)| want(gpu, id, None)).collect();
    Target { gpu: gpu.uuid.clone(), on: true, want }
}

fn profiles(layout: &Layout) -> Vec<u32> {
    let mut ids: Vec<u32> = layout.iter().map(|&(id, _)| id).collect();
    ids.sort_unstable();
    ids
}

/// `SplitMix64`: the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % limit as u64).unwrap()
    }
}

/// Marks each instance as held with probability one third; returns the held UUIDs.
fn hold(gpu: &mut Gpu, random: &mut Random) -> BTreeSet<String> {
    let mut held = BTreeSet::new();
    for one in &mut gpu.instances {
        if random.below(3) == 0 {
            one.compute[0].held = Some("a lease".into());
            held.insert(one.compute[0].uuid.clone());
        }
    }
    held
}

fn held_places(gpu: &Gpu) -> Layout {
    let held = gpu.instances.iter().filter(|one| one.holder().is_some());
    held.map(|one| (one.profile, one.span.start)).collect()
}

#[test]
fn every_layout_from_every_other_around_instances_in_use() {
    let all = every_layout();
    assert!(all.len() > 1000, "{}", all.len());
    let mut random = Random(7);
    let (mut reached, mut refused) = (0, 0);
    while reached < 2500 {
        let (from, to) = (&all[random.below(all.len())], &all[random.below(all.len())]);
        let mut driver = Double::with(from);
        let held = hold(&mut driver.gpus[0], &mut random);
        let places = held_places(&driver.gpus[0]);
        // The same question answered independently: does a layout of these profiles contain everything that is held?
        let possible = all.iter().any(|layout| {
            profiles(layout) == profiles(to) && places.iter().all(|place| layout.contains(place))
        });
        let before = shape(&driver.gpus[0]);
        let gpu = driver.gpus[0].clone();
        match plan(&gpu, &target(&gpu, to)) {
            Err(_) => {
                assert!(!possible, "{from:?} to {to:?} around {places:?}");
                refused += 1;
                continue;
            }
            Ok(found) => {
                assert!(possible, "{from:?} to {to:?} around {places:?}");
                apply(&[found], false, &mut driver).unwrap();
                reached += 1;
            }
        }
        let after = &driver.gpus[0];
        let now: Layout = after.instances.iter().map(|one| (one.profile, one.span.start)).collect();
        assert_eq!(profiles(&now), profiles(to));
        let uuids: BTreeSet<_> =
            after.instances.iter().flat_map(|one| &one.compute).map(|part| part.uuid.clone()).collect();
        assert!(held.is_subset(&uuids), "a held instance was made again");
        assert_eq!(plan(after, &target(after, to)).unwrap().steps, [], "nothing is left to do");
        if profiles(from) == profiles(to) {
            assert_eq!(shape(after), before, "nothing had to be done");
        }
    }
    assert!(refused > 100, "{refused}");
}

#[test]
fn the_least_is_done() {
    let all = every_layout();
    let mut random = Random(11);
    for _ in 0..300 {
        let (from, to) = (&all[random.below(all.len())], &all[random.below(all.len())]);
        let driver = Double::with(from);
        let gpu = &driver.gpus[0];
        let steps = plan(gpu, &target(gpu, to)).unwrap().steps.len();
        // Two steps for each instance that is in only one of both; the minimum over all layouts with these profiles.
        let differ = |layout: &Layout| {
            let kept = layout.iter().filter(|one| from.contains(one)).count();
            2 * (layout.len() - kept + from.len() - kept)
        };
        let least = all.iter().filter(|layout| profiles(layout) == profiles(to)).map(differ).min().unwrap();
        assert_eq!(steps, least, "{from:?} to {to:?}");
    }
}

#[test]
fn whatever_call_fails_the_state_found_comes_back() {
    let all = every_layout();
    let mut random = Random(13);
    let mut failures = 0;
    for _ in 0..120 {
        let (from, to) = (&all[random.below(all.len())], &all[random.below(all.len())]);
        let mut driver = Double::with(from);
        let held = hold(&mut driver.gpus[0], &mut random);
        let (found, gpu) = (driver.gpus.clone(), driver.gpus[0].clone());
        let Ok(steps) = plan(&gpu, &target(&gpu, to)) else { continue };
        let plans = [steps];
        let start = driver.calls;
        apply(&plans, false, &mut driver).unwrap();
        for (call, all_the_same) in (0..driver.calls - start).flat_map(|at| [(at, false), (at, true)]) {
            let mut driver = Double { all_the_same, ..Double::new(found.clone()) };
            driver.fails = Box::new(move |at| at == call);
            let result = apply(&plans, false, &mut driver);
            assert!(
                matches!(result, Err(ApplyError::Nothing { .. } | ApplyError::Undone { .. })),
                "{result:?}"
            );
            assert_eq!(shape(&driver.gpus[0]), shape(&found[0]), "call {call} of {plans:?}: {result:?}");
            let parts = driver.gpus[0].instances.iter().flat_map(|one| &one.compute);
            let uuids: BTreeSet<_> = parts.map(|part| part.uuid.clone()).collect();
            assert!(held.is_subset(&uuids));
            failures += 1;
        }
    }
    assert!(failures > 500, "{failures}");
}

#[test]
fn an_undo_that_fails_too_names_the_remains() {
    let mut driver = Double::with(&[(profile("2g.35gb"), 0)]);
    let gpu = driver.gpus[0].clone();
    let plans = [plan(&gpu, &target(&gpu, &vec![(profile("3g.71gb"), 0)])).unwrap()];
    driver.calls = 0;
    // Reads and destroys twice, reads once more, then every call fails.
    driver.fails = Box::new(|call| call >= 5);
    let error = apply(&plans, false, &mut driver).unwrap_err();
    assert_eq!(
        error.to_string(),
        "GPU 0: cannot create GPU instance 3g.71gb at 4:4: create_instance: the test says so; and not \
         every change could be undone: GPU 0: the new GPU instance at 4:4 is still there: instances: the \
         test says so, GPU 0: the GPU instance that was at 0:2 is missing: instances: the test says so, \
         GPU 0: compute instance MIG-0 of the GPU instance at 0:2 is missing: instances: the test says so"
    );
}

#[test]
fn an_instance_other_than_the_planned_one_is_left_alone() {
    let mut driver = Double::with(&[(profile("2g.35gb"), 0)]);
    let gpu = driver.gpus[0].clone();
    let plans = [plan(&gpu, &target(&gpu, &Vec::new())).unwrap()];
    // Another program destroyed it and created it again: same ids and place, another UUID.
    driver.gpus[0].instances[0].compute[0].uuid = "MIG-other".into();
    let error = apply(&plans, false, &mut driver).unwrap_err();
    assert!(matches!(error, ApplyError::Nothing { .. }), "{error}");
    assert!(error.to_string().contains("another program changed the GPU's instances meanwhile"), "{error}");
    assert_eq!(driver.gpus[0].instances[0].compute[0].uuid, "MIG-other");
}

/// A GPU with MIG mode off; `resets` says whether changing the mode needs a reset.
fn off(resets: bool) -> Double {
    let mode = Some(Mode { current: false, pending: false });
    Double::new(vec![Gpu { mode, resets, ..h200() }])
}

#[test]
fn the_mode_is_switched_and_comes_back_with_the_rest() {
    let mut driver = off(false);
    let gpu = driver.gpus[0].clone();
    let plans = [plan(&gpu, &target(&gpu, &vec![(profile("1g.18gb"), 3), (profile("3g.71gb"), 4)])).unwrap()];
    apply(&plans, false, &mut driver).unwrap();
    assert_eq!(driver.gpus[0].instances.len(), 2);
    for call in 0..driver.calls {
        let mut driver = off(false);
        driver.fails = Box::new(move |at| at == call);
        assert!(apply(&plans, false, &mut driver).is_err());
        assert_eq!(driver.gpus[0], gpu, "call {call}");
    }
    let now = driver.gpus[0].clone();
    let back = Target { gpu: gpu.uuid.clone(), on: false, want: Vec::new() };
    apply(&[plan(&now, &back).unwrap()], false, &mut driver).unwrap();
    assert_eq!(driver.gpus[0], gpu);
}

#[test]
fn nothing_is_reset_unless_it_may_be() {
    let mut driver = off(true);
    let gpu = driver.gpus[0].clone();
    let plans = [plan(&gpu, &target(&gpu, &vec![(profile("1g.18gb"), 3)])).unwrap()];
    let error = apply(&plans, false, &mut driver).unwrap_err().to_string();
    assert_eq!(
        error,
        "GPU 0: switching MIG mode needs a reset of the GPU: add --allow-reset; nothing was changed"
    );
    assert_eq!((driver.calls, &driver.gpus[0]), (0, &gpu));
    apply(&plans, true, &mut driver).unwrap();
    assert_eq!(driver.gpus[0].mode, Some(Mode { current: true, pending: true }));
}

/// The driver did not report beforehand that this GPU needs a reset.
#[test]
fn a_mode_that_stays_pending_is_taken_back() {
    let mut driver = off(true);
    let gpu = driver.gpus[0].clone();
    let found = plan(&Gpu { resets: false, ..gpu.clone() }, &target(&gpu, &Vec::new())).unwrap();
    let error = apply(&[found], false, &mut driver).unwrap_err().to_string();
    assert_eq!(
        error,
        "GPU 0: cannot switch MIG mode on: it needs a reset of the GPU: add --allow-reset; every change \
         was undone"
    );
    assert_eq!(driver.gpus[0], gpu);
}

#[test]
fn a_failure_on_one_gpu_undoes_the_rest_too() {
    let mut driver = Double::with(&[(profile("7g.141gb"), 0)]);
    driver.gpus.push(Gpu { uuid: "GPU-1".into(), index: 1, ..h200() });
    let found = driver.gpus.clone();
    let to = vec![(profile("1g.18gb"), 0)];
    let plans: Vec<_> = found.iter().map(|gpu| plan(gpu, &target(gpu, &to)).unwrap()).collect();
    driver.calls = 0;
    apply(&plans, false, &mut driver).unwrap();
    let last = driver.calls - 1;
    let mut driver = Double::new(found.clone());
    driver.fails = Box::new(move |at| at == last);
    assert!(matches!(apply(&plans, false, &mut driver), Err(ApplyError::Undone { .. })));
    assert_eq!(
        driver.gpus.iter().map(shape).collect::<Vec<_>>(),
        found.iter().map(shape).collect::<Vec<_>>()
    );
}

#[test]
fn compute_instances_are_cut_anew_in_their_gpu_instance() {
    let mut driver = Double::with(&[(profile("4g.71gb"), 0), (profile("3g.71gb"), 4)]);
    let gpu = driver.gpus[0].clone();
    let cut = |compute: &[u32]| Target {
        gpu: gpu.uuid.clone(),
        on: true,
        want: vec![
            Want { profile: profile("4g.71gb"), start: None, compute: compute.to_vec() },
            Want { profile: profile("3g.71gb"), start: None, compute: vec![3] },
        ],
    };
    let other = gpu.instances[1].compute[0].uuid.clone();
    apply(&[plan(&gpu, &cut(&[1, 1, 2])).unwrap()], false, &mut driver).unwrap();
    let now = driver.gpus[0].clone();
    let sizes: Vec<_> = now.instances[0].compute.iter().map(|part| part.slices).collect();
    assert_eq!((sizes.iter().sum::<u32>(), sizes.len()), (4, 3));
    assert_eq!(now.instances[1].compute[0].uuid, other);
    // One of the small compute instances is held. The other two are replaced by one with three slices.
    let held = now.instances[0].compute.iter().position(|part| part.slices == 1 && part.span.start != 1);
    let held = held.unwrap_or_default();
    driver.gpus[0].instances[0].compute[held].held = Some("process 7".into());
    let kept = now.instances[0].compute[held].uuid.clone();
    let now = driver.gpus[0].clone();
    match plan(&now, &cut(&[1, 3])) {
        Ok(found) => {
            apply(&[found], false, &mut driver).unwrap();
            assert!(driver.gpus[0].instances[0].compute.iter().any(|part| part.uuid == kept));
        }
        Err(error) => panic!("{error}"),
    }
    let now = driver.gpus[0].clone();
    let refused = plan(&now, &cut(&[4])).unwrap_err();
    assert!(refused.to_string().contains("it is not possible to "), "{refused}");
}

#[test]
fn a_failure_while_recutting_brings_the_parts_back() {
    let mut driver = Double::with(&[(profile("4g.71gb"), 0)]);
    let gpu = driver.gpus[0].clone();
    let want = vec![Want { profile: profile("4g.71gb"), start: None, compute: vec![1, 1, 2] }];
    let plans = [plan(&gpu, &Target { gpu: gpu.uuid.clone(), on: true, want }).unwrap()];
    driver.calls = 0;
    apply(&plans, false, &mut driver).unwrap();
    for call in 0..driver.calls {
        let mut driver = Double::new(vec![gpu.clone()]);
        driver.fails = Box::new(move |at| at == call);
        assert!(apply(&plans, false, &mut driver).is_err());
        assert_eq!(shape(&driver.gpus[0]), shape(&gpu), "call {call}");
    }
    assert_eq!(driver.instances("GPU-0").unwrap()[0].compute.len(), 3);
}
