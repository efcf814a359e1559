//! What all threads share: whether something is being broken, what runs, what was found wrong.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// So long after a fault its effects may still be seen.
const AFTERMATH: Duration = Duration::from_secs(3);
/// What is printed of one sort of fault found.
const MOST_FINDINGS: usize = 30;

/// A container that was started and not yet told to end.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its id in the ledger.
    pub id: String,
    /// Whether it runs until it is stopped.
    pub stays: bool,
}

/// An attempt to start, for the judgement of another one's refusal.
struct Attempt {
    gpus: usize,
    began: Instant,
    ended: Option<Instant>,
}

/// Counts for the report.
#[derive(Default)]
pub struct Counts {
    pub steps: AtomicU64,
    pub cycles: AtomicU64,
    pub faults: AtomicU64,
    pub looks: AtomicU64,
    pub refusals: AtomicU64,
    pub judged: AtomicU64,
}

/// Shared by all threads.
pub struct Weather {
    began: Instant,
    storms: AtomicUsize,
    /// Milliseconds after `began` at which the last fault ended.
    calm_since: AtomicU64,
    stop: AtomicBool,
    running: Mutex<BTreeMap<String, Running>>,
    attempts: Mutex<Vec<Attempt>>,
    findings: Mutex<Vec<String>>,
    /// Held for writing while no container may be started.
    pub doors: RwLock<()>,
    pub counts: Counts,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Weather {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            storms: AtomicUsize::new(0),
            calm_since: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            running: Mutex::default(),
            attempts: Mutex::default(),
            findings: Mutex::default(),
            doors: RwLock::new(()),
            counts: Counts::default(),
        }
    }

    fn milliseconds(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// While the returned value lives, something is being broken.
    pub fn storm(&self) -> Storm<'_> {
        self.storms.fetch_add(1, Ordering::SeqCst);
        Storm(self)
    }

    /// Whether nothing has been broken since `since` and for some time before it.
    pub fn was_calm_since(&self, since: Instant) -> bool {
        let since = u64::try_from(since.duration_since(self.began).as_millis()).unwrap_or(0);
        let aftermath = u64::try_from(AFTERMATH.as_millis()).unwrap_or(0);
        self.storms.load(Ordering::SeqCst) == 0
            && since >= self.calm_since.load(Ordering::SeqCst).saturating_add(aftermath)
    }

    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub fn end(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// Sleeps in parts, so that the end need not wait for it.
    pub fn sleep(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until && !self.is_over() {
            std::thread::sleep(
                Duration::from_millis(20).min(until.saturating_duration_since(Instant::now())),
            );
        }
    }

    pub fn started(&self, name: &str, running: Running) {
        lock(&self.running).insert(name.to_owned(), running);
    }

    pub fn forget(&self, name: &str) {
        lock(&self.running).remove(name);
    }

    pub fn running(&self) -> BTreeMap<String, Running> {
        lock(&self.running).clone()
    }

    pub fn is_running(&self, name: &str, id: &str) -> bool {
        lock(&self.running).get(name).is_some_and(|running| running.id == id)
    }

    /// Notes an attempt to take so many GPUs; its number.
    pub fn attempt(&self, gpus: usize) -> usize {
        let mut attempts = lock(&self.attempts);
        attempts.push(Attempt { gpus, began: Instant::now(), ended: None });
        attempts.len() - 1
    }

    /// What was killed dies when the kernel comes to it, and may have taken a lease in its last system call.
    pub fn attempted(&self, number: usize, was_killed: bool) {
        let dies = if was_killed { AFTERMATH } else { Duration::ZERO };
        lock(&self.attempts)[number].ended = Some(Instant::now() + dies);
    }

    /// How many GPUs others may have had for a while, beside attempt `number` and since it began.
    pub fn asked_beside(&self, number: usize) -> usize {
        let attempts = lock(&self.attempts);
        let began = attempts[number].began;
        let others = attempts
            .iter()
            .enumerate()
            .filter(|(other, attempt)| *other != number && attempt.ended.is_none_or(|ended| ended >= began));
        others.map(|(_, attempt)| attempt.gpus).sum()
    }

    /// Something is wrong.
    pub fn found(&self, what: String) {
        let mut findings = lock(&self.findings);
        eprintln!("soak: {:8.3} s: FOUND: {what}", self.began.elapsed().as_secs_f64());
        if findings.len() < MOST_FINDINGS {
            findings.push(what);
        }
    }

    pub fn tell(&self, what: &str) {
        if std::env::var_os("SOAK_VERBOSE").is_some() {
            eprintln!("soak: {:8.3} s: {what}", self.began.elapsed().as_secs_f64());
        }
    }

    pub fn findings(&self) -> Vec<String> {
        lock(&self.findings).clone()
    }
}

/// Ends a fault when dropped.
pub struct Storm<'a>(&'a Weather);

impl Drop for Storm<'_> {
    fn drop(&mut self) {
        self.0.calm_since.store(self.0.milliseconds(), Ordering::SeqCst);
        self.0.storms.fetch_sub(1, Ordering::SeqCst);
    }
}
