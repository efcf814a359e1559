//! The socket that systemd hands over, for which nobody has a safe function.
#![allow(unsafe_code, reason = "a descriptor by its number")]

use std::os::fd::{FromRawFd as _, OwnedFd, RawFd};

/// Takes over a descriptor that our parent left us, as `sd_listen_fds(3)` describes. Once, at the start.
pub(super) fn inherited(fd: RawFd) -> OwnedFd {
    // SAFETY: by the protocol of sd_listen_fds(3) it is open and ours alone: the caller has it from what has checked
    // that LISTEN_PID names this process, and nothing of ours has opened files as 3 since the start.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
