//! The services of a Compose file (the Compose Specification): as Docker Compose resolves it if that is installed, else
//! as it stands, as far as nothing in it has to be resolved.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value};

use super::{MOST, Own, Service, Stack, StackError, text, unusable};
use crate::setup::engine_files::version;
use crate::yaml::{self, Node, Wrong, tree};
use sublet_core::process::child;
use sublet_core::request::{has_sublet_annotations, warn_of_labels};
use sublet_core::text::{safe, safe_long, safe_path};

/// The keys of a service that are read as they stand, beside its names. The rest may have variables and aliases.
const READ: [&str; 8] =
    ["annotations", "runtime", "devices", "gpus", "privileged", "deploy", "scale", "profiles"];

/// Said where the file is read as it stands.
const AS_IT_STANDS: &str =
    "Docker Compose is not installed, so variables and `extends` in the file were not resolved";

/// The services of `files`, which Compose merges, one after another as they stand in them. `default_runtime` is
/// dockerd's; `has_hook`: Podman runs sublet's hook.
///
/// # Errors
/// They cannot be read, or have something to resolve and Docker Compose is not there.
pub fn read(files: &[PathBuf], default_runtime: Option<&str>, has_hook: bool) -> Result<Stack, StackError> {
    let sources = files.iter().map(|file| text(file)).collect::<Result<Vec<_>, _>>()?;
    let ([file, ..], [source, ..]) = (files, &sources[..]) else { return Ok(Stack::default()) };
    let order: Vec<String> = sources.iter().flat_map(|source| order(source)).collect();
    let wrong = |message: String| unusable(file, &message);
    let stack = if let Some((document, drops_annotations)) = resolved(files).map_err(wrong)? {
        let mut stack = stack(&document, &order, file).map_err(wrong)?;
        for service in &mut stack.services {
            service.annotations_dropped_by.clone_from(&drops_annotations);
        }
        stack
    } else {
        more_than(files).map_or(Ok(()), |more| Err(wrong(needs_compose(&more))))?;
        let in_line = |(line, message)| StackError(format!("{}:{line}: {message}", safe_path(file)));
        let mut stack = stack(&plain(source).map_err(in_line)?, &order, file).map_err(wrong)?;
        stack.remarks.insert(0, AS_IT_STANDS.to_owned());
        stack
    };
    Ok(with_default_runtime(stack, default_runtime, has_hook))
}

/// Services that name no runtime have the default one, or Podman with sublet's hook.
fn with_default_runtime(mut stack: Stack, default: Option<&str>, has_hook: bool) -> Stack {
    for service in stack.services.iter_mut().filter(|service| service.runtime.is_none()) {
        service.runtime = default.map(str::to_owned);
        service.by_hook = default.is_none() && has_hook;
        if service.by_hook && has_sublet_annotations(&service.annotations) {
            stack.remarks.push(format!(
                "service {} has no `runtime: sublet`: Docker ignores its annotations, Podman with sublet's hook does not",
                safe(&service.name)
            ));
        }
    }
    stack
}

/// The names of the services in the order of the file. Docker Compose sorts them.
fn order(source: &str) -> Vec<String> {
    let names = || {
        let document = tree(source).ok()?;
        let is_services = |key: &Node| key.scalar("").is_ok_and(|key| key == "services");
        let (_, services) = document.map("").ok()?.iter().find(|(key, _)| is_services(key))?;
        let names = services.map("").ok()?.iter().filter_map(|(name, _)| name.scalar("").ok());
        Some(names.map(str::to_owned).collect())
    };
    names().unwrap_or_default()
}

/// `document` is the file in JSON.
fn stack(document: &Value, order: &[String], file: &Path) -> Result<Stack, String> {
    let services = document.get("services").and_then(Value::as_object);
    let services = services.filter(|services| !services.is_empty()).ok_or("it has no services")?;
    let mut sorted: Vec<(&String, &Value)> = services.iter().collect();
    sorted.sort_by_key(|(name, _)| order.iter().position(|known| known == *name).unwrap_or(order.len()));
    let project = project(document, file);
    let mut stack = Stack { own: Own::Project(project.clone()), ..Stack::default() };
    for (name, service) in sorted {
        if service.get("profiles").and_then(Value::as_array).is_some_and(|profiles| !profiles.is_empty())
            && document.get(PLAIN).is_some()
        {
            stack.remarks.push(format!("service {} has profiles and was left out", safe(name)));
            continue;
        }
        let of_service = |why: String| format!("service {}: {why}", safe(name));
        let count = count(service).map_err(of_service)?;
        let one = one(name, service).map_err(of_service)?;
        stack.services.extend((1..=count).map(|number| Service {
            name: if count > 1 { format!("{name}-{number}") } else { name.clone() },
            called: called(name, service, &project, number),
            ..one.clone()
        }));
    }
    Ok(stack)
}

