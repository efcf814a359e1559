//! A daemon's directories: `pipe/` and `log/` for itself, `public/` for containers, and their contents; and its two locks:
//! `mps/<key>/lock`, held while it is started, adjusted or stopped, and `mps/<key>/asking`, held while it is asked.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;

use super::{MpsError, io_at};
use crate::fs::{open_lock, unless_absent};
use crate::ledger::DaemonKey;

/// The bytes of `sun_path` beside its NUL: unix(7).
const LONGEST_SOCKET_PATH: usize = 107;

/// The output of the control program itself, in [`log`].
pub const OUTPUT: &str = "output.log";

/// The file by which processes take turns to ask the daemon ([`wait_for_turn`]).
pub(super) const ASKING: &str = "asking";

/// A log that has grown past this is moved to `<name>.old`, in bytes.
const LOG_CAP: u64 = 1 << 20;

/// The daemon's pipe directory. A process that can write to its `control_privileged` controls the daemon.
pub fn pipe(key: &DaemonKey, state_dir: &Path) -> PathBuf {
    key.dir(state_dir).join("pipe")
}

/// The daemon's logs.
pub fn log(key: &DaemonKey, state_dir: &Path) -> PathBuf {
    key.dir(state_dir).join("log")
}

/// Creates missing directories, with modes that let clients reach `public/` and nothing else.
///
/// # Errors
/// A key that is not a plain name, a socket path that is too long, or a directory that cannot be created or trusted.
pub fn make(key: &DaemonKey, state_dir: &Path) -> Result<(), MpsError> {
    check_key(key)?;
    check_length(&pipe(key, state_dir).join("control_privileged"))?;
    create_directory(&state_dir.join("mps"), 0o755)?;
    create_directory(&key.dir(state_dir), 0o755)?;
    create_directory(&key.public(state_dir), 0o755)?;
    create_directory(&pipe(key, state_dir), 0o700)?;
    create_directory(&log(key, state_dir), 0o700)?;
    let asking = key.dir(state_dir).join(ASKING);
    open_lock(&asking).map(drop).map_err(io_at("create", &asking))
}

/// The key becomes part of a path.
pub fn check_key(key: &DaemonKey) -> Result<(), MpsError> {
    if key.is_well_formed() { Ok(()) } else { Err(MpsError::BadKey { key: crate::text::safe(&key.0) }) }
}

fn check_length(socket: &Path) -> Result<(), MpsError> {
    let length = socket.as_os_str().as_bytes().len();
    let too_long = || MpsError::PathTooLong { path: socket.to_owned(), length };
    if length <= LONGEST_SOCKET_PATH { Ok(()) } else { Err(too_long()) }
}

fn create_directory(path: &Path, mode: u32) -> Result<(), MpsError> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io_at("make the directory", path)(error));
        }
        _ => {}
    }
    let found = fs::symlink_metadata(path).map_err(io_at("look at", path))?;
    if !found.is_dir() || found.uid() != nix::unistd::geteuid().as_raw() {
        let error =
            io::Error::other("it is not a directory of this user: remove it, and sublet creates it again");
        return Err(io_at("use", path)(error));
    }
    if found.mode() & 0o7777 != mode {
        // A umask removed bits, or they were changed later. If a client cannot traverse a parent directory, it runs
        // without MPS on the whole GPU, and without an error.
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(io_at("set the mode of", path))?;
    }
    Ok(())
}

/// Puts a hard link of the daemon's `control` into `public/`, in place of one of an earlier daemon.
///
/// Running containers have `public/` mounted, so they see the new socket under the old name at once.
pub fn publish(key: &DaemonKey, state_dir: &Path) -> Result<(), MpsError> {
    let public = key.public(state_dir);
    let control = pipe(key, state_dir).join("control");
    let link = public.join("control");
    // Outside `public/`, which containers see.
    let temporary = key.dir(state_dir).join(".control");
    remove_if_there(&temporary)?;
    fs::hard_link(&control, &temporary).map_err(io_at("link", &control))?;
    fs::rename(&temporary, &link).map_err(io_at("replace", &link))?;
    // rename(2) of two links to the same file does nothing and leaves both.
    remove_if_there(&temporary)?;
    remove_except(&public, "control")
}

fn remove_except(dir: &Path, keep: &str) -> Result<(), MpsError> {
    for entry in fs::read_dir(dir).map_err(io_at("read", dir))? {
        let entry = entry.map_err(io_at("read", dir))?;
        if entry.file_name() != keep {
            remove_if_there(&entry.path())?;
        }
    }
    Ok(())
}

