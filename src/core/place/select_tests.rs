//! Tests of the choice of devices.

use super::super::fixture::{device, host, request};
use super::*;
use crate::ledger::Ledger;

fn three() -> Inventory {
    let mut devices: Vec<Device> = (0..3).map(device).collect();
    devices[0].uuid = "GPU-aa11".into();
    devices[1].uuid = "GPU-aa22".into();
    devices[2].uuid = "GPU-aa".into();
    devices[2].name = "NVIDIA A100-SXM4-40GB".into();
    host(devices)
}

fn wish(selectors: Vec<Selector>) -> Request {
    Request { devices: Devices::These(selectors), ..request(Mode::TimeSlice) }
}

fn slots_of(request: &Request, config: &Config) -> Result<Vec<Vec<usize>>, String> {
    slots(request, World { inventory: &three(), ledger: &Ledger::empty("boot"), config })
}

fn these(selectors: Vec<Selector>) -> Result<Vec<Vec<usize>>, String> {
    slots_of(&wish(selectors), &Config::default())
}

#[test]
fn every_selector_finds_its_device() {
    let found = |selector| these(vec![selector]).unwrap();
    assert_eq!(found(Selector::Index(1)), [[1]]);
    assert_eq!(found(Selector::Uuid("gpu-AA22".into())), [[1]]);
    assert_eq!(found(Selector::Uuid("GPU-aa1".into())), [[0]]);
    assert_eq!(found(Selector::Uuid("GPU-aa".into())), [[2]], "a whole one beats a beginning");
    for id in ["11:00.0", "0000:11:00.0", "00000000:11:00.0"] {
        assert_eq!(found(Selector::parse(id).unwrap()), [[1]]);
    }
    assert_eq!(found(Selector::Model("*a100*".into())), [[2]]);
    assert_eq!(found(Selector::Model("NVIDIA H?00".into())), [[0, 1]]);
}

#[test]
fn a_selector_of_no_device_or_of_several_is_refused() {
    let why = |selectors| these(selectors).unwrap_err();
    assert_eq!(
        why(vec![Selector::Index(7)]),
        "no GPU of this host is number 7; why: it has GPU 0 (NVIDIA H200, GPU-aa11), GPU 1 (NVIDIA H200, \
         GPU-aa22), GPU 2 (NVIDIA A100-SXM4-40GB, GPU-aa)"
    );
    let several = "matches 3 devices; why: GPU 0 (NVIDIA H200, GPU-aa11), GPU 1 (NVIDIA H200, GPU-aa22), GPU 2 (NVIDIA \
                   A100-SXM4-40GB, GPU-aa); fix: write more of it";
    assert_eq!(why(vec![Selector::Uuid("GPU-a".into())]), format!("GPU-a {several}"));
    assert_eq!(why(vec![Selector::Index(0), Selector::Uuid("GPU-aa11".into())]), "GPU 0 is named twice");
    assert_eq!(why(vec![Selector::Index(0); 4]), "4 GPUs requested, 3 present");
    assert!(why(vec![Selector::Name("big".into())]).starts_with("no GPU of this host is name:big"));
}

#[test]
fn commands_take_a_device_by_any_of_its_names() {
    let mut host = three();
    host.devices[0].uuid = "GPU-aaaa1111-00".into();
    host.devices[1].uuid = "GPU-aaaa1111-22".into();
    let alias = |matches: &str, name: &str| DeviceRule {
        matches: matches.into(),
        name: Some(name.into()),
        fixed_use: None,
        time_slice: None,
    };
    let config = Config { device: vec![alias("1", "left"), alias("2", "left")], ..Config::default() };
    let meant = |text: &str| {
        meant(text, &host, &config).map(|found| found.iter().map(|one| one.index).collect::<Vec<_>>())
    };
    for text in ["1", "GPU-aaaa1111-2", "11:00.0", "GPU-AAAA1111-22"] {
        assert_eq!(meant(text), Ok(vec![1]), "{text}");
    }
    for text in ["left", "name:left"] {
        assert_eq!(meant(text), Ok(vec![1, 2]), "{text}");
    }
    assert_eq!((meant("all"), meant("right")), (Ok(vec![0, 1, 2]), Ok(vec![])));
    let several = "GPU-aaaa1111 matches 2 devices; why: GPU 0 (NVIDIA H200, GPU-aaaa1111-00), GPU 1 (NVIDIA H200, GPU-aaaa1111-22); \
                   fix: write more of it";
    assert_eq!(meant("GPU-aaaa1111"), Err(several.to_owned()));
}

#[test]
fn rules_name_devices_and_the_first_that_matches_counts() {
    let rule_of = |matches: &str, name: &str| DeviceRule {
        matches: matches.into(),
        name: Some(name.into()),
        fixed_use: None,
        time_slice: None,
    };
    let device_rules = vec![rule_of("model:*A100*", "old"), rule_of("1", "second"), rule_of("all", "rest")];
    let config = Config { device: device_rules, ..Config::default() };
    let named = |name: &str| slots_of(&wish(vec![Selector::Name(name.into())]), &config);
    assert_eq!(named("old").unwrap(), [[2]]);
    assert_eq!(named("second").unwrap(), [[1]]);
    assert_eq!(named("rest").unwrap(), [[0]]);
}

#[test]
fn a_wide_selector_leaves_a_narrow_one_its_only_choice() {
    assert_eq!(assign(&[vec![0, 1, 2], vec![0]], &[0, 1, 2]), Some(vec![1, 0]));
    assert_eq!(assign(&[vec![0, 1], vec![0, 1]], &[1, 0]), Some(vec![0, 1]));
    assert_eq!(assign(&[vec![0, 1], vec![0, 1]], &[1]), None);
    assert_eq!(assign(&[vec![0, 1, 2]], &[2, 1, 0]), Some(vec![2]));
}
