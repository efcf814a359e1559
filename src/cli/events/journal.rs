//! Events in systemd's journal, read with journalctl.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use sublet_core::events::{Event, JOURNAL_FIELD, JOURNAL_IDENTIFIER};
use sublet_core::process::child::{ChildError, run_whole};
use sublet_core::text::safe;

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
pub(super) fn read(cursor: Option<&str>, this_boot: bool) -> Result<(Vec<Event>, Option<String>), String> {
    let mut command = Command::new("journalctl");
    command.args(["--output=json", "--all", "--quiet", "--no-pager", "--lines", ENTRIES]);
    command.arg(format!("--output-fields={JOURNAL_FIELD}"));
    if this_boot {
        command.arg("--boot");
    }
    if let Some(cursor) = cursor {
        command.arg(format!("--after-cursor={cursor}"));
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::events::Kind;

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
}
