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
mod pod_annotations;
mod rootfs;

#[cfg(feature = "fixtures")]
pub use apply_edits::edit_within;
pub(crate) use apply_edits::undo_edits;
pub use apply_edits::{EditsShown, edits_shown};
pub use apply_edits::{SpecError, annotations, edit, edit_environment};
pub(crate) use conflict::check_mount_namespace;
pub(crate) use conflict::environment_value;
pub use conflict::{Conflict, conflict};
pub use container_root::KEEP_GROUPS;
pub(crate) use container_root::check_node_modes;
pub(crate) use image::check_uncovered;
pub(crate) use image::make_mount_points;
pub use image::{check_mps_directories, check_no_other_daemon, inspect};
pub use image_error::ImageError;
pub use json_file::{FileError, JsonFile, mentions_sublet};
pub use live::systemctl;
pub use live::{Live, NamespaceError, apply, lost_node};
pub use mount_points::clear;
pub(crate) use mount_points::{cleanup_mount_points, clear_volume, filter_missing};
pub use pod_annotations::own_annotations;
pub use rootfs::Tree;

#[cfg(test)]
mod tests;
