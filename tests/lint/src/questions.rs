//! The appendix of docs/design.md: where is what. Each question names a file and an item in it; both must exist.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Where the table is.
const DOCUMENT: &str = "docs/design.md";
const HEADING: &str = "## Appendix: where is what";
/// How an item begins, in Rust.
const KINDS: [&str; 8] = ["fn", "struct", "enum", "trait", "const", "static", "type", "mod"];
/// The least number of questions.
const FEWEST: usize = 40;

/// What is wrong with the table, a line each.
///
/// # Errors
/// The document cannot be read, or has no such table.
pub fn check() -> Result<Vec<String>> {
    let text = fs::read_to_string(DOCUMENT).with_context(|| format!("{DOCUMENT} cannot be read"))?;
    let table = text.split_once(HEADING).with_context(|| format!("{DOCUMENT} has no {HEADING:?}"))?.1;
    let rows: Vec<&str> =
        table.lines().filter(|line| line.starts_with("| ") && line.contains("`src/")).collect();
    let mut found: Vec<String> = rows.iter().filter_map(|row| fault(row)).collect();
    if rows.len() < FEWEST {
        found
            .push(format!("{DOCUMENT}: the appendix has {} questions, and should have {FEWEST}", rows.len()));
    }
    Ok(found)
}

/// Why the row is wrong, if it is.
fn fault(row: &str) -> Option<String> {
    let wrong = |what: &str| Some(format!("{DOCUMENT}: {what}: {row}"));
    let mut cells = row.trim_end_matches(['|', ' ']).rsplit('|').map(|cell| cell.trim().trim_matches('`'));
    let (Some(item), Some(path), Some(_)) = (cells.next(), cells.next(), cells.nth(1)) else {
        return wrong("no file and item");
    };
    let Ok(code) = fs::read_to_string(Path::new(path)) else { return wrong("there is no such file") };
    item.split("::").any(|name| !has_item(&code, name)).then(|| wrong("there is no such item in the file"))?
}

/// Whether `code` defines `name`, or has an `impl` of it.
fn has_item(code: &str, name: &str) -> bool {
    let words: Vec<&str> = code.split(|part: char| !part.is_alphanumeric() && part != '_').collect();
    let is_defined = words.windows(2).any(|pair| KINDS.contains(&pair[0]) && pair[1] == name);
    is_defined || words.windows(2).any(|pair| pair == ["impl", name])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_needs_a_file_and_an_item_in_it() {
        let row = |path: &str, item: &str| fault(&format!("| Where? | `{path}` | `{item}` |"));
        let here = concat!(env!("CARGO_MANIFEST_DIR"), "/src/questions.rs");
        assert_eq!(row(here, "fault"), None);
        assert!(row(here, "faults").unwrap().contains("no such item"));
        assert!(row("src/none.rs", "fault").unwrap().contains("no such file"));
        assert!(fault("| Where? | `src/lib.rs` |").unwrap().contains("no file and item"));
    }
}
