//! Podman with the hook: a share during the life and end of its container, also with broken surroundings.

use super::frame::Expect::{Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [lives(), visits(), several(), hooks(), around(), killed()].into_iter().flatten().collect()
}

/// Commands on a container that has a share.
fn lives() -> Vec<Case> {
    vec![
        case(
            "restarted thrice at once",
            "rest; for i in 1 2 3; do podman restart -t0 c & done >/dev/null 2>&1; wait; leases",
            Works("2"),
        ),
        case(
            "its first process is killed from outside",
            "rest; kill -9 $(podman inspect -f {{.State.Pid}} c); podman wait c >/dev/null; leases",
            Works("1"),
        ),
        case(
            "killed, and started again",
            "hold; podman kill c >/dev/null; podman wait c >/dev/null; podman start c >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "stopped with a signal that it ignores",
            "podman run -d --name c $share --stop-signal URG probe sleep 60 >/dev/null; podman stop -t1 c >/dev/null 2>&1; leases",
            Works("1"),
        ),
        case(
            "paused, an exec, a gc, and resumed",
            "rest; podman pause c >/dev/null; podman exec c true 2>/dev/null && exit 1; sublet gc; podman unpause c >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "removed while it is paused",
            "rest; podman pause c >/dev/null; podman rm -f -t0 c >/dev/null; leases",
            Works("1"),
        ),
        case(
            "updated: Podman closes what is not its own",
            "rest; podman update --cpus 1 c >/dev/null 2>&1; podman exec c cuda-probe noderights /dev/nvidiactl /dev/nvidia0",
            Works("EPERM"),
        ),
        case(
            "another GPU's node, made with the capability",
            "rest --cap-add MKNOD; podman exec --privileged c mknod /tmp/x c 195 7; podman exec c cuda-probe noderights /tmp/x",
            Works("EPERM"),
        ),
        case("renamed", "rest; podman rename c d; podman exec d probe info", QUARTER),
    ]
}

/// Exec, copies, volumes and exports of a container that has a share.
fn visits() -> Vec<Case> {
    vec![
        case(
            "exec with variables that fight ours",
            "rest; podman exec -e CUDA_VISIBLE_DEVICES=0 -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 c probe info",
            QUARTER,
        ),
        case(
            "exec of another user, elsewhere",
            "rest; podman exec --user 4242:4242 -w /proc c probe info",
            QUARTER,
        ),
        case("exec --privileged", "rest; podman exec --privileged c probe info", QUARTER),
        case(
            "exec while the ledger is gone",
            "rest; rm $STATE/ledger.json $STATE/ledger.json.copy; podman exec c probe info",
            QUARTER,
        ),
        case(
            "copied out of and into",
            "rest; podman cp c:/usr/bin/probe p; podman cp p c:/usr/bin/probe; podman exec c probe info",
            QUARTER,
        ),
        case(
            "copied over the driver's library",
            "rest; : >l; podman cp l c:/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1 2>/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "copied into the MPS directory",
            "rest; : >control; podman cp control c:/run/sublet/mps/control",
            Fails(""),
        ),
        case(
            "the MPS directory unmounted from inside",
            "rest --cap-add SYS_ADMIN; podman exec --privileged c umount /run/sublet/mps; podman exec c probe info",
            Still,
        ),
        case("a checkpoint, where there is no criu", "rest; podman container checkpoint c", Fails("")),
        case(
            "a checkpoint that fails leaves it its share",
            "rest; podman container checkpoint c 2>/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "its storage is unmounted",
            "rest; podman unmount -f c >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "--restart on-failure, and it fails",
            "podman run -d --name c $share --restart on-failure:3 probe false >/dev/null; for i in {1..60}; do [ $(podman inspect -f '{{.RestartCount}}{{.State.Status}}' c) = 3exited ] && break; sleep 0.1; done; leases",
            Works("1"),
        ),
    ]
}

