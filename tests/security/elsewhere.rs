//! C3: commands in other namespaces, which see other processes than the ledger names; and a ledger that is lost with
//! its copy. What cannot be known is not treated as gone or empty.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, bin_dir, eventually, is_alive, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "600"];
const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const QUARTER: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
const WHOLE: &[(&str, &str)] = &[("sublet.sm", "100")];

/// Whether `output` says that pids have another meaning in that namespace, or that this cannot be known with the host's
/// /proc.
fn says_elsewhere(output: &Output) -> bool {
    let said = stderr(output);
    said.contains("the ledger's process ids belong to ") || said.contains("is /proc mounted")
}

/// Ways into other namespaces: with a new /proc, with the host's /proc, with another clock.
const NAMESPACES: [&[&str]; 3] =
    [&["--pid", "--fork", "--mount-proc"], &["--pid", "--fork"], &["--time", "--boottime", "5000", "--fork"]];

/// A sublet program in those namespaces.
fn elsewhere(world: &World, namespaces: &[&str], program: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(namespaces).arg(bin_dir().join(program)).env("SUBLET_CONFIG", &world.config);
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// If the kernel lacks such namespaces, no process can be in them.
fn can(namespaces: &[&str]) -> bool {
    Command::new("unshare").args(namespaces).arg("true").status().is_ok_and(|status| status.success())
}

fn runtime(bundle: &Bundle<'_>, namespaces: &[&str]) -> Command {
    let mut command = elsewhere(bundle.world(), namespaces, "sublet-runtime");
    command.arg("--root").arg(bundle.world().runtime_root());
    command
}

#[test]
fn c3_in_other_namespaces_nothing_is_changed() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("first", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    let leases = world.leases();
    let (id, device) =
        (leases[0]["id"].as_str().expect("an id"), leases[0]["device"].as_str().expect("a GPU"));
    let daemons = world.daemon_pids("");
    let file = world.state_dir().join("ledger.json");
    let ledger = std::fs::read(&file).expect("the ledger");
    // Of a process that runs, and is not seen there.
    let writing = world.state_dir().join(format!(".names.json.{}-0.tmp", std::process::id()));
    std::fs::write(&writing, "").expect("a file");
    let changing: [&[&str]; 7] = [
        &["gc"],
        &["gc", "--rebuild"],
        &["refresh"],
        &["drain", "0"],
        &["lease", "release", "--force", id],
        &["mps", "stop", "--force", device],
        &["serve"],
    ];
    for namespaces in NAMESPACES.into_iter().filter(|namespaces| can(namespaces)) {
        for arguments in changing {
            let done = elsewhere(&world, namespaces, "sublet").args(arguments).output().expect("unshare");
            assert!(!done.status.success(), "{namespaces:?} {arguments:?}: {done:?}");
            assert!(says_elsewhere(&done), "{namespaces:?} {arguments:?}: {done:?}");
        }
        let status = elsewhere(&world, namespaces, "sublet").args(["status", "--format", "json"]).output();
        let status = status.expect("unshare");
        assert!(status.status.success() && says_elsewhere(&status), "{namespaces:?}: {status:?}");
        let told: Value = serde_json::from_slice(&status.stdout).expect("JSON");
        let unknown =
            json!({"memory_bytes": null, "processes": null, "sm_percent": null, "server_sm_percent": null});
        let mut shown = leases.clone();
        shown[0]["used"] = unknown;
        assert_eq!(
            told["leases"].as_array(),
            Some(&shown),
            "what is used is not known there: {namespaces:?}"
        );
        let other = world.bundle("other", &[("sublet.sm", "10")], SLEEP);
        other.write();
        let mut create = runtime(&other, namespaces);
        let create =
            create.args(["create", "--bundle"]).arg(&other.dir).arg("other").output().expect("unshare");
        assert!(!create.status.success() && says_elsewhere(&create), "{namespaces:?}: {create:?}");
        assert_eq!(other.config(), other.spec, "{namespaces:?}");
        assert_eq!(std::fs::read(&file).expect("the ledger"), ledger, "{namespaces:?}");
        assert_eq!(world.daemon_pids(""), daemons, "{namespaces:?}");
        assert_eq!(world.leases(), leases, "{namespaces:?}");
        assert!(writing.exists(), "{namespaces:?}");
    }
    std::fs::remove_file(&writing).expect("it is there");
    bundle.down();
    world.assert_empty();
}

#[test]
fn c3_a_container_is_deleted_in_other_namespaces_and_its_lease_left_to_the_host() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for namespaces in NAMESPACES.into_iter().filter(|namespaces| can(namespaces)) {
        let bundle = world.bundle("first", QUARTER, SLEEP);
        bundle.up();
        assert_eq!(world.leases().len(), 1);
        assert!(bundle.kill("KILL").ok);
        let pid = Pid::from_raw(bundle.pid());
        assert!(eventually(|| !is_alive(pid)), "the container's process ends");
        let ledger = std::fs::read(world.state_dir().join("ledger.json")).expect("the ledger");
        let deleted = runtime(&bundle, namespaces).args(["delete", "first"]).output().expect("unshare");
        assert!(deleted.status.success() && says_elsewhere(&deleted), "{namespaces:?}: {deleted:?}");
        assert!(!world.runtime_root().join("first").exists(), "{namespaces:?}: its record is gone");
        assert_eq!(std::fs::read(world.state_dir().join("ledger.json")).expect("the ledger"), ledger);
        world.assert_empty();
    }
}

