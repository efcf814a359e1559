//! C3 and C4: state files that are damaged, foreign or out of date while containers run, and reused pids. Running
//! containers are found again, nothing is leased twice, and no file is written through a symbolic link.

use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use sublet_e2e::killing::helpers;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "600"];
const GIB: u64 = 1 << 30;

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).expect("it is there")).expect("JSON");
    change(&mut value);
    std::fs::write(path, serde_json::to_vec(&value).expect("JSON")).expect("it is written");
}

/// Cuts a file in half.
fn truncate(path: &Path) {
    let text = std::fs::read(path).expect("it is there");
    std::fs::write(path, &text[..text.len() / 2]).expect("it is written");
}

/// Replaces `path` by a link to a valid file elsewhere.
fn link_away(path: &Path) -> PathBuf {
    let target = path.with_file_name("elsewhere");
    std::fs::copy(path, &target).expect("it is copied");
    std::fs::remove_file(path).expect("it is removed");
    symlink(&target, path).expect("it is linked");
    target
}

/// Content that is no inventory of sublet.
const LIE: &str = "a GPU that is not here";

/// Makes an otherwise valid inventory describe another GPU.
fn lie(inventory: &Path) {
    edit(inventory, |inventory| inventory["devices"][0]["name"] = json!(LIE));
}

/// The name of a kind of damage, and the function that does it to a file.
type Damage = (&'static str, fn(&Path));

/// The ways in which a ledger can be unusable.
const DAMAGES: [Damage; 9] = [
    ("truncated", truncate),
    ("empty", |path| std::fs::write(path, "").expect("written")),
    ("garbage", |path| std::fs::write(path, [0xff, 0, 0x1b, b'{']).expect("written")),
    ("another JSON", |path| std::fs::write(path, "[]").expect("written")),
    // A newer version's is refused: tests/e2e/versions.rs.
    ("another version", |path| edit(path, |ledger| ledger["schema"] = json!("sublet.ledger/0"))),
    ("a bad id", |path| edit(path, |ledger| ledger["leases"][0]["id"] = json!("../../../etc"))),
    ("another owner's", |path| chown(path, Some(1000), Some(1000)).expect("chown")),
    ("writable for all", |path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).expect("chmod");
    }),
    ("a directory", |path| {
        std::fs::remove_file(path).expect("removed");
        std::fs::create_dir(path).expect("made");
    }),
];

/// Two containers on one GPU: 50 % and 8 GiB, 30 %.
fn two(world: &World) -> [Bundle<'_>; 2] {
    let first = world.bundle("first", &[("sublet.sm", "50"), ("sublet.memory", "8GiB")], SLEEP);
    let second = world.bundle("second", &[("sublet.sm", "30")], SLEEP);
    first.up();
    second.up();
    [first, second]
}

/// Id, container, share, memory and state of each lease.
fn told(world: &World) -> Vec<Value> {
    let of = |lease: &Value| {
        json!([
            lease["id"],
            lease["container_id"],
            lease["sm_percent"],
            lease["memory_bytes"],
            lease["state"]
        ])
    };
    let mut told: Vec<Value> = world.leases().iter().map(of).collect();
    told.sort_by_key(|lease| lease[1].to_string());
    told
}

fn lease_id(bundle: &Bundle<'_>) -> Value {
    bundle.config()["annotations"]["sublet.lease"].clone()
}

/// After a container's end limits fall by a command that nobody waits for, and which writes the ledger.
fn settled(world: &World) {
    assert!(eventually(|| helpers(world).is_empty()), "{:?}", helpers(world));
}

