//! What goes wrong around `sublet slurm` with a real Slurm: programs that are missing, older or killed, prologs that run
//! twice, epilogs that never run, other schedulers on the node, users who forge. Runs in the roots `slurm` and
//! `slurm-bookworm`.

use serde_json::Value;
use sublet_e2e::slurm::{Cluster, skip_unless_slurm};
use sublet_e2e::{Finished, eventually};

fn srun(cluster: &Cluster, gres: &str, script: &str) -> Finished {
    cluster.by("tester", &["srun", "-w", "n1", &format!("--gres={gres}"), "bash", "-c", script])
}

/// A job that runs until it is cancelled; its id.
fn hold(cluster: &Cluster, gres: &str) -> String {
    let script = "--wrap=sleep 600";
    let options =
        ["sbatch", "--parsable", "-w", "n1", "--output=/dev/null", &format!("--gres={gres}"), script];
    let done = cluster.by("tester", &options);
    assert!(done.ok, "{done:?}");
    let job = done.stdout.trim().to_owned();
    assert!(
        eventually(|| leases(cluster).iter().any(|lease| lease["job"]["id"].as_u64() == job.parse().ok())),
        "{job}"
    );
    job
}

fn cancel(cluster: &Cluster, job: &str) {
    cluster.done("login", &["scancel", job]);
    cluster.assert_no_jobs();
}

fn leases(cluster: &Cluster) -> Vec<Value> {
    let text = cluster.done("n1", &["sublet", "status", "--format", "json"]);
    let status: Value = serde_json::from_str(&text).expect("JSON");
    status["leases"].as_array().expect("leases").clone()
}

fn records(cluster: &Cluster) -> String {
    cluster
        .done("n1", &["sh", "-c", "cd /run/sublet/slurm && find . -name '*.json' -printf '%f\\n' | sort -V"])
}

/// Every job has ended, its record and lease with it, and the node takes jobs.
fn assert_empty(cluster: &Cluster) {
    cluster.assert_no_jobs();
    assert!(eventually(|| leases(cluster).is_empty()), "{:?}", leases(cluster));
    assert!(eventually(|| records(cluster).is_empty()), "{}", records(cluster));
    // Slurm may keep the reason why the node was down.
    let is_idle = || ["n1 idle", "n1 idle Not responding"].contains(&&*cluster.nodes()[0]);
    assert!(eventually(is_idle), "{:?}", cluster.nodes());
}

/// What slurmd gives the prolog of a job.
fn again(cluster: &Cluster, job: &str, name: &str, which: &str) -> String {
    let script = format!(
        "SLURM_JOB_ID={job} SLURM_JOB_UID=1000 SLURM_JOB_GPUS=0 SLURMD_NODENAME=n1 SLURM_CLUSTER_NAME={name} \
         /usr/libexec/sublet/slurm/{which} 2>&1"
    );
    cluster.done("n1", &["sh", "-c", &script])
}

