//! Who waits for a share: starts with `sublet.wait`, `sublet wait`, refused containers of Docker's, which `sublet serve`
//! starts again, and containers that were suspended for others, which it resumes. An entry is a place in the order and names
//! the share that is waited for; it holds no share. Who comes first is decided in [`crate::admit`], when a lease is taken.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Container, LeaseId, Ledger};
use crate::config::PolicyRule;
use crate::process::{Process, epoch_seconds, uptime_seconds};
use crate::request::Request;
use crate::text::is_engine_id;

/// How many have an entry. Further starts wait without one, and further containers are not started again. Those that were
/// suspended for others always have one: without it nobody would resume them.
const MOST: usize = 128;

/// How many of a user without root's have one.
const MOST_OF_A_USER: usize = 16;

/// The largest entry of such a user, in bytes: its paths and devices are the user's words, and every start reads the ledger.
const LARGEST_OF_A_USER: usize = 16 << 10;

/// The longest reason, in characters.
pub(super) const LONGEST: usize = 1000;

/// How long a refused container is kept that `sublet serve` has not found at Docker yet, in seconds.
const UNCONFIRMED: u64 = 600;

/// How long a process keeps its place when the time is over for which it waits, in seconds: it may have been stopped.
const OVERDUE: u64 = 10;

/// How long before its time a refused container keeps others from its room, in seconds: for as long its start may be under
/// way, too.
const UNDER_WAY: u64 = 10;

/// A waiter, and its request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Waiter {
    /// The lease that a start will have; for other waiters any id.
    pub id: LeaseId,
    /// The container; empty for `sublet wait`.
    pub container: Container,
    /// A [`Request`], as the version that wrote it has it.
    request: Value,
    /// Why there is no share for it yet, or why it was refused: one line.
    pub why: String,
    /// Seconds since the epoch.
    pub since: u64,
    /// The process that waits, with which the wait ends; `None`: `sublet serve` starts the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// When the time is over for which the process waits, in seconds since boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) until: Option<u64>,
    /// The policy of the user who waits; `None`: root, or root's engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// The attempts of `sublet serve` to start the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
}

/// A refused container of Docker's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// Whether Docker has said that the container is to be restarted, and is as the refusal left it.
    pub confirmed: bool,
    /// How often it was started.
    starts: u32,
    /// From when it may be started, in seconds since boot: at first, when it was refused.
    pub from: u64,
}

impl Retry {
    /// It is started. The pause before the next start begins with 5 s, and doubles up to half an hour.
    pub fn note_start(&mut self) {
        self.from = uptime_seconds() + (5 << self.starts.min(9)).min(1800);
        self.starts = self.starts.saturating_add(1);
    }

    /// Docker does not say what the container is like: others need not wait for it.
    pub fn postpone(&mut self) {
        self.from = self.from.max(uptime_seconds() + 30);
    }

    /// Whether `sublet serve` starts it as soon as there is room, or has just done so.
    pub fn is_due(&self) -> bool {
        self.confirmed && self.from <= uptime_seconds() + UNDER_WAY
    }
}

impl Waiter {
    /// The process `by` waits for `request` as long as that says, for the container `of`; `None`: `sublet serve`, which starts
    /// that again.
    pub fn new(id: &LeaseId, of: &Container, request: &Request, why: &str, by: Option<Process>) -> Self {
        Self {
            id: id.clone(),
            container: of.clone(),
            // Serializing fails only for maps whose keys are not strings.
            request: serde_json::to_value(request).unwrap_or_default(),
            why: why.chars().take(LONGEST).collect(),
            since: epoch_seconds(),
            process: by,
            until: by.map(|_| uptime_seconds() + request.wait.as_secs() + OVERDUE),
            rule: None,
            retry: by.is_none().then(|| Retry { from: uptime_seconds(), ..Retry::default() }),
        }
    }

    /// It keeps its place for so long at least.
    pub fn stay_for(&mut self, time: Duration) {
        let least = uptime_seconds() + time.as_secs() + OVERDUE;
        self.until = self.until.map(|until| until.max(least));
    }

    /// Whether it is for a container. `sublet wait` starts none.
    pub(crate) fn starts(&self) -> bool {
        self.container != Container { uid: self.container.uid, ..Container::default() }
    }

    /// Whether it takes room as soon as there is some. One that was suspended and could not be resumed has its lease in `ledger`.
    pub(crate) fn is_due(&self, ledger: &Ledger) -> bool {
        let is_left_alone = ledger.lease(&self.id).is_some_and(|lease| lease.why_left_alone().is_some());
        !is_left_alone && self.retry.as_ref().is_none_or(Retry::is_due)
    }

    /// Whether it waits without an entry.
    fn is_too_large(&self) -> bool {
        let length = || serde_json::to_string(self).map_or(usize::MAX, |text| text.len());
        self.rule.is_some() && length() > LARGEST_OF_A_USER
    }

    /// Its request; `None`: this version cannot read that.
    pub fn request(&self) -> Option<Request> {
        Request::deserialize(&self.request).ok()
    }

