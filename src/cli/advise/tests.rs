use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::bench::{BenchResult, Sharing};
use crate::stack;
use sublet_core::ledger::{Lease, fixture::lease};
use sublet_core::place::fixture::{GIB, device, host, part};
use sublet_core::request;
use sublet_core::share::{Mode, Percent};

const MIB: u64 = 1 << 20;

fn question(tenants: u32, trust: Trust) -> Question {
    Question { tenants, memory: None, p99_ms: None, trust, named: false }
}

fn result(cells: &[(&str, u32, &str)]) -> BenchResult {
    let cell = |(mode, n, figures): &(&str, u32, &str)| {
        format!(r#"{{"load":"small","mode":{mode},"n":{n},"measured":{{{figures}}}}}"#)
    };
    let text = format!(
        r#"{{"schema":"sublet.bench/1","title":"","simulated":false,"in_use_by_others":false,"time":"",
        "machine":{{"gpu":"NVIDIA H200"}},"settings":{{}},"cells":[{}]}}"#,
        cells.iter().map(cell).collect::<Vec<_>>().join(",")
    );
    BenchResult::parse(&text, "x").unwrap()
}

const EXCLUSIVE: &str = r#"{"sharing":"exclusive","sm":null}"#;
const TURNS: &str = r#"{"sharing":"time-slice","sm":null}"#;
const DEDICATED: &str = r#"{"sharing":"dedicated","sm":null}"#;
const MPS: &str = r#"{"sharing":"mps","sm":null}"#;
const EQUAL: &str = r#"{"sharing":"mps","sm":"equal"}"#;

