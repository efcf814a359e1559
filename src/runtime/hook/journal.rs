//! Lines for the system's log, because Podman discards the output of precreate hooks.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use sublet_core::log::{Level, one_line};

/// The socket on which system loggers listen, including systemd's journal (syslog(3)).
const SOCKET: &str = "/dev/log";

/// Writes one line, if a logger listens. Does not wait if its queue is full.
pub(super) fn write(level: Level, message: &str) {
    if let Err(error) = send(Path::new(SOCKET), level, message) {
        tracing::debug!("{SOCKET}: {error}");
    }
}

fn send(socket: &Path, level: Level, message: &str) -> std::io::Result<()> {
    // Facility "user" is 1; severities (RFC 5424): 3 is error, 4 warning, 6 informational.
    let priority = 8 + match level {
        Level::Error => 3,
        Level::Warning => 4,
        Level::Info | Level::Debug => 6,
    };
    let line = format!("<{priority}>sublet-hook[{}]: {}", std::process::id(), one_line(message));
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to(line.as_bytes(), socket).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_datagram_in_the_form_of_syslog() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert!(send(&path, Level::Error, "nobody listens").is_err());
        let listener = UnixDatagram::bind(&path).unwrap();
        send(&path, Level::Error, "container c: no\nplace").unwrap();
        let mut text = [0; 200];
        let length = listener.recv(&mut text).unwrap();
        let pid = std::process::id();
        let expected = format!("<11>sublet-hook[{pid}]: container c: no\\nplace");
        assert_eq!(std::str::from_utf8(&text[..length]).unwrap(), expected);
    }
}
