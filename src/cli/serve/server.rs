//! The one thread that does all input and output. It blocks only in `epoll_wait(2)`.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use sd_notify::NotifyState;

use super::broker;
use super::connection::{Connection, Listener, Phase, Progress, listen};
use super::gpu_watch;
use super::health;
use super::pool::{Job, Pool, Work};
use super::protocol::{self, Answer};
use super::retry;
use super::room;
use crate::accounting;
use crate::cdi_spec;
use crate::guard;
use crate::peer::{OWNS, Peer};
use crate::suspend::is_cut_short;
use sublet_core::admit::{Local, PutOff};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::ledger::Store;
use sublet_core::mps;

/// Connections that one uid may hold at once.
const MOST_OF_ONE: usize = 16;

/// The limit for all connections, and for descriptors; some descriptors remain for the work itself.
const MOST: usize = 4000;
const DESCRIPTORS: u64 = 4096;

/// The limit for bytes kept for clients in the middle of a line or an answer.
const HEAVIEST: usize = 8 << 20;

/// A client that has been connected this long without sending a line may be disconnected for another.
const SETTLED: Duration = Duration::from_secs(1);

/// How often the work of `sublet gc` is done.
const GC: Duration = Duration::from_secs(10);

/// How often MIG devices are compared with the inventory (on hosts with GPUs in MIG mode), daemons are ended whose waiting
/// time is over, and what deleted containers have left.
const WATCH: Duration = Duration::from_secs(2);

/// How long a stop waits for asks that are being answered.
const LAST_ANSWERS: Duration = Duration::from_secs(60);

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const SIGNALS: u64 = 2;
const FIRST_CONNECTION: u64 = 3;

/// Serves until SIGTERM or SIGINT. Asks that are being answered then still get their answers.
///
/// # Errors
/// The socket or the state directory cannot be used, or a system call failed that normally does not.
pub fn serve(config: &Config) -> anyhow::Result<()> {
    share_one_heap();
    raise_descriptors();
    // A service that sees other processes than the ledger would be useless.
    Store::open(&config.state_dir)?.is_of_here()?;
    // From now on daemons may wait for their next lease.
    let (kept, _) = Store::open(&config.state_dir)?.update(mps::register_keeper)?;
    kept.context("/proc")?;
    // Done before the service reports that it is ready: engines may wait for that (sublet.service).
    keep_cdi(config);
    let path = super::socket(config);
    let listener = listen(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
    // Set before the threads start, because they inherit the mask.
    let ends = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    ends.thread_block().map_err(io::Error::from).context("sigprocmask")?;
    let signals = SignalFd::with_flags(&ends, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
        .map_err(io::Error::from)
        .context("signalfd")?;
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    let wake = Arc::new(EventFd::from_value_and_flags(0, flags).map_err(io::Error::from).context("eventfd")?);
    let epoll =
        Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(io::Error::from).context("epoll_create")?;
    let pool = Pool::start(&wake).context("threads")?;
    guard::start().context("threads")?;
    health::start(config).context("threads")?;
    retry::start(Store::open(&config.state_dir)?).context("threads")?;
    accounting::start().context("threads")?;
    let server = Server {
        epoll,
        listener: Some(listener),
        signals,
        wake,
        pool,
        connections: BTreeMap::new(),
        next: FIRST_CONNECTION,
        paused: false,
        stopping: None,
    };
    let ended = server.watch_own().and_then(|()| server.run());
    accounting::finish(config);
    for line in mps::end_all_idle(&Store::open(&config.state_dir)?, config) {
        tracing::warn!("{line}");
    }
    ended.map_err(io::Error::from).context("epoll")
}

/// One heap for all threads: else each keeps the memory that its largest ledger took, 6 MiB in all with 200 leases
/// (docs/evidence/2026-11-28-team.md). They allocate too seldom to wait for each other.
#[allow(unsafe_code, reason = "mallopt(3), for which no library has a safe function")]
fn share_one_heap() {
    // SAFETY: it takes two numbers; threads that come later find it set.
    #[cfg(target_env = "gnu")]
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1);
    }
}

