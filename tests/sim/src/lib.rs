//! The simulated NVIDIA driver: a replacement of NVML (`nvml`, the exported C functions), and the code shared by all
//! programs of the simulator (`layout`: files, GPUs, contexts; `checkpoint`: what libcuda does for other processes).

pub mod checkpoint;
pub mod layout;
pub mod mps;
pub mod nvml;
