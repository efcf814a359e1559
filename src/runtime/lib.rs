//! `sublet-runtime`, the OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook.

pub mod called;
pub mod hook;
pub mod shim;
