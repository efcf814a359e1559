//! `exec` into a running container, with hostile input and broken surroundings.

use sublet_e2e::Engine;

use super::frame::Expect::{Fails, Plain, Refused, Still};
use super::frame::{Case, Expect, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [files(), words(), containers(), around(), process()].into_iter().flatten().collect()
}

/// Process files.
fn files() -> Vec<Case> {
    vec![
        case("nothing is wrong", "runtime exec --process p.json c", QUARTER),
        case("no such file", "runtime exec --process no.json c", Refused("No such file")),
        case("a directory", "runtime exec --process . c", Refused("process file")),
        case("empty", ": >p.json; runtime exec --process p.json c", Refused("p.json")),
        case("cut off", "truncate -s -20 p.json; runtime exec --process p.json c", Refused("p.json")),
        case(
            "a pipe that nobody writes to",
            "mkfifo q; runtime exec --process q c",
            Refused("process file q"),
        ),
        case("/dev/null", "runtime exec --process /dev/null c", Refused("/dev/null")),
        case("/dev/zero", "runtime exec --process /dev/zero c", Refused("/dev/zero")),
        case("/dev/stdin, closed", "runtime exec --process /dev/stdin c <&-", Refused("/dev/stdin")),
        case("a link", "ln -s p.json l; runtime exec --process l c", QUARTER),
        case(
            "20 MiB of blanks behind it",
            r"head -c 20M /dev/zero | tr '\0' ' ' >>p.json; runtime exec --process p.json c",
            Refused("p.json"),
        ),
        case(
            "env twice",
            r#"swap '"env":[' '"env":[],"env":[' p.json; runtime exec --process p.json c"#,
            Refused("twice"),
        ),
        case(
            "ENV alone",
            r#"swap '"env":[' '"ENV":[' p.json; runtime exec --process p.json c"#,
            Refused("the key `ENV`"),
        ),
        case(
            "env with a number",
            r#"swap '"env":[' '"env":[7,' p.json; runtime exec --process p.json c"#,
            Refused("env"),
        ),
        case(
            "env is a word",
            r#"swap '"env":["PATH=/usr/bin:/bin"]' '"env":"PATH=/bin"' p.json; runtime exec --process p.json c"#,
            Refused("env"),
        ),
        case(
            "no env",
            r#"swap '"env":["PATH=/usr/bin:/bin"],' '' p.json; runtime exec --process p.json c"#,
            QUARTER,
        ),
        case(
            "env is null",
            r#"swap '"env":["PATH=/usr/bin:/bin"]' '"env":null' p.json; runtime exec --process p.json c"#,
            QUARTER,
        ),
        case(
            "500 lists deep",
            r#"swap '{"cwd"' "{\"x\":$(printf '[%.0s' {1..500})$(printf ']%.0s' {1..500}),\"cwd\"" p.json; runtime exec --process p.json c"#,
            Refused("recursion limit"),
        ),
        case("a NUL behind it", r"printf '\0' >>p.json; runtime exec --process p.json c", Refused("p.json")),
        case(
            "a list",
            "echo '[]' >p.json; runtime exec --process p.json c",
            Refused("an array, but the OCI runtime specification has an object"),
        ),
        case(
            "another directory, no daemon, no limits in env",
            r#"swap '"env":[' '"env":["CUDA_VISIBLE_DEVICES=7","CUDA_MPS_PIPE_DIRECTORY=/nowhere","CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage","CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100","CUDA_MPS_PIPE_DIRECTORY=/x",' p.json; runtime exec --process p.json c"#,
            QUARTER,
        ),
        case(
            "another user and more groups",
            r#"swap '"uid":0,"gid":0' '"uid":1000,"gid":1000,"additionalGids":[0,44,65534]' p.json; runtime exec --process p.json c"#,
            QUARTER,
        ),
        case(
            "a working directory that is not there",
            r#"swap '"cwd":"/"' '"cwd":"/nowhere/at/all"' p.json; runtime exec --process p.json c"#,
            Still,
        ),
    ]
}

