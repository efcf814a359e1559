//! Finds the driver's files on the host, in the places of all distributions; and which of them a container may get.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sublet_core::config::Driver;
use sublet_core::fs::examine;
use sublet_core::inventory::programs::resolve;
use sublet_core::inventory::{DriverFile, FileKind, programs};
use sublet_core::share::Capability::{self, Compute, Graphics, Utility, Video};

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
    let (mut files, mut other_versions) = (Vec::new(), BTreeSet::new());
    for library in LIBRARIES {
        let (file, mismatched) = host.library(library);
        files.extend(file);
        if ["libcuda.so", "libnvidia-ml.so"].contains(&library.stem) {
            other_versions.extend(mismatched);
        }
    }
    files.extend(PROGRAMS.iter().filter_map(|&(name, capability)| {
        let source = programs::programs(driver, name)
            .filter_map(|program| resolve(root, program.strip_prefix(root).ok()?.to_str()?))
            .find(|program| machine.made(program))?;
        // A loader that is not the usual one. A file that is no sound program names none.
        let needs =
            interpreter(&source).ok().flatten().filter(|named| named.as_path() != Path::new(machine.loader));
        Some(DriverFile { source, kind: FileKind::Program { name: name.to_owned() }, capability, needs })
    }));
    let beside = beside(root, &files);
    files.extend(DATA.iter().filter_map(|&(path, capability)| {
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
    let text = examine(&source, || read(&source, 0, LONGEST_DESCRIPTION)).filter(|text| !text.is_empty())?;
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
        let mut mismatched = Vec::new();
        for directory in &self.directories {
            for name in [&full, &soname] {
                let source = resolve(self.root, &format!("{directory}/{name}"));
                let Some(source) = source.filter(|real| self.machine.made(real)) else { continue };
                match version_of(&source, library.stem) {
                    Some(other) if other != self.version => mismatched.push(other),
                    _ => {
                        let also = library.also.iter().map(|&name| name.to_owned()).collect();
                        let kind = FileKind::Library { soname: soname.clone(), also };
                        let capability = library.capability;
                        return (Some(DriverFile { source, kind, capability, needs: None }), Vec::new());
                    }
                }
            }
        }
        (None, mismatched)
    }
}

/// The driver version in a file name such as `libcuda.so.580.159.04`. `libnvidia-nvvm.so.4` and
/// `libnvidia-egl-wayland.so.1.1.13` have versions of their own.
fn version_of(path: &Path, stem: &str) -> Option<String> {
    let version = path.file_name()?.to_str()?.strip_prefix(stem)?.strip_prefix('.')?;
    sublet_core::inventory::cache::is_driver_version(version).then(|| version.to_owned())
}

// Whether a file is a library or program for this machine, and which loader a program names, by its ELF headers (elf(5)).

/// Up to and with `e_machine`, in bytes.
const IDENTITY: u64 = 20;
/// The whole ELF header and one entry of the program header table, in bytes.
const HEADER: u64 = 64;
const ENTRY: u64 = 56;
/// The type of the entry for the path of the loader.
const PT_INTERP: u64 = 3;
/// More entries, and a longer path in bytes, than any program has.
const MOST_ENTRIES: u64 = 64;
const LONGEST_LOADER: u64 = 4096;

/// A machine for which drivers exist, always in its 64-bit little-endian form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    /// Debian's name for its library directory (Multi-Arch specification).
    triplet: &'static str,
    /// `e_machine`: `EM_X86_64`, `EM_AARCH64` (elf.h).
    number: u8,
    /// The loader of this machine's programs (System V ABI, processor supplements).
    loader: &'static str,
}

impl Machine {
    pub const X86_64: Self =
        Self { triplet: "x86_64-linux-gnu", number: 62, loader: "/lib64/ld-linux-x86-64.so.2" };
    pub const AARCH64: Self =
        Self { triplet: "aarch64-linux-gnu", number: 183, loader: "/lib/ld-linux-aarch64.so.1" };
    /// The machine that sublet runs on.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::AARCH64 } else { Self::X86_64 };

    /// Whether `path` is a 64-bit little-endian ELF file for this machine (`e_ident` and `e_machine`).
    pub fn made(self, path: &Path) -> bool {
        let header = examine(path, || read(path, 0, IDENTITY)).unwrap_or_default();
        header.starts_with(b"\x7fELF\x02\x01") && header.get(18..) == Some(&[self.number, 0])
    }
}

/// The path in the segment `PT_INTERP` of a 64-bit little-endian ELF file (elf(5)).
fn interpreter(path: &Path) -> io::Result<Option<PathBuf>> {
    let header = read(path, 0, HEADER)?;
    let (table, size, count) = (number(&header, 32, 8), number(&header, 54, 2), number(&header, 56, 2));
    for entry in 0..count.min(MOST_ENTRIES) {
        let entry = read(path, table.saturating_add(entry * size), ENTRY)?;
        if number(&entry, 0, 4) == PT_INTERP {
            let text = read(path, number(&entry, 8, 8), number(&entry, 32, 8).min(LONGEST_LOADER))?;
            let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
            return Ok((!text.is_empty()).then(|| std::ffi::OsStr::from_bytes(text).into()));
        }
    }
    Ok(None)
}

