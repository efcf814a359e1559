//! The CDI specification that `sublet cdi generate` writes, with named shares as devices. [`sublet_core::oci::cdi`] handles
//! containers that ask for one.

mod file;
mod list;
mod spec;

pub(crate) use file::keep;
pub use file::{FileError, State, remove, state, write};
pub use list::{Listing, Named, Without, list};
pub use spec::render;
