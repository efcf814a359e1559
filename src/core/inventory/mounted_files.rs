//! Which of the driver's files a container gets, and where in it they are mounted.

use std::path::{Path, PathBuf};

use super::{DriverFile, FileKind, Inventory};
use crate::config::Inject;
use crate::share::{Capabilities, Capability};

impl Inventory {
    /// The driver's files for `capabilities` with their mount points, libraries in `library_dir`; each mount point
    /// once.
    #[must_use]
    pub(crate) fn mounted_files(
        &self,
        library_dir: &Path,
        capabilities: &Capabilities,
        inject: Inject,
    ) -> Vec<(&DriverFile, PathBuf)> {
        let mut mounted: Vec<(&DriverFile, PathBuf)> = Vec::new();
        if inject == Inject::None {
            return mounted;
        }
        for file in self.files.iter().filter(|file| wanted(file, capabilities)) {
            for destination in destinations(&file.kind, library_dir, capabilities) {
                if !mounted.iter().any(|(_, taken)| *taken == destination) {
                    mounted.push((file, destination));
                }
            }
        }
        mounted
    }
}

/// Libraries of `compute` that `libGLX_nvidia` and `libEGL_nvidia` load, too (seen with driver 580).
const OF_GRAPHICS_TOO: [&str; 2] = ["libnvidia-gpucomp.so.", "libnvidia-allocator.so."];

/// The description files of EGL, Vulkan and `OpenCL` belong to both `video` and `graphics`.
fn wanted(file: &DriverFile, capabilities: &Capabilities) -> bool {
    let shared = |soname: &str| OF_GRAPHICS_TOO.iter().any(|name| soname.starts_with(name));
    let other = match &file.kind {
        FileKind::Library { soname, .. } if shared(soname) => Capability::Graphics,
        FileKind::Data { .. } if file.capability == Capability::Graphics => Capability::Video,
        _ => file.capability,
    };
    capabilities.has(file.capability) || capabilities.has(other)
}

fn destinations(kind: &FileKind, library_dir: &Path, capabilities: &Capabilities) -> Vec<PathBuf> {
    match kind {
        FileKind::Library { soname, also } => {
            let mut names = vec![soname.as_str()];
            // Those in a directory of their own are plugins of graphics libraries.
            let fits = |name: &&str| !name.contains('/') || capabilities.has(Capability::Graphics);
            names.extend(also.iter().map(String::as_str).filter(fits));
            if soname == "libcuda.so.1" {
                // Triton and torch.compile link with -lcuda.
                names.push("libcuda.so");
            }
            names.into_iter().map(|name| library_dir.join(name)).collect()
        }
        FileKind::Program { name } => vec![Path::new("/usr/bin").join(name)],
        FileKind::Data { path } => vec![path.clone()],
    }
}
