//! Containers on MIG devices: which device they get, alone and shared, and what they see of it.

use serde_json::{Value, json};
use sublet_e2e::mig::{
    By, DEVICES, FIRST, HOLD, LARGE, SECOND, SMALL, altered, created, devices, nodes, refused, rights, smi,
    up, world,
};
use sublet_e2e::{World, skip_unless_root};

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
    assert!(refused(&world, &[("sublet.gpu", "0:3")]).contains("MIG device 0:3 is taken whole"));
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
        full.contains("each of 2 MIG devices of GPU 0 is taken whole") && full.contains("held by first"),
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
            "GPU 0 is in MIG mode, so only its MIG devices can be used; why: 0:1 and 1 more are 1c.2g.10gb, \
             0:3 is a 1g.5gb, 0:0 is a 4g.20gb; fix: name one (sublet.gpu) or a profile (sublet.mig)"
        ),
        "{whole}"
    );
    let any = up(&world, "any", &[("sublet.mode", "exclusive")]);
    assert_eq!(devices(&world), ["GPU-5b1e7000-0000-4000-8000-000000000a10"]);
    any.down();
    let profile = refused(&world, &[("sublet.mig", "3g.20gb")]);
    assert!(
        profile.contains(
            "no MIG device is a 3g.20gb; why: 0:1 and 1 more are 1c.2g.10gb, 0:3 is a 1g.5gb, 0:0 is"
        ),
        "{profile}"
    );
    let other = refused(&world, &[("sublet.mig", "1g.5gb"), ("sublet.gpu", "0:0")]);
    assert!(other.contains("no MIG device is a 1g.5gb; why: 0:0 is a 4g.20gb"), "{other}");
    let off = refused(&world, &[("sublet.mode", "mig"), ("sublet.gpu", "1")]);
    assert!(off.contains("no MIG device of this host is on the GPU number 1"), "{off}");
    let gone = refused(&world, &[("sublet.gpu", "0:7")]);
    assert!(
        gone.contains("no MIG device of this host is 0:7; why: it has MIG device 0:0 (4g.20gb, MIG-"),
        "{gone}"
    );
    let large = refused(&world, &[("sublet.mode", "mig"), ("sublet.memory", "30GiB")]);
    assert!(large.contains("MIG device 0:0 has 20096 MiB, 30 GiB needed"), "{large}");
    let spelt = refused(&world, &[("sublet.mig", "MIG 1g.5gb")]);
    assert!(
        spelt.contains("sublet.mig=MIG 1g.5gb: not a possible value; why: it must be a MIG profile"),
        "{spelt}"
    );
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
    assert!(refusal.contains("has 3774 MiB left to book, 4162 MiB needed"), "{refusal}");
    let alone = refused(&world, &[("sublet.gpu", "0:2")]);
    assert!(alone.contains("has 3774 MiB left to book, 4992 MiB needed"), "{alone}");
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
    assert_eq!((&status["mps"][0]["devices"], &status["mps"][0]["clients"]), (&json!([LARGE]), &json!(2)));
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
    assert!(more.contains("MIG device 0:0 has 25 % SM left"), "{more}");
    // 48 clients of 108 SMs are 24 of 56.
    let many = refused(&world, &[("sublet.gpu", "0:0"), ("sublet.mode", "mps"), ("sublet.processes", "25")]);
    assert!(many.contains("allows at most 24 MPS clients, not 25"), "{many}");
    let other_use = refused(&world, &[("sublet.gpu", "0:0")]);
    assert!(other_use.contains("is in use as mps"), "{other_use}");
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
    assert_eq!(world.status()["mps"][0]["devices"][0], LARGE);
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
    assert!(kept.contains("is reserved for mps"), "{kept}");
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
    assert!(mixed.contains("no MIG device of this host is on the GPU number 1"), "{mixed}");
    world.assert_empty();

    let dir = tempfile::tempdir().expect("a directory");
    let older = altered(&dir, |text| text.replace("580.159.04", "550.163.01"), "");
    let refusal = refused(&older, &[("sublet.gpu", "0:3,0:1")]);
    assert!(
        refusal.contains(
            "with driver 550.163.01 a process sees only one MIG device, and several need R570 or later"
        ),
        "{refusal}"
    );
    let alone = up(&older, "alone", &[("sublet.gpu", "0:3")]);
    alone.down();
    older.assert_empty();
}

/// vLLM calls `int()` on the variable.
#[test]
fn a_named_share_may_name_its_device_by_a_number() {
    if skip_unless_root() {
        return;
    }
    let (uuid, ..) = DEVICES[0];
    let world = world(&format!("[share.vllm]\ngpu = \"{uuid}\"\nvisible_devices = \"ordinal\"\n"));
    let bundle = created(&world, "vllm", By::Shim, &[("sublet.share", "vllm")], HOLD);
    let info = bundle.event("info");
    assert_eq!((&info["error"], &info["count"]), (&Value::Null, &json!(1)), "{info}");
    let said = bundle.exec(&["/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SUBLET_DEVICES"]).stdout;
    assert_eq!(said.trim_end(), format!("0 {uuid}"));
    bundle.down();
    world.assert_empty();
}
