//! The table "What may share a GPU with what" of docs/modes.md is true of [`place`]; and a refusal names the
//! container whose key would let both run.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use super::fixture::{GIB, device, host, part, request};
use super::tests::{leased, ledger, mps, placed, refused};
use super::*;
use crate::ledger::fixture::lease;
use crate::share::Selector;

const MODES: &str = include_str!("../../../docs/modes.md");
const SHARES: [&str; 6] =
    ["`time-slice`", "`mps`, shared", "`mps`, dedicated", "`exclusive`", "MIG device", "several GPUs"];

/// The cells of the table, by row and column.
fn table() -> BTreeMap<(&'static str, &'static str), &'static str> {
    let (_, section) = MODES.split_once("\n## What may share a GPU with what\n").unwrap();
    let rows =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let mut rows = rows.map(|line| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>());
    let columns = rows.next().unwrap();
    assert_eq!(columns[1..], SHARES);
    let cells = rows.skip(1).flat_map(|row| {
        let line: Vec<_> =
            columns.iter().zip(&row).skip(1).map(|(column, cell)| ((row[0], *column), *cell)).collect();
        line
    });
    cells.collect()
}

/// The share of a row, on GPU 0 or on a MIG device of it.
fn share(row: &str) -> Request {
    let on_gpu = |mode| Request { devices: Devices::These(vec![Selector::Index(0)]), ..request(mode) };
    match row {
        "`time-slice`" => on_gpu(Mode::TimeSlice),
        "`mps`, shared" => on_gpu(Mode::Mps),
        "`mps`, dedicated" => Request { isolation: Isolation::Dedicated, ..on_gpu(Mode::Mps) },
        "`exclusive`" => on_gpu(Mode::Exclusive),
        "MIG device" => on_instance(&request(Mode::Mig)),
        "several GPUs" => Request { devices: Devices::All, ..request(Mode::TimeSlice) },
        _ => unreachable!("{row}"),
    }
}

fn on_instance(request: &Request) -> Request {
    Request { mig: Some("1g.18gb".into()), devices: Devices::Any(NonZeroU32::MIN), ..request.clone() }
}

/// GPU 0 and 1; with `mig`, GPU 0 has two MIG devices.
fn gpus(mig: bool) -> Inventory {
    let gpu = Device { mig_enabled: mig, ..device(0) };
    let parts = if mig { vec![part(&gpu, 1, "1g.18gb"), part(&gpu, 2, "1g.18gb")] } else { vec![] };
    host([vec![gpu], parts, vec![device(1)]].concat())
}

/// Whether `late` is placed beside `early`, on GPU 0 as it is or in MIG mode.
fn both(early: &Request, late: &Request) -> bool {
    [false, true].into_iter().any(|mig| {
        let host = gpus(mig);
        let Ok(first) = placed(early, &host, &ledger(vec![])) else { return false };
        placed(late, &host, &ledger(vec![super::accounts_tests::lease_of(1, first)])).is_ok()
    })
}

/// `request` with the annotation of the cell `way_out`.
fn changed(request: &Request, way_out: &str) -> Request {
    match way_out {
        "isolation=dedicated" if request.mode == Some(Mode::Mps) => {
            Request { isolation: Isolation::Dedicated, ..request.clone() }
        }
        "mig=PROFILE" if request.mode != Some(Mode::Mig) => on_instance(request),
        _ => request.clone(),
    }
}

#[test]
fn the_table_of_pairs_that_may_share_is_true() {
    let table = table();
    assert_eq!(table.len(), SHARES.len() * SHARES.len());
    for ((row, column), cell) in &table {
        assert_eq!(table.get(&(*column, *row)), Some(cell), "whoever starts first: {row}, {column}");
        let (early, late) = (share(row), share(column));
        assert_eq!(both(&early, &late), *cell == "yes", "{row} beside {column}: {cell}");
        if let Some(way_out) = cell.strip_prefix("with `").and_then(|rest| rest.strip_suffix('`')) {
            let [early, late] = [early, late].map(|request| changed(&request, way_out));
            assert!(both(&early, &late), "{row} beside {column} {cell}");
        } else {
            assert!(["yes", "no"].contains(cell), "{cell}");
        }
    }
    assert_eq!(table.values().filter(|cell| **cell == "yes").count(), 11);
}

