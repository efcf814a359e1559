//! The OCI runtime shim: edits what `create`, `run` and `exec` are given, then becomes runc or crun.
