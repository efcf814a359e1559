//! Where runtimes keep the records of their containers: the usual places, and those that were seen in use.
//!
//! A directory that cannot be read is an error, because a container with a share may be recorded there. Only one that an
//! ordinary user may not read counts as empty, with a warning.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::error::failed;
use super::runtime_record::LARGEST;
use super::{Ledger, LedgerError};
use crate::fs::looked_for::is_absent;
use crate::text::safe;

/// Where root's runtimes keep their records: `ROOT/ID`. A `*` at the end of a component matches the rest of its name.
///
/// Users' own roots below /run/user are not included: a file that a user can write must not take a share.
const ROOTS: [&str; 4] = [
    // runc(8), `--root`.
    "/run/runc",
    // crun(1), `--root`. Podman and CRI-O use this default.
    "/run/crun",
    // dockerd: <exec-root>/runtime-<name>, with containerd's namespace below.
    "/run/docker/runtime-*/*",
    // containerd's runc.v2 shim: one for each namespace (`k8s.io`, `default`, `moby`).
    "/run/containerd/runc/*",
];

/// The file in the state directory that names further roots, one per line.
pub(super) const FURTHER_ROOTS: &str = "roots";

/// Records where the runtimes of `ledger`'s leases keep their records, if that is not a usual place and not where leases of
/// `before`, which was written, had theirs. A root that is gone, and that no lease has, is forgotten when the next one is
/// written down.
///
/// # Errors
/// The file cannot be read, so that the roots in it would be lost, or cannot be written.
pub(super) fn remember_roots(state_dir: &Path, ledger: &Ledger, before: Option<&Ledger>) -> io::Result<()> {
    let mut known: Option<Vec<PathBuf>> = None;
    let mut seen: Vec<&[u8]> = Vec::new();
    for record in before.into_iter().flat_map(root_records) {
        let above = root_of(record);
        if !seen.contains(&above) {
            seen.push(above);
        }
    }
    for record in root_records(ledger) {
        // Most leases have one of a few roots.
        let above = root_of(record);
        if seen.contains(&above) {
            continue;
        }
        seen.push(above);
        let Some(root) = record.parent() else { continue };
        let line = root.to_str().filter(|line| line.starts_with('/') && !line.contains('\n'));
        if line.is_none() || ROOTS.iter().any(|pattern| matches(pattern, root)) {
            continue;
        }
        if known.is_none() {
            known = Some(further_roots(state_dir)?);
        }
        let known = known.get_or_insert_default();
        if !known.iter().any(|old| old == root) {
            let leased: BTreeSet<&Path> =
                ledger.leases.iter().filter_map(|lease| lease.container.record.parent()).collect();
            known.retain(|old| {
                leased.contains(&**old) || !old.symlink_metadata().is_err_and(|error| is_absent(&error))
            });
            known.push(root.to_owned());
            let lines: Vec<&str> = known.iter().filter_map(|root| root.to_str()).collect();
            let lines = lines.join("\n");
            crate::fs::atomic::replace(&state_dir.join(FURTHER_ROOTS), lines.as_bytes(), 0o644)?;
        }
    }
    Ok(())
}

/// The records of root's own containers.
fn root_records(ledger: &Ledger) -> impl Iterator<Item = &PathBuf> {
    ledger.leases.iter().filter(|lease| !lease.brokered).map(|lease| &lease.container.record)
}

/// The text of the path above `record`. To take paths apart takes much longer than texts.
fn root_of(record: &Path) -> &[u8] {
    let text = record.as_os_str().as_bytes();
    text.iter().rposition(|byte| *byte == b'/').map_or(text, |slash| &text[..slash])
}

/// The roots that were written down.
pub(super) fn further_roots(state_dir: &Path) -> io::Result<Vec<PathBuf>> {
    // An untrusted file is written anew.
    let trusted = crate::fs::trusted::read(&state_dir.join(FURTHER_ROOTS), LARGEST)?.and_then(Result::ok);
    let text = String::from_utf8_lossy(&trusted.unwrap_or_default()).into_owned();
    Ok(text.lines().filter(|line| line.starts_with('/')).map(PathBuf::from).collect())
}

/// Every existing root, each once, whatever links lead to it. `further` is one more.
pub(super) fn roots(state_dir: &Path, further: Option<&Path>) -> Result<Vec<PathBuf>, LedgerError> {
    let file = state_dir.join(FURTHER_ROOTS);
    let mut named = further_roots(state_dir).map_err(|error| failed("read", &file, error))?;
    named.extend(further.map(Path::to_owned));
    for pattern in ROOTS {
        named.extend(expand(pattern)?);
    }
    let mut roots = Vec::new();
    for root in named {
        roots.extend(skip_absent(&root, root.canonicalize())?);
    }
    roots.sort();
    roots.dedup();
    Ok(roots)
}

