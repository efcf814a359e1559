//! `sublet-hook`: `precreate`, `createRuntime` and `poststop`, as Podman and the low-level runtime call them. The engine
//! is this program.

use std::fs;
use std::process::{Child, Command};

use serde_json::{Value, json};
use sublet_e2e::Bundle;
use sublet_e2e::hooked::{PODMANS_ID, refusal};

use crate::injector::{self, Fault, Key, Seen};
use crate::scene::{Host, SHARE, SPARE_NODE, difference, without_lease, without_node};
use crate::sweep::Path;
use crate::table::Table;

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    PrecreatePlain,
    Precreate,
    CreateRuntime,
    Poststop,
}

impl Stage {
    const fn word(self) -> &'static str {
        match self {
            Self::PrecreatePlain | Self::Precreate => "precreate",
            Self::CreateRuntime => "createRuntime",
            Self::Poststop => "poststop",
        }
    }
}

pub struct Hook {
    stage: Stage,
    host: Host,
    /// The books without the container.
    before: Value,
    /// What precreate returns without a fault.
    expected: Option<Value>,
    /// The spec with a share, which `prepare` had precreate make.
    granted: Value,
    /// In the container's place.
    init: Child,
}

impl Hook {
    pub fn new(stage: Stage) -> Self {
        let mut host = Host::new("h200", "");
        host.hold();
        host.files.stdin = host.users.world.dir.path().join("stdin");
        let before = host.books().expect("a ledger");
        let init = Command::new("sleep").arg("3000").spawn().expect("sleep runs");
        Self { stage, host, before, expected: None, granted: Value::Null, init }
    }

    fn bundle(&self) -> Bundle<'_> {
        let share = if self.stage == Stage::PrecreatePlain { &[][..] } else { SHARE };
        self.host.users.world.bundle("victim", share, &["/bin/sleep", "600"])
    }

    fn hook(&self, stage: &str) -> Command {
        let mut command = self.host.users.world.command("sublet-hook");
        command.arg(stage);
        command
    }

    fn input(&self, input: &Value) {
        fs::write(&self.host.files.stdin, input.to_string()).expect("the hook's input is written");
    }

    /// The state of the container of `spec`, as a runtime gives it.
    fn state(&self, spec: &Value, status: &str) -> Value {
        json!({"ociVersion": "1.0.2", "id": PODMANS_ID, "pid": if status == "stopped" { 0 } else { self.init.id() },
            "bundle": self.bundle().dir, "status": status, "annotations": spec["annotations"]})
    }

    /// Precreate without a fault.
    fn grant(&mut self) -> Result<(), String> {
        self.input(&self.bundle().podmans());
        let done = self.host.undisturbed(&self.hook("precreate"));
        let spec: Value = serde_json::from_str(&done.stdout).map_err(|error| format!("{error}: {done:?}"))?;
        if spec.pointer("/annotations/sublet.lease").is_none() {
            return Err(format!("the next precreate gives no share: {}", refusal(&spec)));
        }
        self.granted = spec;
        Ok(())
    }

    /// The container's process ends; the next one has another.
    fn end_init(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
        self.init = Command::new("sleep").arg("3000").spawn().expect("sleep runs");
    }

    /// Poststop without a fault.
    fn end(&self, spec: &Value) -> Result<(), String> {
        self.input(&self.state(spec, "stopped"));
        let done = self.host.undisturbed(&self.hook("poststop"));
        if !done.ok {
            return Err(format!("poststop fails: {done:?}"));
        }
        self.host.comes_to(&self.before, "no container exists")?;
        self.host.daemons(2)?;
        self.host.tidy(Some(&self.bundle()))
    }

    /// What precreate returned is the whole share, or makes the container's creation fail, or, of a container that is
    /// not sublet's, is what it was given.
    fn judge_spec(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        let text = fs::read_to_string(&self.host.files.stdout).unwrap_or_default();
        if seen.code != Some(0) {
            return if self.stage == Stage::PrecreatePlain && fault.is_none() {
                Err(format!("it fails: {}", self.host.said()))
            } else {
                Ok(())
            };
        }
        let spec: Value =
            serde_json::from_str(&text).map_err(|error| format!("it returns no spec: {error}: {text}"))?;
        if !refusal(&spec).is_empty() && spec.pointer("/annotations/sublet.lease").is_none() {
            let refuses = self.stage == Stage::Precreate && fault.is_some();
            return if refuses { Ok(()) } else { Err(format!("it is refused: {}", refusal(&spec))) };
        }
        let spec = without_lease(spec);
        let mut expected = self.expected.get_or_insert_with(|| spec.clone()).clone();
        if self.host.said().contains(SPARE_NODE) {
            expected = without_node(expected, SPARE_NODE);
        }
        if spec == expected {
            Ok(())
        } else {
            Err(format!("it returns another spec: {}", difference(&spec, &expected)))
        }
    }

    /// Whether the lease of the spec is bound to the container's process.
    fn is_bound(&self) -> Result<bool, String> {
        let ledger = self.host.ledger()?;
        let leases = ledger["leases"].as_array().into_iter().flatten();
        let mut leases = leases.filter(|lease| lease["id"] == self.granted["annotations"]["sublet.lease"]);
        Ok(leases.any(|lease| lease["init"]["process"]["pid"] == self.init.id()))
    }
}

impl Path for Hook {
    fn prepare(&mut self) -> Result<(), String> {
        match self.stage {
            Stage::PrecreatePlain | Stage::Precreate => self.input(&self.bundle().podmans()),
            Stage::CreateRuntime | Stage::Poststop => {
                self.grant()?;
                let status = if self.stage == Stage::Poststop { "stopped" } else { "created" };
                self.bundle().write();
                self.input(&self.state(&self.granted, status));
            }
        }
        self.host.forget_output();
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        injector::run(table, &self.hook(self.stage.word()), &self.host.files, wanted)
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        self.host.ended_well(seen, fault)?;
        let ok = seen.code == Some(0);
        if fault.is_none() && !ok {
            return Err(format!("it fails: {}", self.host.said()));
        }
        match self.stage {
            Stage::PrecreatePlain | Stage::Precreate => self.judge_spec(seen, fault)?,
            Stage::CreateRuntime if ok && !self.is_bound()? => {
                return Err("it says that all is well, and the lease is not bound".to_owned());
            }
            // What the runtime made in the root filesystem may be left for the next command.
            Stage::Poststop if ok && self.host.books()?["leases"] != self.before["leases"] => {
                return Err("it says that all is well, and the lease is not free".to_owned());
            }
            Stage::CreateRuntime | Stage::Poststop => {}
        }
        if self.stage == Stage::CreateRuntime {
            let granted = self.granted.clone();
            self.end_init();
            self.end(&granted)?;
        }
        // The engine tries again, and the container ends.
        if self.stage != Stage::PrecreatePlain {
            self.grant()?;
        }
        let granted = self.granted.clone();
        self.end(&granted)
    }

    fn renew(&mut self) {
        *self = Self::new(self.stage);
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
    }
}
