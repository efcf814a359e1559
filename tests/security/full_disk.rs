//! C5: a full disk, a read-only state directory, no file descriptors left. The container is refused or starts with its
//! share, and no lease is lost or duplicated. (SIGKILL: kill.rs.)

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use sublet_e2e::{Bundle, Finished, World, programs, skip_unless_root};

const SLEEP: &[&str] = &["/bin/sleep", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];

fn bad<'a>(world: &'a World, annotations: &[(&str, &str)]) -> Bundle<'a> {
    world.bundle("bad", annotations, SLEEP)
}

/// Compares all messages together, so that one run shows every change.
fn assert_lines(seen: &[String], expected: &[&str]) {
    let differ: Vec<_> = seen.iter().zip(expected).filter(|(seen, expected)| seen != expected).collect();
    assert!(differ.is_empty() && seen.len() == expected.len(), "{differ:#?}\nall: {seen:#?}");
}

/// `config.toml` with `from` replaced.
fn reconfigure(world: &World, from: &str, to: &str) {
    let text = fs::read_to_string(&world.config).expect("config.toml");
    assert!(text.contains(from), "{from} is not in {text}");
    fs::write(&world.config, text.replace(from, to)).expect("config.toml");
}

/// A mount over a directory, removed on drop.
struct Mounted(PathBuf);

impl Mounted {
    fn new(dir: PathBuf, arguments: &[&[&str]]) -> Self {
        fs::create_dir_all(&dir).expect("a mount point");
        for arguments in arguments {
            let status = Command::new("mount").args(*arguments).arg(&dir).status();
            assert!(status.expect("mount runs").success(), "mount {arguments:?} {}", dir.display());
        }
        Self(dir)
    }

    fn read_only(dir: PathBuf) -> Self {
        let itself = dir.display().to_string();
        fs::create_dir_all(&dir).expect("a mount point");
        Self::new(dir, &[&["--bind", &itself], &["-o", "remount,bind,ro"]])
    }

    /// A separate filesystem.
    fn small(dir: PathBuf) -> Self {
        Self::new(dir, &[&["-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs"]])
    }

    /// Fills the filesystem. Returns the file to remove.
    fn fill(&self) -> PathBuf {
        let filler = self.0.join("filler");
        let mut file = File::create(&filler).expect("a file");
        for size in [1 << 16, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        filler
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn c5_a_full_state_directory() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mounted = Mounted::small(world.state_dir());
    let keeper = world.bundle("keeper", SHARE, SLEEP);
    keeper.up();
    assert_eq!(world.leases()[0]["state"], "active");
    let filler = mounted.fill();
    let line = bad(&world, SHARE).refused();
    assert_lines(
        &[line],
        &[
            "$DIR/sim/run/ledger.json cannot be written: No space left on device (os error 28); run as root, or set state_dir to a directory that can be written",
        ],
    );
    assert_eq!(world.booked(), [json!("keeper")]);
    // The container can still end, and the next command releases its lease.
    keeper.down();
    fs::remove_file(filler).expect("the file");
    world.assert_empty();
    let after = bad(&world, SHARE);
    after.up();
    after.down();
    world.assert_empty();
}

/// The place in /var/lib of drains and of the record of use, which starts do not need.
#[test]
fn c5_a_full_lasting_directory() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mounted = Mounted::small(world.state_dir().join("lasting"));
    let keeper = world.bundle("keeper", SHARE, SLEEP);
    keeper.up();
    let said = |arguments: &[&str]| {
        Finished::of(&world.command("sublet").args(arguments).output().expect("it runs"))
    };
    let total = || {
        let report = said(&["report", "--format", "json"]);
        let report: Value = serde_json::from_str(&report.stdout).unwrap_or_else(|_| panic!("{report:?}"));
        report["total"].clone()
    };
    assert_eq!(total()["leases"], 1);
    let filler = mounted.fill();
    let other = world.bundle("other", SHARE, SLEEP);
    other.up();
    other.down();
    let report = said(&["report"]);
    assert!(report.ok && report.stderr.contains("what is not recorded yet is missing"), "{report:?}");
    let drain = said(&["drain", "0"]);
    assert!(!drain.ok && drain.stderr.contains("nothing was changed"), "{drain:?}");
    assert_eq!(world.status()["devices"][0]["drained"], json!(false));
    fs::remove_file(filler).expect("the file");
    let total = total();
    assert_eq!(
        (&total["leases"], &total["unseen_ends"]),
        (&json!(2), &json!(0)),
        "nothing was lost: {total}"
    );
    keeper.down();
    world.assert_empty();
}

#[test]
fn c5_a_bundle_on_a_full_disk() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = bad(&world, SHARE);
    let rootfs = world.bundle("elsewhere", &[], SLEEP).dir.join("rootfs");
    bundle.spec["root"]["path"] = json!(rootfs);
    let mounted = Mounted::small(bundle.dir.clone());
    bundle.write();
    let before = fs::read(bundle.dir.join("config.json")).expect("config.json");
    let filler = mounted.fill();
    let mut command = world.runtime();
    command.arg("create").arg("--bundle").arg(&bundle.dir).arg("bad").stdin(Stdio::null());
    let line = bundle.line(&Finished::of(&command.output().expect("it runs")));
    assert_lines(
        &[line],
        &["cannot write $DIR/bundles/bad/config.json, which was not changed: No space left on device (os \
             error 28)"],
    );
    assert_eq!(fs::read(bundle.dir.join("config.json")).expect("config.json"), before);
    assert_eq!(world.booked(), Vec::<Value>::new(), "it gives its lease back by itself");
    fs::remove_file(filler).expect("the file");
    world.assert_empty();
}