#[test]
fn c3_an_empty_ledger_is_anybodys() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for namespaces in NAMESPACES.into_iter().filter(|namespaces| can(namespaces)) {
        let gc = elsewhere(&world, namespaces, "sublet").arg("gc").output().expect("unshare");
        // With the host's /proc, sublet cannot know this.
        assert!(gc.status.success() || says_elsewhere(&gc), "{namespaces:?}: {gc:?}");
        let bundle = world.bundle("first", QUARTER, SLEEP);
        bundle.up();
        bundle.down();
        world.assert_empty();
    }
}

/// Removes these files from the state directory.
fn lose(world: &World, names: &[&str]) {
    for name in names {
        let path = world.state_dir().join(name);
        let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    }
}

/// A request for a whole GPU is refused beside the running container, because of `why`.
fn assert_refused(world: &World, why: &str) {
    let refused = world.bundle("other", WHOLE, SLEEP).create();
    assert!(!refused.ok && refused.stderr.contains(why), "{why}: {refused:?}");
}

/// What is lost with its copy and its lock may have been replaced: nothing is given before root gives it up.
fn rebuild(world: &World) {
    assert_refused(world, "again, and sublet goes on");
    let rebuilt = world.sublet(&["gc", "--rebuild"]);
    assert!(rebuilt.status.success(), "{rebuilt:?}");
}

#[test]
fn c3_a_ledger_that_is_gone_with_its_copy_is_rebuilt_from_what_is_left() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("first", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    let leases = world.leases();
    let daemon = daemon(&world);
    let files = ["ledger.json", "ledger.json.copy"];
    for more in [&[][..], &["mps-nothing", "inventory.json"]] {
        lose(&world, &[&files[..], more].concat());
        assert_refused(&world, "75");
        assert_eq!(world.leases(), leases, "{more:?}");
    }
    lose(&world, &["ledger.json", "ledger.json.copy", "lock"]);
    rebuild(&world);
    assert_refused(&world, "75");
    assert_eq!(world.leases(), leases);
    // Without the list of roots, the runtime's record is found through another container in the same root.
    lose(&world, &["ledger.json", "ledger.json.copy", "roots"]);
    assert_refused(&world, "75");
    assert_eq!(world.leases(), leases);
    assert!(is_alive(daemon));
    bundle.down();
    world.assert_empty();
}

