//! A small read-only HTTP server: GET and HEAD, one request for each connection, no encryption. It does not trust
//! clients. A request has 8 KiB and no body, and every read and write ends in time. [`head`] reads a request,
//! [`server`] has the sockets.

mod head;
mod server;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, TcpListener};

pub use server::{Listener, Server};

/// What a page may do: nothing, if its answer does not say otherwise.
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

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Other hosts could connect.
    #[error(
        "{address} is not a loopback address: other hosts could connect, and there is no encryption; use 127.0.0.1, or \
         allow it with {option}"
    )]
    NotLoopback { address: SocketAddr, option: &'static str },
    /// The address cannot be used.
    #[error("cannot listen at {address}: {source}{}", advice(source))]
    Listen { address: SocketAddr, source: io::Error },
    /// There are no random bytes for a token.
    #[error("cannot make a token: getrandom: {0}")]
    Random(io::Error),
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; another program listens there: name another port, or port 0 for any that is free"
        }
        io::ErrorKind::AddrNotAvailable => "; this host has no such address: `ip address` lists those it has",
        io::ErrorKind::PermissionDenied => "; only root may use ports below 1024: name a higher one",
        _ => "",
    }
}

/// Listens at `address`, which other hosts may reach only if `option`, as the command line names it, was given.
///
/// # Errors
/// It is no loopback address, or the system refuses it.
pub fn bind(address: SocketAddr, anywhere: bool, option: &'static str) -> Result<TcpListener, HttpError> {
    if !anywhere && !address.ip().is_loopback() {
        return Err(HttpError::NotLoopback { address, option });
    }
    TcpListener::bind(address).map_err(|source| HttpError::Listen { address, source })
}

/// A secret of 128 random bits, the first part of every path.
#[derive(Clone, Debug)]
pub struct Token(String);

impl Token {
    pub fn new() -> Result<Self, HttpError> {
        let mut bytes = [0; 16];
        // A request for up to 256 bytes is never answered in part (getrandom(2)).
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| HttpError::Random(error.into()))?;
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

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// As it was sent, without the token; nothing is decoded.
    pub path: String,
    pub headers: Vec<(String, String)>,
}

impl Request {
    /// The first header of this name, whose case does not matter.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find(|(each, _)| each.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// The answer.
#[derive(Clone, Debug)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    /// Besides [`STRICT`]. One named [`CONTENT_SECURITY_POLICY`] takes the place of the strict policy.
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
}

impl Response {
    /// Status 200.
    pub fn ok(content_type: &'static str, body: Vec<u8>) -> Self {
        Self { status: 200, content_type, headers: Vec::new(), body }
    }

    /// An error, as one line of text.
    pub fn error(status: u16, why: &str) -> Self {
        let body = format!("{status} {}: {why}\n", reason(status)).into_bytes();
        Self { status, content_type: "text/plain; charset=utf-8", headers: Vec::new(), body }
    }

    /// The answer as it is sent; one to a HEAD request has no body.
    fn bytes(&self, with_body: bool) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} {}\r\n", self.status, reason(self.status));
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
        let mut bytes = head.into_bytes();
        if with_body {
            bytes.extend(&self.body);
        }
        bytes
    }
}

/// The words of a status (RFC 9110, RFC 6585).
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        _ => "Error",
    }
}
