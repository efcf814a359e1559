//! A host in a temporary directory. Nothing is wrong on it until a test changes something.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, Verdict};
use sublet_core::config::{Config, Driver};
use sublet_core::fs::under;
use sublet_core::ledger::Ledger;
use sublet_core::place::fixture::{device, host};

pub(super) struct Fake {
    dir: tempfile::TempDir,
    pub config: Config,
}

impl Fake {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            state_dir: dir.path().join("run/sublet"),
            driver: Driver { root: dir.path().to_owned(), ..Driver::default() },
            ..Config::default()
        };
        Self { dir, config }
    }

    pub fn path(&self, path: &str) -> PathBuf {
        under(self.dir.path(), path)
    }

    pub fn file(&self, path: &str, content: &str) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    /// Creates an executable file.
    pub fn program(&self, path: &str) -> &Self {
        self.file(path, "");
        fs::set_permissions(self.path(path), fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    pub fn link(&self, path: &str, target: impl AsRef<Path>) -> &Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
        self
    }

    /// A host with one idle H200, no leases and no programs.
    pub fn host(&self) -> Host<'_> {
        Host {
            root: self.dir.path().to_owned(),
            config: &self.config,
            quick: false,
            ask: |_| None,
            inventory: Ok(host(vec![device(0)])),
            ledger: Ok(Ledger::empty("")),
            containers: Ok(None),
        }
    }
}

/// The text of a check that passed.
#[track_caller]
pub(super) fn passed(outcome: Outcome) -> String {
    assert_eq!(outcome.0, Verdict::Pass, "{outcome:?}");
    outcome.1
}

/// The text of a check that was skipped.
#[track_caller]
pub(super) fn skipped(outcome: Outcome) -> String {
    assert_eq!(outcome.0, Verdict::Skip, "{outcome:?}");
    outcome.1
}

/// The text and the fix of a check that did not pass.
#[track_caller]
pub(super) fn finding(outcome: Outcome, verdict: Verdict) -> (String, String) {
    assert_eq!(outcome.0, verdict, "{outcome:?}");
    (outcome.1, outcome.2.unwrap())
}
