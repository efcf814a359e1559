//! `sublet top --web`: the same as a page in a browser. The host is looked at only while a page asks, and once for all
//! pages; NVML is closed while none does.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;

use super::rows::{both, percent, power};
use super::source::{History, LookResult, Trace, lease_key, watch};
use super::view::View;
use crate::http::{self, CONTENT_SECURITY_POLICY, Listener, Request, Response, Server, Token};
use crate::names::Of;
use crate::shown::{self, Words, cut};
use crate::status::{DeviceUsed, LeaseOnDevice, OutsideProcess, Status};
use crate::usage::ProcessUse;
use sublet_core::config::Config;
use sublet_core::text::safe;

/// The shortest time between two looks, however many pages ask.
const SHORTEST: Duration = Duration::from_millis(500);

/// Looks end when no page has asked for this long.
const IDLE: Duration = Duration::from_secs(5);

/// How long a page waits for a look that is not old.
const PATIENCE: Duration = Duration::from_secs(2);

/// The page may load its own script and style, and ask this server. Text cannot become markup (Trusted Types).
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
    of: Of,
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
    let looks = Arc::new(Looks { interval: interval.max(SHORTEST), ..Looks::default() });
    looks.state().view.of = of;
    let (looking, config) = (Arc::clone(&looks), config.clone());
    std::thread::Builder::new().name("look".to_owned()).spawn(move || looking.keep(&config))?;
    let server = Server { listener: Listener::Tcp(listener), names, token: Some(token) };
    server.start(move |request| answer(request, &looks))?;
    // Standard output is written at the end of each line.
    writeln!(std::io::stdout(), "{url}").context("the page's address cannot be printed")?;
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
        return Response::error("404 Not Found: no such page");
    };
    let mut response = Response::ok(content_type, text.as_bytes().to_vec());
    response.headers.push((CONTENT_SECURITY_POLICY, POLICY.to_owned()));
    response
}

/// The latest look, for all pages.
#[derive(Debug, Default)]
struct Looks {
    interval: Duration,
    state: Mutex<State>,
    happened: Condvar,
}

#[derive(Debug, Default)]
struct State {
    view: View,
    /// When the last look ended, whether it succeeded or failed.
    looked: Option<Instant>,
    /// When a page asked last.
    asked: Option<Instant>,
}

impl State {
    fn is_wanted(&self) -> bool {
        self.asked.is_some_and(|asked| asked.elapsed() < IDLE)
    }
}

impl Looks {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks while a page asks, and waits while none does.
    fn keep(&self, config: &Config) {
        loop {
            let state = self.state();
            drop(self.happened.wait_while(state, |state| !state.is_wanted()));
            watch(config, self.interval, &mut |result| self.take(result));
        }
    }

    /// Whether another look is wanted.
    fn take(&self, result: LookResult) -> bool {
        let mut state = self.state();
        state.view.take(result);
        state.looked = Some(Instant::now());
        self.happened.notify_all();
        state.is_wanted()
    }

    /// The document for a page. Waits for a look if the last one is old, as when no page asked before.
    fn document(&self) -> Vec<u8> {
        let mut state = self.state();
        state.asked = Some(Instant::now());
        self.happened.notify_all();
        let old = 2 * self.interval + SHORTEST;
        let is_old = |state: &mut State| state.looked.is_none_or(|looked| looked.elapsed() > old);
        let waited = self.happened.wait_timeout_while(state, PATIENCE, is_old);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        serde_json::to_vec(&Document::of(&state.view, self.interval, Instant::now())).unwrap_or_default()
    }
}

/// Values of a sparkline: five minutes.
const TRACE: usize = 60;

/// The longest image that is shown, in characters.
const LONGEST_IMAGE: usize = 96;

/// Processes that are listed for a container or a device.
const PROCESSES: usize = 32;

