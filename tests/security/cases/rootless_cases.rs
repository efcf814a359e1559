//! Rootless Podman: a user's requests, failures of the service, and attacks between users.

use super::frame::Expect::{Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [policy(), options(), service(), users(), lives(), around()].into_iter().flatten().collect()
}

/// What the policy allows the user.
fn policy() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("no key of ours", "plain", Plain),
        case(
            "more memory than is left",
            "up --annotation sublet.memory=9GiB",
            Refused("limits memory to 16384 MiB"),
        ),
        case(
            "its part of the SMs is not named",
            "podman run --rm --annotation sublet.mode=mps --annotation sublet.memory=1GiB probe probe info",
            Refused("say with sublet.sm how much it takes"),
        ),
        case(
            "another mode",
            "podman run --rm --annotation sublet.mode=time-slice probe probe info",
            Refused("your policy allows mps"),
        ),
        case(
            "the whole GPU",
            "podman run --rm --annotation sublet.gpu=0 probe probe info",
            Refused("your policy allows mps"),
        ),
        case("a device that there is not", "up --annotation sublet.gpu=7", Refused("")),
        case("what opens everybody's MIG instances", "up --annotation sublet.mig-caps=monitor", Refused("")),
        case(
            "the policy is lowered meanwhile",
            "sed -i 's/^sm = 50/sm = 30/' $CONFIG; up",
            Refused("limits sm to 30 %"),
        ),
        case(
            "the policy is of another user now",
            "sed -i 's/^user = \"tester\"/user = \"nobody\"/' $CONFIG; up",
            Refused("[[policy]]"),
        ),
        case("a policy that is not closed", "echo '[[policy' >>$CONFIG; up", Refused("")),
        case("a policy that is not closed, and no key of ours", "echo '[[policy' >>$CONFIG; plain", Plain),
        case(
            "a configuration of the user's own",
            "printf '[[policy]]\\nuser = \"*\"\\n' >own; MORE=SUBLET_CONFIG=$PWD/own up --annotation sublet.sm=60",
            Refused("limits sm to 50 %"),
        ),
    ]
}

/// The options of `podman run` without root.
fn options() -> Vec<Case> {
    vec![
        case(
            "the neighbour's lease as its own",
            "up --annotation sublet.lease=$(neighbours)",
            Refused("this container has no live lease"),
        ),
        case("--privileged, which opens no device without root", "up --privileged", QUARTER),
        case("NVIDIA's node as a volume", "up -v $DRIVER/dev/nvidia0:/dev/x", Refused("in addition to")),
        case("--userns keep-id", "up --userns keep-id", QUARTER),
        case("--userns keep-id, as another", "up --userns keep-id:uid=4242,gid=4242", QUARTER),
        case("--userns nomap", "up --userns nomap", QUARTER),
        case("--uidmap of an id that is not the user's", "up --uidmap 0:0:1 --uidmap 1:70000:1", Fails("")),
        case("the host's PIDs, IPC and names", "up --pid host --uts host", QUARTER),
        case("the neighbour's PIDs", "up --pid container:neighbour", QUARTER),
        case("read-only, tmpfs over /run and /tmp", "up --read-only --tmpfs /run --tmpfs /tmp", QUARTER),
        case(
            "the MPS directory is masked",
            "up --security-opt mask=/run/sublet",
            Refused("hides the MPS directory"),
        ),
        case(
            "variables that fight ours",
            "up -e CUDA_VISIBLE_DEVICES=7 -e CUDA_MPS_PIPE_DIRECTORY=/nowhere -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage",
            QUARTER,
        ),
        case("no cgroup of its own", "up --cgroups disabled", QUARTER),
        case("in a new pod", "up --pod new:p --network none", QUARTER),
        case(
            "a root filesystem of the user's",
            "cp -a $DIR/rootfs r; chown -R 1000:1000 r; podman run --rm $share --rootfs $PWD/r probe info; r=$?; find r -size 0 -name 'lib*' | grep . || exit $r",
            QUARTER,
        ),
        case(
            "hooks of the user's own, of which one says nothing",
            r#"mkdir h; printf '#!/bin/sh\n' >h/x; chmod 755 h/x; sed "s|$DIR/bin/sublet-hook|$PWD/h/x|" $HOOKS/sublet.json >h/x.json; podman --hooks-dir $PWD/h run --rm $share probe probe info"#,
            Fails(""),
        ),
        case(
            "a hook of the user's own that gives back what it was given",
            r#"mkdir h; printf '#!/bin/sh\nexec cat\n' >h/x; chmod 755 h/x; sed "s|$DIR/bin/sublet-hook|$PWD/h/x|" $HOOKS/sublet.json >h/x.json; podman --hooks-dir $PWD/h run --rm $share probe probe info; [ $? = 10 ]"#,
            Plain,
        ),
        case(
            "a hook of the user's own that claims the neighbour's lease",
            r#"mkdir h; printf '#!/bin/sh\nsed "s/\\"sublet.sm\\":\\"25\\"/\\"sublet.lease\\":\\"%s\\",&/" | %s/bin/sublet-hook precreate\n' $(neighbours) $DIR >h/x; chmod 755 h/x; sed "s|$DIR/bin/sublet-hook|$PWD/h/x|" $HOOKS/sublet.json >h/x.json; podman --hooks-dir $PWD/h run --rm $share probe probe info"#,
            Refused("this container has no live lease"),
        ),
    ]
}

