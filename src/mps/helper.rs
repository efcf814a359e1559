//! `sublet mps start|stop KEY` as a child: what needs NVML, or must not live where the engine lives.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child::{self, ChildError, Finished};
use super::control::PATH;
use super::{MpsError, ServerKey};
use crate::config::Config;
use crate::text::safe;

/// Longest that `sublet mps stop` may take.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Absolute path of the `sublet` that belongs to this program: the one beside it, else the packaged one.
#[must_use]
pub fn program() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("sublet")));
    beside.filter(|program| program.is_file()).unwrap_or_else(|| PathBuf::from("/usr/bin/sublet"))
}

/// Runs `sublet mps start KEY`; its warnings.
pub(super) fn start(key: &ServerKey, config: &Config) -> Result<Vec<String>, MpsError> {
    // It may first wait for a stop and for another start to end.
    run("start", key, config.mps.start_timeout * 2 + STOP_LIMIT + Duration::from_secs(5))
}

/// Runs `sublet mps stop KEY`; its warnings.
pub(super) fn stop(key: &ServerKey) -> Result<Vec<String>, MpsError> {
    run("stop", key, STOP_LIMIT)
}

fn run(verb: &str, key: &ServerKey, limit: Duration) -> Result<Vec<String>, MpsError> {
    let line = format!("sublet mps {verb} {key}");
    let mut command = command(&program());
    command.args(["mps", verb, &key.0]);
    match child::run(&mut command, "", limit) {
        Ok(finished) if finished.status.success() => Ok(remarks(&finished.stderr)),
        Ok(finished) => Err(failed(line, last_words(&finished))),
        Err(ChildError::Timeout) => Err(failed(line, format!("no end after {} s", limit.as_secs()))),
        Err(ChildError::Io(error)) => Err(failed(line, format!("{}: {error}", program().display()))),
    }
}

/// A clean environment; `SUBLET_CONFIG` only where we honour it ourselves.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", PATH).current_dir("/");
    if let Some(config) = std::env::var_os("SUBLET_CONFIG").filter(|_| has_callers_rights()) {
        command.env("SUBLET_CONFIG", config);
    }
    command
}

/// Whether we run with no more rights than whoever started us: no set-user-id, no set-group-id.
fn has_callers_rights() -> bool {
    use nix::unistd::{getegid, geteuid, getgid, getuid};
    getuid() == geteuid() && getgid() == getegid()
}

fn failed(command: String, message: String) -> MpsError {
    MpsError::Helper { command, message }
}

/// The last line is the error: warnings come before it.
fn last_words(finished: &Finished) -> String {
    remarks(&finished.stderr).pop().unwrap_or_else(|| finished.status.to_string())
}

/// The lines of a `sublet` child's standard error, without who says so.
fn remarks(stderr: &str) -> Vec<String> {
    let bare = |line: &str| {
        let mut rest = line.trim();
        for prefix in ["sublet: ", "error: ", "warning: "] {
            rest = rest.strip_prefix(prefix).unwrap_or(rest);
        }
        long_safe(rest)
    };
    stderr.lines().map(bare).filter(|line| !line.is_empty()).collect()
}

/// Our own program's message, but it quotes logs: made safe piece by piece, since it may be longer than
/// the piece of foreign text that a message usually repeats.
fn long_safe(line: &str) -> String {
    let characters: Vec<char> = line.chars().take(1000).collect();
    characters.chunks(100).map(|piece| safe(&piece.iter().collect::<String>())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_childs_remarks_lose_their_prefix_and_their_escapes() {
        let stderr = "sublet: warning: one\n\nerror: two\u{1b}[2J\n";
        assert_eq!(remarks(stderr), ["one", "two\\u{1b}[2J"]);
        let long = "x".repeat(300);
        assert_eq!(remarks(&long), [long]);
    }

    #[test]
    fn the_child_sees_no_environment_of_ours() {
        let mut env = command(Path::new("/usr/bin/env"));
        let finished = child::run(&mut env, "", Duration::from_secs(5)).unwrap();
        let others: Vec<&str> =
            finished.stdout.lines().filter(|line| !line.starts_with("SUBLET_CONFIG=")).collect();
        assert_eq!(others, ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
    }
}
