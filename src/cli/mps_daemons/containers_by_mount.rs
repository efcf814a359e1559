//! Finds containers of a daemon without the ledger, by the mounts that the kernel lists (proc(5), mountinfo), even if
//! they do not compute now.

use std::fs;
use std::path::Path;

use sublet_core::grant::{MPS_DEFAULT_DIR, MPS_DIR};
use sublet_core::ledger::DaemonKey;
use sublet_core::mps::control::listener;
use sublet_core::process::{Process, shown_in};

/// Whether a process has the directory of `key` mounted where containers have theirs; `daemon` is that directory's
/// daemon. If /proc cannot be read, the answer is yes.
pub(super) fn is_mounted(key: &DaemonKey, state_dir: &Path, daemon: Option<Process>) -> bool {
    let public = key.public(state_dir);
    let Ok(entries) = fs::read_dir("/proc") else { return true };
    entries.flatten().map(|entry| shown_in(entry.path())).any(|process| {
        let mounts = fs::read_to_string(process.join("mountinfo")).unwrap_or_default();
        mounts.lines().filter_map(Mounted::parse).any(|mounted| {
            mounted.is(&public) || mounted.is_of(key) && mounted.leads_to(daemon, &process.join("root"))
        })
    })
}

/// A line of mountinfo: the mounted directory, as a path in its filesystem, and the mount point.
#[derive(Debug, PartialEq, Eq)]
struct Mounted<'a> {
    what: &'a Path,
    at: &'a str,
}

impl<'a> Mounted<'a> {
    /// `None` if containers do not have their MPS directory at this mount point.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split(' ').skip(3);
        let (what, at) = (fields.next()?, fields.next()?);
        let what = Path::new(what.strip_suffix("//deleted").unwrap_or(what));
        [MPS_DIR, MPS_DEFAULT_DIR].contains(&at).then_some(Self { what, at })
    }

    /// Whether it is this very directory, by its name now or before it was removed. Either path may be the longer one:
    /// a mount names its directory from the root of the mounted filesystem, and sublet's own root may be a directory
    /// of that filesystem.
    fn is(&self, public: &Path) -> bool {
        let ends_with =
            |long: &Path, short: &Path| short.strip_prefix("/").is_ok_and(|short| long.ends_with(short));
        ends_with(public, self.what) || ends_with(self.what, public)
    }

    /// Whether it is a directory of the same key, in any state directory.
    fn is_of(&self, key: &DaemonKey) -> bool {
        self.what.ends_with(Path::new(&key.0).join("public"))
    }

    /// Whether `daemon` listens in it, which means that the directory was moved.
    fn leads_to(&self, daemon: Option<Process>, root: &Path) -> bool {
        let control = root.join(self.at.trim_start_matches('/')).join("control");
        daemon.is_some_and(|daemon| listener(&control) == Some(daemon.pid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_known_by_what_it_is_and_where() {
        let line = |what: &str, at: &str| format!("36 35 0:24 {what} {at} ro,nosuid - tmpfs tmpfs rw");
        let key = DaemonKey("GPU-1".into());
        let public = Path::new("/run/sublet/mps/GPU-1/public");
        for (what, is, is_of) in [
            ("/sublet/mps/GPU-1/public", true, true),
            ("/sublet/mps/GPU-1/public//deleted", true, true),
            ("/run/sublet/mps/GPU-1/public", true, true),
            ("/roots/one/run/sublet/mps/GPU-1/public//deleted", true, true),
            ("/sublet.moved/mps/GPU-1/public", false, true),
            ("/other/mps/GPU-1/public", false, true),
            ("/sublet/mps/GPU-2/public", false, false),
        ] {
            let line = line(what, MPS_DIR);
            let mounted = Mounted::parse(&line).unwrap();
            assert_eq!((mounted.is(public), mounted.is_of(&key)), (is, is_of), "{what}");
        }
        assert_eq!(Mounted::parse(&line("/sublet/mps/GPU-1/public", "/mnt")), None);
        assert_eq!(Mounted::parse("garbage"), None);
    }
}
