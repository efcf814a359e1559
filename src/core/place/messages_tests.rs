//! The messages of refusals: each of many requests on each of many hosts.

use std::collections::BTreeMap;

use super::fixture::{GIB, device, host, part, process, request};
use super::tests::{id, leased, ledger, mps, percent, refused, rule};
use super::*;
use crate::config::Use;
use crate::inventory::{ComputeMode, Virtualization};
use crate::ledger::fixture::lease;
use crate::request::parse;
use crate::text::first_line;

const ASKED: [&str; 25] = [
    "sm=50 memory=8GiB",
    "sm=100 memory=90GiB",
    "sm=12.5 memory=50%",
    "sm=25 processes=47",
    "sm=25 priority=low",
    "sm=1",
    "sm=50 memory=100MiB",
    "memory=500GiB",
    "mode=mps isolation=dedicated sm=50 memory=30GiB",
    "mode=time-slice",
    "mode=time-slice memory=60GiB",
    "mode=exclusive",
    "mode=mps",
    "gpu=0",
    "gpu=0 sm=50 memory=20GiB",
    "gpu=9 sm=25",
    "gpu=any:2 sm=25 memory=50%",
    "gpu=all mode=exclusive",
    "gpu=0,1 sm=75",
    "mode=mig",
    "mode=mig memory=30GiB",
    "mode=mig sm=50",
    "mig=1g.18gb",
    "mig=3g.71gb sm=50",
    "gpu=0:1 sm=50 memory=8GiB",
];

fn annotations(asked: &str) -> BTreeMap<String, String> {
    let pairs = asked.split(' ').map(|pair| pair.split_once('=').unwrap());
    pairs
        .map(|(key, value)| (format!("sublet.{}", key.trim_start_matches("sublet.")), value.to_owned()))
        .collect()
}

/// A GPU in MIG mode with seven MIG devices.
fn cut() -> Vec<Device> {
    let gpu = Device { mig_enabled: true, ..device(0) };
    let parts = (0..7).map(|n| part(&gpu, n, if n == 0 { "2g.35gb" } else { "1g.18gb" })).collect::<Vec<_>>();
    [gpu].into_iter().chain(parts).collect()
}

/// Of a GPU that is in no table.
fn without_count(mut device: Device) -> Device {
    device.sm_count = device.sm_count.filter(|_| device.is_mig());
    device.mig_device.iter_mut().for_each(|mig_device| mig_device.gpu_sm_count = None);
    device
}

fn hosts() -> Vec<Inventory> {
    let one = |change: fn(&mut Device)| {
        let mut gpu = device(0);
        change(&mut gpu);
        host(vec![gpu])
    };
    let mut no_mps = host(vec![device(0)]);
    no_mps.driver.mps_control = None;
    vec![
        host(vec![]),
        host(vec![device(0)]),
        host(vec![device(0), device(1)]),
        host((0..8).map(device).collect()),
        host(cut()),
        host(cut().into_iter().chain([device(1)]).collect()),
        host(cut().into_iter().map(without_count).collect()),
        one(|gpu| gpu.compute_capability = (6, 1)),
        one(|gpu| gpu.virtualization = Virtualization::Vgpu),
        one(|gpu| gpu.compute_mode = ComputeMode::ExclusiveProcess),
        one(|gpu| gpu.memory_free_bytes = 10 * GIB),
        one(|gpu| gpu.processes = vec![process(4242, 0, GIB)]),
        one(|gpu| (gpu.sm_count, gpu.mig_enabled) = (None, true)),
        no_mps,
    ]
}

