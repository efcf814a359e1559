//! `sublet bench show`: a result as a table, a picture or a page. `sublet bench compare`: two results, cell by cell.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Column, Format};
use crate::bench::{BenchResult, Cell, Figure, Measured, Mode, Sharing, digits, html, svg};
use crate::shown::bar;
use crate::terminal::utf8;
use sublet_core::text::safe;

/// Arguments of `sublet bench show`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// What sublet bench run wrote; "published": the comparison on an A100 that the authors of nos
    /// (github.com/nebuly-ai/nos) published
    result: PathBuf,
    /// Only this load; needed for a picture of a result with several
    #[arg(long)]
    load: Option<String>,
    /// Show every figure: percentiles, throughput, fairness, memory, energy
    #[arg(long)]
    details: bool,
    /// Write the picture: a figure against the number of containers, in light or dark as the reader's system is
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// What the picture shows
    #[arg(long, value_enum, default_value_t)]
    figure: Figure,
    /// Write a page with all pictures and figures, which needs no other file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Aligned columns or the JSON document
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Runs it.
///
/// # Errors
/// The file is no result, has not got the load, or a file cannot be written.
pub fn show(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let result = BenchResult::of(&arguments.result)?;
    let named = |loads: Vec<&str>| loads.into_iter().map(safe).collect::<Vec<_>>().join(", ");
    let mut loads = result.loads();
    loads.retain(|load| arguments.load.as_deref().is_none_or(|only| only == *load));
    if loads.is_empty() {
        bail!("{} has no such load; it has {}", arguments.result.display(), named(result.loads()));
    }
    if let Some(file) = &arguments.svg {
        let [load] = loads[..] else {
            bail!("a picture shows one load: choose with --load from {}", named(loads))
        };
        let picture = svg(&result, load, arguments.figure)
            .with_context(|| format!("no picture: no {} was measured", arguments.figure.title()))?;
        write(file, picture.as_bytes())?;
    }
    if let Some(file) = &arguments.html {
        write(file, html(&result)?.as_bytes())?;
    }
    match arguments.format {
        Format::Json => tables::json(&result)?,
        Format::Table if arguments.svg.is_some() || arguments.html.is_some() => {}
        Format::Table => println!("{}", shown(&result, &loads, arguments.details, tables::terminal_width())),
    }
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, content: &[u8]) -> anyhow::Result<()> {
    sublet_core::fs::replace(file, content, 0o644).with_context(|| format!("cannot write {}", file.display()))
}

/// All that is printed of a result, on a terminal of `width` characters.
pub fn shown(result: &BenchResult, loads: &[&str], details: bool, width: Option<usize>) -> String {
    let mut parts = vec![tables::wrapped(&head(result), width)];
    let figures = if details { &Figure::ALL[..] } else { &Figure::ALL[..1] };
    for load in loads {
        for figure in figures {
            parts.extend(table(result, load, *figure, width));
        }
        parts.extend(chart(result, load, width));
        parts.extend(notes(result, load).map(|notes| tables::wrapped(&notes, width)));
    }
    parts.join("\n\n")
}

fn head(result: &BenchResult) -> String {
    let driver = result.machine.driver.as_ref().map(|driver| format!(", driver {}", safe(driver)));
    let mut lines = vec![format!(
        "{}: {}{}, {}",
        safe(&result.title),
        safe(&result.machine.gpu),
        driver.unwrap_or_default(),
        safe(result.time.get(..10).unwrap_or_default())
    )];
    let source = result.source.as_ref();
    lines.extend(source.map(|source| format!("Published, not measured here: {}", safe(source))));
    for (is, words) in [
        (result.simulated, "SIMULATED: the driver is sublet's simulated one, and these times mean nothing"),
        (result.in_use_by_others, "Other programs used the GPU during the measurement"),
    ] {
        lines.extend(is.then(|| words.to_owned()));
    }
    lines.join("\n")
}

/// `None`: nothing of this figure is known.
fn table(result: &BenchResult, load: &str, figure: Figure, width: Option<usize>) -> Option<String> {
    let numbers = result.numbers(load);
    let names: Vec<String> = numbers.iter().map(|n| format!("{n} AT ONCE")).collect();
    let title = format!("{}: {}", safe(load).to_uppercase(), figure.title());
    // In the middle is what matters least: alone and the most never go.
    let importance = |at: usize| u8::try_from(at.min(names.len() - 1 - at)).unwrap_or(u8::MAX);
    let mut columns = vec![Column("MODE", 0)];
    columns.extend(names.iter().enumerate().map(|(at, name)| Column(name.as_str(), importance(at))));
    let value = |mode: &Mode, by_hand, n| {
        let Some(cell) = result.cell(load, mode, n, by_hand) else { return String::new() };
        let found = cell.measured.as_ref().and_then(|measured| figure.of(measured));
        let mark = if cell.overcommitted { "*" } else { "" };
        found.map_or_else(|| "–".to_owned(), |value| format!("{}{mark}", digits(value)))
    };
    let row = |(mode, by_hand): (&Mode, bool)| {
        let values = numbers.iter().map(|n| value(mode, by_hand, *n));
        std::iter::once(mode.titled(by_hand)).chain(values).collect()
    };
    let rows: Vec<Vec<String>> = result.lines(load).into_iter().map(row).collect();
    let is_known = |text: &String| text.contains(|character: char| character.is_ascii_digit());
    let any = rows.iter().any(|row| row[1..].iter().any(is_known));
    let table = || tables::fitted(&columns, &rows, width).unwrap_or_else(|| listed(&columns, &rows, width));
    any.then(|| format!("{}\n{}", tables::wrapped(&title, width), table()))
}

