//! Of states that are alike the search visits one. Here it is checked, in every state of smaller models, that they are.

use std::collections::HashSet;

use sublet_model::checker::{Alike, Model, check, check_alike, fingerprint_alike, visit};
use sublet_model::daemons::{Daemons, State};
use sublet_model::ledger::Share;

const HALF: Share = Share::Mps { sm: 2, memory: None };
const MOST: Share = Share::Mps { sm: 3, memory: Some(3) };

fn daemons(shares: &[Share], devices: usize, crashes: u8) -> Daemons {
    let (shares, waiters) = (shares.to_vec(), Vec::new());
    Daemons { shares, devices, waiters, order: false, serve: false, children: true, crashes, mutation: None }
}

/// Panics unless each state of `model` has the same invariants, ends and steps as all that `alike` says are alike. Returns
/// how many states are left if those count as one.
fn go_on_alike(model: &Daemons, alike: &Daemons) -> usize {
    let (fingerprint, names) = (fingerprint_alike(alike), alike.names());
    // A step to a state that is alike is none.
    let steps = |state: &State| {
        let (mut found, own) = (Vec::new(), fingerprint(state));
        model.steps(state, &mut found);
        let next = found.iter().map(|(step, next)| (model.is_crash(step), fingerprint(next)));
        next.filter(|(_, next)| *next != own).collect::<HashSet<_>>()
    };
    let mut distinct = HashSet::new();
    visit(model, |state| {
        distinct.insert(fingerprint(state));
        let (forgotten, expected) = (alike.forgotten(state), steps(state));
        for names in &names {
            let other = alike.renamed(&forgotten, names);
            assert_eq!(model.broken(&other), model.broken(state), "{state:?}\n{other:?}");
            assert_eq!(model.is_end(&other), model.is_end(state), "{state:?}\n{other:?}");
            assert!(steps(&other) == expected, "these go on in other ways:\n{state:?}\n{other:?}");
        }
    });
    distinct.len()
}

/// The search finds one state of those that are alike, and all of them hold what the one holds.
fn finds_all(name: &str, model: &Daemons) {
    let (full, reduced) = (check(model, true), check_alike(model, true));
    println!("{name:<58} {full}\n{:<58} {reduced}", "  those that are alike as one");
    assert!(full.broken.is_none() && reduced.broken.is_none());
    assert_eq!(reduced.unique, go_on_alike(model, model));
}

#[test]
fn three_containers_that_ask_for_the_same() {
    finds_all("three alike on a device", &daemons(&[HALF; 3], 1, 0));
}

#[test]
fn two_containers_that_ask_for_the_same_with_a_crash() {
    let model = Daemons { children: false, ..daemons(&[MOST; 2], 2, 1) };
    finds_all("two alike on two devices, a crash", &model);
}

#[test]
fn two_containers_and_one_that_waits() {
    let model = Daemons { waiters: vec![2], children: false, ..daemons(&[MOST; 3], 1, 1) };
    finds_all("two alike on a device, one waits, a crash", &model);
}

#[test]
fn two_that_wait_in_order() {
    let model = Daemons { waiters: vec![1, 2], order: true, children: false, ..daemons(&[MOST; 3], 1, 0) };
    finds_all("three alike on a device, two wait in order", &model);
}

#[test]
#[should_panic(expected = "these go on in other ways")]
fn containers_that_ask_for_different_shares_are_not_alike() {
    go_on_alike(&daemons(&[HALF, MOST], 1, 0), &daemons(&[MOST, MOST], 1, 0));
}

#[test]
#[should_panic(expected = "these go on in other ways")]
fn one_that_waits_is_not_like_the_others() {
    let model = Daemons { waiters: vec![1], ..daemons(&[MOST, MOST], 1, 0) };
    go_on_alike(&model, &Daemons { waiters: Vec::new(), ..model.clone() });
}
