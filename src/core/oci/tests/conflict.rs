//! Specs of engines that request GPUs themselves, and specs that do not.

use serde_json::{Value, json};

use crate::config::Config;
use crate::inventory::Node;
use crate::oci::{Conflict, check_mount_namespace, conflict};

/// A driver root with these /proc/devices.
fn host() -> (tempfile::TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("proc")).unwrap();
    let devices = "Character devices:\n  1 mem\n195 nvidia-frontend\n241 nvidia-caps\n510 nvidia-uvm\n\n\
                   Block devices:\n259 nvidia-not\n";
    std::fs::write(dir.path().join("proc/devices"), devices).unwrap();
    let mut config = Config::default();
    config.driver.root = dir.path().to_owned();
    (dir, config)
}

fn found(spec: &Value) -> Result<(), Conflict> {
    let (_dir, config) = host();
    conflict(spec, &[], &config)
}

fn rules(rules: &Value) -> Value {
    json!({"linux": {"resources": {"devices": rules}}})
}

/// The spec that Docker 26 gives every container.
fn docker_rules() -> Value {
    json!([
        {"allow": false, "access": "rwm"},
        {"allow": true, "type": "c", "major": 1, "minor": 5, "access": "rwm"},
        {"allow": true, "type": "c", "major": 1, "minor": 3, "access": "rwm"},
        {"allow": true, "type": "c", "major": 136, "access": "rwm"},
        {"allow": true, "type": "c", "access": "m"},
        {"allow": true, "type": "b", "access": "m"},
        {"allow": false, "type": "c", "major": 10, "minor": 229, "access": "rwm"}
    ])
}

#[test]
fn ordinary_specs_pass() {
    assert_eq!(found(&json!({})), Ok(()));
    assert_eq!(found(&json!([1, "x"])), Ok(()));
    assert_eq!(found(&rules(&docker_rules())), Ok(()));
    let cuda_image = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]},
        "mounts": [
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/dev/shm", "type": "bind", "source": "/dev/shm"},
            {"destination": "/data", "type": "bind", "source": "/srv/nvidia"}
        ],
        "linux": {"devices": [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]},
        "hooks": {"prestart": [{"path": "/usr/bin/dockerd"}]}
    });
    assert_eq!(found(&cuda_image), Ok(()));
}

#[test]
fn a_container_without_a_mount_namespace_of_its_own_is_refused() {
    let of = |namespaces: Value| check_mount_namespace(&json!({"linux": {"namespaces": namespaces}}));
    assert_eq!(of(json!([{"type": "pid"}, {"type": "mount"}])), Ok(()));
    assert_eq!(of(json!([{"type": "mount", "path": ""}])), Ok(()));
    for shared in [
        json!([]),
        json!(null),
        json!([{"type": "pid"}]),
        json!([{"type": "mount", "path": "/proc/1/ns/mnt"}]),
    ] {
        assert_eq!(of(shared), Err(Conflict::MountNamespace));
    }
    assert_eq!(check_mount_namespace(&json!({})), Err(Conflict::MountNamespace));
}

/// `GPUDirect` Storage and IMEX channels, which the administrator allows by their paths.
#[test]
fn nodes_that_are_no_gpus_pass_where_the_administrator_allows_them() {
    let (dir, mut config) = host();
    let devices = std::fs::read_to_string(dir.path().join("proc/devices")).unwrap();
    let more =
        devices.replace("510 nvidia-uvm", "505 nvidia-fs\n506 nvidia-caps-imex-channels\n510 nvidia-uvm");
    std::fs::write(dir.path().join("proc/devices"), more).unwrap();
    let with = |path: &str, major: i64| {
        json!({"linux": {
            "devices": [{"path": path, "type": "c", "major": major, "minor": 0}],
            "resources": {"devices": [{"allow": true, "type": "c", "major": major, "minor": 0, "access": "rwm"}]}
        }})
    };
    let mount = |path: &str| json!({"mounts": [{"destination": path, "type": "bind", "source": path}]});
    let (fs, channel) = ("/dev/nvidia-fs0", "/dev/nvidia-caps-imex-channels/channel0");
    let passes = |spec: &Value, config: &Config| conflict(spec, &[], config).is_ok();
    assert!(!passes(&with(fs, 505), &config) && !passes(&mount(fs), &config), "by itself");
    config.limits.allow_devices = vec![fs.into(), "/dev/nvidia-caps-imex-channels".into()];
    assert!(passes(&with(fs, 505), &config) && passes(&with(channel, 506), &config));
    assert!(passes(&mount(fs), &config) && passes(&mount(channel), &config));
    for (path, major) in
        [("/dev/nvidia-fs1", 505), (fs, 195), (fs, 510), (channel, 241), ("/dev/nvidia0", 195)]
    {
        assert!(!passes(&with(path, major), &config), "{path} {major}");
    }
    assert!(!passes(&rules(&json!([{"allow": true, "type": "c", "major": 505, "access": "rwm"}])), &config));
}

