//! `sublet metrics --listen`: the metrics over HTTP. The process needs no rights: it shows what its user may read.

use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::status::Host;
use crate::http::{self, Request, Response, Server};
use crate::metrics::{self, Format};
use crate::serve;
use crate::status::Status;
use sublet_core::config::Config;

/// How long one look at the host is used, however many scrapers there are.
const FRESH: Duration = Duration::from_secs(1);

/// The media types of both formats (`OpenMetrics` 1.0, "Protocol Negotiation"; Prometheus, "Exposition formats").
const OPEN_METRICS: &str = "application/openmetrics-text";
const TYPES: [(Format, &str); 2] = [
    (Format::Openmetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    (Format::Prometheus, "text/plain; version=0.0.4; charset=utf-8"),
];

/// Where scrapers connect.
#[derive(Clone, Debug)]
pub(super) enum Listen {
    Address(SocketAddr),
    /// The socket that systemd passes (`sd_listen_fds(3)`).
    Systemd,
}

impl FromStr for Listen {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "systemd" {
            return Ok(Self::Systemd);
        }
        let address = text.parse().map(Self::Address);
        address
            .map_err(|_| "write it as 127.0.0.1:9843 or [::1]:9843, or `systemd` for a socket unit's socket")
    }
}

/// Answers scrapers until a signal ends the process. `names` are names of this host, besides its addresses and
/// `localhost`, by which they may ask.
///
/// # Errors
/// The address cannot be used, or systemd passed no socket.
pub(super) fn serve(
    config: &Config,
    listen: &Listen,
    anywhere: bool,
    names: Vec<String>,
) -> anyhow::Result<ExitCode> {
    let looks = Looks { config: config.clone(), last: Mutex::default() };
    let answer = move |request: &Request| answer(request, &looks);
    match listen {
        Listen::Address(address) => {
            let listener = http::bind(*address, anywhere, "--listen-public")?;
            println!("http://{}/metrics", listener.local_addr()?);
            Server { listener, names, token: None }.start(answer)?;
        }
        Listen::Systemd => {
            let Some(socket) = serve::inherited_socket().context("systemd's socket cannot be used")? else {
                bail!(
                    "systemd passed no socket: `systemctl start sublet-metrics-http.socket`, or name an address"
                )
            };
            let listener = TcpListener::from(socket);
            // systemd's sockets do not block.
            listener.set_nonblocking(false)?;
            if listener.local_addr().is_ok() {
                Server { listener, names, token: None }.start(answer)?;
            } else {
                let listener = UnixListener::from(std::os::fd::OwnedFd::from(listener));
                Server { listener, names, token: None }.start(answer)?;
            }
        }
    }
    loop {
        std::thread::park();
    }
}

fn answer(request: &Request, looks: &Looks) -> Response {
    if request.path != "/metrics" {
        return Response::error(404, "the metrics are at /metrics");
    }
    let wants_open = request.header("accept").is_some_and(|types| types.contains(OPEN_METRICS));
    let (format, content_type) = TYPES[usize::from(!wants_open)];
    Response::ok(content_type, looks.text(format).into_bytes())
}

/// The last look at the host, for all scrapers.
#[derive(Debug)]
struct Looks {
    config: Config,
    /// When it was taken; `None` inside: the state could not be read.
    last: Mutex<Option<(Instant, Option<Status>)>>,
}

impl Looks {
    fn text(&self, format: Format) -> String {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(taken, _)| taken.elapsed() >= FRESH) {
            let status = match Host::read(&self.config) {
                Ok(host) => Some(host.status),
                Err(error) => {
                    eprintln!("sublet: {}", super::tables::chain(&error));
                    None
                }
            };
            *last = Some((Instant::now(), status));
        }
        match last.as_ref().and_then(|(_, status)| status.as_ref()) {
            Some(status) => metrics::of_host(status, format, &self.config),
            None => metrics::down(format),
        }
    }
}
