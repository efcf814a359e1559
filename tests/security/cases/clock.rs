//! Clocks: a clock that is years off or before the epoch, times that were recorded with such a clock, and time
//! namespaces with another boot clock.

use super::frame::Expect::{Fails, Refused, Works};
use super::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    [commands(), written(), namespaces()].into_iter().flatten().collect()
}

/// Ordinary commands with a wrong clock.
fn commands() -> Vec<Case> {
    vec![
        case("status, before the epoch", "at -80 sublet status", Works("serving")),
        case(
            "the list of leases, before the epoch",
            "at -80 sublet lease list --format json",
            Works("neighbour"),
        ),
        case("gc, before the epoch", "at -80 sublet gc; leases", Works("1")),
        case(
            "refresh, before the epoch, and a container after it",
            "at -80 sublet refresh >/dev/null; up",
            QUARTER,
        ),
        case(
            "refresh, years apart, twice",
            "at +10 sublet refresh >/dev/null; at -10 sublet refresh >/dev/null; up",
            QUARTER,
        ),
        case(
            "a daemon is started before the epoch",
            "end_daemons; at -80 sublet mps start $(key) >/dev/null; up",
            QUARTER,
        )
        .harming(),
        case(
            "wait, ten years on, is over in time",
            "at +10 timeout 5 sublet wait --annotation sublet.sm=95 --timeout 1s",
            Fails("no room"),
        ),
        case(
            "wait, before the epoch, for what is free",
            "at -80 timeout 5 sublet wait --annotation sublet.sm=25 --timeout 1s",
            Works(""),
        ),
        case("explain, ten years on", "at +10 sublet explain --annotation sublet.sm=25", Works("")),
        case(
            "doctor says that the clock is wrong",
            "at -80 sublet doctor 2>&1 | grep -o 'the clock is before 2025'",
            Works("before 2025"),
        ),
        case(
            "serve, before the epoch, and a container beside it",
            "at -80 timeout 4 sublet serve >/dev/null 2>&1 & sleep 1; up; r=$?; wait; exit $r",
            QUARTER,
        ),
        case(
            "serve, ten years on, and a container that ends beside it",
            "at +10 timeout 4 sublet serve >/dev/null 2>&1 & sleep 1; up >o; runtime delete --force c; leases; wait",
            Works("1"),
        ),
    ]
}

/// State that was written with a wrong clock.
fn written() -> Vec<Case> {
    vec![
        case("the ledger's times are ten years ahead", "aged +315360000; up", QUARTER),
        case("the ledger's times are ten years back", "aged -315360000; up", QUARTER),
        case(
            "the ledger's times are ten years ahead, and the daemon is stopped",
            "aged +315360000; stop_daemons; up",
            Refused("does not answer"),
        )
        .harming(),
        case(
            "the ledger's times are ten years ahead, and the daemon is killed",
            "aged +315360000; end_daemons; up",
            QUARTER,
        )
        .harming(),
        case(
            "a lease since the epoch",
            "since 0; sublet status; sublet lease list --format json",
            Works("1970-01-01T00:00:00Z"),
        ),
        case(
            "a lease since the year 10,000",
            "since 253402300800; sublet status && sublet lease list --format json",
            Works("neighbour"),
        ),
        case(
            "a lease since the end of all times",
            "since 18446744073709551615; sublet status && sublet lease list --format json",
            Works("neighbour"),
        ),
        case(
            "a refusal of the year 10,000",
            r#"annotate '"sublet.sm":"95"'; up 2>/dev/null; sed -i 's/"time":[0-9]*/"time":253402300800/' $STATE/refusals.json; sublet status --last-error"#,
            Works("no room"),
        ),
        case(
            "a refusal of the end of all times",
            r#"annotate '"sublet.sm":"95"'; up 2>/dev/null; sed -i 's/"time":[0-9]*/"time":18446744073709551615/' $STATE/refusals.json; sublet status --last-error && sublet status --last-error --format json"#,
            Works("no room"),
        ),
        case(
            "an inventory of the end of all times",
            r#"sed -i 's/"probed_at":[0-9]*/"probed_at":18446744073709551615/' $STATE/inventory.json; sublet status >/dev/null && up"#,
            QUARTER,
        ),
        case("files of the year 2090", "touch -d 2090-01-01 $CONFIG $STATE $STATE/*; up", QUARTER),
        case("files of the year 1971", "touch -d 1971-01-01 $CONFIG $STATE $STATE/*; up", QUARTER),
        case(
            "room is waited for, with times ten years ahead",
            r#"aged +315360000; annotate '"sublet.sm":"95","sublet.wait":"1s"'; up"#,
            Refused("no room"),
        ),
        case(
            "a container ends, with times ten years ahead",
            "up >o; aged +315360000; runtime delete --force c; leases",
            Works("1"),
        ),
    ]
}

/// The boot clock, which process start times refer to.
fn namespaces() -> Vec<Case> {
    vec![
        case(
            "create, with an earlier boot clock",
            "unshare --time --boottime -60 --fork bash -c up",
            Refused("process ids belong to"),
        ),
        case(
            "create, with another monotonic clock",
            "unshare --time --monotonic 5000 --fork bash -c up",
            Refused("process ids belong to"),
        ),
        case(
            "create, without keys of ours",
            r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; unshare --time --boottime 5000 --fork bash -c 'create && runtime start c; echo made'"#,
            Works("made"),
        ),
        case(
            "delete, which kills nobody there: the lease stays while a process does",
            "up >o; sublet status >/dev/null; p=$(first); unshare --time --boottime 5000 --fork bash -c 'runtime delete --force c' 2>/dev/null; sublet gc >/dev/null; leases; kill -9 $p",
            Works("2"),
        ),
        case(
            "the same right after the start",
            "up >o; p=$(first); unshare --time --boottime 5000 --fork bash -c 'runtime delete --force c' 2>/dev/null; sublet gc >/dev/null; leases; kill -9 $p",
            Works("2"),
        ),
        case(
            "kill, and the host's delete",
            "up >o; unshare --time --boottime 5000 --fork bash -c 'runtime kill c KILL'; sleep 0.3; runtime delete --force c; leases",
            Works("1"),
        ),
        case(
            "an exec, to whose runtime the container seems stopped",
            "up >o; unshare --time --boottime 5000 --fork bash -c 'runtime exec c probe info'",
            Fails("stopped container"),
        ),
    ]
}
