//! Device nodes of the driver: which there should be, and making the ones of MIG instances. Majors are from /proc/devices; DRI
//! nodes belong to a GPU.
//!
//! The nodes below /dev/nvidia-caps give access to a MIG instance; missing ones are created.
//! `/proc/driver/nvidia-caps/mig-minors` has a line `NAME MINOR` for each, by the GPU's device minor:
//! `gpu0/gi3/access 30`, `gpu0/gi3/ci0/access 31`, `config 1`, `monitor 2`. For those that exist the driver has
//! a file below `/proc/driver/nvidia/capabilities` with `DeviceFileMinor` and `DeviceFileMode` (NVIDIA's MIG
//! User Guide, "Device nodes and capabilities"; nvidia-modprobe-utils.c reads the same two).

use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::sys::stat::{Mode, SFlag, major, makedev, minor, mknod};

use super::{Majors, Node};
use crate::fs::{create_directories, under, unless_absent};

/// Why a node cannot be given to a container. The paths include the driver root.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum NodeError {
    /// It does not exist.
    #[error("device node {} is missing; {}", .path.display(), remedy(.path))]
    Missing { path: PathBuf },
    /// An nvidia-caps node that does not exist and cannot be created.
    #[error(
        "device node {} is missing and cannot be created ({source}); run `nvidia-modprobe -f {file}` as root",
        .path.display()
    )]
    Unmade { path: PathBuf, file: String, source: io::Error },
    /// Something else is at its path.
    #[error(
        "{} is {found}, but /proc/devices says it should be the character device {major}:{minor}; remove \
         it, then {}",
        .path.display(), remedy(.path)
    )]
    Other { path: PathBuf, found: String, major: u32, minor: u32 },
    /// Its mode keeps the processes of a user namespace out, which have none of the host's groups.
    #[error(
        "device node {} has mode {mode:04o}, so the container, in its user namespace, may not open it: {remedy}",
        .path.display()
    )]
    Closed { path: PathBuf, mode: u32, remedy: &'static str },
    /// It cannot be examined.
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
}

impl Node {
    /// Whether CUDA does without it, so that a container is served without it too: of the driver's nodes it opens
    /// nvidiactl, nvidia-uvm and the GPU's (docs/evidence/2026-11-21-h200-shares.md).
    pub fn is_optional(&self) -> bool {
        let spare = ["/dev/nvidia-modeset", "/dev/nvidia-uvm-tools", "/dev/dri"];
        spare.iter().any(|path| self.path.starts_with(path))
    }
}

/// The command that creates the node. `nvidia-modprobe` is setuid and part of every driver package (its manual page).
fn remedy(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match name.strip_prefix("nvidia").map(str::parse::<u32>) {
        _ if name.starts_with("nvidia-uvm") => {
            "run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`".to_owned()
        }
        _ if name == "nvidia-modeset" => "run `nvidia-modprobe -m`".to_owned(),
        Some(Ok(minor)) => format!("run `nvidia-modprobe -c {minor}`"),
        _ => "run `nvidia-modprobe`".to_owned(),
    }
}

impl Majors {
    /// Reads the text of /proc/devices. Drivers up to 535 call `nvidia` `nvidia-frontend`.
    pub fn parse(devices: &str) -> Self {
        let characters = devices.split("Block devices:").next().unwrap_or_default();
        let find = |names: &[&str]| {
            characters.lines().find_map(|line| {
                let (number, name) = line.trim().split_once(' ')?;
                names.contains(&name.trim()).then(|| number.parse().ok())?
            })
        };
        Self {
            nvidia: find(&["nvidia", "nvidia-frontend", "nvidiactl"]),
            uvm: find(&["nvidia-uvm"]),
            caps: find(&["nvidia-caps"]),
        }
    }
}

/// The nodes under /dev/dri of the GPU at `bus_id`. Nodes that do not exist are left out.
///
/// # Errors
/// The directory or one of the nodes cannot be examined, with its path.
pub fn list_dri_nodes(root: &Path, bus_id: &str) -> Result<Vec<Node>, (PathBuf, io::Error)> {
    let dir = under(root, &format!("/sys/bus/pci/devices/{bus_id}/drm"));
    let names = unless_absent(list_names(&dir)).map_err(|error| (dir, error))?.unwrap_or_default();
    let mut nodes = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("card") || name.starts_with("renderD")) {
        nodes.extend(character_device(root, Path::new("/dev/dri").join(name))?);
    }
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(nodes)
}

