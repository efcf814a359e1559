//! `checkpoint` and `restore` with the real criu: through the shim, without the shim, and by Podman with only the hook.

use super::frame::Expect::{self, Fails, Refused, Works};
use super::frame::{Case, QUARTER, case};

const NO_RESTORE: Expect = Refused("restore of a container with a GPU share is not possible");

/// Plain bundles: `p` requests no share, `q` requests one.
pub fn bundles() -> Vec<Case> {
    vec![
        case("without a share", "runs p; save p; restore p p; alive p", Works("running")),
        case("without a share, under another id", "runs p; save p; restore p r; alive r", Works("running")),
        case(
            "without a share, in another bundle",
            "runs p; save p; cp -al $DIR/bundles/p $DIR/bundles/r; restore r p; alive p; rm -r $DIR/bundles/r",
            Works("running"),
        ),
        case("without a share, --leave-running", "runs p; save --leave-running p; alive p", Works("running")),
        case("without a share, --pre-dump", "runs p; save --pre-dump p; alive p", Works("running")),
        case(
            "the image of one without a share, whose config.json asks for one now",
            r#"runs p; save p; swap '"annotations":{' '"annotations":{"sublet.sm":"25"' $DIR/bundles/p/config.json; restore p p"#,
            NO_RESTORE,
        ),
        case("the same image in the bundle of one with a share", "runs p; save p; restore q p", NO_RESTORE),
        case("with a share", "runs q; save q; runtime exec --process p.json q", QUARTER),
        case("with a share, behind the shim", "runs q; below save q", Fails("")),
        case(
            "with a share, behind the shim: it runs on",
            "runs q; below save q; runtime exec --process p.json q",
            QUARTER,
        ),
        case(
            "with a share, behind the shim, --leave-running",
            "runs q; below save --leave-running q; runtime exec --process p.json q",
            QUARTER,
        ),
        case("an image of one with a share is not restored", "imaged; restore q q", NO_RESTORE),
        case("nor under another id", "imaged; restore q r", NO_RESTORE),
        case("its lease has ended with it", "imaged; leases", Works("2")),
        case(
            "nor while its share is another's",
            r#"imaged; cp -al $DIR/bundles/q o; cp --remove-destination $DIR/bundles/p/config.json o; swap '"annotations":{' '"annotations":{"sublet.sm":"50"' o/config.json; runtime create --bundle o o </dev/null >/dev/null 2>&1; r=$(leases); restore q q 2>err; grep -q 'not possible' err && echo $r, $(leases)"#,
            Works("3, 3"),
        ),
        case("nor behind the shim", "imaged; below restore q q", Fails("")),
        case(
            "with its keys taken away, which root alone can, it is no container of ours",
            r#"imaged; swap '"annotations":{' '"annotations":{},"x":{' $DIR/bundles/q/config.json; restore q q; alive q"#,
            Works("running"),
        ),
    ]
}

/// Podman, which calls the low-level runtime for it.
pub fn podman() -> Vec<Case> {
    vec![
        case(
            "without a share",
            "long; podman container checkpoint c && podman container restore c && podman inspect -f {{.State.Status}} c",
            Works("running"),
        ),
        case("with a share", "long $share; podman container checkpoint c", Fails("checkpoint")),
        case(
            "with a share: it runs on",
            "long $share; podman container checkpoint c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "with a share, --leave-running",
            "long $share; podman container checkpoint -R c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "with a share, --pre-checkpoint",
            "long $share; podman container checkpoint -P c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "with a share, to a file",
            "long $share; podman container checkpoint -e $PWD/e.tar c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "a program at work on the GPU",
            "hold; podman container checkpoint c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "started again after a checkpoint that was refused",
            "long $share; podman container checkpoint c; podman restart -t0 c >/dev/null; podman container checkpoint c; podman exec c probe info",
            QUARTER,
        ),
        case(
            "by the shim",
            "podman --runtime sublet run -d --name c $share probe sleep 60 >/dev/null; podman --runtime sublet container checkpoint c",
            Fails("checkpoint of a container with a GPU share is not possible"),
        ),
        case("an image of one with a share", "imaged; podman container restore c", Fails("")),
        case("its lease has ended with it", "imaged; leases", Works("1")),
        case(
            "it is started instead, with a share of its own",
            "imaged; podman start c >/dev/null && podman exec c probe info",
            QUARTER,
        ),
        case(
            "an image from a file",
            "imaged -e $PWD/e.tar; podman rm -f c >/dev/null; podman container restore -i $PWD/e.tar -n d",
            Fails(""),
        ),
    ]
}
