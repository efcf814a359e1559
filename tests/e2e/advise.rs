//! `sublet advise`: what it advises starts, for as many tenants as were asked about.

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, mig, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

/// What it prints, with its exit code.
fn advise(world: &World, arguments: &[&str], code: i32) -> (String, String) {
    let output = world.sublet(&[&["advise"], arguments].concat());
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stdout}{stderr}");
    (stdout, stderr)
}

fn document(world: &World, arguments: &[&str], code: i32) -> Value {
    let (stdout, _) = advise(world, &[arguments, &["--format", "json"]].concat(), code);
    serde_json::from_str(&stdout).expect("JSON")
}

/// Starts the tenants with the annotations that are advised for `arguments`, and ends them. Returns the advice, and the
/// lease of each.
fn started(world: &World, tenants: usize, arguments: &[&str]) -> (Value, Vec<Value>) {
    let number = tenants.to_string();
    let advised = document(world, &[arguments, &["--tenants", &number]].concat(), 0);
    let annotations: Vec<(&str, &str)> = advised["advice"]["annotations"]
        .as_object()
        .expect("annotations")
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str().expect("a text")))
        .collect();
    let tenants: Vec<Bundle<'_>> =
        (0..tenants).map(|one| world.bundle(&format!("tenant-{one}"), &annotations, HOLD)).collect();
    tenants.iter().for_each(Bundle::up);
    for tenant in &tenants {
        let info = tenant.event("info");
        assert_eq!((&info["error"], &info["count"]), (&Value::Null, &json!(1)), "{advised}");
    }
    let leases = world.leases();
    assert_eq!(leases.len(), tenants.len());
    tenants.iter().for_each(Bundle::down);
    world.assert_empty();
    (advised, leases)
}

#[test]
fn tenants_start_with_what_is_advised_on_one_gpu() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let modes = |leases: &[Value]| -> Vec<String> {
        let mode = |lease: &Value| format!("{} {}", lease["mode"], lease["memory_bytes"]).replace('"', "");
        leases.iter().map(mode).collect()
    };
    let (_, leases) = started(&world, 7, &["--trust", "all"]);
    assert_eq!(modes(&leases), ["mps 21206401024"; 7], "19.75 GiB: a seventh, rounded down");
    let (advised, leases) = started(&world, 7, &["--memory", "10GiB"]);
    assert_eq!(modes(&leases), ["time-slice 10737418240"; 7]);
    assert_eq!(advised["advice"]["cost"]["measured"], false);
    let (_, leases) = started(&world, 3, &["--trust", "all", "--p99", "20ms"]);
    assert!(leases.iter().all(|lease| lease["sm_percent"] == json!(33.3)), "{leases:?}");
    let (_, leases) = started(&world, 1, &["--trust", "none"]);
    assert_eq!(modes(&leases), ["exclusive null"]);
}

#[test]
fn tenants_without_trust_start_on_mig_devices() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("a30-mig", "");
    let (advised, leases) = started(&world, 2, &["--trust", "none"]);
    assert_eq!(advised["advice"]["mig_profile"], "1g.6gb");
    assert_ne!(leases[0]["device"], leases[1]["device"]);
    // Three of one profile there are not, but three that have 5 GiB.
    let (advised, _) = started(&world, 3, &["--trust", "none", "--memory", "5GiB"]);
    assert_eq!(advised["advice"]["annotations"], json!({"sublet.mode": "mig", "sublet.memory": "5GiB"}));
    let refused = document(&world, &["--trust", "none", "--tenants", "4"], 1);
    assert_eq!(refused["advice"], Value::Null);
    let why = refused["why_not"].as_str().expect("a reason");
    assert!(why.contains(" would be refused: no room"), "{why}");
    assert!(refused["would_help"].to_string().contains("sublet mig apply"), "{refused}");
}

#[test]
fn an_instance_that_is_made_for_the_tenant() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "[mig]\ndynamic = true\n");
    let advised = document(&world, &["--trust", "none", "--tenants", "1", "--memory", "10GiB"], 0);
    assert!(advised["advice"]["each_gets"][0].as_str().expect("a text").contains("1g.18gb"), "{advised}");
    let (_, leases) = started(&world, 1, &["--trust", "none", "--memory", "10GiB"]);
    assert_eq!(leases[0]["mode"], "mig");
    mig::assert_nothing_made(&world);
}

#[test]
fn instances_that_are_made_for_several_tenants() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "[mig]\ndynamic = true\n");
    for (tenants, memory, profile) in
        [(7, "10GiB", "1g.18gb"), (4, "30GiB", "1g.35gb"), (2, "60GiB", "3g.71gb")]
    {
        let (advised, leases) = started(&world, tenants, &["--trust", "none", "--memory", memory]);
        let gets = advised["advice"]["each_gets"].as_array().expect("texts");
        assert!(
            gets[0].as_str().expect("a text").starts_with(&format!("a {profile}, which is created")),
            "{advised}"
        );
        assert!(
            advised["advice"]["not_protected"].as_array().is_some_and(|lines| !lines.is_empty()),
            "{advised}"
        );
        let devices: std::collections::BTreeSet<_> =
            leases.iter().map(|lease| lease["device"].as_str()).collect();
        assert_eq!(devices.len(), tenants, "each has one of its own");
        mig::assert_nothing_made(&world);
    }
    for (tenants, memory, most) in [("8", "10GiB", 7), ("5", "30GiB", 4), ("3", "60GiB", 2)] {
        let refused = document(&world, &["--trust", "none", "--tenants", tenants, "--memory", memory], 1);
        let why = refused["why_not"].as_str().expect("a reason");
        assert!(why.contains("GPU 0 has no room for a "), "{why}");
        assert_eq!(refused["would_help"][0], format!("--tenants {most} would fit"), "{refused}");
    }
}

