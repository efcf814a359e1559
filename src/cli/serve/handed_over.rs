//! The socket that systemd hands over, for which no library has a safe function.
#![allow(unsafe_code, reason = "a descriptor by its number")]

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// Takes over a descriptor that the parent process left, as `sd_listen_fds(3)` describes. Called once, at the start.
pub(super) fn inherited(fd: RawFd) -> OwnedFd {
    // SAFETY: by the protocol of sd_listen_fds(3) the descriptor is open and belongs to this process alone: the caller
    // has checked that LISTEN_PID names this process, and nothing in this program has opened descriptor 3 since the
    // start.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
