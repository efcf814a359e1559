//! What a container is given besides its libraries: capabilities, hidden other GPUs, nodes in a user namespace, a
//! share by the runtime's name, crun's own option for the spec.

use std::os::unix::fs::{chown, symlink};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::frameworks::refusals;
use sublet_e2e::{Bundle, Engine, World, bin_dir, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const WHOLE: &[(&str, &str)] = &[("sublet.gpu", "0")];

fn names<'a>(bundle: &Bundle<'_>, wanted: &'a [&'a str]) -> Vec<(&'a str, bool)> {
    let all = bundle.destinations();
    let there = |name: &str| all.iter().any(|path| path.ends_with(&format!("/{name}")));
    wanted.iter().map(|name| (*name, there(name))).collect()
}

#[test]
fn graphics_and_video_bring_their_files_and_nodes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    // With the capabilities, each of which brings it.
    let files = [
        ("libcuda.so.1", "compute"),
        ("nvidia-smi", "utility"),
        ("libEGL_nvidia.so.0", "graphics"),
        ("libnvidia-encode.so.1", "video"),
        ("10_nvidia.json", "graphics video"),
        ("nvidia_icd.json", "graphics video"),
        ("libnvidia-allocator.so.1", "compute graphics"),
        ("libnvidia-gpucomp.so.580.159.04", "compute graphics"),
        ("gbm/nvidia-drm_gbm.so", "graphics"),
        ("libnvidia-egl-wayland.so.1", "graphics"),
        ("libnvidia-egl-wayland2.so.1", "graphics"),
        ("10_nvidia_wayland.json", "graphics video"),
        ("99_nvidia_wayland2.json", "graphics video"),
    ];
    let plain = "nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl";
    let graphical = "dri/card1 dri/renderD128 nvidia-modeset nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl";
    let cases = [
        ("compute", plain),
        ("utility", plain),
        ("graphics", graphical),
        ("video", plain),
        ("all", graphical),
    ];
    for (capabilities, nodes) in cases {
        let annotations = [("sublet.gpu", "0"), ("sublet.capabilities", capabilities)];
        let bundle = world.bundle(capabilities, &annotations, SLEEP);
        bundle.up();
        let brings = |of: &str| capabilities == "all" || of.split(' ').any(|one| one == capabilities);
        let expected = files.map(|(name, of)| (name, brings(of)));
        assert_eq!(names(&bundle, &files.map(|(name, _)| name)), expected, "{capabilities}");
        let script = "cd /dev; for n in dri/* nvidia*; do [ -c $n ] && echo $n; done";
        let listed = bundle.exec(&["/bin/sh", "-c", script]).stdout;
        assert_eq!(listed.split_whitespace().collect::<Vec<_>>().join(" "), nodes, "{capabilities}");
        bundle.down();
    }
    world.assert_empty();
}

/// JAX refuses its two variables together, both in an exec'd process and in the first one.
#[test]
fn jax_is_told_by_one_name_or_the_users_own() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let told = |env: &str| {
        let jax = env.lines().filter(|line| line.starts_with("XLA_")).map(str::to_owned);
        assert_eq!(refusals(&env.lines().map(str::to_owned).collect::<Vec<_>>()), Vec::<String>::new());
        jax.collect::<Vec<_>>()
    };
    let share = [("sublet.sm", "25"), ("sublet.memory", "10GiB")];
    let ours = ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.070"];
    let users = ["XLA_CLIENT_MEM_FRACTION=0.5"];
    let plain = world.bundle("plain", &share, SLEEP);
    let mut own = world.bundle("own", &share, SLEEP);
    own.spec["process"]["env"].as_array_mut().expect("env").push(json!(users[0]));
    // An exec'd process is like the first one: if the container sets its own variable, sublet adds none.
    for (bundle, first, by_exec) in [(&plain, ours, &ours[..]), (&own, users, &[])] {
        bundle.up();
        assert_eq!(told(&bundle.exec(&["/bin/env"]).stdout), first);
        assert_eq!(told(&bundle.exec_file(&["/bin/env"], &["PATH=/usr/bin"]).stdout), by_exec);
        assert_eq!(told(&bundle.exec_file(&["/bin/env"], &users).stdout), users);
        let given = bundle.exec_with(&["--env", users[0]], &["/bin/env"]).stdout;
        assert!(told(&given).contains(&users[0].to_owned()), "{given}");
        bundle.down();
    }
    world.assert_empty();
}