/// The paths in `dir`; none if it does not exist.
pub(super) fn list_directory(dir: &Path) -> Result<Vec<PathBuf>, LedgerError> {
    let listed = fs::read_dir(dir).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    Ok(skip_absent(dir, listed)?.unwrap_or_default())
}

/// The result of reading `path`; `None` if it does not exist.
///
/// # Errors
/// It cannot be read, and not because it is another user's.
pub(super) fn skip_absent<T>(path: &Path, read: io::Result<T>) -> Result<Option<T>, LedgerError> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            tracing::warn!("{} is taken as empty: {error}", safe(&path.to_string_lossy()));
            Ok(None)
        }
        Err(error) => Err(failed("read", path, error)),
    }
}

fn matches(pattern: &str, path: &Path) -> bool {
    let (pattern, path) = (Path::new(pattern).components(), path.components());
    pattern.clone().count() == path.clone().count()
        && pattern.zip(path).all(|(pattern, part)| part_matches(pattern.as_os_str(), part.as_os_str()))
}

fn part_matches(pattern: &std::ffi::OsStr, part: &std::ffi::OsStr) -> bool {
    let (pattern, part) = (pattern.as_encoded_bytes(), part.as_encoded_bytes());
    pattern.strip_suffix(b"*").map_or(pattern == part, |beginning| part.starts_with(beginning))
}

/// The directories that match `pattern`.
fn expand(pattern: &str) -> Result<Vec<PathBuf>, LedgerError> {
    let mut found = vec![PathBuf::new()];
    for component in Path::new(pattern).components() {
        let name = component.as_os_str();
        if !name.as_encoded_bytes().ends_with(b"*") {
            for path in &mut found {
                path.push(name);
            }
            continue;
        }
        let mut below = Vec::new();
        for dir in &found {
            let fits = |path: &PathBuf| path.file_name().is_some_and(|file| part_matches(name, file));
            below.extend(list_directory(dir)?.into_iter().filter(fits));
        }
        found = below;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::fixture::lease;
    use super::*;

    #[test]
    fn roots_are_matched_and_expanded_by_component() {
        assert!(matches("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc/moby")));
        assert!(!matches("/run/docker/runtime-*/*", Path::new("/run/docker/runtime-runc")));
        assert!(!matches("/run/docker/runtime-*/*", Path::new("/run/docker/other/moby")));
        let dir = tempfile::tempdir().unwrap();
        for path in ["runtime-a/x", "runtime-a/y", "runtime-b/z", "other/w"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        let mut found = expand(&format!("{}/runtime-*/*", dir.path().display())).unwrap();
        found.sort();
        let below = |path: &str| dir.path().join(path);
        assert_eq!(found, [below("runtime-a/x"), below("runtime-a/y"), below("runtime-b/z")]);
    }

    #[test]
    fn unusual_roots_are_written_down_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut ledger = Ledger { leases: vec![lease(1, "GPU-a"), lease(2, "GPU-a")], ..Ledger::empty("b") };
        ledger.leases[1].container.record = "/run/runc/container-2".into();
        remember_roots(dir.path(), &ledger, None).unwrap();
        remember_roots(dir.path(), &ledger, None).unwrap();
        let written = fs::read_to_string(dir.path().join("roots")).unwrap();
        assert_eq!(written, "/nonexistent/runc");
    }

    #[test]
    fn roots_that_are_gone_are_forgotten_with_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().to_str().unwrap();
        let gone: Vec<String> = (0..30_000).map(|n| format!("/nonexistent/{n}")).collect();
        let lines = format!("{}\n{there}\n/nonexistent/leased", gone.join("\n"));
        fs::write(dir.path().join("roots"), lines).unwrap();
        let mut ledger = Ledger { leases: vec![lease(1, "GPU-a"), lease(2, "GPU-a")], ..Ledger::empty("b") };
        ledger.leases[1].container.record = "/nonexistent/leased/container-2".into();
        remember_roots(dir.path(), &ledger, None).unwrap();
        let written = fs::read_to_string(dir.path().join("roots")).unwrap();
        assert_eq!(written, format!("{there}\n/nonexistent/leased\n/nonexistent/runc"));
    }

    #[test]
    fn a_root_that_cannot_be_examined_is_neither_missing_nor_empty() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        assert!(!roots(dir.path(), Some(&root)).unwrap().contains(&root), "it is not there");
        symlink("root", &root).unwrap();
        let error = roots(dir.path(), Some(&root)).unwrap_err().to_string();
        assert!(error.contains("/root cannot be read"), "{error}");
        let error = list_directory(&root).unwrap_err().to_string();
        assert!(error.contains("/root cannot be read"), "{error}");
        assert!(list_directory(&dir.path().join("none")).unwrap().is_empty());
    }
}
