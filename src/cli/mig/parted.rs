//! Reads mig-parted's YAML (`api/spec/v1` of NVIDIA/mig-parted) into sublet's layout.

use saphyr_parser::{Event, Parser};

use super::layout_entry::{Entry, Wish, Wrong, counted, entry};
use sublet_core::text::safe;

/// Documents that are nested deeper are attacks.
const DEEPEST: usize = 16;

/// A YAML value and the line it begins in.
#[derive(Debug)]
struct Node {
    line: usize,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Scalar(String),
    List(Vec<Node>),
    Map(Vec<(Node, Node)>),
}

/// The entries of configuration `name`, or of the only configuration.
pub(super) fn parse(text: &str, name: Option<&str>) -> Result<Vec<Entry>, Wrong> {
    let document = tree(text)?;
    let mut configs = None;
    let mut version = None;
    for (key, value) in document.map("version: v1 and mig-configs")? {
        match key.scalar("a key")? {
            "version" => version = Some(value.scalar("a version")?),
            "mig-configs" => configs = Some(value),
            other => {
                return Err(
                    key.wrong(format!("unknown key {}: the keys are version, mig-configs", safe(other)))
                );
            }
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
            other => {
                let known = "devices, device-filter, mig-enabled, mig-devices";
                return Err(key.wrong(format!("unknown key {}: the keys are {known}", safe(other))));
            }
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
    if let Value::Scalar(text) = &node.value {
        let all = text == "all";
        return if all {
            Ok(vec![text.clone()])
        } else {
            Err(node.wrong("must be all or a list of indexes".to_owned()))
        };
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
    match node.scalar("true or false")? {
        "true" => Ok(true),
        "false" => Ok(false),
        other => Err(node.wrong(format!("{}: must be true or false", safe(other)))),
    }
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

impl Node {
    fn wrong(&self, message: String) -> Wrong {
        (self.line, message)
    }

    fn scalar(&self, wanted: &str) -> Result<&str, Wrong> {
        match &self.value {
            Value::Scalar(text) => Ok(text),
            _ => Err(self.wrong(format!("must be {wanted}"))),
        }
    }

    fn number(&self, wanted: &str) -> Result<usize, Wrong> {
        let text = self.scalar(wanted)?;
        text.parse().map_err(|_| self.wrong(format!("{}: must be {wanted}, a whole number", safe(text))))
    }

    fn list(&self, wanted: &str) -> Result<&[Node], Wrong> {
        match &self.value {
            Value::List(list) => Ok(list),
            _ => Err(self.wrong(format!("must be {wanted}"))),
        }
    }

    /// The pairs of a map; a duplicate key is an error.
    fn map(&self, wanted: &str) -> Result<&[(Self, Self)], Wrong> {
        let Value::Map(pairs) = &self.value else { return Err(self.wrong(format!("must be {wanted}"))) };
        for (at, (key, _)) in pairs.iter().enumerate() {
            let name = key.scalar("a key")?;
            if pairs[..at]
                .iter()
                .any(|(known, _)| matches!(&known.value, Value::Scalar(text) if text == name))
            {
                return Err(key.wrong(format!("{} stands twice", safe(name))));
            }
        }
        Ok(pairs)
    }
}

/// The single document in `text`.
fn tree(text: &str) -> Result<Node, Wrong> {
    let mut open: Vec<(Node, Vec<Node>)> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) =
            event.map_err(|error| (error.marker().line(), format!("no YAML: {}", safe(error.info()))))?;
        let line = span.start.line();
        let node = |value| Node { line, value };
        let done = match event {
            Event::Scalar(text, ..) => Some(node(Value::Scalar(text.into_owned()))),
            Event::SequenceStart(..) => opened(&mut open, node(Value::List(Vec::new())))?,
            Event::MappingStart(..) => opened(&mut open, node(Value::Map(Vec::new())))?,
            Event::SequenceEnd | Event::MappingEnd => open.pop().map(closed),
            Event::Alias(_) => {
                return Err((line, "YAML aliases are not supported: write the value out".to_owned()));
            }
            _ => None,
        };
        let Some(done) = done else { continue };
        match open.last_mut() {
            Some((_, children)) => children.push(done),
            None => return Ok(done),
        }
    }
    Err((1, "the file is empty".to_owned()))
}

fn opened(open: &mut Vec<(Node, Vec<Node>)>, node: Node) -> Result<Option<Node>, Wrong> {
    if open.len() >= DEEPEST {
        return Err((node.line, "it is nested too deeply".to_owned()));
    }
    open.push((node, Vec::new()));
    Ok(None)
}

fn closed((node, children): (Node, Vec<Node>)) -> Node {
    let value = match node.value {
        Value::Map(_) => {
            let mut pairs = Vec::new();
            let mut children = children.into_iter();
            while let (Some(key), Some(value)) = (children.next(), children.next()) {
                pairs.push((key, value));
            }
            Value::Map(pairs)
        }
        Value::List(_) => Value::List(children),
        scalar @ Value::Scalar(_) => scalar,
    };
    Node { value, ..node }
}

#[cfg(test)]
#[path = "parted_tests.rs"]
mod tests;
