//! A look at a host, for tests.

use std::time::Instant;

use super::source::Look;
use crate::gpu_processes::Holder;
use crate::mps_daemons::Listed;
use crate::status::{
    DeviceUsed, Driver, Gpu, Guard, Health, LeaseOnDevice, LeaseUsed, OutsideProcess, Room, Status,
};
use crate::usage::ProcessUse;
use sublet_core::ledger::LeaseState;
use sublet_core::process::Process;
use sublet_core::share::{Isolation, Mode};

const GIB: u64 = 1 << 30;

fn used(memory: u64, busy: u32) -> DeviceUsed {
    DeviceUsed {
        memory_bytes: Some(memory * GIB),
        busy_percent: Some(busy),
        sm_percent: Some(71.4),
        occupancy_percent: Some(30.0),
        tensor_percent: None,
        dram_percent: Some(12.0),
        pcie_bytes_per_second: [Some(1.25e9), Some(3.0e6)],
        nvlink_bytes_per_second: [None, None],
        power_watts: Some(388.0),
        power_limit_watts: Some(700.0),
        temperature_celsius: Some(61),
        outside: vec![OutsideProcess { pid: 77, name: "python3".to_owned(), memory_bytes: Some(GIB) }],
    }
}

fn gpu(index: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{index}"),
        index,
        minor: index,
        bus_id: format!("0000:{index:02x}:00.0"),
        name: "NVIDIA H200".to_owned(),
        mode: "mps",
        health: Health { state: "ok", reason: None },
        memory_bytes: 140 * GIB,
        memory_of_host: false,
        sm_count: Some(132),
        free: Room { sm_percent: 50.0, memory_bytes: 70 * GIB },
        booked: Room { sm_percent: 50.0, memory_bytes: 70 * GIB },
        used: (index == 0).then(|| used(35, 77)),
        unknown: (index != 0).then(|| "the GPU is lost".to_owned()),
        lease_count: 1,
        mig_enabled: false,
        mig: Vec::new(),
        drained: false,
        drain: None,
        reserved: None,
    }
}

pub fn lease(number: u32, name: &str, memory: Option<u64>) -> LeaseOnDevice {
    LeaseOnDevice {
        id: format!("{number:016x}"),
        container_id: format!("{number:064x}"),
        device: "GPU-0".to_owned(),
        mode: Mode::Mps,
        isolation: Isolation::Shared,
        sm_percent: Some(12.5),
        memory_bytes: Some(8 * GIB),
        state: LeaseState::Active,
        suspended_bytes: None,
        pid: Some(4242),
        since: "2026-11-23T08:00:00Z".to_owned(),
        engine: None,
        name: Some(name.to_owned()),
        image: Some("registry.example/training:1".to_owned()),
        part_of: None,
        unit: None,
        user: "root".to_owned(),
        owner: None,
        job: None,
        used: LeaseUsed {
            memory_bytes: memory.map(|gib| gib * GIB),
            processes: memory.map(|_| 1),
            sm_percent: None,
            server_sm_percent: memory.map(|_| 77),
        },
        own_server: false,
        daemon: Some("gpu-0".to_owned()),
        taken: u64::from(number),
        called: "deadbeef".to_owned(),
        processes: Vec::new(),
    }
}

/// Two GPUs, one of them lost; three containers, one with a name that a terminal would act on.
pub fn look() -> Look {
    let hostile = format!("\u{1b}[2J{}", "x".repeat(4096));
    let holder = Holder {
        process: Process { pid: 4243, start_time: 1 },
        name: "python3".to_owned(),
        memory_bytes: Some(7 * GIB),
        is_server: false,
        is_client: true,
        lease: None,
    };
    let processes = vec![ProcessUse { holder, sm_percent: None }];
    let leases = vec![
        lease(1, "web", Some(2)),
        LeaseOnDevice { processes, ..lease(2, "training", Some(7)) },
        LeaseOnDevice { device: "GPU-1".to_owned(), ..lease(3, &hostile, None) },
    ];
    Look {
        status: Status {
            schema: "sublet.status/1",
            time: "2026-11-23T08:00:05Z".to_owned(),
            driver: Driver { version: "580.159.04".to_owned(), simulated: false },
            devices: vec![gpu(0), gpu(1)],
            leases,
            mps: Vec::<Listed>::new(),
            guard: Guard {
                watching: true,
                last_look_seconds: Some(0),
                blind: Vec::new(),
                events: Vec::new(),
            },
            mig_made: Vec::new(),
            waiting: Vec::new(),
            warnings: vec!["GPU 1: what is used is not known: the GPU is lost".to_owned()],
        },
        at: Instant::now(),
    }
}