#[test]
fn c3_a_ledger_that_is_none_is_rebuilt_from_what_runs() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let whole = [
        json!([lease_id(&first), "first", 50.0, 8 * GIB, "active"]),
        json!([lease_id(&second), "second", 30.0, null, "active"]),
    ];
    let daemon = world.status()["mps"][0]["pid"].clone();
    let ledger = world.state_dir().join("ledger.json");
    for (damage, apply) in DAMAGES {
        apply(&ledger);
        let gc = world.sublet(&["gc"]);
        assert!(gc.status.success(), "{damage}: {gc:?}");
        assert!(stderr(&gc).contains("rebuil"), "{damage}: no warning in {gc:?}");
        assert_eq!(told(&world), whole, "{damage}");
        let mps = world.status()["mps"].clone();
        assert_eq!((&mps[0]["pid"], &mps[0]["state"]), (&daemon, &json!("serving")), "{damage}: {mps}");
        // The same with only the shim: 20 % are left, not 40.
        apply(&ledger);
        let third = world.bundle("third", &[("sublet.sm", "40")], SLEEP);
        let refused = third.create();
        assert!(!refused.ok && refused.stderr.contains("20"), "{damage}: {refused:?}");
        assert!(refused.stderr.contains("rebuil"), "{damage}: no warning in {refused:?}");
        let fits = world.bundle("fits", &[("sublet.sm", "20")], SLEEP);
        let created = fits.create();
        assert!(created.ok, "{damage}: {created:?}");
        fits.down();
        assert_eq!(told(&world), whole, "{damage}, after others came and went");
    }
    let kept = std::fs::read_dir(world.state_dir()).expect("the state directory").flatten();
    let kept = kept.filter(|entry| entry.file_name().to_string_lossy().contains("corrupt")).count();
    assert_eq!(kept, 1, "one bad ledger is kept as evidence");
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn c3_a_ledger_that_is_a_link_is_neither_read_nor_written_through() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let ledger = world.state_dir().join("ledger.json");
    let target = link_away(&ledger);
    edit(&target, |ledger| ledger["leases"] = json!([]));
    let before = std::fs::read(&target).expect("the target");
    let third = world.bundle("third", &[("sublet.sm", "40")], SLEEP);
    let refused = third.create();
    assert!(!refused.ok, "the link's empty ledger was believed");
    assert_eq!(std::fs::read(&target).expect("the target"), before);
    assert!(std::fs::symlink_metadata(&ledger).expect("a ledger").is_file());
    assert_eq!(world.leases().len(), 2);
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn c3_a_container_ends_although_its_ledger_is_corrupt() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let ledger = world.state_dir().join("ledger.json");
    settled(&world);
    std::fs::write(&ledger, "{").expect("written");
    let seen = second.exec(&["/bin/cat", "/proc/self/stat"]);
    assert!(seen.ok, "exec goes on: {seen:?}");
    first.down();
    std::fs::write(&ledger, "{").expect("written");
    second.down();
    world.assert_empty();
}

#[test]
fn c3_of_a_ledger_of_another_boot_only_what_people_said_counts() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let drained = world.status()["devices"][0]["uuid"].clone();
    let ledger = world.state_dir().join("ledger.json");
    let earlier = std::fs::read(&ledger).expect("the ledger");
    first.down();
    second.down();
    settled(&world);
    std::fs::write(&ledger, earlier).expect("written");
    edit(&ledger, |ledger| {
        ledger["boot_id"] = json!("00000000-0000-4000-8000-000000000000");
        ledger["drained"] = json!([drained]);
    });
    let status = world.status();
    assert_eq!((&status["leases"], &status["mps"]), (&json!([]), &json!([])));
    assert_eq!(status["devices"][0]["drained"], true);
    assert!(world.sublet(&["undrain", "0"]).status.success());
    let [first, second] = two(&world);
    first.down();
    second.down();
    world.assert_empty();
}

/// As if an old copy of the directory had been restored.
#[test]
fn c3_a_ledger_of_another_boot_is_rebuilt_where_the_lock_is_of_this_one() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    for name in ["ledger.json", "ledger.json.copy"] {
        edit(&world.state_dir().join(name), |ledger| {
            ledger["boot_id"] = json!("00000000-0000-4000-8000-000000000000");
        });
    }
    assert!(world.sublet(&["gc"]).status.success());
    assert_eq!(world.leases().len(), 2, "both run");
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn c3_an_inventory_that_does_not_hold_is_made_anew() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let inventory = world.state_dir().join("inventory.json");
    let damages: [Damage; 10] = [
        ("missing", |path| std::fs::remove_file(path).expect("removed")),
        ("truncated", truncate),
        ("garbage", |path| std::fs::write(path, [0xff, 0, 0x1b]).expect("written")),
        ("another version", |path| edit(path, |inventory| inventory["schema"] = json!("sublet.inventory/0"))),
        ("another boot's", |path| {
            edit(path, |inventory| inventory["fingerprint"]["boot_id"] = json!("an earlier one"));
        }),
        ("another driver's", |path| {
            edit(path, |inventory| inventory["fingerprint"]["driver_version"] = json!("535.129.03"));
        }),
        ("of other GPUs", |path| {
            edit(path, |inventory| inventory["fingerprint"]["gpus"] = json!(["0000:99:00.0"]));
        }),
        ("another owner's", |path| {
            lie(path);
            chown(path, Some(1000), Some(1000)).expect("chown");
        }),
        ("writable for all", |path| {
            lie(path);
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).expect("chmod");
        }),
        ("a link", |path| lie(&link_away(path))),
    ];
    assert!(world.sublet(&["refresh"]).status.success());
    let sound: Value = serde_json::from_slice(&std::fs::read(&inventory).expect("inventory")).expect("JSON");
    for (damage, apply) in damages {
        apply(&inventory);
        let bundle = world.bundle("one", &[("sublet.sm", "25")], SLEEP);
        let created = bundle.create();
        assert!(created.ok, "{damage}: {created:?}");
        let now: Value =
            serde_json::from_slice(&std::fs::read(&inventory).expect("inventory")).expect("JSON");
        assert_eq!(now["fingerprint"], sound["fingerprint"], "{damage}");
        assert_eq!(now["devices"][0]["name"], sound["devices"][0]["name"], "{damage}");
        assert!(std::fs::symlink_metadata(&inventory).expect("an inventory").is_file(), "{damage}");
        bundle.down();
    }
    let target = std::fs::read_to_string(world.state_dir().join("elsewhere")).expect("the link's target");
    assert!(target.contains(LIE), "written through the link");
    world.assert_empty();
}

