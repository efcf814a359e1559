//! Applies a [`Grant`](crate::grant::Grant) to a bundle's config.json, without losing anything in it, or to a live
//! container's namespaces.

mod apply_edits;
pub mod cdi;
mod conflict;
pub mod container_root;
pub mod containers_by_name;
pub mod hooks;
mod image;
mod image_error;
mod json_file;
mod live;
mod mount_points;
mod rootfs;

#[cfg(feature = "fixtures")]
pub use apply_edits::edit_within;
pub(crate) use apply_edits::undo_edits;
pub use apply_edits::{EditsShown, SpecError, annotations, edit, edit_environment, edits_shown};
pub use conflict::{Conflict, conflict};
pub(crate) use conflict::{check_mount_namespace, environment_value};
pub use container_root::KEEP_GROUPS;
pub(crate) use container_root::check_node_modes;
pub use containers_by_name::own_annotations;
pub use image::{check_mps_directories, check_no_other_daemon, inspect};
pub(crate) use image::{check_uncovered, make_mount_points};
pub use image_error::ImageError;
pub use json_file::{FileError, JsonFile, mentions_sublet};
pub use live::{Live, NamespaceError, apply, lost_node, systemctl};
pub use mount_points::clear;
pub(crate) use mount_points::{cleanup_mount_points, clear_volume, filter_missing};
pub use rootfs::Tree;

/// `path` in a message.
fn shown(path: &std::path::Path) -> String {
    crate::text::safe(&path.to_string_lossy())
}

#[cfg(test)]
mod tests;
