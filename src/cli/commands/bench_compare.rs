//! `sublet bench compare`: two results, cell by cell.

use std::path::PathBuf;
use std::process::ExitCode;

use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Column, Format};
use crate::bench::{BenchResult, Cell, Mode, Sharing, digits};
use sublet_core::text::safe;

/// Arguments of `sublet bench compare`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A result; `published` is the comparison on an A100 that the authors of nos (github.com/nebuly-ai/nos)
    /// published
    a: PathBuf,
    /// Another
    b: PathBuf,
    /// Aligned columns or one JSON document
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What is printed as JSON: keys may be added, never changed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "BenchComparison")]
pub struct Comparison {
    /// `sublet.bench-comparison/1`.
    schema: &'static str,
    /// Title and GPU of both.
    results: [String; 2],
    cells: Vec<Pair>,
}

/// One cell of the grid in both results. Null: a result has not got it.
#[derive(Serialize, JsonSchema)]
struct Pair {
    load: String,
    /// As on the command line: `mps:20`.
    mode: String,
    n: u32,
    by_hand: bool,
    /// Milliseconds.
    mean_ms: [Option<f64>; 2],
    /// The second mean divided by the first.
    mean_ratio: Option<f64>,
    /// The second 99th percentile divided by the first.
    p99_ratio: Option<f64>,
    /// The second throughput divided by the first.
    throughput_ratio: Option<f64>,
    /// Each mean divided by that of one container with the whole GPU, of the same result: so different GPUs compare.
    times_alone: [Option<f64>; 2],
}

/// Runs it.
pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let (a, b) = (BenchResult::of(&arguments.a)?, BenchResult::of(&arguments.b)?);
    let comparison = compare(&a, &b);
    tables::print(arguments.format, &comparison, || shown(&comparison, tables::terminal_width()))?;
    Ok(ExitCode::SUCCESS)
}

fn compare(a: &BenchResult, b: &BenchResult) -> Comparison {
    // Two results of one load each are of the same load, whatever they call it.
    let only = |result: &BenchResult| match result.loads()[..] {
        [only] => Some(only.to_owned()),
        _ => None,
    };
    let other = only(a).and(only(b));
    let pairs = |load: &str| other.clone().unwrap_or_else(|| load.to_owned());
    let mut cells: Vec<Pair> = Vec::new();
    for cell in &a.cells {
        let paired = b.cell(&pairs(&cell.load), &cell.mode, cell.n, cell.by_hand);
        cells.push(pair(cell, [Some((a, cell)), paired.map(|paired| (b, paired))]));
    }
    for cell in &b.cells {
        let load = a.loads().into_iter().find(|load| pairs(load) == cell.load);
        let has = load.is_some_and(|load| a.cell(load, &cell.mode, cell.n, cell.by_hand).is_some());
        if !has {
            cells.push(pair(cell, [None, Some((b, cell))]));
        }
    }
    let name = |result: &BenchResult| format!("{}, {}", safe(&result.title), safe(&result.machine.gpu));
    Comparison { schema: "sublet.bench-comparison/1", results: [name(a), name(b)], cells }
}

fn pair(cell: &Cell, both: [Option<(&BenchResult, &Cell)>; 2]) -> Pair {
    let measured = both.map(|one| one.and_then(|(_, cell)| cell.measured.as_ref()));
    let ratio = |of: fn(&crate::bench::Measured) -> Option<f64>| {
        let [a, b] = measured.map(|one| one.and_then(of));
        a.zip(b).filter(|(a, _)| *a > 0.0).map(|(a, b)| round(b / a))
    };
    let times_alone = both.map(|one| {
        let (result, cell) = one?;
        let alone = alone(result, &cell.load).filter(|alone| *alone > 0.0)?;
        Some(round(cell.measured.as_ref()?.mean_ms / alone))
    });
    Pair {
        load: cell.load.clone(),
        mode: cell.mode.to_string(),
        n: cell.n,
        by_hand: cell.by_hand,
        mean_ms: measured.map(|one| one.map(|one| one.mean_ms)),
        mean_ratio: ratio(|one| Some(one.mean_ms)),
        p99_ratio: ratio(|one| one.p99_ms),
        throughput_ratio: ratio(|one| one.per_second),
        times_alone,
    }
}