    /// Whether it is the start of `container`, or that with lease `id`, or that for which the process `by` waits.
    pub(crate) fn is_of(&self, id: &LeaseId, container: &Container, by: Option<Process>) -> bool {
        let (own, other) = (&self.container, container);
        let same = (own.uid, &own.id, &own.bundle) == (other.uid, &other.id, &other.bundle);
        self.id == *id || same && !own.id.is_empty() || by.is_some() && self.process == by
    }

    /// Whether its process runs and has time, or `sublet serve` has found its container or may still do so.
    pub fn is_there(&self) -> bool {
        // Whatever the clock is set to.
        let is_new = |retry: &Retry| uptime_seconds().saturating_sub(retry.from) < UNCONFIRMED;
        let may_stay = self.retry.as_ref().is_none_or(|retry| retry.confirmed || is_new(retry));
        let has_time = self.until.is_none_or(|until| uptime_seconds() <= until);
        may_stay && has_time && self.process.as_ref().is_none_or(Process::is_alive)
    }
}

impl Container {
    /// Whether it is one of root's Docker, which has a place of its own for its bundles at containerd.
    pub(crate) fn is_dockers(&self) -> bool {
        let bundle = Path::new("io.containerd.runtime.v2.task/moby").join(&self.id);
        self.uid == 0 && is_engine_id(&self.id) && self.bundle.ends_with(bundle)
    }
}

impl Ledger {
    /// Puts `waiter` at the end of the order. One that waits already keeps its place, and its attempts. If the
    /// order is full, the first goes that may be no container to be started again. One that made room has an entry in any
    /// case: nothing else brings it back.
    pub fn add_waiter(&mut self, waiter: Waiter) {
        if waiter.is_too_large() {
            return;
        }
        // A user's process asks with another lease each time, and the container may not be known yet.
        let by = waiter.process.filter(|_| waiter.rule.is_some());
        let is_its = |old: &&mut Waiter| old.is_of(&waiter.id, &waiter.container, by);
        let of_user = |old: &&Waiter| old.rule.is_some() && old.container.uid == waiter.container.uid;
        let is_over = waiter.rule.is_some() && self.waiters.iter().filter(of_user).count() >= MOST_OF_A_USER;
        match self.waiters.iter_mut().find(is_its) {
            Some(old) if old.retry.is_some() || old.process == waiter.process => {
                (old.request, old.why, old.rule) = (waiter.request, waiter.why, waiter.rule);
                // Of a refused container's start nobody says how long it takes.
                old.until = old.until.max(waiter.until.filter(|_| old.retry.is_none()));
            }
            Some(old) => *old = Waiter { since: old.since, ..waiter },
            None if is_over => {}
            None => {
                let is_unconfirmed = |old: &Waiter| old.retry.as_ref().is_some_and(|retry| !retry.confirmed);
                let unconfirmed = self.waiters.iter().position(is_unconfirmed);
                if let (MOST.., Some(first)) = (self.waiters.len(), unconfirmed) {
                    self.waiters.remove(first);
                }
                let has_place = self.waiters.len() < MOST || self.lease(&waiter.id).is_some();
                self.waiters.extend(has_place.then_some(waiter));
            }
        }
    }

