//! The attacks, each once beside plain MPS and once beside sublet's guard, with a well-behaved neighbour on the
//! same server that measures its own latency from before the attack until after it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::unistd::Pid;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use serde_json::Value;
use sublet_e2e::{Bundle, World, copy_program, is_alive};

use super::beside::{Held, Line};
use super::plain_mps::{self, PlainMps};
use super::{PROBE, Table, number};

/// MiB that a container may have, and what the guard lets pass.
const LIMIT: u64 = 4096;
const TOLERANCE: u64 = 128;

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "4GiB")];
/// Without a limit of memory, which so many contexts would pass.
const NO_MEMORY: &[(&str, &str)] = &[("sublet.sm", "25")];
const DEDICATED: &[(&str, &str)] = &[
    ("sublet.sm", "25"),
    ("sublet.memory", "4GiB"),
    ("sublet.mode", "mps"),
    ("sublet.isolation", "dedicated"),
];
/// Two clients, each with what the others' one has.
const TWO: &[(&str, &str)] = &[("sublet.sm", "50"), ("sublet.memory", "8GiB"), ("sublet.processes", "2")];

/// Tells the neighbour to stop.
const STOP: &str = "tmp/stop";

/// How long nothing must be seen of an attack that was tried.
const QUIET: Duration = Duration::from_secs(1);
/// How long an attack may take to begin: fifty CUDA programs start in one container.
const BEGINS: Duration = Duration::from_secs(45);
/// How long an attack is observed: with plain MPS, which never ends it, and with the guard.
const WATCHED: Duration = Duration::from_secs(3);
const ENDED: Duration = Duration::from_secs(10);

/// One attack.
struct Attack {
    row: &'static str,
    what: String,
    /// The hostile container's shell script.
    script: String,
    /// What it has printed so many times when the attack was tried.
    tried: (&'static str, usize),
    /// It has no PID namespace of its own; with one, its processes would end with the first.
    host_pids: bool,
    /// Whether it goes on; one that is only felt by the neighbour never does.
    goes_on: fn(&Scene<'_>) -> bool,
    /// With sublet: what the containers ask for, the neighbour's first, and whether the neighbour is expected to
    /// notice.
    shares: &'static [(&'static str, Shares, bool)],
}

