//! The file system of the state directory is unmounted under running containers. In the directory below it nothing is
//! given, ended or forgotten, and containers still end; mounted again, everything goes on; lost for ever, the ledger is
//! rebuilt when root says so. A directory that was emptied: tests/security/elsewhere.rs.

use std::path::PathBuf;
use std::process::Command;

use sublet_e2e::killing::mount_points;
use sublet_e2e::user::run;
use sublet_e2e::{Finished, World, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const LARGE: &[(&str, &str)] = &[("sublet.sm", "45"), ("sublet.memory", "8GiB")];
const WHOLE: &[(&str, &str)] = &[("sublet.mode", "exclusive")];
/// Under MPS, its GPU has compute mode `EXCLUSIVE_PROCESS` meanwhile.
const CONFIG: &str = "[mps]\nexclusive_compute_mode = \"always\"\n";

/// A world whose state directory is a tmpfs of its own, which is also mounted elsewhere, so that it can come back.
struct Mounted {
    world: World,
    store: PathBuf,
    /// A place where runtimes usually keep their records: a link to the world's.
    usual: PathBuf,
}

impl Mounted {
    fn new() -> Self {
        let world = World::simulated("h200", CONFIG);
        let path = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
        let store = world.dir.path().join("store");
        std::fs::create_dir_all(&store).expect("a directory");
        std::fs::create_dir_all(world.state_dir()).expect("a directory");
        run("mount", &["-t", "tmpfs", "-o", "mode=755", "tmpfs", &path(&store)]);
        let name = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
        let usual = PathBuf::from(format!("/run/docker/runtime-{name}"));
        std::fs::create_dir_all(&usual).expect("a directory");
        std::fs::create_dir_all(world.runtime_root()).expect("a directory");
        std::os::unix::fs::symlink(world.runtime_root(), usual.join("moby")).expect("a link");
        let mounted = Self { world, store, usual };
        mounted.mount();
        assert!(mounted.world.sublet(&["refresh"]).status.success());
        mounted
    }

    fn mount(&self) {
        run("mount", &["--bind", &self.store.to_string_lossy(), &self.world.state_dir().to_string_lossy()]);
    }

    fn unmount(&self) {
        run("umount", &["--lazy", &self.world.state_dir().to_string_lossy()]);
    }

    fn sublet(&self, arguments: &[&str]) -> Finished {
        Finished::of(&self.world.sublet(arguments))
    }

    fn modes(&self) -> String {
        let program = self.world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
        let query = ["--query-gpu=compute_mode", "--format=csv,noheader"];
        let output = Command::new(program).args(query).output().expect("nvidia-smi runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// No lease, no daemon, no changed compute mode, no mount point.
    fn assert_nothing_is_left(&self) {
        self.world.assert_empty();
        assert!(self.modes().lines().all(|mode| mode.trim() == "Default"), "{}", self.modes());
        let points = mount_points(&self.world.dir.path().join("bundles"));
        assert_eq!(points, "", "mount points are left");
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.usual);
        for dir in [&self.world.state_dir(), &self.store] {
            let _ = Command::new("umount").arg("--lazy").arg(dir).status();
        }
    }
}

fn is_told(refused: &Finished) {
    let told =
        ["again, and sublet goes on", "sublet gc --rebuild"].iter().all(|part| refused.stderr.contains(part));
    assert!(!refused.ok && told, "{refused:?}");
}

#[test]
fn what_is_unmounted_is_waited_for_and_containers_end_meanwhile() {
    if skip_unless_root() {
        return;
    }
    let mounted = Mounted::new();
    let world = &mounted.world;
    let (ending, staying) = (world.bundle("ending", LARGE, HOLD), world.bundle("staying", LARGE, HOLD));
    let other = world.bundle("other", &[("sublet.sm", "5")], HOLD);
    ending.up();
    staying.up();
    let ledger = || std::fs::read_to_string(world.state_dir().join("ledger.json"));
    let (before, daemons) = (ledger().expect("a ledger"), world.daemons());
    assert!(mounted.modes().contains("Exclusive_Process"), "{}", mounted.modes());
    mounted.unmount();
    is_told(&other.create());
    for arguments in [&["gc"][..], &["status"], &["mps", "list"], &["drain", "0"]] {
        is_told(&mounted.sublet(arguments));
    }
    assert!(ledger().is_err(), "nothing is rebuilt there");
    // Its daemon's sockets are there too.
    is_told(&staying.exec(&["/bin/true"]));
    ending.down();
    assert_eq!(world.daemons(), daemons, "no daemon is ended");
    mounted.mount();
    assert_eq!(ledger().expect("a ledger"), before, "nothing was changed");
    assert!(mounted.sublet(&["gc"]).ok);
    assert_eq!(world.leases().len(), 1);
    other.up();
    other.down();
    staying.down();
    mounted.assert_nothing_is_left();
}

/// No record of a runtime's shows the lease of a hook at prestart. Its MPS daemon does.
#[test]
fn a_daemon_alone_tells_of_a_ledger_that_is_unmounted() {
    if skip_unless_root() {
        return;
    }
    let mounted = Mounted::new();
    let mut bundle = mounted.world.bundle("late", LARGE, HOLD);
    bundle.hook(&["prestart", "poststop"]);
    bundle.up();
    mounted.unmount();
    let refused = mounted.world.bundle("other", &[("sublet.sm", "5")], HOLD).create();
    is_told(&refused);
    assert!(refused.stderr.contains("MPS daemon"), "{refused:?}");
    bundle.down();
    mounted.mount();
    assert!(mounted.sublet(&["gc"]).ok);
    mounted.assert_nothing_is_left();
}

#[test]
fn what_is_lost_for_ever_is_rebuilt_by_one_command() {
    if skip_unless_root() {
        return;
    }
    let mounted = Mounted::new();
    let world = &mounted.world;
    // A probe ends with its MPS server, and the daemon of a directory that is gone is started anew.
    let mine = world.bundle("mine", LARGE, &["/bin/sleep", "120"]);
    mine.up();
    let leases = world.leases();
    mounted.unmount();
    run("mount", &["-t", "tmpfs", "-o", "mode=755", "tmpfs", &world.state_dir().to_string_lossy()]);
    is_told(&mounted.sublet(&["gc"]));
    let rebuilt = mounted.sublet(&["gc", "--rebuild"]);
    assert!(rebuilt.ok, "{rebuilt:?}");
    let ids =
        |leases: &[serde_json::Value]| leases.iter().map(|lease| lease["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&world.leases()), ids(&leases), "{rebuilt:?}");
    let other = world.bundle("other", &[("sublet.gpu", "0"), ("sublet.sm", "60")], HOLD);
    let refused = other.create();
    assert!(!refused.ok && refused.stderr.contains("SM left"), "{refused:?}");
    assert!(mounted.sublet(&["doctor", "--quick"]).stdout.contains(", 1 leases"));
    mine.down();
    assert!(mounted.sublet(&["gc", "--rebuild"]).ok, "where there is a ledger, it is the one that is there");
    world.assert_empty();
}

/// The directory below has a ledger of its own, of before something was mounted over it.
#[test]
fn a_ledger_below_takes_no_lease_either_and_doctor_tells_why() {
    if skip_unless_root() {
        return;
    }
    let mounted = Mounted::new();
    let world = &mounted.world;
    mounted.unmount();
    assert!(mounted.sublet(&["gc"]).ok);
    let doctor = || mounted.sublet(&["doctor", "--quick"]).stdout;
    assert!(!doctor().contains("is not that of"), "{}", doctor());
    mounted.mount();
    let mine = world.bundle("mine", LARGE, HOLD);
    mine.up();
    assert!(!doctor().contains("is not that of"), "{}", doctor());
    mounted.unmount();
    assert!(doctor().contains("is not that of"), "{}", doctor());
    is_told(&world.bundle("other", &[("sublet.sm", "5")], HOLD).create());
    mounted.mount();
    mine.down();
    mounted.assert_nothing_is_left();
}

/// Nothing ran when the file system was unmounted, so a container was started below.
#[test]
fn what_runs_by_the_ledger_below_is_not_given_a_second_time() {
    if skip_unless_root() {
        return;
    }
    let mounted = Mounted::new();
    let world = &mounted.world;
    mounted.unmount();
    let (mine, other) = (world.bundle("mine", WHOLE, HOLD), world.bundle("other", WHOLE, HOLD));
    mine.up();
    let leases = world.leases();
    mounted.mount();
    is_told(&other.create());
    assert!(mounted.sublet(&["gc", "--rebuild"]).ok);
    assert_eq!(world.leases(), leases);
    let refused = other.create();
    assert!(!refused.ok && refused.stderr.contains("no room"), "{refused:?}");
    mine.down();
    other.up();
    other.down();
    mounted.assert_nothing_is_left();
}
