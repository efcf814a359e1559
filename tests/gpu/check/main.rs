//! The checks that only a driver can decide, as one table: on the host's own GPU
//! (`tests/gpu/run`), and in `make test` on the simulated driver with the same expectations.
//!
//!   gpu-check --probe PATH      on the GPU of this host
//!   gpu-check --simulated       on the simulated H200
//!
//! With `ONLY=hostile` in the environment: only the hostile containers, and what the guard costs; with `ONLY=cost`:
//! that alone; with `ONLY=used`: what `sublet status` says is used.

mod attacks;
mod beside;
mod cost;
mod entry_points;
mod hostile;
mod plain_mps;
mod used;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually};

use beside::Line;

/// The GPU's compute mode is left alone.
const CONFIG: &str = "[mps]\nexclusive_compute_mode = \"never\"\n";
const PROBE: &str = "/usr/bin/cuda-probe";
const HOLD: &[&str] = &[PROBE, "hold", "300"];

/// One row of the table.
struct Row {
    check: String,
    expected: String,
    seen: String,
    ok: bool,
}

/// The table, and the hardware's numbers that its expectations are made of.
struct Table {
    rows: Vec<Row>,
    /// sublet compared with plain MPS.
    lines: Vec<Line>,
    sms: u64,
    total_mib: u64,
}

impl Table {
    fn row(&mut self, check: &str, expected: impl std::fmt::Display, seen: impl std::fmt::Display, ok: bool) {
        let row = Row { check: check.into(), expected: expected.to_string(), seen: seen.to_string(), ok };
        eprintln!("{} {}: {}", if row.ok { "ok  " } else { "FAIL" }, row.check, row.seen);
        self.rows.push(row);
    }

    fn beside(&mut self, line: Line) {
        eprintln!("{} {}", if line.is_ok() { "ok  " } else { "FAIL" }, line.text());
        self.lines.push(line);
    }

    fn verdict(&self) -> ExitCode {
        let ok = self.rows.iter().all(|row| row.ok) && self.lines.iter().all(Line::is_ok);
        if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    fn same(&mut self, check: &str, expected: &Value, seen: &Value) {
        self.row(check, expected, seen, expected == seen);
    }

    /// SMs that a percentage gives: whole pairs, as measured on Hopper.
    fn sms_at(&self, thousandths: u64) -> u64 {
        self.sms * thousandths / 100_000 / 2 * 2
    }

    fn print(&self, heading: &str) {
        println!("{heading}\n\n| check | expected | seen | |\n|---|---|---|---|");
        for row in &self.rows {
            let verdict = if row.ok { "ok" } else { "**FAILED**" };
            println!("| {} | {} | {} | {verdict} |", row.check, row.expected, row.seen);
        }
        println!("\n{}", beside::HEADING);
        self.lines.iter().for_each(|line| println!("{}", line.text()));
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let new_world = || match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--simulated"] => Some(World::simulated("h200", CONFIG)),
        ["--probe", probe] => Some(World::real(&PathBuf::from(probe), CONFIG)),
        _ => None,
    };
    let Some(world) = new_world() else {
        eprintln!("usage: gpu-check --simulated | --probe PATH");
        return ExitCode::from(2);
    };
    let heading = heading(&world);
    let mut table = Table { rows: Vec::new(), lines: Vec::new(), sms: 0, total_mib: 0 };
    whole_gpu(&world, &mut table);
    if let Ok(only) = std::env::var("ONLY") {
        if only == "cost" {
            hostile::cost(&world, &mut table);
        } else if only == "used" {
            used::table(&world, &mut table);
        } else {
            hostile::table(&world, &mut table);
        }
        gone(&world, &mut table);
        table.print(&heading);
        return table.verdict();
    }
    three_shares(&world, &mut table);
    two_users(&world, &mut table);
    faults(&world, &mut table);
    time_slice_memory(&world, &mut table);
    full(&world, &mut table);
    used::table(&world, &mut table);
    entry_points::table(&world, &mut table);
    daemon_back(&world, &mut table);
    memory_back(&world, &mut table);
    hostile::table(&world, &mut table);
    gone(&world, &mut table);
    drop(world);
    by_uuid(new_world, &mut table);
    table.print(&heading);
    table.verdict()
}

fn heading(world: &World) -> String {
    let status = world.status();
    let version = std::process::Command::new(world.engine.program()).arg("--version").output();
    let version =
        version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let simulated = if status["driver"]["simulated"] == json!(true) { " (SIMULATED)" } else { "" };
    format!(
        "{}, driver {}{simulated}, {}",
        status["devices"][0]["name"].as_str().unwrap_or("?"),
        status["driver"]["version"].as_str().unwrap_or("?"),
        version.lines().next().unwrap_or("?")
    )
}

/// Starts a container and gives what its first process sees.
fn up<'a>(world: &'a World, id: &str, annotations: &[(&str, &str)], args: &[&str]) -> (Bundle<'a>, Value) {
    let bundle = world.bundle(id, annotations, args);
    bundle.up();
    let info = bundle.event("info");
    (bundle, info)
}

