//! The daemon's servers and their clients: starting servers, attaching and ending clients, and which clients wait.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::device::Device;
use super::log::Log;
use super::message::{Order, Report, Settings, Welcome};
use super::wire::{Conn, Peer};

/// The daemon's state, shared by its threads.
#[derive(Debug)]
pub struct Servers {
    /// UUIDs of the devices of every server, in order.
    pub devices: Vec<String>,
    /// Whether they have limits (from Volta on).
    pub limits: bool,
    /// Whether one server serves all users.
    pub multiuser: bool,
    /// The daemon's log.
    pub log: Log,
    table: Mutex<Table>,
    changed: Condvar,
}

/// The state that changes.
#[derive(Debug, Default)]
pub struct Table {
    /// The settings of servers that start from now on.
    pub defaults: Settings,
    /// The servers, by pid.
    pub servers: BTreeMap<i32, Server>,
    /// By the daemon's number for them.
    pub clients: BTreeMap<u64, Client>,
    next_client: u64,
    quitting: bool,
}

/// One `nvidia-cuda-mps-server`.
#[derive(Debug)]
pub struct Server {
    /// Its user.
    pub uid: u32,
    /// The settings for clients that connect from now on.
    pub settings: Settings,
    /// Whether, after a fault, it takes no new client.
    pub faulted: bool,
    conn: Arc<Conn>,
    stopping: bool,
}

/// A process that has a server.
#[derive(Clone, Debug)]
pub struct Client {
    /// Its pid in the daemon's /proc.
    pub pid: i32,
    /// Its server's pid.
    pub server: i32,
    /// UUIDs of the devices on which it has a context.
    pub devices: Vec<String>,
    /// Inode of its PID namespace.
    pub namespace: u64,
}

impl Servers {
    /// No servers yet.
    pub fn new(devices: &[Device], multiuser: bool, defaults: Settings, log: Log) -> Arc<Self> {
        let table = Mutex::new(Table { defaults, ..Table::default() });
        let limits = devices.iter().all(|device| device.limits);
        let devices = devices.iter().map(|device| device.uuid.clone()).collect();
        Arc::new(Self { devices, limits, multiuser, log, table, changed: Condvar::new() })
    }

