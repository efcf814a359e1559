//! Devices and requests for tests.
#![allow(
    missing_docs,
    clippy::missing_panics_doc,
    clippy::new_without_default,
    reason = "for tests: the names say it, and a panic is what they are for"
)]

use std::num::NonZeroU32;
use std::time::Duration;

use crate::inventory::{
    ComputeMode, Device, Driver, Fingerprint, GpuProcess, Inventory, Majors, MigDevice, Virtualization,
};
use crate::request::Request;
use crate::share::{Capabilities, Devices, Isolation, Mode, Priority, Suspend};

/// One GiB in bytes.
pub const GIB: u64 = 1 << 30;

/// `GPU-<n>`: Hopper, 132 SMs, 100 GiB, all of it free.
pub fn device(n: u32) -> Device {
    Device {
        uuid: format!("GPU-{n}"),
        index: n,
        minor: n,
        bus_id: format!("0000:{:02x}:00.0", 0x10 + n),
        name: "NVIDIA H200".into(),
        compute_capability: (9, 0),
        sm_count: Some(132),
        memory_bytes: 100 * GIB,
        memory_free_bytes: 100 * GIB,
        memory_of_host: false,
        unknown: std::collections::BTreeMap::default(),
        mig_enabled: false,
        compute_mode: ComputeMode::Default,
        display_active: false,
        virtualization: Virtualization::None,
        dri_nodes: vec![],
        nodes: vec![],
        processes: vec![],
        mig_device: None,
    }
}

/// `MIG-<n>`, the n-th MIG device of `gpu`: GPU instance n, alone in it, an eighth of all there is.
pub fn part(gpu: &Device, n: u32, profile: &str) -> Device {
    let part = MigDevice {
        gpu: gpu.uuid.clone(),
        index: n,
        profile: profile.into(),
        gi: n,
        ci: 0,
        placement: Some((n, 1)),
        slices: (1, 1),
        gpu_sm_count: gpu.sm_count,
        gpu_memory_bytes: gpu.memory_bytes,
        siblings: vec![],
        sibling_processes: vec![],
        fault: None,
    };
    Device {
        uuid: format!("MIG-{n}"),
        mig_enabled: true,
        sm_count: Some(16),
        memory_bytes: gpu.memory_bytes / 8,
        memory_free_bytes: gpu.memory_bytes / 8,
        mig_device: Some(part),
        ..gpu.clone()
    }
}

/// A host with `devices`, MPS installed, CUDA 13.0.
pub fn host(devices: Vec<Device>) -> Inventory {
    Inventory {
        schema: "sublet.inventory/1".into(),
        fingerprint: Fingerprint {
            boot_id: "boot".into(),
            driver_version: "580.159.04".into(),
            gpus: vec![],
            mig: vec![],
        },
        probed_at: 0,
        mig_changes: 0,
        driver: Driver {
            version: "580.159.04".into(),
            cuda: (13, 0),
            simulated: false,
            mps_control: Some("/usr/bin/nvidia-cuda-mps-control".into()),
            mps_missing: None,
            smi: None,
            majors: Majors::default(),
            mig_caps: [None, None],
        },
        devices,
        left_out: vec![],
        links: vec![],
        files: vec![],
        directories: vec![],
    }
}

/// `sublet.mode=<mode>` on any device.
pub fn request(mode: Mode) -> Request {
    Request {
        devices: Devices::Any(NonZeroU32::MIN),
        mode: Some(mode),
        default_mode: Mode::TimeSlice,
        isolation: Isolation::Shared,
        sm: None,
        memory: None,
        mig: None,
        mig_caps: vec![],
        priority: Priority::Normal,
        guard: None,
        suspend: Suspend::Never,
        visible_devices: None,
        default_directory: true,
        owner: None,
        processes: NonZeroU32::MIN,
        capabilities: Capabilities::default(),
        not_served: Vec::new(),
        wait: Duration::ZERO,
    }
}

/// A process on a GPU.
pub fn process(pid: i32, pid_namespace: u64, memory_bytes: u64) -> GpuProcess {
    GpuProcess {
        pid,
        name: "python3".into(),
        memory_bytes,
        pid_namespace,
        cgroups: vec!["/user.slice".into()],
        mps_server: false,
    }
}
