//! A client that asks an HTTP server one request after another.

use std::time::{Duration, Instant};

use super::samples::Sample;
use crate::load::monotonic_nanoseconds;

/// The longest wait for one answer.
const LIMIT: Duration = Duration::from_secs(60);

/// The pause before a server that does not answer is asked again.
const AGAIN: Duration = Duration::from_millis(100);

/// The largest answer that is read.
const LARGEST: u64 = 256 << 20;

/// What is asked.
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
    /// Asks the server in container `number` until it is over. An answer that is no success is no sample; `fail` is told
    /// of it.
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
                    tell(Sample { end: monotonic_nanoseconds(), took });
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
