//! The Markdown of the pages in docs, as far as manual pages are made of it: headings, paragraphs, lists, tables, code, and the
//! book's `{{#include FILE}}`.

use anyhow::{Context as _, Result, bail};

use super::roff::Block;
use super::{INCLUDED, toml_comments};

/// What a line is, by how it begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Blank,
    Title,
    Heading,
    Fence,
    Code,
    Row,
    Item,
    Text,
}

/// The blocks of the page `text`, without its title.
///
/// # Errors
/// Something that manual pages are not made of.
pub(super) fn blocks(text: &str) -> Result<Vec<Block>> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut blocks, mut rest) = (Vec::new(), &lines[..]);
    while let Some(first) = rest.first() {
        let kind = kind(first)?;
        let (block, after) = rest.split_at(length(kind, rest)?);
        match kind {
            Kind::Blank | Kind::Title => {}
            Kind::Heading => blocks.push(Block::Section(first[3..].to_owned())),
            Kind::Fence => blocks.extend(fenced(&block[1..block.len() - 1])?),
            Kind::Code => blocks.push(Block::Code(block.iter().map(|line| line[4..].to_owned()).collect())),
            Kind::Row => blocks.extend(table(block)?),
            Kind::Item => blocks.push(Block::Item(joined(block)[2..].to_owned())),
            Kind::Text => blocks.push(Block::Text(joined(block))),
        }
        rest = after;
    }
    Ok(blocks)
}

fn kind(line: &str) -> Result<Kind> {
    let begins = |marks: &[&str]| marks.iter().any(|mark| line.starts_with(mark));
    let is_numbered = line.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with(". ");
    if begins(&["> ", "<", "![", "* ", "###", "---", "~~~", "  - "]) || is_numbered && !begins(&["."]) {
        bail!("a manual page cannot be made of this line: {line}");
    }
    Ok(match line {
        "" => Kind::Blank,
        _ if begins(&["# "]) => Kind::Title,
        _ if begins(&["## "]) => Kind::Heading,
        _ if begins(&["```"]) => Kind::Fence,
        _ if begins(&["    "]) => Kind::Code,
        _ if begins(&["|"]) => Kind::Row,
        _ if begins(&["- "]) => Kind::Item,
        _ => Kind::Text,
    })
}

/// How many of `lines` belong to the block of this kind with which they begin.
fn length(kind_of_first: Kind, lines: &[&str]) -> Result<usize> {
    let continued = match kind_of_first {
        Kind::Blank | Kind::Title | Kind::Heading => return Ok(1),
        Kind::Fence => {
            let end = lines[1..].iter().position(|line| line.starts_with("```"));
            return end.map(|end| end + 2).context("``` that does not end");
        }
        Kind::Code => Kind::Code,
        Kind::Row => Kind::Row,
        Kind::Item | Kind::Text => Kind::Text,
    };
    let mut length = 1;
    while length < lines.len() && kind(lines[length])? == continued {
        length += 1;
    }
    Ok(length)
}

fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// What stands between two fences: code, or a file whose comments describe its keys.
fn fenced(lines: &[&str]) -> Result<Vec<Block>> {
    let included = |line: &str| line.strip_prefix("{{#include ")?.strip_suffix("}}").map(str::to_owned);
    let Some(path) = lines.first().and_then(|line| included(line)) else {
        return Ok(vec![Block::Code(lines.iter().map(|line| (*line).to_owned()).collect())]);
    };
    let (_, text) = INCLUDED.iter().find(|(known, _)| *known == path).context(path)?;
    Ok(toml_comments::blocks(text))
}

/// A term for each row: its first cell, which means the last one. Those between have their column's name.
fn table(rows: &[&str]) -> Result<Vec<Block>> {
    let cells = |row: &str| -> Vec<String> {
        row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let [header, _, rows @ ..] = rows else { bail!("a table without a header") };
    let header = cells(header);
    rows.iter()
        .map(|row| match &cells(row)[..] {
            [word, between @ .., last] if between.len() + 2 == header.len() => {
                let named = header[1..].iter().zip(between).map(|(name, cell)| format!("{name}: {cell}"));
                let meaning = named.chain([last.clone()]).map(|text| sentence(&text)).collect();
                Ok(Block::Term { words: vec![word.clone()], meaning })
            }
            _ => bail!("not the cells of the table's header: {row}"),
        })
        .collect()
}

/// `text` with a capital and a full stop.
fn sentence(text: &str) -> String {
    let mut rest = text.chars();
    let first = rest.next().map(char::to_uppercase);
    let stop = if text.ends_with(['.', '…']) { "" } else { "." };
    first.into_iter().flatten().chain(rest).chain(stop.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_becomes_blocks() {
        let page = "# Title\n\nOne\ntwo:\n\n    code\n      more\n\n- an item\n  of two lines\n- another\nwith a line\n\n\
                    ## Part\n| key | values | meaning |\n|---|---|---|\n| `a` | `b` or c | what it is. More |\n\n```toml\nx = 1\n\ny = 2\n```\n";
        let text = |text: &str| text.to_owned();
        assert_eq!(
            blocks(page).unwrap(),
            [
                Block::Text(text("One two:")),
                Block::Code(vec![text("code"), text("  more")]),
                Block::Item(text("an item of two lines")),
                Block::Item(text("another with a line")),
                Block::Section(text("Part")),
                Block::Term {
                    words: vec![text("`a`")],
                    meaning: vec![text("Values: `b` or c."), text("What it is. More.")]
                },
                Block::Code(vec![text("x = 1"), text(""), text("y = 2")]),
            ]
        );
    }

    #[test]
    fn what_no_manual_page_is_made_of_is_refused() {
        for line in [
            "1. first",
            "> quoted",
            "<br>",
            "![a](b.svg)",
            "### deep",
            "- a\n  - b",
            "```\nno end",
            "| a |\n",
            "| a |\n|---|\n| b | c |",
        ] {
            assert!(blocks(line).is_err(), "{line}");
        }
        assert!(blocks("```toml\n{{#include config/mig.toml}}\n```\n").is_err());
        assert!(blocks("24 hours.\n.conf files\n").is_ok());
    }
}
