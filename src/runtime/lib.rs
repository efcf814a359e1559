//! `sublet-runtime`, the OCI runtime shim, which is the OCI hook by the name `sublet-hook`.

pub mod called;
pub mod hook;
pub mod shim;
