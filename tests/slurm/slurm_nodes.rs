//! The clusters of tests/slurm/nodes are what tests of `sublet slurm` take them for: jobs run on both nodes, each node
//! sees its own GPUs, and nothing of a cluster outlives it. Runs in the roots `slurm` and `slurm-bookworm`.

use std::process::Command;

use sublet_e2e::eventually;
use sublet_e2e::slurm::{Cluster, skip_unless_slurm};

const SHARDS: &str = "Name=shard Count=16";

#[test]
fn a_job_runs_on_both_nodes_with_a_simulated_gpu_of_each() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::up("gpu:4,shard:16", SHARDS, "");
    let told = "echo $(hostname) $(id -un) $SLURM_STEP_GPUS $SLURM_SHARDS_ON_NODE; nvidia-smi -L | head -n 1";
    let ran = cluster.by("tester", &["srun", "-N2", "--label", "--gres=shard:2", "sh", "-c", told]);
    assert!(ran.ok, "{ran:?}");
    let mut lines: Vec<&str> = ran.stdout.lines().collect();
    lines.sort_unstable();
    let gpu = |task: u32, node: u32| {
        format!("{task}: GPU 0: NVIDIA H200 (UUID: GPU-5b1e7000-000{node}-4000-8000-000000000800)")
    };
    let wanted = [gpu(0, 1), "0: n1 tester 0 2".to_owned(), gpu(1, 2), "1: n2 tester 0 2".to_owned()];
    assert_eq!(lines, wanted);
    cluster.assert_no_jobs();
    assert_eq!(cluster.nodes(), ["n1 idle", "n2 idle"]);
}

#[test]
fn a_job_may_open_the_gpu_that_slurm_chose_and_no_other() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::up("gpu:4,shard:16", SHARDS, "");
    let first = cluster.spawn("other", &["srun", "-w", "n1", "--gres=shard:3", "sleep", "60"]);
    let running = || cluster.done("login", &["squeue", "--noheader", "-t", "running"]).contains("other");
    assert!(eventually(running), "the first job does not run");
    // Without a driver that is ENXIO where it is allowed.
    let open = "for i in 0 1 2 3; do (: </dev/nvidia$i) 2>&1 | sed \"s/.*: /$i: /\"; done";
    let ran = cluster.by("tester", &["srun", "-w", "n1", "--gres=shard:3", "sh", "-c", open]);
    let (refused, opened) = ("Operation not permitted", "No such device or address");
    let wanted = [refused, opened, refused, refused].into_iter().enumerate();
    let wanted: Vec<String> = wanted.map(|(gpu, how)| format!("{gpu}: {how}")).collect();
    assert_eq!(ran.stdout.lines().collect::<Vec<_>>(), wanted, "{ran:?}");
    cluster.done("login", &["scancel", "-u", "other"]);
    assert!(!first.wait_with_output().expect("it ended").status.success());
    cluster.assert_no_jobs();
}

#[test]
fn a_node_that_is_lost_comes_back() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::up("gpu:4", "", "");
    cluster.tell("lose", "n1");
    // What its slurmd still had to say may reach the controller after that, and makes it idle again.
    let is_down = || {
        cluster.done("login", &["scontrol", "update", "nodename=n1", "state=down", "reason=lost"]);
        cluster.nodes() == ["n1 down lost", "n2 idle"]
    };
    assert!(eventually(is_down), "{:?}", cluster.nodes());
    cluster.tell("boot", "n1");
    cluster.tell("start", "n1");
    let idle = || cluster.nodes().iter().all(|node| node.contains("idle"));
    assert!(eventually(idle), "{:?}", cluster.nodes());
    cluster.kill("n1", "slurmd");
    cluster.tell("start", "n1");
    let ran = cluster.by("tester", &["srun", "-w", "n1", "hostname"]);
    assert_eq!(ran.stdout, "n1\n", "{ran:?}");
}

#[test]
fn nothing_is_left_of_a_cluster() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::up("gpu:4", "", "");
    let dir = cluster.shared().to_owned();
    let mut job = cluster.spawn("tester", &["srun", "-N2", "sleep", "60"]);
    let name = dir.file_name().and_then(|name| name.to_str()).expect("UTF-8").to_owned();
    let cgroups = || {
        let found = Command::new("find").args(["/sys/fs/cgroup", "-name", &format!("*-{name}-*")]).output();
        String::from_utf8_lossy(&found.expect("find runs").stdout).into_owned()
    };
    assert!(!cgroups().is_empty(), "the nodes have cgroups");
    drop(cluster);
    assert!(!job.wait().expect("it ended").success());
    assert_eq!(cgroups(), "", "cgroups are left");
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("/proc");
    assert!(!mounts.contains(&name), "mounts are left: {mounts}");
    assert!(!dir.exists(), "{} is left", dir.display());
}
