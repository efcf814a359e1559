//! What is linked into the programs, as `CycloneDX` 1.6: crates as cargo resolves them for each program and target, the
//! standard library and the C library. Without a date or a serial number: the same commit gives the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// The programs, each with the C library in it or not.
const PROGRAMS: [(&str, bool); 3] = [("sublet", false), ("sublet-runtime", true), ("sublet-share", true)];

/// A crate that is linked into a program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    license: String,
}

impl Crate {
    /// Its package URL, which is its name in the document, too.
    fn purl(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// Crates, with those on which each depends.
type Graph = BTreeMap<Crate, BTreeSet<Crate>>;

/// The document for the programs built for `target`. `libc` is what the C library says of itself.
///
/// # Errors
/// cargo cannot tell what the programs depend on.
pub(crate) fn of(target: &str, libc: &str) -> Result<Value> {
    ensure!(!libc.is_empty(), "no version was found in libc.a, which is linked into the static programs");
    let lock =
        std::fs::read_to_string("Cargo.lock").context("Cargo.lock: run it at the top of the source")?;
    let rust =
        ask(&mut Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())), &["--version"])?;
    let mut graph = Graph::new();
    let mut programs = Vec::new();
    for (name, is_static) in PROGRAMS {
        let root = add(&mut graph, &tree(name, target)?)?;
        programs.push((root, is_static));
    }
    Ok(document(&graph, &programs, &checksums(&lock), &rust, libc))
}

fn document(
    graph: &Graph,
    programs: &[(Crate, bool)],
    checksums: &BTreeMap<(String, String), String>,
    rust: &str,
    libc: &str,
) -> Value {
    let version = &programs[0].0.version;
    let is_program = |found: &Crate| programs.iter().any(|(program, _)| program == found);
    let libraries = graph.keys().filter(|found| !is_program(found));
    let mut components: Vec<Value> = libraries
        .map(|found| {
            let mut component = described("library", found);
            if let Some(checksum) = checksums.get(&(found.name.clone(), found.version.clone())) {
                component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
            }
            component
        })
        .collect();
    components.push(json!({"type": "library", "bom-ref": "rust-std", "name": "rust-std",
        "version": rust.split(' ').nth(1).unwrap_or(rust), "description": rust}));
    components.push(json!({"type": "library", "bom-ref": "libc", "name": "glibc",
        "version": libc_version(libc), "description": libc}));
    let dependencies: Vec<Value> = graph
        .iter()
        .map(|(of, on)| {
            let mut on: Vec<String> = on.iter().map(Crate::purl).collect();
            if let Some((_, is_static)) = programs.iter().find(|(program, _)| program == of) {
                on.push("rust-std".to_owned());
                on.extend(is_static.then(|| "libc".to_owned()));
            }
            json!({"ref": of.purl(), "dependsOn": on})
        })
        .collect();
    let programs: Vec<Value> =
        programs.iter().map(|(program, _)| described("application", program)).collect();
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "bom-ref": "programs", "name": "sublet", "version": version,
            "licenses": [{"expression": "Apache-2.0"}], "components": programs}},
        "components": components,
        "dependencies": dependencies,
    })
}

fn described(kind: &str, found: &Crate) -> Value {
    json!({"type": kind, "bom-ref": found.purl(), "name": found.name, "version": found.version,
        "licenses": [{"expression": found.license}], "purl": found.purl()})
}

/// `2.36-9+deb12u14` of `GNU C Library (Debian GLIBC 2.36-9+deb12u14) stable release version 2.36`.
fn libc_version(says: &str) -> &str {
    let packaged =
        says.split_once("GLIBC ").and_then(|(_, rest)| rest.split_once(')')).map(|(version, _)| version);
    packaged.or_else(|| says.rsplit(' ').next()).unwrap_or(says)
}

