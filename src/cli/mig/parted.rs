//! Reads mig-parted's YAML (`api/spec/v1` of NVIDIA/mig-parted) into sublet's layout.

use super::layout_entry::{Entry, Wish, Wrong, counted, entry};
use crate::yaml::{Node, Value, tree};
use sublet_core::text::safe;

/// The entries of configuration `name`, or of the only configuration.
pub(super) fn parse(text: &str, name: Option<&str>) -> Result<Vec<Entry>, Wrong> {
    let document = tree(text)?;
    let mut configs = None;
    let mut version = None;
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
    chosen(configs, name)?.list("a list of devices: …")?.iter().map(one).collect()
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

fn one(node: &Node) -> Result<Entry, Wrong> {
    let (mut devices, mut filter, mut mig, mut instances) = (None, None, None, Vec::new());
    for (key, value) in node.map("devices, mig-enabled and mig-devices")? {
        match key.scalar("a key")? {
            "devices" => devices = Some(indexes(value)?),
            "device-filter" => filter = Some(pci_devices(value)?),
            "mig-enabled" => mig = Some(flag(value)?),
            "mig-devices" => instances = wishes(value)?,
            other => return Err(unknown(key, other, "devices, device-filter, mig-enabled, mig-devices")),
        }
    }
    let missing = |key: &str| node.wrong(format!("{key} is missing"));
    entry(Entry {
        line: node.line,
        devices: devices.ok_or_else(|| missing("devices"))?,
        pci_devices: filter,
        mig: mig.ok_or_else(|| missing("mig-enabled"))?,
        instances,
    })
}

/// `all`, or a list of indexes.
fn indexes(node: &Node) -> Result<Vec<String>, Wrong> {
    match &node.value {
        Value::Scalar(text) if text == "all" => return Ok(vec![text.clone()]),
        Value::Scalar(_) => return Err(node.wrong("must be all or a list of indexes".to_owned())),
        _ => {}
    }
    let index = |node: &Node| Ok(node.number("an index")?.to_string());
    node.list("all, or a list of indexes")?.iter().map(index).collect()
}

/// PCI ids as `0x233510DE`, device in the upper half.
fn pci_devices(node: &Node) -> Result<Vec<u32>, Wrong> {
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
        counted(name, count).map_err(|message| value.wrong(message))?;
        match part(name) {
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

/// Splits a compute instance's name: (1, `2g.35gb`) of `1c.2g.35gb`.
fn part(name: &str) -> Option<(u32, &str)> {
    let (slices, profile) = name.split_once("c.")?;
    Some((slices.parse().ok()?, profile))
}

/// One wish for each GPU instance that the parts fill.
fn packed(parts: &[(usize, u32, &str)]) -> Vec<Wish> {
    let mut packed: Vec<(Wish, u32)> = Vec::new();
    for &(line, slices, profile) in parts {
        // `2g.…` has two slices. mig-parted too derives this, and nothing else, from the name.
        let all = profile.split_once('g').and_then(|(slices, _)| slices.parse().ok()).unwrap_or(0);
        let name = format!("{slices}c");
        let open = packed
            .iter_mut()
            .find(|(wish, used)| wish.profile == profile && used.saturating_add(slices) <= all);
        if let Some((wish, used)) = open {
            wish.compute.get_or_insert_default().push(name);
            *used += slices;
            continue;
        }
        let (profile, compute) = (profile.to_owned(), Some(vec![name]));
        packed.push((Wish { line, profile, count: 1, start: None, compute }, slices));
    }
    packed.into_iter().map(|(wish, _)| wish).collect()
}

#[cfg(test)]
#[path = "parted_tests.rs"]
mod tests;