/// A mark in a document that was read as it stands.
const PLAIN: &str = "x-sublet-plain";

/// How many containers a service has.
fn count(service: &Value) -> Result<usize, String> {
    let given = service.get("scale").or_else(|| service.pointer("/deploy/replicas"));
    let Some(given) = given.filter(|given| !given.is_null()).map(words) else { return Ok(1) };
    match given.parse() {
        Ok(count) if count <= MOST => Ok(count),
        Ok(count) => Err(format!("{count} containers are more than the {MOST} that are looked at")),
        Err(_) => Err(format!("{} is no number of containers", safe(&given))),
    }
}

fn one(name: &str, service: &Value) -> Result<Service, String> {
    let reserved = service.pointer("/deploy/resources/reservations/devices").and_then(Value::as_array);
    let is_by_cdi = |device: &&Value| device.get("driver").is_some_and(|driver| driver == "cdi");
    let (by_cdi, rest): (Vec<&Value>, Vec<&Value>) = reserved.into_iter().flatten().partition(is_by_cdi);
    let ids = by_cdi.into_iter().filter_map(|one| one.get("device_ids")?.as_array()).flatten().map(words);
    let devices = service.get("devices").map_or(Some(&[][..]), |list| list.as_array().map(Vec::as_slice));
    // As a text, or with `source` and `target`.
    let device = |device: &Value| device.get("source").map_or_else(|| words(device), words);
    let devices = devices.ok_or("devices must be a list")?.iter().map(device);
    let gpus = service.get("gpus").is_some_and(|gpus| !gpus.is_null());
    let (annotations, mut labels) = (pairs("annotations", service)?, pairs("labels", service)?);
    labels.retain(|key, _| !annotations.contains_key(key));
    Ok(Service {
        name: name.to_owned(),
        of: name.to_owned(),
        annotations,
        label_warning: warn_of_labels(&labels, "under `annotations:`"),
        runtime: service.get("runtime").map(words).filter(|runtime| !runtime.is_empty()),
        devices: ids.chain(devices).collect(),
        gpus: gpus || rest.into_iter().any(asks_for_gpus),
        privileged: service.get("privileged").is_some_and(|is| words(is) == "true"),
        ..Service::default()
    })
}

/// A reservation of NVIDIA's devices.
fn asks_for_gpus(device: &Value) -> bool {
    let capabilities = device.get("capabilities").and_then(Value::as_array).into_iter().flatten();
    device.get("driver").is_some_and(|driver| driver == "nvidia")
        || capabilities.map(words).any(|capability| matches!(capability.as_str(), "gpu" | "nvidia"))
}

/// A map, or a list of `key=value`.
fn pairs(key: &str, service: &Value) -> Result<BTreeMap<String, String>, String> {
    match service.get(key) {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(Value::Object(map)) => Ok(map.iter().map(|(key, value)| (key.clone(), words(value))).collect()),
        Some(Value::Array(list)) if list.iter().all(Value::is_string) => {
            let pair = |entry: String| {
                let (key, value) = entry.split_once('=').unwrap_or((&entry, ""));
                (key.to_owned(), value.to_owned())
            };
            Ok(list.iter().map(words).map(pair).collect())
        }
        Some(_) => Err(format!("{key} must be a map, KEY: VALUE, or a list of KEY=VALUE")),
    }
}

/// The name that Compose gives the container, and its image.
fn called(name: &str, service: &Value, project: &str, number: usize) -> Option<(String, String)> {
    let container = service.get("container_name").map_or_else(|| format!("{project}-{name}-{number}"), words);
    let image = service.get("image").map_or_else(|| format!("{project}-{name}"), words);
    // An unresolved value is not known.
    let known = |text: &String| !text.contains('$');
    Some((container, image)).filter(|(container, image)| known(container) && known(image))
}

