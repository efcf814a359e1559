//! Containers on MIG devices: two A100-40GB, the first cut into 4g.20gb (GPU instance 2), 2g.10gb in two
//! (GPU instance 3) and 1g.5gb (GPU instance 9).

use std::path::PathBuf;
use std::process::{Child, Command};

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];

const LARGE: &str = "MIG-5b1e7000-0000-5000-8000-000000000a01";
const FIRST: &str = "MIG-5b1e7000-0000-5000-8000-000000000a02";
const SECOND: &str = "MIG-5b1e7000-0000-5000-8000-000000000a03";
const SMALL: &str = "MIG-5b1e7000-0000-5000-8000-000000000a04";

/// UUID, capabilities, SMs, MiB: of a part, its GPU instance's.
const DEVICES: [(&str, [u32; 2], u32, u64); 4] = [
    (LARGE, [21, 22], 56, 20_096),
    (FIRST, [30, 31], 14, 9_984),
    (SECOND, [30, 32], 14, 9_984),
    (SMALL, [84, 85], 14, 4_864),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Shim,
    Precreate,
    Prestart,
}

fn world(extra: &str) -> World {
    World::simulated("a100x2-mig", extra)
}

/// The same host with another line in its topology.
fn altered(dir: &tempfile::TempDir, change: impl Fn(String) -> String, extra: &str) -> World {
    let shipped = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../sim/topologies/a100x2-mig.toml");
    let text = change(std::fs::read_to_string(shipped).expect("the topology"));
    let file = dir.path().join("topology.toml");
    std::fs::write(&file, text).expect("written");
    World::simulated(file.to_str().expect("UTF-8"), extra)
}

fn created<'a>(
    world: &'a World,
    id: &str,
    by: By,
    annotations: &[(&str, &str)],
    args: &[&str],
) -> Bundle<'a> {
    let mut bundle = world.bundle(id, annotations, args);
    match by {
        By::Shim => {}
        By::Precreate => bundle.precreate(),
        By::Prestart => bundle.hook(&["prestart", "poststop"]),
    }
    bundle.up();
    bundle
}

fn up<'a>(world: &'a World, id: &str, annotations: &[(&str, &str)]) -> Bundle<'a> {
    let bundle = created(world, id, By::Shim, annotations, HOLD);
    let info = bundle.event("info");
    assert_eq!(info["error"], Value::Null, "{id}: {info}");
    bundle
}

fn devices(world: &World) -> Vec<String> {
    let device = |lease: &Value| lease["device"].as_str().expect("a UUID").to_owned();
    world.leases().iter().map(device).collect()
}

fn refused(world: &World, annotations: &[(&str, &str)]) -> String {
    world.bundle("refused", annotations, HOLD).refused()
}