/// A table for a terminal on which it has no room: each mode, with its values below it.
fn listed(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> String {
    let value = |(column, value): (&Column<'_>, &String)| {
        (!value.is_empty()).then(|| format!("  {}  {value}", column.0.to_lowercase()))
    };
    let row = |row: &Vec<String>| {
        let values = columns.iter().zip(row).skip(1).filter_map(value);
        std::iter::once(tables::wrapped(&row[0], width)).chain(values).collect::<Vec<_>>().join("\n")
    };
    rows.iter().map(row).collect::<Vec<_>>().join("\n")
}

/// The length of a bar at most, and at least: a shorter one tells nothing.
const BAR: (usize, usize) = (30, 8);

/// A bar for each mode, for the largest number that most of them were measured with. `None`: there is nothing to
/// compare, or no room.
fn chart(result: &BenchResult, load: &str, width: Option<usize>) -> Option<String> {
    let cells = |n: u32| -> Vec<(&Cell, f64)> {
        let measured = result.of_load(load).filter(|cell| cell.n == n && !cell.by_hand);
        measured.filter_map(|cell| Some((cell, cell.measured.as_ref()?.mean_ms))).collect()
    };
    // One container alone is the whole GPU in every mode.
    let n = result.numbers(load).into_iter().max_by_key(|n| (*n > 1, cells(*n).len(), *n))?;
    let mut bars = cells(n);
    bars.sort_by(|one, other| one.1.total_cmp(&other.1));
    let most = bars.last().map(|bar| bar.1).filter(|most| *most > 0.0 && bars.len() > 1)?;
    let widest = bars.iter().map(|(cell, _)| cell.mode.title().chars().count()).max().unwrap_or_default();
    // Beside a bar stand its title and `54.9 ms`.
    let room = width.map_or(BAR.0, |width| width.saturating_sub(widest + 10).min(BAR.0));
    if room < BAR.1 {
        return None;
    }
    let line = |(cell, mean): &(&Cell, f64)| {
        let title = cell.mode.title();
        format!("{title:<widest$}  {} {} ms", bar(Some(mean / most), None, room, utf8()), digits(*mean))
    };
    let lines: Vec<String> = bars.iter().map(line).collect();
    Some(format!("{n} at once\n{}", lines.join("\n")))
}

/// The meanings of the marks, and the reasons for cells that were not measured.
fn notes(result: &BenchResult, load: &str) -> Option<String> {
    let cells: Vec<&Cell> = result.of_load(load).collect();
    let mut lines = Vec::new();
    if cells.iter().any(|cell| cell.overcommitted && cell.measured.is_some()) {
        lines.push("* overcommitted: the shares come to more than the GPU has".to_owned());
    }
    lines.extend(cells.iter().filter(|cell| cell.by_hand).filter_map(|by_hand| {
        let [own, by_hand_ms] =
            [result.cell(load, &by_hand.mode, by_hand.n, false)?, by_hand].map(|cell| cell.measured.as_ref());
        let more = (own?.mean_ms / by_hand_ms?.mean_ms - 1.0) * 100.0;
        let title = by_hand.mode.title();
        more.is_finite()
            .then(|| format!("{title}, {} at once: {more:+.1} % beside processes by hand", by_hand.n))
    }));
    lines.extend(cells.iter().filter_map(|cell| {
        let why = cell.error.as_ref()?;
        Some(format!("{}, {} at once: {}", cell.mode.titled(cell.by_hand), cell.n, safe(why)))
    }));
    (!lines.is_empty()).then(|| lines.join("\n"))
}

/// Arguments of `sublet bench compare`.
#[derive(Debug, clap::Args)]
pub struct CompareArguments {
    /// A result; "published": the comparison on an A100 that the authors of nos (github.com/nebuly-ai/nos)
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

/// Runs `sublet bench compare`.
pub fn compare(arguments: &CompareArguments) -> anyhow::Result<ExitCode> {
    let (a, b) = (BenchResult::of(&arguments.a)?, BenchResult::of(&arguments.b)?);
    let comparison = compared(&a, &b);
    tables::print(arguments.format, &comparison, || shown_pairs(&comparison, tables::terminal_width()))?;
    Ok(ExitCode::SUCCESS)
}

fn compared(a: &BenchResult, b: &BenchResult) -> Comparison {
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
    let ratio = |of: fn(&Measured) -> Option<f64>| {
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

fn shown_pairs(comparison: &Comparison, width: Option<usize>) -> String {
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
    let table = tables::fitted(&COLUMNS, &rows, width).unwrap_or_else(|| listed_pairs(&rows, width));
    format!("{}\n\n{table}", tables::wrapped(&format!("A: {a}\nB: {b}"), width))
}

/// For a terminal on which the table has no room.
fn listed_pairs(rows: &[Vec<String>], width: Option<usize>) -> String {
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

    #[test]
    fn a_table_of_means() {
        let result = fixture::result();
        let lines = table(&result, "command", Figure::Mean, None).unwrap();
        let expected = "COMMAND: mean of one iteration, ms\n\
                        MODE                 1 AT ONCE  3 AT ONCE  7 AT ONCE\n\
                        time-slice           7.20       23.7       54.9\n\
                        time-slice, by hand                        54.9\n\
                        MPS                  7.20       14.0       29.6\n\
                        MPS, 20 % each       23.3       24.4       32.1*";
        assert_eq!(lines, expected);
        assert_eq!(table(&result, "command", Figure::Energy, None), None);
        let narrow = table(&result, "command", Figure::Mean, Some(20)).unwrap();
        let expected =
            "COMMAND: mean of one\niteration, ms\ntime-slice\n  1 at once  7.20\n  3 at once  23.7\n";
        assert!(narrow.starts_with(expected) && narrow.ends_with("  7 at once  32.1*"), "{narrow}");
        let middle = table(&result, "command", Figure::Mean, Some(45)).unwrap();
        assert!(middle.contains("7 AT ONCE") && !middle.contains("3 AT ONCE"), "{middle}");
    }

    #[test]
    fn a_bar_for_each_mode_of_the_largest_number() {
        let chart = chart(&fixture::result(), "command", None).unwrap();
        let lines: Vec<&str> = chart.lines().collect();
        assert_eq!(lines[0], "7 at once");
        assert!(lines[1].starts_with("MPS ") && lines[1].ends_with("29.6 ms"), "{chart}");
        assert!(lines[3].starts_with("time-slice ") && lines.len() == 4, "{chart}");
        let narrow = |width| super::chart(&fixture::result(), "command", Some(width));
        assert!(narrow(40).unwrap().lines().all(|line| line.chars().count() <= 40));
        assert_eq!(narrow(20), None);
    }

    #[test]
    fn a_failed_measurement_is_noted() {
        let mut result = fixture::result();
        result.cells[0].measured = None;
        result.cells[0].error = Some("no \u{1b}[2Jroom".to_owned());
        let notes = notes(&result, "command").unwrap();
        assert!(
            notes.starts_with("* overcommitted")
                && notes.contains("time-slice, 7 at once: +0.1 % beside processes by hand")
                && notes.contains("time-slice, 1 at once: no "),
            "{notes}"
        );
        assert!(!notes.contains('\u{1b}'));
        assert!(table(&result, "command", Figure::Mean, None).unwrap().contains('–'));
    }

    #[test]
    fn cells_are_paired_and_a_cell_of_only_one_is_kept() {
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
        let found = compared(&a, &b);
        assert_eq!(found.cells.len(), a.cells.len() + 1);
        let seven = found.cells.iter().find(|pair| pair.mode == "mps" && pair.n == 7).unwrap();
        assert_eq!((seven.mean_ms, seven.mean_ratio), ([Some(29.6), Some(59.2)], Some(2.0)));
        assert_eq!(seven.times_alone[0], Some(4.111));
        let last = found.cells.last().unwrap();
        assert_eq!((last.n, last.mean_ms[0], last.mean_ratio), (9, None, None));
        let text = shown_pairs(&found, Some(20));
        assert!(
            text.contains("\ncommand, mps, 7 at\nonce\n  A ms 29.6\n  B ms 59.2\n  B/A  2.00\n"),
            "{text}"
        );
        let text = shown_pairs(&found, Some(40));
        assert!(text.contains("B/A") && !text.contains("ALONE"), "{text}");
    }

    #[test]
    fn the_published_numbers_are_shipped() {
        let published = BenchResult::of(Path::new("published")).unwrap();
        assert!(published.source.is_some());
        let found = compared(&published, &fixture::result());
        let seven = found.cells.iter().find(|pair| pair.mode == "time-slice" && pair.n == 7).unwrap();
        assert_eq!(seven.times_alone, [Some(7.766), Some(7.625)]);
    }
}
