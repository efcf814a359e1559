//! For each invariant, a broken step that it finds: how we know that the model can fail.

use sublet_model::Mutation;
use sublet_model::checker::{Report, check, check_alike};
use sublet_model::daemons::Daemons;
use sublet_model::dynamic_mig::DynamicMig;
use sublet_model::ledger::Share;
use sublet_model::moving::Moving;
use sublet_model::suspending::Suspending;

const HALF: Share = Share::Mps { sm: 2, memory: Some(1) };
const MOST: Share = Share::Mps { sm: 3, memory: None };
const LARGE: Share = Share::Mps { sm: 1, memory: Some(3) };

/// The model of one device finds this mutation by breaking this invariant.
fn finds(shares: &[Share], crashes: u8, serve: bool, mutation: Mutation, invariant: &str) {
    let shares = shares.to_vec();
    let model = Daemons {
        shares,
        devices: 1,
        waiters: vec![1],
        order: false,
        serve,
        children: true,
        crashes,
        mutation: Some(mutation),
    };
    let report = check(&model, true);
    let length = breaks(&report, mutation, invariant);
    let report = check_alike(&model, true);
    assert_eq!(breaks(&report, mutation, invariant), length, "{mutation:?}: not found as soon");
}

/// How many steps it takes to break the invariant.
fn breaks(report: &Report<Daemons>, mutation: Mutation, invariant: &str) -> usize {
    let Some((broken, way)) = &report.broken else { panic!("{mutation:?} is not found: {report}") };
    let shown: Vec<_> = way.iter().map(|(step, _)| format!("  {:?}: {}\n", step.who, step.what)).collect();
    assert_eq!(*broken, invariant, "{mutation:?}:\n{}", shown.concat());
    way.len()
}

/// The model of three containers and two devices, whose states that are alike are visited once, finds it, too.
fn finds_on_two_devices(mutation: Mutation, invariant: &str) {
    let shares = vec![LARGE, LARGE, LARGE];
    let model = Daemons {
        shares,
        devices: 2,
        waiters: vec![2],
        order: false,
        serve: false,
        children: false,
        crashes: 1,
        mutation: Some(mutation),
    };
    breaks(&check_alike(&model, true), mutation, invariant);
}

#[test]
fn broken_steps_are_found_among_states_that_are_alike() {
    let invariant = "no more memory is booked than there is";
    finds_on_two_devices(Mutation::BookWithoutLooking, invariant);
    let invariant = "a daemon is not stopped under a container";
    finds_on_two_devices(Mutation::StopWithoutLooking, invariant);
    finds_on_two_devices(Mutation::TrustStopping, invariant);
    let invariant = "after a command, every lease has its daemon";
    finds_on_two_devices(Mutation::NeverHeal, invariant);
    let invariant = "after a command, a changed compute mode is recorded";
    finds_on_two_devices(Mutation::SetModeBeforeRecord, invariant);
    let invariant = "a waiter gets the room that there is";
    finds_on_two_devices(Mutation::LookWithoutReclaim, invariant);
}

#[test]
fn sms_and_memory_are_looked_for_under_the_lock() {
    finds(&[HALF, MOST], 0, false, Mutation::BookWithoutLooking, "no more SMs are booked than there are");
    finds(&[LARGE, LARGE], 0, false, Mutation::BookWithoutLooking, "no more memory is booked than there is");
}

#[test]
fn a_device_has_one_use() {
    finds(&[HALF, Share::Exclusive], 0, false, Mutation::MixUses, "a device has one use");
}

#[test]
fn a_lease_stays_while_processes_are_in_the_cgroup() {
    finds(&[HALF], 0, false, Mutation::FreeBeforeEmpty, "a lease stays while its container lives");
}

#[test]
fn a_stop_looks_for_leases_under_the_ledgers_lock() {
    finds(&[HALF, HALF], 0, false, Mutation::StopWithoutLooking, "a daemon is not stopped under a container");
}

#[test]
fn a_daemon_that_is_being_stopped_does_not_serve() {
    finds(&[HALF, HALF], 0, false, Mutation::TrustStopping, "a daemon is not stopped under a container");
}

#[test]
fn limits_are_raised_before_a_container_starts() {
    let invariant = "a container starts with its limits in force";
    finds(&[HALF, LARGE], 0, false, Mutation::RaiseAfterStart, invariant);
}

#[test]
fn the_record_is_lowered_before_the_daemon_and_raised_after() {
    let invariant = "the ledger never says more than is in force";
    finds(&[HALF, LARGE], 0, false, Mutation::RecordBeforeAdjust, invariant);
}

#[test]
fn limits_are_set_only_on_a_daemon_that_still_serves() {
    finds(&[HALF, LARGE], 3, false, Mutation::AdjustAnyRecord, "a container starts with its daemon serving");
}

#[test]
fn limits_are_lowered() {
    let invariant = "after a command, limits are those of the largest share";
    finds(&[HALF, LARGE], 1, false, Mutation::NeverLower, invariant);
}

#[test]
fn crashed_daemons_are_started_again() {
    finds(&[HALF], 1, false, Mutation::NeverHeal, "after a command, every lease has its daemon");
}

