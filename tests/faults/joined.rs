//! Commands on a container that exists: `start`, `exec` and `delete`.

use std::fs;

use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, eventually};

use crate::injector::{self, Became, Fault, Key, Seen};
use crate::scene::{Host, SHARE, difference};
use crate::sweep::Path;
use crate::table::Table;

/// Which command, on which container.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Command {
    Start,
    /// Of a process file, as dockerd has it.
    Exec,
    ExecPlain,
    Delete,
    DeletePlain,
}

impl Command {
    const fn is_plain(self) -> bool {
        matches!(self, Self::ExecPlain | Self::DeletePlain)
    }

    const fn deletes(self) -> bool {
        matches!(self, Self::Delete | Self::DeletePlain)
    }
}

pub struct Joined {
    command: Command,
    host: Host,
    /// The low-level runtime's call in the undisturbed run.
    expected: Option<Became>,
    /// The books before the container and after it.
    before: Value,
    /// The books while it exists.
    meanwhile: Value,
}

impl Joined {
    pub fn new(command: Command) -> Self {
        let host = Host::new("h200", "");
        host.hold();
        let before = host.books().expect("a ledger");
        let mut path = Self { command, host, expected: None, before, meanwhile: Value::Null };
        path.create().expect("the container is created");
        path.meanwhile = path.host.books().expect("a ledger");
        path
    }

    fn bundle(&self) -> Bundle<'_> {
        let share = if self.command.is_plain() { &[][..] } else { SHARE };
        self.host.users.world.bundle("victim", share, &["/bin/sleep", "600"])
    }

    fn create(&self) -> Result<(), String> {
        let bundle = self.bundle();
        bundle.write();
        let process =
            json!({"cwd": "/", "args": ["/bin/true"], "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}});
        fs::write(bundle.dir.join("process.json"), process.to_string()).map_err(|error| error.to_string())?;
        let created = self.host.undisturbed(&self.host.create(&bundle));
        if !created.ok {
            return Err(format!("create fails: {created:?}"));
        }
        self.host.collect()
    }

    /// Whether its process lives. The low-level runtime dies with the shim, perhaps after the process and before the
    /// record.
    fn exists(&self) -> bool {
        let record = self.host.users.world.runtime_root().join("victim/state.json");
        let record: Value = serde_json::from_slice(&fs::read(record).unwrap_or_default()).unwrap_or_default();
        let pid = record["init_process_pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        pid.is_some_and(|pid| sublet_e2e::is_alive(Pid::from_raw(pid)))
    }

    /// The next command sees whether the container exists, and nothing else has changed.
    fn is_right(&self) -> Result<(), String> {
        let mut wrong = String::new();
        let right = || {
            let exists = self.exists();
            let books = self.host.collect().and_then(|()| self.host.books());
            let wanted = if exists { &self.meanwhile } else { &self.before };
            wrong = match books {
                Ok(books) if books == *wanted => return true,
                Ok(books) => {
                    format!("the container exists: {exists}; in the ledger {}", difference(&books, wanted))
                }
                Err(why) => why,
            };
            false
        };
        // Its process may end between the two looks.
        if !eventually(right) {
            return Err(wrong);
        }
        self.host.tidy(Some(&self.bundle()))?;
        self.host.daemons(2)
    }

    /// A command that ends by becoming the low-level runtime.
    fn judge_became(&self, seen: &Seen, fault: Option<Fault>, expected: &Became) -> Result<(), String> {
        let said = self.host.said();
        match &seen.became {
            Some(became) => {
                // With a configuration that cannot be read, it is another runc: one that has a record of the container.
                let ((program, arguments), (_, line)) = (split(became), split(expected));
                let is_runc = program.last().is_some_and(|program| program.ends_with("/runc"));
                if is_runc && became.files == expected.files && arguments == line {
                    return Ok(());
                }
                Err(format!("the low-level runtime was called with {became:?}"))
            }
            None if fault == Some(Fault::Kill) => Ok(()),
            None if seen.code == Some(0) => Err("it says that all is well, and did nothing".to_owned()),
            None if self.command == Command::Exec || self.host.may_refuse(seen) => Ok(()),
            None => Err(format!("what is never refused is refused: {said}")),
        }
    }

    fn judge_delete(&self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        let said = self.host.said();
        match seen.code {
            Some(0) if self.exists() => Err("it says that all is well, and the container exists".to_owned()),
            Some(0) => Ok(()),
            _ if fault == Some(Fault::Kill) || self.host.may_refuse(seen) => Ok(()),
            _ => Err(format!("a container cannot be deleted: {said}")),
        }
    }
}

/// The program, and its options and words; by which of its descriptors a file is given does not matter.
fn split(became: &Became) -> (&[String], Vec<&str>) {
    let first = became.arguments.iter().position(|word| word == "--root").unwrap_or(0);
    let (program, line) = became.arguments.split_at(first);
    let word = |word: &'_ String| word.starts_with("/proc/self/fd/");
    (program, line.iter().map(|text| if word(text) { "/proc/self/fd" } else { text.as_str() }).collect())
}

impl Path for Joined {
    fn prepare(&mut self) -> Result<(), String> {
        if !self.exists() {
            self.create()?;
        }
        self.host.forget_output();
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        let file = self.bundle().dir.join("process.json");
        let file = file.to_str().expect("a path of ours");
        let command = match self.command {
            Command::Start => self.host.shim(&["start", "victim"]),
            Command::Exec | Command::ExecPlain => self.host.shim(&["exec", "--process", file, "victim"]),
            Command::Delete | Command::DeletePlain => self.host.shim(&["delete", "--force", "victim"]),
        };
        injector::run(table, &command, &self.host.files, wanted)
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        self.host.ended_well(seen, fault)?;
        // Plain ones, and those of a configuration that cannot be read, are passed on.
        if self.command.deletes() && seen.became.is_none() {
            self.judge_delete(seen, fault)?;
        } else if self.command.deletes() {
            if seen.code == Some(0) && self.exists() {
                return Err("it says that all is well, and the container exists".to_owned());
            }
        } else if let Some(expected) = &self.expected {
            self.judge_became(seen, fault, expected)?;
        } else {
            let became = seen.became.clone().ok_or_else(|| format!("it fails: {}", self.host.said()))?;
            let given = became.files.iter().any(|file| file.contains("CUDA_MPS_PIPE_DIRECTORY"));
            if given != (self.command == Command::Exec) {
                return Err(format!(
                    "the process has not the environment of its container's share: {became:?}"
                ));
            }
            self.expected = Some(became);
        }
        self.is_right()
    }

    fn renew(&mut self) {
        *self = Self::new(self.command);
    }
}
