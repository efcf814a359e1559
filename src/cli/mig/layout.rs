//! Layout files: which instances each GPU of a host is to have (docs/mig.md), in TOML or in mig-parted's YAML
//! (`api/spec/v1` of NVIDIA/mig-parted); and the current instances as such a file.

use std::fmt::Write as _;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use serde::Deserialize;
use toml::Spanned;

use super::{Gpu, Instance, device_name};
use crate::yaml::{Node, Value, Wrong, tree};
use sublet_core::config_files::{explain, position};
use sublet_core::text::{safe, safe_path};

/// A larger file is not a layout.
const LARGEST: u64 = 1 << 20;

/// More than any GPU has; the driver reports the actual limit.
const MOST: usize = 100;

/// The content of a layout file, not yet compared with the GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The file's path, for messages.
    pub path: PathBuf,
    /// In the order of the file.
    pub(super) entries: Vec<Entry>,
}

/// The target of some GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Of the file, from 1 on.
    pub line: usize,
    /// Which GPUs: names as in `sublet.gpu`, or `all`.
    pub devices: Vec<String>,
    /// Only those with one of these PCI ids, device in the upper half (mig-parted's `device-filter`).
    pub pci_devices: Option<Vec<u32>>,
    /// MIG mode.
    pub mig: bool,
    /// All instances that they should have.
    pub instances: Vec<Wish>,
}

/// Some GPU instances.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wish {
    /// Of the file, from 1 on.
    #[serde(skip)]
    pub line: usize,
    /// The profile's name.
    pub profile: String,
    /// How many of them.
    #[serde(default = "one")]
    pub count: usize,
    /// The first memory slice, if the place is prescribed.
    pub start: Option<u32>,
    /// Its compute instances; `None` means a single one with all compute slices.
    pub compute: Option<Vec<String>>,
}

const fn one() -> usize {
    1
}

impl Layout {
    /// The layout in `path`: TOML, or mig-parted's YAML if the name ends in `.yaml` or `.yml`. `name` chooses one of
    /// its configurations.
    ///
    /// # Errors
    /// The file cannot be read or is not a layout; the message names file and line.
    pub fn read(path: &Path, name: Option<&str>) -> anyhow::Result<Self> {
        let unreadable = |error| anyhow!("layout {} cannot be read: {error}", safe_path(path));
        Self::parse(path, &text(path).map_err(unreadable)?, name)
    }

    pub(super) fn parse(path: &Path, text: &str, name: Option<&str>) -> anyhow::Result<Self> {
        let layout = Self { path: path.to_owned(), entries: Vec::new() };
        let parsed = match (layout.is_parteds(), name) {
            (true, name) => from_yaml(text, name),
            (false, None) => from_toml(text),
            (false, Some(_)) => {
                Err((1, "--name is for mig-parted's YAML only: a TOML file has one layout".into()))
            }
        };
        let entries = parsed.map_err(|(line, message)| layout.error(line, &message))?;
        Ok(Self { entries, ..layout })
    }

    /// Whether the file is mig-parted's.
    pub(super) fn is_parteds(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
    }

    /// An error in one line of the file.
    pub(super) fn error(&self, line: usize, message: &str) -> anyhow::Error {
        anyhow!("layout {}:{line}: {message}", safe_path(&self.path))
    }
}