/// Several containers at the same time, and pods.
fn several() -> Vec<Case> {
    vec![
        case("two of one name at once", "up & up & wait", Still),
        case(
            "in a new pod that is killed",
            "rest --pod new:p --network none; podman pod kill p >/dev/null; podman pod rm -f -t0 p >/dev/null; leases",
            Works("1"),
        ),
        case(
            "by kube play, the value a number",
            r"printf '%s\n' 'apiVersion: v1' 'kind: Pod' 'metadata: {name: p, annotations: {sublet.sm: 25}}' 'spec: {containers: [{name: a, image: probe}]}' >p.yaml; podman kube play --network none p.yaml",
            Fails(""),
        ),
        case(
            "by kube play, more than there is",
            r#"printf '%s\n' 'apiVersion: v1' 'kind: Pod' 'metadata: {name: p, annotations: {sublet.sm: "80"}}' 'spec: {containers: [{name: a, image: probe, imagePullPolicy: Never, command: [/bin/sleep, "60"]}]}' >p.yaml; podman kube play --network none p.yaml 2>&1 | grep -o 'no room for mps, 80 % SM' | head -n1; leases"#,
            Works("no room for mps, 80 % SM\n1"),
        ),
    ]
}

/// The hook.
fn hooks() -> Vec<Case> {
    vec![
        case(
            "its directory twice",
            "podman --hooks-dir $HOOKS --hooks-dir $HOOKS run --rm $share probe probe info",
            QUARTER,
        ),
        case("its file cut off", "truncate -s -20 $HOOKS/sublet.json; up", Fails("sublet.json")),
        case(
            "its program is gone: Podman leaves it out, and there is no GPU",
            "swap /sublet-hook /sublet-gone $HOOKS/sublet.json; plain $share",
            Plain,
        ),
        case(
            "its program fails",
            "swap $(dirname $(command -v sublet-hook))/sublet-hook /bin/false $HOOKS/sublet.json; up",
            Fails(""),
        ),
        case(
            "its program says nothing",
            "swap $(dirname $(command -v sublet-hook))/sublet-hook /bin/true $HOOKS/sublet.json; up",
            Fails(""),
        ),
        case(
            "its program hangs",
            r#"printf '#!/bin/sh\nexec sleep 20\n' >h; chmod 755 h; swap $(dirname $(command -v sublet-hook))/sublet-hook $PWD/h $HOOKS/sublet.json; swap '"path"' '"timeout":1,"path"' $HOOKS/sublet.json; up"#,
            Fails(""),
        ),
        case("a stage that there is not", "swap precreate frobnicate $HOOKS/sublet.json; up", Fails("")),
        case("the stage of another hook", r#"swap '"precreate"' '"poststop"' $HOOKS/sublet.json; up"#, Still),
        case(
            "at createRuntime, which goes with servers of its own alone",
            r"sed -i 's/precreate/createRuntime/g' $HOOKS/sublet.json; up 2>/dev/null; sublet status --last-error",
            Works("GPU 0 has compute mode EXCLUSIVE_PROCESS"),
        ),
        case(
            "at createRuntime, and what fights ours",
            r"sed -i 's/precreate/createRuntime/g' $HOOKS/sublet.json; up -e CUDA_MPS_PIPE_DIRECTORY=/nowhere",
            Fails(""),
        ),
        case(
            "another hook that spoils what ours says",
            r#"printf '#!/bin/sh\nsed s/CUDA_MPS_PIPE_DIRECTORY=/X=/\n' >h; chmod 755 h; sed "s|$(dirname $(command -v sublet-hook))/sublet-hook|$PWD/h|" $HOOKS/sublet.json >$HOOKS/z.json; up"#,
            QUARTER,
        ),
        case(
            "another hook that takes ours out",
            r#"printf '#!/bin/sh\nsed s/sublet-hook/true/g\n' >h; chmod 755 h; sed "s|$(dirname $(command -v sublet-hook))/sublet-hook|$PWD/h|" $HOOKS/sublet.json >$HOOKS/z.json; up"#,
            Still,
        ),
        case(
            "gone between two starts",
            "rest; podman stop -t0 c >/dev/null; rm $HOOKS/sublet.json; podman start c >/dev/null 2>&1; leases",
            Works("1"),
        ),
    ]
}

/// sublet's own state, damaged.
fn around() -> Vec<Case> {
    vec![
        case("the configuration is broken", "echo '[limits' >>$CONFIG; up", Refused("config.toml")),
        case("the configuration is broken, and no key of ours", "echo '[limits' >>$CONFIG; plain", Plain),
        case("no configuration", "aside $CONFIG; up", Refused("config.toml")),
        case("the configuration breaks meanwhile", "rest; echo '[limits' >>$CONFIG; podman exec c probe info; podman rm -f -t0 c >/dev/null", QUARTER),
        case("no state directory, while the neighbour runs", "aside $STATE; up", Refused("sublet gc --rebuild")),
        case("anybody may write the state directory", "chmod 0777 $STATE; up", Refused("others than its owner may write to it")),
        case("somebody keeps the lock", "flock $STATE/lock sh -c ': >held; sleep 7' & until [ -e held ]; do sleep 0.01; done; up", Refused("was not free for")),
        case("the ledger is noise", "head -c 4k /dev/urandom >$STATE/ledger.json; up", QUARTER),
        case("ledger and copy are gone", "rm $STATE/ledger.json $STATE/ledger.json.copy; up", QUARTER),
        case("ledger and copy go while it runs", "rest; rm $STATE/ledger.json $STATE/ledger.json.copy; podman rm -f -t0 c >/dev/null; leases", Works("1")),
        case("the lease is released by force while it runs", "rest; sublet lease release --force $(sublet lease list --format json | grep -o '\"id\": *\"[^\"]*' | grep -o '[^\"]*$' | tail -n1) >/dev/null; podman rm -f -t0 c >/dev/null; leases", Still),
        case("the MPS daemon is killed", "end_daemons; up", QUARTER).harming(),
        case("the MPS daemon is stopped", "stop_daemons; up", Refused("does not answer")).harming(),
        case("the driver's library is gone", "aside $(readlink -f $DRIVER/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1); up", Refused("libcuda")),
        case("a node of the driver's is gone", "aside $DRIVER/dev/nvidia-uvm; up", Refused("nvidia-uvm is missing")),
        case("the storage is full", "mount -t tmpfs -o size=64k none $STATE; mkdir -p $STATE/x; head -c 64k /dev/zero >$STATE/full; up; r=$?; umount $STATE; exit $r", Refused("")).harming(),
    ]
}

/// SIGKILL at odd moments.
fn killed() -> Vec<Case> {
    vec![
        case(
            "podman, after 300 ms, with SIGTERM",
            "timeout 0.3 podman run --name c $share probe probe hold 60",
            Still,
        ),
        // Killed once crun has created it and before it is written down, Podman itself finds its name taken.
        case(
            "podman start, after 250 ms",
            "podman create --name c $share probe sleep 60 >/dev/null; timeout -s KILL 0.25 podman start c; podman start c >/dev/null || { podman rm -f -t0 c; podman run -d --name c $share probe sleep 60; } >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "conmon alone: the container keeps its share",
            "rest; kill -9 $(podman inspect -f {{.State.ConmonPid}} c); sublet gc; podman exec c probe info",
            QUARTER,
        ),
        case(
            "the hook, as it begins",
            r"printf '#!/bin/sh\nkill -9 $$\n' >h; chmod 755 h; swap $(dirname $(command -v sublet-hook))/sublet-hook $PWD/h $HOOKS/sublet.json; up",
            Fails(""),
        ),
        case(
            "the hook, as it works",
            r#"printf '#!/bin/sh\nexec timeout -s KILL 0.02 %s "$@"\n' $(command -v sublet-hook) >h; chmod 755 h; swap $(dirname $(command -v sublet-hook))/sublet-hook $PWD/h $HOOKS/sublet.json; up"#,
            Still,
        ),
        case(
            "system renumber and prune while it runs",
            "rest; podman system renumber 2>/dev/null; podman container prune -f >/dev/null; podman exec c probe info",
            QUARTER,
        ),
    ]
}
