//! Suspending: `cuCheckpointProcess…` of cuda.h, which takes a process's GPU memory into host memory and back.
//!
//! As in the real driver, a thread of the process itself does it, so that the process's device nodes, device cgroup and
//! memory decide. Another process reaches it through /proc ([`door`]), adds what only the host sees ([`Ask`]), and waits
//! for the answer ([`calls`]). [`rules`] alone says what is answered and what becomes of the process.
//!
//! Tests have three files below the driver's root:
//! - `sim/fail` and `sim/trace` count and record these calls, too (`nvml::faults`). The codes are those of `CUresult`; a
//!   call that fails with 999, `CUDA_ERROR_UNKNOWN`, leaves the process in the state `FAILED`, and `hang` in place of a
//!   code is a call that never returns.
//! - `sim/checkpoint-pace`: the times of the calls, in percent of those that were measured.

pub mod calls;
pub(crate) mod door;
pub mod rules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::nvml::Answer;
use rules::State;

/// The name of the thread that answers, which is what CUDA calls the process's restore thread.
pub(crate) const THREAD: &str = "cuda-restore";

/// A function of cuda.h.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    /// `cuCheckpointProcessGetState`.
    GetState,
    /// `cuCheckpointProcessLock`.
    Lock,
    /// `cuCheckpointProcessCheckpoint`.
    Checkpoint,
    /// `cuCheckpointProcessRestore`, with pairs of an old and a new GPU's UUID or with none.
    Restore(Vec<(String, String)>),
    /// `cuCheckpointProcessUnlock`.
    Unlock,
    /// None: what follows a call that a test lets fail for good.
    Fail,
}

/// A call for a process, and what only the caller's side of a container sees.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ask {
    pub call: Call,
    /// MiB that all contexts have, by device minor.
    pub used_mib: BTreeMap<u32, u64>,
    /// MiB that the process's cgroups leave it. `None`: no limit.
    pub host_mib: Option<u64>,
    /// Percent of the measured times.
    pub pace: u64,
}

/// The answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Reply {
    pub answer: Answer,
    pub state: State,
    /// Whether the OOM killer comes.
    pub killed: bool,
}

/// What a process's driver keeps for its suspension.
#[derive(Debug, Default)]
pub(crate) struct Suspension {
    pub state: State,
    /// Whether it has managed memory.
    pub managed: bool,
    /// Whether it copies between its GPUs.
    pub peers: bool,
    /// The file that stands for memory that it has in common with another process by CUDA IPC.
    pub shared: Option<PathBuf>,
    /// The beginning of its memory on the first GPU. Empty while that is in host memory.
    pub content: Vec<u8>,
    /// Its memory on the GPUs, while that is in host memory, and how much of it is the content.
    host: Vec<u8>,
    copied: usize,
    /// Device minors of all GPUs on which it ever had a context when it was suspended.
    known: BTreeSet<u32>,
    /// UUIDs of the GPUs whose nodes it could open when it was suspended, in the host's order.
    opened: Vec<String>,
    /// What every further restore answers, since one failed.
    lost: Option<u32>,
}