#[test]
fn an_images_own_capabilities_are_limited_by_the_configuration() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[limits]\ncapabilities = [\"compute\", \"utility\"]\n");
    let mut bundle = world.bundle("greedy", WHOLE, SLEEP);
    let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("NVIDIA_DRIVER_CAPABILITIES=all"));
    bundle.up();
    let files = ["libcuda.so.1", "nvidia-smi", "libEGL_nvidia.so.0", "libnvidia-encode.so.1"];
    let expected = files.into_iter().zip([true, true, false, false]).collect::<Vec<_>>();
    assert_eq!(names(&bundle, &files), expected);
    bundle.down();
    world.assert_empty();
}

/// `GPUDirect` Storage and IMEX channels.
#[test]
fn nodes_that_are_no_gpus_are_the_administrators_to_allow() {
    if skip_unless_root() {
        return;
    }
    let key = "[limits]\nallow_devices = [\"/dev/nvidia-fs0\", \"/dev/nvidia-caps-imex-channels\"]\n";
    for (config, is_allowed) in [("", false), (key, true)] {
        let world = World::simulated("h200", config);
        let listed = world.driver_root.as_ref().expect("simulated").join("proc/devices");
        let text = std::fs::read_to_string(&listed).expect("/proc/devices");
        let more = "Character devices:\n505 nvidia-fs\n506 nvidia-caps-imex-channels\n";
        std::fs::write(&listed, text.replacen("Character devices:\n", more, 1)).expect("/proc/devices");
        let with = |path: &str, major: i64| {
            let mut bundle = world.bundle("beside", SHARE, SLEEP);
            let node = json!({"path": path, "type": "c", "major": major, "minor": 0, "fileMode": 0o666});
            bundle.spec["linux"]["devices"] = json!([node]);
            let rules = bundle.spec["linux"]["resources"]["devices"].as_array_mut().expect("rules");
            rules.push(json!({"allow": true, "type": "c", "major": major, "minor": 0, "access": "rwm"}));
            bundle
        };
        for (path, major) in [("/dev/nvidia-fs0", 505), ("/dev/nvidia-caps-imex-channels/channel0", 506)] {
            let bundle = with(path, major);
            if is_allowed {
                bundle.up();
                assert!(bundle.exec(&["/bin/sh", "-c", &format!("[ -c {path} ]")]).ok, "{path}");
                bundle.down();
            } else {
                assert!(bundle.refused().contains(path), "{path}");
            }
        }
        assert!(with("/dev/nvidia-fs0", 195).refused().contains("/dev/nvidia-fs0"), "a GPU's node");
        world.assert_empty();
    }
}

#[test]
fn other_gpus_are_hidden_in_proc() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let bundle = world.bundle("masked", &[("sublet.gpu", "2")], SLEEP);
    bundle.up();
    let config = bundle.config();
    let masked: Vec<_> = config["linux"]["maskedPaths"].as_array().expect("paths")[2..]
        .iter()
        .map(|path| path.as_str().expect("a path").trim_start_matches("/proc/driver/nvidia/gpus/"))
        .collect();
    assert_eq!(config["linux"]["maskedPaths"][0], "/proc/asound", "the engine's own stay");
    // All but GPU 2, which is 0000:3a:00.0.
    let others = ["18", "2a", "5d", "9a", "ab", "ba", "db"].map(|bus| format!("0000:{bus}:00.0"));
    assert_eq!(masked, others);
    bundle.down();
    world.assert_empty();
}

/// Rootful, with mappings: mknod is not allowed in there, so the nodes are the host's, bind-mounted.
#[test]
fn a_user_namespace_gets_the_hosts_nodes() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("mapped", SHARE, HOLD);
    bundle.map_users();
    let (info, _) = bundle.up_heard();
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)));
    assert!(bundle.destinations().contains(&"/dev/nvidia0".to_owned()), "a bind mount");
    assert_eq!(bundle.config()["linux"]["devices"], Value::Null);
    let seen = bundle.exec(&[
        "/usr/bin/cuda-probe",
        "noderights",
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    ]);
    let results: Vec<_> = seen
        .json()
        .iter()
        .filter(|line| line["event"] == "node")
        .map(|line| line["result"].clone())
        .collect();
    assert_eq!(results, ["ENXIO", "ENXIO", "ENXIO"], "allowed by the cgroup, no driver behind it");
    bundle.down();
    world.assert_empty();
}

