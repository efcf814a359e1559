//! What daemon, server, client and the command line say to each other.

use serde::{Deserialize, Serialize};

/// To the daemon, on `control` or `control_privileged`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Hello {
    /// A line of the command line program. Answered by [`Answer`].
    Command(String),
    /// A CUDA program that wants a server. Answered by [`Welcome`], when its turn comes.
    Client,
}

/// The answer to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer(pub String);

/// The server that a client is given; the connection to it comes along.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// UUIDs of the server's devices, in its order.
    pub devices: Vec<String>,
}

/// A client to its server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// A context; the rest is what its environment says.
    Open(Open),
    /// So much memory. Answered by [`Say::Memory`].
    Alloc {
        /// UUID of the device that it has a context on.
        device: String,
        /// MiB.
        mib: u64,
    },
    /// Access to an illegal address.
    Fault,
}

/// What a client wants its context to be.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Open {
    /// UUID.
    pub device: String,
    /// UUIDs of all the devices that it sees, in its order.
    pub visible: Vec<String>,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
    pub percentage: Option<String>,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
    pub pinned: Option<String>,
}

/// A server to its client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Say {
    /// The context is there.
    Context {
        /// SMs that it sees.
        sm: u32,
        /// Free memory that it sees, in MiB.
        free_mib: u64,
    },
    /// It may, or may not, have the memory.
    Memory {
        /// Whether.
        granted: bool,
    },
    /// No context, or no context any more; the `CUDA_ERROR_…`.
    Ended(String),
}

/// The daemon to its server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// A client; its connection comes along.
    Attach {
        /// The daemon's number for it.
        id: u64,
        /// Its process.
        pid: i32,
        /// What the server is set to, now.
        settings: Settings,
    },
    /// End this client's work.
    Terminate {
        /// The daemon's number for it.
        id: u64,
    },
}

/// The server to its daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Report {
    /// It takes clients.
    Ready,
    /// A client has a context.
    Opened {
        /// The daemon's number for it.
        id: u64,
        /// UUID.
        device: String,
    },
    /// A client has none any more.
    Closed {
        /// The daemon's number for it.
        id: u64,
    },
}

/// What can be set for a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Active thread percentage.
    pub percentage: f64,
    /// Pinned memory limits as they were set, by ordinal: of the server's devices where they are set, of the client's
    /// where they hold (docs/evidence).
    pub pinned: std::collections::BTreeMap<usize, String>,
    /// Client priority, 0 normal, 1 below normal.
    pub priority: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { percentage: 100.0, pinned: std::collections::BTreeMap::new(), priority: 0 }
    }
}
