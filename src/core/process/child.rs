//! Runs a program with a time limit and a limit on its output, feeds its input, and always reaps it.
//!
//! Time in which the program waits for a processor is no part of the limit ([`ProcessorWait`]).

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Stat, inheritance};

/// How much of each output stream is kept, in bytes. The rest is read and dropped.
const KEPT: usize = 64 << 10;

/// How often to check whether the child has ended while a stream is still open: a grandchild may hold it open.
const TICK: Duration = Duration::from_millis(5);

/// A program's output and exit status.
#[derive(Debug)]
pub struct Finished {
    /// Its exit status.
    pub status: ExitStatus,
    /// Its standard output, as far as it was kept.
    pub stdout: String,
    /// Its standard error, as far as it was kept.
    pub stderr: String,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// It could not be started, or waiting failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It did not end in time and was killed.
    #[error("it did not end in time")]
    Timeout,
}

/// Runs `command` with `input` on its standard input for at most `limit`.
pub fn run(command: &mut Command, input: &str, limit: Duration) -> Result<Finished, ChildError> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    supervise(command, input, limit, KEPT, &|| false)
}

/// As [`run`], without input, until `stop` is set: then the program is killed, and the error is
/// [`io::ErrorKind::Interrupted`].
pub fn run_until(
    command: &mut Command,
    limit: Duration,
    stop: &dyn Fn() -> bool,
) -> Result<Finished, ChildError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    supervise(command, "", limit, KEPT, stop)
}

/// As [`run`], without input, keeping up to `most` bytes of each stream: for output that is useless if it is cut.
pub fn run_whole(command: &mut Command, limit: Duration, most: usize) -> Result<Finished, ChildError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    supervise(command, "", limit, most, &|| false)
}

/// As [`run`], without input and without reading the output: for programs that leave a daemon behind.
pub fn run_without_output(command: &mut Command, limit: Duration) -> Result<ExitStatus, ChildError> {
    command.stdout(Stdio::null()).stderr(Stdio::null());
    run_with_own_output(command, limit)
}

/// As [`run_without_output`], with the standard streams of `command`. They must not be pipes, because a daemon would hold
/// their ends open.
pub fn run_with_own_output(command: &mut Command, limit: Duration) -> Result<ExitStatus, ChildError> {
    command.stdin(Stdio::null());
    supervise(command, "", limit, KEPT, &|| false).map(|finished| finished.status)
}

/// Starts `command` as a daemon, with /dev/null as its standard streams. For a process with one thread.
pub(crate) fn spawn_detached(command: &mut Command) -> io::Result<()> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    inheritance::reset_sigchld()?;
    inheritance::set_cloexec_in_child(command);
    inheritance::daemonize(command);
    // The intermediate process ends at once.
    command.spawn()?.wait().map(drop)
}

fn supervise(
    command: &mut Command,
    input: &str,
    limit: Duration,
    most: usize,
    stop: &dyn Fn() -> bool,
) -> Result<Finished, ChildError> {
    inheritance::reset_sigchld()?;
    inheritance::set_cloexec_in_child(command);
    let mut child = command.spawn()?;
    // It shows the end at once. A kernel before Linux 5.3 has none.
    let pidfd = i32::try_from(child.id()).ok().and_then(|pid| super::pidfd_open(pid).ok());
    let result = collect_output(&mut child, pidfd, input, limit, most, stop);
    if result.is_err() {
        let _ = child.kill();
        // One that hangs in the kernel is left behind rather than waited for.
        let mut looks = 0..200;
        while looks.next().is_some() && matches!(child.try_wait(), Ok(None)) {
            sleep(Duration::from_millis(5));
        }
    }
    result
}

fn collect_output(
    child: &mut Child,
    mut pidfd: Option<OwnedFd>,
    input: &str,
    limit: Duration,
    most: usize,
    stop: &dyn Fn() -> bool,
) -> Result<Finished, ChildError> {
    let waited = ProcessorWait::of_new(i32::try_from(child.id()).unwrap_or_default());
    let mut input = Input::new(child.stdin.take(), input.as_bytes())?;
    let outputs = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
    let mut streams = outputs.map(|from| Stream { from: from.map(File::from), kept: Vec::new(), most });
    loop {
        input.write();
        let ended = child.try_wait()?;
        let wait = if ended.is_some() { Duration::ZERO } else { TICK };
        let end = pidfd.as_ref().filter(|_| ended.is_none());
        let (has_output, has_end) = poll_output(&mut streams, end, wait)?;
        if has_end {
            // It would go on to show it, and a tracer may be the first to wait for the program.
            pidfd = None;
        }
        if let (Some(status), false) = (ended, has_output) {
            let [stdout, stderr] = streams.map(|stream| String::from_utf8_lossy(&stream.kept).into_owned());
            return Ok(Finished { status, stdout, stderr });
        }
        // The output of a program that has ended is read even if this process woke up late.
        let is_over =
            if ended.is_some() { waited.is_far_beyond(limit) } else { waited.remaining(limit).is_zero() };
        if is_over {
            return Err(ChildError::Timeout);
        }
        if stop() {
            return Err(io::Error::from(io::ErrorKind::Interrupted).into());
        }
    }
}

