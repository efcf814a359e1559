//! A Compose file as Docker Compose itself reads it, with variables, `extends` and profiles resolved.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::StackError;
use sublet_core::process::child::{self, ChildError};
use sublet_core::text::safe;

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

/// The file with everything resolved; `None` if no Docker Compose is on the host.
///
/// # Errors
/// Compose does not accept the file; the message is its own.
pub fn resolved(file: &Path) -> Result<Option<Value>, StackError> {
    let Some(program) = PROGRAMS.into_iter().find(|program| is_compose(program)) else { return Ok(None) };
    let mut command = command(program);
    command.arg("--file").arg(file).args(["config", "--format", "json"]);
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
        return Err(wrong(long_safe(said.unwrap_or("it says nothing about why it failed"))));
    }
    serde_json::from_str(&finished.stdout).map(Some).map_err(|error| wrong(error.to_string()))
}

/// A message with paths, which may be longer than other foreign text.
fn long_safe(line: &str) -> String {
    let characters: Vec<char> = line.chars().take(600).collect();
    characters.chunks(100).map(|piece| safe(&piece.iter().collect::<String>())).collect()
}

/// With the caller's environment, from which Compose takes variables and profiles.
fn command(program: &[&str]) -> Command {
    let mut command = Command::new(program[0]);
    command.args(&program[1..]);
    command
}

fn is_compose(program: &[&str]) -> bool {
    let answer = child::run(command(program).arg("version"), "", SHORT);
    answer.is_ok_and(|answer| answer.status.success() && answer.stdout.contains(ITS_VERSION))
}
