//! Jobs of a real Slurm with `--gres=mps:PERCENT`. Slurm (22.05 and 24.11) lets them share one GPU of a node at a time.

use serde_json::{Value, json};
use sublet_e2e::eventually;
use sublet_e2e::slurm::{TESTER, cluster, skip_unless_slurm};

#[test]
fn a_percentage_of_mps_is_that_of_the_sms_and_of_the_memory() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("mps");
    let done = cluster.srun("mps:25", "cuda-probe info; sublet status --format json >seen");
    assert!(done.ok, "{done:?}");
    let info: Value = serde_json::from_str(done.stdout.lines().next().expect("a line")).expect("JSON");
    // A quarter of 132 SMs, in pairs.
    assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
    let seen: Value = serde_json::from_slice(cluster.written("seen").as_bytes()).expect("JSON");
    let quarter = (143_771_u64 - 512 - 66) * 25 / 100;
    assert_eq!(seen["leases"][0]["sm_percent"], json!(25.0));
    let memory = seen["leases"][0]["memory_bytes"].as_u64().expect("a limit") >> 20;
    assert!(memory <= quarter && memory + 2 > quarter, "{memory} of {quarter} MiB");
    cluster.assert_empty();
}

#[test]
fn jobs_fill_a_gpu_to_its_last_percent() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("mps");
    let jobs: Vec<String> = ["mps:50", "mps:30", "mps:20"]
        .map(|gres| cluster.sbatch(TESTER, &["--nodelist=n1", &format!("--gres={gres}")], "sleep 600"))
        .into();
    assert!(eventually(|| cluster.leases("n1").len() == 3), "{}", cluster.by(TESTER, &["squeue"]).stdout);
    let status = cluster.status("n1");
    let device = &status["devices"][0];
    assert_eq!(device["booked"]["sm_percent"], json!(100.0), "{device}");
    for job in &jobs {
        assert!(cluster.by(TESTER, &["scancel", job]).ok);
    }
    cluster.assert_empty();
}
