//! `sublet report`: who held how much of the GPUs, for how long, and what was used of it.

use std::time::Duration;

use humantime::format_duration;
use serde::Deserialize as _;
use serde_json::{Map, Value};

use super::tables::{self, Cell};
use crate::accounting::{self, By, Group, Report, Wanted};
use crate::shown::{name_of, or_dash};
use crate::terminal::{terminal_width, warn};
use sublet_core::admit::{is_remote, own_status};
use sublet_core::broker::protocol::Ask;
use sublet_core::config::Config;
use sublet_core::inventory::{self, Device};
use sublet_core::text::safe;

/// `--format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Aligned columns.
    #[default]
    Table,
    /// One JSON document.
    Json,
    /// Comma-separated values.
    Csv,
    /// A picture.
    Svg,
}

/// Arguments of `sublet report`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    wanted: Wanted,
    /// Output format: a table, one JSON document, comma-separated values, or a picture
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Runs it. A user without root gets the report of their own containers, by `sublet serve`.
///
/// # Errors
/// For such a user, the service does not answer.
pub fn run(Arguments { wanted, format }: &Arguments, config: &Config) -> anyhow::Result<()> {
    let report = if is_remote(config) {
        serde_json::from_value(own_status(&Ask::Report { wanted: serde_json::to_value(wanted)? }, config)?)?
    } else {
        let looked = accounting::look(true, None, config);
        looked.unwrap_or_else(|error| eprintln!("sublet: what is not recorded yet is missing: {error}"));
        wanted.report(None, config)
    };
    let inventory = inventory::last(config).ok().filter(|_| report.by == By::Gpu);
    let inventory = inventory.map(|inventory| inventory.with_left_out());
    let label = |uuid: &str| inventory.as_ref()?.device(uuid).map(Device::label);
    let name = |group: &Group| label(&group.name).unwrap_or_else(|| group.words());
    match format {
        Format::Json => return tables::json(&report),
        Format::Csv => {
            print!("{}", csv(&report)?);
            warn(notes(&report));
        }
        Format::Svg => print!("{}", accounting::svg(&report, &name, &notes(&report))),
        Format::Table => println!("{}", table(&report, &name, terminal_width())),
    }
    Ok(())
}

fn table(report: &Report, name: &dyn Fn(&Group) -> String, width: Option<usize>) -> String {
    let total = std::iter::once(("all".to_owned(), &report.total)).filter(|_| report.rows.len() != 1);
    let rows = report.rows.iter().map(|group| (name(group), group)).chain(total);
    let rows = tables::fitting_rows(rows.map(|(name, group)| row(name, group)).collect(), width);
    let (by, Report { since, until, .. }) = (name_of(&report.by), report);
    let notes = notes(report).join("\n");
    let gap = if notes.is_empty() { "" } else { "\n\n" };
    let text = format!("GPU-hours by {by}, from {since} to {until}, days in UTC\n\n{rows}{gap}{notes}");
    tables::wrapped(&text, width)
}

/// Columns with the highest number go first where a terminal is too narrow for all of them.
fn row(name: String, group: &Group) -> [Cell; 8] {
    let number = |hours: f64| format!("{hours:.2}");
    let measured = 100.0 * group.measured_gpu_hours / group.whole_gpu_hours;
    let partly = if measured < 99.0 { format!(" ({measured:.0} % told)") } else { String::new() };
    let waited = Duration::try_from_secs_f64(group.waited_seconds.round()).unwrap_or_default();
    let waited = if group.waits > 0 { format!(", {}", format_duration(waited)) } else { String::new() };
    [
        ("NAME", 0, name),
        ("WHOLE", 0, number(group.whole_gpu_hours)),
        ("SM", 0, number(group.sm_gpu_hours)),
        ("MEMORY", 0, number(group.memory_gpu_hours)),
        ("USED", 1, or_dash(group.used_gpu_hours.map(|used| number(used) + &partly))),
        ("LEASES", 2, group.leases.to_string()),
        ("REFUSED", 3, group.refusals.to_string()),
        ("WAITED", 4, format!("{}{waited}", group.waits)),
    ]
}

/// Gaps of the figures, a line each.
fn notes(report: &Report) -> Vec<String> {
    let (unseen, hours) = (report.total.unseen_ends, report.unwatched_hours);
    let days = report.unread.iter().map(|day| safe(day)).collect::<Vec<_>>().join(", ");
    let unseen = format!("Leases whose end nobody saw, which count up to the last sign of life: {unseen}.");
    let unwatched = format!(
        "Nobody looked for {hours:.2} hours: what began and ended then may be missing, and what was used is. \
         `systemctl enable --now sublet.service` looks."
    );
    let unread = format!("Days whose record cannot be read: {days}.");
    let all =
        [(report.total.unseen_ends > 0, unseen), (hours >= 0.01, unwatched), (!days.is_empty(), unread)];
    all.into_iter().filter(|(is, _)| *is).map(|(_, note)| note).collect()
}