    /// The table, locked.
    pub fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `done` returns true, at most for `limit`. Returns whether it did.
    fn wait(&self, limit: Option<Duration>, done: impl Fn(&Table) -> bool) -> bool {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut table = self.table();
        while !done(&table) {
            let Some(end) = end else {
                table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let Some(left) = end.checked_duration_since(Instant::now()) else { return false };
            table = self.changed.wait_timeout(table, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Gives the client at the other end of `conn` a server when its turn comes, and returns when the client has gone.
    pub fn serve(self: &Arc<Self>, conn: &Conn, peer: Peer) {
        let Some(id) = self.attach(conn, peer) else { return };
        // A client sends nothing more to the daemon, so this returns when it is gone.
        let _ = conn.recv::<()>();
        self.table().clients.remove(&id);
        self.changed.notify_all();
    }

    fn attach(self: &Arc<Self>, conn: &Conn, peer: Peer) -> Option<u64> {
        let mut table = self.table();
        let id = table.next_client;
        table.next_client += 1;
        loop {
            if let Some(server) = self.server_for(&mut table, peer.uid) {
                let (near, far) = Conn::pair().ok()?;
                if table.hand_over(server, id, peer.pid, &far) {
                    let namespace = namespace(peer.pid);
                    table
                        .clients
                        .insert(id, Client { pid: peer.pid, server, devices: Vec::new(), namespace });
                    drop(table);
                    conn.send_with(&Welcome { devices: self.devices.clone() }, &near).ok();
                    return Some(id);
                }
            }
            table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The pid of a server for this user; `None` when it must be waited for.
    fn server_for(self: &Arc<Self>, table: &mut Table, uid: u32) -> Option<i32> {
        if table.quitting {
            return None;
        }
        let Some((&pid, server)) = table.servers.iter_mut().next() else {
            return self.start(table, uid);
        };
        if server.stopping {
            return None;
        }
        if self.multiuser || server.uid == uid {
            return Some(pid);
        }
        if !table.clients.values().any(|client| client.server == pid) {
            server.stopping = true;
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        None
    }

    /// Starts a server. If its program is not found, the process ends at once, and the clients go on waiting.
    fn start(self: &Arc<Self>, table: &mut Table, uid: u32) -> Option<i32> {
        let Ok((near, child)) = spawn() else {
            // Also a child that finds no program has a pid.
            let pid = std::process::id() + 1;
            self.log.line(&format!("Starting new server {pid} for user {uid}"));
            self.log.line(&format!("Server {pid} exited with status 1"));
            return None;
        };
        let pid = i32::try_from(child.id()).ok()?;
        self.log.line(&format!("Starting new server {pid} for user {uid}"));
        let conn = Arc::new(near);
        let settings = table.defaults.clone();
        table
            .servers
            .insert(pid, Server { uid, settings, faulted: false, conn: Arc::clone(&conn), stopping: false });
        let servers = Arc::clone(self);
        std::thread::spawn(move || servers.follow(pid, &conn, child));
        Some(pid)
    }

    /// Starts a server for this user if there is none, and returns the command's output.
    pub fn prewarm(self: &Arc<Self>, uid: u32) -> String {
        let mut table = self.table();
        self.server_for(&mut table, uid);
        String::new()
    }

    /// Reads a server's messages until it is gone.
    fn follow(&self, pid: i32, conn: &Conn, mut child: Child) {
        while let Some((report, _)) = conn.recv() {
            let mut table = self.table();
            match report {
                Report::Ready => self.log.line(&format!("NEW SERVER {pid}: Ready")),
                Report::Opened { id, device } => {
                    if let Some(client) = table.clients.get_mut(&id) {
                        client.devices.push(device);
                    }
                }
                Report::Faulted(faulted) => {
                    if let Some(server) = table.servers.get_mut(&pid) {
                        server.faulted = faulted;
                    }
                }
                Report::Closed { id } => drop(table.clients.remove(&id)),
            }
            self.changed.notify_all();
        }
        let status = child.wait().map_or(-1, ExitStatusExt::into_raw);
        let mut table = self.table();
        table.servers.remove(&pid);
        table.clients.retain(|_, client| client.server != pid);
        self.changed.notify_all();
        drop(table);
        // The wait status: its upper byte is the code that the server exits with.
        self.log.line(&format!("Server {pid} exited with status {}", (status >> 8) & 0xff));
    }

    /// Ends one client's work and waits for that. Returns whether there was such a client.
    pub fn terminate(&self, server: i32, pid: i32) -> bool {
        let table = self.table();
        let of_process = |client: &Client| client.server == server && client.pid == pid;
        let ids: Vec<u64> =
            table.clients.iter().filter(|(_, client)| of_process(client)).map(|(id, _)| *id).collect();
        for &id in &ids {
            if let Some(server) = table.servers.get(&server) {
                let _ = server.conn.send(&Order::Terminate { id });
            }
        }
        drop(table);
        self.wait(None, |table| ids.iter().all(|id| !table.clients.contains_key(id)));
        !ids.is_empty()
    }

    /// Ends a server, at once or when its clients have gone.
    pub fn shut_down(&self, pid: i32, at_once: bool) {
        if !at_once {
            self.wait(None, |table| !table.clients.values().any(|client| client.server == pid));
        }
        let mut table = self.table();
        if let Some(server) = table.servers.get_mut(&pid) {
            server.stopping = true;
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        drop(table);
        self.wait(None, |table| !table.servers.contains_key(&pid));
    }

    /// Waits for all clients to go, at most for `limit`, and then ends all servers. No client is served afterwards.
    pub fn quit(&self, limit: Option<Duration>) {
        self.table().quitting = true;
        self.wait(limit, |table| table.clients.is_empty());
        let pids: Vec<i32> = self.table().servers.keys().copied().collect();
        for pid in pids {
            self.shut_down(pid, true);
        }
    }
}

impl Table {
    /// Passes a client's connection to a server. If that fails, the server is ending.
    fn hand_over(&mut self, server: i32, id: u64, pid: i32, far: &Conn) -> bool {
        let Some(server) = self.servers.get_mut(&server) else { return false };
        let order = Order::Attach { id, pid, settings: server.settings.clone() };
        server.stopping = server.conn.send_with(&order, far).is_err();
        !server.stopping
    }
}

/// The server program in PATH (docs/evidence), with one end of a connection as its standard input.
fn spawn() -> std::io::Result<(Conn, Child)> {
    let (near, far) = Conn::pair()?;
    let mut command = Command::new("nvidia-cuda-mps-server");
    command.current_dir("/");
    command.stdin(far.into_fd()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok((near, command.spawn()?))
}

fn namespace(pid: i32) -> u64 {
    let link = fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
    let inode = link.to_string_lossy();
    inode.trim_start_matches("pid:[").trim_end_matches(']').parse().unwrap_or(0)
}
