//! Reads files whole with few system calls. The standard library first asks for a file's length and position, and then
//! reads once more behind its end.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// More than most files of the kernel have.
const PIECE: usize = 4 << 10;

/// A file of /proc or /sys whose text the kernel makes in one piece (`single_open` in the kernel's `fs/seq_file.c`, a sysctl,
/// an attribute of sysfs): one read gives all of it. A longer one than 4 KiB is read to its end.
///
/// # Errors
/// It cannot be opened or read.
pub(crate) fn kernel_file(path: impl AsRef<Path>) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut text = vec![0; PIECE];
    let length = once(&mut file, &mut text)?;
    text.truncate(length);
    if length == PIECE {
        file.read_to_end(&mut text)?;
    }
    String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into())
}

/// The rest of `file`, which has `length` bytes by its metadata (0: it does not say): what is as long as that has been read
/// whole. Of more than `most` bytes at least one more is read.
///
/// # Errors
/// It cannot be read.
pub(crate) fn regular_file(mut file: impl Read, length: u64, most: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(length.min(most)).unwrap_or_default();
    // A byte more shows that it has grown since.
    let mut content = vec![0; if length == 0 { PIECE } else { length + 1 }];
    let mut end = 0;
    loop {
        let read = once(&mut file, &mut content[end..])?;
        end += read;
        if read == 0 || end == length || end as u64 > most {
            break;
        }
        if end == content.len() {
            content.resize(2 * end + PIECE, 0);
        }
    }
    content.truncate(end);
    Ok(content)
}

/// One read(2), begun again where a signal interrupts it.
pub(crate) fn once(file: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match file.read(buffer) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives at most `piece` bytes at a time, and counts how often it is asked.
    struct Pieces<'a> {
        left: &'a [u8],
        piece: usize,
        asked: usize,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.asked += 1;
            let length = self.piece.min(buffer.len());
            self.left.read(&mut buffer[..length])
        }
    }

    #[test]
    fn a_file_is_read_whole_whatever_its_length_was() {
        let whole = vec![b'x'; 70_000];
        for (length, most, piece, expected, asked) in [
            // As long as it was, at once and in pieces.
            (70_000, 1 << 20, usize::MAX, 70_000, 1),
            (70_000, 1 << 20, 40_000, 70_000, 2),
            // It has grown, or its length was not known; it has been cut.
            (69_999, 1 << 20, usize::MAX, 70_000, 2),
            (0, 1 << 20, 50_000, 70_000, 8),
            (80_000, 1 << 20, usize::MAX, 70_000, 2),
            // It is too long.
            (70_000, 69_999, usize::MAX, 70_000, 1),
        ] {
            let mut file = Pieces { left: &whole, piece, asked: 0 };
            let read = regular_file(&mut file, length, most).unwrap();
            assert_eq!(read.len(), expected, "{length} {most} {piece}");
            assert!(file.asked <= asked, "{length} {most} {piece}: {} reads", file.asked);
        }
    }

    #[test]
    fn a_file_of_the_kernel_is_what_the_standard_library_reads() {
        for path in ["/proc/self/uid_map", "/proc/self/cgroup", "/proc/sys/kernel/random/boot_id"] {
            assert_eq!(kernel_file(path).unwrap(), std::fs::read_to_string(path).unwrap(), "{path}");
        }
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("long");
        std::fs::write(&long, "x".repeat(3 * PIECE)).unwrap();
        assert_eq!(kernel_file(&long).unwrap().len(), 3 * PIECE);
    }
}
