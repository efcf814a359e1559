//! Questions that have no answer.

use sublet_core::text::safe;

use super::MOST;
use crate::bench::ResultError;

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    /// The driver has no GPU.
    #[error("this host has no GPU")]
    NoGpu,
    /// `--gpu` names none.
    #[error("--gpu {}: {why}", safe(asked))]
    NotThatGpu {
        /// What was named.
        asked: String,
        /// Why it is none.
        why: String,
    },
    /// A number of tenants that is none.
    #[error("--tenants {0}: a number from 1 to {MOST}")]
    Tenants(u32),
    /// More memory than a GPU has.
    #[error("--memory {asked}: the largest GPU in question has {has}, so not even one tenant gets that much")]
    Memory {
        /// What was asked for.
        asked: String,
        /// What there is.
        has: String,
    },
    /// A target that is none.
    #[error("--p99 0s: a time over 0, such as 20ms")]
    P99,
    /// The result has several loads, or not this one.
    #[error("the result has the loads {}: choose one with --load", .0.join(", "))]
    Load(Vec<String>),
    /// `--load` without a result.
    #[error("--load chooses among the loads of a result: give one with --from")]
    LoadOfNothing,
    /// The result cannot be used.
    #[error(transparent)]
    Result(#[from] ResultError),
}