type Shares = [&'static [(&'static str, &'static str)]; 2];

const SHARED: &[(&str, Shares, bool)] = &[("sublet", [SHARE, SHARE], false)];

fn attacks(slots: usize) -> Vec<Attack> {
    let attack = |row, what: &str, script: &str, tried, goes_on| Attack {
        row,
        what: what.to_owned(),
        script: script.to_owned(),
        tried,
        host_pids: false,
        goes_on,
        shares: SHARED,
    };
    let many = slots + 1;
    vec![
        attack(
            "B1",
            "default limits changed and `quit` over the pipe directory",
            "for c in 'set_default_active_thread_percentage 10' 'quit -t 1'; do \
             echo \"$c\" | busybox timeout 5 nvidia-cuda-mps-control; done; echo '\"tried\"'; exec sleep 100",
            ("\"tried\"", 1),
            |scene| scene.settings() != scene.settings,
        ),
        attack(
            "B2",
            "MPS left",
            "CUDA_MPS_PIPE_DIRECTORY=/nowhere exec cuda-probe hold 100",
            ("\"info\"", 1),
            |scene| scene.tenants().iter().any(|tenant| !tenant.is_client),
        ),
        attack(
            "B3",
            "memory limit spoilt, 52000 MiB taken of 4096",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=garbage exec cuda-probe alloc 52000 100",
            ("\"alloc\"", 1),
            is_too_large,
        ),
        attack(
            "B4",
            "thread percentage of 100 asked for",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 exec cuda-probe hold 100",
            ("\"info\"", 1),
            |scene| scene.hostile_sms() > scene.sms,
        ),
        attack(
            "B5",
            "two processes of 2500 MiB each",
            "cuda-probe alloc 2500 100 & sleep 1; exec cuda-probe alloc 2500 100",
            ("\"alloc\"", 2),
            is_too_large,
        ),
        Attack {
            shares: &[
                ("sublet, shared", [SHARE, SHARE], true),
                ("sublet, dedicated", [DEDICATED, DEDICATED], false),
            ],
            ..attack("B8", "a fault on the GPU", "cuda-probe fault; exec sleep 100", ("\"fault\"", 1), |_| {
                false
            })
        },
        Attack {
            shares: &[("sublet", [TWO, NO_MEMORY], false)],
            ..attack(
                "B9",
                &format!("{many} MPS clients where {slots} find a place"),
                // Of those that the guard ends at their start nothing is heard.
                &format!(
                    "n=0; while [ $n -lt {many} ]; do cuda-probe hold 100 & n=$((n+1)); done; \
                     sleep 20; echo '\"tried\"'; wait"
                ),
                ("\"tried\"", 1),
                // The neighbour has one, and expects one more.
                |scene| scene.tenants().iter().filter(|tenant| tenant.is_client).count() + 2 > scene.slots,
            )
        },
        Attack {
            host_pids: true,
            ..attack(
                "B10",
                "a process left behind by double fork, in the host's PID namespace",
                "rm -f /tmp/o; (busybox setsid cuda-probe hold 100 >/tmp/o &); \
                 until grep -q info /tmp/o; do sleep 0.1; done; echo '\"tried\"'",
                ("\"tried\"", 1),
                |scene| !is_alive(scene.init) && !scene.tenants().is_empty(),
            )
        },
    ]
}

/// The rows.
pub(super) fn table(world: &World, table: &mut Table) {
    let nvml = world.nvml();
    let whole = plain_mps::whole(world);
    for attack in attacks(slots(&nvml)) {
        let mps = PlainMps::start(world, &whole, LIMIT);
        let line = beside(world, &nvml, table, &attack, By::Plain(&mps));
        drop(mps);
        table.beside(line);
        for (name, shares, is_noticed) in attack.shares {
            let line = beside(world, &nvml, table, &attack, By::Sublet(name, shares, *is_noticed));
            table.beside(line);
        }
    }
}

/// MPS clients that a server takes: 48, and 60 from CUDA 13.1 (CUDA MPS documentation).
fn slots(nvml: &Nvml) -> usize {
    if nvml.sys_cuda_driver_version().is_ok_and(|version| version >= 13_010) { 60 } else { 48 }
}

/// What enforces the containers' shares.
#[derive(Clone, Copy)]
enum By<'a> {
    Plain(&'a PlainMps<'a>),
    Sublet(&'static str, &'static Shares, bool),
}

impl<'a> By<'a> {
    fn bundle(&self, world: &'a World, id: &str, which: usize, args: &[&str]) -> Bundle<'a> {
        match self {
            Self::Plain(mps) => mps.bundle(&format!("plain-{id}"), args),
            Self::Sublet(_, shares, _) => world.bundle(id, shares[which], args),
        }
    }

    fn pipe(&self, world: &World) -> PathBuf {
        match self {
            Self::Plain(mps) => mps.pipe(),
            Self::Sublet(..) => {
                let device = world.status()["devices"][0]["uuid"].clone();
                world.state_dir().join("mps").join(device.as_str().unwrap_or_default()).join("pipe")
            }
        }
    }
}

/// One attack beside a neighbour: how long it lasts, and what the neighbour notices.
fn beside(world: &World, nvml: &Nvml, table: &Table, attack: &Attack, by: By<'_>) -> Line {
    // Its next program starts in it whatever becomes of the first.
    let measures = format!("{PROBE} lat 100 /{STOP}; exec sleep 100");
    let neighbour = by.bundle(world, "neighbour", 0, &["/bin/sh", "-c", &measures]);
    let _ = std::fs::remove_file(neighbour.dir.join("rootfs").join(STOP));
    neighbour.up();
    neighbour.event("info");
    let mut hostile = by.bundle(world, "hostile", 1, &["/bin/sh", "-c", &attack.script]);
    if attack.host_pids {
        let namespaces = hostile.spec["linux"]["namespaces"].as_array_mut().expect("namespaces");
        namespaces.retain(|namespace| namespace["type"] != "pid");
    }
    copy_program(&plain_mps::control(world), &hostile.dir.join("rootfs"), "usr/bin/nvidia-cuda-mps-control");
    let pipe = by.pipe(world);
    let settings = settings(world, &pipe);
    hostile.up();
    let init = Pid::from_raw(hostile.pid());
    let (sms, slots) = (table.sms_at(25_000), slots(nvml));
    let scene = Scene { world, nvml, hostile: &hostile, init, pipe, settings, sms, slots };
    let watched = if matches!(by, By::Plain(_)) { WATCHED } else { ENDED };
    let held = scene.watch(attack, watched);
    let next = next_program(&neighbour);
    std::fs::write(neighbour.dir.join("rootfs").join(STOP), "").expect("a file");
    let (latency, end) = told(&neighbour);
    hostile.down();
    neighbour.down();
    let (by, is_noticed) = match by {
        By::Plain(_) => ("plain MPS", None),
        By::Sublet(name, _, is_noticed) => (name, Some(is_noticed)),
    };
    let attack = format!("{} {}", attack.row, attack.what);
    Line { attack, by, held, latency, end, next, sms, is_noticed }
}

/// What the host sees of the hostile container.
struct Scene<'a> {
    world: &'a World,
    nvml: &'a Nvml,
    hostile: &'a Bundle<'a>,
    init: Pid,
    /// The daemon's, and what it was set to before.
    pipe: PathBuf,
    settings: String,
    /// SMs of one share.
    sms: u64,
    /// MPS clients that there may be.
    slots: usize,
}

