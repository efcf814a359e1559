//! The lines between an entry point without root and the service. Each one is a JSON object with the version `v`.
//!
//! ```text
//! {"v":1,"do":"admit","container":{…},"annotations":{"sublet.sm":"25"},"image":{…},…}
//! {"v":1,"granted":{"lease":"00000000000000aa","grant":{…},"warnings":[]}}
//! ```
//!
//! Several requests may follow each other on one connection, each after the answer to the one before.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::fs::parse_json;
use crate::grant::{Grant, Image};
use crate::inventory::Inventory;
use crate::ledger::{LeaseId, Leftover};
use crate::slurm::{self, JobGpu};

/// The version that this build speaks.
pub const VERSION: u32 = 1;

/// Longest line that a client may send, in bytes. The longest one in use has a path for each of the driver's files.
pub const LONGEST_ASK: usize = 64 << 10;

/// Longest line that the service sends, in bytes: an inventory of 16 GPUs with many processes.
pub(crate) const LONGEST_ANSWER: usize = 8 << 20;

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Ask {
    /// Asks for the present inventory, which the client needs to examine the root filesystem.
    Inventory,
    /// Asks for a share for a container that is being created. The service looks once. Waiting is left to the client.
    Admit(Box<Admit>),
    /// The client waits for room and takes no share (`sublet wait`): it has a place among those who wait, which it asks for again
    /// and again.
    Wait {
        /// As [`Admit::annotations`].
        annotations: BTreeMap<String, String>,
    },
    /// The container of `lease` exists: its first process.
    Bind {
        /// The lease.
        lease: LeaseId,
        /// The names that were not known before, without the root filesystem.
        container: ContainerNames,
        /// Its pid in the client's PID namespace, which must be the service's.
        pid: i32,
    },
    /// Process `owner`, the engine, is responsible for `lease` until it is bound.
    HandOver {
        /// The lease.
        lease: LeaseId,
        /// As [`Ask::Bind`]'s pid.
        owner: i32,
    },
    /// The unbound lease that `owner` still holds for container `id` is from a failed start.
    Abandon {
        /// The container's id.
        id: String,
        /// As [`Ask::Bind`]'s pid.
        owner: i32,
    },
    /// The container is being deleted by the client.
    Ending {
        /// Its id.
        id: String,
        /// As in [`ContainerNames::record`].
        record: PathBuf,
    },
    /// The container was not deleted after all.
    Unmark {
        /// The lease.
        lease: LeaseId,
    },
    /// The container has ended. Refused while it has processes. Waiting for their end is left to the client.
    End {
        /// The lease.
        lease: LeaseId,
    },
    /// The container was never created.
    Withdraw {
        /// The lease.
        lease: LeaseId,
    },
    /// A process is about to join the container, so its MPS daemon must answer.
    Enter {
        /// The container's id.
        id: String,
        /// As in [`ContainerNames::record`].
        record: PathBuf,
    },
    /// A container of the user was refused, or started with a warning. `sublet status --last-error` will show it.
    Refused {
        /// Its id.
        id: String,
        /// Why.
        reason: String,
        /// Each device that could have served it, and why it does not.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        candidates: Vec<String>,
        /// It is a warning.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        started: bool,
    },
    /// Asks for the suspension of the user's container with this lease. The answer may take minutes.
    Suspend {
        /// The lease.
        lease: LeaseId,
        /// Whether it is to be done although its share does not allow it. Refused: that is root's.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        force: bool,
    },
    /// Asks for its end.
    Resume {
        /// The lease.
        lease: LeaseId,
        /// The GPU that it comes to, if not the one that it was on.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        gpu: Option<String>,
    },
    /// Asks for the user's container with this lease to be moved.
    Move {
        /// The lease.
        lease: LeaseId,
        /// The GPU that it goes to.
        gpu: String,
    },
    /// Asks for room for a start of root's that waits in the ledger. The answer comes when there is some, or may be later, and may
    /// take minutes.
    MakeRoom {
        /// As [`crate::ledger::Waiter::id`].
        waiter: LeaseId,
    },
    /// Asks for the start of an MPS daemon that a lease needs. Only for processes of the service's own user, root: their
    /// own children would stay below a container runtime.
    StartDaemon {
        /// The daemon's key.
        key: String,
    },
    /// Asks for the share of a program of the client's job of Slurm's.
    Job,
    /// Asks for the user's leases and the room in their policy.
    Status,
    /// Asks for the report of what the user's containers held.
    Report {
        /// What it is about: `sublet` itself knows.
        wanted: serde_json::Value,
    },
}

/// The parts of a container that matter for its share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Admit {
    /// The container.
    pub container: ContainerNames,
    /// The process that is responsible for the share: if it ends without a container, the share is freed. Absent: the
    /// client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<i32>,
    /// The share that the entry point's name means (`sublet-<share>`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<String>,
    /// The annotations that begin with `sublet.`.
    pub annotations: BTreeMap<String, String>,
    /// `NVIDIA_DRIVER_CAPABILITIES` of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capabilities: Option<String>,
    /// The root filesystem as the client examined it.
    pub image: Image,
    /// GPUs of its job of Slurm's that the client must not open ([`slurm::forbidden`]).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forbidden: Vec<String>,
}

