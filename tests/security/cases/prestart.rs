//! The hook at createRuntime and prestart: bundles started by the low-level runtime, and the hook called by hand.

use sublet_e2e::Engine;

use super::frame::Expect::{self, Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [bundles(), refusals(), by_hand(), strangers(), around(), lives()].into_iter().flatten().collect()
}

/// config.json and the root filesystem.
fn bundles() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("no key of ours", r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; up"#, Plain),
        case(
            "twice",
            r#"h=$(grep -o '{[^{]*"createRuntime"\],*[^}]*}' $BUNDLE/config.json | head -n1); swap '"createRuntime":[' "\"createRuntime\":[$h,"; up"#,
            QUARTER,
        ),
        case(
            "config.json may not be written, and is as it was",
            "chmod 0400 $BUNDLE/config.json; cp $BUNDLE/config.json .; up; r=$?; cmp config.json $BUNDLE/config.json && exit $r",
            QUARTER,
        ),
        case(
            "config.json goes as the container is made",
            "(sleep 0.03; mv $BUNDLE/config.json gone) & up; wait",
            Still,
        ),
        case(
            "the root filesystem by a link",
            "mv $BUNDLE/rootfs r; ln -s $PWD/r $BUNDLE/rootfs; up",
            linked(),
        ),
        case(
            "the root filesystem by two links and ..",
            "mv $BUNDLE/rootfs r; ln -s $PWD/r l; ln -s ../../scratch/l $BUNDLE/rootfs; up",
            linked(),
        ),
        case(
            "the root filesystem by an absolute path",
            r#"swap '"path":"rootfs"' "\"path\":\"$BUNDLE/rootfs\""; up"#,
            QUARTER,
        ),
        case(
            "a link to the host where libcuda is to be",
            "mkdir -p $BUNDLE/rootfs/usr/lib/x86_64-linux-gnu; ln -s /proc/1/root$PWD/out $BUNDLE/rootfs/usr/lib/x86_64-linux-gnu/libcuda.so.1; up; r=$?; [ ! -e out ] && exit $r",
            QUARTER,
        ),
        case("a file where a node is to be", ": >$BUNDLE/rootfs/dev/nvidiactl; up", QUARTER),
        case(
            "a node of its own where ours is to be",
            r#"swap '"linux":{' '"linux":{"devices":[{"path":"/dev/nvidiactl","type":"c","major":1,"minor":3}],'; up"#,
            Fails(""),
        ),
        case(
            "variables of the image's that loaders and we know",
            r#"variables '"LD_PRELOAD=/proc/self/cwd/x.so","SUBLET_CONFIG=/nowhere","RUST_LOG=trace"'; up"#,
            QUARTER,
        ),
        case(
            "a hook before it that keeps its input",
            r#"swap '"createRuntime":[' '"createRuntime":[{"path":"/bin/sh","args":["sh","-c","cat >/dev/null"]},'; up"#,
            QUARTER,
        ),
        case(
            "a hook behind it that fails",
            r#"sed -i 's|"poststop":\[|"createContainer":[{"path":"/bin/false"}],&|' $BUNDLE/config.json; up"#,
            Fails(""),
        ),
        case(
            "the hook without an environment",
            r#"sed -i 's/"env":\["PATH=[^]]*\],*//' $BUNDLE/config.json; up"#,
            Still,
        ),
        case(
            "the program is gone",
            "sed -i 's|/sublet-hook\"|/sublet-gone\"|g' $BUNDLE/config.json; up",
            Fails(""),
        ),
        case(
            "the hook has a second to live, and waits for room",
            r#"annotate '"sublet.sm":"95","sublet.mode":"exclusive","sublet.wait":"60s"'; sed -i 's|"args":\["sublet-hook","createRuntime"\]|&,"timeout":1|' $BUNDLE/config.json; up"#,
            Fails(""),
        ),
    ]
}

