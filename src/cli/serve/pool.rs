//! Threads for slow work. Two answer requests, one at a time for each user, and do the work of `sublet gc` every ten
//! seconds. A third creates and destroys MIG instances, and suspends and resumes containers, which may take minutes. A fourth
//! makes reports, which may read the records of a year.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::eventfd::EventFd;

use super::broker;
use crate::peer::Peer;
use sublet_core::admit::PutOff;

/// All threads.
const THREADS: usize = 4;

/// A piece of work.
pub(super) enum Job {
    /// Answer a line of connection `token`.
    Ask { token: u64, peer: Peer, line: Vec<u8>, work: Work },
    /// Release leases of exited containers, restart crashed MPS daemons, look after MIG devices: the service's own
    /// work.
    Own(fn(&Cell<PutOff>)),
    /// Destroy instances that no lease needs, put right suspensions that were cut short, and take a step for those who wait for
    /// room.
    Clear,
}

/// Which threads do a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// Two: the requests of one user occupy only one, so the other is free for other users.
    Quick,
    /// One: instances are made or destroyed, or containers suspended.
    Slow,
    /// One, for which no other work of its user waits.
    Report,
}

/// The answer for a connection, by its token.
pub(super) type Answer = (u64, Vec<u8>);

/// A job that a thread has finished.
struct Finished {
    who: Who,
    answer: Option<Answer>,
    /// Work that it leaves to the thread for slow work.
    left: Option<Job>,
}

/// For whom a thread works. Each user has at most one job at a time, and so have the service's own quick and slow work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Who {
    /// `None`: the service itself.
    user: Option<u32>,
    work: Work,
}

impl Who {
    fn is_same(self, other: Self) -> bool {
        let is_report = self.work == Work::Report || other.work == Work::Report;
        self == other || self.user.is_some() && self.user == other.user && !is_report
    }
}

/// The threads and the queue.
pub(super) struct Pool {
    waiting: VecDeque<Job>,
    busy: Vec<Who>,
    to_threads: Sender<Job>,
    from_threads: Receiver<Finished>,
}

impl Pool {
    /// Starts the threads. Each finished job is announced through `wake`.
    pub(super) fn start(wake: &Arc<EventFd>) -> io::Result<Self> {
        let (to_threads, jobs) = mpsc::channel();
        let (done, from_threads) = mpsc::channel();
        let jobs = Arc::new(Mutex::new(jobs));
        for number in 0..THREADS {
            let (jobs, done, wake) = (Arc::clone(&jobs), done.clone(), Arc::clone(wake));
            let name = format!("worker-{number}");
            thread::Builder::new().name(name).spawn(move || work(&jobs, &done, &wake))?;
        }
        Ok(Self { waiting: VecDeque::new(), busy: Vec::new(), to_threads, from_threads })
    }

    /// Puts `job` at the end of the queue.
    pub(super) fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
        self.hand_out();
    }

    /// The answers that are ready since the last call.
    pub(super) fn answers(&mut self) -> Vec<Answer> {
        let mut all = Vec::new();
        while let Ok(Finished { who, answer, left }) = self.from_threads.try_recv() {
            if let Some(at) = self.busy.iter().position(|busy| *busy == who) {
                self.busy.swap_remove(at);
            }
            all.extend(answer);
            // One clearing that waits does the work of several.
            let clears = |job: &Job| matches!(job, Job::Clear);
            self.waiting.extend(left.filter(|job| !clears(job) || !self.waiting.iter().any(clears)));
        }
        self.hand_out();
        all
    }

    /// Whether work of the service itself is in the queue.
    pub(super) fn is_behind(&self) -> bool {
        self.waiting.iter().any(|job| matches!(job, Job::Own(_)))
    }

    /// Whether there is no work, waiting or running.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.busy.is_empty()
    }

    fn hand_out(&mut self) {
        while let Some(job) = next(&mut self.waiting, &self.busy) {
            self.busy.push(who(&job));
            // The receivers exist as long as the process does.
            let _ = self.to_threads.send(job);
        }
    }
}

const fn who(job: &Job) -> Who {
    match job {
        // Root's starts that wait for room keep no other of root's.
        Job::Ask { peer, work: Work::Slow, .. } if peer.uid == 0 => Who { user: None, work: Work::Slow },
        Job::Ask { peer, work, .. } => Who { user: Some(peer.uid), work: *work },
        Job::Own(_) => Who { user: None, work: Work::Quick },
        Job::Clear => Who { user: None, work: Work::Slow },
    }
}

/// The first job in the queue that has a free thread, unless its user has an ask that is being answered, or an earlier
/// one that waits for an instance.
fn next(waiting: &mut VecDeque<Job>, busy: &[Who]) -> Option<Job> {
    let mut before = busy.to_vec();
    let at = waiting.iter().position(|job| {
        let who = who(job);
        let threads = if who.work == Work::Quick { 2 } else { 1 };
        let room = busy.iter().filter(|other| other.work == who.work).count() < threads;
        let first = !before.iter().any(|other| other.is_same(who));
        before.push(who);
        room && first
    })?;
    waiting.remove(at)
}

