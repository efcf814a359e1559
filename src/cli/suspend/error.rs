//! Why a container is not suspended, resumed or moved, each in one line, and the word for it in JSON (docs/explain.md).

use sublet_core::admit::AdmitError;
use sublet_core::ledger::{LedgerError, WrongState};
use sublet_core::place::Refusal;

/// Whose memory is too small where others are copying: it is not for long.
pub(super) const BESIDE_OTHERS: &str = "the host, beside what others copy there now,";

/// Why a container is not suspended, resumed or moved. But for the last four, nothing was changed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's text says what it is")]
pub enum SuspendError {
    #[error(transparent)]
    Admit(#[from] AdmitError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    State(#[from] WrongState),
    #[error("{0}")]
    Cannot(&'static str),
    #[error("driver {version} cannot {what}; why: that needs R{branch} or later")]
    OldDriver { version: String, what: &'static str, branch: u32 },
    #[error("its share does not allow it; fix: start it with sublet.suspend=allow{0}")]
    NotAllowed(&'static str),
    #[error("no process of it uses the GPU, so there is nothing to suspend")]
    NoProcess,
    #[error(
        "it has {count} CUDA processes ({pids}); why: memory that they share with each other would be lost; fix: \
         sublet.suspend=allow-many says that they share none"
    )]
    Processes { count: usize, pids: String },
    #[error("its process {0} is paused or stopped; fix: let it go on first")]
    Paused(i32),
    #[error("another program has its process {pid} ({state}); fix: end that first, as with cuda-checkpoint")]
    Held { pid: i32, state: String },
    #[error(
        "its GPU memory does not fit; why: {} MiB are to be copied, and there are {} MiB of {of} left; fix: free host \
         memory, or start it with a larger limit", .needed >> 20, .left >> 20
    )]
    HostMemory { needed: u64, of: &'static str, left: u64 },
    #[error(
        "it could not come back; why: it has {} MiB of the GPU, of which {} MiB can be booked ([limits] reserve)", .bytes >> 20, .most >> 20
    )]
    TooLarge { bytes: u64, most: u64 },
    #[error(
        "there is no room for it when the container comes back; why: it has {} MiB, {} MiB are in host memory, and {} MiB are \
         booked (sublet.memory)", .bytes >> 20, .own >> 20, .booked >> 20
    )]
    Booked { bytes: u64, own: u64, booked: u64 },
    #[error("cannot find out {0}; fix: `sublet doctor` checks the host")]
    Unknown(String),
    #[error("the driver: {0}")]
    Driver(String),
    #[error("{0}")]
    Gpu(String),
    #[error("it cannot go to {0}")]
    OtherGpu(String),
    #[error(transparent)]
    Refused(#[from] Box<Refusal>),
    #[error("it stays suspended; why: {0}")]
    NoRoom(String),
    #[error("it has ended meanwhile")]
    Ended,
    #[error("it goes on as before; why: {0}")]
    Undone(String),
    #[error("half of it is done, and the next sublet command tries again; why: {0}")]
    Stuck(String),
    #[error("{0}")]
    NewEnded(String),
    #[error("its GPU state was lost; why: {0}; fix: start it again")]
    Lost(String),
}

impl SuspendError {
    /// Whether waiting may help.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Admit(error) => error.is_temporary(),
            Self::State(state) => state.is_temporary(),
            Self::Refused(refusal) => refusal.temporary,
            Self::HostMemory { of, .. } => *of == BESIDE_OTHERS,
            Self::Paused(_) | Self::NoRoom(_) => true,
            _ => false,
        }
    }

    /// The word for it. Of what other steps answer, theirs.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Admit(error) => error.reason(),
            Self::Ledger(_) => "state",
            Self::State(WrongState::NotSuspended) => "not-suspended",
            Self::State(state) if state.is_temporary() => "busy",
            Self::State(WrongState::Suspended) => "suspended",
            Self::State(_) | Self::Ended => "no-lease",
            Self::Cannot(_) => "cannot-suspend",
            Self::OtherGpu(_) => "cannot-move",
            Self::OldDriver { .. } => "driver-too-old",
            Self::NotAllowed(_) => "suspend-not-allowed",
            Self::NoProcess => "no-process",
            Self::Processes { .. } => "several-processes",
            Self::Paused(_) | Self::Held { .. } => "paused",
            Self::HostMemory { .. } => "no-host-memory",
            Self::Refused(refusal) if !refusal.temporary => "never-fits",
            Self::TooLarge { .. } | Self::Booked { .. } | Self::Refused(_) | Self::NoRoom(_) => "no-room",
            Self::Unknown(_) | Self::Driver(_) => "driver",
            Self::Gpu(_) => "bad-usage",
            Self::Undone(_) | Self::NewEnded(_) => "suspend-undone",
            Self::Stuck(_) => "suspend-stuck",
            Self::Lost(_) => "suspend-lost",
        }
    }
}