#[test]
fn a_compute_mode_is_recorded_before_it_is_set() {
    let invariant = "after a command, a changed compute mode is recorded";
    finds(&[HALF], 1, false, Mutation::SetModeBeforeRecord, invariant);
}

#[test]
fn no_daemon_waits_for_a_service_that_has_died() {
    let invariant = "after a command, no daemon is left without a lease";
    finds(&[HALF], 1, true, Mutation::TrustDeadKeeper, invariant);
}

#[test]
fn a_waiter_does_not_wait_for_containers_that_have_ended() {
    let invariant = "a waiter gets the room that there is";
    finds(&[LARGE, LARGE], 0, false, Mutation::LookWithoutReclaim, invariant);
}

#[test]
fn a_waiter_looks_again() {
    finds(&[LARGE, LARGE], 0, false, Mutation::LookOnce, "every process comes to its end");
}

/// The model in which two wait in order for what a third has.
fn finds_in_order(crashes: u8, mutation: Mutation, invariant: &str) {
    let model = Daemons {
        shares: vec![MOST, MOST, HALF],
        devices: 1,
        waiters: vec![1, 2],
        order: true,
        serve: false,
        children: false,
        crashes,
        mutation: Some(mutation),
    };
    breaks(&check(&model, true), mutation, invariant);
}

#[test]
fn who_waits_longest_is_served_first() {
    finds_in_order(0, Mutation::PassWaiters, "who waits longest is not passed while it could start");
}

#[test]
fn who_is_killed_leaves_its_place() {
    finds_in_order(1, Mutation::KeepDeadWaiters, "a waiter gets the room that there is");
}

/// The model of dynamic MIG finds this mutation by breaking this invariant.
fn finds_mig(containers: usize, crashes: u8, mutation: Mutation, invariant: &str) {
    let model = DynamicMig { containers, waiter: Some(0), crashes, mutation: Some(mutation) };
    let report = check(&model, true);
    let Some((broken, way)) = report.broken else { panic!("{mutation:?} is not found: {report}") };
    let shown: Vec<_> = way.iter().map(|(step, _)| format!("  {} {}\n", step.what, step.of)).collect();
    assert_eq!(broken, invariant, "{mutation:?}:\n{}", shown.concat());
}

#[test]
fn instances_are_recorded_before_they_are_created_and_until_they_are_destroyed() {
    finds_mig(1, 1, Mutation::RecordAfterCreate, "every instance is recorded");
    finds_mig(1, 0, Mutation::ForgetBeforeDestroy, "every instance is recorded");
}

#[test]
fn instances_are_not_destroyed_under_leases() {
    let invariant = "an instance is not destroyed under its lease";
    finds_mig(1, 0, Mutation::DestroyLeased, invariant);
    finds_mig(1, 1, Mutation::NeedByUuid, invariant);
    finds_mig(2, 0, Mutation::LeaseGoing, invariant);
    finds_mig(2, 0, Mutation::TrustOldInventory, invariant);
    finds_mig(2, 1, Mutation::ForgetQuietly, invariant);
}

#[test]
fn instances_are_not_kept_for_the_dead() {
    finds_mig(1, 1, Mutation::AwaitDead, "after a command, no instance is left without a lease");
}

#[test]
fn a_waiter_does_not_take_its_own_room() {
    finds_mig(1, 2, Mutation::AwaitFailed, "every process comes to its end");
}

/// The model of suspension finds this mutation by breaking this invariant.
fn finds_suspending(mutation: Mutation, invariant: &str) {
    let report = check(&Suspending { crashes: 1, mutation: Some(mutation) }, true);
    let Some((broken, way)) = report.broken else { panic!("{mutation:?} is not found: {report}") };
    let shown: Vec<_> = way.iter().map(|(step, _)| format!("  {} {}\n", step.what, step.of)).collect();
    assert_eq!(broken, invariant, "{mutation:?}:\n{}", shown.concat());
}

#[test]
fn a_suspended_state_comes_back_with_room_and_whoever_is_killed() {
    finds_suspending(Mutation::FreeBeforeOut, "what is on the GPU is booked");
    finds_suspending(Mutation::BookAfterRestore, "a restore begins with booked room");
    finds_suspending(Mutation::TrustBookings, "no state is lost");
    finds_suspending(Mutation::LeaveCutShort, "every process comes to its end");
    finds_suspending(Mutation::RememberOnDemand, "every process comes to its end");
    finds_suspending(Mutation::CallBesideOrphan, "no container is left waiting");
}

/// The model of moving finds this mutation by breaking this invariant.
fn finds_moving(mutation: Mutation, invariant: &str) {
    let report = check(&Moving { crashes: 1, mutation: Some(mutation) }, true);
    let Some((broken, way)) = report.broken else { panic!("{mutation:?} is not found: {report}") };
    let shown: Vec<_> = way.iter().map(|(step, _)| format!("  {} {}\n", step.what, step.of)).collect();
    assert_eq!(broken, invariant, "{mutation:?}:\n{}", shown.concat());
}

#[test]
fn a_container_that_moves_has_room_on_both_gpus_and_is_found_where_it_is() {
    finds_moving(Mutation::MoveWithOneRoom, "what is on the GPU is booked");
    finds_moving(Mutation::PlaceByLedger, "what is on the GPU is booked");
    finds_moving(Mutation::NodesAfterNote, "it has its own GPU's node alone");
}
