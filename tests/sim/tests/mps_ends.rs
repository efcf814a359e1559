//! What is left when a server, a daemon or a client of MPS ends, by itself or not: compares the simulated MPS with
//! measurements on a real H200 (docs/evidence).

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::rig::{Rig, signal, until};
use nix::sys::signal::Signal;
use nvidia_ml::mps::wire::Conn;

#[test]
fn a_killed_server_takes_its_clients_and_the_next_has_another() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut client = rig.start("hold 30", &[]);
    let server: i32 = rig.server().parse().unwrap();
    signal(server, Signal::SIGKILL);
    assert_eq!((client.result(), client.status()), ("CUDA_ERROR_MPS_RPC_FAILURE".into(), 10));
    until("another server", || rig.info(&[])["mps"] == true && rig.server() != server.to_string());
}

#[test]
fn a_killed_daemon_takes_all_and_later_programs_run_alone() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut client = rig.start("hold 30", &[]);
    signal(rig.daemon_pid("a"), Signal::SIGKILL);
    assert_eq!((client.result(), client.status()), ("CUDA_ERROR_MPS_RPC_FAILURE".into(), 10));
    until("no server is left", || rig.contexts().is_empty());
    assert_eq!(rig.info(&[])["mps"], false);
    assert!(rig.path("a/control").exists());
}

#[test]
fn a_killed_client_leaves_the_others_alone() {
    let Some(rig) = Rig::with_daemon() else { return };
    let (mut one, mut other) = (rig.start("hold 30", &[]), rig.start("hold 1", &[]));
    one.child.kill().unwrap();
    one.child.wait().unwrap();
    assert_eq!((other.result(), other.status()), ("CUDA_SUCCESS".into(), 0));
}

#[test]
fn a_stopped_daemon_takes_connections_and_answers_nobody() {
    let Some(rig) = Rig::with_daemon() else { return };
    let pid = rig.daemon_pid("a");
    signal(pid, Signal::SIGSTOP);
    Conn::connect(&rig.path("a/control")).unwrap();
    let mut client = rig.start_silent("info", &[], 0, "a");
    sleep(Duration::from_millis(300));
    assert!(client.is_running());
    signal(pid, Signal::SIGCONT);
    assert_eq!(client.next().unwrap()["mps"], true);
}

#[test]
fn a_fault_ends_every_client_of_its_server_alone() {
    let Some(rig) = Rig::with_daemon() else { return };
    fs::create_dir(rig.path("b")).unwrap();
    rig.daemon("b", &["-M"]);
    let mut apart = rig.start_as("hold 2", &[], 0, "b");
    let mut neighbour = rig.start("hold 30", &[]);
    let server = rig.server();
    let (said, status) = rig.probe("fault", &[]);
    assert_eq!((said[1]["result"].as_str(), status), (Some("CUDA_ERROR_ILLEGAL_ADDRESS"), 10));
    assert_eq!((neighbour.result(), neighbour.status()), ("CUDA_ERROR_ILLEGAL_ADDRESS".into(), 10));
    assert_eq!(rig.info(&[])["mps"], true);
    assert_eq!(rig.server(), server, "it recovers by itself");
    assert_eq!((apart.result(), apart.status()), ("CUDA_SUCCESS".into(), 0));
}

#[test]
fn a_fault_without_mps_stays_with_its_process() {
    let Some(rig) = Rig::new() else { return };
    let mut neighbour = rig.start("hold 1", &[]);
    assert_eq!(rig.probe("fault", &[]).0[1]["result"], "CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_eq!(neighbour.result(), "CUDA_SUCCESS");
}

#[test]
fn a_client_is_terminated() {
    let Some(rig) = Rig::with_daemon() else { return };
    let (mut one, mut other) = (rig.start("hold 30", &[]), rig.start("hold 5", &[]));
    let server = rig.server();
    until("two clients", || rig.ask("ps").lines().count() == 3);
    assert_eq!(rig.ask(&format!("terminate_client {server} {}", one.pid())), "0");
    assert_eq!((one.result(), one.status()), ("CUDA_ERROR_MPS_CLIENT_TERMINATED".into(), 10));
    until("one client", || rig.ask(&format!("get_client_list {server}")) == other.pid().to_string());
    assert_eq!(other.result(), "CUDA_SUCCESS");
}

#[test]
fn quit_waits_for_clients_unless_it_is_told_how_long() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut client = rig.start("hold 1", &[]);
    let start = Instant::now();
    rig.ask("quit");
    assert!(start.elapsed() > Duration::from_millis(700), "{:?}", start.elapsed());
    assert_eq!((client.result(), client.status()), ("CUDA_SUCCESS".into(), 0));
    until("no context", || rig.contexts().is_empty());

    assert!(rig.daemon("a", &["-M"]).status.success());
    let mut client = rig.start("hold 30", &[]);
    rig.ask("quit -t 1");
    assert_eq!(client.result(), "CUDA_ERROR_MPS_RPC_FAILURE");
}

#[test]
fn a_server_is_shut_down() {
    let Some(rig) = Rig::with_daemon() else { return };
    let mut client = rig.start("hold 30", &[]);
    rig.ask(&format!("shutdown_server {} -f", rig.server()));
    assert_eq!(client.result(), "CUDA_ERROR_MPS_RPC_FAILURE");
    assert_eq!(rig.server(), "");
    assert_eq!(rig.info(&[])["mps"], true);
}
