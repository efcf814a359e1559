//! Reads untrusted input to its end or that of a line, bounded in size and time.

use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Everything up to the end of `input`, or to a piece that ends with the byte `end`.
///
/// # Errors
/// `FileTooLarge`: it is longer than `longest`. `TimedOut`: it is not whole at the time `until`.
pub fn read(input: impl AsFd, end: Option<u8>, longest: usize, until: Instant) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let mut part = [0_u8; 16384];
    loop {
        // Until a read will not block.
        let left = until.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(input.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return Err(io::Error::new(ErrorKind::TimedOut, "it was not complete in time")),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        match nix::unistd::read(&input, &mut part) {
            Ok(0) => return Ok(text),
            Ok(count) => text.extend_from_slice(&part[..count]),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        if end.is_some() && text.last().copied() == end {
            return Ok(text);
        }
        if text.len() > longest {
            let why = format!("it is longer than {} MiB", longest >> 20);
            return Err(io::Error::new(ErrorKind::FileTooLarge, why));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reads_to_the_end_and_no_further_than_the_bound() {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        nix::unistd::write(&writer, b"abc").unwrap();
        drop(writer);
        assert_eq!(read(reader, None, 1000, Instant::now() + Duration::from_secs(5)).unwrap(), b"abc");
        let zeros = std::fs::File::open("/dev/zero").unwrap();
        let error = read(zeros, None, 3 << 20, Instant::now() + Duration::from_secs(5)).unwrap_err();
        assert_eq!(error.to_string(), "it is longer than 3 MiB");
    }

    #[test]
    fn a_line_ends_where_nothing_comes_behind_it() {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        nix::unistd::write(&writer, b"a\nb\n").unwrap();
        let in_time = Instant::now() + Duration::from_secs(5);
        assert_eq!(read(reader, Some(b'\n'), 1000, in_time).unwrap(), b"a\nb\n");
    }

    #[test]
    fn does_not_wait_for_a_writer_that_keeps_silent() {
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        let error = read(reader, None, 1000, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.to_string(), "it was not complete in time");
    }
}
