//! Xids in the kernel's log (`/dev/kmsg`), where the driver names the process that each is about; NVML names none.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
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

/// The shortest pause between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// An Xid that the kernel's log has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Xid {
    /// PCI address without its function, as `0000:3b:00`; or UUID.
    pub gpu: String,
    pub number: u32,
    /// The process, on the host.
    pub pid: Option<i32>,
    /// What else the driver says. It may have a process's name, which may be any text.
    pub text: String,
}

/// The log, as far as it was read.
pub(crate) struct KernelLog(BufReader<File>);

impl KernelLog {
    /// The log below `root`, from its end on: nobody knows what was done about what is in it, and a process may have another's
    /// pid by now.
    pub fn open(root: &Path) -> io::Result<Self> {
        let path = under(root, "/dev/kmsg");
        let mut file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self(BufReader::with_capacity(LONGEST, file)))
    }

    /// The Xids of the next records, of [`MOST`] at most.
    pub fn read(&mut self) -> Vec<Xid> {
        let (mut found, mut line) = (Vec::new(), Vec::new());
        for _ in 0..MOST {
            line.clear();
            match self.0.by_ref().take(LONGEST as u64).read_until(b'\n', &mut line) {
                // Records were overwritten before they were read; the next read goes on behind them.
                Err(error) if error.raw_os_error() == Some(EPIPE) => {}
                Ok(0) | Err(_) => break,
                Ok(_) => found.extend(parse(&String::from_utf8_lossy(&line))),
            }
        }
        found
    }

    /// Waits for more, for `longest` at most, and always for a moment: a stream that never stops is not read all the time.
    pub fn wait(&self, longest: Duration) {
        std::thread::sleep(PAUSE);
        // A file is always ready.
        let timeout = PollTimeout::try_from(longest).unwrap_or(PollTimeout::ZERO);
        let _ = poll(&mut [PollFd::new(self.0.get_ref().as_fd(), PollFlags::POLLIN)], timeout);
    }
}

/// The Xid in a record of the kernel's own: `NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python3, …`. What programs write into
/// the log has another facility.
fn parse(line: &str) -> Option<Xid> {
    let (head, text) = line.split_once(';')?;
    let of_kernel = head.split(',').next()?.parse::<u32>().ok()? < 8;
    let (bus, rest) = text.strip_prefix("NVRM: Xid (PCI:").filter(|_| of_kernel)?.split_once("): ")?;
    // Of a MIG device: `0000:3b:00 GPU-I:05`.
    let gpu = bus.split(' ').next()?.to_ascii_lowercase();
    let (number, text) = rest.split_once(',').unwrap_or((rest, ""));
    let (number, text) = (number.trim().parse().ok()?, text.trim().to_owned());
    // Only in the first place, because a process's name may be any text.
    let pid =
        text.strip_prefix("pid=").and_then(|rest| rest.split(',').next()?.trim_matches('\'').parse().ok());
    Some(Xid { gpu, number, pid, text })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn log(text: &str) -> (tempfile::TempDir, KernelLog) {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        let path = root.path().join("dev/kmsg");
        let old = "4,1,9,-;NVRM: Xid (PCI:0000:3B:00): 79, pid=1\n";
        fs::write(&path, old).unwrap();
        let log = KernelLog::open(root.path()).unwrap();
        fs::write(&path, format!("{old}{text}")).unwrap();
        (root, log)
    }

    #[test]
    fn new_xids_are_read_with_the_process_that_they_name() {
        let text = "6,1,1,-;usb 1-1: new device\n SUBSYSTEM=usb\n\
            4,2,9,-;NVRM: Xid (PCI:0000:3B:00): 31, pid=1234, name=python3, Ch 00000008\n\
            4,3,9,-;NVRM: Xid (PCI:0000:b1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n\
            4,4,9,-;NVRM: Xid (PCI:0000:0b:00 GPU-I:05): 13, pid='77', name=x\n\
            4,5,9,-;NVRM: Xid (PCI:0000:0b:00): 119\n";
        let (_root, mut log) = log(text);
        let found = log.read();
        let seen: Vec<_> = found.iter().map(|xid| (&*xid.gpu, xid.number, xid.pid)).collect();
        assert_eq!(
            seen,
            [
                ("0000:3b:00", 31, Some(1234)),
                ("0000:b1:00", 79, None),
                ("0000:0b:00", 13, Some(77)),
                ("0000:0b:00", 119, None)
            ]
        );
        assert_eq!(log.read(), []);
    }

    #[test]
    fn a_line_that_a_program_writes_is_no_xid() {
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
    fn a_log_that_never_ends_is_read_in_pieces() {
        let line = "4,7,9,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=1\n";
        let (_root, mut log) = log(&line.repeat(MOST + 1));
        assert_eq!((log.read().len(), log.read().len()), (MOST, 1));
        let (_root, mut log) = self::log(&"x".repeat(10 * LONGEST));
        assert_eq!(log.read(), []);
    }
}