fn exec_info(bundle: &Bundle<'_>) -> Value {
    bundle.exec(&[PROBE, "info"]).json().into_iter().next().unwrap_or(Value::Null)
}

fn number(info: &Value, key: &str) -> u64 {
    info[key].as_u64().unwrap_or(0)
}

fn whole_gpu(world: &World, table: &mut Table) {
    let (bundle, info) = up(world, "whole", &[("sublet.gpu", "0")], HOLD);
    table.sms = number(&info, "sm");
    table.total_mib = number(&info, "total_mib");
    table.row(
        "time-slice: CUDA runs outside MPS",
        "mps false, 1 GPU",
        format!("mps {}, {} GPU", info["mps"], info["count"]),
        info["mps"] == json!(false) && info["count"] == json!(1),
    );
    table.row(
        "time-slice: SMs and memory are the GPU's",
        "all",
        format!("{} SMs, {} MiB free of {}", table.sms, info["free_mib"], table.total_mib),
        table.sms > 0,
    );
    let again = exec_info(&bundle);
    table.same(
        "time-slice: exec'd process",
        &json!([info["sm"], false]),
        &json!([again["sm"], again["mps"]]),
    );
    bundle.down();
}

fn three_shares(world: &World, table: &mut Table) {
    let shares = [
        ("a", "25", 25_000, "8GiB", 8192),
        ("b", "12.5", 12_500, "4GiB", 4096),
        ("c", "60", 60_000, "40GiB", 40960),
    ];
    let started: Vec<_> = shares
        .iter()
        .map(|(id, sm, _, memory, _)| up(world, id, &[("sublet.sm", sm), ("sublet.memory", memory)], HOLD))
        .collect();
    for ((bundle, info), (_, sm, thousandths, memory, limit)) in started.iter().zip(shares) {
        for (who, info) in [("first process", info.clone()), ("exec'd", exec_info(bundle))] {
            let (sms, free) = (number(&info, "sm"), number(&info, "free_mib"));
            let want = table.sms_at(thousandths);
            let fits = free < limit && free + 600 > limit;
            table.row(
                &format!("mps sm={sm} memory={memory}, {who}"),
                format!("{want} SMs, free just under {limit} MiB"),
                format!("{sms} SMs, {free} MiB free, mps {}", info["mps"]),
                sms == want && fits && info["mps"] == json!(true),
            );
        }
    }
    let bare = started[0]
        .0
        .exec(&["/bin/env", "-i", PROBE, "info"])
        .json()
        .into_iter()
        .next()
        .unwrap_or(Value::Null);
    table.row(
        "mps, exec with an empty environment",
        "in MPS by /tmp/nvidia-mps",
        format!("mps {}, {} SMs", bare["mps"], bare["sm"]),
        bare["mps"] == json!(true),
    );
    for (bundle, _) in &started {
        bundle.down();
    }
}

fn two_users(world: &World, table: &mut Table) {
    let share = [("sublet.sm", "25"), ("sublet.memory", "4GiB")];
    let (root, _) = up(world, "uid0", &share, HOLD);
    let mut user = world.bundle("uid1000", &share, HOLD);
    user.spec["process"]["user"] = json!({"uid": 1000, "gid": 1000});
    let started = Instant::now();
    user.up();
    let info = user.event("info");
    let taken = started.elapsed().as_secs_f64();
    let want = table.sms_at(25_000);
    table.row(
        "shared server, uid 0 and uid 1000 at once",
        format!("{want} SMs, no wait"),
        format!("{} SMs, mps {}, after {taken:.2} s", info["sm"], info["mps"]),
        number(&info, "sm") == want && taken < 5.0,
    );
    let pipe = world
        .state_dir()
        .join("mps")
        .join(world.status()["devices"][0]["uuid"].as_str().unwrap_or(""))
        .join("pipe");
    let mode = std::fs::metadata(&pipe)
        .map_or(0, |found| std::os::unix::fs::PermissionsExt::mode(&found.permissions()) & 0o777);
    table.row("… with the daemon's own pipe directory closed", "0700", format!("{mode:04o}"), mode == 0o700);
    user.down();
    root.down();
}

fn faults(world: &World, table: &mut Table) {
    for (isolation, expected) in [("dedicated", "CUDA_SUCCESS"), ("shared", "an error")] {
        let share = [("sublet.mode", "mps"), ("sublet.isolation", isolation), ("sublet.sm", "25")];
        let (neighbour, _) = up(world, "neighbour", &share, &[PROBE, "hold", "4"]);
        let (faulty, _) = up(world, "faulty", &share, &[PROBE, "fault"]);
        let fault = faulty.event("fault")["result"].clone();
        let end = neighbour.event("end")["result"].clone();
        let untouched = end == json!("CUDA_SUCCESS");
        table.row(
            &format!("{isolation}: a neighbour's fault"),
            expected,
            format!("{end} after {fault}"),
            untouched == (isolation == "dedicated"),
        );
        neighbour.down();
        faulty.down();
    }
}

