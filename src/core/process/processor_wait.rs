//! How long a process has waited for a processor. Time limits on programs and daemons do not count that time: where
//! hundreds of processes want few processors, a sound one takes seconds for what else takes milliseconds.

use std::time::{Duration, Instant};

use super::Stat;
use crate::reading::kernel_file;

/// How many times its limit a process may wait for a processor beside it.
const MOST: u32 = 9;

/// The time that a process's first thread waits for a processor from a moment on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProcessorWait {
    pid: i32,
    since: Instant,
    before: Counted,
}

/// The first two numbers of `/proc/PID/schedstat` (the kernel's Documentation/scheduler/sched-stats.rst).
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// On a processor.
    ran: Duration,
    /// Ready to run, without a processor. A wait is added once it is over.
    waited: Duration,
}

impl ProcessorWait {
    /// Of a process that begins now.
    pub fn of_new(pid: i32) -> Self {
        Self { pid, since: Instant::now(), before: Counted::default() }
    }

    /// Of a process that runs, from now on.
    pub fn from_now_on(pid: i32) -> Self {
        Self { before: Counted::of(pid).unwrap_or_default(), ..Self::of_new(pid) }
    }

    /// How much of `limit` is left; zero once it is over. A process that has ended has waited for nothing, and where the
    /// kernel does not count (`CONFIG_SCHED_INFO`), none has.
    pub fn remaining(self, limit: Duration) -> Duration {
        let passed = self.since.elapsed();
        let waited = if passed < limit { Duration::ZERO } else { self.waited(passed).unwrap_or_default() };
        limit.saturating_add(waited.min(limit.saturating_mul(MOST))).saturating_sub(passed)
    }

    /// Whether `limit` is over, with all that a wait for a processor may add.
    pub fn is_far_beyond(self, limit: Duration) -> bool {
        self.since.elapsed() >= limit.saturating_mul(MOST + 1)
    }

    fn waited(self, passed: Duration) -> Option<Duration> {
        let now = Counted::of(self.pid)?;
        let is_ready = |stat: Stat| stat.state == 'R';
        if Stat::of(self.pid).ok().flatten().is_some_and(is_ready) {
            // It may wait right now, which is not counted yet.
            return Some(passed.saturating_sub(now.ran.saturating_sub(self.before.ran)));
        }
        Some(now.waited.saturating_sub(self.before.waited))
    }
}

impl Counted {
    fn of(pid: i32) -> Option<Self> {
        let text = kernel_file(format!("/proc/{pid}/schedstat")).ok()?;
        let mut numbers = text.split_whitespace().map(|word| word.parse().map(Duration::from_nanos));
        Some(Self { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
    }
}
