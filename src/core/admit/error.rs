//! Every reason not to start a container, each in one line for the user, and one word for each kind of refusal, for
//! machines: in JSON errors, events and metrics. docs/explain.md lists the words. Words may be added, and none is ever
//! renamed.

use super::job_share::JobError;
use crate::broker::client::BrokerError;
use crate::broker::policy_limits::PolicyLimitError;
use crate::inventory::{InventoryError, NodeError};
use crate::ledger::{Doubled, LeaseId, LedgerError, NotBound, TooManyUnbound};
use crate::mps::MpsError;
use crate::oci::cdi::CdiError;
use crate::oci::{Conflict, ImageError, NamespaceError, SpecError, container_root};
use crate::place::Refusal;
use crate::process::sublet::SubletError;
use crate::request::RequestError;
use crate::text::{add_fix, add_why, safe};

/// [`AdmitError::NoDaemon`].
const NO_DAEMON: &str = "its MPS daemon is not available, so a process would have no limits";
const WITHOUT_GPU: &str = "[mps] exec_without_daemon = \"no-gpu\" starts the process, without the GPU";

/// The remedy where a hook does not help.
const SHIM: &str = "start the container with sublet-runtime";

/// Why a container is not started, or why its lease is not freed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant wraps the step that failed, and its text is that step's")]
pub enum AdmitError {
    #[error(transparent)]
    Request(Box<RequestError>),
    #[error(transparent)]
    Conflict(#[from] Conflict),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Storage(#[from] container_root::Unknown),
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    #[error(transparent)]
    Own(#[from] SubletError),
    #[error(transparent)]
    Refused(#[from] Box<Refusal>),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Doubled(#[from] Doubled),
    #[error(transparent)]
    NotBound(#[from] NotBound),
    #[error(transparent)]
    TooManyUnbound(#[from] TooManyUnbound),
    #[error(transparent)]
    Mps(#[from] MpsError),
    #[error("{}", add_fix(&add_why(NO_DAEMON, &.0.to_string()), WITHOUT_GPU))]
    NoDaemon(Box<AdmitError>),
    #[error(transparent)]
    PolicyLimit(#[from] PolicyLimitError),
    #[error(transparent)]
    Job(#[from] JobError),
    #[error("your policy allows only devices that this host does not have; fix: ask root to correct it")]
    NoDeviceAllowed,
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error("you hold no lease {0}, or it has ended; fix: recreate the container")]
    NoLease(LeaseId),
    #[error("`sublet serve` has no lease of this container; fix: recreate the container")]
    NotHeld,
    #[error("lease {lease} cannot be bound to the container; why: {why}")]
    Unbound { lease: LeaseId, why: String },
    #[error("{}", add_why(&.refused.to_string(), &format!("no MIG instance can be created for it: {why}")))]
    Unmade { refused: Box<AdmitError>, why: String, temporary: bool },
    #[error("{}", add_why(&.refused.to_string(), &format!("when the container starts, a MIG instance is created for it ([mig] dynamic): {what}")))]
    WouldMake { refused: Box<AdmitError>, what: String },
    #[error("the MIG layout changed while a device was being chosen; fix: start the container again")]
    LayoutChanged,
    #[error("the engine that asked for the container has ended, so it is not created")]
    NoEngine,
    #[error(
        "the runtime's record {} cannot be read: {source}; fix: use another --root, or a shorter id",
        safe(path)
    )]
    Record { path: String, source: std::io::Error },
    #[error("cannot generate a lease id: getrandom: {0}")]
    Random(std::io::Error),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("sublet.lease={}: this container has no live lease with that id; fix: remove it", safe(id))]
    ForgedLease { id: String },
    #[error("its config.json has sublet's edits of an earlier run; fix: restore the file as it was created")]
    Edited,
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    #[error("sublet.isolation=shared does not work with a hook; fix: leave it out, or {SHIM}")]
    LateShared,
    #[error("sublet.priority=low does not work with a hook; fix: leave it out, or {SHIM}")]
    LatePriority,
    #[error("its environment has {}, which a hook cannot remove; fix: remove it, or {SHIM}", safe(.0))]
    LateEnvironment(String),
    #[error("its /tmp is the host's, shared or read-only; fix: give the container its own /tmp, or {SHIM}")]
    LateTmp,
    #[error("its share has default_directory = false, which does not work with a hook; fix: {SHIM}")]
    NeedsShim,
    #[error(
        "container {}: {left}; fix: `sublet gc` frees lease {lease} when nothing of it runs",
        safe(container)
    )]
    StillRunning { lease: LeaseId, container: String, left: String },
}

impl AdmitError {
    /// The cgroup of the container's first process cannot be read.
    pub(super) fn no_cgroup(lease: &LeaseId, source: &std::io::Error) -> Self {
        let why = format!("the cgroup of its first process cannot be read: {source}");
        Self::Unbound { lease: lease.clone(), why }
    }

    /// Whether waiting may help.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.temporary,
            Self::Unmade { temporary, .. } => *temporary,
            Self::PolicyLimit(limit) => limit.is_temporary(),
            Self::Job(job) => job.is_temporary(),
            Self::Broker(broker) => matches!(broker, BrokerError::Refused { temporary: true, .. }),
            Self::Inventory(_) | Self::Own(_) | Self::StillRunning { .. } | Self::TooManyUnbound(_) => true,
            _ => false,
        }
    }