/// The service.
fn service() -> Vec<Case> {
    vec![
        case("killed", "end_service; up", Refused("sublet serve is not running")),
        case("killed, and started again", "end_service; serve; up", QUARTER),
        case("killed while it is asked", "up & sleep 0.3; end_service; wait; serve", Still),
        case("killed while it is asked, earlier", "up & sleep 0.15; end_service; wait; serve", Still),
        case(
            "ended and started while it is asked",
            "up & sleep 0.2; kill $(service); while [ -n \"$(service)\" ]; do sleep 0.01; done; serve; wait",
            Still,
        ),
        case(
            "killed while the container runs: exec needs it not",
            "rest; end_service; podman exec c probe info",
            QUARTER,
        ),
        case(
            "killed, and the container removed meanwhile",
            "rest; end_service; podman rm -f -t0 c >/dev/null; serve; sublet gc; leases",
            Works("1"),
        ),
        case(
            "killed, and the container killed meanwhile",
            "rest; end_service; kill -9 $(podman inspect -f {{.State.Pid}} c); sleep 0.3; serve; sublet gc; leases",
            Works("1"),
        ),
        case(
            "killed, and a container restarted",
            "rest; end_service; serve; podman restart -t0 c >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case("two of them", "timeout 3 sublet serve; up", QUARTER),
        case(
            "stopped, for a moment",
            "kill -STOP $(service); (sleep 2; kill -CONT $(service)) & up; r=$?; wait; exit $r",
            QUARTER,
        ),
        case(
            "its socket is gone",
            "rm $STATE/sublet.sock; up; r=$?; end_service 2>/dev/null; exit $r",
            Refused("sublet serve is not running"),
        ),
        case(
            "its socket is a file",
            "aside $STATE/sublet.sock; : >$STATE/sublet.sock; up",
            Refused("sublet serve is not running"),
        ),
        case(
            "its socket leads to itself",
            "aside $STATE/sublet.sock; ln -s sublet.sock $STATE/sublet.sock; up",
            Refused("sublet serve is not running"),
        ),
        case(
            "another user's socket in its place, which grants nothing",
            r#"other timeout 4 perl -MIO::Socket::UNIX -e '$s = IO::Socket::UNIX->new(Local => "fake", Listen => 5); for (1..9) { $c = $s->accept; <$c>; print $c "{\"v\":1,\"done\":true}\n"; close $c }' & until [ -S fake ]; do sleep 0.02; done; chmod 666 fake; aside $STATE/sublet.sock; ln -s $PWD/fake $STATE/sublet.sock; up"#,
            Refused(""),
        ),
        case(
            "noise at the socket, and a container after it",
            "head -c 100k /dev/urandom | user speak $STATE/sublet.sock >/dev/null; up",
            QUARTER,
        ),
    ]
}

/// Attacks of users on each other and on root.
fn users() -> Vec<Case> {
    vec![
        case(
            "end the neighbour's lease while it runs",
            r#"ask "{\"v\":1,\"do\":\"end\",\"lease\":\"$(neighbours)\"}""#,
            Works("refused"),
        ),
        case(
            "bind it to root's first process",
            r#"ask "{\"v\":1,\"do\":\"bind\",\"lease\":\"$(neighbours)\",\"container\":{},\"pid\":1}""#,
            Works("refused"),
        ),
        case(
            "hand it over to root's first process",
            r#"ask "{\"v\":1,\"do\":\"hand-over\",\"lease\":\"$(neighbours)\",\"owner\":1}""#,
            Works("refused"),
        ),
        case(
            "a process that there is not",
            r#"ask "{\"v\":1,\"do\":\"hand-over\",\"lease\":\"$(neighbours)\",\"owner\":4194303}""#,
            Works("refused"),
        ),
        case("an ask that there is not", r#"ask '{"v":1,"do":"own-everything"}'"#, Works("refused")),
        case(
            "the other user's status has nothing of the neighbour's",
            r#"printf '{"v":1,"do":"status"}\n' | other speak $STATE/sublet.sock >o; grep -c $(neighbours) o; [ $? = 1 ]"#,
            Works("0"),
        ),
        case("gc", "user sublet gc; sublet lease list --format json | grep -c container_id", Works("1")),
        case("release it by force", "user sublet lease release --force $(neighbours)", Fails("")),
        case(
            "stop its daemon by force",
            "user sublet mps stop --force $(sublet status --format json | grep -o '\"key\": *\"[^\"]*' | grep -o '[^\"]*$')",
            Fails(""),
        ),
        case("drain the GPU", "user sublet drain 0", Fails("")),
        case("a service of the user's own", "user timeout 3 sublet serve", Fails("")),
        case("write the ledger", "user sh -c \"echo >$STATE/ledger.json\"", Fails("ermission denied")),
        case("take the socket away", "user rm -f $STATE/sublet.sock", Fails("ermission denied")),
        case("keep the lock", "user flock -n $STATE/lock true", Fails("ermission denied")),
        case("the daemon's own directory", "user ls $STATE/mps/*/pipe", Fails("ermission denied")),
        case(
            "root in a user namespace",
            "podman unshare $DIR/bin/sublet lease release --force $(neighbours)",
            Fails(""),
        ),
        case(
            "root in a user namespace writes the ledger",
            "podman unshare sh -c \"echo >$STATE/ledger.json\"",
            Fails("ermission denied"),
        ),
        case(
            "two users at once",
            r#"(printf '{"v":1,"do":"inventory"}\n'; sleep 1) | other speak $STATE/sublet.sock >/dev/null & up"#,
            QUARTER,
        ),
    ]
}

/// The life of a container.
fn lives() -> Vec<Case> {
    vec![
        case(
            "killed",
            "rest; podman kill c >/dev/null; podman wait c >/dev/null; sleep 0.2; leases",
            Works("1"),
        ),
        case(
            "killed, and started again",
            "rest; podman kill c >/dev/null; podman wait c >/dev/null; podman start c >/dev/null; podman exec c probe info",
            QUARTER,
        ),
        case(
            "its first process is killed from outside",
            "rest; kill -9 $(podman inspect -f {{.State.Pid}} c); sleep 0.3; sublet gc; leases",
            Works("1"),
        ),
        case(
            "exec with variables that fight ours",
            "rest; podman exec -e CUDA_VISIBLE_DEVICES=0 -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 c probe info",
            QUARTER,
        ),
        case("exec of another user", "rest; podman exec --user 4242:4242 c probe info", QUARTER),
        case(
            "another GPU's node from inside",
            "rest; podman exec --privileged c mknod /tmp/x c 195 7",
            Fails("ermitted"),
        ),
        case(
            "system renumber while it runs",
            "rest; podman system renumber >/dev/null 2>&1; podman exec c probe info",
            QUARTER,
        ),
        case(
            "conmon is killed: the container keeps its share",
            "rest; kill -9 $(podman inspect -f {{.State.ConmonPid}} c); sublet gc; podman exec c probe info",
            QUARTER,
        ),
    ]
}

/// Broken files of root.
fn around() -> Vec<Case> {
    vec![
        case("the ledger is gone, and its copy is there", "rm $STATE/ledger.json; up", QUARTER),
        case("the ledger is noise", "head -c 4k /dev/urandom >$STATE/ledger.json; up", QUARTER),
        case("the copy is gone", "rm $STATE/ledger.json.copy; up", QUARTER),
        case(
            "the ledger goes while it runs",
            "rest; rm $STATE/ledger.json; podman rm -f -t0 c >/dev/null; leases",
            Works("1"),
        ),
        // The service opens it again when it next looks.
        case(
            "the state directory is closed to users",
            "s=$(service); kill -STOP $s; chmod 0700 $STATE; up; r=$?; kill -CONT $s; exit $r",
            Refused("ermission denied"),
        ),
        case("anybody may write the state directory", "chmod 0777 $STATE; up", Refused("")),
        case(
            "somebody keeps the lock",
            "flock $STATE/lock sh -c ': >held; sleep 7' & until [ -e held ]; do sleep 0.01; done; up",
            Refused("was not free for"),
        ),
        case("the MPS daemon is killed", "end_daemons; up", QUARTER).harming(),
        case("the MPS daemon is stopped", "stop_daemons; up", Refused("does not answer")).harming(),
        case("what containers see of the daemon is closed", "chmod 0700 $STATE/mps/*/public; up", QUARTER)
            .harming(),
        case(
            "a node of the driver's is gone",
            "aside $DRIVER/dev/nvidia-uvm; up",
            Refused("nvidia-uvm is missing"),
        ),
        case(
            "the driver's library is gone",
            "aside $(readlink -f $DRIVER/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1); up",
            Refused("libcuda"),
        ),
    ]
}
