//! Reads recorded events: from the system's journal, from the ring beside the ledger, and for users without root their
//! own refusals and warnings, the guard's actions on their containers, and what GPUs reported about these.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::guard;
use crate::sick_gpus;
use sublet_core::admit::{RefusalRecord, is_remote, refusals};
use sublet_core::config::Config;
use sublet_core::events::{Event, JOURNAL_FIELD, JOURNAL_IDENTIFIER, Kind, has_journal, read_ring};
use sublet_core::process::child::{ChildError, run_whole};
use sublet_core::text::{safe, timestamp};

/// Two writers may tell their events in another order than that of their times, by less than this, in milliseconds.
pub(crate) const DISORDER: u64 = 60_000;

/// The positions up to which events were read.
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
    /// Where it goes on.
    pub position: Position,
    /// Of the journal nothing of earlier boots.
    pub this_boot: bool,
    /// For a user without root, also the records of Docker's containers.
    pub dockers: bool,
}

impl Reader {
    /// The events since it read before, oldest first, and what could not be read, in one line.
    pub fn new_events(&mut self, config: &Config) -> (Vec<Event>, Option<String>) {
        if is_remote(config) {
            return (self.unseen(of_user(self.dockers, config)), None);
        }
        let ring = self.unseen(read_ring(&config.state_dir));
        if !has_journal(&config.state_dir) {
            return (ring, None);
        }
        match read(self.position.cursor.as_deref(), self.this_boot) {
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

/// A name that no other event has.
fn name(event: &Event) -> String {
    let container: String = event.container_id.chars().take(64).collect();
    let device = event.devices.first().map_or("", String::as_str);
    format!("{} {} {} {container} {device}", event.time, event.kind, event.lease)
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

/// A user's own refusals and warnings of starts, what the guard did to their containers, and what GPUs reported about these.
fn of_user(dockers: bool, config: &Config) -> Vec<Event> {
    let us = nix::unistd::geteuid().as_raw();
    let may_see = |uid: u32| uid == us || dockers && uid == 0;
    // Recorded times have no milliseconds.
    let at = |time: u64, event: Event| Event {
        time: timestamp(time).replace('Z', ".000Z"),
        uptime_ms: 0,
        ..event
    };
    let refused = refusals(config).into_iter().filter(|record| may_see(record.uid));
    let refused = refused.map(|RefusalRecord { time, container_id, reason, started, uid, .. }| {
        let kind = if started { Kind::Warned } else { Kind::Refused };
        at(time, Event { uid, container_id, text: reason, ..Event::now(kind) })
    });
    let guarded = guard::events(config).into_iter().filter(|guarded| may_see(guarded.uid));
    let guarded = guarded.map(|guarded| at(guarded.time, guarded.recorded())).collect();
    let reported =
        sick_gpus::read(config).unwrap_or_default().events.into_iter().filter(|event| may_see(event.uid));
    let reported = reported.map(|event| Event { uptime_ms: 0, ..event }).collect();
    merged(merged(refused.collect(), guarded), reported)
}

// Events in systemd's journal, read with journalctl.

/// How long reading may take.
const LIMIT: Duration = Duration::from_secs(20);

/// The most that is read at once, in bytes.
const LARGEST: usize = 64 << 20;

/// The most entries that are read at once: the newest.
const ENTRIES: &str = "20000";

/// The events after `cursor`, and the cursor of the last entry. Every user may write to the journal. journald itself
/// sets `_UID` to the writer's user (systemd.journal-fields(7)).
///
/// # Errors
/// Why it cannot be read, in one line.
fn read(cursor: Option<&str>, this_boot: bool) -> Result<(Vec<Event>, Option<String>), String> {
    let mut command = Command::new("journalctl");
    command.args(["--output=json", "--all", "--quiet", "--no-pager", "--lines", ENTRIES]);
    command.arg(format!("--output-fields={JOURNAL_FIELD}"));
    command.args(this_boot.then_some("--boot"));
    command.args(cursor.map(|cursor| format!("--after-cursor={cursor}")));
    command.args([format!("SYSLOG_IDENTIFIER={JOURNAL_IDENTIFIER}"), "_UID=0".to_owned()]);
    let finished = run_whole(&mut command, LIMIT, LARGEST).map_err(|error| match error {
        ChildError::Io(error) => format!("journalctl: {error}"),
        ChildError::Timeout => format!("journalctl has not ended after {} s", LIMIT.as_secs()),
    })?;
    if !finished.status.success() {
        return Err(format!("journalctl: {}", safe(finished.stderr.lines().next().unwrap_or("failed"))));
    }
    Ok(parse(&finished.stdout))
}

/// Entries that are none of ours are left out; the cursor is that of the last line in any case.
fn parse(text: &str) -> (Vec<Event>, Option<String>) {
    let mut cursor = None;
    let mut events = Vec::new();
    for entry in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        cursor = entry["__CURSOR"].as_str().map(str::to_owned).or(cursor);
        events.extend(entry[JOURNAL_FIELD].as_str().and_then(|event| serde_json::from_str(event).ok()));
    }
    (events, cursor)
}

// Points in time as `docker events` takes them: RFC 3339, a date, seconds since the epoch, or how long ago.

/// The moment that `text` means. Without an offset it is in UTC.
pub(crate) fn parse_moment(text: &str) -> Result<SystemTime, String> {
    parse_moment_at(text, SystemTime::now())
}

fn parse_moment_at(text: &str, now: SystemTime) -> Result<SystemTime, String> {
    let ago = || {
        let ago = humantime::parse_duration(text).ok()?;
        Some(now.checked_sub(ago).unwrap_or(UNIX_EPOCH).max(UNIX_EPOCH))
    };
    let date = || {
        let of_utc = || TimeZone::UTC.to_timestamp(text.parse().ok()?).ok();
        let moment = text.parse::<Timestamp>().ok().or_else(of_utc)?;
        Some(SystemTime::from(moment).max(UNIX_EPOCH))
    };
    seconds(text).or_else(ago).or_else(date).ok_or_else(|| {
        format!(
            "{} is no time: write 2026-11-23T07:00:00Z, 2026-11-23, seconds since 1970, or how long ago, as 10m or \
             1h30m",
            safe(text)
        )
    })
}

/// Seconds since the epoch, perhaps with a fraction.
fn seconds(text: &str) -> Option<SystemTime> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let all_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !all_digits(whole) || !all_digits(fraction) || fraction.len() > 9 {
        return None;
    }
    let nanoseconds = format!("{fraction:0<9}").parse().ok()?;
    UNIX_EPOCH.checked_add(Duration::new(whole.parse().ok()?, nanoseconds))
}

#[cfg(test)]
mod tests {
    use sublet_core::events::Kind;

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
    fn an_event_is_not_read_again() {
        let mut reader = Reader::default();
        let events = vec![event("1"), event("2")];
        assert_eq!(reader.unseen(events.clone()).len(), 2);
        let again = reader.unseen([events, vec![event("3")]].concat());
        assert_eq!(again.iter().map(|event| event.time.as_str()).collect::<Vec<_>>(), ["3"]);
    }

    #[test]
    fn entries_that_are_no_events_are_left_out() {
        let event = serde_json::to_string(&Event::now(Kind::Drained)).unwrap();
        let line =
            |cursor: &str, event: Value| serde_json::json!({"__CURSOR": cursor, "SUBLET_EVENT": event});
        let text = format!(
            "{}\nno JSON\n{}\n{}\n",
            line("a", event.into()),
            line("b", serde_json::json!([1, 2])),
            line("c", "{}".into())
        );
        let (events, cursor) = parse(&text);
        assert_eq!((events.len(), cursor.as_deref()), (1, Some("c")));
        assert_eq!(parse(""), (Vec::new(), None));
    }

    #[test]
    fn times_are_taken_in_every_form() {
        let now = UNIX_EPOCH + Duration::from_secs(1_795_251_600);
        let at = |text: &str| {
            let moment = parse_moment_at(text, now).map(|moment| moment.duration_since(UNIX_EPOCH).unwrap());
            moment.map(|since| since.as_secs_f64()).ok()
        };
        let nine = 1_795_251_600.0;
        for text in [
            "2026-11-21T09:00:00Z",
            "2026-11-21T09:00:00",
            "2026-11-21 09:00:00",
            "2026-11-21T10:00:00+01:00",
            "2026-11-21T04:30:00-04:30",
            "1795251600",
            "0s",
        ] {
            assert_eq!(at(text), Some(nine), "{text}");
        }
        assert_eq!(at("1795251600.25"), Some(nine + 0.25));
        assert_eq!(at("2026-11-21"), Some(nine - 9.0 * 3600.0));
        assert_eq!(at("1h30m"), Some(nine - 5400.0));
        assert_eq!(at("99999years"), Some(0.0), "longer ago than time is");
        assert_eq!(at("999999999999"), Some(999_999_999_999.0), "shown as the end of the year 9999");
        for text in [
            "",
            "yesterday",
            "2026-13-01",
            "1795251600.",
            "-5",
            "2026-11-21T09:00:00+1:00",
            "99999999999999999999",
        ] {
            assert_eq!(at(text), None, "{text}");
        }
        assert!(parse_moment("\u{1b}[2J").unwrap_err().starts_with("\\u{1b}[2J is no time"));
    }
}
