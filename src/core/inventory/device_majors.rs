//! Majors from /proc/devices, and the DRI nodes that belong to a GPU.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::{Majors, Node};
use crate::fs::below::under;
use crate::fs::looked_for::is_absent;

impl Majors {
    /// Reads the text of /proc/devices. Drivers up to 535 call `nvidia` `nvidia-frontend`.
    #[must_use]
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
pub fn dri(root: &Path, bus_id: &str) -> Result<Vec<Node>, (PathBuf, io::Error)> {
    let dir = under(root, &format!("/sys/bus/pci/devices/{bus_id}/drm"));
    let names = match names(&dir) {
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        names => names.map_err(|error| (dir, error))?,
    };
    let mut nodes = Vec::new();
    for name in names.iter().filter(|name| name.starts_with("card") || name.starts_with("renderD")) {
        nodes.extend(character_device(root, Path::new("/dev/dri").join(name))?);
    }
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(nodes)
}

/// The names in `dir` that are UTF-8.
fn names(dir: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    names.filter_map(Result::transpose).collect()
}

fn character_device(root: &Path, path: PathBuf) -> Result<Option<Node>, (PathBuf, io::Error)> {
    let file = under(root, &path.to_string_lossy());
    let there = match fs::metadata(&file) {
        Err(error) if is_absent(&error) => return Ok(None),
        there => there.map_err(|error| (file, error))?,
    };
    let number = |part: u64| u32::try_from(part).ok();
    let numbers = number(major(there.rdev())).zip(number(minor(there.rdev())));
    let numbers = numbers.filter(|_| there.file_type().is_char_device());
    Ok(numbers.map(|(major, minor)| Node { path, major, minor }))
}

#[cfg(test)]
mod tests {
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
        let found = |bus_id| dri(root.path(), bus_id).unwrap();
        assert_eq!(found("0000:3b:00.0"), [expected]);
        assert_eq!(found("0000:5e:00.0"), []);
    }

    #[test]
    fn what_cannot_be_examined_is_not_left_out() {
        let root = super::super::fixture::Root::new();
        root.file("/sys/bus/pci/devices/0000:3b:00.0/drm/card1/dev", "");
        // ELOOP stands for every error but absence.
        root.link("/dev/dri/card1", "card1").link("/sys/bus/pci/devices/0000:5e:00.0/drm", "drm");
        let why = |bus_id| dri(root.path(), bus_id).unwrap_err().0;
        assert_eq!(why("0000:3b:00.0"), root.path().join("dev/dri/card1"));
        assert_eq!(why("0000:5e:00.0"), root.path().join("sys/bus/pci/devices/0000:5e:00.0/drm"));
    }
}
