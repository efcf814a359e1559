//! Which module uses which, and whether that goes downwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Result;
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens as _;

use crate::modules::Module;

/// Modules side by side, by their common path: which module uses which, and where.
type Uses = BTreeMap<Vec<String>, BTreeMap<(String, String), String>>;

/// What is wrong with the modules of the crate in `dir`.
pub fn check(dir: &Path, modules: &[Module]) -> Result<Vec<String>> {
    let uses = uses(modules);
    let layer_of = layers(&fs::read_to_string(dir.join("lib.rs"))?);
    let mut found = Vec::new();
    for ((from, to), place) in uses.get(&Vec::new()).into_iter().flatten() {
        let (Some(own), Some(other)) = (layer_of.get(from), layer_of.get(to)) else { continue };
        if other >= own {
            let where_to = if other == own { "of its own layer" } else { "of a higher layer" };
            found.push(format!("{place}: {from} uses {to}, {where_to} ({}/lib.rs)", dir.display()));
        }
    }
    for (common, edges) in &uses {
        let within = [&[dir.display().to_string()], common.as_slice()].concat().join("/");
        for circle in circles(edges) {
            found
                .push(format!("{within}: modules use each other in a circle: {}", described(&circle, edges)));
        }
    }
    Ok(found)
}

fn described(circle: &BTreeSet<String>, edges: &BTreeMap<(String, String), String>) -> String {
    let within = edges.iter().filter(|((from, to), _)| circle.contains(from) && circle.contains(to));
    let uses: Vec<_> = within.map(|((from, to), place)| format!("{from} uses {to} ({place})")).collect();
    uses.join(", ")
}

/// The number of each module's layer: groups of `mod` lines with empty lines between them.
fn layers(text: &str) -> BTreeMap<String, usize> {
    let mut layers = BTreeMap::new();
    for (number, group) in text.split("\n\n").enumerate() {
        for line in group.lines() {
            let line = line.trim_start_matches("pub ");
            if let Some(name) = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
                layers.insert(name.to_owned(), number);
            }
        }
    }
    layers
}

fn uses(modules: &[Module]) -> Uses {
    let known: BTreeSet<&[String]> = modules.iter().map(|module| module.path.as_slice()).collect();
    let mut uses = Uses::new();
    for module in modules {
        for item in &module.items {
            let mut paths = Vec::new();
            absolute_paths(item.to_token_stream(), &module.path, &mut paths);
            for (path, line) in paths {
                let Some((common, from, to)) = neighbours(&module.path, &path, &known) else { continue };
                let place = format!("{}:{line}", module.file.display());
                uses.entry(common).or_default().entry((from, to)).or_insert(place);
            }
        }
    }
    uses
}

/// The two modules side by side that `from` and the module that `path` leads to lie in.
fn neighbours(
    from: &[String],
    path: &[String],
    known: &BTreeSet<&[String]>,
) -> Option<(Vec<String>, String, String)> {
    let longest = (1..=path.len()).rev().find(|length| known.contains(&path[..*length]))?;
    let to = &path[..longest];
    let common = from.iter().zip(to).take_while(|(one, other)| one == other).count();
    Some((from[..common].to_vec(), from.get(common)?.clone(), to.get(common)?.clone()))
}

/// The paths in `tokens` that begin with `crate` or `super`, as paths from the crate's root, each with its line.
fn absolute_paths(tokens: TokenStream, module: &[String], paths: &mut Vec<(Vec<String>, usize)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(word) if word == "crate" => {
                at = follow(&tokens, at + 1, Vec::new(), paths);
            }
            TokenTree::Ident(word) if word == "super" => {
                let above = module.split_last().map_or(&[][..], |(_, above)| above);
                at = follow(&tokens, at + 1, above.to_vec(), paths);
            }
            TokenTree::Group(group) => {
                absolute_paths(group.stream(), module, paths);
                at += 1;
            }
            _ => at += 1,
        }
    }
}

