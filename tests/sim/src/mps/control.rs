//! `nvidia-cuda-mps-control`: the daemon with `-d` or `-f`, otherwise the command line client.

use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result};
use nix::unistd::{dup2_stdout, setsid};

use super::daemon::{Daemon, NOT_FOUND};
use super::message::{self, Answer, Hello};
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

/// Of a daemon that speaks with another program (docs/evidence/2026-11-25-mps-control.md).
const CANNOT_SEND: &str = "Cannot send command to MPS control daemon process";

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

/// Sends each line of standard input to the daemon. The conversation begins before anything is read, and ends with the
/// input.
fn talk() -> ExitCode {
    let conn = match greet() {
        Ok(conn) => conn,
        Err(why) => {
            say(why);
            return ExitCode::FAILURE;
        }
    };
    for line in BufReader::new(stdin()).lines().map_while(Result::ok) {
        if line.trim().is_empty() {
            continue;
        }
        if conn.send(&message::Command(line)).is_err() {
            say(CANNOT_SEND);
            return ExitCode::FAILURE;
        }
        // A daemon that ends before it has answered has said nothing (docs/evidence/2026-11-24-h100-cycles.md).
        match conn.recv() {
            Some((Answer(answer), _)) if !answer.is_empty() => say(&answer),
            _ => {}
        }
    }
    ExitCode::SUCCESS
}

/// Uses `control_privileged` if it can be reached, otherwise `control`.
fn greet() -> Result<Conn, &'static str> {
    let directory = pipe_directory();
    let conn = Conn::connect(&directory.join("control_privileged"))
        .or_else(|_| Conn::connect(&directory.join("control")))
        .map_err(|_| NOT_FOUND)?;
    conn.send(&Hello::Program).map_err(|_| CANNOT_SEND)?;
    conn.recv::<Answer>().map(|_| conn).ok_or(CANNOT_SEND)
}
