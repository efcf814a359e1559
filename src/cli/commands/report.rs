//! `sublet report`: who held how much of the GPUs, for how long, and what was used of it.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::tables::{self, Column};
use crate::accounting::{self, By, Group, Report, Wanted};
use crate::events::parse_moment;
use crate::names::Of;
use crate::shown::name_of;
use crate::terminal::terminal_width;
use sublet_core::admit::{is_remote, own_report};
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
    /// Since then: 2026-11-23, 2026-11-23T07:00:00Z, or how long ago, as 30d; the whole day counts
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = parse_moment)]
    since: SystemTime,
    /// Until then; the whole day counts
    #[arg(long, value_name = "TIME", value_parser = parse_moment)]
    until: Option<SystemTime>,
    /// What is counted together
    #[arg(long, value_enum, default_value_t)]
    by: By,
    #[command(flatten)]
    of: Of,
    /// Output format: a table, one JSON document, comma-separated values, or a picture
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Runs it. A user without root is told of their own containers, by `sublet serve`.
///
/// # Errors
/// For such a user, the service does not answer.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let milliseconds = |time: SystemTime| {
        u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
    };
    let wanted = Wanted {
        since: milliseconds(arguments.since),
        until: milliseconds(arguments.until.unwrap_or_else(SystemTime::now)),
        by: arguments.by,
        of: arguments.of.clone(),
    };
    let report = if is_remote(config) {
        serde_json::from_value(own_report(config, serde_json::to_value(&wanted)?)?)?
    } else {
        if let Err(error) = accounting::look(true, None, config) {
            eprintln!("sublet: what is not recorded yet is missing: {error}");
        }
        accounting::report(&wanted, None, config)
    };
    let inventory = inventory::last(config).ok().map(|inventory| inventory.with_left_out());
    let name = |group: &Group| {
        let device = inventory.as_ref().filter(|_| report.by == By::Gpu);
        let device = device.and_then(|inventory| inventory.device(&group.name)).map(Device::label);
        device.unwrap_or_else(|| group.words())
    };
    match arguments.format {
        Format::Json => return tables::json(&report),
        Format::Csv => print!("{}", csv(&report)),
        Format::Svg => print!("{}", accounting::svg(&report, &name)),
        Format::Table => println!("{}", table(&report, &name, terminal_width())),
    }
    Ok(())
}

fn table(report: &Report, name: &dyn Fn(&Group) -> String, width: Option<usize>) -> String {
    let by = name_of(&report.by).to_uppercase();
    // Those with the highest number go first where a terminal is too narrow for all of them.
    let columns = [
        Column(&by, 0),
        Column("WHOLE", 0),
        Column("SM", 0),
        Column("MEMORY", 0),
        Column("USED", 1),
        Column("LEASES", 2),
        Column("REFUSED", 3),
        Column("WAITED", 4),
    ];
    let total = std::iter::once(("all".to_owned(), &report.total)).filter(|_| report.rows.len() != 1);
    let rows = report.rows.iter().map(|group| (name(group), group)).chain(total);
    let rows: Vec<Vec<String>> = rows.map(|(name, group)| row(name, group)).collect();
    let mut text = format!("GPU-hours from {} to {}, days in UTC\n\n", report.since, report.until);
    text += &tables::fitting(&columns, &rows, width);
    let notes = notes(report).into_iter().map(|note| format!("\n{note}")).collect::<String>();
    if !notes.is_empty() {
        let _ = write!(text, "\n{notes}");
    }
    tables::wrapped(&text, width)
}

fn row(name: String, group: &Group) -> Vec<String> {
    let number = |hours: f64| format!("{hours:.2}");
    let told = 100.0 * group.told_gpu_hours / group.whole_gpu_hours;
    let used = group.used_gpu_hours.map_or_else(
        || "-".to_owned(),
        |used| if told < 99.0 { format!("{used:.2} ({told:.0} % told)") } else { number(used) },
    );
    let waited = Duration::try_from_secs_f64(group.waited_seconds.round()).unwrap_or_default();
    let waits = match group.waits {
        0 => "0".to_owned(),
        waits => format!("{waits}, {}", humantime::format_duration(waited)),
    };
    vec![
        name,
        number(group.whole_gpu_hours),
        number(group.sm_gpu_hours),
        number(group.memory_gpu_hours),
        used,
        group.leases.to_string(),
        group.refusals.to_string(),
        waits,
    ]
}

