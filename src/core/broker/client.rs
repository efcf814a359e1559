//! The client side, for entry points: one connection to the service, with requests and answers in turn.

use std::io::{self, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::protocol::{self, Answer, Ask, LONGEST_ANSWER, LONGEST_ASK, ProtocolError};
use crate::bounded_input;
use crate::config::Config;
use crate::text::safe_long;

/// The longest time for an answer. The slowest one waits for a refresh of the inventory and then for the start of an
/// MPS daemon.
const ANSWER_LIMIT: Duration = Duration::from_secs(150);

/// The same where GPU memory is copied, maybe after that of other users. The service gives each copy 4 s for a GiB.
const COPY_LIMIT: Duration = Duration::from_secs(3600);

/// The same for a place among those who wait, which is asked for again: who waits has a time of its own. The service may ask the
/// driver first.
const PLACE_LIMIT: Duration = Duration::from_secs(10);

/// How long to wait for a service that is restarting, or that already works for its maximum number of this user's
/// containers.
const BUSY_LIMIT: Duration = Duration::from_secs(30);

/// Between two tries.
const NAP: Duration = Duration::from_millis(20);

/// Why the service did not carry out a request; each is one line.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// No process listens on the socket.
    #[error(
        "sublet serve is not running; why: {}: {}; fix: run `systemctl enable --now sublet.socket` as root",
        .0.display(),
        .1
    )]
    NotRunning(PathBuf, #[source] io::Error),
    /// The connection broke.
    #[error("sublet serve did not answer ({0}): `journalctl -u sublet.service` may say why")]
    Broken(io::Error),
    /// It took too long.
    #[error(
        "sublet serve did not answer within {} s: `systemctl status sublet.service` shows its state",
        .0.as_secs()
    )]
    Late(Duration),
    /// Either side speaks another version.
    #[error("sublet serve: {0}")]
    Protocol(#[from] ProtocolError),
    /// The request is longer than the service reads.
    #[error("the request to sublet serve is longer than 64 KiB: use fewer and shorter annotations")]
    TooLong,
    /// The service refused. Its refusal is one line.
    #[error("{reason}")]
    Refused {
        /// The line.
        reason: String,
        /// Whether waiting may help.
        temporary: bool,
        /// Each device that could have served it, and why it does not.
        candidates: Vec<String>,
    },
    /// An answer to another question.
    #[error("sublet serve gave an answer that does not fit the request: is its version another one?")]
    UnexpectedAnswer,
}

/// A connection to the service.
#[derive(Debug)]
pub struct Broker {
    socket: PathBuf,
    stream: Option<UnixStream>,
    /// How long others may be suspended for a start.
    making_room: Duration,
}

impl Broker {
    /// The service of this configuration. The first request connects to it.
    pub fn new(config: &Config) -> Self {
        Self { socket: super::socket(config), stream: None, making_room: config.suspend.limit }
    }

