//! MIG devices that are destroyed, created again with the same ids, or have no nvidia-caps nodes.

use std::process::Child;

use serde_json::{Value, json};
use sublet_e2e::mig::{
    By, HOLD, SLEEP, SMALL, altered, created, devices, refused, remake_small, rights, smi, up, world,
};
use sublet_e2e::{World, eventually, skip_unless_root};

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
        let bundle = created(&world, &format!("watcher-{by:?}"), by, &asked, HOLD);
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
        unmade.contains("nvidia-cap84 is ") || unmade.contains("cannot read"),
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
    assert!(
        refusal.contains("cannot be used; why: /proc/driver/nvidia-caps/mig-minors has minor 85"),
        "{refusal}"
    );
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
        refusal.contains("has a destroyed instance's nodes; why: container old still holds them"),
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
fn a_mode_switched_off_by_another_tool_opens_the_gpu_again() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200-mig", "");
    let share = [("sublet.gpu", "0"), ("sublet.sm", "25")];
    assert!(
        refused(&world, &share)
            .contains("is in MIG mode, so only its MIG devices can be used; why: it has none")
    );
    let _ = smi(&world, &["-i", "0", "-mig", "0"]);
    up(&world, "one", &share).down();
    world.assert_empty();
}

#[test]
fn the_service_notices_a_mode_switched_where_there_is_no_instance() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h100x2-mig-off", "");
    let enabled = || {
        let known = std::fs::read(world.state_dir().join("inventory.json")).expect("inventory.json");
        let known: Value = serde_json::from_slice(&known).expect("JSON");
        known["devices"][0]["mig_enabled"].clone()
    };
    assert!(world.sublet(&["refresh"]).status.success());
    assert_eq!(enabled(), false);
    let _ = smi(&world, &["-i", "0", "-mig", "1"]);
    let serve = Serve::start(&world);
    assert!(eventually(|| enabled() == true), "the service did not look");
    assert!(refused(&world, &[("sublet.gpu", "0"), ("sublet.sm", "25")]).contains("is in MIG mode"));
    let _ = smi(&world, &["-i", "0", "-mig", "0"]);
    assert!(eventually(|| enabled() == false), "the service did not look again");
    up(&world, "one", &[("sublet.gpu", "0"), ("sublet.sm", "25")]).down();
    drop(serve);
    world.assert_empty();
}

#[test]
fn the_service_notices_and_its_word_spares_the_question() {
    if skip_unless_root() {
        return;
    }
    let world = world("");
    assert!(world.sublet(&["refresh"]).status.success());
    let inventory = world.state_dir().join("inventory.json");
    let heartbeat = world.state_dir().join("mig-watched");
    let modified = || std::fs::metadata(&inventory).and_then(|file| file.modified()).expect("inventory.json");
    let serve = Serve::start(&world);
    assert!(eventually(|| heartbeat.exists()), "no word of the service");
    let before = modified();
    let old = created(&world, "old", By::Shim, &[("sublet.mig", "1g.5gb")], SLEEP);
    assert_eq!(modified(), before, "nobody asked NVML again");
    remake_small(&world);
    assert!(eventually(|| modified() > before), "the service did not look");
    assert!(eventually(|| heartbeat.exists()));
    assert_eq!(world.leases()[0]["state"], "lost");
    old.down();
    // An instance that is destroyed for good: /proc shows that, and no container has to start to notice it.
    let gone = created(&world, "gone", By::Shim, &[("sublet.mig", "4g.20gb")], SLEEP);
    let before = modified();
    let _ = smi(&world, &["mig", "-i", "0", "-dci", "-gi", "2", "-ci", "0"]);
    let _ = smi(&world, &["mig", "-i", "0", "-dgi", "-gi", "2"]);
    assert!(eventually(|| modified() > before), "the service did not look");
    let lease = world.leases().remove(0);
    assert_eq!((&lease["state"], &lease["container_id"]), (&json!("lost"), &json!("gone")));
    assert_eq!(world.status()["devices"][0]["mig"].as_array().map(Vec::len), Some(3));
    gone.down();
    drop(serve);
    world.assert_empty();
}