fn ledgers() -> Vec<Ledger> {
    let turns = |count| ledger((1..=count).map(|n| lease(n, "GPU-0")).collect());
    let alone = |n, uuid: &str| Lease { mode: Mode::Exclusive, ..lease(n, uuid) };
    let instance = |n: u64, uuid: String| Lease { mode: Mode::Mig, ..lease(n, &uuid) };
    let destroyed = |n: u64| {
        let old = LeasedMigDevice {
            uuid: "MIG-old".into(),
            gpu: "GPU-0".into(),
            gi: u32::try_from(n).unwrap(),
            ci: 0,
            placement: None,
            sm: None,
            memory_bytes: None,
        };
        Lease { mig_devices: vec![old], ..instance(n + 1, "MIG-old".into()) }
    };
    let apart = Lease { isolation: Isolation::Dedicated, ..leased(1, "GPU-0", 50_000, 40) };
    vec![
        ledger(vec![]),
        ledger(vec![leased(1, "GPU-0", 60_000, 16)]),
        ledger(vec![leased(1, "GPU-0", 100_000, 90), leased(2, "GPU-1", 87_500, 8)]),
        ledger(vec![Lease { processes: 48, ..leased(1, "GPU-0", 10_000, 8) }, alone(2, "GPU-1")]),
        ledger((0..8).map(|n| leased(n + 1, &format!("GPU-{n}"), 99_000, 60)).collect()),
        ledger((0..7).map(|n| instance(n + 1, format!("MIG-{n}"))).collect()),
        ledger(vec![leased(1, "MIG-1", 75_000, 8), instance(2, "MIG-0".into())]),
        ledger((0..7).map(destroyed).collect()),
        ledger(vec![alone(1, "GPU-0")]),
        ledger(vec![apart]),
        turns(1),
        turns(8),
        Ledger { drained: vec!["GPU-0".into()], unexplained: vec!["GPU-1".into()], ..Ledger::empty("boot") },
    ]
}

fn configs() -> Vec<Config> {
    let mut generous = Config::default();
    (generous.limits.sm_overcommit, generous.limits.memory_overcommit) = (2.0, 1.5);
    let mut strict = Config::default();
    strict.limits.require = vec![crate::config::Required::Memory];
    vec![Config::default(), generous, strict, rule("0", Use::TimeSlice), rule("all", Use::Exclusive)]
}

/// The numbers before `%` in `text`.
fn percentages(text: &str) -> Vec<f64> {
    let words: Vec<&str> = text.split([' ', '=']).collect();
    words.windows(2).filter(|pair| pair[1].starts_with('%')).filter_map(|pair| pair[0].parse().ok()).collect()
}

/// The requests that would fit by `refusal`, as annotations.
fn suggestions(refusal: &Refusal) -> Vec<BTreeMap<String, String>> {
    let (_, fixes) = refusal.message.split_once("; fix: ").unwrap_or_default();
    let ways = fixes.split("; or ").filter_map(|way| way.split_once(" fits now"));
    ways.map(|(settings, _)| annotations(settings)).collect()
}

fn check(refusal: &Refusal, context: &str) {
    let (message, first) = (&refusal.message, first_line(&refusal.message));
    assert!(first.chars().count() <= 80, "{context}");
    assert!(!message.contains('\n') && message.matches("; why: ").count() < 2, "{context}");
    for text in refusal.candidates.iter().chain([message]) {
        let numbers = percentages(text);
        assert!(numbers.iter().all(|number| *number > 0.0 && *number <= 100.0), "{numbers:?} in {text}");
    }
    assert_eq!(message.contains("sublet.wait="), refusal.temporary && !refusal.left_out, "{context}");
    // That of a device by which the whole is decided.
    let decides = |candidate: &&String| {
        let (_, said) = candidate.split_once(") ").unwrap();
        let said = if said.ends_with(']') { said.rsplit_once(" [").unwrap().0 } else { said };
        let reason = said.split("; ").next().unwrap();
        first.ends_with(reason) && candidate.ends_with(']') == refusal.temporary
    };
    assert!(refusal.candidates.is_empty() || refusal.candidates.iter().any(|one| decides(&one)), "{context}");
}

#[test]
fn first_lines_are_short_and_suggestions_fit() {
    let (mut refusals, mut tried) = (0, 0);
    let (hosts, ledgers) = (hosts(), ledgers());
    for (at, config) in configs().iter().enumerate() {
        let held = || ledgers.iter().step_by(if at == 0 { 1 } else { 3 });
        for (inventory, ledger) in hosts.iter().flat_map(|host| held().map(move |held| (host, held))) {
            for asked in ASKED {
                let wanted = annotations(asked);
                let Ok(request) = parse(&wanted, None, None, config) else { continue };
                let Err(refusal) = place(&request, &id(), inventory, ledger, config) else { continue };
                let context = format!("{asked}: {}; {:?}", refusal.message, refusal.candidates);
                refusals += 1;
                check(&refusal, &context);
                for changed in suggestions(&refusal) {
                    let all = wanted.clone().into_iter().chain(changed).collect();
                    let instead =
                        parse(&all, None, None, config).unwrap_or_else(|why| panic!("{why}: {context}"));
                    let placed = place(&instead, &id(), inventory, ledger, config);
                    assert!(placed.is_ok(), "{all:?} does not fit, but {context}");
                    tried += 1;
                }
            }
        }
    }
    assert!(refusals > 2000 && tried > 200, "{refusals} {tried}");
}