    /// Whether it depends on the last report of the driver, so that a refresh may change it.
    pub fn wants_refresh(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.refresh_first,
            Self::Unmade { refused, .. } => refused.wants_refresh(),
            _ => false,
        }
    }

    /// The refusal, with the reason why nobody is suspended for it.
    #[must_use]
    pub fn without_room(mut self, why: &str) -> Self {
        if let Self::Refused(refusal) = &mut self {
            refusal.message = add_why(&refusal.message, &format!("no room is made for it: {why}"));
        }
        self
    }

    /// The refusal of a start for which `sublet serve` would make room, with what helps.
    #[must_use]
    pub fn with_room_by_service(mut self, serves: bool) -> Self {
        if let Self::Refused(refusal) = &mut self {
            let runs =
                if serves { "start it: `sublet serve`" } else { "it would fit if `sublet serve` ran, which" };
            refusal.message = add_fix(&refusal.message, &format!("{runs} suspends others for it"));
        }
        self
    }

    /// Each device that could have served it, and why it does not.
    pub fn candidates(&self) -> &[String] {
        match self {
            Self::Refused(refusal) => &refusal.candidates,
            Self::Unmade { refused, .. } | Self::WouldMake { refused, .. } => refused.candidates(),
            Self::Broker(BrokerError::Refused { candidates, .. }) => candidates,
            _ => &[],
        }
    }

    /// The word for the refusal.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) if refusal.left_out => "gpu-lost",
            Self::Refused(refusal) if refusal.temporary => "no-room",
            Self::Refused(_) => "never-fits",
            Self::Unmade { temporary: true, .. } | Self::Job(JobError::NoPlace { .. }) => "no-room",
            Self::Unmade { .. } => "no-mig-device",
            Self::WouldMake { .. } => "mig-device-would-be-made",
            Self::Request(_)
            | Self::LateShared
            | Self::LatePriority
            | Self::LateEnvironment(_)
            | Self::LateTmp
            | Self::NeedsShim => "bad-request",
            Self::Conflict(_) => "conflict",
            Self::Image(_) | Self::Storage(_) => "bad-image",
            Self::Spec(_)
            | Self::ForgedLease { .. }
            | Self::Edited
            | Self::Namespace(_)
            | Self::Record { .. } => "bad-bundle",
            Self::Cdi(_) => "cdi",
            Self::Inventory(error) => of_inventory(error),
            Self::Own(_) => "driver",
            Self::Mps(error) => of_mps(error),
            Self::NoDaemon(_) => "mps",
            Self::Node(_) => "device-nodes",
            Self::Job(_) => "job",
            Self::PolicyLimit(_) | Self::TooManyUnbound(_) | Self::NoDeviceAllowed => "policy",
            Self::Broker(error) => of_broker(error),
            Self::NoLease(_) | Self::NotHeld | Self::NotBound(_) | Self::Unbound { .. } => "no-lease",
            Self::Doubled(_) | Self::StillRunning { .. } | Self::LayoutChanged => "busy",
            Self::NoEngine => "engine-gone",
            Self::Ledger(_) | Self::Random(_) => "state",
        }
    }
}

impl From<RequestError> for AdmitError {
    fn from(error: RequestError) -> Self {
        Self::Request(Box::new(error))
    }
}

/// The word for an inventory that cannot be had.
pub fn of_inventory(error: &InventoryError) -> &'static str {
    match error {
        InventoryError::NoDriver { .. } => "no-driver",
        InventoryError::FellOffTheBus { .. } => "gpu-lost",
        _ if error.wants_refresh() => "no-inventory",
        _ => "state",
    }
}

/// The word for an MPS daemon that does not serve.
pub fn of_mps(error: &MpsError) -> &'static str {
    match error {
        MpsError::Inventory(error) => of_inventory(error),
        MpsError::Ledger(_) => "state",
        _ => "mps",
    }
}

/// The word for `sublet serve`. Its refusals have no word of their own on the way here: the text says why.
pub fn of_broker(error: &BrokerError) -> &'static str {
    match error {
        BrokerError::Refused { .. } => "refused-by-service",
        _ => "no-service",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::in_lines;

    #[test]
    fn a_message_with_another_in_it_has_its_reasons_and_ways_out_in_one_line_each() {
        let (device, key) = ("GPU-0".to_owned(), "GPU-0".to_owned());
        let silent = MpsError::Silent { device, key, pid: 7, kept_by: vec![] };
        let stopped = AdmitError::NoDaemon(Box::new(silent.into())).to_string();
        assert_eq!(
            in_lines(&stopped).lines().collect::<Vec<_>>(),
            [
                "its MPS daemon is not available, so a process would have no limits",
                "why: the MPS daemon of GPU-0 (pid 7) does not answer",
                "fix: if it is stopped, `kill -CONT 7` continues it; or `sublet mps stop --force GPU-0` ends it and the \
                 GPU work of its clients; or [mps] exec_without_daemon = \"no-gpu\" starts the process, without the GPU"
            ]
        );
        let why = "refused: GPU 0 is drained; fix: `sublet undrain 0` ends that (root)".to_owned();
        let taken = JobError::NoPlace { job: 9, why, whole: false, temporary: false }.to_string();
        assert_eq!(
            in_lines(&taken).lines().collect::<Vec<_>>(),
            [
                "refused: GPU 0 is drained",
                "why: Slurm gave it to job 9 all the same",
                "fix: `sublet undrain 0` ends that (root); or submit it again when there is room, or for another node \
                 with --exclude"
            ]
        );
    }
}
