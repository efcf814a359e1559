use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use sublet_core::admit::lease_for;
use sublet_core::config::Config;
use sublet_core::grant::Image;
use sublet_core::inventory::Link;
use sublet_core::ledger::{LeaseId, Ledger, fixture};
use sublet_core::place::fixture::{device, host, part};
use sublet_core::place::place;
use sublet_core::process::Process;
use sublet_core::request;

/// The answer to `annotations` on a host that is idle.
fn answer(annotations: &[(&str, &str)], inventory: &Inventory) -> Answer {
    let annotations: BTreeMap<String, String> =
        annotations.iter().map(|(key, value)| (format!("sublet.{key}"), (*value).to_owned())).collect();
    let config = Config::default();
    let request = request::parse(&annotations, None, None, &config).unwrap();
    let id = LeaseId::parse("00000000000000ab").unwrap();
    let placement = place(&request, &id, inventory, &Ledger::empty(""), &config).unwrap();
    let container = fixture::lease(1, "").container;
    let lease =
        lease_for(&container, Process::current().unwrap(), &placement, &Image::default(), id, &config);
    Answer::of(&request, &placement, &lease, inventory)
}

fn row(answer: &Answer, name: &str) -> String {
    answer.rows().into_iter().find(|(row, _)| *row == name).unwrap_or_default().1
}

#[test]
fn several_gpus_say_how_they_are_joined() {
    let mut host = host(vec![device(0), device(1), device(2)]);
    let whole = |gpu: &str, host: &Inventory| answer(&[("gpu", gpu), ("mode", "exclusive")], host);
    assert_eq!(row(&whole("any:2", &host), "Joined"), "", "the driver does not tell");
    host.links = vec![Link(0, 1, Join::System), Link(0, 2, Join::Nvlink), Link(1, 2, Join::System)];
    let two = whole("any:2", &host);
    assert_eq!(
        (row(&two, "Joined"), json!(two)["joined"].clone()),
        ("by NVLink".to_owned(), json!("nvlink"))
    );
    assert_eq!(row(&whole("all", &host), "Joined"), "over several NUMA nodes");
    assert_eq!(row(&whole("1", &host), "Joined"), "");
}

#[test]
fn the_numbers_come_first() {
    let answer = answer(&[("sm", "25"), ("memory", "8GiB"), ("processes", "2")], &host(vec![device(0)]));
    let text = answer.to_string();
    let (rows, protection) = text.split_once("\n\n").unwrap();
    assert_eq!(
        rows.lines().collect::<Vec<_>>(),
        [
            "GPU        0, NVIDIA H200, GPU-0",
            "Mode       mps",
            "SMs        32 of 132 (at most 25 %)",
            "Memory     8192 MiB of 102400 MiB",
            "Processes  2, each with 16 SMs and 4096 MiB",
        ]
    );
    assert!(
        protection.starts_with("This share protects\n  + ")
            && protection.contains("\nIt does not protect\n  - ")
    );
    let document = json!(answer);
    assert_eq!(
        document["gpus"],
        json!([{"uuid": "GPU-0", "number": "0", "name": "NVIDIA H200", "sm_count": 32, "sm_total": 132,
            "memory_bytes": 8_589_934_592_u64, "memory_total_bytes": 107_374_182_400_u64,
            "process_sm_count": 16, "process_memory_bytes": 4_294_967_296_u64}])
    );
    assert_eq!((&document["sm_percent"], &document["mps_server"]), (&json!(25.0), &json!("GPU-0")));
}

#[test]
fn each_mode_says_which_resources_are_the_containers_own() {
    let gpu = device(0);
    let one = host(vec![device(0)]);
    let turns = answer(&[], &one);
    assert_eq!(
        (row(&turns, "SMs"), row(&turns, "Memory")),
        ("132 of 132, in turns".into(), "102400 MiB (no limit)".into())
    );
    let whole = answer(&[("mode", "exclusive"), ("wait", "30s")], &one);
    assert_eq!(
        (row(&whole, "SMs"), row(&whole, "Memory")),
        ("132 of 132, its own".into(), "102400 MiB, its own".into())
    );
    assert_eq!(row(&whole, "Wait"), "up to 30s for room");
    let slice = answer(
        &[("mode", "mig")],
        &host(vec![
            sublet_core::inventory::Device { mig_enabled: true, ..gpu.clone() },
            part(&gpu, 1, "1g.18gb"),
        ]),
    );
    assert_eq!(
        (row(&slice, "GPU"), row(&slice, "SMs")),
        ("0:1, 1g.18gb, MIG-1".into(), "16, the MIG device's own".into())
    );
    assert_eq!(row(&slice, "Memory"), "12800 MiB, its own");
    assert_eq!(row(&slice, "Mode"), "mig 1g.18gb", "as `sublet status` says it");
    assert_eq!(
        row(&answer(&[("memory", "8GiB"), ("mode", "time-slice")], &one), "Mode"),
        "time-slice, own MPS"
    );
}

#[test]
fn more_processes_than_the_drivers_fewest_sms_allow_are_said() {
    let three = answer(&[("sm", "12"), ("processes", "3")], &host(vec![device(0)]));
    let said = "3, each with 8 SMs (the driver gives no process fewer SMs, so together they may have 24)";
    assert_eq!(
        (row(&three, "SMs"), row(&three, "Processes")),
        ("14 of 132 (at most 12 %)".into(), said.into())
    );
}

#[test]
fn several_gpus_are_distinguished_only_where_they_differ() {
    let two =
        answer(&[("gpu", "any:2"), ("sm", "25"), ("memory", "8GiB")], &host(vec![device(0), device(1)]));
    assert_eq!(row(&two, "SMs"), "32 of 132 (at most 25 %), on each");
    assert_eq!(row(&two, "Mode"), "mps, own MPS for all of them");
    let mut other = device(1);
    other.sm_count = Some(64);
    let two = answer(&[("gpu", "any:2"), ("sm", "25")], &host(vec![device(0), other]));
    assert_eq!(row(&two, "SMs"), "32 of 132 (at most 25 %) on 0; 16 of 64 (at most 25 %) on 1");
    assert_eq!(row(&two, "Processes"), "1, with 32 SMs on 0; 1, with 16 SMs on 1");
}
