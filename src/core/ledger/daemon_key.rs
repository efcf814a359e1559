//! The name of an MPS control daemon, and its directories.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A daemon's name: the device's UUID (shared) or the lease id (dedicated).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DaemonKey(pub String);

impl DaemonKey {
    /// The daemon's own directory. Other users can only pass through it to `public/`.
    #[must_use]
    pub fn dir(&self, state_dir: &Path) -> PathBuf {
        state_dir.join("mps").join(&self.0)
    }

    /// The directory that containers see. It holds a hard link to `control` and nothing else.
    #[must_use]
    pub fn public(&self, state_dir: &Path) -> PathBuf {
        self.dir(state_dir).join("public")
    }
}

impl std::fmt::Display for DaemonKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.0)
    }
}
