//! The shim: hostile and damaged input for `create`.

use super::around;
use super::frame::Expect::{Fails, Plain, Refused, Still};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [spec(), keys(), fighting(), hiding(), image(), around::cases()].into_iter().flatten().collect()
}

/// config.json files that no engine writes.
fn spec() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
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
        case("a second value behind it", "echo '{}' >>$BUNDLE/config.json; up", Refused("cannot edit")),
        case("a NUL behind it", r"printf '\0' >>$BUNDLE/config.json; up", Refused("cannot edit")),
        case(
            "a byte order mark before it",
            r"sed -i '1s/^/\xef\xbb\xbf/' $BUNDLE/config.json; up",
            Refused("cannot edit"),
        ),
        case("UTF-16", "iconv -t UTF-16 <$BUNDLE/config.json >u; cp u $BUNDLE/config.json; up", Fails("")),
        case(
            "our key twice",
            r#"annotate '"sublet.sm":"25","sublet.sm":"100"'; up"#,
            Refused("occurs twice"),
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
    ]
}

/// Keys that are nearly sublet's, and values that do not exist.
fn keys() -> Vec<Case> {
    vec![
        case("a key with a blank behind it", r#"annotate '"sublet.sm ":"25"'; up"#, Refused("sublet.sm")),
        case(
            "somebody else's key with our name in it",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"org.sublet.x":"sublet.sm"'; up"#,
            Plain,
        ),
        case(
            "99999999999999999999 GPUs",
            r#"annotate '"sublet.gpu":"any:99999999999999999999"'; up"#,
            Refused("sublet.gpu"),
        ),
        case(
            "more processes than MPS has clients",
            r#"annotate '"sublet.sm":"25","sublet.processes":"49"'; up"#,
            Refused("at most 48 MPS clients"),
        ),
        case(
            "the whole GPU beside a neighbour",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' '"sublet.mode":"exclusive"'; up"#,
            Refused("no room"),
        ),
    ]
}

/// Entries of the spec that conflict with sublet's.
fn fighting() -> Vec<Case> {
    vec![
        case("no rule that denies the rest", r#"swap '{"allow":false,"access":"rwm"},' ''; up"#, QUARTER),
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
        case("the host's PID namespace", r#"swap '{"type":"pid"},' ''; up"#, QUARTER),
        case("a user without root", r#"swap '"uid":0,"gid":0' '"uid":1000,"gid":1000'; up"#, QUARTER),
    ]
}
