//! A crate's modules as the compiler finds them, without those for tests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use syn::{Attribute, Item, ItemMod, LitStr, Meta, Visibility};

/// A module.
pub struct Module {
    /// Its path in the crate; empty for the crate's root.
    pub path: Vec<String>,
    /// The file it stands in.
    pub file: PathBuf,
    /// Whether other crates can name it: it and all above it are `pub`.
    pub public: bool,
    /// Its items but modules.
    pub items: Vec<Item>,
}

/// Every module of the crate whose `lib.rs` is in `dir`, the root first.
pub fn read(dir: &Path) -> Result<Vec<Module>> {
    let mut all = Vec::new();
    from_file(&dir.join("lib.rs"), dir, Place { path: Vec::new(), public: true }, &mut all)?;
    Ok(all)
}

/// Where a module stands in its crate.
struct Place {
    path: Vec<String>,
    public: bool,
}

/// Adds the module of `file`, whose own modules have their files in `below`.
fn from_file(file: &Path, below: &Path, place: Place, all: &mut Vec<Module>) -> Result<()> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let parsed = syn::parse_file(&text).with_context(|| file.display().to_string())?;
    from_items(parsed.items, file, below, place, all)
}

fn from_items(
    items: Vec<Item>,
    file: &Path,
    below: &Path,
    place: Place,
    all: &mut Vec<Module>,
) -> Result<()> {
    let (mut own, mut modules) = (Vec::new(), Vec::new());
    for item in items.into_iter().filter(|item| !is_for_tests(item)) {
        match item {
            Item::Mod(module) => modules.push(module),
            item => own.push(item),
        }
    }
    let Place { path, public } = place;
    all.push(Module { path: path.clone(), file: file.to_owned(), public, items: own });
    for module in modules {
        let name = module.ident.to_string();
        let below = below.join(&name);
        let public = public && matches!(module.vis, Visibility::Public(_));
        let place = Place { path: [path.as_slice(), &[name]].concat(), public };
        match module.content {
            Some((_, items)) => from_items(items, file, &below, place, all)?,
            None => from_file(&file_of(&module, file, &below)?, &below, place, all)?,
        }
    }
    Ok(())
}

fn file_of(module: &ItemMod, from: &Path, below: &Path) -> Result<PathBuf> {
    for attribute in module.attrs.iter().filter(|attribute| attribute.path().is_ident("path")) {
        if let Meta::NameValue(named) = &attribute.meta {
            let syn::Expr::Lit(literal) = &named.value else { continue };
            let name: LitStr = syn::parse2(quote::ToTokens::to_token_stream(&literal.lit))?;
            return Ok(from.with_file_name(name.value()));
        }
    }
    let beside = below.with_extension("rs");
    Ok(if beside.exists() { beside } else { below.join("mod.rs") })
}

/// Whether an item is there for tests alone.
fn is_for_tests(item: &Item) -> bool {
    attributes(item).iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string();
            condition.starts_with("test")
                || condition.starts_with("any (test")
                || condition.starts_with("any(test")
                || condition.starts_with("feature = \"fixtures\"")
        }
        meta => meta.path().is_ident("test"),
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
