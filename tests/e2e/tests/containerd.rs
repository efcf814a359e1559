//! containerd as people use it: `ctr run --runc-binary`, and pods by the CRI with a runtime handler. Runs in
//! the root that tests/engines/enter gives. One H200: 132 SMs, 143155 MiB for CUDA.

use serde_json::{Value, json};
use sublet_e2e::World;
use sublet_e2e::containerd::Containerd;
use sublet_e2e::docker::skip_unless_engines;

fn h200() -> Containerd {
    Containerd::up(World::simulated("h200", ""))
}

#[test]
fn the_first_process_and_execs_see_the_share() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let id = containerd.hold("first", &["sublet.sm=25", "sublet.memory=8GiB"], &[]);
    let is_share = |info: &Value| {
        assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
        let free = info["free_mib"].as_i64().expect("free_mib");
        assert!((free - 8047).abs() < 64, "free {free} MiB of 8192");
    };
    is_share(&containerd.event("first", "info"));
    is_share(&containerd.exec_info("first", &[]));
    // No environment at all: MPS at CUDA's default place, the server's ceiling and its memory limit.
    let bare = containerd.exec_info("first", &["env", "-i"]);
    assert_eq!((&bare["mps"], &bare["sm"]), (&json!(true), &json!(32)), "{bare}");
    let lease = containerd.lease(&id).expect("a lease");
    assert_eq!(
        (&lease["state"], &lease["pid"]),
        (&json!("active"), &json!(containerd.pid("first").as_raw()))
    );
    containerd.remove("first");
    containerd.assert_empty();
}

#[test]
fn a_pod() {
    if skip_unless_engines() {
        return;
    }
    let containerd = h200();
    let pod = containerd.run_pod("pod", "sublet", &["sublet.sm=25"]);
    eprintln!("{pod} {:?}", containerd.world.leases());
    let one = containerd.run_in_pod(("pod", &pod), "one", &[]);
    eprintln!("{one:?} {:?}", containerd.world.leases());
    let info = containerd.exec_sync_info(&one.unwrap(), &[]);
    eprintln!("{info:?}");
    containerd.remove_pod(&pod);
    containerd.assert_empty();
}
