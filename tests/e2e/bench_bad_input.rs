//! What `sublet bench` says to hosts, numbers, files and terminals that it cannot use, and what it leaves behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sublet_e2e::measuring::{bench, command, nothing_is_left, result, told};
use sublet_e2e::terminal::Terminal;

use sublet_e2e::{World, skip_unless_root};

const IDLE: &str = "[mps]\nidle = \"0s\"\n";
const ONE: &[&str] = &["--simulated", "--load", "small", "-n", "1", "--mode", "time-slice"];

/// What `sublet bench` says to these arguments, which it refuses.
fn refused(world: &World, arguments: &[&str]) -> String {
    let output = world.sublet(&[&["bench"], arguments].concat());
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{output:?}");
    told(&output)
}

/// Takes something from the driver below this root.
type Damage = fn(&Path);

#[test]
fn a_host_without_a_gpu_is_told_what_to_do() {
    if skip_unless_root() {
        return;
    }
    let hosts: [(Damage, &str); 2] = [
        (
            |root| {
                fs::write(root.join("sys/bus/pci/devices/0000:3b:00.0/config"), [0xff; 64]).expect("written");
            },
            "this host has no GPU 0: see `sublet status`",
        ),
        (
            |root| {
                for gone in ["proc/driver/nvidia", "sys/module/nvidia"] {
                    fs::remove_dir_all(root.join(gone)).expect("it was there");
                }
            },
            "no NVIDIA driver is loaded: $DIR/sim/proc/driver/nvidia/version is missing; install the driver or load it with `modprobe nvidia`",
        ),
    ];
    for (damage, said) in hosts {
        let world = World::simulated("h200", IDLE);
        damage(world.driver_root.as_ref().expect("simulated"));
        let output = bench(&world, "a.json", ONE);
        let line = told(&output).replace(world.dir.path().to_str().expect("UTF-8"), "$DIR");
        assert!(line.ends_with(&format!("{said}\n")) && output.status.code() == Some(1), "{line}");
        assert!(!world.dir.path().join("a.json").exists());
    }
    let world = World::simulated("h200", IDLE);
    let other = bench(&world, "a.json", &[ONE, &["--gpu", "7"]].concat());
    assert_eq!(told(&other), "sublet: this host has no GPU 7: see `sublet status`\n");
}

#[test]
fn more_sharers_than_the_accounts_let_in_name_the_key() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", IDLE);
    let many = ["--simulated", "--load", "small", "-n", "12", "--mode", "time-slice,dedicated"];
    let output = bench(&world, "a.json", &many);
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    let found = result(&world, "a.json");
    let cells = found["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    for cell in cells {
        let why = cell["error"].as_str().expect("why");
        assert_eq!(why, "more than the GPU has: set [limits] time_slice_max = 12 to measure it");
        assert_eq!((&cell["measured"], &cell["overcommitted"]), (&Value::Null, &true.into()));
        assert!(told(&output).contains(why), "{}", told(&output));
    }
    nothing_is_left(&world);
    // The key that it names lets them in.
    world.configure("[limits]\ntime_slice_max = 12\n");
    let output =
        bench(&world, "b.json", &many[..6].iter().chain(&["time-slice"]).copied().collect::<Vec<_>>());
    assert!(output.status.success(), "{}", told(&output));
    let cell = &result(&world, "b.json")["cells"][0];
    assert_eq!(cell["measured"]["containers"].as_array().map(Vec::len), Some(12), "{cell}");
    assert_eq!((&cell["error"], &cell["overcommitted"]), (&Value::Null, &true.into()));
    nothing_is_left(&world);
}

#[test]
fn results_of_another_form_and_other_files_are_left_as_they_are() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", IDLE);
    let path = world.dir.path().join("a.json");
    let file = path.to_str().expect("UTF-8");
    for (text, said) in [
        (
            "{\"schema\": \"sublet.bench/2\", \"cells\": []}",
            "its form is sublet.bench/2, and this sublet reads sublet.bench/1",
        ),
        ("{\"schema\": \"sublet.bench/1\", \"cells\": []}", "is no result of `sublet bench`: missing field"),
        ("{\"schema\": \"\\u001b[2Jx\"}", "its form is \\u{1b}[2Jx"),
        ("{}", "it has no schema"),
        ("", "is no result of `sublet bench`"),
        ("\u{0}\u{1}", "is no result of `sublet bench`"),
    ] {
        fs::write(&path, text).expect("written");
        let resumed = bench(&world, "a.json", &[ONE, &["--resume"]].concat());
        assert_eq!(resumed.status.code(), Some(1));
        let html = world.dir.path().join("page.html");
        let show = ["show", file, "--html", html.to_str().expect("UTF-8")];
        let all = [
            told(&resumed),
            refused(&world, &show),
            refused(&world, &["compare", file, "published"]),
            refused(&world, &["compare", "published", file]),
        ];
        for line in all {
            assert!(line.contains(said) && !line.contains('\u{1b}'), "{text}: {line}");
        }
        assert!(!html.exists());
        assert_eq!(fs::read_to_string(&path).expect("it is there"), text);
        nothing_is_left(&world);
    }
    fs::remove_file(&path).expect("removed");
    fs::create_dir(&path).expect("a directory");
    let resumed = bench(&world, "a.json", &[ONE, &["--resume"]].concat());
    assert!(told(&resumed).contains("directory"), "{}", told(&resumed));
    for arguments in [&["show", file][..], &["compare", file, file], &["show", "/nonexistent"]] {
        let line = refused(&world, arguments);
        assert!(line.contains("directory"), "{line}");
    }
}

