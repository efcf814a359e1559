//! Docker's `daemon.json`: the runtime, the default runtime, CDI devices, resources for Swarm (docs.docker.com,
//! "dockerd"); and the flags beside it.

use std::collections::BTreeMap;
use std::path::Path;

use jsonc_parser::cst::{CstInputValue, CstObject, CstObjectProp, CstRootNode};
use serde_json::{Value, json};

use super::engine_files::{Record, Recorded, undo_by_record, with_record, words};
use super::{Ask, NAME, SetupError, Wish, plain};
use crate::proc::{namespace, processes};
use sublet_core::config::{Config, WithoutShare};
use sublet_core::fs::under;
use sublet_core::ledger::Ledger;

const RUNTIME: [&str; 2] = ["runtimes", NAME];
const DEFAULT: [&str; 1] = ["default-runtime"];
const CDI: [&str; 2] = ["features", "cdi"];

/// `daemon.json` with sublet, and the record of the changes. `found` is its current text, `record` that of an earlier
/// setup, if any.
///
/// # Errors
/// The file is no JSON object, has another `runtimes.sublet`, or has the default runtime `sublet` without defining it.
pub fn set_up(found: Option<&str>, record: Option<&str>, wish: &Wish) -> Result<Recorded, SetupError> {
    let after = put_in(found.unwrap_or_default(), wish)?;
    with_record(found, record, (is_set_up(found.unwrap_or_default())?, after), take_out)
}

/// `daemon.json` without sublet; `None` if there is no such file. `record` is the one from [`set_up`], if it still
/// exists. Without it only members that name sublet are removed.
///
/// # Errors
/// The file is no JSON object, or the record is none.
pub fn undo(found: Option<&str>, record: Option<&str>) -> Result<Option<String>, SetupError> {
    undo_by_record(found, record, take_out)
}

fn put_in(found: &str, wish: &Wish) -> Result<String, SetupError> {
    let file = JsonFile::parse(found)?;
    let runtime = json!({ "path": plain(&wish.runtime)? });
    // Reads everything that an undo will read, so that a file that an undo could not read is refused now.
    let (there, is_default) = (file.get(&RUNTIME)?, file.get(&DEFAULT)? == Some(NAME.into()));
    let (_, resources) = (file.get(&CDI)?, resources_in(file.get(&RESOURCES)?)?);
    match there {
        Some(there) if there != runtime => return Err(SetupError::Taken { key: RUNTIME.join(".") }),
        // An undo removes a default named sublet, whoever set it.
        None if is_default => return Err(SetupError::Orphan),
        _ => file.set(&RUNTIME, &runtime)?,
    }
    if wish.default {
        file.set(&DEFAULT, &NAME.into())?;
    }
    if wish.cdi {
        file.set(&CDI, &true.into())?;
    }
    if let Some(ours) = &wish.resources {
        let wanted = [foreign(&resources), ours.clone()].concat();
        if wanted != resources {
            file.set(&RESOURCES, &wanted.into())?;
        }
    }
    Ok(file.root.to_string())
}

