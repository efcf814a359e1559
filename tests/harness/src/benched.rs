//! What `sublet bench run` does with an engine that it finds by itself: built-in loads without an image, a program of an
//! image, servers, what goes wrong, and a signal in the middle. Nothing may be left of any.

use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::world::{World, eventually};

/// What is said of a container that worked and had no turn in the measured time.
const NO_TURN: &str = "no iteration of it ended in that time";

/// An engine, as `sublet bench` finds it.
pub struct Benched<'a> {
    /// Its driver, configuration and leases.
    pub world: &'a World,
    /// What the environment says of it.
    pub environment: Vec<(String, String)>,
    /// What its version begins with.
    pub version: &'a str,
    /// An image with busybox.
    pub image: &'a str,
    /// The names of all its containers.
    pub containers: &'a dyn Fn() -> String,
}

impl Benched<'_> {
    /// A short measurement into `file` in the world's directory.
    fn command(&self, file: &str, more: &[&str]) -> Command {
        let dir = self.world.dir.path();
        let mut command = self.world.command("sublet");
        command.envs(self.environment.clone()).args(["bench", "run", "--simulated", "--warm-up", "100ms"]);
        command.arg("--output").arg(dir.join(file)).args(more);
        command
    }

    /// The first cell that it came to, after it was run to its end.
    fn cell(&self, file: &str, more: &[&str]) -> (Value, Output) {
        // Longer than an iteration on busy processors: one that ends in it makes a cell.
        let output = self.command(file, &[&["--time", "1s"], more].concat()).output().expect("it runs");
        self.nothing_is_left();
        (self.result(file)["cells"][0].clone(), output)
    }

    fn result(&self, file: &str) -> Value {
        let path = self.world.dir.path().join(file);
        std::fs::read(path).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).expect("JSON"))
    }

    fn nothing_is_left(&self) {
        let containers = || (self.containers)();
        assert!(eventually(|| !containers().contains("sublet-bench-")), "{}", containers());
        assert!(eventually(|| self.world.leases().is_empty()), "{:?}", self.world.leases());
    }
}

/// Containers of this program itself, in three modes.
///
/// # Panics
/// Something is not as it should be.
pub fn built_in_loads(bench: &Benched<'_>) {
    let grid = ["--load", "small,mixed", "-n", "1,3", "--mode", "time-slice,mps,dedicated"];
    let (_, output) = bench.cell("loads.json", &grid);
    let result = bench.result("loads.json");
    let engine = result["machine"]["engine"].as_str().unwrap_or_default();
    assert!(engine.starts_with(bench.version), "{engine}: {output:?}");
    let cells = result["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 12, "{output:?}");
    // On busy processors not every one has a turn in the measured time. It had one before, or there is no measurement.
    let late = |error: &Value| error.as_str().is_some_and(|why| why.ends_with(NO_TURN));
    for cell in cells {
        assert!(cell["error"].is_null() || late(&cell["error"]), "{cell}");
        let containers = cell["measured"]["containers"].as_array().expect("containers");
        let works = |one: &Value| one["error"].is_null() && one["iterations"].as_u64() > Some(0);
        assert!(containers.iter().all(|one| works(one) || late(&one["error"])), "{cell}");
        assert!(containers.iter().any(works), "{cell}");
        assert_eq!(containers.len() as u64, cell["n"], "{cell}");
    }
}

/// An image's program that prints latencies, and what may be wrong with it.
///
/// # Panics
/// Something is not as it should be.
pub fn a_program(bench: &Benched<'_>) {
    let own = ["--mode", "mps", "-n", "2", "--image", bench.image];
    let script = |file, more: &[&str], script| {
        bench.cell(file, &[&own[..], more, &["--", "/bin/sh", "-c", script]].concat())
    };
    let works = "while sleep 0.02; do echo took 0.02 s; done";
    let (cell, output) = script("own.json", &["--unit", "s", "--parse", "took ([0-9.]+)"], works);
    assert_eq!(cell["measured"]["mean_ms"], 20.0, "{output:?}");
    let told = script("option.json", &["--run-option=--env=MS=7"], "while sleep 0.02; do echo $MS; done");
    assert_eq!(told.0["measured"]["mean_ms"], 7.0, "{:?}", told.1);

    let error = |(cell, output): (Value, Output)| {
        assert_eq!((output.status.code(), &cell["measured"]), (Some(1), &Value::Null), "{output:?}");
        cell["error"].as_str().expect("why").to_owned()
    };
    let silent = error(script("silent.json", &["--start-limit", "3s"], "echo loading >&2; sleep 60"));
    assert!(silent.contains("no latency came from it within 3 s: loading"), "{silent}");
    let missing = error(bench.cell("none.json", &[&own[..], &["--", "/no/such/program"]].concat()));
    assert!(missing.contains("/no/such/program"), "{missing}");
    let image = ["--mode", "mps", "-n", "1", "--image", "127.0.0.1:9/none", "--", "true"];
    let unknown = error(bench.cell("image.json", &image));
    assert!(unknown.contains("127.0.0.1:9"), "{unknown}");
}

/// Servers that are asked, and one that does not know what it is asked for.
///
/// # Panics
/// Something is not as it should be.
pub fn servers(bench: &Benched<'_>) {
    let serve = "echo yes > /tmp/index.html; exec busybox httpd -f -p 127.0.0.1:{port} -h /tmp";
    let ask = |file, url| {
        let server =
            ["--run-option=--network=host", "--http", url, "--start-limit", "5s", "--mode", "time-slice"];
        let words = ["-n", "2", "--image", bench.image, "--", "/bin/sh", "-c", serve];
        bench.cell(file, &[&server[..], &words].concat())
    };
    let (cell, output) = ask("http.json", "http://127.0.0.1:{port}/index.html");
    assert_eq!((&cell["load"], &cell["error"]), (&"http".into(), &Value::Null), "{output:?}");
    for one in cell["measured"]["containers"].as_array().expect("containers") {
        assert!(one["iterations"].as_u64() > Some(2), "{cell}");
    }
    let (cell, output) = ask("404.json", "http://127.0.0.1:{port}/other");
    let why = cell["error"].as_str().unwrap_or_default();
    assert!(why.contains("/other: http status: 404") && cell["measured"].is_null(), "{cell} {output:?}");
}

/// Ctrl-C while containers run.
///
/// # Panics
/// Something is not as it should be.
pub fn a_signal(bench: &Benched<'_>) {
    let grid = ["--time", "60s", "--load", "small", "-n", "2", "--mode", "time-slice"];
    let mut child = bench.command("long.json", &grid).spawn().expect("it starts");
    assert!(eventually(|| bench.world.leases().len() == 2), "{:?}", bench.world.leases());
    kill(Pid::from_raw(i32::try_from(child.id()).expect("a pid")), Signal::SIGINT).expect("it runs");
    assert!(!child.wait().expect("it ends").success());
    bench.nothing_is_left();
    assert_eq!(bench.result("long.json"), Value::Null);
}

/// The tests of an engine, which `$with` gives to each.
#[macro_export]
macro_rules! benched_by {
    ($with:ident) => {
        #[test]
        fn built_in_loads_need_no_image() {
            $with($crate::benched::built_in_loads);
        }

        #[test]
        fn a_program_of_the_users_own() {
            $with($crate::benched::a_program);
        }

        #[test]
        fn servers_are_asked() {
            $with($crate::benched::servers);
        }

        #[test]
        fn a_signal_leaves_nothing() {
            $with($crate::benched::a_signal);
        }
    };
}