    /// The attempts of `sublet serve` to start the container of `id`, if that waits.
    pub fn retry_mut(&mut self, id: &LeaseId) -> Option<&mut Retry> {
        self.waiters.iter_mut().find(|waiter| waiter.id == *id)?.retry.as_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::request;

    fn waiter(n: u64, container: &str, why: &str, by: Option<Process>) -> Waiter {
        let bundle = Path::new("/run/containerd/io.containerd.runtime.v2.task/moby").join(container);
        let container = Container { id: container.to_owned(), bundle, ..Container::default() };
        let annotations = [("sublet.sm".to_owned(), "40".to_owned())].into();
        let request = request::parse(&annotations, None, None, &Config::default()).unwrap();
        let id = LeaseId::parse(&format!("{n:016x}")).unwrap();
        let waiter = Waiter::new(&id, &container, &request, why, by);
        assert_eq!(waiter.request(), Some(request), "it is read as it was written");
        waiter
    }

    fn names(ledger: &Ledger) -> Vec<(&str, &str)> {
        ledger.waiters.iter().map(|waiter| (waiter.container.id.as_str(), waiter.why.as_str())).collect()
    }

    #[test]
    fn who_is_refused_again_keeps_its_place_and_the_order_is_bounded() {
        let (mut ledger, me) = (Ledger::empty("boot"), Process::current().unwrap());
        ledger.add_waiter(waiter(1, "web", "no", Some(me)));
        ledger.add_waiter(waiter(2, "db", "no", None));
        // After its wait the first one is refused; later both are started, with other leases, and refused again.
        ledger.add_waiter(waiter(1, "web", "no longer", None));
        ledger.retry_mut(&ledger.waiters[0].id.clone()).unwrap().confirmed = true;
        ledger.add_waiter(waiter(3, "db", "still no", None));
        ledger.add_waiter(waiter(4, "web", "waits", Some(me)));
        assert_eq!(names(&ledger), [("web", "waits"), ("db", "still no")]);
        let web = &ledger.waiters[0];
        assert!(web.process.is_none() && web.retry.as_ref().unwrap().confirmed, "what was done is kept");
        // `sublet wait` has no container: each is another.
        for n in 10..300 {
            ledger.add_waiter(waiter(n, "", &"x".repeat(2000), Some(me)));
        }
        assert_eq!((ledger.waiters.len(), ledger.waiters[127].why.len()), (MOST, LONGEST));
        let all = names(&ledger);
        assert_eq!((all[0].0, all[1].0), ("web", ""), "what may be no container to start made room: db");
    }

    #[test]
    fn waiters_are_forgotten_whose_process_ends_or_whom_the_service_does_not_find() {
        let me = Process::current().unwrap();
        let gone = Process { start_time: 1, ..me };
        let mut late = waiter(3, "late", "no", None);
        // Not on a machine that was booted just now.
        let Some(from) = uptime_seconds().checked_sub(UNCONFIRMED) else { return };
        late.retry.as_mut().unwrap().from = from;
        let mut found = late.clone();
        found.retry.as_mut().unwrap().confirmed = true;
        // A clock that was set changes nothing.
        let set = Waiter { since: 0, ..waiter(4, "c", "no", None) };
        let all = [waiter(1, "a", "no", Some(me)), waiter(2, "b", "no", Some(gone)), late, found, set];
        assert_eq!(all.map(|waiter| waiter.is_there()), [true, false, false, true, true]);
        // A process that was stopped keeps no place for ever.
        let overdue = Waiter { until: uptime_seconds().checked_sub(1), ..waiter(5, "d", "no", Some(me)) };
        assert!(!overdue.is_there());
    }

    /// Of a user, for whom `process` asks again and again.
    fn users(n: u64, uid: u32, process: Process) -> Waiter {
        let waiter = waiter(n, "", "no", Some(process));
        let container = Container { uid, ..waiter.container.clone() };
        Waiter { rule: Some(PolicyRule::default()), container, ..waiter }
    }

    #[test]
    fn a_user_has_an_entry_for_each_process_and_not_all_of_them() {
        let (mut ledger, me) = (Ledger::empty("boot"), Process::current().unwrap());
        for n in 1..10 {
            ledger.add_waiter(users(n, 1000, me));
        }
        assert_eq!((ledger.waiters.len(), ledger.waiters[0].id.as_str()), (1, "0000000000000001"));
        let rule = Some(PolicyRule { leases: Some(1), ..PolicyRule::default() });
        ledger.add_waiter(Waiter { rule: rule.clone(), ..users(9, 1000, me) });
        assert_eq!((ledger.waiters.len(), &ledger.waiters[0].rule), (1, &rule), "the policy of now");
        for n in 10..100 {
            ledger.add_waiter(users(n, 1000, Process { start_time: n, ..me }));
        }
        assert_eq!(ledger.waiters.len(), MOST_OF_A_USER);
        let process = |n| Process { start_time: n, ..me };
        ledger.add_waiter(users(200, 1001, process(200)));
        assert_eq!(ledger.waiters.len(), MOST_OF_A_USER + 1);
        let mut long = users(201, 1002, process(201));
        long.container.rootfs = "\u{1}".repeat(4096).into();
        ledger.add_waiter(long.clone());
        assert_eq!(ledger.waiters.len(), MOST_OF_A_USER + 1, "every start would read its 24 KiB");
        long.rule = None;
        ledger.add_waiter(long);
        assert_eq!(ledger.waiters.len(), MOST_OF_A_USER + 2, "root's may be long");
    }

    #[test]
    fn a_refused_container_keeps_its_turn_while_its_start_is_due_or_under_way() {
        let mut retry = waiter(1, "web", "no", None).retry.unwrap();
        assert!(!retry.is_due(), "Docker has not said that it is to be started");
        retry.confirmed = true;
        assert!(retry.is_due());
        retry.note_start();
        assert!(retry.is_due(), "it is being started");
        retry.postpone();
        assert!(!retry.is_due());
        (0..5).for_each(|_| retry.note_start());
        assert!(!retry.is_due(), "it was refused often");
    }

    #[test]
    fn the_pauses_between_starts_grow_to_half_an_hour() {
        let mut retry = waiter(1, "web", "no", None).retry.unwrap();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            retry.note_start();
            pauses.push(retry.from.saturating_sub(uptime_seconds()).div_ceil(5) * 5);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 640, 1280, 1800, 1800, 1800]);
    }

    #[test]
    fn dockers_are_the_containers_of_roots_dockerd() {
        let of = |id: &str| waiter(1, id, "no", None).container;
        let docker = of(&"0a".repeat(32));
        assert!(docker.is_dockers());
        assert!(!of("web").is_dockers(), "no id of Docker's goes into a request to it");
        assert!(!Container { uid: 1000, ..docker.clone() }.is_dockers());
        assert!(!Container { bundle: Path::new("/moby").join(&docker.id), ..docker }.is_dockers());
    }
}
