//! Programs and scripts that tests write and run. Another process writes them: a file that this process has open for
//! writing would also be open in a child that another test is starting, and could not be run until that child closes
//! it (ETXTBSY, execve(2)).

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Copies the program `from` to `to`, executable by every user.
pub fn copy(from: &Path, to: &Path) {
    let done = Command::new("install").args(["-m", "0755"]).arg(from).arg(to).status();
    assert!(done.expect("install runs").success(), "{} to {}", from.display(), to.display());
}

/// Writes the shell script `text` to `to`, executable by every user.
pub fn script(to: &Path, text: &str) {
    let mut install = Command::new("install");
    install.args(["-m", "0755", "/dev/stdin"]).arg(to).stdin(Stdio::piped());
    let mut install = install.spawn().expect("install runs");
    let mut stdin = install.stdin.take().expect("piped");
    stdin.write_all(format!("#!/bin/sh\n{text}").as_bytes()).expect("it reads");
    drop(stdin);
    assert!(install.wait().expect("it ends").success(), "{}", to.display());
}
