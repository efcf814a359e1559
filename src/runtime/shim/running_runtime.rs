//! Finds the low-level runtime that runs this hook, and where it keeps its record of the container.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::argv::parse;
use super::low_level::{self, Host};

/// The record of container `id` that the runtime with process id `pid` keeps; `None` if it is not found.
pub(crate) fn find_record(pid: i32, id: &str) -> Option<PathBuf> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let args = read_strings(&proc.join("cmdline"));
    // /proc/PID/exe is not used, because crun runs a copy of itself that has no path.
    let (program, args) = args.split_first()?;
    let dialect = low_level::detect_dialect(Path::new(program));
    let line = parse(args, dialect);
    let host = Host::from_environment(&read_strings(&proc.join("environ")));
    let record = low_level::record_path(dialect, line.global.root.as_deref(), id, &host)?;
    record.is_dir().then_some(record)
}

/// The strings of a file of /proc, each ended by a NUL byte.
fn read_strings(file: &Path) -> Vec<OsString> {
    let bytes = std::fs::read(file).unwrap_or_default();
    let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    text.split(|byte| *byte == 0).map(|part| OsStr::from_bytes(part).to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_is_where_the_runtimes_command_line_says() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("c1")).unwrap();
        // A waiting shell with additional arguments that it does not read.
        let mut runtime = std::process::Command::new("/bin/sh")
            .args(["-c", "echo up; read wait", "--root"])
            .arg(dir.path())
            .args(["create", "c1"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // A process that was just started has no command line yet.
        std::io::Read::read_exact(runtime.stdout.as_mut().unwrap(), &mut [0; 3]).unwrap();
        let pid = i32::try_from(runtime.id()).unwrap();
        assert_eq!(find_record(pid, "c1"), Some(dir.path().join("c1")));
        assert_eq!(find_record(pid, "c2"), None, "there is none");
        assert_eq!(find_record(pid, "../c1"), None);
        drop(runtime.stdin.take());
        runtime.wait().unwrap();
        assert_eq!(find_record(pid, "c1"), None, "the runtime is gone");
    }
}
