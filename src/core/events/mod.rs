//! Events of leases, MPS daemons and MIG instances: emitted once, at the decision.
//!
//! Where the ledger is the system's they go to systemd's journal, by its native protocol
//! (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL>). Elsewhere they go to a ring of two files beside the ledger:
//! `events.jsonl`, and `events.1.jsonl` with those before them. The older file goes when the newer one is full.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::fs::{open_lock, parse_json, read_if_trusted};
use crate::process::{self, uptime_milliseconds};

/// The longest text of an event, in bytes.
const LONGEST: usize = 2000;

/// `time` as events have it: RFC 3339 in UTC with milliseconds, within the years that have such a form.
pub fn timestamp(time: SystemTime) -> String {
    let time = time.clamp(UNIX_EPOCH, UNIX_EPOCH + Duration::from_secs(crate::text::LAST_SECOND));
    humantime::format_rfc3339_millis(time).to_string()
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Kind {
    /// A container was given a share.
    LeaseTaken,
    /// Its first process is known.
    LeaseBound,
    /// Its share is free again.
    LeaseEnded,
    /// A process that a deleted container had left was ended.
    LeftEnded,
    /// A process that a deleted container has left is not ended.
    LeftRunning,
    /// A container has a share, with something that its owner should know.
    Warned,
    /// A container's GPU state was put into host memory.
    Suspended,
    /// It is on the GPU again.
    Resumed,
    /// It is on another GPU.
    Moved,
    /// A container was to be suspended, resumed or moved, and is as it was before.
    SuspendUndone,
    /// A container's GPU state was lost on the way, and the container was ended.
    SuspendLost,
    /// A container was refused.
    Refused,
    /// The guard found an offence.
    Guard,
    /// An MPS daemon serves for the first time.
    MpsStarted,
    /// An MPS daemon serves again under containers that ran before it.
    MpsRestarted,
    /// An MPS daemon has ended or does not answer.
    MpsFailed,
    /// An MPS daemon was ended, because no lease needs it.
    MpsStopped,
    /// A MIG instance was created for a container.
    MigCreated,
    /// That instance was destroyed.
    MigDestroyed,
    /// The MIG layout of GPUs was changed.
    MigChanged,
    /// A device takes no new lease.
    Drained,
    /// It takes leases again.
    Undrained,
    /// A GPU is left out: it is lost, does not answer as it should, or reported a fault.
    GpuLost,
    /// It is served again.
    GpuBack,
    /// A GPU reported an error of a program's own (Xid).
    GpuError,
    /// The ledger was lost and rebuilt.
    LedgerRebuilt,
}

impl Kind {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;
}

/// One event. Its texts are not escaped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When: RFC 3339 in UTC, with milliseconds.
    pub time: String,
    /// The same in milliseconds since boot, which no clock that is set changes.
    pub uptime_ms: u64,
    /// Its kind.
    pub kind: Kind,
    /// The uid of the container's engine; root's where there is no container.
    pub uid: u32,
    /// The container's id; if it is unknown, its bundle or root filesystem.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// The lease.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lease: String,
    /// Whom `sublet.owner` of a container of root's engine names.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// UUIDs of the devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// The MPS daemon's key.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub daemon: String,
    /// A duration in milliseconds. For a lease that was taken or bound: from the start of the process that takes it to its
    /// taking, or to the start of the container's first process. For one that ended: since it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
    /// Of a refusal: the word for it, as in JSON errors (docs/explain.md). Of an action of the guard: the offence. Of a
    /// GPU's error: `xid-31`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The guard's action: `report`, `terminate` or `container`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub action: String,
    /// The event in one line.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

impl Event {
    /// One that happens now.
    pub fn now(kind: Kind) -> Self {
        Self {
            time: timestamp(SystemTime::now()),
            uptime_ms: uptime_milliseconds(),
            kind,
            uid: 0,
            container_id: String::new(),
            lease: String::new(),
            owner: String::new(),
            devices: Vec::new(),
            daemon: String::new(),
            took_ms: None,
            reason: String::new(),
            action: String::new(),
            text: String::new(),
        }
    }

    /// As one line of JSON, with texts that are not too long.
    fn line(&self) -> String {
        let mut event = self.clone();
        for text in [&mut event.text, &mut event.container_id] {
            let end = (0..=LONGEST.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
        }
        event.devices.truncate(64);
        // Serializing fails only for maps whose keys are not strings.
        serde_json::to_string(&event).unwrap_or_default()
    }
}

/// Emits `events` of the ledger in `state_dir`. Failures are ignored: no container fails for them.
pub fn emit(state_dir: &Path, events: &[Event]) {
    if events.is_empty() {
        return;
    }
    let lines: Vec<String> = events.iter().map(Event::line).collect();
    let unsent = if has_journal(state_dir) {
        send_to_socket(Path::new(JOURNAL_SOCKET), &lines, events)
    } else {
        &lines[..]
    };
    if let Err(error) = append_to_ring(state_dir, unsent) {
        tracing::debug!("cannot write events: {error}");
    }
}

/// Where the journal listens.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// The field that has an event as one line of JSON.
pub const JOURNAL_FIELD: &str = "SUBLET_EVENT";

/// Of all entries with an event.
pub const JOURNAL_IDENTIFIER: &str = "sublet-events";

/// The ledger of other state directories, such as of tests, is not the system's.
const SYSTEMS: &str = "/run/sublet";

/// Whether events of the ledger in `state_dir` are in the system's journal. Only root's entries count, because every
/// user may write to the journal.
pub fn has_journal(state_dir: &Path) -> bool {
    let is_root = || nix::unistd::geteuid().is_root() && !process::is_nested();
    state_dir == Path::new(SYSTEMS) && is_root() && Path::new(JOURNAL_SOCKET).exists()
}

/// Sends an entry for each line; returns those that the journal did not take. It does not wait for the journal.
fn send_to_socket<'l>(socket: &Path, lines: &'l [String], events: &[Event]) -> &'l [String] {
    let Ok(sender) = UnixDatagram::unbound() else { return lines };
    if sender.set_nonblocking(true).is_err() {
        return lines;
    }
    let send = |(line, event): &(&String, &Event)| {
        sender.send_to(journal_entry(line, event).as_bytes(), socket).is_ok()
    };
    &lines[lines.iter().zip(events).take_while(send).count()..]
}

