//! The containers of Quadlet's `.container` files (podman-systemd.unit(5)), with their drop-ins.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use super::{Own, Service, Stack, StackError, text, unusable};
use crate::setup::engine_files::{self, words};
use sublet_core::request::warn_of_labels;
use sublet_core::text::safe;

/// The most directories of Quadlet's that are looked into.
const MOST: usize = 1000;

/// One container for each of `files`.
///
/// # Errors
/// A file cannot be read, is not one container's, or has something that only systemd can resolve.
pub fn read(files: &[PathBuf]) -> Result<Stack, StackError> {
    read_with(files, &search_path())
}

/// [`read`], with drop-ins in the directories `search`, the first of which goes before the rest.
fn read_with(files: &[PathBuf], search: &[PathBuf]) -> Result<Stack, StackError> {
    let mut stack = Stack::default();
    let mut units = Vec::new();
    for file in files {
        let name = name(file)?;
        let mut entries = entries(&text(file)?);
        for drop_in in drop_ins(file, search) {
            entries.extend(self::entries(&text(&drop_in)?));
        }
        let unit = Unit { file, entries };
        units.push(format!("{}.service", unit.last("ServiceName")?.unwrap_or_else(|| name.clone())));
        stack.services.push(unit.service(name)?);
    }
    stack.own = Own::Units(units);
    Ok(stack)
}

/// `worker` of `worker.container`.
fn name(file: &Path) -> Result<String, StackError> {
    let wrong = |message: &str| Err(unusable(file, message));
    let Some(stem) = file.file_stem().and_then(|stem| stem.to_str()) else { return wrong("it has no name") };
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("container") if stem.contains('@') => {
            wrong("it is a template, whose instances only systemd knows: give a file without @ in its name")
        }
        Some("container") => Ok(stem.to_owned()),
        Some("kube") => {
            wrong("its containers are in the YAML that it names: only .container files can be explained")
        }
        _ => wrong("only .container files can be explained"),
    }
}

/// The drop-ins of `team-worker.container`, in the order in which they apply: by name. Of several of one name the most
/// specific one counts (`team-worker.container.d`, `team-.container.d`, `container.d`), then the one that comes first
/// in the search path (Podman 5.6, cmd/quadlet/main.go, `loadUnitDropins`). A file that is not in the search path is
/// read as if its directory came first there.
fn drop_ins(file: &Path, search: &[PathBuf]) -> Vec<PathBuf> {
    let own = file.parent().and_then(|directory| Path::new(".").join(directory).canonicalize().ok());
    let own = own.into_iter().filter(|own| !search.contains(own));
    let directories: Vec<PathBuf> = own.chain(search.iter().cloned()).collect();
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    let begins = stem.char_indices().rev().filter(|(_, c)| *c == '-').map(|(at, _)| &stem[..=at]);
    let specific = std::iter::once(&*stem).chain(begins).map(|begin| format!("{begin}.container.d"));
    let mut found = BTreeMap::new();
    for name in specific.chain(["container.d".to_owned()]) {
        for path in directories.iter().flat_map(|dir| engine_files::drop_ins(&dir.join(&name), "conf")) {
            found.entry(path.file_name().map(ToOwned::to_owned)).or_insert(path);
        }
    }
    found.into_values().collect()
}

/// The directories that Quadlet reads for this user, each followed by those in it (`getRootDirs`, `getRootlessDirs`
/// there). `QUADLET_UNIT_DIRS` takes their place.
fn search_path() -> Vec<PathBuf> {
    let variable = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let of_users = Path::new("/etc/containers/systemd/users");
    let uid = nix::unistd::geteuid();
    let tops: Vec<PathBuf> = if let Some(given) = variable("QUADLET_UNIT_DIRS") {
        env::split_paths(&given).collect()
    } else if uid.is_root() {
        ["/run", "/etc", "/usr/share"].map(|top| Path::new(top).join("containers/systemd")).into()
    } else {
        let home = || variable("HOME").map(|home| home.join(".config"));
        let own = [variable("XDG_RUNTIME_DIR"), variable("XDG_CONFIG_HOME").or_else(home)];
        let own = own.into_iter().flatten().map(|top| top.join("containers/systemd"));
        own.chain([of_users.to_owned(), of_users.join(uid.to_string())]).collect()
    };
    let mut found = Vec::new();
    for top in &tops {
        add_with_those_in_it(top, &mut found, &|directory| {
            // The directories of users, and of each of them.
            uid.is_root() && directory.starts_with(of_users)
                || directory.parent() == Some(of_users)
                    && directory.file_name().is_some_and(|name| name.to_string_lossy().parse::<u32>().is_ok())
                    && directory != top
        });
    }
    found
}

