//! What the cgroups of a process say of it, by the kernel's paths and not by those in a lease: how much memory they leave
//! it, and whether they are frozen (`docker pause`).

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::{CGROUP_MOUNT, cgroup_line, cgroup_table, kernel_file, unified_cgroups};

/// How many bytes process `pid` may still take before a limit of one of its cgroups stops it, cached files not counted;
/// `None`: none has a limit.
///
/// # Errors
/// It has ended, or a cgroup cannot be read.
pub fn memory_left(pid: i32) -> io::Result<Option<u64>> {
    let mut least = None;
    for directory in directories(pid, "memory")? {
        let left = left_in(&directory)?;
        least = [least, left].into_iter().flatten().min();
    }
    Ok(least)
}

/// Whether process `pid` is frozen by a cgroup.
///
/// # Errors
/// As [`memory_left`].
pub fn is_frozen(pid: i32) -> io::Result<bool> {
    for directory in directories(pid, "freezer")? {
        let has_line = |name: &str, line: &str| {
            Ok::<_, io::Error>(read(&directory, name)?.is_some_and(|text| text.lines().any(|is| is == line)))
        };
        if has_line("cgroup.events", "frozen 1")? || has_line("freezer.state", "FROZEN")? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The process's cgroups and those above them but for the roots, in v1's hierarchy of `controller` and in v2's: a kernel that has
/// the first one says so of every process, also where nobody has mounted it.
fn directories(pid: i32, controller: &str) -> io::Result<Vec<PathBuf>> {
    let (table, mount) = (cgroup_table(pid)?, Path::new(CGROUP_MOUNT));
    let v1 = cgroup_line(&table, controller).map(|path| (mount.join(controller), path));
    let v2 = cgroup_line(&table, "").map(|path| (unified_cgroups(mount), path));
    Ok(v1.into_iter().chain(v2).flat_map(|(root, path)| upwards(&root, path)).collect())
}

fn upwards(root: &Path, path: &str) -> Vec<PathBuf> {
    let own = root.join(path.trim_start_matches('/'));
    own.ancestors().take_while(|directory| *directory != root).map(Path::to_owned).collect()
}

/// v1 shows no limit as a number near 2^63 (the kernel's memory.rst).
const NO_LIMIT: u64 = 1 << 60;

fn left_in(directory: &Path) -> io::Result<Option<u64>> {
    let number = |names: [&str; 2]| {
        let texts = names.map(|name| read(directory, name));
        let [v2, v1] = texts;
        Ok::<_, io::Error>(v2?.or(v1?).and_then(|text| text.trim().parse::<u64>().ok()))
    };
    let limit = number(["memory.max", "memory.limit_in_bytes"])?.filter(|limit| *limit < NO_LIMIT);
    let (Some(limit), Some(used)) = (limit, number(["memory.current", "memory.usage_in_bytes"])?) else {
        return Ok(None);
    };
    let statistics = read(directory, "memory.stat")?.unwrap_or_default();
    let cached = |key: &str| statistics.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok());
    let cached: u64 = cached("total_inactive_file ").or_else(|| cached("inactive_file ")).unwrap_or(0);
    Ok(Some(limit.saturating_sub(used.saturating_sub(cached))))
}

fn read(directory: &Path, name: &str) -> io::Result<Option<String>> {
    match kernel_file(directory.join(name)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        text => text.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_less_used_memory_that_is_not_cached_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        assert_eq!(left_in(dir.path()).unwrap(), None, "the root has no such files");
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(left_in(dir.path()).unwrap(), None);
        write("memory.max", "1000\n");
        assert_eq!(left_in(dir.path()).unwrap(), Some(300));
        write("memory.stat", "anon 500\ninactive_file 200\n");
        assert_eq!(left_in(dir.path()).unwrap(), Some(500));
        let v1 = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(v1.path().join(name), text).unwrap();
        write("memory.limit_in_bytes", "9223372036854771712\n");
        write("memory.usage_in_bytes", "700\n");
        assert_eq!(left_in(v1.path()).unwrap(), None);
        write("memory.limit_in_bytes", "1000\n");
        write("memory.stat", "inactive_file 1\ntotal_inactive_file 200\n");
        assert_eq!(left_in(v1.path()).unwrap(), Some(500));
    }

    #[test]
    fn every_cgroup_above_counts_but_the_root() {
        let root = Path::new("/sys/fs/cgroup");
        let all = ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"].map(PathBuf::from);
        assert_eq!(upwards(root, "/a/b"), all);
        assert_eq!(upwards(root, "/"), [] as [PathBuf; 0]);
    }

    #[test]
    fn this_process_is_not_frozen() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!is_frozen(own).unwrap());
        memory_left(own).unwrap();
    }
}
