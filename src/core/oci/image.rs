//! Examines a container's root filesystem, without ever leaving it (openat2). Nothing in the
//! image is executed, parsed as code, or used as the source of a mount.

use std::io;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, stat, umask};
use serde_json::Value;

use super::cuda_versions;
use super::hidden_mps;
use super::hooks;
use super::image_error::ImageError;
use super::live::Kind;
use super::mount_points::{self, FilePoints};
use super::rootfs::Tree;
use crate::config::{Config, Inject};
use crate::fs::selinux;
use crate::grant::{Grant, Image, MPS_DEFAULT_DIR, MPS_DIR, SHARE_PROGRAM};
use crate::inventory::{DriverFile, Inventory};
use crate::request::Request;
use crate::text::safe;

/// Debian's name of the host's architecture, and the driver's `e_machine` (elf.h).
#[cfg(target_arch = "x86_64")]
const HOST: (&str, u16) = ("x86_64-linux-gnu", 62);
/// As above.
#[cfg(target_arch = "aarch64")]
const HOST: (&str, u16) = ("aarch64-linux-gnu", 183);
/// NVIDIA has no driver for other architectures, so nothing matches.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const HOST: (&str, u16) = ("none", 0);

/// Finds out from `tree`, the container's root filesystem with the volumes of `spec` over it, where the driver's files are
/// mounted. This does not depend on the placement. [`check_mps_directories`] checks the rest.
///
/// # Errors
/// A mount point is a directory where a file is needed, or cannot be created on a read-only root.
pub fn inspect(
    spec: &Value,
    tree: &Tree,
    request: &Request,
    inventory: &Inventory,
    config: &Config,
) -> Result<Image, ImageError> {
    let mut image = Image { without_default: !request.default_directory, ..Image::default() };
    let led = hidden_mps::follow_links(Path::new(MPS_DEFAULT_DIR), tree)?;
    inspect_tmp(tree, &led, &mut image).map_err(|source| unusable(Path::new(MPS_DEFAULT_DIR), source))?;
    let mut files = Vec::new();
    if config.driver.inject == Inject::Builtin {
        image.library_dir = library_dir(tree)?;
        image.nix = image.library_dir.is_none() && is_nix(tree)?;
        if let Some(dir) = image.libraries() {
            files = inventory.mounted_files(dir, &request.capabilities, config.driver.inject);
        }
        image.warnings = cuda_versions::warnings(tree, spec, image.libraries(), &inventory.driver);
        image.warnings.extend(not_served(request));
    }
    let (files, useless) = by_use(tree, files)?;
    image.useless = useless;
    let points = mount_points::check_files(tree, &files)?;
    image = Image {
        created: points.created,
        empty: points.empty,
        volumes: points.volumes,
        left_out: points.left_out,
        ..image
    };
    add_share_program(&mut image, tree);
    Ok(image)
}

/// One line, if the image names driver capabilities that it does not get.
fn not_served(request: &Request) -> Option<String> {
    (!request.not_served.is_empty()).then(|| {
        format!(
            "the image's NVIDIA_DRIVER_CAPABILITIES names {}, for which nothing is mounted: there are compute, utility, \
             graphics and video, of which [limits] capabilities lets images choose; with sublet.capabilities the \
             container chooses itself",
            safe(&request.not_served.join(", "))
        )
    })
}

/// The mount points of `files`, and of unusable files, whose needs the image lacks.
fn by_use(
    tree: &Tree,
    files: Vec<(&DriverFile, PathBuf)>,
) -> Result<(Vec<PathBuf>, Vec<PathBuf>), ImageError> {
    let (mut useful, mut useless) = (Vec::new(), Vec::new());
    for (file, destination) in files {
        let lacks = |needed: &PathBuf| {
            tree.find_if_present(needed)
                .map(|found| found.is_none())
                .map_err(|source| unusable(needed, source))
        };
        let is_useless = file.needs.as_ref().map_or(Ok(false), lacks)?;
        let list = if is_useless { &mut useless } else { &mut useful };
        list.push(destination);
    }
    Ok((useful, useless))
}

/// Examines the spec's mount over /tmp, and CUDA's default directory for MPS there, which links resolve to
/// `directory`.
fn inspect_tmp(tree: &Tree, directory: &Path, image: &mut Image) -> io::Result<()> {
    let tmp = Path::new("/tmp");
    let there = tree.find_if_present(directory)?;
    let is_volume = there.as_ref().is_some_and(|found| tree.volumes().any(|volume| volume == found.path));
    let control = tree.find_if_present(&directory.join("control"))?;
    image.other_daemon = is_volume || control.is_some_and(|found| found.in_volume);
    let Some(volume) = tree.find_if_present(tmp)?.filter(|found| found.in_volume) else { return Ok(()) };
    let own = volume.stat()?;
    image.tmp_is_host = stat(tmp).is_ok_and(|host| (own.st_dev, own.st_ino) == (host.st_dev, host.st_ino));
    image.tmp_is_closed = there.is_none() && volume.is_read_only()? || tree.is_shared(directory)?;
    if let (Some(mut place), made) = tree.place_in_volume(directory)? {
        place.files.extend(there.is_none().then_some(made));
        image.tmp_volume = Some(place);
    }
    Ok(())
}

