//! Alice and Bob, two users with policy rules, and their host.

use std::path::Path;

use sublet_e2e::user::Host;

pub const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
pub const QUARTER: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];
pub const ALICE: u32 = 1000;
pub const BOB: u32 = 1001;

/// Allows Alice a quarter and 8 GiB twice, and Bob one lease of any kind.
const POLICY: &str = "[[policy]]\nuser = 1000\nmodes = [\"mps\"]\nsm = 50\nmemory = \"16GiB\"\nleases = 2\n\
                      [[policy]]\nuser = 1001\nleases = 1\n";

/// Without the service yet.
pub fn host(topology: &str) -> Host {
    Host::new(topology, POLICY, Path::new(env!("CARGO_BIN_EXE_speak")))
}

/// With the service.
pub fn serving(topology: &str) -> Host {
    let mut host = host(topology);
    host.start();
    host
}
