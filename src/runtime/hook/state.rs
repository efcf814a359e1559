//! The container's state as the OCI runtime gives it to hooks on standard input (runtime-spec,
//! runtime.md, "State"). Untrusted: bounded in size and time.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use sublet_core::ledger::{LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, LeaseId};

/// Longest state that is read: far more than any engine's annotations.
pub const LONGEST: usize = 1 << 20;

/// Why there is no state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Nothing came.
    #[error("it is empty")]
    Empty,
    /// More than is read.
    #[error("it is longer than {} MiB", .0 >> 20)]
    TooLong(usize),
    /// It did not end.
    #[error("its end did not come in time")]
    Timeout,
    /// It cannot be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// No JSON, or not that of a state.
    #[error("{}", sublet_core::text::safe(&.0.to_string()))]
    Json(#[from] serde_json::Error),
    /// An empty id.
    #[error("its id is empty")]
    NoId,
}

/// The part of the state that we need.
#[derive(Debug, Deserialize)]
pub struct State {
    /// The container.
    pub id: String,
    /// The container's first process in our PID namespace; 0 or absent where there is none.
    pub pid: Option<i32>,
    /// The bundle.
    pub bundle: Option<PathBuf>,
    /// Checked to be one of the specification's; what has really ended is found out by other means.
    pub status: Status,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// Where a container is in its life (runtime-spec, runtime.md, "State").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the specification's own words")]
pub enum Status {
    Creating,
    Created,
    Running,
    Stopped,
}

impl State {
    /// Reads it from JSON.
    ///
    /// # Errors
    /// No JSON object with an id and a known status.
    pub fn parse(text: &[u8]) -> Result<Self, StateError> {
        if text.trim_ascii().is_empty() {
            return Err(StateError::Empty);
        }
        let state: Self = serde_json::from_slice(text)?;
        if state.id.is_empty() { Err(StateError::NoId) } else { Ok(state) }
    }

    /// The annotations as the runtime tells them.
    pub fn annotations(&self) -> impl Iterator<Item = (&String, &String)> {
        self.annotations.iter().flatten()
    }

    /// Whether its annotations ask for a share.
    pub fn is_ours(&self) -> bool {
        self.annotations.as_ref().is_some_and(sublet_core::request::is_ours)
    }

    /// The annotation that holds the lease itself; empty without one.
    pub fn lease_record(&self) -> &str {
        self.annotations.as_ref().and_then(|all| all.get(LEASE_RECORD_ANNOTATION)).map_or("", String::as_str)
    }

    /// The lease in its annotations.
    ///
    /// # Errors
    /// The annotation's text, made safe, if it is no lease id.
    pub fn lease(&self) -> Result<Option<LeaseId>, String> {
        let annotation = self.annotations.as_ref().and_then(|annotations| annotations.get(LEASE_ANNOTATION));
        annotation.map(|text| LeaseId::parse(text).ok_or_else(|| sublet_core::text::safe(text))).transpose()
    }
}

/// Everything up to the end of `input`.
///
/// # Errors
/// It is longer than `longest`, or does not end before `deadline`.
pub fn read(input: impl AsFd, longest: usize, deadline: Instant) -> Result<Vec<u8>, StateError> {
    let mut text = Vec::new();
    let mut part = [0_u8; 16384];
    loop {
        wait(&input, deadline)?;
        match nix::unistd::read(&input, &mut part) {
            Ok(0) => return Ok(text),
            Ok(count) => text.extend_from_slice(&part[..count]),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if text.len() > longest {
            return Err(StateError::TooLong(longest));
        }
    }
}

/// Waits until a read will not block.
fn wait(input: &impl AsFd, deadline: Instant) -> Result<(), StateError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(input.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return Err(StateError::Timeout),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn lease_of(text: &str) -> Result<Option<LeaseId>, String> {
        State::parse(text.as_bytes()).unwrap().lease()
    }

    #[test]
    fn finds_the_lease_of_what_runc_and_podman_send() {
        let runc = r#"{"ociVersion":"1.0.2-dev","id":"c1","status":"stopped","bundle":"/b",
                       "annotations":{"a":"b","sublet.lease":"0123456789abcdef"}}"#;
        assert_eq!(lease_of(runc).unwrap().unwrap().as_str(), "0123456789abcdef");
        assert_eq!(lease_of(r#"{"id":"c","status":"stopped","annotations":{}}"#), Ok(None));
        assert_eq!(lease_of(r#"{"id":"c","status":"stopped","annotations":null}"#), Ok(None));
        assert_eq!(lease_of(r#"{"id":"c","pid":0,"status":"running"}"#), Ok(None));
    }

    #[test]
    fn refuses_a_lease_that_is_none() {
        let state = r#"{"id":"c","status":"stopped","annotations":{"sublet.lease":"../../x\u001b"}}"#;
        assert_eq!(lease_of(state), Err("../../x\\u{1b}".to_owned()));
    }

    #[test]
    fn refuses_what_is_no_state() {
        let cases = [
            ("", "it is empty"),
            (" \n", "it is empty"),
            (r#"{"id":"c"}"#, "missing field `status` at line 1 column 10"),
            (r#"{"status":"stopped"}"#, "missing field `id` at line 1 column 20"),
            (r#"{"id":"","status":"stopped"}"#, "its id is empty"),
            (r#"{"id":"c","id":"d","status":"stopped"}"#, "duplicate field `id` at line 1 column 14"),
            (
                r#"{"id":7,"status":"stopped"}"#,
                "invalid type: integer `7`, expected a string at line 1 column 7",
            ),
            (
                r#"{"id":"c","status":"gone"}"#,
                "unknown variant `gone`, expected one of `creating`, `created`, `running`, `stopped` at line 1 column 25",
            ),
            (r#"{"id":"c","status":"stopped"} x"#, "trailing characters at line 1 column 31"),
            ("[]", "invalid length 0, expected struct State with 5 elements at line 1 column 2"),
        ];
        for (text, message) in cases {
            assert_eq!(State::parse(text.as_bytes()).unwrap_err().to_string(), message, "{text}");
        }
    }

    #[test]
    fn reads_to_the_end_and_no_further_than_the_bound() {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        nix::unistd::write(&writer, b"abc").unwrap();
        drop(writer);
        assert_eq!(read(reader, LONGEST, Instant::now() + Duration::from_secs(5)).unwrap(), b"abc");
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        let error = read(zeros, LONGEST, Instant::now() + Duration::from_secs(5)).unwrap_err();
        assert!(matches!(error, StateError::TooLong(LONGEST)));
    }

    #[test]
    fn does_not_wait_for_a_writer_that_keeps_silent() {
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        let error = read(reader, LONGEST, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, StateError::Timeout));
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(state) = State::parse(&text) {
                let _ = state.lease();
            }
        }
    }
}
