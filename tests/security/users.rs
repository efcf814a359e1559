//! B11, B12, B15, B23 and C1: what users must not be able to do through `sublet serve` to each other and to the service.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use crate::two_users::{self, ALICE, BOB, HOLD, QUARTER, serving};
use serde_json::{Value, json};
use sublet_e2e::user::{Bundle, Holder, Host};
use sublet_e2e::{eventually, skip_unless_root, tree};

#[test]
fn b11_nobody_acts_on_what_is_somebody_elses() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let lease = host.leases()[0]["id"].clone();
    let alices = bundle.pid();
    // Bob knows Alice's lease, as every user can, and her container's process.
    let container = json!({"id": "mine", "bundle": bundle.dir, "record": bundle.dir.join("state/mine")});
    let record = bundle.dir.join("state/mine");
    let asks = [
        json!({"v": 1, "do": "bind", "lease": lease, "container": container, "pid": alices}),
        json!({"v": 1, "do": "hand-over", "lease": lease, "owner": alices}),
        json!({"v": 1, "do": "unmark", "lease": lease}),
        json!({"v": 1, "do": "end", "lease": lease}),
        json!({"v": 1, "do": "withdraw", "lease": lease}),
    ];
    for answer in host.say(BOB, &asks) {
        let reason = answer["refused"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("you hold no lease"), "{answer}");
    }
    let asks = [
        json!({"v": 1, "do": "ending", "id": "mine", "record": record}),
        json!({"v": 1, "do": "enter", "id": "mine", "record": record}),
    ];
    let answers = host.say(BOB, &asks);
    assert_eq!((&answers[0]["lease"], &answers[1]["done"]), (&Value::Null, &json!(false)));
    assert_eq!(host.leases()[0]["state"], "active");

    // Processes that are not Bob's: Alice's container, root's init, and none.
    let admit = |owner: i32| {
        json!({"v": 1, "do": "admit", "container": {"id": "b", "bundle": "/b", "rootfs": "/b/r", "record": "/r/b"},
            "owner": owner, "annotations": {"sublet.gpu": "0", "sublet.mode": "mps"}, "image":
            {"library_dir": null, "nix": false, "tmp_is_host": false, "created": [], "warnings": []}})
    };
    // (If not even root may inspect init, the message says that.)
    for (owner, why) in
        [(alices, "does not belong to uid 1001"), (1, "process 1"), (-1, "there is no process")]
    {
        let answer = &host.say(BOB, &[admit(owner)])[0];
        assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains(why), "{answer}");
    }
    // Bob's own lease cannot be bound to Alice's process either. It ends with Bob's process.
    let mut speaking = host.command(BOB, "speak");
    let mut speaking =
        speaking.arg(host.socket()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut answers = BufReader::new(speaking.stdout.take().expect("piped"));
    let mut ask = |line: &Value| {
        writeln!(speaking.stdin.as_mut().expect("piped"), "{line}").expect("it listens");
        let mut answer = String::new();
        answers.read_line(&mut answer).expect("an answer");
        serde_json::from_str::<Value>(&answer).expect("JSON")
    };
    let mut own = admit(0);
    own["owner"] = Value::Null;
    let bobs = ask(&own)["granted"]["lease"].clone();
    assert!(bobs.is_string());
    let bind = |pid: i32| json!({"v": 1, "do": "bind", "lease": bobs, "container": {"id": "b"}, "pid": pid});
    for pid in [alices, 1] {
        let answer = ask(&bind(pid));
        let reason = answer["refused"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("cannot be bound") && reason.contains(&format!("process {pid}")), "{answer}");
    }
    assert_eq!(host.leases().len(), 2);
    drop(speaking.stdin.take());
    speaking.wait().expect("it ends");
    assert!(eventually(|| host.leases().len() == 1), "the lease of a client that is gone");
    // Whom root's daemons serve, and where they run, is root's.
    let start = json!({"v": 1, "do": "start-daemon", "key": host.world.status()["mps"][0]["key"]});
    let answer = &host.say(BOB, &[start])[0];
    assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains("only for root"), "{answer}");
    // The owner cannot release the lease of a running container, and the attempt does not end the container.
    let end = json!({"v": 1, "do": "withdraw", "lease": lease});
    let answer = &host.say(ALICE, &[end])[0];
    assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains("still run"), "{answer}");
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn b11_no_path_of_a_users_is_opened_by_root() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let precious = host.world.dir.path().join("precious");
    std::fs::create_dir(&precious).expect("directory");
    std::fs::write(precious.join("empty"), "").expect("file");
    std::fs::write(precious.join(".x.999999999.tmp"), "").expect("file");
    let admit = json!({"v": 1, "do": "admit", "container":
        {"id": "b", "bundle": precious, "rootfs": precious, "record": precious},
        "annotations": {"sublet.gpu": "0"}, "image":
        {"library_dir": null, "nix": false, "tmp_is_host": false, "created": ["/empty"], "warnings": []}});
    let answer = &host.say(BOB, &[admit])[0];
    assert!(answer["granted"]["lease"].is_string(), "{answer}");
    // The owner's process is gone, so the next command releases the lease and would remove its files.
    assert!(eventually(|| host.leases().is_empty()));
    assert!(host.world.sublet(&["gc"]).status.success());
    assert!(precious.join("empty").exists() && precious.join(".x.999999999.tmp").exists());
    host.world.assert_empty();
}

