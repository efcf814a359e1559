//! `inventory.json`: writing it, reading it, and checking that it is up to date.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Fingerprint, Inventory, MpsPrograms, check_node};
use crate::config::{Config, Inject};
use crate::fs::atomic::replace;
use crate::fs::trusted::{self, distrust_file};
use crate::parse_errors::plain;
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
pub enum InventoryError {
    /// It was not written since boot.
    #[error("{} is missing; run `sublet refresh`", .path.display())]
    Missing {
        /// `inventory.json`.
        path: PathBuf,
    },
    /// The system has changed since it was written.
    #[error("{} is out of date: {changed}; run `sublet refresh`", .path.display())]
    Stale {
        /// `inventory.json`.
        path: PathBuf,
        /// The difference, with the old and the new value.
        changed: String,
    },
    /// Its content is not what `sublet refresh` writes.
    #[error("{} is corrupt ({why}); run `sublet refresh`", .path.display())]
    Corrupt {
        /// `inventory.json`.
        path: PathBuf,
        /// How.
        why: String,
    },
    /// Another user could have written it, so it is not read.
    #[error("{} is not trusted: {why}; remove it and run `sublet refresh`", .path.display())]
    Untrusted {
        /// `inventory.json`.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A GPU of the inventory no longer answers on the PCI bus.
    #[error(
        "GPU {bus_id} fell off the bus (its PCI configuration reads ffff or is gone); run `sublet refresh` to go on \
         without it; a power cycle may bring it back"
    )]
    FellOffTheBus {
        /// As `0000:3b:00.0`.
        bus_id: String,
    },
    /// No driver is loaded, so there is nothing to share.
    #[error(
        "no NVIDIA driver is loaded: {} is missing; install the driver or load it with `modprobe nvidia`",
        .path.display()
    )]
    NoDriver {
        /// Where a loaded kernel module gives its version.
        path: PathBuf,
    },
    /// A file or directory exists and cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `inventory.json` cannot be written.
    #[error("cannot write {}: {source}; run as root, or set state_dir to a directory that can be written", .path.display())]
    Unwritable {
        /// `inventory.json` or its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl InventoryError {
    /// Whether `sublet refresh` can help. Otherwise the administrator has to.
    #[must_use]
    pub const fn wants_refresh(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Stale { .. }
                | Self::Corrupt { .. }
                | Self::Untrusted { .. }
                | Self::FellOffTheBus { .. }
        )
    }
}

/// The inventory as last written, whether or not it is up to date. For containers that already run.
pub fn last(config: &Config) -> Result<Inventory, InventoryError> {
    let path = path(config);
    check_directory(&path)?;
    parse(&path, &read(&path)?)
}

/// The inventory as last refreshed, checked against the running system in a few short file reads.
///
/// # Errors
/// If [`InventoryError::wants_refresh`], `sublet refresh` helps. Other errors concern the driver.
pub fn load(config: &Config) -> Result<Inventory, InventoryError> {
    let path = path(config);
    check_directory(&path)?;
    load_beside(config, &[])
}

/// As [`load`], whatever MIG instances the GPUs `changing` (UUIDs) have now. That the state directory is trusted has been
/// checked.
pub(crate) fn load_beside(config: &Config, changing: &[String]) -> Result<Inventory, InventoryError> {
    let path = path(config);
    let inventory = parse(&path, &read(&path)?)?;
    let mut seen = super::fingerprint::read(&config.driver.root)?;
    seen.fingerprint.mig = exclude_gpus(&inventory, changing, seen.fingerprint.mig);
    let then = Fingerprint {
        mig: exclude_gpus(&inventory, changing, inventory.fingerprint.mig.clone()),
        ..inventory.fingerprint.clone()
    };
    if let Some(bus_id) = seen.lost.into_iter().find(|lost| inventory.fingerprint.gpus.contains(lost)) {
        return Err(InventoryError::FellOffTheBus { bus_id });
    }
    let changed = find_difference(&then, &seen.fingerprint)
        .or_else(|| missing_file(config, &inventory))
        .or_else(|| missing_node(config, &inventory))
        .or_else(|| new_programs(config, &inventory));
    match changed {
        Some(changed) => Err(InventoryError::Stale { path, changed }),
        None => Ok(inventory),
    }
}

