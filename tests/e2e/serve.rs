//! Containers without root: a real uid, a user namespace, a real runc or crun, and `sublet serve` as root.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::two_users::{ALICE, BOB, HOLD, QUARTER, host, serving};
use serde_json::{Value, json};
use sublet_e2e::user::{Bundle, Host, run, text};
use sublet_e2e::{bin_dir, eventually, skip_unless_root};

#[test]
fn a_user_takes_a_share_sees_it_and_gives_it_back() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let info = bundle.event("info");
    assert_eq!(
        (&info["error"], &info["mps"], &info["sm"]),
        (&Value::Null, &json!(true), &json!(32)),
        "{info}"
    );
    let lease = &host.leases()[0];
    assert_eq!((&lease["state"], &lease["sm_percent"]), (&json!("active"), &json!(25.0)));
    assert_eq!((&lease["memory_bytes"], &lease["pid"]), (&json!(8_589_934_592_u64), &json!(bundle.pid())));
    // A process exec'd in dockerd's way has none of config.json's environment.
    let process = json!({"cwd": "/", "args": ["/usr/bin/cuda-probe", "info"], "env": ["PATH=/usr/bin"],
        "user": {"uid": 0, "gid": 0}});
    let file = bundle.dir.join("process.json");
    std::fs::write(&file, process.to_string()).expect("process.json");
    std::os::unix::fs::chown(&file, Some(ALICE), Some(ALICE)).expect("chown");
    let exec = bundle.runtime(&["exec", "--process", text(&file), "mine"]);
    assert!(exec.ok, "{exec:?}");
    let info = &exec.json()[0];
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{exec:?}");
    bundle.down();
    host.world.assert_empty();
    let made = bundle.dir.join("rootfs/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    assert!(!made.exists(), "a mount point is left");
}

/// Its device nodes are bind mounts, like those a user might add.
#[test]
fn a_bundle_that_is_run_again_is_granted_anew() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "again", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    let first = bundle.config();
    bundle.down();
    host.world.assert_empty();
    let created = bundle.runtime(&["create", "--bundle", text(&bundle.dir), "again"]);
    assert!(created.ok, "{created:?}");
    assert!(bundle.runtime(&["start", "again"]).ok);
    assert_eq!(bundle.event("info")["sm"], json!(32));
    let second = bundle.config();
    assert_ne!(second["annotations"]["sublet.lease"], first["annotations"]["sublet.lease"]);
    assert_eq!(second["mounts"].as_array().map(Vec::len), first["mounts"].as_array().map(Vec::len));
    assert_eq!(second["hooks"], first["hooks"]);
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn run_frees_its_share_by_itself() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "ran", QUARTER, &["/usr/bin/cuda-probe", "info"]);
    bundle.write();
    let ran = bundle.runtime(&["run", "--bundle", text(&bundle.dir), "ran"]);
    assert!(ran.ok, "{ran:?}");
    assert_eq!(ran.json()[0]["sm"], json!(32));
    host.world.assert_empty();
}

#[test]
fn without_the_service_a_container_is_refused_and_untouched() {
    if skip_unless_root() {
        return;
    }
    let host = host("h200");
    let bundle = host.bundle(ALICE, "alone", QUARTER, HOLD);
    let refused = bundle.create();
    assert!(!refused.ok);
    let line = "sublet serve is not running";
    assert!(refused.stderr.contains(line) && refused.stderr.contains("systemctl enable --now sublet.socket"));
    assert_eq!(bundle.config(), bundle.spec);
    // One that is not ours does not need it.
    let plain = host.bundle(ALICE, "plain", &[], &["/bin/true"]);
    plain.up();
    plain.down();
}