/// A process of the hostile container on the GPU.
struct Tenant {
    mib: u64,
    is_client: bool,
}

impl Scene<'_> {
    /// When it began, and when it was over.
    fn watch(&self, attack: &Attack, watched: Duration) -> Held {
        let (marker, times) = attack.tried;
        let (start, mut tried) = (Instant::now(), None);
        while !(attack.goes_on)(self) {
            if tried.is_none() && self.hostile.output().matches(marker).count() >= times {
                tried = Some(Instant::now());
            }
            match tried {
                Some(at) if at.elapsed() > QUIET => return Held::Always,
                None if start.elapsed() > BEGINS => return Held::NotTried,
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
        let began = Instant::now();
        while (attack.goes_on)(self) {
            if began.elapsed() > watched {
                return Held::No(watched);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Held::EndedAfter(began.elapsed())
    }

    /// By its cgroup, which is named after the container.
    fn tenants(&self) -> Vec<Tenant> {
        let world = self.world.dir.path().file_name().expect("a name").to_string_lossy();
        let name = format!("{world}-{}", self.hostile.id);
        let device = self.nvml.device_by_index(0).expect("a GPU");
        let running = device.running_compute_processes().unwrap_or_default();
        let clients = device.mps_running_compute_processes().unwrap_or_default();
        let is_ours = |pid: u32| {
            std::fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(&name))
        };
        let tenant = |process: &nvml_wrapper::struct_wrappers::device::ProcessInfo| Tenant {
            mib: match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => bytes >> 20,
                UsedGpuMemory::Unavailable => 0,
            },
            is_client: clients.iter().any(|client| client.pid == process.pid),
        };
        running.iter().filter(|process| is_ours(process.pid)).map(tenant).collect()
    }

    fn settings(&self) -> String {
        settings(self.world, &self.pipe)
    }

    fn hostile_sms(&self) -> u64 {
        let output = self.hostile.output();
        let mut lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["event"] == "info").map_or(0, |info| number(&info, "sm"))
    }
}

fn is_too_large(scene: &Scene<'_>) -> bool {
    scene.tenants().iter().map(|tenant| tenant.mib).sum::<u64>() > LIMIT + TOLERANCE
}

fn settings(world: &World, pipe: &std::path::Path) -> String {
    plain_mps::ask(world, pipe, "get_default_active_thread_percentage")
}

/// What another program in the neighbour's container gets.
fn next_program(neighbour: &Bundle<'_>) -> Value {
    let next = neighbour.exec(&["/bin/busybox", "timeout", "10", PROBE, "info"]);
    next.json().into_iter().next().unwrap_or(Value::Null)
}

/// What the neighbour measured, and how it ended; it may hang.
fn told(neighbour: &Bundle<'_>) -> (Value, Option<String>) {
    let find = |event: &str| {
        let output = neighbour.output();
        let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["event"] == event)
    };
    sublet_e2e::eventually(|| find("end").is_some());
    let end = find("end").and_then(|end| end["result"].as_str().map(str::to_owned));
    (find("lat").unwrap_or_default(), end)
}
