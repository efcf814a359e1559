//! /proc of a process whose first thread may have ended while others go on: any program can end its first
//! thread alone (`syscall(SYS_exit, 0)`). Its `/proc/PID` then says that it is a zombie without memory, and shows no
//! program, no environment, no open file, no mounts and no network, and in cgroup v1 the root cgroup.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::is_gone;
use crate::reading::kernel_file;

/// A line of `/proc/PID/stat` or `/proc/PID/task/TID/stat` (proc(5)).
pub(super) struct Stat {
    /// The command name.
    pub name: String,
    /// Of the first thread, or of the thread TID.
    pub state: char,
    pub parent: i32,
    /// In clock ticks since boot.
    pub start_time: u64,
    /// Virtual memory, in bytes (`vsize`); 0 once the thread has given it up.
    pub memory: u64,
    /// Threads that have not been reaped. A first thread that has ended is not reaped before the last one.
    threads: u64,
}

impl Stat {
    /// Of the process `pid`; `None` if there is none.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        Self::read(&Path::new("/proc").join(pid.to_string()))
    }

    /// [`Stat::of`], with state and memory of a thread that runs, if the first one has ended.
    pub fn of_running_thread(pid: i32) -> io::Result<Option<Self>> {
        let proc = Path::new("/proc").join(pid.to_string());
        let first = match Self::read(&proc)? {
            Some(first) if first.has_only_first_thread_ended() => first,
            other => return Ok(other),
        };
        let running = running_thread(&proc).and_then(|thread| Self::read(&thread).ok().flatten());
        let (state, memory) = running.map_or((first.state, first.memory), |stat| (stat.state, stat.memory));
        Ok(Some(Self { state, memory, ..first }))
    }

    fn read(proc: &Path) -> io::Result<Option<Self>> {
        // One read is enough: the line has at most 52 numbers and a command name of 15 bytes (proc(5)).
        let mut line = [0; 1024];
        let file = proc.join("stat");
        match File::open(&file).and_then(|mut file| file.read(&mut line)) {
            Ok(length) => Self::parse(&String::from_utf8_lossy(&line[..length]))
                .map(Some)
                .ok_or_else(|| io::Error::other(format!("{} does not describe a process", file.display()))),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The command name in field 2 may contain spaces and parentheses, so fields are counted from the last `)`.
    fn parse(text: &str) -> Option<Self> {
        let (begin, end) = (text.find('(')?, text.rfind(')')?);
        let mut fields = text[end + 1..].split_ascii_whitespace();
        Some(Self {
            name: text.get(begin + 1..end)?.to_owned(),
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            threads: fields.nth(15)?.parse().ok()?,
            start_time: fields.nth(1)?.parse().ok()?,
            memory: fields.next()?.parse().ok()?,
        })
    }

    /// Whether the process is a zombie: all its threads have ended, and it holds no resources.
    pub fn has_ended(&self) -> bool {
        self.has_thread_ended() && self.threads <= 1
    }

    fn has_only_first_thread_ended(&self) -> bool {
        self.has_thread_ended() && self.threads > 1
    }

    pub fn has_thread_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// The directory of /proc with a process's files: `proc`, its `/proc/PID`, or a running thread's, if its first thread has
/// ended.
#[must_use]
pub fn live_proc_dir(proc: PathBuf) -> PathBuf {
    let only_first_has_ended = |stat: Stat| stat.has_only_first_thread_ended();
    let running =
        Stat::read(&proc).ok().flatten().is_some_and(only_first_has_ended).then(|| running_thread(&proc));
    running.flatten().unwrap_or(proc)
}

/// [`live_proc_dir`], of the process `pid`.
#[must_use]
pub fn live_proc_dir_of(pid: i32) -> PathBuf {
    live_proc_dir(Path::new("/proc").join(pid.to_string()))
}

/// The text of `/proc/PID/cgroup` (cgroups(7)) of the process `pid`. In cgroup v1 a thread that has ended is shown in
/// the root of every hierarchy (`proc_cgroup_show` in the kernel's kernel/cgroup/cgroup.c): of a first thread that is,
/// another one's text is taken. In v2 its cgroup stays.
///
/// # Errors
/// It cannot be read, or the process has ended.
pub fn cgroup_table(pid: i32) -> io::Result<String> {
    let proc = Path::new("/proc").join(pid.to_string());
    let first = kernel_file(proc.join("cgroup"))?;
    if !is_in_every_root_of_v1(&first) {
        return Ok(first);
    }
    let others = threads(&proc).filter_map(|thread| kernel_file(thread.join("cgroup")).ok());
    Ok(others.into_iter().find(|table| !is_in_every_root_of_v1(table)).unwrap_or(first))
}

fn is_in_every_root_of_v1(table: &str) -> bool {
    let mut of_v1 = table.lines().filter(|line| !line.starts_with("0::")).peekable();
    of_v1.peek().is_some() && of_v1.all(|line| line.ends_with(":/"))
}

fn threads(proc: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    fs::read_dir(proc.join("task")).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// The directory of a thread that runs, of the process of `proc`; `None` if there is none any more.
fn running_thread(proc: &Path) -> Option<PathBuf> {
    let runs = |thread: &PathBuf| {
        Stat::read(thread).ok().flatten().is_some_and(|stat| !stat.has_thread_ended() && stat.memory != 0)
    };
    threads(proc).find(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_fields_behind_a_hostile_command_name() {
        let text = "7 (a) R 1 (b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.state, stat.parent, stat.threads), ('S', 1, 17));
        assert_eq!((stat.start_time, stat.memory), (4242, 20));
    }

    #[test]
    fn a_zombie_has_ended_only_with_its_last_thread() {
        let ended = |state: char, threads: u64| {
            Stat { name: String::new(), state, parent: 1, start_time: 1, memory: 0, threads }.has_ended()
        };
        assert!(ended('Z', 1) && ended('Z', 0) && ended('X', 1));
        assert!(!ended('Z', 2) && !ended('S', 1));
    }

    #[test]
    fn a_thread_that_has_ended_is_in_every_root_of_v1() {
        assert!(is_in_every_root_of_v1("5:devices:/\n1:name=systemd:/\n0::/docker/c1\n"));
        for other in ["5:devices:/docker/c1\n1:name=systemd:/\n0::/\n", "0::/docker/c1\n", "0::/\n", ""] {
            assert!(!is_in_every_root_of_v1(other), "{other}");
        }
    }

    #[test]
    fn what_the_first_thread_no_longer_shows_another_one_does() {
        let started = super::super::fixture::without_first_thread();
        let process = started.process();
        let shown = live_proc_dir_of(process.pid);
        assert!(fs::read_link(Path::new("/proc").join(process.pid.to_string()).join("exe")).is_err());
        assert!(fs::read_link(shown.join("exe")).is_ok(), "{}", shown.display());
        let own_table = fs::read_to_string("/proc/self/cgroup").unwrap();
        assert_eq!(cgroup_table(process.pid).unwrap(), own_table);
        let own = Path::new("/proc").join(std::process::id().to_string());
        assert_eq!(live_proc_dir(own.clone()), own);
    }
}
