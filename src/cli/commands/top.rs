//! `sublet top`: GPUs and containers, live.

use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};

use crate::names::Of;
use crate::top::{self, web};
use sublet_core::config::Config;

/// The width of a frame where standard output is no terminal.
const WIDTH: usize = 132;

/// Arguments of `sublet top`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Time between two looks at the driver: 500ms, 2s; from 200ms to 60s
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    #[command(flatten)]
    of: Of,
    /// Print one frame as text, without control characters, and end
    #[arg(long)]
    once: bool,
    /// Show it as a page in a browser, at this address of this host, such as 127.0.0.1:8080; prints the page's URL
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with = "once", value_parser = address)]
    web: Option<SocketAddr>,
    /// Let other hosts reach the page. There is no encryption: whoever sees the traffic can read the page
    #[arg(long, requires = "web")]
    web_public: bool,
    /// A name of this host by which browsers may ask for the page, besides its addresses and localhost
    #[arg(long, value_name = "NAME", requires = "web")]
    web_name: Vec<String>,
}

/// Runs it.
///
/// # Errors
/// There is no driver, or no ledger; standard output is no terminal, and neither `--once` nor `--web` is given; the
/// page's address cannot be used.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if !arguments.once && arguments.web.is_none() && !std::io::stdout().is_terminal() {
        bail!("standard output is no terminal; `sublet top --once` prints one frame, `--web` serves a page");
    }
    // A fault at the beginning is an error as of other commands.
    super::settled_ledger(config)?;
    sublet_core::admit::confirmed_inventory(config)?;
    let (of, names) = (arguments.of.clone(), arguments.web_name.clone());
    if let Some(address) = arguments.web {
        return web::run(config, of, arguments.interval, address, arguments.web_public, names);
    }
    if !arguments.once {
        return top::run(config, of, arguments.interval);
    }
    let width = u16::try_from(super::tables::terminal_width().unwrap_or(WIDTH)).unwrap_or(u16::MAX);
    let frame = top::once(config, of, width, crate::terminal::utf8()).map_err(|error| anyhow!(error))?;
    print!("{frame}");
    Ok(ExitCode::SUCCESS)
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write it as 127.0.0.1:8080 or [::1]:8080; port 0: any that is free".to_owned())
}

fn interval(text: &str) -> Result<Duration, String> {
    let time =
        humantime::parse_duration(text).map_err(|error| format!("write it as 500ms or 2s: {error}"))?;
    let allowed = Duration::from_millis(200)..=Duration::from_secs(60);
    if allowed.contains(&time) { Ok(time) } else { Err("from 200ms to 60s".to_owned()) }
}