/// The command line.
fn words() -> Vec<Case> {
    vec![
        case(
            "--env of ours",
            "runtime exec --env CUDA_MPS_PIPE_DIRECTORY=/nowhere --env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 --env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage c /usr/bin/probe info",
            QUARTER,
        ),
        case("-e of ours", "runtime exec -e CUDA_MPS_PIPE_DIRECTORY=/nowhere c /usr/bin/probe info", QUARTER),
        case(
            "--env without a value",
            "runtime exec --env CUDA_VISIBLE_DEVICES= c /usr/bin/probe info",
            QUARTER,
        ),
        case("--cwd", "runtime exec --cwd /proc/self c probe info", QUARTER),
        case("--process=FILE", "runtime exec --process=p.json c", QUARTER),
        case("--process twice", "runtime exec --process nowhere --process p.json c", QUARTER),
        case(
            "--detach",
            "runtime exec --detach --pid-file pid --process p.json c >o 2>&1; sleep 0.5; cat o",
            QUARTER,
        ),
        case("--preserve-fds", "runtime exec --preserve-fds 1 --process p.json c 3</etc/passwd", QUARTER),
        case("an option that there is not", "runtime exec --frobnicate c probe info", Fails("")),
        case("no command", "runtime exec c", Fails("")),
        case("no container", "runtime exec", Fails("")),
        case(
            "the root by a relative path",
            "cp p.json $DIR; cd $DIR; ROOT=${ROOT##*/} runtime exec --process p.json c",
            QUARTER,
        ),
        case("an id that leads to it", "runtime exec --process p.json ./c", Fails("")),
        case("an id of 1000 letters", "runtime exec --process p.json $(printf 'a%.0s' {1..1000})", Fails("")),
    ]
}

/// The container.
fn containers() -> Vec<Case> {
    vec![
        case("nobody's", "runtime exec --process p.json nobody", Fails("")),
        case("ended", "runtime kill c KILL; sleep 0.3; runtime exec --process p.json c", Fails("")),
        case("deleted", "runtime delete --force c; runtime exec --process p.json c", Fails("")),
        case(
            "without keys of ours",
            "runtime create --bundle $DIR/bundles/p p </dev/null >/dev/null 2>&1; runtime start p; runtime exec --process p.json p; [ $? = 10 ]",
            Plain,
        ),
        case(
            "without keys of ours, and all that is ours is broken",
            "runtime create --bundle $DIR/bundles/p p </dev/null >/dev/null 2>&1; runtime start p; echo '[' >>$CONFIG; aside $STATE; runtime exec --process p.json p; [ $? = 10 ]",
            Plain,
        ),
        case(
            "made and not started",
            r#"runtime delete --force c; swap '"sublet.lease"' '"x"'; runtime create --bundle $DIR/bundles/q q </dev/null >/dev/null 2>&1; runtime exec --process p.json q"#,
            QUARTER,
        ),
        case(
            "paused",
            "runtime pause c; timeout 5 sublet-runtime --root $ROOT exec --process p.json c; r=$?; runtime resume c; exit $r",
            Fails("paused"),
        ),
        case(
            "its config.json is gone",
            "rm $BUNDLE/config.json; runtime exec --process p.json c",
            lost("it has a share of a GPU"),
        ),
        case(
            "its config.json is another's",
            "cp $DIR/bundles/neighbour/config.json $BUNDLE; runtime exec --process p.json c",
            lost("no longer says so"),
        ),
        case(
            "its config.json says 100 %",
            "sed -i 's/CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25/CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100/' $BUNDLE/config.json; runtime exec --process p.json c",
            QUARTER,
        ),
    ]
}

