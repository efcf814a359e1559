//! `sublet-runtime create`: plain, beside another container, and without a daemon; and `run`, whose container the
//! low-level runtime itself deletes.

use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::Bundle;

use crate::injector::{self, Became, Call, Fault, Key, Seen};
use crate::scene::{Host, SHARE, SPARE_NODE, difference, without_lease, without_node};
use crate::sweep::Path;
use crate::table::Table;

/// The directory of another runtime, as sublet has written it down. It is there: one that is gone is forgotten.
const OTHER_ROOT: &str = "/var/lib";

/// What is created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A container without a key of sublet's.
    Plain,
    /// One with a share, beside another.
    Warm,
    /// One with a share, and no MPS daemon runs.
    Cold,
    /// As `Warm`, by `run`.
    Run,
}

pub struct Create {
    kind: Kind,
    host: Host,
    /// Of the undisturbed run.
    expected: Option<Expected>,
    /// The books before a container and after its end.
    books: Value,
}

struct Expected {
    became: Became,
    config: Value,
    books: Value,
}

impl Create {
    pub fn new(kind: Kind) -> Self {
        let host = Host::new("h200", "");
        if kind != Kind::Cold {
            host.hold();
        }
        assert!(host.sublet(&["gc"]).ok);
        let books = host.books().expect("a ledger");
        Self { kind, host, expected: None, books }
    }

    fn bundle(&self) -> Bundle<'_> {
        let share = if self.kind == Kind::Plain { &[][..] } else { SHARE };
        self.host.users.world.bundle("victim", share, &["/bin/sleep", "600"])
    }

    /// How many MPS processes there are while the container exists, or not.
    fn daemons(&self, exists: bool) -> usize {
        if self.kind != Kind::Cold || exists { 2 } else { 0 }
    }

    fn command(&self, bundle: &Bundle<'_>) -> Command {
        match self.kind {
            Kind::Run => self.host.run(bundle),
            Kind::Plain | Kind::Warm | Kind::Cold => self.host.create(bundle),
        }
    }

    fn delete(&self) -> Result<(), String> {
        if self.kind == Kind::Run {
            return self.end_by_hook();
        }
        let deleted = self.host.undisturbed(&self.host.shim(&["delete", "--force", "victim"]));
        if deleted.ok { Ok(()) } else { Err(format!("delete fails: {deleted:?}")) }
    }

    /// What the low-level runtime does at the end of a container of `run`. Its hooks, and no other command, free the
    /// lease.
    fn end_by_hook(&self) -> Result<(), String> {
        let bundle = self.bundle();
        let config = bundle.config();
        self.host.low_level(&["delete", "victim"]);
        let state = json!({"ociVersion": "1.0.2", "id": "victim", "status": "stopped", "bundle": bundle.dir,
            "annotations": config["annotations"]});
        let hooks = config.pointer("/hooks/poststop").and_then(Value::as_array);
        for hook in hooks.into_iter().flatten() {
            let done = self.host.hook(hook, &state);
            if !done.ok {
                return Err(format!("its hook fails: {done:?}"));
            }
        }
        let books = self.host.books()?;
        if hooks.is_some() && books["leases"] != self.books["leases"] {
            return Err(format!("its hook has run, and in the ledger {}", difference(&books, &self.books)));
        }
        Ok(())
    }

    /// The engine tries again with the config.json that it writes, and the container ends.
    fn again(&self) -> Result<(), String> {
        let bundle = self.bundle();
        bundle.write();
        let created = self.host.undisturbed(&self.command(&bundle));
        if !created.ok {
            return Err(format!("the next create fails: {created:?}"));
        }
        let wanted = self.expected.as_ref().map_or(Value::Null, |expected| expected.config.clone());
        self.is_right(&wanted)?;
        self.delete()?;
        self.is_as_before()
    }

    /// The container that exists has what it should have, and `wanted` as its config.json.
    fn is_right(&self, wanted: &Value) -> Result<(), String> {
        self.host.collect()?;
        let Some(expected) = &self.expected else { return Ok(()) };
        let config = without_lease(self.bundle().config());
        if config != *wanted {
            let differs = difference(&config, wanted);
            return Err(format!("it was created from another config.json: {differs}"));
        }
        self.host.comes_to(&expected.books, "the container exists")?;
        self.host.daemons(self.daemons(self.kind != Kind::Plain))
    }

    /// Where sublet writes down the directories in which runtimes keep their records of containers.
    fn roots(&self) -> std::path::PathBuf {
        self.host.users.world.state_dir().join("roots")
    }

    fn is_as_before(&self) -> Result<(), String> {
        let roots = std::fs::read_to_string(self.roots()).map_err(|error| error.to_string())?;
        if !roots.lines().any(|root| root == OTHER_ROOT) {
            return Err(format!("the other runtime's directory is forgotten: {roots}"));
        }
        self.host.comes_to(&self.books, "no container exists")?;
        self.host.tidy(Some(&self.bundle()))?;
        self.host.daemons(self.daemons(false))
    }
}

