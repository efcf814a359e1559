//! Lines for the system's log, where an engine throws away what its hooks say: Podman's precreate.

use std::os::unix::net::UnixDatagram;

use crate::runtime::log::{Level, one_line};

/// Where every system log listens, systemd's journal too (syslog(3)).
const SOCKET: &str = "/dev/log";

/// Writes one line, if anybody listens; a full queue is not waited for.
pub(super) fn write(level: Level, message: &str) {
    // Facility "user" is 1; severities (RFC 5424): 3 is error, 4 warning, 6 informational.
    let priority = 8 + match level {
        Level::Error => 3,
        Level::Warning => 4,
        Level::Info | Level::Debug => 6,
    };
    let line = format!("<{priority}>sublet-hook[{}]: {}", std::process::id(), one_line(message));
    let sent = UnixDatagram::unbound().and_then(|socket| {
        socket.set_nonblocking(true)?;
        socket.send_to(line.as_bytes(), SOCKET)
    });
    if let Err(error) = sent {
        tracing::debug!("{SOCKET}: {error}");
    }
}
