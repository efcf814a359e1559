//! Tests of the store: many processes that crash, bad files, other boots, a real container.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::fixture::lease;
use super::*;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::place::accounts_tests::{assert_accounts, lease_of};
use crate::place::fixture::{GIB, device, host, request};
use crate::request::Request;
use crate::share::Memory;

type Nothing = std::convert::Infallible;

fn look(store: &Store) -> (Ledger, Freed) {
    let (ledger, freed) = store.update(|ledger| Ok::<_, Nothing>(ledger.clone())).unwrap();
    (ledger.unwrap(), freed)
}

fn mine(n: u64) -> Lease {
    Lease { owner: Process::current().unwrap(), ..lease(n, "GPU-0") }
}

#[test]
fn the_directory_and_its_files_have_the_modes_of_the_contract() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("a/sublet");
    let store = Store::open(&state).unwrap();
    assert!(store.read().unwrap().leases.is_empty());
    assert_eq!(fs::read_dir(&state).unwrap().count(), 0, "reading leaves nothing behind");
    store.update(|ledger| ledger.insert(mine(1))).unwrap().0.unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&state), 0o755);
    assert_eq!(mode(&state.join("ledger.json")), 0o644);
    assert_eq!(mode(&state.join("lock")), 0o600);
    assert_eq!(store.read().unwrap().leases.len(), 1);
    fs::set_permissions(&state, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(Store::open(&state), Err(LedgerError::Directory { .. })));
    symlink(&state, dir.path().join("link")).unwrap();
    assert!(matches!(Store::open(&dir.path().join("link")), Err(LedgerError::Directory { .. })));
}

#[test]
fn a_failed_change_is_dropped_and_freed_leases_stay_freed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    store.update(|ledger| ledger.insert(lease(1, "GPU-0"))).unwrap().0.unwrap();
    let failing = |ledger: &mut Ledger| {
        ledger.drained.push("GPU-0".into());
        Err::<(), _>("no place")
    };
    let (outcome, freed) = store.update(failing).unwrap();
    assert_eq!((outcome, freed.len()), (Err("no place"), 1));
    let ledger = store.read().unwrap();
    assert!(ledger.leases.is_empty() && ledger.drained.is_empty());
}

#[test]
fn another_boot_leaves_only_peoples_decisions() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let old = Ledger {
        leases: vec![mine(1)],
        drained: vec!["GPU-3".into()],
        unexplained: vec!["GPU-4".into()],
        ..Ledger::empty("another boot")
    };
    fs::write(dir.path().join("ledger.json"), serde_json::to_vec(&old).unwrap()).unwrap();
    for ledger in [store.read().unwrap(), look(&store).0, store.read().unwrap()] {
        assert!(ledger.leases.is_empty() && ledger.unexplained.is_empty());
        assert_eq!(ledger.drained, ["GPU-3"]);
    }
    let written = fs::read_to_string(dir.path().join("ledger.json")).unwrap();
    assert!(!written.contains("another boot"));
}

#[test]
fn a_bad_ledger_is_never_an_empty_one_and_is_kept_as_evidence() {
    let good = serde_json::to_string(&Ledger::empty("boot")).unwrap();
    let bad_key = good.replace(
        "\"daemons\":[]",
        r#""daemons":[{"key":"../x","devices":[],"process":null,"state":"down","default_limits":{"sm":0,"memory":"unlimited"},"answered_at":0}]"#,
    );
    let cases =
        [String::new(), good[..30].to_owned(), "[]".into(), good.replace("ledger/1", "ledger/0"), bad_key];
    for content in cases {
        let dir = tempfile::tempdir().unwrap();
        let (store, path) = (Store::open(dir.path()).unwrap(), dir.path().join("ledger.json"));
        fs::write(dir.path().join("ledger.json.corrupt-1"), "older").unwrap();
        fs::write(&path, &content).unwrap();
        assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })), "{content}");
        look(&store);
        store.read().unwrap();
        let aside: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_str().unwrap().contains("corrupt-"))
            .collect();
        assert_eq!(aside.len(), 1);
        assert_eq!(fs::read_to_string(&aside[0]).unwrap(), content);
    }
}

