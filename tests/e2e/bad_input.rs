//! Bad input: mistakes of users, engines and hosts. Each is refused in one line that names the mistake and says what
//! to do. `refused` checks exit status 1, config.json, and that nothing is left behind.

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, assert_lines, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];

fn bad<'a>(world: &'a World, annotations: &[(&str, &str)]) -> Bundle<'a> {
    world.bundle("bad", annotations, HOLD)
}

fn refusals(world: &World, requests: &[&[(&str, &str)]]) -> Vec<String> {
    requests.iter().map(|annotations| bad(world, annotations).refused()).collect()
}

#[test]
fn annotations_that_make_no_request() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let requests: &[&[(&str, &str)]] = &[
        &[("sublet.colour", "red")],
        &[("sublet.compute", "25")],
        &[("sublet.sm", "0")],
        &[("sublet.sm", "101")],
        &[("sublet.sm", "0.25")],
        &[("sublet.memory", "25")],
        &[("sublet.memory", "0")],
        &[("sublet.gpu", "first")],
        &[("sublet.mode", "exclusive"), ("sublet.sm", "25")],
        &[("sublet.share", "nobody")],
        &[("sublet.wait", "soon")],
        &[("sublet.processes", "0")],
        &[("sublet.capabilities", "compute,magic")],
    ];
    assert_lines(
        &refusals(&world, requests),
        &[
            "sublet.colour=red: unknown key; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, sublet.share",
            "sublet.compute=25: unknown key, did you mean sublet.sm?; why: the keys are sublet.gpu, sublet.mode, sublet.sm, sublet.memory, sublet.mig, sublet.mig-caps, sublet.isolation, sublet.priority, sublet.processes, sublet.capabilities, sublet.wait, sublet.guard, sublet.suspend, sublet.owner, sublet.share",
            "sublet.sm=0: not a possible value; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5",
            "sublet.sm=101: not a possible value; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5",
            "sublet.sm=0.25: a quarter of a percent? write 25; why: it must be a percentage over 0 up to 100, such as 25, 25% or 12.5",
            "sublet.memory=25: the unit is missing: write 25GiB or 25MiB or 25%; why: it must be an amount of 1MiB or more with a unit, such as 8GiB or 8192MiB, or a percentage up to 100%, such as 25%",
            "sublet.memory=0: not a possible value; why: it must be an amount of 1MiB or more with a unit, such as 8GiB or 8192MiB, or a percentage up to 100%, such as 25%",
            "sublet.gpu=first: write model:*first* for a model, name:first for an alias; why: it must be any, any:<count>, all, or a list of an index, GPU-<uuid> (8 hex digits or more), PCI bus id, MIG-<uuid>, \"G:M\" (quoted in YAML), name:<alias>, model:<glob>",
            "sublet.sm=25 cannot be combined with sublet.mode=exclusive; why: only MPS limits SMs; fix: write sublet.mode=mps or leave sublet.sm out",
            "sublet.share=nobody: this host has no named share; why: its configuration has no [share.<name>]",
            "sublet.wait=soon: not a possible value; why: it must be 0 or a whole number of ms, s or m, such as 10s, at most 1m ([limits] wait_max)",
            "sublet.processes=0: not a possible value; why: it must be a whole number, 1 or more",
            "sublet.capabilities=compute,magic: not a possible value; why: it must be a list of compute, utility, graphics, video, or all",
        ],
    );
    world.assert_empty();
}

