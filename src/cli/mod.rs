//! The `sublet` command: one file a command.

pub mod refresh;
