//! Jobs of a real Slurm with shards of simulated GPUs: what their programs and containers get, and that nothing is left of
//! them. Runs in the root that tests/engines/enter gives; two nodes, four H200 each, eight shards a GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use sublet_e2e::eventually;
use sublet_e2e::guarded::{LEAVE, SPOIL};
use sublet_e2e::slurm::{Cluster, OTHER, TESTER, cluster, skip_unless_slurm};

/// Of 143,771 MiB of a GPU, what may be booked less an MPS server's own: an eighth of it, and two.
const SHARD: u64 = (143_771 - 512 - 66) / 8;

fn info(text: &str) -> Value {
    let line =
        text.lines().find(|line| line.contains("\"event\":\"info\"")).unwrap_or_else(|| panic!("{text}"));
    serde_json::from_str(line).expect("JSON")
}

fn variables(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once('=')).collect()
}

/// On devices with leases: an idle server of an earlier job's, on another device, has memory too.
fn booked(cluster: &Cluster, node: &str) -> u64 {
    let status = cluster.status(node);
    let devices = status["devices"].as_array().expect("devices").iter();
    let used = devices.filter(|device| device["lease_count"] != 0);
    used.filter_map(|device| device["booked"]["memory_bytes"].as_u64()).sum()
}

#[test]
fn a_program_has_the_share_of_its_job() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let stray = "CUDA_MPS_PIPE_DIRECTORY=/tmp/mine CUDA_MPS_CLIENT_PRIORITY=1 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=90G \
                 CUDA_VISIBLE_DEVICES=0,1,2,3 SLURM_SHARDS_ON_NODE=8";
    let script =
        "env; cuda-probe info; ls $CUDA_MPS_PIPE_DIRECTORY; sublet status --format json >seen; sleep 1";
    let done = cluster
        .by(TESTER, &["env", "-S", &format!("{stray} srun --quiet -w n1 --gres=shard:2 bash -c '{script}'")]);
    assert!(done.ok, "{done:?}");
    let seen: Value = serde_json::from_slice(cluster.written("seen").as_bytes()).expect("JSON");
    let lease = &seen["leases"][0];
    let uuid = lease["device"].as_str().expect("a UUID");
    let set = variables(&done.stdout);
    let limit = format!("0={}M", SHARD * 2);
    assert_eq!(set.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), Some(&limit.as_str()));
    assert_eq!(set.get("CUDA_VISIBLE_DEVICES"), Some(&uuid));
    assert_eq!(set.get("CUDA_MPS_PIPE_DIRECTORY"), Some(&format!("/run/sublet/mps/{uuid}/public").as_str()));
    assert_eq!(set.get("CUDA_MPS_CLIENT_PRIORITY"), None, "the user's own is taken out");
    assert!(done.stdout.ends_with("\ncontrol\n"), "without the side that commands it: {}", done.stdout);
    let info = info(&done.stdout);
    assert_eq!((&info["error"], &info["mps"], &info["uuid"]), (&Value::Null, &json!(true), &json!(uuid)));
    let job = lease["job"]["id"].as_u64().expect("a job");
    let name = format!("slurm-{job}");
    assert_eq!(lease["container_id"], json!(name));
    assert_eq!((&lease["user"], &lease["memory_bytes"]), (&json!("tester"), &json!((SHARD * 2) << 20)));
    assert_eq!(lease["owner"], json!({"name": "tester", "known_by": "user"}));
    cluster.assert_empty();
    // Slurm's accounting (jobcomp/filetxt) and sublet's events have the same job, user and node.
    let accounting = cluster.done("login", &["cat", "/var/log/slurm/jobcomp.log"]);
    let of_job = |line: &&str| line.starts_with(&format!("JobId={job} "));
    let accounted = accounting.lines().find(of_job).unwrap_or_else(|| panic!("{accounting}"));
    let has = |word: &str| accounted.split(' ').any(|other| other == word);
    assert!(has("UserId=tester(1000)") && has("NodeList=n1") && has("JobState=COMPLETED"), "{accounted}");
    let told = cluster.done("n1", &["sublet", "events", "--container", &name, "--format", "json"]);
    let told: Vec<Value> = told.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert!(told.len() >= 2, "taken and freed: {told:?}");
    for event in &told {
        assert_eq!((&event["uid"], &event["container_id"]), (&json!(1000), &json!(name)), "{event}");
    }
}