/// Requests that these hooks refuse, because the container exists already.
fn refusals() -> Vec<Case> {
    vec![
        case(
            "another MPS directory in its environment",
            r#"variables '"CUDA_MPS_PIPE_DIRECTORY=/nowhere"'; up"#,
            refused("its environment has CUDA_MPS_PIPE_DIRECTORY"),
        ),
        case(
            "the host's /tmp",
            r#"mounted "{\"destination\":\"/tmp\",\"type\":\"bind\",\"source\":\"/tmp\",\"options\":[\"rbind\"]}"; up"#,
            refused("its /tmp is the host's"),
        ),
        case(
            "no mount namespace of its own",
            r#"swap '{"type":"mount"}' '{"type":"cgroup"}'; alone up"#,
            Fails(""),
        ),
        case(
            "a lease that is none",
            r#"annotate '"sublet.sm":"25","sublet.lease":"../../etc"'; up"#,
            refused("is not a lease id"),
        ),
    ]
}

/// The hook with all kinds of standard input.
fn by_hand() -> Vec<Case> {
    vec![
        case("standard input is closed", "sublet-hook createRuntime <&-", Refused("standard input")),
        case("no end of zeros", "sublet-hook createRuntime </dev/zero", Refused("longer than 1 MiB")),
        case(
            "a byte a second",
            "for i in 1 2 3 4 5 6 7; do printf x; sleep 1; done 2>/dev/null | sublet-hook prestart",
            Refused("was not complete in time"),
        ),
        case("a directory", "sublet-hook createRuntime <.", Refused("directory")),
        case("a list", "echo '[]' | sublet-hook createRuntime", Refused("standard input")),
        case("500 lists deep", "printf '[%.0s' {1..500} | sublet-hook prestart", Refused("standard input")),
        case(
            "an id twice",
            r#"echo '{"id":"c","id":"d","status":"creating"}' | sublet-hook prestart"#,
            Refused("duplicate key"),
        ),
        case(
            "an id that rewrites the terminal",
            r#"state "$(printf 'c\\u001b[2J')" creating 0 | sublet-hook prestart"#,
            Refused("has no `pid`"),
        ),
        case("no stage", "state c creating $$ | sublet-hook", Refused("unknown stage")),
    ]
}

/// The hook called for another container, or for something that is not a container.
fn strangers() -> Vec<Case> {
    vec![
        case(
            "a negative process",
            "state c creating -1 | sublet-hook createRuntime",
            Refused("has no `pid`"),
        ),
        case("the host's first process", "state c creating 1 | sublet-hook createRuntime", Fails("")),
        case(
            "the neighbour's process, which has its share",
            "state c creating $(neighbours) | sublet-hook createRuntime",
            Works(""),
        ),
        case(
            "the neighbour itself, which has its share",
            "state neighbour creating $(neighbours) $DIR/bundles/neighbour | sublet-hook createRuntime",
            Works(""),
        ),
        case(
            "a container that has stopped",
            "state c stopped 0 | sublet-hook prestart",
            Refused("it has stopped"),
        ),
        case(
            "a relative bundle",
            "state c creating $$ bundles/c | sublet-hook createRuntime",
            Refused("not an absolute path"),
        ),
        case(
            "a bundle that is a file",
            "state c creating $$ $CONFIG | sublet-hook createRuntime",
            Refused(""),
        ),
        case(
            "poststop for the neighbour, which runs",
            "state neighbour stopped 0 $DIR/bundles/neighbour | sublet-hook poststop; sublet lease list --format json | grep -c container_id",
            Works("1"),
        ),
        case("poststop for nobody", "state nobody stopped 0 | sublet-hook poststop", Works("")),
        case(
            "in another PID namespace",
            "unshare --pid --fork --mount-proc bash -c 'state() { printf %s \"{\\\"id\\\":\\\"c\\\",\\\"status\\\":\\\"creating\\\",\\\"pid\\\":$$,\\\"bundle\\\":\\\"$BUNDLE\\\"}\"; }; state | sublet-hook createRuntime'",
            Fails(""),
        ),
        case("8 descriptors", "(ulimit -n 8; state c creating $$ | sublet-hook createRuntime)", Fails("")),
    ]
}

