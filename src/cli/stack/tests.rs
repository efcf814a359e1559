use std::collections::BTreeMap;

use super::*;
use crate::names::Names;
use sublet_core::inventory::GpuProcess;
use sublet_core::ledger::{Init, Waiter, fixture::lease};
use sublet_core::place::fixture::{GIB, device, host};
use sublet_core::process::Process;

fn service(name: &str, annotations: &[(&str, &str)]) -> Service {
    let pair = |(key, value): &(&str, &str)| (format!("sublet.{key}"), (*value).to_owned());
    Service {
        name: name.to_owned(),
        of: name.to_owned(),
        annotations: annotations.iter().map(pair).collect::<BTreeMap<_, _>>(),
        runtime: Some("sublet".to_owned()),
        ..Service::default()
    }
}

fn config() -> Config {
    toml::from_str("[share.small]\nsm = 25\nmemory = '8GiB'\n").unwrap()
}

/// The outcome of each, in few words.
fn outcomes(services: Vec<Service>, inventory: Inventory) -> Vec<String> {
    outcomes_beside(Ledger::empty("boot"), services, inventory)
}

/// The same beside what is in `ledger`.
fn outcomes_beside(ledger: Ledger, services: Vec<Service>, inventory: Inventory) -> Vec<String> {
    outcomes_by(&config(), Whose::Root, (ledger, inventory), services)
}

fn outcomes_by(
    config: &Config,
    whose: Whose,
    world: (Ledger, Inventory),
    services: Vec<Service>,
) -> Vec<String> {
    let stack = Stack { services, ..Stack::default() };
    let containers = toml::from_str("[[container]]\nname = 'web-*'\nshare = 'small'\n").ok();
    let (fitted, _) = fit(&stack, containers.as_ref(), world, &Names::default(), whose, config).unwrap();
    let words = |one: Fitted| match one.outcome {
        Outcome::Fits(placement) => {
            let sm = placement.sm.map(|sm| format!(" {sm}")).unwrap_or_default();
            format!("{} on {}, {}{sm}", one.service, placement.devices.join("+"), placement.mode)
        }
        Outcome::InTurns(placement) => {
            format!("{} on {}, in turns", one.service, placement.devices.join("+"))
        }
        Outcome::AsksForNone => format!("{} asks for none", one.service),
        Outcome::Made(made) => format!("{} makes {}", one.service, made.0.label),
        Outcome::Not(why) => format!("{} not: {why}", one.service),
    };
    fitted.into_iter().map(words).collect()
}

#[test]
fn each_sees_the_bookings_of_those_before_it() {
    let services = [("a", "60"), ("b", "60"), ("c", "40"), ("d", "50"), ("e", "30")];
    let services = services.map(|(name, sm)| service(name, &[("sm", sm)])).to_vec();
    let lines = outcomes(services, host(vec![device(0), device(1)]));
    assert_eq!(lines.len(), 5);
    let gpus: Vec<&str> =
        lines.iter().map(|line| line.split_once(", ").map_or("-", |(gpu, _)| gpu)).collect();
    assert_eq!(gpus[..2], ["a on GPU-0", "b on GPU-1"]);
    assert!(gpus[2].starts_with("c on GPU-"), "{lines:?}");
    assert!(lines[3].starts_with("d not: no room for"), "{lines:?}");
    assert!(gpus[4].starts_with("e on GPU-"), "one that does not fit books nothing: {lines:?}");
}

/// It waits, in this process, for so many percent of a GPU's SMs.
fn waits(id: &str, sm: &str) -> Waiter {
    let wanted = [("sublet.sm".to_owned(), sm.to_owned()), ("sublet.wait".to_owned(), "60s".to_owned())];
    let wanted = sublet_core::request::parse(&wanted.into(), None, None, &config()).unwrap();
    let container = Container { id: id.to_owned(), ..Container::default() };
    Waiter::new(&LeaseId::random().unwrap(), &container, &wanted, "no room", Process::current().ok())
}

#[test]
fn who_waits_comes_before_a_stack() {
    let ledger = Ledger { waiters: vec![waits("first", "80")], ..Ledger::empty("boot") };
    let services = [("large", "40"), ("small", "20")].map(|(name, sm)| service(name, &[("sm", sm)]));
    let lines = outcomes_beside(ledger, services.to_vec(), host(vec![device(0)]));
    assert!(lines[0].starts_with("large not: no room: others wait for what is left"), "{lines:?}");
    assert_eq!(lines[1], "small on GPU-0, mps 20");
}

