//! The container's state as the OCI runtime gives it to hooks on standard input (runtime-spec,
//! runtime.md, "State"). Untrusted: bounded in size and time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{anyhow, ensure};
use serde::Deserialize;

use sublet_core::ledger::{LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, LeaseId};
use sublet_core::parse_errors::plain;

/// Longest state that is read, far longer than any engine's annotations.
pub const LONGEST: usize = 1 << 20;

/// The part of the state that sublet needs.
#[derive(Debug, Deserialize)]
pub struct State {
    /// The container.
    pub id: String,
    /// The container's first process in this process's PID namespace; 0 or absent if there is none.
    pub pid: Option<i32>,
    /// The bundle.
    pub bundle: Option<PathBuf>,
    /// Must be one of the specification's words. Whether the container has really ended is checked by other means.
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
    pub fn parse(text: &[u8]) -> anyhow::Result<Self> {
        ensure!(!text.trim_ascii().is_empty(), "it is empty");
        let state: Self =
            serde_json::from_slice(text).map_err(|error| anyhow!(plain(&error.to_string(), None)))?;
        ensure!(!state.id.is_empty(), "its id is empty");
        Ok(state)
    }

    /// The annotations as the runtime reports them.
    pub fn annotations(&self) -> impl Iterator<Item = (&String, &String)> {
        self.annotations.iter().flatten()
    }

    /// Whether it has annotations for sublet.
    ///
    /// This is no decision that the container asks for a share ([`sublet_core::admit::RequestSource::of`]): that needs
    /// config.json, because a CDI device asks without annotations and a pause container has its pod's annotations.
    pub fn has_sublet_annotations(&self) -> bool {
        self.annotations.as_ref().is_some_and(sublet_core::request::has_sublet_annotations)
    }

    /// The annotation that holds the lease itself; empty without one.
    pub fn lease_record(&self) -> &str {
        self.annotations.as_ref().and_then(|all| all.get(LEASE_RECORD_ANNOTATION)).map_or("", String::as_str)
    }

    /// The lease in its annotations.
    ///
    /// # Errors
    /// The annotation's text, made safe, if it is not a lease id.
    pub fn lease(&self) -> Result<Option<LeaseId>, String> {
        let annotation = self.annotations.as_ref().and_then(|annotations| annotations.get(LEASE_ANNOTATION));
        annotation.map(|text| LeaseId::parse(text).ok_or_else(|| sublet_core::text::safe(text))).transpose()
    }
}

#[cfg(test)]
mod tests {
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
            (r#"{"id":"c"}"#, "missing key `status` at line 1 column 10"),
            (r#"{"status":"stopped"}"#, "missing key `id` at line 1 column 20"),
            (r#"{"id":"","status":"stopped"}"#, "its id is empty"),
            (r#"{"id":"c","id":"d","status":"stopped"}"#, "duplicate key `id` at line 1 column 14"),
            (r#"{"id":7,"status":"stopped"}"#, "a value must be a string, not 7 at line 1 column 7"),
            (
                r#"{"id":"c","status":"gone"}"#,
                "unknown value `gone`, expected one of `creating`, `created`, `running`, `stopped` at line 1 column 25",
            ),
            (r#"{"id":"c","status":"stopped"} x"#, "trailing characters at line 1 column 31"),
            ("[]", "a value must be an object, not an array of 0 at line 1 column 2"),
        ];
        for (text, message) in cases {
            assert_eq!(State::parse(text.as_bytes()).unwrap_err().to_string(), message, "{text}");
        }
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