/// The project's name: the file's, the environment's, or that of its directory (compose-go, `NormalizeProjectName`).
fn project(document: &Value, file: &Path) -> String {
    let given = document.get("name").and_then(Value::as_str).map(str::to_owned);
    let given = given.or_else(|| std::env::var("COMPOSE_PROJECT_NAME").ok()).filter(|name| !name.is_empty());
    given.unwrap_or_else(|| {
        let dir = file.canonicalize().ok();
        let dir = dir.and_then(|file| Some(file.parent()?.file_name()?.to_string_lossy().to_lowercase()));
        let allowed = |c: &char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
        let name: String = dir.unwrap_or_default().chars().filter(allowed).collect();
        name.trim_start_matches(['_', '-']).to_owned()
    })
}

/// A scalar as text, with Compose's `$$` as the `$` that it stands for.
fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.replace("$$", "$"),
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The file in JSON, as far as it is read.
fn plain(source: &str) -> Result<Value, Wrong> {
    let document = tree(source)?;
    let mut plain = Map::from_iter([(PLAIN.to_owned(), Value::Bool(true))]);
    for (key, value) in document.map("services: …")? {
        match key.scalar("a key")? {
            "include" => return Err(key.wrong(needs_compose("include"))),
            "name" => drop(plain.insert("name".to_owned(), json(value, true)?)),
            "services" => {
                let service = |(name, service): &(Node, Node)| {
                    Ok((name.scalar("a name")?.to_owned(), plain_service(service)?))
                };
                let services: Map<String, Value> =
                    value.map("services by name")?.iter().map(service).collect::<Result<_, Wrong>>()?;
                plain.insert("services".to_owned(), services.into());
            }
            _ => {}
        }
    }
    Ok(plain.into())
}

fn plain_service(service: &Node) -> Result<Value, Wrong> {
    let mut plain = Map::new();
    for (key, value) in service.map("a service")? {
        let name = key.scalar("a key")?;
        match name {
            "extends" | "<<" => return Err(key.wrong(needs_compose(name))),
            // These matter only for containers.toml.
            "image" | "container_name" => drop(plain.insert(name.to_owned(), value.scalar("a name")?.into())),
            // Other labels may have variables.
            "labels" => drop(plain.insert(name.to_owned(), json(value, false)?)),
            _ if READ.contains(&name) => drop(plain.insert(name.to_owned(), json(value, true)?)),
            _ if READ.contains(&&*format!("{name}s")) => {
                return Err(key.wrong(format!("{0}: Compose has no such key, but {0}s", safe(name))));
            }
            _ => {}
        }
    }
    Ok(plain.into())
}

fn needs_compose(part: &str) -> String {
    format!(
        "{} needs Docker Compose, which is not installed: install it, or write its values out",
        safe(part)
    )
}

/// Variables and aliases are errors, or, if not `strict`, left as they are and left out.
fn json(node: &Node, strict: bool) -> Result<Value, Wrong> {
    let each = |node: &Node| json(node, strict);
    Ok(match &node.value {
        yaml::Value::Alias if strict => return Err(node.wrong(needs_compose("an alias"))),
        yaml::Value::Alias => Value::Null,
        yaml::Value::Scalar(text) if strict && text.replace("$$", "").contains('$') => {
            return Err(node.wrong(needs_compose(text)));
        }
        yaml::Value::Scalar(text) => text.as_str().into(),
        yaml::Value::List(list) => list.iter().map(each).collect::<Result<Vec<_>, _>>()?.into(),
        yaml::Value::Map(_) => {
            let pairs = node.map("a map")?;
            let pair = |(key, value): &(Node, Node)| Ok((key.scalar("a key")?.to_owned(), each(value)?));
            Value::Object(pairs.iter().map(pair).collect::<Result<_, Wrong>>()?)
        }
    })
}

// The files as Docker Compose itself reads them, with variables, `extends`, profiles and overriding files resolved.

/// The programs that may be Docker Compose.
const PROGRAMS: [&[&str]; 3] = [&["docker", "compose"], &["docker-compose"], &["podman", "compose"]];

/// Docker Compose's answer to `version`. Other programs of these names have no `config --format json`.
const ITS_VERSION: &str = "Docker Compose version";

/// For `version`.
const SHORT: Duration = Duration::from_secs(10);