#[test]
fn docker_gpus_is_named() {
    let spec = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "hooks": {"prestart": [{
            "path": "/usr/bin/nvidia-container-runtime-hook",
            "args": ["nvidia-container-runtime-hook", "prestart"]
        }]}
    });
    let error = found(&spec).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the engine was asked for GPUs too (hook nvidia-container-runtime-hook); fix: remove `--gpus` (Compose: \
         deploy.resources)"
    );
    let (_dir, mut config) = host();
    config.limits.allow_privileged = true;
    assert_eq!(conflict(&spec, &[], &config), Err(error));
}

#[test]
fn gpus_of_containerd_are_named() {
    // `ctr run --gpus=0` of containerd 1.7.
    let hook = |program: &str| {
        let args = ["containerd", "oci-hook", "--", program, "--load-kmods", "configure", "--device=0"];
        found(&json!({"hooks": {"prestart": [{"path": "/usr/bin/containerd", "args": args}]}}))
    };
    let error = hook("/usr/bin/nvidia-container-cli").unwrap_err();
    assert_eq!(error, Conflict::GpuOption("nvidia-container-cli".to_owned()));
    assert_eq!(hook("/opt/bin/other"), Ok(()));
}

#[test]
fn a_hook_that_has_nothing_to_do_is_no_request() {
    let hooks = json!({"prestart": [{"path": "/usr/bin/nvidia-container-toolkit"}]});
    assert_eq!(found(&json!({"hooks": hooks})), Ok(()));
    let void = json!({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}, "hooks": hooks});
    assert_eq!(found(&void), Ok(()));
    let podman = json!({
        "process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]},
        "annotations": {"io.container.manager": "libpod"},
        "hooks": hooks
    });
    assert_eq!(found(&podman), Ok(()));
}

#[test]
fn nvidia_cdi_devices_are_named() {
    let hook = json!({"hooks": {"createContainer": [{"path": "/usr/bin/nvidia-cdi-hook"}]}});
    assert_eq!(found(&hook), Err(Conflict::Cdi("hook nvidia-cdi-hook".to_owned())));
    let annotated = json!({"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=0"}});
    let error = found(&annotated).unwrap_err();
    assert_eq!(error, Conflict::Cdi("nvidia.com/gpu=0".to_owned()));
    assert!(error.to_string().contains("remove `--device` or `--gpus`"));
    let ours = json!({"annotations": {"cdi.k8s.io/x": "sublet.dev/share=small"}});
    assert_eq!(found(&ours), Ok(()));
}

#[test]
fn allow_all_rules_are_refused_unless_configured() {
    let privileged = [
        json!([{"allow": true, "access": "rwm"}]),
        json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "a", "access": "rwm"}]),
        json!([{"allow": true, "type": "c", "major": -1, "minor": -1, "access": "rw"}]),
        json!([{"allow": true, "type": "c"}]),
    ];
    let (_dir, mut config) = host();
    for list in &privileged {
        let spec = rules(list);
        assert!(matches!(conflict(&spec, &[], &config), Err(Conflict::EveryDevice(_))), "{list}");
    }
    let error = conflict(&rules(&privileged[0]), &[], &config).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the container may open every device of the host (a *:* rwm); fix: remove `--privileged` or the rule, or \
         set `[limits] allow_privileged = true`"
    );
    config.limits.allow_privileged = true;
    assert_eq!(conflict(&rules(&privileged[0]), &[], &config), Ok(()));
}

#[test]
fn a_rule_that_a_later_one_takes_back_does_not_count() {
    let list = json!([{"allow": true, "access": "rwm"}, {"allow": false, "access": "rwm"}]);
    assert_eq!(found(&rules(&list)), Ok(()));
    let partly =
        json!([{"allow": true, "access": "rwm"}, {"allow": false, "type": "c", "major": 1, "access": "rwm"}]);
    assert!(found(&rules(&partly)).is_err());
}

#[test]
fn rules_for_nvidia_majors_are_refused() {
    for rule in [
        json!({"allow": true, "type": "c", "major": 195, "minor": 1, "access": "rwm"}),
        json!({"allow": true, "type": "c", "major": 510, "access": "r"}),
        json!({"allow": true, "type": "a", "major": 241, "minor": 3, "access": "w"}),
        json!({"allow": true, "type": "c", "minor": 255, "access": "rw"}),
    ] {
        assert!(matches!(found(&rules(&json!([rule]))), Err(Conflict::Rule(_))), "{rule}");
    }
    for rule in [
        json!({"allow": true, "type": "c", "major": 195, "access": "m"}),
        json!({"allow": true, "type": "b", "major": 195, "access": "rwm"}),
        json!({"allow": true, "type": "b", "access": "rwm"}),
        json!({"allow": true, "type": "c", "major": 259, "access": "rwm"}),
        json!({"allow": false, "type": "c", "major": 195, "access": "rwm"}),
    ] {
        assert_eq!(found(&rules(&json!([rule]))), Ok(()), "{rule}");
    }
}

