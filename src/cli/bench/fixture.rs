//! A small result for tests.

use super::plan::mode;
use super::result::{BenchResult, Cell, Machine, Measured, SCHEMA, Settings};

/// Mode, by hand, and the mean in ms for each number.
type Row = (&'static str, bool, &'static [(u32, f64)]);

/// Mean in ms of three modes and a base line by hand.
pub fn result() -> BenchResult {
    let rows: [Row; 4] = [
        ("time-slice", false, &[(1, 7.2), (3, 23.7), (7, 54.9)]),
        ("time-slice", true, &[(7, 54.86)]),
        ("mps", false, &[(1, 7.2), (3, 14.0), (7, 29.6)]),
        ("mps:20", false, &[(1, 23.3), (3, 24.4), (7, 32.1)]),
    ];
    let cells = rows.iter().flat_map(|(name, by_hand, points)| {
        points.iter().map(move |(n, mean_ms)| Cell {
            load: "command".to_owned(),
            mode: mode(name).unwrap(),
            n: *n,
            by_hand: *by_hand,
            overcommitted: *name == "mps:20" && *n == 7,
            error: None,
            measured: Some(Measured {
                mean_ms: *mean_ms,
                p99_ms: Some(mean_ms * 1.1),
                per_second: Some(f64::from(*n) * 1000.0 / mean_ms),
                fairness: Some(0.98),
                ..Measured::default()
            }),
        })
    });
    BenchResult {
        schema: SCHEMA.to_owned(),
        title: "YOLOS-small".to_owned(),
        simulated: false,
        in_use_by_others: false,
        time: "2026-11-23T18:54:23Z".to_owned(),
        source: None,
        machine: Machine {
            gpu: "NVIDIA H200".to_owned(),
            driver: Some("580.159.04".to_owned()),
            ..Machine::default()
        },
        settings: Settings::default(),
        cells: cells.collect(),
    }
}