#[test]
fn policy_says_who_may_take_what() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200x8");
    let refusal = |uid, id: &str, annotations: &[(&str, &str)]| {
        let bundle = host.bundle(uid, id, annotations, HOLD);
        let refused = bundle.create();
        assert!(!refused.ok, "{annotations:?}");
        assert_eq!(bundle.config(), bundle.spec);
        refused.stderr
    };
    let stranger = refusal(4321, "stranger", QUARTER);
    assert!(stranger.contains("policy = [{ user = 4321, leases = 1 }]"), "{stranger}");
    let slice = refusal(ALICE, "slice", &[("sublet.mode", "time-slice"), ("sublet.memory", "1GiB")]);
    assert!(slice.contains("allows mps, and this is time-slice"), "{slice}");
    let unlimited = refusal(ALICE, "unlimited", &[("sublet.sm", "25")]);
    assert!(
        unlimited.contains("your policy limits memory to 16384 MiB, and this names no limit"),
        "{unlimited}"
    );
    let large = refusal(ALICE, "large", &[("sublet.sm", "60"), ("sublet.memory", "1GiB")]);
    assert!(
        large.contains("limits sm to 50 %\nwhy: your containers hold 0 %, and this one asks for 60 %"),
        "{large}"
    );
    let bundle = host.bundle(BOB, "one", &[("sublet.gpu", "3")], HOLD);
    bundle.up();
    let second = refusal(BOB, "two", &[("sublet.gpu", "4")]);
    assert!(second.contains("limits your containers to 1"), "{second}");
    // A policy holds from the moment it is written.
    host.world.configure("[[policy]]\nuser = 4321\ndevices = [\"5\"]\n");
    let allowed = host.bundle(4321, "allowed", &[("sublet.gpu", "any")], HOLD);
    allowed.up();
    let wrong = refusal(4321, "wrong", &[("sublet.gpu", "0")]);
    let told = "no GPU that your policy allows is number 0\nwhy: it allows GPU 5 (";
    assert!(wrong.contains(told), "{wrong}");
    let uuid = host.world.status()["devices"][5]["uuid"].clone();
    assert!(host.leases().iter().any(|lease| lease["container_id"] == "allowed" && lease["device"] == uuid));
    bundle.down();
    allowed.down();
    host.world.assert_empty();
    let last = host.world.sublet(&["status", "--last-error"]);
    assert!(String::from_utf8_lossy(&last.stdout).contains("container wrong, of user 4321 (uid 4321): "));
}

#[test]
fn a_lease_whose_container_never_came_to_be_is_given_back() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let mut bundle = host.bundle(ALICE, "broken", QUARTER, HOLD);
    bundle.spec["process"]["args"] = json!(["/no/such/program"]);
    bundle.spec["hooks"] = json!({"createRuntime": [{"path": "/bin/sh",
        "args": ["sh", "-c", "cat >/dev/null; exit 1"], "env": ["PATH=/usr/bin:/bin"]}]});
    assert!(!bundle.create().ok);
    assert!(eventually(|| host.leases().is_empty()));
    host.world.assert_empty();
}