/// Values are without newlines: JSON escapes them, and so does `one_line`.
fn journal_entry(line: &str, event: &Event) -> String {
    // As syslog's: 4 is warning, 6 informational.
    let priority = match event.kind {
        Kind::LeftEnded
        | Kind::LeftRunning
        | Kind::Warned
        | Kind::SuspendUndone
        | Kind::SuspendLost
        | Kind::Refused
        | Kind::Guard
        | Kind::MpsFailed
        | Kind::GpuLost
        | Kind::GpuError
        | Kind::LedgerRebuilt => 4,
        _ => 6,
    };
    let words = [<&str>::from(event.kind), &event.container_id, &event.daemon, &event.text];
    let message: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
    format!(
        "MESSAGE={}\nPRIORITY={priority}\nSYSLOG_IDENTIFIER={JOURNAL_IDENTIFIER}\n{JOURNAL_FIELD}={line}\n",
        crate::log::one_line(&message.join(" "))
    )
}

/// A file with this many bytes is full.
const FULL_RING: u64 = 256 << 10;

/// Far more than a file ever has: the last write may be long.
const LARGEST_RING: u64 = 4 << 20;

/// Appends `lines` with one write(2), so that lines of two writers do not mix.
fn append_to_ring(state_dir: &Path, lines: &[String]) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let [path, _] = ring_files(state_dir);
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o644).custom_flags(nix::libc::O_NOFOLLOW);
    let mut file = options.open(&path)?;
    let mut length = file.metadata()?.len();
    if length >= FULL_RING {
        turn_ring(&file, state_dir)?;
        file = options.open(&path)?;
        length = file.metadata()?.len();
    }
    if length >= 2 * FULL_RING {
        return Err(io::Error::other(format!("{} is full and cannot be turned", path.display())));
    }
    // A line that a killed writer did not end would take the next one with it. Another writer adds whole lines meanwhile.
    let mut last = *b"\n";
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    let line_end = if last == *b"\n" { "" } else { "\n" };
    file.write_all(format!("{line_end}{}\n", lines.join("\n")).as_bytes())
}

/// Makes a full file the older one. Of two writers that find it full, one does it.
fn turn_ring(full: &File, state_dir: &Path) -> io::Result<()> {
    let [path, older] = ring_files(state_dir);
    let lock = open_lock(&state_dir.join("events.lock"))?;
    let Ok(_held) = Flock::lock(lock, FlockArg::LockExclusiveNonblock) else { return Ok(()) };
    if fs::symlink_metadata(&path)?.ino() == full.metadata()?.ino() {
        fs::rename(&path, &older)?;
    }
    Ok(())
}

