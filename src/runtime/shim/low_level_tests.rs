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
