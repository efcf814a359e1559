//! What a daemon and its servers have logged since a start, to find out why they do not run.

use std::path::{Path, PathBuf};

use sublet_core::ledger::DaemonKey;
use sublet_core::mps::dirs;
use sublet_core::text::safe;

/// Standard output and error of the control program, and the logs that it and its servers keep.
const NAMES: [&str; 3] = [dirs::OUTPUT, "control.log", "server.log"];

/// More than the log of a daemon that is asked two hundred times a second for `[mps] start_timeout`.
const MOST: u64 = 1 << 18;

/// How many lines at the end of each file a message repeats.
const LINES: usize = 2;

/// The daemon writes one of these for each command that it receives.
const NOISE: [&str; 2] = ["Accepting connection...", "User did not send valid credentials"];

/// The logs of one daemon, from a start on.
pub(super) struct Logs<'a> {
    key: &'a DaemonKey,
    state_dir: &'a Path,
    /// The lengths of the files at the start; what was there before belongs to earlier daemons.
    from: [u64; NAMES.len()],
}

impl<'a> Logs<'a> {
    pub fn from_now_on(key: &'a DaemonKey, state_dir: &'a Path) -> Self {
        let length =
            |name| std::fs::metadata(dirs::log(key, state_dir).join(name)).map_or(0, |log| log.len());
        Self { key, state_dir, from: NAMES.map(length) }
    }

    fn text(&self, at: usize) -> String {
        dirs::log_since(self.key, self.state_dir, NAMES[at], self.from[at], MOST)
    }

    /// The path of the server's log.
    pub fn of_server(&self) -> PathBuf {
        dirs::log(self.key, self.state_dir).join(NAMES[2])
    }

    /// The pid of a server that has ended, and how it ended.
    pub fn ended(&self) -> Option<(i32, String)> {
        self.text(1).lines().find_map(ended)
    }

    /// Whether the daemon has logged that its server `pid` is ready.
    pub fn is_ready(&self, pid: i32) -> bool {
        let ready = format!("NEW SERVER {pid}: Ready");
        self.text(1).lines().any(|line| words(line) == ready)
    }

    /// The last lines of the logs, for a message; safe for terminals.
    pub fn ends(&self) -> String {
        let ends: Vec<String> = (0..NAMES.len()).filter_map(|at| end(NAMES[at], &self.text(at))).collect();
        if ends.is_empty() {
            return format!("; nothing in {}", dirs::log(self.key, self.state_dir).display());
        }
        format!("; {}", ends.join("; "))
    }
}

fn end(name: &str, text: &str) -> Option<String> {
    let told = |line: &&str| !line.is_empty() && !NOISE.contains(line);
    let mut last: Vec<String> = text.lines().rev().map(words).filter(told).take(LINES).map(safe).collect();
    last.reverse();
    (!last.is_empty()).then(|| format!("{name}: {}", last.join(" | ")))
}

/// A line without its prefix, such as `[2026-02-06 09:34:17.770 Control   261] `.
fn words(line: &str) -> &str {
    let bare = line.starts_with('[').then(|| line.split_once("] ")).flatten();
    bare.map_or(line, |(_, words)| words).trim()
}

/// Parses `Server 95 exited with status 1`, the daemon's text (docs/evidence; driver 535: NVIDIA/k8s-device-plugin,
/// issue 685).
fn ended(line: &str) -> Option<(i32, String)> {
    let (pid, how) = words(line).strip_prefix("Server ")?.split_once(' ')?;
    how.starts_with("exited").then_some(())?;
    Some((pid.parse().ok()?, safe(how)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTROL: &str = "\
[2024-04-29 11:22:10.421 Control    73] Starting new server 95 for user 0
[2024-04-29 11:22:10.425 Control    73] Accepting connection...
[2024-04-29 11:22:10.446 Control    73] Server 95 exited with status 1
[2024-04-29 11:22:10.447 Control    73] Accepting connection...
";

    #[test]
    fn what_was_there_before_a_start_is_not_of_it() {
        let state = tempfile::tempdir().unwrap();
        let key = DaemonKey("GPU-1".into());
        dirs::make(&key, state.path()).unwrap();
        let dir = dirs::log(&key, state.path());
        let append = |name: &str, text: &str| {
            let before = std::fs::read_to_string(dir.join(name)).unwrap_or_default();
            std::fs::write(dir.join(name), before + text).unwrap();
        };
        append("control.log", CONTROL);
        let logs = Logs::from_now_on(&key, state.path());
        assert_eq!((logs.ended(), logs.ends()), (None, format!("; nothing in {}", dir.display())));
        append("control.log", &CONTROL.replace("95", "96"));
        append(
            "server.log",
            "[2024-04-29 11:22:10.425 Other    96] Startup\n[x] Failed to start : a\u{1b}[2J\n",
        );
        assert_eq!(logs.ended(), Some((96, "exited with status 1".into())));
        assert_eq!(
            logs.ends(),
            "; control.log: Starting new server 96 for user 0 | Server 96 exited with status 1; \
             server.log: Startup | Failed to start : a\\u{1b}[2J"
        );
        append("control.log", "[2026-02-06 09:34:36.400 Control   261] NEW SERVER 337: Ready\n");
        assert!(logs.is_ready(337) && !logs.is_ready(33));
    }

    #[test]
    fn other_lines_are_no_end_of_a_server() {
        for line in ["Server 7 is fine", "Server x exited with status 1", "Server", "", "[ ] Exiting"] {
            assert_eq!(ended(line), None, "{line}");
        }
        assert_eq!(ended("Server 7 exited with status 139"), Some((7, "exited with status 139".into())));
    }
}