/// `instances` (as in [`Fingerprint::mig`]) except of the GPUs `changing`.
fn exclude_gpus(inventory: &Inventory, changing: &[String], mut instances: Vec<String>) -> Vec<String> {
    for gpu in changing.iter().filter_map(|uuid| inventory.device(uuid)) {
        let prefix = format!("gpu{}/", gpu.minor);
        instances.retain(|instance| !instance.starts_with(&prefix));
    }
    instances
}

/// Writes `inventory.json` atomically with mode 0644, and the file that keeps criu from saving containers with a share.
/// Creates the state directory if it is missing.
pub fn store(config: &Config, inventory: &Inventory) -> Result<(), InventoryError> {
    let path = path(config);
    write(config, &path, inventory).map_err(|source| InventoryError::Unwritable { path, source })
}

/// The present fingerprint. GPUs that no longer answer on the bus are not in it.
///
/// # Errors
/// No driver is loaded, or its files cannot be read.
pub fn fingerprint(config: &Config) -> Result<Fingerprint, InventoryError> {
    super::fingerprint::read(&config.driver.root).map(|seen| seen.fingerprint)
}

/// `inventory.json` of this configuration.
#[must_use]
pub fn path(config: &Config) -> PathBuf {
    config.state_dir.join("inventory.json")
}

/// [`NO_CHECKPOINT_FILE`] in this state directory. It exists whenever an inventory does.
#[must_use]
pub(crate) fn no_checkpoint(state_dir: &Path) -> PathBuf {
    state_dir.join(NO_CHECKPOINT_FILE)
}

fn write(config: &Config, path: &Path, inventory: &Inventory) -> io::Result<()> {
    trusted::make(&config.state_dir).map_err(|why| io::Error::other(format!("its directory: {why}")))?;
    write_file(&no_checkpoint(&config.state_dir), NO_CHECKPOINT.as_bytes())?;
    write_file(path, &serde_json::to_vec(inventory)?)
}

fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    // `replace` keeps the mode and owner of an existing file, so a file that would not be trusted is removed first.
    if fs::symlink_metadata(path).is_ok_and(|there| distrust_file(&there, LARGEST).is_some()) {
        fs::remove_file(path)?;
    }
    replace(path, content, 0o644)
}

fn check_directory(path: &Path) -> Result<(), InventoryError> {
    path.parent().and_then(trusted::distrust).map_or(Ok(()), |why| {
        Err(InventoryError::Untrusted { path: path.to_owned(), why: format!("its directory: {why}") })
    })
}

fn read(path: &Path) -> Result<Vec<u8>, InventoryError> {
    let untrusted = |why| InventoryError::Untrusted { path: path.to_owned(), why };
    match trusted::read(path, LARGEST) {
        Ok(Some(content)) => content.map_err(untrusted),
        Ok(None) => Err(InventoryError::Missing { path: path.to_owned() }),
        Err(source) => Err(InventoryError::Unreadable { path: path.to_owned(), source }),
    }
}

fn parse(path: &Path, text: &[u8]) -> Result<Inventory, InventoryError> {
    let corrupt = |why| InventoryError::Corrupt { path: path.to_owned(), why };
    let inventory: Inventory =
        serde_json::from_slice(text).map_err(|error| corrupt(plain(&error.to_string(), None)))?;
    if inventory.schema != SCHEMA {
        return Err(corrupt(format!("schema {}, not {SCHEMA}", safe(&inventory.schema))));
    }
    Ok(inventory)
}

/// The first difference, in words for people.
fn find_difference(then: &Fingerprint, now: &Fingerprint) -> Option<String> {
    if then.boot_id != now.boot_id {
        Some("it was written in an earlier boot".to_owned())
    } else if then.driver_version != now.driver_version {
        Some(format!(
            "the driver was {}, and is {} now",
            safe(&then.driver_version),
            safe(&now.driver_version)
        ))
    } else if then.gpus != now.gpus {
        Some(format!("the GPUs were {}, and are {} now", list_names(&then.gpus), list_names(&now.gpus)))
    } else if then.mig != now.mig {
        Some(format!(
            "the MIG instances were {}, and are {} now",
            list_names(&then.mig),
            list_names(&now.mig)
        ))
    } else {
        None
    }
}

fn list_names(names: &[String]) -> String {
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

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