fn take_out(found: &str, record: Option<&Record>) -> Result<Option<String>, SetupError> {
    // dockerd treats a file of white space as an empty configuration (seen with `dockerd --validate`, 26.1).
    if is_blank(found) {
        return Ok(Some(found.to_owned()));
    }
    let file = JsonFile::parse(found)?;
    let before = JsonFile::parse(record.and_then(|record| record.before.as_deref()).unwrap_or_default())?;
    let after = JsonFile::parse(record.map_or("", |record| &record.after))?;
    file.put_back(&RUNTIME, None)?;
    if file.get(&DEFAULT)? == Some(NAME.into()) {
        // Whoever set it: without the runtime dockerd would not start.
        file.put_back(&DEFAULT, before.get(&DEFAULT)?.as_ref())?;
    }
    let is_on = Some(Value::Bool(true));
    if after.get(&CDI)? == is_on && file.get(&CDI)? == is_on {
        file.put_back(&CDI, before.get(&CDI)?.as_ref())?;
    }
    if record.is_none() || after.get(&RESOURCES)? != before.get(&RESOURCES)? {
        let (left, was) = (foreign(&resources_in(file.get(&RESOURCES)?)?), before.get(&RESOURCES)?);
        let is_as_before = left == foreign(&resources_in(was.clone())?);
        let left = if is_as_before { was } else { (!left.is_empty()).then(|| left.into()) };
        file.put_back(&RESOURCES, left.as_ref())?;
    }
    for parent in [&RUNTIME[..1], &CDI[..1]] {
        let is_ours = before.get(parent)?.is_none() && (record.is_none() || after.get(parent)?.is_some());
        if is_ours && file.get(parent)? == Some(json!({})) {
            file.put_back(parent, None)?;
        }
    }
    let is_empty = file.object.properties().is_empty();
    let nothing = record.filter(|record| is_empty && record.before.as_deref().is_none_or(is_blank));
    Ok(nothing.map_or_else(|| Some(file.root.to_string()), |record| record.before.clone()))
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// The program of the runtime `sublet`, if that runtime exists.
///
/// # Errors
/// The file is no JSON object.
pub fn runtime(text: &str) -> Result<Option<String>, SetupError> {
    string(text, &[RUNTIME[0], RUNTIME[1], "path"])
}

/// The runtime of containers that name none, if it is set.
///
/// # Errors
/// The file is no JSON object, or a key occurs twice.
pub(crate) fn default_runtime(text: &str) -> Result<Option<String>, SetupError> {
    string(text, &DEFAULT)
}

/// The string at `path`.
fn string(text: &str, path: &[&str]) -> Result<Option<String>, SetupError> {
    Ok(JsonFile::parse(text)?.get(path)?.as_ref().and_then(Value::as_str).map(str::to_owned))
}

/// Whether CDI devices are enabled.
///
/// # Errors
/// The file is no JSON object, or a key occurs twice.
pub(crate) fn has_cdi(text: &str) -> Result<bool, SetupError> {
    Ok(JsonFile::parse(text)?.get(&CDI)? == Some(Value::Bool(true)))
}

/// Whether sublet is among the runtimes.
///
/// # Errors
/// The file is no JSON object.
pub fn is_set_up(text: &str) -> Result<bool, SetupError> {
    Ok(JsonFile::parse(text)?.get(&RUNTIME)?.is_some())
}

// `node-generic-resources` of Docker's `daemon.json`: a node's resources for Swarm, as `"sublet-small=4"`.

const RESOURCES: [&str; 1] = ["node-generic-resources"];

/// How sublet's resources begin; a share's name follows.
pub(crate) const RESOURCE: &str = "sublet-";

/// The resources in `text` (a daemon.json) that are sublet's.
///
/// # Errors
/// The file is no JSON object, or they are no list of strings.
pub(crate) fn advertised(text: &str) -> Result<Vec<String>, SetupError> {
    let mut all = resources_in(JsonFile::parse(text)?.get(&RESOURCES)?)?;
    all.retain(|resource| resource.starts_with(RESOURCE));
    Ok(all)
}

/// The resources in a value; none if there is no value.
fn resources_in(value: Option<Value>) -> Result<Vec<String>, SetupError> {
    let Some(value) = value else { return Ok(Vec::new()) };
    let key = RESOURCES.join(".");
    let wrong = SetupError::Shape { key, found: "something else", expected: "a list of strings" };
    serde_json::from_value(value).map_err(|_| wrong)
}

fn foreign(all: &[String]) -> Vec<String> {
    all.iter().filter(|resource| !resource.starts_with(RESOURCE)).cloned().collect()
}

// The file as JSON, of which single members are read and edited. The rest keeps its layout.

/// A file that says nothing.
const EMPTY: &str = "{\n}\n";

/// One JSON object.
struct JsonFile {
    root: CstRootNode,
    object: CstObject,
}

impl JsonFile {
    /// That of `text`. White space says as little as an empty object.
    ///
    /// # Errors
    /// The text is incomplete, has comments, or is of another type.
    pub fn parse(text: &str) -> Result<Self, SetupError> {
        let text = if text.trim().is_empty() { EMPTY } else { text };
        let unparsable = |why| SetupError::Unparsable { language: "JSON", why };
        // The editor's parser takes more than engines do.
        serde_json::from_str::<Value>(text).map_err(|error| {
            let is_comment = |line: &str| ["//", "#", "/*"].iter().any(|mark| line.starts_with(mark));
            let has_comment = text.lines().any(|line| is_comment(line.trim_start()));
            unparsable(format!("{error}{}", if has_comment { "; JSON has no comments" } else { "" }))
        })?;
        let root = CstRootNode::parse(text, &jsonc_parser::ParseOptions::default());
        let root = root.map_err(|error| unparsable(error.to_string()))?;
        let object = root.object_value().ok_or_else(|| no_object("the file".to_owned()))?;
        Ok(Self { root, object })
    }

    /// The value at `path`.
    ///
    /// # Errors
    /// A name on the way occurs twice, or its value is not an object.
    pub fn get(&self, path: &[&str]) -> Result<Option<Value>, SetupError> {
        Ok(self.property(path)?.as_ref().and_then(value_of))
    }

    /// Puts `value` at `path`, with the objects that are missing. A new member comes first in its object.
    pub fn set(&self, path: &[&str], value: &Value) -> Result<(), SetupError> {
        let Some((name, parents)) = path.split_last() else { return Ok(()) };
        match (self.property(path)?, self.object_at(parents)?) {
            (Some(there), _) if value_of(&there).as_ref() == Some(value) => {}
            (Some(there), _) => there.set_value(input(value)),
            (None, Some(object)) => drop(object.insert(0, name, input(value))),
            (None, None) => self.set(parents, &json!({ *name: value }))?,
        }
        Ok(())
    }

    /// Puts `value` at `path`; `None`: removes the member.
    pub fn put_back(&self, path: &[&str], value: Option<&Value>) -> Result<(), SetupError> {
        match (value, self.property(path)?) {
            (Some(value), _) => self.set(path, value)?,
            (None, Some(property)) => property.remove(),
            (None, None) => {}
        }
        Ok(())
    }

    fn object_at(&self, path: &[&str]) -> Result<Option<CstObject>, SetupError> {
        if path.is_empty() {
            return Ok(Some(self.object.clone()));
        }
        let property = self.property(path)?;
        property.map(|property| property.object_value().ok_or_else(|| no_object(path.join(".")))).transpose()
    }

    fn property(&self, path: &[&str]) -> Result<Option<CstObjectProp>, SetupError> {
        let Some((name, parents)) = path.split_last() else { return Ok(None) };
        let Some(object) = self.object_at(parents)? else { return Ok(None) };
        let is_named = |property: &CstObjectProp| {
            property.name().and_then(|own| own.decoded_value().ok()).as_deref() == Some(*name)
        };
        let mut named = object.properties().into_iter().filter(is_named);
        let property = named.next();
        if named.next().is_some() { Err(SetupError::Twice(path.join("."))) } else { Ok(property) }
    }
}

fn value_of(property: &CstObjectProp) -> Option<Value> {
    serde_json::from_str(&property.value()?.to_string()).ok()
}

fn no_object(key: String) -> SetupError {
    SetupError::Shape { key, found: "no object", expected: "{ … }" }
}

fn input(value: &Value) -> CstInputValue {
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(value) => CstInputValue::Bool(*value),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(elements) => CstInputValue::Array(elements.iter().map(input).collect()),
        Value::Object(members) => {
            CstInputValue::Object(members.iter().map(|(name, value)| (name.clone(), input(value))).collect())
        }
    }
}

