//! `sublet top --web` and `sublet metrics --listen`, and a client that sends what it is told.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A program that serves the page; killed when dropped.
pub struct Web {
    child: Child,
    /// As it was printed.
    pub url: String,
    /// As `127.0.0.1:8080`.
    pub address: String,
    /// The first part of its paths.
    pub token: String,
}

impl Web {
    /// Starts `command`, which is `sublet`, as `sublet top --web` at any free port, with more `options`.
    #[must_use]
    pub fn start(mut command: Command, options: &[&str]) -> Self {
        command.args(["top", "--web", "127.0.0.1:0"]).args(options);
        let web = Self::of(command);
        assert!(web.url.ends_with('/'), "{}", web.url);
        web
    }

    /// Starts `command`, which is `sublet`, as `sublet metrics --listen` at any free port. Its "token" is the path.
    #[must_use]
    pub fn metrics(mut command: Command) -> Self {
        command.args(["metrics", "--listen", "127.0.0.1:0"]);
        let web = Self::of(command);
        assert_eq!(web.token, "metrics");
        web
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it runs");
        let mut url = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut url).expect("a line");
        let url = url.trim_end().to_owned();
        let mut parts = url.strip_prefix("http://").expect("a URL").split('/').map(str::to_owned);
        let (address, token) = (parts.next().expect("an address"), parts.next().expect("a path"));
        Self { child, url, address, token }
    }

    /// A connection.
    #[must_use]
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        stream
    }

    /// What it answers to `text`.
    #[must_use]
    pub fn send(&self, text: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(text.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers in time");
        answer
    }

    /// The status and the body of `path`, which has no token before it yet.
    #[must_use]
    pub fn get(&self, path: &str) -> (u16, String) {
        let answer =
            self.send(&format!("GET /{}{path} HTTP/1.1\r\nHost: {}\r\n\r\n", self.token, self.address));
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head");
        (status(&answer), body.to_owned())
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    /// Ends it by `signal`.
    pub fn ended(&mut self, signal: Signal) -> ExitStatus {
        kill(Pid::from_raw(self.pid()), signal).expect("it runs");
        self.child.wait().expect("it ends")
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status of an answer; 0 if it has none.
#[must_use]
pub fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
}