fn text(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns `entry` if it does not contradict itself.
fn checked(entry: Entry) -> Result<Entry, Wrong> {
    match entry.instances.first() {
        Some(wish) if !entry.mig => Err((wish.line, "instances need MIG mode: set mig = true".to_owned())),
        _ => Ok(entry),
    }
}

/// Whether any GPU could have that many.
fn check_count(line: usize, profile: &str, count: usize) -> Result<(), Wrong> {
    if (1..=MOST).contains(&count) {
        return Ok(());
    }
    let profile = safe(profile);
    Err((line, format!("{count} × {profile}: the count must be between 1 and what the GPU offers")))
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
    instances: Vec<Spanned<Wish>>,
}

fn from_toml(text: &str) -> Result<Vec<Entry>, Wrong> {
    let line = |offset: usize| position(text, offset).0;
    let document: Document = toml::from_str(text)
        .map_err(|error| (line(error.span().map_or(0, |span| span.start)), explain(text, &error)))?;
    let wish = |table: Spanned<Wish>| {
        let line = line(table.span().start);
        let wish = Wish { line, ..table.into_inner() };
        check_count(line, &wish.profile, wish.count)?;
        match (wish.count, wish.start) {
            (count @ 2.., Some(start)) => {
                Err((line, format!("{count} instances cannot all start at {start}")))
            }
            _ => Ok(wish),
        }
    };
    let entry = |table: Spanned<GpuTable>| {
        let line = line(table.span().start);
        let GpuTable { matches, mig, instances } = table.into_inner();
        let instances = instances.into_iter().map(wish).collect::<Result<_, _>>()?;
        let devices = matches.split(',').map(|name| name.trim().to_owned()).collect();
        checked(Entry { line, devices, pci_devices: None, mig, instances })
    };
    document.gpu.into_iter().map(entry).collect()
}

/// The entries of configuration `name` of mig-parted's, or of the only configuration.
fn from_yaml(text: &str, name: Option<&str>) -> Result<Vec<Entry>, Wrong> {
    let document = tree(text)?;
    let (mut version, mut configs) = (None, None);
    for (key, value) in document.map("version: v1 and mig-configs")? {
        match key.scalar("a key")? {
            "version" => version = Some(value.scalar("a version")?),
            "mig-configs" => configs = Some(value),
            other => return Err(unknown(key, other, "version, mig-configs")),
        }
    }
    match version {
        Some("v1") => {}
        Some(other) => return Err(document.wrong(format!("version {}: only v1 is known", safe(other)))),
        None => return Err(document.wrong("version: v1 is missing".to_owned())),
    }
    let configs = configs.ok_or_else(|| document.wrong("mig-configs is missing".to_owned()))?;
    chosen(configs, name)?.list("a list of devices: …")?.iter().map(entry).collect()
}

fn unknown(key: &Node, name: &str, known: &str) -> Wrong {
    key.wrong(format!("unknown key {}: the keys are {known}", safe(name)))
}

fn chosen<'a>(configs: &'a Node, name: Option<&str>) -> Result<&'a Node, Wrong> {
    let all = configs.map("configurations by name")?;
    let mut names = Vec::new();
    for (key, value) in all {
        let known = key.scalar("a name")?;
        if Some(known) == name || name.is_none() && all.len() == 1 {
            return Ok(value);
        }
        names.push(safe(known));
    }
    let names = names.join(", ");
    Err(configs.wrong(match name {
        Some(name) => format!("there is no configuration {}: choose one of {names}", safe(name)),
        None => format!("there are several configurations: choose one with --name: {names}"),
    }))
}

fn entry(node: &Node) -> Result<Entry, Wrong> {
    let (mut devices, mut pci_devices, mut mig, mut instances) = (None, None, None, Vec::new());
    for (key, value) in node.map("devices, mig-enabled and mig-devices")? {
        match key.scalar("a key")? {
            "devices" => devices = Some(indexes(value)?),
            "device-filter" => pci_devices = Some(pci_ids(value)?),
            "mig-enabled" => mig = Some(flag(value)?),
            "mig-devices" => instances = wishes(value)?,
            other => return Err(unknown(key, other, "devices, device-filter, mig-enabled, mig-devices")),
        }
    }
    let missing = |key: &str| node.wrong(format!("{key} is missing"));
    let devices = devices.ok_or_else(|| missing("devices"))?;
    let mig = mig.ok_or_else(|| missing("mig-enabled"))?;
    checked(Entry { line: node.line, devices, pci_devices, mig, instances })
}

/// `all`, or a list of indexes.
fn indexes(node: &Node) -> Result<Vec<String>, Wrong> {
    let index = |node: &Node| Ok(node.number("an index")?.to_string());
    match &node.value {
        Value::Scalar(text) if text == "all" => Ok(vec![text.clone()]),
        Value::Scalar(_) => Err(node.wrong("must be all or a list of indexes".to_owned())),
        _ => node.list("all, or a list of indexes")?.iter().map(index).collect(),
    }
}

/// PCI ids as `0x233510DE`, device in the upper half.
fn pci_ids(node: &Node) -> Result<Vec<u32>, Wrong> {
    let id = |node: &Node| {
        let text = node.scalar("a PCI id")?;
        let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
        digits
            .and_then(|digits| u32::from_str_radix(digits, 16).ok())
            .ok_or_else(|| node.wrong(format!("{} is not a PCI id such as 0x233510DE", safe(text))))
    };
    match &node.value {
        Value::List(list) => list.iter().map(id).collect(),
        _ => Ok(vec![id(node)?]),
    }
}