#[test]
fn nvidia_nodes_are_refused_by_path_and_by_number() {
    for device in [
        json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}),
        json!({"path": "/dev/nvidia-caps/nvidia-cap3", "type": "c", "major": 1, "minor": 3}),
        json!({"path": "/dev/../dev//nvidia1", "type": "c", "major": 1, "minor": 3}),
        json!({"path": "/dev/harmless", "type": "c", "major": 510, "minor": 0}),
        json!({"path": "/dev/harmless", "type": "u", "major": 195, "minor": 0}),
    ] {
        let spec = json!({"linux": {"devices": [device]}});
        assert!(matches!(found(&spec), Err(Conflict::Node(_))), "{device}");
    }
}

#[test]
fn of_a_node_and_its_rule_the_option_that_brought_both_is_named() {
    // Docker's `--device /dev/nvidia0`, and a CDI device without hooks.
    let rule = json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rwm"});
    let mut spec = json!({"linux": {
        "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
        "resources": {"devices": [{"allow": false, "access": "rwm"}, rule]}
    }});
    assert!(matches!(found(&spec), Err(Conflict::Node(_))));
    // `--privileged` brings every node of the host.
    spec["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
    assert!(matches!(found(&spec), Err(Conflict::EveryDevice(_))));
}

#[test]
fn nvidia_nodes_are_refused_as_bind_mounts() {
    let (dir, config) = host();
    let simulated = dir.path().join("dev/nvidia0");
    for mount in [
        json!({"destination": "/x", "type": "bind", "source": "/dev/nvidia0"}),
        json!({"destination": "/x", "source": "/dev/./nvidia-caps", "options": ["rbind"]}),
        json!({"destination": "/dev/nvidiactl", "type": "bind", "source": "/srv/x"}),
        json!({"destination": "/dev", "type": "bind", "source": "/dev"}),
        json!({"destination": "/host-dev", "type": "none", "source": "/dev/", "options": ["bind"]}),
        json!({"destination": "/x", "type": "bind", "source": simulated}),
    ] {
        let spec = json!({"mounts": [mount]});
        assert!(matches!(conflict(&spec, &[], &config), Err(Conflict::Node(_))), "{mount}");
    }
}

#[test]
fn a_mount_that_would_hide_nvidia_nodes_is_refused() {
    let over = |destination: &str| {
        found(&json!({"mounts": [{"destination": destination, "type": "tmpfs", "source": "tmpfs"}]}))
    };
    for hidden in ["/dev/nvidia-caps", "/dev/./nvidia0", "/dev/nvidiactl/"] {
        let error = over(hidden).unwrap_err();
        assert!(
            error.to_string().contains(&format!("given a mount over {hidden} in addition to its share")),
            "{error}"
        );
    }
    for other in ["/dev", "/dev/shm", "/srv/dev/nvidia0"] {
        assert_eq!(over(other), Ok(()));
    }
}

#[test]
fn foreign_text_is_made_safe() {
    let spec = json!({"linux": {"devices": [{"path": "/dev/nvidia\u{1b}[2J\n", "type": "c"}]}});
    let message = found(&spec).unwrap_err().to_string();
    assert!(message.contains("/dev/nvidia\\u{1b}[2J\\n"), "{message}");
}

#[test]
fn only_the_nodes_of_a_cdi_device_pass() {
    let (_dir, config) = host();
    let given = [Node { path: "/dev/nvidia0".into(), major: 195, minor: 0 }];
    let device = |path: &str, minor: i64| json!({"path": path, "type": "c", "major": 195, "minor": minor});
    let rule =
        |minor: Value| json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rw"});
    let of = |device: Value, rule: Value| {
        let spec = json!({"linux": {"devices": [device], "resources": {"devices": [rule]}}});
        conflict(&spec, &given, &config)
    };
    assert_eq!(of(device("/dev/nvidia0", 0), rule(json!(0))), Ok(()));
    for (node, minor) in
        [("/dev/nvidia0", 1), ("/dev/nvidia1", 0), ("/dev/elsewhere", 0), ("/dev/nvidia1", 1)]
    {
        let found = of(device(node, minor), rule(json!(0)));
        assert!(matches!(found, Err(Conflict::Node(_))), "{node} {minor}: {found:?}");
    }
    for minor in [json!(1), json!(-1), json!(null)] {
        let found = of(device("/dev/nvidia0", 0), rule(minor.clone()));
        assert!(matches!(found, Err(Conflict::Rule(_))), "{minor}: {found:?}");
    }
}
