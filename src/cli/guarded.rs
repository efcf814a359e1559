//! What `sublet status` and `sublet explain` say of the guard.

use serde_json::{Value, json};

use super::output;
use crate::config::Config;
use crate::guard::{self, Event};

/// The last of these are in the tables.
const SHOWN: usize = 5;

/// `guard` in `sublet status --format json`.
pub fn document(config: &Config) -> Value {
    json!({"watching": guard::is_watching(config), "events": guard::events(config)})
}

/// What stands below the tables: whether there is a guard, and what it did last.
pub fn lines(config: &Config) -> Vec<String> {
    let mut lines = vec![state(config).to_owned()];
    let events = guard::events(config);
    lines.extend(events[events.len().saturating_sub(SHOWN)..].iter().map(line));
    lines
}

fn state(config: &Config) -> &'static str {
    if guard::is_watching(config) {
        "Guard: on."
    } else if config.guard.enabled {
        "GUARD OFF: limits bind honest programs only; systemctl enable --now sublet.service"
    } else {
        "GUARD OFF: limits bind honest programs only; [guard] enabled = false in the configuration"
    }
}

/// One event.
pub fn line(event: &Event) -> String {
    format!("{}  {}", output::timestamp(event.time), event.text)
}