/// The tree of what is linked into `program`, a line a crate: depth, name, version and licence.
fn tree(program: &str, target: &str) -> Result<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    ask(
        Command::new(cargo).args([
            "tree",
            "--locked",
            "--edges",
            "normal,no-proc-macro",
            "--prefix",
            "depth",
        ]),
        &["--format", "|{p}|{l}|", "--target", target, "--package", program],
    )
}

fn ask(command: &mut Command, arguments: &[&str]) -> Result<String> {
    let output = command.args(arguments).output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
}

/// Adds the crates of a tree. Returns the first.
fn add(graph: &mut Graph, tree: &str) -> Result<Crate> {
    let mut above: Vec<Crate> = Vec::new();
    for line in tree.lines() {
        let mut fields = line.split('|');
        let mut field = || fields.next().with_context(|| format!("cargo tree: {line}"));
        let (depth, package, license) = (field()?.parse()?, field()?, field()?);
        let mut words = package.split(' ');
        let mut word = || words.next().with_context(|| format!("cargo tree: {line}"));
        let found = Crate {
            name: word()?.to_owned(),
            version: word()?.trim_start_matches('v').to_owned(),
            license: expression(license),
        };
        above.truncate(depth);
        if let Some(parent) = above.last() {
            graph.entry(parent.clone()).or_default().insert(found.clone());
        }
        graph.entry(found.clone()).or_default();
        above.push(found);
    }
    above.into_iter().next().context("cargo tree printed nothing")
}

/// Crates from before SPDX expressions write `MIT/Apache-2.0`.
fn expression(license: &str) -> String {
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// The checksum of each crate's archive, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |package: &str, key: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""))?;
        Some(line.trim_end_matches('"').to_owned())
    };
    lock.split("[[package]]")
        .filter_map(|package| {
            Some(((value(package, "name")?, value(package, "version")?), value(package, "checksum")?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = "0|top v0.1.0 (/x)|Apache-2.0|\n1|a v1.0.0|MIT/Apache-2.0|\n2|b v2.1.0+x|MIT|\n1|b v2.1.0+x|MIT|\n1|c v3.0.0|MIT| (*)";
    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nsource = \"s\"\nchecksum = \"0123\"\n\n[[package]]\nname = \"top\"\nversion = \"0.1.0\"\n";

    #[test]
    fn a_tree_becomes_components_and_what_they_depend_on() {
        let mut graph = Graph::new();
        let top = add(&mut graph, TREE).unwrap();
        let document = document(
            &graph,
            &[(top, true)],
            &checksums(LOCK),
            "rustc 1.95.0 (x)",
            "GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36",
        );
        let names = |list: &Value| {
            list.as_array()
                .unwrap()
                .iter()
                .map(|c| format!("{} {}", c["name"], c["version"]).replace('"', ""))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(&document["components"]),
            ["a 1.0.0", "b 2.1.0+x", "c 3.0.0", "rust-std 1.95.0", "glibc 2.36-9"]
        );
        assert_eq!(names(&document["metadata"]["component"]["components"]), ["top 0.1.0"]);
        assert_eq!(document["components"][0]["hashes"][0]["content"], "0123");
        assert_eq!(document["components"][0]["licenses"][0]["expression"], "MIT OR Apache-2.0");
        let on = |of: &str| {
            let all = document["dependencies"].as_array().unwrap();
            all.iter().find(|entry| entry["ref"] == of).unwrap()["dependsOn"].clone()
        };
        assert_eq!(
            on("pkg:cargo/top@0.1.0"),
            json!(["pkg:cargo/a@1.0.0", "pkg:cargo/b@2.1.0+x", "pkg:cargo/c@3.0.0", "rust-std", "libc"])
        );
        assert_eq!(on("pkg:cargo/a@1.0.0"), json!(["pkg:cargo/b@2.1.0+x"]));
        assert!(add(&mut graph, "0|nonsense|MIT|").is_err() && add(&mut graph, "").is_err());
    }

    #[test]
    fn a_c_library_that_is_not_debians_has_a_version_too() {
        assert_eq!(libc_version("GNU C Library (GNU libc) stable release version 2.39"), "2.39");
    }
}
