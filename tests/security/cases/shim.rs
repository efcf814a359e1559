//! The shim: hostile and damaged input for `create`.

use super::around;
use super::frame::Expect::{Fails, Plain, Refused, Still};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [spec(), annotations(), keys(), fighting(), hiding(), image(), around::cases()]
        .into_iter()
        .flatten()
        .collect()
}

/// config.json files that no engine writes.
fn spec() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("no key of ours", r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; up"#, Plain),
        case("config.json is cut off", "truncate -s -20 $BUNDLE/config.json; up", Refused("cannot edit")),
        case("config.json is empty", ": >$BUNDLE/config.json; up", Fails("")),
        case("config.json is missing", "rm $BUNDLE/config.json; up", Fails("config.json")),
        case(
            "config.json is a directory",
            "rm $BUNDLE/config.json; mkdir $BUNDLE/config.json; up",
            Fails("config.json"),
        ),
        case(
            "config.json is a pipe that nobody writes to",
            "rm $BUNDLE/config.json; mkfifo $BUNDLE/config.json; up",
            Refused("config.json"),
        ),
        case(
            "config.json leads to /dev/zero",
            "ln -sf /dev/zero $BUNDLE/config.json; up",
            Refused("not a regular file"),
        ),
        case(
            "config.json is a link to a sound file",
            "mv $BUNDLE/config.json $BUNDLE/real; ln -s real $BUNDLE/config.json; up",
            QUARTER,
        ),
        case(
            "20 MiB of blanks behind it",
            r"head -c 20M /dev/zero | tr '\0' ' ' >>$BUNDLE/config.json; up",
            Refused("larger than 16 MiB"),
        ),
        case(
            "the same without keys of ours",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; head -c 20M /dev/zero | tr '\0' ' ' >>$BUNDLE/config.json; up"#,
            Plain,
        ),
        case(
            "500 lists deep",
            r#"swap '{"ociVersion"' "{\"x\":$(printf '[%.0s' {1..500})$(printf ']%.0s' {1..500}),\"ociVersion\""; up"#,
            Refused("recursion limit"),
        ),
        case("a second value behind it", "echo '{}' >>$BUNDLE/config.json; up", Refused("cannot edit")),
        case("a NUL behind it", r"printf '\0' >>$BUNDLE/config.json; up", Refused("cannot edit")),
        case(
            "a byte order mark before it",
            r"sed -i '1s/^/\xef\xbb\xbf/' $BUNDLE/config.json; up",
            Refused("cannot edit"),
        ),
        case(
            "no UTF-8 in it",
            r#"sed -i 's/"hostname":"test"/"hostname":"\xff"/' $BUNDLE/config.json; up"#,
            Refused("cannot edit"),
        ),
        case("UTF-16", "iconv -t UTF-16 <$BUNDLE/config.json >u; cp u $BUNDLE/config.json; up", Fails("")),
        case(
            "our key twice",
            r#"annotate '"sublet.sm":"25","sublet.sm":"100"'; up"#,
            Refused("occurs twice"),
        ),
        case(
            "annotations twice, the second without keys of ours",
            r#"swap '"linux":{' '"annotations":{},"linux":{'; up"#,
            Refused("occurs twice"),
        ),
        case(
            "Annotations, which runc takes for annotations",
            r#"swap '"annotations":' '"Annotations":{},"annotations":'; up"#,
            Refused("runc takes the key `Annotations`"),
        ),
        case(
            "our keys written in escapes",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"\u0073ublet.sm":"25","\u0073ublet.memory":"8GiB"'; up"#,
            QUARTER,
        ),
        case("annotations is null", r#"swap '{"sublet.sm":"25","sublet.memory":"8GiB"}' null; up"#, Plain),
        case(
            "annotations is a list",
            r#"swap '{"sublet.sm":"25","sublet.memory":"8GiB"}' '["sublet.sm=25"]'; up"#,
            Refused("annotations"),
        ),
        case("process is null", r#"swap '"process":{' '"process":null,"x":{'; up"#, Refused("process")),
    ]
}

/// Annotations.
fn annotations() -> Vec<Case> {
    vec![
        case("a value that is a number", r#"annotate '"sublet.sm":25'; up"#, Refused("annotations.*")),
        case("a percentage of 0", r#"annotate '"sublet.sm":"0"'; up"#, Refused("sublet.sm=0")),
        case("a percentage of 1e309", r#"annotate '"sublet.sm":"1e309"'; up"#, Refused("sublet.sm")),
        case("a percentage in Arabic digits", r#"annotate '"sublet.sm":"٢٥"'; up"#, Refused("sublet.sm")),
        case("a percentage with a NUL", r#"annotate '"sublet.sm":"25\u0000"'; up"#, Refused("sublet.sm")),
        case(
            "a value that rewrites the terminal",
            r#"annotate '"sublet.sm":"25\u001b[2J"'; up"#,
            Refused("sublet.sm"),
        ),
        case(
            "a value of two lines",
            r#"annotate '"sublet.sm":"25\nsublet.mode=exclusive"'; up"#,
            Refused("sublet.sm"),
        ),
        case(
            "a value of 100,000 digits",
            r#"annotate "\"sublet.sm\":\"$(printf '9%.0s' {1..100000})\""; up"#,
            Refused("sublet.sm"),
        ),
        case("memory without a unit", "swap 8GiB 8; up", Refused("sublet.memory=8")),
        case("less than no memory", "swap 8GiB -8GiB; up", Refused("sublet.memory")),
        case(
            "more memory than 64 bits hold",
            "swap 8GiB 99999999999999999999GiB; up",
            Refused("sublet.memory"),
        ),
        case("more memory than there is", "swap 8GiB 200GiB; up", Refused("no place")),
        case("more SMs than are left", r#"annotate '"sublet.sm":"90"'; up"#, Refused("no place")),
    ]
}

/// Keys that are nearly sublet's, and values that do not exist.
fn keys() -> Vec<Case> {
    vec![
        case("a key of another case", r#"annotate '"Sublet.sm":"25"'; up"#, Refused("sublet.sm")),
        case("a key with another separator", r#"annotate '"sublet_sm":"25"'; up"#, Refused("sublet.sm")),
        case("a key with a blank behind it", r#"annotate '"sublet.sm ":"25"'; up"#, Refused("sublet.sm")),
        case("a key that there is not", r#"annotate '"sublet.cores":"25"'; up"#, Refused("sublet.cores")),
        case(
            "a near miss alone",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"Sublet.sm":"25"'; up"#,
            Refused("sublet.sm"),
        ),
        case(
            "a key of ours behind a prefix",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"org.example.sublet.sm":"25"'; up"#,
            Refused("write sublet.sm=25"),
        ),
        case(
            "somebody else's key with our name in it",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"org.sublet.x":"sublet.sm"'; up"#,
            Plain,
        ),
        case("a GPU that there is not", r#"annotate '"sublet.gpu":"7"'; up"#, Refused("7")),
        case(
            "a path for a GPU",
            r#"annotate '"sublet.gpu":"../../../etc/passwd"'; up"#,
            Refused("sublet.gpu"),
        ),
        case(
            "99999999999999999999 GPUs",
            r#"annotate '"sublet.gpu":"any:99999999999999999999"'; up"#,
            Refused("sublet.gpu"),
        ),
        case(
            "no process",
            r#"annotate '"sublet.sm":"25","sublet.processes":"0"'; up"#,
            Refused("sublet.processes"),
        ),
        case(
            "more processes than MPS has clients",
            r#"annotate '"sublet.sm":"25","sublet.processes":"49"'; up"#,
            Refused("at most 48 MPS clients"),
        ),
        case(
            "an hour's wait",
            r#"annotate '"sublet.sm":"25","sublet.wait":"3600s"'; up"#,
            Refused("sublet.wait"),
        ),
        case(
            "the whole GPU beside a neighbour",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"sublet.mode":"exclusive"'; up"#,
            Refused("no place"),
        ),
        case(
            "a lease that nobody has",
            r#"annotate '"sublet.sm":"25","sublet.lease":"0123456789abcdef"'; up"#,
            Refused("sublet.lease"),
        ),
        case(
            "the neighbour's lease",
            r#"annotate "\"sublet.sm\":\"25\",$(grep -o '"sublet.lease":"[0-9a-f]*"' $DIR/bundles/neighbour/config.json)"; up"#,
            Refused("this container has no live lease"),
        ),
        case(
            "a lease that leads elsewhere",
            r#"annotate '"sublet.sm":"25","sublet.lease":"../../../etc/passwd"'; up"#,
            Refused("sublet.lease"),
        ),
        case(
            "a record of a lease, without a lease",
            r#"annotate '"sublet.sm":"25","sublet.lease.record":"{}"'; up"#,
            QUARTER,
        ),
    ]
}

/// Entries of the spec that conflict with sublet's.
fn fighting() -> Vec<Case> {
    vec![
        case(
            "a rule that allows every device",
            r#"swap '{"allow":false,"access":"rwm"}' '{"allow":true,"access":"rwm"}'; up"#,
            Refused("allow"),
        ),
        case("no rule that denies the rest", r#"swap '{"allow":false,"access":"rwm"},' ''; up"#, QUARTER),
        case(
            "a rule for every GPU",
            r#"swap '{"allow":false,"access":"rwm"},' '{"allow":false,"access":"rwm"},{"allow":true,"type":"c","major":195,"access":"rwm"},'; up"#,
            Refused("195"),
        ),
        case(
            "another GPU's node",
            r#"swap '"linux":{' '"linux":{"devices":[{"path":"/dev/nvidia1","type":"c","major":195,"minor":1}],'; up"#,
            Refused("/dev/nvidia1"),
        ),
        case(
            "the same by an innocent name",
            r#"swap '"linux":{' '"linux":{"devices":[{"path":"/dev/zero2","type":"c","major":195,"minor":1}],'; up"#,
            Refused("/dev/zero2"),
        ),
        case(
            "the GPU's node as a volume",
            r#"mounted "{\"destination\":\"/dev/nvidia0\",\"source\":\"$DRIVER/dev/nvidia0\",\"options\":[\"bind\"]}"; up"#,
            Refused("/dev/nvidia0"),
        ),
        case(
            "the MIG nodes' directory as a volume",
            r#"mkdir -p $DRIVER/dev/nvidia-caps; mounted "{\"destination\":\"/dev/nvidia-caps\",\"source\":\"$DRIVER/dev/nvidia-caps\",\"options\":[\"bind\"]}"; up"#,
            Refused("/dev/nvidia-caps"),
        ),
        case(
            "a volume over the MPS directory",
            r#"mkdir v; mounted "{\"destination\":\"/run/sublet/mps\",\"source\":\"$PWD/v\",\"options\":[\"bind\"]}"; up"#,
            QUARTER,
        ),
        case(
            "the same by way of ..",
            r#"mkdir v; mounted "{\"destination\":\"/proc/../run/sublet/./mps\",\"source\":\"$PWD/v\",\"options\":[\"bind\"]}"; up"#,
            QUARTER,
        ),
        case(
            "a volume over /run",
            r#"mkdir v; mounted "{\"destination\":\"/run\",\"source\":\"$PWD/v\",\"options\":[\"bind\"]}"; up"#,
            QUARTER,
        ),
        case(
            "a volume over /tmp",
            r#"mkdir v; mounted "{\"destination\":\"/tmp\",\"source\":\"$PWD/v\",\"options\":[\"bind\"]}"; up && [ -z "$(ls -A v)" ]"#,
            QUARTER,
        ),
        case(
            "an empty volume over the libraries",
            r#"mkdir v; mounted "{\"destination\":\"/usr/lib\",\"source\":\"$PWD/v\",\"options\":[\"bind\",\"ro\"]}"; up"#,
            QUARTER,
        ),
        case(
            "/dev/null over libcuda",
            r#"mounted "{\"destination\":\"/lib/$(uname -m)-linux-gnu/libcuda.so.1\",\"source\":\"/dev/null\",\"options\":[\"bind\"]}"; up"#,
            QUARTER,
        ),
    ]
}

/// Masks, variables and other hooks.
fn hiding() -> Vec<Case> {
    vec![
        case(
            "the MPS directories are masked",
            r#"swap '"maskedPaths":[' '"maskedPaths":["/run/sublet/mps","/tmp/nvidia-mps",'; up"#,
            Refused("/run/sublet/mps"),
        ),
        case(
            "a parent of them is masked",
            r#"swap '"maskedPaths":[' '"maskedPaths":["/run","/tmp",'; up"#,
            Refused("mask"),
        ),
        // No limit depends on them. A user who masks them only hides the GPU from the container.
        case(
            "a node is masked: its user's own loss",
            r#"swap '"maskedPaths":[' '"maskedPaths":["/dev/nvidiactl",'; up"#,
            Still,
        ),
        case(
            "libcuda is masked: its user's own loss",
            r#"swap '"maskedPaths":[' "\"maskedPaths\":[\"/lib/$(uname -m)-linux-gnu/libcuda.so.1\","; up"#,
            Still,
        ),
        case(
            "other GPUs, another daemon, no limits by the environment",
            r#"variables '"CUDA_VISIBLE_DEVICES=7","CUDA_MPS_PIPE_DIRECTORY=/nowhere","CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage","CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"'; up"#,
            QUARTER,
        ),
        case(
            "the same twice",
            r#"variables '"CUDA_MPS_PIPE_DIRECTORY=/nowhere","CUDA_MPS_PIPE_DIRECTORY=/elsewhere","CUDA_MPS_PIPE_DIRECTORY="'; up"#,
            QUARTER,
        ),
        case("a variable without a value", r#"variables '"ALONE","="'; up"#, Still),
        case("a variable that is a number", "variables '7'; up", Refused("process.env")),
        case("NVIDIA_VISIBLE_DEVICES=all", r#"variables '"NVIDIA_VISIBLE_DEVICES=all"'; up"#, QUARTER),
        case(
            "another hook that fails",
            r#"swap '"linux":{' '"hooks":{"prestart":[{"path":"/bin/false"}]},"linux":{'; up"#,
            Fails("hook"),
        ),
        case("the program is not in the image", "swap /usr/bin/probe /usr/bin/nothing; up", Fails("nothing")),
        case(
            "a mount that cannot be",
            r#"mounted '{"destination":"/x","type":"bind","source":"/nowhere","options":["bind"]}'; up"#,
            Fails("/nowhere"),
        ),
    ]
}

/// The image and the namespaces.
fn image() -> Vec<Case> {
    vec![
        case(
            "a terminal, and nobody takes it",
            r#"swap '"cwd":"/"' '"cwd":"/","terminal":true'; up"#,
            Fails(""),
        ),
        case(
            "a root that cannot be written",
            r#"swap '"path":"rootfs"' '"path":"rootfs","readonly":true'; up"#,
            QUARTER,
        ),
        case(
            "the root is not there",
            r#"swap '"path":"rootfs"' '"path":"nowhere"'; up"#,
            Refused("root.path"),
        ),
        case(
            "libcuda.so.1 is a directory in the image",
            "mkdir $BUNDLE/rootfs/lib/$(uname -m)-linux-gnu/libcuda.so.1; up",
            Refused("libcuda.so.1"),
        ),
        case(
            "/run leads to the host's / in the image",
            "rmdir $BUNDLE/rootfs/run; ln -s /proc/1/root $BUNDLE/rootfs/run; up; [ ! -e /run/sublet/mps/control ]",
            Still,
        ),
        case("no mount namespace", r#"swap '{"type":"mount"},' ''; up"#, Refused("mount namespace")),
        case("the host's PID namespace", r#"swap '{"type":"pid"},' ''; up"#, QUARTER),
        case("a user without root", r#"swap '"uid":0,"gid":0' '"uid":1000,"gid":1000'; up"#, QUARTER),
    ]
}