/// For `config`, which may fetch included files.
const LONG: Duration = Duration::from_secs(60);

/// The largest answer, in bytes.
const LARGEST: usize = 16 << 20;

/// The files that Compose takes in a directory if it is given none, the first that is there (compose-go,
/// `cli.DefaultFileNames`).
const DEFAULT_NAMES: [&str; 4] = ["compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"];

/// The files that take the place of these, or come on top, in a directory (compose-go, `cli.DefaultOverrideFileNames`;
/// docs.docker.com, "`COMPOSE_FILE`").
const OVERRIDES: [&str; 4] = [
    "compose.override.yml",
    "compose.override.yaml",
    "docker-compose.override.yml",
    "docker-compose.override.yaml",
];
const VARIABLE: &str = "COMPOSE_FILE";

/// The first version that passes a service's annotations on to the engine (docker/compose 11645).
const PASSES_ANNOTATIONS: [u32; 2] = [2, 26];

/// The files with everything resolved, and the version of Docker Compose, if it is too old to pass annotations on; `None` if
/// none is on the host. A file that Compose takes by itself in
/// its directory is read as there, without its name: with the file that overrides it, or as `COMPOSE_FILE` says.
///
/// # Errors
/// Compose does not accept the files; the message is its own.
fn resolved(files: &[PathBuf]) -> Result<Option<(Value, Option<String>)>, String> {
    let version = |program: &[&str]| {
        let answer = child::run(command(program).arg("version"), "", SHORT).ok()?;
        (answer.status.success() && answer.stdout.contains(ITS_VERSION)).then_some(answer.stdout)
    };
    let found = PROGRAMS.into_iter().find_map(|program| Some((program, version(program)?)));
    let Some((program, version)) = found else { return Ok(None) };
    let mut command = command(program);
    match directory(files) {
        Some(directory) => drop(command.current_dir(directory)),
        None => drop(command.args(files.iter().flat_map(|file| ["--file".as_ref(), file.as_os_str()]))),
    }
    command.args(["config", "--format", "json"]);
    let name = program.join(" ");
    let wrong = |message: String| format!("{name} config: {message}");
    let finished = child::run_whole(&mut command, LONG, LARGEST).map_err(|error| wrong(error.to_string()))?;
    if !finished.status.success() {
        let said = finished.stderr.lines().rev().find(|line| !line.trim().is_empty());
        // With paths, a message may be longer than other foreign text.
        return Err(wrong(safe_long(said.unwrap_or("it says nothing about why it failed"), 600)));
    }
    let document = serde_json::from_str(&finished.stdout).map_err(|error| wrong(error.to_string()))?;
    Ok(Some((document, drops_annotations(&version))))
}

/// The version in `answer`, Compose's own, if it is too old to pass annotations on.
pub fn drops_annotations(answer: &str) -> Option<String> {
    let version = version(answer)?;
    let shown: Vec<String> = version.iter().map(ToString::to_string).collect();
    (version[..] < PASSES_ANNOTATIONS[..]).then(|| shown.join("."))
}

/// The directory in which Compose takes the only one of `files` by itself.
fn directory(files: &[PathBuf]) -> Option<PathBuf> {
    let [file] = files else { return None };
    let directory = std::path::absolute(file).ok()?.parent()?.to_owned();
    let taken = DEFAULT_NAMES.into_iter().find(|name| directory.join(name).exists())?;
    (file.file_name()? == taken).then_some(directory)
}

/// The part beside `files` that only Compose can put together, for a host without it.
fn more_than(files: &[PathBuf]) -> Option<String> {
    if files.len() > 1 {
        return Some("several files".to_owned());
    }
    let directory = directory(files)?;
    let set = |text: String| text.lines().any(|line| line.trim_start().starts_with("COMPOSE_FILE="));
    if std::env::var_os(VARIABLE).is_some() || std::fs::read_to_string(directory.join(".env")).is_ok_and(set)
    {
        return Some(VARIABLE.to_owned());
    }
    OVERRIDES.into_iter().find(|name| directory.join(name).exists()).map(str::to_owned)
}

/// With the caller's environment, from which Compose takes variables and profiles.
fn command(program: &[&str]) -> Command {
    let mut command = Command::new(program[0]);
    command.args(&program[1..]);
    command
}

#[cfg(test)]
#[path = "compose_tests.rs"]
mod tests;
