//! `sublet bench run` in containers of the real low-level runtime, on the simulated driver.

use serde_json::Value;
use sublet_e2e::measuring::{bench, command, nothing_is_left, result, told};
use sublet_e2e::{World, skip_unless_root};

#[test]
fn every_mode_is_measured_beside_processes_by_hand() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nidle = \"0s\"\n");
    let refused = bench(&world, "a.json", &["-n", "1"]);
    assert!(!refused.status.success() && told(&refused).contains("--simulated"), "{}", told(&refused));

    let modes = "exclusive,time-slice,mps,mps:equal,dedicated,mps:40";
    let grid = ["--simulated", "--load", "small", "-n", "1,3", "--mode", modes, "--baseline", "by-hand"];
    let output = bench(&world, "a.json", &grid);
    // 3 x 40 % are more than the accounts have: named, not measured, and the exit code tells.
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    let found = result(&world, "a.json");
    assert_eq!((&found["schema"], &found["simulated"]), (&"sublet.bench/1".into(), &true.into()));
    let cells = found["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 22, "{}", told(&output));
    for cell in cells {
        let n = cell["n"].as_u64().expect("a number");
        let is_beyond = cell["mode"]["sm"]["percent"] == 40.0 && n == 3 && cell["by_hand"] == false;
        if is_beyond {
            assert!(cell["error"].as_str().expect("why").contains("[limits] sm_overcommit = 1.2 "), "{cell}");
            assert_eq!(cell["overcommitted"], true);
            continue;
        }
        let measured = &cell["measured"];
        assert_eq!(cell["error"], Value::Null, "{cell}");
        assert_eq!(measured["containers"].as_array().expect("containers").len() as u64, n);
        assert!(
            measured["mean_ms"].as_f64().expect("ms") >= 1.0,
            "the simulated GPU takes a millisecond: {cell}"
        );
        assert!(measured["per_second"].as_f64().is_some_and(|rate| rate > 1.0), "{cell}");
    }
    nothing_is_left(&world);

    let again = bench(&world, "a.json", &grid);
    assert!(told(&again).contains("exists: --resume goes on with it"), "{}", told(&again));
    let resumed = bench(&world, "a.json", &[&grid[..], &["--resume"]].concat());
    assert!(told(&resumed).contains("[1/1]"), "only what was missing: {}", told(&resumed));
    let other = bench(&world, "a.json", &["--simulated", "--resume", "--repeat", "2", "-n", "1"]);
    assert!(told(&other).contains("measured with another"), "{}", told(&other));
}

#[test]
fn a_program_of_the_users_own_and_what_goes_wrong_with_it() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nidle = \"0s\"\n");
    let root = world.dir.path().join("rootfs").display().to_string();
    let own = ["--simulated", "--mode", "time-slice", "-n", "2", "--image", &root, "--start-limit", "3s"];
    let run = |file: &str, more: &[&str], script: &str| {
        bench(&world, file, &[&own[..], more, &["--", "/bin/sh", "-c", script]].concat())
    };
    let works = "while sleep 0.02; do echo took 0.02 s; done";
    let output = run("own.json", &["--unit", "s", "--parse", "took ([0-9.]+)"], works);
    assert!(output.status.success(), "{}", told(&output));
    let cell = &result(&world, "own.json")["cells"][0];
    assert_eq!((&cell["load"], &cell["measured"]["mean_ms"]), (&"command".into(), &20.0.into()), "{cell}");

    // {n} is the container's number: the second ends early, the first goes on.
    let output = run(
        "one.json",
        &[],
        "echo 1; [ {n} = 0 ] || { echo no memory >&2; exit 3; }; while sleep 0.02; do echo 1; done",
    );
    assert!(output.status.success(), "{}", told(&output));
    let cell = &result(&world, "one.json")["cells"][0];
    let why = cell["error"].as_str().expect("an error");
    assert!(
        why.starts_with("1 of 2 containers did not work all the time") && why.contains("no memory"),
        "{why}"
    );
    assert!(
        cell["measured"]["containers"][0]["iterations"].as_u64().is_some_and(|count| count > 2),
        "{cell}"
    );

    for (script, expected) in [
        ("echo loading >&2; sleep 60", "no latency came from it within 3 s: loading"),
        ("exit 7", "exit status: 7"),
        ("/no/such/program", "not found"),
    ] {
        let output = run("none.json", &["--resume"], script);
        assert_eq!(output.status.code(), Some(1));
        let error = result(&world, "none.json")["cells"][0]["error"].to_string();
        assert!(error.contains(expected), "{script}: {error}");
        std::fs::remove_file(world.dir.path().join("none.json")).expect("removed");
    }
    let output = bench(&world, "x.json", &own);
    assert!(told(&output).contains("write it behind `--`"), "{}", told(&output));
    nothing_is_left(&world);
}

#[test]
fn a_gpu_in_use_is_left_alone_and_a_signal_leaves_nothing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[mps]\nidle = \"0s\"\n");
    let other =
        world.bundle("other", &[("sublet.mode", "time-slice")], &["/usr/bin/cuda-probe", "hold", "120"]);
    other.up();
    other.event("info");
    let one = ["--simulated", "--load", "small", "-n", "2", "--mode", "time-slice"];
    let refused = bench(&world, "a.json", &one);
    assert!(told(&refused).contains("the GPU is in use: 1 containers with a share"), "{}", told(&refused));
    let beside = bench(&world, "a.json", &[&one[..], &["--in-use"]].concat());
    assert!(beside.status.success(), "{}", told(&beside));
    assert_eq!(result(&world, "a.json")["in_use_by_others"], true);
    other.down();

    let mut child =
        command(&world, "long.json").args(["--time", "60s"]).args(one).spawn().expect("it starts");
    let pid = child.id();
    let bench = format!("sublet-bench-{pid}-1");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !has_lease(&world, &bench) && std::time::Instant::now() < deadline {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(has_lease(&world, &bench));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGINT)
        .expect("it runs");
    assert!(!child.wait().expect("it ends").success());
    assert!(!world.dir.path().join("long.json").exists());
    nothing_is_left(&world);
}

fn has_lease(world: &World, container: &str) -> bool {
    let listed = world.sublet(&["lease", "list", "--format", "json"]);
    String::from_utf8_lossy(&listed.stdout).contains(container)
}
