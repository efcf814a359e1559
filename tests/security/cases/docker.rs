//! Docker: the commands of `docker`, and failures of dockerd and its helpers.

use super::frame::Expect::{Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [options(), volumes(), words(), images(), life(), deaths(), around()].into_iter().flatten().collect()
}

/// Options that give the container more rights, or request the GPU in another way.
fn options() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case(
            "the GPU's node under an innocent name",
            "up --device $DRIVER/dev/nvidia0:/dev/innocent",
            Refused("/dev/innocent"),
        ),
        case(
            "a rule for everything",
            "up --device-cgroup-rule 'a *:* rwm'",
            Refused("every device of the host"),
        ),
        case(
            "every capability, no seccomp, no AppArmor: another GPU's node made by hand does not open",
            "up --cap-add ALL --security-opt seccomp=unconfined --security-opt apparmor=unconfined >o2 && docker exec job mknod /tmp/n c 195 5 && docker exec job cuda-probe noderights /tmp/n",
            Works("EPERM"),
        ),
        case("the host's IPC, PID and UTS namespaces", "up --ipc host --pid host --uts host", QUARTER),
        case("the neighbour's PID namespace", "up --pid container:neighbour", QUARTER),
        case(
            "the host's cgroup namespace, and a cgroup elsewhere",
            "up --cgroupns host --cgroup-parent /elsewhere",
            QUARTER,
        ),
        case("a terminal", "up -t", QUARTER),
        case(
            "no capability, no new privileges, nobody",
            "up --cap-drop ALL --security-opt no-new-privileges --user 65534:65534",
            QUARTER,
        ),
        case("system paths unconfined", "up --security-opt systempaths=unconfined", QUARTER),
    ]
}

/// Mounts over sublet's mounts, and mounts of files that belong to sublet.
fn volumes() -> Vec<Case> {
    vec![
        case("read-only, without a place to write", "up --read-only", QUARTER),
        case("read-only, /run and /tmp fresh", "up --read-only --tmpfs /run --tmpfs /tmp", QUARTER),
        case("fresh directories over MPS's", "up --tmpfs /run/sublet/mps --tmpfs /tmp/nvidia-mps", QUARTER),
        case(
            "a volume over /tmp: nothing of ours is left in it",
            "mkdir v; up -v $PWD/v:/tmp && docker rm -f job >/dev/null && [ -z \"$(ls -A v)\" ]",
            QUARTER,
        ),
        case(
            "a named volume over the libraries",
            "up -v libraries:/usr/lib; r=$?; docker rm -f job >/dev/null; docker volume rm libraries >/dev/null; exit $r",
            QUARTER,
        ),
        case(
            "the daemon's whole directory over MPS's: the container has the client socket alone",
            "up -v $(ls -d $STATE/mps/GPU*)/pipe:/tmp/nvidia-mps >o2 && docker exec job ls -A /tmp/nvidia-mps && ! docker exec job ls -A /tmp/nvidia-mps | grep privileged",
            Works("control"),
        ),
        case("the driver's nodes over /dev", "up -v $DRIVER/dev:/dev", Refused("/dev")),
        case("the GPU's node as a volume", "up -v $DRIVER/dev/nvidia0:/mnt/n", Refused("nvidia0")),
        case("/dev/null over libcuda", "up -v /dev/null:/lib/$(uname -m)-linux-gnu/libcuda.so.1", QUARTER),
        case("the neighbour's volumes", "up --volumes-from neighbour", QUARTER),
    ]
}

/// Annotations, labels and the environment.
fn words() -> Vec<Case> {
    vec![
        case(
            "labels and variables are no annotations",
            "run --runtime sublet --label sublet.sm=25 -e sublet.sm=25 probe probe hold 60; said",
            Plain,
        ),
        case("a key without a value", "up --annotation sublet.gpu=", Refused("sublet.gpu")),
        case(
            "our key twice: Docker hands on the last, which finds no room",
            "up --annotation sublet.sm=100",
            Refused("no room"),
        ),
        case(
            "other limits, another daemon, another GPU by -e",
            "up -e CUDA_MPS_PIPE_DIRECTORY=/nowhere -e CUDA_VISIBLE_DEVICES=7 -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage",
            QUARTER,
        ),
        case(
            "the same by a file, twice, and names without a value",
            r"printf 'CUDA_MPS_PIPE_DIRECTORY=/a\nCUDA_MPS_PIPE_DIRECTORY=/b\nCUDA_MPS_PINNED_DEVICE_MEM_LIMIT\nNVIDIA_VISIBLE_DEVICES=all\n' >env; CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G up --env-file env",
            QUARTER,
        ),
        case(
            "compose: the engine's own GPU request beside annotations",
            r#"printf 'services:\n  job:\n    image: probe\n    container_name: job\n    network_mode: none\n    runtime: sublet\n    annotations: ["sublet.sm=25"]\n    labels: ["sublet.sm=50"]\n    command: probe hold 60\n    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}\n' >f.yaml; docker compose -p c -f f.yaml up -d --pull never 2>e; r=$?; docker compose -p c -f f.yaml down -t 0 2>/dev/null; sed -n /Error.response/,\$p e >&2; exit $r"#,
            Refused("deploy.resources"),
        ),
    ]
}

