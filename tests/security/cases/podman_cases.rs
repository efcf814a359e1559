//! Podman with the hook: effects of its options and images on a share.

use super::frame::Expect::{Fails, Plain, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};
use super::podman_lives;

pub fn cases() -> Vec<Case> {
    [options(), hiding(), images(), podman_lives::cases()].into_iter().flatten().collect()
}

/// The options of `podman run`.
fn options() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("our keys as labels alone", "plain --label sublet.sm=25 --label sublet.memory=8GiB", Plain),
        case("our keys as variables alone", "plain -e sublet.sm=25 -e SUBLET_SM=25", Plain),
        case("a share of nothing", "up --annotation sublet.sm=0", Refused("sublet.sm=0")),
        case(
            "edits of an earlier run, which there was none of",
            "up --annotation sublet.lease.edits='[{\"mounts\":0}]' --annotation sublet.lease.record=x",
            Still,
        ),
        case("a harmless device besides", "up --device /dev/null:/dev/nothing", QUARTER),
        case("NVIDIA's node as a volume", "up -v $DRIVER/dev/nvidia0:/dev/x", Refused("in addition to")),
        case(
            "a rule for NVIDIA's nodes",
            "up --device-cgroup-rule 'c 195:* rwm'",
            Refused("`--device-cgroup-rule`"),
        ),
        case("a rule for all there is", "up --device-cgroup-rule 'a *:* rwm'", Refused("every device")),
        case("all capabilities", "up --cap-add ALL", QUARTER),
        case("no capability", "up --cap-drop ALL --security-opt no-new-privileges", QUARTER),
        case(
            "nothing is masked, no profile",
            "up --security-opt unmask=ALL --security-opt seccomp=unconfined --security-opt label=disable",
            QUARTER,
        ),
        case("another user without a name", "up --user 12345:54321", QUARTER),
        case(
            "a user namespace whose root is the host's nobody",
            "up --uidmap 0:65534:1 --uidmap 1:100000:1000",
            QUARTER,
        ),
        case("a user namespace without root", "up --uidmap 1000:100000:10 --user 1000", Fails("")),
        case(
            "the host's PIDs, IPC and names",
            "up --pid host --ipc host --uts host --cgroupns host",
            QUARTER,
        ),
        case("the neighbour's PIDs and IPC", "up --pid container:neighbour --ipc none", QUARTER),
        case("a cgroup elsewhere", "up --cgroup-parent /elsewhere/by/far", QUARTER),
        case("--init", "up --init", QUARTER),
        case("--systemd=always", "up --systemd always", QUARTER),
        case("a shared memory of no size", "up --shm-size 1k", QUARTER),
        case(
            "limits of the smallest",
            "up --ulimit nofile=64:64 --ulimit core=0:0 --ulimit stack=1048576",
            QUARTER,
        ),
        case(
            "variables that fight ours",
            "up -e CUDA_VISIBLE_DEVICES=7 -e CUDA_MPS_PIPE_DIRECTORY=/nowhere -e CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 -e CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage",
            QUARTER,
        ),
        case(
            "the host's variables, which fight ours",
            "CUDA_VISIBLE_DEVICES=7 CUDA_MPS_PIPE_DIRECTORY=/nowhere CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage SUBLET_MEMORY_BYTES=1 up --env-host",
            QUARTER,
        ),
        case(
            "--unsetenv of ours",
            "up --unsetenv-all --env PATH=/usr/bin:/bin --unsetenv CUDA_MPS_PIPE_DIRECTORY",
            QUARTER,
        ),
        case(
            "a container id in a variable, and a huge one",
            "up -e container=$(printf 'x%.0s' {1..60000})",
            QUARTER,
        ),
        case(
            "a name like an option",
            "podman run --rm --name=sublet.sm --hostname=-x $share probe probe info",
            QUARTER,
        ),
        case("an annotation of 60,000 letters", "up --annotation x=$(printf 'x%.0s' {1..60000})", QUARTER),
        case(
            "a value of 60,000 digits",
            "up --annotation sublet.sm=$(printf '9%.0s' {1..60000})",
            Refused("sublet.sm"),
        ),
        case("--gpus besides", "up --gpus all", Fails("")),
    ]
}

