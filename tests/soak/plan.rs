//! What will be done, from a seed alone: the same seed gives each lane the same steps and the saboteur the same faults.
//! (How lanes interleave is up to the machine.)

use fastrand::Rng;

/// Containers that a lane has at once.
pub const SLOTS: usize = 4;

/// What a container asks for.
#[derive(Debug)]
pub struct Share {
    pub annotations: &'static [(&'static str, &'static str)],
    /// Its use of a device, in the ledger's words of [`crate::books`].
    pub used_as: Use,
    /// Thousandths of a percent.
    pub sm: u64,
    pub memory_mib: u64,
    /// Whole GPUs; 0 for MIG devices.
    pub gpus: usize,
    pub processes: u64,
    /// Servers that it brings to a device.
    pub servers: u64,
}

/// How a device is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    Exclusive,
    Mig,
    Mps,
    TimeSlice,
}

impl Share {
    /// The same with an MPS server of its own, which takes turns with others.
    pub fn dedicated(&self) -> Self {
        let used_as = if self.used_as == Use::Mps { Use::TimeSlice } else { self.used_as };
        Self { used_as, ..*self }
    }
}

const PLAIN: Share =
    Share { annotations: &[], used_as: Use::Mps, sm: 0, memory_mib: 0, gpus: 1, processes: 1, servers: 1 };

pub static SHARES: [Share; 13] = [
    Share {
        annotations: &[("sublet.sm", "25"), ("sublet.memory", "8GiB")],
        sm: 25_000,
        memory_mib: 8192,
        ..PLAIN
    },
    Share { annotations: &[("sublet.sm", "50")], sm: 50_000, ..PLAIN },
    Share {
        annotations: &[("sublet.sm", "12.5"), ("sublet.memory", "2GiB"), ("sublet.processes", "2")],
        sm: 12_500,
        memory_mib: 2048,
        processes: 2,
        ..PLAIN
    },
    Share {
        annotations: &[("sublet.sm", "30"), ("sublet.memory", "40GiB")],
        sm: 30_000,
        memory_mib: 40_960,
        ..PLAIN
    },
    Share { annotations: &[("sublet.gpu", "any")], used_as: Use::TimeSlice, servers: 0, ..PLAIN },
    Share {
        annotations: &[("sublet.mode", "time-slice"), ("sublet.memory", "60GiB")],
        used_as: Use::TimeSlice,
        memory_mib: 61_440,
        ..PLAIN
    },
    Share {
        annotations: &[("sublet.sm", "40"), ("sublet.memory", "4GiB"), ("sublet.isolation", "dedicated")],
        used_as: Use::TimeSlice,
        memory_mib: 4096,
        ..PLAIN
    },
    Share {
        annotations: &[("sublet.gpu", "any:2"), ("sublet.sm", "25"), ("sublet.memory", "8GiB")],
        used_as: Use::TimeSlice,
        memory_mib: 8192,
        gpus: 2,
        ..PLAIN
    },
    Share { annotations: &[("sublet.mode", "exclusive")], used_as: Use::Exclusive, servers: 0, ..PLAIN },
    Share {
        annotations: &[("sublet.mode", "exclusive"), ("sublet.wait", "2s")],
        used_as: Use::Exclusive,
        servers: 0,
        ..PLAIN
    },
    Share {
        annotations: &[("sublet.gpu", "any:2"), ("sublet.mode", "exclusive")],
        used_as: Use::Exclusive,
        gpus: 2,
        servers: 0,
        ..PLAIN
    },
    Share { annotations: &[("sublet.mig", "1g.18gb")], used_as: Use::Mig, gpus: 0, servers: 0, ..PLAIN },
    Share { annotations: &[("sublet.mig", "2g.35gb")], used_as: Use::Mig, gpus: 0, servers: 0, ..PLAIN },
];

/// How the share reaches the container. Engines that have only one way take that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Shim,
    Hook,
}

/// A limit under which the shim runs: no descriptors left, no memory left.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    Descriptors(u64),
    AddressSpaceMib(u64),
}

/// One step of a lane. Slots are the lane's own containers.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// Starts a container; `command` is one of [`COMMANDS`].
    Start {
        slot: usize,
        share: usize,
        by: By,
        command: usize,
    },
    /// The same, killed with SIGKILL after this time: what the engine started, not the container.
    StartKilled {
        slot: usize,
        share: usize,
        by: By,
        after_ms: u64,
    },
    StartLimited {
        slot: usize,
        share: usize,
        limit: Limit,
    },
    Exec {
        slot: usize,
    },
    Stop {
        slot: usize,
    },
    StopKilled {
        slot: usize,
        after_ms: u64,
    },
    /// SIGKILL for the container's first process.
    KillInit {
        slot: usize,
    },
    Pause {
        ms: u64,
    },
}

/// What the containers run. The last ends by itself.
pub const COMMANDS: [&[&str]; 3] =
    [&["/usr/bin/cuda-probe", "hold", "3600"], &["/bin/sleep", "3600"], &["/bin/true"]];

