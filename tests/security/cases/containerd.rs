//! containerd: the commands of `ctr`, and failures of containerd and its shims.

use super::frame::Expect::{Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [options(), words(), names(), life(), deaths(), around()].into_iter().flatten().collect()
}

/// Options of `ctr run`.
fn options() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case(
            "the GPU's node as a volume",
            "up --mount type=bind,src=$DRIVER/dev/nvidia0,dst=/mnt/n,options=bind",
            Refused("nvidia0"),
        ),
        case(
            "a volume over the MPS directory",
            "mkdir v; up --mount type=bind,src=$PWD/v,dst=/run/sublet/mps,options=rbind:ro",
            QUARTER,
        ),
        case(
            "a volume over /tmp: nothing of ours is left in it",
            "mkdir v; up --mount type=bind,src=$PWD/v,dst=/tmp,options=rbind:rw && remove && [ -z \"$(ls -A v)\" ]",
            QUARTER,
        ),
        case("a root that cannot be written", "up --read-only", QUARTER),
        case(
            "a directory for a root",
            "cp -a $DIR/rootfs r; ctr run --detach --rootfs --cpu-shares 0 --log-uri file://$PWD/out --runc-binary $(command -v sublet-runtime) --annotation sublet.sm=25 --annotation sublet.memory=8GiB --env PATH=/usr/bin:/bin $PWD/r job probe hold 60 && said",
            QUARTER,
        ),
        case("the host's PID namespace", "up --with-ns pid:/proc/1/ns/pid", QUARTER),
        case(
            "the neighbour's PID and IPC namespaces",
            "n=$(NAME=neighbour pid); up --with-ns pid:/proc/$n/ns/pid --with-ns ipc:/proc/$n/ns/ipc",
            QUARTER,
        ),
        case("the host's mount namespace", "up --with-ns mount:/proc/1/ns/mnt", Refused("mount namespace")),
        case(
            "every capability: another GPU's node made by hand does not open",
            "up --cap-add CAP_SYS_ADMIN --cap-add CAP_MKNOD >o2; try job mknod /tmp/n c 195 5; try job cuda-probe noderights /tmp/n",
            Works("EPERM"),
        ),
        case("nobody", "up --user 65534:65534", QUARTER),
        case("a cgroup elsewhere", "up --cgroup /elsewhere/job", QUARTER),
        case("runtime's records elsewhere", "up --runc-root $PWD/r", QUARTER),
        case("new privileges are allowed", "up --allow-new-privs", QUARTER),
    ]
}

/// Annotations and the environment.
fn words() -> Vec<Case> {
    vec![
        case("a variable is no annotation", "run --env sublet.sm=25 && said", Plain),
        case(
            "a label: ctr itself makes an annotation of it, whoever is the runtime",
            "SHIM=$(command -v runc) run --label sublet.sm=25 && grep -o '\"sublet.sm\":\"25\"' $RUN/io.containerd.runtime.v2.task/$CONTAINERD_NAMESPACE/job/config.json",
            Works("sublet.sm"),
        ),
        case("a key without a value", "up --annotation sublet.gpu", Fails("")),
        case(
            "other limits, another daemon, another GPU",
            "up --env CUDA_MPS_PIPE_DIRECTORY=/nowhere --env CUDA_VISIBLE_DEVICES=7 --env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 --env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage",
            QUARTER,
        ),
        case(
            "the same by a file, twice",
            r"printf 'CUDA_MPS_PIPE_DIRECTORY=/a\nCUDA_MPS_PIPE_DIRECTORY=/b\nNVIDIA_VISIBLE_DEVICES=all\n' >env; up --env-file env",
            QUARTER,
        ),
        case(
            "the shim by a link of another name",
            "ln -s $(command -v sublet-runtime) runc; SHIM=$PWD/runc up",
            QUARTER,
        ),
    ]
}

/// Ids and namespaces.
fn names() -> Vec<Case> {
    vec![
        case("the same id twice", "up >o2; KEEP=1 up", Fails("already exists")),
        case("the neighbour's id", "NAME=neighbour KEEP=1 up", Fails("already exists")),
        case(
            "the same id in two namespaces: a share each",
            "up >o2; export CONTAINERD_NAMESPACE=k8s.io; up >o3; leases",
            Works("3"),
        ),
        case(
            "one of them is removed: the other keeps its share",
            "up >o2; (export CONTAINERD_NAMESPACE=k8s.io; up >o3; remove); info && [ $(leases) = 2 ]",
            QUARTER,
        ),
        case(
            "the neighbour's id in another namespace, and removed",
            "export CONTAINERD_NAMESPACE=k8s.io NAME=neighbour; up >o2; remove; leases",
            Works("1"),
        ),
        case(
            "in two namespaces at once",
            "(export CONTAINERD_NAMESPACE=k8s.io; up >o2) & up; rc=$?; wait; [ $(leases) = 3 ] && exit $rc",
            QUARTER,
        ),
        case("an id like a command", "NAME=delete up", QUARTER),
        case("an id like a file of ours", "NAME=ledger.json up", QUARTER),
        case("76 letters, which is the longest", "NAME=$(printf 'a%.0s' {1..76}) up", QUARTER),
        case("one more", "NAME=$(printf 'a%.0s' {1..77}) up", Fails("76 characters")),
        case("an id that leads elsewhere", "NAME=../../job up", Fails("")),
        case("an empty id", "NAME= up", Fails("")),
        case("an id of two lines", "NAME=$'a\\nb' up", Fails("")),
    ]
}

