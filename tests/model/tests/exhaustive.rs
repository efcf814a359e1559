//! Every state of the protocol.

use sublet_model::checker::{Model, check};
use sublet_model::daemons::Daemons;
use sublet_model::dynamic_mig::DynamicMig;
use sublet_model::ledger::Share;

const QUARTER: Share = Share::Mps { sm: 1, memory: Some(1) };
const HALF: Share = Share::Mps { sm: 2, memory: None };
const ALL: Share = Share::Mps { sm: 4, memory: Some(3) };

fn holds<M: Model>(name: &str, model: &M, ends: bool) {
    let begun = std::time::Instant::now();
    let report = check(model, ends);
    println!("{name:<44} {report}, {:?}", begun.elapsed());
    if let Some((name, way)) = report.broken {
        for step in way {
            println!("  {step:?}");
        }
        panic!("broken: {name}");
    }
}

fn daemons(shares: &[Share], devices: usize, waiter: Option<usize>, serve: bool, crashes: u8) -> Daemons {
    Daemons { shares: shares.to_vec(), devices, waiter, serve, crashes, mutation: None }
}

#[test]
fn t1() {
    holds("two any", &daemons(&[QUARTER, HALF], 1, None, false, 255), true);
}
#[test]
fn t2() {
    for c in 0..2 {
        holds(&format!("3 on 1: {c}"), &daemons(&[QUARTER, HALF, QUARTER], 1, Some(2), false, c), true);
    }
}
#[test]
fn t3() {
    for c in 0..2 {
        holds(&format!("3 on 2: {c}"), &daemons(&[QUARTER, HALF, ALL], 2, Some(2), false, c), false);
    }
}
#[test]
fn t4() {
    for c in 0..2 {
        holds(
            &format!("2 excl on 1, serve: {c}"),
            &daemons(&[QUARTER, Share::Exclusive], 1, Some(1), true, c),
            true,
        );
    }
}

#[test]
fn mig() {
    for (n, c) in [(1, 255), (2, 255), (3, 0), (3, 1)] {
        let model = DynamicMig { containers: n, waiter: Some(n - 1), crashes: c, mutation: None };
        holds(&format!("mig {n}, {c}"), &model, true);
    }
}