fn smi(world: &World, arguments: &[&str]) -> String {
    let program = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    let output = Command::new(program).args(arguments).output().expect("nvidia-smi runs");
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Destroys the 1g.5gb and makes it again: the same place, the same ids, another UUID.
fn remake_small(world: &World) {
    smi(world, &["mig", "-i", "0", "-dci", "-gi", "9", "-ci", "0"]);
    smi(world, &["mig", "-i", "0", "-dgi", "-gi", "9"]);
    smi(world, &["mig", "-i", "0", "-cgi", "1g.5gb", "-C"]);
}

/// How opening nodes ends that the container has made for itself: (major, minor) of each.
fn rights(bundle: &Bundle<'_>, nodes: &[(u32, u32)]) -> Vec<String> {
    let mut script = String::new();
    for (major, minor) in nodes {
        script += &format!("mknod /tmp/n{major}-{minor} c {major} {minor} && ");
    }
    script += "exec cuda-probe noderights";
    for (major, minor) in nodes {
        script += &format!(" /tmp/n{major}-{minor}");
    }
    let seen = bundle.exec(&["/bin/sh", "-c", &script]);
    let results: Vec<_> = seen.json().into_iter().filter(|line| line["event"] == "node").collect();
    assert_eq!(results.len(), nodes.len(), "{seen:?}");
    results.iter().map(|line| line["result"].as_str().expect("a result").to_owned()).collect()
}

fn nodes(bundle: &Bundle<'_>) -> String {
    let script = "cd /dev; for n in nvidia* nvidia-caps/*; do [ -c $n ] && echo $n; done";
    bundle.exec(&["/bin/sh", "-c", script]).stdout.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn four_devices(by: By) {
    let world = world("");
    let caps: Vec<(u32, u32)> = [1, 2, 21, 22, 30, 31, 32, 84, 85]
        .map(|minor| (241, minor))
        .into_iter()
        .chain([(195, 0), (195, 1)])
        .collect();
    for (uuid, own, sm, mib) in DEVICES {
        let id = &uuid[uuid.len() - 3..];
        let bundle = created(&world, id, by, &[("sublet.gpu", uuid)], HOLD);
        let info = bundle.event("info");
        assert_eq!(
            (&info["error"], &info["count"], &info["sm"]),
            (&Value::Null, &json!(1), &json!(sm)),
            "{info}"
        );
        assert_eq!((&info["mps"], &info["total_mib"]), (&json!(false), &json!(mib)), "{info}");
        let [gi, ci] = own;
        assert_eq!(
            nodes(&bundle),
            format!(
                "nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl nvidia-caps/nvidia-cap{gi} nvidia-caps/nvidia-cap{ci}"
            )
        );
        let seen = rights(&bundle, &caps);
        for ((major, minor), result) in caps.iter().zip(&seen) {
            let opens = (*major == 241 && own.contains(minor)) || (*major, *minor) == (195, 0);
            assert_eq!(result, if opens { "ENXIO" } else { "EPERM" }, "{uuid} {major}:{minor} by {by:?}");
        }
        if by != By::Prestart {
            let environment = bundle.config()["process"]["env"].to_string();
            assert!(environment.contains(&format!("\"CUDA_VISIBLE_DEVICES={uuid}\"")), "{environment}");
            assert!(environment.contains(&format!("\"SUBLET_DEVICES={uuid}\"")), "{environment}");
        }
    }
    assert_eq!(devices(&world), DEVICES.map(|(uuid, ..)| uuid));
    let status = world.status();
    assert!(status["devices"][0]["mig"].as_array().expect("mig").iter().all(|mig| mig["free"] == false));
    assert!(refused(&world, &[("sublet.gpu", "0:3")]).contains("MIG device 0:3 (1g.5gb) is taken whole"));
    drop_all(&world, DEVICES.map(|(uuid, ..)| &uuid[uuid.len() - 3..]), by);
    assert_eq!(world.status()["devices"][0]["mig"][3]["free"], true);
    world.assert_empty();
}

fn drop_all(world: &World, ids: [&str; 4], by: By) {
    for id in ids {
        let mut bundle = world.bundle(id, &[], HOLD);
        bundle.plain = by != By::Shim;
        bundle.down();
    }
}

#[test]
fn four_devices_by_the_shim() {
    if !skip_unless_root() {
        four_devices(By::Shim);
    }
}

#[test]
fn four_devices_by_precreate() {
    if !skip_unless_root() {
        four_devices(By::Precreate);
    }
}

#[test]
fn four_devices_by_prestart() {
    if !skip_unless_root() {
        four_devices(By::Prestart);
    }
}

#[test]
fn devices_are_named_by_number_old_name_profile_and_size() {
    if skip_unless_root() {
        return;
    }
    let world = world("[[device]]\nmatch = \"0:3\"\nname = \"tiny\"\n");
    let old = "MIG-GPU-5b1e7000-0000-4000-8000-000000000a00/3/1";
    let cases: [(&[(&str, &str)], &str); 11] = [
        (&[("sublet.gpu", "0:0")], LARGE),
        (&[("sublet.gpu", old)], SECOND),
        (&[("sublet.gpu", "name:tiny")], SMALL),
        (&[("sublet.mig", "1g.5gb")], SMALL),
        (&[("sublet.mig", "1c.2g.10gb")], FIRST),
        (&[("sublet.mig", "1C.2G.10GB"), ("sublet.gpu", "0")], FIRST),
        (&[("sublet.mig", "4g.20gb"), ("sublet.gpu", "model:*A100*")], LARGE),
        // The smallest that fits; a part of the 2g.10gb has half of its memory.
        (&[("sublet.mode", "mig")], SMALL),
        (&[("sublet.mode", "mig"), ("sublet.memory", "5GiB")], LARGE),
        (&[("sublet.mode", "mig"), ("sublet.sm", "20")], LARGE),
        (&[("sublet.mode", "mig"), ("sublet.memory", "12%")], FIRST),
    ];
    for (annotations, expected) in cases {
        let bundle = up(&world, "one", annotations);
        assert_eq!(devices(&world), [expected], "{annotations:?}");
        assert_eq!(world.leases()[0]["mode"], "mig");
        bundle.down();
    }
    let first = up(&world, "first", &[("sublet.mig", "1c.2g.10gb")]);
    let second = up(&world, "second", &[("sublet.mig", "1c.2g.10gb")]);
    assert_eq!(devices(&world), [FIRST, SECOND]);
    let full = refused(&world, &[("sublet.mig", "1c.2g.10gb")]);
    assert!(
        full.contains("MIG device 0:1 (1c.2g.10gb) is taken whole") && full.contains("held by first"),
        "{full}"
    );
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn what_names_no_mig_device_is_refused_with_the_way_out() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let whole = refused(&world, &[("sublet.gpu", "0")]);
    assert!(
        whole.contains(
            "GPU 0 (NVIDIA A100-PCIE-40GB) is in MIG mode and used through its MIG devices alone (sublet.gpu=0:0 \
             is a 4g.20gb, sublet.gpu=0:1 is a 1c.2g.10gb, sublet.gpu=0:2 is a 1c.2g.10gb, sublet.gpu=0:3 is a \
             1g.5gb; sublet.mig=<profile> takes a free one)"
        ),
        "{whole}"
    );
    let any = up(&world, "any", &[("sublet.mode", "exclusive")]);
    assert_eq!(devices(&world), ["GPU-5b1e7000-0000-4000-8000-000000000a10"]);
    any.down();
    let profile = refused(&world, &[("sublet.mig", "3g.20gb")]);
    assert!(profile.contains("none is a 3g.20gb: 0:0 is a 4g.20gb, 0:1 is a 1c.2g.10gb"), "{profile}");
    let other = refused(&world, &[("sublet.mig", "1g.5gb"), ("sublet.gpu", "0:0")]);
    assert!(other.contains("none is a 1g.5gb: 0:0 is a 4g.20gb"), "{other}");
    let off = refused(&world, &[("sublet.mode", "mig"), ("sublet.gpu", "1")]);
    assert!(off.contains("no MIG device here is of the GPU number 1"), "{off}");
    let gone = refused(&world, &[("sublet.gpu", "0:7")]);
    assert!(
        gone.contains("no MIG device here is 0:7; this host has MIG device 0:0 (4g.20gb, MIG-"),
        "{gone}"
    );
    let large = refused(&world, &[("sublet.mode", "mig"), ("sublet.memory", "30GiB")]);
    assert!(large.contains("MIG device 0:0 (4g.20gb) has 20096 MiB, 30 GiB wanted"), "{large}");
    let spelt = refused(&world, &[("sublet.mig", "MIG 1g.5gb")]);
    assert!(spelt.contains("sublet.mig=MIG 1g.5gb: must be a MIG profile"), "{spelt}");
    world.assert_empty();
}

#[test]
fn the_memory_of_a_gpu_instance_is_accounted_for_all_its_compute_instances() {
    if skip_unless_root() {
        return;
    }
    let world = world("[limits]\nreserve = 0\n");
    let first =
        up(&world, "first", &[("sublet.gpu", "0:1"), ("sublet.mode", "mps"), ("sublet.memory", "6GiB")]);
    let share = |memory| [("sublet.gpu", "0:2"), ("sublet.mode", "mps"), ("sublet.memory", memory)];
    // 9984 MiB less 6 GiB, two servers of 66 MiB and what the first container has not used yet.
    let refusal = refused(&world, &share("4GiB"));
    assert!(refusal.contains("has 3774 MiB left to book, 4162 MiB wanted"), "{refusal}");
    let alone = refused(&world, &[("sublet.gpu", "0:2")]);
    assert!(alone.contains("has 3774 MiB left to book, 4992 MiB wanted"), "{alone}");
    let second = up(&world, "second", &share("3GiB"));
    let mig = world.status()["devices"][0]["mig"].clone();
    assert_eq!(mig[1]["memory_bytes_free"], mig[2]["memory_bytes_free"]);
    assert_eq!((&mig[1]["mode"], &mig[3]["mode"]), (&json!("mps"), &json!("idle")));
    first.down();
    second.down();
    // Each alone on its part: half of the memory is its own by the accounts.
    let first = up(&world, "first", &[("sublet.gpu", "0:1")]);
    assert_eq!(world.leases()[0]["memory_bytes"], json!(4992_u64 << 20));
    let environment = first.config()["process"]["env"].to_string();
    assert!(environment.contains("SUBLET_MEMORY_BYTES=5234491392"), "{environment}");
    let second = up(&world, "second", &[("sublet.gpu", "0:2")]);
    assert_eq!(world.status()["devices"][0]["mig"][1]["memory_bytes_free"], json!(0));
    first.down();
    second.down();
    world.assert_empty();
}

#[test]
fn mps_on_an_instance_has_limits_of_the_instance() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let share = |sm| [("sublet.mig", "4g.20gb"), ("sublet.sm", sm), ("sublet.memory", "4GiB")];
    let (one, two) = (up(&world, "one", &share("25")), up(&world, "two", &share("50")));
    for (bundle, sm) in [(&one, 14), (&two, 28)] {
        let info = bundle.event("info");
        assert_eq!(
            (&info["mps"], &info["sm"], &info["count"]),
            (&json!(true), &json!(sm), &json!(1)),
            "{info}"
        );
        assert!(info["free_mib"].as_u64().expect("free_mib") <= 4096, "{info}");
    }
    let status = world.status();
    assert_eq!((&status["mps"][0]["device"], &status["mps"][0]["clients"]), (&json!(LARGE), &json!(2)));
    assert_eq!(status["mps"].as_array().map(Vec::len), Some(1));
    assert_eq!(status["devices"][0]["mig"][0]["sm_percent_free"], json!(25.0));
    let modes = smi(&world, &["--query-gpu=compute_mode", "--format=csv,noheader"]);
    assert_eq!(modes.lines().collect::<Vec<_>>(), ["Default", "Default"]);
    // An exec'd process is in MPS too, and sees the instance alone.
    let seen = one.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]).json().remove(0);
    assert_eq!(
        (&seen["mps"], &seen["count"], &seen["error"]),
        (&json!(true), &json!(1), &Value::Null),
        "{seen}"
    );
    let more = refused(&world, &share("30"));
    assert!(more.contains("MIG device 0:0 (4g.20gb) has 25 % SM left"), "{more}");
    // 48 clients of 108 SMs are 24 of 56.
    let many = refused(&world, &[("sublet.gpu", "0:0"), ("sublet.mode", "mps"), ("sublet.processes", "25")]);
    assert!(many.contains("takes at most 24 MPS clients, not 25"), "{many}");
    let other_use = refused(&world, &[("sublet.gpu", "0:0")]);
    assert!(other_use.contains("is used as mps now"), "{other_use}");
    one.down();
    two.down();
    world.assert_empty();
}