#[test]
fn a_directory_that_is_not_there_or_takes_no_file_is_refused_before_anything_starts() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", IDLE);
    let proc = Path::new("/proc/self").join("a.json");
    let below_a_file = world.config.join("a.json");
    fs::create_dir(world.dir.path().join("dir")).expect("a directory");
    for (file, said) in [
        (Path::new("no/such/a.json"), "no/such is no directory"),
        (&below_a_file, "config.toml is no directory"),
        (&proc, "nothing can be written into /proc/self"),
        (Path::new("dir"), "/dir: it is a directory"),
        (Path::new("dir/.."), "/dir/..: it is a directory"),
    ] {
        let output = bench(&world, file.to_str().expect("UTF-8"), ONE);
        let line = told(&output);
        assert!(line.contains(said), "{}: {line}", file.display());
        assert!(!line.contains("[1/1]") && output.status.code() == Some(1), "{line}");
        nothing_is_left(&world);
    }
}

/// A small file system, removed on drop.
struct Small(PathBuf);

impl Small {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).expect("a mount point");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).arg(&dir).status();
        assert!(mounted.expect("mount runs").success());
        Self(dir)
    }

    /// Takes all that is left.
    fn fill(&self) {
        use std::io::Write as _;
        let mut file = fs::File::create(self.0.join("filler")).expect("a file");
        while file.write_all(&[0; 512]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_what_was_there_before_and_nothing_else() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", IDLE);
    let small = Small::new(world.dir.path().join("small"));
    assert!(bench(&world, "small/a.json", ONE).status.success());
    let before = fs::read(small.0.join("a.json")).expect("a result");
    small.fill();
    let more = ["--simulated", "--load", "small", "-n", "2,1", "--mode", "time-slice", "--resume"];
    let output = bench(&world, "small/a.json", &more);
    let line = told(&output);
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert!(
        line.contains("No space left on device") && line.contains("what it had before is still there"),
        "{line}"
    );
    assert_eq!(fs::read(small.0.join("a.json")).expect("it is there"), before);
    let names = fs::read_dir(&small.0).expect("a directory").flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, ["a.json", "filler"]);
    nothing_is_left(&world);

    // Its own files have no room either.
    let full = Small::new(world.dir.path().join("full"));
    full.fill();
    let mut command = command(&world, "b.json");
    let output =
        command.args(["--time", "300ms"]).args(ONE).env("TMPDIR", &full.0).output().expect("it runs");
    assert!(told(&output).contains("No space left on device"), "{}", told(&output));
    assert_eq!(output.status.code(), Some(1));
    let left = fs::read_dir(&full.0).expect("a directory").flatten().map(|entry| entry.file_name());
    assert_eq!(left.collect::<Vec<_>>(), ["filler"]);
    nothing_is_left(&world);

    fs::remove_file(small.0.join("filler")).expect("removed");
    let output = bench(&world, "small/a.json", &more);
    assert!(output.status.success() && told(&output).contains("[1/1]"), "{}", told(&output));
}

/// What `program` shows on a terminal of 20 columns. A line that the terminal had to break is one of a single word.
fn on_a_narrow_terminal(program: &Command) -> String {
    let mut terminal = Terminal::start(program, 20, 300);
    assert!(terminal.ended().success(), "{}", terminal.screen());
    let screen = terminal.screen();
    for line in screen.lines() {
        let words = line.split_whitespace().count();
        assert!(line.chars().count() <= 20 || words == 1, "{line:?} is too long in\n{screen}");
    }
    screen
}

#[test]
fn a_terminal_of_20_columns_is_enough() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", IDLE);
    let mut run = command(&world, "a.json");
    run.args([
        "--time",
        "300ms",
        "--simulated",
        "--load",
        "small",
        "-n",
        "1,2",
        "--mode",
        "time-slice,mps:equal",
    ]);
    let seen = on_a_narrow_terminal(&run);
    for part in [
        "[1/4] small,\ntime-slice, 1 at\nonce\n    mean ",
        "\nleft] small, MPS,\n",
        "\n  2 at once  ",
        "SIMULATED:",
        "\nWritten to\n",
    ] {
        assert!(seen.contains(part), "{part:?} is not in\n{seen}");
    }
    let file = world.dir.path().join("a.json");
    let sublet = |arguments: &[&str]| {
        let mut command = world.command("sublet");
        command.arg("bench").args(arguments);
        on_a_narrow_terminal(&command)
    };
    let file = file.to_str().expect("UTF-8");
    let shown = sublet(&["show", file, "--details"]);
    assert!(shown.contains("\nMPS, 100 %/N each\n  1 at once  "), "{shown}");
    assert!(shown.contains("SMALL: fairness:"), "{shown}");
    let compared = sublet(&["compare", file, "published"]);
    assert!(
        compared.contains("time-slice, 1\nat once\n  A ms ") && compared.contains("\n  B/A  "),
        "{compared}"
    );
    let _ = sublet(&["show", "published"]);
    let _ = sublet(&["compare", "published", "published"]);
    nothing_is_left(&world);
}
