//! The programs that the library starts. A process that may not start programs asks its waiting parent process to do
//! so. The parent builds these few commands itself, from words that it checks, so that a request cannot become another
//! program, another environment or another option.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};

use super::Commands;
use crate::process::child::{self, ChildError, Finished};
use crate::text::safe;

/// Longer than any request (64 KiB of input) or answer (twice 64 KiB), even with every byte escaped.
const LONGEST: u64 = 1 << 20;

/// The limit of a request for a program that is not waited for.
const DETACHED: Duration = Duration::ZERO;

/// The connection by which a process that may not start programs asks for commands.
pub(super) static OUTSIDE: OnceLock<UnixStream> = OnceLock::new();

/// Whether this process may neither start programs nor send signals.
pub(crate) fn is_confined() -> bool {
    OUTSIDE.get().is_some()
}

/// As [`child::run`], for `command`. If this process may not run it itself, it asks for `words` instead: the program's
/// name and the arguments that identify the command.
///
/// # Errors
/// As [`child::run`]; or the process that runs commands for this one has ended.
pub fn run(
    words: &[&str],
    command: impl FnOnce() -> Command,
    input: &str,
    limit: Duration,
) -> Result<Finished, ChildError> {
    match OUTSIDE.get() {
        Some(outside) => ask(outside, words, input, limit),
        None => child::run(&mut command(), input, limit),
    }
}

/// As [`child::spawn_detached`], for `command`, or by its `words` as [`run`].
///
/// # Errors
/// It cannot be started; or the process that runs commands for this one has ended.
pub fn start(words: &[&str], command: impl FnOnce() -> Command) -> io::Result<()> {
    let Some(outside) = OUTSIDE.get() else { return child::spawn_detached(&mut command()) };
    match ask(outside, words, "", DETACHED) {
        Ok(_) => Ok(()),
        Err(ChildError::Io(error)) => Err(error),
        Err(ChildError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn ask(
    mut outside: &UnixStream,
    words: &[&str],
    input: &str,
    limit: Duration,
) -> Result<Finished, ChildError> {
    let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    writeln!(outside, "{}", json!([words, input, limit]))?;
    let mut answer = String::new();
    BufReader::new(outside).take(LONGEST).read_line(&mut answer)?;
    match serde_json::from_str(&answer).map_err(io::Error::from)? {
        Value::Null => Err(ChildError::Timeout),
        Value::String(error) => Err(io::Error::other(error).into()),
        answer => parse_answer(&answer)
            .ok_or_else(|| io::Error::other("the process that starts programs did not answer").into()),
    }
}

fn parse_answer(answer: &Value) -> Option<Finished> {
    let text = |at: usize| answer.get(at)?.as_str().map(str::to_owned);
    let status = i32::try_from(answer.get(0)?.as_i64()?).ok()?;
    Some(Finished { status: ExitStatus::from_raw(status), stdout: text(1)?, stderr: text(2)? })
}

/// Runs the `commands` that the process at the other end asks for, until that process ends, or cannot be heard or
/// answered any more.
pub(super) fn serve(mut inside: &UnixStream, commands: Commands) {
    let mut asked = BufReader::new(inside);
    let mut line = String::new();
    while matches!(asked.by_ref().take(LONGEST).read_line(&mut line), Ok(1..)) {
        let answer = match run_request(&line, commands) {
            Ok(Finished { status, stdout, stderr }) => json!([status.into_raw(), stdout, stderr]),
            Err(ChildError::Timeout) => Value::Null,
            Err(ChildError::Io(error)) => Value::String(error.to_string()),
        };
        if writeln!(inside, "{answer}").is_err() {
            return;
        }
        line.clear();
    }
}

fn run_request(line: &str, commands: Commands) -> Result<Finished, ChildError> {
    let (words, input, limit): (Vec<&str>, String, u64) =
        serde_json::from_str(line).map_err(io::Error::from)?;
    let unknown = || io::Error::other(format!("no hook runs `{}`", safe(&words.join(" "))));
    let mut command = commands(&words).ok_or_else(unknown)?;
    if Duration::from_millis(limit) == DETACHED {
        child::spawn_detached(&mut command)?;
        let status = ExitStatus::default();
        return Ok(Finished { status, stdout: String::new(), stderr: String::new() });
    }
    child::run(&mut command, &input, Duration::from_millis(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_answer_of_the_program_or_why_there_is_none() {
        let (outside, inside) = UnixStream::pair().unwrap();
        let commands: Commands = |words| (words == ["cat"]).then(|| Command::new("cat"));
        let server = std::thread::spawn(move || serve(&outside, commands));
        let limit = Duration::from_secs(10);
        let refused = ask(&inside, &["sh", "-c", "true"], "", limit);
        let Err(ChildError::Io(error)) = refused else { panic!("{refused:?}") };
        assert_eq!(error.to_string(), "no hook runs `sh -c true`");
        let answer = ask(&inside, &["cat"], "in\\n\nput", limit).unwrap();
        assert_eq!((answer.stdout.as_str(), answer.status.success()), ("in\\n\nput", true));
        let begun = std::time::Instant::now();
        ask(&inside, &["cat"], "", DETACHED).unwrap();
        assert!(begun.elapsed() < limit, "it is not waited for");
        drop(inside);
        server.join().unwrap();
    }
}
