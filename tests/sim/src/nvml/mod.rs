//! NVML's stand-in.

pub mod profiles;
