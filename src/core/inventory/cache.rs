//! `inventory.json`: writing it, reading it, and checking that it is up to date; and `mig-watched`, in which `sublet serve`
//! confirms that it compares the MIG devices in it with NVML's.
//!
//! It is while the state of the host is as it was, read from a few short files of the kernel module in /proc and /sys.
//! As long as a directory of the driver's files is as it was seen, no entry of it was added, renamed or removed since,
//! and its files need not be looked for one by one.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use rustix::fs::{Mode, OFlags, RawDir, open};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::{DriverFile, Fingerprint, Inventory, MpsPrograms, check_node};
use crate::config::{Config, Inject};
use crate::fs::{
    distrust, distrust_file, make_trusted_directory, parse_json, read_if_trusted, read_trusted, replace,
    replace_dated, under,
};
use crate::process::{self, kernel_file, uptime_seconds};
use crate::text::safe;

/// `Inventory::schema` of this build.
pub const SCHEMA: &str = "sublet.inventory/1";

/// criu's configuration file for containers with a share, in the directory of `inventory.json`.
pub(crate) const NO_CHECKPOINT_FILE: &str = "no-checkpoint.conf";
/// Its content. criu reads it as an unknown option, prints it, and does not touch the container.
const NO_CHECKPOINT: &str = "\
# sublet has containers with a GPU share name this file for criu. What is on a GPU cannot be saved, and a runtime that
# restores a container asks nobody for its share.
a-container-with-a-GPU-share-cannot-be-checkpointed
";

/// Far more than 16 GPUs with many processes need.
const LARGEST: u64 = 8 << 20;

/// Why there is no usable inventory.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum InventoryError {
    /// It was not written since boot.
    #[error("{} is missing; run `sublet refresh`", .path.display())]
    Missing { path: PathBuf },
    /// The system has changed since it was written.
    #[error("{} is out of date: {changed}; run `sublet refresh`", .path.display())]
    Stale { path: PathBuf, changed: String },
    /// Its content is not of the form that `sublet refresh` writes.
    #[error("{} is corrupt ({why}); run `sublet refresh`", .path.display())]
    Corrupt { path: PathBuf, why: String },
    /// Another user could have written it, so it is not read.
    #[error("{} is not trusted: {why}; remove it and run `sublet refresh`", .path.display())]
    Untrusted { path: PathBuf, why: String },
    /// A GPU of the inventory no longer answers on the PCI bus.
    #[error(
        "GPU {bus_id} fell off the bus (its PCI configuration reads ffff or is gone); run `sublet refresh` to go on \
         without it; a power cycle may bring it back"
    )]
    FellOffTheBus { bus_id: String },
    /// No driver is loaded, so there is nothing to share.
    #[error(
        "no NVIDIA driver is loaded: {} is missing; install the driver or load it with `modprobe nvidia`",
        .path.display()
    )]
    NoDriver { path: PathBuf },
    /// A file or directory exists and cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// `inventory.json` cannot be written.
    #[error("cannot write {}: {source}; run as root, or set state_dir to a directory that can be written", .path.display())]
    Unwritable { path: PathBuf, source: io::Error },
}

impl InventoryError {
    /// Whether `sublet refresh` can help. Otherwise the administrator has to.
    pub const fn wants_refresh(&self) -> bool {
        !matches!(self, Self::NoDriver { .. } | Self::Unreadable { .. } | Self::Unwritable { .. })
    }
}

/// The inventory as last written, whether or not it is up to date. For containers that already run.
pub fn last(config: &Config) -> Result<Inventory, InventoryError> {
    check_directory(config)?;
    read(&path(config))
}

/// The inventory as last refreshed, checked against the running system in a few short file reads.
///
/// # Errors
/// If [`InventoryError::wants_refresh`], `sublet refresh` helps. Other errors concern the driver.
pub fn load(config: &Config) -> Result<Inventory, InventoryError> {
    check_directory(config)?;
    load_beside(config, &[])
}

