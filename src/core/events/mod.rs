//! Events of leases, MPS daemons and MIG instances: emitted once, at the decision, to the
//! system's journal where the ledger is the system's, else to a ring of two files beside the ledger.

mod journal;
mod ring;

use std::path::Path;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::process::uptime_milliseconds;
use crate::text::timestamp_milliseconds;

pub use journal::{JOURNAL_FIELD, JOURNAL_IDENTIFIER, has_journal};
pub use ring::read_ring;

/// The longest text of an event, in bytes.
const LONGEST: usize = 2000;

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A container was given a share.
    LeaseTaken,
    /// Its first process is known.
    LeaseBound,
    /// Its share is free again.
    LeaseEnded,
    /// A process that a deleted container had left was ended.
    LeftEnded,
    /// A process that a deleted container has left is not ended.
    LeftRunning,
    /// A container has a share, with something that its owner should know.
    Warned,
    /// A container was refused.
    Refused,
    /// The guard found an offence.
    Guard,
    /// An MPS daemon serves for the first time.
    MpsStarted,
    /// An MPS daemon serves again under containers that ran before it.
    MpsRestarted,
    /// An MPS daemon has ended or does not answer.
    MpsFailed,
    /// An MPS daemon was ended, because no lease needs it.
    MpsStopped,
    /// A MIG instance was created for a container.
    MigCreated,
    /// That instance was destroyed.
    MigDestroyed,
    /// The MIG layout of GPUs was changed.
    MigChanged,
    /// A device takes no new lease.
    Drained,
    /// It takes leases again.
    Undrained,
    /// A GPU is left out: it is lost, or does not answer as it should.
    GpuLost,
    /// It is served again.
    GpuBack,
    /// The ledger was lost and rebuilt.
    LedgerRebuilt,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::LeaseTaken,
        Self::LeaseBound,
        Self::LeaseEnded,
        Self::LeftEnded,
        Self::LeftRunning,
        Self::Warned,
        Self::Refused,
        Self::Guard,
        Self::MpsStarted,
        Self::MpsRestarted,
        Self::MpsFailed,
        Self::MpsStopped,
        Self::MigCreated,
        Self::MigDestroyed,
        Self::MigChanged,
        Self::Drained,
        Self::Undrained,
        Self::GpuLost,
        Self::GpuBack,
        Self::LedgerRebuilt,
    ];

    /// The word in JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::LeaseTaken => "lease-taken",
            Self::LeaseBound => "lease-bound",
            Self::LeaseEnded => "lease-ended",
            Self::LeftEnded => "left-ended",
            Self::LeftRunning => "left-running",
            Self::Warned => "warned",
            Self::Refused => "refused",
            Self::Guard => "guard",
            Self::MpsStarted => "mps-started",
            Self::MpsRestarted => "mps-restarted",
            Self::MpsFailed => "mps-failed",
            Self::MpsStopped => "mps-stopped",
            Self::MigCreated => "mig-created",
            Self::MigDestroyed => "mig-destroyed",
            Self::MigChanged => "mig-changed",
            Self::Drained => "drained",
            Self::Undrained => "undrained",
            Self::GpuLost => "gpu-lost",
            Self::GpuBack => "gpu-back",
            Self::LedgerRebuilt => "ledger-rebuilt",
        }
    }
}

/// One event. Its texts are not escaped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When: RFC 3339 in UTC, with milliseconds.
    pub time: String,
    /// The same in milliseconds since boot, which no clock that is set changes.
    pub uptime_ms: u64,
    /// Its kind.
    pub kind: Kind,
    /// The uid of the container's engine; root's where there is no container.
    pub uid: u32,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// The lease.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lease: String,
    /// UUIDs of the devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// The MPS daemon's key.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub daemon: String,
    /// A duration in milliseconds. For a lease that was taken or bound: from the start of the process that takes it to its
    /// taking, or to the start of the container's first process. For one that ended: since it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// Of a refusal: the word for it, as in JSON errors (docs/explain.md). Of an action of the guard: the offence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The guard's action: `report`, `terminate` or `container`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub action: String,
    /// The event in one line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Event {
    /// One that happens now.
    #[must_use]
    pub fn now(kind: Kind) -> Self {
        Self {
            time: timestamp_milliseconds(SystemTime::now()),
            uptime_ms: uptime_milliseconds(),
            kind,
            uid: 0,
            container_id: String::new(),
            lease: String::new(),
            devices: Vec::new(),
            daemon: String::new(),
            took_ms: None,
            reason: String::new(),
            action: String::new(),
            text: String::new(),
        }
    }

    /// As one line of JSON, with texts that are not too long.
    fn line(&self) -> String {
        let mut event = self.clone();
        for text in [&mut event.text, &mut event.container_id] {
            let end = (0..=LONGEST.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
        }
        event.devices.truncate(64);
        // Serializing fails only for maps whose keys are not strings.
        serde_json::to_string(&event).unwrap_or_default()
    }
}

/// Emits `events` of the ledger in `state_dir`. Failures are ignored: no container fails for them.
pub fn emit(state_dir: &Path, events: &[Event]) {
    if events.is_empty() {
        return;
    }
    let lines: Vec<String> = events.iter().map(Event::line).collect();
    let unsent = if journal::has_journal(state_dir) { journal::send(&lines, events) } else { &lines[..] };
    if let Err(error) = ring::append(state_dir, unsent) {
        tracing::debug!("cannot write events: {error}");
    }
}