/// The document that the page's script fetches regularly. Its texts are the terminal's, and the script only places
/// them. It belongs to the page and may change with it. Other programs read `sublet status --format json`.
#[derive(Default, Serialize)]
struct Document<'a> {
    host: String,
    /// When the last look was taken; empty: there is none yet.
    time: &'a str,
    /// How old it is; null: there is none yet.
    age_seconds: Option<u64>,
    interval_milliseconds: u128,
    /// Why there is no newer look.
    error: Option<String>,
    driver: String,
    simulated: bool,
    guard: &'static str,
    warnings: &'a [String],
    gpus: Vec<Device>,
    containers: Vec<Container>,
}

/// A GPU or a MIG device.
#[derive(Serialize)]
struct Device {
    key: String,
    number: String,
    name: String,
    mode: String,
    memory: Bar,
    sm: Bar,
    /// Words and values of what else is known.
    facts: Vec<(&'static str, String)>,
    /// Why no container can use it, or nothing is known of it.
    fault: Option<String>,
    outside: Vec<Process>,
    past: Vec<Option<u8>>,
    parts: Vec<Device>,
}

/// The used and the booked part, each of 1; null: not known, or nothing can be booked.
#[derive(Serialize)]
struct Bar {
    used: Option<f64>,
    booked: Option<f64>,
    text: String,
}

#[derive(Serialize)]
struct Container {
    key: String,
    #[serde(flatten)]
    words: Words,
    process_list: Vec<Process>,
    age: String,
    past: Vec<Option<u8>>,
}

#[derive(Serialize)]
struct Process {
    key: String,
    text: String,
}

impl<'a> Document<'a> {
    fn of(view: &'a View, interval: Duration, now: Instant) -> Self {
        let bare = Self {
            host: safe(&nix::unistd::gethostname().unwrap_or_default().to_string_lossy()),
            interval_milliseconds: interval.as_millis(),
            error: view.error.as_deref().map(safe),
            ..Self::default()
        };
        let Some(look) = &view.look else { return bare };
        let status = &look.status;
        let gpu = |gpu| Device::of(&shown::Device::of(gpu), &view.history);
        let containers = view.containers().into_iter();
        Self {
            time: &status.time,
            age_seconds: Some(now.saturating_duration_since(look.at).as_secs()),
            driver: safe(&status.driver.version),
            simulated: status.driver.simulated,
            guard: status.guard.words(),
            warnings: &status.warnings,
            gpus: status.devices.iter().map(gpu).collect(),
            containers: containers.map(|lease| Container::of(lease, status, &view.history)).collect(),
            ..bare
        }
    }
}

impl Device {
    fn of(device: &shown::Device<'_>, history: &History) -> Self {
        let siblings = device.part.map_or(&[][..], |part| &part.shares_memory_with);
        let fault = device.part.and_then(|part| part.fault.as_deref()).map(safe);
        let parts = shown::Device::parts(device.gpu).filter(|_| device.part.is_none());
        let unknown = || device.unknown.map(|why| format!("what is used is not known: {}", safe(why)));
        let mut memory = memory_bar(device);
        if !siblings.is_empty() {
            let _ = write!(memory.text, ", shared with {}", siblings.join(", "));
        }
        let mut facts = device.used.filter(|_| device.part.is_none()).map(facts).unwrap_or_default();
        facts.extend(device.drain().map(|words| ("Drained", words.to_owned())));
        let outside = device.used.into_iter().flat_map(|used| &used.outside).take(PROCESSES);
        let process = |process: &OutsideProcess| {
            Process::of(process.pid, &format!("No lease: {}", cut(&process.name)), process.memory_bytes, None)
        };
        Self {
            key: device.uuid.to_owned(),
            number: device.number.clone(),
            name: safe(device.name),
            mode: device.state(),
            memory,
            sm: sm_bar(device),
            facts,
            fault: fault.or_else(unknown),
            outside: outside.map(process).collect(),
            past: history.past(device.uuid, Trace::Load, TRACE),
            parts: parts.map(|part| Self::of(&part, history)).collect(),
        }
    }
}

impl Container {
    fn of(lease: &LeaseOnDevice, status: &Status, history: &History) -> Self {
        let process = |ProcessUse { holder, sm_percent }: &ProcessUse| {
            Process::of(holder.process.pid, &cut(&safe(&holder.name)), holder.memory_bytes, *sm_percent)
        };
        let key = lease_key(lease);
        Self {
            words: Words::of(lease, status, LONGEST_IMAGE),
            process_list: lease.processes.iter().take(PROCESSES).map(process).collect(),
            age: shown::ago(lease.taken),
            past: history.past(&key, Trace::Memory, TRACE),
            key,
        }
    }
}

impl Process {
    fn of(pid: i32, name: &str, memory_bytes: Option<u64>, sm_percent: Option<u32>) -> Self {
        let memory = memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        let busy = sm_percent.map(|percent| format!(", {percent} % busy")).unwrap_or_default();
        Self { key: pid.to_string(), text: format!("{name} (pid {pid}) {memory}{busy}") }
    }
}

fn memory_bar(device: &shown::Device<'_>) -> Bar {
    let used = device.used.and_then(|used| used.memory_bytes).map_or_else(|| "-".to_owned(), shown::memory);
    let mut text = format!("{used} of {}", shown::memory(device.memory_bytes));
    let booked = device.own_bookings().map(|booked| booked.memory_bytes);
    if let Some(booked) = booked.filter(|booked| *booked > 0) {
        let _ = write!(text, ", {} booked", shown::memory(booked));
    }
    let booked = booked.map(|booked| shown::fraction(booked, device.memory_bytes));
    Bar { used: device.memory_used(), booked, text }
}

fn sm_bar(device: &shown::Device<'_>) -> Bar {
    let (load, booked) = (device.load(), device.own_bookings().map(|booked| booked.sm_percent));
    let busy = load.map_or_else(|| "busy: not reported".to_owned(), |_| format!("{} busy", percent(load)));
    let text = booked.map_or_else(|| busy.clone(), |booked| format!("{busy}, {booked} % booked"));
    Bar { used: load.map(|load| load / 100.0), booked: booked.map(|booked| booked / 100.0), text }
}

fn facts(used: &DeviceUsed) -> Vec<(&'static str, String)> {
    let celsius = used.temperature_celsius.map_or_else(|| "-".to_owned(), |celsius| format!("{celsius} °C"));
    let all = [
        ("Power", power(used)),
        ("Temperature", celsius),
        ("SMs with work", percent(used.sm_percent)),
        ("Tensor cores", percent(used.tensor_percent)),
        ("Memory bandwidth", percent(used.dram_percent)),
        ("PCIe out + in", both(used.pcie_bytes_per_second)),
        ("NVLink out + in", both(used.nvlink_bytes_per_second)),
    ];
    all.into_iter().filter(|(_, value)| value != "-").collect()
}

#[cfg(test)]
mod tests {
    use sublet_core::ledger::LeaseState;

