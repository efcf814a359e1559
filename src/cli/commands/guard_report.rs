//! What `sublet status` and `sublet explain` say about the guard.

use serde_json::{Value, json};

use super::tables;
use crate::guard::{self, Event, Sight};
use sublet_core::config::Config;

/// How many of the latest events the tables show.
const SHOWN: usize = 5;

/// The member `guard` of `sublet status --format json`.
pub fn document(config: &Config) -> Value {
    let sight = guard::sight(config);
    let blind = if let Sight::Blind(why) = &sight { why.clone() } else { Vec::new() };
    json!({"watching": sight == Sight::All, "blind": blind, "events": guard::events(config)})
}

/// The lines below the tables: whether the guard runs, and its latest events.
pub fn lines(config: &Config) -> Vec<String> {
    let mut lines = state(config);
    let events = guard::events(config);
    lines.extend(events[events.len().saturating_sub(SHOWN)..].iter().map(line));
    lines
}

fn state(config: &Config) -> Vec<String> {
    match guard::sight(config) {
        Sight::All => vec!["Guard: on.".to_owned()],
        Sight::Blind(why) => why.into_iter().map(|why| format!("GUARD OFF: {why}")).collect(),
        Sight::None if config.guard.enabled => vec![
            "GUARD OFF: programs that tamper with their MPS limits are not stopped; run `systemctl enable \
             --now sublet.service`"
                .to_owned(),
        ],
        Sight::None => vec![
            "GUARD OFF: programs that tamper with their MPS limits are not stopped; the configuration has \
             [guard] enabled = false"
                .to_owned(),
        ],
    }
}

/// One event as a line.
pub fn line(event: &Event) -> String {
    format!("{}  {}", tables::timestamp(event.time), event.text)
}
