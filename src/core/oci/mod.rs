//! Applies a [`Grant`](crate::grant::Grant) to a bundle's config.json, without losing anything in it, or to a live
//! container's namespaces.

mod apply_edits;
pub mod cdi;
mod conflict;
pub mod container_root;
pub mod containers_by_name;
pub mod hooks;
mod image;
mod json_file;
mod live;
mod rootfs;

use std::io;
use std::path::{Path, PathBuf};

use crate::grant::{MPS_DEFAULT_DIR, MPS_DIR};
use crate::text::{safe, safe_path};

#[cfg(feature = "fixtures")]
pub use apply_edits::edit_within;
pub(crate) use apply_edits::undo_edits;
pub use apply_edits::{EditsShown, SpecError, annotations, edit, edit_environment, edits_shown};
pub use conflict::{Conflict, conflict};
pub(crate) use conflict::{check_mount_namespace, entries, environment_value, text};
pub(crate) use container_root::check_node_modes;
pub use container_root::{KEEP_GROUPS, own_annotations};
pub use image::{check_mps_directories, check_no_other_daemon, inspect};
pub(crate) use image::{check_uncovered, make_mount_points};
pub use json_file::{FileError, JsonFile, mentions_sublet};
pub use live::{Live, NamespaceError, apply, lost_node, set_gpus, systemctl};
pub use rootfs::{Tree, clear};
pub(crate) use rootfs::{cleanup_mount_points, clear_volume, filter_missing};

/// Why this image cannot be served; names the path.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The rootfs cannot be looked into.
    #[error("cannot read the container's root filesystem {}: {}", safe_path(.0), .1)]
    Rootfs(PathBuf, #[source] io::Error),
    /// A file cannot be mounted over a directory.
    #[error(
        "the image has a directory at {}, where a driver's file is mounted; fix: remove it, or leave out its \
         capability (sublet.capabilities)",
        safe_path(.0)
    )]
    Directory(PathBuf),
    /// The MPS directory cannot be mounted over a file.
    #[error(
        "the image has a file at {}, where the MPS directory is mounted; fix: remove it{}",
        safe_path(.0),
        advise_tmp([.0])
    )]
    NotDirectory(PathBuf),
    /// A mount would show on the host.
    #[error(
        "{} may be shared with the host; why: it is on a volume that is, or behind a link that may lead to one; \
         fix: use rslave or rprivate for that volume",
        safe_path(.0)
    )]
    Shared(PathBuf),
    /// The kernel cannot follow the path: a loop of links, a file where a directory must be.
    #[error(
        "the image's {} cannot be a mount point for sublet: {}{}",
        safe_path(.0),
        .1,
        if crate::fs::is_of_the_image(.1) { "; fix: remove it from the image" } else { ": the fault is this host's, not the image's" }
    )]
    Unusable(PathBuf, #[source] io::Error),
    /// One mount would lie in another that is a directory of the host's.
    #[error(
        "a link in the image puts {} in or below the mount at {}; fix: remove the link{}",
        safe_path(.0),
        safe_path(.1),
        advise_tmp([.0, .1])
    )]
    Nested(PathBuf, PathBuf),
    /// Processes would not find their MPS server and run without limits.
    #[error(
        "{} hides the MPS directory {} from the container; fix: remove that {}{}",
        safe_path(by),
        safe_path(directory),
        if *mask { "mask (`--security-opt mask=…`, linux.maskedPaths)" } else { "mount" },
        advise_tmp([directory])
    )]
    Covered {
        /// The MPS directory, in the container.
        directory: PathBuf,
        /// The mask or mount.
        by: PathBuf,
        /// Masked, not mounted.
        mask: bool,
    },
    /// Processes would not reach their MPS server and run without limits.
    #[error(
        "SELinux does not let {} connect to its MPS daemon; fix: leave out `--security-opt label=type:…`, or \
         allow that type what sublet-selinux allows container_t",
        safe(.0)
    )]
    Barred(String),
    /// A mount point that neither the container's root nor sublet may create.
    #[error(
        "the root of the container's user namespace does not own the directory of {}; why: sublet may not create \
         it for it: {}; fix: create it in the image, empty",
        safe_path(.0),
        .1
    )]
    Unmade(PathBuf, #[source] io::Error),
    /// Its processes would be clients of a daemon that is not the share's.
    #[error("a volume brings another MPS daemon's directory to {MPS_DEFAULT_DIR}; fix: leave it out")]
    OtherDaemon,
    /// Mount points of files that the runtime cannot create.
    #[error(
        "its root filesystem or a volume is read-only, without mount points; fix: make it writable, or create \
         these as empty files (with MPS also the directories {MPS_DIR} and {MPS_DEFAULT_DIR}): {}",
        listed(.0)
    )]
    ReadOnly(Vec<PathBuf>),
    /// Mount points of the MPS directories that the runtime cannot create.
    #[error(
        "its root filesystem or a volume is read-only, without mount points for MPS; fix: make it writable, or create: {}{}",
        listed(.0),
        advise_tmp(.0)
    )]
    ReadOnlyMps(Vec<PathBuf>),
}

/// Further advice if CUDA's default directory is among `paths`.
fn advise_tmp<'p>(paths: impl IntoIterator<Item = &'p PathBuf>) -> &'static str {
    if paths.into_iter().any(|path| path == Path::new(MPS_DEFAULT_DIR)) {
        " (a named share with `default_directory = false` has nothing at /tmp/nvidia-mps)"
    } else {
        ""
    }
}

fn listed(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| safe_path(path)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
