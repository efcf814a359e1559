//! A refused container: one line that says why, exit status 1, and everything unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use crate::bundle::{Bundle, Finished};

/// A message as logs and JSON have it, from its lines on stderr.
#[must_use]
pub fn in_one_line(stderr: &str) -> String {
    stderr.trim_end().replace("\nwhy: ", "; why: ").replace("\nfix: ", "; fix: ")
}

/// Compares all messages at once, so that one run shows every change.
///
/// # Panics
/// The messages differ.
pub fn assert_lines(seen: &[String], expected: &[&str]) {
    let differ: Vec<_> = seen.iter().zip(expected).filter(|(seen, expected)| seen != expected).collect();
    assert!(differ.is_empty() && seen.len() == expected.len(), "{differ:#?}\nall: {seen:#?}");
}

/// Files in the state directory that a refusal may write: records, but no daemon's directory.
const RECORDS: [&str; 15] = [
    "clearing.lock",
    "events.1.jsonl",
    "events.jsonl",
    "events.lock",
    "health.json",
    "health.lock",
    "inventory.json",
    "ledger.json",
    "ledger.json.copy",
    "lock",
    "names.json",
    "no-checkpoint.conf",
    "refusals.json",
    "refresh.lock",
    "roots",
];

/// Everything that a refused container must not change.
#[derive(Debug, PartialEq)]
struct Surroundings {
    /// Every file of the bundle, rootfs included: kind and size, and config.json's own bytes.
    bundle: BTreeMap<String, (u32, u64)>,
    config: Vec<u8>,
    /// Leases and daemons.
    booked: Vec<Value>,
    /// The content of the state directory, without its records.
    state: BTreeSet<String>,
    daemons: Vec<String>,
}

impl Bundle<'_> {
    /// Checks that `create` is refused with exit status 1 and one message, and that nothing changes. Returns the message
    /// in one line, without the container's name, and with `$DIR` for the world's directory.
    #[must_use]
    pub fn refused(&self) -> String {
        self.write();
        self.refused_as_written(&["create"])
    }

    /// [`refused`](Self::refused) for another command with a bundle, and without writing config.json.
    #[must_use]
    pub fn refused_as_written(&self, command: &[&str]) -> String {
        let before = self.surroundings();
        let mut runtime = self.world.runtime();
        runtime.args(command).arg("--bundle").arg(&self.dir).arg(&self.id);
        let finished = self.detached(runtime);
        let line = self.line(&finished);
        let after = self.surroundings();
        assert_eq!(after.state, before.state, "the state directory, changed by: {line}");
        assert_eq!(after.bundle, before.bundle, "the bundle, changed by: {line}");
        assert!(after == before, "config.json, leases or daemons, changed by: {line}");
        assert!(!self.world.runtime_root().join(&self.id).exists(), "the runtime has a container: {line}");
        line
    }

    /// The one message of a command that failed, in one line.
    #[must_use]
    pub fn line(&self, finished: &Finished) -> String {
        assert_eq!(finished.code, Some(1), "{finished:?}");
        let joined = in_one_line(&finished.stderr);
        assert_eq!(joined.lines().count(), 1, "not one message: {}", finished.stderr);
        let prefix = format!("sublet-runtime: container {}: ", self.id);
        let line = joined.strip_prefix(&prefix);
        let line = line.unwrap_or_else(|| panic!("it does not begin with {prefix:?}: {}", finished.stderr));
        let dir = self.world.dir.path().to_string_lossy();
        line.replace(&*dir, "$DIR")
    }

    fn surroundings(&self) -> Surroundings {
        let mut bundle = tree(&self.dir);
        for of_the_test in ["out", "err"] {
            bundle.remove(of_the_test);
        }
        let mut state: BTreeSet<_> = tree(&self.world.state_dir()).into_keys().collect();
        // The service writes down what is used, whatever is refused meanwhile.
        state.retain(|path| {
            !RECORDS.contains(&path.as_str()) && path != "lasting" && !path.starts_with("lasting/usage")
        });
        let ledger = std::fs::read(self.world.state_dir().join("ledger.json")).unwrap_or_default();
        let ledger: Value = serde_json::from_slice(&ledger).unwrap_or_default();
        Surroundings {
            bundle,
            config: std::fs::read(self.dir.join("config.json")).expect("config.json is there"),
            // Only the names, because their states may change meanwhile.
            booked: [("leases", "id"), ("daemons", "key")]
                .iter()
                .flat_map(|&(all, name)| {
                    ledger[all].as_array().into_iter().flatten().map(move |each| each[name].clone())
                })
                .collect(),
            state,
            daemons: self.world.daemons(),
        }
    }
}

/// Every path below `dir` with its mode and size; a directory's size is left out.
#[must_use]
pub fn tree(dir: &Path) -> BTreeMap<String, (u32, u64)> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next).into_iter().flatten().flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                open.push(entry.path());
            }
            let name = entry.path().strip_prefix(dir).expect("below").to_string_lossy().into_owned();
            let size = if metadata.is_dir() { 0 } else { metadata.size() };
            found.insert(name, (metadata.mode(), size));
        }
    }
    found
}