#[test]
fn one_instance_is_there_and_the_others_are_made() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "[mig]\ndynamic = true\n");
    let _ = mig::smi(&world, &["mig", "-i", "0", "-cgi", "1g.18gb", "-C"]);
    let there = mig::bare(&world);
    let (advised, leases) = started(&world, 3, &["--trust", "none"]);
    let advice = &advised["advice"];
    assert_eq!(advice["devices"].as_array().map(Vec::len), Some(1), "{advice}");
    assert_eq!(advice["devices"][0], leases[0]["device"]);
    let gets = [
        "a 1g.18gb, all 16 SMs, all its 16 GiB of memory",
        "a 1g.18gb, which is created when it starts: 16 SMs, 16 GiB of memory",
    ];
    assert_eq!(advice["each_gets"], json!(gets));
    assert_eq!(mig::bare(&world), there);
}

/// The command that it names is one that `sublet bench` takes.
#[test]
fn the_measurement_that_it_names_can_be_run() {
    if skip_unless_root() {
        return;
    }
    for (topology, gpu) in [("h200", "0"), ("h200-h100", "1"), ("a30-mig", "0")] {
        let world = World::simulated(topology, "");
        for trust in ["none", "some", "all"] {
            let asked =
                document(&world, &["--trust", trust, "--tenants", "1", "--p99", "20ms", "--gpu", gpu], 0);
            let remarks = asked["remarks"].to_string();
            let rest = remarks.split("measure it with: sublet ").nth(1).expect("a command");
            let words = rest.split('"').next().expect("a command").split(' ');
            // It gets as far as looking at the driver.
            let output = world.sublet(&words.collect::<Vec<_>>());
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains("the driver is sublet's simulated one"), "{rest}: {said}");
        }
    }
}

const RESULT: &str = r#"{"schema":"sublet.bench/1","title":"t","simulated":false,"in_use_by_others":false,"time":"",
    "machine":{"gpu":"NVIDIA H200"},"settings":{},"cells":[
    {"load":"small","mode":{"sharing":"exclusive","sm":null},"n":1,"measured":{"mean_ms":7.2,"p99_ms":8}},
    {"load":"small","mode":{"sharing":"mps","sm":null},"n":7,"measured":{"mean_ms":29.6,"p99_ms":50}},
    {"load":"small","mode":{"sharing":"mps","sm":"equal"},"n":7,"measured":{"mean_ms":36.1,"p99_ms":40}}]}"#;

#[test]
fn a_result_is_advised_from_and_questions_without_sense_are_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let path = world.dir.path().join("result.json");
    std::fs::write(&path, RESULT).expect("written");
    let file = path.to_str().expect("UTF-8");
    let (advised, leases) = started(&world, 7, &["--from", file, "--trust", "all", "--p99", "45ms"]);
    assert_eq!(leases[6]["sm_percent"], json!(14.2));
    let cost = &advised["advice"]["cost"];
    assert_eq!((&cost["measured"], &cost["n"], &cost["mean_ms"]), (&json!(true), &json!(7), &json!(36.1)));
    let (text, _) = advise(&world, &["--from", file, "--trust", "all"], 0);
    for part in [
        "Share GPU 0 (NVIDIA H200) among 7 tenants by MPS, on one server that they share.\n",
        "\nEach gets  all 132 SMs, 19.7 GiB of memory\n",
        "\nIt costs   (measured) mean 29.6 ms, p99 50.0 ms with 7 at once; alone mean 7.2 ms, p99 8.0 ms: 4.1 times as long",
        "\nNote       the driver is simulated\n",
        "\n  - a GPU fault in any container of this MPS server ends the work of all of them",
        "\n    docker run --runtime sublet --annotation sublet.memory=20224MiB --annotation sublet.mode=mps IMAGE\n",
        "\n        scale: 7\n        annotations:\n          sublet.memory: \"20224MiB\"\n",
        "\n    Annotation=sublet.memory=20224MiB\n    Annotation=sublet.mode=mps\n",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let refused = |arguments: &[&str]| advise(&world, arguments, 1).1;
    for (arguments, said) in [
        (&["--tenants", "0"][..], "--tenants 0: a number from 1 to 1000"),
        (&["--tenants", "10000"], "--tenants 10000: a number from 1 to 1000"),
        (&["--memory", "200GiB"], "--memory 200 GiB: the largest GPU in question has 140.4 GiB"),
        (&["--gpu", "7"], "--gpu 7: this host has no such GPU"),
        (&["--load", "small"], "give one with --from"),
        (&["--from", file, "--load", "large"], "the result has the loads small"),
        (&["--from", "/nonexistent"], "/nonexistent: "),
    ] {
        assert!(refused(arguments).contains(said), "{arguments:?}: {}", refused(arguments));
    }
    std::fs::write(&path, RESULT.replace("bench/1", "bench/2")).expect("written");
    assert!(refused(&["--from", file]).contains("its form is sublet.bench/2"));
    let (text, _) = advise(&world, &["--tenants", "12"], 1);
    assert!(text.contains("[limits] time_slice_max = 8") && text.contains("--tenants 8 would fit"), "{text}");
    for gone in ["proc/driver/nvidia", "sys/module/nvidia"] {
        let gone = world.driver_root.as_ref().expect("simulated").join(gone);
        std::fs::remove_dir_all(gone).expect("it was there");
    }
    assert!(refused(&[]).contains("driver"), "{}", refused(&[]));
}
