//! Examines a container's root filesystem, without ever leaving it (openat2). Nothing in the image is executed, parsed
//! as code, or used as the source of a mount.
//!
//! Which CUDA an image needs, and which libcuda its programs will load, is known by its environment, by names, and by
//! where links lead. A CUDA program that finds no MPS server still runs, on the whole GPU (docs/evidence), so a container
//! is refused in which a mount or a mask hides the MPS directories.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, stat, umask};
use serde_json::Value;

use super::conflict::{entries, environment_value, plain, text};
use super::live::Kind;
use super::rootfs::{Tree, unusable};
use super::{ImageError, rootfs};
use crate::config::{Config, Inject};
use crate::fs::{is_of_the_image, selinux};
use crate::grant::{Grant, Image, MPS_DEFAULT_DIR, MPS_DIR, SHARE_PROGRAM};
use crate::inventory::{Driver, Inventory};
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
    let led = follow_links(Path::new(MPS_DEFAULT_DIR), tree)?;
    inspect_tmp(tree, &led, &mut image).map_err(unusable(Path::new(MPS_DEFAULT_DIR)))?;
    let mut files = Vec::new();
    if config.driver.inject == Inject::Builtin {
        image.library_dir = library_dir(tree)?;
        let store = Path::new("/nix/store");
        let is_nix = || tree.find_if_present(store)?.map_or(Ok(false), |found| found.is(SFlag::S_IFDIR));
        image.nix = image.library_dir.is_none() && is_nix().map_err(unusable(store))?;
        if let Some(dir) = image.libraries() {
            files = inventory.mounted_files(dir, &request.capabilities, config.driver.inject);
        }
        image.warnings = cuda_warnings(tree, spec, image.libraries(), &inventory.driver);
        image.warnings.extend(not_served(request));
    }
    let mut useful = Vec::new();
    for (file, destination) in files {
        match &file.needs {
            Some(needed) if tree.find_if_present(needed).map_err(unusable(needed))?.is_none() => {
                image.useless.push(destination);
            }
            _ => useful.push(destination),
        }
    }
    rootfs::check_files(tree, &useful, &mut image)?;
    // A convenience: where it is not installed, or the container has no room for it, it is left out.
    let share = crate::process::inheritance::installed("sublet-share");
    if let Some((program, points)) = share.and_then(|program| Some((program, room_for_share_program(tree)?)))
    {
        image.created.extend(points.created);
        image.empty.extend(points.empty);
        image.share_program = Some(program);
    }
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

/// The mount point of `sublet-share`; `None` if there is something else, or no place for it, or the container's root may not
/// create it. It is put into no volume, because other containers may have that too.
pub(super) fn room_for_share_program(tree: &Tree) -> Option<Image> {
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
    let mut points = Image::default();
    rootfs::check_files(tree, &[path], &mut points).ok()?;
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
    rootfs::check_directories(tree, &directories, &files)?;
    check_unmasked(spec, tree, &directories)
}

/// Checks the `SELinux` label that the container's processes will have. Without one it is the runtime's own.
fn check_label(spec: &Value, grant: &Grant) -> Result<(), ImageError> {
    let label = spec.get("process").and_then(|process| text(process, "selinuxLabel")).unwrap_or_default();
    // `mps/<key>/public` in the state directory.
    let mounted = grant.mounts.iter().find(|mount| mount.destination == Path::new(MPS_DIR));
    let mps = mounted.and_then(|mount| mount.source.ancestors().nth(2));
    let is_barred = mps.is_some_and(|mps| !label.is_empty() && selinux::is_denied(label, mps));
    if is_barred { Err(ImageError::Barred(selinux::type_in(label).to_owned())) } else { Ok(()) }
}

