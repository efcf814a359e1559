//! `sublet top --web`: the same as a page in a browser. The host is looked at only while a page asks, and once for all
//! pages; NVML is closed while none does. [`document`] is what the page's script fetches again and again.

mod document;

use std::io::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};

use super::source::{Told, watch};
use super::view::View;
use crate::http::{self, CONTENT_SECURITY_POLICY, Listener, Request, Response, Server, Token};
use document::Document;
use sublet_core::config::Config;

/// The shortest time between two looks, however many pages ask.
const SHORTEST: Duration = Duration::from_millis(500);

/// Looks end when no page has asked for this long.
const IDLE: Duration = Duration::from_secs(5);

/// How long a page waits for a look that is not old.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the page may do: load its own script and style, and ask this server. Text cannot become markup (Trusted Types).
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// The files of the page.
const FILES: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("page.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
    ("/icon.svg", "image/svg+xml", include_str!("icon.svg")),
];

/// Serves the page at `address`, which other hosts may reach only `anywhere`, until a signal ends it. Browsers may ask for
/// it by `names`, too.
pub fn run(
    config: &Config,
    interval: Duration,
    address: SocketAddr,
    anywhere: bool,
    names: Vec<String>,
) -> anyhow::Result<ExitCode> {
    // Before any thread starts: they inherit the mask.
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]);
    ends.thread_block()?;
    let listener = http::bind(address, anywhere, "--web-public")?;
    let address = listener.local_addr()?;
    let token = Token::new()?;
    let url = format!("http://{}/{}/", reached(address), token.as_str());
    let looks = Arc::new(Looks::new(interval.max(SHORTEST)));
    let (looking, config) = (Arc::clone(&looks), config.clone());
    thread::Builder::new().name("look".to_owned()).spawn(move || looking.keep(&config))?;
    let server = Server { listener: Listener::Tcp(listener), names, token: Some(token) };
    server.start(move |request| answer(request, &looks))?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{url}").and_then(|()| out.flush()).context("the page's address cannot be printed")?;
    drop(out);
    ends.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Where this host itself reaches what listens at `address`, which may stand for all of its addresses.
fn reached(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        let of_family =
            if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
        address.set_ip(of_family);
    }
    address
}

fn answer(request: &Request, looks: &Looks) -> Response {
    if request.path == "/data.json" {
        return Response::ok("application/json", looks.document());
    }
    let Some((_, content_type, text)) = FILES.into_iter().find(|(path, ..)| *path == request.path) else {
        return Response::error(404, "no such page");
    };
    let mut response = Response::ok(content_type, text.as_bytes().to_vec());
    response.headers.push((CONTENT_SECURITY_POLICY, POLICY.to_owned()));
    response
}

/// The latest look, for all pages.
#[derive(Debug)]
struct Looks {
    interval: Duration,
    state: Mutex<State>,
    happened: Condvar,
}

#[derive(Debug, Default)]
struct State {
    view: View,
    /// When the last look ended, whether it succeeded or failed.
    told: Option<Instant>,
    /// When a page asked last.
    asked: Option<Instant>,
}

impl State {
    fn is_wanted(&self) -> bool {
        self.asked.is_some_and(|asked| asked.elapsed() < IDLE)
    }
}

impl Looks {
    fn new(interval: Duration) -> Self {
        Self { interval, state: Mutex::default(), happened: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks while a page asks, and waits while none does.
    fn keep(&self, config: &Config) {
        loop {
            let state = self.state();
            drop(self.happened.wait_while(state, |state| !state.is_wanted()));
            watch(config, self.interval, &mut |told| self.take(told));
        }
    }

    /// Whether another look is wanted.
    fn take(&self, told: Told) -> bool {
        let mut state = self.state();
        state.view.take(told);
        state.told = Some(Instant::now());
        self.happened.notify_all();
        state.is_wanted()
    }

    /// What a page shows. Waits for a look if the last one is old, as when no page asked before.
    fn document(&self) -> Vec<u8> {
        let mut state = self.state();
        state.asked = Some(Instant::now());
        self.happened.notify_all();
        let old = 2 * self.interval + SHORTEST;
        let is_old = |state: &mut State| state.told.is_none_or(|told| told.elapsed() > old);
        let waited = self.happened.wait_timeout_while(state, PATIENCE, is_old);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        serde_json::to_vec(&Document::of(&state.view, self.interval, Instant::now())).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::look;
    use super::*;

    #[test]
    fn a_page_is_answered_at_once_by_a_look_that_is_not_old() {
        let looks = Looks::new(SHORTEST);
        assert!(!looks.take(Ok(look())), "no page has asked");
        let began = Instant::now();
        let document: serde_json::Value = serde_json::from_slice(&looks.document()).unwrap();
        assert!(began.elapsed() < PATIENCE);
        assert_eq!(document["containers"].as_array().unwrap().len(), 3);
        assert!(looks.take(Ok(look())), "a page has asked");
    }

    #[test]
    fn a_page_waits_for_the_first_look_and_then_says_that_there_is_none() {
        let looks = Looks::new(SHORTEST);
        let document: serde_json::Value = serde_json::from_slice(&looks.document()).unwrap();
        assert_eq!((&document["age_seconds"], &document["time"]), (&serde_json::Value::Null, &"".into()));
    }

    #[test]
    fn the_printed_address_is_one_that_can_be_opened() {
        let shown = |address: &str| reached(address.parse().unwrap()).to_string();
        assert_eq!(
            ["0.0.0.0:8", "[::]:8", "192.0.2.1:8"].map(shown),
            ["127.0.0.1:8", "[::1]:8", "192.0.2.1:8"]
        );
    }

    #[test]
    fn every_file_of_the_page_has_the_policy_and_no_other_path_exists() {
        let looks = Looks::new(SHORTEST);
        let ask = |path: &str| answer(&Request { path: path.to_owned(), ..Request::default() }, &looks);
        for (path, ..) in FILES {
            let response = ask(path);
            assert_eq!((response.status, &*response.headers[0].1), (200, POLICY));
        }
        assert_eq!(ask("/../page.js").status, 404);
        let html = FILES[0].2;
        assert!(!html.contains("style=") && !html.contains("://") && !html.contains(" onload"), "{html}");
    }
}
