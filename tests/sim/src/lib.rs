//! The simulated NVIDIA driver: NVML's stand-in (`nvml`, the exported C functions) and what all programs
//! of the simulation share (`layout`: where things lie, what the GPUs are, who holds a context).

pub mod layout;
pub mod mps;
pub mod nvml;