#[test]
fn several_gpus_with_limits_share_as_those_without() {
    let limited = Request { devices: Devices::All, ..mps(25_000, 8) };
    for row in SHARES {
        let beside = share(row);
        assert_eq!(both(&beside, &limited), both(&beside, &share("several GPUs")), "{row}");
    }
}

/// Leases 1 to `count` on the shared server of GPU 0, each of a container with a long id.
fn on_shared_server(count: u64) -> Ledger {
    let one = |n: u64| {
        let mut lease = leased(n, "GPU-0", 10_000, 8);
        lease.container.id = format!("{n}f2a9c1b2d4e5f60718293a4b5c6d7e8");
        lease
    };
    ledger((1..=count).map(one).collect())
}

#[test]
fn a_refusal_says_which_container_needs_a_server_of_its_own() {
    let host = host(vec![device(0)]);
    let dedicated = Request { isolation: Isolation::Dedicated, ..mps(25_000, 8) };
    let limited = Request { memory: Some(Memory::Bytes(GIB)), ..request(Mode::TimeSlice) };
    let one =
        "beside 1f2a9c1b2d4e it would fit if that container had sublet.isolation=dedicated, in turns with it";
    for wanted in [&request(Mode::TimeSlice), &limited, &dedicated] {
        let refusal = refused(wanted, &host, &on_shared_server(1));
        assert!(refusal.message.contains(one) && refusal.temporary, "{}", refusal.message);
    }
    let two = refused(&dedicated, &host, &on_shared_server(2)).message;
    let both = "beside 1f2a9c1b2d4e, 2f2a9c1b2d4e it would fit if those containers had \
                sublet.isolation=dedicated, in turns with them";
    assert!(two.contains(both), "{two}");
    // Nobody is advised to change a lease that they cannot change.
    let mut theirs = on_shared_server(2);
    theirs.leases[0].container.uid = 1001;
    let mut of_job = on_shared_server(1);
    of_job.leases[0].job = Some(crate::ledger::Job { id: 7, step: None, uid: 1000, cgroup_inode: 1 });
    for held in [theirs.seen_by(1000), of_job] {
        let message = refused(&dedicated, &host, &held).message;
        assert!(!message.contains("it would fit if"), "{message}");
    }
    // The other way round it is the new container's own key, whether or not it names its mode.
    let sliced = ledger(vec![lease(1, "GPU-0")]);
    for mode in [Some(Mode::Mps), None] {
        let wanted = Request { mode, default_mode: Mode::Mps, ..request(Mode::Mps) };
        let own = refused(&wanted, &host, &sliced).message;
        assert!(own.contains("; fix: sublet.isolation=dedicated fits now, in turns"), "{own}");
    }
}

#[test]
fn a_refusal_names_no_key_that_would_not_help() {
    let host = host(vec![device(0)]);
    let says_nothing = |wanted: &Request, held: &Ledger| {
        let message = refused(wanted, &host, held).message;
        assert!(!message.contains("sublet.isolation"), "{message}");
    };
    says_nothing(&request(Mode::Exclusive), &on_shared_server(1));
    says_nothing(
        &request(Mode::TimeSlice),
        &ledger(vec![Lease { mode: Mode::Exclusive, ..lease(1, "GPU-0") }]),
    );
    // Memory that the other one has stays booked.
    let large = Request { memory: Some(Memory::Bytes(95 * GIB)), ..request(Mode::TimeSlice) };
    says_nothing(&large, &on_shared_server(1));
    // More containers than may take turns.
    says_nothing(&request(Mode::TimeSlice), &on_shared_server(8));
}
