//! The record of `sublet serve` that the inventory has the driver's MIG devices.
//!
//! Ids of destroyed instances are reused, and /proc looks the same then: only NVML can tell. While
//! the service checks that, other programs need not ask NVML before each container.

use std::fs;
use std::path::PathBuf;

use crate::config::Config;
use crate::fs::trusted;
use crate::host::boot_id;
use crate::process::uptime_seconds;

/// A word older than this, in seconds, is none: the service gives it every two.
const LIMIT: u64 = 5;

/// A boot id and a number, in bytes.
const LONGEST: u64 = 100;

/// Whether the service has compared them just now.
#[must_use]
pub(crate) fn is_watched(config: &Config) -> bool {
    let word = trusted::read_if_trusted(&path(config), LONGEST).unwrap_or_default();
    is_recent(&String::from_utf8_lossy(&word), boot_id::read().unwrap_or_default(), uptime_seconds())
}

/// Gives the word: they were equal at `since`, in seconds since boot.
///
/// # Errors
/// The state directory cannot be written.
pub fn watch(config: &Config, since: u64) -> std::io::Result<()> {
    crate::fs::atomic::replace(
        &path(config),
        format!("{} {since}\n", boot_id::read().unwrap_or_default()).as_bytes(),
        0o644,
    )
}

/// Takes it back.
pub fn unwatch(config: &Config) {
    let _ = fs::remove_file(path(config));
}

fn path(config: &Config) -> PathBuf {
    config.state_dir.join("mig-watched")
}

fn is_recent(text: &str, boot_id: &str, now: u64) -> bool {
    let Some((boot, since)) = text.trim().split_once(' ') else { return false };
    let since = since.parse::<u64>().ok();
    !boot_id.is_empty() && boot == boot_id && since.is_some_and(|since| since <= now && now - since <= LIMIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_holds_for_this_boot_and_a_few_seconds() {
        assert!(is_recent("boot 100\n", "boot", 100) && is_recent("boot 100\n", "boot", 105));
        for (text, now) in [("boot 100", 106), ("boot 100", 99), ("other 100", 100), ("boot x", 100), ("", 0)]
        {
            assert!(!is_recent(text, "boot", now), "{text}");
        }
        assert!(!is_recent(" 100", "", 100));
    }
}
