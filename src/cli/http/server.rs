//! The sockets: a fixed number of threads that each answer one connection after the other.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::head::{Called, LONGEST, parse};
use super::{Request, Response, Token};

/// Connections that are answered at once. Others wait in the kernel.
const CONNECTIONS: usize = 32;

/// How long a client may take to send its request, and how long to take the answer.
const IN_TIME: Duration = Duration::from_secs(5);

/// How long the server waits for a client to close its end, so that the system does not drop the answer (RFC 9112,
/// 9.6).
const CLOSING: Duration = Duration::from_secs(1);

/// The wait after a connection could not be taken, for example because there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// A listening socket.
#[derive(Debug)]
pub enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// The next connection, and the address of this host that it came in on; none for a Unix socket, whose stream differs
    /// from another in nothing that is done with it here.
    fn accept(&self) -> io::Result<(TcpStream, Option<IpAddr>)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                let local = stream.local_addr()?.ip().to_canonical();
                Ok((stream, Some(local)))
            }
            Self::Unix(listener) => Ok((OwnedFd::from(listener.accept()?.0).into(), None)),
        }
    }
}

/// A server that has a socket and has not started yet.
#[derive(Debug)]
pub struct Server {
    pub listener: Listener,
    /// Names of this host that a request may ask for, besides its addresses and `localhost`.
    pub names: Vec<String>,
    /// What every path must begin with.
    pub token: Option<Token>,
}

impl Server {
    /// Answers requests by `answer` until the program ends, in threads of its own.
    pub fn start<A>(self, answer: A) -> io::Result<()>
    where
        A: Fn(&Request) -> Response + Send + Sync + 'static,
    {
        let shared = Arc::new((self, answer));
        for _ in 0..CONNECTIONS {
            let shared = Arc::clone(&shared);
            let run = move || {
                let (server, answer) = &*shared;
                loop {
                    // A client that fails, or is too slow, gets nothing more.
                    match server.listener.accept() {
                        Ok((stream, local)) => drop(server.serve(stream, local, answer)),
                        Err(_) => thread::sleep(PAUSE),
                    }
                }
            };
            thread::Builder::new().name("http".to_owned()).spawn(run)?;
        }
        Ok(())
    }

    fn serve(
        &self,
        mut stream: TcpStream,
        local: Option<IpAddr>,
        answer: &impl Fn(&Request) -> Response,
    ) -> io::Result<()> {
        let called = Called { local, names: &self.names };
        let (response, wants_body) = match read(&mut stream, &called)? {
            Ok((request, wants_body)) => (self.answer(request, answer), wants_body),
            Err(refused) => (refused, true),
        };
        write(&mut stream, &response.bytes(wants_body))?;
        stream.shutdown(Shutdown::Write)?;
        drain(&mut stream)
    }

    fn answer(&self, mut request: Request, answer: &impl Fn(&Request) -> Response) -> Response {
        if let Some(token) = &self.token {
            // A wrong token and a path that does not exist look the same.
            let Some(rest) = token.strip(&request.path) else { return Response::error(404, "no such page") };
            request.path = rest.to_owned();
        }
        answer(&request)
    }
}

/// Reads a request, or why it is refused.
fn read(stream: &mut TcpStream, called: &Called<'_>) -> io::Result<Result<(Request, bool), Response>> {
    let until = Instant::now() + IN_TIME;
    let mut bytes = Vec::new();
    let mut piece = [0; 2048];
    loop {
        let Some(left) = left(until) else {
            return Ok(Err(Response::error(408, "the request did not come within 5 s")));
        };
        limit(stream, left)?;
        let length = match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(length) => length,
            Err(error) if is_transient(&error) => continue,
            Err(error) => return Err(error),
        };
        bytes.extend(&piece[..length]);
        match parse(&bytes, called) {
            Ok(Some(head)) => return Ok(Ok(head)),
            Ok(None) => debug_assert!(bytes.len() <= LONGEST),
            Err(refused) => return Ok(Err(refused)),
        }
    }
}

fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + IN_TIME;
    while !bytes.is_empty() {
        limit(stream, left(until).ok_or(io::ErrorKind::TimedOut)?)?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(error) if is_transient(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The longest that a read and a write take.
fn limit(stream: &TcpStream, time: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(time))
}

/// Reads what the client still sends, until it closes its end.
fn drain(stream: &mut TcpStream) -> io::Result<()> {
    let until = Instant::now() + CLOSING;
    while let Some(left) = left(until) {
        limit(stream, left)?;
        if stream.read(&mut [0; 2048])? == 0 {
            break;
        }
    }
    Ok(())
}

/// Interrupted, or nothing happened within the time of [`limit`]: the loops above look at the clock.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// The time until then, if there is any.
fn left(until: Instant) -> Option<Duration> {
    until.checked_duration_since(Instant::now()).filter(|left| *left >= Duration::from_millis(1))
}
