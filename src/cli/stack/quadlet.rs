//! The containers of Quadlet's `.container` files (podman-systemd.unit(5)), with the drop-ins beside them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Own, Service, Stack, StackError, text};
use sublet_core::text::safe;

/// One container for each of `files`.
///
/// # Errors
/// A file cannot be read, is not one container's, or has something that only systemd can resolve.
pub fn read(files: &[PathBuf]) -> Result<Stack, StackError> {
    let mut stack = Stack::default();
    let mut units = Vec::new();
    for file in files {
        let name = name(file)?;
        let mut entries = entries(&text(file)?);
        for drop_in in drop_ins(file) {
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
    let wrong = |message: &str| Err(StackError::unusable(file, message));
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

/// Those in `worker.container.d` beside the file, in the order in which they apply.
fn drop_ins(file: &Path) -> Vec<PathBuf> {
    let mut dir = file.as_os_str().to_owned();
    dir.push(".d");
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "conf")).collect();
    found.sort();
    found
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
        let mut service = Service { name, by_hook: true, ..Service::default() };
        for annotation in self.words("Annotation") {
            self.annotate(&annotation, &mut service.annotations)?;
        }
        for device in self.words("AddDevice") {
            service.devices.push(self.plain(device.strip_prefix('-').unwrap_or(&device))?);
        }
        let arguments: Vec<String> =
            ["GlobalArgs", "PodmanArgs"].iter().flat_map(|key| self.words(key)).collect();
        self.arguments(&arguments, &mut service)?;
        Ok(service)
    }

    /// Podman's own arguments, as far as they concern the share.
    fn arguments(&self, arguments: &[String], service: &mut Service) -> Result<(), StackError> {
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let (option, joined) = match argument.split_once('=') {
                Some((option, value)) => (option, Some(value)),
                None => (argument.as_str(), None),
            };
            let mut value =
                || joined.or_else(|| rest.next().map(String::as_str)).unwrap_or_default().to_owned();
            match option {
                "--annotation" => self.annotate(&value(), &mut service.annotations)?,
                "--device" => service.devices.push(self.plain(&value())?),
                "--runtime" => service.runtime = Some(self.plain(&value())?),
                "--gpus" => service.gpus = true,
                "--privileged" => service.privileged = joined != Some("false"),
                _ => {}
            }
        }
        Ok(())
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
        if text.replace("%%", "").contains('%') {
            let message =
                format!("{}: specifiers of systemd cannot be resolved here: write the value out", safe(text));
            return Err(StackError::unusable(self.file, message));
        }
        Ok(text.replace("%%", "%"))
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

/// Splits at white space, except in quotes (systemd.syntax(7), "Quoting").
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            ('\\', _) => word.get_or_insert_default().extend(characters.next()),
            (end, Some(open)) if end == open => quote = None,
            ('"' | '\'', None) => {
                quote = Some(character);
                word.get_or_insert_default();
            }
            (space, None) if space.is_whitespace() => words.extend(word.take()),
            (other, _) => word.get_or_insert_default().push(other),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
#[path = "quadlet_tests.rs"]
mod tests;