#[test]
fn requests_that_the_devices_cannot_serve() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let requests: &[&[(&str, &str)]] = &[
        &[("sublet.gpu", "7")],
        &[("sublet.gpu", "GPU-ffffffff-0000-0000-0000-000000000000")],
        &[("sublet.gpu", "name:nobody")],
        &[("sublet.gpu", "model:*A100*")],
        &[("sublet.gpu", "any:2"), ("sublet.mode", "exclusive")],
        &[("sublet.memory", "1024GiB")],
        &[("sublet.sm", "1")],
        &[("sublet.sm", "50"), ("sublet.memory", "100MiB")],
        &[("sublet.mig", "1g.18gb")],
        &[("sublet.mode", "mig")],
        &[("sublet.gpu", "MIG-5b1e7000-0000-5000-8000-000000000a01")],
        &[("sublet.gpu", "0:1")],
    ];
    assert_lines(
        &refusals(&world, requests),
        &[
            "no GPU of this host is number 7; why: it has GPU 0 (NVIDIA H200, GPU-5b1e7000-0000-4000-8000-000000000100); fix: sublet.gpu=0 fits now",
            "no GPU of this host is GPU-ffffffff-0000-0000-0000-000000000000; why: it has GPU 0 (NVIDIA H200, GPU-5b1e7000-0000-4000-8000-000000000100); fix: sublet.gpu=0 fits now",
            "no GPU of this host is name:nobody (see [[device]] in the configuration); why: it has GPU 0 (NVIDIA H200, GPU-5b1e7000-0000-4000-8000-000000000100); fix: sublet.gpu=0 fits now",
            "no GPU of this host is model:*A100*; why: it has GPU 0 (NVIDIA H200, GPU-5b1e7000-0000-4000-8000-000000000100); fix: sublet.gpu=0 fits now",
            "2 GPUs requested, 1 present",
            "refused: GPU 0 has 143771 MiB, of which 143259 MiB can be booked; why: 1024 GiB asked; [limits] reserve, memory_overcommit; fix: sublet.memory=143193MiB fits now",
            "cannot serve mps, 1 % SM: GPU 0 has too few SMs; why: 1 % for 1 process(es) is less than 2 SMs each",
            "refused: GPU 0 needs 274 MiB for the CUDA context(s); why: 1 process(es) at that SM share have no room in 100 MiB",
            "this needs a MIG device, and no GPU of this host is in MIG mode; fix: `sublet mig apply` switches it on (root); or share a whole GPU, with sublet.sm and sublet.memory",
            "this needs a MIG device, and no GPU of this host is in MIG mode; fix: `sublet mig apply` switches it on (root); or share a whole GPU, with sublet.sm and sublet.memory",
            "this needs a MIG device, and no GPU of this host is in MIG mode; fix: `sublet mig apply` switches it on (root); or share a whole GPU, with sublet.sm and sublet.memory",
            "this needs a MIG device, and no GPU of this host is in MIG mode; fix: `sublet mig apply` switches it on (root); or share a whole GPU, with sublet.sm and sublet.memory",
        ],
    );
    world.assert_empty();
}

/// The same damage under an inventory that was true a moment ago.
#[test]
fn specs_that_contradict_a_share() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let edits: &[fn(&mut Value)] = &[
        // docker run --privileged
        |spec| spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]),
        // docker run --device /dev/nvidia5
        |spec| {
            spec["linux"]["devices"] =
                json!([{"path": "/dev/nvidia5", "type": "c", "major": 195, "minor": 5, "fileMode": 438}]);
        },
        // The same under another name.
        |spec| {
            spec["linux"]["devices"] =
                json!([{"path": "/dev/harmless", "type": "c", "major": 195, "minor": 5}]);
        },
        // docker run --device-cgroup-rule 'c 195:* rw'
        |spec| {
            let rules = spec["linux"]["resources"]["devices"].as_array_mut().expect("rules");
            rules.push(json!({"allow": true, "type": "c", "major": 195, "access": "rw"}));
        },
        // docker run -v /dev:/host-dev
        |spec| {
            let mounts = spec["mounts"].as_array_mut().expect("mounts");
            mounts.push(json!({"destination": "/host-dev", "type": "bind", "source": "/dev",
                "options": ["rbind"]}));
        },
        // docker run --gpus all
        |spec| {
            spec["process"]["env"].as_array_mut().expect("env").push(json!("NVIDIA_VISIBLE_DEVICES=all"));
            spec["hooks"] = json!({"prestart": [
                {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["hook", "prestart"]}]});
        },
        // docker run --device nvidia.com/gpu=0
        |spec| spec["annotations"]["cdi.k8s.io/docker"] = json!("nvidia.com/gpu=0"),
        |spec| spec["annotations"]["sublet.lease"] = json!("0123456789abcdef"),
        |spec| spec["annotations"]["sublet.lease"] = json!("../../etc"),
        // podman run --security-opt mask=/run/sublet
        |spec| spec["linux"]["maskedPaths"] = json!(["/proc/kcore", "/run/sublet"]),
        |spec| spec["linux"]["maskedPaths"] = json!(["/tmp"]),
        |spec| {
            let namespaces = spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
            namespaces.retain(|namespace| namespace["type"] != "mount");
        },
    ];
    let seen: Vec<_> = edits
        .iter()
        .map(|edit| {
            let mut bundle = bad(&world, SHARE);
            edit(&mut bundle.spec);
            bundle.refused()
        })
        .collect();
    assert_lines(
        &seen,
        &[
            "the container may open every device of the host (a *:* rwm); fix: remove `--privileged` or the rule, or set `[limits] allow_privileged = true`",
            "the container is given the device /dev/nvidia5 in addition to its share; fix: remove that device or volume, or set `[limits] allow_privileged = true`",
            "the container is given the device /dev/harmless in addition to its share; fix: remove that device or volume, or set `[limits] allow_privileged = true`",
            "the container's device cgroup rule `c 195:* rw` opens NVIDIA devices too; fix: remove that `--device-cgroup-rule`, or set `[limits] allow_privileged = true`",
            "the container is given the bind mount of /dev in addition to its share; fix: remove that device or volume, or set `[limits] allow_privileged = true`",
            "the engine was asked for GPUs too (hook nvidia-container-runtime-hook); fix: remove `--gpus` (Compose: deploy.resources)",
            "the engine was asked for an NVIDIA CDI device too (nvidia.com/gpu=0); fix: remove `--device` or `--gpus`",
            "sublet.lease=0123456789abcdef: this container has no live lease with that id; fix: remove it",
            "sublet.lease=../../etc: this container has no live lease with that id; fix: remove it",
            "/run/sublet hides the MPS directory /run/sublet/mps from the container; fix: remove that mask (`--security-opt mask=…`, linux.maskedPaths)",
            "/tmp hides the MPS directory /tmp/nvidia-mps from the container; fix: remove that mask (`--security-opt mask=…`, linux.maskedPaths) (a named share with `default_directory = false` has nothing at /tmp/nvidia-mps)",
            "the container has no mount namespace of its own; fix: add one, without a path, to its config.json",
        ],
    );
    world.assert_empty();
}