/// Bob says that his container has the root filesystem of root's, and a volume on the same file system.
#[test]
fn b11_what_roots_container_left_is_removed_whatever_a_user_says_of_his() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.world.bundle("roots", QUARTER, HOLD);
    let rootfs = bundle.dir.join("rootfs");
    // Directories stay.
    let files = || {
        tree(&rootfs).into_iter().filter(|(_, (mode, _))| mode & 0o170_000 != 0o040_000).collect::<Vec<_>>()
    };
    let before = files();
    let device = std::fs::metadata(&rootfs).expect("a directory").dev();
    let mut told = admit(None);
    told["container"]["rootfs"] = json!(rootfs);
    told["image"]["volumes"] = json!([{"directory": rootfs, "device": device, "inode": 1, "files": ["x"]}]);
    let mut own = sleeper(&["--reuid=1001", "--regid=1001"]);
    told["owner"] = json!(pid(&own));
    told["annotations"] = json!({"sublet.gpu": "0", "sublet.mode": "mps"});
    let granted = &host.say(BOB, &[told])[0];
    assert!(granted["granted"]["lease"].is_string(), "{granted}");
    bundle.up();
    assert_ne!(files(), before, "there are mount points while it runs");
    bundle.down();
    assert_eq!((host.leases().len(), files()), (1, before));
    own.kill().and_then(|()| own.wait().map(drop)).expect("it ends");
    host.world.assert_empty();
}

/// A user takes a share, and starts no container.
#[test]
fn b23_a_share_that_is_never_bound_hides_nobody_and_is_not_kept() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let [mut own, mut second] = [(); 2].map(|()| sleeper(&["--reuid=1001", "--regid=1001"]));
    let granted = host.say(BOB, &[admit(Some(pid(&own)))]).remove(0);
    let lease = &granted["granted"]["lease"];
    assert!(lease.is_string(), "{granted}");
    let mut stranger = host.world.stranger();
    let seen =
        || host.events().iter().any(|event| event["offence"] == "stranger" && event["pid"] == stranger.id());
    assert!(eventually(seen), "{:?}", host.events());
    stranger.kill().and_then(|()| stranger.wait().map(drop)).expect("it ends");
    // The time that he has is that from the beginning.
    let until = || {
        let ledger = std::fs::read(host.world.state_dir().join("ledger.json")).expect("the ledger");
        let ledger: Value = serde_json::from_slice(&ledger).expect("JSON");
        ledger["leases"][0]["bind_by"].as_u64().expect("a time")
    };
    let before = until();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let hand_over = json!({"v": 1, "do": "hand-over", "lease": lease, "owner": pid(&second)});
    assert_eq!(host.say(BOB, &[hand_over])[0]["done"], true);
    assert_eq!(until(), before);
    for child in [&mut own, &mut second] {
        child.kill().and_then(|()| child.wait().map(drop)).expect("it ends");
    }
    host.world.assert_empty();
}