// How this host starts dockerd: flags beside daemon.json, or in its place.

/// dockerd's configuration, unless a flag says otherwise.
const FILE: &str = "/etc/docker/daemon.json";

/// Flags, and the keys of daemon.json with the same meaning that a setup writes. dockerd does not start with both (moby,
/// `findConfigurationConflicts`; seen with 26.1). It merges `--add-runtime` and `runtimes`.
const TWICE: [(&str, &str); 3] = [
    ("default-runtime", "default-runtime"),
    ("node-generic-resource", "node-generic-resources"),
    // Docker's dockerd(8), of 27 and later: both are an error.
    ("feature", "features"),
];

/// dockerd, as this host starts it.
#[derive(Debug, Default)]
pub(crate) struct Dockerd {
    flags: Vec<Flag>,
}

/// A flag of its command line, with a value.
#[derive(Debug, PartialEq, Eq)]
struct Flag {
    name: String,
    value: String,
    /// Who says so.
    by: &'static str,
}

impl Dockerd {
    /// dockerd of the host below `root`: the flags of the running one (of several, the one that reads `file`), and the
    /// flags of the next start, from systemd.
    pub(crate) fn of(root: &Path, ask: Ask, file: Option<&Path>) -> Self {
        let mut running = Self::running(root);
        // The sort is stable: without a `file`, or one that reads it, the first counts.
        running.sort_by_key(|dockerd| file.is_some_and(|file| dockerd.file() != file));
        let mut flags = running.into_iter().next().unwrap_or_default().flags;
        let properties = "--property=ExecStart,Environment,EnvironmentFiles";
        if let Some(unit) = ask(&["systemctl", "show", "docker.service", properties]) {
            flags.extend(self::flags(&start_of(&unit, root), "docker.service"));
        }
        Self { flags }
    }

    /// Those that run and see the files of this process.
    fn running(root: &Path) -> Vec<Self> {
        let proc = under(root, "/proc");
        let own = namespace(&proc.join("self"), "mnt");
        let of = |pid: i32| {
            let process = proc.join(pid.to_string());
            let is_dockerd = std::fs::read(process.join("comm")).ok()?.trim_ascii_end() == b"dockerd";
            let line = (is_dockerd && namespace(&process, "mnt") == own)
                .then(|| std::fs::read(process.join("cmdline")))?;
            let line = String::from_utf8_lossy(&line.ok()?).into_owned();
            let words: Vec<String> = line.split('\0').map(str::to_owned).collect();
            Some(Self { flags: flags(&words, "the running dockerd") })
        };
        processes(&proc).into_iter().filter_map(of).collect()
    }