#[test]
fn whole_gpus_are_the_jobs_alone() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let done = cluster.srun("gpu:3", "env; sublet status --format json >seen");
    assert!(done.ok, "{done:?}");
    let seen: Value = serde_json::from_slice(cluster.written("seen").as_bytes()).expect("JSON");
    let devices: Vec<&str> = seen["leases"]
        .as_array()
        .expect("leases")
        .iter()
        .filter_map(|lease| lease["device"].as_str())
        .collect();
    // Slurm counts the nodes: the third is minor 2, which is NVML's index 3.
    let minors = ["800", "801", "803"].map(|end| format!("GPU-5b1e7000-0001-4000-8000-000000000{end}"));
    assert_eq!(devices, minors);
    assert!(seen["leases"].as_array().expect("leases").iter().all(|lease| lease["mode"] == "exclusive"));
    assert_eq!(variables(&done.stdout).get("CUDA_VISIBLE_DEVICES"), Some(&minors.join(",").as_str()));
    assert_eq!(variables(&done.stdout).get("CUDA_MPS_PIPE_DIRECTORY"), None);
    cluster.assert_empty();
}

#[test]
fn without_room_the_task_fails_and_the_node_goes_on() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    assert!(cluster.on("n1", &["sublet", "drain", "all"]).ok);
    let done = cluster.srun("shard:1", "echo started");
    assert!(!done.ok && !done.stdout.contains("started"), "{done:?}");
    assert!(done.stdout.contains("sublet: ") && done.stdout.contains("is drained"), "{}", done.stdout);
    assert!(!done.stdout.contains("sublet.") && done.stdout.contains("--exclude"), "{}", done.stdout);
    let last = cluster.done("n1", &["runuser", "-u", TESTER, "--", "sublet", "status", "--last-error"]);
    assert!(last.contains("container slurm-") && last.contains("is drained"), "{last}");
    assert!(cluster.on("n1", &["sublet", "undrain", "all"]).ok);
    let done = cluster.srun("shard:1", "echo started");
    assert!(done.ok && done.stdout.contains("started"), "{done:?}");
    cluster.assert_empty();
}

#[test]
fn jobs_without_a_gpu_need_nothing_of_sublets() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let serve = cluster.done("n1", &["cat", "/run/sublet.pid"]);
    let serve = serve.trim();
    assert!(cluster.on("n1", &["kill", "-STOP", serve]).ok);
    let done = cluster.srun("", "env; echo started");
    assert!(cluster.on("n1", &["kill", "-CONT", serve]).ok);
    assert!(done.ok && done.stdout.contains("started") && !done.stdout.contains("SUBLET_"), "{done:?}");
    cluster.assert_empty();
}

#[test]
fn a_jobs_user_is_told_of_the_job_and_not_of_a_policy() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let done = cluster.srun("shard:1", "sublet status");
    assert!(done.ok && done.stdout.contains("\nIn job ") && !done.stdout.contains("policy"), "{done:?}");
    let done = cluster.srun("", "sublet status");
    assert!(
        done.stdout.contains("You cannot take a share: job ") && !done.stdout.contains("policy"),
        "{done:?}"
    );
    let outside = cluster.done("n1", &["runuser", "-u", TESTER, "--", "sublet", "status"]);
    assert!(outside.contains("You cannot take a share: ") && outside.contains("[[policy]]"), "{outside}");
    cluster.assert_empty();
}

fn contained(cluster: &Cluster, gres: &[&str], bundle: &str, script: &str) -> sublet_e2e::Finished {
    let container = format!("--container={bundle}");
    let words =
        [&["srun", "--quiet", "--nodelist=n1"], gres, &[&container, "/bin/sh", "-c", script]].concat();
    cluster.by(TESTER, &words)
}

#[test]
fn a_container_has_the_share_of_its_job_and_books_nothing_more() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let plain = cluster.bundle("plain", "{}");
    let script = "env; ls /dev; cuda-probe info; sleep 2";
    let words = [
        "srun",
        "--quiet",
        "--nodelist=n1",
        "--gres=shard:2",
        &format!("--container={plain}"),
        "/bin/sh",
        "-c",
        script,
    ];
    let running = cluster.spawn(TESTER, &words);
    assert!(eventually(|| cluster.leases("n1").len() == 2), "the job's lease and the container's");
    let leases = cluster.leases("n1");
    let within = leases.iter().find(|lease| lease["job"]["step"] == "0").expect("the container's");
    assert_eq!(within["memory_bytes"], json!((SHARD * 2) << 20));
    assert_eq!(booked(&cluster, "n1") >> 20, SHARD * 2 + 66, "booked once, and the server");
    let table = cluster.done("n1", &["sublet", "status"]);
    let name = format!("\nn1.tester.{}.0.0 ", within["job"]["id"]);
    assert!(table.contains(&name), "{table}");
    let done = sublet_e2e::Finished::of(&running.wait_with_output().expect("it ends"));
    assert!(done.ok, "{done:?}");
    let info = info(&done.stdout);
    assert_eq!((&info["error"], &info["mps"], &info["count"]), (&Value::Null, &json!(true), &json!(1)));
    let nodes: Vec<&str> = done.stdout.lines().filter(|line| line.starts_with("nvidia")).collect();
    assert_eq!(nodes, ["nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidiactl"]);
    let none = contained(&cluster, &[], &plain, "env; ls /dev");
    assert!(none.ok && !none.stdout.contains("nvidia") && !none.stdout.contains("SUBLET_MODE"), "{none:?}");
    cluster.assert_empty();
}

