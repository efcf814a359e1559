//! Which `pub` items no other crate uses. By name: one that is used elsewhere under the same name counts as used.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Fields, ImplItem, Item, Visibility};

use crate::modules::Module;

/// The exports of a crate that neither `users`, which are directories, nor its other exports use.
pub fn check(modules: &[Module], users: &[&Path]) -> Result<Vec<String>> {
    let mut used = BTreeSet::new();
    for user in users {
        words_below(user, &mut used)?;
    }
    let named = exported_types(modules);
    let exports: Vec<Export> = modules.iter().flat_map(|module| exports(module, &named)).collect();
    for export in &exports {
        words(export.shown.clone(), &mut used);
    }
    let unused = exports.iter().filter(|export| !used.contains(&export.name));
    Ok(unused
        .map(|export| format!("{}: {} is pub, and no other crate uses it", export.place, export.name))
        .collect())
}

/// Something that is `pub`.
struct Export {
    name: String,
    place: String,
    /// What another crate sees of it: other types' names.
    shown: TokenStream,
}

/// What other crates can name: what stands in public modules, and what such modules re-export.
fn exported_types(modules: &[Module]) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    for item in modules.iter().filter(|module| module.public).flat_map(|module| &module.items) {
        match item {
            Item::Use(item) if is_public(&item.vis) => words(item.tree.to_token_stream(), &mut named),
            Item::Struct(item) if is_public(&item.vis) => drop(named.insert(item.ident.to_string())),
            Item::Enum(item) if is_public(&item.vis) => drop(named.insert(item.ident.to_string())),
            _ => {}
        }
    }
    named
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

/// The exports of one module; methods are those of types in `named`.
fn exports(module: &Module, named: &BTreeSet<String>) -> Vec<Export> {
    let mut all = Vec::new();
    let mut add = |visibility: &Visibility, ident: &syn::Ident, shown: TokenStream| {
        if is_public(visibility) && (module.public || named.contains(&ident.to_string())) {
            all.push(export(module, ident, shown));
        }
    };
    for item in &module.items {
        match item {
            Item::Fn(item) => add(&item.vis, &item.sig.ident, without_name(&item.sig)),
            Item::Struct(item) => add(&item.vis, &item.ident, fields(&item.fields)),
            Item::Enum(item) => {
                let shown = item.variants.iter().map(|variant| variant.fields.to_token_stream());
                add(&item.vis, &item.ident, shown.collect());
            }
            Item::Const(item) => add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Static(item) => add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Type(item) => add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Trait(item) => {
                let shown = item.items.iter().map(quote::ToTokens::to_token_stream);
                add(&item.vis, &item.ident, shown.collect());
            }
            _ => {}
        }
    }
    let inherent = module.items.iter().filter_map(|item| match item {
        Item::Impl(item) if item.trait_.is_none() => Some(item),
        _ => None,
    });
    for block in inherent {
        let mut of = BTreeSet::new();
        words(block.self_ty.to_token_stream(), &mut of);
        if of.is_disjoint(named) {
            continue;
        }
        for method in &block.items {
            let ImplItem::Fn(method) = method else { continue };
            if is_public(&method.vis) {
                all.push(export(module, &method.sig.ident, without_name(&method.sig)));
            }
        }
    }
    all
}

fn export(module: &Module, ident: &syn::Ident, shown: TokenStream) -> Export {
    let place = format!("{}:{}", module.file.display(), ident.span().start().line);
    Export { name: ident.to_string(), place, shown }
}

fn without_name(signature: &syn::Signature) -> TokenStream {
    [
        signature.inputs.to_token_stream(),
        signature.output.to_token_stream(),
        signature.generics.to_token_stream(),
    ]
    .into_iter()
    .collect()
}

fn fields(fields: &Fields) -> TokenStream {
    let shown = fields.iter().filter(|field| matches!(field.vis, Visibility::Public(_)));
    shown.map(|field| field.ty.to_token_stream()).collect()
}

/// Every name in the Rust files of `dir`.
fn words_below(dir: &Path, used: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            words_below(&path, used)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)?;
            words(text.parse().map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?, used);
        }
    }
    Ok(())
}

fn words(tokens: TokenStream, used: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                used.insert(word.to_string());
            }
            TokenTree::Group(group) => words(group.stream(), used),
            _ => {}
        }
    }
}
