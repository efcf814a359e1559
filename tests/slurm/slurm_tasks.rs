//! Steps and tasks of a job that have fewer whole GPUs than it: what their programs and containers see is what Slurm lets
//! them open. Runs in the roots `slurm` and `slurm-bookworm`; two nodes, four H200 each.

use serde_json::{Value, json};
use sublet_e2e::slurm::{Cluster, TESTER, cluster, skip_unless_slurm};

/// The GPUs of n1 as Slurm counts them: the third node is that of NVML's index 3.
fn gpu(at: usize) -> String {
    format!("GPU-5b1e7000-0001-4000-8000-000000000{}", ["800", "801", "803", "802"][at])
}

/// Writes what it sees to the file that its first argument names.
const TELL: &str = r#"echo "$CUDA_VISIBLE_DEVICES $SUBLET_DEVICES" >$1; cuda-probe info >>$1"#;

/// What a program told: the GPUs in its environment, and the first line of `cuda-probe info`.
fn told(cluster: &Cluster, name: &str) -> (String, Value) {
    let text = cluster.written(name);
    let (seen, info) = text.split_once('\n').expect("two lines");
    let info = info.lines().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
    (seen.to_owned(), info)
}

fn assert_has(cluster: &Cluster, name: &str, gpus: &[usize]) {
    let (seen, info) = told(cluster, name);
    let own: Vec<String> = gpus.iter().map(|&at| gpu(at)).collect();
    let own = own.join(",");
    assert_eq!(seen, format!("{own} {own}"), "{name}");
    if gpus.is_empty() {
        assert_eq!(info["error"], json!("CUDA_ERROR_NO_DEVICE"), "{name}: {info}");
        return;
    }
    assert_eq!((&info["error"], &info["count"]), (&Value::Null, &json!(gpus.len())), "{name}: {info}");
    assert_eq!(info["uuid"], json!(gpu(gpus[0])), "{name}: {info}");
}

#[test]
fn a_task_sees_the_gpu_that_slurm_gave_it() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let script = format!("set -- task-$SLURM_PROCID; {TELL}");
    let forged = "CUDA_VISIBLE_DEVICES=0,1,2,3 SLURM_STEP_GPUS=3 SLURM_GPUS_ON_NODE=4";
    let srun = format!("{forged} srun --quiet -w n1 -n3 --gpus-per-task=1 bash -c '{script}'");
    let done = cluster.by(TESTER, &["env", "-S", &srun]);
    assert!(done.ok, "{done:?}");
    for task in 0..3 {
        assert_has(&cluster, &format!("task-{task}"), &[task]);
    }
    cluster.assert_empty();
}

#[test]
fn a_step_sees_the_gpus_that_slurm_gave_it() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    std::fs::write(cluster.work().join("tell"), format!("{TELL}\nsleep ${{2:-0}}\n")).expect("a file");
    // The first step has the first GPU while the second one starts.
    let script = "bash tell batch; srun --exact -n1 --gres=gpu:1 bash tell first 4 & sleep 2; \
                  srun --exact -n1 --gres=gpu:2 bash tell second; wait; srun --exact -n1 --gres=none bash tell none; \
                  srun -n2 --gpu-bind=none bash tell unbound";
    let options = ["--wait", "-w", "n1", "-n2", "--gres=gpu:3"];
    let job = cluster.sbatch(TESTER, &options, script);
    assert_eq!(cluster.state(&job), "COMPLETED", "{}", cluster.written(&format!("job-{job}.out")));
    let wanted: [(&str, &[usize]); 5] =
        [("batch", &[0, 1, 2]), ("first", &[0]), ("second", &[1, 2]), ("none", &[]), ("unbound", &[0, 1, 2])];
    for (name, gpus) in wanted {
        assert_has(&cluster, name, gpus);
    }
    cluster.assert_empty();
}

#[test]
fn a_container_of_a_step_has_the_gpus_of_the_step() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let plain = cluster.bundle("step", "{}");
    let contained = |gres: &str, name: &str, script: &str| {
        format!("srun --exact -n1 --gres={gres} --container={plain} /bin/sh -c '{script}' >{name} 2>&1")
    };
    let script = [
        "srun --exact -n1 --gres=gpu:1 sleep 6 & sleep 2".to_owned(),
        contained("gpu:1", "inside", "ls /dev; cuda-probe info"),
        format!("{} || echo refused >>outside", contained("none", "outside", "echo started")),
        "wait".to_owned(),
    ];
    let job = cluster.sbatch(TESTER, &["--wait", "-w", "n1", "-n2", "--gres=gpu:2"], &script.join("\n"));
    assert_eq!(cluster.state(&job), "COMPLETED", "{}", cluster.written(&format!("job-{job}.out")));
    let inside = cluster.written("inside");
    let nodes: Vec<&str> = inside.lines().filter(|line| line.starts_with("nvidia")).collect();
    assert_eq!(nodes, ["nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidiactl"], "{inside}");
    let info = inside.lines().find(|line| line.contains("\"event\":\"info\"")).expect("a line");
    let info: Value = serde_json::from_str(info).expect("JSON");
    assert_eq!((&info["error"], &info["uuid"]), (&Value::Null, &json!(gpu(1))), "{inside}");
    let outside = cluster.written("outside");
    assert!(outside.ends_with("refused\n") && !outside.contains("started\n"), "{outside}");
    assert!(outside.contains("open none of the job's GPUs"), "{outside}");
    cluster.assert_empty();
}