/// The service has no descriptor left, and who is connected waits for the ledger's lock, so that nobody can be closed.
#[test]
fn b12_without_descriptors_for_another_client_the_service_rests() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200");
    let log = host.world.dir.path().join("log");
    let mut serve = host.world.command("sublet");
    let serve = serve.arg("serve").stderr(std::fs::File::create(&log).expect("a file")).spawn();
    let served = host.serve.insert(serve.expect("it runs")).id().to_string();
    assert!(eventually(|| UnixStream::connect(host.socket()).is_ok()), "no socket");
    let limit = |most: &str| {
        let mut prlimit = std::process::Command::new("prlimit");
        let done = prlimit.args(["--pid", &served, &format!("--nofile={most}:")]).status();
        assert!(done.expect("prlimit runs").success());
    };
    let ask = |line: Value| {
        let mut stream = BufReader::new(UnixStream::connect(host.socket()).expect("it listens"));
        writeln!(stream.get_mut(), "{line}").expect("it is heard");
        stream
    };
    let answer = |mut stream: BufReader<UnixStream>| {
        let mut answer = String::new();
        stream.read_line(&mut answer).expect("an answer");
        answer
    };
    let path = host.world.state_dir().join("lock");
    let lock = std::fs::File::options().read(true).write(true).open(&path).expect("a lock");
    let lock = nix::fcntl::Flock::lock(lock, nix::fcntl::FlockArg::LockExclusive).expect("free");
    // Refused, once the ledger can be looked at.
    let mut much = admit(None);
    much["annotations"] = json!({"sublet.gpu": "0", "sublet.mode": "mps", "sublet.memory": "9000GiB"});
    let waits = ask(much);
    let is_lock = |fd: std::fs::DirEntry| std::fs::read_link(fd.path()).is_ok_and(|open| open == path);
    let fds = || std::fs::read_dir(format!("/proc/{served}/fd")).expect("/proc").flatten();
    assert!(eventually(|| fds().any(is_lock)), "it is not answered yet");
    limit("3");
    let late = ask(json!({"v": 1, "do": "status"}));
    let told = || std::fs::read_to_string(&log).expect("the log").matches("accept: ").count();
    assert!(eventually(|| told() > 0), "{}", std::fs::read_to_string(&log).expect("the log"));
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert!(told() < 100, "it has tried {} times", told());
    limit("512");
    drop(lock.unlock());
    assert!(answer(waits).contains("refused"));
    assert!(answer(late).contains("status"));
    host.world.assert_empty();
}

#[test]
fn b12_bad_lines_are_answered_and_the_next_one_too() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let status = json!({"v": 1, "do": "status"});
    let asks =
        [json!({}), json!({"v": 2, "do": "status"}), json!({"v": 1, "do": "admit"}), json!([]), status];
    let answers = host.say(ALICE, &asks);
    assert_eq!(answers.len(), 5);
    assert!(answers[..4].iter().all(|answer| answer["refused"]["reason"].is_string()), "{answers:?}");
    assert!(answers[1]["refused"]["reason"].as_str().unwrap_or_default().contains("version 2"));
    assert_eq!((&answers[4]["status"]["uid"], &answers[4]["status"]["leases"]), (&json!(ALICE), &json!([])));
    let long = json!({"v": 1, "do": "status", "x": "x".repeat(70_000)});
    let answer = &host.say(ALICE, &[long])[0];
    assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains("64 KiB"), "{answer}");
}

#[test]
fn b12_one_uid_holds_sixteen_connections() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let mut held = host.hold(ALICE, "hold", 20);
    let (turned_away, words) = held.turned_away();
    assert_eq!(turned_away, 4);
    assert!(words.contains("uid 1000 already has 16 connections to sublet serve"), "{words}");
    // Other users are served, and so is Alice once those connections have hung for a second.
    assert_eq!(host.say(BOB, &[json!({"v": 1, "do": "status"})])[0]["status"]["uid"], json!(BOB));
    let bundle = host.bundle(ALICE, "all-the-same", QUARTER, HOLD);
    bundle.up();
    bundle.down();
    drop(held);
    host.world.assert_empty();
}

/// `tests/bench/run hanging` measures the cost for other users.
#[test]
fn b12_hanging_connections_hold_nobody() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    // A thousand connections of 63 other users, one of which sends a byte a second, and sixteen of Alice's.
    let mut holders: Vec<Holder> = (0..63).map(|user| host.hold(20_000 + user, "hang", 16)).collect();
    holders.push(host.hold(19_999, "drip", 1));
    holders.push(host.hold(ALICE, "hold", 16));
    for holder in &mut holders {
        assert_eq!(holder.turned_away().0, 0);
    }
    let pid = host.serve.as_ref().expect("it runs").id();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("/proc").count();
    // On a busy machine the first connections may have hung so long that they were closed.
    assert!(open > 500, "{open}");
    for round in 0..3 {
        let bundle = host.bundle(ALICE, &format!("beside-{round}"), QUARTER, HOLD);
        bundle.up();
        bundle.down();
    }
    // Its own memory; how much of its program the kernel has mapped depends on the machine and the build.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("/proc");
    let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    let kib: u64 = own.trim().trim_end_matches("kB").trim().parse().expect("a number");
    assert!(kib < 16 << 10, "serve took {kib} KiB");
    drop(holders);
    host.world.assert_empty();
}

