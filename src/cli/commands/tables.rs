//! Tables for people, JSON for machines.

use clap::ValueEnum;
use comfy_table::{Table, presets};
use serde::Serialize;

/// `--format`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Aligned columns.
    #[default]
    #[value(alias = "text")]
    Table,
    /// One JSON document.
    Json,
}

/// Arguments of commands that list something.
#[derive(Debug, clap::Args)]
pub struct Output {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// A table without lines; the header is bold on a terminal that wants it.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    lines(header, rows).join("\n")
}

fn lines(header: &[&str], rows: Vec<Vec<String>>) -> Vec<String> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let plain = table.lines().map(|line| line.trim_end().to_owned());
    plain.enumerate().map(|(at, line)| if at == 0 { bold(&line) } else { line }).collect()
}

/// A column: its header, and how soon it goes where there is no room for all. 0 never goes.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a>(pub &'a str, pub u8);

/// [`table`] with as many of `columns` as fit into `width` characters; all of them where that is not known.
pub fn fitting(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> String {
    narrowed(columns, rows, width).0.join("\n")
}

/// The header of a column, how soon it goes, and the text in it.
pub type Cell = (&'static str, u8, String);

/// [`fitting`], of rows, at least one, that have their columns with them.
pub fn fitting_rows<const N: usize>(rows: Vec<[Cell; N]>, width: Option<usize>) -> String {
    let column = |(header, rank, _): &Cell| Column(header, *rank);
    let columns: Vec<Column<'_>> = rows.first().into_iter().flatten().map(column).collect();
    let texts: Vec<_> = rows.into_iter().map(|row| row.map(|(.., text)| text).to_vec()).collect();
    fitting(&columns, &texts, width)
}

/// [`fitting`]; `None`: not even the columns fit that never go.
pub fn fitted(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> Option<String> {
    let (lines, fits) = narrowed(columns, rows, width);
    fits.then(|| lines.join("\n"))
}

/// The lines, and whether they fit. A column in which no row has anything goes first.
fn narrowed(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> (Vec<String>, bool) {
    let has_text = |at: &usize| rows.is_empty() || rows.iter().any(|row| !row[*at].is_empty());
    let mut kept: Vec<usize> = (0..columns.len()).filter(has_text).collect();
    loop {
        let header: Vec<&str> = kept.iter().map(|&at| columns[at].0).collect();
        let row = |row: &Vec<String>| kept.iter().map(|&at| row[at].clone()).collect();
        let lines = lines(&header, rows.iter().map(row).collect());
        let widest = lines.iter().map(|line| crate::terminal::length(line)).max().unwrap_or_default();
        let least = kept.iter().copied().filter(|&at| columns[at].1 > 0).max_by_key(|&at| columns[at].1);
        let fits = width.is_none_or(|width| widest <= width);
        match least {
            Some(least) if !fits => kept.retain(|&at| at != least),
            _ => return (lines, fits),
        }
    }
}

/// Prints `value` as one JSON document, or what people read of it.
pub fn print(format: Format, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    match format {
        Format::Json => return json(value),
        Format::Table => println!("{}", text()),
    }
    Ok(())
}

/// Prints `value` as one JSON document.
pub fn json(value: &impl Serialize) -> anyhow::Result<()> {
    print!("{}\n", serde_json::to_string_pretty(value)?);
    Ok(())
}

pub use crate::shown::{ago, memory, memory_limit};
pub use crate::terminal::{bold, terminal_width, wrapped};
pub use sublet_core::text::timestamp;

/// An error and its causes on one line. Many of sublet's errors already repeat their cause in their text.
pub fn chain(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_printed_once() {
        let cause = || std::io::Error::other("disk on fire");
        assert_eq!(
            chain(&anyhow::Error::new(cause()).context("cannot write x")),
            "cannot write x: disk on fire"
        );
        let error = anyhow::Error::new(cause()).context("cannot write x: disk on fire; call somebody");
        assert_eq!(chain(&error), "cannot write x: disk on fire; call somebody");
    }

    #[test]
    fn a_column_without_text_is_left_out() {
        let rows = [vec!["0".to_owned(), String::new()], vec!["1".to_owned(), String::new()]];
        assert_eq!(fitting(&[Column("GPU", 0), Column("FOR", 1)], &rows, None), "GPU\n0\n1");
        assert_eq!(fitting(&[Column("GPU", 0), Column("FOR", 1)], &[], None), "GPU  FOR");
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let shown = table(&["A", "LONG"], vec![vec!["xyz".into(), "1".into()], vec!["x".into(), "2".into()]]);
        assert_eq!(shown, "A    LONG\nxyz  1\nx    2");
    }
}