/// The mean of one container with the whole GPU.
fn alone(result: &BenchResult, load: &str) -> Option<f64> {
    let whole = [Sharing::Exclusive, Sharing::TimeSlice, Sharing::Mps, Sharing::Dedicated];
    whole.into_iter().find_map(|sharing| {
        let mode = Mode { sharing, sm: None, profile: None };
        Some(result.cell(load, &mode, 1, false)?.measured.as_ref()?.mean_ms)
    })
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

const COLUMNS: [Column; 9] = [
    Column("LOAD", 0),
    Column("MODE", 0),
    Column("N", 0),
    Column("A ms", 3),
    Column("B ms", 3),
    Column("B/A", 0),
    Column("p99 B/A", 5),
    Column("A/ALONE", 2),
    Column("B/ALONE", 2),
];

fn shown(comparison: &Comparison, width: Option<usize>) -> String {
    let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), digits);
    let row = |pair: &Pair| {
        let by_hand = if pair.by_hand { ", by hand" } else { "" };
        vec![
            safe(&pair.load),
            format!("{}{by_hand}", pair.mode),
            pair.n.to_string(),
            number(pair.mean_ms[0]),
            number(pair.mean_ms[1]),
            number(pair.mean_ratio),
            number(pair.p99_ratio),
            number(pair.times_alone[0]),
            number(pair.times_alone[1]),
        ]
    };
    let rows: Vec<_> = comparison.cells.iter().map(row).collect();
    let [a, b] = &comparison.results;
    let table = tables::fitted(&COLUMNS, &rows, width).unwrap_or_else(|| listed(&rows, width));
    format!("{}\n\n{table}", tables::wrapped(&format!("A: {a}\nB: {b}"), width))
}

/// For a terminal on which the table has no room.
fn listed(rows: &[Vec<String>], width: Option<usize>) -> String {
    let row = |row: &Vec<String>| {
        let title = tables::wrapped(&format!("{}, {}, {} at once", row[0], row[1], row[2]), width);
        format!("{title}\n  A ms {}\n  B ms {}\n  B/A  {}", row[3], row[4], row[5])
    };
    rows.iter().map(row).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fixture;
    use std::path::Path;

    #[test]
    fn cells_are_paired_and_what_only_one_has_is_kept() {
        let a = fixture::result();
        let mut b = fixture::result();
        for cell in &mut b.cells {
            cell.load = "http".to_owned();
            if let Some(measured) = &mut cell.measured {
                measured.mean_ms *= 2.0;
            }
        }
        b.cells.retain(|cell| cell.n != 3);
        b.cells[0].n = 9;
        let found = compare(&a, &b);
        assert_eq!(found.cells.len(), a.cells.len() + 1);
        let seven = found.cells.iter().find(|pair| pair.mode == "mps" && pair.n == 7).unwrap();
        assert_eq!((seven.mean_ms, seven.mean_ratio), ([Some(29.6), Some(59.2)], Some(2.0)));
        assert_eq!(seven.times_alone[0], Some(4.111));
        let last = found.cells.last().unwrap();
        assert_eq!((last.n, last.mean_ms[0], last.mean_ratio), (9, None, None));
        let text = shown(&found, Some(20));
        assert!(
            text.contains("\ncommand, mps, 7 at\nonce\n  A ms 29.6\n  B ms 59.2\n  B/A  2.00\n"),
            "{text}"
        );
        let text = shown(&found, Some(40));
        assert!(text.contains("B/A") && !text.contains("ALONE"), "{text}");
    }

    #[test]
    fn the_published_numbers_are_shipped() {
        let published = BenchResult::of(Path::new("published")).unwrap();
        assert!(published.source.is_some());
        let found = compare(&published, &fixture::result());
        let seven = found.cells.iter().find(|pair| pair.mode == "time-slice" && pair.n == 7).unwrap();
        assert_eq!(seven.times_alone, [Some(7.766), Some(7.625)]);
    }
}