/// As [`load`], whatever MIG instances the GPUs `changing` (UUIDs) have now. That the state directory is trusted has been
/// checked.
pub(crate) fn load_beside(config: &Config, changing: &[String]) -> Result<Inventory, InventoryError> {
    let path = path(config);
    let inventory = read(&path)?;
    let Seen { fingerprint: mut now, lost } = read_seen(&config.driver.root)?;
    let mut then = inventory.fingerprint.clone();
    for gpu in changing.iter().filter_map(|uuid| inventory.device(uuid)) {
        let prefix = format!("gpu{}/", gpu.minor);
        for instances in [&mut then.mig, &mut now.mig] {
            instances.retain(|instance| !instance.starts_with(&prefix));
        }
    }
    if let Some(bus_id) = lost.into_iter().find(|lost| then.gpus.contains(lost)) {
        return Err(InventoryError::FellOffTheBus { bus_id });
    }
    let changed = find_difference(&then, &now)
        .or_else(|| missing_file(config, &inventory))
        .or_else(|| missing_node(config, &inventory))
        .or_else(|| new_programs(config, &inventory));
    match changed {
        Some(changed) => Err(InventoryError::Stale { path, changed }),
        None => Ok(inventory),
    }
}

/// Writes `inventory.json` atomically with mode 0644, and the file that keeps criu from saving containers with a share.
/// Creates the state directory if it is missing. The file's time is when its probe `began`: who waits for a refresh compares
/// that with its own start.
pub fn store(config: &Config, inventory: &Inventory, began: SystemTime) -> Result<(), InventoryError> {
    let path = path(config);
    let write = || {
        make_trusted_directory(&config.state_dir)
            .map_err(|why| io::Error::other(format!("its directory: {why}")))?;
        write_file(&no_checkpoint(&config.state_dir), NO_CHECKPOINT.as_bytes(), began)?;
        write_file(&path, &serde_json::to_vec(inventory)?, began)
    };
    write().map_err(|source| InventoryError::Unwritable { path: path.clone(), source })
}

/// The present fingerprint. GPUs that no longer answer on the bus are not in it.
///
/// # Errors
/// No driver is loaded, or its files cannot be read.
pub fn fingerprint(config: &Config) -> Result<Fingerprint, InventoryError> {
    read_seen(&config.driver.root).map(|seen| seen.fingerprint)
}

/// `inventory.json` of this configuration.
pub fn path(config: &Config) -> PathBuf {
    config.state_dir.join("inventory.json")
}

/// [`NO_CHECKPOINT_FILE`] in this state directory. It exists whenever an inventory does.
pub(crate) fn no_checkpoint(state_dir: &Path) -> PathBuf {
    state_dir.join(NO_CHECKPOINT_FILE)
}

fn write_file(path: &Path, content: &[u8], time: SystemTime) -> io::Result<()> {
    // `replace_dated` keeps the mode and owner of an existing file, so a file that would not be trusted is removed first.
    if fs::symlink_metadata(path).is_ok_and(|there| distrust_file(&there, LARGEST).is_some()) {
        fs::remove_file(path)?;
    }
    replace_dated(path, content, 0o644, time)
}

fn check_directory(config: &Config) -> Result<(), InventoryError> {
    distrust(&config.state_dir).map_or(Ok(()), |why| {
        Err(InventoryError::Untrusted { path: path(config), why: format!("its directory: {why}") })
    })
}

fn read(path: &Path) -> Result<Inventory, InventoryError> {
    let corrupt = |why| InventoryError::Corrupt { path: path.to_owned(), why };
    let text = read_trusted(path, LARGEST)
        .map_err(|source| InventoryError::Unreadable { path: path.to_owned(), source })?
        .ok_or_else(|| InventoryError::Missing { path: path.to_owned() })?
        .map_err(|why| InventoryError::Untrusted { path: path.to_owned(), why })?;
    let inventory: Inventory =
        parse_json(&text).map_err(|error| corrupt(crate::parse_errors::plain(&error.to_string(), None)))?;
    if inventory.schema != SCHEMA {
        return Err(corrupt(format!("schema {}, not {SCHEMA}", safe(&inventory.schema))));
    }
    Ok(inventory)
}