#[test]
fn c5_no_descriptors_left() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    // runc hangs with 3 descriptors, so it gets the normal limit.
    let (runtime, own) = (world.dir.path().join("runtime"), world.engine.program());
    programs::script(&runtime, &format!("ulimit -n 1024\nexec {own} \"$@\"\n"));
    reconfigure(&world, &format!("{:?}", [own]), &format!("{:?}", [&runtime]));
    let keeper = world.bundle("keeper", SHARE, SLEEP);
    keeper.up();
    let (mut started, mut refused) = (0, 0);
    for limit in (3..24).chain([64]) {
        let bundle = bad(&world, SHARE);
        bundle.write();
        let mut command = Command::new("prlimit");
        let shim = world.runtime();
        command.arg(format!("--nofile={limit}:")).arg(shim.get_program()).args(shim.get_args());
        command.envs(shim.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.arg("create").arg("--bundle").arg(&bundle.dir).arg("bad");
        let (null, said) = (Stdio::null, bundle.dir.join("err"));
        let err = File::create(&said).expect("a file");
        let created = command.stdin(null()).stdout(null()).stderr(err).status().expect("prlimit runs");
        let leases = world.leases();
        let states: Vec<_> = leases.iter().map(|lease| (&lease["container_id"], &lease["state"])).collect();
        let active = json!("active");
        let (ours, others) = ((&json!("bad"), &active), (&json!("keeper"), &active));
        if created.success() {
            started += 1;
            assert!(bundle.start().ok, "{limit}");
            assert!(
                states.contains(&ours) && states.contains(&others) && states.len() == 2,
                "{limit}: {states:?}"
            );
            assert_eq!(bundle.exec(&["/usr/bin/cuda-probe", "info"]).json()[0]["sm"], json!(32), "{limit}");
        } else {
            refused += 1;
            // An error of this process must not tell the user to change the image.
            let said = fs::read_to_string(said).expect("what was said");
            assert!(!said.contains("from the image"), "{limit}: {said}");
            assert_eq!(states, [others], "{limit}");
        }
        bundle.down();
        assert_eq!(world.booked(), [json!("keeper")], "{limit}");
    }
    assert!(started > 0 && refused > 5, "{started} started, {refused} refused");
    keeper.down();
    world.assert_empty();
}

#[test]
fn c5_a_state_directory_that_cannot_be_used() {
    if skip_unless_root() {
        return;
    }
    let mut seen = Vec::new();
    let world = World::simulated("h200", "");
    {
        let _mounted = Mounted::read_only(world.state_dir());
        seen.push(bad(&world, SHARE).refused());
    }
    assert!(world.sublet(&["refresh"]).status.success());
    {
        let _mounted = Mounted::read_only(world.state_dir());
        seen.push(bad(&world, SHARE).refused());
        let doctor = world.sublet(&["doctor"]);
        let told = String::from_utf8_lossy(&doctor.stdout).into_owned();
        assert!(!doctor.status.success() && told.contains("is on a read-only file system"), "{told}");
    }
    let state_dir = world.state_dir();
    let below = world.dir.path().join("file");
    std::fs::write(&below, "").expect("a file");
    reconfigure(&world, &state_dir.display().to_string(), &below.display().to_string());
    seen.push(bad(&world, SHARE).refused());
    let deep = world.dir.path().join("d".repeat(90));
    reconfigure(&world, &below.display().to_string(), &deep.display().to_string());
    seen.push(bad(&world, SHARE).refused());
    let deep = deep.file_name().expect("a name").to_string_lossy().into_owned();
    let seen: Vec<_> = seen.iter().map(|line| line.replace(&deep, "$DEEP")).collect();
    assert_lines(
        &seen,
        &[
            "cannot write $DIR/sim/run/refresh.lock: Read-only file system (os error 30); run as root, or set state_dir to a directory that can be written",
            "$DIR/sim/run/lock cannot be locked: Read-only file system (os error 30); run as root, or set state_dir to a directory that can be written",
            "state directory $DIR/file: is no directory; run as root, or set state_dir in the configuration",
            "configuration $DIR/sim/config.toml:1:1: state_dir must be at most 38 bytes long, because \
             paths of MPS sockets below it may have 107",
        ],
    );
}
