//! The CDI specification that `sublet cdi generate` writes, with named shares as devices. [`sublet_core::oci::cdi`]
//! handles containers that ask for one.

mod share_devices;
mod spec_file;

pub use share_devices::{Listing, Named, Without, list};
pub(crate) use spec_file::keep;
pub use spec_file::{FileError, State, remove, render, state, write};
