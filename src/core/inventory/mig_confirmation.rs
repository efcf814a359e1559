//! A record in which `sublet serve` confirms that the inventory has the driver's present MIG devices.
//!
//! Ids of destroyed instances are reused, and /proc then looks the same, so only NVML shows the difference. While
//! the service checks this, other programs need not ask NVML before each container.

use std::fs;
use std::path::PathBuf;

use crate::config::Config;
use crate::fs::trusted;
use crate::host;
use crate::process::uptime_seconds;

/// A confirmation older than this, in seconds, does not count. The service renews it every two seconds.
const LIMIT: u64 = 5;

/// A boot id and a number, in bytes.
const LONGEST: u64 = 100;

/// Whether the service has compared them recently.
pub(crate) fn is_watched(config: &Config) -> bool {
    let word = trusted::read_if_trusted(&path(config), LONGEST).unwrap_or_default();
    is_recent(&String::from_utf8_lossy(&word), host::read_boot_id().unwrap_or_default(), uptime_seconds())
}

/// Confirms that they were equal at `since`, in seconds since boot.
pub fn watch(config: &Config, since: u64) -> std::io::Result<()> {
    crate::fs::atomic::replace(
        &path(config),
        format!("{} {since}\n", host::read_boot_id().unwrap_or_default()).as_bytes(),
        0o644,
    )
}

/// Withdraws the confirmation.
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
