//! Tables for people, JSON for machines.

use std::os::fd::AsFd;

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

/// A table without lines; the header is bold on a terminal that wants it.
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    with_bold_header(lines(header, rows))
}

fn lines(header: &[&str], rows: Vec<Vec<String>>) -> Vec<String> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header);
    table.add_rows(rows);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect()
}

fn with_bold_header(mut lines: Vec<String>) -> String {
    if let Some(header) = lines.first_mut().filter(|_| colour()) {
        *header = format!("\u{1b}[1m{header}\u{1b}[0m");
    }
    lines.join("\n")
}

/// A column: its header, and how soon it goes where there is no room for all. 0 never goes.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a>(pub &'a str, pub u8);

/// [`table`] with as many of `columns` as fit into `width` characters; all of them where that is not known.
pub fn fitting(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> String {
    with_bold_header(narrowed(columns, rows, width).0)
}

/// The header of a column, how soon it goes, and the text in it.
pub type Cell = (&'static str, u8, String);

/// [`fitting`] into the terminal, of rows, at least one, that have their columns with them.
pub fn fitting_rows<const N: usize>(rows: Vec<[Cell; N]>) -> String {
    let column = |(header, rank, _): &Cell| Column(header, *rank);
    let columns: Vec<Column<'_>> = rows.first().into_iter().flatten().map(column).collect();
    let texts: Vec<_> = rows.into_iter().map(|row| row.map(|(.., text)| text).to_vec()).collect();
    fitting(&columns, &texts, terminal_width())
}

/// [`fitting`]; `None`: not even the columns fit that never go.
pub fn fitted(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> Option<String> {
    let (lines, fits) = narrowed(columns, rows, width);
    fits.then(|| with_bold_header(lines))
}

/// The lines, and whether they fit.
fn narrowed(columns: &[Column<'_>], rows: &[Vec<String>], width: Option<usize>) -> (Vec<String>, bool) {
    let mut kept: Vec<usize> = (0..columns.len()).collect();
    loop {
        let header: Vec<&str> = kept.iter().map(|&at| columns[at].0).collect();
        let row = |row: &Vec<String>| kept.iter().map(|&at| row[at].clone()).collect();
        let plain = lines(&header, rows.iter().map(row).collect());
        let widest = plain.iter().map(|line| line.chars().count()).max().unwrap_or_default();
        let least = kept.iter().copied().filter(|&at| columns[at].1 > 0).max_by_key(|&at| columns[at].1);
        let fits = width.is_none_or(|width| widest <= width);
        match least {
            Some(least) if !fits => kept.retain(|&at| at != least),
            _ => return (plain, fits),
        }
    }
}

/// How many characters a line of the terminal has that standard output is; `None`: it is none.
pub fn terminal_width() -> Option<usize> {
    width_of(std::io::stdout())
}

/// As [`terminal_width`], of `output`.
pub fn width_of(output: impl AsFd) -> Option<usize> {
    // What is no terminal has no size.
    let size = rustix::termios::tcgetwinsize(output).ok()?;
    Some(usize::from(size.ws_col)).filter(|width| *width > 0)
}

/// `text` with its lines broken between words, so that they have `width` characters if no word is longer. The rest of a
/// line is indented as its beginning is.
pub fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    text.lines().map(|line| wrapped_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn wrapped_line(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_owned();
    }
    let indent = &line[..line.len() - line.trim_start().len()];
    let (mut lines, mut last) = (Vec::new(), String::new());
    for word in line.split_whitespace() {
        let length = [indent, &last, " ", word].map(|part| part.chars().count()).iter().sum::<usize>();
        if !last.is_empty() && length > width {
            lines.push(format!("{indent}{}", std::mem::take(&mut last)));
        }
        last = if last.is_empty() { word.to_owned() } else { format!("{last} {word}") };
    }
    lines.push(format!("{indent}{last}"));
    lines.join("\n")
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
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

use crate::shown::colour;
pub use crate::shown::{ago, memory, memory_limit};
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
        let told = anyhow::Error::new(cause()).context("cannot write x: disk on fire; call somebody");
        assert_eq!(chain(&told), "cannot write x: disk on fire; call somebody");
    }

    #[test]
    fn lines_are_broken_between_words() {
        let broken = |text, width| wrapped(text, Some(width));
        assert_eq!(broken("one two three", 8), "one two\nthree");
        assert_eq!(broken("    one two\nthree", 8), "    one\n    two\nthree");
        assert_eq!(broken("a verylongword b", 4), "a\nverylongword\nb");
        assert_eq!((broken("÷ ÷", 3).as_str(), broken("", 3).as_str()), ("÷ ÷", ""));
        assert_eq!(wrapped("one  two", None), "one  two");
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let shown = table(&["A", "LONG"], vec![vec!["xyz".into(), "1".into()], vec!["x".into(), "2".into()]]);
        assert_eq!(shown, "A    LONG\nxyz  1\nx    2");
    }
}
