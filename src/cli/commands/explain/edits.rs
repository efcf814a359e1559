//! What is done to a container for its share: environment, device nodes, mounts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use sublet_core::grant::{Grant, Mount, refused_beside};
use sublet_core::inventory::Node;

/// The same for machines.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Edits<'a> {
    /// Variables that are set, whatever the image has.
    #[schemars(with = "BTreeMap<String, String>")]
    environment: Map<String, Value>,
    /// Variables that are set where the image has none of that name.
    #[schemars(with = "BTreeMap<String, String>")]
    environment_where_unset: Map<String, Value>,
    nodes: Vec<ShownNode>,
    /// All are read-only.
    mounts: Vec<ShownMount<'a>>,
    /// Paths that are empty in the container.
    hidden: &'a [PathBuf],
}

/// A device node.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ShownNode {
    path: PathBuf,
    major: u32,
    minor: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ShownMount<'a> {
    /// On the host.
    source: &'a Path,
    /// In the container.
    destination: &'a Path,
}

impl<'a> Edits<'a> {
    pub fn of(grant: &'a Grant) -> Self {
        let variables = |list: &[(String, String)]| {
            list.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect()
        };
        let mount = |mount: &'a Mount| ShownMount { source: &mount.source, destination: &mount.destination };
        Self {
            environment: variables(&grant.env.set),
            environment_where_unset: variables(&grant.env.default),
            nodes: grant.nodes.iter().map(|granted| granted.node.clone().into()).collect(),
            mounts: grant.mounts.iter().map(mount).collect(),
            hidden: &grant.masked_paths,
        }
    }
}

impl From<Node> for ShownNode {
    fn from(node: Node) -> Self {
        let Node { path, major, minor } = node;
        Self { path, major, minor }
    }
}

/// For people.
pub fn print(grant: &Grant) {
    println!("\nEnvironment");
    for (name, value) in &grant.env.set {
        println!("  {name}={value}");
    }
    for (name, value) in &grant.env.default {
        let beside = refused_beside(name).map(|other| format!(", and {other} too")).unwrap_or_default();
        println!("  {name}={value} (where unset{beside})");
    }
    println!("Device nodes");
    for granted in &grant.nodes {
        println!("  {} {}:{}", granted.node.path.display(), granted.node.major, granted.node.minor);
    }
    println!("Mounts, read-only");
    for mount in &grant.mounts {
        println!("  {} from {}", mount.destination.display(), mount.source.display());
    }
    for path in &grant.masked_paths {
        println!("  {} hidden", path.display());
    }
}

/// The changes to a bundle's config.json.
pub fn diff(before: &Value, after: &Value) -> anyhow::Result<String> {
    let (before, after) = (serde_json::to_string_pretty(before)?, serde_json::to_string_pretty(after)?);
    let diff = similar::TextDiff::from_lines(&before, &after);
    Ok(diff.unified_diff().context_radius(2).header("config.json", "config.json for this share").to_string())
}