/// Creates the mount points of `grant` that the container's runtime may not create: in a user namespace whose root owns
/// neither the root filesystem nor the volume. Those that the runtime creates are left to it.
///
/// # Errors
/// This process may not create one either.
pub(crate) fn make_mount_points(tree: &Tree, grant: &Grant) -> Result<(), ImageError> {
    if tree.root.is_hosts() {
        return Ok(());
    }
    let mounts = grant.mounts.iter().map(|mount| mount.destination.as_path());
    // In a user namespace nodes are mounted, too.
    let nodes = grant.nodes.iter().map(|granted| granted.node.path.as_path());
    // Everybody has to be able to enter the directories.
    let before = umask(Mode::from_bits_truncate(0o022));
    let made = mounts.chain(nodes).try_for_each(|path| {
        let kind = if is_mps(path) { Kind::Directory } else { Kind::File };
        tree.make(path, kind).map_err(|error| ImageError::Unmade(path.to_owned(), error))
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
        let found = with_libc(tree, candidate).map_err(unusable(candidate))?;
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
    // 64-bit, little-endian and for this machine (elf(5): `e_ident`, `e_machine`).
    let (_, machine) = HOST;
    let is_for_host =
        header.starts_with(b"\x7fELF\x02\x01") && header.get(18..20) == Some(&machine.to_le_bytes());
    Ok((is_for_host && dir.path.to_str().is_some()).then(|| dir.path.clone()))
}

/// Searched for names, never parsed. ld.so.conf, which contains directives, is not read at all.
const LD_CACHE: &str = "/etc/ld.so.cache";
/// How much of an image's ld.so.cache is read at most, in bytes. That of a full desktop has a few hundred KiB.
const LONGEST_LD_CACHE: u64 = 4 << 20;
/// How many directories of one `LD_LIBRARY_PATH` are searched at most.
const MOST_DIRECTORIES: usize = 64;
/// Where NVIDIA's packages put a newer libcuda for older drivers (CUDA Compatibility, "Forward Compatibility").
const COMPAT_DIRECTORY: &str = "/usr/local/cuda/compat";

/// One line for each libcuda that takes precedence over the mounted one, and if the driver is older than the image needs.
/// Nothing is changed, because forward compatibility packages work this way.
pub(super) fn cuda_warnings(tree: &Tree, spec: &Value, ours: Option<&Path>, driver: &Driver) -> Vec<String> {
    let rivals = rivals(tree, spec, ours);
    let is_too_old = |needed: &(u32, u32)| driver.cuda != (0, 0) && *needed > driver.cuda;
    let Some(needed) = required_version(spec).filter(is_too_old) else {
        let advice = "if CUDA fails, remove it from LD_LIBRARY_PATH or from the image";
        let host = format!("is used instead of the libcuda of the host's driver {}", driver.version);
        return rivals.iter().map(|rival| format!("the image's own {rival} {host}: {advice}")).collect();
    };
    let (major, minor) = driver.cuda;
    let help = match rivals.first() {
        Some(rival) => format!("it uses its own {rival}, which works on data-centre GPUs only"),
        None if tree.find(Path::new(&format!("{COMPAT_DIRECTORY}/libcuda.so.1"))).is_ok() => format!(
            "use an image for CUDA {major}.{minor} or a newer driver; on data-centre GPUs the image can use its own \
             newer libcuda with `-e LD_LIBRARY_PATH={COMPAT_DIRECTORY}`"
        ),
        None => format!("use an image for CUDA {major}.{minor} or a newer driver"),
    };
    vec![format!(
        "the image needs CUDA {}.{} (its NVIDIA_REQUIRE_CUDA), and the host's driver {} has CUDA {major}.{minor}: {help}",
        needed.0, needed.1, driver.version
    )]
}

/// The CUDA version that `NVIDIA_REQUIRE_CUDA` asks for: as `cuda>=12.4 brand=tesla,driver>=470`, where a space means or,
/// and a comma and (Container Toolkit, "Driver Capabilities and Constraints").
fn required_version(spec: &Value) -> Option<(u32, u32)> {
    let required = environment_value(spec, "NVIDIA_REQUIRE_CUDA")?;
    let version = |term: &str| {
        let version = term.strip_prefix("cuda>=")?;
        let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let alternatives = required.split_whitespace().take(MOST_DIRECTORIES);
    alternatives.filter_map(|terms| terms.split(',').filter_map(version).max()).min()
}

/// The libcudas of the image that its loader will prefer to the mounted one: each with the file where links lead, such as
/// `libcuda.so.575.57.08`, and with the setting that finds it.
fn rivals(tree: &Tree, spec: &Value, ours: Option<&Path>) -> Vec<String> {
    let path = environment_value(spec, "LD_LIBRARY_PATH").unwrap_or_default();
    // ld.so(8): separated by colons or semicolons.
    let by_path = path.split([':', ';']).filter(|dir| dir.starts_with('/')).take(MOST_DIRECTORIES);
    let by_path =
        by_path.map(|dir| (format!("{}/libcuda.so.1", dir.trim_end_matches('/')), "LD_LIBRARY_PATH"));
    let cache = tree.find(Path::new(LD_CACHE)).and_then(|found| found.read(LONGEST_LD_CACHE));
    // Among its strings (dl-cache.h), found without parsing it.
    let cache = cache.unwrap_or_default();
    let strings = cache.split(|&byte| byte == 0).filter(|text| text.ends_with(b"/libcuda.so.1"));
    let paths =
        strings.filter_map(|text| std::str::from_utf8(text).ok()).filter(|text| text.starts_with('/'));
    let by_cache = paths.take(MOST_DIRECTORIES).map(|path| (path.to_owned(), "/etc/ld.so.cache"));
    let mut seen = Vec::new();
    let mut rivals = Vec::new();
    for (path, found_by) in by_path.chain(by_cache) {
        let Ok(found) = tree.find(Path::new(&path)) else { continue };
        let elsewhere = Path::new(&path).parent().and_then(|dir| tree.find(dir).ok());
        if elsewhere.is_none_or(|dir| Some(dir.path.as_path()) == ours) || seen.contains(&found.path) {
            continue;
        }
        let file = safe(&found.path.file_name().unwrap_or_default().to_string_lossy());
        rivals.push(format!("{} ({file}, found by its {found_by})", safe(&path)));
        seen.push(found.path.clone());
    }
    rivals
}

/// Checks whether a spec that already has its MPS directories (from `state_dir`) hides them: by a mount that was added
/// after them, or by a mask.
///
/// # Errors
/// Something hides them, or the root filesystem cannot be read.
pub(crate) fn check_uncovered(spec: &Value, rootfs: &Path, state_dir: &Path) -> Result<(), ImageError> {
    let mps = state_dir.join("mps");
    let mount = |mount: &Value| {
        let of_ours = text(mount, "source").is_some_and(|source| Path::new(source).starts_with(&mps));
        Some((PathBuf::from(text(mount, "destination")?), of_ours))
    };
    let mounts: Vec<(PathBuf, bool)> = entries(spec, "/mounts").iter().filter_map(mount).collect();
    let last = |ours: &str| {
        let last = mounts.iter().rposition(|(path, of_ours)| *of_ours && path == Path::new(ours))?;
        Some((last, PathBuf::from(ours)))
    };
    let given: Vec<(usize, PathBuf)> = [MPS_DIR, MPS_DEFAULT_DIR].into_iter().filter_map(last).collect();
    if given.is_empty() {
        return Ok(());
    }
    // The tree is examined without the mounts, because a mount that hides something would prevent resolving the paths.
    let image = Tree::open(&Value::Null, rootfs)?;
    for (last, directory) in &given {
        let led = follow_links(directory, &image)?;
        for (by, _) in mounts.iter().skip(last + 1) {
            if hides(by, directory, &led, &image)? {
                let (directory, by) = (directory.clone(), by.clone());
                return Err(ImageError::Covered { directory, by, mask: false });
            }
        }
    }
    let directories: Vec<PathBuf> = given.into_iter().map(|(_, directory)| directory).collect();
    check_unmasked(spec, &Tree::open(spec, rootfs)?, &directories)
}

/// Checks whether `linux.maskedPaths` hides one of `directories`, which are about to be mounted. The runtime
/// masks last and follows links inside the root filesystem.
pub(super) fn check_unmasked(spec: &Value, tree: &Tree, directories: &[PathBuf]) -> Result<(), ImageError> {
    let masks = entries(spec, "/linux/maskedPaths").iter().filter_map(Value::as_str).map(Path::new);
    // Engines mask a dozen kernel files in every container, and resolving paths takes time.
    let masks: Vec<&Path> = masks.filter(|mask| !is_kernel_path(mask)).collect();
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
        led => led.map_err(unusable(path)),
    }
}
