//! Why the ledger could not be read or changed.

use std::io;
use std::path::Path;

use super::SCHEMA;
use crate::text::safe_path;

/// Why the ledger could not be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The state directory cannot be used.
    #[error("state directory {path}: {why}; run as root, or set state_dir in the configuration")]
    Directory {
        /// The directory.
        path: String,
        /// Its fault.
        why: String,
    },
    /// Another process holds the lock for too long, or too many take it in turns.
    #[error(
        "the ledger lock {path} was not free for {seconds} s; `fuser -v {path}` shows which process holds it"
    )]
    Locked {
        /// The lock file.
        path: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// A system call failed.
    #[error(
        "{path} cannot be {verb}: {source}; run as root, or set state_dir to a directory that can be written"
    )]
    Io {
        /// `read`, `locked` or `written`.
        verb: &'static str,
        /// The file.
        path: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Its process ids are of other namespaces than this process's.
    #[error(
        "the ledger's process ids belong to {theirs}, but this process is in {ours}, where running \
         containers seem to have ended, so nothing was changed; run the command on the host (in a \
         container: --pid=host), or where the ledger's containers run; if nothing runs there any more, \
         `sublet gc --rebuild` on the host makes the ledger anew from what runs"
    )]
    Elsewhere {
        /// The ledger's namespaces.
        theirs: String,
        /// This process's namespaces.
        ours: String,
    },
    /// This process's namespaces cannot be determined.
    #[error(
        "sublet cannot find out in which PID namespace it runs ({0}), so nothing was changed: is \
         /proc mounted, and does it belong to this namespace?"
    )]
    NoNamespaces(#[source] io::Error),
    /// It lacks the content that a ledger in this directory had since boot: that one was unmounted, emptied or replaced.
    #[error(
        "the ledger in the state directory {path} is not that of {owner}: the directory was emptied or replaced, or a file \
         system was mounted or unmounted there (`findmnt -T {path}`), so nothing was changed: put or mount the former one \
         there again, and sublet goes on; if it is lost for ever, `sublet gc --rebuild` makes the ledger anew from what runs"
    )]
    Unmounted {
        /// The state directory.
        path: String,
        /// A container, an MPS daemon, or their leftovers.
        owner: String,
    },
    /// Another file system has taken the place of the one with the ledger while this process worked.
    #[error(
        "a file system was mounted or unmounted at the state directory {0}, or the directory was removed, while this \
         command ran, so nothing was changed; run it again"
    )]
    Exchanged(String),
    /// A newer version of sublet wrote it. Nothing is changed.
    #[error(
        "ledger {path} was written by a newer version of sublet: its schema is {found}, this version reads {SCHEMA}; \
         nothing was changed: install the newer version again (docs/packaging.md, \"Upgrades\", says how to go back)"
    )]
    Newer {
        /// The file.
        path: String,
        /// Its schema.
        found: String,
    },
    /// Its content is not a ledger.
    #[error("ledger {path} cannot be used: {why}; `sublet gc` rebuilds it from the containers that run")]
    Corrupt {
        /// The file.
        path: String,
        /// Its fault.
        why: String,
    },
}

impl LedgerError {
    /// Whether its process ids are not valid here, so that the ledger can be shown but not changed.
    pub const fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Elsewhere { .. } | Self::NoNamespaces(_))
    }
}

pub(super) fn failed(verb: &'static str, path: &Path, source: io::Error) -> LedgerError {
    LedgerError::Io { verb, path: safe_path(path), source }
}
