//! `sublet wait` of users without root, for whom `sublet serve` keeps a place among those who wait.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::two_users::{ALICE, BOB, HOLD, host, serving};
use serde_json::{Value, json};
use sublet_e2e::user::{Host, run, text};
use sublet_e2e::{eventually, skip_unless_root};

/// `sublet wait` of `uid`, for a part of the SMs.
fn wait(host: &Host, uid: u32, sm: u32, timeout: &str) -> Command {
    let mut command = host.command(uid, "sublet");
    command.args(["wait", &format!("sm={sm}"), "memory=1GiB", "--timeout", timeout]);
    command
}

fn start(mut command: Command) -> Child {
    command.spawn().expect("sublet runs")
}

/// Those who wait, as `uid` sees them.
fn waiting(host: &Host, uid: u32) -> Vec<Value> {
    let status = host.command(uid, "sublet").args(["status", "--format", "json"]).output();
    let status: Value = serde_json::from_slice(&status.expect("sublet runs").stdout).expect("JSON");
    status["waiting"].as_array().expect("a list").clone()
}

#[test]
fn a_users_wait_is_in_one_order_with_roots_and_leaves_it_when_it_is_killed() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let holder = host.world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    let mut of_alice = start(wait(&host, ALICE, 40, "2m"));
    assert!(eventually(|| waiting(&host, 0).len() == 1), "it has no entry");
    let mut of_root = start(wait(&host, 0, 70, "2m"));
    assert!(eventually(|| waiting(&host, 0).len() == 2), "{:?}", waiting(&host, 0));
    let seen = waiting(&host, 0);
    for (entry, uid, place, pid) in [(&seen[0], ALICE, 1, of_alice.id()), (&seen[1], 0, 2, of_root.id())] {
        let [of, at, by] = ["uid", "place", "pid"].map(|key| entry[key].clone());
        assert_eq!([of, at, by], [json!(uid), json!(place), json!(pid)], "{entry}");
        assert_eq!(entry["container_id"], Value::Null);
    }
    assert!(seen[0]["asks"].as_str().is_some_and(|asks| asks.contains("40 % SM")), "{}", seen[0]);
    // Every user may read the ledger, and it has what she may know of others.
    let why = seen[0]["why"].as_str().expect("a reason");
    assert!(why.contains("another user's container") && !why.contains("holder"), "{why}");
    let keys = |entries: &[Value]| -> Vec<Value> {
        entries.iter().map(|entry| json!([entry["uid"], entry["place"], entry["since"]])).collect()
    };
    for uid in [ALICE, BOB] {
        assert_eq!(keys(&waiting(&host, uid)), keys(&seen), "uid {uid}");
    }
    let shown = String::from_utf8_lossy(&host.world.sublet(&["status"]).stdout).replace('\n', " ");
    assert!(shown.contains("1. `sublet wait` of user "), "{shown}");
    assert!(shown.contains("2. `sublet wait` has waited for "), "{shown}");
    // There is room, but hers is the first turn, which she does not take.
    run("kill", &["-STOP", &of_alice.id().to_string()]);
    holder.down();
    let late = wait(&host, 0, 70, "0").output().expect("sublet runs");
    let said = String::from_utf8_lossy(&late.stderr);
    assert!(!late.status.success() && said.contains("others wait for what is left"), "{said}");
    assert!(of_root.try_wait().expect("it is known").is_none(), "it is behind her");
    of_alice.kill().expect("it runs");
    of_alice.wait().expect("it ends");
    assert!(waiting(&host, 0).iter().all(|entry| entry["uid"] != json!(ALICE)), "it is still there");
    assert!(of_root.wait().expect("it ends").success());
    assert_eq!(waiting(&host, 0), Vec::<Value>::new());
    host.world.assert_empty();
}

#[test]
fn a_users_wait_shows_its_place() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let holder = host.world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    let mut first = start(wait(&host, BOB, 80, "2m"));
    assert!(eventually(|| waiting(&host, 0).len() == 1), "it has no entry");
    let program = host.world.dir.path().join("bin/sublet");
    let line = format!(
        "setpriv --reuid {ALICE} --regid {ALICE} --clear-groups {} wait sm=40 memory=1GiB --timeout 5s",
        text(&program)
    );
    let mut on_terminal = Command::new("script");
    on_terminal.args(["-qec", &line, "/dev/null"]).env("SUBLET_CONFIG", &host.world.config);
    let output = on_terminal.current_dir("/").output().expect("script runs");
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("place 2: no room for mps, 40 % SM"), "{shown}");
    first.kill().expect("it runs");
    first.wait().expect("it ends");
    holder.down();
    host.world.assert_empty();
}