    /// Asks, and asks again while the service is busy.
    ///
    /// # Errors
    /// The service is not running, breaks the connection, or refuses.
    pub fn ask(&mut self, ask: &Ask) -> Result<Answer, BrokerError> {
        let line = protocol::line(ask)?;
        if line.len() > LONGEST_ASK {
            return Err(BrokerError::TooLong);
        }
        let limit = answer_limit(ask, self.making_room);
        let deadline = Instant::now() + BUSY_LIMIT.min(limit);
        loop {
            match self.once(&line, limit)? {
                Answer::Busy(_) if Instant::now() < deadline => {
                    self.stream = None;
                    std::thread::sleep(NAP);
                }
                Answer::Busy(reason) => return Err(refused(&reason, true, &[])),
                Answer::Refused(answer) => {
                    return Err(refused(&answer.reason, answer.temporary, &answer.candidates));
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Checks that the service answers within `limit`, even if only that it is busy. If the connection is not accepted
    /// at once because too many connections are waiting, this counts as no answer.
    ///
    /// # Errors
    /// It does not answer, or its answer is of another protocol version.
    pub fn answers(config: &Config, limit: Duration) -> Result<(), BrokerError> {
        let socket = super::socket(config);
        let mut stream = connect_now(&socket).map_err(|error| BrokerError::NotRunning(socket, error))?;
        stream.set_write_timeout(Some(limit)).map_err(BrokerError::Broken)?;
        stream.write_all(&protocol::line(&Ask::Status)?).map_err(BrokerError::Broken)?;
        Ok(protocol::parse::<Answer>(&receive(&stream, limit)?).map(drop)?)
    }

    fn once(&mut self, line: &[u8], limit: Duration) -> Result<Answer, BrokerError> {
        let mut stream = if let Some(stream) = self.stream.take() {
            stream
        } else {
            let stream = UnixStream::connect(&self.socket)
                .map_err(|error| BrokerError::NotRunning(self.socket.clone(), error))?;
            stream.set_write_timeout(Some(Duration::from_secs(10))).map_err(BrokerError::Broken)?;
            stream
        };
        // A service that turns the connection away sends the reason before it has read a request.
        let sent = stream.write_all(line);
        let answer = match (receive(&stream, limit), sent) {
            (Err(BrokerError::Broken(_)), Err(error)) => Err(BrokerError::Broken(error)),
            (answer, _) => answer,
        }?;
        self.stream = Some(stream);
        Ok(protocol::parse(&answer)?)
    }
}

fn answer_limit(ask: &Ask, making_room: Duration) -> Duration {
    match ask {
        Ask::Suspend { .. } | Ask::Resume { .. } | Ask::Move { .. } => COPY_LIMIT,
        Ask::MakeRoom { .. } => making_room,
        Ask::Wait { .. } => PLACE_LIMIT,
        Ask::Admit(_) => ANSWER_LIMIT.saturating_add(making_room),
        _ => ANSWER_LIMIT,
    }
}

/// connect(2) that does not wait if the queue of unaccepted connections is full.
///
/// # Errors
/// Nobody listens there, or nobody accepts connections.
pub fn connect_now(path: &std::path::Path) -> io::Result<UnixStream> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &UnixAddr::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Makes a refusal safe to print. It is the service's own line and may be longer than one piece of foreign text.
fn refused(reason: &str, temporary: bool, candidates: &[String]) -> BrokerError {
    let safe = |text: &str| safe_long(text, 2000);
    let candidates = candidates.iter().map(|text| safe(text)).collect();
    BrokerError::Refused { reason: safe(reason), temporary, candidates }
}

/// One line, without its end.
fn receive(stream: &UnixStream, limit: Duration) -> Result<Vec<u8>, BrokerError> {
    let read = bounded_input::read(stream, Some(b'\n'), LONGEST_ANSWER, Instant::now() + limit);
    let mut line = read.map_err(|error| match error.kind() {
        ErrorKind::TimedOut => BrokerError::Late(limit),
        ErrorKind::FileTooLarge => BrokerError::UnexpectedAnswer,
        _ => BrokerError::Broken(error),
    })?;
    let end = line.pop().filter(|end| *end == b'\n');
    end.map(|_| line).ok_or(BrokerError::Broken(ErrorKind::UnexpectedEof.into()))
}

#[cfg(test)]
mod tests {
    use std::io::BufRead as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn config(dir: &tempfile::TempDir) -> Config {
        Config { state_dir: dir.path().to_owned(), ..Config::default() }
    }

    /// A service that answers with these lines, one for each request. It closes a connection after the last line.
    fn service(config: &Config, connections: Vec<Vec<&'static str>>) -> std::thread::JoinHandle<Vec<String>> {
        let listener = UnixListener::bind(super::super::socket(config)).unwrap();
        std::thread::spawn(move || {
            let mut heard = Vec::new();
            for answers in connections {
                let (stream, _) = listener.accept().unwrap();
                let mut lines = io::BufReader::new(stream);
                for answer in answers {
                    let mut line = String::new();
                    lines.read_line(&mut line).unwrap();
                    heard.push(line);
                    lines.get_mut().write_all(answer.as_bytes()).unwrap();
                }
            }
            heard
        })
    }

    #[test]
    fn names_the_remedy_where_nobody_listens() {
        let dir = tempfile::tempdir().unwrap();
        let error = Broker::new(&config(&dir)).ask(&Ask::Status).unwrap_err().to_string();
        let socket = dir.path().join("sublet.sock");
        assert_eq!(
            error,
            format!(
                "sublet serve is not running; why: {}: No such file or directory (os error 2); fix: run \
                 `systemctl enable --now sublet.socket` as root",
                socket.display()
            )
        );
    }

    #[test]
    fn asks_again_on_a_new_connection_while_the_service_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let busy = vec!["{\"v\":1,\"busy\":\"restarting\"}\n"];
        let done = vec!["{\"v\":1,\"done\":true}\n", "{\"v\":1,\"lease\":null}\n"];
        let service = service(&config, vec![busy, done]);
        let mut broker = Broker::new(&config);
        assert_eq!(broker.ask(&Ask::Status).unwrap(), Answer::Done(true));
        assert_eq!(broker.ask(&Ask::Inventory).unwrap(), Answer::Lease(None));
        let status = "{\"v\":1,\"do\":\"status\"}\n";
        assert_eq!(service.join().unwrap(), [status, status, "{\"v\":1,\"do\":\"inventory\"}\n"]);
    }

    #[test]
    fn a_refusal_is_one_safe_line_and_a_broken_connection_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let no = vec![
            "{\"v\":1,\"refused\":{\"reason\":\"no\\u001b[2J\\nplace\",\"temporary\":false}}\n",
            "{\"v\":1",
        ];
        let service = service(&config, vec![no]);
        let mut broker = Broker::new(&config);
        assert_eq!(broker.ask(&Ask::Status).unwrap_err().to_string(), "no\\u{1b}[2J\\nplace");
        let error = broker.ask(&Ask::Status).unwrap_err();
        assert!(matches!(error, BrokerError::Broken(_)), "{error}");
        service.join().unwrap();
    }

    #[test]
    fn a_copy_may_take_longer_than_other_answers() {
        let lease = crate::ledger::fixture::lease(1, "GPU-0").id;
        let resume = Ask::Resume { lease: lease.clone(), gpu: None };
        let moved = Ask::Move { lease: lease.clone(), gpu: "1".into() };
        for ask in [Ask::Suspend { lease, force: false }, resume, moved] {
            // 288 GiB out and back again, at 4 s for each GiB (sublet's suspend/driver.rs).
            assert!(answer_limit(&ask, Duration::ZERO) > Duration::from_secs(2 * 288 * 4), "{ask:?}");
        }
        assert_eq!(answer_limit(&Ask::Status, COPY_LIMIT), ANSWER_LIMIT);
        let admit = Ask::Admit(Box::default());
        assert_eq!(answer_limit(&admit, Duration::from_secs(9)), ANSWER_LIMIT + Duration::from_secs(9));
    }

    #[test]
    fn a_service_that_is_wedged_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&dir);
        let listener = UnixListener::bind(super::super::socket(&config)).unwrap();
        let limit = Duration::from_millis(50);
        let error = Broker::answers(&config, limit).unwrap_err();
        assert!(matches!(error, BrokerError::Late(_)), "{error}");
        // As many connections as fill the queue.
        let waiting: Vec<_> =
            std::iter::from_fn(|| connect_now(&super::super::socket(&config)).ok()).collect();
        let error = Broker::answers(&config, limit).unwrap_err().to_string();
        assert!(error.contains("Resource temporarily unavailable"), "{error}");
        drop((listener, waiting));
        std::fs::remove_file(super::super::socket(&config)).unwrap();
        let service = service(&config, vec![vec!["{\"v\":1,\"busy\":\"x\"}\n"]]);
        Broker::answers(&config, Duration::from_secs(10)).unwrap();
        service.join().unwrap();
    }
}
