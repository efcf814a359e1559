//! A small read-only HTTP server: GET and HEAD, one request for each connection, no encryption. It does not trust
//! clients. A request has 8 KiB and no body, and every read and write ends in time.

#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

/// The rights of a page: none, if its answer does not say otherwise.
const POLICY: &str = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The name of the header that [`POLICY`] belongs to.
pub const CONTENT_SECURITY_POLICY: &str = "Content-Security-Policy";

/// Headers of every answer. Nothing of it is kept, shown inside another page, or read by another origin.
const STRICT: [(&str, &str); 8] = [
    ("Connection", "close"),
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Embedder-Policy", "require-corp"),
];

/// Listens at `address`, which other hosts may reach only if `option`, as the command line names it, was given.
///
/// # Errors
/// It is no loopback address, or the system refuses it.
pub fn bind(address: SocketAddr, anywhere: bool, option: &'static str) -> anyhow::Result<TcpListener> {
    if !anywhere && !address.ip().is_loopback() {
        bail!(
            "{address} is not a loopback address: other hosts could connect, and there is no encryption; use 127.0.0.1, \
             or allow it with {option}"
        );
    }
    TcpListener::bind(address).map_err(|error| {
        let advice = match error.kind() {
            ErrorKind::AddrInUse => {
                "; another program listens there: name another port, or port 0 for any that is free"
            }
            ErrorKind::AddrNotAvailable => "; this host has no such address: `ip address` lists those it has",
            ErrorKind::PermissionDenied => "; only root may use ports below 1024: name a higher one",
            _ => "",
        };
        anyhow::anyhow!("cannot listen at {address}: {error}{advice}")
    })
}

/// A secret of 128 random bits, the first part of every path.
#[derive(Clone, Debug)]
pub struct Token(String);

impl Token {
    pub fn new() -> anyhow::Result<Self> {
        let mut bytes = [0; 16];
        // A request for up to 256 bytes is never answered in part (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(io::Error::from)
            .context("cannot make a token: getrandom")?;
        Ok(Self(format!("{:032x}", u128::from_ne_bytes(bytes))))
    }

    /// The token as hex digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// `path` without the token, which it must begin with. The time that this takes does not depend on where they
    /// differ.
    fn strip<'a>(&self, path: &'a str) -> Option<&'a str> {
        let (given, rest) = path.strip_prefix('/')?.split_at_checked(self.0.len())?;
        let differs = given.bytes().zip(self.0.bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        (std::hint::black_box(differs) == 0 && rest.starts_with('/')).then_some(rest)
    }
}

/// A request of a client.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: String,
    /// As it was sent, without the token; nothing is decoded.
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Request {
    /// The headers of this name, whose case does not matter.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let headers = self.headers.iter().filter(move |(each, _)| each.eq_ignore_ascii_case(name));
        headers.map(|(_, value)| value.as_str())
    }
}

/// The answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// The code and its words (RFC 9110, RFC 6585).
    pub status: &'static str,
    pub content_type: &'static str,
    /// Besides [`STRICT`]. One named [`CONTENT_SECURITY_POLICY`] takes the place of the strict policy.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Response {
    /// Status 200.
    pub fn ok(content_type: &'static str, body: Vec<u8>) -> Self {
        Self { status: "200 OK", content_type, headers: Vec::new(), body }
    }

    /// An error, as one line of text: the status, a colon, and why.
    pub fn error(line: &'static str) -> Self {
        let (status, body) = (line.split(':').next().unwrap_or(line), format!("{line}\n").into_bytes());
        Self { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }

    /// The answer as it is sent; one to a HEAD request has no body.
    fn bytes(&self, with_body: bool) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {}\r\n", self.status);
        let mut add = |name: &str, value: &str| head.extend([name, ": ", value, "\r\n"]);
        add("Content-Type", self.content_type);
        add("Content-Length", &self.body.len().to_string());
        for (name, value) in STRICT {
            add(name, value);
        }
        for (name, value) in &self.headers {
            add(name, value);
        }
        if !self.headers.iter().any(|(name, _)| *name == CONTENT_SECURITY_POLICY) {
            add(CONTENT_SECURITY_POLICY, POLICY);
        }
        head.push_str("\r\n");
        [head.as_bytes(), if with_body { &self.body } else { &[] }].concat()
    }
}

