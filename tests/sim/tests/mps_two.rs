//! Compares one simulated daemon over two GPUs with measurements on two real H200s (docs/evidence).

use crate::rig::{H200, OTHER, Rig, until};
use serde_json::Value;

const PERCENTAGE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const PINNED: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The memory, of its limit, that a context with all 132 SMs takes.
const CONTEXT: u64 = 514;

/// Two GPUs and a daemon that serves both.
fn rig_with_daemon() -> Option<Rig> {
    let rig = Rig::pair()?;
    let mut daemon = rig.program("nvidia-cuda-mps-control", "a");
    daemon.args(["-d", "-M"]).env(VISIBLE, format!("{H200},{OTHER}"));
    assert!(daemon.output().unwrap().status.success());
    Some(rig)
}

/// UUID, SMs and free MiB of each device that a client sees.
fn seen(rig: &Rig, env: &[(&str, &str)]) -> Vec<(String, u64, u64)> {
    let info = rig.info(env);
    assert_eq!(info["mps"], true, "{info}");
    let each = |device: &Value| {
        let number = |key: &str| device[key].as_u64().unwrap();
        (device["uuid"].as_str().unwrap().to_owned(), number("sm"), number("free_mib"))
    };
    info["devices"].as_array().unwrap().iter().map(each).collect()
}

fn free(rig: &Rig, env: &[(&str, &str)]) -> Vec<u64> {
    seen(rig, env).into_iter().map(|(_, _, free)| free).collect()
}

#[test]
fn a_client_is_served_on_both_with_its_own_limits_on_each() {
    let Some(rig) = rig_with_daemon() else { return };
    let env = [(PERCENTAGE, "25"), (PINNED, "0=4G,1=6G")];
    let both = seen(&rig, &env);
    assert_eq!(both[0], (H200.to_owned(), 32, 4 * 1024 - 146));
    assert_eq!(both[1], (OTHER.to_owned(), 32, 6 * 1024 - 146));
    let one = |pinned| free(&rig, &[(VISIBLE, "1"), (PINNED, pinned)]);
    assert!(one("0=4G,1=6G")[0] > 140_000, "a limit for a device that it does not see binds nothing");
    assert_eq!(one("0=4G"), [4 * 1024 - CONTEXT]);
    rig.ask("set_default_active_thread_percentage 50");
    let server = rig.server();
    rig.ask(&format!("set_active_thread_percentage {server} 50"));
    assert!(seen(&rig, &[(PERCENTAGE, "90")]).iter().all(|(_, sm, _)| *sm == 66), "clamped on both");
}

/// Limits set by index and limits set by UUID behave alike.
#[test]
fn a_servers_limits_go_by_the_clients_ordinals() {
    let Some(rig) = rig_with_daemon() else { return };
    let (four, six) = (4 * 1024 - CONTEXT, 6 * 1024 - CONTEXT);
    for name in [["0", "1"], [H200, OTHER]] {
        for before in [true, false] {
            let command = if before {
                "set_default_device_pinned_mem_limit".to_owned()
            } else {
                format!("set_device_pinned_mem_limit {}", rig.server())
            };
            for (device, limit) in name.iter().zip(["4G", "6G"]) {
                assert_eq!(rig.ask(&format!("{command} {device} {limit}")), "");
            }
            assert_eq!(free(&rig, &[]), [four, six]);
            assert_eq!(free(&rig, &[(VISIBLE, "0,1")]), [four, six]);
            assert_eq!(free(&rig, &[(VISIBLE, "1")]), [four]);
            assert_eq!(free(&rig, &[(VISIBLE, OTHER)]), [four]);
            let swapped = seen(&rig, &[(VISIBLE, "1,0")]);
            assert_eq!((swapped[0].0.as_str(), swapped[0].2), (OTHER, four));
            assert_eq!((swapped[1].0.as_str(), swapped[1].2), (H200, six));
            assert_eq!(free(&rig, &[(VISIBLE, "1"), (PINNED, "0=9G")]), [four], "clamped");
            assert_eq!(free(&rig, &[(VISIBLE, "1"), (PINNED, "0=2G")]), [2048 - CONTEXT]);
            assert!(free(&rig, &[(PINNED, "garbage")]).iter().all(|free| *free > 140_000));
        }
    }
}

#[test]
fn a_clients_memory_counts_on_the_device_that_it_is_on() {
    let Some(rig) = rig_with_daemon() else { return };
    let mut held = rig.start("alloc 100000 30", &[(VISIBLE, "1")]);
    assert_eq!(held.result(), "CUDA_SUCCESS");
    let both = free(&rig, &[]);
    assert!(both[0] > 140_000 && both[1] < 43_000, "{both:?}");
    // The server tells the daemon of contexts, and of clients that have ended, some time later.
    let only = format!("{H200}\n{OTHER} {}", held.pid());
    until("the one client", || rig.ask("get_device_client_list") == only);
    let mut on_both = rig.start("hold 30", &[]);
    let pid = on_both.pid().to_string();
    until("both contexts", || rig.ask("ps").lines().filter(|line| line.starts_with(&pid)).count() == 2);
    assert_eq!(rig.ask(&format!("get_client_list {}", rig.server())).lines().count(), 2);
    rig.ask(&format!("terminate_client {} {}", rig.server(), on_both.pid()));
    assert_eq!(on_both.result(), "CUDA_ERROR_MPS_CLIENT_TERMINATED");
}
