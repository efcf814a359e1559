//! `nvidia-cuda-mps-control`: the daemon with `-d` or `-f`, otherwise the command line client.

use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use nix::unistd::{dup2_stdout, setsid};

use super::daemon::{Daemon, NOT_FOUND};
use super::message::{Answer, Hello};
use super::pipe_directory;
use super::wire::Conn;

/// Marks the daemon process in the background, as opposed to the process that the user started.
const BACKGROUND: &str = "SUBLET_SIM_MPS_BACKGROUND";

/// Runs the program on its arguments.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |names: &[&str]| arguments.iter().any(|argument| names.contains(&argument.as_str()));
    let multiuser = given(&["-M", "--multiuser-server"]);
    let result = if given(&["-v"]) {
        say("CUDA MPS Control binary version: 13000");
        Ok(())
    } else if std::env::var_os(BACKGROUND).is_some() {
        in_background(multiuser)
    } else if given(&["-d"]) {
        detach(&arguments)
    } else if given(&["-f"]) {
        Daemon::new(multiuser).map(Daemon::run)
    } else {
        return talk();
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{error}"));
            ExitCode::FAILURE
        }
    }
}

/// A caller that has closed its end wants no output.
fn say(text: &str) {
    let _ = writeln!(stdout(), "{text}");
}

/// Starts this program again, without the caller's standard streams, and waits until it serves.
fn detach(arguments: &[String]) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg0("nvidia-cuda-mps-control").args(arguments).env(BACKGROUND, "1").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().context("cannot start the daemon")?;
    let mut said = String::new();
    child.stdout.take().context("no pipe")?.read_to_string(&mut said)?;
    match said.trim() {
        "" => Ok(()),
        reason => Err(anyhow::anyhow!("{reason}")),
    }
}

/// The daemon closes standard output when it serves. If it cannot serve, it writes the reason first.
fn in_background(multiuser: bool) -> Result<()> {
    setsid()?;
    let daemon = Daemon::new(multiuser)?;
    dup2_stdout(std::fs::File::open("/dev/null")?)?;
    daemon.run();
    Ok(())
}

/// Sends each line of standard input to the daemon.
fn talk() -> ExitCode {
    for line in BufReader::new(stdin()).lines().map_while(Result::ok) {
        if line.trim().is_empty() {
            continue;
        }
        let Some(answer) = ask(&line) else {
            say(NOT_FOUND);
            return ExitCode::FAILURE;
        };
        if !answer.is_empty() {
            say(&answer);
        }
    }
    ExitCode::SUCCESS
}

/// Uses `control_privileged` if it can be reached, otherwise `control`.
fn ask(line: &str) -> Option<String> {
    let directory = pipe_directory();
    let conn = Conn::connect(&directory.join("control_privileged"))
        .or_else(|_| Conn::connect(&directory.join("control")))
        .ok()?;
    conn.send(&Hello::Command(line.to_owned())).ok()?;
    conn.recv().map(|(Answer(text), _)| text)
}
