//! Commands of `sublet`, the program that loads NVML: `gc`, `refresh`, `mps start` and `stop`, `mig apply`.

use std::collections::BTreeMap;
use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use sublet_e2e::eventually;

use crate::injector::{self, Fault, Key, Seen};
use crate::scene::{Host, SHARE, difference, names};
use crate::sweep::Path;
use crate::table::Table;

/// Which command.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// After a container that ended without a `delete`.
    Gc,
    Refresh,
    /// For a lease whose daemon has gone.
    MpsStart,
    /// Of a daemon that serves no lease.
    MpsStop,
    MigApply,
}

/// The GPU of the topology h200.
const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000100";
const SEVEN: &str = "[[gpu]]\nmatch = \"0\"\nmig = true\ninstances = [{ profile = \"1g.5gb\", count = 7 }]\n";

pub struct Run {
    tool: Tool,
    host: Host,
    /// What was there before it.
    before: Value,
    /// What `prepare` made of that, for the command to change.
    prepared: Value,
    /// What is there after it.
    after: Value,
}

impl Run {
    pub fn new(tool: Tool) -> Self {
        let host = Host::new(if tool == Tool::MigApply { "a100x2-mig" } else { "h200" }, "");
        assert!(host.sublet(&["gc"]).ok);
        let file = |name: &str| host.users.world.dir.path().join(name);
        if tool == Tool::MigApply {
            fs::write(file("seven.toml"), SEVEN).expect("a layout");
            let exported = host.sublet(&["mig", "export"]);
            fs::write(file("before.toml"), exported.stdout).expect("a layout");
        }
        let mut run = Self { tool, host, before: Value::Null, prepared: Value::Null, after: Value::Null };
        run.before = run.state().expect("a state");
        run
    }

    fn layout(&self, name: &str) -> String {
        self.host.users.world.dir.path().join(name).to_str().expect("a path of ours").to_owned()
    }

    fn command(&self) -> Vec<String> {
        let words: &[&str] = match self.tool {
            Tool::Gc => &["gc"],
            Tool::Refresh => &["refresh"],
            Tool::MpsStart => &["mps", "start", GPU],
            Tool::MpsStop => &["mps", "stop", GPU],
            Tool::MigApply => &["mig", "apply", &self.layout("seven.toml")],
        };
        words.iter().map(|&word| word.to_owned()).collect()
    }

    fn ok(&self, arguments: &[&str]) -> Result<(), String> {
        let done = self.host.sublet(arguments);
        if done.ok { Ok(()) } else { Err(format!("{arguments:?} fails: {done:?}")) }
    }

    /// What the command changes, as far as it is the same each time.
    fn state(&self) -> Result<Value, String> {
        let mut state = self.host.books()?;
        if self.tool == Tool::MigApply {
            let listed = self.host.sublet(&["mig", "list", "--format", "json"]);
            let listed: Value = serde_json::from_str(&listed.stdout).map_err(|error| error.to_string())?;
            state["mig"] = shape(&listed);
        }
        if self.tool == Tool::Refresh {
            let text = fs::read(self.host.users.world.state_dir().join("inventory.json"))
                .map_err(|error| error.to_string())?;
            state["inventory"] = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
            // A directory is in it once its last change is over for longer than the clock's tick.
            for key in ["probed_at", "written_at", "made_at", "read_at", "directories"] {
                state["inventory"][key] = Value::Null;
            }
        }
        Ok(state)
    }

    /// A container that ended without a word.
    fn end_unseen(&self) -> Result<(), String> {
        self.create()?;
        self.host.low_level(&["delete", "victim"]);
        Ok(())
    }

    /// A container whose MPS daemon was killed.
    fn lose_daemon(&self) -> Result<(), String> {
        self.create()?;
        self.host.collect()?;
        for daemon in self.host.users.world.daemon_pids("") {
            let _ = kill(daemon, Signal::SIGKILL);
        }
        self.host.daemons(0)
    }

    /// A daemon that was stopped leaves nothing that could be taken for a running one's.
    fn no_sockets(&self) -> Result<(), String> {
        let books = self.host.books()?;
        let dir = self.host.users.world.state_dir().join("mps").join(GPU);
        let left = [names(&dir.join("pipe")), names(&dir.join("public"))].concat();
        let stopped = books["daemons"].as_array().is_some_and(Vec::is_empty);
        if stopped && !left.is_empty() { Err(format!("it has stopped, and left {left:?}")) } else { Ok(()) }
    }

