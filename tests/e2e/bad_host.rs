//! Bad hosts: an incomplete driver, GPUs that cannot do what is asked, directories that cannot be written, an invalid
//! configuration. Each is refused in one line that says what to do.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, assert_lines, in_one_line, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];

fn bad<'a>(world: &'a World, annotations: &[(&str, &str)]) -> Bundle<'a> {
    world.bundle("bad", annotations, HOLD)
}

fn refusals(world: &World, requests: &[&[(&str, &str)]]) -> Vec<String> {
    requests.iter().map(|annotations| bad(world, annotations).refused()).collect()
}

/// The fault of a host.
type Damage = fn(&World);

/// A file of the simulated driver.
fn driver(world: &World, path: &str) -> PathBuf {
    world.driver_root.as_ref().expect("simulated").join(path)
}

fn libraries(world: &World) -> PathBuf {
    let dirs = ["usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"].map(|dir| driver(world, dir));
    dirs.into_iter().find(|dir| dir.exists()).expect("a library directory")
}

/// A topology of the shipped ones with `change` made to its text.
fn topology(name: &str, change: impl FnOnce(String) -> String) -> (tempfile::TempDir, String) {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../sim/topologies/{name}.toml"));
    let text = change(std::fs::read_to_string(shipped).expect("a topology"));
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("changed.toml");
    std::fs::write(&file, text).expect("a topology");
    let name = file.to_str().expect("UTF-8").to_owned();
    (dir, name)
}

/// Programs and their bundle work the same wherever a driver's layout has its MPS programs.
#[test]
fn mps_programs_outside_the_usual_path() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let names = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];
    let aside = driver(&world, "usr/local/nvidia/bin");
    std::fs::create_dir_all(&aside).expect("a directory");
    for name in names {
        std::fs::rename(driver(&world, "usr/bin").join(name), aside.join(name)).expect("moved");
    }
    let bundle = world.bundle("one", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    assert_eq!(
        (bundle.event("info")["mps"].clone(), bundle.event("info")["sm"].clone()),
        (json!(true), json!(32))
    );
    bundle.down();
    world.assert_empty();
    // Of three copies the first whole installation runs; doctor says so.
    let other = driver(&world, "opt/bin");
    std::fs::create_dir_all(&other).expect("a directory");
    for name in names {
        std::fs::copy(aside.join(name), other.join(name)).expect("copied");
    }
    std::fs::copy(aside.join(names[0]), driver(&world, "usr/bin").join(names[0])).expect("copied");
    let doctor = world.sublet(&["doctor", "--quick"]);
    let said =
        String::from_utf8_lossy(&doctor.stdout).replace(world.dir.path().to_str().expect("UTF-8"), "$DIR");
    let line = said.lines().find(|line| line.contains("mps-programs")).expect("the check");
    assert_lines(
        &[line.split("daemons run").nth(1).unwrap_or(line).trim().to_owned()],
        &[
            "$DIR/sim/usr/local/nvidia/bin/nvidia-cuda-mps-control, which starts $DIR/sim/usr/local/nvidia/bin/nvidia-cuda-mps-server; not used: $DIR/sim/usr/bin/nvidia-cuda-mps-control, $DIR/sim/opt/bin/nvidia-cuda-mps-control, $DIR/sim/opt/bin/nvidia-cuda-mps-server",
        ],
    );
    let again = world.bundle("again", SHARE, HOLD);
    again.up();
    assert_eq!(again.event("info")["mps"], json!(true));
    again.down();
    world.assert_empty();
}

