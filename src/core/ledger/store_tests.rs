//! Tests of the ledger's file and texts, of which file is known, of namespaces, and of whose the state is.

use super::*;

mod known_tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;

    use super::Store;

    #[test]
    fn no_later_ledger_has_the_inode_of_one_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = (dir.path().join("ledger.json"), || Store::open(dir.path()).unwrap());
        store().change(|ledger| ledger.drained.push("GPU-0".into())).unwrap();
        let reader = store();
        reader.peek().unwrap();
        let known = fs::metadata(&path).unwrap().ino();
        for n in 1..20 {
            store().change(|ledger| ledger.drained[0] = format!("GPU-{}", n % 2)).unwrap();
            assert_ne!(fs::metadata(&path).unwrap().ino(), known, "after {n} changes");
            assert_eq!(reader.known_inode(), Some(known));
        }
    }

    #[test]
    fn a_written_ledger_is_known_until_another_store_writes() {
        let dir = tempfile::tempdir().unwrap();
        let (path, store) = (dir.path().join("ledger.json"), Store::open(dir.path()).unwrap());
        let is_known = || store.known_inode() == Some(fs::metadata(&path).unwrap().ino());
        store.change(|ledger| ledger.drained.push("GPU-a".into())).unwrap();
        assert!(is_known());
        let other = Store::open(dir.path()).unwrap();
        other.change(|ledger| ledger.drained[0] = "GPU-b".into()).unwrap();
        assert!(!is_known());
        assert_eq!(store.peek().unwrap().drained, ["GPU-b"]);
        assert!(is_known());
        // In its place, by a person with an editor.
        let text = fs::read_to_string(&path).unwrap().replace("GPU-b", "GPU-other");
        fs::write(&path, text).unwrap();
        assert_eq!(store.peek().unwrap().drained, ["GPU-other"]);
    }
}

mod namespaces_tests {
    use super::*;
    use crate::ledger::fixture::lease;
    use crate::ledger::{Lease, Store};

    const HERE: Namespaces = Namespaces { pid: 5, time: 6 };

    fn ledger(leases: Vec<Lease>, namespaces: Option<Namespaces>) -> Ledger {
        Ledger { namespaces, leases, ..Ledger::empty("boot") }
    }

    #[test]
    fn process_ids_of_other_namespaces_are_not_believed() {
        let held = || vec![lease(1, "GPU-a")];
        let moved =
            [Namespaces { pid: 7, ..HERE }, Namespaces { time: 7, ..HERE }, Namespaces { time: 0, ..HERE }];
        assert!(ledger(held(), Some(HERE)).check_namespaces(HERE).is_ok());
        for theirs in moved {
            let checked = ledger(held(), Some(theirs)).check_namespaces(HERE);
            assert!(matches!(checked, Err(LedgerError::Elsewhere { .. })), "{theirs}");
            assert!(ledger(Vec::new(), Some(theirs)).check_namespaces(HERE).is_ok(), "it names no process");
        }
    }

    /// Whether anything of such a ledger still runs is only seen from a host's first namespaces, and only a person says
    /// that nothing does.
    #[test]
    fn a_ledger_of_namespaces_that_are_gone_is_refused_until_the_hosts_root_gives_it_up() {
        let dir = tempfile::tempdir().unwrap();
        let store = || Store::open(dir.path()).unwrap();
        let boot_id = store().peek().unwrap().boot_id;
        let nowhere = Namespaces { pid: 1, time: 0 };
        let left = Ledger {
            boot_id,
            drained: vec!["GPU-b".into()],
            ..ledger(vec![lease(1, "GPU-a")], Some(nowhere))
        };
        std::fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&left).unwrap()).unwrap();
        let refused = store().change(|_| ()).unwrap_err();
        assert!(refused.is_elsewhere() && refused.to_string().contains("sublet gc --rebuild"), "{refused}");
        let unknown = Ledger { namespaces: None, ..left.clone() };
        assert!(unknown.check_namespaces(Namespaces::current().unwrap()).unwrap_err().is_elsewhere());
        let given_up = store().rebuilding().change(|_| ());
        if Namespaces::current().unwrap().are_the_first() {
            given_up.unwrap();
            let now = store().read().unwrap();
            assert_eq!((now.leases.len(), &now.drained[..], now.lost), (0, &["GPU-b".to_owned()][..], true));
        } else {
            assert!(given_up.unwrap_err().is_elsewhere());
            assert_eq!(store().peek().unwrap(), left);
        }
    }
}

mod annotation_tests {
    use super::*;
    use crate::ledger::fixture::lease;
    use crate::process::Process;