/// Empties a directory, which need not be there.
fn empty(dir: &Path) -> Result<(), MpsError> {
    match dir.try_exists() {
        Ok(true) => remove_except(dir, ""),
        Ok(false) => Ok(()),
        Err(error) => Err(io_at("look at", dir)(error)),
    }
}

fn remove_if_there(path: &Path) -> Result<(), MpsError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    unless_absent(removed).map(drop).map_err(io_at("remove", path))
}

/// Removes the sockets and fifos that a daemon left when it ended. Otherwise they would be taken for the ones of a running
/// one.
pub fn clear_pipe(key: &DaemonKey, state_dir: &Path) -> Result<(), MpsError> {
    empty(&pipe(key, state_dir))
}

/// Cleans up after the daemon's end: removes all sockets. A dedicated daemon leaves nothing at all. A shared daemon's log
/// and lock are kept.
pub fn clear(key: &DaemonKey, state_dir: &Path) -> Result<(), MpsError> {
    if crate::ledger::LeaseId::parse(&key.0).is_some() {
        return remove_if_there(&key.dir(state_dir));
    }
    empty(&key.public(state_dir))?;
    clear_pipe(key, state_dir)
}

/// Limits each log of the daemon. A log that is too large is moved to `<name>.old`, of which there is one.
///
/// The daemon keeps its logs open, so they are copied and truncated, never renamed.
pub fn cap_logs(key: &DaemonKey, state_dir: &Path) {
    let dir = log(key, state_dir);
    for name in ["control.log", "server.log", OUTPUT] {
        if let Err(error) = cap_log(&dir.join(name), LOG_CAP) {
            tracing::debug!("{}: {error}", dir.join(name).display());
        }
    }
}

fn cap_log(path: &Path, cap: u64) -> io::Result<()> {
    // A daemon that does not append leaves a hole when its log is truncated. The number of blocks shows the real size.
    let is_large = |found: &Metadata| found.len().min(found.blocks() * 512) > cap;
    // Most are not, and need not be opened.
    if fs::symlink_metadata(path).is_ok_and(|found| !is_large(&found)) {
        return Ok(());
    }
    let Some(mut file) = unless_absent(open_log(path))? else { return Ok(()) };
    let found = file.metadata()?;
    if !found.is_file() || !is_large(&found) {
        return Ok(());
    }
    file.seek(SeekFrom::Start(found.len().saturating_sub(cap)))?;
    let mut tail = Vec::new();
    (&mut file).take(cap).read_to_end(&mut tail)?;
    let old = path.with_extension("log.old");
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(old)?.write_all(&tail)?;
    file.set_len(0)
}

fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// The content of a log of the daemon after its first `from` bytes, at most the last `most` bytes; empty where there is none.
pub fn log_since(key: &DaemonKey, state_dir: &Path, name: &str, from: u64, most: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = open_log(&log(key, state_dir).join(name))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(most).max(from)))?;
        let mut tail = Vec::new();
        file.take(most).read_to_end(&mut tail)?;
        Ok(tail)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).replace('\0', "")
}

/// Where the control program's own output goes; `None`: nowhere.
pub fn output(key: &DaemonKey, state_dir: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(log(key, state_dir).join(OUTPUT)).ok()
}

/// Held until dropped. No other program inherits it: the descriptor is close-on-exec.
pub struct DaemonLock {
    _file: Flock<File>,
}

/// How long a lock is waited for that others take one after the other: many containers may start at once.
struct Patience {
    /// For one holder.
    limit: Duration,
    begun: Instant,
    /// When the present holder was seen first, and when it took the lock by the file's time.
    holder: (Instant, Option<SystemTime>),
}

impl Patience {
    /// Times `limit`, for all holders together: with the longest usual `sublet.wait` a start is still within a hook's time
    /// (docs/prestart.md).
    const HOLDERS: u32 = 2;

    fn new(limit: Duration, begun: Instant) -> Self {
        Self { limit, begun, holder: (begun, None) }
    }

    /// Whether it is over `now`, while the lock is held since `taken_at`.
    fn is_over(&mut self, taken_at: Option<SystemTime>, now: Instant) -> bool {
        if taken_at != self.holder.1 {
            self.holder = (now, taken_at);
        }
        now >= self.holder.0 + self.limit || now >= self.begun + self.limit * Self::HOLDERS
    }
}

