//! Stacks: the services of a Compose file, or several Quadlet units, and whether all of them would get their shares
//! on this host together.

mod ask;
mod compose;
mod fit;
mod quadlet;
mod resolved_compose;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use sublet_core::text::safe;

pub use compose::read as compose;
pub use fit::{Fitted, NotPlaced, Outcome, fit, most};
pub use quadlet::read as quadlet;
pub(crate) use resolved_compose::drops_annotations;

/// More containers of a stack are a mistake.
const MOST: usize = 1000;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 4 << 20;

/// The containers of a stack, in the order in which they would start.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// One for each container.
    pub services: Vec<Service>,
    /// What the engine calls them together, so that those which run already are not counted twice.
    pub own: Own,
    /// What was not looked at, one line each.
    pub remarks: Vec<String>,
}

/// How containers of a stack that run are recognized by the names that engines have for them.
#[derive(Debug, Default, PartialEq, Eq)]
pub enum Own {
    /// There are none.
    #[default]
    None,
    /// They are part of this Compose project.
    Project(String),
    /// They run in these systemd units.
    Units(Vec<String>),
}

/// One container, as far as its share depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Its name in the file, with a number if there are several of it.
    pub name: String,
    /// All its annotations.
    pub annotations: BTreeMap<String, String>,
    /// Its OCI runtime: a name of Docker's, or a path.
    pub runtime: Option<String>,
    /// Its devices, as the file names them: nodes, and CDI devices.
    pub devices: Vec<String>,
    /// Whether the engine itself is asked for GPUs.
    pub gpus: bool,
    /// Whether it is privileged.
    pub privileged: bool,
    /// Whether annotations alone make it a container of sublet's: Podman's hook needs no runtime.
    pub by_hook: bool,
    /// By what containers.toml knows it, where that file applies: its name and image; `None` if they are not known.
    pub called: Option<(String, String)>,
    /// The version of a Docker Compose that does not pass its annotations on.
    pub annotations_dropped_by: Option<String>,
}

/// Why a stack cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StackError {
    /// A file cannot be read.
    #[error("{} cannot be read: {source}", safe(&path.to_string_lossy()))]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// A line of the file is not understood.
    #[error("{}:{line}: {message}", safe(&path.to_string_lossy()))]
    Wrong { path: PathBuf, line: usize, message: String },
    /// The file as a whole cannot be used.
    #[error("{}: {message}", safe(&path.to_string_lossy()))]
    Unusable { path: PathBuf, message: String },
}

impl StackError {
    fn unusable(path: &Path, message: impl Into<String>) -> Self {
        Self::Unusable { path: path.to_owned(), message: message.into() }
    }
}

/// The text of a file that a user names.
fn text(path: &Path) -> Result<String, StackError> {
    let text = std::fs::File::open(path).and_then(|file| std::io::read_to_string(file.take(LARGEST)));
    text.map_err(|source| StackError::Unreadable { path: path.to_owned(), source })
}