/// Takes the rest of a path, which has come to `path`; where it goes on in braces, each of them. Returns where it ends.
fn follow(
    tokens: &[TokenTree],
    mut at: usize,
    mut path: Vec<String>,
    paths: &mut Vec<(Vec<String>, usize)>,
) -> usize {
    loop {
        if !is_separator(tokens, at) {
            break;
        }
        match tokens.get(at + 2) {
            Some(TokenTree::Ident(word)) if word == "super" => {
                path.pop();
            }
            Some(TokenTree::Ident(word)) => path.push(word.to_string()),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                for part in
                    inner.split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ','))
                {
                    let Some(TokenTree::Ident(first)) = part.first() else { continue };
                    let mut whole = path.clone();
                    if first != "self" {
                        whole.push(first.to_string());
                    }
                    follow(part, 1, whole, paths);
                }
                return at + 3;
            }
            _ => break,
        }
        at += 3;
    }
    let line = tokens.get(at.saturating_sub(1)).map_or(0, |token| token.span().start().line);
    paths.push((path, line));
    at
}

fn is_separator(tokens: &[TokenTree], at: usize) -> bool {
    let is_colon =
        |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(colon)) if colon.as_char() == ':');
    is_colon(tokens.get(at)) && is_colon(tokens.get(at + 1))
}

/// The sets of more than one module each of which leads to all others of its set.
fn circles(edges: &BTreeMap<(String, String), String>) -> Vec<BTreeSet<String>> {
    let names: BTreeSet<&String> = edges.keys().flat_map(|(from, to)| [from, to]).collect();
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        names.iter().map(|name| (*name, reachable(name, edges))).collect();
    let mut circles = BTreeSet::new();
    for name in &names {
        let circle: BTreeSet<String> = names
            .iter()
            .filter(|other| reach[name].contains(**other) && reach[*other].contains(name))
            .map(|other| (*other).clone())
            .collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reachable<'a>(name: &'a String, edges: &'a BTreeMap<(String, String), String>) -> BTreeSet<&'a String> {
    let (mut seen, mut open) = (BTreeSet::new(), vec![name]);
    while let Some(next) = open.pop() {
        for (_, to) in edges.keys().filter(|(from, _)| from == next) {
            if seen.insert(to) {
                open.push(to);
            }
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(path: &[&str], text: &str) -> Module {
        let items = syn::parse_file(text).unwrap().items;
        Module {
            path: path.iter().map(|name| (*name).to_owned()).collect(),
            file: "f.rs".into(),
            public: true,
            items,
        }
    }

    fn edges(modules: &[Module]) -> Vec<(String, String)> {
        uses(modules).remove(&Vec::new()).unwrap_or_default().into_keys().collect()
    }

    #[test]
    fn every_form_of_a_path_is_seen() {
        for text in [
            "use crate::b;",
            "use crate::b::X;",
            "use crate::{std as s, b::{X, Y}};",
            "use super::b::X;",
            "fn f() { crate::b::g(); }",
            "fn f() { println!(\"{}\", crate::b::g()); }",
            "fn f(x: &[super::b::X]) {}",
        ] {
            let found = edges(&[module(&["a"], text), module(&["b"], "")]);
            assert_eq!(found, [("a".to_owned(), "b".to_owned())], "{text}");
        }
        let deep = module(&["a", "c"], "use super::super::b;");
        assert_eq!(edges(&[deep, module(&["b"], "")]).len(), 1);
        assert!(edges(&[module(&["a"], "use crate::a::X; use std::b;"), module(&["b"], "")]).is_empty());
    }

    #[test]
    fn a_circle_is_found_and_a_line_is_none() {
        let two = [module(&["a"], "use crate::b;"), module(&["b"], "use crate::c;"), module(&["c"], "")];
        assert!(circles(&uses(&two)[&Vec::new()]).is_empty());
        let circle = [
            module(&["a"], "use crate::b;"),
            module(&["b"], "use crate::c;"),
            module(&["c"], "use super::a;"),
        ];
        assert_eq!(circles(&uses(&circle)[&Vec::new()]).len(), 1);
    }

    #[test]
    fn groups_of_lines_are_layers() {
        let layers = layers("//! x\n\npub mod a;\n\npub mod b;\nmod c;\n");
        assert_eq!((layers["a"] < layers["b"], layers["b"] == layers["c"]), (true, true));
    }
}