/// Waits up to `wait` for output, or for the `end` of the program, and reads the output. Returns which of both has come.
fn poll_output(streams: &mut [Stream; 2], end: Option<&OwnedFd>, wait: Duration) -> io::Result<(bool, bool)> {
    let outputs = streams.iter().filter_map(|stream| stream.from.as_ref()).map(File::as_fd);
    let listened = outputs.chain(end.map(OwnedFd::as_fd));
    let mut open: Vec<PollFd> = listened.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    if open.is_empty() {
        // Both streams are closed: the child ends within microseconds, or the limit ends it.
        sleep(wait.min(Duration::from_micros(500)));
        return Ok((false, false));
    }
    match poll(&mut open, PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO)) {
        Err(nix::errno::Errno::EINTR) | Ok(0) => return Ok((false, false)),
        Err(error) => return Err(error.into()),
        Ok(_) => {}
    }
    let ready: Vec<bool> = open.iter().map(|fd| fd.any().unwrap_or(true)).collect();
    let mut ready = ready.into_iter();
    let mut has_output = false;
    for stream in streams.iter_mut().filter(|stream| stream.from.is_some()) {
        has_output |= ready.next() == Some(true) && stream.read()?;
    }
    Ok((has_output, ready.next() == Some(true)))
}

/// A child's remaining input. It may read slowly or never, and a pipe may hold only a page (pipe(7)).
struct Input<'a> {
    to: Option<ChildStdin>,
    left: &'a [u8],
}