/// The first difference, in words for people.
fn find_difference(then: &Fingerprint, now: &Fingerprint) -> Option<String> {
    if then.boot_id != now.boot_id {
        return Some("it was written in an earlier boot".to_owned());
    }
    let (before, version) = (&then.driver_version, &now.driver_version);
    if before != version {
        return Some(format!("the driver was {}, and is {} now", safe(before), safe(version)));
    }
    let lists = [("GPUs", &then.gpus, &now.gpus), ("MIG instances", &then.mig, &now.mig)];
    let (what, then, now) = lists.into_iter().find(|(_, then, now)| then != now)?;
    Some(format!("the {what} were {}, and are {} now", join_names(then), join_names(now)))
}

fn join_names(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { safe(&names.join(" ")) }
}

/// An upgrade of the driver package removes the old files while the old module is still loaded.
fn missing_file(config: &Config, inventory: &Inventory) -> Option<String> {
    if config.driver.inject == Inject::None {
        return None;
    }
    let unchanged: Vec<_> = inventory.directories.iter().filter(|seen| seen.is_unchanged()).collect();
    let is_there = |source: &PathBuf| {
        unchanged.iter().any(|seen| seen.has(source))
            || fs::metadata(source).is_ok_and(|there| there.is_file())
    };
    let gone = |source: &PathBuf| !source.starts_with(&config.driver.root) || !is_there(source);
    let source = inventory.files.iter().map(|file| &file.source).find(|source| gone(source))?;
    Some(format!("driver file {} is missing", safe(&source.display().to_string())))
}

/// The refresh leaves a GPU without its node out.
fn missing_node(config: &Config, inventory: &Inventory) -> Option<String> {
    let nodes = inventory.gpus().filter_map(|gpu| gpu.nodes.first());
    nodes.filter_map(|node| check_node(&config.driver.root, node).err()).map(|error| error.to_string()).next()
}

/// The MPS programs, if they were installed after the inventory was written.
fn new_programs(config: &Config, inventory: &Inventory) -> Option<String> {
    let driver = &config.driver;
    let found = inventory.driver.mps_control.is_none() && MpsPrograms::find(driver).both(driver).is_ok();
    found.then(|| "the driver's MPS programs have been installed since".to_owned())
}

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
pub fn read_seen(root: &Path) -> Result<Seen, InventoryError> {
    let boot_id = process::read_boot_id()
        .map(str::to_owned)
        .map_err(|source| InventoryError::Unreadable { path: process::BOOT_ID_FILE.into(), source })?;
    let driver_version = loaded_kernel_module(root)?.version;
    let (lost, gpus) = list_names(&under(root, "/proc/driver/nvidia/gpus"))?
        .into_iter()
        .partition(|bus_id| is_off_the_bus(root, bus_id));
    let mig = mig_instances(&under(root, "/proc/driver/nvidia/capabilities"))?;
    Ok(Seen { fingerprint: Fingerprint { boot_id, driver_version, gpus, mig }, lost })
}