/// Like a libcuda of another driver. The logs stay, to show what happened.
#[test]
fn an_mps_server_that_ends_as_it_starts_is_named_at_once() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let fault = driver(&world, "sim/mps-server-fault");
    std::fs::write(&fault, "").expect("written");
    let one = bad(&world, SHARE);
    let begun = std::time::Instant::now();
    let refused = one.create();
    assert!(!refused.ok && begun.elapsed() < std::time::Duration::from_secs(8), "{refused:?}");
    assert_eq!(one.config(), one.spec);
    let pid = refused.stderr.split("(pid ").nth(1).and_then(|rest| rest.split(')').next());
    let said = in_one_line(&refused.stderr).replace(pid.expect("its pid"), "$PID");
    let said = said.replace(world.dir.path().to_str().expect("UTF-8"), "$DIR");
    assert!(
        said.ends_with(
            "the MPS daemon of GPU-5b1e7000-0000-4000-8000-000000000100 cannot start an MPS server: \
             $DIR/sim/usr/bin/nvidia-cuda-mps-server (pid $PID) exited with status 1; control.log: \
             Starting new server $PID for user 0 | Server $PID exited with status 1; see \
             $DIR/sim/run/mps/GPU-5b1e7000-0000-4000-8000-000000000100/log/server.log, and check that the \
             libcuda.so.1 that it loads (ldconfig -p | grep libcuda) is of the loaded driver 580.159.04"
        ),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    world.assert_empty();
    std::fs::remove_file(fault).expect("removed");
    let again = world.bundle("again", SHARE, HOLD);
    again.up();
    again.down();
    world.assert_empty();
}

/// `config.toml` with `from` replaced.
fn reconfigure(world: &World, from: &str, to: &str) {
    let text = std::fs::read_to_string(&world.config).expect("config.toml");
    assert!(text.contains(from), "{from} is not in {text}");
    std::fs::write(&world.config, text.replace(from, to)).expect("config.toml");
}

#[test]
fn hosts_whose_driver_is_not_whole() {
    if skip_unless_root() {
        return;
    }
    let hosts: &[(&str, Damage)] = &[
        ("no driver", |world| {
            std::fs::remove_dir_all(driver(world, "proc/driver/nvidia")).expect("removed");
            std::fs::remove_dir_all(driver(world, "sys/module/nvidia")).expect("removed");
        }),
        ("no NVML", |world| remove_library(world, "libnvidia-ml.so")),
        ("no libcuda", |world| remove_library(world, "libcuda.so")),
        ("no MPS", |world| {
            std::fs::remove_file(driver(world, "usr/bin/nvidia-cuda-mps-control")).expect("removed");
        }),
        ("no MPS server", |world| {
            std::fs::remove_file(driver(world, "usr/bin/nvidia-cuda-mps-server")).expect("removed");
        }),
        ("no node of the GPU", |world| std::fs::remove_file(driver(world, "dev/nvidia0")).expect("removed")),
        ("no nvidiactl", |world| std::fs::remove_file(driver(world, "dev/nvidiactl")).expect("removed")),
        ("no uvm", |world| std::fs::remove_file(driver(world, "dev/nvidia-uvm")).expect("removed")),
        ("fell off the bus", |world| {
            let config = driver(world, "sys/bus/pci/devices/0000:3b:00.0/config");
            std::fs::write(config, [0xff; 64]).expect("written");
        }),
    ];
    let seen: Vec<_> = hosts
        .iter()
        .map(|(what, damage)| {
            let world = World::simulated("h200", "");
            damage(&world);
            let fresh = bad(&world, SHARE).refused();
            format!("{what}: {fresh}")
        })
        .collect();
    assert_lines(
        &seen,
        &[
            "no driver: no NVIDIA driver is loaded: $DIR/sim/proc/driver/nvidia/version is missing; install the driver or load it with `modprobe nvidia`",
            "no NVML: NVML is missing: [driver] nvml names $DIR/sim/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1, which does not exist; Debian: apt install libnvidia-ml1, Red Hat: dnf install nvidia-driver-cuda-libs",
            "no libcuda: libcuda.so.1 of driver 580.159.04 is not in any library directory below $DIR/sim; Debian: apt install libcuda1, Red Hat: dnf install nvidia-driver-cuda-libs",
            "no MPS: cannot serve mps, 25 % SM: GPU 0 needs an MPS server; why: nvidia-cuda-mps-control is not installed (Debian: apt install nvidia-cuda-mps)",
            "no MPS server: cannot serve mps, 25 % SM: GPU 0 needs an MPS server; why: $DIR/sim/usr/bin/nvidia-cuda-mps-control is installed, but nvidia-cuda-mps-server, which it starts, is not: install it from the same package (Debian: apt install nvidia-cuda-mps), or link it into $DIR/sim/usr/bin (looked below $DIR/sim in /usr/bin /usr/sbin /bin /sbin /usr/lib/nvidia/current /run/current-system/sw/bin /run/opengl-driver/bin /usr/local/bin /usr/local/sbin /usr/local/glibc/usr/bin /usr/local/nvidia/bin /home/kubernetes/bin/nvidia/bin /var/lib/nvidia/bin /opt/bin)",
            "no node of the GPU: every GPU that could serve it is left out; why: GPU 0 is left out: device node $DIR/sim/dev/nvidia0 is missing; run `nvidia-modprobe -c 0`",
            "no nvidiactl: device node $DIR/sim/dev/nvidiactl is missing; run `nvidia-modprobe`",
            "no uvm: device node $DIR/sim/dev/nvidia-uvm is missing; run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`",
            "fell off the bus: every GPU that could serve it is left out; why: GPU 0 is left out: it fell off the bus; see \
             `dmesg | grep -i xid`; a power cycle may bring it back",
        ],
    );
}