/// Refuses a container that would find the MPS daemon of somebody else at CUDA's default place. If its own is mounted
/// there, it is not found.
pub fn check_no_other_daemon(image: &Image, has_daemon: bool) -> Result<(), ImageError> {
    let covered = has_daemon && image.takes_default_directory();
    if image.other_daemon && !covered { Err(ImageError::OtherDaemon) } else { Ok(()) }
}

/// `sublet-share` is a convenience: where it is not installed, or the container has no room for it, it is left out.
fn add_share_program(image: &mut Image, tree: &Tree) {
    let Some(program) = hooks::installed("sublet-share") else { return };
    if let Some(points) = room_for_share_program(tree) {
        image.created.extend(points.created);
        image.empty.extend(points.empty);
        image.share_program = Some(program);
    }
}

/// Its mount point; `None` if there is something else, or no place for it, or the container's root may not create it. It is put
/// into no volume, because other containers may have that too.
pub(super) fn room_for_share_program(tree: &Tree) -> Option<FilePoints> {
    let path = PathBuf::from(SHARE_PROGRAM);
    let directory = tree.find(path.parent()?).ok()?;
    if !directory.is(SFlag::S_IFDIR).ok()? || directory.in_volume || tree.find_denied(&path).ok()?.is_some() {
        return None;
    }
    // An earlier container in the same root filesystem may have left its empty mount point.
    let is_free = match tree.find(&path) {
        Ok(found) => !found.in_volume && found.read(1).is_ok_and(|content| content.is_empty()),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    let points = mount_points::check_files(tree, &[path]).ok()?;
    (is_free && points.volumes.is_empty() && points.left_out.is_empty()).then_some(points)
}

/// Checks that the MPS directories of `grant` can be mounted in `tree`, and that they are visible afterwards.
///
/// # Errors
/// A mount point is a file, cannot be created on a read-only root, or leads into another mount; a mask hides one.
pub fn check_mps_directories(spec: &Value, tree: &Tree, grant: &Grant) -> Result<(), ImageError> {
    let mounted = grant.mounts.iter().map(|mount| mount.destination.clone());
    let (directories, files): (Vec<_>, Vec<_>) = mounted.partition(|path| is_mps(path));
    if directories.is_empty() {
        return Ok(());
    }
    check_label(spec, grant)?;
    mount_points::check_directories(tree, &directories, &files)?;
    hidden_mps::check_unmasked(spec, tree, &directories)
}

/// Checks the `SELinux` label that the container's processes will have. Without one it is the runtime's own.
fn check_label(spec: &Value, grant: &Grant) -> Result<(), ImageError> {
    let label = spec.pointer("/process/selinuxLabel").and_then(Value::as_str).unwrap_or_default();
    // `mps/<key>/public` in the state directory.
    let mounted = grant.mounts.iter().find(|mount| mount.destination == Path::new(MPS_DIR));
    let mps = mounted.and_then(|mount| mount.source.ancestors().nth(2));
    match mps.filter(|mps| !label.is_empty() && selinux::is_denied(label, mps)) {
        Some(_) => Err(ImageError::Barred(selinux::type_in(label).to_owned())),
        None => Ok(()),
    }
}

/// Creates the mount points of `grant` that the container's runtime may not create: in a user namespace whose root owns
/// neither the root filesystem nor the volume. Those that the runtime creates are left to it.
///
/// # Errors
/// This process may not create one either.
pub(crate) fn make_mount_points(tree: &Tree, grant: &Grant) -> Result<(), ImageError> {
    if tree.is_of_hosts_root() {
        return Ok(());
    }
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
    let Some(dir) = tree.find_if_present(candidate)? else { return Ok(None) };
    let Some(libc) = tree.find_if_present(&dir.path.join("libc.so.6"))? else { return Ok(None) };
    if !libc.is(SFlag::S_IFREG)? {
        return Ok(None);
    }
    let header = libc.read(20)?;
    Ok((is_for_host(&header) && dir.path.to_str().is_some()).then(|| dir.path.clone()))
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
    let found = tree
        .find_if_present(store)
        .and_then(|found| found.map_or(Ok(false), |found| found.is(SFlag::S_IFDIR)));
    found.map_err(|source| unusable(store, source))
}
