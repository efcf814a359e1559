//! A command's output may be cut off (`sublet status | head -1`), but its work must not be.
//!
//! When the reader has closed the pipe, the standard library's `println!` panics in the middle of the work, and
//! SIGPIPE's default would kill there. All of `cli` uses these macros instead. Output that cannot be written is
//! dropped. If the reason is not a closed pipe, it is reported at the end and by the exit status.
//!
//! `println!` and `eprintln!` are for people: they break lines as the terminal is wide. What programs read, or people paste,
//! is printed with `print!`, which leaves lines as they are.

use std::fmt::Arguments;
use std::io::{ErrorKind, IsTerminal as _, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::terminal::{terminal_width, width_of, wrapped};

static FAILED: AtomicBool = AtomicBool::new(false);
static BEGUN: AtomicBool = AtomicBool::new(false);

static CLOSED: AtomicBool = AtomicBool::new(false);

macro_rules! print {
    ($($text:tt)*) => { $crate::commands::closed_output::out(format_args!($($text)*)) };
}

macro_rules! println {
    ($($text:tt)*) => { $crate::commands::closed_output::line(format_args!($($text)*)) };
}

macro_rules! eprintln {
    ($($text:tt)*) => { $crate::commands::closed_output::err(format_args!($($text)*)) };
}

pub(super) fn out(text: Arguments<'_>) {
    BEGUN.store(true, Ordering::Relaxed);
    note_failure(stdout().lock().write_fmt(text));
}

pub(super) fn line(text: Arguments<'_>) {
    out(format_args!("{}\n", wrapped(&text.to_string(), terminal_width())));
}

/// Whether anything was printed on standard output.
pub(super) fn has_begun() -> bool {
    BEGUN.load(Ordering::Relaxed)
}

pub(super) fn err(text: Arguments<'_>) {
    // Programs read the last line of it, among them sublet's own, which inherit COLUMNS.
    let width = stderr().is_terminal().then(|| width_of(stderr())).flatten();
    let _ = writeln!(stderr().lock(), "{}", wrapped(&text.to_string(), width));
}

/// Whether anybody can still read the output.
pub(super) fn is_open() -> bool {
    !CLOSED.load(Ordering::Relaxed)
}

/// Whether all output was written, or the reader had closed the pipe; reports any other failure.
pub(super) fn finish() -> bool {
    note_failure(stdout().lock().flush());
    !FAILED.load(Ordering::Relaxed)
}

fn note_failure(written: std::io::Result<()>) {
    let Err(error) = written else { return };
    CLOSED.store(true, Ordering::Relaxed);
    if error.kind() != ErrorKind::BrokenPipe && !FAILED.swap(true, Ordering::Relaxed) {
        err(format_args!("sublet: cannot write to standard output: {error}"));
    }
}