/// Bob's request for container `b`.
fn admit(owner: Option<i32>) -> Value {
    json!({"v": 1, "do": "admit", "container": {"id": "b", "bundle": "/b", "rootfs": "/b/r", "record": "/r/b"},
        "owner": owner, "annotations": {"sublet.gpu": "0"}, "image":
        {"library_dir": null, "nix": false, "tmp_is_host": false, "created": [], "warnings": []}})
}

fn reason(answer: &Value) -> &str {
    answer["refused"]["reason"].as_str().unwrap_or_default()
}

/// A sleeping process of user `uid`, started by `setpriv` with these options.
fn sleeper(options: &[&str]) -> std::process::Child {
    let mut command = std::process::Command::new("setpriv");
    let child = command.args(options).args(["--clear-groups", "sleep", "300"]).spawn().expect("setpriv runs");
    let comm = || std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
    assert!(eventually(|| comm() == "sleep\n"), "{}", comm());
    child
}

fn pid(child: &std::process::Child) -> i32 {
    i32::try_from(child.id()).expect("a pid")
}

#[test]
fn b11_a_process_is_a_users_only_if_it_is_theirs_alone() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let mut own = sleeper(&["--reuid=1001", "--regid=1001"]);
    let mut second = sleeper(&["--reuid=1001", "--regid=1001"]);
    // As a set-user-ID program that Bob has started.
    let mut raised = sleeper(&["--ruid=1001"]);
    let refused = &host.say(BOB, &[admit(Some(pid(&raised)))])[0];
    assert!(reason(refused).contains("does not belong to uid 1001"), "{refused}");
    // A lease may be bound to Bob's own process, but not handed over to another user's.
    let granted = host.say(BOB, &[admit(Some(pid(&own)))]).remove(0);
    let lease = &granted["granted"]["lease"];
    assert!(lease.is_string(), "{granted}");
    for foreign in [pid(&raised), i32::try_from(std::process::id()).expect("a pid"), 1, 0, -1] {
        let asks = [
            json!({"v": 1, "do": "hand-over", "lease": lease, "owner": foreign}),
            json!({"v": 1, "do": "abandon", "id": "b", "owner": foreign}),
            json!({"v": 1, "do": "bind", "lease": lease, "container": {"id": "b"}, "pid": foreign}),
        ];
        for answer in host.say(BOB, &asks) {
            assert!(reason(&answer).contains("process"), "{foreign}: {answer}");
        }
    }
    let bind = |pid: i32| json!({"v": 1, "do": "bind", "lease": lease, "container": {"id": "b"}, "pid": pid});
    assert_eq!(host.say(BOB, &[bind(pid(&own))])[0]["done"], true);
    let answer = &host.say(BOB, &[bind(pid(&second))])[0];
    assert!(reason(answer).contains("belongs to container b"), "{answer}");
    for child in [&mut own, &mut second, &mut raised] {
        child.kill().and_then(|()| child.wait().map(drop)).expect("it ends");
    }
    let answer = &host.say(BOB, &[bind(pid(&second))])[0];
    assert!(!reason(answer).is_empty(), "a process that has ended: {answer}");
    assert!(eventually(|| host.leases().is_empty()));
    host.world.assert_empty();
}