/// The names in `dir` that are UTF-8.
fn list_names(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    names.filter_map(Result::transpose).collect()
}

fn character_device(root: &Path, path: PathBuf) -> Result<Option<Node>, (PathBuf, io::Error)> {
    let file = under(root, &path.to_string_lossy());
    let there = unless_absent(fs::metadata(&file)).map_err(|error| (file, error))?;
    let Some(there) = there else { return Ok(None) };
    let number = |part: u64| u32::try_from(part).ok();
    let numbers = number(major(there.rdev())).zip(number(minor(there.rdev())));
    let numbers = numbers.filter(|_| there.file_type().is_char_device());
    Ok(numbers.map(|(major, minor)| Node { path, major, minor }))
}

const MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";

/// Where the nodes of MIG instances are.
pub(super) const NODES: &str = "/dev/nvidia-caps";

/// The mode of all of these except `config`, if the driver does not give one.
const MODE: u32 = 0o444;

/// The node of the capability `name`. `minors` is the text of `mig-minors`.
fn cap_node(minors: &str, name: &str, major: u32) -> Option<Node> {
    let (_, minor) = cap_minors(minors).find(|(known, _)| *known == name)?;
    Some(Node { path: Path::new(NODES).join(format!("nvidia-cap{minor}")), major, minor })
}

/// The nodes of a compute instance on the GPU with this device minor. The first one is its GPU instance's.
///
/// # Errors
/// One line: the driver does not give their numbers, or gives two different ones.
pub fn instance_nodes(
    root: &Path,
    major: Option<u32>,
    gpu: u32,
    gi: u32,
    ci: u32,
) -> Result<[Node; 2], String> {
    let major = major.ok_or("/proc/devices has no nvidia-caps: the driver gives no access to MIG devices")?;
    let minors = read(root, MINORS)?;
    let find = |name: String| {
        let node = cap_node(&minors, &name, major).ok_or_else(|| format!("{MINORS} has no line {name}"))?;
        let file = file_of(&name);
        match value(&read(root, &file)?, "DeviceFileMinor") {
            Some(minor) if minor == node.minor => Ok(node),
            other => {
                let other = other.map_or_else(|| "none".to_owned(), |minor| minor.to_string());
                Err(format!("{MINORS} has minor {} for {name}, but {file} has {other}", node.minor))
            }
        }
    };
    Ok([find(format!("gpu{gpu}/gi{gi}/access"))?, find(format!("gpu{gpu}/gi{gi}/ci{ci}/access"))?])
}

/// The nodes for monitoring and changing all instances: `monitor` and `config`; none if the driver has none.
///
/// # Errors
/// The driver's list of them cannot be read, with its path.
pub fn privileged_nodes(root: &Path, major: Option<u32>) -> Result<[Option<Node>; 2], (PathBuf, io::Error)> {
    let path = under(root, MINORS);
    let minors = unless_absent(fs::read_to_string(&path)).map_err(|error| (path, error))?.unwrap_or_default();
    Ok(["monitor", "config"].map(|name| cap_node(&minors, name, major?)))
}

/// Creates `node` as nvidia-modprobe would. Another process may do the same meanwhile.
///
/// # Errors
/// The file of its capability, and why the node could not be created.
pub(super) fn make_cap_node(root: &Path, node: &Node) -> Result<(), (String, io::Error)> {
    let minors = read(root, MINORS).unwrap_or_default();
    let name = cap_minors(&minors).find(|(_, minor)| *minor == node.minor).map(|(name, _)| name);
    let file = file_of(name.unwrap_or("*"));
    let make = || {
        let text = fs::read_to_string(under(root, &file))?;
        if value(&text, "DeviceFileMinor") != Some(node.minor) {
            return Err(io::Error::other(format!("{file} does not describe nvidia-cap{}", node.minor)));
        }
        make_node(root, node, value(&text, "DeviceFileMode").unwrap_or(MODE) & 0o777)
    };
    make().map_err(|error| (file, error))
}