/// connect(2) to it succeeds, and programs would wait for it for ever.
#[test]
fn a_daemon_that_is_stopped_serves_no_new_container() {
    use nix::sys::signal::{Signal, kill};
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let keeper = world.bundle("keeper", SHARE, &["/bin/sleep", "120"]);
    keeper.up();
    let daemons = world.daemon_pids("");
    daemons.iter().copied().for_each(sublet_e2e::stop);
    // Whether it answered just now or long ago.
    let just = bad(&world, SHARE).refused();
    world.forget_answers();
    let long = bad(&world, SHARE).refused();
    for pid in daemons {
        kill(pid, Signal::SIGCONT).expect("it lives");
    }
    assert!([&just, &long].iter().all(|line| line.contains("does not answer")), "{just} {long}");
    let again = world.bundle("again", SHARE, HOLD);
    again.up();
    assert_eq!(again.event("info")["mps"], json!(true));
    again.down();
    keeper.down();
    world.assert_empty();
}

fn remove_library(world: &World, stem: &str) {
    let entries = std::fs::read_dir(libraries(world)).expect("libraries").flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(stem)) {
        std::fs::remove_file(entry.path()).expect("removed");
    }
}

#[test]
fn nodes_that_vanish_after_the_refresh() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    assert!(world.sublet(&["refresh"]).status.success());
    std::fs::remove_file(driver(&world, "dev/nvidia-uvm")).expect("removed");
    let seen = bad(&world, SHARE).refused();
    assert_lines(
        &[seen],
        &[
            "device node $DIR/sim/dev/nvidia-uvm is missing; run `modprobe nvidia-uvm`, then `nvidia-modprobe -u -c0`",
        ],
    );
    world.assert_empty();
}

#[test]
fn a_driver_upgraded_and_not_reloaded_is_named_with_both_versions() {
    if skip_unless_root() {
        return;
    }
    let (_dir, name) = topology("h200", |text| format!("file_version = \"580.173.02\"\n{text}"));
    let world = World::simulated(&name, "");
    assert_lines(
        &[bad(&world, SHARE).refused()],
        &["the loaded NVIDIA kernel module is 580.159.04, but the driver's files are 580.173.02: reboot, \
             or reload the modules"],
    );
}

#[test]
fn before_volta_mps_has_no_limits() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("pascal", "");
    let limits: &[&[(&str, &str)]] =
        &[&[("sublet.sm", "25")], &[("sublet.mode", "mps"), ("sublet.memory", "4GiB")]];
    assert_lines(
        &refusals(&world, limits),
        &[
            "refused: GPU 0 is older than Volta, where MPS has no limits; fix: leave out sublet.sm, memory and priority",
            "refused: GPU 0 is older than Volta, where MPS has no limits; fix: leave out sublet.sm, memory and priority",
        ],
    );
    let plain = world.bundle("plain", &[("sublet.mode", "mps")], HOLD);
    plain.up();
    assert_eq!(plain.event("info")["mps"], json!(true), "without limits it works");
    plain.down();
    world.assert_empty();
}