fn add_with_those_in_it(directory: &Path, found: &mut Vec<PathBuf>, is_left_out: &dyn Fn(&Path) -> bool) {
    let Ok(directory) = directory.canonicalize() else { return };
    let is_of_drop_ins = directory.extension().is_some_and(|end| end == "d");
    if is_of_drop_ins || is_left_out(&directory) || found.contains(&directory) || found.len() >= MOST {
        return;
    }
    let Ok(entries) = std::fs::read_dir(&directory) else { return };
    found.push(directory);
    let mut entries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    for path in entries.iter().filter(|path| path.is_dir()) {
        add_with_those_in_it(path, found, is_left_out);
    }
}

/// The `KEY=VALUE` of `[Container]` (systemd.syntax(7)).
fn entries(text: &str) -> Vec<(String, String)> {
    let (mut found, mut here, mut begun) = (Vec::new(), false, String::new());
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with(['#', ';']) || line.is_empty() && begun.is_empty() {
            continue;
        }
        if let Some(part) = line.strip_suffix('\\') {
            begun.push_str(part);
            begun.push(' ');
            continue;
        }
        let line = std::mem::take(&mut begun) + line;
        if line.starts_with('[') {
            here = line == "[Container]";
        } else if let Some((key, value)) = line.split_once('=').filter(|_| here) {
            found.push((key.trim_end().to_owned(), value.trim_start().to_owned()));
        }
    }
    found
}

struct Unit<'a> {
    file: &'a Path,
    entries: Vec<(String, String)>,
}

impl Unit<'_> {
    fn service(&self, name: String) -> Result<Service, StackError> {
        let mut service = Service { of: name.clone(), name, by_hook: true, ..Service::default() };
        let mut labels = BTreeMap::new();
        for label in self.words("Label") {
            self.annotate(&label, &mut labels)?;
        }
        for annotation in self.words("Annotation") {
            self.annotate(&annotation, &mut service.annotations)?;
        }
        for device in self.words("AddDevice") {
            service.devices.push(self.plain(device.strip_prefix('-').unwrap_or(&device))?);
        }
        // Podman's own arguments, as far as they concern the share.
        let mut rest = ["GlobalArgs", "PodmanArgs"].into_iter().flat_map(|key| self.words(key));
        while let Some(argument) = rest.next() {
            let (option, joined) = match argument.split_once('=') {
                Some((option, value)) => (option, Some(value.to_owned())),
                None => (argument.as_str(), None),
            };
            let is_off = joined.as_deref() == Some("false");
            let value = || joined.or_else(|| rest.next()).unwrap_or_default();
            match option {
                "--annotation" => self.annotate(&value(), &mut service.annotations)?,
                "--label" | "-l" => self.annotate(&value(), &mut labels)?,
                "--device" => service.devices.push(self.plain(&value())?),
                "--runtime" => service.runtime = Some(self.plain(&value())?),
                "--gpus" => service.gpus = true,
                "--privileged" => service.privileged = !is_off,
                _ => {}
            }
        }
        labels.retain(|key, _| !service.annotations.contains_key(key));
        service.label_warning = warn_of_labels(&labels, "as Annotation=");
        Ok(service)
    }

    fn annotate(&self, text: &str, annotations: &mut BTreeMap<String, String>) -> Result<(), StackError> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        if key.contains("sublet") {
            annotations.insert(self.plain(key)?, self.plain(value)?);
        }
        Ok(())
    }

    /// `text`, in which systemd has nothing to fill in.
    fn plain(&self, text: &str) -> Result<String, StackError> {
        if !text.replace("%%", "").contains('%') {
            return Ok(text.replace("%%", "%"));
        }
        let wrong = "specifiers of systemd cannot be resolved here: write the value out";
        Err(unusable(self.file, &format!("{}: {wrong}", safe(text))))
    }

    /// All words of all lines with `key`; an empty line drops those before it.
    fn words(&self, key: &str) -> Vec<String> {
        let mut all = Vec::new();
        for (_, value) in self.entries.iter().filter(|(found, _)| found == key) {
            if value.is_empty() {
                all.clear();
            }
            all.extend(words(value));
        }
        all
    }

    fn last(&self, key: &str) -> Result<Option<String>, StackError> {
        let last = self.entries.iter().rev().find(|(found, _)| found == key);
        last.filter(|(_, value)| !value.is_empty()).map(|(_, value)| self.plain(value)).transpose()
    }
}

#[cfg(test)]
#[path = "quadlet_tests.rs"]
mod tests;