/// sublet's own state, damaged.
fn around() -> Vec<Case> {
    vec![
        case("the daemon was killed, and its program ends at once", "aside $DRIVER/usr/bin/nvidia-cuda-mps-control; cp /bin/false $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; runtime exec --process p.json c", Refused("nvidia-cuda-mps-control")).harming(),
        case("what the container sees of it is gone", "aside $(echo $STATE/mps/*/public); runtime exec --process p.json c", Still).harming(),
        case("no ledger and no copy", "rm $STATE/ledger.json $STATE/ledger.json.copy; runtime exec --process p.json c", QUARTER),
        case("the ledger is noise, as its copy", "for f in ledger.json ledger.json.copy; do head -c 4k /dev/urandom >$STATE/$f; done; runtime exec --process p.json c", QUARTER),
        case("the ledger is a pipe", "aside $STATE/ledger.json; mkfifo $STATE/ledger.json; runtime exec --process p.json c", QUARTER),
        case("no configuration", "aside $CONFIG; runtime exec --process p.json c", QUARTER),
        case("the configuration is a pipe", "aside $CONFIG; mkfifo $CONFIG; runtime exec --process p.json c", QUARTER),
        case("no such runtime in it", r#"sed -i 's|^low_level.*|low_level = ["/nowhere/runc"]|' $CONFIG; runtime exec --process p.json c"#, Still),
        case("the state directory is read-only", "alone 'mount --bind $STATE $STATE; mount -o remount,bind,ro $STATE; runtime exec --process p.json c'", QUARTER),
        case("the libraries of the driver are gone", "aside $(readlink -f $DRIVER/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1); runtime exec --process p.json c", QUARTER),
    ]
}

/// The shim's process.
fn process() -> Vec<Case> {
    vec![
        case(
            "SIGKILL after 5 ms",
            "timeout -s KILL 0.005 sublet-runtime --root $ROOT exec --process p.json c",
            Still,
        ),
        case(
            "SIGKILL after 20 ms",
            "timeout -s KILL 0.02 sublet-runtime --root $ROOT exec --process p.json c",
            Still,
        ),
        case("it may write no file", "(ulimit -f 0; runtime exec --process p.json c) | cat", Still),
        case("8 descriptors", "(ulimit -n 8; runtime exec --process p.json c)", Still),
        case("no more processes", "(ulimit -u 1; runtime exec --process p.json c)", Still),
        case("umask 0777", "umask 0777; runtime exec --process p.json c", QUARTER),
        case("standard input is closed", "runtime exec --process p.json c <&-", QUARTER),
        case("standard error is closed", "runtime exec --process p.json c 2>&-", QUARTER),
        case("SIGPIPE is ignored", "trap '' PIPE; runtime exec --process p.json c", QUARTER),
        case(
            "SIGCHLD is ignored, which crun does not bear",
            "trap '' CHLD; runtime exec --process p.json c",
            Still,
        ),
        case(
            "the working directory is deleted",
            "p=$PWD/p.json; mkdir d; cd d; rmdir ../d; runtime exec --process $p c",
            QUARTER,
        ),
        case(
            "PATH is empty",
            "p=$(command -v sublet-runtime); PATH= $p --root $ROOT exec --process p.json c",
            QUARTER,
        ),
        case("LD_PRELOAD of nothing", "LD_PRELOAD=/nowhere.so runtime exec --process p.json c", QUARTER),
        case(
            "another PID namespace",
            "unshare --pid --fork --mount-proc bash -c 'runtime exec --process p.json c'",
            Fails(""),
        ),
        case(
            "the container ends meanwhile",
            r#"swap '"info"' '"hold","20"' p.json; runtime exec --process p.json c & sleep 0.3; runtime delete --force c; wait"#,
            Still,
        ),
    ]
}

/// runc reads the bundle's config.json again for each process, crun reads its own copy.
fn lost(words: &'static str) -> Expect {
    match Engine::chosen() {
        Engine::Runc => Refused(words),
        Engine::Crun => QUARTER,
    }
}
