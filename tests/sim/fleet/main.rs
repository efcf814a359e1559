//! How full a fleet gets: jobs arrive, run and end on four nodes of eight H200, by whole GPUs, by MIG instances and by
//! sublet's shares. Shares are placed by the product's own code, MIG instances where the driver allows them. Everything
//! is whole numbers from one seed: each run gives the same table and picture, which docs/evidence and docs/pictures have.

mod cluster;
mod jobs;
mod mig;
mod node;
mod picture;

use std::fmt::Write as _;
use std::path::Path;

use cluster::{Outcome, run};
use jobs::{MIXES, Mix};
use node::Way;

/// Work that arrives, in percent of what the fleet's SMs could do.
const LOADS: [u32; 5] = [50, 75, 100, 125, 150];

/// One mix: the outcome of each way at each of [`LOADS`].
struct Panel {
    mix: &'static Mix,
    lines: Vec<(Way, Vec<Outcome>)>,
}

fn panel(mix: &'static Mix) -> Panel {
    let line = |way: Way| (way, LOADS.map(|load| run(mix, way, load)).to_vec());
    Panel { mix, lines: Way::ALL.map(line).to_vec() }
}

fn panels() -> Vec<Panel> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = MIXES.iter().map(|mix| scope.spawn(move || panel(mix))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A value in tenths, as `71.3`.
fn tenths(value: u64) -> String {
    format!("{}.{}", value / 10, value % 10)
}

/// The tables of docs/evidence, in markdown.
fn tables(panels: &[Panel]) -> String {
    let mut out = String::from(
        "| mix | way | at 50 % | 75 % | 100 % | 125 % | 150 % |\n|---|---|---|---|---|---|---|\n",
    );
    for panel in panels {
        for (way, outcomes) in &panel.lines {
            let cells: Vec<String> = outcomes.iter().map(|one| tenths(one.used_tenths)).collect();
            let _ = writeln!(out, "| {} | {} | {} |", panel.mix.name, way.title(), cells.join(" | "));
        }
    }
    out += "\n| mix | way | jobs | refused | SMs free then | tries that a node refused |\n|---|---|---|---|---|---|\n";
    for panel in panels {
        for (way, outcomes) in &panel.lines {
            let one = &outcomes[LOADS.iter().position(|load| *load == 100).unwrap_or_default()];
            let misled = if way.counts() { tenths(one.misled_tenths) + " %" } else { "-".to_owned() };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} % | {} % | {misled} |",
                panel.mix.name,
                way.title(),
                one.jobs,
                tenths(one.refused_tenths),
                tenths(one.stranded_tenths)
            );
        }
    }
    out
}

#[test]
fn the_table_and_the_picture_that_are_kept_are_those_of_the_seed() {
    let panels = panels();
    for (way, outcomes) in panels.iter().flat_map(|panel| &panel.lines) {
        for (load, one) in LOADS.into_iter().zip(outcomes) {
            // Jobs of before the counting run on into it.
            assert!(
                one.used_tenths <= u64::from(load) * 10 + 20 && one.used_tenths <= 1000,
                "{way:?}: {one:?}"
            );
        }
    }
    let (tables, picture) = (tables(&panels), picture::svg(&panels));
    let made = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(made.join("fleet.md"), &tables).unwrap();
    std::fs::write(made.join("fleet.svg"), &picture).unwrap();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let kept = |file: &str| std::fs::read_to_string(docs.join(file)).unwrap_or_default();
    let text = kept("evidence/2026-11-24-fleet.md");
    for line in tables.lines() {
        assert!(text.contains(line), "docs/evidence has not {line:?}; {} has all of it", made.display());
    }
    assert!(kept("pictures/fleet.svg") == picture, "docs/pictures/fleet.svg is not {}", made.display());
}
