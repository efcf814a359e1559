//! Tests of reading, replacing and trusting files.

use super::*;

mod looked_for_tests {
    use std::cell::RefCell;

    use nix::libc::{EIO, EMFILE, ENOENT, ENOMEM, ENOTDIR};

    use super::*;

    /// The result if the kernel gives these errors one after the other (0: none), and how often it was asked.
    fn asked(errors: &[i32]) -> (Option<()>, usize) {
        let left = RefCell::new(errors.iter());
        let ask = || match left.borrow_mut().next() {
            Some(0) => Ok(()),
            errno => Err(io::Error::from_raw_os_error(*errno.expect("asked no more often"))),
        };
        let found = examine(Path::new("/x"), ask);
        (found, errors.len() - left.borrow().len())
    }

    #[test]
    fn an_error_of_the_moment_is_no_absence() {
        assert_eq!(asked(&[0]), (Some(()), 1));
        assert_eq!(asked(&[EMFILE, 0]), (Some(()), 2));
        assert_eq!(asked(&[ENOMEM, ENOENT]), (None, 2));
        assert_eq!(asked(&[EIO, EIO]), (None, 2));
        for absent in [ENOENT, ENOTDIR] {
            assert_eq!(asked(&[absent]), (None, 1));
        }
    }
}

mod reading_tests {
    use super::*;

    /// Gives at most `piece` bytes at a time, and counts how often it is asked.
    struct Pieces<'a> {
        left: &'a [u8],
        piece: usize,
        asked: usize,
    }

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.asked += 1;
            let length = self.piece.min(buffer.len());
            self.left.read(&mut buffer[..length])
        }
    }

    #[test]
    fn a_file_is_read_whole_whatever_its_length_was() {
        let whole = vec![b'x'; 70_000];
        for (length, most, piece, expected, asked) in [
            // As long as it was, at once and in pieces.
            (70_000, 1 << 20, usize::MAX, 70_000, 1),
            (70_000, 1 << 20, 40_000, 70_000, 2),
            // It has grown, or its length was not known; it has been cut.
            (69_999, 1 << 20, usize::MAX, 70_000, 2),
            (0, 1 << 20, 50_000, 70_000, 8),
            (80_000, 1 << 20, usize::MAX, 70_000, 2),
            // It is too long.
            (70_000, 69_999, usize::MAX, 70_000, 1),
        ] {
            let mut file = Pieces { left: &whole, piece, asked: 0 };
            let read = regular_file(&mut file, length, most).unwrap();
            assert_eq!(read.len(), expected, "{length} {most} {piece}");
            assert!(file.asked <= asked, "{length} {most} {piece}: {} reads", file.asked);
        }
    }
}

mod atomic_tests {
    use super::*;

    #[test]
    fn keeps_the_mode_of_an_existing_file_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_of_our_own_gets_its_mode_whatever_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger.json");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        replace_own(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    }

    #[test]
    fn a_file_that_cannot_be_synced_is_not_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.json");
        fs::write(&path, "old").unwrap();
        let full = |_: &File| Err(io::Error::from(io::ErrorKind::StorageFull));
        write_and_rename(&path, |_| Ok(()), b"new", full).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        write_and_rename(&path, |_| Ok(()), b"new", File::sync_all).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
    }

    #[test]
    fn sweeps_only_files_of_dead_processes() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let ours = format!(".a.json.{}-7.tmp", std::process::id());
        let left = format!(".a.json.{}-7.tmp", child.id());
        let foreign = ["a.json.1.tmp", ".a.json.tmp", "a.json", ".a.json.1-x.tmp", ".a.json.1.tmp"];
        for name in foreign.into_iter().chain([ours.as_str(), left.as_str()]) {
            fs::write(dir.path().join(name), "").unwrap();
        }
        sweep(dir.path());
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let mut kept = [&foreign[..], &[ours.as_str()]].concat();
        kept.sort_unstable();
        assert_eq!(names, kept);
    }

    /// Threads of one process write the same file: the content of the last one is there, complete.
    #[test]
    fn threads_do_not_share_a_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::thread::scope(|scope| {
            for byte in b'a'..b'e' {
                let path = &path;
                scope.spawn(move || (0..100).for_each(|_| replace(path, &vec![byte; 9999], 0o644).unwrap()));
            }
        });
        let content = fs::read(&path).unwrap();
        assert!(content.len() == 9999 && content.iter().all(|byte| *byte == content[0]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn replaces_a_symbolic_link_and_not_its_target() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "untouched").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new", 0o644).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"untouched");
        assert_eq!(fs::read(&link).unwrap(), b"new");
        assert_eq!(fs::metadata(&link).unwrap().mode() & 0o7777, 0o644);
    }
}

mod trusted_tests {
    use nix::unistd::Uid;

