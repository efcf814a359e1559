//! What a CUDA program sees.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::libcuda::{Driver, MPS_ENABLED, MULTIPROCESSOR_COUNT};

/// The first device, as a context on it sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Seen {
    /// How many devices CUDA lists.
    pub devices: usize,
    /// Streaming multiprocessors that the context may use.
    pub sms: i32,
    /// The memory that can still be allocated.
    pub memory_free_bytes: u64,
    /// The device's memory.
    pub memory_total_bytes: u64,
    /// Whether the context is a client of an MPS server.
    pub mps: bool,
}

/// Creates a context on device 0 and queries it. The context exists until the process ends.
///
/// # Errors
/// There is no libcuda, or it answered with an error; one line.
pub fn look() -> Result<Seen, String> {
    let driver = Driver::load()?;
    let devices = driver.count()?;
    let device = driver.context()?;
    let (memory_free_bytes, memory_total_bytes) = driver.memory()?;
    Ok(Seen {
        devices,
        sms: driver.attribute(MULTIPROCESSOR_COUNT, device)?,
        memory_free_bytes,
        memory_total_bytes,
        mps: driver.attribute(MPS_ENABLED, device)? != 0,
    })
}
