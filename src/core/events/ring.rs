//! Events in two files beside the ledger: `events.jsonl`, and `events.1.jsonl` with those before them. Each line is one
//! event. The older file goes when the newer one is full.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use nix::libc::O_NOFOLLOW;

use super::Event;
use crate::fs::trusted;

/// A file with this many bytes is full.
const FULL: u64 = 256 << 10;

/// Far more than a file ever has: the last write may be long.
const LARGEST: u64 = 4 << 20;

/// Appends `lines` with one write(2), so that those of two writers do not mix.
pub(super) fn append(state_dir: &Path, lines: &[String]) -> io::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let [path, _] = files(state_dir);
    let open = || {
        OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o644)
            .custom_flags(O_NOFOLLOW)
            .open(&path)
    };
    let mut file = open()?;
    let mut length = file.metadata()?.len();
    if length >= FULL {
        turn(&file, state_dir)?;
        file = open()?;
        length = file.metadata()?.len();
    }
    if length >= 2 * FULL {
        return Err(io::Error::other(format!("{} is full and cannot be turned", path.display())));
    }
    // A line that a killed writer did not end would take the next one with it.
    let broken = !ends_with_newline(&file, length)?;
    let text = lines
        .iter()
        .fold(if broken { "\n".to_owned() } else { String::new() }, |text, line| text + line + "\n");
    file.write_all(text.as_bytes())
}

/// Makes a full file the older one. Of two writers that find it full, one does it. The lock is a file that only this
/// user can open: whoever can read a file can hold its lock.
fn turn(full: &File, state_dir: &Path) -> io::Result<()> {
    let [path, older] = files(state_dir);
    let mut lock = OpenOptions::new();
    let lock = lock.write(true).create(true).truncate(false).mode(0o600).custom_flags(O_NOFOLLOW);
    let lock = lock.open(state_dir.join("events.lock"))?;
    let Ok(_held) = Flock::lock(lock, FlockArg::LockExclusiveNonblock) else { return Ok(()) };
    if fs::symlink_metadata(&path)?.ino() == full.metadata()?.ino() {
        fs::rename(&path, &older)?;
    }
    Ok(())
}

/// Whether the last line of a file with this length is whole. Another writer may add to it meanwhile, which adds whole lines.
fn ends_with_newline(file: &File, length: u64) -> io::Result<bool> {
    if length == 0 {
        return Ok(true);
    }
    let mut last = [0];
    file.read_exact_at(&mut last, length - 1)?;
    Ok(last == *b"\n")
}

/// The events in the ring, oldest first. Incomplete ones are left out.
#[must_use]
pub fn read_ring(state_dir: &Path) -> Vec<Event> {
    let [path, older] = files(state_dir);
    // The newer file first: if it becomes the older one meanwhile, its events are there twice, and not lost.
    let newer = events_in(&path);
    let mut events = events_in(&older);
    for event in newer {
        if !events.contains(&event) {
            events.push(event);
        }
    }
    events
}

fn events_in(path: &Path) -> Vec<Event> {
    let text = trusted::read_if_trusted(path, LARGEST).unwrap_or_default();
    text.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect()
}

fn files(state_dir: &Path) -> [PathBuf; 2] {
    ["events.jsonl", "events.1.jsonl"].map(|name| state_dir.join(name))
}

#[cfg(test)]
mod tests {
    use super::super::Kind;
    use super::*;

    fn event(number: usize) -> Event {
        Event { container_id: format!("c{number}"), ..Event::now(Kind::LeaseTaken) }
    }

    fn add(dir: &Path, events: &[Event]) {
        append(dir, &events.iter().map(Event::line).collect::<Vec<_>>()).unwrap();
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
        let bytes: u64 = files(dir.path()).iter().map(|path| path.metadata().unwrap().len()).sum();
        assert!(bytes < 3 * FULL, "{bytes}");
        let names = names(dir.path());
        assert_eq!(names.last().map(String::as_str), Some("c999"));
        assert!(names.len() > 60, "{}", names.len());
        assert!(read_ring(dir.path()).iter().all(|event| event.text.len() <= super::super::LONGEST));
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
    fn a_file_that_others_may_write_is_not_read_and_a_link_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        add(dir.path(), &[event(1)]);
        let path = dir.path().join("events.jsonl");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        fs::set_permissions(&path, open).unwrap();
        assert_eq!(names(dir.path()), [""; 0]);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
        assert!(append(dir.path(), &[event(1).line()]).is_err());
    }
}