    use super::*;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_directory_that_another_user_could_exchange_is_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let (above, state) = (dir.path().join("a"), dir.path().join("a/sublet"));
        make_trusted_directory(&state).unwrap();
        assert_eq!(distrust(&state), None);
        mode(&above, 0o777);
        let uid = nix::unistd::geteuid();
        let refused = |state: &Path, uid: Uid, mode: &str| {
            let expected = format!(
                "others may write to {}, which is above it, and could replace it (uid {uid}, mode {mode})",
                above.display()
            );
            assert_eq!(make_trusted_directory(state).unwrap_err(), expected);
            assert_eq!(distrust(state), Some(expected));
        };
        refused(&state, uid, "777");
        assert!(make_trusted_directory(&above.join("new/sublet")).is_err() && !above.join("new").exists());
        mode(&above, 0o775);
        refused(&state, uid, "775");
        mode(&above, 0o1777);
        make_trusted_directory(&state).unwrap();
        // By way of a link, in a directory that only we may write to.
        let linked = dir.path().join("link/sublet");
        std::os::unix::fs::symlink(&above, dir.path().join("link")).unwrap();
        make_trusted_directory(&linked).unwrap();
        mode(&above, 0o777);
        refused(&linked, uid, "777");
        if uid.is_root() {
            for mode in [0o755, 0o1777] {
                super::trusted_tests::mode(&above, mode);
                std::os::unix::fs::chown(&above, Some(4321), None).unwrap();
                refused(&state, Uid::from_raw(4321), &format!("{mode:o}"));
            }
            std::os::unix::fs::chown(&above, Some(0), None).unwrap();
        }
        mode(&above, 0o755);
        // The link of somebody else in a sticky directory, also where another link leads to it.
        if uid.is_root() {
            let sticky = dir.path().join("sticky");
            fs::create_dir(&sticky).unwrap();
            mode(&sticky, 0o1777);
            std::os::unix::fs::symlink(&above, sticky.join("theirs")).unwrap();
            std::os::unix::fs::symlink("sticky/theirs", dir.path().join("ours")).unwrap();
            for linked in ["sticky/theirs/sublet", "ours/sublet"].map(|below| dir.path().join(below)) {
                make_trusted_directory(&linked).unwrap();
                std::os::unix::fs::lchown(sticky.join("theirs"), Some(4321), None).unwrap();
                let refused = make_trusted_directory(&linked).unwrap_err();
                assert!(refused.contains("sticky/theirs, which is above it"), "{refused}");
                std::os::unix::fs::lchown(sticky.join("theirs"), Some(0), None).unwrap();
            }
        }
        mode(&state, 0o775);
        assert!(
            make_trusted_directory(&state).unwrap_err().starts_with("others than its owner may write to it")
        );
        assert_eq!(distrust(&dir.path().join("none")), None);
    }

    #[test]
    fn a_directory_that_a_umask_closed_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("a/b");
        make_trusted_directory(&state).unwrap();
        let modes =
            || [dir.path().join("a"), state.clone()].map(|dir| fs::metadata(dir).unwrap().mode() & 0o7777);
        assert_eq!(modes(), [0o755, 0o755]);
        mode(&state, 0o700);
        make_trusted_directory(&state).unwrap();
        assert_eq!(modes(), [0o755, 0o755]);
    }

    #[test]
    fn a_file_is_believed_by_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        assert!(read_trusted(&path, 9).unwrap().is_none());
        fs::write(&path, "content").unwrap();
        mode(&path, 0o644);
        assert_eq!(read_trusted(&path, 9).unwrap().unwrap().unwrap(), b"content");
        let why = |path: &Path, largest| read_trusted(path, largest).unwrap().unwrap().unwrap_err();
        assert_eq!(why(&path, 6), "it has 7 bytes");
        mode(&path, 0o664);
        assert_eq!(why(&path, 9), "others than its owner may write to it (mode 664)");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert_eq!(why(&link, 9), "it is not a regular file");
        assert_eq!(why(dir.path(), 9), "it is not a regular file");
        let pipe = dir.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(why(&pipe, 9), "it is not a regular file");
        assert_eq!(read_if_trusted(&pipe, 9), None);
    }

    #[test]
    fn a_history_that_is_not_understood_is_put_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.json");
        let history = || read_history::<Vec<u32>>(&path, 99);
        assert!(history().unwrap().is_empty());
        fs::write(&path, "[1,2]").unwrap();
        assert_eq!(history().unwrap(), [1, 2]);
        let newer = r#"{"schema":"x/9","all":[1,2]}"#;
        fs::write(&path, newer).unwrap();
        assert!(history().unwrap().is_empty());
        assert!(!path.exists());
        assert_eq!(fs::read_to_string(dir.path().join("h.json.aside")).unwrap(), newer);
    }

    #[test]
    fn a_history_that_cannot_be_read_is_not_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let unreadable = dir.path().join("x".repeat(300));
        assert!(read_history::<Vec<u32>>(&unreadable, 99).is_err());
    }
}
