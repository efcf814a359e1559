//! The messages between daemon, server, client and command line program.

use serde::{Deserialize, Serialize};

/// Messages to the daemon, on `control` or `control_privileged`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Hello {
    /// The command line program. Its greeting is answered by [`Answer`], or by the end of the connection if the daemon
    /// speaks with another one; then it sends each line as a [`Command`].
    Program,
    /// A CUDA program's request for a server. Answered by [`Welcome`] when its turn comes.
    Client,
}

/// A line of the command line program. Answered by [`Answer`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Command(pub String);

/// The answer to a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Answer(pub String);

/// A client's server. The connection to it is passed with this message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// UUIDs of the server's devices, in its order.
    pub devices: Vec<String>,
}

/// Messages of a client to its server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ask {
    /// A request for a context, with the settings of the client's environment.
    Open(Open),
    /// A request for memory. Answered by [`Say::Memory`].
    Alloc {
        /// UUID of a device on which it has a context.
        device: String,
        /// MiB.
        mib: u64,
    },
    /// Access to an illegal address.
    Fault,
}

/// The settings of a client's context.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Open {
    /// UUID.
    pub device: String,
    /// UUIDs of all devices that it sees, in its order.
    pub visible: Vec<String>,
    /// `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`.
    pub percentage: Option<String>,
    /// `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`.
    pub pinned: Option<String>,
}

/// Messages of a server to its client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Say {
    /// The context exists.
    Context {
        /// SMs that it sees.
        sm: u32,
        /// Free memory that it sees, in MiB.
        free_mib: u64,
    },
    /// The answer to a request for memory.
    Memory {
        /// Whether it gets the memory.
        granted: bool,
    },
    /// The context was not created, or has ended, with this `CUDA_ERROR_…`.
    Ended(String),
}

/// Messages of the daemon to its server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// A new client. Its connection is passed with this message.
    Attach {
        /// The daemon's number for it.
        id: u64,
        /// Its process.
        pid: i32,
        /// The server's current settings.
        settings: Settings,
    },
    /// End this client's work.
    Terminate {
        /// The daemon's number for it.
        id: u64,
    },
}

/// Messages of the server to its daemon.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Report {
    /// The server accepts clients.
    Ready,
    /// A client has a context.
    Opened {
        /// The daemon's number for it.
        id: u64,
        /// UUID.
        device: String,
    },
    /// Whether, after a fault, it takes no new client.
    Faulted(bool),
    /// A client no longer has a context.
    Closed {
        /// The daemon's number for it.
        id: u64,
    },
}

/// The settings of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Active thread percentage.
    pub percentage: f64,
    /// Pinned device memory limits as they were set, by ordinal. They are set by the server's ordinals and apply by the
    /// client's (docs/evidence).
    pub pinned: std::collections::BTreeMap<usize, String>,
    /// Client priority, 0 normal, 1 below normal.
    pub priority: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { percentage: 100.0, pinned: std::collections::BTreeMap::new(), priority: 0 }
    }
}
