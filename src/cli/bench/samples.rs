//! Containers' output, or their answers to a client that asks one request after another, and the figures: latencies,
//! percentiles, throughput, fairness.

use std::time::{Duration, Instant};

use regex_lite::Regex;

use super::result::{Measured, Tenant};
use crate::shown::float;

/// One iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// When it ended, or when its line came, in nanoseconds of `CLOCK_MONOTONIC`.
    pub end: u64,
    /// How long it took, in nanoseconds.
    pub took: u64,
}

/// Where latencies come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Lines that a built-in load prints: end and duration in nanoseconds.
    BuiltIn,
    /// Lines that the user's own program prints: the first group of the pattern, or all that it matches, is a number,
    /// in this many nanoseconds.
    Pattern(Regex, f64),
    /// The programs are servers, and each is asked all the time by one client.
    Http(Client),
}

/// Finds the first number of a line.
pub const FIRST_NUMBER: &str = r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?";

impl Source {
    /// The iteration of a line that came at `now`; `None`: it has none.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative; capped")]
    pub fn sample(&self, line: &str, now: u64) -> Option<Sample> {
        match self {
            Self::BuiltIn => {
                let (end, took) = line.split_once(' ')?;
                Some(Sample { end: end.parse().ok()?, took: took.trim_end().parse().ok()? })
            }
            Self::Pattern(pattern, unit) => {
                let found = pattern.captures(line)?;
                let number = found.get(1).or_else(|| found.get(0))?.as_str();
                let took = number.parse::<f64>().ok().filter(|took| took.is_finite() && *took >= 0.0)? * unit;
                Some(Sample { end: now, took: took.min(1e18) as u64 })
            }
            Self::Http(_) => None,
        }
    }
}

/// The figures of one container for the iterations that ended in the window.
fn tenant(samples: &[u64], error: Option<String>) -> Tenant {
    let none = || samples.is_empty().then(|| "no iteration of it ended in that time".to_owned());
    Tenant {
        iterations: samples.len() as u64,
        mean_ms: mean(samples),
        p50_ms: percentile(samples, 50),
        p99_ms: percentile(samples, 99),
        error: error.or_else(none),
    }
}

/// The figures of a cell: `containers` has each one's samples, and why it did not work all the time. `None`: no
/// iteration ended in the window.
pub fn measured(containers: &[(Vec<Sample>, Option<String>)], (from, to): (u64, u64)) -> Option<Measured> {
    let inside = |samples: &[Sample]| {
        let mut took: Vec<u64> =
            samples.iter().filter(|one| (from..to).contains(&one.end)).map(|one| one.took).collect();
        took.sort_unstable();
        took
    };
    let each: Vec<(Vec<u64>, Option<String>)> =
        containers.iter().map(|(samples, error)| (inside(samples), error.clone())).collect();
    let mut all: Vec<u64> = each.iter().flat_map(|(took, _)| took.iter().copied()).collect();
    all.sort_unstable();
    if all.is_empty() {
        return None;
    }
    let counts = || each.iter().map(|(took, _)| took.len() as u64);
    let most = counts().max().unwrap_or(0);
    let least = counts().min().unwrap_or(0);
    Some(Measured {
        mean_ms: mean(&all),
        p50_ms: Some(percentile(&all, 50)),
        p99_ms: Some(percentile(&all, 99)),
        per_second: Some(rounded(float(all.len() as u64) * 1e9 / float((to - from).max(1)))),
        fairness: Some(rounded(float(least) / float(most.max(1)))),
        containers: each.into_iter().map(|(took, error)| tenant(&took, error)).collect(),
        ..Measured::default()
    })
}

/// In milliseconds.
fn mean(took: &[u64]) -> f64 {
    // Not `sum`, which is -0.0 where there is none.
    let sum = took.iter().fold(0.0, |sum, took| sum + float(*took));
    rounded(sum / float(took.len().max(1) as u64) / 1e6)
}

/// The least value that `percent` of the sorted values do not exceed, in milliseconds.
fn percentile(sorted: &[u64], percent: usize) -> f64 {
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    rounded(sorted.get(at).copied().map_or(0.0, float) / 1e6)
}

/// To four decimals: more is noise, and makes results longer.
pub fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// The longest wait for one answer.
const LIMIT: Duration = Duration::from_secs(60);

/// The pause before a server that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(100);

/// The largest answer that is read.
const LARGEST: u64 = 256 << 20;

/// A client, and its requests.
#[derive(Clone, Debug)]
pub struct Client {
    /// `{port}` is the port of the container.
    pub url: String,
    /// Sent by POST; none: GET.
    pub body: Option<Vec<u8>>,
    /// The type of the body.
    pub content_type: String,
    /// One for each container.
    pub ports: Vec<u16>,
}