#[test]
fn a_stack_fits_in_turns_where_its_containers_are_suspended_for_each_other() {
    let model = |name, gib: &str| service(name, &[("memory", gib), ("suspend", "allow")]);
    let by = |config: &Config, whose, services: Vec<Service>, count: u32| {
        let inventory = host((0..count).map(device).collect());
        outcomes_by(config, whose, (Ledger::empty("boot"), inventory), services)
    };
    let root = |services, count| by(&config(), Whose::Root, services, count);
    let two = || vec![model("chat", "80GiB"), model("image", "80GiB")];
    assert_eq!(root(two(), 1), ["chat on GPU-0, time-slice", "image on GPU-0, in turns"]);
    assert_eq!(root(two(), 2), ["chat on GPU-0, time-slice", "image on GPU-1, time-slice"]);
    let third = root([two(), vec![model("music", "80GiB")]].concat(), 1);
    assert_eq!(third[2], "music on GPU-0, in turns");
    let third = root([two(), vec![model("music", "80GiB")]].concat(), 2);
    assert_eq!(third[2], "music on GPU-0, in turns");

    let is_refused = |lines: &[String], word: &str| {
        assert!(lines.last().unwrap().starts_with(&format!("{word} not: ")), "{lines:?}");
    };
    let mut config = config();
    config.suspend.on_demand = false;
    is_refused(&by(&config, Whose::Root, two(), 1), "image");
    // Nobody is suspended that stays, and what is too large for the GPU never fits.
    let stays = service("stays", &[("mode", "time-slice"), ("memory", "80GiB")]);
    is_refused(&root(vec![stays.clone(), model("image", "80GiB")], 1), "image");
    is_refused(&root(vec![model("chat", "80GiB"), stays.clone(), model("image", "80GiB")], 1), "image");
    is_refused(&root(vec![model("chat", "80GiB"), model("large", "200GiB")], 1), "large");
    // Room is made on one GPU, not on two.
    let both = service("both", &[("mode", "time-slice"), ("memory", "80GiB"), ("gpu", "any:2")]);
    is_refused(&root([two(), vec![both]].concat(), 2), "both");
}

#[test]
fn a_share_comes_by_runtime_by_cdi_by_name_and_by_annotation() {
    let with = |name: &str, change: fn(&mut Service)| {
        let mut service = service(name, &[]);
        change(&mut service);
        service
    };
    let lines = outcomes(
        vec![
            with("runtime", |service| service.runtime = Some("sublet-small".into())),
            with("cdi", |service| service.devices = vec!["sublet/share=small.0".into()]),
            with("name", |service| service.called = Some(("web-1".into(), "x".into()))),
            with("db", |service| service.called = Some(("db-1".into(), "x".into()))),
            with("unknown", |_| {}),
            with("plain", |service| service.runtime = None),
            with("no-cdi", |service| service.devices = vec!["sublet/share=large.0".into()]),
        ],
        host(vec![device(0)]),
    );
    for (line, name) in lines.iter().zip(["runtime", "cdi", "name"]) {
        assert_eq!(*line, format!("{name} on GPU-0, mps 25"));
    }
    assert_eq!(lines[3], "db asks for none");
    assert!(lines[4].starts_with("unknown not: its share is that of its name or image"), "{lines:?}");
    assert_eq!(lines[5], "plain asks for none");
    assert!(lines[6].contains("there is no CDI device sublet/share=large.0"), "{lines:?}");
}