#[test]
fn a_prolog_that_runs_twice_changes_nothing() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let job = hold(&cluster, "shard:2");
    let record = || cluster.done("n1", &["cat", &format!("/run/sublet/slurm/{job}.json")]);
    let (written, lease) = (record(), leases(&cluster)[0]["id"].clone());
    assert!(written.contains(r#""cluster":"test""#), "{written}");
    assert_eq!(again(&cluster, &job, "test", "prolog"), "");
    assert_eq!(record(), written);
    assert_eq!(leases(&cluster)[0]["id"], lease);
    assert_eq!(again(&cluster, &job, "other", "prolog"), "", "as the slurmd of another cluster does");
    assert!(record().contains("the clusters test and other both have a job"), "{}", record());
    let step = format!("--jobid={job}");
    let refused = cluster.by("tester", &["srun", &step, "--overlap", "--gres=shard:2", "echo", "started"]);
    assert!(
        refused.stdout.contains("sublet: job ") && refused.stdout.contains("both have a job"),
        "{refused:?}"
    );
    assert!(!refused.stdout.contains("started"), "{refused:?}");
    assert_eq!(leases(&cluster)[0]["id"], lease, "what runs has it still");
    again(&cluster, &job, "other", "epilog");
    assert!(record().contains("test"), "it is not the other cluster's");
    cancel(&cluster, &job);
    assert_empty(&cluster);
}

#[test]
fn a_job_whose_epilog_never_ran_is_forgotten_by_a_later_one() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let lost = hold(&cluster, "shard:2");
    // As when it was killed: slurmd does not run it again.
    cluster.done("n1", &["sh", "-c", "printf '#!/bin/sh\\nexit 0\\n' >/usr/libexec/sublet/slurm/epilog"]);
    cancel(&cluster, &lost);
    assert!(eventually(|| leases(&cluster).is_empty()), "its lease ends with its cgroup");
    assert_eq!(records(&cluster), format!("{lost}.json\n"));
    let checkout = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let shipped = format!("{checkout}/packaging/slurm/epilog");
    cluster.done("n1", &["cp", &shipped, "/usr/libexec/sublet/slurm/epilog"]);
    let live = hold(&cluster, "shard:2");
    let age = |job: &str| {
        cluster.done("n1", &["touch", "-d", "2 hours ago", &format!("/run/sublet/slurm/{job}.json")])
    };
    assert!(srun(&cluster, "shard:1", "true").ok);
    let both = || records(&cluster) == format!("{lost}.json\n{live}.json\n");
    assert!(eventually(both), "{}", records(&cluster));
    age(&lost);
    age(&live);
    // A job that slurmctld does not know, any more.
    cluster.done(
        "n1",
        &["sh", "-c", &format!("cd /run/sublet/slurm && sed s/:{lost},/:999,/ {lost}.json >999.json")],
    );
    age("999");
    assert!(srun(&cluster, "shard:1", "true").ok);
    assert!(eventually(|| records(&cluster) == format!("{live}.json\n")), "{}", records(&cluster));
    cancel(&cluster, &live);
    assert_empty(&cluster);
}

/// A container that root starts on n1 without Slurm, such as Docker does.
fn outside(cluster: &Cluster, annotations: &str) -> Finished {
    let script = format!(
        "rm -rf /root/outside; mkdir -p /root/outside/rootfs/bin; cd /root/outside; cp /bin/busybox rootfs/bin/sh; \
         runc spec; sed -i 's/\"terminal\": true/\"terminal\": false/; s|\"ociVersion\"|\"annotations\": {annotations}, &|; \
         s|^\\t\\t\\t\"sh\"$|\"sh\", \"-c\", \"sleep 600\"|' config.json; \
         sublet-runtime --root /run/outside run --detach outside </dev/null >/run/out 2>&1 || \
         {{ cat /run/out >&2; exit 1; }}"
    );
    cluster.on("n1", &["bash", "-ec", &script])
}

#[test]
fn a_container_outside_of_slurm_and_a_job_never_have_one_gpu_beyond_its_shares() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let alone = r#"{"sublet.mode": "exclusive", "sublet.gpu": "0"}"#;
    let first = outside(&cluster, alone);
    assert!(first.ok, "{first:?}");
    for gres in ["shard:1", "gpu:1"] {
        let refused = srun(&cluster, gres, "echo started");
        assert!(!refused.ok && !refused.stdout.contains("started"), "{refused:?}");
        assert!(refused.stdout.contains("sublet: ") && refused.stdout.contains("outside"), "{refused:?}");
        assert!(!refused.stdout.contains("sublet.wait"), "annotations help no job: {refused:?}");
        let own_nodes = refused.stdout.contains("Slurm 22.05 needs nodes of their own");
        assert_eq!(own_nodes, gres == "gpu:1", "{refused:?}");
    }
    cluster.done("n1", &["sublet-runtime", "--root", "/run/outside", "delete", "--force", "outside"]);
    assert_empty(&cluster);
    let job = hold(&cluster, "gpu:1");
    for annotations in [alone, r#"{"sublet.sm": "10", "sublet.gpu": "0"}"#] {
        let refused = outside(&cluster, annotations);
        assert!(!refused.ok && refused.stderr.contains(&format!("slurm-{job}")), "{refused:?}");
    }
    cancel(&cluster, &job);
    assert_empty(&cluster);
}

