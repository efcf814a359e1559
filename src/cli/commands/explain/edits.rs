//! What is done to a container for its share: environment, device nodes, mounts.

use serde_json::{Value, json};

use sublet_core::grant::{Grant, refused_beside};

/// For machines.
pub fn document(grant: &Grant) -> Value {
    let variables = |list: &[(String, String)]| {
        list.iter()
            .map(|(name, value)| (name.clone(), value.clone().into()))
            .collect::<serde_json::Map<_, _>>()
    };
    json!({
        "environment": variables(&grant.env.set),
        "environment_where_unset": variables(&grant.env.default),
        "nodes": grant.nodes.iter().map(|granted| &granted.node).collect::<Vec<_>>(),
        "mounts": grant.mounts,
        "hidden": grant.masked_paths,
    })
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
///
/// # Errors
/// It cannot be written as JSON.
pub fn diff(before: &Value, after: &Value) -> anyhow::Result<String> {
    let (before, after) = (serde_json::to_string_pretty(before)?, serde_json::to_string_pretty(after)?);
    let diff = similar::TextDiff::from_lines(&before, &after);
    Ok(diff.unified_diff().context_radius(2).header("config.json", "config.json for this share").to_string())
}
