//! Finds the driver's files on the host, in the places of all distributions.

mod elf;
mod file_table;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) use elf::Machine;
use file_table::Library;

use super::cache::is_driver_version;
use super::{DriverFile, FileKind, programs};
use sublet_core::config::Driver;
use sublet_core::fs::examine;
use sublet_core::inventory::programs::resolve;

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

/// More than any description of a library has, in bytes.
const LONGEST_DESCRIPTION: u64 = 4096;

/// The driver's files of `version` for `machine`, where `driver` says.
pub(super) fn find(driver: &Driver, version: &str, machine: Machine) -> Found {
    let root = &driver.root;
    let host = Host { root, version, machine, directories: directories(driver, machine) };
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
        let source = programs::programs(driver, name)
            .filter_map(|program| resolve(root, program.strip_prefix(root).ok()?.to_str()?))
            .find(|program| machine.made(program))?;
        let needs = machine.unusual_loader(&source);
        Some(DriverFile { source, kind: FileKind::Program { name: name.to_owned() }, capability, needs })
    }));
    let beside = beside(root, &files);
    files.extend(file_table::DATA.iter().filter_map(|&(path, capability)| {
        let below = |prefix: &String| format!("{prefix}{}", path.strip_prefix("/usr").unwrap_or(path));
        let named = driver.search.iter().map(below);
        let places = named.chain([path.to_owned()]).chain(beside.iter().map(below));
        let (source, needs) = places.filter_map(|place| resolve(root, &place)).find_map(with_needs)?;
        Some(DriverFile { source, kind: FileKind::Data { path: path.into() }, capability, needs })
    }));
    Found { files, other_versions }
}

/// A data file with the library that it names by its path in the store of `NixOS`, if it does; `None`: it is no file.
fn with_needs(source: PathBuf) -> Option<(PathBuf, Option<PathBuf>)> {
    let text =
        examine(&source, || elf::read(&source, 0, LONGEST_DESCRIPTION)).filter(|text| !text.is_empty())?;
    let text = String::from_utf8_lossy(&text);
    let named = text.split(['"', '\n', '\0']).find(|word| word.starts_with("/nix/store/"));
    Some((source, named.map(PathBuf::from)))
}

/// The installations in which files were found, each by the directory that has `lib` and `bin`. Their data files are there,
/// too, if they are not the distribution's.
fn beside(root: &Path, files: &[DriverFile]) -> BTreeSet<String> {
    let prefix = |file: &DriverFile| {
        let prefix = file.source.strip_prefix(root).ok()?.parent()?.parent()?.to_str()?;
        Some(format!("/{prefix}"))
    };
    files.iter().filter_map(prefix).chain(["/run/opengl-driver".to_owned()]).collect()
}

/// The directories of libraries, in the order of preference: `[driver] search`, Debian and Ubuntu, Red Hat and SUSE, Arch,
/// `NixOS`, container hosts, Google's, Flatcar, Talos. NVIDIA's own installer uses the distribution's directories.
fn directories(driver: &Driver, machine: Machine) -> Vec<String> {
    let triplet = machine.triplet;
    let named = driver.search.iter().flat_map(|prefix| ["lib64", "lib"].map(|dir| format!("{prefix}/{dir}")));
    let known = [
        &format!("/usr/lib/{triplet}"),
        &format!("/usr/lib/{triplet}/nvidia/current"),
        "/usr/lib64",
        "/usr/lib",
        "/run/opengl-driver/lib",
        "/usr/local/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/lib64",
        "/var/lib/nvidia/lib64",
        "/opt/nvidia/lib64",
        "/usr/local/glibc/usr/lib",
    ];
    let all: Vec<String> = named.chain(known.map(str::to_owned)).collect();
    let of_vdpau: Vec<String> = all.iter().map(|directory| format!("{directory}/vdpau")).collect();
    let is_there = |directory: &String| resolve(&driver.root, directory).is_some();
    all.into_iter().chain(of_vdpau).filter(is_there).collect()
}

struct Host<'a> {
    root: &'a Path,
    version: &'a str,
    machine: Machine,
    /// Of libraries.
    directories: Vec<String>,
}

impl Host<'_> {
    /// The library's file, or the other versions of it that were found.
    fn library(&self, library: &Library) -> (Option<DriverFile>, Vec<String>) {
        let full = format!("{}.{}", library.stem, self.version);
        let soname =
            library.suffix.map_or_else(|| full.clone(), |suffix| format!("{}{suffix}", library.stem));
        let mut others = Vec::new();
        for directory in &self.directories {
            for name in [&full, &soname] {
                let source = resolve(self.root, &format!("{directory}/{name}"));
                let Some(source) = source.filter(|real| self.machine.made(real)) else { continue };
                match version_of(&source, library.stem) {
                    Some(other) if other != self.version => others.push(other),
                    _ => {
                        let also = library.also.iter().map(|&name| name.to_owned()).collect();
                        let kind = FileKind::Library { soname: soname.clone(), also };
                        let capability = library.capability;
                        return (Some(DriverFile { source, kind, capability, needs: None }), Vec::new());
                    }
                }
            }
        }
        (None, others)
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