/// The life of a container.
fn life() -> Vec<Case> {
    vec![
        case("exec as nobody, elsewhere", "up >o2; info --user 65534:65534 --cwd /proc", QUARTER),
        case(
            "exec that raises its limits itself",
            "up >o2; try job env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G /bin/sh /usr/bin/probe info",
            QUARTER,
        ),
        case(
            "two execs of one id at once",
            "up >o2; ctr tasks exec --exec-id e job sleep 5 & sleep 0.5; ctr tasks exec --exec-id e job true; rc=$?; ctr tasks rm --force job >/dev/null; wait; exit $rc",
            Fails("e"),
        ),
        case("paused, and removed so", "up >o2; ctr tasks pause job; remove; leases", Works("1")),
        case(
            "exec into one that is paused",
            "up >o2; ctr tasks pause job; timeout 5 ctr tasks exec --exec-id e job true",
            Fails("paused"),
        ),
        case("removed with its snapshot, and made anew", "up >o2; remove; up && [ $(leases) = 2 ]", QUARTER),
        case("checkpoint", "up >o2; ctr tasks checkpoint job", Fails("checkpoint")),
        case(
            "its containers' record is removed while the task runs",
            "up >o2; ctr containers rm job; info",
            QUARTER,
        ),
        case(
            "config.json in its bundle is gone: exec is refused, remove is not",
            "up >o2; rm $RUN/io.containerd.runtime.v2.task/$CONTAINERD_NAMESPACE/job/config.json; ! info 2>/dev/null && remove && leases",
            Works("1"),
        ),
    ]
}

/// A process is killed.
fn deaths() -> Vec<Case> {
    vec![
        case(
            "containerd, and the container meanwhile",
            "up >o2; p=$(pid); containerd_ends; ends $p; leases",
            Works("1"),
        ),
        // How far the command gets is chance. What is left is checked once containerd has finished. containerd itself
        // leaves the mount of a root filesystem then, with plain runc too.
        // Killed between its snapshot and its container, the client leaves the snapshot.
        case(
            "the client, while it waits",
            "timeout -s KILL 0.1 ctr run --detach --snapshotter native --cpu-shares 0 --runc-binary $(command -v sublet-runtime) --annotation sublet.sm=25 $IMAGE job sleep 60; sleep 1; ctr tasks ls -q | grep -qx job || umount $RUN/io.containerd.runtime.v2.task/$CONTAINERD_NAMESPACE/job/rootfs; ctr containers ls -q | grep -qx job || ctr snapshots --snapshotter native rm job 2>/dev/null",
            Still,
        ),
        // How far the command gets is chance. Only what is left afterwards is checked.
        case(
            "the runtime, on the way",
            "ask & for i in {1..400}; do p=$(having \"^$(command -v sublet-runtime).* create\\|^runc.* create\"); [ -n \"$p\" ] && kill -9 $p && break; done 2>/dev/null; wait",
            Still,
        ),
        case("the container's first process", "up >o2; ends $(pid); sleep 0.3; leases", Works("1")),
        case("the MPS daemon: exec has it started", "DO='sleep 60' ask; end_daemons; info", QUARTER)
            .harming(),
        case(
            "the MPS daemon, whose program is gone: exec is refused",
            "DO='sleep 60' ask; aside $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; info",
            Fails("MPS"),
        )
        .harming(),
        case("the MPS daemon is stopped", "up >o2; stop_daemons; info", Fails("does not answer")).harming(),
    ]
}

/// sublet's files are broken during a command, and other containers start at the same time.
fn around() -> Vec<Case> {
    vec![
        case(
            "the configuration is broken: exec, and its removal",
            "up >o2; echo '[' >>$CONFIG; info && remove",
            QUARTER,
        ),
        case(
            "ledger and copy are lost while it runs",
            "up >o2; rm $STATE/ledger.json $STATE/ledger.json.copy; info && [ $(leases) = 2 ]",
            QUARTER,
        ),
        case(
            "removed while it starts",
            "ask & for i in {1..40}; do ctr tasks rm --force job >/dev/null 2>&1 && break; sleep 0.02; done; wait; remove 2>/dev/null; leases",
            Works("1"),
        ),
    ]
}
