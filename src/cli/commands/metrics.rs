//! `sublet metrics`: limits, use and counts for Prometheus.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;

use super::metrics_http::{self, Listen};
use super::status::Host;
use crate::metrics::{self, Format};
use sublet_core::config::Config;
use sublet_core::fs::atomic;

/// Arguments of `sublet metrics`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Replace this file, as `node_exporter`'s textfile collector reads it, instead of printing
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Serve the metrics over HTTP at this address, such as `127.0.0.1:9843`, or at the socket of systemd's unit
    /// (`systemd`); the scraper chooses the format
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["output", "format"])]
    listen: Option<Listen>,
    /// Let other hosts reach the address. There is no encryption and no password
    #[arg(long, requires = "listen")]
    listen_public: bool,
    /// A name of this host by which scrapers may ask, besides its addresses and `localhost`
    #[arg(long, value_name = "NAME", requires = "listen")]
    listen_name: Vec<String>,
}

/// Runs it. Where the state cannot be read, `sublet_up` is 0 and the exit code 1.
///
/// # Errors
/// The file cannot be written, or the address cannot be used.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if let Some(listen) = &arguments.listen {
        return metrics_http::serve(config, listen, arguments.listen_public, arguments.listen_name.clone());
    }
    let (text, code) = match Host::read(config) {
        Ok(host) => (metrics::of_host(&host.status, arguments.format, config), ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("sublet: {}", super::tables::chain(&error));
            (metrics::down(arguments.format), ExitCode::FAILURE)
        }
    };
    match &arguments.output {
        Some(file) => atomic::replace(file, text.as_bytes(), 0o644)
            .with_context(|| format!("{} cannot be written", file.display()))?,
        None => print!("{text}"),
    }
    Ok(code)
}
