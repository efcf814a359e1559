//! The low-level runtime: where it is, whether its command line is runc's or crun's, and where it keeps its state.

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use sublet_core::fs::real_directory;
use sublet_core::host;
use sublet_core::process::inheritance::effective_user;

use super::flags::Dialect;

/// Where names are looked up when there is no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How many links the kernel follows (`path_resolution(7)`).
const MOST_LINKS: usize = 40;

/// None of the configured runtimes is installed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "missing {first}: no executable {names} found{ourselves}; install runc or crun, or set [runtime] low_level"
)]
pub struct MissingRuntime {
    first: String,
    names: String,
    ourselves: &'static str,
}

/// A low-level runtime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowLevel {
    /// Its program.
    pub program: PathBuf,
    /// Its command line.
    pub dialect: Dialect,
}

/// The first of `names` that exists and is not sublet itself, looked up in `path`.
pub fn find(
    names: &[String],
    path: Option<&OsStr>,
    own: Option<&Metadata>,
) -> Result<LowLevel, MissingRuntime> {
    let mut met_ourselves = false;
    for name in names {
        for program in candidates(name, path) {
            let metadata = match std::fs::metadata(&program) {
                Ok(metadata) if metadata.is_file() && metadata.mode() & 0o111 != 0 => Some(metadata),
                Ok(_) => continue,
                Err(error) if is_skipped_by_execvp(&error) => continue,
                // Only running it shows. Another runtime would not know this one's containers.
                Err(_) => None,
            };
            if is_sublet(&program, metadata.as_ref(), own) {
                met_ourselves = true;
                continue;
            }
            return Ok(LowLevel { dialect: detect_dialect(&program), program });
        }
    }
    Err(MissingRuntime {
        first: names.first().map_or_else(|| "runc".to_owned(), |name| sublet_core::text::safe(name)),
        names: sublet_core::text::safe(&names.join(" or ")),
        ourselves: if met_ourselves { " but sublet itself" } else { "" },
    })
}

/// The paths that `name` may mean. Relative directories in PATH are skipped.
fn candidates(name: &str, path: Option<&OsStr>) -> Vec<PathBuf> {
    if name.contains('/') {
        return vec![PathBuf::from(name)];
    }
    let path = path.filter(|path| !path.is_empty()).unwrap_or(OsStr::new(DEFAULT_PATH));
    std::env::split_paths(path).filter(|dir| dir.is_absolute()).map(|dir| dir.join(name)).collect()
}

/// As execvp(3) goes on to the next directory of PATH.
fn is_skipped_by_execvp(error: &io::Error) -> bool {
    use nix::libc::{EACCES, ELOOP, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT};
    let kinds = [EACCES, ELOOP, ENAMETOOLONG, ENODEV, ENOENT, ENOTDIR, ESTALE, ETIMEDOUT];
    error.raw_os_error().is_some_and(|errno| kinds.contains(&errno))
}

/// Whether running `program` would run this program again, without end.
fn is_sublet(program: &Path, metadata: Option<&Metadata>, own: Option<&Metadata>) -> bool {
    let files = own.zip(metadata);
    let same = files.is_some_and(|(own, found)| (own.dev(), own.ino()) == (found.dev(), found.ino()));
    same || file_name(program).starts_with("sublet-")
}

/// Decided by the name of the program, or of the file that it links to: distributions link `runc` to crun.
pub(super) fn detect_dialect(program: &Path) -> Dialect {
    let is_crun = |path: &Path| {
        let name = file_name(path);
        name.contains("crun") || name.contains("krun")
    };
    if is_crun(program) || is_crun(&resolve_links(program)) { Dialect::Crun } else { Dialect::Runc }
}

fn resolve_links(program: &Path) -> PathBuf {
    let mut path = program.to_owned();
    for _ in 0..MOST_LINKS {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = path.with_file_name(target);
    }
    path
}

fn file_name(path: &Path) -> std::borrow::Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

/// The inputs of the runtimes' default state directory.
#[derive(Debug, Default)]
pub struct Host {
    xdg_runtime_dir: Option<OsString>,
    user: Option<OsString>,
    root: bool,
    user_namespace: bool,
}