/// As in runc's and crun's own tests: the root filesystem is the host's root's, and so is a volume.
#[test]
fn a_user_namespace_whose_root_owns_nothing_gets_its_mount_points() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    for hooked in [false, true] {
        let mut bundle = world.bundle(if hooked { "hooked" } else { "unowned" }, SHARE, HOLD);
        bundle.map_users();
        let rootfs = bundle.dir.join("rootfs");
        let back = Command::new("chown").args(["-R", "0:0"]).arg(&rootfs).status();
        assert!(back.expect("chown").success());
        let volume = bundle.dir.join("volume");
        std::fs::create_dir(&volume).expect("a volume");
        let mounts = bundle.spec["mounts"].as_array_mut().expect("mounts");
        mounts.push(
            json!({"destination": "/run", "type": "bind", "source": volume, "options": ["bind", "rprivate"]}),
        );
        if hooked {
            bundle.hook(&["createRuntime", "poststop"]);
        }
        let (info, _) = bundle.up_heard();
        assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{hooked}");
        assert!(!rootfs.join("usr/bin/sublet-share").exists(), "a convenience is left out: {hooked}");
        assert!(rootfs.join("usr/bin/nvidia-smi").exists(), "{hooked}");
        bundle.down();
        assert!(!rootfs.join("usr/bin/nvidia-smi").exists(), "{hooked}");
    }
    world.assert_empty();
}

/// A directory in which nobody may create anything, until this is dropped (chattr(1)).
struct Immutable(PathBuf);

impl Immutable {
    /// `None` if the file system has no such flag.
    fn make(directory: PathBuf) -> Option<Self> {
        let made = Command::new("chattr").arg("+i").arg(&directory).output();
        made.is_ok_and(|output| output.status.success()).then_some(Self(directory))
    }
}

impl Drop for Immutable {
    fn drop(&mut self) {
        let _ = Command::new("chattr").arg("-i").arg(&self.0).status();
    }
}

#[test]
fn a_mount_point_that_nobody_may_create_is_named() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("unowned", SHARE, HOLD);
    bundle.map_users();
    let programs = bundle.dir.join("rootfs/usr/bin");
    chown(&programs, Some(0), Some(0)).expect("root's");
    let Some(immutable) = Immutable::make(programs) else {
        println!("skipped: no immutable directory (chattr +i) in {}", bundle.dir.display());
        return;
    };
    let line = bundle.refused();
    let why = "the root of the container's user namespace does not own the directory of /usr/bin/nvidia-smi";
    assert!(line.contains(why) && line.contains("Operation not permitted"), "{line}");
    let last = String::from_utf8(world.sublet(&["status", "--last-error"]).stdout).expect("UTF-8");
    assert!(last.contains(why), "{last}");
    drop(immutable);
    world.assert_empty();
}

#[test]
fn the_name_of_the_runtime_may_be_the_share() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[share.quarter]\nsm = \"25\"\nmemory = \"8GiB\"\n");
    let quarter = world.dir.path().join("sublet-quarter");
    symlink(bin_dir().join("sublet-runtime"), &quarter).expect("a link");
    let bundle = world.bundle("named", &[], HOLD);
    bundle.write();
    let mut command = Command::new(&quarter);
    command.env("SUBLET_CONFIG", &world.config).arg("--root").arg(world.runtime_root());
    let out = std::fs::File::create(bundle.dir.join("out")).expect("a file");
    command.args(["create", "--bundle"]).arg(&bundle.dir).arg("named").stdout(out);
    assert!(command.status().expect("it runs").success());
    assert!(bundle.start().ok);
    assert_eq!(bundle.event("info")["sm"], json!(32));
    assert_eq!(world.leases()[0]["memory_bytes"], json!(8_589_934_592_u64));
    bundle.down();
    world.assert_empty();
}

/// crun's `--config` names the file to edit, whatever lies in the bundle.
#[test]
fn cruns_config_option_names_the_file() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    if world.engine != Engine::Crun {
        println!("skipped: runc has no --config");
        return;
    }
    for option in [&["-f"][..], &["--config"]] {
        let mut bundle = world.bundle("elsewhere", SHARE, HOLD);
        let spec = serde_json::to_vec(&bundle.spec).expect("JSON");
        std::fs::write(bundle.dir.join("other.json"), spec).expect("a file");
        bundle.spec["annotations"] = json!({});
        bundle.write();
        let before = std::fs::read(bundle.dir.join("config.json")).expect("config.json");
        let out = std::fs::File::create(bundle.dir.join("out")).expect("a file");
        let mut command = world.runtime();
        command.arg("create").args(option).arg(bundle.dir.join("other.json"));
        command.arg("--bundle").arg(&bundle.dir).arg("elsewhere").stdout(out);
        assert!(command.status().expect("it runs").success());
        assert!(bundle.start().ok);
        assert_eq!(bundle.event("info")["sm"], json!(32));
        assert_eq!(std::fs::read(bundle.dir.join("config.json")).expect("config.json"), before);
        bundle.down();
    }
    world.assert_empty();
}
