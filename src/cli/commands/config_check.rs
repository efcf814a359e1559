//! The part of `sublet config check` that looks at more than the files: at the layout, the host's users, and rules of
//! several files together.

use std::path::Path;

use crate::doctor;
use crate::mig::Layout;
use sublet_core::config::{Config, PolicyRule};
use sublet_core::config_files::{Containers, OneFile};
use sublet_core::text::safe;

/// What was found, one line each.
#[derive(Debug, Default)]
pub struct Found {
    /// What can never work as it is written.
    pub errors: Vec<String>,
    /// What works, but perhaps not as it is meant.
    pub warnings: Vec<String>,
}

/// Looks at all files. `etc`: the directory that stands for `/etc/sublet`, if another one does.
pub fn found(files: &[OneFile], etc: Option<&Path>) -> Found {
    let mut found = Found::default();
    let mut aliases: Vec<String> = Vec::new();
    for file in files {
        found.errors.extend(layout(file, etc));
        found.errors.extend(unknown_users(file));
        for (index, rule) in file.config.device.iter().enumerate() {
            let Some(name) = &rule.name else { continue };
            if aliases.contains(name) {
                found.warnings.push(same_alias(file, index, name));
            }
            aliases.push(name.clone());
        }
    }
    found
}

/// sublet-mig.service would fail at boot.
fn layout(file: &OneFile, etc: Option<&Path>) -> Option<String> {
    let path = file.config.mig.layout.as_deref()?;
    let instead = etc.and_then(|etc| Some(etc.join(path.strip_prefix("/etc/sublet").ok()?)));
    let error = Layout::read(instead.as_deref().unwrap_or(path), None).err()?;
    Some(file.about(&["mig", "layout"], &error.to_string()).to_string())
}

/// The rules of a user or group that this host does not have. They never apply.
fn unknown_users(file: &OneFile) -> Vec<String> {
    let problem = |(index, rule): (usize, &PolicyRule)| {
        let name = doctor::unknown(rule)?;
        let key = if rule.user.is_some() { "user" } else { "group" };
        let message = format!("this host has no {name}, so the rule never applies");
        Some(file.about(&["policy", &index.to_string(), key], &message).to_string())
    };
    file.config.policy.iter().enumerate().filter_map(problem).collect()
}

/// It may be meant: the name then stands for any of the devices.
fn same_alias(file: &OneFile, index: usize, name: &str) -> String {
    let name = safe(name);
    let message =
        format!("another [[device]] is called {name} too: sublet.gpu=name:{name} takes any of their devices");
    file.about(&["device", &index.to_string(), "name"], &message).to_string()
}

/// A container whose mapped share does not exist is refused at its start, so the check reports it here. `path`: where
/// `containers` is.
pub fn unknown_share(containers: &Containers, path: &Path, config: &Config) -> Option<String> {
    let share = containers.unknown_share(config)?;
    Some(format!(
        "configuration {}: the configuration has no [share.{share}]: add it, or name another share",
        path.display(),
        share = safe(share)
    ))
}
