//! Reads what sublet must know about a container's root filesystem, without ever leaving it (openat2). Nothing in the
//! image is executed, parsed as code, or used as the source of a mount.

use std::io;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, umask};
use serde_json::Value;

use super::container_root::ContainerRoot;
use super::environment::environment_value;
use super::hidden_mps;
use super::hooks;
use super::image_error::ImageError;
use super::live::Kind;
use super::mount_points;
use super::rootfs::Tree;
use crate::config::{Config, Inject};
use crate::fs::selinux;
use crate::grant::{Grant, Image, MPS_DEFAULT_DIR, MPS_DIR, SHARE_PROGRAM};
use crate::inventory::Inventory;
use crate::request::Request;
use crate::text::safe;

/// Searched for names, never parsed. ld.so.conf, which contains directives, is not read at all.
const CACHE: &str = "/etc/ld.so.cache";
/// How much of an image's ld.so.cache is read at most, in bytes. That of a full desktop has a few hundred KiB.
const LONGEST_CACHE: u64 = 4 << 20;
/// How many directories of one `LD_LIBRARY_PATH` are searched at most.
const MOST_DIRECTORIES: usize = 64;

/// Debian's name of the host's architecture, and the driver's `e_machine` (elf.h).
#[cfg(target_arch = "x86_64")]
const HOST: (&str, u16) = ("x86_64-linux-gnu", 62);
/// As above.
#[cfg(target_arch = "aarch64")]
const HOST: (&str, u16) = ("aarch64-linux-gnu", 183);
/// NVIDIA has no driver for other architectures, so nothing matches.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const HOST: (&str, u16) = ("none", 0);

/// Finds out from `rootfs`, with the spec's volumes over it, where the driver's files are mounted. This does not depend
/// on the placement. What the placement adds is checked by [`check_mps_directories`].
///
/// # Errors
/// A mount point is a directory where a file is needed, or cannot be created on a read-only root.
pub fn inspect(
    spec: &Value,
    rootfs: &Path,
    request: &Request,
    inventory: &Inventory,
    config: &Config,
) -> Result<Image, ImageError> {
    let tree =
        Tree::open(spec, rootfs).map_err(|source| ImageError::Rootfs { path: rootfs.to_owned(), source })?;
    let tmp = Path::new("/tmp");
    let tmp_is_host = tree.is_of_the_host(tmp).map_err(|source| unusable(tmp, source))?;
    let mut image = Image { tmp_is_host, ..Image::default() };
    let mut files = Vec::new();
    if config.driver.inject == Inject::Builtin {
        image.library_dir = library_dir(&tree)?;
        image.nix = image.library_dir.is_none() && is_nix(&tree)?;
        if let Some(dir) = image.libraries() {
            files = inventory.mounted_files(dir, &request.capabilities, config.driver.inject);
        }
        image.warnings = rivals(&tree, spec, image.libraries());
    }
    let files: Vec<_> = files.into_iter().map(|(_, destination)| destination).collect();
    (image.created, image.volumes) = mount_points::check_files(&tree, &files)?;
    add_share_program(&mut image, &tree);
    Ok(image)
}

/// `sublet-share` is a convenience: where it is not installed, or the container has no room for it, it is left out.
fn add_share_program(image: &mut Image, tree: &Tree) {
    let Some(program) = hooks::installed("sublet-share") else { return };
    if let Some(created) = room_for_share_program(tree) {
        image.created.extend(created);
        image.share_program = Some(program);
    }
}

