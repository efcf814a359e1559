//! Single calls, each of which ends in `/bin/true` in the low-level runtime's place.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use sublet_e2e::Bundle;

use crate::rows::{Group, Row, WARM_UP};
use crate::scene::{Build, ID, Scene, TIME_SLICE, WARM, create};

/// Calls on a host whose GPU nobody uses.
pub fn without_daemon(scene: &Scene, rounds: usize) -> Result<Group> {
    let plain = scene.bundle("plain", &[]);
    let shared = scene.bundle("slice", TIME_SLICE);
    let mut rows = base();
    for build in &scene.builds {
        rows.push(Row::new(format!("`sublet-runtime state`, passed through{}", build.name), "+0.35 ms"));
        rows.push(Row::new(format!("`create`, no annotation, passed through{}", build.name), "+0.35 ms"));
        rows.push(Row::new(format!("`create`, time-slice{}", build.name), "+1.0 ms"));
    }
    for round in 0..rounds + WARM_UP {
        plain.write();
        let mut turns: Vec<Turn<'_>> = scene
            .builds
            .iter()
            .flat_map(|build| {
                [
                    Turn { build: Some(build), words: vec!["state", ID], shared: None },
                    Turn { build: Some(build), words: create(&plain).to_vec(), shared: None },
                    Turn { build: Some(build), words: create(&shared).to_vec(), shared: Some(&shared) },
                ]
            })
            .collect();
        take_turns(scene, &mut rows, &mut turns, round)?;
    }
    ensure!(plain.config() == plain.spec, "the container without annotations was touched");
    ensure!(shared.config() != shared.spec, "no share was given");
    Ok(Group { title: "Single calls, low-level runtime = `/bin/true`", rows })
}

/// Calls while another container keeps the daemon warm.
pub fn with_daemon(scene: &Scene, rounds: usize) -> Result<Group> {
    let shared = scene.bundle("shared", WARM);
    let mut rows = base();
    for build in &scene.builds {
        rows.push(Row::new(format!("`create`, sm=25 memory=8GiB, daemon warm{}", build.name), "+1.0 ms"));
    }
    for round in 0..rounds + WARM_UP {
        let turn =
            |build| Turn { build: Some(build), words: create(&shared).to_vec(), shared: Some(&shared) };
        let mut turns: Vec<Turn<'_>> = scene.builds.iter().map(turn).collect();
        take_turns(scene, &mut rows, &mut turns, round)?;
    }
    ensure!(shared.config() != shared.spec, "no share was given");
    Ok(Group { title: "Single calls, MPS, low-level runtime = `/bin/true`", rows })
}

fn base() -> Vec<Row> {
    vec![
        Row::new("`/bin/true` alone", ""),
        Row::new("`busybox env /bin/true`: a static C program that only execs", ""),
    ]
}

/// A call of the shim of `build`; `None`: of neither.
struct Turn<'a> {
    build: Option<&'a Build>,
    words: Vec<&'a str>,
    /// Its bundle, which the call before has edited.
    shared: Option<&'a Bundle<'a>>,
}

/// Each takes its turn to be first in a round, because the first finds the caches full of other data.
fn take_turns(scene: &Scene, rows: &mut [Row], turns: &mut Vec<Turn<'_>>, round: usize) -> Result<()> {
    for words in [vec!["/bin/true"], vec!["busybox", "env", "/bin/true"]].into_iter().rev() {
        turns.insert(0, Turn { build: None, words, shared: None });
    }
    let mut order: Vec<_> = rows.iter_mut().zip(turns.iter()).collect();
    let length = order.len();
    order.rotate_left(round % length);
    // What comes before a row is not always the same either.
    if round % 2 == 1 {
        order.reverse();
    }
    for (row, turn) in order {
        if let Some(shared) = turn.shared {
            // The lease of the call before is of a container that never came to be.
            scene.collect()?;
            shared.write();
        }
        row.times.push(vec![call(scene, turn)?]);
    }
    Ok(())
}

fn call(scene: &Scene, turn: &Turn<'_>) -> Result<Duration> {
    let command = match turn.build {
        Some(build) => scene.shim(build, &turn.words)?,
        None => scene.quiet(Command::new(turn.words[0]).args(&turn.words[1..]))?,
    };
    scene.timed(command)
}
