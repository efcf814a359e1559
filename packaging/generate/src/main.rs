//! `sublet-generate docs DIRECTORY` writes the man pages and shell completions of `sublet` into DIRECTORY, from the
//! same source as `--help`, and the man pages of annotations and configuration files, from the pages of the book.
//! `sublet-generate sbom TARGET LIBC` prints the list of what the programs are made of (`CycloneDX`). For building
//! packages; the product does not carry what makes them.

mod manual;
mod sbom;

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use clap_complete::Shell;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["docs", directory] => docs(Path::new(directory)),
        ["sbom", target, libc] => {
            println!("{}", serde_json::to_string_pretty(&sbom::of(target, libc)?)?);
            Ok(())
        }
        _ => bail!("usage: sublet-generate docs DIRECTORY | sbom TARGET LIBC"),
    }
}

fn docs(directory: &Path) -> Result<()> {
    let mut command = sublet::commands::command();
    let completions = directory.join("completions");
    std::fs::create_dir_all(&completions)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "sublet", &completions)?;
    }
    let pages = directory.join("man");
    std::fs::create_dir_all(&pages)?;
    manual::write(&pages).context("man pages")
}
