//! Named shares as CDI devices of Docker, with runc as the runtime: the specification that the engine reads, and other
//! requests beside it.

use super::frame::Expect::{Fails, Refused, Share, Still, Works};
use super::frame::{Case, OF_H200, QUARTER, Share as Of, case};

pub fn cases() -> Vec<Case> {
    [devices(), file(), options(), beside(), life(), around()].into_iter().flatten().collect()
}

/// Device names.
fn devices() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("a GPU that there is not", "DEVICE=sublet/share=small.7 up", Fails("unresolvable CDI devices")),
        case("a name that leads elsewhere", "DEVICE=sublet/share=../../etc/passwd up", Fails("")),
        case("another kind", "DEVICE=sublet/gpu=0 up", Fails("unresolvable CDI devices")),
    ]
}

/// The specification.
fn file() -> Vec<Case> {
    vec![
        case("removed", "aside $SPEC; up", Fails("unresolvable CDI devices")),
        case(
            "removed while the container runs: exec has the share",
            "up >o2; aside $SPEC; info job",
            QUARTER,
        ),
        case("cut off", "truncate -s -20 $SPEC; up", Fails("unresolvable CDI devices")),
        case("empty", ": >$SPEC; up", Fails("unresolvable CDI devices")),
        case(
            "of a later version",
            r#"sed -i 's|"cdiVersion": *"[^"]*"|"cdiVersion":"99.0.0"|' $SPEC; up"#,
            Fails("unresolvable CDI devices"),
        ),
        case("twice", "cp $SPEC $DIR/cdi/again.json; up", Fails("unresolvable CDI devices")),
        case(
            "a stranger's file beside it is noise",
            "head -c 4k /dev/urandom >$DIR/cdi/noise.json; up",
            QUARTER,
        ),
        case(
            "edited: more SMs",
            "sed -i 's/CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25/CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100/' $SPEC; up",
            Refused("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        ),
        case(
            "edited: more memory",
            "sed -i 's/CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=[0-9]*M/CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140000M/' $SPEC; up",
            Refused("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
        ),
        case(
            "edited: another daemon",
            "sed -i 's|CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps|CUDA_MPS_PIPE_DIRECTORY=/nowhere|' $SPEC; up",
            Refused("CUDA_MPS_PIPE_DIRECTORY"),
        ),
        case(
            "edited: the hook is told of another share",
            r#"sed -i '/"--share"/{n;s/small/large/}' $SPEC; up"#,
            Refused("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        ),
        case(
            "edited: the hook is told of another GPU",
            r#"sed -i '/"--device"/{n;s/GPU-5b1e7000/GPU-00000000/}' $SPEC; up"#,
            Refused("GPU-00000000"),
        ),
        case(
            "edited: another GPU's node besides",
            r#"sed -i 's|"path": "/dev/nvidiactl",|"path": "/dev/nvidia7", "type": "c", "major": 195, "minor": 7}, { &|' $SPEC; up"#,
            Refused("/dev/nvidia7"),
        ),
        case(
            "edited: the hook's program is not there",
            r#"sed -i 's|"path": *"[^"]*sublet-hook"|"path":"/nowhere/sublet-hook"|' $SPEC; up"#,
            Fails("/nowhere/sublet-hook"),
        ),
        case(
            "out of date: the driver was upgraded and not reloaded",
            "cp $DRIVER/proc/driver/nvidia/version $DRIVER/proc/driver/nvidia/version.aside; sed -i s/580.159.04/575.57.08/ $DRIVER/proc/driver/nvidia/version; up",
            Refused("reload"),
        ),
        case(
            "generated to a full disk: the old one stays",
            "mkdir m; mount -t tmpfs -o size=16k none m; cp $SPEC m/; head -c 1M /dev/zero >m/full 2>/dev/null; printf '[share.more]\\nsm = 5\\n' >>$CONFIG; sublet cdi generate --output m/sublet.json 2>e && echo written; cmp $SPEC m/sublet.json && cat e; umount m",
            Works("No space left"),
        ),
    ]
}

/// Options that conflict with the device.
fn options() -> Vec<Case> {
    vec![
        // Docker writes its own variable first. For NVIDIA's hook and for sublet the last one counts.
        case(
            "--gpus all: NVIDIA's hook is told that there is nothing for it",
            "up --gpus all && [ $(grep -o 'NVIDIA_VISIBLE_DEVICES=[a-z]*' $RUN/containerd/daemon/io.containerd.runtime.v2.task/moby/$(docker inspect -f '{{.Id}}' job)/config.json | tail -1) = NVIDIA_VISIBLE_DEVICES=void ]",
            QUARTER,
        ),
        case(
            "compose: the same the other way round",
            r#"printf 'services:\n  job:\n    image: probe\n    container_name: job\n    network_mode: none\n    runtime: low\n    command: probe hold 60\n    deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: ["sublet/share=small"], capabilities: [gpu]}, {driver: nvidia, count: 1, capabilities: [gpu]}]}}}\n' >f.yaml; docker compose -p c -f f.yaml up -d --pull never 2>e; r=$?; docker compose -p c -f f.yaml down -t 0 2>/dev/null; sed -n /Error.response/,\$p e | brief >&2; exit $r"#,
            Refused("deploy.resources"),
        ),
        case(
            "the GPU's node again, by another name",
            "up --device $DRIVER/dev/nvidia0:/dev/innocent",
            Refused("/dev/innocent"),
        ),
        case(
            "a larger share by -e",
            "up -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PIPE_DIRECTORY=/nowhere -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G",
            QUARTER,
        ),
        case(
            "a loader's variables by -e",
            "up -e LD_PRELOAD=/proc/self/cwd/x.so -e LD_AUDIT=/x.so -e GCONV_PATH=/x 2>/dev/null",
            QUARTER,
        ),
        case("read-only, without a place to write", "up --read-only", QUARTER),
        case("read-only, /run and /tmp fresh", "up --read-only --tmpfs /run --tmpfs /tmp", QUARTER),
        case("fresh directories over MPS's", "up --tmpfs /run/sublet/mps --tmpfs /tmp/nvidia-mps", QUARTER),
        case(
            "a volume over /tmp: nothing of ours is left in it",
            "mkdir v; up -v $PWD/v:/tmp && docker rm -f job >/dev/null && [ -z \"$(ls -A v)\" ]",
            QUARTER,
        ),
        case("the host's PID namespace", "up --pid host", QUARTER),
        case(
            "no capability, nobody",
            "up --cap-drop ALL --security-opt no-new-privileges --user 65534:65534",
            QUARTER,
        ),
        case(
            "no glibc: the nodes, and no driver files",
            "tar -C $DIR/rootfs -c bin usr/bin/probe dev proc sys tmp | docker import - own >/dev/null; ask own sh /usr/bin/probe; docker wait job >/dev/null; docker logs job; docker rm -f job >/dev/null; docker rmi own >/dev/null",
            Works("nodes: nvidia-uvm nvidia-uvm-tools nvidia0 nvidiactl"),
        ),
    ]
}

/// Annotations and the shim beside the device.
fn beside() -> Vec<Case> {
    vec![
        case("an annotation that there is not", "up --annotation sublet.smm=1", Refused("sublet.smm")),
        case(
            "the neighbour's lease",
            "up --annotation sublet.lease=$(sublet lease list --format json | grep -o '\"id\": *\"[0-9a-f]*\"' | head -1 | cut -d'\"' -f4)",
            Refused("sublet.lease"),
        ),
        case(
            "the shim and a file that is out of date",
            "sed -i 's/sm = 25/sm = 50/' $CONFIG; up --runtime sublet",
            Share(Of { sm: 66, ..OF_H200 }),
        ),
    ]
}

/// The stages of a container's life, and processes that are killed.
fn life() -> Vec<Case> {
    vec![
        // Docker's exec has the image's environment, so the server's default limit applies, which is the same for all
        // shares here.
        case(
            "exec, and its own limits",
            "up >o2; info -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=140G job",
            QUARTER,
        ),
        case(
            "restarted",
            "up >o2 && docker restart -t 0 job >/dev/null && info job && [ $(leases) = 2 ]",
            QUARTER,
        ),
        case(
            "restarted with a file that is out of date",
            "up >o2; sed -i 's/sm = 25/sm = 50/' $CONFIG; docker restart -t 0 job 2>&1 >/dev/null | brief >&2; false",
            Fails("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        ),
        case(
            "its first process is killed: started again, with a lease",
            "up --restart always >o2; p=$(pid); kill -9 $p; for i in {1..80}; do n=$(pid); [ $n != 0 ] && [ $n != $p ] && break; sleep 0.1; done; info job && [ $(leases) = 2 ]",
            QUARTER,
        ),
        case(
            "its containerd-shim is killed: no poststop hook is run",
            "up >o2; kill -9 $(shim); for i in {1..80}; do [ $(leases) = 1 ] && break; sleep 0.1; done; leases",
            Works("1"),
        ),
        // How far the command gets is chance. Only what is left afterwards is checked.
        case(
            "the hook is killed on the way",
            "ask probe probe hold 60 & for i in {1..400}; do for p in /proc/[0-9]*; do read -r n <$p/comm && case $n in sublet-hook*) kill -9 ${p#/proc/} && break 2;; esac; done 2>/dev/null; done; wait",
            Still,
        ),
        // How far the command gets is chance. Only what is left afterwards is checked.
        case(
            "the client is killed",
            "timeout -s KILL 0.3 docker run --name job --network none --runtime low --device sublet/share=small probe probe hold 60",
            Still,
        ),
        case("the MPS daemon is killed before", "end_daemons; up", QUARTER).harming(),
        case("the MPS daemon is stopped", "stop_daemons; up", Refused("does not answer")).harming(),
        case(
            "the MPS daemon is killed, and its program is gone",
            "aside $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; up",
            Refused("nvidia-cuda-mps-control"),
        )
        .harming(),
    ]
}

/// sublet's files are broken, and other containers start at the same time.
fn around() -> Vec<Case> {
    vec![
        case("the configuration is broken", "echo '[' >>$CONFIG; up", Refused("config.toml")),
        case("the configuration is gone", "aside $CONFIG; up", Refused("config.toml")),
        case(
            "the configuration is broken while it runs: removed all the same",
            "up >o2; echo '[' >>$CONFIG; docker rm -f job",
            Works("job"),
        ),
        case(
            "the ledger is noise, and its copy",
            "for f in ledger.json ledger.json.copy; do head -c 4k /dev/urandom >$STATE/$f; done; up",
            QUARTER,
        ),
        case(
            "the ledger is lost while it runs, and its copy: exec has the share",
            "up >o2; rm $STATE/ledger.json $STATE/ledger.json.copy; info job",
            QUARTER,
        ),
        case(
            "the same: nothing new on the GPU while nobody knows whose it is",
            "up >o2; rm $STATE/ledger.json $STATE/ledger.json.copy; NAME=other ask probe sleep 60",
            Fails("the ledger was lost, and processes without a lease run on it"),
        ),
        // A warning that the ledger is rebuilt is printed first.
        case(
            "another file system is at the state directory, and full",
            "mount -t tmpfs -o size=4k,mode=755 none $STATE; head -c 4k /dev/zero >$STATE/full; up; rc=$?; umount $STATE; exit $rc",
            Fails("so nothing was changed"),
        ),
        case(
            "anybody may write the state directory",
            "chmod 0777 $STATE; up",
            Refused("others than its owner may write to it"),
        ),
        case("a node of the driver's is gone", "aside $DRIVER/dev/nvidia-uvm; up", Fails("nvidia-uvm")),
        case(
            "one by the device and one by annotations at once",
            "up >o2 & docker run -d --name other --network none --runtime sublet --annotation sublet.sm=25 probe probe hold 60 >/dev/null & wait; leases",
            Works("3"),
        ),
    ]
}
