//! The ledger is lost while there are leases that no record of root's runtimes shows: pending ones, those of prestart
//! hooks, those of rootless users. Nothing is given twice.

use std::path::Path;

use serde_json::{Value, json};
use sublet_e2e::user::{Host, run};
use sublet_e2e::{World, bin_dir, eventually, programs, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const LARGE: &[(&str, &str)] = &[("sublet.sm", "70"), ("sublet.memory", "8GiB")];
const ALICE: u32 = 1000;

/// Its name, and what does it to the ledger.
type Loss = (&'static str, fn(&Path));

/// Ways to lose it.
const LOSSES: [Loss; 3] = [
    ("garbage", |ledger| std::fs::write(ledger, [0xff, 0, b'{']).expect("written")),
    ("gone", |ledger| std::fs::remove_file(ledger).expect("removed")),
    ("a stranger's", |ledger| std::os::unix::fs::chown(ledger, Some(ALICE), Some(ALICE)).expect("chown")),
];

fn host() -> Host {
    let policy = "[[policy]]\nuser = 1000\n";
    let mut host = Host::new("h200", policy, Path::new(env!("CARGO_BIN_EXE_speak")));
    host.start();
    host
}

/// The one lease there is, once the ledger was lost in each way and looked at: the same as before, and
/// another share that does not fit beside it is refused.
fn assert_kept(world: &World) {
    let before = world.leases();
    assert_eq!(before.len(), 1, "{before:?}");
    let ledger = world.state_dir().join("ledger.json");
    for (loss, lose) in LOSSES {
        lose(&ledger);
        let other = world.bundle("other", LARGE, HOLD);
        let refused = other.create();
        assert!(!refused.ok, "{loss}: {before:?}");
        assert_eq!(world.leases(), before, "{loss}");
    }
}

#[test]
fn a_rootless_users_lease_is_kept() {
    if skip_unless_root() {
        return;
    }
    let host = host();
    let bundle = host.bundle(ALICE, "mine", LARGE, HOLD);
    bundle.up();
    bundle.event("info");
    assert_kept(&host.world);
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn a_prestart_hooks_lease_is_kept() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for annotations in [[("sublet.mode", "time-slice"), ("sublet.gpu", "0")], [LARGE[0], LARGE[1]]] {
        let mut bundle = world.bundle("late", &annotations, HOLD);
        bundle.plain = true;
        let env = ["PATH=/usr/bin:/bin".to_owned(), format!("SUBLET_CONFIG={}", world.config.display())];
        let program = bin_dir().join("sublet-hook");
        bundle.spec["hooks"]["createRuntime"] =
            json!([{"path": program, "args": ["sublet-hook", "createRuntime"], "env": env}]);
        bundle.up();
        // A shared MPS server and time-slicing exclude each other.
        assert_kept(&world);
        bundle.down();
        world.assert_empty();
    }
}

/// A low-level runtime that begins when it may: until then there is no record of the container.
fn wait_before_create(world: &World) {
    let program = world.engine.program();
    let slow = world.dir.path().join("slow").join(program);
    std::fs::create_dir(world.dir.path().join("slow")).expect("a directory");
    let go = world.dir.path().join("go");
    let script = format!(
        "case \" $* \" in *\" create \"*) : >{go}.asked; n=0; while [ ! -e {go} ] && [ $n -lt 500 ]; \
         do n=$((n+1)); sleep 0.02; done;; esac\nexec /usr/bin/env {program} \"$@\"\n",
        go = go.display()
    );
    programs::script(&slow, &script);
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    let (from, to) = (format!("[\"{program}\"]"), format!("[\"{}\"]", slow.display()));
    assert!(text.contains(&from));
    std::fs::write(&world.config, text.replace(&from, &to)).expect("written");
}

#[test]
fn a_lease_whose_container_is_being_created_is_kept() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    wait_before_create(&world);
    let bundle = world.bundle("slow", LARGE, HOLD);
    let ledger = world.state_dir().join("ledger.json");
    for (loss, lose) in LOSSES {
        let go = world.dir.path().join("go");
        std::thread::scope(|scope| {
            let created = scope.spawn(|| bundle.create());
            assert!(eventually(|| world.dir.path().join("go.asked").exists()), "{loss}");
            lose(&ledger);
            assert!(world.sublet(&["gc"]).status.success(), "{loss}");
            let leases = world.leases();
            assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("pending")), "{loss}: {leases:?}");
            std::fs::write(&go, "").expect("written");
            assert!(created.join().expect("it ends").ok, "{loss}");
        });
        let leases = world.leases();
        assert_eq!((leases.len(), &leases[0]["state"]), (1, &json!("active")), "{loss}: {leases:?}");
        bundle.down();
        world.assert_empty();
        std::fs::remove_file(&go)
            .and_then(|()| std::fs::remove_file(go.with_extension("asked")))
            .expect("go");
    }
}

