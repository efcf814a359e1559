//! Looks at the machine every second, from outside: the ledger, processes, cgroups, mounts, daemons. What must never
//! hold is reported at once; what may hold for a moment, such as the lease of a container that has just ended, once it
//! has outlasted its time of grace in calm weather and a `sublet gc`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::Value;
use sublet_e2e::World;
use sublet_e2e::killing::mount_points;

use crate::books::{self, text};
use crate::engine::{Engine, Harm, bounded};
use crate::machine;
use crate::weather::Weather;

/// How long something may be in between.
const GRACE: Duration = Duration::from_secs(8);
/// `[mps] idle` of the world, and as much again for the service to act.
pub const IDLE_SECONDS: u64 = 4;
const IDLE_GRACE: u64 = 12;
/// sublet's own programs end sooner, `sublet serve` aside.
const LONGEST_RUN: u64 = 100;

pub struct Checker<'a> {
    engine: &'a dyn Engine,
    weather: &'a Weather,
    /// Mounts of before the first container.
    mounts: BTreeSet<String>,
    suspects: BTreeMap<String, Instant>,
    reported: BTreeSet<String>,
    saved: bool,
}

impl<'a> Checker<'a> {
    pub fn new(engine: &'a dyn Engine, weather: &'a Weather) -> Self {
        let mounts = machine::mounts(engine.world());
        Self { engine, weather, mounts, suspects: BTreeMap::new(), reported: BTreeSet::new(), saved: false }
    }

    fn world(&self) -> &World {
        self.engine.world()
    }

    /// Looks every second until the end.
    pub fn watch(&mut self) {
        while !self.weather.is_over() {
            let began = Instant::now();
            self.look();
            self.save();
            self.weather.counts.looks.fetch_add(1, Ordering::Relaxed);
            self.weather.sleep(Duration::from_secs(1).saturating_sub(began.elapsed()));
        }
    }

    /// Keeps the state directory as it was within a second of the first finding: its events are soon written over.
    fn save(&mut self) {
        if self.saved || self.weather.findings().is_empty() {
            return;
        }
        self.saved = true;
        let (from, to) = (self.world().state_dir(), self.world().dir.path().join("first-finding"));
        let _ = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status();
    }

    fn look(&mut self) {
        if let Some(ledger) = books::read(&self.world().state_dir()) {
            for excess in books::overcommitted(&ledger) {
                self.report(format!("over-commitment: {excess}: {ledger}"));
            }
        }
        self.ask_status();
        let now = self.wrong();
        self.suspects.retain(|what, _| now.contains(what));
        for what in now {
            self.suspects.entry(what).or_insert_with(Instant::now);
        }
        let old = |since: &Instant| since.elapsed() > GRACE;
        if self.suspects.values().any(old) && self.weather.was_calm_since(Instant::now()) {
            self.convict();
        }
    }

    /// What is still wrong after a command of sublet's, and calm weather.
    fn convict(&mut self) {
        let began = Instant::now();
        let gc = self.sublet(&["gc"]);
        let still = self.wrong();
        if !self.weather.was_calm_since(began) {
            return;
        }
        let guilty: Vec<String> = self
            .suspects
            .iter()
            .filter(|(what, since)| since.elapsed() > GRACE && still.contains(*what))
            .map(|(what, _)| what.clone())
            .collect();
        for what in guilty {
            self.report(format!("{what} (after gc: {}{})", gc.stdout.trim_end(), gc.stderr.trim_end()));
            self.suspects.remove(&what);
        }
    }

    /// Each finding once.
    fn report(&mut self, what: String) {
        let sort: String = what.chars().take(120).collect();
        if self.reported.insert(sort) {
            self.weather.found(what);
        }
    }

    fn sublet(&self, arguments: &[&str]) -> sublet_e2e::Finished {
        let mut command = self.world().command("sublet");
        command.args(arguments);
        bounded(command, self.world(), "checker", Harm::None)
    }

