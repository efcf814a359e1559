//! What we must know of a container's root filesystem, read without ever leaving it (openat2).

use std::path::Path;

use serde_json::Value;

use crate::config::Config;
use crate::grant::Image;

/// Why this image cannot be served; names the path.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {}

/// Looks into `rootfs`.
///
/// # Errors
/// A mount point of ours is a directory where a file must be, or cannot be created on a read-only root.
pub fn inspect(_spec: &Value, _rootfs: &Path, _config: &Config) -> Result<Image, ImageError> {
    todo!()
}
