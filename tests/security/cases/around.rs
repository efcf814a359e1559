//! The shim: `create` and later commands, while files and programs around it are broken, missing or owned by others.

use super::frame::Expect::{Fails, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [state(), configuration(), daemon(), names(), process()].into_iter().flatten().collect()
}

/// The state directory and its files.
fn state() -> Vec<Case> {
    vec![
        case(
            "a link to itself elsewhere",
            "aside $STATE; ln -s $STATE.aside $STATE; up",
            Refused("is no directory"),
        ),
        case(
            "a link to nowhere",
            "aside $STATE; ln -s /nowhere/at/all $STATE; up",
            Refused("state directory"),
        ),
        case("a pipe", "aside $STATE; mkfifo $STATE; up", Refused("is no directory")),
        case("without a mode", "chmod 0 $STATE; up", QUARTER),
        case("gone, while the neighbour runs", "aside $STATE; up", Refused("sublet gc --rebuild")),
        case("the lock is a pipe", "aside $STATE/lock; mkfifo $STATE/lock; up", Refused("lock")),
        case(
            "the lock is a link to somebody's file",
            "aside $STATE/lock; cp /etc/passwd p; ln -s $PWD/p $STATE/lock; up; r=$?; cmp p /etc/passwd && exit $r",
            Refused("symbolic link"),
        ),
        case("the lock is a directory", "aside $STATE/lock; mkdir $STATE/lock; up", Refused("lock")),
        case(
            "somebody keeps the lock",
            "flock $STATE/lock sh -c ': >held; sleep 7' & until [ -e held ]; do sleep 0.01; done; up",
            Refused("was not free for"),
        ),
        case("the ledger is gone", "rm $STATE/ledger.json; up", QUARTER),
        case(
            "ledger and copy are noise",
            "for f in ledger.json ledger.json.copy; do head -c 4k /dev/urandom >$STATE/$f; done; up",
            QUARTER,
        ),
        case(
            "the ledger is of another boot",
            r#"sed -i 's|"boot_id":"[^"]*"|"boot_id":"00000000-0000-4000-8000-000000000000"|' $STATE/ledger.json; up"#,
            QUARTER,
        ),
        case(
            "the ledger is a pipe",
            "aside $STATE/ledger.json; mkfifo $STATE/ledger.json; up; r=$?; runtime delete --force c; exit $r",
            QUARTER,
        ),
        case(
            "the ledger leads to /dev/zero",
            "aside $STATE/ledger.json; ln -s /dev/zero $STATE/ledger.json; up; r=$?; runtime delete --force c; exit $r",
            QUARTER,
        ),
        case(
            "the copy is a directory",
            "rm $STATE/ledger.json.copy; mkdir $STATE/ledger.json.copy; up; r=$?; rmdir $STATE/ledger.json.copy; exit $r",
            Refused("Is a directory"),
        ),
        case(
            "the inventory is a pipe",
            "rm $STATE/inventory.json; mkfifo $STATE/inventory.json; up",
            QUARTER,
        ),
        case(
            "the inventory is a directory",
            "rm $STATE/inventory.json; mkdir $STATE/inventory.json; up; r=$?; rmdir $STATE/inventory.json; exit $r",
            Refused("inventory.json"),
        ),
    ]
}

/// config.toml, the low-level runtime and the driver.
fn configuration() -> Vec<Case> {
    vec![
        case("missing", "aside $CONFIG; up", Refused("config.toml")),
        case("a pipe that nobody writes to", "aside $CONFIG; mkfifo $CONFIG; up", Refused("config.toml")),
        case("leads to /dev/zero", "aside $CONFIG; ln -s /dev/zero $CONFIG; up", Refused("config.toml")),
        case(
            "a pipe, without keys of ours",
            r#"aside $CONFIG; mkfifo $CONFIG; swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; up"#,
            Fails("config.toml"),
        ),
        case(
            "the runtime is the shim itself",
            r#"sed -i "s|^low_level.*|low_level = [\"$(command -v sublet-runtime)\"]|" $CONFIG; up"#,
            Refused("itself"),
        ),
        case(
            "a relative state directory",
            r#"sed -i 's|^state_dir.*|state_dir = "run"|' $CONFIG; up"#,
            Refused("state_dir"),
        ),
        case(
            "a state directory with .. in it",
            r#"sed -i 's|^state_dir = "\(.*\)"|state_dir = "\1/../run"|' $CONFIG; up"#,
            Still,
        ),
        case(
            "features with a broken configuration",
            "echo '[' >>$CONFIG; runtime features",
            Works("ociVersionMax"),
        ),
        case(
            "libcuda is gone since the refresh",
            "aside $(readlink -f $DRIVER/usr/lib/$(uname -m)-linux-gnu/libcuda.so.1); up",
            Refused("libcuda"),
        ),
    ]
}