#[test]
fn links_strangers_files_and_cut_short_rebuilds_are_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let (store, path) = (Store::open(dir.path()).unwrap(), dir.path().join("ledger.json"));
    let elsewhere = dir.path().join("elsewhere");
    let planted = Ledger { drained: vec!["planted".into()], ..Ledger::empty("boot") };
    fs::write(&elsewhere, serde_json::to_vec(&planted).unwrap()).unwrap();
    symlink(&elsewhere, &path).unwrap();
    assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })));
    assert!(look(&store).0.drained.is_empty(), "the link was followed");
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })));
    look(&store);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })));
    look(&store);
    fs::remove_file(&path).unwrap();
    assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })), "a crash between moving and writing");
    look(&store);
    store.read().unwrap();
    if nix::unistd::geteuid().is_root() {
        nix::unistd::chown(&path, Some(4242.into()), None).unwrap();
        assert!(matches!(store.read(), Err(LedgerError::Corrupt { .. })));
        look(&store);
        assert_eq!(fs::metadata(&path).unwrap().uid(), 0);
    }
}

#[test]
fn a_ledger_of_another_schema_still_has_its_drained_devices() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let other = r#"{"schema":"sublet.ledger/0","boot_id":"x","drained":["GPU-7"],"leases":{}}"#;
    fs::write(dir.path().join("ledger.json"), other).unwrap();
    assert_eq!(look(&store).0.drained, ["GPU-7"]);
}

#[test]
fn a_newer_versions_ledger_or_its_copy_is_refused_and_stays_as_it_is() {
    let newer = r#"{"schema":"sublet.ledger/2","boot_id":"x","leases":{}}"#;
    for (newer_one, other) in [
        ("ledger.json", None),
        ("ledger.json", Some(("ledger.json.copy", newer))),
        ("ledger.json.copy", None),
        ("ledger.json.copy", Some(("ledger.json", "garbage"))),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let files = || {
            let names = ["ledger.json", "ledger.json.copy"].map(|name| dir.path().join(name));
            names.map(|path| fs::read_to_string(path).ok())
        };
        for (name, content) in [Some((newer_one, newer)), other].into_iter().flatten() {
            fs::write(dir.path().join(name), content).unwrap();
        }
        let before = files();
        let refused = store.update(|ledger| ledger.insert(mine(1))).unwrap_err();
        assert!(matches!(refused, LedgerError::Newer { .. }), "{refused}");
        let said = refused.to_string();
        assert!(said.contains(newer_one) && said.contains("sublet.ledger/2"), "{said}");
        assert_eq!(files(), before, "{newer_one}");
        assert!(store.read().is_err() && store.peek().is_err(), "{newer_one}");
    }
}

#[test]
fn a_process_that_no_lease_explains_closes_its_device_until_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    // The lock then names this process's namespaces: without that, only a host's first ones may rebuild.
    store.update(|ledger| ledger.insert(mine(1))).unwrap().0.unwrap();
    fs::remove_file(dir.path().join("ledger.json.copy")).unwrap();
    let mut child = Command::new("sleep").arg("600").spawn().unwrap();
    let mut inventory = host(vec![device(0), device(1)]);
    inventory.fingerprint.boot_id = store.read().unwrap().boot_id;
    inventory.devices[1].processes =
        vec![crate::place::fixture::process(i32::try_from(child.id()).unwrap(), 0, GIB)];
    fs::write(dir.path().join("inventory.json"), serde_json::to_vec(&inventory).unwrap()).unwrap();
    fs::write(dir.path().join("ledger.json"), "garbage").unwrap();
    assert_eq!(look(&store).0.unexplained, ["GPU-1"]);
    assert_eq!(look(&store).0.unexplained, ["GPU-1"]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(look(&store).0.unexplained.is_empty());
}

