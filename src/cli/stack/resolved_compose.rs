//! Compose files as Docker Compose itself reads them, with variables, `extends`, profiles and overriding files resolved.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::StackError;
use crate::setup::engine_files::version;
use sublet_core::process::child::{self, ChildError};
use sublet_core::text::safe_long;

/// The programs that may be Docker Compose.
const PROGRAMS: [&[&str]; 3] = [&["docker", "compose"], &["docker-compose"], &["podman", "compose"]];

/// What Docker Compose answers to `version`. Other programs of these names have no `config --format json`.
const ITS_VERSION: &str = "Docker Compose version";

/// For `version`.
const SHORT: Duration = Duration::from_secs(10);

/// For `config`, which may fetch included files.
const LONG: Duration = Duration::from_secs(60);

/// The largest answer, in bytes.
const LARGEST: usize = 16 << 20;

/// The files that Compose takes in a directory if it is told none, the first that is there (compose-go,
/// `cli.DefaultFileNames`).
const DEFAULT_NAMES: [&str; 4] = ["compose.yaml", "compose.yml", "docker-compose.yml", "docker-compose.yaml"];

/// What takes the place of these, or comes on top, in a directory (compose-go, `cli.DefaultOverrideFileNames`;
/// docs.docker.com, "`COMPOSE_FILE`").
const OVERRIDES: [&str; 4] = [
    "compose.override.yml",
    "compose.override.yaml",
    "docker-compose.override.yml",
    "docker-compose.override.yaml",
];
const VARIABLE: &str = "COMPOSE_FILE";

/// The first version that passes a service's annotations on to the engine (docker/compose 11645).
pub const PASSES_ANNOTATIONS: [u32; 2] = [2, 26];

/// The files with everything resolved, and the version of Docker Compose, if it is too old to pass annotations on; `None` if
/// none is on the host. A file that Compose takes by itself in
/// its directory is read as there, without its name: with the file that overrides it, or as `COMPOSE_FILE` says.
///
/// # Errors
/// Compose does not accept the files; the message is its own.
pub fn resolved(files: &[PathBuf]) -> Result<Option<(Value, Option<String>)>, StackError> {
    let version = |program: &[&str]| {
        let answer = child::run(command(program).arg("version"), "", SHORT).ok()?;
        (answer.status.success() && answer.stdout.contains(ITS_VERSION)).then_some(answer.stdout)
    };
    let found = PROGRAMS.into_iter().find_map(|program| Some((program, version(program)?)));
    let (Some((program, version)), [file, ..]) = (found, files) else { return Ok(None) };
    let mut command = command(program);
    match directory(files) {
        Some(directory) => drop(command.current_dir(directory)),
        None => drop(command.args(files.iter().flat_map(|file| ["--file".as_ref(), file.as_os_str()]))),
    }
    command.args(["config", "--format", "json"]);
    let name = program.join(" ");
    let wrong = |message: String| StackError::unusable(file, format!("{name} config: {message}"));
    let finished = child::run_whole(&mut command, LONG, LARGEST).map_err(|error| {
        wrong(match error {
            ChildError::Io(error) => error.to_string(),
            ChildError::Timeout => format!("it did not end within {} s", LONG.as_secs()),
        })
    })?;
    if !finished.status.success() {
        let said = finished.stderr.lines().rev().find(|line| !line.trim().is_empty());
        // With paths, a message may be longer than other foreign text.
        return Err(wrong(safe_long(said.unwrap_or("it says nothing about why it failed"), 600)));
    }
    let document = serde_json::from_str(&finished.stdout).map_err(|error| wrong(error.to_string()))?;
    Ok(Some((document, drops_annotations(&version))))
}

/// The version in `told`, which Compose says of itself, if it is too old to pass annotations on.
pub fn drops_annotations(told: &str) -> Option<String> {
    let version = version(told)?;
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

/// What else than `files` only Compose can put together, for a host without it.
pub fn more_than(files: &[PathBuf]) -> Option<String> {
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
