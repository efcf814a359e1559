//! The CDI specification that `sublet cdi generate` writes: our named shares as devices. What becomes of a container that
//! asks for one is [`sublet_core::oci::cdi`].

mod file;
mod list;
mod spec;

pub(crate) use file::keep;
pub use file::{FileError, State, remove, state, write};
pub use list::{Listing, Named, Without, list};
pub use spec::render;