#[test]
fn the_lock_is_not_waited_for_forever() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    look(&store);
    let file = fs::File::open(dir.path().join("lock")).unwrap();
    let _held = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).unwrap();
    let before = Instant::now();
    let outcome = store.update(|_| Ok::<_, Nothing>(()));
    assert!(matches!(outcome, Err(LedgerError::Locked { .. })));
    assert!(before.elapsed() >= Duration::from_secs(5));
}

/// Many processes that hold it in turns are not one that hangs.
#[test]
fn the_lock_of_a_ledger_that_changes_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    look(&store);
    let file = fs::File::open(dir.path().join("lock")).unwrap();
    let held = nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusive).unwrap();
    let ledger = dir.path().join("ledger.json");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let held = held;
            for _ in 0..7 {
                std::thread::sleep(Duration::from_secs(1));
                fs::copy(&ledger, dir.path().join("next")).unwrap();
                fs::rename(dir.path().join("next"), &ledger).unwrap();
            }
            drop(held);
        });
        let before = Instant::now();
        store.update(|_| Ok::<_, Nothing>(())).unwrap().0.unwrap();
        assert!(before.elapsed() >= Duration::from_secs(6));
    });
}

fn two_gpus() -> Inventory {
    host(vec![device(0), device(1)])
}

/// One of many processes: takes and frees leases at random, and is killed in between. The next test starts it.
#[test]
#[ignore = "run by many_processes_that_crash_never_break_the_accounts"]
fn worker() {
    let store = Store::open(Path::new(&std::env::var("SUBLET_TEST_STATE").unwrap())).unwrap();
    let (inventory, config) = (two_gpus(), Config::default());
    let mut held: Vec<LeaseId> = Vec::new();
    loop {
        let id = LeaseId::random().unwrap();
        let n = u64::from_str_radix(id.as_str(), 16).unwrap();
        let wanted = Request {
            sm: Some(Percent::from_thousandths(5000 + (n % 40) as u32 * 1000)),
            memory: Some(Memory::Bytes((1 + n % 20) * GIB)),
            ..request(Mode::Mps)
        };
        let giving = (n % 3 == 0).then(|| held.pop()).flatten();
        let taken = store.update(|ledger| {
            assert_accounts(&inventory, ledger, &config);
            if let Some(id) = &giving {
                assert!(ledger.remove(id).is_some(), "a live lease was lost");
            }
            let placement = crate::place::place(&wanted, &id, &inventory, ledger, &config).map_err(|_| ())?;
            let owner = Process::current().unwrap();
            ledger.insert(Lease { owner, ..lease_of(n, placement) }).map_err(|_| ())?;
            assert_accounts(&inventory, ledger, &config);
            Ok::<_, ()>(())
        });
        match taken.unwrap().0 {
            Ok(()) => held.push(id),
            // The whole change was dropped, including the freed leases.
            Err(()) => held.extend(giving),
        }
    }
}

fn start_worker(state: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ledger::stress::worker", "--ignored", "--nocapture"])
        .env("SUBLET_TEST_STATE", state)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn many_processes_that_crash_never_break_the_accounts() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut workers: Vec<Child> = (0..4).map(|_| start_worker(dir.path())).collect();
    let mut most = 0;
    for round in 0..24 {
        std::thread::sleep(Duration::from_millis(40 + round * 7 % 30));
        let ledger = store.read().unwrap();
        assert_accounts(&two_gpus(), &ledger, &Config::default());
        most = most.max(ledger.leases.len());
        let mut victim = workers.remove(0);
        assert!(victim.try_wait().unwrap().is_none(), "a worker failed: {:?}", victim.wait_with_output());
        victim.kill().unwrap();
        victim.wait().unwrap();
        workers.push(start_worker(dir.path()));
    }
    for mut worker in workers {
        assert!(worker.try_wait().unwrap().is_none(), "a worker failed: {:?}", worker.wait_with_output());
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
    assert!(most > 1, "the workers did nothing");
    assert!(look(&store).0.leases.is_empty(), "the leases of the dead are freed");
    let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().contains("corrupt")));
}

