//! Clocks with the real faketime. Its library is loaded into every dynamic program of a command, and also changes waits
//! and the monotonic clock. The shim and the hook are static as shipped, or dynamic (tests/jobs).

use super::frame::Expect::{Fails, Refused, Still, Works};
use super::frame::{Case, QUARTER, case};

/// The same cases for a clock.
macro_rules! at {
    ($clock:literal) => {
        [
            case(
                concat!("a whole life: ", $clock),
                concat!("fake '", $clock, "' bash -c 'up >o; runtime exec c probe info; runtime kill c KILL; sleep 0.3; runtime delete c' && [ $(leases) = 1 ]"),
                Works("\"sm\":32"),
            ),
            case(
                concat!("create and start, and now: ", $clock),
                concat!("fake '", $clock, "' bash -c up >/dev/null; sublet gc; runtime exec c probe info"),
                QUARTER,
            ),
            case(
                concat!("gc, status, list, doctor beside what runs: ", $clock),
                concat!("up >o; fake '", $clock, "' bash -c 'sublet gc; sublet status; sublet lease list; sublet doctor' >o2; leases; runtime exec c probe info"),
                Works("2"),
            ),
            case(
                concat!("delete: ", $clock),
                concat!("up >o; fake '", $clock, "' sublet-runtime --root $ROOT delete --force c; leases"),
                Works("1"),
            ),
            case(
                concat!("refresh, and a container after it: ", $clock),
                concat!("fake '", $clock, "' sublet refresh >/dev/null; up"),
                QUARTER,
            ),
            case(
                concat!("a daemon, by hand: ", $clock),
                concat!("end_daemons; fake '", $clock, "' sublet mps start $(key) >o; up"),
                QUARTER,
            )
            .harming(),
            case(
                concat!("a daemon, by a container: ", $clock),
                concat!("end_daemons; fake '", $clock, "' bash -c up"),
                QUARTER,
            )
            .harming(),
        ]
    };
}

/// Plain bundles.
pub fn bundles() -> Vec<Case> {
    let clocks = [
        at!("@1970-01-02 00:00:00"),
        at!("@2000-01-01 00:00:00"),
        at!("@2037-12-31 23:59:50"),
        at!("@2200-01-01 00:00:00"),
        at!("@9999-12-31 23:59:50"),
        at!("+0 x0.1"),
    ];
    let jumps = [
        case(
            "the clock comes to a dynamic shim, and to no static one",
            "fake '@2200-01-01 00:00:00' bash -c up >o; ! ldd $(command -v sublet-runtime) | grep -q libc.so; dynamic=$?; [ $(sublet lease list --format json | grep -c '\"since\": *\"2200') = $dynamic ]",
            Works(""),
        ),
        case(
            "one command after the other in another century",
            "up >o; for y in 1970 9999 2000 2200 2037; do fake \"@$y-01-02 00:00:00\" bash -c 'sublet gc; sublet refresh; sublet status' >>o2; done; leases; runtime exec c probe info",
            Works("2"),
        ),
        case(
            "made in 9999, ended in 1970",
            "fake '@9999-01-01 00:00:00' bash -c up >o; fake '@1970-01-02 00:00:00' bash -c 'sublet gc; runtime delete --force c'; leases",
            Works("1"),
        ),
        case(
            "made in 1970, and gc in 9999",
            "fake '@1970-01-02 00:00:00' bash -c up >o; fake '@9999-01-01 00:00:00' sublet gc; runtime exec c probe info",
            QUARTER,
        ),
        case(
            "made in 9999 and not started, and gc in 1970 and now",
            "fake '@9999-01-01 00:00:00' bash -c create; fake '@1970-01-02 00:00:00' sublet gc; sublet gc; runtime start c; said",
            QUARTER,
        ),
        case(
            "room is waited for, a thousand times as fast",
            r#"annotate '"sublet.sm":"95","sublet.wait":"1s"'; fake '+0 x1000' bash -c create"#,
            Refused("no room"),
        ),
        case(
            "somebody keeps the lock, a thousand times as fast",
            "flock $STATE/lock sh -c ': >held; sleep 2' & until [ -e held ]; do sleep 0.01; done; fake '+0 x1000' bash -c up; wait; sublet gc",
            Still,
        ),
        case(
            "a whole life, a thousand times as fast: whoever answers in time is too late",
            "fake '+0 x1000' bash -c 'up >o; runtime exec c probe info; runtime kill c KILL; runtime delete --force c'; leases",
            Works("1"),
        ),
        case(
            "a daemon by a container, a thousand times as fast",
            "end_daemons; fake '+0 x1000' bash -c up",
            Still,
        )
        .harming(),
        case(
            "gc, status, list, doctor beside what runs, a thousand times as fast",
            "up >o; fake '+0 x1000' bash -c 'sublet gc; sublet status; sublet lease list; sublet doctor' >o2; leases; runtime exec c probe info",
            Works("2"),
        ),
        case(
            "delete, a thousand times as fast",
            "up >o; fake '+0 x1000' sublet-runtime --root $ROOT delete --force c; leases",
            Works("1"),
        ),
        case(
            "serve a thousand times as fast, and a container beside it",
            "fake '+0 x1000' timeout 3 sublet serve >/dev/null 2>&1 & sleep 1; up; r=$?; wait; exit $r",
            QUARTER,
        ),
        case(
            "serve in 1970, and a container that ends beside it",
            "fake '@1970-01-02 00:00:00' timeout 3 sublet serve >/dev/null 2>&1 & sleep 1; up >o; runtime delete --force c; leases; wait",
            Works("1"),
        ),
        case(
            "the library alone is nothing to the shim",
            "LD_PRELOAD=/nowhere/libfaketime.so.1 FAKETIME=+10y up",
            QUARTER,
        ),
        case("a clock that is none", "fake 'no such time' bash -c up; exit 1", Fails("")),
    ];
    clocks.into_iter().flatten().chain(jumps).collect()
}