/// Checks it with a container that computes, and with one that does not; and where the daemon's directory is gone, so that
/// it cannot be asked.
#[test]
fn c3_after_a_loss_a_daemon_whose_container_nobody_knows_is_left_alone_and_closes_its_gpu() {
    if skip_unless_root() {
        return;
    }
    for (program, more) in [(HOLD, None), (SLEEP, None), (HOLD, Some("mps")), (SLEEP, Some("mps"))] {
        let world = World::simulated("h200", "");
        let bundle = world.bundle("first", QUARTER, program);
        bundle.up();
        if program == HOLD {
            bundle.event("info");
        }
        let daemon = daemon(&world);
        lose(&world, &["ledger.json", "ledger.json.copy", "roots", "lock", more.unwrap_or("lock")]);
        let other = world.bundle("other", WHOLE, SLEEP);
        other.write();
        for why in ["sublet gc --rebuild", "the ledger was lost"] {
            let mut create = world.command("sublet-runtime");
            create.arg("--root").arg(world.dir.path().join("another")).args(["create", "--bundle"]);
            // Output goes to a file, because a container that is created in spite of the error would keep a pipe open.
            let said = std::fs::File::create(other.dir.join("said")).expect("a file");
            let create = create.arg(&other.dir).arg("other").stdin(Stdio::null()).stdout(Stdio::null());
            let refused = create.stderr(said).status().expect("it runs");
            let said = std::fs::read_to_string(other.dir.join("said")).expect("what it said");
            assert!(!refused.success() && said.contains(why), "{program:?} {more:?}: {refused}: {said}");
            let rebuilt = world.sublet(&["gc", "--rebuild"]);
            assert!(rebuilt.status.success(), "{program:?} {more:?}: {rebuilt:?}");
            assert!(is_alive(daemon), "{program:?} {more:?}: it serves the container still");
        }
        bundle.down();
        if more.is_some() {
            let key = world.status()["mps"][0]["key"].as_str().expect("a daemon").to_owned();
            assert!(world.sublet(&["mps", "stop", "--force", &key]).status.success());
        }
        let later = world.bundle("later", QUARTER, SLEEP);
        let mut said = Vec::new();
        let opened = eventually(|| {
            let create = later.create();
            said.push(create.stderr);
            create.ok
        });
        assert!(opened, "{said:?} {}", world.status());
        later.down();
        world.assert_empty();
    }
}

/// The MPS daemon in the ledger.
fn daemon(world: &World) -> Pid {
    let ledger = std::fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
    let ledger: Value = serde_json::from_slice(&ledger).expect("JSON");
    let daemon = ledger["daemons"][0]["process"]["pid"].as_i64().expect("an MPS daemon");
    Pid::from_raw(i32::try_from(daemon).expect("a pid"))
}

#[test]
fn c3_after_a_loss_a_context_that_nobody_explains_closes_its_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut late = world.bundle("late", &[("sublet.mode", "time-slice"), ("sublet.gpu", "0")], HOLD);
    late.plain = true;
    let env = ["PATH=/usr/bin:/bin".to_owned(), format!("SUBLET_CONFIG={}", world.config.display())];
    let hook = json!([{"path": bin_dir().join("sublet-hook"), "args": ["sublet-hook", "createRuntime"], "env": env}]);
    late.spec["hooks"]["createRuntime"] = hook;
    late.up();
    late.event("info");
    // No record of a runtime names its lease, it has no daemon, and the inventory is older than the container.
    lose(&world, &["ledger.json", "ledger.json.copy"]);
    assert_refused(&world, "the ledger was lost");
    late.down();
    let bundle = world.bundle("other", WHOLE, SLEEP);
    assert!(eventually(|| bundle.create().ok), "it opens when that is gone");
    bundle.down();
    world.assert_empty();
}

#[test]
fn c3_without_a_trace_it_is_the_first_start_and_the_hosts_processes_block_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nexclusive_compute_mode = \"never\"\n");
    let mut stranger = world.stranger();
    let bundle = world.bundle("first", QUARTER, SLEEP);
    bundle.up();
    bundle.down();
    stranger.kill().expect("it is ours");
    stranger.wait().expect("it is ours");
    world.assert_empty();
}

#[test]
fn c3_a_container_whose_record_could_not_be_found_again_gets_no_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("first", QUARTER, SLEEP);
    bundle.write();
    let root = world.dir.path().join("loop");
    std::os::unix::fs::symlink(&root, &root).expect("a loop");
    let (long, own) = ("a".repeat(1000), world.runtime_root());
    // If the root directory does not exist yet, the low-level runtime reports it.
    let (runtimes, ours) = ("", "fix: use another --root");
    for (root, id, why) in [(&own, long.as_str(), runtimes), (&own, &long, ours), (&root, "first", ours)] {
        let mut create = world.command("sublet-runtime");
        let create =
            create.arg("--root").arg(root).args(["create", "--bundle"]).arg(&bundle.dir).arg(id).output();
        let create = create.expect("it runs");
        assert!(!create.status.success() && stderr(&create).contains(why), "{id}: {create:?}");
        world.assert_empty();
        bundle.write();
        std::fs::create_dir_all(&own).expect("a root");
    }
}

