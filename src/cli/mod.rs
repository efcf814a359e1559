//! The `sublet` command: one file a command.
