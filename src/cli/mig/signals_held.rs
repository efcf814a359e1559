//! Signals that ask the program to end (SIGINT, SIGTERM, SIGHUP) do not interrupt a change of the layout.

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

/// While it exists these signals are blocked, so that no layout is left half done.
#[derive(Debug)]
pub(crate) struct Uninterrupted {
    before: Option<SigSet>,
}

impl Uninterrupted {
    /// Blocks the signals from now on.
    #[must_use]
    pub fn begin() -> Self {
        let mut polite = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            polite.add(signal);
        }
        let mut before = SigSet::empty();
        let blocked = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&polite), Some(&mut before));
        Self { before: blocked.is_ok().then_some(before) }
    }
}

impl Drop for Uninterrupted {
    fn drop(&mut self) {
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, self.before.as_ref(), None);
    }
}