/// A container's names. The service never opens these paths.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerNames {
    /// The container id.
    pub id: String,
    /// The bundle, canonical.
    pub bundle: PathBuf,
    /// The root filesystem, canonical.
    pub rootfs: PathBuf,
    /// The directory of the low-level runtime's record.
    pub record: PathBuf,
}

/// An answer of the service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// To `inventory`.
    Inventory(Box<Inventory>),
    /// To `admit`.
    Granted(Box<Granted>),
    /// To `admit`, where the spec carries a live lease of this container.
    AlreadyGranted(LeaseId),
    /// To `ending`: the container's lease, if it has one. To `wait`: the id of the client's entry, if it has one.
    Lease(Option<LeaseId>),
    /// To `end` and `withdraw`: the leftovers that the client has to remove, if any.
    Freed(Option<Leftover>),
    /// To `start-daemon`: warnings, one line each.
    Started(Vec<String>),
    /// To `start-daemon`: why it could not be started.
    NotStarted(String),
    /// To `suspend`, `resume` and `move`.
    Stepped {
        /// GPU memory that was copied.
        bytes: u64,
        /// How long it took.
        took_ms: u64,
    },
    /// To `job`; `None`: the job asked Slurm for no GPU.
    Job(Option<JobEnvironment>),
    /// To `status` and `report`.
    Status(serde_json::Value),
    /// To `bind`, `unmark` and `make-room`, and to `enter`, for which `false` means that the container has no lease.
    Done(bool),
    /// The service refuses, with one line.
    Refused(Refused),
    /// The service is busy, with one line. Nothing was done, and the same request may succeed in a moment.
    Busy(String),
}

/// A share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Granted {
    /// The new lease.
    pub lease: LeaseId,
    /// The grant to edit the spec with.
    pub grant: Grant,
    /// One line each.
    pub warnings: Vec<String>,
}

/// The environment of a job's programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEnvironment {
    /// The job's lease.
    pub lease: LeaseId,
    /// Variables to set.
    pub set: Vec<(String, String)>,
    /// Variables with these prefixes are removed unless they are in `set`.
    pub remove_prefixes: Vec<String>,
    /// The job's GPUs, of which a step or a task may have some only.
    pub gpus: Vec<JobGpu>,
}

impl JobEnvironment {
    /// As the calling process needs it: without the GPUs that its step or task must not open. CUDA would find none at all
    /// behind the first of them.
    pub fn of_this_task(mut self) -> Self {
        let forbidden = slurm::forbidden(&self.gpus);
        for (name, value) in &mut self.set {
            if matches!(name.as_str(), "CUDA_VISIBLE_DEVICES" | "SUBLET_DEVICES") {
                let left = value.split(',').filter(|uuid| !forbidden.iter().any(|other| other == uuid));
                *value = left.collect::<Vec<_>>().join(",");
            }
        }
        self
    }
}

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// One line, safe to print.
    pub reason: String,
    /// Whether waiting may help.
    pub temporary: bool,
    /// Each device that could have served it, and why it does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Line<T> {
    v: u32,
    #[serde(flatten)]
    content: T,
}

#[derive(Deserialize)]
struct Versioned {
    v: u32,
}

/// Why a line is not of this protocol.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// It is of another version.
    #[error(
        "the request has protocol version {0}, and this sublet has version {VERSION}: after an upgrade run \
         `systemctl restart sublet.service`"
    )]
    Version(u32),
    /// It is not JSON, or not a valid line.
    #[error("the request cannot be parsed: {0}")]
    Malformed(String),
}

/// The line for `content`, newline included.
///
/// # Errors
/// A path that is not UTF-8.
pub fn line<T: Serialize>(content: &T) -> Result<Vec<u8>, ProtocolError> {
    let mut line = serde_json::to_vec(&Line { v: VERSION, content }).map_err(malformed)?;
    line.push(b'\n');
    Ok(line)
}

