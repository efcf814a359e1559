//! Finds the driver's files on the host, in the places of all distributions.

mod elf;
mod file_table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) use elf::Machine;
use file_table::Library;

use super::kernel_module::is_driver_version;
use super::{DriverFile, FileKind, programs};
use sublet_core::fs::looked_for::there;
use sublet_core::inventory::driver_root_links::resolve;

/// The files that were found.
#[derive(Debug)]
pub(super) struct Found {
    pub files: Vec<DriverFile>,
    /// The versions of CUDA and NVML libraries found that differ from the module's version.
    pub other_versions: BTreeSet<String>,
}

impl Found {
    /// The real file of the library with this soname.
    pub fn library(&self, wanted: &str) -> Option<&Path> {
        self.files.iter().find_map(|file| match &file.kind {
            FileKind::Library { soname, .. } if soname == wanted => Some(file.source.as_path()),
            _ => None,
        })
    }
}

/// The driver's files of `version` for `machine`, below `root`.
pub(super) fn find(root: &Path, version: &str, machine: Machine) -> Found {
    let host = Host { root, version, machine };
    let mut other_versions = BTreeSet::new();
    let mut files: Vec<DriverFile> = file_table::LIBRARIES
        .iter()
        .filter_map(|library| {
            let (file, others) = host.library(library);
            if ["libcuda.so", "libnvidia-ml.so"].contains(&library.stem) {
                other_versions.extend(others);
            }
            file
        })
        .collect();
    files.extend(file_table::PROGRAMS.iter().filter_map(|&(name, capability)| {
        let source = programs::programs(root, name)
            .filter_map(|program| real(root, &program))
            .find(|program| machine.made(program))?;
        Some(DriverFile { source, kind: FileKind::Program { name: name.to_owned() }, capability })
    }));
    files.extend(file_table::DATA.iter().filter_map(|&(path, capability)| {
        let source = resolve(root, path).filter(|source| is_file(source))?;
        Some(DriverFile { source, kind: FileKind::Data { path: path.into() }, capability })
    }));
    Found { files, other_versions }
}

fn is_file(path: &Path) -> bool {
    there(path, || path.metadata()).is_some_and(|found| found.is_file())
}

/// The path of the file that a program below `root` resolves to, including the root.
fn real(root: &Path, program: &Path) -> Option<PathBuf> {
    resolve(root, program.strip_prefix(root).ok()?.to_str()?)
}

struct Host<'a> {
    root: &'a Path,
    version: &'a str,
    machine: Machine,
}

impl Host<'_> {
    /// Library directories in search order: Debian and Ubuntu, Red Hat and SUSE, Arch, NixOS, Container-Optimized OS.
    /// NVIDIA's own installer uses the distribution's directories.
    fn directories(&self) -> [String; 10] {
        let triplet = self.machine.triplet();
        [
            format!("/usr/lib/{triplet}"),
            format!("/usr/lib/{triplet}/nvidia/current"),
            "/usr/lib64".to_owned(),
            "/usr/lib".to_owned(),
            "/run/opengl-driver/lib".to_owned(),
            "/usr/local/nvidia/lib64".to_owned(),
            format!("/usr/lib/{triplet}/vdpau"),
            "/usr/lib64/vdpau".to_owned(),
            "/usr/lib/vdpau".to_owned(),
            "/run/opengl-driver/lib/vdpau".to_owned(),
        ]
    }

    /// The library's file, or the other versions of it that were found.
    fn library(&self, library: &Library) -> (Option<DriverFile>, Vec<String>) {
        let full = format!("{}.{}", library.stem, self.version);
        let soname =
            library.suffix.map_or_else(|| full.clone(), |suffix| format!("{}{suffix}", library.stem));
        let mut others = Vec::new();
        for directory in self.directories() {
            for name in [&full, &soname] {
                let Some(source) = self.made_here(&format!("{directory}/{name}")) else { continue };
                match version_of(&source, library.stem) {
                    Some(other) if other != self.version => others.push(other),
                    _ => return (Some(entry(source, &soname, library)), Vec::new()),
                }
            }
        }
        (None, others)
    }

    fn made_here(&self, path: &str) -> Option<PathBuf> {
        resolve(self.root, path).filter(|real| self.machine.made(real))
    }
}

fn entry(source: PathBuf, soname: &str, library: &Library) -> DriverFile {
    let also = library.also.iter().map(|&name| name.to_owned()).collect();
    DriverFile {
        source,
        kind: FileKind::Library { soname: soname.to_owned(), also },
        capability: library.capability,
    }
}

/// The driver version in a file name such as `libcuda.so.580.159.04`. `libnvidia-nvvm.so.4` and
/// `libnvidia-egl-wayland.so.1.1.13` have versions of their own.
fn version_of(path: &Path, stem: &str) -> Option<String> {
    let version = path.file_name()?.to_str()?.strip_prefix(stem)?.strip_prefix('.')?;
    is_driver_version(version).then(|| version.to_owned())
}

#[cfg(test)]
#[path = "distribution_tests.rs"]
mod tests;
