//! SEQPACKET sockets that carry one JSON value a packet, sometimes with a file descriptor.

#![allow(unsafe_code, reason = "descriptors from packets")]

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    accept4, bind, connect, getsockopt, listen, recvmsg, send, sendmsg, socket, socketpair, sockopt,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

const PACKET: usize = 64 * 1024;

/// One end of a connection.
#[derive(Debug)]
pub struct Conn(OwnedFd);

/// The process at the other end, in this process's namespaces (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Process id.
    pub pid: i32,
    /// User id.
    pub uid: u32,
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
}

impl Conn {
    /// Connects to the socket at `path`. It succeeds if a listener exists, even one that never answers.
    ///
    /// # Errors
    /// No process listens there, or it cannot be reached.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = new_socket()?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self(socket))
    }

    /// Two ends of one connection.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(one), Self(other)))
    }

    /// Sends one value.
    pub fn send(&self, value: &impl Serialize) -> io::Result<()> {
        let packet = serde_json::to_vec(value)?;
        send(self.0.as_raw_fd(), &packet, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    /// Sends one value with a copy of the descriptor `extra`.
    pub fn send_with(&self, value: &impl Serialize, extra: &Self) -> io::Result<()> {
        let packet = serde_json::to_vec(value)?;
        let fds: [RawFd; 1] = [extra.0.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        let slices = [IoSlice::new(&packet)];
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &slices, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// The next value and the connection that came with it. `None` if the other end is gone, or sent something invalid.
    pub fn recv<T: DeserializeOwned>(&self) -> Option<(T, Option<Self>)> {
        let mut packet = vec![0; PACKET];
        let mut rights = nix::cmsg_space!([RawFd; 4]);
        let (length, received) = loop {
            let mut slices = [IoSliceMut::new(&mut packet)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            match recvmsg::<UnixAddr>(self.0.as_raw_fd(), &mut slices, Some(&mut rights), flags) {
                Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return None,
                Ok(message) => break (message.bytes, descriptors(message.cmsgs().ok()?)),
            }
        };
        let value = serde_json::from_slice(packet.get(..length)?).ok()?;
        Some((value, received.into_iter().next().map(Self)))
    }

    /// Whether the other end is closed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let mut poll_fd = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        poll(&mut poll_fd, PollTimeout::ZERO).is_ok()
            && poll_fd[0].revents().is_some_and(|events| events.contains(PollFlags::POLLHUP))
    }

    /// The process at the other end.
    pub fn peer(&self) -> io::Result<Peer> {
        let credentials = getsockopt(&self.0, sockopt::PeerCredentials)?;
        Ok(Peer { pid: credentials.pid(), uid: credentials.uid() })
    }

    /// The file descriptor, to pass it on.
    #[must_use]
    pub fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl From<OwnedFd> for Conn {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Conn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn descriptors(messages: impl Iterator<Item = ControlMessageOwned>) -> Vec<OwnedFd> {
    let rights = messages.filter_map(|message| match message {
        ControlMessageOwned::ScmRights(fds) => Some(fds),
        _ => None,
    });
    // SAFETY: the kernel has just created these descriptors for this process, and nothing else owns them.
    rights.flatten().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect()
}

/// A socket in the file system that takes connections.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens at `path` with these permissions. Replaces an existing file.
    ///
    /// # Errors
    /// The directory cannot be written, or the path is longer than a socket address.
    pub fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        if let Err(error) = fs::remove_file(path) {
            if error.kind() != io::ErrorKind::NotFound {
                return Err(error);
            }
        }
        let socket = new_socket()?;
        bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        listen(&socket, Backlog::MAXCONN)?;
        Ok(Self(socket))
    }

    /// The next connection. `None` if there will be no more.
    #[must_use]
    pub fn accept(&self) -> Option<Conn> {
        loop {
            match accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                // SAFETY: accept4 has just created the descriptor for this process, and nothing else owns it.
                Ok(fd) => return Some(Conn(unsafe { OwnedFd::from_raw_fd(fd) })),
                Err(nix::errno::Errno::EINTR | nix::errno::Errno::ECONNABORTED) => {}
                Err(_) => return None,
            }
        }
    }

    /// Refuses all connections from now on.
    pub fn shut(&self) {
        // An error means that it is already closed.
        let _ = nix::sys::socket::shutdown(self.0.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
