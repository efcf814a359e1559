//! `sublet-generate DIRECTORY`: writes the man pages and shell completions of `sublet` into DIRECTORY, from the
//! same source as `--help`. For building packages; the product does not carry what makes them.

use std::path::Path;

use anyhow::{Context as _, Result};
use clap_complete::Shell;

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("usage: sublet-generate DIRECTORY")?;
    let command = sublet::commands::command();
    let completions = Path::new(&directory).join("completions");
    std::fs::create_dir_all(&completions)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command.clone(), "sublet", &completions)?;
    }
    let pages = Path::new(&directory).join("man");
    std::fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(command, pages).context("man pages")
}