/// One fault, or a command of the administrator's.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    KillServe,
    /// The MPS control daemon of this number, of those that run.
    KillControl(usize),
    KillServer(usize),
    /// The next process of this name that is seen: the shim, the hook, a helper, or a part of the engine.
    KillNext(&'static str),
    Refresh,
    /// One of [`LAYOUTS`] for the GPU in MIG mode.
    Layout(usize),
    FullDisk {
        ms: u64,
    },
    Unmounted {
        ms: u64,
    },
    Drained {
        gpu: usize,
        ms: u64,
    },
    LedgerLost,
    Gc,
    Status,
    StopIdleDaemons,
}

/// Layouts of the GPU in MIG mode.
pub const LAYOUTS: [&str; 3] = [
    "{ profile = \"1g.18gb\", count = 7 }",
    "{ profile = \"2g.35gb\", count = 3 }, { profile = \"1g.18gb\" }",
    "{ profile = \"3g.71gb\" }, { profile = \"1g.18gb\", count = 3 }",
];

/// A stream of its own for each lane: the seeds of neighbours are not near each other.
fn dice(seed: u64, lane: u64) -> Rng {
    let mut seeds = Rng::with_seed(seed);
    Rng::with_seed(seeds.u64(..) ^ Rng::with_seed(lane).u64(..))
}

/// The steps of one lane, without end.
pub struct Lane {
    dice: Rng,
    /// Which slots would be taken if every start succeeded.
    taken: [bool; SLOTS],
}

impl Lane {
    pub fn new(seed: u64, lane: u64) -> Self {
        Self { dice: dice(seed, lane), taken: [false; SLOTS] }
    }

    fn start(&mut self, slot: usize) -> Step {
        let dice = &mut self.dice;
        let share = dice.usize(0..SHARES.len());
        let by = if dice.f64() < 0.25 { By::Hook } else { By::Shim };
        match dice.u8(0..100) {
            0..8 => Step::StartKilled { slot, share, by, after_ms: dice.u64(0..120) },
            8..10 => Step::StartLimited { slot, share, limit: Limit::Descriptors(dice.u64(3..16)) },
            10..12 => Step::StartLimited { slot, share, limit: Limit::AddressSpaceMib(dice.u64(1..24)) },
            _ => Step::Start { slot, share, by, command: dice.usize(0..COMMANDS.len()) },
        }
    }

    fn with(&mut self, slot: usize) -> Step {
        let dice = &mut self.dice;
        let step = match dice.u8(0..100) {
            0..20 => return Step::Exec { slot },
            20..30 => Step::KillInit { slot },
            30..36 => Step::StopKilled { slot, after_ms: dice.u64(0..60) },
            _ => Step::Stop { slot },
        };
        self.taken[slot] = matches!(step, Step::KillInit { .. } | Step::StopKilled { .. });
        step
    }
}

impl Iterator for Lane {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.dice.f64() < 0.05 {
            return Some(Step::Pause { ms: self.dice.u64(0..400) });
        }
        let slot = self.dice.usize(0..SLOTS);
        if self.taken[slot] {
            return Some(self.with(slot));
        }
        self.taken[slot] = true;
        Some(self.start(slot))
    }
}

/// The saboteur's faults, each with the milliseconds to wait before it, without end. `parts`: programs of the engine.
pub struct Faults {
    dice: Rng,
    parts: &'static [&'static str],
}

impl Faults {
    pub fn new(seed: u64, parts: &'static [&'static str]) -> Self {
        Self { dice: dice(seed, u64::MAX), parts }
    }
}

impl Iterator for Faults {
    type Item = (u64, Fault);

    fn next(&mut self) -> Option<Self::Item> {
        let dice = &mut self.dice;
        let wait = dice.u64(200..5000);
        let fault = match dice.u8(0..100) {
            0..8 => Fault::KillServe,
            8..18 => Fault::KillControl(dice.usize(0..8)),
            18..28 => Fault::KillServer(dice.usize(0..8)),
            28..36 => Fault::KillNext("sublet-runtime"),
            36..44 => Fault::KillNext("sublet-hook"),
            44..50 => Fault::KillNext("sublet"),
            50..58 => Fault::KillNext(dice.choice(self.parts).copied().unwrap_or("sublet-runtime")),
            58..64 => Fault::Refresh,
            64..70 => Fault::Layout(dice.usize(0..LAYOUTS.len())),
            70..76 => Fault::FullDisk { ms: dice.u64(50..1500) },
            76..80 => Fault::Unmounted { ms: dice.u64(50..800) },
            80..85 => Fault::Drained { gpu: dice.usize(0..4), ms: dice.u64(100..1500) },
            85..88 => Fault::LedgerLost,
            88..93 => Fault::Gc,
            93..97 => Fault::Status,
            _ => Fault::StopIdleDaemons,
        };
        Some((wait, fault))
    }
}
