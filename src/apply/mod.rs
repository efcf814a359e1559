//! Carrying out a [`Grant`](crate::grant::Grant): on a bundle's config.json, losing nothing of it, or on
//! a live container's namespaces.

mod conflict;
mod file;
mod image;
mod json;
mod mount_points;
mod namespace;
mod spec;
mod tree;

pub use conflict::{Conflict, conflict};
pub use file::{FileError, JsonFile};
pub use image::{ImageError, inspect};
pub use mount_points::cleanup_mount_points;
pub(crate) use namespace::systemctl;
pub use namespace::{Live, NamespaceError, apply};
#[cfg(fuzzing)]
pub use spec::edit_within;
pub(crate) use spec::in_user_namespace;
pub use spec::{SpecError, annotations, edit, edit_environment, environment_value};

#[cfg(test)]
mod tests;