#[test]
fn where_the_copy_is_lost_too_the_device_of_a_rootless_container_is_closed_and_its_daemon_left_alone() {
    if skip_unless_root() {
        return;
    }
    let host = host();
    let bundle = host.bundle(ALICE, "mine", LARGE, HOLD);
    bundle.up();
    bundle.event("info");
    for file in ["ledger.json", "ledger.json.copy"] {
        std::fs::write(host.world.state_dir().join(file), "{").expect("written");
    }
    let daemon = |world: &World| world.status()["mps"][0]["pid"].clone();
    let before = daemon(&host.world);
    assert!(before.is_number());
    let other = host.world.bundle("other", &[("sublet.sm", "5")], HOLD);
    let refused = other.create();
    assert!(!refused.ok && refused.stderr.contains("the ledger was lost"), "{refused:?}");
    assert_eq!(daemon(&host.world), before, "its daemon is left alone");
    assert_eq!(still_holds(&bundle), Value::Null);
    bundle.down();
    assert!(eventually(|| other.create().ok), "the device opens when the container has ended");
    other.down();
    run("rm", &["-f", host.world.state_dir().join("roots").to_str().expect("UTF-8")]);
    host.world.assert_empty();
}

/// Without the copy, too, a container's lease and a daemon are only known from its record and from /proc.
#[test]
fn what_cannot_be_read_for_a_moment_is_not_taken_as_gone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("mine", LARGE, HOLD);
    bundle.up();
    let lease = world.leases()[0].clone();
    let written = std::fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
    let written: Value = serde_json::from_slice(&written).expect("JSON");
    let record = written["leases"][0]["container"]["record"].as_str().expect("a path");
    let daemon = world.status()["mps"][0]["pid"].clone();
    for file in ["ledger.json", "ledger.json.copy"] {
        std::fs::write(world.state_dir().join(file), "{").expect("written");
    }
    let inventory = world.state_dir().join("inventory.json").display().to_string();
    for unread in [format!("{record}/state.json"), format!("/proc/{daemon}/environ"), inventory] {
        let sublet = world.command("sublet");
        let mut command = std::process::Command::new("strace");
        command.args(["-f", "-o", "/dev/null", "-P", &unread, "-e", "inject=openat:error=EIO", "--"]);
        command.arg(sublet.get_program()).arg("gc");
        command.envs(sublet.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = command.output().expect("strace is installed");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("cannot be read"), "{unread}: {said}");
        let ledger = std::fs::read(world.state_dir().join("ledger.json")).expect("a ledger");
        assert_eq!(ledger, b"{", "{unread}: nothing was written");
    }
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!((&world.leases()[0]["id"], world.leases().len()), (&lease["id"], 1));
    assert_eq!(world.status()["mps"][0]["pid"], daemon);
    bundle.down();
    world.assert_empty();
}

/// What the container said of trouble since it holds its context.
fn still_holds(bundle: &sublet_e2e::user::Bundle<'_>) -> Value {
    let output = std::fs::read_to_string(bundle.dir.join("create.out")).unwrap_or_default();
    let mut lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.find(|line| line["event"] != "info" && !line["error"].is_null()).unwrap_or_default()
}