/// Connections that are answered at once. Further ones wait in the kernel.
const CONNECTIONS: usize = 32;

/// How long a client may take to send its request, and how long to take the answer.
const IN_TIME: Duration = Duration::from_secs(5);

/// How long the server waits for a client to close its end, so that the system does not drop the answer (RFC 9112,
/// 9.6).
const CLOSING: Duration = Duration::from_secs(1);

/// The wait after a connection could not be taken, for example because there are no descriptors left.
const PAUSE: Duration = Duration::from_millis(100);

/// The longest head, in bytes.
const LONGEST: usize = 8 << 10;

/// The most headers.
const HEADERS: usize = 64;

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
    /// The beginning that every path must have.
    pub token: Option<Token>,
}

impl Server {
    /// Answers requests by `answer` until the program ends, in threads of its own.
    pub fn start(self, answer: impl Fn(&Request) -> Response + Send + Sync + 'static) -> io::Result<()> {
        let shared = Arc::new((self, answer));
        for _ in 0..CONNECTIONS {
            let shared = Arc::clone(&shared);
            let run = move || {
                let (server, answer) = &*shared;
                loop {
                    // A client that fails, or is too slow, gets nothing more.
                    match server.listener.accept() {
                        Ok((stream, local)) => drop(server.serve(&stream, local, answer)),
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
        stream: &TcpStream,
        local: Option<IpAddr>,
        answer: &impl Fn(&Request) -> Response,
    ) -> io::Result<()> {
        let permitted = |request: Request| self.check(&request, local).map(|()| request);
        let (response, wants_body) = match read(stream)?.and_then(permitted) {
            Ok(request) => {
                let wants_body = request.method == "GET";
                (self.answer(request, answer), wants_body)
            }
            Err(refused) => (refused, true),
        };
        write(stream, &response.bytes(wants_body))?;
        stream.shutdown(Shutdown::Write)?;
        // Further input of the client is read until it closes its end.
        let until = Instant::now() + CLOSING;
        while in_time(stream, until, |mut stream| stream.read(&mut [0; 2048]))? > 0 {}
        Ok(())
    }

    /// # Errors
    /// The answer to a request that is refused.
    fn check(&self, request: &Request, local: Option<IpAddr>) -> Result<(), Response> {
        let refuse = |line| Err(Response::error(line));
        let [host] = request.named("host").collect::<Vec<_>>()[..] else {
            return refuse("400 Bad Request: a request names one Host");
        };
        if local.is_some_and(|local| !self.is_called(host, local)) {
            return refuse("421 Misdirected Request: this is not the host that the request names");
        }
        if !matches!(&*request.method, "GET" | "HEAD") {
            let mut refused =
                Response::error("405 Method Not Allowed: nothing can be changed here: GET and HEAD only");
            refused.headers.push(("Allow", "GET, HEAD".to_owned()));
            return Err(refused);
        }
        let has_length = request.named("content-length").any(|length| length != "0");
        if has_length || request.named("transfer-encoding").next().is_some() {
            return refuse("413 Content Too Large: a request has no body");
        }
        if !request.path.starts_with('/') {
            return refuse("400 Bad Request: the path begins with a slash");
        }
        Ok(())
    }

    /// Whether `host` is a name of this host, or its address `local`, which the client has connected to. Another name means
    /// that a page has made its own name point to this host (DNS rebinding); no page can reach a Unix socket.
    fn is_called(&self, host: &str, local: IpAddr) -> bool {
        let Some(name) = without_port(host) else { return false };
        let address: Option<IpAddr> = name.parse().ok();
        address.is_some_and(|address| address.is_loopback() || address == local)
            || name.eq_ignore_ascii_case("localhost")
            || self.names.iter().any(|also| also.eq_ignore_ascii_case(name))
    }

    fn answer(&self, mut request: Request, answer: &impl Fn(&Request) -> Response) -> Response {
        if let Some(token) = &self.token {
            // A wrong token and a path that does not exist look the same.
            let Some(rest) = token.strip(&request.path) else {
                return Response::error("404 Not Found: no such page");
            };
            request.path = rest.to_owned();
        }
        answer(&request)
    }
}

/// Reads a request, or why it is refused.
fn read(stream: &TcpStream) -> io::Result<Result<Request, Response>> {
    let until = Instant::now() + IN_TIME;
    let mut bytes = Vec::new();
    let mut piece = [0; 2048];
    loop {
        let length = match in_time(stream, until, |mut stream| stream.read(&mut piece)) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Err(late) if late.kind() == ErrorKind::TimedOut => {
                return Ok(Err(Response::error("408 Request Timeout: the request did not come within 5 s")));
            }
            length => length?,
        };
        bytes.extend(&piece[..length]);
        match parse(&bytes) {
            Ok(Some(request)) => return Ok(Ok(request)),
            Ok(None) => debug_assert!(bytes.len() <= LONGEST),
            Err(refused) => return Ok(Err(refused)),
        }
    }
}

/// Reads the head that `bytes` begin with; `None`: more of it is to come.
///
/// # Errors
/// The answer to a request that is refused.
fn parse(bytes: &[u8]) -> Result<Option<Request>, Response> {
    let refuse = |line| Err(Response::error(line));
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= LONGEST => {}
        Ok(httparse::Status::Partial) if bytes.len() <= LONGEST => return Ok(None),
        Ok(_) => return refuse("431 Request Header Fields Too Large: the request is longer than 8 KiB"),
        Err(httparse::Error::TooManyHeaders) => {
            return refuse("431 Request Header Fields Too Large: the request has more than 64 headers");
        }
        Err(_) => return refuse("400 Bad Request: this is no HTTP request"),
    }
    let headers = (parsed.headers.iter())
        .map(|header| Some((header.name.to_owned(), std::str::from_utf8(header.value).ok()?.to_owned())))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| Response::error("400 Bad Request: a header is not UTF-8"))?;
    let target = parsed.path.unwrap_or_default();
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let method = parsed.method.unwrap_or_default().to_owned();
    Ok(Some(Request { method, path: path.to_owned(), headers }))
}

fn write(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    let until = Instant::now() + IN_TIME;
    while !bytes.is_empty() {
        match in_time(stream, until, |mut stream| stream.write(bytes))? {
            0 => return Err(ErrorKind::WriteZero.into()),
            length => bytes = &bytes[length..],
        }
    }
    Ok(())
}

/// Reads or writes by `call`, and again where it was interrupted.
///
/// # Errors
/// Errors of `call`; `TimedOut`: until then nothing happened.
fn in_time<T>(
    stream: &TcpStream,
    until: Instant,
    mut call: impl FnMut(&TcpStream) -> io::Result<T>,
) -> io::Result<T> {
    loop {
        let left = until.checked_duration_since(Instant::now());
        let left = left.filter(|left| *left >= Duration::from_millis(1)).ok_or(ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))?;
        let done = call(stream);
        // The timeouts' errors, too: the clock decides.
        let again = [ErrorKind::Interrupted, ErrorKind::WouldBlock, ErrorKind::TimedOut];
        if !done.as_ref().is_err_and(|error| again.contains(&error.kind())) {
            return done;
        }
    }
}

/// `name:80`, `[::1]:80` or either without a port. A port may be another one, such as that of an SSH tunnel.
fn without_port(host: &str) -> Option<&str> {
    let (name, rest) = match host.strip_prefix('[') {
        Some(host) => host.split_once(']')?,
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = |port: &str| port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port)).then_some(name)
}