    fn create(&self) -> Result<(), String> {
        let bundle = self.host.users.world.bundle("victim", SHARE, &["/bin/sleep", "600"]);
        bundle.write();
        let created = self.host.undisturbed(&self.host.create(&bundle));
        if !created.ok {
            return Err(format!("create fails: {created:?}"));
        }
        Ok(())
    }
}

impl Path for Run {
    fn prepare(&mut self) -> Result<(), String> {
        match self.tool {
            Tool::Gc | Tool::MpsStop => self.end_unseen()?,
            Tool::Refresh => {}
            Tool::MpsStart => self.lose_daemon()?,
            Tool::MigApply => self.ok(&["mig", "apply", &self.layout("before.toml")])?,
        }
        let prepared = self.state()?;
        if self.prepared.is_null() {
            self.prepared = prepared;
        } else if prepared != self.prepared {
            return Err(format!("earlier runs left {}", difference(&prepared, &self.prepared)));
        }
        self.host.forget_output();
        Ok(())
    }

    fn run(&mut self, table: &Table, wanted: Option<(&Key, Fault)>) -> Seen {
        let mut command = self.host.users.world.command("sublet");
        command.args(self.command());
        let mut seen = injector::run(table, &command, &self.host.files, wanted);
        if self.tool == Tool::MigApply {
            // The simulated driver reads its state anew for each question, some thousand times.
            let mut alike = BTreeMap::<(&str, String), usize>::new();
            seen.calls.retain(|call| {
                let before = alike.entry((call.key.name, call.path.clone())).or_default();
                *before += 1;
                *before <= if call.path.is_empty() { 20 } else { 2 }
            });
        }
        seen
    }

    fn judge(&mut self, seen: &Seen, fault: Option<Fault>) -> Result<(), String> {
        self.host.ended_well(seen, fault)?;
        let again: Vec<String> = self.command();
        let again: Vec<&str> = again.iter().map(String::as_str).collect();
        if self.after.is_null() {
            if seen.code != Some(0) {
                return Err(format!("it fails: {}", self.host.said()));
            }
            self.after = self.state()?;
        }
        // `gc`, and a `mps stop` of a daemon that may have a lease, leave what they could not find out as it was. `refresh`
        // leaves out what does not answer, and says so.
        let said = self.host.said();
        let warnings = ["sublet: warning: ", "gets no node below /dev/dri", "no container gets a MIG device"];
        let is_named = self.tool == Tool::Refresh && warnings.iter().any(|words| said.contains(words));
        if seen.code == Some(0) && !is_named && !matches!(self.tool, Tool::Gc | Tool::MpsStop) {
            let state = self.state()?;
            if state != self.after {
                return Err(format!("it says that all is well, and {}", difference(&state, &self.after)));
            }
        }
        if seen.code == Some(0) && self.tool == Tool::MpsStop {
            self.no_sockets()?;
        }
        match self.tool {
            // Whatever it left, the same command can be given again, and then all is as it should be.
            Tool::Gc | Tool::Refresh | Tool::MigApply => {
                self.ok(&again)?;
                let state = self.state()?;
                if state != self.after {
                    return Err(format!("given again, {}", difference(&state, &self.after)));
                }
                self.host.daemons(0)?;
            }
            Tool::MpsStart | Tool::MpsStop => {
                if self.tool == Tool::MpsStart {
                    self.ok(&again)?;
                    self.host.daemons(2)?;
                }
                self.host.low_level(&["delete", "victim"]);
                // Its process may take a moment to end.
                let gone =
                    || self.host.collect().is_ok() && self.state().is_ok_and(|state| state == self.before);
                if !eventually(gone) {
                    return Err(format!("stopped, {}", difference(&self.state()?, &self.before)));
                }
                self.host.daemons(0)?;
            }
        }
        self.host.collect()?;
        self.host.tidy(None)
    }

    /// One of a layout takes five commands.
    fn part(&self) -> usize {
        if self.tool == Tool::MigApply { 5 } else { 1 }
    }

    fn renew(&mut self) {
        *self = Self::new(self.tool);
    }
}

/// The instances of each GPU, without the UUIDs that each has anew.
fn shape(listed: &Value) -> Value {
    match listed {
        Value::Object(members) => {
            let kept = members.iter().filter(|(key, _)| !["uuid", "id", "gi", "ci"].contains(&key.as_str()));
            Value::Object(kept.map(|(key, value)| (key.clone(), shape(value))).collect())
        }
        Value::Array(all) => Value::Array(all.iter().map(shape).collect()),
        other => other.clone(),
    }
}