impl Client {
    /// Asks the server in container `number` until it is over. An answer that is no success is no sample; `fail`
    /// gets it.
    pub fn ask_until(
        &self,
        number: u32,
        is_over: impl Fn() -> bool,
        mut tell: impl FnMut(Sample),
        fail: impl Fn(String),
    ) {
        let port = self.ports.get(number as usize).map(u16::to_string).unwrap_or_default();
        let url = self.url.replace("{port}", &port);
        let agent = ureq::Agent::config_builder().timeout_global(Some(LIMIT)).build().new_agent();
        while !is_over() {
            let start = Instant::now();
            match self.ask(&agent, &url) {
                Ok(()) => {
                    let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
                    tell(Sample { end: crate::load::monotonic_nanoseconds(), took });
                }
                Err(error) => {
                    fail(format!("{url}: {error}"));
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// One request and its whole answer.
    fn ask(&self, agent: &ureq::Agent, url: &str) -> Result<(), ureq::Error> {
        let mut answer = match &self.body {
            Some(body) => agent.post(url).content_type(&self.content_type).send(&body[..])?,
            None => agent.get(url).call()?,
        };
        answer.body_mut().with_config().limit(LARGEST).read_to_vec().map(drop)
    }
}

/// Ports of loopback that are free now.
pub fn free_ports(n: u32) -> std::io::Result<Vec<u16>> {
    let bind = |_| std::net::TcpListener::bind(("127.0.0.1", 0));
    // All are held until the last is known, so that they differ.
    let held = (0..n).map(bind).collect::<Result<Vec<_>, _>>()?;
    held.iter().map(|one| one.local_addr().map(|address| address.port())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    use std::net::TcpListener;

    #[test]
    fn lines_of_built_in_loads() {
        let read = |line: &str| Source::BuiltIn.sample(line, 7);
        assert_eq!(read("100 25\n"), Some(Sample { end: 100, took: 25 }));
        for line in ["", "100", "100 x", "x 1", "-1 2"] {
            assert_eq!(read(line), None, "{line}");
        }
    }

    #[test]
    fn lines_of_other_programs() {
        let read = |pattern: &str, line: &str| {
            let format = Source::Pattern(Regex::new(pattern).unwrap(), 1e6);
            format.sample(line, 7).map(|sample| (sample.end, sample.took))
        };
        assert_eq!(read(FIRST_NUMBER, "12.5"), Some((7, 12_500_000)));
        assert_eq!(read(FIRST_NUMBER, "iteration took 3 ms"), Some((7, 3_000_000)));
        assert_eq!(read(FIRST_NUMBER, "loading"), None);
        assert_eq!(read(r"latency=(\S+)", "i=4 latency=2.5ms"), None, "2.5ms is no number");
        assert_eq!(read(r"latency=([0-9.]+)", "i=4 latency=2.5ms"), Some((7, 2_500_000)));
        assert_eq!(read(r"(nan|inf)", "nan"), None);
        assert_eq!(read(FIRST_NUMBER, "1e300"), Some((7, 1_000_000_000_000_000_000)));
    }

    #[test]
    fn figures_are_of_the_window_alone() {
        let samples = |took: &[u64]| -> Vec<Sample> {
            took.iter().zip(0..).map(|(took, at)| Sample { end: 1000 + at, took: took * 1_000_000 }).collect()
        };
        let many: Vec<u64> = (1..=100).collect();
        let mut first = samples(&many);
        first.push(Sample { end: 999, took: 5_000_000_000 });
        first.push(Sample { end: 2000, took: 5_000_000_000 });
        let second = (samples(&[200]), Some("it ended with exit code 1".to_owned()));
        let found = measured(&[(first, None), second], (1000, 2000)).unwrap();
        assert_eq!(found.containers[0].iterations, 100);
        assert!(
            (found.containers[0].p50_ms - 50.0).abs() < 1e-9
                && (found.containers[0].p99_ms - 99.0).abs() < 1e-9
        );
        assert!((found.mean_ms - (5050.0 + 200.0) / 101.0).abs() < 1e-3, "{}", found.mean_ms);
        assert_eq!(found.fairness, Some(0.01));
        assert_eq!(found.per_second, Some(101.0 * 1e6));
        assert_eq!(found.containers[1].error.as_deref(), Some("it ended with exit code 1"));
        assert_eq!(measured(&[(Vec::new(), None)], (0, 1)), None);
    }

    #[test]
    fn a_container_that_got_no_turn_is_reported() {
        let one = vec![Sample { end: 5, took: 1_000_000 }];
        let found = measured(&[(one, None), (Vec::new(), None)], (0, 10)).unwrap();
        assert_eq!(found.containers[0].error, None);
        let none = &found.containers[1];
        assert_eq!(none.error.as_deref(), Some("no iteration of it ended in that time"));
        assert!(none.iterations == 0 && none.mean_ms.is_sign_positive(), "{none:?}");
    }

    /// Answers each connection's requests, the first with an error.
    fn serve(listener: &TcpListener) {
        let mut answers = 0;
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            loop {
                let mut length = 0;
                let mut line = String::new();
                while stream.read_line(&mut line).is_ok_and(|read| read > 2) {
                    if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    line.clear();
                }
                let mut body = vec![0; length];
                if stream.read_exact(&mut body).is_err() || body != b"{}" {
                    break;
                }
                answers += 1;
                let status = if answers == 1 { "503 Starting" } else { "200 OK" };
                let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nok");
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        }
    }

    #[test]
    fn only_answers_of_success_are_samples() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || serve(&listener));
        let client = Client {
            url: "http://127.0.0.1:{port}/predict".to_owned(),
            body: Some(b"{}".to_vec()),
            content_type: "application/json".to_owned(),
            ports: vec![1, port],
        };
        let samples = std::cell::RefCell::new(Vec::new());
        // Dropped before the next request, because the server takes one connection after the other.
        let agent = ureq::Agent::new_with_defaults();
        drop(client.ask(&agent, &format!("http://127.0.0.1:{port}/predict")).expect_err("503"));
        drop(agent);
        let is_over = || samples.borrow().len() >= 3;
        client.ask_until(1, is_over, |sample| samples.borrow_mut().push(sample), |why| panic!("{why}"));
        assert!(samples.borrow().iter().all(|sample| sample.took > 0 && sample.end > sample.took));
        let nobody = std::cell::RefCell::new(Vec::new());
        let is_over = || !nobody.borrow().is_empty();
        client.ask_until(0, is_over, |_| {}, |why| nobody.borrow_mut().push(why));
        assert!(nobody.borrow()[0].starts_with("http://127.0.0.1:1/predict: "), "{nobody:?}");
    }

    #[test]
    fn ports_differ() {
        let mut ports = free_ports(20).unwrap();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 20);
    }
}
