//! A change of a layout is not ended half-way by who asks for its end politely.

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

/// While it lives, the polite signals wait: half a layout is nobody's wish.
#[derive(Debug)]
pub(crate) struct Uninterrupted {
    before: Option<SigSet>,
}

impl Uninterrupted {
    /// From now on.
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
