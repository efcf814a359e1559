//! The texts of plans: obstacles by name, and that room is kept for large instances.

use super::super::Mode;
use super::super::fake_driver::{Double, h200, profile};
use super::*;

fn want(name: &str, start: Option<u32>) -> Want {
    let gpu = h200();
    let id = profile(name);
    Want { profile: id, start, compute: vec![gpu.profile(id).unwrap().slices] }
}

fn target(want: Vec<Want>) -> Target {
    Target { gpu: "GPU-0".into(), on: true, want }
}

fn refused(gpu: &Gpu, want: Vec<Want>) -> String {
    plan(gpu, &target(want)).unwrap_err().to_string()
}

#[test]
fn obstacles_name_the_reason() {
    let gpu = h200();
    let times = |name: &str, count: usize| (0..count).map(|_| want(name, None)).collect::<Vec<_>>();
    assert_eq!(
        refused(&gpu, times("2g.35gb", 4)),
        "GPU 0: the layout has 4 2g.35gb, and this GPU can have at most 3"
    );
    assert_eq!(
        refused(&gpu, [times("3g.71gb", 2), times("1g.18gb", 1)].concat()),
        "GPU 0: 2 × 3g.71gb, 1g.18gb together do not fit this GPU, in any arrangement"
    );
    assert_eq!(
        refused(&gpu, vec![want("3g.71gb", Some(2))]),
        "GPU 0: a 3g.71gb cannot start at 2, only at 0, 4"
    );
    let cut = Want { profile: profile("2g.35gb"), start: None, compute: vec![1, 2] };
    assert_eq!(
        refused(&gpu, vec![cut]),
        "GPU 0: 1c.2g.35gb and 2g.35gb together do not fit a 2g.35gb, which has 2 compute slices"
    );
    let old = Gpu { mode: None, name: "Tesla P100".into(), ..gpu };
    assert_eq!(
        refused(&old, times("1g.18gb", 1)),
        "GPU 0 (Tesla P100) does not support MIG: leave it out of the layout, or set mig = false"
    );
    let off = Target { on: false, ..target(Vec::new()) };
    assert_eq!(plan(&old, &off).unwrap().steps, []);
}

#[test]
fn a_held_instance_in_the_way_is_named() {
    let ones: Vec<_> = [0, 2, 4].map(|start| (profile("1g.18gb"), start)).into();
    let mut gpu = Double::with(&ones).gpus.remove(0);
    gpu.instances[0].compute[0].held = Some("process 7".into());
    gpu.instances[1].compute[0].held = Some("lease 00000000000000aa of container web".into());
    let wanted = vec![want("1g.18gb", None), want("1g.18gb", None), want("3g.71gb", Some(0))];
    assert_eq!(
        refused(&gpu, wanted),
        "GPU 0: it is not possible to place 2 × 1g.18gb, 3g.71gb at 0 around 1g.18gb at 0 (process 7), \
         1g.18gb at 2 (lease 00000000000000aa of container web): end its use first, or give it a place in \
         the layout"
    );
    gpu.instances[1].compute[0].held = None;
    assert_eq!(
        refused(&gpu, Vec::new()),
        "GPU 0: it is not possible to have no instance around 1g.18gb at 0 (process 7): end its use first, \
         or give it a place in the layout"
    );
    let off = Target { on: false, ..target(Vec::new()) };
    assert_eq!(
        plan(&gpu, &off).unwrap_err().to_string(),
        "GPU 0: MIG mode cannot be switched off while process 7 holds the GPU: end it first"
    );
}

#[test]
fn the_mode_of_a_gpu_in_use_stays() {
    let mode = Some(Mode { current: false, pending: false });
    let gpu = Gpu { mode, held: vec!["process 7".into()], ..h200() };
    assert_eq!(
        refused(&gpu, Vec::new()),
        "GPU 0: MIG mode cannot be switched on while process 7 holds the GPU: end it first"
    );
}

#[test]
fn a_switch_that_waits_for_a_reset_is_taken_back_without_one() {
    let gpu = Gpu { mode: Some(Mode { current: true, pending: false }), resets: true, ..h200() };
    let plan = plan(&gpu, &target(Vec::new())).unwrap();
    assert_eq!((plan.reset, plan.steps), (false, vec![Step::Mode(true)]));
}

