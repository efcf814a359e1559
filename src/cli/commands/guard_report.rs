//! What `sublet status` and `sublet explain` say about what the guard did.

use super::tables;
use crate::guard::Event;
use crate::status::GuardEvent;

/// How many of the latest events `sublet status` shows.
const SHOWN: usize = 5;

/// The latest of `events`, a line each.
pub fn latest(events: &[GuardEvent]) -> Vec<String> {
    let latest = &events[events.len().saturating_sub(SHOWN)..];
    latest.iter().map(|event| format!("{}  {}", event.time, event.text)).collect()
}

/// One event as a line.
pub fn line(event: &Event) -> String {
    format!("{}  {}", tables::timestamp(event.time), event.text)
}