#[test]
fn a_vgpu_guest_has_no_mps_unless_somebody_says_so() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("vgpu", "");
    assert_lines(
        &[bad(&world, SHARE).refused()],
        &[
            "refused: GPU 0 is a vGPU, where MPS works with some profiles only; fix: set [mps] allow_vgpu = true to \
             try it (root), or use time-slice",
        ],
    );
    let plain = world.bundle("plain", &[("sublet.gpu", "0")], HOLD);
    plain.up();
    assert_eq!(plain.event("info")["mps"], json!(false), "time-slice works");
    plain.down();
    world.configure("[mps]\nallow_vgpu = true\n");
    let allowed = world.bundle("allowed", SHARE, HOLD);
    allowed.up();
    assert_eq!(allowed.event("info")["mps"], json!(true));
    allowed.down();
    world.assert_empty();
}

#[test]
fn a_process_of_the_hosts_keeps_a_gpu_from_being_exclusive() {
    if skip_unless_root() {
        return;
    }
    let (_dir, name) =
        topology("h200", |text| format!("{text}\n[[process]]\ngpu = 0\nname = \"trainer\"\nmib = 2048\n"));
    let world = World::simulated(&name, "");
    let line = bad(&world, &[("sublet.mode", "exclusive")]).refused();
    let pid: String =
        line.split("process ").nth(1).unwrap_or("").chars().take_while(char::is_ascii_digit).collect();
    assert!(!pid.is_empty(), "it names the process: {line}");
    assert_lines(
        &[line.replace(&pid, "$PID")],
        &[
            "no room for exclusive: GPU 0 cannot be given to one container alone; why: process $PID (trainer) has a \
             CUDA context on it without a lease; 100 % SM, 141223 MiB left; fix: end it first; or sublet.mode=mps \
             fits now, shared with others; or sublet.wait=60s waits for room",
        ],
    );
    world.assert_empty();
}

#[test]
fn a_low_level_runtime_that_is_missing() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let present = format!("[\"{}\"]", world.engine.program());
    reconfigure(&world, &present, r#"["nowhere", "/opt/no/runc"]"#);
    assert_lines(
        &[bad(&world, SHARE).refused()],
        &[
            "missing nowhere: no executable nowhere or /opt/no/runc found; install runc or crun, or set [runtime] low_level",
        ],
    );
    world.assert_empty();
}

#[test]
fn configuration_that_cannot_be_used() {
    if skip_unless_root() {
        return;
    }
    let extras = [
        "[limits]\ntime_slice_maximum = 3\n",
        "[mps]\nexclusive_compute_mode = \"sometimes\"\n",
        "[guard]\nperiod = \"60s\"\n",
        "[limits\n",
    ];
    let seen: Vec<_> = extras
        .iter()
        .map(|extra| {
            let world = World::simulated("h200", extra);
            let line = bad(&world, SHARE).refused();
            let stranger = world.bundle("stranger", &[], &["/bin/sleep", "120"]);
            let created = stranger.create();
            assert!(created.ok, "no annotation: the configuration is not its own: {created:?}");
            line
        })
        .collect();
    assert_lines(
        &seen,
        &[
            "configuration $DIR/sim/config.toml:15:1: unknown key `time_slice_maximum`, did you mean time_slice_max?; why: expected one of `sm_overcommit`, `memory_overcommit`, `time_slice_max`, `reserve`, `require`, `wait_max`, `capabilities`, `allow_privileged`, `allow_devices`",
            "configuration $DIR/sim/config.toml:15:26: mps.exclusive_compute_mode: unknown value `sometimes`; why: expected one of `auto`, `always`, `never`",
            "configuration $DIR/sim/config.toml:15:1: guard.period must be from 100ms to 10s",
            "configuration $DIR/sim/config.toml:14:8: unclosed table; why: expected `]`",
        ],
    );
}