/// The events in the ring, oldest first. Incomplete ones are left out.
pub fn read_ring(state_dir: &Path) -> Vec<Event> {
    let [path, older] = ring_files(state_dir);
    // The newer file first: if it becomes the older one meanwhile, its events are there twice, and not lost.
    let newer = events_in(&path);
    let mut events = events_in(&older);
    let new: Vec<Event> = newer.into_iter().filter(|event| !events.contains(event)).collect();
    events.extend(new);
    events
}

fn events_in(path: &Path) -> Vec<Event> {
    let text = read_if_trusted(path, LARGEST_RING).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(|line| parse_json(line).ok()).collect()
}

fn ring_files(state_dir: &Path) -> [PathBuf; 2] {
    ["events.jsonl", "events.1.jsonl"].map(|name| state_dir.join(name))
}

#[cfg(test)]
mod journal_tests {
    use super::*;

    #[test]
    fn an_event_is_one_datagram_and_events_that_are_not_taken_are_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let event = Event { text: "no\nplace".into(), ..Event::now(Kind::Refused) };
        let (lines, events) = ([event.line(), event.line()], [event.clone(), event]);
        assert_eq!(send_to_socket(&path, &lines, &events), lines, "nobody listens");
        let listener = UnixDatagram::bind(&path).unwrap();
        assert!(send_to_socket(&path, &lines, &events).is_empty());
        let mut bytes = [0; 1000];
        let length = listener.recv(&mut bytes).unwrap();
        let text = std::str::from_utf8(&bytes[..length]).unwrap();
        let fields: Vec<&str> = text.lines().collect();
        assert_eq!(fields[..2], ["MESSAGE=refused no\\nplace", "PRIORITY=4"]);
        assert_eq!(fields[3], format!("SUBLET_EVENT={}", lines[0]));
        assert_eq!(fields.len(), 4);
    }

    #[test]
    fn the_journal_has_no_events_of_tests() {
        assert!(!has_journal(Path::new("/var/tmp/x/run")));
    }
}

#[cfg(test)]
mod ring_tests {
    use super::Kind;
    use super::*;

    fn event(number: usize) -> Event {
        Event { container_id: format!("c{number}"), ..Event::now(Kind::LeaseTaken) }
    }

    fn add(dir: &Path, events: &[Event]) {
        append_to_ring(dir, &events.iter().map(Event::line).collect::<Vec<_>>()).unwrap();
    }

    fn names(dir: &Path) -> Vec<String> {
        read_ring(dir).into_iter().map(|event| event.container_id).collect()
    }

    #[test]
    fn a_stored_event_is_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/event.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Event = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn a_record_that_was_cut_off_takes_no_other_with_it() {
        let dir = tempfile::tempdir().unwrap();
        add(dir.path(), &[event(1), event(2)]);
        let path = dir.path().join("events.jsonl");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        assert_eq!(names(dir.path()), ["c1"]);
        add(dir.path(), &[event(3)]);
        assert_eq!(names(dir.path()), ["c1", "c3"]);
        fs::write(&path, b"\xff\x00{}\n[1]\n").unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
    }

    #[test]
    fn the_ring_is_bounded_and_keeps_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let long = "ä\u{1b}[2J".repeat(2000);
        for number in 0..1000 {
            add(dir.path(), &[Event { text: long.clone(), ..event(number) }]);
        }
        let bytes: u64 = ring_files(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(bytes < 3 * FULL_RING, "{bytes}");
        let names = names(dir.path());
        assert_eq!(names.last().map(String::as_str), Some("c999"));
        assert!(names.len() > 60, "{}", names.len());
        assert!(read_ring(dir.path()).iter().all(|event| event.text.len() <= super::LONGEST));
    }

    #[test]
    fn two_writers_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let dir = dir.path();
                scope.spawn(move || (0..200).for_each(|number| add(dir, &[event(writer * 1000 + number)])));
            }
        });
        let mut names = names(dir.path());
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 800);
    }

    #[test]
    fn a_file_that_everyone_may_write_is_not_read_and_a_link_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        add(dir.path(), &[event(1)]);
        let path = dir.path().join("events.jsonl");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(&path, open).unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(append_to_ring(dir.path(), &[event(1).line()]).is_err());
    }
}
