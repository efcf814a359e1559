//! Programs and scripts that tests lay down and run. Another process writes them: what we had open for writing
//! ourselves, a child that another test is just starting would hold open too, and as long as it does the
//! program cannot be run (ETXTBSY, execve(2)).

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// A copy of the program `from` at `to`, which everybody may run.
pub fn copy(from: &Path, to: &Path) {
    let done = Command::new("install").args(["-m", "0755"]).arg(from).arg(to).status();
    assert!(done.expect("install runs").success(), "{} to {}", from.display(), to.display());
}

/// The shell script `text` at `to`, which everybody may run.
pub fn script(to: &Path, text: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "0755", "/dev/stdin"]).arg(to).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install runs");
    let mut stdin = install.stdin.take().expect("piped");
    stdin.write_all(format!("#!/bin/sh\n{text}").as_bytes()).expect("it reads");
    drop(stdin);
    assert!(install.wait().expect("it ends").success(), "{}", to.display());
}
