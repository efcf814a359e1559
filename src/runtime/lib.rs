//! `sublet-runtime`, the OCI runtime shim. Called by the name `sublet-hook`, it is the OCI hook.

// Layers, the lowest first: a module uses only modules that stand above it here (`make lint`).

pub mod shim;

pub mod hook;
