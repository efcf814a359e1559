//! Two threads for what takes time: asks, one at a time for each user, and every ten seconds `sublet gc`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::sys::eventfd::EventFd;

use super::broker;
use super::peer::Peer;

/// One user's slow asks leave the other thread to everybody else.
const THREADS: usize = 2;

/// Something to do.
pub(super) enum Job {
    /// Answer a line of connection `token`.
    Ask { token: u64, peer: Peer, line: Vec<u8> },
    /// Free what is gone, bring back what died, look after MIG devices: the service's own work.
    Own(fn()),
}

/// Something done.
pub(super) enum Done {
    /// The answer for connection `token` of `uid`.
    Answer { token: u64, uid: u32, line: Vec<u8> },
    /// The service's own work.
    Own,
}

/// The threads, and what waits for them.
pub(super) struct Pool {
    waiting: VecDeque<Job>,
    /// Uids whose asks are being answered, `None` for the service's own work.
    busy: Vec<Option<u32>>,
    to_threads: Sender<Job>,
    from_threads: Receiver<Done>,
}

impl Pool {
    /// Starts the threads; each thing done is announced by `wake`.
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

    /// What has been done since the last call.
    pub(super) fn done(&mut self) -> Vec<Done> {
        let done: Vec<Done> = self.from_threads.try_iter().collect();
        for done in &done {
            let who = match done {
                Done::Answer { uid, .. } => Some(*uid),
                Done::Own => None,
            };
            if let Some(at) = self.busy.iter().position(|busy| *busy == who) {
                self.busy.swap_remove(at);
            }
        }
        self.hand_out();
        done
    }

    /// Whether work of the service's own waits for its turn.
    pub(super) fn is_behind(&self) -> bool {
        self.waiting.iter().any(|job| matches!(job, Job::Own(_)))
    }

    /// Whether nothing waits and nothing is being done.
    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.busy.is_empty()
    }

    fn hand_out(&mut self) {
        while self.busy.len() < THREADS {
            let Some(job) = next(&mut self.waiting, &self.busy) else { return };
            self.busy.push(who(&job));
            // The threads end with the process: somebody listens.
            let _ = self.to_threads.send(job);
        }
    }
}

fn who(job: &Job) -> Option<u32> {
    match job {
        Job::Ask { peer, .. } => Some(peer.uid),
        Job::Own(_) => None,
    }
}

/// The first that waits whose user has no ask being answered.
fn next(waiting: &mut VecDeque<Job>, busy: &[Option<u32>]) -> Option<Job> {
    let at = waiting.iter().position(|job| !busy.contains(&who(job)))?;
    waiting.remove(at)
}

fn work(jobs: &Mutex<Receiver<Job>>, done: &Sender<Done>, wake: &EventFd) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let finished = match job {
            Ok(Job::Ask { token, peer, line }) => {
                Done::Answer { token, uid: peer.uid, line: broker::answer(&line, peer) }
            }
            Ok(Job::Own(task)) => {
                task();
                Done::Own
            }
            Err(_) => return,
        };
        if done.send(finished).is_err() {
            return;
        }
        if let Err(error) = wake.write(1) {
            tracing::warn!("eventfd {}: {error}", wake.as_raw_fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(token: u64, uid: u32) -> Job {
        Job::Ask { token, peer: Peer { pid: 1, uid }, line: Vec::new() }
    }

    fn token(job: Option<Job>) -> Option<u64> {
        job.map(|job| match job {
            Job::Ask { token, .. } => token,
            Job::Own(_) => 0,
        })
    }

    #[test]
    fn one_user_has_one_thread_and_the_others_pass() {
        let mut waiting: VecDeque<Job> = [ask(1, 7), ask(2, 7), ask(3, 8), Job::Own(|| ())].into();
        assert_eq!(token(next(&mut waiting, &[])), Some(1));
        assert_eq!(token(next(&mut waiting, &[Some(7)])), Some(3));
        assert_eq!(token(next(&mut waiting, &[Some(7)])), Some(0));
        assert_eq!(token(next(&mut waiting, &[Some(7)])), None);
        assert_eq!(token(next(&mut waiting, &[])), Some(2));
    }
}