#[test]
fn an_annotation_narrows_the_share_and_never_widens_it() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let narrow = cluster.bundle("narrow", r#"{"sublet.memory": "2GiB", "sublet.sm": "10"}"#);
    let done = contained(&cluster, &["--gres=shard:2"], &narrow, "env");
    assert!(done.ok, "{done:?}");
    let set = variables(&done.stdout);
    assert_eq!(set.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), Some(&"0=2048M"));
    assert_eq!(set.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), Some(&"10"));
    for (name, annotations, gres, said) in [
        (
            "more",
            r#"{"sublet.memory": "60GiB"}"#,
            "--gres=shard:2",
            "got 35798 MiB of memory from Slurm, and this container asks for 61440 MiB",
        ),
        ("alone", r#"{"sublet.mode": "exclusive"}"#, "--gres=shard:2", "this container asks for sublet.mode"),
        ("another", r#"{"sublet.gpu": "3"}"#, "--gres=shard:2", "this container asks for sublet.gpu"),
        ("several", r#"{"sublet.gpu": "any:2"}"#, "--gres=shard:2", "this container asks for sublet.gpu"),
        (
            "forged",
            r#"{"sublet.lease": "00000000000000aa"}"#,
            "--gres=shard:2",
            "has no live lease with that id",
        ),
        ("limits", r#"{"sublet.sm": "10"}"#, "--gres=gpu:1", "this container asks for sublet.mode"),
    ] {
        let done = contained(&cluster, &[gres], &cluster.bundle(name, annotations), "echo started");
        assert!(!done.ok && !done.stdout.contains("started"), "{name}: {done:?}");
        assert!(done.stderr.contains(said), "{name}: {}", done.stderr);
    }
    cluster.assert_empty();
}

#[test]
fn a_job_that_leaves_its_limits_is_ended() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let done = cluster.srun("shard:1", "cuda-probe hold 4 >/dev/null; echo status $?");
    assert!(done.ok && done.stdout == "status 0\n", "it keeps to them: {done:?}");
    let done = cluster.srun("shard:1", &format!("{SPOIL} cuda-probe alloc 52000 600; echo status $?"));
    assert!(done.ok && done.stdout.contains("status "), "{done:?}");
    assert!(!done.stdout.contains("status 0"), "{}", done.stdout);
    let told = cluster.done("n1", &["sublet", "events", "--filter", "kind=guard", "--format", "json"]);
    assert!(told.contains(r#""reason":"memory","action":"terminate""#), "{told}");
    cluster.assert_empty();
    // Without its server, it finds the GPU taken: EXCLUSIVE_PROCESS.
    let done = cluster.srun("shard:1", &format!("{LEAVE} cuda-probe hold 600; :"));
    assert!(done.stdout.contains("CUDA_ERROR_DEVICE_UNAVAILABLE"), "{done:?}");
    cluster.assert_empty();
}

#[test]
fn outside_a_job_the_share_of_a_job_is_none() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let plain = cluster.bundle("outside", "{}");
    let run = format!("cd {plain}; /usr/libexec/sublet/slurm/sublet-slurm --root {plain}/root run c1");
    let done = cluster.on(
        "n1",
        &["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--inh-caps=-all", "bash", "-c", &run],
    );
    assert!(!done.ok && done.stderr.contains("this process is in no job of Slurm's"), "{done:?}");
    cluster.assert_empty();
}

#[test]
fn forty_jobs_share_two_nodes_and_none_is_over_committed() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let script = "cuda-probe info >info-$SLURM_JOB_ID; sleep 1";
    let submit = |n: usize| {
        let (uid, gres) = ([TESTER, OTHER][n % 2], ["shard:1", "shard:3", "shard:5", "gpu:1"][n % 4]);
        (cluster.sbatch(uid, &[&format!("--gres={gres}")], script), gres)
    };
    let jobs: Vec<_> = (0..40).map(submit).collect();
    let done = || {
        for node in ["n1", "n2"] {
            let status = cluster.status(node);
            for device in status["devices"].as_array().expect("devices") {
                assert!(
                    device["booked"]["memory_bytes"].as_u64() <= device["memory_bytes"].as_u64(),
                    "{device}"
                );
            }
        }
        jobs.iter().all(|(job, _)| matches!(cluster.state(job).as_str(), "COMPLETED" | "FAILED"))
    };
    assert!(eventually(done), "{}", cluster.by(TESTER, &["squeue"]).stdout);
    for (job, gres) in &jobs {
        if cluster.state(job) == "FAILED" {
            let told = cluster.written(&format!("job-{job}.out"));
            assert!(cluster.is_2205() && told.contains("sublet: no room"), "{job} {gres}: {told}");
            assert!(*gres == "gpu:1" || told.contains("(exclusive)"), "{job} {gres}: {told}");
            continue;
        }
        let text = cluster.written(&format!("info-{job}"));
        assert_eq!(
            (&info(&text)["error"], &info(&text)["mps"]),
            (&Value::Null, &json!(*gres != "gpu:1")),
            "{job} {gres}"
        );
    }
    cluster.assert_empty();
}

#[test]
fn cancelled_requeued_and_arrays_of_jobs_leave_nothing() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let array = cluster.sbatch(TESTER, &["--array=1-4", "--gres=shard:2"], "sleep 600");
    let held = || cluster.leases("n1").len() + cluster.leases("n2").len();
    assert!(eventually(|| held() == 4), "{}", held());
    assert!(cluster.by(TESTER, &["scancel", &array]).ok);
    cluster.assert_empty();
    let job = cluster.sbatch(
        TESTER,
        &["--requeue", "--nodelist=n1", "--gres=shard:2"],
        "echo $SLURM_RESTART_COUNT >count; sleep 600",
    );
    assert!(eventually(|| held() == 1));
    let first = cluster.leases("n1")[0]["id"].clone();
    assert!(cluster.on("login", &["scontrol", "requeue", &job]).ok);
    // Slurm starts a requeued job again after two minutes, unless it is told to do so now.
    assert!(eventually(|| cluster.state(&job) == "PENDING" && cluster.leases("n1").is_empty()));
    if cluster.is_2205() {
        std::thread::sleep(Duration::from_secs(6));
    }
    assert!(cluster.on("login", &["scontrol", "update", &format!("JobId={job}"), "StartTime=now"]).ok);
    assert!(eventually(|| cluster.leases("n1").first().is_some_and(|lease| lease["id"] != first)));
    assert!(cluster.by(TESTER, &["scancel", &job]).ok);
    cluster.assert_empty();
}

#[test]
fn a_job_outlives_slurmd_and_its_lease_ends_with_it() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let job = cluster.sbatch(TESTER, &["--nodelist=n1", "--gres=shard:2"], "sleep 600");
    assert!(eventually(|| cluster.leases("n1").len() == 1));
    cluster.kill("n1", "slurmd");
    assert!(cluster.on("n1", &["sublet", "gc"]).ok);
    assert_eq!(cluster.leases("n1").len(), 1, "the job runs");
    // Neither slurmd nor the epilog sees its end.
    let kill =
        "find /sys/fs/cgroup -path '*/job_*/cgroup.procs' -exec cat {} + | sort -u | xargs kill -KILL || :";
    cluster.done("n1", &["sh", "-c", kill]);
    assert!(eventually(|| cluster.leases("n1").is_empty()), "no command of Slurm's was needed");
    cluster.tell("start", "n1");
    cluster.done("login", &["scancel", &job]);
    cluster.assert_empty();
}

