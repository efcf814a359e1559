//! A CUDA program's side of MPS.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::message::{Ask, Hello, Open, Say, Welcome};
use super::pipe_directory;
use super::wire::Conn;

/// A client's error after its daemon or server has ended.
pub const RPC_FAILURE: &str = "CUDA_ERROR_MPS_RPC_FAILURE";

/// Connections to daemon and server.
#[derive(Debug)]
pub struct Client {
    daemon: Conn,
    server: Conn,
    /// UUIDs of the server's devices, in its order.
    pub devices: Vec<String>,
}

impl Client {
    /// Connects to the daemon in the pipe directory and waits for its turn. `None` if no daemon can be reached: a CUDA
    /// program then continues without MPS, and without a message.
    #[must_use]
    pub fn connect() -> Option<Self> {
        let daemon = Conn::connect(&pipe_directory().join("control")).ok()?;
        daemon.send(&Hello::Client).ok()?;
        let (Welcome { devices }, server) = daemon.recv()?;
        Some(Self { daemon, server: server?, devices })
    }

    fn ask(&self, ask: &Ask) -> Result<Say, String> {
        self.server.send(ask).map_err(|_| RPC_FAILURE.to_owned())?;
        match self.server.recv() {
            None => Err(RPC_FAILURE.into()),
            Some((Say::Ended(error), _)) => Err(error),
            Some((say, _)) => Ok(say),
        }
    }

    /// Makes a context: the SMs and the free memory that it sees.
    pub fn open(&self, open: Open) -> Result<(u32, u64), String> {
        match self.ask(&Ask::Open(open))? {
            Say::Context { sm, free_mib } => Ok((sm, free_mib)),
            _ => Err(RPC_FAILURE.into()),
        }
    }

    /// Allocates memory on a device on which it has a context. Returns whether there was enough.
    ///
    /// # Errors
    /// The `CUDA_ERROR_…` if the context has ended.
    pub fn alloc(&self, device: &str, mib: u64) -> Result<bool, String> {
        match self.ask(&Ask::Alloc { device: device.to_owned(), mib })? {
            Say::Memory { granted } => Ok(granted),
            _ => Err(RPC_FAILURE.into()),
        }
    }

    /// Breaks this context and the contexts of all other clients. Returns the resulting error.
    #[must_use]
    pub fn fault(&self) -> String {
        match self.ask(&Ask::Fault) {
            Err(error) => error,
            Ok(_) => RPC_FAILURE.into(),
        }
    }

    /// Computes for this time.
    ///
    /// # Errors
    /// The `CUDA_ERROR_…` if the context has ended.
    pub fn hold(&self, time: Duration) -> Result<(), String> {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let limit =
                PollTimeout::try_from(left.min(Duration::from_secs(3600))).unwrap_or(PollTimeout::MAX);
            let mut ends =
                [&self.server, &self.daemon].map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
            let ready = poll(&mut ends, limit);
            let [server, daemon] = ends.map(|end| end.any().unwrap_or(false));
            match ready {
                Ok(0) if Instant::now() >= end => return Ok(()),
                Ok(_) if server => return Err(self.last_word()),
                Ok(_) if daemon => return Err(RPC_FAILURE.into()),
                _ => {}
            }
        }
    }

    fn last_word(&self) -> String {
        match self.server.recv() {
            Some((Say::Ended(error), _)) => error,
            _ => RPC_FAILURE.into(),
        }
    }
}