impl DaemonLock {
    /// Waits for the lock of `key`, for at most `limit` for each who holds it meanwhile, and twice as long in all.
    /// Creates missing directories.
    ///
    /// # Errors
    /// [`MpsError::Busy`] if the lock is not free in time.
    pub fn take(key: &DaemonKey, state_dir: &Path, limit: Duration) -> Result<Self, MpsError> {
        let path = key.dir(state_dir).join("lock");
        let mut patience = Patience::new(limit, Instant::now());
        loop {
            if let Some(lock) = Self::try_take(key, state_dir)? {
                return Ok(lock);
            }
            let taken_at = fs::metadata(&path).and_then(|lock| lock.modified()).ok();
            if patience.is_over(taken_at, Instant::now()) {
                let seconds = patience.begun.elapsed().as_secs();
                return Err(MpsError::Busy { key: key.to_string(), seconds });
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// The lock of `key`; `None` while another process holds it.
    pub(crate) fn try_take(key: &DaemonKey, state_dir: &Path) -> Result<Option<Self>, MpsError> {
        make(key, state_dir)?;
        let path = key.dir(state_dir).join("lock");
        // A stop may just have removed the directory of a dedicated daemon. The next round creates it.
        let file = unless_absent(lock_now(&path, true)).map_err(io_at("lock", &path))?.flatten();
        // By its time those who wait see that the holder is another one.
        let _ = file.as_ref().map(|file| file.set_modified(SystemTime::now()));
        Ok(file.map(|file| Self { _file: file }))
    }
}

/// Waits for this process's turn to ask a daemon, which it has until the file is dropped. A daemon speaks with one program at
/// a time, and without turns most of sixteen that ask at once are sent away (docs/evidence/2026-11-25-mps-control.md).
///
/// It waits for at most `limit`: whoever is stopped while it asks must not keep everyone else waiting. Users who may not write
/// in `own`, the daemon's directory, have no turns. The file is not created here, where the daemon may be about to end and
/// its directory about to be removed ([`make`]).
pub(super) fn wait_for_turn(own: &Path, limit: Duration) -> Option<Flock<File>> {
    let (path, deadline) = (own.join(ASKING), Instant::now() + limit);
    loop {
        match lock_now(&path, false) {
            Ok(None) if Instant::now() < deadline => sleep(Duration::from_millis(2)),
            turn => return turn.ok().flatten(),
        }
    }
}

fn lock_now(path: &Path, create: bool) -> io::Result<Option<Flock<File>>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(create).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)?;
    let held = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(held) => held,
        Err((_, Errno::EWOULDBLOCK | Errno::EINTR)) => return Ok(None),
        Err((_, error)) => return Err(error.into()),
    };
    // The last holder may have removed the file. A lock on a removed file excludes no other process.
    let (ours, there) = (held.metadata()?, std::fs::symlink_metadata(path)?);
    Ok((ours.ino() == there.ino() && ours.dev() == there.dev()).then_some(held))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn key() -> DaemonKey {
        DaemonKey("GPU-11111111-2222-3333-4444-555555555555".into())
    }

    fn mode(path: PathBuf) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn clients_reach_public_and_nothing_else() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        make(&key(), state).unwrap();
        let dir = state.join("mps/GPU-11111111-2222-3333-4444-555555555555");
        fs::set_permissions(dir.join("pipe"), Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(dir.join("public"), Permissions::from_mode(0o700)).unwrap();
        make(&key(), state).unwrap();
        assert_eq!(mode(state.join("mps")), 0o755);
        assert_eq!(mode(dir.clone()), 0o755);
        assert_eq!(mode(dir.join("public")), 0o755);
        assert_eq!(mode(dir.join("pipe")), 0o700);
        assert_eq!(mode(dir.join("log")), 0o700);
    }

