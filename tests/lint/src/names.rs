//! Names that leave out what they stand for, in the product's crates and their tests. docs/glossary.md: a name says what
//! it holds, and a function's name is a verb and its object. Strings and comments are passed over.

use std::fs;
use std::path::Path;

use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};

/// What no name may have in it, where `_` stands before and after each name.
const REFUSED: [&str; 5] = ["_told_", "Told", "_others_", "_those_of_", "_what_"];
/// A key of the file that `sublet bench run` writes.
const KEPT: [&str; 1] = ["in_use_by_others"];

/// Such names in the Rust files of `dir`, a line each.
pub fn check(dir: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(check(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)?;
            let place = path.display().to_string();
            let code: TokenStream = text.parse().map_err(|error| anyhow::anyhow!("{place}: {error}"))?;
            names(code, &place, &mut found);
        }
    }
    Ok(found)
}

fn names(code: TokenStream, place: &str, found: &mut Vec<String>) {
    for token in code {
        match token {
            TokenTree::Ident(name) if is_refused(&name.to_string()) => {
                let line = name.span().start().line;
                found.push(format!("{place}:{line}: {name} does not say what it stands for"));
            }
            TokenTree::Group(group) => names(group.stream(), place, found),
            _ => {}
        }
    }
}

/// A last `what` has nothing behind it to leave out.
fn is_refused(name: &str) -> bool {
    let framed = format!("_{name}_");
    let framed = framed.trim_end_matches("what_");
    !KEPT.contains(&name) && REFUSED.iter().any(|part| framed.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_refused_by_their_parts_and_strings_and_comments_are_not() {
        for name in ["told", "is_told", "Told", "LabelsTold", "others", "those_of", "what_is", "and_what_is"]
        {
            assert!(is_refused(name), "{name}");
        }
        for name in ["what", "says_what", "threshold", "untold", "in_use_by_others", "somewhat_old"] {
            assert!(!is_refused(name), "{name}");
        }
        let code = "/// told\nfn a() { let told = \"others\"; // what_is\n b!(others); }";
        let mut found = Vec::new();
        names(code.parse().unwrap(), "x.rs", &mut found);
        let expected = ["x.rs:2: told", "x.rs:3: others"]
            .map(|fault| format!("{fault} does not say what it stands for"));
        assert_eq!(found, expected);
    }
}