#[test]
fn no_task_runs_without_sublet_or_with_one_that_knows_no_slurm() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let refused = |reasons: &[&str], says: &str| {
        let done = srun(&cluster, "shard:1", "echo started");
        assert!(!done.ok && !done.stdout.contains("started"), "{done:?}");
        let said = [done.stdout, done.stderr].concat();
        assert!(said.contains(says), "{says}: {said}");
        let is_so = || reasons.contains(&&cluster.nodes()[0]["n1 ".len()..]);
        assert!(eventually(is_so), "{:?}, not {reasons:?}", cluster.nodes());
        cluster.assert_no_jobs();
        if reasons != ["idle"] {
            cluster.done("login", &["scontrol", "update", "NodeName=n1", "State=RESUME"]);
        }
    };
    let on = |script: &str| cluster.done("n1", &["sh", "-ec", script]);
    let programs = "/usr/libexec/sublet/slurm";
    let prolog = "drained Prolog error";
    // Where the epilog fails too, slurmctld keeps the reason that it hears of last.
    let either = [prolog, "drained Epilog error"];
    // The package is missing, with what slurm.conf names.
    on(&format!("mv {programs} {programs}.away"));
    refused(&either, "Prolog failure on node n1");
    on(&format!("mv {programs}.away {programs}; mv {programs}/task-prolog /root"));
    refused(&["idle"], "task_prolog can not be executed (/usr/libexec/sublet/slurm/task-prolog)");
    on(&format!("mv /root/task-prolog {programs}; mv {programs}/prolog /root"));
    refused(&[prolog], "Prolog failure on node n1");
    on(&format!("mv /root/prolog {programs}"));
    // In the words of the last one that knew no Slurm, commit 7adb87a. It was seen here with both versions of Slurm; with
    // its `sublet serve` below the programs of now, tasks were refused with "the request cannot be parsed: unknown value
    // `job`", and the node stayed idle.
    let older = r#"[ "$1" != slurm ] || { echo "error: unrecognized subcommand '"'"'slurm'"'"'" >&2; exit 2; }; exec /usr/bin/sublet.new "$@""#;
    on(&format!(
        "mv /usr/bin/sublet /usr/bin/sublet.new; printf '#!/bin/sh\\n%s\\n' '{older}' >/usr/bin/sublet; chmod 755 /usr/bin/sublet"
    ));
    refused(&either, "Prolog failure on node n1");
    on(&format!(
        "mv {programs}/prolog /root; printf '#!/bin/sh\\n' >{programs}/prolog; chmod 755 {programs}/prolog"
    ));
    refused(&["drained Epilog error"], "TaskProlog failed status=2");
    on("mv /usr/bin/sublet.new /usr/bin/sublet");
    refused(&["idle"], "has no record on this node");
    on(&format!("mv /root/prolog {programs}"));
    cluster.kill("n1", "sublet");
    refused(&["idle"], "sublet: sublet serve is not running");
    let plain = srun(&cluster, "none", "echo started");
    assert_eq!(plain.stdout, "started\n", "a job without a GPU needs no service: {plain:?}");
    cluster.tell("start", "n1");
    assert!(srun(&cluster, "shard:1", "echo started").ok);
    assert_empty(&cluster);
}

