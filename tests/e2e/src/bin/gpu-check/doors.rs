//! One share through the shim and through each hook, for root's container and for one in a user
//! namespace: what the first process, an exec'd one and one without an environment get.

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World};

use super::{HOLD, PROBE, Table, number};

/// MiB of `sublet.memory`.
const LIMIT: u64 = 8192;

/// How a bundle gets its share.
#[derive(Clone, Copy, PartialEq)]
enum Door {
    Shim,
    Precreate,
    Late(&'static str),
}

/// Which limits hold a process.
#[derive(Clone, Copy)]
enum Held {
    /// SMs and memory of the share.
    Share,
    /// The SM ceiling of the shared server: the memory limit is in an environment that it has not.
    Ceiling,
}

pub fn table(world: &World, table: &mut Table) {
    // (door, isolation, what holds an exec'd process, one with an empty environment)
    let doors = [
        ("shim", Door::Shim, "shared", Held::Share, Held::Ceiling),
        ("shim", Door::Shim, "dedicated", Held::Share, Held::Share),
        ("precreate", Door::Precreate, "shared", Held::Ceiling, Held::Ceiling),
        ("precreate", Door::Precreate, "dedicated", Held::Share, Held::Share),
        ("prestart", Door::Late("prestart"), "dedicated", Held::Share, Held::Share),
        ("createRuntime", Door::Late("createRuntime"), "dedicated", Held::Share, Held::Share),
    ];
    for (name, door, isolation, exec, bare) in doors {
        for mapped in [false, true] {
            let bundle = start(world, door, isolation, mapped);
            let who = if mapped { "user namespace" } else { "root" };
            let heading = format!("{name}, {isolation}, {who}");
            let path = ["PATH=/usr/bin:/bin"];
            let seen = [
                ("first process", Held::Share, bundle.event("info")),
                ("exec'd", exec, first(&bundle.exec_file(&[PROBE, "info"], &path))),
                ("exec'd, env -i", bare, first(&bundle.exec(&["/bin/env", "-i", PROBE, "info"]))),
            ];
            for (process, held, info) in seen {
                row(table, &format!("{heading}: {process}"), held, &info);
            }
            nodes(table, &heading, &bundle, mapped);
            bundle.down();
        }
    }
}

fn start<'a>(world: &'a World, door: Door, isolation: &str, mapped: bool) -> Bundle<'a> {
    let share = [("sublet.sm", "25"), ("sublet.memory", "8GiB"), ("sublet.isolation", isolation)];
    let mut bundle = world.bundle("door", &share, HOLD);
    if mapped {
        bundle.map_users();
    }
    match door {
        Door::Shim => {}
        Door::Precreate => bundle.precreate(),
        Door::Late(stage) => bundle.hook(&[stage, "poststop"]),
    }
    bundle.up();
    bundle
}

/// What a probe that was exec'd prints, or why it printed nothing.
fn first(done: &Finished) -> Value {
    done.json().into_iter().next().unwrap_or_else(|| json!({"error": done.stderr.trim()}))
}

fn row(table: &mut Table, check: &str, held: Held, info: &Value) {
    let (sms, free, want) = (number(info, "sm"), number(info, "free_mib"), table.sms_at(25_000));
    let within = free < LIMIT && free + 600 > LIMIT;
    let (expected, memory_ok) = match held {
        Held::Share => (format!("{want} SMs, free just under {LIMIT} MiB"), within),
        Held::Ceiling => (format!("{want} SMs, no memory limit"), free > LIMIT),
    };
    table.row(
        check,
        expected,
        format!(
            "{sms} SMs, {free} MiB free, mps {}{}",
            info["mps"],
            info["error"].as_str().unwrap_or_default()
        ),
        sms == want && memory_ok && info["mps"] == json!(true),
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