impl Host {
    /// Of this process.
    #[must_use]
    pub fn current() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Of a process of the same user with this `environment`.
    #[must_use]
    pub fn from_environment(environment: &[OsString]) -> Self {
        Self::from_variables(|name| {
            let value = |entry: &OsString| {
                let rest = entry.as_bytes().strip_prefix(name.as_bytes())?;
                rest.strip_prefix(b"=").map(|value| OsStr::from_bytes(value).to_owned())
            };
            environment.iter().find_map(value)
        })
    }

    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        Self {
            xdg_runtime_dir: variable("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()),
            user: variable("USER"),
            root: effective_user() == 0,
            user_namespace: host::is_nested(),
        }
    }

    /// runc's rule (`shouldHonorXDGRuntimeDir` in `rootless_linux.go`) and crun's (`get_run_directory` in
    /// libcrun/status.c, which honours `XDG_RUNTIME_DIR` for root too).
    fn state_dir(&self, dialect: Dialect) -> PathBuf {
        let not_named_root = self.user.as_deref() != Some(OsStr::new("root"));
        let (name, honoured) = match dialect {
            Dialect::Crun => ("crun", true),
            Dialect::Runc => ("runc", !self.root || self.user_namespace && not_named_root),
        };
        let base = self.xdg_runtime_dir.as_ref().filter(|_| honoured);
        base.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join(name)
    }
}

/// The directory in which `dialect` keeps the state of container `id`: ROOT/ID, absolute.
///
/// `None` for ids that are no single path component: both runtimes refuse those.
#[must_use]
pub fn record_path(dialect: Dialect, root: Option<&Path>, id: &str, host: &Host) -> Option<PathBuf> {
    if id.is_empty() || id.contains(['/', '\0']) || matches!(id, "." | "..") {
        return None;
    }
    let root = root.map_or_else(|| host.state_dir(dialect), Path::to_owned);
    Some(resolve_existing(&std::path::absolute(dialect.interpret_path(&root)).ok()?).join(id))
}

impl Dialect {
    /// Whether `record` is a record of this runtime.
    pub(super) fn has_record(self, record: &Path) -> bool {
        record.join(if self == Self::Crun { "status" } else { "state.json" }).is_file()
    }

    /// `path` as the runtime understands it on its command line. runc calls Go's `filepath.Abs`, which resolves `..`
    /// and an empty path by the text. crun leaves this to the kernel.
    fn interpret_path(self, path: &Path) -> PathBuf {
        if self == Self::Crun {
            return path.to_owned();
        }
        let mut clean = std::path::absolute(if path.as_os_str().is_empty() { Path::new(".") } else { path })
            .unwrap_or_default();
        if clean.components().any(|part| part == Component::ParentDir) {
            clean = clean.components().fold(PathBuf::new(), |mut above, part| {
                if part == Component::ParentDir {
                    above.pop();
                } else {
                    above.push(part);
                }
                above
            });
        }
        clean
    }
}

