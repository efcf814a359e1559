//! Whether containerd, with the files that its configuration imports, reads what a setup writes. What it does with a table
//! that stands in several files differs between its versions, so it is asked.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};
use toml::{Table, Value};

use super::{SetupError, Wish, containerd, toml};
use sublet_core::text::safe;

/// Checks `text`, which is to become `path`. `ask` runs a program of the host.
///
/// # Errors
/// An imported file takes the place of sublet's lines, or containerd does not read the file.
pub fn check(
    path: &Path,
    text: &str,
    wish: &Wish,
    ask: fn(&[&str]) -> Option<String>,
) -> Result<(), SetupError> {
    let mut file = toml(text)?;
    let imports = file.get_mut("imports").and_then(Value::as_array_mut).filter(|imports| !imports.is_empty());
    let Some(imports) = imports.filter(|_| ask(&["containerd", "--version"]).is_some()) else {
        return Ok(());
    };
    // A copy is read, so that nothing is changed yet. It has no directory that names could be relative to.
    let beside = path.parent().unwrap_or(Path::new("/"));
    for import in imports {
        if let Some(name) = import.as_str() {
            *import = Value::String(beside.join(name).to_string_lossy().into_owned());
        }
    }
    let read = || {
        let mut copy = File::from(memfd_create(c"config.toml", MFdFlags::MFD_CLOEXEC).ok()?);
        copy.write_all(file.to_string().as_bytes()).ok()?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), copy.as_raw_fd());
        ask(&["containerd", "--config", &path, "config", "dump"])
    };
    let dump = read().ok_or_else(|| SetupError::Unread(safe(&path.to_string_lossy())))?;
    containerd::has(&dump, wish).map_err(|_| {
        let names = replacing(&dump).iter().map(|file| safe(file)).collect::<Vec<_>>();
        SetupError::Replaced { files: names.join(", ") }
    })
}

/// The imported files that have the table of the plugin for pods, of what containerd read.
fn replacing(dump: &str) -> Vec<String> {
    let dump: Table = toml::from_str(dump).unwrap_or_default();
    let read = dump.get("imports").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let has_it = |path: &&str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let table: Table = toml::from_str(&text).unwrap_or_default();
        let plugins = table.get("plugins").and_then(Value::as_table);
        plugins.is_some_and(|plugins| containerd::PLUGINS.iter().any(|name| plugins.contains_key(*name)))
    };
    read.filter(has_it).map(str::to_owned).collect()
}