/// The little-endian number of `length` bytes at `at`; 0 where there are none.
fn number(bytes: &[u8], at: usize, length: usize) -> u64 {
    let bytes = bytes.get(at..at + length).unwrap_or_default();
    bytes.iter().rev().fold(0, |number, &byte| (number << 8) | u64::from(byte))
}

/// The bytes of a file from `offset` on, at most `length`; none of a directory.
fn read(path: &Path, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let (mut file, mut bytes) = (std::fs::File::open(path)?, Vec::new());
    file.seek(SeekFrom::Start(offset))?;
    match file.take(length).read_to_end(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => Ok(Vec::new()),
        read => read.map(|_| bytes),
    }
}

// Which files of the driver a container may get, and which driver capability each belongs to. From the driver's README,
// chapter "Installed Components", of 535 to 580. The daemons (nv-fabricmanager, nvidia-cuda-mps-*) and files for an X
// server stay on the host.

/// A library, by the names that containers use.
struct Library {
    /// The name up to and including `.so`.
    stem: &'static str,
    /// The rest of the soname; `None` means the driver's version, and no shorter name exists.
    suffix: Option<&'static str>,
    /// Further names under which programs look for it.
    also: &'static [&'static str],
    capability: Capability,
}

const fn library(stem: &'static str, suffix: &'static str, capability: Capability) -> Library {
    Library { stem, suffix: Some(suffix), also: &[], capability }
}

const fn versioned(stem: &'static str, capability: Capability) -> Library {
    Library { stem, suffix: None, also: &[], capability }
}

/// Libraries of all releases from 535 on; each release has most of them.
const LIBRARIES: &[Library] = &[
    library("libnvidia-ml.so", ".1", Utility),
    library("libnvidia-cfg.so", ".1", Utility),
    // `-lcuda` and Triton look for `libcuda.so`.
    Library { also: &["libcuda.so"], ..library("libcuda.so", ".1", Compute) },
    library("libcudadebugger.so", ".1", Compute),
    library("libnvidia-ptxjitcompiler.so", ".1", Compute),
    library("libnvidia-nvvm.so", ".4", Compute),
    library("libnvidia-nvvm70.so", ".4", Compute),
    library("libnvidia-opencl.so", ".1", Compute),
    // Mesa's libgbm looks for a backend by the name of the kernel's driver.
    Library { also: &["gbm/nvidia-drm_gbm.so"], ..library("libnvidia-allocator.so", ".1", Compute) },
    library("libnvidia-sandboxutils.so", ".1", Compute),
    versioned("libnvidia-gpucomp.so", Compute),
    versioned("libnvidia-tileiras.so", Compute),
    versioned("libnvidia-pkcs11.so", Compute),
    versioned("libnvidia-pkcs11-openssl3.so", Compute),
    library("libnvcuvid.so", ".1", Video),
    library("libnvidia-encode.so", ".1", Video),
    library("libnvidia-opticalflow.so", ".1", Video),
    library("libvdpau_nvidia.so", ".1", Video),
    // If libglvnd finds no vendor, it asks for libGLX_indirect.
    Library { also: &["libGLX_indirect.so.0"], ..library("libGLX_nvidia.so", ".0", Graphics) },
    library("libEGL_nvidia.so", ".0", Graphics),
    library("libGLESv1_CM_nvidia.so", ".1", Graphics),
    library("libGLESv2_nvidia.so", ".2", Graphics),
    library("libnvidia-egl-gbm.so", ".1", Graphics),
    library("libnvidia-egl-wayland.so", ".1", Graphics),
    library("libnvidia-egl-wayland2.so", ".1", Graphics),
    library("libnvidia-egl-xcb.so", ".1", Graphics),
    library("libnvidia-egl-xlib.so", ".1", Graphics),
    library("libnvidia-fbc.so", ".1", Graphics),
    library("libnvidia-ngx.so", ".1", Graphics),
    library("libnvoptix.so", ".1", Graphics),
    versioned("libnvidia-eglcore.so", Graphics),
    versioned("libnvidia-glcore.so", Graphics),
    versioned("libnvidia-glsi.so", Graphics),
    versioned("libnvidia-glvkspirv.so", Graphics),
    versioned("libnvidia-rtcore.so", Graphics),
    versioned("libnvidia-tls.so", Graphics),
];

/// Programs that containers may get.
const PROGRAMS: &[(&str, Capability)] =
    &[("nvidia-smi", Utility), ("nvidia-debugdump", Utility), ("nvidia-persistenced", Utility)];

/// Data files, at the same path in host and container. Packages differ in directory and name.
const DATA: &[(&str, Capability)] = &[
    ("/etc/OpenCL/vendors/nvidia.icd", Compute),
    ("/usr/share/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", Graphics),
    ("/usr/share/vulkan/icd.d/nvidia_icd.aarch64.json", Graphics),
    ("/etc/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/usr/share/vulkan/implicit_layer.d/nvidia_layers.json", Graphics),
    ("/etc/vulkan/implicit_layer.d/nvidia_layers.json", Graphics),
    ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/99_nvidia_wayland2.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json", Graphics),
    ("/usr/share/nvidia/nvoptix.bin", Graphics),
];

#[cfg(test)]
#[path = "driver_files_tests.rs"]
mod tests;
