//! A CUDA program's view of MIG devices, with and without MPS.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::driver::{Driver, root_or_skip};
use crate::libcuda;
use nvml_wrapper::Nvml;
use serde_json::Value;

const FOUR: &str = "MIG-5b1e7000-0000-5000-8000-000000000a01";
const HALF: &str = "MIG-5b1e7000-0000-5000-8000-000000000a02";
const OTHER_HALF: &str = "MIG-5b1e7000-0000-5000-8000-000000000a03";
const ONE: &str = "MIG-5b1e7000-0000-5000-8000-000000000a04";

pub fn up(topology: &str) -> Option<Driver> {
    libcuda::built();
    root_or_skip("device nodes").then(|| Driver::up(topology))
}

fn program(driver: &Driver, name: &str, env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(driver.root.join("usr/bin").join(name));
    command
        .env_clear()
        .env("PATH", driver.root.join("usr/bin"))
        .env("CUDA_MPS_PIPE_DIRECTORY", driver.root.join("mps"))
        .env("CUDA_MPS_LOG_DIRECTORY", driver.root.join("sim"))
        .env("SUBLET_SIM_DEV", driver.root.join("dev"))
        .env("LD_LIBRARY_PATH", driver.root.libraries())
        .envs(env.iter().copied());
    command
}

