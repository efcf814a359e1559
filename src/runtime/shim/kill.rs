//! `kill` of a container whose first process goes on after its first thread has ended, as any program can have it. runc and
//! crun take such a container for stopped and send it no signal, and an engine waits for its end for ever.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use nix::libc::EXIT_SUCCESS;
use nix::sys::signal::Signal;

use super::{Call, Kill};
use sublet_core::ledger::Record;
use sublet_core::process::pidfd_signal;

/// Sends the signal to the first process itself where the runtime would not. With `--all` the runtime runs, too.
pub(super) fn kill(call: &Call<'_>, kill: &Kill, container: Option<(&str, PathBuf)>) -> anyhow::Result<i32> {
    let signal = kill.signal.as_deref().map_or(Some(Signal::SIGTERM), parse_signal);
    let first = container.and_then(|(_, record)| find_without_first_thread(&record));
    let sent = signal.zip(first).is_some_and(|(signal, first)| pidfd_signal(first, signal).is_ok());
    if sent && !kill.all {
        return Ok(EXIT_SUCCESS);
    }
    call.pass_on()
}

/// The first process of the container with a share and this `record`, if only its first thread has ended.
pub(super) fn find_without_first_thread(record: &Path) -> Option<OwnedFd> {
    let first = Record::read(record).ok()?.filter(|record| record.lease.is_some())?.init;
    if first.has_first_thread() { None } else { first.hold().ok()? }
}

/// As runc and crun parse it: a number, or a name with or without `SIG`.
fn parse_signal(word: &OsStr) -> Option<Signal> {
    let word = word.to_str()?;
    if let Ok(number) = word.parse::<i32>() {
        return Signal::try_from(number).ok();
    }
    let name = word.to_ascii_uppercase();
    Signal::from_str(&if name.starts_with("SIG") { name } else { format!("SIG{name}") }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_a_number_or_a_name() {
        for word in ["15", "TERM", "SIGTERM", "term"] {
            assert_eq!(parse_signal(word.as_ref()), Some(Signal::SIGTERM), "{word}");
        }
        for word in ["", "0", "-9", "99", "RTMIN+3", "SIG", "KILL "] {
            assert_eq!(parse_signal(word.as_ref()), None, "{word}");
        }
    }
}
