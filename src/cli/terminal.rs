//! The abilities of the user's terminal: the width of its lines, and how text is broken into them; colour, and UTF-8.

use std::env;
use std::io::{IsTerminal as _, stdout};
use std::os::fd::AsFd;

/// The sequences that switch a terminal to bold letters and back (ECMA-48, SGR).
const BOLD: [&str; 2] = ["\u{1b}[1m", "\u{1b}[0m"];

/// In characters: in a narrower column, text would be hard to read.
const ROOM: usize = 30;

/// Colour only on a terminal, and not against `NO_COLOR` (no-color.org).
pub fn colour() -> bool {
    stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// `text`, bold on a terminal that wants it.
pub fn bold(text: &str) -> String {
    if colour() { BOLD.join(text) } else { text.to_owned() }
}

/// Whether the user's terminal shows UTF-8: the first of these variables that is set decides (locale(7)).
pub fn utf8() -> bool {
    let set = ["LC_ALL", "LC_CTYPE", "LANG"]
        .into_iter()
        .find_map(|name| env::var(name).ok().filter(|value| !value.is_empty()));
    is_utf8(&set.unwrap_or_default())
}

fn is_utf8(locale: &str) -> bool {
    let codeset = locale.split('.').nth(1).and_then(|rest| rest.split('@').next()).unwrap_or_default();
    codeset.replace('-', "").eq_ignore_ascii_case("utf8")
}

/// Writes a warning a line to standard error, which sublet's own programs read.
pub fn warn(warnings: impl IntoIterator<Item = String>) {
    for warning in warnings {
        eprintln!("sublet: warning: {warning}");
    }
}

/// How many characters a line of standard output has; `None`: it is no terminal, and COLUMNS does not say.
pub fn terminal_width() -> Option<usize> {
    width_of(stdout())
}

/// As [`terminal_width`], of `output`.
pub fn width_of(output: impl AsFd) -> Option<usize> {
    // Only a terminal has a size.
    let size = rustix::termios::tcgetwinsize(output).ok().map(|size| usize::from(size.ws_col));
    first_of(env::var("COLUMNS").ok().as_deref(), size)
}

/// COLUMNS is what the user wants, whatever the terminal has (POSIX, "Environment Variables").
fn first_of(columns: Option<&str>, size: Option<usize>) -> Option<usize> {
    [columns.and_then(|text| text.parse().ok()), size].into_iter().flatten().find(|width| *width > 0)
}

/// `text` with its lines broken between words, so that they have `width` characters if no word is longer. The rest of a
/// line stands below its text ([`start_of_text`]).
pub fn wrapped(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    text.split('\n').map(|line| wrapped_line(line, width)).collect::<Vec<_>>().join("\n")
}

fn wrapped_line(line: &str, width: usize) -> String {
    let (head, text) = line.split_at(start_of_text(line, width));
    let indent = " ".repeat(length(head));
    let (mut lines, mut last) = (Vec::new(), head.to_owned());
    // Between two blanks is an empty word, so that aligned text stays so.
    for word in text.split(' ') {
        let has_begun = length(&last) > indent.len();
        if has_begun && length(&last) + 1 + length(word) > width {
            lines.push(std::mem::replace(&mut last, indent.clone()));
        } else if has_begun {
            last.push(' ');
        }
        last.push_str(word);
    }
    lines.push(last);
    lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n")
}

/// Behind the last gap between columns that leaves its text room; without one, behind the indentation and the mark of a
/// list, or of a part of a message ([`in_lines`](sublet_core::text::in_lines)). In bytes.
fn start_of_text(line: &str, width: usize) -> usize {
    let text = line.trim_start_matches([' ', '+', '-']);
    let text = ["why: ", "fix: "].iter().find_map(|mark| text.strip_prefix(mark)).unwrap_or(text);
    let indent = line.len() - text.len();
    let is_behind_gap = |&(at, character): &(usize, char)| {
        character != ' ' && line[..at].ends_with("  ") && length(&line[..at]) + ROOM <= width
    };
    line.char_indices().filter(is_behind_gap).map(|(at, _)| at).chain([indent]).max().unwrap_or(indent)
}

/// In characters that a terminal shows.
pub fn length(text: &str) -> usize {
    BOLD.iter().fold(text.to_owned(), |text, sequence| text.replace(sequence, "")).chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_broken_between_words() {
        let broken = |text, width| wrapped(text, Some(width));
        assert_eq!(broken("one two three", 8), "one two\nthree");
        assert_eq!(broken("    one two\nthree", 8), "    one\n    two\nthree");
        assert_eq!(broken("a verylongword b", 4), "a\nverylongword\nb");
        assert_eq!((broken("÷ ÷", 3).as_str(), broken("", 3).as_str()), ("÷ ÷", ""));
        assert_eq!(broken("one\n\n", 8), "one\n\n");
        assert_eq!(wrapped("one  two", None), "one  two");
    }

    #[test]
    fn the_rest_of_a_line_stands_below_its_text() {
        let broken = |text| wrapped(text, Some(44));
        let row = "pass  nvml  the driver answers, and tells all";
        assert_eq!(broken(row), "pass  nvml  the driver answers, and tells\n            all");
        let without_room = "driver  persistence  what it was is not known";
        assert_eq!(broken(without_room), "driver  persistence  what it was is not\n        known");
        let listed = "  - a fault ends the work of all the others too";
        assert_eq!(broken(listed), "  - a fault ends the work of all the others\n    too");
        let part = "fix: sublet.sm=40 fits now; or wait for a while";
        assert_eq!(broken(part), "fix: sublet.sm=40 fits now; or wait for a\n     while");
        let bold = format!("{}{}{}", BOLD[0], "x".repeat(44), BOLD[1]);
        assert_eq!(broken(&bold), bold, "what is not shown takes no room");
    }

    #[test]
    fn columns_come_before_the_terminals_size() {
        assert_eq!((first_of(Some("80"), Some(120)), first_of(Some("80"), None)), (Some(80), Some(80)));
        assert_eq!((first_of(None, Some(120)), first_of(None, Some(0))), (Some(120), None));
        for nothing in ["", "0", "-1", "wide"] {
            assert_eq!(first_of(Some(nothing), Some(120)), Some(120), "{nothing}");
        }
    }

    #[test]
    fn the_locale_decides_whether_a_terminal_shows_utf8() {
        let cases = [
            ("C.UTF-8", true),
            ("de_DE.utf8@euro", true),
            ("C", false),
            ("en_US.ISO-8859-1", false),
            ("", false),
        ];
        for (locale, expected) in cases {
            assert_eq!(is_utf8(locale), expected, "{locale}");
        }
    }
}