#[test]
fn b11_a_lease_of_anothers_is_no_grant_and_a_user_without_a_policy_gets_nothing() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let lease = host.leases()[0]["id"].clone();
    let mut forged = admit(None);
    forged["annotations"]["sublet.lease"] = lease.clone();
    let answer = &host.say(BOB, &[forged.clone()])[0];
    assert!(reason(answer).contains("this container has no live lease with that id"), "{answer}");
    // Alice does it herself, for another of her containers.
    assert!(reason(&host.say(ALICE, &[forged])[0]).contains("this container has no live lease"));
    let asks = [admit(None), json!({"v": 1, "do": "inventory"})];
    for answer in host.say(4321, &asks) {
        assert!(reason(&answer).contains("uid 4321 has no [[policy]]"), "{answer}");
    }
    assert_eq!(host.leases().len(), 1);
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn c1_what_a_user_tells_of_a_refusal_is_safe_to_print() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let told = json!({"v": 1, "do": "refused", "id": "x\u{1b}[2J", "reason": format!("\u{7}\n{}", "y".repeat(9000))});
    assert_eq!(host.say(4321, &[told])[0]["done"], true);
    let last = host.world.sublet(&["status", "--last-error"]).stdout;
    assert!(last.len() < 3000 && last.iter().filter(|byte| **byte < b' ').count() == 1, "{last:?}");
    host.world.assert_empty();
}

#[test]
fn c1_a_user_who_names_roots_container_is_not_taken_at_their_word() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let roots = host.world.bundle("web", &[("sublet.sm", "200")], HOLD);
    let _ = roots.refused();
    let told = json!({"v": 1, "do": "refused", "id": "web", "reason": "no; why: so; fix: run evil"});
    assert_eq!(host.say(4321, &[told])[0]["done"], true);
    let text = |arguments: &[&str]| {
        String::from_utf8_lossy(&host.world.sublet(arguments).stdout).trim_end().to_owned()
    };
    let last = text(&["status", "--last-error"]);
    assert!(last.ends_with("container web, of user 4321 (uid 4321): no; why: so; fix: run evil"), "{last}");
    let explained = text(&["explain", "--container", "web"]);
    assert!(explained.contains("sublet.sm=200") && !explained.contains("evil"), "{explained}");
    let events = text(&["events"]);
    let line = events.lines().find(|line| line.contains("evil")).expect("it is recorded");
    assert!(line.contains(" web of user 4321 (uid 4321) no; why: so"), "{line}");
    drop(roots);
    host.world.assert_empty();
}

#[test]
fn b12_clients_that_never_read_hold_nobody() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let line = json!({"v": 1, "do": "inventory"}).to_string() + "\n";
    let deaf: Vec<_> = (0..16)
        .map(|_| {
            let mut stream = std::os::unix::net::UnixStream::connect(host.socket()).expect("it listens");
            stream.set_nonblocking(true).expect("nonblocking");
            for _ in 0..1000 {
                if stream.write_all(line.as_bytes()).is_err() {
                    break;
                }
            }
            stream
        })
        .collect();
    let bundle = host.bundle(ALICE, "beside", QUARTER, HOLD);
    bundle.up();
    bundle.down();
    drop(deaf);
    host.world.assert_empty();
}

#[test]
fn c5_a_service_that_is_killed_leaves_whole_containers_or_none() {
    if skip_unless_root() {
        return;
    }
    let mut host = serving("h200");
    for round in 0..12_u64 {
        let mut serve = host.serve.take().expect("it runs");
        let bundle = host.bundle(ALICE, &format!("killed-{round}"), QUARTER, HOLD);
        let created = std::thread::scope(|scope| {
            let created = scope.spawn(|| bundle.create());
            std::thread::sleep(std::time::Duration::from_millis(round * 6));
            serve.kill().and_then(|()| serve.wait().map(drop)).expect("it ends");
            created.join().expect("it ends")
        });
        let (dir, id) = (bundle.dir.clone(), bundle.id.clone());
        std::mem::forget(bundle);
        host.start();
        let bundle = Bundle { host: &host, uid: ALICE, id, dir, spec: Value::Null };
        let states = || host.leases().iter().map(|lease| lease["state"].clone()).collect::<Vec<_>>();
        let whole: &[Value] = if created.ok { &[json!("active")] } else { &[] };
        assert!(eventually(|| states() == whole), "{round}: {created:?} {:?}", states());
        if created.ok {
            bundle.down();
        }
    }
    host.world.assert_empty();
}

#[test]
fn b11_what_is_not_the_users_own_is_not_ended_for_their_lease() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    host.world.configure("[mps]\nexclusive_compute_mode = \"never\"\n");
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    // A program of root that has joined the PID namespace of Alice's container and computes outside her server.
    let mut program = std::process::Command::new("nsenter");
    program.args(["--pid", "--target", &bundle.pid().to_string(), "--"]);
    let mut roots = host.world.stranger_by(program);
    let told = || host.event("bypass");
    assert!(eventually(|| told().is_some()), "{:?}", host.events());
    let text = told().expect("told")["text"].clone();
    assert!(text.as_str().expect("text").ends_with("it does not belong to the container's user"), "{text}");
    assert!(roots.try_wait().expect("it can be asked").is_none(), "it runs on");
    roots.kill().and_then(|()| roots.wait().map(drop)).expect("it ends");
    bundle.down();
    host.world.assert_empty();
}

