//! Xids in the kernel's log (`/dev/kmsg`), where the driver names the process that each is about; NVML names none.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::libc::{EPIPE, O_NONBLOCK};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use sublet_core::fs::under;

/// The longest record (`CONSOLE_EXT_LOG_MAX` of the kernel's printk), in bytes.
const LONGEST: usize = 8192;

/// How many records are read at once.
const MOST: usize = 4096;

/// The pause between two looks at a log that cannot be waited for, and after records.
const PAUSE: Duration = Duration::from_millis(100);

/// An Xid that the kernel's log has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Xid {
    /// The record's number since boot.
    pub sequence: u64,
    /// PCI address without its function: `0000:3b:00`.
    pub bus_id: String,
    pub number: u32,
    /// The process, on the host.
    pub pid: Option<i32>,
    /// What else the driver says. It may have a process's name, which may be any text.
    pub text: String,
}

/// The log, as far as it was read.
pub(crate) struct KernelLog {
    file: File,
    /// The beginning of a line.
    rest: Vec<u8>,
    /// Whether the kernel tells when there is more.
    is_device: bool,
    /// The number of the last record.
    pub last: u64,
}

impl KernelLog {
    /// The log below `root`, from its oldest record on.
    pub fn open(root: &Path) -> io::Result<Self> {
        let path = under(root, "/dev/kmsg");
        let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
        let is_device = !file.metadata()?.is_file();
        Ok(Self { file, rest: Vec::new(), is_device, last: 0 })
    }

    /// The Xids of the next records. That is the end of the log if it takes fewer than there is room for.
    pub fn read(&mut self) -> (Vec<Xid>, bool) {
        let mut found = Vec::new();
        let mut piece = [0; LONGEST];
        for _ in 0..MOST {
            match self.file.read(&mut piece) {
                Ok(0) => return (found, true),
                Ok(length) => found.extend(self.take(&piece[..length])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Records were overwritten before they were read; the next read goes on behind them.
                Err(error) if error.raw_os_error() == Some(EPIPE) => {}
                Err(_) => return (found, true),
            }
        }
        (found, false)
    }

    fn take(&mut self, piece: &[u8]) -> Vec<Xid> {
        self.rest.extend_from_slice(piece);
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let lines: Vec<u8> = self.rest.drain(..end).collect();
        // No record is longer.
        self.rest.truncate(LONGEST);
        let mut found = Vec::new();
        for line in String::from_utf8_lossy(&lines).lines() {
            self.last = sequence(line).unwrap_or(self.last);
            found.extend(parse(line));
        }
        found
    }

    /// Waits for more, for a second at most.
    pub fn wait(&self) {
        if self.is_device {
            let timeout = PollTimeout::try_from(Duration::from_secs(1)).unwrap_or(PollTimeout::ZERO);
            let _ = poll(&mut [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)], timeout);
        }
        // Then a stream that never stops is read this often, and not all the time.
        std::thread::sleep(PAUSE);
    }
}

/// The number of the last record of the log below `root`; `None`: it cannot be read.
pub(crate) fn end_of_log(root: &Path) -> Option<u64> {
    let mut log = KernelLog::open(root).ok()?;
    while !log.read().1 {}
    Some(log.last)
}

/// The number of a record: `4,339,5140900,-;text` (the kernel's Documentation/ABI/testing/dev-kmsg). Lines after the first
/// begin with a space.
fn sequence(line: &str) -> Option<u64> {
    line.split(',').nth(1).filter(|_| line.starts_with(|first: char| first.is_ascii_digit()))?.parse().ok()
}

/// The Xid in a record of the kernel's own: `NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python3, …`. What programs write into
/// the log has another facility.
fn parse(line: &str) -> Option<Xid> {
    let (head, text) = line.split_once(';')?;
    let of_kernel = head.split(',').next()?.parse::<u32>().ok()? < 8;
    let (bus, rest) = text.strip_prefix("NVRM: Xid (PCI:").filter(|_| of_kernel)?.split_once("): ")?;
    // Of a MIG device: `0000:3b:00 GPU-I:05`.
    let bus_id = bus.split(' ').next()?.to_ascii_lowercase();
    let (number, rest) = rest.split_once(',').unwrap_or((rest, ""));
    let text = rest.trim_start();
    // Only in the first place, because a process's name may be any text.
    let pid =
        text.strip_prefix("pid=").and_then(|rest| rest.split(',').next()?.trim_matches('\'').parse().ok());
    Some(Xid {
        sequence: sequence(line)?,
        bus_id,
        number: number.trim().parse().ok()?,
        pid,
        text: text.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn log(text: &str) -> (tempfile::TempDir, KernelLog) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        fs::write(root.path().join("dev/kmsg"), text).unwrap();
        let log = KernelLog::open(root.path()).unwrap();
        (root, log)
    }

    #[test]
    fn xids_are_read_with_the_process_that_they_name() {
        let text = "6,1,1,-;usb 1-1: new device\n SUBSYSTEM=usb\n\
            4,2,9,-;NVRM: Xid (PCI:0000:3B:00): 31, pid=1234, name=python3, Ch 00000008\n\
            4,3,9,-;NVRM: Xid (PCI:0000:b1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n\
            4,4,9,-;NVRM: Xid (PCI:0000:0b:00 GPU-I:05): 13, pid='77', name=x\n\
            4,5,9,-;NVRM: Xid (PCI:0000:0b:00): 119\n";
        let (_root, mut log) = log(text);
        let (found, is_end) = log.read();
        let seen: Vec<_> = found.iter().map(|xid| (&*xid.bus_id, xid.number, xid.pid)).collect();
        assert_eq!(
            seen,
            [
                ("0000:3b:00", 31, Some(1234)),
                ("0000:b1:00", 79, None),
                ("0000:0b:00", 13, Some(77)),
                ("0000:0b:00", 119, None)
            ]
        );
        assert_eq!((is_end, log.last, found[3].sequence), (true, 5, 5));
    }

    #[test]
    fn what_a_program_writes_is_no_xid() {
        for line in [
            "12,7,9,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
            "4,7,9,-;audit: comm=\"NVRM: Xid (PCI:0000:3b:00): 79, pid=1\"",
            "4,7,9,-;NVRM: Xid (PCI:0000:3b:00): many",
            " NVRM: Xid (PCI:0000:3b:00): 79",
            "x,7;NVRM: Xid (PCI:0000:3b:00): 79",
            ";",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
        let named = "4,7,9,-;NVRM: Xid (PCI:0000:3b:00): 31, pid='<unknown>', name=a, pid=1, b";
        assert_eq!(parse(named).unwrap().pid, None);
    }

    #[test]
    fn a_log_without_line_ends_takes_no_memory() {
        let (_root, mut log) = log(&"x".repeat(10 * LONGEST));
        assert!(log.read().0.is_empty() && log.rest.len() <= LONGEST);
    }

    #[test]
    fn a_log_that_never_ends_is_read_in_pieces() {
        let line = "4,7,9,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1\n";
        let (root, mut log) = log(&line.repeat(2 * MOST * LONGEST / line.len()));
        let (found, is_end) = log.read();
        assert!(!is_end && found.len() >= MOST);
        assert_eq!(end_of_log(root.path()), Some(7));
    }
}