#[test]
fn a_late_container_has_a_server_of_its_own_on_the_instance() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let annotations = [("sublet.gpu", "0:0"), ("sublet.sm", "25"), ("sublet.memory", "4GiB")];
    let bundle = created(&world, "late", By::Prestart, &annotations, HOLD);
    let info = bundle.event("info");
    assert_eq!(
        (&info["mps"], &info["sm"], &info["error"]),
        (&json!(true), &json!(14), &Value::Null),
        "{info}"
    );
    assert_eq!(world.status()["mps"][0]["device"], LARGE);
    bundle.down();
    world.assert_empty();
}

#[test]
fn time_slices_of_an_instance() {
    if skip_unless_root() {
        return;
    }
    let world = world("[limits]\ntime_slice_max = 2\n");
    let share = [("sublet.mig", "1g.5gb"), ("sublet.mode", "time-slice")];
    let (one, two) = (up(&world, "one", &share), up(&world, "two", &share));
    assert_eq!(devices(&world), [SMALL, SMALL]);
    assert_eq!(one.event("info")["sm"], 14);
    assert!(refused(&world, &share).contains("has 2 containers taking turns"));
    one.down();
    let limited = up(
        &world,
        "limited",
        &[("sublet.gpu", "0:3"), ("sublet.mode", "time-slice"), ("sublet.memory", "1GiB")],
    );
    assert_eq!(limited.event("info")["mps"], true);
    two.down();
    limited.down();
    world.assert_empty();
}