#[test]
fn the_service_restarts_under_running_containers() {
    if skip_unless_root() {
        return;
    }
    let mut host = serving("h200");
    {
        let bundle = host.bundle(ALICE, "kept", QUARTER, &["/usr/bin/cuda-probe", "hold", "120"]);
        bundle.up();
        bundle.event("info");
        std::mem::forget(bundle);
    }
    host.stop();
    assert!(!host.socket().exists());
    assert_eq!(host.leases()[0]["state"], "active");
    // Killed, not ended: the socket that it leaves is no obstacle.
    host.start();
    let mut killed = host.serve.take().expect("it runs");
    killed.kill().and_then(|()| killed.wait().map(drop)).expect("it ends");
    host.start();
    let dir = host.home(ALICE).join("kept");
    let bundle = Bundle { host: &host, uid: ALICE, id: "kept".into(), dir, spec: Value::Null };
    let exec = bundle.runtime(&["exec", "--env", "A=b", "kept", "/usr/bin/cuda-probe", "info"]);
    assert_eq!(exec.json()[0]["sm"], json!(32), "{exec:?}");
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn a_crashed_container_is_freed_by_the_service_alone() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let bundle = host.bundle(ALICE, "crashed", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    run("kill", &["-9", &bundle.pid().to_string()]);
    let ledger = host.world.state_dir().join("ledger.json");
    let begun = Instant::now();
    let freed = || !std::fs::read_to_string(&ledger).unwrap_or_default().contains("crashed");
    while !freed() && begun.elapsed() < Duration::from_secs(25) {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(freed(), "no command of ours has run, and ten seconds are over");
}

#[test]
fn systemd_is_told_and_its_socket_is_taken() {
    if skip_unless_root() || !Path::new("/usr/bin/systemd-socket-activate").exists() {
        return;
    }
    let host = host("h200");
    let notify = UnixDatagram::bind(host.world.dir.path().join("notify")).expect("a socket");
    notify.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    std::fs::create_dir_all(host.world.state_dir()).expect("state directory");
    let mut command = Command::new("systemd-socket-activate");
    command.arg("--listen").arg(host.socket()).arg("--setenv=NOTIFY_SOCKET").arg("--setenv=SUBLET_CONFIG");
    command.arg("--setenv=WATCHDOG_USEC").arg(bin_dir().join("sublet")).arg("serve");
    command.env("NOTIFY_SOCKET", host.world.dir.path().join("notify")).env("WATCHDOG_USEC", "2000000");
    let mut child = command.env("SUBLET_CONFIG", &host.world.config).spawn().expect("it runs");
    assert!(eventually(|| host.socket().exists()));
    std::fs::set_permissions(host.socket(), std::fs::Permissions::from_mode(0o666)).expect("chmod");
    let answers = host.say(ALICE, &[json!({"v": 1, "do": "status"})]);
    assert_eq!(answers[0]["status"]["uid"], json!(ALICE));
    let mut heard = Vec::new();
    let mut buffer = [0; 64];
    while heard.len() < 3 {
        let length = match notify.recv(&mut buffer) {
            // A process that was stopped, as by a freezer, is told so where a limit is set (signal(7)).
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            length => length.expect("a word in time"),
        };
        heard.push(String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned());
    }
    assert_eq!(heard, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    run("kill", &["-TERM", &child.id().to_string()]);
    assert!(child.wait().expect("it ends").success());
    assert!(host.socket().exists(), "systemd's socket is systemd's to remove");
}

/// What `sublet` prints to a user, standard error behind it.
fn sublet(host: &Host, uid: u32, arguments: &[&str]) -> String {
    let output = host.command(uid, "sublet").args(arguments).output().expect("sublet runs");
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn a_user_sees_their_leases_their_policy_and_their_own_refusals() {
    if skip_unless_root() {
        return;
    }
    let mut host = serving("h200");
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let status: Value =
        serde_json::from_str(&sublet(&host, ALICE, &["status", "--format", "json"])).expect("JSON");
    assert_eq!(status["leases"][0]["container_id"], "mine", "{status}");
    assert_eq!(status["mps"][0]["state"], "serving", "{status}");
    let left = json!({"sm_percent": 25.0, "memory_bytes": 8_589_934_592_u64, "leases": 1});
    assert_eq!((&status["own"]["left"], &status["own"]["refused"]), (&left, &Value::Null));
    let line = "Your policy: modes mps; sm 50 %, 25 % left; memory 16 GiB, 8 GiB left; leases 2, 1 left";
    let table = sublet(&host, ALICE, &["status"]);
    assert!(table.lines().any(|found| found == line), "{table}");
    assert!(sublet(&host, ALICE, &["lease", "list"]).contains("active"));
    let top = sublet(&host, ALICE, &["top", "--once"]);
    assert!(top.lines().any(|line| line.starts_with("mine ") && line.contains("/ 8 GiB")), "{top}");
    assert!(sublet(&host, 4321, &["status"]).contains("You cannot take a share: uid 4321 has no [[policy]]"));
    // Refused by the service, by the shim itself, for want of a policy.
    let refused = |uid, id: &str, annotations: &[(&str, &str)]| {
        let bundle = host.bundle(uid, id, annotations, HOLD);
        assert!(!bundle.create().ok, "{id}");
        sublet(&host, uid, &["status", "--last-error"])
    };
    let large = refused(ALICE, "large", &[("sublet.sm", "60"), ("sublet.memory", "1GiB")]);
    assert!(large.contains("container large: your policy limits sm to 50 %"), "{large}");
    let typo = refused(ALICE, "typo", &[("sublet.smm", "60")]);
    assert!(typo.contains("container typo: sublet.smm=60: unknown key"), "{typo}");
    let stranger = refused(4321, "stranger", QUARTER);
    assert!(stranger.contains("container stranger: uid 4321 has no [[policy]]"), "{stranger}");
    assert!(
        sublet(&host, BOB, &["status", "--last-error"]).contains("No container of yours has been refused")
    );
    assert!(sublet(&host, ALICE, &["status", "--last-error"]).contains("container typo"));
    assert!(
        sublet(&host, ALICE, &["explain", "--container", "large"])
            .contains("refused: your policy limits sm to 50 %")
    );
    assert!(sublet(&host, BOB, &["explain", "--container", "large"]).contains("holds no lease"));
    // What would be refused is refused with the same words, and what fits is explained.
    let explain = |sm: &str| {
        let sm = format!("sublet.sm={sm}");
        sublet(&host, ALICE, &["explain", "--annotation", &sm, "--annotation", "sublet.memory=1GiB"])
    };
    assert!(
        explain("60")
            .contains("limits sm to 50 %\nwhy: your containers hold 25 %, and this one asks for 60 %")
    );
    assert!(explain("20").contains("(at most 20 %)"), "{}", explain("20"));
    let wait = ["wait", "--annotation", "sublet.sm=60", "--annotation", "sublet.memory=1GiB"];
    assert!(sublet(&host, ALICE, &wait).contains("limits sm to 50 %"));
    bundle.down();
    drop(bundle);
    // Stale, and only root may refresh: the service does.
    std::fs::remove_file(host.world.state_dir().join("inventory.json")).expect("the inventory");
    assert!(sublet(&host, ALICE, &["status"]).contains("No leases."));
    host.stop();
    let alone = sublet(&host, ALICE, &["status"]);
    assert!(alone.contains("You cannot take a share: sublet serve is not running"), "{alone}");
    host.world.assert_empty();
}

#[test]
fn a_user_waits_in_one_order_with_root() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let holder = host.world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    let bobs = host.bundle(BOB, "bobs", &[("sublet.sm", "80"), ("sublet.wait", "60s")], HOLD);
    let roots = host.world.bundle("roots", &[("sublet.sm", "40"), ("sublet.wait", "60s")], HOLD);
    let share = [("sublet.sm", "40"), ("sublet.memory", "8GiB"), ("sublet.wait", "60s")];
    let killed = host.bundle(ALICE, "killed", &share, HOLD);
    let queue = || host.world.status()["waiting"].clone();
    let wait_for = |many: usize| {
        assert!(eventually(|| queue().as_array().map(Vec::len) == Some(many)), "{}", queue());
    };
    std::thread::scope(|scope| {
        let of_bob = scope.spawn(|| bobs.create());
        wait_for(1);
        let of_root = scope.spawn(|| roots.create());
        wait_for(2);
        let seen = queue();
        let told = |at: usize| {
            (seen[at]["container_id"].clone(), seen[at]["uid"].clone(), seen[at]["place"].clone())
        };
        assert_eq!(told(0), (json!("bobs"), json!(BOB), json!(1)));
        assert_eq!(told(1), (json!("roots"), json!(0), json!(2)));
        let of_alice = scope.spawn(|| killed.create());
        wait_for(3);
        run("kill", &["-9", &queue()[2]["pid"].to_string()]);
        assert!(!of_alice.join().expect("no panic").ok);
        wait_for(2);
        holder.down();
        let created = of_bob.join().expect("no panic");
        assert!(created.ok, "{created:?}");
        assert!(!of_root.is_finished(), "it has no room beside the first one");
        wait_for(1);
        bobs.down();
        let created = of_root.join().expect("no panic");
        assert!(created.ok, "{created:?}");
    });
    assert_eq!(queue(), json!([]));
    roots.down();
    host.world.assert_empty();
}

#[test]
fn a_user_is_told_of_others_containers_without_their_names() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let roots = host.world.bundle("roots", &[("sublet.sm", "40")], HOLD);
    roots.up();
    let (bobs, own) =
        (host.bundle(BOB, "bobs", &[("sublet.sm", "30")], HOLD), host.bundle(ALICE, "own", QUARTER, HOLD));
    bobs.up();
    own.up();
    let refused =
        host.bundle(ALICE, "refused", &[("sublet.sm", "10"), ("sublet.memory", "1GiB")], HOLD).create();
    let wait = ["wait", "sm=10", "memory=1GiB", "--timeout=0"];
    let (other, own_share) = ("another user's container", "own (mps, 25 % SM, 8 GiB)");
    let held = format!("held by {other} (mps, 40 % SM), {other} (mps, 30 % SM), {own_share}");
    for told in [
        refused.stderr.clone(),
        sublet(&host, ALICE, &["status", "--last-error"]),
        sublet(&host, ALICE, &wait),
        sublet(&host, ALICE, &["explain", "sm=10", "memory=1GiB"]),
    ] {
        assert!(told.contains(&held), "{told}");
    }
    let told = String::from_utf8_lossy(&host.world.sublet(&wait).stderr).into_owned();
    assert!(told.contains("held by roots (mps, 40 % SM), bobs (mps, 30 % SM), own ("), "{told}");
    bobs.down();
    own.down();
    roots.down();
    host.world.assert_empty();
}

#[test]
fn what_a_users_container_is_warned_of_is_an_event_of_roots_and_of_theirs() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let mut bundle = host.bundle(ALICE, "warned", QUARTER, HOLD);
    let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("NVIDIA_REQUIRE_CUDA=cuda>=99.1"));
    bundle.up();
    let arguments = ["events", "--format", "json", "--filter", "kind=warned"];
    let of_root = String::from_utf8_lossy(&host.world.sublet(&arguments).stdout).into_owned();
    for told in [of_root, sublet(&host, ALICE, &arguments)] {
        // Where the daemon cannot leave its starter's cgroup, that is warned of, too.
        let of_image: Vec<&str> =
            told.lines().filter(|line| line.contains("the image needs CUDA 99.1")).collect();
        let [line] = of_image[..] else { panic!("not one event of the image: {told}") };
        let event: Value = serde_json::from_str(line).expect("an event");
        assert_eq!((&event["uid"], &event["container_id"]), (&json!(ALICE), &json!("warned")), "{event}");
    }
    assert_eq!(sublet(&host, BOB, &arguments), "");
    bundle.down();
    drop(bundle);
    host.world.assert_empty();
}

