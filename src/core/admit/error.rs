//! Every reason not to start a container, each one line for whoever started it.

use crate::broker::client::BrokerError;
use crate::broker::policy_limits::PolicyLimitError;
use crate::inventory::{InventoryError, NodeError};
use crate::ledger::{Doubled, LeaseId, LedgerError, NotBound};
use crate::mps::MpsError;
use crate::oci::cdi::CdiError;
use crate::oci::podman_storage;
use crate::oci::{Conflict, ImageError, NamespaceError, SpecError};
use crate::place::Refusal;
use crate::process::sublet::SubletError;
use crate::request::RequestError;
use crate::text::safe;

/// Why a container is not started, or its lease not ended.
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
    Storage(#[from] podman_storage::Unknown),
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
    Mps(#[from] MpsError),
    #[error(
        "its MPS daemon cannot be had, and without it a process would have the whole GPU without limits: {0} ([mps] \
         exec_without_daemon = \"no-gpu\" starts it without the GPU instead)"
    )]
    NoDaemon(Box<AdmitError>),
    #[error(transparent)]
    PolicyLimit(Box<PolicyLimitError>),
    #[error("your [[policy]] on this host allows devices, and none of them is here: ask root to look at it")]
    NoDeviceAllowed,
    #[error(transparent)]
    Broker(Box<BrokerError>),
    #[error("no lease {0} is held by you, or it has ended: create the container again")]
    NoLease(LeaseId),
    #[error("`sublet serve` knows of no lease of this container's: create the container again")]
    NotHeld,
    #[error("lease {lease} cannot be bound to the container: {why}")]
    Unbound { lease: LeaseId, why: String },
    #[error("{refused}; and no instance can be made for it: {}", why)]
    Unmade { refused: Box<AdmitError>, why: String, temporary: bool },
    #[error("{refused}; a container that is started has one made ([mig] dynamic): {what}")]
    WouldMake { refused: Box<AdmitError>, what: String },
    #[error("the MIG layout changed while a place was looked for: start the container again")]
    LayoutChanged,
    #[error("who asked for the container has ended meanwhile, so it is not created")]
    NoEngine,
    #[error(
        "its runtime's record {} cannot be looked at ({source}), so nobody could tell when it has ended: use another \
         --root, or a shorter id",
        safe(path)
    )]
    Record { path: String, source: std::io::Error },
    #[error("no random lease id: getrandom: {0}")]
    Random(std::io::Error),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(
        "annotation sublet.lease={}: no live lease of this container has that id; sublet writes this \
         annotation itself: remove it",
        safe(id)
    )]
    ForgedLease { id: String },
    #[error(
        "its config.json has the edits for a share of an earlier run, and does not say which they are: put the file \
         back that the container was created with"
    )]
    Edited,
    #[error(transparent)]
    Cdi(Box<CdiError>),
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    #[error(
        "{} does not go with a hook: the limits of the shared MPS server stand in the environment, which is \
         settled by then; leave it out (the container gets a server of its own), or start it through \
         sublet-runtime",
        safe(.0)
    )]
    LateShared(String),
    #[error(
        "sublet.priority=low does not go with a hook: it orders the clients of one MPS server, and through a \
         hook a container has a server of its own; leave it out, or start it through sublet-runtime"
    )]
    LatePriority,
    #[error(
        "its environment has {}, which a hook cannot change and which would lead its processes past their \
         limits: remove it, or start the container through sublet-runtime",
        safe(.0)
    )]
    LateEnvironment(String),
    #[error(
        "its /tmp comes from the host, so its MPS directory cannot be at /tmp/nvidia-mps, and a hook cannot \
         set CUDA_MPS_PIPE_DIRECTORY: give it a /tmp of its own, or start it through sublet-runtime"
    )]
    LateTmp,
    #[error(
        "container {} is deleted but processes in its cgroup still run: lease {lease} is kept until they \
         are gone (`sublet gc` frees it then)",
        safe(container)
    )]
    StillRunning { lease: LeaseId, container: String },
}

impl From<CdiError> for AdmitError {
    fn from(error: CdiError) -> Self {
        Self::Cdi(Box::new(error))
    }
}

impl From<BrokerError> for AdmitError {
    fn from(error: BrokerError) -> Self {
        Self::Broker(Box::new(error))
    }
}

impl AdmitError {
    /// Whether waiting may help.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Refused(refusal) => refusal.temporary,
            Self::Unmade { temporary, .. } => *temporary,
            Self::PolicyLimit(limit) => limit.is_temporary(),
            Self::Broker(broker) => matches!(**broker, BrokerError::Refused { temporary: true, .. }),
            Self::Inventory(_) | Self::Own(_) | Self::StillRunning { .. } => true,
            _ => false,
        }
    }
}

impl From<RequestError> for AdmitError {
    fn from(error: RequestError) -> Self {
        Self::Request(Box::new(error))
    }
}
