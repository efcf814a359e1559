//! Runs sublet's other programs as child processes, for work that needs NVML or that must not run in the engine's
//! cgroup.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::child::ChildError;
use super::{confine, inheritance};
use crate::text::{in_one_line, safe_long};

/// Where programs are looked up. Nothing in the caller's environment is trusted.
pub const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// A `sublet` command that failed.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SubletError(
    /// The last message it printed, which names the fault; if it printed nothing, the command and its exit status.
    pub String,
);

/// The absolute path of the `sublet` that belongs to this program: the one in the same directory, otherwise the
/// packaged one.
pub fn program() -> PathBuf {
    let beside = super::inheritance::own_program().map(|own| own.with_file_name("sublet"));
    beside.filter(|program| program.is_file()).unwrap_or_else(|| PathBuf::from("/usr/bin/sublet"))
}

/// Runs `sublet ARGUMENTS` for at most `limit`, with a clean environment. Returns its warnings.
///
/// The child reports on standard error: one warning per line, and, if it fails, the error as the last message.
pub fn run(arguments: &[&str], limit: Duration) -> Result<Vec<String>, SubletError> {
    ask(arguments, "", limit).map(|(_, warnings)| warnings)
}

/// As [`run`], with `input` (less than 64 KiB) on its standard input. Returns its output and its warnings.
pub fn ask(arguments: &[&str], input: &str, limit: Duration) -> Result<(String, Vec<String>), SubletError> {
    let words: Vec<&str> = std::iter::once("sublet").chain(arguments.iter().copied()).collect();
    let named = |how: String| format!("`sublet {}`: {how}", arguments.join(" "));
    Err(SubletError(match confine::run(&words, || command(&program(), arguments), input, limit) {
        Ok(finished) if finished.status.success() => {
            return Ok((finished.stdout, parse_messages(&finished.stderr)));
        }
        Ok(finished) => {
            parse_messages(&finished.stderr).pop().unwrap_or_else(|| named(finished.status.to_string()))
        }
        Err(ChildError::Timeout) => named(format!("it did not end within {} s", limit.as_secs())),
        Err(ChildError::Io(error)) => named(format!("{}: {error}", program().display())),
    }))
}

/// Starts `sublet ARGUMENTS` as a daemon. Its messages are lost.
pub(crate) fn start(arguments: &[&str]) -> std::io::Result<()> {
    let words: Vec<&str> = std::iter::once("sublet").chain(arguments.iter().copied()).collect();
    confine::start(&words, || command(&program(), arguments))
}

/// A clean environment. `SUBLET_CONFIG` is passed on only if this process honours it itself.
pub fn command(program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.env_clear().args(arguments).env("PATH", PATH).current_dir("/");
    if let Some(config) = inheritance::honoured_config() {
        command.env(inheritance::VARIABLE, config);
    }
    command
}

/// The messages of a `sublet` child's standard error, without the program's name in front.
fn parse_messages(stderr: &str) -> Vec<String> {
    let bare = |line: &str| {
        let mut rest = line.trim();
        for prefix in ["sublet: ", "error: ", "warning: "] {
            rest = rest.strip_prefix(prefix).unwrap_or(rest);
        }
        safe_long(rest, 1000)
    };
    in_one_line(stderr).lines().map(bare).filter(|line| !line.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_childs_remarks_lose_their_prefix_and_their_escapes() {
        let stderr = "sublet: warning: one\n\nerror: two\u{1b}[2J\nwhy: three\nfix: four\n";
        assert_eq!(parse_messages(stderr), ["one", "two\\u{1b}[2J; why: three; fix: four"]);
        let long = "x".repeat(300);
        assert_eq!(parse_messages(&long), [long]);
    }

    #[test]
    fn the_child_sees_no_environment_of_ours() {
        let mut env = command(Path::new("/usr/bin/env"), &[]);
        let finished = crate::process::child::run(&mut env, "", Duration::from_secs(5)).unwrap();
        let own: Vec<&str> =
            finished.stdout.lines().filter(|line| !line.starts_with("SUBLET_CONFIG=")).collect();
        assert_eq!(own, ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
    }
}