    #[test]
    fn a_container_that_lives_has_not_ended() {
        let dir = tempfile::tempdir().unwrap();
        let held = lease(1, "GPU-a");
        let write = |process: Process| {
            let status = format!(r#"{{"pid":{},"process-start-time":{}}}"#, process.pid, process.start_time);
            std::fs::write(dir.path().join("status"), status).unwrap();
        };
        assert_eq!(Lease::read_ended(dir.path()), None);
        let config = serde_json::json!({"annotations": {"sublet.lease.record": held.to_annotation(Path::new(DEFAULT_STATE_DIR))}});
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let me = Process::current().unwrap();
        write(me);
        assert_eq!(Lease::read_ended(dir.path()), None);
        write(Process { start_time: 1, ..me });
        assert_eq!(Lease::read_ended(dir.path()), Some(held));
        assert_eq!(Lease::from_annotation("{}"), None);
    }
}

mod mount_points_tests {
    use std::path::Path;

    use super::*;
    use crate::ledger::fixture::lease;

    fn ledger(leases: u64) -> Ledger {
        let list = |n: u64| -> MountPoints { vec![format!("/lib/{}", n % 2).into(), "/b".into()].into() };
        let leases = (1..=leases).map(|n| Lease { mount_points: list(n), ..lease(n, "GPU-a") });
        Ledger { leases: leases.collect(), ..Ledger::empty("boot") }
    }

    #[test]
    fn the_text_has_each_list_once() {
        for (leases, lists) in [(0, 0), (1, 1), (9, 2)] {
            let mut ledger = ledger(leases);
            let before = ledger.clone();
            let written = ledger_text(&mut ledger).unwrap();
            assert_eq!(ledger, before, "as it was");
            let value: serde_json::Value = serde_json::from_slice(&written).unwrap();
            assert_eq!(value["mount_point_lists"].as_array().map_or(0, Vec::len), lists);
            let mut read = parse_ledger(&written, Path::new("")).unwrap();
            assert_eq!(read, before);
            assert_eq!(ledger_text(&mut read).unwrap(), written);
        }
    }

    #[test]
    fn an_annotation_has_the_files_themselves() {
        let lease = ledger(1).leases.remove(0);
        let text = lease.to_annotation(Path::new("/run/sublet"));
        assert_eq!(Lease::from_annotation(&text), Some(lease));
        let numbered = text.replace(r#"["/lib/1","/b"]"#, "0");
        assert_ne!(numbered, text);
        assert_eq!(Lease::from_annotation(&numbered), None);
    }

    #[test]
    fn a_number_without_a_list_is_no_ledger() {
        let written = ledger_text(&mut ledger(9)).unwrap();
        let written = String::from_utf8(written).unwrap();
        for (old, new) in [(r#""mount_points":1"#, r#""mount_points":2"#), (r#"["/lib/1","/b"]"#, "1")] {
            assert!(written.contains(old), "{written}");
            assert!(parse_ledger(written.replace(old, new).as_bytes(), Path::new("")).is_err(), "{new}");
        }
    }
}

mod stored_tests {
    use super::*;

    #[test]
    fn only_a_higher_number_of_our_schema_is_a_newer_version() {
        for (schema, newer) in [
            ("sublet.ledger/3", true),
            ("sublet.ledger/10", true),
            ("sublet.ledger/0", false),
            ("sublet.ledger/", false),
            ("sublet.ledger/-2", false),
            ("sublet.ledger", false),
            ("sublet.inventory/9", false),
            ("", false),
        ] {
            // Such a text may have nothing else in common with ours.
            let deep = format!(r#","leases":[],"x":{}{}"#, "[".repeat(200), "]".repeat(200));
            for rest in [
                r#","leases":{"a":7}"#,
                r#","leases":[],"x":1e999"#,
                &deep,
                r#","boot_id":"b","leases":[],"daemons":[],"compute_modes":[],"drained":[],"unexplained":[]"#,
            ] {
                let text = format!(r#"{{"schema":"{schema}"{rest}}}"#);
                let outcome = parse_ledger(text.as_bytes(), Path::new("l")).unwrap_err();
                let is_newer = matches!(&outcome, LedgerError::Newer { found, .. } if found == schema);
                assert_eq!(is_newer, newer, "{text}: {outcome:?}");
            }
        }
        let cut_off = parse_ledger(br#"{"schema":"sublet.ledger/3","leases":"#, Path::new("l"));
        assert!(matches!(cut_off, Err(LedgerError::Corrupt { .. })), "{cut_off:?}");
    }
}

mod remote_tests {
    use super::*;

    #[test]
    fn state_of_our_own_is_ours_to_change() {
        let dir = tempfile::tempdir().unwrap();
        let config = |dir: &Path| Config { state_dir: dir.to_owned(), ..Config::default() };
        assert!(!is_remote(&config(dir.path())));
        assert!(!is_remote(&config(&dir.path().join("not/yet"))));
    }
}
