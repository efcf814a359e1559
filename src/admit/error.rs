//! Every reason not to start a container, each one line for whoever started it.

use crate::apply::{Conflict, ImageError, NamespaceError, SpecError};
use crate::inventory::{InventoryError, NodeError};
use crate::ledger::{Doubled, LeaseId, LedgerError, NotBound};
use crate::mps::MpsError;
use crate::own::OwnError;
use crate::place::Refusal;
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
    Spec(#[from] SpecError),
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    #[error(transparent)]
    Own(#[from] OwnError),
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
    #[error("no random lease id: /dev/urandom: {0}")]
    Random(std::io::Error),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(
        "annotation sublet.lease={}: no live lease of this container has that id; sublet writes this \
         annotation itself: remove it",
        safe(id)
    )]
    ForgedLease { id: String },
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

impl From<RequestError> for AdmitError {
    fn from(error: RequestError) -> Self {
        Self::Request(Box::new(error))
    }
}
