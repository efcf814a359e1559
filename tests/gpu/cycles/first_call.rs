//! From the spawn of `create` to a container's first CUDA context, in each mode: with its MPS server up already (warm) and
//! not (cold), beside plain runc or crun with the same nodes and driver files written by hand.

use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_e2e::{Bundle, World};

use super::plan::Share;

const ROUNDS: usize = 7;
const HOLD: [&str; 3] = ["/usr/bin/cuda-probe", "hold", "20"];

const TIME_SLICE: Share = &[("sublet.mode", "time-slice")];
const MPS: Share = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
const HIGHER: Share = &[("sublet.sm", "50"), ("sublet.memory", "8GiB")];
const DEDICATED: Share = &[("sublet.isolation", "dedicated"), ("sublet.sm", "25"), ("sublet.memory", "8GiB")];

pub(super) fn table(world: &World) {
    let whole = whole(world);
    println!("\nFrom `create` to the first CUDA context, medians of {ROUNDS} rounds in turns, ms:\n");
    println!("| | median | least | most | of plain |\n|---|---|---|---|---|");
    let mut rows: Vec<(&str, Vec<f64>)> = Vec::new();
    for _ in 0..ROUNDS {
        note(&mut rows, "plain, the whole GPU by hand", || plain(world, &whole));
        note(&mut rows, "time-slice", || timed(&world.bundle("first", TIME_SLICE, &HOLD)));
        note(&mut rows, "exclusive", || {
            timed(&world.bundle("first", &[("sublet.mode", "exclusive")], &HOLD))
        });
        note(&mut rows, "shared MPS, cold", || timed(&world.bundle("first", MPS, &HOLD)));
        note(&mut rows, "shared MPS, warm", || beside(world, MPS));
        note(&mut rows, "shared MPS, warm, the ceiling rises", || beside(world, HIGHER));
        note(&mut rows, "an MPS server of its own, cold", || timed(&world.bundle("first", DEDICATED, &HOLD)));
    }
    let base = median(&rows[0].1);
    for (name, times) in &rows {
        let (least, most) =
            (times.iter().copied().fold(f64::MAX, f64::min), times.iter().copied().fold(0.0, f64::max));
        let middle = median(times);
        println!("| {name} | {middle:.0} | {least:.0} | {most:.0} | {:.2} |", middle / base);
    }
}

fn note(rows: &mut Vec<(&'static str, Vec<f64>)>, name: &'static str, time: impl FnOnce() -> Duration) {
    let took = time().as_secs_f64() * 1000.0;
    match rows.iter_mut().find(|(other, _)| *other == name) {
        Some((_, times)) => times.push(took),
        None => rows.push((name, vec![took])),
    }
}

/// The daemon ends with its last lease, so the next one that needs it finds none.
fn timed(bundle: &Bundle<'_>) -> Duration {
    let began = Instant::now();
    bundle.up();
    let took = first_call(bundle, began);
    bundle.down();
    bundle.world().stop_waiting();
    took
}

/// With another container of the same server, which has a context.
fn beside(world: &World, share: Share) -> Duration {
    let other = world.bundle("other", MPS, &HOLD);
    other.up();
    let _ = other.event("info");
    let took = timed(&world.bundle("first", share, &HOLD));
    other.down();
    world.stop_waiting();
    took
}

fn plain(world: &World, whole: &Value) -> Duration {
    let mut bundle = world.bundle("plain", &[], &HOLD);
    bundle.plain = true;
    for part in ["devices", "resources"] {
        bundle.spec["linux"][part] = whole["linux"][part].clone();
    }
    bundle.spec["mounts"] = whole["mounts"].clone();
    timed(&bundle)
}

/// config.json of a container that has the GPU without MPS.
fn whole(world: &World) -> Value {
    let bundle = world.bundle("template", TIME_SLICE, &["/bin/sleep", "1"]);
    let created = bundle.create();
    assert!(created.ok, "create template: {}", created.stderr);
    let config = bundle.config();
    bundle.down();
    config
}

/// `Bundle::event` looks every 10 ms, which is too seldom for a time.
fn first_call(bundle: &Bundle<'_>, began: Instant) -> Duration {
    let deadline = began + Duration::from_secs(20);
    while !bundle.output().contains("\"event\":\"info\"") {
        assert!(Instant::now() < deadline, "container {} makes no context", bundle.id);
        std::thread::sleep(Duration::from_micros(300));
    }
    let took = began.elapsed();
    assert!(bundle.event("info")["error"].is_null(), "{}", bundle.output());
    took
}

fn median(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
