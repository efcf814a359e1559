//! What a layout asks for, whatever the format of its file.

pub(super) use crate::yaml::Wrong;
use sublet_core::text::safe;

/// More than any GPU has; the driver reports the actual limit.
const MOST: usize = 100;

/// What some GPUs should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Of the file, from 1 on.
    pub line: usize,
    /// Which GPUs: names as in `sublet.gpu`, or `all`.
    pub devices: Vec<String>,
    /// Only those with one of these PCI ids, device in the upper half (mig-parted's `device-filter`).
    pub pci_devices: Option<Vec<u32>>,
    /// MIG mode.
    pub mig: bool,
    /// All instances that they should have.
    pub instances: Vec<Wish>,
}

/// Some GPU instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wish {
    /// Of the file, from 1 on.
    pub line: usize,
    /// The profile's name.
    pub profile: String,
    /// How many of them.
    pub count: usize,
    /// The first memory slice, if the place is prescribed.
    pub start: Option<u32>,
    /// Its compute instances; `None` means a single one with all compute slices.
    pub compute: Option<Vec<String>>,
}

/// Returns `entry` if it does not contradict itself.
pub(super) fn entry(entry: Entry) -> Result<Entry, Wrong> {
    match entry.instances.first() {
        Some(wish) if !entry.mig => Err((wish.line, "instances need MIG mode: set mig = true".to_owned())),
        _ => Ok(entry),
    }
}

/// Whether any GPU could have that many.
pub(super) fn counted(profile: &str, count: usize) -> Result<(), String> {
    if (1..=MOST).contains(&count) {
        return Ok(());
    }
    Err(format!("{count} × {}: the count must be between 1 and what the GPU offers", safe(profile)))
}
