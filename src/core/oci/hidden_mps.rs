//! Finds mounts and masks that hide a container's MPS directories. A CUDA program that finds no MPS server still runs, on the
//! whole GPU (docs/evidence), so a container whose directories are hidden does not start.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::conflict::plain;
use super::image_error::ImageError;
use super::rootfs::Tree;
use crate::fs::below::is_of_the_image;
use crate::grant::{MPS_DEFAULT_DIR, MPS_DIR};

/// Checks whether a spec that already has its MPS directories (from `state_dir`) hides them: by a mount that was added
/// after them, or by a mask.
///
/// # Errors
/// Something hides them, or the root filesystem cannot be read.
pub(crate) fn check_uncovered(spec: &Value, rootfs: &Path, state_dir: &Path) -> Result<(), ImageError> {
    let text = |mount: &Value, key| mount.get(key).and_then(Value::as_str).map(PathBuf::from);
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    let mounts: Vec<(PathBuf, bool)> = mounts
        .filter_map(|mount| {
            let of_ours =
                text(mount, "source").is_some_and(|source| source.starts_with(state_dir.join("mps")));
            Some((text(mount, "destination")?, of_ours))
        })
        .collect();
    let given: Vec<(usize, PathBuf)> = [MPS_DIR, MPS_DEFAULT_DIR]
        .iter()
        .filter_map(|ours| {
            let last = mounts.iter().rposition(|(path, of_ours)| *of_ours && path == Path::new(ours))?;
            Some((last, PathBuf::from(ours)))
        })
        .collect();
    if given.is_empty() {
        return Ok(());
    }
    // The tree is examined without the mounts, because a mount that hides something would prevent resolving the paths.
    let image = Tree::open(&Value::Null, rootfs)?;
    for (last, directory) in &given {
        let led = follow_links(directory, &image)?;
        for (by, _) in mounts.iter().skip(last + 1) {
            if hides(by, directory, &led, &image)? {
                return Err(ImageError::Covered {
                    directory: directory.clone(),
                    by: by.clone(),
                    mask: false,
                });
            }
        }
    }
    let directories: Vec<PathBuf> = given.into_iter().map(|(_, directory)| directory).collect();
    check_unmasked(spec, &Tree::open(spec, rootfs)?, &directories)
}

/// Checks whether `linux.maskedPaths` hides one of `directories`, which are about to be mounted. The runtime
/// masks last and follows links inside the root filesystem.
pub(super) fn check_unmasked(spec: &Value, tree: &Tree, directories: &[PathBuf]) -> Result<(), ImageError> {
    let masks = spec.pointer("/linux/maskedPaths").and_then(Value::as_array).into_iter().flatten();
    // Engines mask a dozen kernel files in every container, and resolving paths takes time.
    let masks: Vec<&Path> =
        masks.filter_map(Value::as_str).map(Path::new).filter(|mask| !is_kernel_path(mask)).collect();
    if masks.is_empty() {
        return Ok(());
    }
    for directory in directories {
        let led = follow_links(directory, tree)?;
        for mask in &masks {
            // Hiding one of the two directories is enough for a program to run without its limits.
            let by_process = plain(&mask.to_string_lossy()).starts_with("/proc");
            if by_process || hides(mask, directory, &led, tree)? {
                let by = (*mask).to_owned();
                return Err(ImageError::Covered { directory: directory.clone(), by, mask: true });
            }
        }
    }
    Ok(())
}

/// Whether a path in /proc or /sys stays there. Only the links of processes lead elsewhere (proc(5)).
fn is_kernel_path(mask: &Path) -> bool {
    const LINKS: [&str; 5] = ["root", "cwd", "fd", "exe", "map_files"];
    let path = plain(&mask.to_string_lossy());
    let is_link = |part: &OsStr| LINKS.iter().any(|link| part == *link);
    path.starts_with("/sys") || path.starts_with("/proc") && !mask.iter().any(is_link)
}

/// Whether a mount at `path` hides `directory`, which links resolve to `led`: as both are written, or where links
/// lead them.
fn hides(path: &Path, directory: &Path, led: &Path, tree: &Tree) -> Result<bool, ImageError> {
    let path = plain(&path.to_string_lossy());
    Ok(directory.starts_with(&path) || led.starts_with(follow_links(&path, tree)?))
}

/// Where links lead `path`. A loop of links leads nowhere: the runtime can mount nothing there.
pub(super) fn follow_links(path: &Path, tree: &Tree) -> Result<PathBuf, ImageError> {
    match tree.creation_path(path) {
        Err(error) if is_of_the_image(&error) => Ok(path.to_owned()),
        led => led.map_err(|source| ImageError::Unusable { path: path.to_owned(), source }),
    }
}