fn info(driver: &Driver, env: &[(&str, &str)]) -> Value {
    let output = program(driver, "cuda-probe", env).arg("info").output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn on(device: &str) -> [(&'static str, &str); 1] {
    [("CUDA_VISIBLE_DEVICES", device)]
}

/// SMs, total memory and UUID.
fn shape(info: &Value) -> (u64, u64, &str) {
    assert_eq!(info["error"], Value::Null, "{info}");
    (info["sm"].as_u64().unwrap(), info["total_mib"].as_u64().unwrap(), info["uuid"].as_str().unwrap())
}

/// A probe that has finished its task and still holds its context.
pub struct Holding(pub Child, pub Vec<Value>);

pub fn hold(driver: &Driver, task: &str, env: &[(&str, &str)], lines: usize) -> Holding {
    let mut command = program(driver, "cuda-probe", env);
    let mut child = command.args(task.split(' ')).stdout(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(child.stdout.take().unwrap()).lines().take(lines);
    let said = said.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    Holding(child, said)
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn a_program_sees_its_instance() {
    let Some(driver) = up("a100x2-mig") else { return };
    assert_eq!(shape(&info(&driver, &on(FOUR))), (56, 20096, FOUR));
    assert_eq!(shape(&info(&driver, &on(OTHER_HALF))), (14, 9984, OTHER_HALF));
    assert_eq!(
        shape(&info(&driver, &on("MIG-GPU-5b1e7000-0000-4000-8000-000000000a00/9/0"))),
        (14, 4864, ONE)
    );
    assert_eq!(
        info(&driver, &on("MIG-5b1e7000-0000-5000-8000-00000000dead"))["error"],
        "CUDA_ERROR_NO_DEVICE"
    );
}

/// Driver 580, then 550.
#[test]
fn how_many_instances_a_program_sees_depends_on_the_driver() {
    let Some(driver) = up("a100x2-mig") else { return };
    assert_eq!((info(&driver, &[])["count"].as_u64(), shape(&info(&driver, &[])).2), (Some(3), FOUR));
    let several = format!("{ONE},{HALF},{OTHER_HALF}");
    assert_eq!(info(&driver, &on(&several))["count"], 2, "one compute instance of each GPU instance");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/a100x2-mig.toml");
    let old = fs::read_to_string(file).unwrap().replace("580.159.04", "550.163.01");
    let old = Driver::up_with(&old);
    assert_eq!(info(&old, &[])["count"], 1);
    assert_eq!(
        (info(&old, &on(&several))["count"].as_u64(), shape(&info(&old, &on(&several))).2),
        (Some(1), ONE)
    );
}

#[test]
fn an_instance_is_three_nodes() {
    let Some(driver) = up("a100x2-mig") else { return };
    let dev = |name: &str| driver.root.join("dev").join(name);
    for node in ["nvidia0", "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap32"] {
        fs::rename(dev(node), dev("away")).unwrap();
        assert_eq!(info(&driver, &on(OTHER_HALF))["error"], "CUDA_ERROR_NO_DEVICE", "{node}");
        fs::rename(dev("away"), dev(node)).unwrap();
    }
    for node in ["nvidia1", "nvidia-uvm-tools", "nvidia-caps/nvidia-cap31", "nvidia-caps/nvidia-cap1"] {
        fs::remove_file(dev(node)).unwrap();
    }
    assert_eq!(shape(&info(&driver, &on(OTHER_HALF))).0, 14);
    assert_eq!(info(&driver, &on(HALF))["error"], "CUDA_ERROR_NO_DEVICE");
}

#[test]
fn compute_instances_share_the_memory_of_their_gpu_instance() {
    let Some(driver) = up("a100x2-mig") else { return };
    let before = info(&driver, &on(HALF))["free_mib"].as_u64().unwrap();
    let held = hold(&driver, "alloc 5000 60", &on(OTHER_HALF), 2);
    assert_eq!(held.1[1]["result"], "CUDA_SUCCESS");
    // 5000 and the other process's context of 14 SMs.
    assert_eq!(info(&driver, &on(HALF))["free_mib"], before - 5000 - 80);
    assert_eq!(info(&driver, &on(ONE))["free_mib"], 4864 - 80, "another GPU instance has its own");
}

#[test]
fn a_running_program_keeps_its_instance_and_a_new_one_is_seen_at_once() {
    let Some(driver) = up("a100x2-mig") else { return };
    let held = hold(&driver, "hold 60", &on(ONE), 1);
    assert_eq!(driver.smi("mig -dci -gi 9").status.code(), Some(19));
    drop(held);
    driver.said("mig -dci -gi 9");
    assert_eq!(info(&driver, &on(ONE))["error"], "CUDA_ERROR_NO_DEVICE");
    driver.said("mig -cci -gi 9");
    assert_eq!(info(&driver, &on(ONE))["error"], "CUDA_ERROR_NO_DEVICE", "made again is another one");
    let listed = driver.said("-L");
    let line = listed.lines().find(|line| line.contains("MIG 1g.5gb")).unwrap();
    let uuid = line.split("UUID: ").nth(1).unwrap().trim_end_matches(')');
    assert_eq!(shape(&info(&driver, &on(uuid))), (14, 4864, uuid));
    assert_eq!(info(&driver, &on("MIG-GPU-5b1e7000-0000-4000-8000-000000000a00/9/0"))["uuid"], uuid);
}

/// A container has only the libraries of the root, as mounts. Here hard links replace the mounts.
#[test]
fn what_changes_is_seen_where_only_the_libraries_are() {
    let Some(driver) = up("a100x2-mig") else { return };
    let apart = tempfile::tempdir_in("/var/tmp").unwrap();
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        let file = driver.root.libraries().join(format!("{name}.580.159.04"));
        fs::hard_link(file, apart.path().join(format!("{name}.1"))).unwrap();
    }
    let library = apart.path().join("libnvidia-ml.so.1");
    driver.said("mig -dci -gi 9");
    driver.said("mig -dgi -gi 9");
    driver.said("mig -cgi 1g.10gb -C");
    let nvml = Nvml::builder().lib_path(library.as_os_str()).init().unwrap();
    let gpu = nvml.device_by_index(0).unwrap();
    let names = |index| gpu.mig_device_by_index(index).unwrap().name().unwrap();
    assert_eq!(names(3), "NVIDIA A100-PCIE-40GB MIG 1g.10gb");
    let uuid = gpu.mig_device_by_index(3).unwrap().uuid().unwrap();
    let env = [("LD_LIBRARY_PATH", apart.path().to_str().unwrap()), ("CUDA_VISIBLE_DEVICES", &uuid)];
    assert_eq!(shape(&info(&driver, &env)), (14, 9856, uuid.as_str()));
}

#[test]
fn a_daemon_on_an_instance_serves_that_alone() {
    let Some(driver) = up("a100x2-mig") else { return };
    let daemon = program(&driver, "nvidia-cuda-mps-control", &on(FOUR)).arg("-d").output().unwrap();
    assert!(daemon.status.success(), "{daemon:?}");
    // Under MPS a client sees the server's devices: ordinal 0 is the instance.
    let whole = info(&driver, &[]);
    assert_eq!((shape(&whole), whole["mps"].as_bool()), ((56, 20096, FOUR), Some(true)));
    // 234 for a context of 56 SMs, 66 for the server's context.
    assert_eq!(whole["free_mib"], 20096 - 234 - 66);
    let half = info(&driver, &[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"), ("CUDA_VISIBLE_DEVICES", "0")]);
    assert_eq!(half["sm"], 28);
    let limited = info(&driver, &[("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2G")]);
    assert_eq!(limited["free_mib"], 2048 - 234);
    assert_eq!(info(&driver, &on(ONE))["error"], "CUDA_ERROR_NO_DEVICE");
    // The server's context on the instance keeps it in use.
    assert_eq!(driver.smi("mig -dci -gi 2").status.code(), Some(19));
    assert!(driver.said("mig -dci -gi 9").contains("Successfully destroyed"));
}

#[test]
fn an_instance_has_its_part_of_the_clients() {
    let Some(driver) = up("a100x2-mig") else { return };
    assert!(
        program(&driver, "nvidia-cuda-mps-control", &on(ONE)).arg("-d").output().unwrap().status.success()
    );
    // 48 clients on 108 SMs are 6 on 14.
    let six: Vec<Holding> = (0..6).map(|_| hold(&driver, "hold 60", &[], 1)).collect();
    assert!(six.iter().all(|held| held.1[0]["error"] == Value::Null));
    assert_eq!(info(&driver, &[])["error"], "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED");
}
