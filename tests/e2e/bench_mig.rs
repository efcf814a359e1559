//! `sublet bench run` on the MIG devices of a GPU, and on those that are created for it.

use serde_json::Value;
use sublet_e2e::measuring::{bench, command, nothing_is_left, result, told};
use sublet_e2e::{World, eventually, mig, skip_unless_root};

const IDLE: &str = "[mps]\nidle = \"0s\"\n";

/// What was said of each cell: mode, number, and why there is no measurement; a measured one is looked at.
fn cells(world: &World, file: &str) -> Vec<(String, u64, String)> {
    let found = result(world, file);
    let cells = found["cells"].as_array().expect("cells");
    let said = |cell: &Value| {
        let mode = &cell["mode"];
        let n = cell["n"].as_u64().expect("a number");
        let why = cell["error"].as_str().unwrap_or_default().to_owned();
        if why.is_empty() {
            let each = cell["measured"]["containers"].as_array().expect("containers");
            assert_eq!(each.len() as u64, n, "{cell}");
            assert!(
                each.iter().all(|one| one["iterations"].as_u64().is_some_and(|count| count > 2)),
                "{cell}"
            );
        } else {
            assert_eq!(cell["measured"], Value::Null, "{cell}");
        }
        let profile = mode["profile"].as_str().unwrap_or_default();
        (format!("{} {profile}", mode["sharing"].as_str().expect("a mode")).trim().to_owned(), n, why)
    };
    cells.iter().map(said).collect()
}

/// Those of these cells that were not measured.
fn not_measured(world: &World, file: &str, count: usize) -> Vec<(String, u64, String)> {
    let mut cells = cells(world, file);
    assert_eq!(cells.len(), count, "{cells:?}");
    cells.retain(|(_, _, why)| !why.is_empty());
    cells
}

#[test]
fn the_devices_of_a_gpu_in_mig_mode() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a100x2-mig", IDLE);
    let before = mig::bare(&world);
    let modes = "exclusive,mig,mig:1c.2g.10gb,mig:1g.5gb,mig:7g.40gb,time-slice";
    let grid = ["--simulated", "--load", "small", "-n", "1,2,5", "--mode", modes];
    let output = bench(&world, "a.json", &grid);
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    let off = "MIG mode of the GPU is on: only mig can be measured on it";
    let has = |kind: &str, count: u32| {
        format!(
            "each container needs a {kind}, and the GPU has {count}; its MIG devices: 4g.20gb, 1c.2g.10gb, 1c.2g.10gb, \
             1g.5gb (`sublet mig apply` changes them)"
        )
    };
    let expected = [
        ("exclusive", 1, off.to_owned()),
        ("mig", 5, has("MIG device", 4)),
        ("mig 1c.2g.10gb", 5, has("1c.2g.10gb", 2)),
        ("mig 1g.5gb", 2, has("1g.5gb", 1)),
        ("mig 1g.5gb", 5, has("1g.5gb", 1)),
        ("mig 7g.40gb", 1, has("7g.40gb", 0)),
        ("mig 7g.40gb", 2, has("7g.40gb", 0)),
        ("mig 7g.40gb", 5, has("7g.40gb", 0)),
        ("time-slice", 1, off.to_owned()),
        ("time-slice", 2, off.to_owned()),
        ("time-slice", 5, off.to_owned()),
    ];
    let expected = expected.map(|(mode, n, why)| (mode.to_owned(), n, why));
    assert_eq!(not_measured(&world, "a.json", 16), expected);
    nothing_is_left(&world);
    assert_eq!(mig::bare(&world), before);

    // By hand each process gets a MIG device, too. Without modes it is mig.
    let by_hand = ["--simulated", "--load", "small", "-n", "1,4", "--baseline", "by-hand"];
    let output = bench(&world, "b.json", &by_hand);
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(not_measured(&world, "b.json", 4), []);
    // The other GPU is in MIG mode no more than any.
    let other = ["--simulated", "--load", "small", "-n", "1", "--mode", "exclusive,mig", "--gpu", "1"];
    let _ = bench(&world, "c.json", &other);
    let why = "MIG mode of the GPU is off: `sublet mig apply` switches it on".to_owned();
    assert_eq!(not_measured(&world, "c.json", 2), [("mig".to_owned(), 1, why)]);
    nothing_is_left(&world);
    assert_eq!(mig::bare(&world), before);
}

#[test]
fn instances_that_are_created_for_the_containers() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", &format!("[mig]\ndynamic = true\n{IDLE}"));
    let modes = "mig,mig:3g.71gb,mig:1g.5gb";
    let grid = ["--simulated", "--load", "small", "-n", "1,7,8", "--mode", modes];
    let output = bench(&world, "a.json", &grid);
    assert_eq!(output.status.code(), Some(1), "{}", told(&output));
    let found = not_measured(&world, "a.json", 9);
    let starts = |at: usize, mode: &str, n: u64, why: &str| {
        let cell = &found[at];
        assert!((cell.0.as_str(), cell.1) == (mode, n) && cell.2.starts_with(why), "{cell:?}");
    };
    starts(0, "mig", 8, "container 8 gets no MIG device: GPU 0 has no room for a 1g.18gb beside ");
    starts(1, "mig 3g.71gb", 7, "container 3 gets no MIG device: GPU 0 has no room for a 3g.71gb beside ");
    starts(2, "mig 3g.71gb", 8, "container 3 gets no MIG device: ");
    starts(3, "mig 1g.5gb", 1, "container 1 gets no MIG device: GPU 0 (NVIDIA H200) has no profile 1g.5gb");
    assert_eq!(found.len(), 6);
    nothing_is_left(&world);
    mig::assert_nothing_made(&world);

    let by_hand = ["--simulated", "--load", "small", "-n", "1", "--baseline", "by-hand"];
    let _ = bench(&world, "b.json", &by_hand);
    let found = not_measured(&world, "b.json", 2);
    assert!(found.len() == 1 && found[0].2.contains("the GPU has 0; its MIG devices: none"), "{found:?}");
    // One that an administrator made stays, and is used first.
    let _ = mig::smi(&world, &["mig", "-i", "0", "-cgi", "1g.18gb", "-C"]);
    let there = mig::bare(&world);
    let output = bench(&world, "c.json", &["--simulated", "--load", "small", "-n", "3", "--mode", "mig"]);
    assert!(output.status.success(), "{}", told(&output));
    assert_eq!(not_measured(&world, "c.json", 1), []);
    nothing_is_left(&world);
    assert_eq!(mig::bare(&world), there);
}

#[test]
fn ctrl_c_destroys_what_was_created() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", &format!("[mig]\ndynamic = true\n{IDLE}"));
    let mut child = command(&world, "a.json")
        .args(["--time", "60s", "--simulated", "--load", "small", "-n", "3", "--mode", "mig"])
        .spawn()
        .expect("it starts");
    assert!(eventually(|| mig::bare(&world).len() == 3), "{:?}", mig::bare(&world));
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("it runs");
    let began = std::time::Instant::now();
    assert!(!child.wait().expect("it ends").success());
    // The last of them was still being created.
    assert!(began.elapsed() < std::time::Duration::from_secs(20), "{:?}", began.elapsed());
    assert!(!world.dir.path().join("a.json").exists());
    nothing_is_left(&world);
    mig::assert_nothing_made(&world);
}
