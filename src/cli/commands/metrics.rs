//! `sublet metrics`: limits, use and counts for Prometheus.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::status::Host;
use crate::http::{self, Listener, Request, Response, Server};
use crate::metrics::{self, Format};
use crate::serve;
use crate::status::Status;
use sublet_core::config::Config;

/// Arguments of `sublet metrics`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Replace this file, as the node exporter's textfile collector reads it, instead of printing
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Serve the metrics over HTTP at this address, such as 127.0.0.1:9843, or at the socket of systemd's unit
    /// (systemd); the scraper chooses the format
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["output", "format"], value_parser = listen)]
    listen: Option<Listen>,
    /// Let other hosts reach the address. There is no encryption and no password
    #[arg(long, requires = "listen")]
    listen_public: bool,
    /// A name of this host by which scrapers may ask, besides its addresses and localhost
    #[arg(long, value_name = "NAME", requires = "listen")]
    listen_name: Vec<String>,
}

/// Runs it. Where the state cannot be read, `sublet_up` is 0 and the exit code 1.
///
/// # Errors
/// The file cannot be written, or the address cannot be used.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if let Some(listen) = &arguments.listen {
        return listen_http(config, listen, arguments);
    }
    let status = look(config);
    let text = text(status.as_ref(), arguments.format, config);
    match &arguments.output {
        Some(file) => sublet_core::fs::replace(file, text.as_bytes(), 0o644)
            .with_context(|| format!("{} cannot be written", file.display()))?,
        None => print!("{text}"),
    }
    Ok(if status.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `None`: the state cannot be read, and the reason is printed.
fn look(config: &Config) -> Option<Status> {
    let warn = |error| eprintln!("sublet: {}", super::tables::chain(&error));
    Host::read(config).map_err(warn).ok().map(|host| host.status)
}

fn text(status: Option<&Status>, format: Format, config: &Config) -> String {
    status.map_or_else(|| metrics::down(format), |status| metrics::of_host(status, format, config))
}

// `sublet metrics --listen`: the metrics over HTTP. The process needs no rights: it shows what its user may read.

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
enum Listen {
    Address(SocketAddr),
    /// The socket that systemd passes (`sd_listen_fds(3)`).
    Systemd,
}

fn listen(text: &str) -> Result<Listen, &'static str> {
    let wrong = "write it as 127.0.0.1:9843 or [::1]:9843, or `systemd` for a socket unit's socket";
    if text == "systemd" { Ok(Listen::Systemd) } else { text.parse().map(Listen::Address).map_err(|_| wrong) }
}

/// Answers scrapers until a signal ends the process.
///
/// # Errors
/// The address cannot be used, or systemd passed no socket.
fn listen_http(config: &Config, listen: &Listen, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let config = config.clone();
    // The last look at the host, for all scrapers: when it was taken; `None` inside: the state could not be read.
    let last: Mutex<Option<(Instant, Option<Status>)>> = Mutex::default();
    let answer = move |request: &Request| {
        if request.path != "/metrics" {
            return Response::error("404 Not Found: the metrics are at /metrics");
        }
        let wants_open = request.named("accept").next().is_some_and(|types| types.contains(OPEN_METRICS));
        let (format, content_type) = TYPES[usize::from(!wants_open)];
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref().is_none_or(|(taken, _)| taken.elapsed() >= FRESH) {
            let status = look(&config);
            *last = Some((Instant::now(), status));
        }
        let status = last.as_ref().and_then(|(_, status)| status.as_ref());
        Response::ok(content_type, text(status, format, &config).into_bytes())
    };
    let listener = match listen {
        Listen::Address(address) => {
            let listener = http::bind(*address, arguments.listen_public, "--listen-public")?;
            println!("http://{}/metrics", listener.local_addr()?);
            Listener::Tcp(listener)
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
            let is_tcp = listener.local_addr().is_ok();
            if is_tcp { Listener::Tcp(listener) } else { Listener::Unix(OwnedFd::from(listener).into()) }
        }
    };
    Server { listener, names: arguments.listen_name.clone(), token: None }.start(answer)?;
    loop {
        std::thread::park();
    }
}
