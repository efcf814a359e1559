//! MIG with several processes and users, failures on demand, and GPU types that have no other tests.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};

use crate::driver::{Driver, root_or_skip};
use nvidia_ml::layout::state_file::State;

const GPU: &str = "GPU-5b1e7000-0000-4000-8000-000000000120";

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn smi_as(driver: &Driver, uid: u32, env: &[(&str, &str)], arguments: &str) -> Output {
    let mut command = Command::new(driver.root.join("usr/bin/nvidia-smi"));
    command.args(arguments.split_whitespace()).uid(uid).gid(uid).envs(env.iter().copied());
    command.output().unwrap()
}

#[test]
fn two_at_once_never_get_the_same_place() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let driver = Driver::up("h200-mig");
    let program = driver.root.join("usr/bin/nvidia-smi");
    let create = || Command::new(&program).args(["mig", "-cgi", "19", "-C"]).output().unwrap();
    let made = std::thread::scope(|scope| {
        let all: Vec<_> = (0..10).map(|_| scope.spawn(create)).collect();
        all.into_iter().map(|one| one.join().unwrap()).filter(|output| output.status.success()).count()
    });
    let instances = &State::read(&driver.root).unwrap().mig[GPU].instances;
    let starts: BTreeSet<u32> = instances.iter().map(|one| one.start).collect();
    let uuids: BTreeSet<&str> = instances.iter().map(|one| one.compute[0].uuid.as_str()).collect();
    assert_eq!((made, starts.len(), uuids.len()), (7, 7, 7));
}

#[test]
fn who_is_not_root_may_look_at_mig_only_while_it_is_off() {
    if !root_or_skip("other users") {
        return;
    }
    let driver = Driver::up("h200-mig");
    for arguments in ["mig -lgi", "mig -cgi 19", "-mig 0", "--gpu-reset"] {
        let refused = smi_as(&driver, 65534, &[], arguments);
        assert_eq!(refused.status.code(), Some(4), "{arguments}: {refused:?}");
        assert!(text(&refused).contains("Insufficient Permissions"), "{arguments}: {refused:?}");
    }
    assert!(smi_as(&driver, 65534, &[], "-L").status.success());
    let off = Driver::up("h200");
    assert!(
        text(&smi_as(&off, 65534, &[], "mig -lgipp")).starts_with("GPU  0 Profile ID 19 Placements: {0,1")
    );
}

#[test]
fn a_call_fails_when_it_is_told_to() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let driver = Driver::up("h200-mig");
    let count = || State::read(&driver.root).unwrap().mig[GPU].instances.len();
    let fail = driver.root.join("sim/fail");
    fs::write(&fail, "nvmlDeviceCreateGpuInstance 2 23\nnvmlGpuInstanceDestroy 1 999 done\n").unwrap();
    assert!(driver.smi("mig -cgi 19").status.success());
    assert_eq!(
        fs::read_to_string(&fail).unwrap(),
        "nvmlDeviceCreateGpuInstance 1 23\nnvmlGpuInstanceDestroy 1 999 done\n"
    );
    let second = driver.smi("mig -cgi 19");
    assert!(text(&second).contains("profile 19: Insufficient Resources"), "{second:?}");
    assert_eq!(count(), 1);
    assert!(driver.smi("mig -cgi 19").status.success());
    assert!(text(&driver.smi("mig -dgi -gi 7")).contains("Unknown Error"));
    assert_eq!(
        (count(), fs::read_to_string(&fail).unwrap().as_str()),
        (1, ""),
        "it was destroyed all the same"
    );

    let env = [("SUBLET_SIM_FAIL", "* 0 15")];
    assert!(!smi_as(&driver, 0, &env, "-L").status.success());
    let env = [("SUBLET_SIM_FAIL", "nvmlGpuInstanceDestroy 1 19; nvmlInit_v2 2 9")];
    assert_eq!(smi_as(&driver, 0, &env, "mig -dgi").status.code(), Some(19));
    assert_eq!(count(), 1);
    let env = [("SUBLET_SIM_FAIL", "nvmlInit_v2 1 9")];
    assert_eq!(smi_as(&driver, 0, &env, "-L").status.code(), Some(9));
}

#[test]
fn a_process_dies_in_the_middle_of_its_work() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let driver = Driver::up("h200-mig");
    for (how, instances) in [("kill", 0), ("kill done", 1)] {
        fs::write(driver.root.join("sim/fail"), format!("nvmlDeviceCreateGpuInstance 1 {how}")).unwrap();
        assert_eq!(driver.smi("mig -cgi 19 -C").status.signal(), Some(9));
        assert_eq!(State::read(&driver.root).unwrap().mig[GPU].instances.len(), instances);
    }
    assert!(driver.smi("mig -cgi 19 -C").status.success());
}

#[test]
fn calls_are_written_down_where_there_is_a_trace() {
    let driver = Driver::up("h200");
    fs::write(driver.root.join("sim/trace"), "").unwrap();
    driver.said("--query-gpu=uuid --format=csv");
    let trace = driver.read("sim/trace");
    let calls: Vec<&str> = trace.lines().filter(|name| !name.starts_with("nvmlSystem")).collect();
    assert_eq!(
        calls,
        ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"]
    );
}

#[test]
fn a_driver_without_nvidia_modprobe_makes_no_nodes() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/a100x2-mig.toml");
    let text = fs::read_to_string(file).unwrap();
    let driver = Driver::up_with(&format!("cap_nodes = false\n{text}"));
    assert!(
        driver
            .read("proc/driver/nvidia/capabilities/gpu0/mig/gi3/ci1/access")
            .starts_with("DeviceFileMinor: 32\n")
    );
    assert!(!driver.root.join("dev/nvidia-caps").exists());
    driver.said("mig -dci -gi 9");
    driver.said("mig -cci -gi 9");
    assert!(!driver.root.join("dev/nvidia-caps").exists());
    assert!(
        driver
            .read("proc/driver/nvidia/capabilities/gpu0/mig/gi9/ci0/access")
            .starts_with("DeviceFileMinor: 85\n")
    );
}

#[test]
fn parts_differ_in_profiles_and_agree_in_placements() {
    let names = |topology| -> Vec<String> {
        let listed = Driver::up(topology).said("mig -lgip");
        let rows = listed.lines().filter_map(|line| line.strip_prefix("|   0  MIG "));
        rows.map(|row| row.split_whitespace().take(4).collect::<Vec<_>>().join(" ")).collect()
    };
    assert_eq!(
        names("b200"),
        [
            "1g.23gb 19 7/7 22.00",
            "1g.23gb+me 20 1/1 22.00",
            "1g.45gb 15 4/4 44.25",
            "2g.45gb 14 3/3 44.25",
            "3g.90gb 9 2/2 89.00",
            "4g.90gb 5 1/1 89.00",
            "7g.180gb 0 1/1 178.00",
        ]
    );
    assert_eq!(names("h100x2-mig-off")[4], "3g.40gb 9 2/2 39.50");
    let driver = Driver::up("b200");
    assert_eq!(driver.said("mig -lgipp"), Driver::up("h200").said("mig -lgipp"));
}