#[test]
fn a_node_that_is_lost_comes_back_without_leases() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let job = cluster.sbatch(TESTER, &["--no-requeue", "--nodelist=n1", "--gres=shard:2"], "sleep 600");
    assert!(eventually(|| cluster.leases("n1").len() == 1));
    cluster.tell("lose", "n1");
    cluster.done("login", &["scontrol", "update", "nodename=n1", "state=down", "reason=lost"]);
    assert!(eventually(|| cluster.state(&job) == "NODE_FAIL"), "{}", cluster.state(&job));
    cluster.tell("boot", "n1");
    cluster.tell("start", "n1");
    cluster.assert_empty();
    let done = cluster.srun("shard:8", "echo started");
    assert!(done.ok && done.stdout == "started\n", "{done:?}");
    cluster.assert_empty();
}

#[test]
fn the_lines_for_gres_conf_are_those_of_this_cluster() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = cluster("shard");
    let text = cluster.on("n1", &["sublet", "slurm", "gres"]).stdout;
    for gpu in 0..4 {
        assert!(text.contains(&format!("\nNodeName=n1 Name=gpu File=/dev/nvidia{gpu}\n")), "{text}");
        assert!(
            text.contains(&format!("\nNodeName=n1 Name=shard Count=8 File=/dev/nvidia{gpu}\n")),
            "{text}"
        );
    }
    assert!(text.contains("\nNodeName=n1 Gres=gpu:4,shard:32 "), "{text}");
}
