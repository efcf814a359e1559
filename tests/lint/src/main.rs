//! `make lint`: what the compiler does not check of the product's crates.
//!
//! - Layers. `lib.rs` lists a crate's modules, the lowest first, with empty lines between layers: a module uses only
//!   modules of layers below its own. No two modules anywhere use each other in a circle.
//! - Exports. What a crate has `pub` is used by another crate, or is part of what is.
//! - Names. None is a riddle, such as `told` or `what_is_left`: in tests, too.
//! - Questions. What the appendix of docs/design.md names exists.
//!
//! For layers and exports, code for tests alone is passed over.

mod exports;
mod layers;
mod modules;
mod names;
mod questions;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};

/// The product's crates, and the directories whose code may use them.
const CRATES: [&str; 3] = ["src/core", "src/runtime", "src/cli"];
const USERS: [&str; 5] = ["src/runtime", "src/cli", "tests", "fuzz/targets", "packaging/generate"];

fn main() -> Result<ExitCode> {
    let mut found = Vec::new();
    for dir in CRATES {
        let modules = modules::read(Path::new(dir)).with_context(|| format!("{dir} cannot be read"))?;
        found.extend(layers::check(Path::new(dir), &modules)?);
        let users: Vec<_> = USERS.iter().filter(|user| **user != dir).map(Path::new).collect();
        found.extend(exports::check(&modules, &users)?);
    }
    found.extend(names::check(Path::new("src"))?);
    found.extend(questions::check()?);
    for line in &found {
        eprintln!("lint: {line}");
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
