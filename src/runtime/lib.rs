//! `sublet-runtime`, the OCI runtime shim, which is the OCI hook by the name `sublet-hook`.

// Layers, the lowest first: a module uses only modules that stand above it here (`make lint`).

pub mod input;

pub mod shim;

pub mod hook;

pub mod dispatch;