/// RFC 4180, with a header. The columns are the keys of the JSON document.
fn csv(report: &Report) -> anyhow::Result<String> {
    let line = |cells: Vec<String>| cells.join(",") + "\r\n";
    let keys = |group: &Group| Map::deserialize(serde_json::to_value(group)?);
    let mut text = line(keys(&Group::default())?.into_iter().map(|(key, _)| key).collect());
    for group in &report.rows {
        let cells = keys(group)?.into_iter().map(|(_, value)| match value {
            Value::Null => String::new(),
            Value::String(text) => cell(&text),
            number => number.to_string(),
        });
        text += &line(cells.collect());
    }
    Ok(text)
}

/// Quoted where it must be. A program for tables would take what begins with one of these for a formula.
fn cell(text: &str) -> String {
    let text = safe(text);
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text };
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::KnownBy;

    fn report() -> Report {
        let group = Group {
            name: "=a,\"b\"\u{1b}[2J".to_owned(),
            known_by: Some(KnownBy::Claim),
            whole_gpu_hours: 40.0,
            sm_gpu_hours: 10.0,
            memory_gpu_hours: 2.5,
            used_gpu_hours: Some(7.5),
            measured_gpu_hours: 20.0,
            leases: 12,
            unseen_ends: 2,
            refusals: 3,
            waits: 1,
            waited_seconds: 130.4,
        };
        let nobody = Group { whole_gpu_hours: 1.0, ..Group::default() };
        Report {
            since: "2026-10-28".to_owned(),
            until: "2026-11-27".to_owned(),
            unwatched_hours: 3.5,
            unread: vec!["2026-11-01".to_owned()],
            total: Group { unseen_ends: 2, whole_gpu_hours: 41.0, ..Group::default() },
            rows: vec![group, nobody],
            ..Report::default()
        }
    }

    #[test]
    fn a_table_fits_80_columns_and_names_its_gaps() {
        let text = table(&report(), &Group::words, Some(80));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let expected = "GPU-hours by owner, from 2026-10-28 to 2026-11-27, days in UTC\n\n\
             NAME                     WHOLE  SM     MEMORY  USED              LEASES  REFUSED\n\
             =a,\"b\"\\u{1b}[2J (claim)  40.00  10.00  2.50    7.50 (50 % told)  12      3\n\
             -                        1.00   0.00   0.00    -                 0       0\n\
             all                      41.00  0.00   0.00    -                 0       0\n\n\
             Leases whose end nobody saw, which count up to the last sign of life: 2.\n\
             Nobody looked for 3.50 hours: ";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("Days whose record cannot be read: 2026-11-01."), "{text}");
        assert_eq!(row("x".into(), &report().rows[0])[7].2, "1, 2m 10s");
        let alone = Report { rows: vec![Group::default()], ..Report::default() };
        assert!(!table(&alone, &Group::words, None).contains("\nall"), "one row needs no sum");
    }

    #[test]
    fn values_are_quoted_and_are_no_formulas() {
        let text = csv(&report()).unwrap();
        let lines: Vec<&str> = text.split("\r\n").collect();
        assert_eq!(lines[1], "\"'=a,\"\"b\"\"\\u{1b}[2J\",claim,40.0,10.0,2.5,7.5,20.0,12,2,3,1,130.4");
        assert_eq!(lines[2], ",,1.0,0.0,0.0,,0.0,0,0,0,0,0.0");
        assert_eq!(lines[0].split(',').count(), 12);
        assert_eq!((lines.len(), notes(&report()).len()), (4, 3), "the notes are on standard error");
    }

    #[test]
    fn a_picture_has_a_bar_for_each_figure_and_is_xml_whatever_names_hold() {
        let mut report = report();
        report.rows[0].name = "</svg><script>&\u{1b}".to_owned();
        let svg = accounting::svg(&report, &Group::words, &[]);
        // Two groups and the legend; the page's own.
        assert_eq!(svg.matches("<rect").count(), 3 * 4 + 1);
        assert!(svg.contains("&lt;/svg&gt;&lt;script&gt;&amp;") && !svg.contains("<script"), "{svg}");
        report.rows = vec![report.rows[0].clone(); 30];
        assert!(accounting::svg(&report, &Group::words, &[]).contains("and 10 more"));
    }

    #[test]
    fn a_picture_has_the_gaps_of_its_figures_below_the_bars() {
        let mut report = report();
        report.unread = vec!["2026-11-01".to_owned(); 30];
        let svg = accounting::svg(&report, &Group::words, &notes(&report));
        let number = |text: &str| -> f64 { text.split('"').next().unwrap().parse().unwrap() };
        let line = |words: &str| number(svg.split_once(words).unwrap().0.rsplit_once(" y=\"").unwrap().1);
        let height = number(svg.split_once("viewBox=\"0 0 930 ").unwrap().1);
        let last_bar = number(svg.rsplit_once("<rect x=\"250\" y=\"").unwrap().1);
        let lines = ["Leases whose end", "Nobody looked", "Days whose record"].map(line);
        let downwards = [&[last_bar][..], &lines, &[height]].concat();
        assert!(downwards.is_sorted(), "{downwards:?}: {svg}");
        assert_eq!(svg.matches("2026-11-01").count(), 30, "long ones are broken into lines");
    }
}
