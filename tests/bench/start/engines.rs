//! `docker run` and `podman run`, where those engines are installed.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use sublet_e2e::docker::Docker;
use sublet_e2e::podman::{self, Podman};
use sublet_e2e::{World, docker};

use crate::by_hand::in_path;
use crate::rows::{Group, Row, WARM_UP};
use crate::scene::{self, HIGHER, TIME_SLICE, WARM};

const PAUSE: Duration = Duration::from_millis(50);

/// Containers by the engines that are there, each with a driver, storage and state of its own.
pub fn measure(real: bool, rounds: usize) -> Result<Vec<Group>> {
    let mut groups = Vec::new();
    if in_path("dockerd").is_some() {
        let docker = Docker::up(scene::world(real), &json!({}));
        let run = |words: &[&str]| {
            let runtime = if words.is_empty() { "--runtime=runc" } else { "--runtime=sublet" };
            let image = [docker::IMAGE, "/bin/true"];
            let done = docker.cli(&[&["run", "--rm", "--network=none", runtime], words, &image].concat());
            ensure!(done.ok, "docker run: {}", done.stderr);
            Ok(())
        };
        groups.push(group("`docker run --rm` of `/bin/true`", "1.03 x", rounds, &docker.world, run)?);
    }
    if in_path("podman").is_some() {
        let podman = Podman::up(scene::world(real));
        let run = |words: &[&str]| {
            let image = [podman::IMAGE, "/bin/true"];
            let done = podman.cli(&[&["run", "--rm", "--network=none"], words, &image].concat());
            ensure!(done.ok, "podman run: {}", done.stderr);
            Ok(())
        };
        let title = "`podman run --rm` of `/bin/true`, with the hook";
        groups.push(group(title, "1.05 x", rounds, &podman.world, run)?);
    }
    Ok(groups)
}

/// Annotations.
type Share = &'static [(&'static str, &'static str)];

fn group(
    title: &'static str,
    goal: &'static str,
    rounds: usize,
    world: &World,
    run: impl Fn(&[&str]) -> Result<()>,
) -> Result<Group> {
    let words = |share: Share| -> Vec<String> {
        share.iter().map(|(key, value)| format!("--annotation={key}={value}")).collect()
    };
    let mut group = Group { title, rows: vec![] };
    // A device has one use at a time: time-slice first, then MPS beside a container that keeps the daemon warm.
    let sets: [&[(&str, Share)]; 2] = [
        &[("bare", &[]), ("time-slice", TIME_SLICE)],
        &[("bare, again", &[]), ("MPS, daemon warm", WARM), ("MPS, the SM ceiling rises and falls", HIGHER)],
    ];
    for (nth, set) in sets.into_iter().enumerate() {
        let holder = (nth == 1).then(|| world.bundle("holder-of-engines", WARM, &["/bin/sleep", "86400"]));
        if let Some(holder) = &holder {
            holder.up();
        }
        let mut rows: Vec<Row> = set
            .iter()
            .map(|(what, share)| Row::new(*what, if share.is_empty() { "" } else { goal }))
            .collect();
        for round in 0..rounds + WARM_UP {
            for turn in 0..set.len() {
                let at = (round + turn) % set.len();
                let words = words(set[at].1);
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                sleep(PAUSE);
                let begun = Instant::now();
                run(&words)?;
                rows[at].times.push(vec![begun.elapsed()]);
            }
        }
        if let Some(holder) = &holder {
            holder.down();
        }
        group.rows.extend(rows);
    }
    Ok(group)
}