    #[test]
    fn a_symbolic_link_in_place_of_a_directory_is_not_followed() {
        let (state, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::os::unix::fs::symlink(elsewhere.path(), state.path().join("mps")).unwrap();
        let error = make(&key(), state.path()).unwrap_err().to_string();
        assert!(error.contains("not a directory of this user"), "{error}");
        assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
    }

    #[test]
    fn keys_that_would_be_paths_are_refused() {
        for bad in ["", "..", ".", "a/b", "-x", "a b", "GPU-1\n"] {
            assert!(check_key(&DaemonKey(bad.into())).is_err(), "{bad:?}");
        }
        assert!(check_key(&DaemonKey("00f1e2d3c4b5a697".into())).is_ok());
    }

    #[test]
    fn a_socket_path_holds_107_bytes() {
        let path = |length: usize| PathBuf::from(format!("/{}", "x".repeat(length - 1)));
        assert!(check_length(&path(107)).is_ok());
        let error = check_length(&path(108)).unwrap_err().to_string();
        assert!(error.contains("108 bytes") && error.contains("state_dir"), "{error}");
    }

    #[test]
    fn a_new_daemons_socket_takes_the_old_ones_name() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        make(&key(), state).unwrap();
        let control = pipe(&key(), state).join("control");
        let link = key().public(state).join("control");
        let inode = |path: &Path| fs::symlink_metadata(path).unwrap().ino();
        let old = UnixListener::bind(&control).unwrap();
        publish(&key(), state).unwrap();
        assert_eq!(inode(&control), inode(&link));
        // Again, with both names for the same socket already.
        publish(&key(), state).unwrap();
        clear_pipe(&key(), state).unwrap();
        assert!(!control.exists() && link.exists());
        drop(old);
        let _new = UnixListener::bind(&control).unwrap();
        fs::write(key().public(state).join("stray"), "").unwrap();
        publish(&key(), state).unwrap();
        assert_eq!(inode(&control), inode(&link));
        let names = |dir: PathBuf| {
            fs::read_dir(dir)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(key().public(state)), ["control"]);
        assert!(!names(key().dir(state)).contains(&".control".to_owned()));
    }

    #[test]
    fn a_long_log_is_cut_and_its_end_kept_once() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join("control.log");
        let mut held = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        held.write_all(&vec![b'a'; 40_000]).unwrap();
        held.write_all(b"the end").unwrap();
        cap_log(&path, 20_000).unwrap();
        let old = fs::read(state.path().join("control.log.old")).unwrap();
        assert_eq!((old.len(), &old[old.len() - 7..]), (20_000, &b"the end"[..]));
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        held.write_all(b"more").unwrap();
        cap_log(&path, 20_000).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"more");
    }

    #[test]
    fn a_leases_own_daemon_leaves_nothing() {
        let state = tempfile::tempdir().unwrap();
        let own = DaemonKey("00f1e2d3c4b5a697".into());
        for key in [&own, &key()] {
            make(key, state.path()).unwrap();
            fs::write(key.public(state.path()).join("control"), "").unwrap();
            fs::write(pipe(key, state.path()).join("log"), "").unwrap();
            clear(key, state.path()).unwrap();
        }
        assert!(!own.dir(state.path()).exists());
        assert_eq!(fs::read_dir(key().public(state.path())).unwrap().count(), 0);
        assert_eq!(fs::read_dir(pipe(&key(), state.path())).unwrap().count(), 0);
    }
}

#[cfg(test)]
mod lock_tests {
    use super::*;

    fn key() -> DaemonKey {
        DaemonKey("GPU-11111111-2222-3333-4444-555555555555".into())
    }

    #[test]
    fn one_holder_at_a_time_and_a_limit_on_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let held = DaemonLock::take(&key(), dir.path(), Duration::from_secs(1)).unwrap();
        assert!(DaemonLock::try_take(&key(), dir.path()).unwrap().is_none());
        let begun = Instant::now();
        let refused = DaemonLock::take(&key(), dir.path(), Duration::from_millis(60));
        assert!(matches!(refused, Err(MpsError::Busy { .. })));
        assert!(begun.elapsed() < Duration::from_secs(2));
        drop(held);
        assert!(DaemonLock::try_take(&key(), dir.path()).unwrap().is_some());
    }

    #[test]
    fn who_waits_behind_many_waits_for_each_of_them_and_not_for_ever() {
        let (limit, begun) = (Duration::from_secs(20), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let taken = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        let mut patience = Patience::new(limit, begun);
        let mut is_over = |since, now| patience.is_over(taken(since), at(now));
        assert!(!is_over(1, 0) && !is_over(1, 14) && !is_over(14, 15) && !is_over(14, 34) && is_over(14, 35));
        assert!(!is_over(36, 36) && !is_over(38, 39) && is_over(39, 40), "others still take it");
        let dir = tempfile::tempdir().unwrap();
        let taken_at = || {
            let _held = DaemonLock::take(&key(), dir.path(), Duration::ZERO).unwrap();
            fs::metadata(key().dir(dir.path()).join("lock")).unwrap().modified().unwrap()
        };
        assert_ne!(taken_at(), taken_at());
    }

    #[test]
    fn a_lock_on_a_removed_file_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let held = DaemonLock::take(&key(), dir.path(), Duration::ZERO).unwrap();
        std::fs::remove_file(key().dir(dir.path()).join("lock")).unwrap();
        let second = DaemonLock::try_take(&key(), dir.path()).unwrap();
        assert!(second.is_some(), "the new file is another lock");
        drop(held);
    }
}
