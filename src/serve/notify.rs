//! What systemd wants to hear of a service (`sd_notify(3)`): a datagram of `KEY=VALUE` lines.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// Where systemd listens, if it started us.
#[derive(Debug)]
pub(super) struct Notify(Option<OsString>);

impl Notify {
    pub(super) fn from_environment() -> Self {
        Self(std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()))
    }

    /// Nobody waits for us to tell: failure is worth a line, no more.
    pub(super) fn say(&self, state: &str) {
        if let Some(Err(error)) = self.0.as_ref().map(|socket| send(socket, state)) {
            tracing::debug!("NOTIFY_SOCKET: {error}");
        }
    }
}

fn send(socket: &OsString, state: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let datagram = UnixDatagram::unbound()?;
    datagram.set_nonblocking(true)?;
    datagram.send_to_addr(state.as_bytes(), &address).map(drop)
}

/// How often `WATCHDOG=1` is due (`sd_watchdog_enabled(3)`: twice in the time given); `None`: never.
pub(super) fn watchdog() -> Option<Duration> {
    let pid = std::env::var("WATCHDOG_PID").ok();
    if pid.is_some_and(|pid| pid.parse() != Ok(std::process::id())) {
        return None;
    }
    let limit: u64 = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    (limit > 0).then(|| Duration::from_micros(limit / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_heard_by_path_and_by_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        Notify(Some(path.into())).say("READY=1");
        let name = format!("sublet-test-{}", std::process::id());
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        Notify(Some(format!("@{name}").into())).say("STOPPING=1");
        let mut buffer = [0; 32];
        for (socket, expected) in [(by_path, "READY=1"), (by_name, "STOPPING=1")] {
            socket.set_nonblocking(true).unwrap();
            let length = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], expected.as_bytes());
        }
        Notify(Some("/nowhere".into())).say("READY=1");
        Notify(None).say("READY=1");
    }
}