#[test]
fn a_setting_that_contradicts_a_share_is_found() {
    let with = |name: &str, change: fn(&mut Service)| {
        let mut service = service(name, &[("sm", "5")]);
        change(&mut service);
        service
    };
    let lines = outcomes(
        vec![
            with("runc", |service| service.runtime = Some("/usr/bin/runc".into())),
            with("gpus", |service| service.gpus = true),
            with("open", |service| service.privileged = true),
            with("node", |service| service.devices = vec!["/dev/nvidia0:/dev/nvidia0".into()]),
            with("nvidia", |service| service.devices = vec!["nvidia.com/gpu=0".into()]),
            with("typo", |service| drop(service.annotations.insert("sublet.smm".into(), "1".into()))),
            with("two", |service| service.devices = vec!["sublet/share=small.0".into()]),
            with("hook", |service| (service.runtime, service.by_hook) = (Some("/usr/bin/crun".into()), true)),
            with("none", |service| service.runtime = None),
            with("podman", |service| (service.runtime, service.by_hook) = (None, true)),
            with("labels", |service| {
                service.label_warning = Some("labels are not annotations: write x".into());
            }),
        ],
        host(vec![device(0)]),
    );
    for (line, said) in lines.iter().zip([
        "runc not: its runtime is runc, which does not read its annotations",
        "gpus not: the engine was asked for GPUs too",
        "open not: the container may open every device of the host",
        "node not: the container is given the device /dev/nvidia0 in addition to its share",
        "nvidia not: the engine was asked for an NVIDIA CDI device too",
        "typo not: sublet.smm=1: unknown key",
        "two not: sublet.sm=5 and the CDI device sublet/share=small ask for different shares",
        "hook on GPU-0, mps 5",
        "none not: its runtime is the engine's default, which does not read its annotations: write `runtime: sublet`",
        "podman on GPU-0, mps 5",
        "labels not: labels are not annotations: write x",
    ]) {
        assert!(line.starts_with(said), "{line}");
    }
}

/// Which of containers with these names and percentages of SMs fit in other orders: in every one, in another, in words.
fn ordered(containers: &[(&str, &str)], inventory: &Inventory, most: usize) -> [String; 3] {
    let container = |(name, sm): &(&str, &str)| Service {
        of: name.split('-').next().unwrap().to_owned(),
        ..service(name, &[("sm", sm)])
    };
    let stack = Stack { services: containers.iter().map(container).collect(), ..Stack::default() };
    let config = config();
    let place = |stack: &Stack| {
        let world = (Ledger::empty("boot"), inventory.clone());
        fit(stack, None, world, &Names::default(), Whose::Root, &config).map(|(fitted, _)| fitted)
    };
    let found = orders(&stack, &place(&stack).unwrap(), most, place).unwrap();
    let names = |key: &str| {
        let document = json!(found);
        document[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    };
    [names("in_every_order"), names("in_another_order"), found.sentence.clone().unwrap_or_default()]
}

#[test]
fn containers_whose_share_depends_on_the_start_order_are_named_and_so_are_those_that_always_fit() {
    let (one, two) = (host(vec![device(0)]), host(vec![device(0), device(1)]));
    let [every, another, sentence] = ordered(&[("a", "60"), ("b", "60"), ("c", "40")], &one, 1000);
    assert_eq!((every.as_str(), another.as_str()), ("c", "b"));
    let said =
        "the start order decides: another, such as c, b, a, would let b in; in every order these fit: c";
    assert_eq!(sentence, said);
    // Small ones first take from both GPUs the room of a large one.
    let [every, another, sentence] =
        ordered(&[("a", "40"), ("b", "40"), ("c", "60"), ("d", "60")], &two, 1000);
    assert_eq!((every.as_str(), another.as_str()), ("a b", "d"));
    assert!(
        sentence.contains("such as d, c, b, a, would let d in; in every order these fit: a, b"),
        "{sentence}"
    );
    let [every, another, sentence] =
        ordered(&[("d", "60"), ("c", "60"), ("b", "40"), ("a", "40")], &two, 1000);
    assert_eq!((every.as_str(), another.as_str()), ("b a", ""), "in the order of the file all fit");
    assert!(sentence.contains("in another, d, c may not fit; in every order these fit: b, a"), "{sentence}");
    // Two that fit by themselves alone.
    let [every, _, sentence] = ordered(&[("a", "60"), ("b", "60")], &one, 1000);
    assert!(every.is_empty() && sentence.ends_with("; in every order these fit: none"), "{sentence}");
}

#[test]
fn where_no_order_changes_anything_none_is_spoken_of() {
    let one = host(vec![device(0)]);
    let fitting = ordered(&[("a", "50"), ("b", "50")], &one, 1000);
    assert_eq!(fitting, ["a b", "", ""]);
    // Containers of one service are alike, and so is which of them goes without.
    assert_eq!(ordered(&[("a-1", "40"), ("a-2", "40"), ("a-3", "40")], &one, 1000), ["a-1 a-2", "", ""]);
    assert_eq!(ordered(&[], &one, 1000), ["", "", ""]);
    assert_eq!(
        ordered(&[("a", "200"), ("b", "50")], &one, 1000),
        ["b", "", ""],
        "a bad request fits nowhere"
    );
}

#[test]
fn of_many_containers_some_orders_are_tried_which_begin_and_end_with_each() {
    let one = host(vec![device(0)]);
    let names: Vec<String> = (0..12).map(|number| format!("c{number}")).collect();
    let containers: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "10")).collect();
    let [every, another, sentence] = ordered(&containers, &one, 600);
    assert_eq!((every.as_str(), another.as_str()), ("", "c10 c11"), "each is last once, and first");
    assert!(sentence.ends_with("; in all 50 orders tried these fit: none"), "{sentence}");
    // The order of the file, and back.
    let [every, _, sentence] = ordered(&containers, &one, 1);
    assert!(
        every == "c2 c3 c4 c5 c6 c7 c8 c9" && sentence.contains("in all 2 orders tried"),
        "{every}: {sentence}"
    );
}

