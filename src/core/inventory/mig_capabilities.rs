//! The nodes below /dev/nvidia-caps that give access to a MIG instance: which ones they are, and creating missing
//! ones.
//!
//! `/proc/driver/nvidia-caps/mig-minors` has a line `NAME MINOR` for each, by the GPU's device minor:
//! `gpu0/gi3/access 30`, `gpu0/gi3/ci0/access 31`, `config 1`, `monitor 2`. For those that exist the driver has
//! a file below `/proc/driver/nvidia/capabilities` with `DeviceFileMinor` and `DeviceFileMode` (NVIDIA's MIG
//! User Guide, "Device nodes and capabilities"; nvidia-modprobe-utils.c reads the same two).

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::Node;
use crate::fs::is_absent;
use crate::fs::under;

const MINORS: &str = "/proc/driver/nvidia-caps/mig-minors";

/// Where the nodes are.
const NODES: &str = "/dev/nvidia-caps";

/// The mode of all nodes except `config`, if the driver does not give one.
const MODE: u32 = 0o444;

/// Whether `node` is an nvidia-caps node.
pub(super) fn is_cap(node: &Node) -> bool {
    node.path.starts_with(NODES)
}

/// The node of the capability `name`. `minors` is the text of `mig-minors`.
pub(super) fn node(minors: &str, name: &str, major: u32) -> Option<Node> {
    let (_, minor) = lines(minors).find(|(known, _)| *known == name)?;
    Some(Node { path: Path::new(NODES).join(format!("nvidia-cap{minor}")), major, minor })
}

/// The nodes of a compute instance on the GPU with this device minor. The first one is its GPU instance's.
///
/// # Errors
/// One line: the driver does not give their numbers, or gives two different ones.
pub fn nodes(root: &Path, major: Option<u32>, gpu: u32, gi: u32, ci: u32) -> Result<[Node; 2], String> {
    let major = major.ok_or("/proc/devices has no nvidia-caps: the driver gives no access to MIG devices")?;
    let minors = read(root, MINORS)?;
    let find = |name: String| {
        let node = node(&minors, &name, major).ok_or_else(|| format!("{MINORS} has no line {name}"))?;
        let told = file_of(&name);
        match value(&read(root, &told)?, "DeviceFileMinor") {
            Some(minor) if minor == node.minor => Ok(node),
            other => {
                let other = other.map_or_else(|| "none".to_owned(), |minor| minor.to_string());
                Err(format!("{MINORS} has minor {} for {name}, but {told} has {other}", node.minor))
            }
        }
    };
    Ok([find(format!("gpu{gpu}/gi{gi}/access"))?, find(format!("gpu{gpu}/gi{gi}/ci{ci}/access"))?])
}

/// The nodes for monitoring and changing all instances: `monitor` and `config`; none if the driver has none.
///
/// # Errors
/// The driver's list of them cannot be read, with its path.
pub fn privileged(root: &Path, major: Option<u32>) -> Result<[Option<Node>; 2], (PathBuf, io::Error)> {
    let path = under(root, MINORS);
    let minors = match fs::read_to_string(&path) {
        Err(error) if is_absent(&error) => String::new(),
        minors => minors.map_err(|error| (path, error))?,
    };
    Ok(["monitor", "config"].map(|name| node(&minors, name, major?)))
}

/// Creates `node` as nvidia-modprobe would. Another process may do the same meanwhile.
///
/// # Errors
/// The file of its capability, and why the node could not be created.
pub(super) fn make(root: &Path, node: &Node) -> Result<(), (String, io::Error)> {
    let minors = read(root, MINORS).unwrap_or_default();
    let name = lines(&minors).find(|(_, minor)| *minor == node.minor).map(|(name, _)| name);
    let file = file_of(name.unwrap_or("*"));
    let made = capability(root, &file, node.minor).and_then(|mode| make_node(root, node, mode));
    made.map_err(|error| (file, error))
}

/// The mode of the node that the capability `file` is for.
fn capability(root: &Path, file: &str, minor: u32) -> io::Result<u32> {
    let text = fs::read_to_string(under(root, file))?;
    if value(&text, "DeviceFileMinor") != Some(minor) {
        return Err(io::Error::other(format!("{file} does not describe nvidia-cap{minor}")));
    }
    Ok(value(&text, "DeviceFileMode").unwrap_or(MODE) & 0o777)
}

/// Creates the device node with `mode`, and its directory.
///
/// # Errors
/// Something else has that name, or the node cannot be created.
pub fn make_node(root: &Path, node: &Node, mode: u32) -> io::Result<()> {
    let path: PathBuf = under(root, &node.path.to_string_lossy());
    if let Some(dir) = path.parent() {
        crate::fs::trusted::create(dir)?;
    }
    match mknod(&path, SFlag::S_IFCHR, Mode::empty(), makedev(node.major.into(), node.minor.into())) {
        // Set again, because the umask changed it.
        Ok(()) => fs::set_permissions(&path, fs::Permissions::from_mode(mode)),
        Err(Errno::EEXIST) => Ok(()),
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

fn lines(minors: &str) -> impl Iterator<Item = (&str, u32)> {
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
        let [gi, ci] = nodes(root(166).path(), Some(241), 1, 3, 0).unwrap();
        assert_eq!(
            (gi.path.to_str(), gi.major, gi.minor),
            (Some("/dev/nvidia-caps/nvidia-cap165"), 241, 165)
        );
        assert_eq!(ci.path.to_str(), Some("/dev/nvidia-caps/nvidia-cap166"));
        assert!(is_cap(&ci));
    }

    #[test]
    fn what_the_driver_does_not_tell_or_tells_twice_is_no_node() {
        let why = |root: &Root, gpu, gi, ci| nodes(root.path(), Some(241), gpu, gi, ci).unwrap_err();
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
        assert!(nodes(root(166).path(), None, 1, 3, 0).unwrap_err().contains("no nvidia-caps"));
    }

    #[test]
    fn the_privileged_ones_are_there_where_the_driver_has_them() {
        let minors = privileged(root(166).path(), Some(241)).unwrap().map(|node| node.map(|node| node.minor));
        assert_eq!(minors, [Some(2), Some(1)]);
        assert_eq!(privileged(Root::new().path(), Some(241)).unwrap(), [None, None]);
        assert_eq!(privileged(root(166).path(), None).unwrap(), [None, None]);
        let unreadable = Root::new();
        unreadable.link(MINORS, "mig-minors");
        assert_eq!(
            privileged(unreadable.path(), Some(241)).unwrap_err().0,
            unreadable.path().join(&MINORS[1..])
        );
    }

    #[test]
    fn no_node_is_made_but_that_of_its_capability() {
        let root = root(167);
        let node = |minor| Node { path: format!("{NODES}/nvidia-cap{minor}").into(), major: 241, minor };
        let (file, error) = make(root.path(), &node(166)).unwrap_err();
        assert_eq!(file, "/proc/driver/nvidia/capabilities/gpu1/mig/gi3/ci0/access");
        assert!(error.to_string().ends_with("does not describe nvidia-cap166"), "{error}");
        assert!(make(root.path(), &node(99)).is_err());
        assert!(!root.path().join("dev/nvidia-caps").exists());
    }
}