/// sublet's own state, damaged.
fn around() -> Vec<Case> {
    vec![
        case("the configuration is broken", "echo '[limits' >>$CONFIG; up", refused("config.toml")),
        case("no configuration", "aside $CONFIG; up", Fails("")),
        case(
            "the state directory is read-only",
            "alone 'mount --bind $STATE $STATE; mount -o remount,bind,ro $STATE; up'",
            Fails(""),
        ),
        case(
            "anybody may write the state directory",
            "chmod 0777 $STATE; up",
            refused("others than its owner may write to it"),
        ),
        case(
            "somebody keeps the lock",
            "flock $STATE/lock sh -c ': >held; sleep 7' & until [ -e held ]; do sleep 0.01; done; up",
            refused("was not free for"),
        ),
        case("the ledger is noise", "head -c 4k /dev/urandom >$STATE/ledger.json; up", QUARTER),
        case("the ledger is gone", "rm $STATE/ledger.json; up", QUARTER),
        case(
            "the ledger goes while it runs",
            "up >o; rm $STATE/ledger.json; runtime exec c probe info",
            QUARTER,
        ),
        case("no inventory", "rm $STATE/inventory.json; up", QUARTER),
        case(
            "the daemon's program is gone",
            "aside $DRIVER/usr/bin/nvidia-cuda-mps-control; up",
            refused("nvidia-cuda-mps-control"),
        ),
        case(
            "the daemon's server ends at once",
            "aside $DRIVER/usr/bin/nvidia-cuda-mps-server; cp /bin/false $DRIVER/usr/bin/nvidia-cuda-mps-server; up",
            refused("cannot start an MPS server"),
        ),
        case(
            "the driver's library is gone",
            "aside $(readlink -f $DRIVER/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1); up",
            refused("libcuda"),
        ),
        case(
            "a node of the driver's is gone",
            "aside $DRIVER/dev/nvidia-uvm; up",
            refused("nvidia-uvm is missing"),
        ),
    ]
}

/// The container's life, and SIGKILL.
fn lives() -> Vec<Case> {
    vec![
        case(
            "deleted while it is made",
            "create & sleep 0.05; runtime delete --force c 2>/dev/null; wait",
            Still,
        ),
        case(
            "killed, and deleted with a broken configuration",
            "up >o; echo '[' >>$CONFIG; runtime kill c KILL; sleep 0.3; runtime delete c",
            Works(""),
        ),
        case(
            "the hook is killed after 10 ms",
            r#"printf '#!/bin/sh\nexec timeout -s KILL 0.01 %s "$@"\n' $(command -v sublet-hook) >h; chmod 755 h; sed -i "0,/\"path\":\"[^\"]*sublet-hook/s||\"path\":\"$PWD/h|" $BUNDLE/config.json; up"#,
            Fails(""),
        ),
        case(
            "the hook is killed after 50 ms",
            r#"printf '#!/bin/sh\nexec timeout -s KILL 0.05 %s "$@"\n' $(command -v sublet-hook) >h; chmod 755 h; sed -i "0,/\"path\":\"[^\"]*sublet-hook/s||\"path\":\"$PWD/h|" $BUNDLE/config.json; up"#,
            Still,
        ),
        case(
            "its daemon is killed",
            "up >o; for p in $(daemons); do grep -qz /mps/$(ls $STATE/mps | grep -v \"$(sublet lease list --format json | grep -o '\"id\": *\"[^\"]*' | head -n1 | grep -o '[^\"]*$')\") $p/environ 2>/dev/null; done; runtime delete --force c",
            Works(""),
        ),
    ]
}

/// crun does not print a hook's output.
fn refused(words: &'static str) -> Expect {
    match Engine::chosen() {
        Engine::Runc => Fails(words),
        Engine::Crun => Fails("error executing hook"),
    }
}

/// runc does not accept a symbolic link as a root filesystem.
fn linked() -> Expect {
    match Engine::chosen() {
        Engine::Runc => Fails("invalid rootfs"),
        Engine::Crun => QUARTER,
    }
}
