//! The manual pages: of commands as clap has them, and of annotations and files from the pages of the book, so that one text
//! serves both.

mod markdown;
mod roff;
#[cfg(test)]
mod tests;
mod toml_comments;

use std::path::Path;

use anyhow::{Context as _, Result};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, line_break, roman};

use roff::{Block, reference, write_block};

/// A page that is made of one of the book's.
struct Page {
    name: &'static str,
    section: &'static str,
    about: &'static str,
    synopsis: &'static [&'static str],
    /// The book's page: its name in docs, and its text.
    source: (&'static str, &'static str),
    files: &'static [(&'static str, &'static str)],
}

const CONFIG: (&str, &str) = ("`/etc/sublet/config.toml`", "The configuration: sublet-config(5).");
const CONTAINERS: (&str, &str) =
    ("`/etc/sublet/containers.toml`", "Shares for containers without annotations: sublet-containers(5).");
const DOCS: (&str, &str) =
    ("`/usr/share/doc/sublet`", "The pages of the documentation (docs) that are named here.");

static PAGES: [Page; 3] = [
    Page {
        name: "sublet-annotations",
        section: "7",
        about: "annotations by which containers get shares of NVIDIA GPUs",
        synopsis: &[
            "docker run --runtime sublet --annotation sublet.KEY=VALUE IMAGE",
            "podman run --annotation sublet.KEY=VALUE IMAGE",
        ],
        source: ("annotations.md", include_str!("../../../../docs/annotations.md")),
        files: &[CONFIG, CONTAINERS, DOCS],
    },
    Page {
        name: "sublet-config",
        section: "5",
        about: "configuration of sublet",
        synopsis: &["/etc/sublet/config.toml", "/etc/sublet/conf.d/*.toml", "/usr/lib/sublet/conf.d/*.toml"],
        source: ("configuration.md", include_str!("../../../../docs/configuration.md")),
        files: &[
            ("`/usr/share/doc/sublet/config.toml`", "This text as a file, with every key commented out."),
            CONTAINERS,
            DOCS,
        ],
    },
    Page {
        name: "sublet-containers",
        section: "5",
        about: "shares of GPUs for containers without annotations",
        synopsis: &["/etc/sublet/containers.toml"],
        source: ("containers.md", include_str!("../../../../docs/containers.md")),
        files: &[
            ("`/usr/share/doc/sublet/containers.toml`", "The file with every key commented out."),
            CONFIG,
            DOCS,
        ],
    },
];

/// What a page of the book may include, by its path in the source.
const INCLUDED: [(&str, &str); 2] = [
    ("config/config.toml", include_str!("../../../../config/config.toml")),
    ("config/containers.toml", include_str!("../../../../config/containers.toml")),
];

/// The pages that every page names.
const SEE_ALSO: [(&str, &str); 6] = [
    ("sublet", "1"),
    ("sublet-annotations", "7"),
    ("sublet-config", "5"),
    ("sublet-containers", "5"),
    ("sublet-hook", "8"),
    ("sublet-runtime", "8"),
];

/// Writes all pages into `directory`.
pub(crate) fn write(directory: &Path) -> Result<()> {
    let mut command = sublet::commands::command().disable_help_subcommand(true);
    command.build();
    write_commands(&command, directory)?;
    for page in &PAGES {
        std::fs::write(directory.join(page.file_name()), page.render()?)?;
    }
    Ok(())
}

fn write_commands(command: &clap::Command, directory: &Path) -> Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_commands(inner, directory)?;
    }
    let page = Man::new(command.clone());
    std::fs::write(directory.join(page.get_filename()), of_command(&page)?)?;
    Ok(())
}

fn of_command(page: &Man) -> Result<Vec<u8>> {
    let (mut text, mut end) = (Vec::new(), Roff::new());
    page.render(&mut text)?;
    write_see_also(&mut end, &page.get_filename());
    text.extend(end.to_roff().bytes());
    Ok(text)
}

impl Page {
    fn file_name(&self) -> String {
        format!("{}.{}", self.name, self.section)
    }

    fn blocks(&self) -> Result<Vec<Block>> {
        markdown::blocks(self.source.1).context(self.source.0)
    }

    fn render(&self) -> Result<String> {
        let mut roff = Roff::new();
        let version = concat!("sublet ", env!("CARGO_PKG_VERSION"));
        roff.control("TH", [self.name.to_uppercase().as_str(), self.section, "\"\"", version, "sublet"]);
        // What is to be typed stays in one piece.
        roff.control("nh", []).control("ad", ["l"]);
        roff.control("SH", ["NAME"]).text([roman(format!("{} - {}", self.name, self.about))]);
        let synopsis: Vec<_> = self.synopsis.iter().map(|line| [bold(*line)]).collect();
        roff.control("SH", ["SYNOPSIS"]).text(synopsis.join(&line_break()));
        roff.control("SH", ["DESCRIPTION"]);
        let files = self.files.iter().map(|(file, what)| Block::term(file, what));
        let blocks = self.blocks()?.into_iter().chain([Block::Section("Files".to_owned())]).chain(files);
        blocks.for_each(|block| write_block(&mut roff, &block));
        write_see_also(&mut roff, &self.file_name());
        Ok(roff.render())
    }
}

/// The other pages than the one in the file `own`.
fn write_see_also(roff: &mut Roff, own: &str) {
    let others = SEE_ALSO.iter().filter(|(name, section)| format!("{name}.{section}") != own);
    let named: Vec<_> = others.map(|(name, section)| reference(name, section)).collect();
    roff.control("SH", ["SEE ALSO"]).text(named.join(&roman(", ")));
}

/// Name and section of the manual page that is made of the book's page `file`.
fn page_of(file: &str) -> Option<(&'static str, &'static str)> {
    let page = PAGES.iter().find(|page| page.source.0 == file)?;
    Some((page.name, page.section))
}