fn flag(node: &Node) -> Result<bool, Wrong> {
    let text = node.scalar("true or false")?;
    text.parse().map_err(|_| node.wrong(format!("{}: must be true or false", safe(text))))
}

/// `PROFILE: COUNT`. Compute instances of one profile fill one GPU instance before the next, as they do in
/// mig-parted.
fn wishes(node: &Node) -> Result<Vec<Wish>, Wrong> {
    let (mut whole, mut parts) = (Vec::new(), Vec::<(usize, u32, &str)>::new());
    for (key, value) in node.map("profiles and their counts")? {
        let (line, name) = (key.line, key.scalar("a profile")?);
        let count = value.number("a count")?;
        if count == 0 {
            continue;
        }
        check_count(value.line, name, count)?;
        // (1, `2g.35gb`) of the compute instance `1c.2g.35gb`.
        let part = name.split_once("c.").and_then(|(slices, all)| Some((slices.parse().ok()?, all)));
        match part {
            Some((slices, profile)) => parts.extend(std::iter::repeat_n((line, slices, profile), count)),
            None => {
                whole.push(Wish { line, profile: name.to_owned(), count, start: None, compute: None });
            }
        }
    }
    // Sorted largest first, which packs them closest.
    parts.sort_by(|a, b| (a.2, b.1).cmp(&(b.2, a.1)));
    whole.extend(packed(&parts));
    Ok(whole)
}

/// One wish for each GPU instance that the parts fill.
fn packed(parts: &[(usize, u32, &str)]) -> Vec<Wish> {
    let mut packed: Vec<(Wish, u32)> = Vec::new();
    for &(line, slices, profile) in parts {
        // `2g.…` has two slices. mig-parted too derives this, and nothing else, from the name.
        let all = profile.split_once('g').and_then(|(slices, _)| slices.parse().ok()).unwrap_or(0);
        let name = format!("{slices}c");
        let has_room =
            |(wish, used): &&mut (Wish, u32)| wish.profile == profile && used.saturating_add(slices) <= all;
        if let Some((wish, used)) = packed.iter_mut().find(has_room) {
            wish.compute.get_or_insert_default().push(name);
            *used += slices;
            continue;
        }
        let (profile, compute) = (profile.to_owned(), Some(vec![name]));
        packed.push((Wish { line, profile, count: 1, start: None, compute }, slices));
    }
    packed.into_iter().map(|(wish, _)| wish).collect()
}

/// The layout file of these GPUs as they are; those that cannot do MIG are left out. Applying it to them changes nothing.
pub fn export(gpus: &[Gpu]) -> String {
    let mut out = "# A MIG layout as `sublet mig export` found it (docs/mig.md).\n".to_owned();
    for (gpu, mode) in gpus.iter().filter_map(|gpu| Some((gpu, gpu.mode?))) {
        let (label, name, uuid) = (gpu.label(), safe(&gpu.name), &gpu.uuid);
        let _ = write!(out, "\n# {label}: {name}\n[[gpu]]\nmatch = \"{uuid}\"\nmig = {}\n", mode.current);
        if !gpu.instances.is_empty() {
            let lines: String = gpu.instances.iter().map(|one| exported(gpu, one)).collect();
            let _ = write!(out, "instances = [\n{lines}]\n");
        }
    }
    if gpus.iter().all(|gpu| gpu.mode.is_none()) {
        out.push_str("gpu = []\n");
    }
    out
}

fn exported(gpu: &Gpu, one: &Instance) -> String {
    let Some(profile) = gpu.profile(one.profile) else {
        return format!("    # a GPU instance of unknown profile {} at {}\n", one.profile, one.span);
    };
    let mut parts: Vec<u32> = one.compute.iter().map(|part| part.slices).collect();
    parts.sort_unstable();
    let named: Vec<_> = parts.iter().map(|&slices| format!("\"{}\"", device_name(profile, slices))).collect();
    let compute =
        if parts == [profile.slices] { String::new() } else { format!(", compute = [{}]", named.join(", ")) };
    format!("    {{ profile = \"{}\", start = {}{compute} }},\n", profile.name, one.span.start)
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
