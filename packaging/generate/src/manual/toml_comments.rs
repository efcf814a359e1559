//! A configuration file as it is shipped: every key commented out, below a comment that describes it.

use std::collections::BTreeSet;

use super::roff::Block;

/// What a line is.
#[derive(Clone, Copy)]
enum Line<'a> {
    Blank,
    /// Of a comment, without the `#` and the space.
    Comment(&'a str),
    /// `[name]` or `[[name]]`.
    Table(&'a str),
    Key(&'a str, &'a str),
}

fn line(line: &str) -> Line<'_> {
    let bare = line.strip_prefix('#').unwrap_or(line);
    match bare.strip_prefix(' ').or(bare.is_empty().then_some("")) {
        Some(_) if line.is_empty() => Line::Blank,
        Some(comment) => Line::Comment(comment),
        None if bare.starts_with('[') => Line::Table(bare),
        None => bare.split_once(" = ").map_or(Line::Comment(bare), |(key, value)| Line::Key(key, value)),
    }
}

/// The file `text` as a page describes it: a heading for each table, a term for each key. The first paragraph says what file it
/// is, which the page says itself.
pub(super) fn blocks(text: &str) -> Vec<Block> {
    let mut reader = Reader::default();
    for read in text.lines().map(line).skip_while(|line| !matches!(line, Line::Blank)) {
        reader.read(read);
    }
    reader.flush();
    reader.blocks
}

#[derive(Default)]
struct Reader<'a> {
    blocks: Vec<Block>,
    /// The comment above the next line.
    comment: Vec<&'a str>,
    table: &'a str,
    /// The tables and keys that have been read.
    known: BTreeSet<(&'a str, &'a str)>,
}

impl<'a> Reader<'a> {
    fn read(&mut self, line: Line<'a>) {
        match line {
            Line::Blank => self.flush(),
            Line::Comment(text) => self.comment.push(text),
            Line::Table(name) => {
                if std::mem::replace(&mut self.table, name) != name {
                    self.blocks.push(Block::Subsection(name.to_owned()));
                }
                self.flush();
            }
            Line::Key(key, value) => self.read_key(key, value),
        }
    }

    /// A key without a comment has that of the key above it. Below a table's name it is part of an example.
    fn read_key(&mut self, key: &'a str, value: &'a str) {
        if !self.known.insert((self.table, key)) && self.comment.is_empty() {
            return;
        }
        let (value, unset) = match value.strip_suffix("# unset") {
            Some(example) => (example.trim_end(), " Unset by default."),
            None => (value, ""),
        };
        let word = format!("`{key}` = {value}");
        let comment = std::mem::take(&mut self.comment);
        match self.blocks.last_mut() {
            _ if !comment.is_empty() => {
                self.blocks.push(Block::term(&word, &format!("{}{unset}", comment.join(" "))));
            }
            Some(Block::Term { words, .. }) => words.push(word),
            Some(Block::Code(lines)) => lines.push(format!("{key} = {value}")),
            _ => self.blocks.push(Block::Code(vec![format!("{key} = {value}")])),
        }
    }

    /// The comment by itself. Lines that are set in are a word, two spaces and what it means.
    fn flush(&mut self) {
        let mut paragraph = Vec::new();
        for line in std::mem::take(&mut self.comment).into_iter().chain([""]) {
            let term = line.strip_prefix("  ").and_then(|line| line.trim().split_once("  "));
            if term.is_none() && !line.is_empty() {
                paragraph.push(line);
                continue;
            }
            if !paragraph.is_empty() {
                self.blocks.push(Block::Text(std::mem::take(&mut paragraph).join(" ")));
            }
            let term = term.map(|(word, meaning)| Block::term(&format!("`{word}`"), meaning.trim()));
            self.blocks.extend(term);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Block {
        Block::Text(text.to_owned())
    }

    #[test]
    fn comments_describe_keys() {
        let file = "# This file.\n\n# How it\n# is read:\n#   one.toml   first\n#   two.toml   then\n#\n# The rest.\n\n\
                    # Of a.\n#a = 1\n[t]\n# Of b and c.\n#b = [\"x\"]\n#c = 3\n\n# Of u.\n[u]\n# Of d.\n#d = \"\"        # unset\n";
        let two = ["`b` = [\"x\"]", "`c` = 3"].map(str::to_owned).to_vec();
        assert_eq!(
            blocks(file),
            [
                text("How it is read:"),
                Block::term("`one.toml`", "first"),
                Block::term("`two.toml`", "then"),
                text("The rest."),
                Block::term("`a` = 1", "Of a."),
                Block::Subsection("[t]".to_owned()),
                Block::Term { words: two, meaning: vec!["Of b and c.".to_owned()] },
                Block::Subsection("[u]".to_owned()),
                text("Of u."),
                Block::term("`d` = \"\"", "Of d. Unset by default."),
            ]
        );
    }

    #[test]
    fn a_table_that_comes_again_adds_its_keys() {
        let file = "\n# Rules.\n#[[r]]\n# Of a.\n#a = 1\n# Of b.\n#b = 2\n#[[r]]\n#a = 3\n# Of c.\n#c = 4\n#b = 5\n\n# Shares.\n#[s.x]\n#a = 1\n#b = 2\n";
        assert_eq!(
            blocks(file),
            [
                Block::Subsection("[[r]]".to_owned()),
                text("Rules."),
                Block::term("`a` = 1", "Of a."),
                Block::term("`b` = 2", "Of b."),
                Block::term("`c` = 4", "Of c."),
                Block::Subsection("[s.x]".to_owned()),
                text("Shares."),
                Block::Code(vec!["a = 1".to_owned(), "b = 2".to_owned()]),
            ]
        );
    }
}