/// A bundle of Docker's: where that has them, and with an id as it gives.
fn at_docker<'a>(host: &'a Host, digit: &str, annotations: &[(&str, &str)]) -> sublet_e2e::Bundle<'a> {
    let mut bundle = host.world.bundle(&digit.repeat(64), annotations, HOLD);
    bundle.dir = moved(&bundle.dir);
    bundle
}

/// Moves a bundle to where Docker has its.
fn moved(bundle: &Path) -> PathBuf {
    let docker = bundle.with_file_name("io.containerd.runtime.v2.task").join("moby");
    std::fs::create_dir_all(&docker).expect("a directory");
    let place = docker.join(bundle.file_name().expect("a name"));
    std::fs::rename(bundle, &place).expect("it is moved");
    place
}

/// A dockerd at `socket` that says the same of every container but for its id: that it is to be restarted, and that its last
/// start failed with these `errors`. What it was asked.
fn dockerd(socket: &Path, errors: Vec<(String, String)>) -> Arc<Mutex<String>> {
    let (asked, listener) = (Arc::new(Mutex::new(String::new())), UnixListener::bind(socket).expect("bound"));
    let heard = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.expect("a client"));
            let mut line = String::new();
            stream.read_line(&mut line).expect("a line");
            heard.lock().expect("it is whole").push_str(&line);
            let told = errors.iter().find(|(id, _)| line.contains(id)).map(|(id, error)| {
                json!({"Id": id, "Name": "/c", "State": {"Status": "created", "Error": error},
                    "HostConfig": {"RestartPolicy": {"Name": "always"}}})
            });
            let _ = write!(stream.get_mut(), "HTTP/1.0 200 OK\r\n\r\n{}", told.unwrap_or_default());
        }
    });
    asked
}

#[test]
fn b15_nobody_but_root_has_docker_start_a_container_and_none_that_was_touched() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200");
    let socket = host.world.dir.path().join("docker.sock");
    host.world.configure(&format!("[retry]\nsocket = \"{}\"\n", socket.display()));
    host.start();
    let holder = host.world.bundle("holder", &[("sublet.sm", "100")], HOLD);
    holder.up();
    // Bob says that a container of root's was refused, and has one of his own refused as if it were Docker's.
    let [told, own] = ["b", "c"].map(|digit| digit.repeat(64));
    let no_room = "no room for mps, 25 % SM: GPU 0 has no SMs left";
    let refused = json!({"v": 1, "do": "refused", "id": told, "reason": no_room});
    assert_eq!(host.say(BOB, &[refused])[0]["done"], true);
    let mut bobs = host.bundle(BOB, &own, &[("sublet.sm", "25")], HOLD);
    bobs.dir = moved(&bobs.dir);
    let bobs = bobs.create();
    assert!(!bobs.ok && bobs.stderr.contains("no room"), "{bobs:?}");
    // Root's were refused for the same reason; somebody has tried to start one of them since.
    let create = |digit| {
        let refused = at_docker(&host, digit, &[("sublet.sm", "25")]).create();
        assert!(!refused.ok && refused.stderr.contains("no room"), "{refused:?}");
        (digit.repeat(64), refused.stderr)
    };
    let (touched, _) = create("d");
    let roots = create("a");
    let errors = vec![
        (told.clone(), no_room.to_owned()),
        (own.clone(), bobs.stderr),
        (touched.clone(), "driver failed programming external connectivity".to_owned()),
        roots.clone(),
    ];
    let asked = dockerd(&socket, errors);
    holder.down();
    let heard = || asked.lock().expect("it is whole").clone();
    let started = |id: &str| heard().contains(&format!("POST /containers/{id}/start "));
    assert!(eventually(|| started(&roots.0)), "{}", heard());
    assert!(![&told, &own].iter().any(|id| heard().contains(id.as_str())), "{}", heard());
    assert!(heard().contains(&touched) && !started(&touched), "{}", heard());
    host.world.assert_empty();
}
