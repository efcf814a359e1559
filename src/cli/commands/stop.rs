//! Signals that ask this program to end, for commands that have things to remove first.

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// Records a signal that asks this program to end (Ctrl-C, `systemctl stop`, a closed terminal).
pub struct Stop(SignalFd);

impl Stop {
    /// From here on these signals are recorded and do not end the program.
    pub fn listen() -> anyhow::Result<Self> {
        let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
        signals.thread_block()?;
        Ok(Self(SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?))
    }

    pub fn is_wanted(&self) -> bool {
        matches!(self.0.read_signal(), Ok(Some(_)))
    }
}