#[test]
fn a_rule_and_a_drain_are_for_instances_too() {
    if skip_unless_root() {
        return;
    }
    let world = world("[grant]\nvisible_devices = \"ordinal\"\n[[device]]\nmatch = \"0:0\"\nuse = \"mps\"\n");
    let kept = refused(&world, &[("sublet.gpu", "0:0"), ("sublet.mode", "mig")]);
    assert!(kept.contains("is kept for mps"), "{kept}");
    let ordinal = up(&world, "ordinal", &[("sublet.mig", "1g.5gb")]);
    let environment = ordinal.config()["process"]["env"].to_string();
    assert!(environment.contains("\"CUDA_VISIBLE_DEVICES=0\""), "{environment}");
    ordinal.down();
    for drained in ["0:3", "0"] {
        assert!(world.sublet(&["drain", drained]).status.success());
        assert!(refused(&world, &[("sublet.mig", "1g.5gb")]).contains("is drained"), "{drained}");
        assert!(world.sublet(&["undrain", drained]).status.success());
    }
    world.assert_empty();
}

#[test]
fn several_instances_where_the_driver_can() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let bundle = up(&world, "both", &[("sublet.gpu", "0:3,0:1")]);
    assert_eq!(bundle.event("info")["count"], 2);
    assert_eq!(devices(&world), [SMALL, FIRST]);
    assert_eq!(
        nodes(&bundle),
        "nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl nvidia-caps/nvidia-cap30 nvidia-caps/nvidia-cap31 \
         nvidia-caps/nvidia-cap84 nvidia-caps/nvidia-cap85"
    );
    bundle.down();
    let three = up(&world, "three", &[("sublet.gpu", "any:3"), ("sublet.mode", "mig")]);
    assert_eq!(devices(&world), [LARGE, FIRST, SMALL], "one of each GPU instance");
    assert_eq!(three.event("info")["count"], 3);
    three.down();
    let same = refused(&world, &[("sublet.gpu", "0:1,0:2")]);
    assert!(
        same.contains("MIG device 0:1 and MIG device 0:2 are compute instances of one GPU instance"),
        "{same}"
    );
    let mixed = refused(&world, &[("sublet.gpu", "0:1,1")]);
    assert!(mixed.contains("no MIG device here is of the GPU number 1"), "{mixed}");
    world.assert_empty();

    let dir = tempfile::tempdir().expect("a directory");
    let older = altered(&dir, |text| text.replace("580.159.04", "550.163.01"), "");
    let refusal = refused(&older, &[("sublet.gpu", "0:3,0:1")]);
    assert!(
        refusal.contains("with driver 550.163.01 a process sees one MIG device alone, several from R570 on"),
        "{refusal}"
    );
    let alone = up(&older, "alone", &[("sublet.gpu", "0:3")]);
    alone.down();
    older.assert_empty();
}