/// Mounts over sublet's paths.
fn hiding() -> Vec<Case> {
    vec![
        case(
            "CUDA's default one is masked",
            "up --security-opt mask=/tmp/nvidia-mps",
            Refused("hides the MPS directory"),
        ),
        case(
            "a parent of both is masked",
            "up --security-opt mask=/run:/tmp",
            Refused("hides the MPS directory"),
        ),
        case(
            "the driver's library is masked",
            "up --security-opt mask=/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1",
            Still,
        ),
        case("read-only", "up --read-only", QUARTER),
        case("read-only, without the tmpfs", "up --read-only --read-only-tmpfs=false", QUARTER),
        case("tmpfs over /run and /tmp", "up --tmpfs /run --tmpfs /tmp:size=4k", QUARTER),
        case("tmpfs over what we mount", "up --tmpfs /run/sublet --tmpfs /run/sublet/mps", Still),
        case("tmpfs over CUDA's place", "up --tmpfs /tmp/nvidia-mps", Still),
        case("a volume over the MPS directory", "mkdir m; up -v $PWD/m:/run/sublet/mps", Still),
        case("a file over the MPS directory", ": >f; up -v $PWD/f:/tmp/nvidia-mps", Still),
        case("a socket of its own for the daemon's", "mkdir -p m; up -v $PWD/m:/tmp/nvidia-mps:ro", Still),
        case("the host's /tmp", "mkdir t; up -v $PWD/t:/tmp", QUARTER),
        case("the host's /dev", "mkdir d; up -v $PWD/d:/dev/shm -v /dev/null:/dev/nvidiactl", Still),
        case(
            "a volume shared with the host",
            "mkdir s; mount --bind s s; mount --make-shared s; up -v $PWD/s:/run:rshared; r=$?; umount s; exit $r",
            Refused("shared with the host"),
        ),
        case("the host's state directory, to write", "up -v $STATE:/run/sublet", Still),
        case("another libcuda", ": >l; up -v $PWD/l:/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1", Still),
        case("all volumes of the neighbour", "up --volumes-from neighbour", QUARTER),
        case(
            "a root filesystem of the host's",
            "cp -a $DIR/rootfs r; podman run --rm $share --rootfs $PWD/r probe info; r=$?; find r -size 0 -name 'lib*' | grep . || exit $r",
            QUARTER,
        ),
        case(
            "a root filesystem of the host's, which is mapped",
            "cp -a $DIR/rootfs r; chown -R 100000:100000 r; podman run --rm $share --uidmap 0:100000:65536 --rootfs $PWD/r probe info",
            Refused("leave out --uidmap and --userns"),
        ),
        case(
            "a root filesystem of the host's, which is the host's",
            "podman run --rm $share --rootfs / --read-only -v $DIR/rootfs/usr/bin:/opt:ro /bin/true",
            Still,
        ),
    ]
}

/// Images.
fn images() -> Vec<Case> {
    vec![
        case(
            "committed from a container with a share, without our keys",
            "rest; podman commit -q c made >/dev/null 2>&1; podman rm -f -t0 c >/dev/null; podman run --rm made probe info; [ $? = 10 ]",
            Plain,
        ),
        case(
            "the same, with them",
            "rest; podman commit -q c made >/dev/null 2>&1; podman rm -f -t0 c >/dev/null; podman run --rm $share made probe info",
            QUARTER,
        ),
        case(
            "ENV that fights ours",
            "podman create --name d probe >/dev/null; podman commit -q --change 'ENV CUDA_VISIBLE_DEVICES=7 CUDA_MPS_PIPE_DIRECTORY=/nowhere LD_PRELOAD=/nowhere.so SUBLET_CONFIG=/nowhere NVIDIA_VISIBLE_DEVICES=all' d made >/dev/null 2>&1; podman run --rm $share made probe info",
            QUARTER,
        ),
        case(
            "a libcuda of its own",
            "cp -a $DIR/rootfs r; for d in lib usr/lib; do mkdir -p r/$d/$(uname -m)-linux-gnu; echo noise >r/$d/$(uname -m)-linux-gnu/libcuda.so.1; done; import r; podman run --rm $share made probe info",
            QUARTER,
        ),
        case(
            "a directory where libcuda is to be",
            "cp -a $DIR/rootfs r; for d in lib usr/lib; do mkdir -p r/$d/$(uname -m)-linux-gnu/libcuda.so.1; done; import r; podman run --rm $share made probe info",
            Refused("fix: remove it, or leave out"),
        ),
        case(
            "a link out of it where the MPS directory is to be",
            "cp -a $DIR/rootfs r; ln -s /proc/1/cwd/etc r/run/sublet; import r; podman run --rm $share made probe info; r=$?; ls /etc | grep -w mps || exit $r",
            Fails("cross-device"),
        ),
        case(
            "without a C library: nothing there could use the driver's",
            "mkdir -p r/bin; cp /bin/busybox r/bin; import r; podman run --rm $share made /bin/busybox ls /dev",
            Works("nvidia0"),
        ),
        case("without anything", "mkdir r; import r; podman run --rm $share made /x", Fails("/x")),
        case(
            "a loader's configuration of its own",
            "cp -a $DIR/rootfs r; echo /nowhere >r/etc/ld.so.conf; head -c 4k /dev/urandom >r/etc/ld.so.cache; import r; podman run --rm $share made probe info",
            QUARTER,
        ),
        case(
            "a library directory that leads out of it",
            "cp -a $DIR/rootfs r; mv r/lib r/lib.real; ln -s ../../../../lib.real r/lib; import r; podman run --rm $share made probe info",
            QUARTER,
        ),
        case(
            "an image that there is not",
            "podman run --rm --pull never $share nothing probe info",
            Fails("nothing"),
        ),
    ]
}
