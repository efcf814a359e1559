//! The head of a request: what is read of it, and what is refused.

use std::net::IpAddr;

use super::{Request, Response};

/// The longest head, in bytes.
pub(super) const LONGEST: usize = 8 << 10;

/// The most headers.
const HEADERS: usize = 64;

/// The names of this host that a request may contain in `Host`. Another name means that a page has made its own name
/// point to this host (DNS rebinding).
#[derive(Debug)]
pub(super) struct Called<'a> {
    /// The address of this host that the client has connected to; none: a Unix socket, which no page can reach.
    pub local: Option<IpAddr>,
    /// More names, of the command line.
    pub names: &'a [String],
}

impl Called<'_> {
    fn permits(&self, host: &str) -> bool {
        let Some(local) = self.local else { return true };
        let Some(name) = without_port(host) else { return false };
        let address: Option<IpAddr> = name.parse().ok();
        address.is_some_and(|address| address.is_loopback() || address == local.to_canonical())
            || name.eq_ignore_ascii_case("localhost")
            || self.names.iter().any(|also| also.eq_ignore_ascii_case(name))
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

/// Reads the head that `bytes` begin with: the request, and whether the answer has a body; `None`: more of it is to come.
///
/// # Errors
/// The answer to a request that is refused.
pub(super) fn parse(bytes: &[u8], called: &Called<'_>) -> Result<Option<(Request, bool)>, Response> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(length)) if length <= LONGEST => {}
        Ok(httparse::Status::Partial) if bytes.len() <= LONGEST => return Ok(None),
        Ok(_) => return Err(Response::error(431, "the request is longer than 8 KiB")),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Response::error(431, "the request has more than 64 headers"));
        }
        Err(_) => return Err(Response::error(400, "this is no HTTP request")),
    }
    let headers = (parsed.headers.iter())
        .map(|header| Some((header.name.to_owned(), std::str::from_utf8(header.value).ok()?.to_owned())))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| Response::error(400, "a header is not UTF-8"))?;
    let target = parsed.path.unwrap_or_default();
    let path = target.split_once('?').map_or(target, |(path, _)| path);
    let request = Request { path: path.to_owned(), headers };
    let wants_body = check(parsed.method.unwrap_or_default(), &request, called)?;
    Ok(Some((request, wants_body)))
}

/// Whether the answer has a body.
fn check(method: &str, request: &Request, called: &Called<'_>) -> Result<bool, Response> {
    let named = |wanted: &'static str| {
        let headers = request.headers.iter().filter(move |(name, _)| name.eq_ignore_ascii_case(wanted));
        headers.map(|(_, value)| value.as_str())
    };
    let [host] = named("host").collect::<Vec<_>>()[..] else {
        return Err(Response::error(400, "a request names one Host"));
    };
    if !called.permits(host) {
        return Err(Response::error(421, "this is not the host that the request names"));
    }
    if !matches!(method, "GET" | "HEAD") {
        let mut refused = Response::error(405, "nothing can be changed here: GET and HEAD only");
        refused.headers.push(("Allow", "GET, HEAD".to_owned()));
        return Err(refused);
    }
    if named("transfer-encoding").next().is_some() || named("content-length").any(|length| length != "0") {
        return Err(Response::error(413, "a request has no body"));
    }
    if !request.path.starts_with('/') {
        return Err(Response::error(400, "the path begins with a slash"));
    }
    Ok(method == "GET")
}