    use super::super::fixture::look;
    use super::*;

    #[test]
    fn a_page_is_answered_at_once_by_a_look_that_is_not_old() {
        let looks = Looks { interval: SHORTEST, ..Looks::default() };
        let mut look = look();
        look.status.leases[0].state = LeaseState::Suspended;
        assert!(!looks.take(Ok(look.clone())), "no page has asked");
        let began = Instant::now();
        let document: serde_json::Value = serde_json::from_slice(&looks.document()).unwrap();
        assert!(began.elapsed() < PATIENCE);
        let containers = document["containers"].as_array().unwrap();
        assert_eq!(containers.len(), 3);
        let web = containers.iter().find(|container| container["name"] == "web").unwrap();
        assert_eq!(web["state"], "suspended");
        assert!(looks.take(Ok(look)), "a page has asked");
    }

    #[test]
    fn a_page_waits_for_the_first_look_and_then_says_that_there_is_none() {
        let looks = Looks { interval: SHORTEST, ..Looks::default() };
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
        let looks = Looks { interval: SHORTEST, ..Looks::default() };
        let ask = |path: &str| answer(&Request { path: path.to_owned(), ..Request::default() }, &looks);
        for (path, ..) in FILES {
            let response = ask(path);
            assert_eq!((response.status, &*response.headers[0].1), ("200 OK", POLICY));
        }
        assert_eq!(ask("/../page.js").status, "404 Not Found");
        let html = FILES[0].2;
        assert!(!html.contains("style=") && !html.contains("://") && !html.contains(" onload"), "{html}");
    }
}
