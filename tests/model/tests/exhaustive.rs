//! Every state of the protocol.

use sublet_model::checker::{Model, check};
use sublet_model::daemons::Daemons;
use sublet_model::ledger::Share;

const QUARTER: Share = Share::Mps { sm: 1, memory: Some(1) };
const HALF: Share = Share::Mps { sm: 2, memory: None };

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

#[test]
fn one() {
    let model = Daemons {
        shares: vec![QUARTER],
        devices: 1,
        waiter: None,
        serve: false,
        crashes: u8::MAX,
        mutation: None,
    };
    holds("one", &model, true);
}
#[test]
fn one_serve() {
    let model = Daemons {
        shares: vec![QUARTER],
        devices: 1,
        waiter: None,
        serve: true,
        crashes: u8::MAX,
        mutation: None,
    };
    holds("one serve", &model, true);
}
#[test]
fn two() {
    let model = Daemons {
        shares: vec![QUARTER, HALF],
        devices: 1,
        waiter: None,
        serve: false,
        crashes: u8::MAX,
        mutation: None,
    };
    holds("two", &model, true);
}

#[test]
fn two_crash() {
    for crashes in 0..4 {
        let model = Daemons {
            shares: vec![QUARTER, HALF],
            devices: 1,
            waiter: None,
            serve: false,
            crashes,
            mutation: None,
        };
        holds(&format!("two {crashes}"), &model, false);
    }
}