#[test]
fn containers_of_the_stack_that_run_are_not_counted_twice() {
    let mut running = lease(1, "GPU-0");
    (running.mode, running.memory_bytes) = (sublet_core::share::Mode::Exclusive, None);
    running.init = Some(Init {
        process: Process { pid: 7, start_time: 1 },
        pid_namespace: 0,
        cgroup: Some("/sys/fs/cgroup/a".into()),
        cgroup_inode: None,
    });
    let mut inventory = host(vec![device(0)]);
    inventory.devices[0].memory_free_bytes = 60 * GIB;
    inventory.devices[0].processes = vec![GpuProcess {
        pid: 7,
        name: "x".into(),
        memory_bytes: 40 * GIB,
        pid_namespace: 0,
        cgroups: vec![],
        mps_server: false,
    }];
    // Names know it by an id.
    let waiters = vec![waits(running.id.as_str(), "40"), waits("other", "40")];
    let ledger = Ledger { leases: vec![running, lease(2, "GPU-0")], waiters, ..Ledger::empty("boot") };
    let name = Name { part_of: "shop/web".into(), unit: "web.service".into(), ..Name::default() };
    let names = Names::for_test(&ledger.leases[0], name);
    for (own, left, free) in [
        (Own::Project("shop".into()), 1, 100),
        (Own::Units(vec!["web.service".into()]), 1, 100),
        (Own::Project("sho".into()), 2, 60),
        (Own::default(), 2, 60),
    ] {
        let (mut ledger, mut inventory) = (ledger.clone(), inventory.clone());
        let aside = set_aside(&own, &mut ledger, &mut inventory, &names);
        assert_eq!((ledger.leases.len(), 2 - aside, ledger.waiters.len()), (left, left, left), "{own:?}");
        assert_eq!(inventory.devices[0].memory_free_bytes, free * GIB, "{own:?}");
        assert_eq!(inventory.devices[0].processes.len(), left - 1, "{own:?}");
    }
}

fn of(toml: &str, inventory: &Inventory) -> Vec<String> {
    resources(&counts(&toml::from_str(toml).unwrap(), inventory).unwrap())
}

#[test]
fn each_share_is_counted_on_empty_gpus_by_itself() {
    let mut busy = device(1);
    (busy.memory_free_bytes, busy.memory_bytes) = (0, 50 * GIB);
    let two = host(vec![device(0), busy]);
    let text = "[share.quarter]\nsm = 25\n[share.large]\nmemory = '60GiB'\nsm = 10\n\
                [share.first]\ngpu = 0\nsm = 50\n[share.whole]\nmode = 'exclusive'\n\
                [share.both]\ngpu = 'any:2'\n[share.none]\nmemory = '200GiB'\n";
    let expected =
        ["sublet-first=2", "sublet-large=1", "sublet-quarter=8", "sublet-whole=2"].map(str::to_owned);
    let mut found = of(text, &two);
    let both = found.remove(0);
    assert!(both.starts_with("sublet-both="), "{both}");
    assert_eq!(found, expected);
    // Swarm counts those that run at once.
    let models = of("[share.model]\nmemory = '60GiB'\nsuspend = 'allow'\n", &host(vec![device(0)]));
    assert_eq!(models, ["sublet-model=1"]);
    let none = counts(&toml::from_str("[share.none]\nmemory = '200GiB'\n").unwrap(), &two).unwrap();
    assert_eq!(none[0].fits, 0);
    assert!(none[0].why.contains("200 GiB") || none[0].why.contains("204800"), "{}", none[0].why);
    assert!(of("", &two).is_empty() && of("[share.a]\nsm = 25\n", &host(vec![])).is_empty());
}