/// Thousands of connections need as many descriptors. If the limit cannot be raised, fewer clients connect.
fn raise_descriptors() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let raised = setrlimit(Resource::RLIMIT_NOFILE, soft.max(DESCRIPTORS.min(hard)), hard);
        let _ = raised.inspect_err(|error| tracing::debug!("RLIMIT_NOFILE: {error}"));
    }
}

/// The work of `sublet gc`, and the CDI devices. Findings go to the journal.
fn housekeeping(put_off: &Cell<PutOff>) {
    let done = config_files::load().map_err(|error| error.to_string()).and_then(|config| {
        // Recorded each time: a ledger that was lost and rebuilt does not have it.
        let done = Local::putting_off(&config, put_off).reconcile(mps::register_keeper);
        if is_cut_short(&config) || broker::STUCK.any() {
            put_off.set(PutOff { clear: true, ..put_off.get() });
        }
        keep_cdi(&config);
        done.map_err(|error| error.to_string())
    });
    match done {
        Ok(done) => done.lines.iter().for_each(|line| tracing::warn!("{line}")),
        Err(error) => tracing::warn!("{error}"),
    }
}

/// The work that cannot wait for the next housekeeping.
fn watch(put_off: &Cell<PutOff>) {
    let Ok(config) = config_files::load() else { return };
    gpu_watch::watch_mig(&config);
    // One, which does not read the same ledger again for each.
    let store = match Store::open(&config.state_dir) {
        Ok(store) => store,
        Err(error) => return tracing::debug!("{error}"),
    };
    gpu_watch::watch_gpus(&store, &config);
    if room::is_wanted(&store, &config) {
        put_off.set(PutOff { clear: true, ..put_off.get() });
    }
    let overdue = mps::end_overdue(&store, &config);
    let killed = Local::putting_off(&config, put_off).kill_left_processes(&store, OWNS);
    let killed = killed.inspect_err(|error| tracing::debug!("{error}")).unwrap_or_default();
    overdue.iter().chain(&killed).for_each(|line| tracing::warn!("{line}"));
}

/// GPUs and shares may change while the service runs.
fn keep_cdi(config: &Config) {
    match cdi_spec::keep(config) {
        Ok(true) => tracing::info!("{} was updated to the named shares and GPUs", config.cdi.spec.display()),
        Ok(false) => {}
        // Not worth a line every ten seconds without a driver: `sublet cdi list` reports it when asked.
        Err(error @ cdi_spec::FileError::Admit(_)) => tracing::debug!("{error}"),
        Err(error) => tracing::warn!("{error}"),
    }
}

struct Server {
    epoll: Epoll,
    /// Dropped when the service begins to stop.
    listener: Option<Listener>,
    signals: SignalFd,
    wake: Arc<EventFd>,
    pool: Pool,
    /// By token, which is also the order of age.
    connections: BTreeMap<u64, Connection>,
    next: u64,
    /// Whether new clients are not listened to, until something else has happened, or a second.
    paused: bool,
    /// When the service began to stop.
    stopping: Option<Instant>,
}

impl Server {
    fn watch_own(&self) -> nix::Result<()> {
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        if let Some(listener) = &self.listener {
            self.epoll.add(&listener.socket, readable(LISTENER))?;
        }
        self.epoll.add(self.wake.as_fd(), readable(WAKE))?;
        self.epoll.add(self.signals.as_fd(), readable(SIGNALS))
    }

