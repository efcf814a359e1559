//! One lane: carries out its steps one after the other, and judges what it is told.

use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sublet_e2e::Finished;

use crate::books;
use crate::engine::{Engine, Harm, Wanted};
use crate::machine;
use crate::plan::{By, COMMANDS, Lane, SHARES, SLOTS, Step};
use crate::weather::{Running, Weather};

/// What a lane knows of one of its containers.
#[derive(Default)]
struct Slot {
    /// Its id in the ledger, after a start that succeeded.
    id: Option<String>,
    /// It was not removed, so another one of this name cannot start.
    left: bool,
}

/// How things were before a start.
struct Before {
    ledger: Value,
    /// Milliseconds since boot.
    uptime: u64,
    /// [`Weather::attempt`].
    attempt: usize,
    began: Instant,
}

/// A lane and its containers.
pub struct Actor<'a> {
    engine: &'a dyn Engine,
    weather: &'a Weather,
    lane: u64,
    slots: [Slot; SLOTS],
}

impl<'a> Actor<'a> {
    pub fn new(engine: &'a dyn Engine, weather: &'a Weather, lane: u64) -> Self {
        Self { engine, weather, lane, slots: Default::default() }
    }

    /// Up to `steps` steps of this seed, then the end of its containers.
    pub fn play(&mut self, seed: u64, steps: u64) {
        for step in Lane::new(seed, self.lane).take(usize::try_from(steps).unwrap_or(usize::MAX)) {
            if self.weather.is_over() {
                break;
            }
            self.weather.tell(&format!("lane {}: {step:?}", self.lane));
            self.take(step);
            self.weather.counts.steps.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn name(&self, slot: usize) -> String {
        format!("lane{}-{slot}", self.lane)
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Start { slot, share, by, command } => self.start(slot, share, by, command, Harm::None),
            Step::StartKilled { slot, share, by, after_ms } => {
                self.start(slot, share, by, 1, Harm::KilledAfter(Duration::from_millis(after_ms)));
            }
            Step::StartLimited { slot, share, limit } => {
                self.start(slot, share, By::Shim, 1, Harm::Limited(limit));
            }
            Step::Exec { slot } => self.exec(slot),
            Step::Stop { slot } => self.stop(slot, Harm::None),
            Step::StopKilled { slot, after_ms } => {
                self.stop(slot, Harm::KilledAfter(Duration::from_millis(after_ms)));
            }
            Step::KillInit { slot } => self.kill_init(slot),
            Step::Pause { ms } => self.weather.sleep(Duration::from_millis(ms)),
        }
    }

    fn ledger(&self) -> Value {
        books::read(&self.engine.world().state_dir()).unwrap_or_default()
    }

    fn start(&mut self, slot: usize, share: usize, by: By, command: usize, harm: Harm) {
        if self.slots[slot].left {
            self.stop(slot, Harm::None);
        }
        if self.slots[slot].left {
            return;
        }
        let _open = self.weather.doors.read().unwrap_or_else(PoisonError::into_inner);
        let (name, wish) = (self.name(slot), &SHARES[share]);
        machine::end_orphan(self.engine.world(), &name);
        machine::thaw(Path::new("/sys/fs/cgroup"), &name);
        let before = Before {
            ledger: self.ledger(),
            uptime: machine::uptime_milliseconds(),
            attempt: self.weather.attempt(wish.gpus),
            began: Instant::now(),
        };
        let wanted = Wanted { name: &name, annotations: wish.annotations, by, command: COMMANDS[command] };
        let done = self.engine.start(&wanted, harm);
        self.slots[slot].left = true;
        if done.ok {
            let id = done.stdout.clone();
            self.slots[slot].id = Some(id.clone());
            self.weather.started(&name, Running { id, stays: command < 2 });
        } else if matches!(harm, Harm::None) {
            let dedicated = self.engine.at_prestart(&wanted);
            self.judge(&name, (share, dedicated), &done, &before);
        }
        self.weather.attempted(before.attempt, !matches!(harm, Harm::None));
        self.in_time(&format!("start of {name}"), &done);
    }

    /// Whether a start had to fail. `dedicated`: a hook at prestart gives no environment, so MPS needs a server of the
    /// container's own.
    fn judge(&self, name: &str, (share, dedicated): (usize, bool), done: &Finished, before: &Before) {
        let told_now = self.refusals(name, before.uptime);
        // An engine shows the first line, and has another name for the container. What a hook at prestart says, crun does not
        // pass on: its event has the reason.
        let first_lines = ["no room", "cannot serve", "refused: ", "no MIG device", "needs a MIG device"];
        let is_refusal = |event: &Value| ["no-room", "never-fits"].contains(&books::text(event, "reason"));
        let refused =
            first_lines.iter().any(|line| done.stderr.contains(line)) || told_now.iter().any(is_refusal);
        if refused {
            self.weather.counts.refusals.fetch_add(1, Ordering::Relaxed);
        }
        if !self.weather.was_calm_since(before.began) {
            return;
        }
        let wish = if dedicated { &SHARES[share].dedicated() } else { &SHARES[share] };
        let told = format!("{name}: {:?}: {} {told_now:?}", wish.annotations, done.stderr.trim_end());
        if !refused && self.is_the_engines(name, done) {
            return;
        }
        if !refused {
            self.weather.found(format!("a start failed though nothing was being broken: {told}"));
            return;
        }
        let after = self.ledger();
        let beside = self.weather.asked_beside(before.attempt);
        match books::had_room(wish, &before.ledger, &after, beside) {
            Some(true) => self.weather.found(format!(
                "refused though there was room (others asked for {beside} GPUs): {told}\nbefore: {}\nafter: {after}", before.ledger
            )),
            Some(false) => {
                self.weather.counts.judged.fetch_add(1, Ordering::Relaxed);
            }
            None => {}
        }
    }

    /// What engines say of themselves, such as that their containerd is not back yet or that a removal is already in
    /// progress, is theirs.
    fn is_the_engines(&self, name: &str, done: &Finished) -> bool {
        self.engine.kept_rootfs(name).is_none() && !done.stderr.contains("sublet")
    }

    /// What sublet tells of refusing this container, from this moment on (milliseconds since boot).
    fn refusals(&self, name: &str, since: u64) -> Vec<Value> {
        let state = self.engine.world().state_dir();
        let text = |file| std::fs::read_to_string(state.join(file)).unwrap_or_default();
        let lines = text("events.1.jsonl") + &text("events.jsonl");
        // A hook may know no more than the root filesystem.
        let path = format!("/{name}/");
        let its = |event: &Value| {
            let called = books::text(event, "container_id");
            event["kind"] == "refused"
                && event["uptime_ms"].as_u64().is_some_and(|time| time >= since)
                && (called == name || called.contains(&path))
        };
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(its).collect()
    }

    fn in_time(&self, what: &str, done: &Finished) {
        if done.stderr.contains("TOO LATE") {
            self.weather.found(format!("{what} did not end: {}", done.stderr));
        }
    }

    fn exec(&self, slot: usize) {
        let name = self.name(slot);
        let Some(running) = self.weather.running().get(&name).filter(|running| running.stays).cloned() else {
            return;
        };
        let began = Instant::now();
        let done = self.engine.exec(&name, &["/bin/true"]);
        self.in_time(&format!("exec in {name}"), &done);
        // A probe ends with its MPS server.
        let lives = || books::lease_of(&self.ledger(), &running.id).is_some_and(books::has_process);
        if !done.ok && self.weather.was_calm_since(began) && lives() {
            self.weather
                .found(format!("exec in {name} failed though nothing was being broken: {}", done.stderr));
        }
    }

    fn stop(&mut self, slot: usize, harm: Harm) {
        let name = self.name(slot);
        self.weather.forget(&name);
        let began = Instant::now();
        let done = self.engine.stop(&name, harm);
        self.in_time(&format!("the end of {name}"), &done);
        if !done.ok {
            // A container that stays is found in the end.
            let theirs = self.is_the_engines(&name, &done) && !done.stderr.contains("TOO LATE");
            if matches!(harm, Harm::None) && !theirs && self.weather.was_calm_since(began) {
                self.weather.found(format!("{name} could not be ended: {}", done.stderr));
            }
            return;
        }
        self.slots[slot].left = false;
        self.mount_points_left(&name, began);
        if self.slots[slot].id.take().is_some() {
            self.weather.counts.cycles.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// sublet removes the mount points in a root filesystem that persists, or writes down that it has to.
    fn mount_points_left(&self, name: &str, began: Instant) {
        let Some(rootfs) = self.engine.kept_rootfs(name) else { return };
        let file = |dir: &str| rootfs.join(dir).join("libcuda.so.1").symlink_metadata().is_ok();
        let left = || ["lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu"].into_iter().any(file);
        if left() && !self.ledger().to_string().contains(&*rootfs.to_string_lossy()) && left() {
            // While the state directory is away, the ledger in it is.
            if self.weather.was_calm_since(began) {
                self.weather.found(format!("{name}: mount points are left, and nobody knows"));
            }
        }
    }

    fn kill_init(&self, slot: usize) {
        let name = self.name(slot);
        self.weather.forget(&name);
        let Some(id) = &self.slots[slot].id else { return };
        let ledger = self.ledger();
        let pid = books::lease_of(&ledger, id).and_then(books::init_pid);
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// Ends all of its containers, however often that takes.
    pub fn end(&mut self) {
        let until = Instant::now() + Duration::from_secs(90);
        for slot in 0..SLOTS {
            while self.slots[slot].left {
                self.stop(slot, Harm::None);
                if Instant::now() > until {
                    self.weather.found(format!("{} cannot be removed", self.name(slot)));
                    break;
                }
            }
        }
    }
}