    fn ask_status(&mut self) {
        let began = Instant::now();
        let done = self.sublet(&["status", "--format", "json"]);
        let status: Option<Value> = serde_json::from_str(&done.stdout).ok();
        if (!done.ok || status.is_none()) && self.weather.was_calm_since(began) {
            self.report(format!("sublet status failed: {}", done.stderr));
        }
    }

    /// What should not be for long.
    fn wrong(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let state = self.world().state_dir();
        let Some(ledger) = books::read(&state) else {
            found.insert("there is no ledger that can be read".to_owned());
            return found;
        };
        self.leases(&ledger, &mut found);
        self.daemons(&ledger, &mut found);
        self.machine(&mut found);
        found
    }

    fn leases(&self, ledger: &Value, found: &mut BTreeSet<String>) {
        let running = self.weather.running();
        for lease in books::leases(ledger) {
            let (id, container) = (text(lease, "id"), text(&lease["container"], "id"));
            if !books::has_owner(lease) && !self.lives(container) {
                found.insert(format!(
                    "lease {id} of {container}, {}: nothing of it runs",
                    text(lease, "state")
                ));
            }
            let bundle = text(&lease["container"], "bundle");
            let config = std::fs::read(std::path::Path::new(bundle).join("config.json")).unwrap_or_default();
            let config: Value = serde_json::from_slice(&config).unwrap_or_default();
            let in_config = config["annotations"]["sublet.lease"].as_str();
            // With a hook at prestart config.json stays as it is.
            if text(lease, "state") == "active" && in_config.is_some_and(|other| other != id) {
                found.insert(format!("lease {id} of {container}: its config.json has {in_config:?}"));
            }
        }
        for (name, running) in running {
            if running.stays && books::lease_of(ledger, &running.id).is_none() {
                // Its process may have ended by itself, as a probe does with its server.
                if self.lives(&running.id) && self.weather.is_running(&name, &running.id) {
                    found.insert(format!("container {name} ({}) runs and has no lease", running.id));
                }
            }
        }
    }

