//! Which GPUs a share of several gets where they are not all joined alike.

use std::num::NonZeroU32;

use super::super::fixture::{device, host, request};
use super::super::tests::{ledger, placed};
use crate::inventory::{Inventory, Join, Link};
use crate::ledger::Lease;
use crate::ledger::fixture::lease;
use crate::request::Request;
use crate::share::{Devices, Mode, Selector};

/// So many GPUs, each two joined as `by` says.
fn joined(count: u32, by: impl Fn(u32, u32) -> Option<Join>) -> Inventory {
    let pairs = (0..count).flat_map(|low| (low + 1..count).map(move |high| (low, high)));
    let links = pairs.filter_map(|(low, high)| Some(Link(low, high, by(low, high)?))).collect();
    Inventory { links, ..host((0..count).map(device).collect()) }
}

/// Four: bridges of `NVLink` join 0 with 2 and 1 with 3; 0 and 1 are of one NUMA node.
fn bridged() -> Inventory {
    joined(4, |low, high| {
        let numa = if low / 2 == high / 2 { Join::HostBridge } else { Join::System };
        Some(if high - low == 2 { Join::Nvlink } else { numa })
    })
}

/// The GPUs that `any:<count>` gets beside `leases`.
fn any(count: u32, mode: Mode, inventory: &Inventory, leases: Vec<Lease>) -> Vec<String> {
    let devices = Devices::Any(NonZeroU32::new(count).unwrap());
    placed(&Request { devices, ..request(mode) }, inventory, &ledger(leases)).unwrap().devices
}

fn gpus(numbers: &[u32]) -> Vec<String> {
    numbers.iter().map(|number| format!("GPU-{number}")).collect()
}

#[test]
fn gpus_that_are_joined_closely_go_together() {
    let host = bridged();
    assert_eq!(any(2, Mode::Exclusive, &host, vec![]), gpus(&[0, 2]));
    assert_eq!(any(2, Mode::Exclusive, &host, vec![lease(1, "GPU-0")]), gpus(&[1, 3]));
    // Neither bridge is whole: GPUs of one NUMA node.
    let held = vec![lease(1, "GPU-0"), lease(2, "GPU-1")];
    assert_eq!(any(2, Mode::Exclusive, &host, held), gpus(&[2, 3]));
    // Three of four: with both that are joined by NVLink, and the third of a node with one of them.
    assert_eq!(any(3, Mode::Exclusive, &host, vec![]), gpus(&[0, 1, 2]));
    let group = |low: u32, high: u32| Some(if low / 4 == high / 4 { Join::Switch } else { Join::System });
    let eight = joined(8, group);
    assert_eq!(any(4, Mode::Exclusive, &eight, vec![lease(1, "GPU-1")]), gpus(&[4, 5, 6, 7]));
}

#[test]
fn use_and_names_decide_before_joins() {
    let host = bridged();
    // A GPU that is in use is taken first, and then the one that is joined with it.
    assert_eq!(any(2, Mode::TimeSlice, &host, vec![lease(1, "GPU-3")]), gpus(&[1, 3]));
    let held = vec![lease(1, "GPU-0"), lease(2, "GPU-3")];
    assert_eq!(any(2, Mode::TimeSlice, &host, held), gpus(&[0, 3]), "however they are joined");
    // And who names them gets those.
    let devices = Devices::These(vec![Selector::Index(0), Selector::Index(1)]);
    let named = Request { devices, ..request(Mode::Exclusive) };
    assert_eq!(placed(&named, &host, &ledger(vec![])).unwrap().devices, gpus(&[0, 1]));
}

#[test]
fn where_all_are_joined_alike_or_nothing_is_known_nothing_changes() {
    let alike = joined(8, |_, _| Some(Join::Nvlink));
    for host in [alike, joined(8, |_, _| None)] {
        for count in 2..8 {
            let first: Vec<u32> = (0..count).collect();
            assert_eq!(any(count, Mode::Exclusive, &host, vec![]), gpus(&first));
        }
    }
    // Of one pair alone the driver tells.
    let one = joined(4, |low, high| ((low, high) == (1, 3)).then_some(Join::System));
    assert_eq!(any(2, Mode::Exclusive, &one, vec![]), gpus(&[1, 3]), "what is not known is no closer");
}

#[test]
fn the_longest_way_is_named_if_all_are_known() {
    let host = bridged();
    assert_eq!(host.widest_join(&[2, 0]), Some(Join::Nvlink));
    assert_eq!(host.widest_join(&[0, 1, 2]), Some(Join::System));
    assert_eq!((host.widest_join(&[0]), host.widest_join(&[])), (None, None));
    assert_eq!(host.widest_join(&[0, 9]), None);
    let text = serde_json::to_string(&host.links[..2]).unwrap();
    assert_eq!(text, r#"[[0,1,"host-bridge"],[0,2,"nvlink"]]"#);
    assert_eq!(serde_json::from_str::<Vec<Link>>(&text).unwrap(), host.links[..2]);
}
