//! One container's life, from `create` to `delete`.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use sublet_e2e::{Bundle, World, is_alive};

use super::judge::Life;
use super::plan::{Cycle, Ending, Use};

const PROBE: &str = "/usr/bin/cuda-probe";

/// A program that has not ended by then hangs.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) fn live(world: &World, seed: u64, number: u64, usage: &Use) -> Life {
    let cycle = Cycle::of(seed, number, usage);
    let id = format!("cycle-{number}");
    let holds = Duration::from_millis(cycle.holds_ms).as_secs_f64().to_string();
    let args = match cycle.ending {
        Ending::Fault => vec![PROBE, "fault"],
        Ending::Finished => vec![PROBE, "hold", &holds],
        // Until it is killed.
        _ => vec![PROBE, "hold", "20"],
    };
    let bundle = world.bundle(&id, cycle.share, &args);
    let mut life = Life::new(number, cycle);
    if cycle.ending == Ending::ShimKilled {
        shim_killed(&bundle, Duration::from_millis(cycle.after_ms));
    } else {
        let created = bundle.create();
        if created.ok {
            started(&bundle, &cycle, &mut life);
        } else {
            life.result = Some(format!("not created: {}", created.stderr.trim()));
        }
    }
    life.ended = Instant::now();
    delete(&bundle, &mut life);
    let _ = std::fs::remove_dir_all(&bundle.dir);
    life
}

fn started(bundle: &Bundle<'_>, cycle: &Cycle, life: &mut Life) {
    // Of a container that has ended already, runtimes say 0.
    let pid = Pid::from_raw(bundle.pid());
    let started = bundle.start();
    if !started.ok {
        life.result = Some(format!("not started: {}", started.stderr.trim()));
        return;
    }
    if matches!(cycle.ending, Ending::Killed | Ending::DaemonKilled | Ending::ServerKilled) {
        wait(|| has_printed(bundle, "info") || !is_alive(pid));
        std::thread::sleep(Duration::from_millis(cycle.after_ms));
        life.harm_began = Some(Instant::now());
        match cycle.ending {
            Ending::Killed => drop(kill(pid, Signal::SIGKILL)),
            ending => kill_daemon(bundle, ending),
        }
    }
    if cycle.ending == Ending::Fault {
        life.harm_began = Some(Instant::now());
    }
    let ended = wait(|| !is_alive(pid));
    life.result = Some(if ended { word(bundle) } else { "it hangs".to_owned() });
}

/// SIGKILL of the shim, wherever it is then; if it was quick, of the container.
fn shim_killed(bundle: &Bundle<'_>, after: Duration) {
    bundle.write();
    let mut command = bundle.runtime();
    command.arg("create").arg("--bundle").arg(&bundle.dir).arg(&bundle.id);
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    let mut shim = command.stderr(std::process::Stdio::null()).spawn().expect("the shim runs");
    std::thread::sleep(after);
    let _ = shim.kill();
    let _ = shim.wait();
}

/// The control daemon of the container's lease, or its server.
fn kill_daemon(bundle: &Bundle<'_>, ending: Ending) {
    let status = bundle.world().status();
    let leases = status["leases"].as_array().cloned().unwrap_or_default();
    let lease = leases.iter().find(|lease| lease["container_id"] == bundle.id.as_str());
    let Some(lease) = lease.map(|lease| lease["id"].clone()) else { return };
    let daemons = status["mps"].as_array().cloned().unwrap_or_default();
    let of = |wanted: &Value| daemons.iter().find(|daemon| daemon["lease"] == *wanted);
    let Some(daemon) = of(&lease).or_else(|| of(&Value::Null)) else { return };
    let Some(pid) = daemon["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()) else { return };
    for pid in if ending == Ending::DaemonKilled { vec![pid] } else { children(pid) } {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

/// A control daemon's children are its servers.
fn children(pid: i32) -> Vec<i32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    listed.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// What the program said last: a CUDA word of its end, or of why it has no context.
fn word(bundle: &Bundle<'_>) -> String {
    let output = bundle.output();
    let lines: Vec<Value> = output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let said = |event: &str| lines.iter().find(|line| line["event"] == event);
    let last = said("end").or_else(|| said("fault")).map(|line| &line["result"]);
    let last = last.or_else(|| said("info").map(|line| &line["error"]).filter(|error| !error.is_null()));
    match last.and_then(Value::as_str) {
        Some(word) => word.to_owned(),
        None if said("info").is_some() => "ended while it computed".to_owned(),
        None => format!("ended before its first word {:?}", output.trim()),
    }
}

fn has_printed(bundle: &Bundle<'_>, event: &str) -> bool {
    bundle.output().contains(&format!("\"event\":\"{event}\""))
}

/// `delete --force`, as engines call it. Where no container came to be, the low-level runtime has nothing to delete.
fn delete(bundle: &Bundle<'_>, life: &mut Life) {
    let mut command = bundle.runtime();
    let output = command.args(["delete", "--force"]).arg(&bundle.id).output().expect("the shim runs");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    if !output.status.success() && !text.contains("does not exist") && !text.contains("No such file") {
        life.delete_failed = Some(text.trim().to_owned());
    }
}

fn wait(mut holds: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if holds() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    holds()
}
