//! Layout files: which instances each GPU of a host is to have (docs/mig.md).

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use super::layout_entry::{Entry, Wish, Wrong, counted, entry};
use super::parted;
use sublet_core::config_files::{explain, position};
use sublet_core::text::safe;

/// A larger file is not a layout.
const LARGEST: u64 = 1 << 20;

/// The content of a layout file, not yet compared with the GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The file's path, for messages.
    pub(super) path: PathBuf,
    /// In the order of the file.
    pub(super) entries: Vec<Entry>,
}

/// Why a layout file cannot be used.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// It cannot be read.
    #[error("layout {} cannot be read: {source}", safe(&path.to_string_lossy()))]
    Unreadable { path: PathBuf, source: io::Error },
    /// The file contradicts itself or is not valid.
    #[error("layout {}:{line}: {message}", safe(&path.to_string_lossy()))]
    Invalid { path: PathBuf, line: usize, message: String },
}

impl Layout {
    /// The layout in `path`: TOML, or mig-parted's YAML if the name ends in `.yaml` or `.yml`. `name` chooses one of
    /// its configurations.
    ///
    /// # Errors
    /// The file cannot be read or is not a layout; the message names file and line.
    pub fn read(path: &Path, name: Option<&str>) -> Result<Self, LayoutError> {
        let text = text(path).map_err(|source| LayoutError::Unreadable { path: path.to_owned(), source })?;
        Self::parse(path, &text, name)
    }

    pub(super) fn parse(path: &Path, text: &str, name: Option<&str>) -> Result<Self, LayoutError> {
        let layout = Self { path: path.to_owned(), entries: Vec::new() };
        let parsed = match (layout.is_parteds(), name) {
            (true, name) => parted::parse(text, name),
            (false, None) => from_toml(text),
            (false, Some(_)) => {
                Err((1, "--name is for mig-parted's YAML only: a TOML file has one layout".into()))
            }
        };
        let entries = parsed.map_err(|(line, message)| layout.error(line, message))?;
        Ok(Self { entries, ..layout })
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is mig-parted's.
    pub(super) fn is_parteds(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
    }

    /// An error in one line of the file.
    pub(super) fn error(&self, line: usize, message: String) -> LayoutError {
        LayoutError::Invalid { path: self.path.clone(), line, message }
    }
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    gpu: Vec<Spanned<GpuTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuTable {
    #[serde(rename = "match")]
    matches: String,
    mig: bool,
    #[serde(default)]
    instances: Vec<Spanned<InstanceTable>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InstanceTable {
    profile: String,
    count: Option<usize>,
    start: Option<u32>,
    compute: Option<Vec<String>>,
}

fn from_toml(text: &str) -> Result<Vec<Entry>, Wrong> {
    let line = |offset: usize| position(text, offset).0;
    let document: Document = toml::from_str(text)
        .map_err(|error| (line(error.span().map_or(0, |span| span.start)), explain(text, &error)))?;
    document
        .gpu
        .into_iter()
        .map(|table| {
            let at = line(table.span().start);
            let GpuTable { matches, mig, instances } = table.into_inner();
            let wish = |table: Spanned<InstanceTable>| wish(line(table.span().start), table.into_inner());
            let instances: Vec<Wish> = instances.into_iter().map(wish).collect::<Result<_, _>>()?;
            let devices = matches.split(',').map(|name| name.trim().to_owned()).collect();
            entry(Entry { line: at, devices, pci_devices: None, mig, instances })
        })
        .collect()
}

fn wish(line: usize, table: InstanceTable) -> Result<Wish, Wrong> {
    let InstanceTable { profile, count, start, compute } = table;
    let count = count.unwrap_or(1);
    counted(&profile, count).map_err(|message| (line, message))?;
    match start {
        Some(start) if count > 1 => Err((line, format!("{count} instances cannot all start at {start}"))),
        _ => Ok(Wish { line, profile, count, start, compute }),
    }
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