#[test]
fn capabilities_over_all_instances_are_for_whom_root_allows_them() {
    if skip_unless_root() {
        return;
    }
    let asked = [("sublet.mig", "1g.5gb"), ("sublet.mig-caps", "monitor")];
    assert!(refused(&world(""), &asked).contains("[mig] allow_caps"));
    let world = world("[mig]\nallow_caps = [\"monitor\"]\n");
    let config = refused(&world, &[("sublet.mig", "1g.5gb"), ("sublet.mig-caps", "config")]);
    assert!(config.contains("[mig] allow_caps"), "{config}");
    for by in [By::Shim, By::Precreate, By::Prestart] {
        let bundle = created(&world, "watcher", by, &asked, HOLD);
        assert_eq!(bundle.event("info")["error"], Value::Null);
        assert_eq!(
            rights(&bundle, &[(241, 1), (241, 2), (241, 84), (241, 21)]),
            ["EPERM", "ENXIO", "ENXIO", "EPERM"]
        );
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn missing_capability_nodes_are_made_and_wrong_ones_refused() {
    if skip_unless_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let none = |text: String| format!("cap_nodes = false\n{text}");
    let world = altered(&dir, none, "");
    let dev = world.driver_root.as_ref().expect("simulated").join("dev/nvidia-caps");
    assert!(!dev.join("nvidia-cap84").exists());
    for by in [By::Shim, By::Precreate, By::Prestart] {
        let _ = std::fs::remove_dir_all(&dev);
        let bundle = created(&world, "one", by, &[("sublet.gpu", "0:3")], HOLD);
        assert_eq!(bundle.event("info")["error"], Value::Null);
        let made: Vec<_> =
            std::fs::read_dir(&dev).expect("it is there").flatten().map(|one| one.file_name()).collect();
        assert_eq!(made.len(), 2, "its own alone: {made:?}");
        bundle.down();
    }
    let _ = std::fs::remove_dir_all(&dev);
    std::fs::write(&dev, "no directory").expect("written");
    let unmade = refused(&world, &[("sublet.gpu", "0:3")]);
    assert!(
        unmade.contains("nvidia-cap84 is ") || unmade.contains("cannot look at"),
        "what is in the way is named: {unmade}"
    );
    world.assert_empty();
}

#[test]
fn capabilities_that_the_driver_tells_two_ways_close_the_instance() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let root = world.driver_root.as_ref().expect("simulated");
    let file = root.join("proc/driver/nvidia/capabilities/gpu0/mig/gi9/ci0/access");
    std::fs::write(file, "DeviceFileMinor: 99\n").expect("written");
    let refusal = refused(&world, &[("sublet.gpu", "0:3")]);
    assert!(refusal.contains("cannot be given: /proc/driver/nvidia-caps/mig-minors says 85"), "{refusal}");
    assert!(world.status()["devices"][0]["mig"][3]["fault"].is_string());
    up(&world, "other", &[("sublet.gpu", "0:0")]).down();
    world.assert_empty();
}

#[test]
fn an_instance_made_again_with_its_ids_is_another_one() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    let old = created(&world, "old", By::Shim, &[("sublet.mig", "1g.5gb")], SLEEP);
    remake_small(&world);
    let status = world.status();
    let lease = &status["leases"][0];
    assert_eq!((&lease["state"], &lease["device"]), (&json!("lost"), &json!(SMALL)), "{lease}");
    assert_eq!(lease["container_id"], "old");
    let new = status["devices"][0]["mig"][3]["uuid"].as_str().expect("a UUID").to_owned();
    assert_ne!(new, SMALL);
    // Its nodes are the old container's still.
    let refusal = refused(&world, &[("sublet.mig", "1g.5gb")]);
    assert!(
        refusal.contains("has the nodes of an instance that is gone, and container old has those still"),
        "{refusal}"
    );
    old.down();
    let next = up(&world, "next", &[("sublet.mig", "1g.5gb")]);
    assert_eq!(devices(&world), [new]);
    next.down();
    world.assert_empty();
}