/// The mount point to be created, if any; `None` if there is something else, or no place for it, or the container's root may
/// not create it. It is put into no volume, because other containers may have that too.
pub(super) fn room_for_share_program(tree: &Tree) -> Option<Vec<PathBuf>> {
    let path = PathBuf::from(SHARE_PROGRAM);
    let directory = tree.find(path.parent()?).ok()?;
    if !directory.is(SFlag::S_IFDIR).ok()? || directory.in_volume || tree.denied(&path).ok()?.is_some() {
        return None;
    }
    // An earlier container in the same root filesystem may have left its empty mount point.
    let is_free = match tree.find(&path) {
        Ok(found) => !found.in_volume && found.read(1).is_ok_and(|content| content.is_empty()),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let (created, volumes) = mount_points::check_files(tree, &[path]).ok()?;
    (is_free && volumes.is_empty()).then_some(created)
}

/// Checks that the MPS directories of `grant` can be mounted in `rootfs`, with the spec's volumes over it, and that
/// they are visible afterwards.
///
/// # Errors
/// A mount point is a file, cannot be created on a read-only root, or leads into another mount; a mask hides one.
pub fn check_mps_directories(spec: &Value, rootfs: &Path, grant: &Grant) -> Result<(), ImageError> {
    let mounted = grant.mounts.iter().map(|mount| mount.destination.clone());
    let (directories, files): (Vec<_>, Vec<_>) = mounted.partition(|path| is_mps(path));
    if directories.is_empty() {
        return Ok(());
    }
    check_label(spec, grant)?;
    let tree =
        Tree::open(spec, rootfs).map_err(|source| ImageError::Rootfs { path: rootfs.to_owned(), source })?;
    mount_points::check_directories(&tree, &directories, &files)?;
    hidden_mps::unmasked(spec, &tree, &directories)
}

/// Checks the SELinux label that the container's processes will have. Without one it is the runtime's own.
fn check_label(spec: &Value, grant: &Grant) -> Result<(), ImageError> {
    let label = spec.pointer("/process/selinuxLabel").and_then(Value::as_str).unwrap_or_default();
    // `mps/<key>/public` in the state directory.
    let mounted = grant.mounts.iter().find(|mount| mount.destination == Path::new(MPS_DIR));
    let mps = mounted.and_then(|mount| mount.source.ancestors().nth(2));
    match mps.filter(|mps| !label.is_empty() && selinux::bars(label, mps)) {
        Some(_) => Err(ImageError::Barred(selinux::type_in(label).to_owned())),
        None => Ok(()),
    }
}

/// Creates the mount points of `grant` that the container's runtime may not create: in a user namespace whose root owns
/// neither the root filesystem nor the volume. What a runtime creates is left to it.
///
/// # Errors
/// This process may not create one either.
pub(crate) fn make_mount_points(spec: &Value, rootfs: &Path, grant: &Grant) -> Result<(), ImageError> {
    if ContainerRoot::of(spec).is_hosts() {
        return Ok(());
    }
    let tree =
        Tree::open(spec, rootfs).map_err(|source| ImageError::Rootfs { path: rootfs.to_owned(), source })?;
    let mounts = grant.mounts.iter().map(|mount| mount.destination.as_path());
    // In a user namespace nodes are mounted, too.
    let nodes = grant.nodes.iter().map(|granted| granted.node.path.as_path());
    // Everybody has to be able to enter the directories.
    let before = umask(Mode::from_bits_truncate(0o022));
    let made = mounts.chain(nodes).try_for_each(|path| {
        let kind = if is_mps(path) { Kind::Directory } else { Kind::File };
        tree.make(path, kind).map_err(|source| ImageError::Unmade { path: path.to_owned(), source })
    });
    umask(before);
    made
}

fn is_mps(path: &Path) -> bool {
    path == Path::new(MPS_DIR) || path == Path::new(MPS_DEFAULT_DIR)
}

/// The directory, with links resolved, of the libc.so.6 that can load the driver's libraries. ld.so searches its
/// built-in directories after the cache, so it finds a soname there without ldconfig.
fn library_dir(tree: &Tree) -> Result<Option<PathBuf>, ImageError> {
    let (triplet, _) = HOST;
    let candidates =
        [&format!("/usr/lib/{triplet}"), &format!("/lib/{triplet}"), "/usr/lib64", "/lib64", "/usr/lib"];
    for candidate in candidates.map(Path::new) {
        let found = with_libc(tree, candidate).map_err(|source| unusable(candidate, source))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The path of `candidate`, if it has a libc.so.6 for this machine.
fn with_libc(tree: &Tree, candidate: &Path) -> io::Result<Option<PathBuf>> {
    let Some(dir) = tree.there(candidate)? else { return Ok(None) };
    let Some(libc) = tree.there(&dir.path.join("libc.so.6"))? else { return Ok(None) };
    if !libc.is(SFlag::S_IFREG)? {
        return Ok(None);
    }
    let header = libc.read(20)?;
    Ok((is_for_host(&header) && dir.path.to_str().is_some()).then_some(dir.path))
}

fn unusable(path: &Path, source: io::Error) -> ImageError {
    ImageError::Unusable { path: path.to_owned(), source }
}

/// Whether an ELF header is 64-bit, little-endian and for this machine (elf(5): `e_ident`, `e_machine`).
fn is_for_host(header: &[u8]) -> bool {
    let (_, machine) = HOST;
    header.starts_with(b"\x7fELF\x02\x01") && header.get(18..20) == Some(&machine.to_le_bytes())
}

fn is_nix(tree: &Tree) -> Result<bool, ImageError> {
    let store = Path::new("/nix/store");
    let found = tree.there(store).and_then(|found| found.map_or(Ok(false), |found| found.is(SFlag::S_IFDIR)));
    found.map_err(|source| unusable(store, source))
}

/// Libraries of the image that its loader will prefer to the mounted ones. They are not changed, because forward
/// compatibility packages work this way.
fn rivals(tree: &Tree, spec: &Value, ours: Option<&Path>) -> Vec<String> {
    let path = environment_value(spec, "LD_LIBRARY_PATH").unwrap_or_default();
    // ld.so(8): separated by colons or semicolons.
    let by_path = path.split([':', ';']).filter(|dir| dir.starts_with('/')).take(MOST_DIRECTORIES);
    let by_path =
        by_path.map(|dir| (format!("{}/libcuda.so.1", dir.trim_end_matches('/')), "LD_LIBRARY_PATH"));
    let cache = tree.find(Path::new(CACHE)).and_then(|found| found.read(LONGEST_CACHE));
    let by_cache = cached(&cache.unwrap_or_default()).into_iter().map(|path| (path, "/etc/ld.so.cache"));
    let mut seen = Vec::new();
    let mut warnings = Vec::new();
    for (path, origin) in by_path.chain(by_cache) {
        let Ok(found) = tree.find(Path::new(&path)) else { continue };
        let elsewhere = Path::new(&path).parent().and_then(|dir| tree.find(dir).ok());
        if elsewhere.is_none_or(|dir| Some(dir.path.as_path()) == ours) || seen.contains(&found.path) {
            continue;
        }
        seen.push(found.path);
        warnings.push(format!(
            "the image's own {} (found by its {origin}) is used instead of the host driver's libcuda: if \
             CUDA fails, remove it from the image or use an image without CUDA forward compatibility",
            safe(&path)
        ));
    }
    warnings
}

/// Paths of a libcuda among the strings of an ld.so.cache (dl-cache.h), found without parsing it.
fn cached(cache: &[u8]) -> Vec<String> {
    let strings = cache.split(|&byte| byte == 0).filter(|text| text.ends_with(b"/libcuda.so.1"));
    let paths =
        strings.filter_map(|text| std::str::from_utf8(text).ok().filter(|text| text.starts_with('/')));
    paths.take(MOST_DIRECTORIES).map(str::to_owned).collect()
}
