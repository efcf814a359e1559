//! A control daemon that is kept busy by others: it speaks with one program at a time, and waits for what a connection
//! says first (docs/evidence/2026-11-25-mps-control.md).

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde_json::json;
use sublet_e2e::{Bundle, Finished, World, eventually, skip_unless_root};

const INFO: &[&str] = &["/usr/bin/cuda-probe", "info"];
const SLEEP: &[&str] = &["/bin/sleep", "300"];

/// A container with a quarter of the SMs, and one that needs the daemon's limits raised, not started yet.
fn two(world: &World) -> (Bundle<'_>, Bundle<'_>) {
    let bundle = |id, sm| world.bundle(id, &[("sublet.sm", sm)], SLEEP);
    let (first, second) = (bundle("first", "25"), bundle("second", "50"));
    first.up();
    (first, second)
}

/// The daemon's directory.
fn own(world: &World) -> PathBuf {
    let key = world.status()["mps"][0]["key"].as_str().expect("a daemon").to_owned();
    world.state_dir().join("mps").join(key)
}

/// What `nvidia-cuda-mps-control` is at its prompt: a conversation in which nothing is said.
fn prompt(world: &World) -> Child {
    let usr = world.driver_root.as_ref().expect("simulated").join("usr");
    let program = || {
        let mut command = Command::new(usr.join("bin/nvidia-cuda-mps-control"));
        command.env("CUDA_MPS_PIPE_DIRECTORY", own(world).join("pipe"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    };
    let kept = program().spawn().expect("it runs");
    let is_sent_away = || {
        let other = program().stdin(Stdio::null()).output().expect("it runs");
        String::from_utf8_lossy(&other.stdout).starts_with("Cannot send command")
    };
    assert!(eventually(is_sent_away), "another program is sent away");
    kept
}

fn assert_share(seen: &Finished, sm: u64) {
    let info = seen.json().into_iter().next().unwrap_or_else(|| panic!("{seen:?}"));
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(sm)), "{info}");
}

/// `second` is refused with `why` and leaves nothing.
fn assert_refused(world: &World, second: &Bundle<'_>, why: &str) {
    let refused = second.create();
    assert!(!refused.ok && refused.stderr.contains(why), "{refused:?}");
    assert_eq!(world.leases().len(), 1, "{:?}", world.leases());
}

#[test]
fn where_a_program_keeps_it_execs_go_on_and_a_start_says_why_it_cannot() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let (first, second) = two(&world);
    let mut kept = prompt(&world);
    world.forget_answers();
    assert_share(&first.exec(INFO), 32);
    assert_refused(&world, &second, "speaks with one program at a time, and another kept it");
    assert_ne!(world.status()["mps"][0]["state"], "fault");
    kept.kill().expect("killed");
    kept.wait().expect("waited for");
    second.up();
    assert_share(&second.exec(INFO), 66);
    second.down();
    first.down();
    world.assert_empty();
}

#[test]
fn where_a_connection_says_nothing_nothing_starts_until_it_is_closed() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let (first, second) = two(&world);
    let control = own(&world).join("public/control");
    let of_container = "does not answer: it waits for container first, which keeps a connection to it open";
    let inside = Some(first.pid());
    for (namespace, why) in [(None, "does not answer\nfix: if it is stopped"), (inside, of_container)] {
        let silent = connected(&control, namespace);
        world.forget_answers();
        let exec = first.exec(INFO);
        assert!(!exec.ok && exec.stderr.contains(why), "{exec:?}");
        assert_refused(&world, &second, why);
        drop(silent);
    }
    assert_share(&first.exec(INFO), 32);
    second.up();
    assert_share(&second.exec(INFO), 66);
    second.down();
    first.down();
    world.assert_empty();
}

/// A connection as any container can make it, in the network namespace of the process `pid`, or in this one.
fn connected(control: &Path, pid: Option<i32>) -> OwnedFd {
    let connect = || {
        if let Some(pid) = pid {
            let namespace = std::fs::File::open(format!("/proc/{pid}/ns/net")).expect("it runs");
            setns(namespace, CloneFlags::CLONE_NEWNET).expect("entered");
        }
        let kind = (AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        let fd = socket(kind.0, kind.1, kind.2, None).expect("a socket");
        connect(fd.as_raw_fd(), &UnixAddr::new(control).expect("an address")).expect("connected");
        fd
    };
    // The namespace is the thread's.
    std::thread::scope(|scope| scope.spawn(connect).join().expect("it ends"))
}

#[test]
fn many_execs_at_once_are_all_answered() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("one", &[("sublet.sm", "25")], SLEEP);
    bundle.up();
    world.forget_answers();
    std::thread::scope(|scope| {
        let execs: Vec<_> = (0..12).map(|_| scope.spawn(|| bundle.exec(INFO))).collect();
        for exec in execs {
            assert_share(&exec.join().expect("it ends"), 32);
        }
    });
    bundle.down();
    world.assert_empty();
}