/// What the figures leave out, a line each.
fn notes(report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    let unseen = report.total.unseen_ends;
    if unseen > 0 {
        notes
            .push(format!("Leases whose end nobody saw, which count up to the last sign of life: {unseen}."));
    }
    if report.unwatched_hours >= 0.01 {
        notes.push(format!(
            "Nobody looked for {:.2} hours: what began and ended then may be missing, and what was used is. \
             `systemctl enable --now sublet.service` looks.",
            report.unwatched_hours
        ));
    }
    if !report.unread.is_empty() {
        let days = report.unread.iter().map(|day| safe(day)).collect::<Vec<_>>().join(", ");
        notes.push(format!("Days whose record cannot be read: {days}."));
    }
    notes
}

/// RFC 4180, with a header. The names of the columns are the keys of the JSON document.
fn csv(report: &Report) -> String {
    let mut text =
        "name,known_by,whole_gpu_hours,sm_gpu_hours,memory_gpu_hours,used_gpu_hours,told_gpu_hours,leases,\
                    unseen_ends,refusals,waits,waited_seconds\r\n"
            .to_owned();
    for group in &report.rows {
        let known_by = group.known_by.map(|known_by| crate::shown::word(&known_by)).unwrap_or_default();
        let used = group.used_gpu_hours.map(|used| used.to_string()).unwrap_or_default();
        let _ = write!(
            text,
            "{},{known_by},{},{},{},{used},{},{},{},{},{},{}\r\n",
            cell(&group.name),
            group.whole_gpu_hours,
            group.sm_gpu_hours,
            group.memory_gpu_hours,
            group.told_gpu_hours,
            group.leases,
            group.unseen_ends,
            group.refusals,
            group.waits,
            group.waited_seconds,
        );
    }
    text
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
            told_gpu_hours: 20.0,
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
    fn a_table_fits_80_columns_and_says_what_it_leaves_out() {
        let text = table(&report(), &Group::words, Some(80));
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let expected = "GPU-hours from 2026-10-28 to 2026-11-27, days in UTC\n\n\
             OWNER                      WHOLE  SM     MEMORY  USED              LEASES\n\
             =a,\"b\"\\u{1b}[2J (claim)  40.00  10.00  2.50    7.50 (50 % told)  12\n\
             -                          1.00   0.00   0.00    -                 0\n\
             all                        41.00  0.00   0.00    -                 0\n\n\
             Leases whose end nobody saw, which count up to the last sign of life: 2.\n\
             Nobody looked for 3.50 hours: ";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.ends_with("Days whose record cannot be read: 2026-11-01."), "{text}");
        assert_eq!(row("x".into(), &report().rows[0])[7], "1, 2m 10s");
        let alone = Report { rows: vec![Group::default()], ..Report::default() };
        assert!(!table(&alone, &Group::words, None).contains("\nall"), "one row needs no sum");
    }

    #[test]
    fn values_are_quoted_and_are_no_formulas() {
        let text = csv(&report());
        let lines: Vec<&str> = text.split("\r\n").collect();
        assert_eq!(lines[1], "\"'=a,\"\"b\"\"\\u{1b}[2J\",claim,40,10,2.5,7.5,20,12,2,3,1,130.4");
        assert_eq!(lines[2], ",,1,0,0,,0,0,0,0,0,0");
        assert_eq!(lines[0].split(',').count(), 12);
    }

    #[test]
    fn a_picture_has_a_bar_for_each_figure_and_is_xml_whatever_names_hold() {
        let mut report = report();
        report.rows[0].name = "</svg><script>&\u{1b}".to_owned();
        let svg = accounting::svg(&report, &Group::words);
        // Two groups and the legend; the page's own.
        assert_eq!(svg.matches("<rect").count(), 3 * 4 + 1);
        assert!(svg.contains("&lt;/svg&gt;&lt;script&gt;&amp;") && !svg.contains("<script"), "{svg}");
        report.rows = vec![report.rows[0].clone(); 30];
        assert!(accounting::svg(&report, &Group::words).contains("and 10 more"));
    }
}