    fn run(mut self) -> nix::Result<()> {
        notify_systemd(NotifyState::Ready);
        // Half of the time given, as `sd_watchdog_enabled(3)` says.
        let beat = sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero()).map(|limit| limit / 2);
        let (mut next_beat, mut next_gc, mut next_watch) = (Instant::now(), Instant::now(), Instant::now());
        let mut events = [EpollEvent::empty(); 64];
        while !self.is_done() {
            let now = Instant::now();
            if let Some(beat) = beat.filter(|_| now >= next_beat) {
                notify_systemd(NotifyState::Watchdog);
                next_beat = now + beat;
            }
            if now >= next_gc && self.stopping.is_none() {
                self.pool.push(Job::Own(housekeeping));
                next_gc = now + GC;
            }
            if now >= next_watch && self.stopping.is_none() && !self.pool.is_behind() {
                self.pool.push(Job::Own(watch));
                next_watch = now + WATCH;
            }
            self.connections.retain(|_, connection| !connection.is_overdue(now));
            let due = beat.map_or(next_gc, |_| next_gc.min(next_beat));
            let wait = due.saturating_duration_since(now).clamp(Duration::from_millis(10), SETTLED);
            let timeout = EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::ZERO);
            let count = match self.epoll.wait(&mut events, timeout) {
                Err(nix::errno::Errno::EINTR) => 0,
                waited => waited?,
            };
            if self.paused {
                self.listen_to_new(true);
            }
            for event in &events[..count] {
                match event.data() {
                    LISTENER => self.accept(),
                    WAKE => self.deliver(),
                    SIGNALS => self.stop(),
                    token => self.serve_one(token),
                }
            }
        }
        Ok(())
    }

    /// Accepts waiting clients, except those that already have their share of connections.
    fn accept(&mut self) {
        loop {
            let Some(listener) = &self.listener else { return };
            match listener.socket.accept() {
                Ok((stream, _)) => self.add_connection(stream),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors. The next round tries again, with one connection less. Where every client waits
                    // for its answer there is none to close, and the listener would go on to be ready.
                    tracing::warn!("accept: {error}");
                    if !self.close_oldest(|_| true, Duration::ZERO) {
                        self.listen_to_new(false);
                    }
                    return;
                }
            }
        }
    }

    fn listen_to_new(&mut self, listen: bool) {
        let Some(listener) = &self.listener else { return };
        let flags = if listen { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
        match self.epoll.modify(&listener.socket, &mut EpollEvent::new(flags, LISTENER)) {
            Ok(()) => self.paused = !listen,
            Err(error) => tracing::warn!("epoll: {error}"),
        }
    }

    fn add_connection(&mut self, stream: UnixStream) {
        let prepared = stream.set_nonblocking(true).and_then(|()| Peer::of(&stream));
        let Ok(peer) = prepared else { return };
        let of_peer = |connection: &Connection| connection.peer.uid == peer.uid;
        let count = self.connections.values().filter(|connection| of_peer(connection)).count();
        if count >= MOST_OF_ONE && !self.close_oldest(of_peer, SETTLED) {
            let text = format!("uid {} already has {MOST_OF_ONE} connections to sublet serve", peer.uid);
            return reject(&stream, text);
        }
        if self.connections.len() >= MOST && !self.close_oldest(|_| true, Duration::ZERO) {
            return reject(&stream, "sublet serve has too many connections".to_owned());
        }
        let token = self.next;
        if self.watch(&stream, token, EpollFlags::EPOLLIN) {
            self.next += 1;
            self.connections.insert(token, Connection::new(stream, peer));
        }
    }

    /// Closes the oldest of these connections that has not sent a line for `idle`; an entry point sends its line at
    /// once. Returns whether there was one.
    fn close_oldest(&mut self, of: impl Fn(&Connection) -> bool, idle: Duration) -> bool {
        let hangs = |connection: &Connection| {
            connection.phase != Phase::Waiting && connection.since.elapsed() >= idle && of(connection)
        };
        let oldest =
            self.connections.iter().find(|(_, connection)| hangs(connection)).map(|(token, _)| *token);
        oldest.is_some_and(|token| self.connections.remove(&token).is_some())
    }

    fn serve_one(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let progress = match connection.phase {
            Phase::Asking => connection.read(),
            Phase::Reading => connection.write(),
            Phase::Waiting => return,
        };
        self.proceed(token, progress);
    }

    fn proceed(&mut self, token: u64, progress: Progress) {
        match progress {
            Progress::More => self.limit_memory(),
            Progress::Line(line) => self.ask(token, line),
            Progress::Sent => self.listen_again(token),
            Progress::TooLong => {
                let refusal = broker::no(&anyhow!("a line to sublet serve is at most 64 KiB long"));
                let answer = protocol::line(&refusal).unwrap_or_default();
                if let Some(mut connection) = self.connections.remove(&token) {
                    connection.answer(answer);
                }
            }
            Progress::Gone => drop(self.connections.remove(&token)),
        }
    }

    /// A client that waits for its answer is not read, so that it can neither fill memory nor keep this thread busy.
    fn ask(&mut self, token: u64, line: Vec<u8>) {
        let Some(connection) = self.connections.get(&token) else { return };
        let deleted = self.epoll.delete(&connection.stream);
        let _ = deleted.inspect_err(|error| tracing::debug!("epoll: {error}"));
        let work = if broker::is_report(&line) { Work::Report } else { Work::Quick };
        self.pool.push(Job::Ask { token, peer: connection.peer, line, work });
    }

    fn listen_again(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if self.stopping.is_some() {
            self.connections.remove(&token);
        } else if let Some(line) = connection.line() {
            self.ask(token, line);
        } else {
            let interest = EpollEvent::new(EpollFlags::EPOLLIN, token);
            if self.epoll.modify(&connection.stream, &mut interest.clone()).is_err() {
                self.connections.remove(&token);
            }
        }
    }

    /// Sends as much of the answers as the clients take.
    fn deliver(&mut self) {
        let _ = self.wake.read();
        for (token, line) in self.pool.answers() {
            let Some(mut connection) = self.connections.remove(&token) else { continue };
            if !self.watch(&connection.stream, token, EpollFlags::EPOLLOUT) {
                continue;
            }
            let progress = connection.answer(line);
            self.connections.insert(token, connection);
            self.proceed(token, progress);
        }
    }

    fn watch(&self, stream: &UnixStream, token: u64, flags: EpollFlags) -> bool {
        let added = self.epoll.add(stream, EpollEvent::new(flags, token));
        added.inspect_err(|error| tracing::warn!("epoll: {error}")).is_ok()
    }

    /// Limits the memory for incomplete lines and answers by closing the oldest connections.
    fn limit_memory(&mut self) {
        let weight = |server: &Self| server.connections.values().map(Connection::weight).sum::<usize>();
        while weight(self) > HEAVIEST
            && self.close_oldest(|connection| connection.weight() > 0, Duration::ZERO)
        {}
    }

    /// Begins to stop: no client is accepted any more, and those that have not asked yet are sent back for later.
    fn stop(&mut self) {
        let _ = self.signals.read_signal();
        notify_systemd(NotifyState::Stopping);
        self.listener = None;
        self.stopping = Some(Instant::now());
        self.connections.retain(|_, connection| {
            if connection.phase == Phase::Asking {
                reject(&connection.stream, "sublet serve is restarting".to_owned());
            }
            connection.phase != Phase::Asking
        });
    }

    fn is_done(&self) -> bool {
        let delivered = self.pool.is_idle() && self.connections.is_empty();
        self.stopping.is_some_and(|since| delivered || since.elapsed() > LAST_ANSWERS)
    }
}

/// Notifies systemd if it started this service. No program waits for it, so a failure is only logged.
fn notify_systemd(state: NotifyState<'_>) {
    let _ = sd_notify::notify(&[state]).inspect_err(|error| tracing::debug!("NOTIFY_SOCKET: {error}"));
}

/// Sends one line that fits into any socket buffer. Dropping the stream closes it.
fn reject(mut stream: &UnixStream, why: String) {
    use std::io::Write as _;
    let line = protocol::line(&Answer::Busy(why)).unwrap_or_default();
    let _ = stream.write_all(&line);
}