#[test]
fn c3_a_container_that_its_runtime_forgot_at_once_keeps_its_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("forgotten-at-once", QUARTER, SLEEP);
    bundle.up();
    let pid = Pid::from_raw(bundle.pid());
    // As runc's delete in another time namespace does. No command has looked at the lease before.
    let (record, aside) = (world.runtime_root().join("forgotten-at-once"), world.dir.path().join("aside"));
    std::fs::rename(&record, &aside).expect("moved");
    let gc = world.sublet(&["gc"]);
    assert!(gc.status.success() && stderr(&gc).contains("in its cgroup"), "{gc:?}");
    let leases = world.leases();
    let kept = world.sublet(&["lease", "release", leases[0]["id"].as_str().expect("an id")]);
    assert!(stderr(&kept).contains("no record of it, but"), "{kept:?}");
    assert_eq!(world.leases(), leases);
    let all = world.bundle("other", &[("sublet.sm", "95")], SLEEP);
    assert!(all.create().stderr.contains("no room"), "its share is not anybody else's");
    kill(pid, Signal::SIGKILL).expect("killed");
    assert!(eventually(|| !is_alive(pid)), "the container's process ends");
    assert_eq!(world.leases(), Vec::<Value>::new());
    std::fs::rename(&aside, &record).expect("put back");
    bundle.down();
    world.assert_empty();
}

#[test]
fn c3_a_lease_whose_record_cannot_be_read_any_more_is_kept_until_it_is_released() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("first", QUARTER, SLEEP);
    bundle.up();
    let (root, aside) = (world.runtime_root(), world.dir.path().join("aside"));
    std::fs::rename(&root, &aside).expect("moved");
    std::os::unix::fs::symlink(&root, &root).expect("a loop");
    let gc = world.sublet(&["gc"]);
    assert!(gc.status.success() && stderr(&gc).contains("lease release --force"), "{gc:?}");
    let leases = world.leases();
    let id = leases[0]["id"].as_str().expect("an id");
    let kept = stderr(&world.sublet(&["lease", "release", id]));
    for said in
        ["record", &root.to_string_lossy(), "symbolic links", "the process that started it", "is gone"]
    {
        assert!(kept.contains(said), "{said}: {kept}");
    }
    assert_eq!(world.leases(), leases);
    put_back(&root, &aside);
    assert_eq!(world.leases()[0]["state"], "active", "and nothing was lost");
    bundle.down();
    world.assert_empty();
    // The user can confirm that the container has ended.
    let bundle = world.bundle("second", QUARTER, SLEEP);
    bundle.up();
    std::fs::rename(&root, &aside).expect("moved");
    std::os::unix::fs::symlink(&root, &root).expect("a loop");
    let leases = world.leases();
    let released = world.sublet(&["lease", "release", "--force", leases[0]["id"].as_str().expect("an id")]);
    assert!(released.status.success(), "{released:?}");
    assert_eq!(world.leases(), Vec::<Value>::new());
    put_back(&root, &aside);
    bundle.down();
    world.assert_empty();
}

fn put_back(root: &Path, aside: &Path) {
    std::fs::remove_file(root).and_then(|()| std::fs::rename(aside, root)).expect("put back");
}

#[test]
fn c5_a_container_that_nobody_waits_for_any_more_is_not_made() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let holder = world.bundle("holder", &[("sublet.mode", "exclusive")], SLEEP);
    holder.up();
    let waiting = world.bundle("waiting", &[("sublet.sm", "25"), ("sublet.wait", "60s")], SLEEP);
    waiting.write();
    // A caller that waits for the shim, as engines do.
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", "\"$@\"; exit $?", "sh"]).arg(bin_dir().join("sublet-runtime"));
    shell
        .env("SUBLET_CONFIG", &world.config)
        .arg("--root")
        .arg(world.runtime_root())
        .args(["create", "--bundle"]);
    let said = std::fs::File::create(waiting.dir.join("said")).expect("a file");
    let mut shell = shell.arg(&waiting.dir).arg("waiting").stderr(said).spawn().expect("sh runs");
    let pid = shell.id();
    let children = || std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    assert!(eventually(|| !children().is_empty()));
    let shim = Pid::from_raw(children().trim().parse().expect("one child"));
    std::thread::sleep(std::time::Duration::from_millis(500));
    kill(Pid::from_raw(i32::try_from(pid).expect("a pid")), Signal::SIGKILL).expect("it runs");
    shell.wait().expect("it is ours");
    assert!(eventually(|| kill(shim, None).is_err()), "it waits on");
    let said = std::fs::read_to_string(waiting.dir.join("said")).expect("what it said");
    assert!(said.contains("has ended, so it is not created"), "{said}");
    holder.down();
    world.assert_empty();
    assert!(!world.runtime_root().join("waiting").exists());
}
