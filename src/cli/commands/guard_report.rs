//! What `sublet status` says about what the guard did.

use crate::status::GuardEvent;

/// How many of the latest events are shown.
const SHOWN: usize = 5;

/// The latest of `events`, a line each.
pub fn latest(events: &[GuardEvent]) -> Vec<String> {
    let latest = &events[events.len().saturating_sub(SHOWN)..];
    latest.iter().map(|event| format!("{}  {}", event.time, event.text)).collect()
}