/// The MPS daemon.
fn daemon() -> Vec<Case> {
    vec![
        case("killed", "end_daemons; up", QUARTER).harming(),
        case("killed, without its program", "aside $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; up", Refused("nvidia-cuda-mps-control")).harming(),
        case("killed, and its program ends at once", "aside $DRIVER/usr/bin/nvidia-cuda-mps-control; cp /bin/false $DRIVER/usr/bin/nvidia-cuda-mps-control; end_daemons; up", Refused("nvidia-cuda-mps-control")).harming(),
        case("killed, and its server ends at once", "aside $DRIVER/usr/bin/nvidia-cuda-mps-server; cp /bin/false $DRIVER/usr/bin/nvidia-cuda-mps-server; end_daemons; up", Refused("cannot start an MPS server")).harming(),
        case("killed, and its program hangs", r#"aside $DRIVER/usr/bin/nvidia-cuda-mps-control; printf '#!/bin/sh\nexec sleep 20\n' >$DRIVER/usr/bin/nvidia-cuda-mps-control; chmod 755 $DRIVER/usr/bin/nvidia-cuda-mps-control; printf '[mps]\nstart_timeout = "1s"\n' >>$CONFIG; end_daemons; up"#, Refused("nvidia-cuda-mps-control")).harming(),
        case("its directory is gone", "rm -r $STATE/mps/*/pipe; up", Still).harming(),
        case("what containers see of it is gone", "rm $STATE/mps/*/public/control; up", QUARTER).harming(),
        case("its directory is a file", "end_daemons; aside $STATE/mps; : >$STATE/mps; up", Refused("mps")).harming(),
        case("anybody may write its directory", "end_daemons; chmod 0777 $STATE/mps $STATE/mps/*; up", Still).harming(),
    ]
}

/// Ids, bundles, roots.
fn names() -> Vec<Case> {
    vec![
        case("the neighbour's id", "create neighbour", Fails("exist")),
        case("an id of 1000 letters", "create $(printf 'a%.0s' {1..1000})", Fails("")),
        case("an id that leads elsewhere", "create ../../elsewhere", Fails("")),
        case("an empty id", "runtime create --bundle $BUNDLE ''", Fails("")),
        case("no id", "runtime create --bundle $BUNDLE", Fails("")),
        case("an id of two lines", r"create $'c\nd'", Still),
        case("the bundle by a link", "ln -s $BUNDLE l; BUNDLE=$PWD/l up", QUARTER),
        case("the bundle by a relative path", "cd $DIR/bundles; BUNDLE=c up", QUARTER),
        case(
            "the bundle is the working directory",
            "cd $BUNDLE; runtime create c </dev/null >out 2>err; runtime start c; said",
            QUARTER,
        ),
        case("the root by a link", "ln -s $ROOT r; ROOT=$PWD/r up", QUARTER),
        case("a root of its own", "ROOT=$PWD/new/root; up; r=$?; runtime delete --force c; exit $r", QUARTER),
        case("the root is a file", ": >f; ROOT=$PWD/f; create", Fails("")),
        case("two creates at once, of one container", "create & create; wait", Still),
        case("two creates at once, of two containers on one bundle", "create a & create b; wait", Still),
        case("a delete while it is made", "create & sleep 0.03; runtime delete --force c; wait", Still),
    ]
}

/// The shim's process.
fn process() -> Vec<Case> {
    vec![
        case(
            "SIGTERM on the way",
            "timeout -s TERM 0.01 sublet-runtime --root $ROOT create --bundle $BUNDLE c",
            Still,
        ),
        case(
            "it may write no file",
            "(ulimit -f 0; sublet-runtime --root $ROOT create --bundle $BUNDLE c) >/dev/null 2>&1 </dev/null",
            Fails(""),
        ),
        case("no more processes", "(ulimit -u 1; up)", Still),
        case("64 MiB of addresses", "(ulimit -v 65536; create)", Still),
        case("umask 0777, and a daemon to start", "end_daemons; umask 0777; up", QUARTER).harming(),
        case(
            "umask 0, and a daemon to start",
            "end_daemons; umask 0; : >t; up >o && ! find $STATE -newer t -perm -2 ! -type s ! -type l | grep . >&2",
            Works(""),
        )
        .harming(),
        case(
            "standard input, output and error are closed",
            "sublet-runtime --root $ROOT create --bundle $BUNDLE c <&- >&- 2>&-; runtime start c; runtime exec c probe info",
            QUARTER,
        ),
        case("SIGPIPE and SIGCHLD are ignored", "trap '' PIPE CHLD; up", QUARTER),
        case("the working directory is deleted", "mkdir d; cd d; rmdir ../d; up", QUARTER),
        case(
            "PATH is empty",
            "p=$(command -v sublet-runtime); PATH= $p --root $ROOT create --bundle $BUNDLE c </dev/null >$BUNDLE/out 2>$BUNDLE/err; r=$?; cat $BUNDLE/err >&2; [ $r = 0 ] && runtime start c && said",
            QUARTER,
        ),
        case(
            "LD_PRELOAD of nothing, a TMPDIR nowhere, Rust's variables",
            "LD_PRELOAD=/nowhere.so TMPDIR=/nowhere RUST_LOG=trace RUST_BACKTRACE=full up",
            QUARTER,
        ),
        case("a variable of 100,000 letters", "export BIG=$(printf 'x%.0s' {1..100000}); up", QUARTER),
        case(
            "delete with the ledger gone and the daemon killed",
            "up >o; end_daemons; rm $STATE/ledger.json $STATE/ledger.json.copy; runtime delete --force c",
            Works(""),
        )
        .harming(),
        case(
            "delete with a state directory that is read-only",
            "up >o; alone 'mount --bind $STATE $STATE; mount -o remount,bind,ro $STATE; runtime delete --force c'",
            Works(""),
        ),
        case("delete with the bundle gone", "up >o; rm -r $BUNDLE; runtime delete --force c", Works("")),
        case("kill of nobody", "runtime kill nobody KILL", Fails("")),
    ]
}
