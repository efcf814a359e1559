//! Tests of reading processes from the kernel.

use super::*;

mod process_tests {
    use super::*;

    #[test]
    fn a_process_without_memory_is_ending() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let process = Process::find(i32::try_from(child.id()).unwrap()).unwrap();
        assert_eq!(process.condition(), Condition::Running);
        child.kill().unwrap();
        // It stays a zombie until it is waited for.
        while process.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(process.condition(), Condition::Ending);
        child.wait().unwrap();
        assert_eq!(process.condition(), Condition::Ending, "it is gone");
    }

    #[test]
    fn a_process_is_ending_from_when_it_is_killed() {
        let killed = |_| {
            let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
            let process = Process::find(i32::try_from(child.id()).unwrap()).unwrap();
            child.kill().unwrap();
            let condition = process.condition();
            child.wait().unwrap();
            condition
        };
        // It mostly has not run since.
        assert_eq!((0..50).map(killed).find(|condition| *condition != Condition::Ending), None);
    }

    #[test]
    fn a_process_lives_until_its_last_thread_has_ended() {
        let mut started = fixture::without_first_thread();
        let process = started.process();
        assert!(process.is_alive() && Process::may_run(process.pid));
        assert_eq!(process.condition(), Condition::Running);
        assert!(process.has_environment("PATH", std::env::var_os("PATH").unwrap().as_ref()).unwrap());
        let held = process.hold().unwrap().unwrap();
        assert!(!pidfd_await_end(&held, std::time::Duration::ZERO));
        let other = Process { start_time: process.start_time + 1, ..process };
        assert!(other.hold().unwrap().is_none());
        kill(Pid::from_raw(process.pid), Signal::SIGSTOP).unwrap();
        while process.condition() != Condition::Stopped {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(process.is_alive());
        started.end();
        assert!(pidfd_await_end(&held, std::time::Duration::from_secs(60)));
        assert!(!process.is_alive() && !Process::may_run(process.pid), "a zombie holds nothing");
        assert!(process.condition() == Condition::Ending && process.hold().unwrap().is_none());
    }

    #[test]
    fn a_reused_pid_is_another_process() {
        let me = Process::current().unwrap();
        assert!(me.is_alive());
        assert!(!Process { start_time: me.start_time + 1, ..me }.is_alive());
    }
}

mod stat_tests {
    use super::*;

    #[test]
    fn reads_the_fields_behind_a_hostile_command_name() {
        let stat = |flags: u64, memory: u64, pending: u64| {
            let text = format!(
                "7 (a) R 1 (b) S 1 2 3 4 5 {flags} 7 8 9 10 11 12 13 14 15 16 17 18 4242 {memory} 21 22 23 24 25 26 27 {pending}"
            );
            Stat::parse(&text).unwrap()
        };
        let sleeps = stat(0x0040_0100, 20, 0x4_0000);
        assert_eq!((sleeps.state, sleeps.parent, sleeps.threads, sleeps.memory), ('S', 1, 17, 20));
        assert_eq!((sleeps.process, sleeps.is_killed), (Process { pid: 7, start_time: 4242 }, false));
        assert!(stat(0x0040_0500, 20, 0).is_killed && stat(0x0040_0100, 20, 0x100).is_killed);
    }

    #[test]
    fn a_zombie_has_ended_only_with_its_last_thread() {
        let ended = |state: char, threads: u64| {
            let process = Process { pid: 1, start_time: 1 };
            Stat { process, name: String::new(), state, parent: 1, memory: 0, is_killed: false, threads }
                .has_ended()
        };
        assert!(ended('Z', 1) && ended('Z', 0) && ended('X', 1));
        assert!(!ended('Z', 2) && !ended('S', 1));
    }

    #[test]
    fn a_thread_that_has_ended_is_in_every_root_of_v1() {
        assert!(is_in_every_root_of_v1("5:devices:/\n1:name=systemd:/\n0::/docker/c1\n"));
        for other in ["5:devices:/docker/c1\n1:name=systemd:/\n0::/\n", "0::/docker/c1\n", "0::/\n", ""] {
            assert!(!is_in_every_root_of_v1(other), "{other}");
        }
    }

    #[test]
    fn another_thread_shows_the_process_after_the_first_has_ended() {
        let started = crate::process::fixture::without_first_thread();
        let process = started.process();
        let shown = live_proc_dir_of(process.pid);
        assert!(fs::read_link(Path::new("/proc").join(process.pid.to_string()).join("exe")).is_err());
        assert!(fs::read_link(shown.join("exe")).is_ok(), "{}", shown.display());
        let own_table = fs::read_to_string("/proc/self/cgroup").unwrap();
        assert_eq!(cgroup_table(process.pid).unwrap(), own_table);
        let own = Path::new("/proc").join(std::process::id().to_string());
        assert_eq!(live_proc_dir(own.clone()), own);
    }
}

mod kernel_file_tests {
    use super::*;

    #[test]
    fn kernel_files_are_read_as_the_standard_library_reads_them() {
        for path in ["/proc/self/uid_map", "/proc/self/cgroup", "/proc/sys/kernel/random/boot_id"] {
            assert_eq!(kernel_file(path).unwrap(), std::fs::read_to_string(path).unwrap(), "{path}");
        }
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("long");
        std::fs::write(&long, "x".repeat(3 * PIECE)).unwrap();
        assert_eq!(kernel_file(&long).unwrap().len(), 3 * PIECE);
    }
}

mod user_namespace_tests {
    use super::*;

    #[test]
    fn an_id_map_that_cannot_be_read_is_no_hosts() {
        let map = |text: &str| Ok(text.to_owned());
        assert!(!is_nested_by(map("         0          0 4294967295\n")));
        assert!(!is_nested_by(Err(io::ErrorKind::NotFound.into())), "a kernel without user namespaces");
        for nested in ["0 1000 1\n1 100000 65536\n", "0 0 1\n", ""] {
            assert!(is_nested_by(map(nested)), "{nested}");
        }
        assert!(is_nested_by(Err(io::ErrorKind::PermissionDenied.into())));
    }
}

mod listens_tests {
    use super::*;

    #[test]
    fn a_socket_without_a_listener_is_nobody() {
        use nix::sys::socket::{Backlog, bind, listen};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        assert!(!listens(&path));
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        assert!(!listens(&path));
        listen(&fd, Backlog::new(4).unwrap()).unwrap();
        assert!(listens(&path));
        drop(fd);
        assert!(path.exists() && !listens(&path));
    }
}