#[test]
fn room_is_kept_for_the_largest() {
    let gpu = h200();
    let starts = |wanted: Vec<Want>| {
        let steps = plan(&gpu, &target(wanted)).unwrap().steps;
        steps
            .iter()
            .filter_map(|step| match step {
                Step::CreateInstance { name, span, .. } => Some(format!("{name}@{}", span.start)),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(
        starts(vec![want("1g.18gb", None)]),
        ["1g.18gb@6"],
        "all larger ones but one 1g.35gb still fit"
    );
    assert_eq!(starts(vec![want("3g.71gb", None)]), ["3g.71gb@4"]);
    assert_eq!(starts(vec![want("2g.35gb", None), want("1g.18gb", None)]), ["2g.35gb@4", "1g.18gb@6"]);
}

#[test]
fn steps_read_as_sentences() {
    let gpu = Double::with(&[(profile("1g.18gb"), 0)]).gpus.remove(0);
    let cut = Want { profile: profile("2g.35gb"), start: Some(0), compute: vec![1, 1] };
    let steps = plan(&gpu, &target(vec![cut])).unwrap().steps;
    let said: Vec<_> = steps.iter().map(ToString::to_string).collect();
    assert_eq!(
        said,
        [
            "destroy compute instance 1g.18gb (MIG-0) in the GPU instance at 0:1",
            "destroy GPU instance 1g.18gb at 0:1",
            "create GPU instance 2g.35gb at 0:2",
            "create compute instance 1c.2g.35gb in the GPU instance at 0:2",
            "create compute instance 1c.2g.35gb in the GPU instance at 0:2",
        ]
    );
}

fn group(starts: &[u32], size: u32, count: usize) -> Group {
    Group { places: starts.iter().map(|&start| Span { start, size }).collect(), count }
}

fn cheapest(groups: &[Group], fixed: &[Span], dear: u32) -> Option<(u32, Vec<(usize, u32)>)> {
    let price = |_: usize, span: Span| Some(u32::from(span.start == dear));
    let (cost, placed) = arrange(groups, fixed, &price, &|_| Vec::new())?;
    Some((cost, placed.into_iter().map(|(group, span)| (group, span.start)).collect()))
}

#[test]
fn a_narrow_piece_makes_way_for_a_wide_one() {
    let groups = [group(&[0, 1, 2, 3], 1, 2), group(&[0, 2], 2, 1)];
    assert_eq!(cheapest(&groups, &[], 9), Some((0, vec![(0, 0), (0, 1), (1, 2)])));
    assert_eq!(cheapest(&groups, &[Span { start: 3, size: 1 }], 9), Some((0, vec![(1, 0), (0, 2), (0, 3)])));
    assert_eq!(cheapest(&groups, &[], 1).unwrap().0, 0, "the dear place is avoided");
    let full = [group(&[0, 1, 2, 3], 1, 3), group(&[0, 2], 2, 1)];
    assert_eq!(cheapest(&full, &[], 9), None);
}

#[test]
fn a_fixed_place_is_used_or_there_is_no_arrangement() {
    let ones = [group(&[0, 1], 1, 1)];
    assert_eq!(cheapest(&ones, &[Span { start: 1, size: 1 }], 1), Some((1, vec![(0, 1)])));
    assert_eq!(cheapest(&ones, &[Span { start: 3, size: 1 }], 9), None);
    assert_eq!(cheapest(&ones, &[Span { start: 0, size: 2 }], 9), None);
    assert_eq!(cheapest(&[], &[], 9), Some((0, vec![])));
    assert_eq!(cheapest(&[], &[Span { start: 0, size: 2 }], 9), None);
}

#[test]
fn of_equal_costs_the_worthier_wins() {
    let start = |placed: &[Placed]| vec![placed[0].1.start];
    let (_, placed) = arrange(&[group(&[0, 5, 3], 1, 1)], &[], &|_, _| Some(0), &start).unwrap();
    assert_eq!(placed, [(0, Span { start: 5, size: 1 })]);
}