#[test]
fn a_place_is_given_within_the_users_policy_and_once_to_a_process() {
    if skip_unless_root() {
        return;
    }
    let host = serving("h200");
    let line = |share: &Value| json!({"v": 1, "do": "wait", "annotations": share});
    let ask = |uid, share: &Value| host.say(uid, &[line(share)]).remove(0);
    let fits = json!({"sublet.sm": "40", "sublet.memory": "1GiB"});
    for (uid, share, why) in [
        (ALICE, json!({"sublet.sm": "60", "sublet.memory": "1GiB"}), "your policy limits sm to 50 %"),
        (ALICE, json!({"sublet.sm": "40"}), "your policy limits memory to "),
        (ALICE, json!({"sublet.mode": "time-slice"}), "your policy allows mps, and this is time-slice"),
        (ALICE, json!({"sublet.sm": "40", "sublet.memory": "1GiB", "sublet.owner": "root"}), "is not "),
        (ALICE, json!({"sublet.smm": "40"}), "unknown key"),
        (4321, fits.clone(), "uid 4321 has no [[policy]]"),
    ] {
        let answer = ask(uid, &share);
        let refused = answer["refused"]["reason"].as_str().unwrap_or_default();
        assert!(refused.contains(why), "{share}: {answer}");
    }
    assert_eq!(ask(ALICE, &fits), json!({"v": 1, "lease": null}), "there is room");
    let holder = host.world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    // Root writes its entry itself.
    assert_eq!(ask(0, &fits), json!({"v": 1, "lease": null}));
    let answers = host.say(ALICE, &[line(&fits), line(&json!({"sublet.sm": "50", "sublet.memory": "1GiB"}))]);
    assert!(answers[0]["lease"].is_string(), "{answers:?}");
    assert_eq!(answers[0], answers[1], "it has one entry");
    assert!(waiting(&host, 0).is_empty(), "its process has ended");
    holder.down();
    host.world.assert_empty();
}

#[test]
fn what_an_mps_server_left_in_the_inventory_keeps_no_user_waiting() {
    if skip_unless_root() {
        return;
    }
    let config = "[mps]\nidle = \"0s\"\n[[policy]]\nuser = 1001\nleases = 1\n";
    let mut host = Host::new("h200", config, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    let server = host.world.bundle("server", &[("sublet.sm", "25")], HOLD);
    server.up();
    assert!(host.world.sublet(&["refresh"]).status.success());
    let inventory = host.world.state_dir().join("inventory.json");
    let is_exclusive =
        || std::fs::read_to_string(&inventory).expect("it is there").contains("EXCLUSIVE_PROCESS");
    assert!(is_exclusive());
    let wait = |timeout: &str| {
        let mut command = host.command(BOB, "sublet");
        command.args(["wait", "mode=time-slice", "--timeout", timeout]);
        command
    };
    assert_eq!(wait("0").status().expect("sublet runs").code(), Some(1), "it is there");
    let mut before = start(wait("60s"));
    assert!(eventually(|| waiting(&host, 0).len() == 1), "it has no entry");
    server.down();
    assert!(is_exclusive());
    let after = wait("0").output().expect("sublet runs");
    assert!(after.status.success(), "{after:?}");
    assert!(before.wait().expect("it ends").success(), "it waited from before");
    host.world.assert_empty();
}

#[test]
fn beside_an_older_service_a_users_wait_has_no_place_and_waits() {
    if skip_unless_root() {
        return;
    }
    let host = host("h200");
    let holder = host.world.bundle("holder", &[("sublet.sm", "70")], HOLD);
    holder.up();
    let socket = UnixListener::bind(host.socket()).expect("bound");
    std::fs::set_permissions(host.socket(), PermissionsExt::from_mode(0o666)).expect("open to all");
    let (heard, lines) = channel();
    std::thread::spawn(move || {
        let (stream, _) = socket.accept().expect("a client");
        let (mut stream, mut line) = (BufReader::new(stream), String::new());
        stream.read_line(&mut line).expect("a line");
        let no = json!({"reason": "the request cannot be parsed: unknown value `wait`", "temporary": false});
        writeln!(stream.get_mut(), "{}", json!({"v": 1, "refused": no})).expect("it listens");
        heard.send(line)
    });
    let late = wait(&host, ALICE, 40, "1s").output().expect("sublet runs");
    let said = String::from_utf8_lossy(&late.stderr);
    assert!(!late.status.success() && said.contains("no room for mps, 40 % SM"), "{said}");
    let line = lines.recv_timeout(Duration::from_secs(10)).expect("it asks for a place");
    assert!(line.contains(r#""do":"wait""#), "{line}");
    holder.down();
    host.world.assert_empty();
}