/// Hidden MPS directories concern the containers that get them. Which do, the placement decides.
#[test]
fn a_mask_over_the_mps_directories_is_refused_only_where_they_are_mounted() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "[[device]]\nmatch = \"0\"\nuse = \"mps\"\n");
    let masked = |id: &str, gpu: &str| {
        let mut bundle = world.bundle(id, &[("sublet.gpu", gpu)], HOLD);
        bundle.spec["linux"]["maskedPaths"] = json!(["/run/sublet"]);
        bundle
    };
    let refused = masked("by-mps", "0").refused();
    assert!(refused.starts_with("/run/sublet hides the MPS directory"), "{refused}");
    world.assert_empty();
    let bundle = masked("by-time-slice", "1");
    bundle.up();
    assert_eq!(world.leases()[0]["mode"], "time-slice");
    bundle.down();
    world.assert_empty();
}

#[test]
fn what_a_container_with_a_share_cannot_do() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("bad", SHARE, HOLD);
    bundle.up();
    bundle.event("info");
    let lease = world.leases()[0]["id"].as_str().expect("an id").to_owned();
    let mut checkpoint = world.runtime();
    checkpoint.args(["checkpoint", "bad"]);
    let checkpoint = sublet_e2e::Finished::of(&checkpoint.output().expect("it runs"));
    let mut seen = vec![bundle.line(&checkpoint)];
    // A second create for the same container: as the engine wrote it, and from another bundle.
    let config = std::fs::read(bundle.dir.join("config.json")).expect("config.json");
    let again = bundle.create();
    seen.push(bundle.line(&again));
    std::fs::write(bundle.dir.join("config.json"), config).expect("config.json");
    assert_eq!(bundle.exec(&["/usr/bin/cuda-probe", "info"]).json()[0]["sm"], json!(32), "it goes on");
    assert_eq!(world.leases().len(), 1);
    bundle.down();
    seen.push(bundle.refused_as_written(&["restore"]));
    let seen: Vec<_> = seen.iter().map(|line| line.replace(&lease, "$LEASE")).collect();
    assert_lines(
        &seen,
        &[
            "checkpoint of a container with a GPU share is not possible, because the GPU's state cannot be \
             saved: recreate the container instead",
            "container bad already holds lease $LEASE; fix: delete the container before you create it again",
            "restore of a container with a GPU share is not possible, because the GPU's state cannot be \
             saved: recreate the container instead",
        ],
    );
    world.assert_empty();
}

/// Engines read the `--log` file, people read stderr: both say the same.
#[test]
fn the_log_has_the_same_line_as_stderr() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = bad(&world, &[("sublet.sm", "101")]);
    bundle.write();
    let log = world.dir.path().join("log.json");
    let mut command = world.command("sublet-runtime");
    command.arg("--root").arg(world.runtime_root()).arg("--log").arg(&log);
    command.args(["--log-format", "json", "create", "--bundle"]).arg(&bundle.dir).arg("bad");
    let output = command.output().expect("it runs");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let text = std::fs::read_to_string(&log).expect("a log");
    let line: Value = serde_json::from_str(&text).expect("one JSON line");
    assert_eq!(line["level"], "error");
    assert_eq!(line["msg"].as_str(), Some(stderr.trim_end()));
    assert!(stderr.contains(": not a possible value\nwhy: it must be "), "{stderr}");
    assert!(line["time"].as_str().is_some_and(|time| time.len() >= 20), "{line}");
}