/// The same for Podman.
macro_rules! podman_at {
    ($clock:literal) => {
        [
            case(
                concat!("all of it: ", $clock),
                concat!(
                    "hooked '",
                    $clock,
                    "' '",
                    $clock,
                    "'; fake '",
                    $clock,
                    "' podman run --rm --name c $share probe probe info"
                ),
                QUARTER,
            ),
            case(
                concat!("it is made now and removed: ", $clock),
                concat!(
                    "rest; hooked '",
                    $clock,
                    "' '",
                    $clock,
                    "'; fake '",
                    $clock,
                    "' podman rm -f -t0 c >o; leases"
                ),
                Works("1"),
            ),
        ]
    };
}

/// Podman, its hook included.
pub fn podman() -> Vec<Case> {
    let clocks = [
        podman_at!("@1970-01-02 00:00:00"),
        podman_at!("@2000-01-01 00:00:00"),
        podman_at!("@2037-12-31 23:59:50"),
        podman_at!("@2200-01-01 00:00:00"),
        podman_at!("@9999-12-31 23:59:50"),
    ];
    let jumps = [
        case(
            "the hook's first stage in 2000, the next in 2200",
            "hooked '@2000-01-01 00:00:00' '@2200-01-01 00:00:00'; up",
            QUARTER,
        ),
        case(
            "the hook's first stage in 2200, the next in 1970",
            "hooked '@2200-01-01 00:00:00' '@1970-01-02 00:00:00'; up",
            QUARTER,
        ),
        case(
            "all of it a thousand times as fast: whoever answers in time is too late",
            "hooked '+0 x1000' '+0 x1000'; fake '+0 x1000' podman run --rm --name c $share probe probe info",
            Still,
        ),
        case(
            "the clock comes to a dynamic hook, from a file: its environment it forgets",
            "hooked '@2000-01-01 00:00:00' '@2200-01-01 00:00:00'; rest; cat /etc/faketimerc; sublet lease list --format json | grep -o '2000-01-01'",
            Works("@2200-01-01 00:00:00\n2000-01-01"),
        ),
        case(
            "gc in other centuries beside what runs",
            "rest; for y in 1970 9999; do fake \"@$y-01-02 00:00:00\" sublet gc; done; podman exec c probe info",
            QUARTER,
        ),
    ];
    clocks.into_iter().flatten().chain(jumps).collect()
}
