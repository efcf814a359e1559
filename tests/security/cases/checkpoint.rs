//! `checkpoint` and `restore`: GPU state cannot be saved, and a share cannot be restored.

use sublet_e2e::Engine;

use super::frame::Expect::{self, Fails, Refused, Still, Works};
use super::frame::{Case, case};

const NO_CHECKPOINT: Expect = Refused("checkpoint of a container with a GPU share is not possible");
const NO_RESTORE: Expect = Refused("restore of a container with a GPU share is not possible");

pub fn cases() -> Vec<Case> {
    [checkpoints(), restores()].into_iter().flatten().collect()
}

/// Of a running container.
fn checkpoints() -> Vec<Case> {
    vec![
        case(
            "--leave-running, to an image of its own",
            "runtime checkpoint --image-path $PWD/i --work-path $PWD/w --leave-running c; r=$?; [ ! -e i ] && exit $r",
            NO_CHECKPOINT,
        ),
        case(
            "--image-path=DIR, and TCP",
            "runtime checkpoint --image-path=$PWD/i --tcp-established c",
            NO_CHECKPOINT,
        ),
        case("--pre-dump", "runtime checkpoint --pre-dump --image-path $PWD/i c", NO_CHECKPOINT),
        case(
            "while it is paused",
            "runtime pause c; runtime checkpoint c; r=$?; runtime resume c; exit $r",
            NO_CHECKPOINT,
        ),
        case("its program has ended", "runtime kill c KILL; sleep 0.3; runtime checkpoint c", Fails("")),
        case(
            "no ledger and no copy",
            "rm $STATE/ledger.json $STATE/ledger.json.copy; runtime checkpoint c",
            NO_CHECKPOINT,
        ),
        case(
            "the ledger is noise, as its copy",
            "for f in ledger.json ledger.json.copy; do head -c 4k /dev/urandom >$STATE/$f; done; runtime checkpoint c",
            NO_CHECKPOINT,
        ),
        case("a broken configuration", "echo '[limits' >>$CONFIG; runtime checkpoint c", NO_CHECKPOINT),
        case("no configuration", "aside $CONFIG; runtime checkpoint c", NO_CHECKPOINT),
        case(
            "the daemon is killed",
            "end_daemons; runtime checkpoint c; r=$?; runtime exec --process p.json c >o; exit $r",
            NO_CHECKPOINT,
        )
        .harming(),
        case("the daemon is stopped", "stop_daemons; runtime checkpoint c", NO_CHECKPOINT).harming(),
        case(
            "its config.json is gone",
            "rm $BUNDLE/config.json; runtime checkpoint c",
            lost("it has a share of a GPU"),
        ),
        case(
            "its config.json is another's",
            "cp $DIR/bundles/p/config.json $BUNDLE; runtime checkpoint c",
            lost("no longer says so"),
        ),
        case("nobody", "runtime checkpoint nobody", Fails("")),
        case("no id", "runtime checkpoint", Fails("")),
        case("an id that leads to it", "runtime checkpoint ./c", Fails("")),
        // With criu the runtime makes the checkpoint and ends the container.
        case(
            "a container without keys of ours is the runtime's business",
            "runtime create --bundle $DIR/bundles/p p </dev/null >/dev/null 2>&1; runtime start p; runtime checkpoint --image-path $PWD/i p",
            Still,
        ),
    ]
}

/// Of a container that is to be created.
fn restores() -> Vec<Case> {
    vec![
        case(
            "the bundle of a container that runs is restored under another id",
            "runtime restore --image-path $PWD --bundle $BUNDLE --detach d",
            NO_RESTORE,
        ),
        case(
            "over the container that runs",
            "runtime restore --image-path $PWD --bundle $BUNDLE c; r=$?; runtime exec --process p.json c >o && exit $r",
            NO_RESTORE,
        ),
        case(
            "the neighbour's bundle",
            "runtime restore --image-path $PWD --bundle $DIR/bundles/neighbour n",
            NO_RESTORE,
        ),
        case(
            "a bundle with a misspelt key",
            r#"swap '"sublet.sm"' '"sublet.smm"' $DIR/bundles/q/config.json; runtime restore --image-path $PWD --bundle $DIR/bundles/q q"#,
            Refused(""),
        ),
        case(
            "a bundle that is not there",
            "runtime restore --image-path $PWD --bundle $PWD/nowhere q",
            Fails("nowhere"),
        ),
        case(
            "a config.json that is cut off",
            "truncate -s -20 $DIR/bundles/q/config.json; runtime restore --image-path $PWD --bundle $DIR/bundles/q q",
            Refused("cannot edit"),
        ),
        case(
            "a bundle with a share, and all that is ours is broken",
            "echo '[' >>$CONFIG; runtime restore --image-path $PWD --bundle $DIR/bundles/q q",
            Refused(""),
        ),
        case(
            "a bundle without keys of ours, and no image",
            "runtime restore --image-path $PWD/none --bundle $DIR/bundles/p p",
            Fails(""),
        ),
        case(
            "no lease is taken on the way",
            "runtime restore --image-path $PWD --bundle $DIR/bundles/q q 2>/dev/null; sublet lease list --format json | grep -c container_id",
            Works("2"),
        ),
    ]
}

/// runc reads the bundle's config.json again, crun reads its own copy.
fn lost(words: &'static str) -> Expect {
    match Engine::chosen() {
        Engine::Runc => Refused(words),
        Engine::Crun => NO_CHECKPOINT,
    }
}
