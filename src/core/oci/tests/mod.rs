//! Tests of the appliers, one file each.

mod apply_edits;
mod conflict;
mod cuda_versions;
mod hidden_mps;
mod image;
mod json_file;
mod mount_points;
mod rootfs;