#[test]
fn a_driver_that_was_upgraded_and_not_reloaded_is_refused_with_both_versions() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("one", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    let root = world.driver_root.as_ref().expect("simulated");
    let version = root.join("proc/driver/nvidia/version");
    let text = std::fs::read_to_string(&version).expect("the module's version");
    assert!(text.contains("580.159.04"));
    std::fs::write(&version, text.replace("580.159.04", "575.57.08")).expect("written");
    let late = world.bundle("late", &[("sublet.sm", "25")], HOLD);
    let refused = late.create();
    assert!(!refused.ok);
    for word in ["580.159.04", "575.57.08", "reboot, or reload the modules"] {
        assert!(refused.stderr.contains(word), "{word} is not in: {}", refused.stderr);
    }
    assert_eq!(in_one_line(&refused.stderr).lines().count(), 1, "{}", refused.stderr);
    assert_eq!(late.config(), late.spec);
    // The container that runs is not stopped, and can end.
    bundle.down();
    std::fs::write(&version, text).expect("written");
    world.assert_empty();
}

#[test]
fn the_lease_of_a_gpu_that_fell_off_the_bus_is_lost() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200x8", "");
    let share = [("sublet.gpu", "3"), ("sublet.mode", "time-slice")];
    let bundle = world.bundle("unlucky", &share, HOLD);
    bundle.up();
    let other = world.bundle("lucky", &[("sublet.gpu", "4"), ("sublet.mode", "time-slice")], HOLD);
    other.up();
    // The fourth of `h200x8.toml` by index.
    let gone = "GPU-5b1e7000-0000-4000-8000-000000000803";
    let inventory: Value =
        serde_json::from_slice(&std::fs::read(world.state_dir().join("inventory.json")).expect("inventory"))
            .expect("JSON");
    assert_eq!(inventory["devices"][3]["uuid"], gone);
    let bus = inventory["devices"][3]["bus_id"].as_str().expect("bus id");
    let root = world.driver_root.as_ref().expect("simulated");
    let config = root.join("sys/bus/pci/devices").join(bus).join("config");
    std::fs::write(&config, [0xff; 256]).expect("written");
    let states = |world: &World| {
        let mut states: Vec<Value> =
            world.leases().iter().map(|lease| json!([lease["container_id"], lease["state"]])).collect();
        states.sort_by_key(ToString::to_string);
        states
    };
    assert_eq!(states(&world), [json!(["lucky", "active"]), json!(["unlucky", "lost"])]);
    let devices = world.status()["devices"].as_array().cloned().expect("a list");
    assert_eq!((devices.len(), &devices[3]["health"]["state"]), (8, &json!("lost")));
    let again = world.bundle("again", &[("sublet.gpu", gone)], HOLD);
    let refused = again.create();
    assert!(!refused.ok && refused.stderr.contains("GPU 3 is left out: it fell off the bus"), "{refused:?}");
    assert_eq!(again.config(), again.spec);
    let all = world.bundle("all", &[("sublet.gpu", "any:7")], HOLD);
    let created = all.create();
    assert!(created.ok, "seven are left: {created:?}");
    [&bundle, &other, &all].into_iter().for_each(Bundle::down);
    world.assert_empty();
}

/// If CUDA cannot reach its daemon, it runs on the whole GPU or not at all.
#[test]
fn a_daemon_that_was_closed_to_containers_is_open_again_before_the_next_starts() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let first = world.bundle("first", &[("sublet.sm", "25")], &["/bin/sleep", "60"]);
    first.up();
    let daemons = std::fs::read_dir(world.state_dir().join("mps")).expect("mps").flatten();
    let public = daemons.map(|daemon| daemon.path().join("public")).find(|public| public.is_dir());
    let public = public.expect("a daemon");
    std::fs::set_permissions(&public, Permissions::from_mode(0o700)).expect("chmod");
    let second = world.bundle("second", &[("sublet.sm", "25")], &["/bin/sleep", "60"]);
    second.up();
    assert_eq!(std::fs::metadata(&public).expect("public").mode() & 0o777, 0o755);
    second.down();
    first.down();
    world.assert_empty();
}
