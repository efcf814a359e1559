//! The shim: `create` with everything around it hostile, broken or unlucky.

use crate::frame::Expect::{Fails, Plain, Refused, Still, Works};
use crate::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    vec![
        case("nothing is wrong", "up", QUARTER),
        case("the percentage is no number", r#"annotate '"sublet.sm":"abc"'; up"#, Refused("sublet.sm")),
        case("no key of ours", r#"swap '"sublet.sm":"25","sublet.memory":"8GiB"' ''; up"#, Plain),
        case("the program is not in the image", "swap /usr/bin/probe /usr/bin/nothing; up", Fails("nothing")),
        case(
            "SIGKILL on the way",
            "timeout -s KILL 0.02 sublet-runtime --root $ROOT create --bundle $BUNDLE c",
            Still,
        ),
        case("the daemon was killed", "kill -9 $(daemons); up", QUARTER).harming(),
        case("features", "runtime features", Works("")),
    ]
}