#[test]
fn a_refusal_names_the_devices_that_a_policy_allows() {
    let asked = parse(&annotations("gpu=0"), None, None, &Config::default()).unwrap();
    let (allowed, all) = (host(vec![device(5)]), host(vec![device(5), device(6)]));
    let message_of =
        |of: &Inventory| Box::new(refused(&asked, &allowed, &ledger(vec![]))).of_policy(&allowed, of).message;
    assert!(message_of(&allowed).starts_with("no GPU of this host is number 0; why: it has GPU 5 ("));
    let message = message_of(&all);
    let fewer = "no GPU that your policy allows is number 0; why: it allows GPU 5 (";
    assert!(message.starts_with(fewer) && message.ends_with("; fix: sublet.gpu=5 fits now"), "{message}");
}

#[test]
fn mig_devices_with_one_reason_are_named_together() {
    let held = (0..7).map(|n| Lease { mode: Mode::Mig, ..lease(n + 1, &format!("MIG-{n}")) }).collect();
    let whole = Request { mig: Some("1g.18gb".into()), ..request(Mode::Mig) };
    let refusal = refused(&whole, &host(cut()), &ledger(held));
    let first = "no room for mig, 1g.18gb: each of 6 MIG devices of GPU 0 is taken whole";
    assert_eq!(first_line(&refusal.message), first);
    assert!(refusal.message.contains("; why: held by container-2 (mig), "), "{}", refusal.message);
    assert!(
        refusal.message.ends_with(", and 2 more; fix: sublet.wait=60s waits for room"),
        "{}",
        refusal.message
    );
    assert_eq!(refusal.candidates.len(), 6);
}

#[test]
fn the_device_that_lacks_least_decides() {
    let two = host((0..3).map(device).collect());
    let held = ledger(vec![
        leased(1, "GPU-0", 90_000, 8),
        leased(2, "GPU-1", 60_000, 8),
        Lease { mode: Mode::Exclusive, ..lease(3, "GPU-2") },
    ]);
    let refusal = refused(&mps(50_000, 8), &two, &held);
    assert!(first_line(&refusal.message).ends_with(": GPU 1 has 40 % SM left"), "{}", refusal.message);
    assert!(
        refusal.message.contains("; fix: sublet.sm=40 fits now; or sublet.wait=60s"),
        "{}",
        refusal.message
    );
    let full = ledger(vec![leased(1, "GPU-0", 100_000, 8)]);
    let refusal = refused(&mps(50_000, 8), &host(vec![device(0)]), &full);
    assert!(first_line(&refusal.message).ends_with(": GPU 0 has no SMs left"), "{}", refusal.message);
}

#[test]
fn a_refusal_suggests_nothing_that_a_policy_does_not_allow() {
    let (one, held) = (host(vec![device(0)]), ledger(vec![lease(1, "GPU-0")]));
    let asked = |allows: Allows<'_>| {
        let whole = request(Mode::Exclusive);
        place_within(&whole, &id(), &one, &held, &Config::default(), allows).unwrap_err().message
    };
    assert!(
        asked(&|_| true).contains("sublet.mode=time-slice fits now, shared with others"),
        "{}",
        asked(&|_| true)
    );
    assert!(!asked(&|placed| placed.mode == Mode::Mps).contains("fits now"));
    let nearly = Request { sm: Some(percent(30_000)), ..request(Mode::Mps) };
    let busy = ledger(vec![leased(1, "GPU-0", 80_000, 8)]);
    let refusal =
        place_within(&nearly, &id(), &one, &busy, &Config::default(), &|placed| placed.sm.is_none());
    assert!(!refusal.unwrap_err().message.contains("fits now"));
}