#[test]
fn a_user_can_neither_forge_nor_remove_a_record() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let script = "cd /run/sublet/slurm; echo {} >9.json; echo {} >$SLURM_JOB_ID.json; rm -f *.json; mv * /tmp; \
                  mv /run/sublet/slurm /run/sublet/x; ln -s /tmp /run/sublet/slurm; \
                  SLURM_JOB_ID=9 SLURM_JOB_UID=1000 SLURM_JOB_GPUS=1 SLURMD_NODENAME=n1 sublet slurm prolog; \
                  SLURM_JOB_ID=$SLURM_JOB_ID sublet slurm epilog; cd /run/sublet/slurm; ls *.json; cat *.json";
    let done = srun(&cluster, "shard:1", script);
    let lines: Vec<&str> = done.stdout.lines().collect();
    assert!(lines.len() == 2, "{done:?}");
    assert!(lines[1].contains(r#""uid":1000,"cluster":"test","share":{"#), "{done:?}");
    assert!(done.stderr.contains("slurmd, which runs it as root"), "{done:?}");
    assert_empty(&cluster);
}

#[test]
fn doctor_asks_slurm_and_says_what_does_not_fit() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let check = || {
        // Its exit code is that of other checks, too.
        let text = cluster.on("n1", &["sublet", "doctor", "--format", "json"]).stdout;
        let document: Value = serde_json::from_str(&text).expect("JSON");
        let all = document["checks"].as_array().expect("checks");
        all.iter().find(|check| check["check"] == "slurm").expect("this check").to_string()
    };
    let good = check();
    assert!(good.contains(r#""result":"pass""#) && good.contains("gpu:4,shard:32"), "{good}");
    cluster.done("n1", &["rm", "/usr/libexec/sublet/slurm/epilog"]);
    let missing = check();
    assert!(missing.contains(r#""result":"fail""#) && missing.contains("is not on this node"), "{missing}");
    cluster.kill("login", "slurmctld");
    assert!(check().contains("slurmctld could not be asked"), "{}", check());
}

#[test]
fn a_lost_ledger_has_the_leases_of_jobs_before_another_task_starts() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    for gres in ["gpu:1", "shard:2"] {
        let job = hold(&cluster, gres);
        let before = leases(&cluster);
        cluster.done("n1", &["sh", "-ec", "cd /run/sublet; rm ledger.json ledger.json.copy"]);
        let refused = outside(&cluster, r#"{"sublet.mode": "exclusive", "sublet.gpu": "0"}"#);
        assert!(!refused.ok && refused.stderr.contains(&format!("slurm-{job}")), "{gres}: {refused:?}");
        let after = leases(&cluster);
        for key in ["id", "container_id", "device", "memory_bytes", "state", "job"] {
            assert_eq!(after[0][key], before[0][key], "{gres}: {key}");
        }
        cancel(&cluster, &job);
        assert_empty(&cluster);
        assert_eq!(cluster.done("n1", &["find", "/run/sublet/slurm", "-mindepth", "1"]), "", "{gres}");
    }
}

/// A second cluster, `other`, with slurmctld on the same login node and slurmd on n1. Returns its slurm.conf.
fn second(cluster: &Cluster) -> String {
    let dir = cluster.shared().join("other");
    let dir = dir.display();
    let script = format!(
        "cp -a /etc/slurm {dir}; cd {dir}; sed -i 's/n\\[1-2\\]/n1/' nodes.conf; mkdir /var/lib/slurm2; \
         chown slurm: /var/lib/slurm2; sed -i 's/^ClusterName=.*/ClusterName=other/; s,/var/[a-z]*/slurmd*$,&2,; \
         s,\\.pid$,2&,; s,\\.log$,2&,' slurm.conf; printf 'SlurmctldPort=7817\\nSlurmdPort=7818\\n' >>slurm.conf; \
         slurmctld -f {dir}/slurm.conf"
    );
    cluster.done("login", &["sh", "-ec", &script]);
    cluster.done("n1", &["sh", "-ec", &format!("mkdir /var/spool/slurmd2; slurmd -f {dir}/slurm.conf")]);
    format!("{dir}/slurm.conf")
}

#[test]
fn two_clusters_share_a_node_and_their_jobs_of_one_id_are_not_mixed_up() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let conf = format!("SLURM_CONF={}", second(&cluster));
    let node = || cluster.on("login", &["env", &conf, "sinfo", "--noheader", "-o", "%T %E"]).stdout;
    let is_idle = || node() == "idle none\n";
    assert!(eventually(is_idle), "{}", node());
    let by_other = |gres: &str| {
        let script = "echo started $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
        cluster
            .by("tester", &["env", &conf, "srun", "--quiet", &format!("--gres={gres}"), "bash", "-c", script])
    };
    let job = hold(&cluster, "shard:2");
    let lease = leases(&cluster)[0]["id"].clone();
    let same = by_other("shard:1");
    let says = format!("the clusters test and other both have a job {job} on this node");
    assert!(!same.ok && same.stdout.contains(&says) && !same.stdout.contains("started"), "{same:?}");
    assert_eq!(leases(&cluster)[0]["id"], lease, "what runs has it still");
    assert!(eventually(is_idle), "{}", node());
    // Each cluster believes that all GPUs are its own; both have the first one.
    let beside = by_other("shard:3");
    assert_eq!(beside.stdout, "started 0=53697M\n", "{beside:?}");
    let full = by_other("shard:8");
    assert!(!full.ok && full.stdout.contains("sublet: no room"), "{full:?}");
    assert!(full.stdout.contains(&format!("held by slurm-{job} ")), "{full:?}");
    assert!(eventually(is_idle), "{}", node());
    assert!(eventually(|| leases(&cluster).len() == 1 && leases(&cluster)[0]["id"] == lease));
    cancel(&cluster, &job);
    assert_empty(&cluster);
    let done = by_other("shard:8");
    assert!(done.stdout.starts_with("started "), "{done:?}");
    assert_empty(&cluster);
}

/// Starts munged and slurmd of n1 again, with the clock of `FAKETIME=offset`.
fn set_clock(cluster: &Cluster, offset: &str) {
    let script = format!(
        "kill $(cat /run/slurmd.pid) $(cat /run/munge/munged.pid); sleep 1; \
         fake=\"env FAKETIME={offset} FAKETIME_DONT_FAKE_MONOTONIC=1 LD_PRELOAD=$(echo /usr/lib/*/faketime/libfaketime.so.1)\"; \
         setpriv --reuid munge --regid munge --clear-groups $fake munged; $fake slurmd"
    );
    cluster.done("n1", &["sh", "-ec", &script]);
}

#[test]
fn a_node_with_a_wrong_clock_keeps_its_jobs_leases_and_comes_back_without_them() {
    if skip_unless_slurm() {
        return;
    }
    let cluster = Cluster::with_sublet("shard");
    let down = || cluster.nodes()[0].starts_with("n1 down* Not responding");
    // Each way with one version.
    let (offset, why) = if cluster.is_2205() { ("-10m", "Expired") } else { ("+10m", "Rewound") };
    let job = hold(&cluster, "shard:2");
    let lease = leases(&cluster)[0]["id"].clone();
    set_clock(&cluster, offset);
    let credential = cluster.done("n1", &["munge", "--no-input"]);
    let decoded = cluster.on("login", &["sh", "-c", &format!("echo '{credential}' | unmunge")]);
    assert!(decoded.stdout.contains(&format!("{why} credential")), "{decoded:?}");
    assert!(eventually(down), "{:?}", cluster.nodes());
    let started = ["timeout", "3", "srun", "-w", "n1", "--gres=shard:1", "echo", "started"];
    assert!(!cluster.by("tester", &started).stdout.contains("started"));
    // slurmctld has given the job up, and its processes run.
    cluster.done("login", &["scancel", &job]);
    assert!(cluster.on("n1", &["sublet", "gc"]).ok);
    assert_eq!(leases(&cluster)[0]["id"], lease);
    cluster.done("n1", &["sh", "-c", "kill $(cat /run/slurmd.pid) $(cat /run/munge/munged.pid); sleep 1"]);
    cluster.tell("start", "n1");
    assert_empty(&cluster);
    assert!(srun(&cluster, "shard:8", "echo started").ok);
    assert_empty(&cluster);
}