impl Path for Create {
    fn prepare(&mut self) -> Result<(), String> {
        // Another runtime had containers here, this one none yet. A process that the run before has left may just be
        // adding to the file, so it is never there without its content.
        let written = self.roots().with_extension("new");
        std::fs::write(&written, OTHER_ROOT)
            .and_then(|()| std::fs::rename(&written, self.roots()))
            .map_err(|error| error.to_string())?;
        self.bundle().write();
        self.host.forget_output();
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        let bundle = self.bundle();
        injector::run(table, &self.command(&bundle), &self.host.files, wanted)
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        self.host.ended_well(seen, fault)?;
        let bundle = self.bundle();
        let config = bundle.config();
        let Some(expected) = &self.expected else {
            let became = seen.became.clone().ok_or_else(|| format!("it fails: {}", self.host.said()))?;
            self.host.collect()?;
            let books = self.host.books()?;
            let granted = config.pointer("/annotations/sublet.lease").is_some();
            if granted != (self.kind != Kind::Plain) {
                return Err(format!("the share was not given: {config}"));
            }
            self.expected = Some(Expected { became, config: without_lease(config), books });
            self.delete()?;
            return self.is_as_before();
        };
        let edited = without_lease(config.clone());
        let mut wanted = expected.config.clone();
        if self.host.said().contains(SPARE_NODE) {
            wanted = without_node(wanted, SPARE_NODE);
        }
        if config != bundle.spec && edited != wanted {
            let differs = difference(&edited, &wanted);
            return Err(format!("config.json is neither the engine's nor the edited one: {differs}"));
        }
        match &seen.became {
            Some(became) if *became != expected.became => {
                return Err(format!("the low-level runtime was called with {became:?}"));
            }
            Some(_) if seen.code != Some(0) => {
                return Err(format!("the low-level runtime failed: {:?}", seen.code));
            }
            Some(_) => {
                self.is_right(&wanted)?;
                self.delete()?;
            }
            None if seen.code == Some(0) => {
                return Err("it says that all is well, and created nothing".to_owned());
            }
            None if self.kind == Kind::Plain && fault != Some(Fault::Kill) && !self.host.may_refuse(seen) => {
                return Err(format!("a container without sublet's keys is refused: {}", self.host.said()));
            }
            None => {}
        }
        self.is_as_before()?;
        self.again()
    }

    fn first(&self, calls: &[Call]) -> usize {
        let makes = |call: &Call| ["clone", "clone3", "fork", "vfork"].contains(&call.key.name);
        let adds_hook = |call: &Call| call.path.ends_with("/sublet-hook");
        let first = match self.kind {
            Kind::Plain | Kind::Warm => None,
            Kind::Cold => calls.iter().position(makes),
            Kind::Run => calls.iter().position(adds_hook),
        };
        first.unwrap_or(0)
    }

    fn renew(&mut self) {
        *self = Self::new(self.kind);
    }
}
