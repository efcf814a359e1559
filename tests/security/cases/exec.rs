//! `exec` into a container that runs, with everything around it hostile, broken or unlucky.

use crate::frame::Expect::Refused;
use crate::frame::{Case, QUARTER, case};

pub fn cases() -> Vec<Case> {
    vec![
        case("nothing is wrong", "runtime exec --process p.json c", QUARTER),
        case("no such file", "runtime exec --process no.json c", Refused("No such file")),
    ]
}