    /// daemon.json.
    pub(crate) fn file(&self) -> &Path {
        Path::new(self.value("config-file").unwrap_or(FILE))
    }

    /// The program of the runtime `sublet`, where a flag defines it.
    pub(crate) fn runtime(&self) -> Option<&str> {
        let added = self.flags.iter().filter(|flag| flag.name == "add-runtime");
        added.filter_map(|flag| flag.value.split_once('=')).find(|(name, _)| *name == NAME).map(|to| to.1)
    }

    /// The runtime of containers that name none; `text` is daemon.json's.
    pub(crate) fn default_runtime(&self, text: &str) -> Option<String> {
        self.value("default-runtime").map(str::to_owned).or_else(|| default_runtime(text).ok().flatten())
    }

    /// Where it keeps its records of containers; `text` is daemon.json's.
    fn data_root(&self, text: &str) -> String {
        let in_file = || string(text, &["data-root"]).ok().flatten();
        let configured = self.value("data-root").map(str::to_owned).or_else(in_file);
        configured.unwrap_or_else(|| "/var/lib/docker".to_owned())
    }

    /// Whether dockerd starts again with `text` as its daemon.json.
    ///
    /// # Errors
    /// One of its flags says the same as `text`.
    pub fn starts_with(&self, text: &str) -> Result<(), SetupError> {
        let file = JsonFile::parse(text)?;
        for (name, key) in TWICE {
            let flag = self.flags.iter().find(|flag| flag.name == name);
            if let (Some(Flag { value, by, .. }), Some(_)) = (flag, file.get(&[key])?) {
                let flag = sublet_core::text::safe(&format!("--{name}={value}"));
                return Err(SetupError::Flag { flag, by, key });
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.flags.iter().find(|flag| flag.name == name).map(|flag| flag.value.as_str())
    }
}

/// The names of Docker's containers on the host below `root` that were meant to have a share and have none. Where every
/// container's runtime is sublet, or the configuration says that it is meant, that is not known.
pub(crate) fn without_share(root: &Path, ledger: &Ledger, config: &Config) -> Vec<String> {
    if config.runtime.without_share == Some(WithoutShare::Run) {
        return Vec::new();
    }
    let of = |dockerd: &Dockerd| {
        let text = dockerd.file().to_str().map(|file| std::fs::read_to_string(under(root, file)));
        let text = text.and_then(Result::ok).unwrap_or_default();
        let is_default = dockerd.default_runtime(&text).as_deref() == Some(NAME);
        let data_root = (!is_default).then(|| under(root, &dockerd.data_root(&text)));
        data_root.map(|data_root| crate::names::without_share(&data_root, ledger)).unwrap_or_default()
    };
    Dockerd::running(root).iter().flat_map(of).collect()
}

/// The command line of the next start, from the output of `systemctl show`: variables of systemd.exec(5) are filled in.
fn start_of(unit: &str, root: &Path) -> Vec<String> {
    let property =
        |name: &'static str| unit.lines().filter_map(move |line| line.strip_prefix(name)?.strip_prefix('='));
    let files = property("EnvironmentFiles").filter_map(|file| {
        let path = file.split_once(" (").map_or(file, |(path, _)| path);
        std::fs::read_to_string(under(root, path)).ok()
    });
    let of_unit = property("Environment").flat_map(words);
    let of_files = files.flat_map(|text| text.lines().map(|line| words(line).concat()).collect::<Vec<_>>());
    let pair = |entry: String| entry.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    let variables: BTreeMap<String, String> = of_unit.chain(of_files).filter_map(pair).collect();
    let argv = property("ExecStart").find_map(|start| start.split_once("argv[]=")?.1.split(" ; ").next());
    let fill_in = |word: String| {
        let Some(name) = word.strip_prefix('$').map(|name| name.trim_matches(['{', '}'])) else {
            return vec![word];
        };
        words(variables.get(name).map_or("", String::as_str))
    };
    words(argv.unwrap_or_default()).into_iter().flat_map(fill_in).collect()
}

/// The flags in `line` behind `dockerd`.
fn flags(line: &[String], by: &'static str) -> Vec<Flag> {
    let at = line.iter().position(|word| word.ends_with("dockerd")).unwrap_or(line.len());
    let rest = line.iter().skip(at + 1);
    // Of a flag without a value, the word behind it is taken for one.
    let next = rest.clone().skip(1).map(String::as_str).chain([""]);
    let flag = |(word, next): (&String, &str)| {
        let word = word.strip_prefix("--")?;
        let (name, value) = word.split_once('=').unwrap_or((word, next));
        Some(Flag { name: name.to_owned(), value: value.to_owned(), by })
    };
    rest.zip(next).filter_map(flag).collect()
}

#[cfg(test)]
#[path = "docker_tests.rs"]
mod tests;