/// Creates the device node with `mode`, and its directory.
///
/// # Errors
/// Something else has that name, or the node cannot be created.
pub fn make_node(root: &Path, node: &Node, mode: u32) -> io::Result<()> {
    let path = under(root, &node.path.to_string_lossy());
    path.parent().map(create_directories).transpose()?;
    match mknod(&path, SFlag::S_IFCHR, Mode::empty(), makedev(node.major.into(), node.minor.into())) {
        // Set again, because the umask changed it.
        Ok(()) => fs::set_permissions(&path, fs::Permissions::from_mode(mode)),
        Err(nix::errno::Errno::EEXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// `gpu0/gi3/access` has its file at `gpu0/mig/gi3/access`, `config` at `mig/config`.
fn file_of(name: &str) -> String {
    let below = match name.split_once('/') {
        Some((gpu, rest)) => format!("{gpu}/mig/{rest}"),
        None => format!("mig/{name}"),
    };
    format!("/proc/driver/nvidia/capabilities/{below}")
}

fn cap_minors(minors: &str) -> impl Iterator<Item = (&str, u32)> {
    minors.lines().filter_map(|line| {
        let (name, minor) = line.trim().split_once(' ')?;
        Some((name, minor.trim().parse().ok()?))
    })
}

/// The number after `KEY:`.
pub fn value(text: &str, key: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')?.trim().parse().ok())
}

fn read(root: &Path, path: &str) -> Result<String, String> {
    fs::read_to_string(under(root, path)).map_err(|error| format!("{path} cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Root;
    use super::*;
    use crate::inventory::check_node;

    #[test]
    fn nodes_are_checked_by_number_and_kind() {
        let node = |path: &str, major, minor| Node { path: path.into(), major, minor };
        assert!(check_node(Path::new("/"), &node("/dev/null", 1, 3)).is_ok());
        let error = check_node(Path::new("/"), &node("/dev/null", 195, 0)).unwrap_err().to_string();
        assert!(
            error.contains(
                "is the character device 1:3, but /proc/devices says it should be the character device 195:0"
            ),
            "{error}"
        );
        let root = Root::new();
        root.file("/dev/nvidia0", "");
        let error = check_node(root.path(), &node("/dev/nvidia0", 195, 0)).unwrap_err().to_string();
        assert!(error.contains("is no character device, but"), "{error}");
    }

    #[test]
    fn a_missing_node_comes_with_the_command_that_makes_it() {
        let root = Root::new();
        let cases = [
            ("/dev/nvidia3", "is missing; run `nvidia-modprobe -c 3`"),
            ("/dev/nvidiactl", "is missing; run `nvidia-modprobe`"),
            ("/dev/nvidia-modeset", "is missing; run `nvidia-modprobe -m`"),
            ("/dev/nvidia-uvm", "is missing; run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`"),
        ];
        for (path, message) in cases {
            let node = Node { path: path.into(), major: 195, minor: 3 };
            let error = check_node(root.path(), &node).unwrap_err().to_string();
            assert!(error.ends_with(message), "{error}");
        }
    }
}

#[cfg(test)]
mod device_majors_tests {
    use super::*;

    #[test]
    fn majors_of_new_and_old_drivers() {
        let new = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n\
                   241 nvidia-caps\n240 nvidia-caps-imex-channels\n510 nvidia-uvm\n\n\
                   Block devices:\n  8 sd\n";
        assert_eq!(Majors::parse(new), Majors { nvidia: Some(195), uvm: Some(510), caps: Some(241) });
        let old = "Character devices:\n195 nvidia-frontend\n235 nvidia-uvm\n";
        assert_eq!(Majors::parse(old), Majors { nvidia: Some(195), uvm: Some(235), caps: None });
    }

    #[test]
    fn a_block_device_or_garbage_is_no_major() {
        let block = "Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n";
        assert_eq!(Majors::parse(block), Majors::default());
        assert_eq!(Majors::parse("Character devices:\nx nvidia\nnvidia\n195\n"), Majors::default());
    }

    #[test]
    fn dri_nodes_are_numbered_as_found_and_left_out_where_nobody_made_them() {
        let root = super::super::fixture::Root::new();
        let drm = "/sys/bus/pci/devices/0000:3b:00.0/drm";
        for name in ["card1", "card2", "renderD128", "controlD64", "version"] {
            root.file(&format!("{drm}/{name}/dev"), "");
        }
        // /dev/null stands for a node: 1:3 on every Linux.
        root.link("/dev/dri/renderD128", "/dev/null").link("/dev/dri/controlD64", "/dev/null");
        root.file("/dev/dri/card1", "no device");
        let expected = Node { path: "/dev/dri/renderD128".into(), major: 1, minor: 3 };
        let found = |bus_id| list_dri_nodes(root.path(), bus_id).unwrap();
        assert_eq!(found("0000:3b:00.0"), [expected]);
        assert_eq!(found("0000:5e:00.0"), []);
    }

    #[test]
    fn a_node_that_cannot_be_examined_is_an_error() {
        let root = super::super::fixture::Root::new();
        root.file("/sys/bus/pci/devices/0000:3b:00.0/drm/card1/dev", "");
        // ELOOP stands for every error but absence.
        root.link("/dev/dri/card1", "card1").link("/sys/bus/pci/devices/0000:5e:00.0/drm", "drm");
        let why = |bus_id| list_dri_nodes(root.path(), bus_id).unwrap_err().0;
        assert_eq!(why("0000:3b:00.0"), root.path().join("dev/dri/card1"));
        assert_eq!(why("0000:5e:00.0"), root.path().join("sys/bus/pci/devices/0000:5e:00.0/drm"));
    }
}

#[cfg(test)]
mod mig_nodes_tests {
    use super::super::fixture::Root;
    use super::*;

    fn root(minor_of_ci: u32) -> Root {
        let root = Root::new();
        let minors = "config 1\nmonitor 2\ngpu0/gi3/access 30\ngpu0/gi3/ci0/access 31\ngpu1/gi3/access 165\n\
                      gpu1/gi3/ci0/access 166\n";
        root.file(MINORS, minors);
        let file =
            |minor: u32| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        root.file("/proc/driver/nvidia/capabilities/gpu1/mig/gi3/access", file(165));
        root.file("/proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access", file(minor_of_ci));
        root
    }

    #[test]
    fn an_instance_has_two_nodes_by_the_device_minor() {
        let [gi, ci] = instance_nodes(root(166).path(), Some(241), 1, 3, 0).unwrap();
        assert_eq!(
            (gi.path.to_str(), gi.major, gi.minor),
            (Some("/dev/nvidia-caps/nvidia-cap165"), 241, 165)
        );
        assert_eq!(ci.path.to_str(), Some("/dev/nvidia-caps/nvidia-cap166"));
        assert!(ci.path.starts_with(NODES));
    }

    #[test]
    fn a_minor_that_is_missing_or_contradicted_is_an_error() {
        let why = |root: &Root, gpu, gi, ci| instance_nodes(root.path(), Some(241), gpu, gi, ci).unwrap_err();
        assert_eq!(
            why(&root(167), 1, 3, 0),
            "/proc/driver/nvidia-caps/mig-minors has minor 166 for gpu1/gi3/ci0/access, but \
             /proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access has 167"
        );
        assert_eq!(
            why(&root(166), 1, 3, 1),
            "/proc/driver/nvidia-caps/mig-minors has no line gpu1/gi3/ci1/access"
        );
        assert!(why(&root(166), 0, 3, 0).starts_with(
            "/proc/driver/nvidia/capabilities/gpu0/mig/gi3/access cannot be read: No such file"
        ));
        assert!(instance_nodes(root(166).path(), None, 1, 3, 0).unwrap_err().contains("no nvidia-caps"));
    }

    #[test]
    fn the_privileged_ones_are_there_where_the_driver_has_them() {
        let minors =
            privileged_nodes(root(166).path(), Some(241)).unwrap().map(|node| node.map(|node| node.minor));
        assert_eq!(minors, [Some(2), Some(1)]);
        assert_eq!(privileged_nodes(Root::new().path(), Some(241)).unwrap(), [None, None]);
        assert_eq!(privileged_nodes(root(166).path(), None).unwrap(), [None, None]);
        let unreadable = Root::new();
        unreadable.link(MINORS, "mig-minors");
        assert_eq!(
            privileged_nodes(unreadable.path(), Some(241)).unwrap_err().0,
            unreadable.path().join(&MINORS[1..])
        );
    }

    #[test]
    fn no_node_is_made_but_that_of_its_capability() {
        let root = root(167);
        let node = |minor| Node { path: format!("{NODES}/nvidia-cap{minor}").into(), major: 241, minor };
        let (file, error) = make_cap_node(root.path(), &node(166)).unwrap_err();
        assert_eq!(file, "/proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access");
        assert!(error.to_string().ends_with("does not describe nvidia-cap166"), "{error}");
        assert!(make_cap_node(root.path(), &node(99)).is_err());
        assert!(!root.path().join("dev/nvidia-caps").exists());
    }
}