/// The content of `line`.
///
/// # Errors
/// It is of another version, or is not a valid line.
pub fn parse<T: for<'de> Deserialize<'de>>(line: &[u8]) -> Result<T, ProtocolError> {
    let Versioned { v } = parse_json(line).map_err(malformed)?;
    if v != VERSION {
        return Err(ProtocolError::Version(v));
    }
    let line: Line<T> = parse_json(line).map_err(malformed)?;
    Ok(line.content)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn malformed(error: serde_json::Error) -> ProtocolError {
    ProtocolError::Malformed(crate::parse_errors::plain(&error.to_string(), None))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(line: &str) -> Result<Ask, String> {
        parse(line.as_bytes()).map_err(|error| error.to_string())
    }

    fn id(digit: char) -> LeaseId {
        LeaseId::parse(&format!("00000000000000a{digit}")).unwrap()
    }

    #[test]
    fn asks_are_written_as_they_are_documented() {
        let written = |ask: &Ask| String::from_utf8(line(ask).unwrap()).unwrap();
        assert_eq!(written(&Ask::Inventory), "{\"v\":1,\"do\":\"inventory\"}\n");
        assert_eq!(
            written(&Ask::HandOver { lease: id('1'), owner: 7 }),
            "{\"v\":1,\"do\":\"hand-over\",\"lease\":\"00000000000000a1\",\"owner\":7}\n"
        );
        assert_eq!(
            written(&Ask::StartDaemon { key: "GPU-1".into() }),
            "{\"v\":1,\"do\":\"start-daemon\",\"key\":\"GPU-1\"}\n"
        );
        let wait = Ask::Wait { annotations: [("sublet.sm".to_owned(), "25".to_owned())].into() };
        assert_eq!(written(&wait), "{\"v\":1,\"do\":\"wait\",\"annotations\":{\"sublet.sm\":\"25\"}}\n");
        let admit = Admit {
            container: ContainerNames {
                id: "c1".into(),
                bundle: "/b".into(),
                rootfs: "/b/rootfs".into(),
                record: "/r/c1".into(),
            },
            annotations: [("sublet.sm".to_owned(), "25".to_owned())].into(),
            ..Admit::default()
        };
        assert_eq!(
            written(&Ask::Admit(Box::new(admit))),
            "{\"v\":1,\"do\":\"admit\",\"container\":{\"id\":\"c1\",\"bundle\":\"/b\",\"rootfs\":\"/b/rootfs\",\
             \"record\":\"/r/c1\"},\"annotations\":{\"sublet.sm\":\"25\"},\"image\":{\"library_dir\":null,\
             \"nix\":false,\"tmp_is_host\":false,\"created\":[],\"warnings\":[]}}\n"
        );
    }

    #[test]
    fn answers_are_written_as_they_are_documented() {
        let written = |answer: &Answer| String::from_utf8(line(answer).unwrap()).unwrap();
        let refused = Refused { reason: "no".into(), temporary: true, candidates: vec![] };
        let cases = [
            (Answer::Done(true), "{\"v\":1,\"done\":true}\n"),
            (Answer::Lease(None), "{\"v\":1,\"lease\":null}\n"),
            (Answer::AlreadyGranted(id('2')), "{\"v\":1,\"already-granted\":\"00000000000000a2\"}\n"),
            (Answer::Refused(refused), "{\"v\":1,\"refused\":{\"reason\":\"no\",\"temporary\":true}}\n"),
            (Answer::Started(vec!["x".into()]), "{\"v\":1,\"started\":[\"x\"]}\n"),
            (Answer::NotStarted("no".into()), "{\"v\":1,\"not-started\":\"no\"}\n"),
            (Answer::Busy("wait".into()), "{\"v\":1,\"busy\":\"wait\"}\n"),
        ];
        for (answer, expected) in cases {
            assert_eq!(written(&answer), expected);
            assert_eq!(parse::<Answer>(expected.as_bytes()).unwrap(), answer);
        }
    }

    #[test]
    fn keys_of_later_versions_of_the_same_protocol_are_passed_over() {
        assert_eq!(ask(r#"{"do":"status","v":1,"colour":"red"}"#), Ok(Ask::Status));
    }

    #[test]
    fn lines_that_are_none_say_why() {
        let cases = [
            ("", "the request cannot be parsed: EOF while parsing a value at line 1 column 0"),
            ("{}", "the request cannot be parsed: missing key `v` at line 1 column 2"),
            (
                r#"{"v":2,"do":"fly"}"#,
                "the request has protocol version 2, and this sublet has version 1: after an upgrade run \
                 `systemctl restart sublet.service`",
            ),
            (r#"{"v":1}"#, "the request cannot be parsed: missing key `do` at line 1 column 7"),
            (
                r#"{"v":1,"do":"hand-over","lease":"00000000000000a1","owner":"7"}"#,
                "the request cannot be parsed: a value must be a whole number, not \"7\" at line 1 column 63",
            ),
        ];
        for (line, message) in cases {
            assert_eq!(ask(line).unwrap_err(), message, "{line}");
        }
        assert!(ask(r#"{"v":1,"do":"fly"}"#).unwrap_err().contains("unknown value `fly`"));
        assert!(ask(&"[".repeat(60_000)).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered(text in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse::<Ask>(&text);
        }

        #[test]
        fn any_json_about_right_is_answered_in_one_safe_line(
            verb in "(admit|wait|bind|ending|unmark|end|withdraw|enter|start-daemon|status|[a-z]{1,5})",
            key in "(lease|pid|id|key|record|container|annotations|image|[a-z]{1,4})",
            value in "(null|true|-?[0-9]{1,30}|\"[^\"\\\\]{0,20}\"|\\[\\]|\\{\\}|\\{\"id\":1\\})",
        ) {
            let line = format!("{{\"v\":1,\"do\":\"{verb}\",\"{key}\":{value}}}");
            if let Err(error) = parse::<Ask>(line.as_bytes()) {
                prop_assert!(!error.to_string().contains(char::is_control), "{error}");
            }
        }
    }
}
