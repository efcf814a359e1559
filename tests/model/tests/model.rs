//! Every state of the protocol that can be reached: the invariants hold, and the counts of states are printed.

use sublet_model::checker::{Model, Report, check, check_alike};
use sublet_model::daemons::Daemons;
use sublet_model::dynamic_mig::DynamicMig;
use sublet_model::ledger::Share;
use sublet_model::moving::Moving;
use sublet_model::suspending::Suspending;

const QUARTER: Share = Share::Mps { sm: 1, memory: Some(1) };
const HALF: Share = Share::Mps { sm: 2, memory: None };
/// The others leave no room for it on one device.
const MOST: Share = Share::Mps { sm: 3, memory: Some(3) };

/// With `ends`, it is also checked that all processes can come to their end from every state.
fn holds<M: Model>(name: &str, model: &M, ends: bool) {
    shows(name, check(model, ends));
}

fn shows<M: Model>(name: &str, report: Report<M>) {
    println!("{name:<58} {report}");
    if let Some((name, way)) = report.broken {
        let shown: Vec<_> = way.iter().map(|(step, _)| format!("  {step:?}\n")).collect();
        panic!("broken: {name}\n{}", shown.concat());
    }
}

fn daemons(shares: &[Share], waiter: Option<usize>) -> Daemons {
    let (shares, waiters) = (shares.to_vec(), waiter.into_iter().collect());
    Daemons {
        shares,
        devices: 1,
        waiters,
        order: false,
        serve: false,
        children: true,
        crashes: u8::MAX,
        mutation: None,
    }
}

#[test]
fn two_containers_on_a_device_with_crashes_anywhere() {
    holds("two containers, any crashes", &daemons(&[QUARTER, HALF], None), true);
}

#[test]
fn a_service_and_two_uses_of_a_device_with_crashes_anywhere() {
    let model = Daemons { serve: true, children: false, ..daemons(&[QUARTER, Share::Exclusive], Some(1)) };
    holds("two uses, a waiter, the service, any crashes", &model, true);
}

#[test]
fn three_containers_on_a_device_and_one_waits() {
    let model = Daemons { children: false, crashes: 2, ..daemons(&[QUARTER, HALF, MOST], Some(2)) };
    holds("three containers, a waiter, two crashes", &model, true);
}

#[test]
fn three_containers_on_two_devices_and_one_waits() {
    let model =
        Daemons { devices: 2, children: false, crashes: 0, ..daemons(&[QUARTER, HALF, MOST], Some(2)) };
    holds("three containers, two devices, a waiter", &model, true);
}

/// Of states that are alike, one is visited; `alike.rs` checks that this hides nothing.
#[test]
fn three_containers_on_two_devices_with_a_crash_anywhere() {
    let model = Daemons { devices: 2, children: false, crashes: 1, ..daemons(&[MOST; 3], Some(2)) };
    shows("three alike, two devices, a waiter, a crash", check_alike(&model, true));
}

#[test]
#[ignore = "7 GB of memory: make test-model-unlike"]
fn three_unlike_containers_on_two_devices_with_a_crash_anywhere() {
    let shares = [QUARTER, HALF, MOST];
    let model = Daemons { devices: 2, children: false, crashes: 1, ..daemons(&shares, Some(2)) };
    shows("three unlike, two devices, a waiter, a crash", check_alike(&model, true));
}

#[test]
fn two_wait_in_order_behind_a_third() {
    let model = Daemons {
        waiters: vec![1, 2],
        order: true,
        children: false,
        crashes: 1,
        ..daemons(&[MOST, MOST, HALF], None)
    };
    holds("three containers, two wait in order, a crash", &model, true);
}

#[test]
fn one_waits_and_another_that_does_not_wait_comes_later() {
    let model =
        Daemons { order: true, children: false, crashes: 1, ..daemons(&[MOST, QUARTER, HALF], Some(0)) };
    holds("three containers, one waits in order, a crash", &model, true);
}

#[test]
fn two_wait_in_order_for_two_devices() {
    let shares = [MOST, MOST, MOST];
    let model = Daemons {
        devices: 2,
        waiters: vec![1, 2],
        order: true,
        children: false,
        crashes: 0,
        ..daemons(&shares, None)
    };
    shows("three alike, two devices, two wait in order", check_alike(&model, true));
}

#[test]
fn two_containers_on_two_devices_and_one_waits() {
    let model = Daemons { devices: 2, children: false, crashes: 2, ..daemons(&[QUARTER, MOST], Some(1)) };
    holds("two containers, two devices, a waiter, two crashes", &model, true);
}

#[test]
fn dynamic_mig_with_crashes_anywhere() {
    let model = DynamicMig { containers: 2, waiter: Some(1), crashes: u8::MAX, mutation: None };
    holds("dynamic MIG: two containers, a waiter, any crashes", &model, true);
}

#[test]
fn dynamic_mig_for_three_containers() {
    let model = DynamicMig { containers: 3, waiter: Some(2), crashes: 2, mutation: None };
    holds("dynamic MIG: three containers, a waiter, two crashes", &model, true);
}

#[test]
fn suspending_with_crashes_anywhere() {
    let model = Suspending { crashes: u8::MAX, mutation: None };
    holds("suspending: a container, another, any crashes", &model, true);
}

#[test]
fn moving_with_crashes_anywhere() {
    let model = Moving { crashes: u8::MAX, mutation: None };
    holds("moving: a container, two GPUs, another, any crashes", &model, true);
}
