//! Tests of the appliers, one file each.

mod conflict;
mod covered;
mod file;
mod image;
mod mount_points;
mod spec;
