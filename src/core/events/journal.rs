//! Events in systemd's journal, by its native protocol (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL>).

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use nix::unistd::geteuid;

use super::{Event, Kind};
use crate::host::user_namespace;
use crate::log::one_line;

/// Where the journal listens.
const SOCKET: &str = "/run/systemd/journal/socket";

/// The field that has an event as one line of JSON.
pub const JOURNAL_FIELD: &str = "SUBLET_EVENT";

/// Of all entries with an event.
pub const JOURNAL_IDENTIFIER: &str = "sublet-events";

/// The ledger of other state directories, such as those of tests, is not the system's.
const SYSTEMS: &str = "/run/sublet";

/// Whether events of the ledger in `state_dir` are in the system's journal. Only root's entries count, because every
/// user may write to the journal.
#[must_use]
pub fn has_journal(state_dir: &Path) -> bool {
    let is_root = || geteuid().is_root() && !user_namespace::is_nested();
    state_dir == Path::new(SYSTEMS) && is_root() && Path::new(SOCKET).exists()
}

/// Sends an entry for each line; returns those that the journal did not take. It does not wait for the journal.
pub(super) fn send<'l>(lines: &'l [String], events: &[Event]) -> &'l [String] {
    send_to(Path::new(SOCKET), lines, events)
}

fn send_to<'l>(socket: &Path, lines: &'l [String], events: &[Event]) -> &'l [String] {
    let Ok(sender) = UnixDatagram::unbound() else { return lines };
    if sender.set_nonblocking(true).is_err() {
        return lines;
    }
    for (at, (line, event)) in lines.iter().zip(events).enumerate() {
        if sender.send_to(entry(line, event).as_bytes(), socket).is_err() {
            return &lines[at..];
        }
    }
    &[]
}

/// Values are without newlines: JSON escapes them, and so does `one_line`.
fn entry(line: &str, event: &Event) -> String {
    // As syslog's: 4 is warning, 6 informational.
    let priority = match event.kind {
        Kind::LeftEnded
        | Kind::LeftRunning
        | Kind::Warned
        | Kind::Refused
        | Kind::Guard
        | Kind::MpsFailed
        | Kind::GpuLost
        | Kind::LedgerRebuilt => 4,
        _ => 6,
    };
    let words = [event.kind.as_str(), &event.container_id, &event.daemon, &event.text];
    let message: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    format!(
        "MESSAGE={}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER={JOURNAL_IDENTIFIER}\n{JOURNAL_FIELD}={line}\n",
        one_line(&message.join(" "))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_datagram_and_what_is_not_taken_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let event = Event { text: "no\nplace".into(), ..Event::now(Kind::Refused) };
        let (lines, events) = ([event.line(), event.line()], [event.clone(), event]);
        assert_eq!(send_to(&path, &lines, &events), lines, "nobody listens");
        let listener = UnixDatagram::bind(&path).unwrap();
        assert!(send_to(&path, &lines, &events).is_empty());
        let mut bytes = [0; 1000];
        let length = listener.recv(&mut bytes).unwrap();
        let text = std::str::from_utf8(&bytes[..length]).unwrap();
        let fields: Vec<&str> = text.lines().collect();
        assert_eq!(fields[..2], ["MESSAGE=refused no\\nplace", "PRIORITY=4"]);
        assert_eq!(fields[3], format!("SUBLET_EVENT={}", lines[0]));
        assert_eq!(fields.len(), 4);
    }

    #[test]
    fn the_journal_has_no_events_of_tests() {
        assert!(!has_journal(Path::new("/var/tmp/x/run")));
    }
}