/// Unusual images.
fn images() -> Vec<Case> {
    vec![
        case(
            "no glibc: the nodes, and no driver files",
            "tar -C $DIR/rootfs -c bin usr/bin/probe dev proc sys tmp | docker import - own >/dev/null; ask own sh /usr/bin/probe; docker wait job >/dev/null; docker logs job; docker rm -f job >/dev/null; docker rmi own >/dev/null",
            Works("nodes: nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl"),
        ),
        case(
            "a single program, and no directory at all",
            "tar -C $DIR/rootfs/bin -c busybox | docker import - own >/dev/null; ask own /busybox ls /dev; docker wait job >/dev/null; docker logs job; docker rm -f job >/dev/null; docker rmi own >/dev/null",
            Works("nvidia0"),
        ),
        case(
            "a libcuda of its own, in our place",
            "image 'head -c 1M /dev/urandom >l && docker cp -q l tmp:/lib/$(uname -m)-linux-gnu/libcuda.so.1' && IMAGE=own up; r=$?; docker rm -f job >/dev/null; docker rmi own >/dev/null; exit $r",
            QUARTER,
        ),
        case(
            "an environment that fights ours",
            "image true -c 'ENV CUDA_MPS_PIPE_DIRECTORY=/nowhere CUDA_VISIBLE_DEVICES= CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G NVIDIA_VISIBLE_DEVICES=all NVIDIA_REQUIRE_CUDA=cuda>=99' && IMAGE=own up; r=$?; docker rm -f job >/dev/null; docker rmi own >/dev/null; exit $r",
            QUARTER,
        ),
        case(
            "LD_PRELOAD and SUBLET_CONFIG of the image's",
            "image true -c 'ENV LD_PRELOAD=/proc/self/cwd/x.so SUBLET_CONFIG=/nowhere RUST_LOG=trace' && IMAGE=own up; r=$?; docker rm -f job >/dev/null; docker rmi own >/dev/null; exit $r",
            QUARTER,
        ),
        case(
            "/run and /tmp lead to the host's /: nothing of ours appears there",
            "mkdir r; cp -a $DIR/rootfs/. r; rmdir r/run r/tmp; ln -s /proc/1/root/run r/run; ln -s ../../../.. r/tmp; tar -C r -c . | docker import - own >/dev/null; IMAGE=own up; docker rm -f job >/dev/null 2>&1; docker rmi own >/dev/null; [ ! -e /run/sublet ] && [ ! -e /nvidia-mps ] && echo clean",
            Works("clean"),
        ),
        case(
            "committed while it has its share, and run with a share again",
            "up >o2 && docker commit job own >/dev/null; docker rm -f job >/dev/null; IMAGE=own up; r=$?; docker rm -f job >/dev/null; docker rmi own >/dev/null; exit $r",
            QUARTER,
        ),
        case(
            "the same image without a share",
            "up >o2 && docker commit job own >/dev/null; docker rm -f job >/dev/null; run own probe hold 60; said; r=$?; docker rm -f job >/dev/null; docker rmi own >/dev/null; exit $r",
            Plain,
        ),
    ]
}