fn work(jobs: &Mutex<Receiver<Job>>, done: &Sender<Finished>, wake: &EventFd) {
    loop {
        let Ok(job) = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv() else { return };
        if done.send(finish(job)).is_err() {
            return;
        }
        let woken = wake.write(1);
        let _ = woken.inspect_err(|error| tracing::warn!("eventfd {}: {error}", wake.as_raw_fd()));
    }
}

/// Does the job, or leaves it to the thread for slow work.
fn finish(job: Job) -> Finished {
    let who = who(&job);
    let put_off = Cell::new(PutOff::default());
    let answer = match job {
        Job::Ask { token, peer, line, work } => {
            let answer = broker::answer(&line, peer, (work == Work::Quick).then_some(&put_off));
            if put_off.get().make {
                let left = Some(Job::Ask { token, peer, line, work: Work::Slow });
                return Finished { who, answer: None, left };
            }
            Some((token, answer))
        }
        Job::Own(task) => {
            task(&put_off);
            None
        }
        Job::Clear => {
            broker::clear(&put_off);
            None
        }
    };
    Finished { who, answer, left: put_off.get().clear.then_some(Job::Clear) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(token: u64, uid: u32) -> Job {
        of(Work::Quick, token, uid)
    }

    fn make(token: u64, uid: u32) -> Job {
        of(Work::Slow, token, uid)
    }

    fn of(work: Work, token: u64, uid: u32) -> Job {
        Job::Ask { token, peer: Peer { pid: 1, uid }, line: Vec::new(), work }
    }

    fn user(uid: u32, makes: bool) -> Who {
        Who { user: Some(uid), work: if makes { Work::Slow } else { Work::Quick } }
    }

    fn token(job: Option<Job>) -> Option<u64> {
        job.map(|job| match job {
            Job::Ask { token, .. } => token,
            Job::Own(_) | Job::Clear => 0,
        })
    }

    #[test]
    fn one_user_has_one_thread_and_blocks_no_other_user() {
        let mut waiting: VecDeque<Job> = [ask(1, 7), ask(2, 7), ask(3, 8), Job::Own(|_| ())].into();
        assert_eq!(token(next(&mut waiting, &[])), Some(1));
        assert_eq!(token(next(&mut waiting, &[user(7, false)])), Some(3));
        assert_eq!(token(next(&mut waiting, &[user(7, false)])), Some(0));
        assert_eq!(token(next(&mut waiting, &[user(7, false)])), None);
        assert_eq!(token(next(&mut waiting, &[])), Some(2));
    }

    #[test]
    fn roots_starts_that_wait_for_room_keep_no_other_of_root() {
        let mut waiting: VecDeque<Job> = [make(2, 0), ask(3, 0)].into();
        assert_eq!(token(next(&mut waiting, &[who(&make(1, 0))])), Some(3));
        assert_eq!(token(next(&mut waiting, &[who(&make(1, 0))])), None, "one after the other");
        assert_eq!(token(next(&mut waiting, &[user(0, false)])), Some(2));
    }

    #[test]
    fn a_report_neither_waits_for_its_users_other_asks_nor_keeps_them() {
        let report = |token, uid| of(Work::Report, token, uid);
        let mut waiting: VecDeque<Job> = [ask(1, 7), report(2, 7), report(3, 8), make(4, 7)].into();
        assert_eq!(token(next(&mut waiting, &[user(7, true)])), Some(2));
        let busy = who(&report(2, 7));
        assert_eq!(token(next(&mut waiting, &[busy])), Some(1));
        assert_eq!(token(next(&mut waiting, &[busy])), Some(4));
        assert_eq!(token(next(&mut waiting, &[busy])), None, "one after the other");
    }

    #[test]
    fn jobs_that_change_instances_leave_a_thread_to_the_rest() {
        let mut waiting: VecDeque<Job> =
            [make(1, 7), Job::Clear, make(2, 8), ask(3, 8), ask(4, 9), Job::Own(|_| ()), ask(5, 10)].into();
        let mut busy = Vec::new();
        let mut started = || {
            let next = next(&mut waiting, &busy)?;
            busy.push(who(&next));
            token(Some(next))
        };
        assert_eq!([started(), started(), started(), started()], [Some(1), Some(4), Some(0), None]);
        busy.remove(0);
        assert_eq!(token(next(&mut waiting, &busy)), Some(0), "clearing");
        assert_eq!(token(next(&mut waiting, &busy)), Some(2));
        assert_eq!(
            token(next(&mut waiting, &[user(9, false), user(8, true)])),
            Some(5),
            "3 waits for its user"
        );
    }
}
