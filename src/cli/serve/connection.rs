//! One client: the part of a line that it has sent, and the part of the answer that it has not read yet. Never blocks.
//! And the socket that clients connect to: the one that systemd passes, or a new one.

use std::fs::{self, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::protocol::LONGEST_ASK;
use crate::peer::Peer;

/// How long a client may take to send a line, or to read an answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// It is sending a line.
    Asking,
    /// It waits for its answer.
    Waiting,
    /// It is reading the answer.
    Reading,
}

/// The result of reading or writing.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// Not finished yet.
    More,
    /// The line is complete; given without its newline.
    Line(Vec<u8>),
    /// The answer has been sent.
    Sent,
    /// The line is longer than any ask.
    TooLong,
    /// The client has disconnected.
    Gone,
}

/// A client.
pub(super) struct Connection {
    pub stream: UnixStream,
    pub peer: Peer,
    pub phase: Phase,
    /// When the phase began.
    pub since: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    written: usize,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, peer: Peer) -> Self {
        let (phase, since) = (Phase::Asking, Instant::now());
        Self { stream, peer, phase, since, input: Vec::new(), output: Vec::new(), written: 0 }
    }

    /// The bytes that are kept for it.
    pub(super) fn weight(&self) -> usize {
        self.input.capacity() + self.output.capacity()
    }

    /// Whether it has been idle for too long.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        self.phase != Phase::Waiting && now.duration_since(self.since) > PATIENCE
    }

    /// Reads the available part of a line. Bytes after its end wait until the answer is sent.
    pub(super) fn read(&mut self) -> Progress {
        let mut part = [0_u8; 8 << 10];
        loop {
            match self.stream.read(&mut part) {
                Ok(0) => return Progress::Gone,
                Ok(count) => self.input.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::More,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Progress::Gone,
            }
            if let Some(line) = self.line() {
                return Progress::Line(line);
            }
            if self.input.len() > LONGEST_ASK {
                return Progress::TooLong;
            }
        }
    }

    /// The first complete line that was read.
    pub(super) fn line(&mut self) -> Option<Vec<u8>> {
        let end = self.input.iter().position(|byte| *byte == b'\n').filter(|end| *end <= LONGEST_ASK)?;
        let rest = self.input.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.input, rest);
        line.pop();
        self.enter(Phase::Waiting);
        Some(line)
    }

    /// Starts to send `answer`.
    pub(super) fn answer(&mut self, answer: Vec<u8>) -> Progress {
        (self.output, self.written) = (answer, 0);
        self.enter(Phase::Reading);
        self.write()
    }

    /// Sends as much as the client takes.
    pub(super) fn write(&mut self) -> Progress {
        while self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(0) => return Progress::Gone,
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::More,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Progress::Gone,
            }
        }
        self.output = Vec::new();
        self.enter(Phase::Asking);
        Progress::Sent
    }

    fn enter(&mut self, phase: Phase) {
        (self.phase, self.since) = (phase, Instant::now());
    }
}

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
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o666))?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes of it. A child that another test has just started holds the other end as well until it has its own program.
    fn later(mut step: impl FnMut() -> Progress) -> Progress {
        loop {
            match step() {
                Progress::More => std::thread::yield_now(),
                progress => return progress,
            }
        }
    }

    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Connection::new(ours, Peer { pid: 1, uid: 1 }), theirs)
    }

    #[test]
    fn a_line_may_come_byte_by_byte_and_the_next_one_with_it() {
        let (mut connection, mut client) = pair();
        for byte in b"{\"v\":1" {
            client.write_all(&[*byte]).unwrap();
            assert_eq!(connection.read(), Progress::More);
        }
        client.write_all(b"}\n{}\nx").unwrap();
        assert_eq!(connection.read(), Progress::Line(b"{\"v\":1}".to_vec()));
        assert_eq!(connection.phase, Phase::Waiting);
        assert_eq!(connection.answer(b"no\n".to_vec()), Progress::Sent);
        assert_eq!(connection.line().as_deref(), Some(b"{}".as_slice()));
        assert_eq!(connection.line(), None);
        drop(client);
        assert_eq!(later(|| connection.read()), Progress::Gone);
    }

    #[test]
    fn lines_are_bounded() {
        let (mut connection, mut client) = pair();
        let writer = std::thread::spawn(move || {
            let _ = client.write_all(&vec![b'x'; LONGEST_ASK + 1]);
            client
        });
        assert_eq!(later(|| connection.read()), Progress::TooLong);
        assert!(connection.weight() <= 2 * LONGEST_ASK + (16 << 10));
        drop(connection);
        writer.join().unwrap();
    }

    #[test]
    fn a_client_that_does_not_read_holds_nobody() {
        let (mut connection, client) = pair();
        assert_eq!(connection.answer(vec![b'x'; 4 << 20]), Progress::More);
        assert_eq!(connection.phase, Phase::Reading);
        assert!(!connection.is_overdue(Instant::now()));
        assert!(connection.is_overdue(Instant::now() + Duration::from_secs(11)));
        drop(client);
        assert_eq!(later(|| connection.write()), Progress::Gone);
    }

    #[test]
    fn a_client_that_waits_for_its_answer_is_never_overdue() {
        let (mut connection, mut client) = pair();
        client.write_all(b"{}\n").unwrap();
        assert!(matches!(connection.read(), Progress::Line(_)));
        assert!(!connection.is_overdue(Instant::now() + Duration::from_secs(3600)));
    }

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