/// The life of a container.
fn life() -> Vec<Case> {
    vec![
        case(
            "exec with limits of its own",
            "up >o2 && info -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PIPE_DIRECTORY=/nowhere -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage job",
            QUARTER,
        ),
        case("exec --privileged", "up >o2 && info --privileged job", QUARTER),
        case("exec as nobody, elsewhere", "up >o2 && info --user 65534:65534 --workdir /proc job", QUARTER),
        case(
            "updated",
            "up >o2 && docker update --pids-limit 200 --restart always job >/dev/null && info job",
            QUARTER,
        ),
        case(
            "paused, and removed so",
            "up >o2 && docker pause job && docker rm -f job && leases",
            Works("1"),
        ),
        case(
            "exec into one that is paused",
            "up >o2 && docker pause job >/dev/null; info job",
            Fails("paused"),
        ),
        case(
            "a name that is taken",
            "NAME=neighbour; docker run -d --name neighbour --runtime sublet --annotation sublet.sm=25 probe true 2>&1 >/dev/null | brief >&2; false",
            Refused("already in use"),
        ),
        case("renamed", "up >o2 && docker rename job other && info other", QUARTER),
        case(
            "stopped by SIGSTOP, and killed so",
            "up >o2 && docker kill -s STOP job && docker kill job && docker wait job && leases",
            Works("1"),
        ),
        // The kernel removes a mount with the directory entry below it. Users who may use dockerd may do that.
        case(
            "docker cp puts a file of its own in libcuda's place",
            "up >o2; head -c 1M /dev/urandom >l; docker cp -q l job:/lib/$(uname -m)-linux-gnu/libcuda.so.1; docker exec job probe info",
            Still,
        ),
        case(
            "a program that ends at once, three times again",
            "ask --restart on-failure:3 probe false && for i in {1..80}; do [ $(docker inspect -f '{{.State.Status}}' job) = exited ] && break; sleep 0.1; done; docker inspect -f '{{.RestartCount}} times' job; leases",
            Works("3 times\n1"),
        ),
        case("checkpoint", "up >o2 && docker checkpoint create job x", Fails("")),
    ]
}

/// A process is killed.
fn deaths() -> Vec<Case> {
    vec![
        // How far the command gets is chance. Only what is left afterwards is checked.
        case(
            "the client, while it waits",
            "timeout -s KILL 0.3 docker run --name job --network none --runtime sublet --annotation sublet.sm=25 probe probe hold 60",
            Still,
        ),
        // How far the command gets is chance. Only what is left afterwards is checked.
        case(
            "the shim or the runtime below it, on the way",
            "ask probe probe hold 60 & for i in {1..400}; do for p in /proc/[0-9]*; do read -r n <$p/comm && case $n in sublet-runtime|runc*) tr '\\0' ' ' <$p/cmdline | grep -q \"$RUN.* create\" && kill -9 ${p#/proc/} && break 2;; esac; done 2>/dev/null; done; wait",
            Still,
        ),
        case("the MPS daemon: exec has it started", "ask probe sleep 60; end_daemons; info job", QUARTER)
            .harming(),
        case(
            "the MPS daemon, whose program is gone: exec is refused",
            "ask probe sleep 60; aside $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; info job",
            Fails("MPS"),
        )
        .harming(),
        case("the MPS daemon is stopped", "up >o2; stop_daemons; info job", Fails("does not answer"))
            .harming(),
    ]
}

/// sublet's files are broken during a command, and other containers start at the same time.
fn around() -> Vec<Case> {
    vec![
        case(
            "the configuration is broken: a health check passes all the same",
            "up --health-cmd 'probe info' --health-interval 1s >o2; echo '[' >>$CONFIG; for i in {1..60}; do [ $(docker inspect -f '{{.State.Health.Status}}' job) = healthy ] && break; sleep 0.1; done; docker inspect -f '{{.State.Health.Status}}' job",
            Works("healthy"),
        ),
        case(
            "the configuration is broken: the container is removed all the same",
            "up >o2; echo '[' >>$CONFIG; docker rm -f job",
            Works("job"),
        ),
        case(
            "the configuration is broken: no restart",
            "up >o2; echo '[' >>$CONFIG; docker restart -t 0 job 2>&1 >/dev/null | brief >&2; false",
            Fails("config.toml"),
        ),
        case(
            "the ledger is lost while it runs, and its copy",
            "up >o2; rm $STATE/ledger.json $STATE/ledger.json.copy; info job && [ $(leases) = 2 ]",
            QUARTER,
        ),
        case(
            "gone is all but the daemon and the list of roots (this dockerd's is not the usual one): exec has the share",
            "up >o2; find $STATE -maxdepth 1 -type f ! -name roots -delete; info job; r=$?; sublet gc --rebuild >o3 2>&1; exit $r",
            QUARTER,
        ),
        // The directory is mounted below the path, so there is no daemon.
        case(
            "the state directory is gone: exec is refused",
            "up >o2; aside $STATE; info job",
            Fails("its MPS daemon is not available"),
        ),
        case("the state directory is gone: rm -f", "up >o2; aside $STATE; docker rm -f job", Works("job")),
        case(
            "two runs of one name at once",
            "for i in 1 2; do docker run -d --name job --network none --runtime sublet --annotation sublet.sm=25 probe sleep 60 >/dev/null 2>&1 & done; wait; leases",
            Works("2"),
        ),
        case(
            "removed while it starts",
            "ask probe probe hold 60 & for i in {1..50}; do docker rm -f job >/dev/null 2>&1 && break; sleep 0.02; done; wait; docker rm -f job >/dev/null 2>&1; leases",
            Works("1"),
        ),
    ]
}
