//! The listening socket: the one that systemd passes, or a new one.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    pub socket: UnixListener,
    /// Removed at the end, if this process created it.
    path: Option<PathBuf>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
}

/// Takes over systemd's socket (`sd_listen_fds(3)`), or listens at `path`, to which every user may then connect.
///
/// # Errors
/// Another service listens there, or the socket cannot be created.
pub(super) fn listen(path: &Path) -> io::Result<Listener> {
    let listener = match inherited_socket()? {
        Some(socket) => Listener { socket: socket.into(), path: None },
        None => Listener { socket: bind(path)?, path: Some(path.to_owned()) },
    };
    listener.socket.set_nonblocking(true)?;
    Ok(listener)
}

/// The single socket that systemd's socket unit passes to this process, if there is one. Called once, at the start.
#[allow(unsafe_code, reason = "a descriptor by its number, for which no library has a safe function")]
pub fn inherited_socket() -> io::Result<Option<OwnedFd>> {
    let mut handed = sd_notify::listen_fds()?;
    let only = handed.next().filter(|_| handed.len() == 0);
    // SAFETY: by the protocol of sd_listen_fds(3) the descriptor is open and belongs to this process alone: LISTEN_PID
    // was checked to name this process, and nothing in this program has opened descriptor 3 since the start.
    Ok(only.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

fn bind(path: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        return Err(io::Error::other("another `sublet serve` already listens there"));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_place_of_a_dead_service_and_not_of_a_live_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sublet.sock");
        drop(UnixListener::bind(&path).unwrap());
        let first = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        assert!(listen(&path).unwrap_err().to_string().contains("another `sublet serve`"));
        drop(first);
        assert!(!path.exists());
    }
}
