//! Whether processes run in a container's cgroup, and which cgroup that is if no record names it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use nix::libc::{ELOOP, ENAMETOOLONG, ENOENT, ENOTDIR};
use serde::Deserialize;

use super::Container;
use super::runtime_record::{read_bounded, table};
use crate::fs::looked_for::is_absent;
use crate::host::cgroup_layout::{MOUNT, is_unified};
use crate::process::{Process, is_gone};
use crate::reading::kernel_file;
use crate::text::safe;

/// A cgroup with more cgroups than this below it is not walked through. In v1 it counts as populated.
const MOST_CGROUPS: usize = 1000;

/// The interval for cgroup v1, which reports no changes.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Whether a process runs in the cgroup `dir` or below. An absent cgroup is empty.
pub(super) fn is_populated(dir: &Path) -> io::Result<bool> {
    match kernel_file(dir.join("cgroup.events")) {
        // cgroup v2 includes the descendants (cgroups(7)).
        Ok(events) => Ok(events.lines().any(|line| line == "populated 1")),
        Err(error) if is_absent(&error) => Ok(!live_processes(dir)?.is_empty()),
        Err(error) if is_removed(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Waits up to `longest` until `dir` may have become empty: cgroup v2 says so by `cgroup.events` (cgroups(7)); v1 does
/// not, and is looked at again after a moment.
pub(super) fn await_change(dir: &Path, longest: Duration) {
    let Ok(mut events) = fs::File::open(dir.join("cgroup.events")) else {
        std::thread::sleep(POLL_INTERVAL.min(longest));
        return;
    };
    // An event is one that comes after a read by the same descriptor.
    let mut text = String::new();
    if events.read_to_string(&mut text).is_ok() && text.lines().any(|line| line == "populated 1") {
        let mut awaited = [PollFd::new(events.as_fd(), PollFlags::POLLPRI)];
        let _ = poll(&mut awaited, PollTimeout::try_from(longest).unwrap_or(PollTimeout::MAX));
    }
}

/// The live processes in the cgroup `dir` and below. None of an absent cgroup.
///
/// # Errors
/// A cgroup or a process cannot be read, or there are too many cgroups.
pub(super) fn live_processes(dir: &Path) -> io::Result<Vec<Process>> {
    let mut pids = BTreeSet::new();
    let mut open = vec![dir.to_owned()];
    let mut seen = 0;
    while let Some(dir) = open.pop() {
        seen += 1;
        if seen > MOST_CGROUPS {
            return Err(io::Error::other(format!("there are more than {MOST_CGROUPS} cgroups in it")));
        }
        pids.extend(pids_in(&dir)?);
        let entries = match fs::read_dir(&dir) {
            Err(error) if is_removed(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            }
        }
    }
    // v1 also lists zombies, which hold no resources.
    let found = pids.into_iter().map(|pid| Ok(Process::examine(pid)?.filter(Process::is_alive)));
    found.filter_map(io::Result::transpose).collect()
}

/// The processes in the cgroup `dir`. Of one whose first thread alone has ended, v2 lists only the threads.
fn pids_in(dir: &Path) -> io::Result<Vec<i32>> {
    let list = |name: &str| -> io::Result<_> {
        match read_bounded(&dir.join(name)) {
            Err(error) if is_removed(&error) => Ok(None),
            list => Ok(list?.map(|list| parse_pids(&list))),
        }
    };
    let Some(threads) = list("cgroup.threads")? else { return Ok(list("cgroup.procs")?.unwrap_or_default()) };
    threads.into_iter().filter_map(|thread| process_of_thread(thread).transpose()).collect()
}

fn parse_pids(text: &[u8]) -> Vec<i32> {
    String::from_utf8_lossy(text).lines().filter_map(|line| line.parse().ok()).collect()
}

/// The id of the process of a thread (`Tgid`, proc(5)); `None` if it has ended.
fn process_of_thread(thread: i32) -> io::Result<Option<i32>> {
    // v2 lists threads that this PID namespace does not show as 0.
    if thread <= 0 {
        return Err(io::Error::other("a process in it is of a PID namespace that is not seen from here"));
    }
    match fs::read_to_string(format!("/proc/{thread}/status")) {
        Err(error) if is_gone(&error) => Ok(None),
        status => Ok(status?.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())),
    }
}

/// Reading a cgroup that was removed while open fails with ENODEV.
fn is_removed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
}

/// Evidence that processes run in `container`'s cgroup. That is the cgroup that its config.json requests. If it
/// requests none, it is one with the container's id in its name; to find that, every process is examined.
///
/// # Errors
/// config.json, cgroups or /proc cannot be read.
pub(super) fn find_sign_of_life(container: &Container) -> io::Result<Option<String>> {
    // The bundle of a lease that is not bound yet is not known.
    let asked = if container.bundle.as_os_str().is_empty() { None } else { cgroups_path(&container.bundle)? };
    if let Some(below) = asked {
        for dir in possible_dirs(Path::new(MOUNT), &below)? {
            if is_there(&dir)? && is_populated(&dir)? {
                return Ok(Some(format!("processes are in its cgroup {}", safe(&dir.to_string_lossy()))));
            }
        }
        return Ok(None);
    }
    let pid = if container.id.is_empty() { None } else { process_named_for(&container.id)? };
    Ok(pid.map(|pid| format!("process {pid} is in its cgroup")))
}

/// Whether there is such a directory. There is none with a name that no cgroup can have.
fn is_there(dir: &Path) -> io::Result<bool> {
    match dir.symlink_metadata() {
        Err(error) if [ENOENT, ENOTDIR, ENAMETOOLONG, ELOOP].map(Some).contains(&error.raw_os_error()) => {
            Ok(false)
        }
        found => found.map(|_| true),
    }
}

/// The directories that the cgroup `below` may have under `mount`.
fn possible_dirs(mount: &Path, below: &Path) -> io::Result<Vec<PathBuf>> {
    let mut all = vec![mount.join(below)];
    if !is_unified(mount) {
        for hierarchy in fs::read_dir(mount)? {
            all.push(hierarchy?.path().join(below));
        }
    }
    Ok(all)
}

fn process_named_for(id: &str) -> io::Result<Option<i32>> {
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let table = table(pid)?;
        let mut paths = table.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        if paths.any(|path| path.split('/').any(|name| is_named_for(name, id))) && Process::may_run(pid) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// The part of config.json that matters here. The rest is skipped.
#[derive(Deserialize)]
struct Config {
    linux: Option<Linux>,
}

#[derive(Deserialize)]
struct Linux {
    #[serde(rename = "cgroupsPath")]
    cgroups_path: Option<String>,
}

/// The cgroup that `bundle`'s config.json requests, below a hierarchy's root; `None` if it requests none or does not
/// exist.
fn cgroups_path(bundle: &Path) -> io::Result<Option<PathBuf>> {
    let Some(config) = read_bounded(&bundle.join("config.json"))? else { return Ok(None) };
    let config: Config = serde_json::from_slice(&config)?;
    Ok(config.linux.and_then(|linux| linux.cgroups_path).and_then(|path| parse_cgroups_path(&path)))
}

/// A path, or systemd's `SLICE:PREFIX:NAME`, which means the scope `PREFIX-NAME.scope` in that slice (runc's
/// documentation, "systemd cgroup driver").
fn parse_cgroups_path(path: &str) -> Option<PathBuf> {
    let parts: Vec<_> = path.split(':').collect();
    let asked = match parts[..] {
        [slice, "", name] => slice_path(slice).join(format!("{name}.scope")),
        [slice, prefix, name] => slice_path(slice).join(format!("{prefix}-{name}.scope")),
        _ => path.trim_matches('/').into(),
    };
    Some(asked).filter(|asked| !asked.as_os_str().is_empty())
}

/// `a-b.slice` is in `a.slice` (systemd.slice(5)). An empty name means runc's default.
fn slice_path(slice: &str) -> PathBuf {
    let name = match slice {
        "" => "system",
        slice => slice.strip_suffix(".slice").unwrap_or(slice),
    };
    let ends = name.match_indices('-').map(|(at, _)| at).filter(|at| *at > 0).chain([name.len()]);
    ends.filter(|_| name != "-").map(|end| format!("{}.slice", &name[..end])).collect()
}

/// Whether a cgroup is called `ID`, `ENGINE-ID` or `ENGINE-ID.scope`, as engines and systemd call them. Podman's
/// monitor, which is not part of the container, is in `libpod-conmon-ID.scope`.
fn is_named_for(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let engine = name.strip_suffix(id);
    engine.is_some_and(|engine| engine.is_empty() || engine.ends_with('-') && engine != "libpod-conmon-")
}

#[cfg(test)]
mod tests {
    use super::super::fixture::lease;
    use super::*;
    use crate::process::{fixture, pidfd_await_end};

    #[test]
    fn a_process_whose_first_thread_has_ended_is_in_its_cgroup_of_v1_until_its_last_has() {
        let dir = tempfile::tempdir().unwrap();
        let mut started = fixture::without_first_thread();
        let process = started.process();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", process.pid)).unwrap();
        assert!(is_populated(dir.path()).unwrap());
        let held = process.hold().unwrap().unwrap();
        started.end();
        assert!(pidfd_await_end(&held, Duration::from_secs(60)));
        assert!(!is_populated(dir.path()).unwrap(), "a zombie is left");
    }

    #[test]
    fn cgroups_are_named_for_containers_in_every_engines_way() {
        for name in ["c1", "docker-c1.scope", "libpod-c1.scope", "libpod-payload-c1"] {
            assert!(is_named_for(name, "c1"), "{name}");
        }
        for name in ["", "c12", "xc1", "libpod-conmon-c1.scope", "c1.slice"] {
            assert!(!is_named_for(name, "c1"), "{name}");
        }
    }

    #[test]
    fn a_config_asks_for_a_cgroup_by_path_or_by_systemds_words() {
        let asked = [
            ("/docker/c1", Some("docker/c1")),
            ("system.slice:docker:c1", Some("system.slice/docker-c1.scope")),
            ("machine.slice::c1", Some("machine.slice/c1.scope")),
            ("a-b.slice:x:c1", Some("a.slice/a-b.slice/x-c1.scope")),
            (":x:c1", Some("system.slice/x-c1.scope")),
            ("-.slice:x:c1", Some("x-c1.scope")),
            ("", None),
            ("/", None),
        ];
        for (path, expected) in asked {
            assert_eq!(parse_cgroups_path(path).as_deref(), expected.map(Path::new), "{path}");
        }
    }

    #[test]
    fn without_a_process_there_is_nothing_in_it_and_what_cannot_be_read_is_an_error() {
        let bundle = tempfile::tempdir().unwrap();
        let container = Container { bundle: bundle.path().to_owned(), ..lease(1, "GPU-a").container };
        let none = Container { id: String::new(), ..container.clone() };
        assert_eq!(find_sign_of_life(&none).unwrap(), None);
        let file = bundle.path().join("config.json");
        fs::write(&file, r#"{"linux": {"cgroupsPath": "/sublet-test-of-no-container"}}"#).unwrap();
        assert_eq!(find_sign_of_life(&none).unwrap(), None);
        fs::write(&file, "{").unwrap();
        assert!(find_sign_of_life(&container).is_err());
    }
}