    /// Whether a process is in the container's cgroup.
    fn lives(&self, id: &str) -> bool {
        let world = self.world().dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let cgroups = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("cgroup")).ok());
        let (plain, engines) = (format!("/{world}-{id}\n"), format!("/{id}"));
        cgroups.into_iter().any(|text| {
            text.contains(&plain) || id.len() == 64 && (text.contains(&engines) || text.contains(id))
        })
    }

    fn daemons(&self, ledger: &Value, found: &mut BTreeSet<String>) {
        let empty = Vec::new();
        let records = ledger["daemons"].as_array().unwrap_or(&empty);
        let known: BTreeSet<i64> = records.iter().filter_map(|one| one["process"]["pid"].as_i64()).collect();
        for pid in machine::daemons(self.world(), "mps-control") {
            if !known.contains(&pid.as_raw().into()) {
                found.insert(format!("MPS daemon {pid} runs and is not in the ledger"));
            }
        }
        for record in records {
            let key = text(record, "key");
            let leased = books::leases(ledger).iter().any(|lease| lease["daemon"] == record["key"]);
            let idle = record["idle_since"].as_u64();
            // A start whose server was killed goes on until its time limit; one that hangs is found as a process.
            let starts = || {
                machine::of_sublet(self.world())
                    .iter()
                    .any(|(_, line, _)| line.contains(&format!("mps start {key}")))
            };
            if leased && !books::is_alive(&record["process"]) && !starts() {
                found.insert(format!(
                    "MPS daemon {key} has leases and does not run ({})",
                    text(record, "state")
                ));
            }
            let late = idle.is_none_or(|since| machine::uptime() > since + IDLE_SECONDS + IDLE_GRACE);
            if !leased && late {
                found.insert(format!("MPS daemon {key} has no lease, since {idle:?}"));
            }
        }
        for changed in ledger["compute_modes"].as_array().into_iter().flatten() {
            let device = text(changed, "device");
            let leased = |lease: &&Value| {
                lease["devices"].as_array().is_some_and(|all| all.iter().any(|each| each == device))
            };
            if !books::leases(ledger).iter().any(|lease| leased(&lease)) {
                found.insert(format!("{device} has no lease, and its compute mode is still changed"));
            }
        }
    }

    fn machine(&self, found: &mut BTreeSet<String>) {
        for mount in machine::mounts(self.world()).difference(&self.mounts) {
            found.insert(format!("{mount} is mounted on the host"));
        }
        for (pid, line, seconds) in machine::of_sublet(self.world()) {
            if seconds > LONGEST_RUN && !line.trim_end().ends_with(" serve") {
                found.insert(format!("process {pid} runs and runs: {line}"));
            }
        }
    }

    /// When all containers have been ended and the service too: nothing may be left.
    pub fn nothing_is_left(&mut self) {
        // A hook whose engine was killed before it took its lease may have it for a minute, until its time to bind is over.
        let until = Instant::now() + Duration::from_secs(90);
        let (mut left, mut said) = (self.left(), String::new());
        while !left.is_empty() && Instant::now() < until {
            let gc = self.sublet(&["gc"]);
            said = format!("{}{}", gc.stdout, gc.stderr);
            std::thread::sleep(Duration::from_millis(200));
            left = self.left();
        }
        for what in left {
            self.weather.found(format!("left at the end: {what} (gc: {})", said.trim_end()));
        }
    }

    fn left(&self) -> Vec<String> {
        let mut found = Vec::new();
        let ledger = books::read(&self.world().state_dir()).unwrap_or_default();
        for member in ["leases", "daemons", "compute_modes", "leftovers", "unexplained", "drained"] {
            let empty = ledger[member].as_array().is_none_or(Vec::is_empty);
            if !empty {
                found.push(format!("{member} in the ledger: {}", ledger[member]));
            }
        }
        for name in ["dynamic_instances", "under_way"] {
            if ledger["mig"][name].as_array().is_some_and(|all| !all.is_empty())
                || ledger["mig"][name].is_object()
            {
                found.push(format!("mig.{name} in the ledger: {}", ledger["mig"][name]));
            }
        }
        let mut processes = machine::of_sublet(self.world());
        processes.retain(|(pid, ..)| sublet_e2e::is_alive(*pid));
        found.extend(processes.iter().map(|(pid, line, _)| format!("process {pid}: {line}")));
        let daemons = self.world().daemons();
        found.extend(daemons.iter().map(|line| format!("MPS process: {line}")));
        let mounts = machine::mounts(self.world());
        found.extend(mounts.difference(&self.mounts).map(|mount| format!("{mount} is mounted")));
        let points = mount_points(self.world().dir.path());
        found.extend(
            points.lines().filter(|line| !line.contains("/sim/")).map(|line| format!("mount point {line}")),
        );
        found.extend(self.files_left());
        found.extend(self.modes_left());
        found
    }

    /// Files of the state directory that belong to nobody any more.
    fn files_left(&self) -> Vec<String> {
        let state = self.world().state_dir();
        let names = |dir: &std::path::Path| {
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        let temporary =
            |name: &String| name.contains(".tmp") || name.contains("rebuilding") || name == "filler";
        let mut found: Vec<String> = names(&state).into_iter().filter(temporary).collect();
        // A device's directory stays, with its log; that of a dedicated daemon is named after its lease.
        let dedicated = names(&state.join("mps")).into_iter().filter(|name| name.len() == 16);
        found.extend(dedicated.map(|name| format!("mps/{name}")));
        found
    }

    fn modes_left(&self) -> Vec<String> {
        let program = self.world().driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
        let query = ["--query-gpu=compute_mode", "--format=csv,noheader"];
        let output = std::process::Command::new(program).args(query).output().expect("nvidia-smi runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines()
            .filter(|mode| mode.trim() != "Default")
            .map(|mode| format!("compute mode {mode}"))
            .collect()
    }
}
