//! Reads recorded events: from the system's journal, from the ring beside the ledger, and for users without root their
//! own refusals and warnings, and the guard's actions on their containers.

mod journal;
pub(crate) mod moment;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::guard;
use sublet_core::admit::{is_remote, refusals};
use sublet_core::config::Config;
use sublet_core::events::{Event, Kind, has_journal, read_ring};
use sublet_core::text::timestamp;

/// Two writers may tell their events in another order than that of their times, by less than this, in milliseconds.
const DISORDER: u64 = 60_000;

/// What was read already.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Position {
    /// Of the journal.
    cursor: Option<String>,
    /// Of the files: the newest event, in milliseconds since boot.
    newest: u64,
    /// Of the files: the events that are little older than that.
    late: BTreeSet<String>,
}

/// Reads events again and again.
#[derive(Default)]
pub(crate) struct Reader {
    position: Position,
    /// Of the journal nothing of earlier boots.
    this_boot: bool,
}

impl Reader {
    /// One that goes on there, and reads nothing of earlier boots.
    pub fn since(position: Position) -> Self {
        Self { position, this_boot: true }
    }

    /// What it has read.
    pub fn position(self) -> Position {
        self.position
    }

    /// The events since it read before, oldest first, and what could not be read, in one line.
    pub fn new_events(&mut self, config: &Config) -> (Vec<Event>, Option<String>) {
        if is_remote(config) {
            return (self.unseen(of_user(config)), None);
        }
        let ring = self.unseen(read_ring(&config.state_dir));
        if !has_journal(&config.state_dir) {
            return (ring, None);
        }
        match journal::read(self.position.cursor.as_deref(), self.this_boot) {
            Ok((events, cursor)) => {
                self.position.cursor = cursor.or(self.position.cursor.take());
                (merged(events, ring), None)
            }
            Err(error) => (ring, Some(format!("events in the system's journal are not shown: {error}"))),
        }
    }

    fn unseen(&mut self, events: Vec<Event>) -> Vec<Event> {
        let Position { newest, late, .. } = &mut self.position;
        let (before, oldest) = (std::mem::take(late), newest.saturating_sub(DISORDER));
        let top = events.iter().map(|event| event.uptime_ms).max().unwrap_or_default().max(*newest);
        let is_late = |event: &Event| event.uptime_ms >= top.saturating_sub(DISORDER);
        *late = events.iter().filter(|event| is_late(event)).map(name).collect();
        *newest = top;
        events
            .into_iter()
            .filter(|event| event.uptime_ms >= oldest && !before.contains(&name(event)))
            .collect()
    }
}

/// What no other event has.
fn name(event: &Event) -> String {
    let container: String = event.container_id.chars().take(64).collect();
    let device = event.devices.first().map_or("", String::as_str);
    format!("{} {} {} {container} {device}", event.time, event.kind.as_str(), event.lease)
}

/// Both in one row by their times, each in its own order: a clock that is set back changes neither.
fn merged(one: Vec<Event>, other: Vec<Event>) -> Vec<Event> {
    let (mut one, mut other) = (one.into_iter().peekable(), other.into_iter().peekable());
    let mut all = Vec::new();
    loop {
        let first_is_next = match (one.peek(), other.peek()) {
            (Some(one), Some(other)) => one.time <= other.time,
            (one, _) => one.is_some(),
        };
        match if first_is_next { one.next() } else { other.next() } {
            Some(event) => all.push(event),
            None => return all,
        }
    }
}

/// A user's own refusals and warnings of images, and what the guard did to their containers.
fn of_user(config: &Config) -> Vec<Event> {
    let us = nix::unistd::geteuid().as_raw();
    let event = |time: u64, kind, container_id: String, text: String| Event {
        time: timestamp(time).replace('Z', ".000Z"),
        uptime_ms: 0,
        uid: us,
        container_id,
        text,
        ..Event::now(kind)
    };
    let refused = refusals(config).into_iter().filter(|record| record.uid == us);
    let kind = |started: bool| if started { Kind::Warned } else { Kind::Refused };
    let refused =
        refused.map(|record| event(record.time, kind(record.started), record.container_id, record.reason));
    let guarded = guard::events(config).into_iter().filter(|guarded| guarded.uid == us);
    let guarded = guarded.map(|guarded| Event {
        devices: vec![guarded.device],
        reason: guarded.offence.as_str().to_owned(),
        action: guarded.action.to_string(),
        ..event(guarded.time, Kind::Guard, guarded.container_id.unwrap_or_default(), guarded.text)
    });
    merged(refused.collect(), guarded.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(time: &str) -> Event {
        Event { time: time.to_owned(), ..Event::now(Kind::Drained) }
    }

    #[test]
    fn two_sources_are_merged_and_a_clock_that_steps_back_changes_no_order() {
        let one = vec![event("3"), event("1"), event("5")];
        let other = vec![event("2"), event("4")];
        let times: Vec<String> = merged(one, other).into_iter().map(|event| event.time).collect();
        assert_eq!(times, ["2", "3", "1", "4", "5"]);
    }

    #[test]
    fn what_was_read_is_not_read_again() {
        let mut reader = Reader::default();
        let events = vec![event("1"), event("2")];
        assert_eq!(reader.unseen(events.clone()).len(), 2);
        let again = reader.unseen([events, vec![event("3")]].concat());
        assert_eq!(again.iter().map(|event| event.time.as_str()).collect::<Vec<_>>(), ["3"]);
    }
}