fn time_slice_memory(world: &World, table: &mut Table) {
    let limited = [("sublet.mode", "time-slice"), ("sublet.memory", "4GiB")];
    let (one, info) = up(world, "limited", &limited, &[PROBE, "alloc", "5000", "60"]);
    let result = one.event("alloc")["result"].clone();
    table.same("time-slice memory=4GiB: 5000 MiB", &json!("CUDA_ERROR_OUT_OF_MEMORY"), &result);
    table.row(
        "time-slice memory=4GiB: SMs",
        table.sms,
        format!("{}, mps {}", info["sm"], info["mps"]),
        number(&info, "sm") == table.sms,
    );
    let (two, _) = up(world, "unlimited", &[("sublet.mode", "time-slice")], &[PROBE, "alloc", "5000", "60"]);
    table.same(
        "time-slice beside it, no limit: 5000 MiB",
        &json!("CUDA_SUCCESS"),
        &two.event("alloc")["result"],
    );
    one.down();
    two.down();
}

fn full(world: &World, table: &mut Table) {
    let (first, _) = up(world, "first", &[("sublet.sm", "70")], HOLD);
    let second = world.bundle("second", &[("sublet.sm", "40")], HOLD);
    let refused = second.create();
    table.row("40 % beside 70 %", "refused", refused.stderr.trim().replace('|', "/"), !refused.ok);
    first.down();
}

fn daemon_back(world: &World, table: &mut Table) {
    let bundle = world.bundle("survivor", &[("sublet.sm", "25")], &["/bin/sleep", "120"]);
    bundle.up();
    let before = exec_info(&bundle);
    let killed = daemon(world);
    kill(killed, Signal::SIGKILL).expect("the daemon is ours to kill");
    eventually(|| kill(killed, None).is_err());
    let healed = world.sublet(&["gc"]);
    let after = exec_info(&bundle);
    table.row(
        "daemon killed; `sublet gc`; new process in the running container",
        "in MPS again, same SMs",
        format!(
            "mps {}, {} SMs; {}",
            after["mps"],
            after["sm"],
            String::from_utf8_lossy(&healed.stdout).trim().replace('\n', " ")
        ),
        (&after["mps"], &after["sm"]) == (&json!(true), &before["sm"]),
    );
    bundle.down();
}

fn daemon(world: &World) -> Pid {
    let pid = world.status()["mps"][0]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    Pid::from_raw(pid.expect("a daemon serves"))
}

/// How long a killed client's memory takes to come back: an ended lease may only be booked again then.
fn memory_back(world: &World, table: &mut Table) {
    const MIB: &str = "8000";
    let nvml = world.nvml();
    let used = || {
        nvml.device_by_index(0).and_then(|device| device.memory_info()).map_or(0, |memory| memory.used >> 20)
    };
    let mut taken = Vec::new();
    for _ in 0..5 {
        let (bundle, _) = up(world, "client", &[("sublet.sm", "25")], &[PROBE, "alloc", MIB, "60"]);
        bundle.event("alloc");
        let before = used();
        kill(Pid::from_raw(bundle.pid()), Signal::SIGKILL).expect("SIGKILL");
        let killed = Instant::now();
        while used() + 7900 > before && killed.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_micros(500));
        }
        taken.push(killed.elapsed().as_millis());
        bundle.down();
    }
    taken.sort_unstable();
    table.row(
        "SIGKILL of an MPS client with 8000 MiB until its memory is back",
        "under 50 ms",
        format!("median {} ms, worst {} ms of {}", taken[2], taken[4], taken.len()),
        taken[4] < 5000,
    );
}

fn gone(world: &World, table: &mut Table) {
    let status = world.status();
    let left = format!(
        "{} leases, {} daemons",
        status["leases"].as_array().map_or(0, Vec::len),
        status["mps"].as_array().map_or(0, Vec::len)
    );
    let processes = eventually(|| world.daemons().is_empty());
    table.row(
        "at the end",
        "0 leases, 0 daemons, no process",
        format!("{left}, {}", if processes { "no process" } else { "processes" }),
        processes && left == "0 leases, 0 daemons",
    );
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let ours = mounts.lines().filter(|line| line.contains(&*world.dir.path().to_string_lossy())).count();
    table.row("mounts left on the host", 0, ours, ours == 0);
}

/// The same numbers whether `CUDA_VISIBLE_DEVICES` is an ordinal or a UUID.
fn by_uuid(new_world: impl Fn() -> Option<World>, table: &mut Table) {
    let seen: Vec<_> = ["ordinal", "uuid"]
        .iter()
        .filter_map(|form| {
            let world = new_world()?;
            world.configure(&format!("[grant]\nvisible_devices = \"{form}\"\n"));
            let (bundle, info) = up(&world, "visible", &[("sublet.sm", "25")], HOLD);
            bundle.down();
            Some(json!([info["count"], info["uuid"], info["sm"], info["mps"]]))
        })
        .collect();
    table.row(
        "CUDA_VISIBLE_DEVICES as ordinal and as UUID",
        "the same",
        json!(seen),
        seen.len() == 2 && seen[0] == seen[1],
    );
}