#[test]
fn a_user_takes_mig_devices_within_their_policy() {
    if skip_unless_root() {
        return;
    }
    let host = serving("a100x2-mig");
    let refusal = |uid, annotations: &[(&str, &str)]| {
        let bundle = host.bundle(uid, "refused", annotations, HOLD);
        let refused = bundle.create();
        assert!(!refused.ok, "{annotations:?}");
        refused.stderr
    };
    let alone = refusal(ALICE, &[("sublet.mig", "1g.5gb")]);
    assert!(alone.contains("allows mps, and this is mig"), "{alone}");
    let quarter = [("sublet.mig", "4g.20gb"), ("sublet.sm", "25"), ("sublet.memory", "4GiB")];
    let share = host.bundle(ALICE, "share", &quarter, HOLD);
    share.up();
    let info = share.event("info");
    assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(14)));
    let small = host.bundle(BOB, "small", &[("sublet.mig", "1g.5gb")], HOLD);
    small.up();
    let info = small.event("info");
    assert_eq!((&info["error"], &info["count"], &info["sm"]), (&Value::Null, &json!(1), &json!(14)));
    let nodes = "cd /dev; for n in nvidia? nvidia-caps/*; do [ -c $n ] && echo $n; done";
    let nodes = small.runtime(&["exec", "small", "/bin/sh", "-c", nodes]).stdout;
    assert_eq!(
        nodes.split_whitespace().collect::<Vec<_>>(),
        ["nvidia0", "nvidia-caps/nvidia-cap84", "nvidia-caps/nvidia-cap85"]
    );
    let caps = refusal(BOB, &[("sublet.mig", "1c.2g.10gb"), ("sublet.mig-caps", "monitor")]);
    assert!(caps.contains("sublet.mig-caps"), "{caps}");
    assert!(refusal(BOB, &[("sublet.mig", "1c.2g.10gb")]).contains("limits your containers to 1"));
    small.down();
    share.down();
    // What the device has counts, of the GPU, and not the little that was asked for at least.
    host.world.configure("[[policy]]\nuser = 4321\nsm = 20\nmemory = \"8GiB\"\n");
    let large = refusal(4321, &[("sublet.mig", "4g.20gb")]);
    assert!(
        large.contains("limits sm to 20 %\nwhy: your containers hold 0 %, and this one asks for 51.852 %"),
        "{large}"
    );
    let first = host.bundle(4321, "first", &[("sublet.mode", "mig"), ("sublet.sm", "1")], HOLD);
    first.up();
    let lease = &host.leases()[0];
    assert_eq!((&lease["mode"], &lease["sm_percent"]), (&json!("mig"), &Value::Null));
    let second = refusal(4321, &[("sublet.mode", "mig"), ("sublet.sm", "1")]);
    assert!(second.contains("your containers hold 12.963 %, and this one asks for 12.963 %"), "{second}");
    first.down();
    host.world.assert_empty();
}