/// Creates a bundle whose container sleeps; `None` if there is no busybox.
fn bundle(dir: &Path, annotations: &serde_json::Value) -> Option<()> {
    for inside in ["bin", "dev", "proc"] {
        fs::create_dir_all(dir.join("rootfs").join(inside)).unwrap();
    }
    fs::copy("/bin/busybox", dir.join("rootfs/bin/busybox")).ok()?;
    let namespaces: Vec<_> = ["pid", "mount"].iter().map(|kind| serde_json::json!({"type": kind})).collect();
    let spec = serde_json::json!({"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "annotations": annotations,
        "process": {"cwd": "/", "args": ["/bin/busybox", "sleep", "600"], "user": {"uid": 0, "gid": 0}},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": namespaces}});
    fs::write(dir.join("config.json"), spec.to_string()).ok()
}

/// crun refuses a host with cgroup v1 and v2, so it gets a cgroup2 mount of its own there.
fn command(runtime: &str) -> Command {
    if runtime == "runc" || Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return Command::new(runtime);
    }
    let script = "umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, runtime]);
    command
}

#[test]
fn a_real_runc_containers_lease_is_promoted_rebuilt_and_freed() {
    promoted_rebuilt_and_freed("runc");
}

#[test]
fn a_real_crun_containers_lease_is_promoted_rebuilt_and_freed() {
    promoted_rebuilt_and_freed("crun");
}

fn promoted_rebuilt_and_freed(runtime: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (root, bundle_dir) = (dir.path().join("root"), dir.path().join("bundle"));
    let name = format!("sublet-test-{runtime}-{}", std::process::id());
    let record = root.join(&name);
    let plain = lease(1, "GPU-0");
    let container = Container { record: record.clone(), id: name.clone(), ..plain.container.clone() };
    let taken = Lease { container, owner: Process::current().unwrap(), ..plain };
    let annotations = serde_json::json!({LEASE_ANNOTATION: taken.id.as_str(), LEASE_RECORD_ANNOTATION: taken.to_annotation(&dir.path().join("state"))});
    let run = |args: &[&str]| {
        let mut command = command(runtime);
        command.arg("--root").arg(&root).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    let usable = nix::unistd::geteuid().is_root()
        && run(&["--version"])
        && bundle(&bundle_dir, &annotations).is_some();
    if !usable {
        eprintln!("skipped: needs root, {runtime} and busybox");
        return;
    }
    let store = Store::open(&dir.path().join("state")).unwrap();
    store.update(|ledger| ledger.insert(taken)).unwrap().0.unwrap();
    assert!(run(&["create", "--bundle", bundle_dir.to_str().unwrap(), &name]), "{runtime} create failed");
    let created = look(&store).0.leases;
    assert_eq!(created[0].state, LeaseState::Active, "a created container exists, started or not");
    let init = created[0].init.clone().unwrap();
    assert!(init.process.is_alive() && init.pid_namespace != 0);
    assert!(
        init.cgroup.as_ref().is_some_and(|cgroup| runtime == "crun" || cgroup.is_dir()),
        "{:?}",
        init.cgroup
    );
    assert!(run(&["start", &name]));
    fs::write(dir.path().join("state/ledger.json"), "{\"schema\":").unwrap();
    let rebuilt = look(&store).0.leases;
    assert_eq!(rebuilt.len(), 1, "the root is no usual one: it was written down");
    assert_eq!((rebuilt[0].init.as_ref(), rebuilt[0].state), (Some(&init), LeaseState::Active));
    assert!(run(&["kill", &name, "KILL"]));
    let deadline = Instant::now() + Duration::from_secs(10);
    while !look(&store).0.leases.is_empty() {
        assert!(Instant::now() < deadline, "a dead container's lease is not freed");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(record.exists(), "freed before any delete");
    assert!(run(&["delete", "--force", &name]));
}
