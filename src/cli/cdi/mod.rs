//! The CDI specification that `sublet cdi generate` writes, with named shares as devices. [`sublet_core::cdi`] handles
//! containers that ask for one.

mod file;
mod list;
mod spec;

pub use sublet_core::cdi::*;

pub use file::{FileError, State, keep, remove, state, write};
pub use list::{Listing, Named, Without, list};
pub use spec::render;
