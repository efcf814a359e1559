//! One share through the shim and through each hook, for root's container and for one in a user
//! namespace: what the first process, an exec'd one and one without an environment get. A shared server has no
//! other lease here: its ceiling is the share.

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World};

use super::{HOLD, PROBE, Table, number};

/// MiB of `sublet.memory`.
const LIMIT: u64 = 8192;

/// How a bundle gets its share.
#[derive(Clone, Copy, PartialEq)]
enum EntryPoint {
    Shim,
    Precreate,
    Late(&'static str),
}

pub fn table(world: &World, table: &mut Table) {
    let entry_points = [
        ("shim", EntryPoint::Shim, "shared"),
        ("shim", EntryPoint::Shim, "dedicated"),
        ("precreate", EntryPoint::Precreate, "shared"),
        ("precreate", EntryPoint::Precreate, "dedicated"),
        ("prestart", EntryPoint::Late("prestart"), "dedicated"),
        ("createRuntime", EntryPoint::Late("createRuntime"), "dedicated"),
    ];
    for (name, entry_point, isolation) in entry_points {
        for mapped in [false, true] {
            let bundle = start(world, entry_point, isolation, mapped);
            let who = if mapped { "user namespace" } else { "root" };
            let heading = format!("{name}, {isolation}, {who}");
            let path = ["PATH=/usr/bin:/bin"];
            let seen = [
                ("first process", bundle.event("info")),
                ("exec'd", first(&bundle.exec_file(&[PROBE, "info"], &path))),
                ("exec'd, env -i", first(&bundle.exec(&["/bin/env", "-i", PROBE, "info"]))),
            ];
            for (process, info) in seen {
                row(table, &format!("{heading}: {process}"), &info);
            }
            nodes(table, &heading, &bundle, mapped);
            bundle.down();
        }
    }
}

fn start<'a>(world: &'a World, entry_point: EntryPoint, isolation: &str, mapped: bool) -> Bundle<'a> {
    let share = [("sublet.sm", "25"), ("sublet.memory", "8GiB"), ("sublet.isolation", isolation)];
    let mut bundle = world.bundle("door", &share, HOLD);
    if mapped {
        bundle.map_users();
    }
    match entry_point {
        EntryPoint::Shim => {}
        EntryPoint::Precreate => bundle.precreate(),
        EntryPoint::Late(stage) => bundle.hook(&[stage, "poststop"]),
    }
    bundle.up();
    bundle
}

/// What a probe that was exec'd prints, or why it printed nothing.
fn first(done: &Finished) -> Value {
    done.json().into_iter().next().unwrap_or_else(|| json!({"error": done.stderr.trim()}))
}

fn row(table: &mut Table, check: &str, info: &Value) {
    let (sms, free, want) = (number(info, "sm"), number(info, "free_mib"), table.sms_at(25_000));
    let within = free < LIMIT && free + 600 > LIMIT;
    table.row(
        check,
        format!("{want} SMs, free just under {LIMIT} MiB"),
        format!(
            "{sms} SMs, {free} MiB free, mps {}{}",
            info["mps"],
            info["error"].as_str().unwrap_or_default()
        ),
        sms == want && within && info["mps"] == json!(true),
    );
}

/// The container's nodes open, and another GPU's does not: its cgroup says no, or the user namespace
/// does to mknod.
fn nodes(table: &mut Table, heading: &str, bundle: &Bundle<'_>, mapped: bool) {
    let script = "rm -f /tmp/other; mknod /tmp/other c 195 200 2>/dev/null || echo no mknod; \
                  /usr/bin/cuda-probe noderights /dev/nvidiactl /tmp/other";
    let seen = bundle.exec(&["/bin/sh", "-c", script]);
    let results: Vec<Value> = seen
        .json()
        .iter()
        .filter(|line| line["event"] == "node")
        .map(|line| line["result"].clone())
        .collect();
    let made = !seen.stdout.starts_with("no mknod");
    // The simulated driver's nodes have nothing behind them.
    let [control, other] = &results[..] else {
        return table.row(&format!("{heading}: nodes"), "two answers", seen.stderr.trim(), false);
    };
    let opens = matches!(control.as_str(), Some("ok" | "ENXIO"));
    table.row(
        &format!("{heading}: /dev/nvidiactl, a node of another number"),
        if mapped { "opens, no mknod" } else { "opens, EPERM" },
        format!("{control}, {}", if made { other.to_string() } else { "no mknod".into() }),
        opens && if mapped { !made } else { *other == json!("EPERM") },
    );
}
