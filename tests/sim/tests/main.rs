//! The simulated driver: NVML as from C, MIG, MPS and the programs of it. A module is a job's unit (tests/jobs): each runs in
//! a process of its own.
#![allow(unsafe_code, reason = "the C ABI is what is tested")]

mod c_abi;
mod checkpoint;
mod driver;
mod driver_mig;
mod driver_mps;
mod libcuda;
mod mig_cuda;
mod mig_shared;
mod mig_smi;
mod mps_ends;
mod mps_two;
mod rig;
mod simulated;