#[test]
fn c4_a_pid_that_another_process_got_holds_no_lease() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let ledger = world.state_dir().join("ledger.json");
    assert_eq!(world.leases().len(), 2);
    let before = std::fs::read(&ledger).expect("the ledger");
    for id in ["first", "second"] {
        let mut command = Command::new(world.engine.program());
        let deleted =
            command.arg("--root").arg(world.runtime_root()).args(["delete", "--force", id]).output();
        assert!(deleted.expect("the runtime runs").status.success());
    }
    // As if the kernel had given the first container's pid to another process, which has another start time. Whoever takes
    // that for the container's may end it.
    let mut other = Command::new("sleep").arg("600").spawn().expect("it runs");
    let (pid, started) = (json!(other.id()), start_time(other.id()));
    std::fs::write(&ledger, &before).expect("written");
    edit(&ledger, |ledger| {
        for lease in ledger["leases"].as_array_mut().expect("leases") {
            lease["init"]["process"] = json!({"pid": pid, "start_time": started});
            if lease["container"]["id"] == "first" {
                lease["init"]["process"]["start_time"] = json!(started - 1);
            }
        }
    });
    assert!(world.sublet(&["gc"]).status.success());
    let left: Vec<Value> = world.leases().iter().map(|lease| lease["container_id"].clone()).collect();
    assert_eq!(left, ["second"], "the one whose process runs stays");
    edit(&ledger, |ledger| ledger["leases"][0]["init"]["process"]["start_time"] = json!(started - 1));
    assert!(eventually(|| world.leases().is_empty()));
    // A pending lease whose owner's pid was reused.
    std::fs::write(&ledger, &before).expect("written");
    edit(&ledger, |ledger| {
        let leases = ledger["leases"].as_array_mut().expect("leases");
        leases.truncate(1);
        leases[0]["init"] = Value::Null;
        leases[0]["state"] = json!("pending");
        leases[0]["owner"] = json!({"pid": pid, "start_time": started});
        ledger["daemons"] = json!([]);
    });
    assert_eq!(world.leases().len(), 1, "its owner runs");
    edit(&ledger, |ledger| ledger["leases"][0]["owner"]["start_time"] = json!(started + 1));
    world.assert_empty();
    assert_eq!(other.try_wait().expect("a child"), None, "it is nobody's container");
    other.kill().expect("it runs");
    other.wait().expect("a child");
    drop((first, second));
}

#[test]
fn c3_a_state_directory_that_others_can_write_is_not_used() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let [first, second] = two(&world);
    let dir = world.state_dir();
    let ledger = std::fs::read(dir.join("ledger.json")).expect("the ledger");
    let bundle = world.bundle("one", &[("sublet.sm", "10")], SLEEP);
    let above = dir.parent().expect("a directory").to_owned();
    let damages: [Damage; 5] = [
        ("writable for all", |dir| {
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o777)).expect("chmod");
        }),
        ("another user's", |dir| chown(dir, Some(1000), Some(1000)).expect("chown")),
        ("in another user's", |dir| chown(dir.parent().expect("one"), Some(1000), None).expect("chown")),
        ("in another user's, sticky", |dir| {
            let above = dir.parent().expect("one");
            chown(above, Some(1000), None).expect("chown");
            std::fs::set_permissions(above, std::fs::Permissions::from_mode(0o1777)).expect("chmod");
        }),
        ("in a group's", |dir| {
            let mode = std::fs::Permissions::from_mode(0o775);
            std::fs::set_permissions(dir.parent().expect("one"), mode).expect("chmod");
        }),
    ];
    for (damage, apply) in damages {
        apply(&dir);
        let refused = bundle.create();
        let why = if damage.starts_with("in ") {
            "which is above it"
        } else {
            "others than its owner may write to it"
        };
        assert!(!refused.ok && refused.stderr.contains(why), "{damage}: {refused:?}");
        assert_eq!(bundle.config(), bundle.spec, "{damage}");
        assert_eq!(std::fs::read(dir.join("ledger.json")).expect("the ledger"), ledger, "{damage}");
        for dir in [&dir, &above] {
            chown(dir, Some(0), Some(0)).expect("chown");
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        }
    }
    first.down();
    second.down();
    world.assert_empty();
}

/// When the process started: field 22 of /proc/PID/stat, the 20th after the name.
fn start_time(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("stat");
    let behind = &stat[stat.rfind(')').expect("a name") + 2..];
    behind.split(' ').nth(19).and_then(|field| field.parse().ok()).expect("a start time")
}
