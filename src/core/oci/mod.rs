//! Carrying out a [`Grant`](crate::grant::Grant): on a bundle's config.json, losing nothing of it, or on
//! a live container's namespaces.

pub mod cdi;
mod conflict;
mod covered;
pub mod engine;
mod file;
pub mod hooks;
mod image;
mod json;
mod live;
pub mod mapped;
mod mount_points;
pub mod podman_storage;
mod spec;
mod tree;
mod undo;

pub use conflict::{Conflict, conflict, own_mount_namespace};
pub use covered::uncovered;
pub use file::{FileError, JsonFile, mentions_sublet};
pub use image::{ImageError, inspect};
pub use live::systemctl;
pub use live::{Live, NamespaceError, apply};
pub use mount_points::{cleanup_mount_points, clear, clear_volume};
#[cfg(fuzzing)]
pub use spec::edit_within;
pub use spec::in_user_namespace;
pub use spec::{SpecError, annotations, edit, edit_environment, environment_value};
pub use undo::undo;

#[cfg(test)]
mod tests;