#[test]
fn a_create_asks_nvml_who_an_instance_is() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    up(&world, "before", &[("sublet.mig", "1g.5gb")]).down();
    remake_small(&world);
    let after = up(&world, "after", &[("sublet.mig", "1g.5gb")]);
    assert_ne!(devices(&world), [SMALL]);
    after.down();
    world.assert_empty();
}

/// `sublet serve`, ended when it goes.
struct Serve(Child);

impl Serve {
    fn start(world: &World) -> Self {
        Self(world.command("sublet").arg("serve").spawn().expect("sublet serve"))
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_service_notices_and_its_word_spares_the_question() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    assert!(world.sublet(&["refresh"]).status.success());
    let inventory = world.state_dir().join("inventory.json");
    let word = world.state_dir().join("mig-watched");
    let modified = || std::fs::metadata(&inventory).and_then(|file| file.modified()).expect("inventory.json");
    let serve = Serve::start(&world);
    assert!(eventually(|| word.exists()), "no word of the service");
    let before = modified();
    let old = created(&world, "old", By::Shim, &[("sublet.mig", "1g.5gb")], SLEEP);
    assert_eq!(modified(), before, "nobody asked NVML again");
    remake_small(&world);
    assert!(eventually(|| modified() > before), "the service did not look");
    assert!(eventually(|| word.exists()));
    assert_eq!(world.leases()[0]["state"], "lost");
    old.down();
    drop(serve);
    world.assert_empty();
}
