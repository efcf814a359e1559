//! What a manual page is made of, and how it is written for man(1). Texts are lines of Markdown.

use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use super::page_of;

/// A part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// A heading.
    Section(String),
    /// A heading within a section.
    Subsection(String),
    /// A paragraph.
    Text(String),
    /// An item of a list.
    Item(String),
    /// One or several words, and what they mean, a line each.
    Term { words: Vec<String>, meaning: Vec<String> },
    /// Lines that stay as they are.
    Code(Vec<String>),
}

impl Block {
    pub(super) fn term(word: &str, meaning: &str) -> Self {
        Self::Term { words: vec![word.to_owned()], meaning: vec![meaning.to_owned()] }
    }
}

/// Appends `block` to `roff`.
pub(super) fn write_block(roff: &mut Roff, block: &Block) {
    match block {
        Block::Section(title) => roff.control("SH", [title.to_uppercase().as_str()]),
        Block::Subsection(title) => roff.control("SS", [title.as_str()]),
        Block::Text(text) => roff.control("PP", []).text(inlines(text)),
        Block::Item(text) => roff.control("IP", [r"\(bu", "2"]).text(inlines(text)),
        Block::Term { words, meaning } => write_term(roff, words, meaning),
        Block::Code(lines) => write_code(roff, lines),
    };
}

fn write_term<'r>(roff: &'r mut Roff, words: &[String], meaning: &[String]) -> &'r mut Roff {
    for (at, word) in words.iter().enumerate() {
        roff.control(if at == 0 { "TP" } else { "TQ" }, []).text(inlines(word));
    }
    for (at, line) in meaning.iter().enumerate() {
        if at > 0 {
            roff.control("br", []);
        }
        roff.text(inlines(line));
    }
    roff
}

fn write_code<'r>(roff: &'r mut Roff, lines: &[String]) -> &'r mut Roff {
    roff.control("PP", []).control("RS", ["4"]).control("EX", []);
    for line in lines {
        roff.text([roman(line)]);
    }
    roff.control("EE", []).control("RE", [])
}

/// `text` with code and strong words in bold, and links as what they name; in characters that every terminal has.
fn inlines(text: &str) -> Vec<Inline> {
    let text = text.replace('…', "...");
    let (mut found, mut rest) = (Vec::new(), &*text);
    let mut plain = String::new();
    while let Some(at) = rest.find(['`', '*', '[']) {
        plain.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some((marked, after)) = marked(rest) {
            found.push(roman(std::mem::take(&mut plain)));
            found.extend(marked);
            rest = after;
        } else {
            plain.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    found.push(roman(plain + rest));
    found.retain(|inline| *inline != roman(""));
    found
}

/// The code, strong words or link with which `text` begins, and what is behind it.
fn marked(text: &str) -> Option<(Vec<Inline>, &str)> {
    for mark in ["`", "**"] {
        if let Some((words, rest)) = text.strip_prefix(mark).and_then(|text| text.split_once(mark)) {
            return Some((vec![bold(words)], rest));
        }
    }
    let (words, rest) = text.strip_prefix('[')?.split_once("](")?;
    let (target, rest) = rest.split_once(')').filter(|_| !words.contains(['[', ']']))?;
    Some((link(words, target), rest))
}

/// A link to another page of the book is that page's name, or the manual page made of it.
fn link(words: &str, target: &str) -> Vec<Inline> {
    let path = target.split('#').next().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or_default();
    let name = page_of(file).map_or_else(|| vec![italic(file)], |(name, section)| reference(name, section));
    match file {
        "" => vec![roman(words)],
        _ if words == file => name,
        _ => [vec![roman(format!("{words} ("))], name, vec![roman(")")]].concat(),
    }
}

/// How a manual page names another one.
pub(super) fn reference(name: &str, section: &str) -> Vec<Inline> {
    vec![bold(name), roman(format!("({section})"))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(blocks: &[Block]) -> String {
        let mut roff = Roff::new();
        for block in blocks {
            write_block(&mut roff, block);
        }
        roff.to_roff()
    }

    fn line(text: &str) -> String {
        written(&[Block::Text(text.to_owned())]).trim_start_matches(".PP\n").to_owned()
    }

    #[test]
    fn blocks_are_macros() {
        let text = |text: &str| text.to_owned();
        let blocks = [
            Block::Section(text("In short")),
            Block::Subsection(text("[[a]]")),
            Block::Item(text("one")),
            Block::Term {
                words: vec![text("`a` = 1"), text("`b` = 2")],
                meaning: vec![text("this"), text("that")],
            },
            Block::Code(vec![text(".x = \\1"), text(""), text("  y")]),
        ];
        assert_eq!(
            written(&blocks),
            ".SH \"IN SHORT\"\n.SS [[a]]\n.IP \\(bu 2\none\n.TP\n\\fBa\\fR = 1\n.TQ\n\\fBb\\fR = 2\nthis\n.br\nthat\n\
             .PP\n.RS 4\n.EX\n\\&.x = \\\\1\n\n  y\n.EE\n.RE\n"
        );
    }

    #[test]
    fn marked_words_are_bold_and_links_are_names() {
        assert_eq!(
            line("run `a-b` **at once** [1, 2] * `x"),
            "run \\fBa\\-b\\fR \\fBat once\\fR [1, 2] * `x\n"
        );
        assert_eq!(line("[modes.md](modes.md)."), "\\fImodes.md\\fR.\n");
        assert_eq!(line("[of a pod](../docs/podman.md#pods)"), "of a pod (\\fIpodman.md\\fR)\n");
        assert_eq!(line("[Examples](#examples)"), "Examples\n");
        assert_eq!(line("`GPU-…`"), "\\fBGPU\\-...\\fR\n");
        assert_eq!(line("[[x]] and [it](configuration.md)"), "[[x]] and it (\\fBsublet\\-config\\fR(5))\n");
    }
}