impl<'a> Input<'a> {
    fn new(to: Option<ChildStdin>, left: &'a [u8]) -> io::Result<Self> {
        let to = to.filter(|_| !left.is_empty());
        if let Some(to) = &to {
            fcntl(to, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        Ok(Self { to, left })
    }

    /// Writes as much as the pipe takes now, and closes it after the last byte.
    fn write(&mut self) {
        let Some(to) = &mut self.to else { return };
        match to.write(self.left) {
            Ok(count) => self.left = &self.left[count..],
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            // A child that does not read its input is no error by itself: its exit status decides.
            Err(_) => self.left = &[],
        }
        if self.left.is_empty() {
            self.to = None;
        }
    }
}

struct Stream {
    from: Option<File>,
    kept: Vec<u8>,
    most: usize,
}

impl Stream {
    /// Reads once. `false` at the end of the stream, which is then closed.
    fn read(&mut self) -> io::Result<bool> {
        let Some(from) = &mut self.from else { return Ok(false) };
        let mut buffer = [0_u8; 4096];
        match from.read(&mut buffer) {
            Ok(0) => self.from = None,
            Ok(count) => {
                let room = self.most.saturating_sub(self.kept.len()).min(count);
                self.kept.extend_from_slice(&buffer[..room]);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(self.from.is_some())
    }
}

/// How many times its limit a process may wait for a processor beside it. Time limits on programs and daemons do not count
/// that wait: where hundreds of processes want few processors, a sound one takes seconds instead of milliseconds.
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
        if Stat::of(self.pid).ok().flatten().is_some_and(|stat: Stat| stat.state == 'R') {
            // It may wait right now, which is not counted yet.
            return Some(passed.saturating_sub(now.ran.saturating_sub(self.before.ran)));
        }
        Some(now.waited.saturating_sub(self.before.waited))
    }
}

impl Counted {
    fn of(pid: i32) -> Option<Self> {
        let text = crate::process::kernel_file(format!("/proc/{pid}/schedstat")).ok()?;
        let mut numbers = text.split_whitespace().map(|word| word.parse().map(Duration::from_nanos));
        Some(Self { ran: numbers.next()?.ok()?, waited: numbers.next()?.ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_program_past_its_limit_is_killed_and_reaped() {
        let begun = Instant::now();
        let mut command = shell("echo $$ >&2; exec sleep 30");
        let error = run(&mut command, "", Duration::from_millis(150)).unwrap_err();
        assert!(matches!(error, ChildError::Timeout));
        assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    }

    /// As where a debugger has still to wait for it.
    #[test]
    fn an_end_that_is_shown_and_cannot_be_waited_for_yet_is_not_asked_for_without_a_pause() {
        let mut gone = shell("exit 0").spawn().unwrap();
        let pidfd = super::super::pidfd_open(i32::try_from(gone.id()).unwrap()).unwrap();
        gone.wait().unwrap();
        let looks = std::cell::Cell::new(0_u32);
        let stop = || {
            looks.set(looks.get() + 1);
            false
        };
        let mut child = shell("sleep 0.5; echo done").stdout(Stdio::piped()).spawn().unwrap();
        let limit = Duration::from_secs(60);
        let finished = collect_output(&mut child, Some(pidfd), "", limit, KEPT, &stop).unwrap();
        assert_eq!(finished.stdout, "done\n");
        // One each 5 ms, and more where the shell is late; without a pause some 100,000.
        assert!(looks.get() < 5000, "{} looks in half a second", looks.get());
    }

    /// Two want the same processor all the time, and the kernel prefers one of them.
    #[test]
    fn the_wait_for_a_processor_is_no_part_of_the_limit() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim();
        let first = allowed.split(['-', ',']).next().unwrap();
        let start = |words: &[&str]| Command::new("taskset").args(["-c", first]).args(words).spawn().unwrap();
        let endless = "while :; do :; done";
        let time = Duration::from_millis(200);
        let mut children = [
            start(&["sh", "-c", endless]),
            start(&["chrt", "-i", "0", "sh", "-c", endless]),
            start(&["sleep", "60"]),
        ];
        let wait = |child: &Child| ProcessorWait::of_new(i32::try_from(child.id()).unwrap());
        let [_, waits, sleeps] = children.each_ref().map(wait);
        sleep(time * 2);
        let (left, over) =
            (waits.remaining(time), [waits, sleeps].map(|wait| wait.remaining(time).is_zero()));
        let unread = sleeps.is_far_beyond(time);
        let far = waits.remaining(time / 1000);
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(over, [false, true], "{left:?}");
        assert!(!unread, "its output is read, if it has ended in the meantime");
        assert!(far.is_zero(), "it is not waited for without end");
    }

    #[test]
    fn a_program_that_does_not_read_its_input_is_killed_at_its_limit() {
        let input = "x".repeat(1 << 20);
        let begun = Instant::now();
        let error = run(&mut shell("exec sleep 30"), &input, Duration::from_millis(150)).unwrap_err();
        assert!(matches!(error, ChildError::Timeout));
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        let counted = run(&mut shell("sleep 0.1; wc -c"), &input, Duration::from_secs(60)).unwrap();
        assert_eq!(counted.stdout.trim(), "1048576");
    }

    /// In processes of their own, because the setting is a whole process's.
    #[test]
    fn where_the_caller_ignored_the_ends_of_children_they_are_waited_for_all_the_same() {
        for name in ["feeds_and_hears", "a_detached_process_is_no_child_of_ours_and_in_a_session_of_its_own"]
        {
            let mut alone = Command::new("env");
            alone.arg("--ignore-signal=CHLD").arg(std::env::current_exe().unwrap()).arg("--exact");
            alone.arg(format!("process::child::tests::{name}"));
            let finished = run(&mut alone, "", Duration::from_secs(100)).unwrap();
            assert!(finished.stdout.contains("1 passed"), "{}", finished.stdout);
        }
    }

    #[test]
    fn feeds_and_hears() {
        let finished =
            run(&mut shell("cat; echo oops >&2; exit 3"), "ask\n", Duration::from_secs(10)).unwrap();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("ask\n", "oops\n"));
        assert_eq!(finished.status.code(), Some(3));
    }

    #[test]
    fn a_flood_is_read_to_its_end_and_kept_in_part() {
        let mut command = shell("head -c 1000000 /dev/zero; echo end >&2");
        let finished = run(&mut command, "", Duration::from_secs(10)).unwrap();
        assert_eq!(finished.stdout.len(), 65536);
        assert_eq!(finished.stderr, "end\n");
        assert_eq!(
            run_whole(&mut command, Duration::from_secs(10), 1 << 20).unwrap().stdout.len(),
            1_000_000
        );
    }

    #[test]
    fn a_grandchild_that_keeps_the_pipe_does_not_hold_us() {
        let begun = Instant::now();
        let finished = run(&mut shell("sleep 20 & echo done"), "", Duration::from_secs(15)).unwrap();
        assert_eq!(finished.stdout, "done\n");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    }

    #[test]
    fn a_detached_process_is_no_child_of_ours_and_in_a_session_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let stat = dir.path().join("told");
        let mut command = shell(&format!(
            "cat /proc/$$/stat >{0}.new; ls /proc/$$/fd >>{0}.new; mv {0}.new {0}; exec sleep 2",
            stat.display()
        ));
        let begun = Instant::now();
        spawn_detached(&mut command).unwrap();
        assert!(begun.elapsed() < Duration::from_secs(2), "it was waited for");
        while !stat.exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it says nothing");
            sleep(Duration::from_millis(5));
        }
        let stat = std::fs::read_to_string(stat).unwrap();
        let mut fields =
            stat.rsplit_once(") ").unwrap().1.split_whitespace().skip(1).map(|field| field.parse().unwrap());
        let own = nix::unistd::getpid().as_raw();
        assert_ne!(fields.next(), Some(own), "its parent");
        let session: i32 = fields.nth(1).unwrap();
        assert_ne!(session, nix::unistd::getsid(None).unwrap().as_raw());
        assert!(spawn_detached(&mut Command::new("/nowhere")).is_err());
    }

    #[test]
    fn a_program_that_reads_nothing_is_no_error() {
        assert!(
            run_without_output(&mut Command::new("/bin/true"), Duration::from_secs(5)).unwrap().success()
        );
        assert!(matches!(
            run_without_output(&mut Command::new("/nowhere"), Duration::from_secs(5)),
            Err(ChildError::Io(_))
        ));
    }
}
