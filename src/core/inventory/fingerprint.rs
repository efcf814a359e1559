//! The state of the host that must be unchanged for an inventory to be up to date, read from a few short files.

use std::fs::File;
use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fs::{Mode, OFlags, RawDir, open};
use rustix::io::Errno;

use super::{Fingerprint, InventoryError, kernel_module};
use crate::fs::below::under;
use crate::host::boot_id;

/// The present fingerprint, and the GPUs that it leaves out.
#[derive(Debug)]
pub struct Seen {
    /// The fingerprint in the form that the inventory keeps.
    pub fingerprint: Fingerprint,
    /// Bus ids of GPUs that the driver lists but that no longer answer on the PCI bus. They are not in the fingerprint.
    pub lost: Vec<String>,
}

/// Reads boot id, kernel module version, GPUs and MIG instances below the driver root.
///
/// # Errors
/// No driver is loaded, or one of its directories cannot be read.
pub fn read(root: &Path) -> Result<Seen, InventoryError> {
    let boot_id = boot_id::read()
        .map(str::to_owned)
        .map_err(|source| InventoryError::Unreadable { path: boot_id::FILE.into(), source })?;
    let version_file = under(root, kernel_module::VERSION_FILE);
    let module = kernel_module::loaded(root)
        .map_err(|source| InventoryError::Unreadable { path: version_file.clone(), source })?
        .ok_or(InventoryError::NoDriver { path: version_file })?;
    let (lost, gpus) = names(&under(root, "/proc/driver/nvidia/gpus"))?
        .into_iter()
        .partition(|bus_id| is_off_the_bus(root, bus_id));
    let mig = mig_instances(&under(root, "/proc/driver/nvidia/capabilities"))?;
    Ok(Seen { fingerprint: Fingerprint { boot_id, driver_version: module.version, gpus, mig }, lost })
}

/// Whether any GPU supports MIG, in MIG mode or not. Such a GPU has a directory of instances, which may be empty (H200
/// with MIG off; docs/evidence).
#[must_use]
pub fn can_do_mig(root: &Path) -> bool {
    let capabilities = under(root, "/proc/driver/nvidia/capabilities");
    let gpus = names(&capabilities).unwrap_or_default();
    gpus.iter().any(|name| is_numbered(name, "gpu") && capabilities.join(name).join("mig").is_dir())
}

/// Every configuration read of a device that is gone returns all ones (PCI Local Bus Specification 3.0, 6.1: the vendor
/// id `0xFFFF` is invalid), and one that was removed has no directory any more. A file that cannot be read proves nothing.
fn is_off_the_bus(root: &Path, bus_id: &str) -> bool {
    let devices = under(root, "/sys/bus/pci/devices");
    let mut vendor = [0; 2];
    match File::open(devices.join(bus_id).join("config"))
        .and_then(|mut config| config.read_exact(&mut vendor))
    {
        Ok(()) => vendor == [0xff, 0xff],
        Err(error) => {
            error.kind() == io::ErrorKind::NotFound && devices.is_dir() && !devices.join(bus_id).exists()
        }
    }
}

/// `gpu<minor>/gi<G>/ci<C>` for each compute instance under `gpu<minor>/mig/gi<G>/ci<C>`.
fn mig_instances(capabilities: &Path) -> Result<Vec<String>, InventoryError> {
    let mut found = Vec::new();
    for gpu in names(capabilities)?.iter().filter(|name| is_numbered(name, "gpu")) {
        let mig = capabilities.join(gpu).join("mig");
        for gi in names(&mig)?.iter().filter(|name| is_numbered(name, "gi")) {
            let instances = names(&mig.join(gi))?;
            found.extend(
                instances.iter().filter(|name| is_numbered(name, "ci")).map(|ci| format!("{gpu}/{gi}/{ci}")),
            );
        }
    }
    Ok(found)
}

fn is_numbered(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix)
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The sorted names in `dir`; none if the directory does not exist.
fn names(dir: &Path) -> Result<Vec<String>, InventoryError> {
    let unreadable = |error: Errno| InventoryError::Unreadable { path: dir.to_owned(), source: error.into() };
    let opened = match open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(Vec::new()),
        opened => opened.map_err(unreadable)?,
    };
    // Read as the kernel gives them: the C library would also ask for the directory's metadata.
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let (mut entries, mut names) = (RawDir::new(opened, &mut buffer), Vec::new());
    while let Some(entry) = entries.next() {
        let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        names.extend(Some(name).filter(|name| name != "." && name != ".."));
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::fixture::Root;
    use super::*;

    #[test]
    fn sees_gpus_and_mig_instances_in_order() {
        let root = Root::with_driver("580.159.04");
        root.gpu("0000:b3:00.0", [0xde, 0x10]).gpu("0000:3b:00.0", [0xde, 0x10]);
        for access in ["gi2/ci0/access", "gi10/ci0/access", "gi10/ci1/access", "gi2/access", "gi11/access"] {
            root.file(&format!("/proc/driver/nvidia/capabilities/gpu1/mig/{access}"), "DeviceFileMinor: 1");
        }
        root.file("/proc/driver/nvidia/capabilities/mig/config", "")
            .file("/proc/driver/nvidia/capabilities/fabric-imex-mgmt", "");
        let seen = read(root.path()).unwrap();
        assert_eq!(seen.fingerprint.driver_version, "580.159.04");
        assert_eq!(seen.fingerprint.gpus, ["0000:3b:00.0", "0000:b3:00.0"]);
        assert_eq!(seen.fingerprint.mig, ["gpu1/gi10/ci0", "gpu1/gi10/ci1", "gpu1/gi2/ci0"]);
        assert_eq!(seen.fingerprint.boot_id.len(), 36);
        assert!(seen.lost.is_empty());
    }

    #[test]
    fn a_gpu_that_answers_with_ones_or_has_left_is_lost() {
        let root = Root::with_driver("580.159.04");
        root.gpu("0000:3b:00.0", [0xff, 0xff]).gpu("0000:5e:00.0", [0xde, 0x10]);
        root.gpu("0000:86:00.0", [0xde, 0x10]);
        fs::remove_dir_all(root.path().join("sys/bus/pci/devices/0000:86:00.0")).unwrap();
        let seen = read(root.path()).unwrap();
        assert_eq!(seen.lost, ["0000:3b:00.0", "0000:86:00.0"]);
        assert_eq!(seen.fingerprint.gpus, ["0000:5e:00.0"]);
    }

    #[test]
    fn no_kernel_module_is_named() {
        let root = Root::new();
        let error = read(root.path()).unwrap_err().to_string();
        assert!(error.starts_with("no NVIDIA driver is loaded: "), "{error}");
        assert!(error.contains("/proc/driver/nvidia/version is missing"), "{error}");
    }
}
