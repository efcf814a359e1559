//! Hostile and unlucky cases at every entry point. Each case is a line of shell and the expected result. They run one
//! after the other, and a table is written (docs/evidence/2026-11-22-cases.md) where `SUBLET_CASES_TO` names a file:
//! `SUBLET_CASES_TO=$PWD/target/cases.md make test-cases`.
//!
//! To add an entry point, write a module below `cases/` with a `Stage` (a machine with a neighbour on its GPU, the
//! prelude of a case's shell, and how to find and remove containers) and a list of cases. Add a line to `DOORS` here,
//! and one to tests/jobs with the root that it needs. A case is `case(what, command, expectation)`:
//!
//! - The command is one line of bash. A reader could type it after the stage's prelude, which is printed above the
//!   table.
//! - It may change `$STATE`, `$CONFIG` and `$DRIVER`, and move files away (`aside FILE`). All of that is restored
//!   afterwards, the containers are removed, and `sublet gc` runs.
//! - In every case nothing may be left afterwards (lease, container, process, mount, dedicated daemon), and the
//!   neighbour keeps its share, its process and its daemon (`.harming()`: the case itself ends the daemon).

#[path = "cases/around.rs"]
mod around;
#[path = "cases/bundles.rs"]
mod bundles;
#[path = "cases/cdi.rs"]
mod cdi;
#[path = "cases/checkpoint.rs"]
mod checkpoint;
#[path = "cases/clock.rs"]
mod clock;
#[path = "cases/containerd.rs"]
mod containerd;
#[path = "cases/criu.rs"]
mod criu;
#[path = "cases/ctr.rs"]
mod ctr;
#[path = "cases/docker.rs"]
mod docker;
#[path = "cases/engine.rs"]
mod engine;
#[path = "cases/exec.rs"]
mod exec;
#[path = "cases/faketime.rs"]
mod faketime;
#[path = "cases/frame.rs"]
mod frame;
#[path = "cases/mig.rs"]
mod mig;
#[path = "cases/podman.rs"]
mod podman;
#[path = "cases/podman_cases.rs"]
mod podman_cases;
#[path = "cases/podman_lives.rs"]
mod podman_lives;
#[path = "cases/prestart.rs"]
mod prestart;
#[path = "cases/rootless.rs"]
mod rootless;
#[path = "cases/rootless_cases.rs"]
mod rootless_cases;
#[path = "cases/shim.rs"]
mod shim;
#[path = "cases/watch.rs"]
mod watch;

use frame::EntryPoint;
use sublet_e2e::skip_unless_root;

const DOORS: &[EntryPoint] = &[
    EntryPoint { name: "shim", open: bundles::empty, cases: shim::cases },
    EntryPoint { name: "exec", open: bundles::with_container, cases: exec::cases },
    EntryPoint { name: "docker", open: engine::docker, cases: docker::cases },
    EntryPoint { name: "containerd", open: ctr::containerd, cases: containerd::cases },
    EntryPoint { name: "cdi", open: engine::cdi, cases: cdi::cases },
    EntryPoint { name: "mig", open: engine::mig, cases: mig::cases },
    EntryPoint { name: "podman", open: podman::stand, cases: podman_cases::cases },
    EntryPoint { name: "prestart", open: bundles::hooked, cases: prestart::cases },
    EntryPoint { name: "checkpoint", open: bundles::with_container, cases: checkpoint::cases },
    EntryPoint { name: "criu", open: bundles::criu, cases: criu::bundles },
    EntryPoint { name: "criu-podman", open: podman::stand, cases: criu::podman },
    EntryPoint { name: "clock", open: bundles::clocks, cases: clock::cases },
    EntryPoint { name: "faketime", open: bundles::faketime, cases: faketime::bundles },
    EntryPoint { name: "faketime-podman", open: podman::stand, cases: faketime::podman },
    EntryPoint { name: "rootless", open: rootless::stand, cases: rootless_cases::cases },
];

/// `SUBLET_CASES` names the entry points, `SUBLET_CASES_TO` the file for their tables. `SUBLET_CASES_ONLY` selects
/// cases by words of their titles, and `SUBLET_CASES_BELOW` leaves out those that sublet refuses: the same whichever
/// runtime is below it.
#[test]
#[ignore = "hundreds of cases: make test-cases"]
fn entry_points() {
    if skip_unless_root() {
        return;
    }
    let wanted = std::env::var("SUBLET_CASES").unwrap_or_default();
    let is_wanted =
        |entry_point: &&EntryPoint| wanted.split_whitespace().any(|name| name == entry_point.name);
    let failed: usize = DOORS.iter().filter(is_wanted).map(frame::try_entry_point).sum();
    assert_eq!(failed, 0, "cases FAILED: see their rows");
}