/// Whether any GPU supports MIG, in MIG mode or not. Such a GPU has a directory of instances, which may be empty (H200
/// with MIG off; docs/evidence).
pub fn can_do_mig(root: &Path) -> bool {
    let capabilities = under(root, "/proc/driver/nvidia/capabilities");
    let gpus = list_names(&capabilities).unwrap_or_default();
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
    for gpu in list_names(capabilities)?.iter().filter(|name| is_numbered(name, "gpu")) {
        let mig = capabilities.join(gpu).join("mig");
        for gi in list_names(&mig)?.iter().filter(|name| is_numbered(name, "gi")) {
            let instances = list_names(&mig.join(gi))?;
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
fn list_names(dir: &Path) -> Result<Vec<String>, InventoryError> {
    let unreadable = |error: Errno| InventoryError::Unreadable { path: dir.to_owned(), source: error.into() };
    let opened = match open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(Vec::new()),
        opened => opened.map_err(unreadable)?,
    };
    // Read as the kernel gives them: the C library would also ask for the directory's metadata.
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let (mut entries, mut names) = (RawDir::new(opened, &mut buffer), Vec::new());
    while let Some(entry) = entries.next() {
        let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        names.extend(Some(name).filter(|name| name != "." && name != ".."));
    }
    names.sort_unstable();
    Ok(names)
}

/// The `nvidia` kernel module's report about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelModule {
    /// As `580.159.04`.
    pub version: String,
    /// Whether it reports that it is simulated.
    pub simulated: bool,
}

/// The file with the module's version.
pub const VERSION_FILE: &str = "/proc/driver/nvidia/version";

/// The module loaded on this host.
///
/// # Errors
/// None is loaded, or its version cannot be read.
pub fn loaded_kernel_module(root: &Path) -> Result<KernelModule, InventoryError> {
    let path = under(root, VERSION_FILE);
    for file in [VERSION_FILE, "/sys/module/nvidia/version"] {
        match kernel_file(under(root, file)) {
            Ok(text) => return parse_kernel_module(&text).ok_or(InventoryError::NoDriver { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(InventoryError::Unreadable { path, source }),
        }
    }
    Err(InventoryError::NoDriver { path })
}

/// Two spellings are in use, and a bare version in /sys:
/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …` and
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build …`.
fn parse_kernel_module(text: &str) -> Option<KernelModule> {
    let first = text.lines().next()?;
    let version = first.split_ascii_whitespace().find(|word| is_driver_version(word))?;
    Some(KernelModule { version: version.to_owned(), simulated: first.contains("SIMULATED") })
}

/// Whether `text` has the form of a driver's version: `580.65`, `580.159.04`. Its first number has three digits or
/// more, unlike a library's own version, such as `1.1.13` of libnvidia-egl-wayland.
pub fn is_driver_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let digits = |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    matches!(parts.len(), 2 | 3) && parts[0].len() >= 3 && parts.iter().all(digits)
}

/// A change that comes as soon after another may get the same time: the kernel's clock for files goes on once in 10 ms at
/// the most (`current_time` in the kernel's fs/inode.c).
const TICK: Duration = Duration::from_millis(100);
/// The same on file systems that count whole seconds, or two.
const LONG_TICK: Duration = Duration::from_secs(3);

/// A directory when all files of the driver in it were there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileDirectory {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// Seconds and nanoseconds of its last change (`st_ctim`), which no program can set.
    changed: (i64, i64),
}

impl FileDirectory {
    /// Of `files`. One that has just been changed is left out, because the next change could have the same time.
    pub fn of(files: &[DriverFile]) -> Vec<Self> {
        let mut paths: Vec<&Path> = files.iter().filter_map(|file| file.source.parent()).collect();
        paths.sort_unstable();
        paths.dedup();
        let seen: Vec<Self> = paths.into_iter().filter_map(Self::stat).filter(Self::is_settled).collect();
        // A file that is missing now went before its directory was seen.
        let is_whole =
            |directory: &Self| files.iter().all(|file| !directory.has(&file.source) || file.source.is_file());
        seen.into_iter().filter(is_whole).collect()
    }

    fn stat(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        let changed = (meta.ctime(), meta.ctime_nsec());
        Some(Self { path: path.to_owned(), device: meta.dev(), inode: meta.ino(), changed })
    }

    fn is_settled(&self) -> bool {
        let (seconds, nanoseconds) = (u64::try_from(self.changed.0), u32::try_from(self.changed.1));
        let Some((seconds, nanoseconds)) = seconds.ok().zip(nanoseconds.ok()) else { return false };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let passed = since.checked_sub(Duration::new(seconds, nanoseconds));
        passed.is_some_and(|passed| passed > if nanoseconds == 0 { LONG_TICK } else { TICK })
    }

    /// Whether `file` is in it.
    pub(super) fn has(&self, file: &Path) -> bool {
        file.parent() == Some(&self.path)
    }

    /// Whether it is as it was seen.
    pub(super) fn is_unchanged(&self) -> bool {
        Self::stat(&self.path).as_ref() == Some(self)
    }
}

/// A confirmation older than this, in seconds, does not count. The service renews it every two seconds.
const WATCHED_LIMIT: u64 = 5;

/// A boot id and a number, in bytes.
const LONGEST_WATCHED: u64 = 100;

/// Whether the service has recently compared the MIG devices that NVML reports with the inventory.
pub(crate) fn is_watched(config: &Config) -> bool {
    let word = read_if_trusted(&watched_file(config), LONGEST_WATCHED).unwrap_or_default();
    is_recent(&String::from_utf8_lossy(&word), process::read_boot_id().unwrap_or_default(), uptime_seconds())
}

/// Confirms that its MIG devices were the ones of NVML at `since`, in seconds since boot.
pub fn watch(config: &Config, since: u64) -> io::Result<()> {
    let record = format!("{} {since}\n", process::read_boot_id().unwrap_or_default());
    replace(&watched_file(config), record.as_bytes(), 0o644)
}

/// Withdraws the confirmation.
pub fn unwatch(config: &Config) {
    let _ = fs::remove_file(watched_file(config));
}

fn watched_file(config: &Config) -> PathBuf {
    config.state_dir.join("mig-watched")
}

fn is_recent(text: &str, boot_id: &str, now: u64) -> bool {
    let Some((boot, since)) = text.trim().split_once(' ') else { return false };
    let since = since.parse::<u64>().ok();
    !boot_id.is_empty()
        && boot == boot_id
        && since.is_some_and(|since| since <= now && now - since <= WATCHED_LIMIT)
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;

#[cfg(test)]
mod fingerprint_tests {
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
        let seen = read_seen(root.path()).unwrap();
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
        let seen = read_seen(root.path()).unwrap();
        assert_eq!(seen.lost, ["0000:3b:00.0", "0000:86:00.0"]);
        assert_eq!(seen.fingerprint.gpus, ["0000:5e:00.0"]);
    }

    #[test]
    fn no_kernel_module_is_named() {
        let root = Root::new();
        let error = read_seen(root.path()).unwrap_err().to_string();
        assert!(error.starts_with("no NVIDIA driver is loaded: "), "{error}");
        assert!(error.contains("/proc/driver/nvidia/version is missing"), "{error}");
    }
}

#[cfg(test)]
mod kernel_module_tests {
    use super::*;

    #[test]
    fn reads_both_spellings_and_the_bare_version() {
        let cases = [
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n\
                 GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
                "535.129.03",
                false,
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build  (dvs)",
                "570.86.15",
                false,
            ),
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  SIMULATED", "580.159.04", true),
            ("580.65\n", "580.65", false),
        ];
        for (text, version, simulated) in cases {
            assert_eq!(
                parse_kernel_module(text),
                Some(KernelModule { version: version.into(), simulated }),
                "{text}"
            );
        }
    }

    #[test]
    fn no_version_is_no_module() {
        for text in ["", "\n", "NVRM version: NVIDIA UNIX x86_64 Kernel Module", "1.2.3", "580.", "5a0.1"] {
            assert_eq!(parse_kernel_module(text), None, "{text}");
        }
    }

    #[test]
    fn a_library_version_is_no_driver_version() {
        assert!(is_driver_version("580.159.04"));
        for own in ["1", "4.0.0", "1.1.13", "580", "580.1.2.3", ""] {
            assert!(!is_driver_version(own), "{own}");
        }
    }
}