/// `path` without links, so that two names of a directory become one. The runtime creates missing components as they
/// are written.
fn resolve_existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find_map(|above| Some((real_directory(above).ok()?, above)));
    found.map_or_else(
        || path.to_owned(),
        |(real, above)| path.strip_prefix(above).map_or_else(|_| path.to_owned(), |below| real.join(below)),
    )
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn program(dir: &Path, name: &str, mode: u32) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        path
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn takes_the_first_name_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let crun = program(dir.path(), "crun", 0o755);
        program(dir.path(), "runc", 0o644);
        let path = Some(dir.path().as_os_str());
        let found = find(&names(&["runc", "crun"]), path, None).unwrap();
        assert_eq!(found, LowLevel { program: crun, dialect: Dialect::Crun });
        let runc = program(dir.path(), "runc", 0o755);
        let found = find(&names(&["runc", "crun"]), path, None).unwrap();
        assert_eq!(found, LowLevel { program: runc, dialect: Dialect::Runc });
    }

    #[test]
    fn never_takes_sublet_itself() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let shim = program(first.path(), "the-shim", 0o755);
        std::os::unix::fs::symlink(&shim, first.path().join("runc")).unwrap();
        program(first.path(), "sublet-quarter", 0o755);
        let own = fs::metadata(&shim).unwrap();
        let path = std::env::join_paths([first.path(), second.path()]).unwrap();
        let error = find(&names(&["runc", "sublet-quarter"]), Some(&path), Some(&own)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "missing runc: no executable runc or sublet-quarter found but sublet itself; install runc or crun, \
             or set [runtime] low_level"
        );
        let real = program(second.path(), "runc", 0o755);
        assert_eq!(find(&names(&["runc"]), Some(&path), Some(&own)).unwrap().program, real);
    }

    #[test]
    fn absolute_paths_need_no_path_and_relative_directories_are_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let runc = program(dir.path(), "my-runtime", 0o755);
        let found = find(&[runc.to_str().unwrap().to_owned()], Some(OsStr::new("")), None).unwrap();
        assert_eq!(found.program, runc);
        assert_eq!(candidates("x", Some(OsStr::new(".:bin::/a"))), [PathBuf::from("/a/x")]);
        assert_eq!(candidates("x", None)[0], PathBuf::from("/usr/local/sbin/x"));
    }

    #[test]
    fn a_runc_that_links_to_crun_reads_cruns_command_line() {
        let dir = tempfile::tempdir().unwrap();
        let crun = program(dir.path(), "crun", 0o755);
        std::os::unix::fs::symlink(crun, dir.path().join("runc")).unwrap();
        let found = find(&names(&["runc"]), Some(dir.path().as_os_str()), None).unwrap();
        assert_eq!(found.dialect, Dialect::Crun);
    }

    #[test]
    fn records_are_where_the_runtimes_keep_them() {
        let plain = Host { root: true, ..Host::default() };
        let xdg = |root, user_namespace, user: Option<&str>| Host {
            xdg_runtime_dir: Some("/run/user/7".into()),
            user: user.map(OsString::from),
            root,
            user_namespace,
        };
        let at = |dialect, host: &Host| record_path(dialect, None, "c", host).unwrap();
        assert_eq!(at(Dialect::Runc, &plain), Path::new("/run/runc/c"));
        assert_eq!(at(Dialect::Crun, &plain), Path::new("/run/crun/c"));
        assert_eq!(at(Dialect::Runc, &xdg(true, false, None)), Path::new("/run/runc/c"));
        assert_eq!(at(Dialect::Runc, &xdg(true, true, None)), Path::new("/run/user/7/runc/c"));
        assert_eq!(at(Dialect::Runc, &xdg(true, true, Some("root"))), Path::new("/run/runc/c"));
        assert_eq!(at(Dialect::Runc, &xdg(false, false, None)), Path::new("/run/user/7/runc/c"));
        assert_eq!(at(Dialect::Crun, &xdg(true, false, None)), Path::new("/run/user/7/crun/c"));
        let given = record_path(Dialect::Runc, Some(Path::new("/r")), "c", &plain);
        assert_eq!(given.unwrap(), Path::new("/r/c"));
    }

    #[test]
    fn a_root_is_one_by_whatever_name() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(dir.join("real/runc/x")).unwrap();
        std::os::unix::fs::symlink(dir.join("real"), dir.join("link")).unwrap();
        let at =
            |dialect, root: &str| record_path(dialect, Some(&dir.join(root)), "c", &Host::default()).unwrap();
        for dialect in [Dialect::Runc, Dialect::Crun] {
            for root in ["real/runc", "link/runc", "link/runc/", "link/./runc", "real/runc/x/.."] {
                assert_eq!(at(dialect, root), dir.join("real/runc/c"), "{root}");
            }
            assert_eq!(at(dialect, "link/not/yet"), dir.join("real/not/yet/c"));
        }
        // Go resolves `..` by the text, the kernel by the directory.
        assert_eq!(at(Dialect::Runc, "link/../real/runc"), dir.join("real/runc/c"));
        std::os::unix::fs::symlink(dir.join("real/runc/x"), dir.join("deep")).unwrap();
        assert_eq!(at(Dialect::Runc, "deep/.."), dir.join("c"));
        assert_eq!(at(Dialect::Crun, "deep/.."), dir.join("real/runc/c"));
    }

    #[test]
    fn ids_that_leave_the_root_have_no_record() {
        for id in ["", ".", "..", "a/b", "../a", "a\0b"] {
            assert_eq!(record_path(Dialect::Runc, None, id, &Host::default()), None, "{id:?}");
        }
    }
}