/// As it was seen on an H200, the p99 made up.
fn seen() -> BenchResult {
    result(&[
        (EXCLUSIVE, 1, r#""mean_ms":7.2,"p99_ms":8.0,"per_second":139.0"#),
        (TURNS, 3, r#""mean_ms":22.0,"p99_ms":25.0,"per_second":136.0"#),
        (MPS, 3, r#""mean_ms":14.0,"p99_ms":19.0,"per_second":214.0"#),
        (TURNS, 7, r#""mean_ms":54.9,"p99_ms":60.0,"per_second":127.5"#),
        (DEDICATED, 7, r#""mean_ms":55.5,"p99_ms":61.0,"per_second":126.1"#),
        (MPS, 7, r#""mean_ms":29.6,"p99_ms":50.0,"per_second":236.5"#),
        (EQUAL, 7, r#""mean_ms":36.1,"p99_ms":40.0,"per_second":193.9"#),
    ])
}

/// The advice for the first GPU.
fn advised_in(
    asked: &Question,
    result: Option<&BenchResult>,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Result<Advice, NoAdvice> {
    let host = Host { inventory, ledger, whose: Whose::Root, config };
    let gpu = inventory.gpus().next().unwrap();
    let measurements = result.and_then(|result| Measurements::of(result, None, gpu).unwrap().0);
    advise(asked, gpu, measurements.as_ref(), host).unwrap()
}

fn advised(
    asked: &Question,
    result: Option<&BenchResult>,
    inventory: &Inventory,
) -> Result<Advice, NoAdvice> {
    advised_in(asked, result, inventory, &Ledger::empty("boot"), &Config::default())
}

/// Its annotations in one line, without their prefix.
fn line(advice: &Result<Advice, NoAdvice>) -> String {
    let advice = advice.as_ref().unwrap();
    let pairs: Vec<String> =
        advice.candidate.annotations.iter().map(|(key, value)| format!("{}={value}", &key[7..])).collect();
    pairs.join(" ")
}

fn one_gpu() -> Inventory {
    host(vec![device(0)])
}

/// A GPU with seven equal MIG devices, and an eighth that is larger.
fn in_mig_mode() -> Inventory {
    let gpu = sublet_core::inventory::Device { mig_enabled: true, ..device(0) };
    let small = (1..=7).map(|n| part(&gpu, n, "1g.12gb"));
    let mut large = part(&gpu, 8, "4g.50gb");
    large.memory_bytes = 50 * GIB;
    host([gpu.clone()].into_iter().chain(small).chain([large]).collect())
}

#[test]
fn trust_decides_without_a_measurement() {
    let with = |tenants, trust| line(&advised(&question(tenants, trust), None, &one_gpu()));
    assert_eq!(with(1, Trust::None), "mode=exclusive");
    assert_eq!(with(1, Trust::All), "mode=exclusive");
    // 100 GiB less 512 MiB and seven servers' 66 MiB, divided by 7, rounded down to 256 MiB.
    assert_eq!(with(7, Trust::Some), "memory=14GiB mode=time-slice");
    // One server alone, and 3 tenants: 33.1 GiB.
    assert_eq!(with(3, Trust::All), "memory=33GiB mode=mps");
    let late = Question { p99_ms: Some(20.0), ..question(3, Trust::All) };
    assert_eq!(line(&advised(&late, None, &one_gpu())), "memory=33GiB mode=mps sm=33.3");
}

#[test]
fn tenants_without_trust_get_hardware_of_their_own() {
    let asked = question(2, Trust::None);
    let refused = advised(&asked, None, &one_gpu()).unwrap_err();
    assert!(refused.why.contains("is taken whole"), "{refused:?}");
    assert_eq!(refused.help, ["--tenants 1 would fit", "--trust some would fit: time-slice"]);
    assert_eq!(line(&advised(&asked, None, &host(vec![device(0), device(1)]))), "mode=exclusive");
    let seven = |memory| Question { memory, ..question(7, Trust::None) };
    assert_eq!(line(&advised(&seven(None), None, &in_mig_mode())), "mig=1g.12gb");
    assert_eq!(line(&advised(&question(1, Trust::None), None, &in_mig_mode())), "mig=4g.50gb");
    let small = Question { memory: Some(Memory::Bytes(8 * GIB)), ..question(1, Trust::None) };
    assert_eq!(line(&advised(&small, None, &in_mig_mode())), "mig=1g.12gb");
    let large = seven(Some(Memory::Bytes(20 * GIB)));
    let refused = advised(&large, None, &in_mig_mode()).unwrap_err();
    assert_eq!(refused.help[0], "--tenants 1 would fit");
    assert!(refused.help[1].starts_with("more MIG devices would"), "{refused:?}");
}

#[test]
fn mig_devices_that_share_memory_separate_nothing() {
    let mut inventory = in_mig_mode();
    inventory.devices.truncate(3);
    for (own, other) in [(1, "MIG-2"), (2, "MIG-1")] {
        let part = inventory.devices[own].mig_device.as_mut().unwrap();
        (part.siblings, part.slices) = (vec![other.to_owned()], (1, 2));
    }
    assert!(advised(&question(2, Trust::None), None, &inventory).is_err());
    assert_eq!(line(&advised(&question(2, Trust::Some), None, &inventory)), "mig=1g.12gb");
}

#[test]
fn memory_that_does_not_fit_is_refused_with_an_amount_that_would() {
    let asked = Question { memory: Some(Memory::Bytes(20 * GIB)), ..question(7, Trust::Some) };
    let refused = advised(&asked, None, &one_gpu()).unwrap_err();
    let why = "the best way is time-slice, and container 5 would be refused: no room: GPU 0 has ";
    assert!(refused.why.starts_with(why), "{refused:?}");
    let turns = "sublet.suspend=allow would: who finds no room has others suspended, and with [suspend] turns each comes \
                 back in turn (docs/suspend.md)";
    assert_eq!(refused.help, ["--tenants 4 would fit", "--memory 14GiB would fit", turns]);
    // Not where only commands suspend, nobody is trusted, the GPU is in MIG mode, or it has less than one needs.
    let by_commands: Config = toml::from_str("[suspend]\non_demand = false\n").unwrap();
    let refused = advised_in(&asked, None, &one_gpu(), &Ledger::empty("boot"), &by_commands).unwrap_err();
    assert!(!refused.help.contains(&turns.to_owned()), "{refused:?}");
    let booked = Lease { memory_bytes: Some(90 * GIB), ..lease(1, "GPU-0") };
    let ledger = Ledger { leases: vec![booked], ..Ledger::empty("boot") };
    let refused = advised_in(&asked, None, &one_gpu(), &ledger, &Config::default()).unwrap_err();
    assert!(!refused.help.contains(&turns.to_owned()), "{refused:?}");
    for (inventory, trust) in [(one_gpu(), Trust::None), (in_mig_mode(), Trust::Some)] {
        let refused = advised(&Question { trust, ..asked }, None, &inventory).unwrap_err();
        assert!(!refused.help.contains(&turns.to_owned()), "{refused:?}");
    }
    let many = question(1000, Trust::All);
    // The most clients that an MPS server has.
    assert_eq!(advised(&many, None, &one_gpu()).unwrap_err().help, ["--tenants 48 would fit"]);
    let fewer = Question { tenants: 4, ..asked };
    assert_eq!(line(&advised(&fewer, None, &one_gpu())), "memory=20GiB mode=time-slice");
}

#[test]
fn booked_memory_is_not_given_again() {
    let held = Lease { memory_bytes: Some(50 * GIB), ..lease(1, "GPU-0") };
    let ledger = Ledger { leases: vec![held], ..Ledger::empty("boot") };
    let advice = advised_in(&question(2, Trust::All), None, &one_gpu(), &ledger, &Config::default());
    // In turns as the lease that is there. 49.5 GiB less 132 MiB, divided by 2.
    assert_eq!(line(&advice), "memory=25088MiB mode=time-slice");
}

#[test]
fn without_mps_programs_tenants_take_turns_without_a_limit() {
    let mut inventory = one_gpu();
    inventory.driver.mps_control = None;
    assert_eq!(line(&advised(&question(3, Trust::All), None, &inventory)), "mode=time-slice");
    let asked = Question { memory: Some(Memory::Bytes(40 * GIB)), ..question(3, Trust::All) };
    assert!(advised(&asked, None, &inventory).is_err(), "together they would not fit");
}

#[test]
fn the_host_s_rules_are_kept() {
    let config: Config =
        toml::from_str("[limits]\nrequire = ['sm']\n[defaults]\nisolation = 'dedicated'\n").unwrap();
    let with =
        |trust| line(&advised_in(&question(4, trust), None, &one_gpu(), &Ledger::empty("boot"), &config));
    assert_eq!(with(Trust::Some), "isolation=dedicated memory=25344MiB mode=mps sm=25");
    assert_eq!(with(Trust::All), "isolation=shared memory=25344MiB mode=mps sm=25");
    let refused = advised(&question(12, Trust::Some), None, &one_gpu()).unwrap_err();
    assert!(refused.why.contains("[limits] time_slice_max = 8"), "the key: {refused:?}");
    assert_eq!(refused.help[0], "--tenants 8 would fit");
    assert!(refused.help[1].starts_with("--trust all would fit: MPS"), "{refused:?}");
}

#[test]
fn of_measured_modes_the_fastest_that_trust_allows() {
    let with = |asked: Question| line(&advised(&asked, Some(&seen()), &one_gpu()));
    assert_eq!(with(question(7, Trust::All)), "memory=14GiB mode=mps");
    assert_eq!(with(question(7, Trust::Some)), "memory=14GiB mode=time-slice");
    // Five were not measured: as seven. Eight were not, nor more: by rules.
    let found =
        |tenants| advised(&question(tenants, Trust::All), Some(&seen()), &one_gpu()).unwrap().candidate.found;
    assert_eq!(found(5).map(|found| (found.n, found.alone)), Some((7, Some((7.2, Some(8.0))))));
    assert_eq!(found(8), None);
}

#[test]
fn a_target_is_kept_or_there_is_no_advice() {
    let with = |tenants, p99_ms| Question { p99_ms: Some(p99_ms), ..question(tenants, Trust::All) };
    assert_eq!(line(&advised(&with(7, 45.0), Some(&seen()), &one_gpu())), "memory=14GiB mode=mps sm=14.2");
    let refused = advised(&with(7, 20.0), Some(&seen()), &one_gpu()).unwrap_err();
    assert_eq!(
        refused.why,
        "no measured way keeps a p99 of 20 ms: with 7 at once the best p99 is 40.0 ms (MPS, 100 %/N each); it was kept \
         with 3 at once (MPS)"
    );
    let refused = advised(&with(7, 1.0), Some(&seen()), &one_gpu()).unwrap_err();
    assert!(refused.why.ends_with("it was kept with no smaller number"), "{refused:?}");
    // Another model's milliseconds judge nothing.
    let mut other = seen();
    other.machine.gpu = "NVIDIA A100".to_owned();
    let advice = advised(&with(7, 20.0), Some(&other), &one_gpu()).unwrap();
    assert!(advice.candidate.found.is_some_and(|found| !found.same_gpu));
}

#[test]
fn close_throughputs_are_decided_by_protection_and_fairness() {
    let with = |turns: &str, mps: &str| {
        let result = result(&[(MPS, 2, mps), (TURNS, 2, turns)]);
        line(&advised(&question(2, Trust::All), Some(&result), &one_gpu()))
    };
    let hundred = r#""mean_ms":20,"per_second":100"#;
    assert_eq!(with(r#""mean_ms":21,"per_second":96"#, hundred), "memory=50688MiB mode=time-slice");
    assert_eq!(with(r#""mean_ms":22,"per_second":94"#, hundred), "memory=50688MiB mode=mps");
    let unfair = result(&[
        (MPS, 2, r#""mean_ms":20,"per_second":100,"fairness":0.5"#),
        (EQUAL, 2, r#""mean_ms":20,"per_second":97,"fairness":0.99"#),
    ]);
    let advice = advised(&question(2, Trust::All), Some(&unfair), &one_gpu());
    assert_eq!(line(&advice), "memory=50688MiB mode=mps sm=50");
}

#[test]
fn cells_that_prove_nothing_are_not_used() {
    let gpu = device(0);
    let used = |change: fn(&mut BenchResult)| {
        let mut result = result(&[(MPS, 2, r#""mean_ms":20"#)]);
        change(&mut result);
        Measurements::of(&result, None, &gpu).unwrap().0.is_some()
    };
    assert!(used(|_| {}));
    assert!(!used(|result| result.simulated = true));
    assert!(!used(|result| result.cells[0].by_hand = true));
    assert!(!used(|result| result.cells[0].overcommitted = true));
    assert!(!used(|result| result.cells[0].error = Some("x".to_owned())));
    assert!(!used(|result| result.cells[0].measured = None));
    let mut several = seen();
    several.cells[0].load = "large".to_owned();
    let why = Measurements::of(&several, None, &gpu).unwrap_err().to_string();
    assert_eq!(why, "the result has the loads large, small: choose one with --load");
    assert!(Measurements::of(&several, Some("large"), &gpu).unwrap().0.is_some());
    assert!(Measurements::of(&several, Some("copy"), &gpu).is_err());
}

#[test]
fn the_words_distinguish_measured_from_concluded() {
    let asked = question(5, Trust::Some);
    let inventory = one_gpu();
    let advice = advised(&asked, Some(&seen()), &inventory).unwrap();
    let found = advice.candidate.found.as_ref().unwrap();
    assert_eq!(
        measured_cost(found, 5),
        "mean 54.9 ms, p99 60.0 ms with 7 at once (5 were not measured; fewer wait less); alone mean 7.2 ms, p99 8.0 \
         ms: 7.6 times as long; 127.5 iterations a second together"
    );
    let other = Found { same_gpu: false, gpu: "NVIDIA A100".to_owned(), ..found.clone() };
    assert_eq!(
        measured_cost(&other, 7),
        "with 7 at once, an iteration took 7.6 times as long as alone, on another GPU (NVIDIA A100)"
    );
    assert_eq!(
        sentence(&advice, &asked, &inventory.devices[0]),
        "Share GPU 0 (NVIDIA H200) among 5 tenants by turns (time-slice)."
    );
    assert_eq!(each_gets(&advice, &inventory), ["all 132 SMs while its turn lasts, 19.7 GiB of memory"]);
    let advice = advised(&asked, None, &inventory).unwrap();
    assert!(concluded(&advice, &asked, &inventory.devices[0], &inventory).contains("1/5 of the time"));
    assert_eq!(
        measure_with(&asked, &inventory.devices[0]).as_deref(),
        Some("sublet bench run -n 1,5 --mode exclusive,time-slice,dedicated")
    );
    assert_eq!(measure_with(&question(5, Trust::None), &inventory.devices[0]), None);
}

/// The services of the texts to paste, read back as `sublet explain` reads them.
fn read_back(paste: &Paste) -> Vec<Service> {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let mut services = stack::compose(&[file("compose.yaml", &paste.compose)], None, false).unwrap().services;
    services.extend(stack::quadlet(&[file("tenant.container", &paste.quadlet)]).unwrap().services);
    services
}

#[test]
fn texts_to_paste_ask_for_the_same() {
    let annotations = BTreeMap::from([
        ("sublet.memory".to_owned(), "512MiB".to_owned()),
        ("sublet.mode".to_owned(), "mps".to_owned()),
        ("sublet.sm".to_owned(), "0.9%".to_owned()),
    ]);
    let paste = Paste::new(&annotations, 3);
    let services = read_back(&paste);
    assert_eq!(services.len(), 4, "three by Compose, one by Quadlet");
    assert!(services.iter().all(|service| service.annotations == annotations), "{services:?}");
    assert!(services[..3].iter().all(|service| service.runtime.as_deref() == Some("sublet")));
    let mut words = paste.docker_run.split_whitespace();
    let given: BTreeMap<_, _> =
        std::iter::from_fn(|| words.find(|word| *word == "--annotation").and(words.next()))
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
    assert_eq!(given, annotations);
    assert!(
        paste.docker_run.starts_with("docker run --runtime sublet ")
            && paste.docker_run.ends_with(" IMAGE\n")
    );
}

fn inventories() -> impl Strategy<Value = Inventory> {
    (1..4_u32, 0..4_u32, 0..8_u32, any::<bool>(), 1..40_u64).prop_map(|(gpus, small, large, mps, used)| {
        let mut devices: Vec<_> = (0..gpus).map(device).collect();
        devices[0].memory_free_bytes -= used * GIB;
        if small + large > 3 {
            let gpu = sublet_core::inventory::Device { mig_enabled: true, ..device(0) };
            let parts =
                (1..=small + large).map(|n| part(&gpu, n, if n > small { "1g.12gb" } else { "1g.12gb+me" }));
            let parts: Vec<_> = parts.collect();
            devices[0] = gpu;
            devices.splice(1..1, parts);
        }
        let mut inventory = host(devices);
        if !mps {
            inventory.driver.mps_control = None;
        }
        inventory
    })
}

fn questions() -> impl Strategy<Value = Question> {
    let trust = prop_oneof![Just(Trust::None), Just(Trust::Some), Just(Trust::All)];
    let memory = prop_oneof![
        Just(None),
        (1..60_000_u64).prop_map(|mib| Some(Memory::Bytes(mib * MIB))),
        (1..100_000_u32).prop_map(|part| Some(Memory::Share(Percent::from_thousandths(part)))),
    ];
    let p99 = prop_oneof![Just(None), (1.0..80.0).prop_map(Some)];
    (1..64_u32, trust, memory, p99, any::<bool>()).prop_map(|(tenants, trust, memory, p99_ms, named)| {
        Question { tenants, memory, p99_ms, trust, named }
    })
}

fn configs() -> impl Strategy<Value = Config> {
    let rule =
        prop_oneof![Just(""), Just("use = 'mps'"), Just("use = 'time-slice'"), Just("use = 'exclusive'")];
    (rule, 1..40_u32, 0..3_u32).prop_map(|(rule, turns, overcommit)| {
        let text = format!(
            "[[device]]\nmatch = '0'\n{rule}\n[limits]\ntime_slice_max = {turns}\nmemory_overcommit = {}\n",
            0.5 + f64::from(overcommit) / 2.0
        );
        toml::from_str(&text).unwrap()
    })
}

fn ledgers() -> impl Strategy<Value = Ledger> {
    let mode = prop_oneof![Just(Mode::TimeSlice), Just(Mode::Mps), Just(Mode::Exclusive)];
    proptest::option::of((mode, 0..50_u64)).prop_map(|held| {
        let held = held.map(|(mode, gib)| Lease {
            mode,
            memory_bytes: Some(gib * GIB).filter(|_| mode != Mode::Exclusive),
            ..lease(1, "GPU-0")
        });
        Ledger { leases: held.into_iter().collect(), ..Ledger::empty("boot") }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn an_advised_share_is_placed_for_all_tenants(
        asked in questions(),
        inventory in inventories(),
        config in configs(),
        ledger in ledgers(),
        measured: bool,
    ) {
        let seen = measured.then(seen);
        let Ok(advice) = advised_in(&asked, seen.as_ref(), &inventory, &ledger, &config) else { return Ok(()) };
        let annotations = &advice.candidate.annotations;
        let request = request::parse(annotations, None, None, &config);
        prop_assert!(request.is_ok(), "{annotations:?}: {request:?}");
        let services = read_back(&Paste::new(annotations, asked.tenants));
        prop_assert!(services.iter().all(|service| service.annotations == *annotations));
        let tenants = asked.tenants as usize;
        prop_assert_eq!(services.len(), tenants + 1);
        // Placed again, from the text that is pasted.
        let stack = Stack { services: services[..tenants].to_vec(), ..Stack::default() };
        let world = (ledger, inventory.clone());
        let (fitted, _) = fit(&stack, None, world, &Names::default(), Whose::Root, &config).unwrap();
        let placements: Vec<_> = fitted
            .iter()
            .filter_map(|one| if let Outcome::Fits(placement) = &one.outcome { Some(placement) } else { None })
            .collect();
        prop_assert_eq!(placements.len(), tenants);
        let devices: BTreeSet<_> = placements.iter().flat_map(|one| &one.devices).collect();
        let alone = matches!(advice.candidate.mode.sharing, Sharing::Exclusive | Sharing::Mig);
        prop_assert!(alone || asked.trust != Trust::None);
        prop_assert_eq!(devices.len(), if alone { tenants } else { 1 });
        for placement in placements {
            let shared = placement.mode == Mode::Mps && placement.isolation == sublet_core::share::Isolation::Shared;
            prop_assert!(asked.trust == Trust::All || !shared, "{placement:?}");
            let device = inventory.device(&placement.devices[0]).unwrap();
            let gpu = inventory.device(device.gpu()).unwrap();
            let needs = asked.memory.map_or(0, |memory| memory.on(gpu.memory_bytes));
            prop_assert!(placement.memory_bytes.unwrap_or(device.memory_bytes) >= needs, "{placement:?}");
        }
    }
}