#[cfg(test)]
mod file_directories_tests {
    use super::super::FileKind;
    use super::*;
    use crate::share::Capability;

    fn file(source: PathBuf) -> DriverFile {
        let kind = FileKind::Program { name: "x".into() };
        DriverFile { source, kind, capability: Capability::Utility, needs: None }
    }

    #[test]
    fn a_directory_counts_until_an_entry_comes_or_goes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("libcuda.so.1"), dir.path().join("other"));
        fs::write(&path, "").unwrap();
        let files = [file(path.clone()), file(dir.path().join("below/libnone.so"))];
        assert!(FileDirectory::of(&files).is_empty(), "it has just been changed");
        // Its time is the kernel's clock's.
        std::thread::sleep(2 * TICK);
        let seen = || FileDirectory::of(&files);
        let [directory] = seen().try_into().unwrap();
        assert!(directory.is_unchanged() && directory.has(&path) && !directory.has(dir.path()));
        for change in
            [|path: &Path| fs::write(path, "").unwrap(), |path: &Path| fs::remove_file(path).unwrap()]
        {
            change(&other);
            assert!(!directory.is_unchanged());
        }
        std::thread::sleep(2 * TICK);
        assert_ne!(seen(), [directory]);
        fs::remove_file(&path).unwrap();
        std::thread::sleep(2 * TICK);
        assert!(seen().is_empty(), "the file is gone");
    }
}
