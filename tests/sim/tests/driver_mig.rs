//! MIG through NVML's C ABI, against nvml.h's contracts and what a real H200 answered (docs/evidence).

use std::ffi::{CStr, c_char};
use std::mem;
use std::os::fd::OwnedFd;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use crate::driver::{
    Driver, IN_USE, INSUFFICIENT_RESOURCES, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, RESET_REQUIRED,
    SUCCESS, root_or_skip,
};
use nvidia_ml::layout::contexts::{self, Kind, On};
use nvidia_ml::layout::state_file::State;
use nvidia_ml::layout::topology::Topology;
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t,
    nvmlComputeInstanceProfileInfo_v2_t, nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t,
    nvmlGpuInstancePlacement_t, nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t,
    nvmlGpuInstanceProfileInfo_v3_t,
};

/// The first GPU of a driver.
struct Gpu {
    driver: Driver,
    device: nvmlDevice_t,
}

/// NVML calls on it. Every pointer is valid unless said otherwise, and handles are never followed.
impl Gpu {
    /// The only context ends. A child that another test has forked holds its descriptor, too, until it runs its program.
    fn ends(&self, held: OwnedFd) {
        drop(held);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !contexts::list(&self.tag()).is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn up(topology: &str) -> Self {
        Self::of(Driver::up(topology))
    }

    fn of(driver: Driver) -> Self {
        let device = driver.first();
        Self { driver, device }
    }

    /// Return code, activation status, current and pending mode.
    fn set_mode(&self, mode: u32) -> (u32, u32, u32, u32) {
        let (lib, mut status, mut current, mut pending) = (&self.driver.lib, 99, 99, 99);
        // SAFETY: as said above.
        unsafe {
            let code = lib.nvmlDeviceSetMigMode(self.device, mode, &raw mut status);
            assert_eq!(lib.nvmlDeviceGetMigMode(self.device, &raw mut current, &raw mut pending), SUCCESS);
            (code, status, current, pending)
        }
    }

    fn create(&self, profile: u32) -> Result<nvmlGpuInstance_t, u32> {
        let mut made = null_mut();
        // SAFETY: as said above.
        let code =
            unsafe { self.driver.lib.nvmlDeviceCreateGpuInstance(self.device, profile, &raw mut made) };
        if code == SUCCESS { Ok(made) } else { Err(code) }
    }

    fn create_at(&self, profile: u32, start: u32, size: u32) -> Result<nvmlGpuInstance_t, u32> {
        let (mut made, place) = (null_mut(), nvmlGpuInstancePlacement_t { start, size });
        let (lib, device) = (&self.driver.lib, self.device);
        // SAFETY: as said above.
        let code = unsafe {
            lib.nvmlDeviceCreateGpuInstanceWithPlacement(device, profile, &raw const place, &raw mut made)
        };
        if code == SUCCESS { Ok(made) } else { Err(code) }
    }

    /// Id, profile, start and size.
    fn info(&self, instance: nvmlGpuInstance_t) -> Result<(u32, u32, u32, u32), u32> {
        // SAFETY: plain integers and a pointer.
        let mut info: nvmlGpuInstanceInfo_t = unsafe { mem::zeroed() };
        // SAFETY: as said above.
        let code = unsafe { self.driver.lib.nvmlGpuInstanceGetInfo(instance, &raw mut info) };
        if code != SUCCESS {
            return Err(code);
        }
        assert_eq!(info.device, self.device);
        Ok((info.id, info.profileId, info.placement.start, info.placement.size))
    }

    fn destroy(&self, instance: nvmlGpuInstance_t) -> u32 {
        // SAFETY: as said above.
        unsafe { self.driver.lib.nvmlGpuInstanceDestroy(instance) }
    }

    fn capacity(&self, profile: u32) -> u32 {
        let (lib, mut count) = (&self.driver.lib, 99);
        // SAFETY: as said above.
        let code =
            unsafe { lib.nvmlDeviceGetGpuInstanceRemainingCapacity(self.device, profile, &raw mut count) };
        assert_eq!(code, SUCCESS);
        count
    }

    fn compute(&self, instance: nvmlGpuInstance_t, profile: u32) -> Result<nvmlComputeInstance_t, u32> {
        let (lib, mut made) = (&self.driver.lib, null_mut());
        // SAFETY: as said above.
        let code = unsafe { lib.nvmlGpuInstanceCreateComputeInstance(instance, profile, &raw mut made) };
        if code == SUCCESS { Ok(made) } else { Err(code) }
    }

    /// Id, profile, start and size.
    fn compute_info(&self, compute: nvmlComputeInstance_t) -> Result<(u32, u32, u32, u32), u32> {
        // SAFETY: plain integers and pointers.
        let mut info: nvmlComputeInstanceInfo_t = unsafe { mem::zeroed() };
        // SAFETY: as said above.
        let code = unsafe { self.driver.lib.nvmlComputeInstanceGetInfo_v2(compute, &raw mut info) };
        if code != SUCCESS {
            return Err(code);
        }
        assert!(info.device == self.device && self.info(info.gpuInstance).is_ok());
        Ok((info.id, info.profileId, info.placement.start, info.placement.size))
    }

    fn destroy_compute(&self, compute: nvmlComputeInstance_t) -> u32 {
        // SAFETY: as said above.
        unsafe { self.driver.lib.nvmlComputeInstanceDestroy(compute) }
    }

    /// GPU instance id, compute instance id and UUID of each MIG device.
    fn devices(&self) -> Vec<(u32, u32, String)> {
        let (lib, mut count) = (&self.driver.lib, 99);
        // SAFETY: as said above.
        unsafe {
            assert_eq!(lib.nvmlDeviceGetMaxMigDeviceCount(self.device, &raw mut count), SUCCESS);
            let handle = |index| {
                let mut mig = null_mut();
                let code = lib.nvmlDeviceGetMigDeviceHandleByIndex(self.device, index, &raw mut mig);
                (code == SUCCESS).then_some(mig)
            };
            let ids = |mig| {
                let (mut gi, mut ci, mut uuid) = (99, 99, [0 as c_char; 96]);
                assert_eq!(lib.nvmlDeviceGetGpuInstanceId(mig, &raw mut gi), SUCCESS);
                assert_eq!(lib.nvmlDeviceGetComputeInstanceId(mig, &raw mut ci), SUCCESS);
                assert_eq!(lib.nvmlDeviceGetUUID(mig, uuid.as_mut_ptr(), 96), SUCCESS);
                (gi, ci, CStr::from_ptr(uuid.as_ptr()).to_str().unwrap().to_owned())
            };
            (0..count).filter_map(handle).map(ids).collect()
        }
    }

    fn tag(&self) -> String {
        Topology::load(&self.driver.root).unwrap().tag
    }

    /// Everything below the GPU's capability directory, such as `gi9/ci0`.
    fn capabilities(&self) -> Vec<String> {
        let below = |dir: &std::path::Path| -> Vec<String> {
            let entries = std::fs::read_dir(dir).unwrap().flatten();
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
        };
        let mig = self.driver.root.join("proc/driver/nvidia/capabilities/gpu0/mig");
        let mut found: Vec<String> = Vec::new();
        for gi in below(&mig) {
            let inside = below(&mig.join(&gi)).into_iter().filter(|name| name != "access");
            found.extend(inside.map(|ci| format!("{gi}/{ci}")));
            found.push(gi);
        }
        found.sort();
        found
    }
}

/// `NVML_STRUCT_VERSION`.
const fn version(size: u32, number: u32) -> u32 {
    size | number << 24
}

#[test]
fn profile_structs_are_those_of_driver_580() {
    let gpu = Gpu::up("h200");
    let (lib, device) = (&gpu.driver.lib, gpu.device);
    // SAFETY: plain integers; pointers are null or valid.
    unsafe {
        let mut v1: nvmlGpuInstanceProfileInfo_t = mem::zeroed();
        let mut v2: nvmlGpuInstanceProfileInfo_v2_t = mem::zeroed();
        let mut v3: nvmlGpuInstanceProfileInfo_v3_t = mem::zeroed();
        assert_eq!((size_of_val(&v1), size_of_val(&v2), size_of_val(&v3)), (48, 152, 152));
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfo(device, 4, &raw mut v1), SUCCESS);
        assert_eq!((v1.id, v1.sliceCount, v1.instanceCount, v1.multiprocessorCount), (0, 7, 1, 132));
        assert_eq!((v1.copyEngineCount, v1.decoderCount, v1.encoderCount), (8, 7, 0));
        assert_eq!((v1.jpegCount, v1.ofaCount, v1.memorySizeMB, v1.isP2pSupported), (7, 1, 143_360, 0));
        v2.version = version(152, 2);
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfoV(device, 7, &raw mut v2), SUCCESS);
        assert_eq!(CStr::from_ptr(v2.name.as_ptr()), c"MIG 1g.18gb+me");
        assert_eq!((v2.version, v2.id, v2.instanceCount, v2.ofaCount, v2.memorySizeMB), (0, 20, 1, 1, 16384));
        v3.version = version(152, 3);
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfoV(device, 9, (&raw mut v3).cast()), SUCCESS);
        assert_eq!((v3.version, v3.id, v3.multiprocessorCount, v3.memorySizeMB), (0, 15, 26, 33280));
        assert_eq!((v3.name[0], v3.capabilities), (0, 0), "driver 580 leaves them out");
        for wrong in [0, 7, version(152, 1), version(48, 1), version(152, 4)] {
            v2.version = wrong;
            let code = lib.nvmlDeviceGetGpuInstanceProfileInfoV(device, 0, &raw mut v2);
            assert_eq!(code, INVALID_ARGUMENT, "{wrong}");
        }
        v2.version = version(152, 2);
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfoByIdV(device, 14, &raw mut v2), SUCCESS);
        assert_eq!(CStr::from_ptr(v2.name.as_ptr()), c"MIG 2g.35gb");
        let codes =
            [5, 8, 16, 17].map(|index| lib.nvmlDeviceGetGpuInstanceProfileInfo(device, index, &raw mut v1));
        assert_eq!(codes, [NOT_SUPPORTED, NOT_SUPPORTED, NOT_SUPPORTED, INVALID_ARGUMENT]);
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfo(device, 0, null_mut()), INVALID_ARGUMENT);
        assert_eq!(lib.nvmlDeviceGetGpuInstanceProfileInfoV(device, 0, null_mut()), INVALID_ARGUMENT);
    }
}

#[test]
fn with_mig_off_there_are_no_instances_and_none_can_be_made() {
    let gpu = Gpu::up("h200");
    let (lib, device) = (&gpu.driver.lib, gpu.device);
    assert_eq!([19, 20, 15, 14, 9, 5, 0].map(|id| gpu.capacity(id)), [7, 1, 4, 3, 2, 1, 1]);
    assert_eq!(gpu.create(19), Err(NOT_SUPPORTED));
    assert_eq!(gpu.create_at(19, 0, 1), Err(NOT_SUPPORTED));
    assert_eq!(gpu.create(77), Err(INVALID_ARGUMENT));
    assert!(gpu.devices().is_empty());
    let (mut instances, mut count, mut one, mut id) = ([null_mut(); 8], 8, null_mut(), 0);
    // SAFETY: every pointer is valid.
    unsafe {
        let list = lib.nvmlDeviceGetGpuInstances(device, 19, instances.as_mut_ptr(), &raw mut count);
        assert_eq!((list, count), (SUCCESS, 0));
        assert_eq!(lib.nvmlDeviceGetGpuInstanceById(device, 0, &raw mut one), NOT_FOUND);
        for index in [0, 6, 7] {
            let mut mig = null_mut();
            let code = lib.nvmlDeviceGetMigDeviceHandleByIndex(device, index, &raw mut mig);
            assert_eq!(code, NOT_FOUND, "{index}");
        }
        assert_eq!(lib.nvmlDeviceGetGpuInstanceId(device, &raw mut id), INVALID_ARGUMENT);
    }
    assert!(gpu.capabilities().is_empty());
}

#[test]
fn hopper_switches_at_once_when_nothing_runs() {
    if !root_or_skip("MIG mode") {
        return;
    }
    let gpu = Gpu::up("h100x2-mig-off");
    let minor_1 = On { minor: 1, instance: None };
    let held = contexts::announce(&gpu.tag(), minor_1, Kind::Compute, 500).unwrap();
    assert_eq!(gpu.set_mode(1), (SUCCESS, IN_USE, 0, 1));
    assert_eq!(gpu.create(19), Err(NOT_SUPPORTED), "pending is not on");
    gpu.ends(held);
    assert_eq!(gpu.set_mode(1), (SUCCESS, SUCCESS, 1, 1));
    assert_eq!(gpu.set_mode(7).0, INVALID_ARGUMENT);
    let instance = gpu.create(19).unwrap();
    assert_eq!(gpu.set_mode(0), (SUCCESS, IN_USE, 1, 0));
    assert_eq!(gpu.destroy(instance), SUCCESS);
    assert_eq!(gpu.set_mode(0), (SUCCESS, SUCCESS, 0, 0));
    assert!(State::read(&gpu.driver.root).unwrap().resets.is_empty());
    assert_eq!(gpu.set_mode(1), (SUCCESS, SUCCESS, 1, 1));
    gpu.driver.reboot();
    assert_eq!(gpu.set_mode(0), (SUCCESS, SUCCESS, 0, 0));
    assert_eq!(
        gpu.driver.said("--query-gpu=mig.mode.current,mig.mode.pending --format=csv,noheader"),
        "Disabled, Disabled\nDisabled, Disabled\n"
    );
}

#[test]
fn ampere_resets_and_remembers() {
    if !root_or_skip("MIG mode") {
        return;
    }
    let gpu = Gpu::up("a100x2-mig");
    let second = "GPU-5b1e7000-0000-4000-8000-000000000a10";
    assert_eq!(gpu.driver.said("-i 1 -mig 1"), "Enabled MIG Mode for GPU 00000000:65:00.0\nAll done.\n");
    assert_eq!(State::read(&gpu.driver.root).unwrap().resets.get(second), Some(&1));
    let busy = gpu.driver.said("-i 0 -mig 0");
    assert_eq!(
        busy,
        "Warning: MIG mode is in pending disable state for GPU 00000000:17:00.0:In use by another client\n"
    );
    assert_eq!(gpu.set_mode(1), (SUCCESS, SUCCESS, 1, 1));
    gpu.driver.reboot();
    assert_eq!(gpu.set_mode(1), (SUCCESS, SUCCESS, 1, 1), "the mode is kept");
    assert!(gpu.devices().is_empty() && gpu.capabilities().is_empty(), "the instances are not");
}

#[test]
fn a_passed_through_ampere_wants_its_reset() {
    if !root_or_skip("MIG mode") {
        return;
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/a30-mig.toml");
    let text = std::fs::read_to_string(file).unwrap();
    let text = text.split("[[gpu.mig]]").next().unwrap().replace("\"enabled\"", "\"disabled\"");
    let gpu = Gpu::of(Driver::up_with(&format!("{text}\nvirtualization = \"passthrough\"\n")));
    assert_eq!(gpu.set_mode(1), (SUCCESS, RESET_REQUIRED, 0, 1));
    let reset = gpu.driver.said("--gpu-reset -i 0");
    assert_eq!(reset, "GPU 00000000:AF:00.0 was successfully reset.\nAll done.\n");
    assert_eq!(gpu.set_mode(1), (SUCCESS, SUCCESS, 1, 1));
    assert_eq!(gpu.create(5).map(|made| gpu.info(made)), Ok(Ok((2, 5, 0, 2))));
}

#[test]
fn who_has_no_mig_says_so() {
    for topology in ["pascal", "vgpu"] {
        let gpu = Gpu::up(topology);
        let mut status = 99;
        // SAFETY: valid pointers.
        let code = unsafe { gpu.driver.lib.nvmlDeviceSetMigMode(gpu.device, 1, &raw mut status) };
        assert_eq!((code, status), (NOT_SUPPORTED, 99), "{topology}");
        assert!(gpu.create(19).is_err());
        assert_eq!(gpu.driver.said("mig -lgip"), "No MIG-supported devices found.\n", "{topology}");
    }
}

#[test]
fn instances_are_made_where_there_is_room() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let gpu = Gpu::up("h200-mig");
    let seven: Vec<_> = (0..7).map(|_| gpu.info(gpu.create(19).unwrap()).unwrap()).collect();
    let (ids, starts): (Vec<u32>, Vec<u32>) = seven.iter().map(|info| (info.0, info.2)).unzip();
    assert_eq!((ids, starts), (vec![9, 7, 8, 11, 12, 13, 14], vec![6, 4, 5, 0, 1, 2, 3]));
    assert_eq!(gpu.create(19), Err(INSUFFICIENT_RESOURCES));
    assert_eq!([19, 15, 14, 9, 0].map(|id| gpu.capacity(id)), [0, 0, 0, 0, 0]);
    assert!(gpu.driver.said("mig -dgi").contains("Successfully destroyed GPU instance ID 14 from GPU  0\n"));

    let four = gpu.create_at(5, 0, 4).unwrap();
    assert_eq!(gpu.info(four), Ok((2, 5, 0, 4)));
    assert_eq!(gpu.create_at(14, 2, 2), Err(INSUFFICIENT_RESOURCES), "overlaps");
    for (profile, start, size) in [(14, 1, 2), (14, 6, 2), (5, 4, 4), (14, 4, 1), (19, 7, 1)] {
        assert_eq!(gpu.create_at(profile, start, size), Err(INVALID_ARGUMENT), "{profile} {start}:{size}");
    }
    assert_eq!(gpu.info(gpu.create_at(20, 5, 1).unwrap()), Ok((8, 20, 5, 1)));
    assert_eq!(gpu.create(20), Err(INSUFFICIENT_RESOURCES), "one has the media engines");
    assert_eq!([19, 20, 15, 14, 9, 5, 0].map(|id| gpu.capacity(id)), [2, 0, 1, 0, 0, 0, 0]);
    assert_eq!(gpu.capabilities(), ["gi2", "gi8"]);
    let access = gpu.driver.read("proc/driver/nvidia/capabilities/gpu0/mig/gi8/access");
    assert_eq!(access, "DeviceFileMinor: 75\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
    assert!(gpu.driver.root.join("dev/nvidia-caps/nvidia-cap75").exists());
    // SAFETY: this tests a null pointer.
    let no_handle = unsafe { gpu.driver.lib.nvmlDeviceCreateGpuInstance(gpu.device, 19, null_mut()) };
    let (lib, mut made) = (&gpu.driver.lib, null_mut());
    // SAFETY: as above.
    let no_place =
        unsafe { lib.nvmlDeviceCreateGpuInstanceWithPlacement(gpu.device, 19, null(), &raw mut made) };
    assert_eq!((no_handle, no_place), (INVALID_ARGUMENT, INVALID_ARGUMENT));
}

#[test]
fn an_instance_made_again_has_its_ids_and_another_uuid() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let gpu = Gpu::up("h200-mig");
    let make = || {
        let instance = gpu.create_at(14, 2, 2).unwrap();
        (instance, gpu.compute(instance, 1).unwrap())
    };
    let (instance, compute) = make();
    let before = gpu.devices();
    let files = gpu.capabilities();
    assert_eq!((gpu.destroy(instance), gpu.destroy_compute(compute)), (IN_USE, SUCCESS));
    assert_eq!((gpu.destroy(instance), gpu.destroy(instance)), (SUCCESS, INVALID_ARGUMENT));
    assert!(gpu.devices().is_empty() && gpu.capabilities().is_empty());
    let (again, _) = make();
    let after = gpu.devices();
    assert_eq!(((before[0].0, before[0].1), (after[0].0, after[0].1)), ((6, 0), (6, 0)));
    assert_ne!(before[0].2, after[0].2);
    assert_eq!(gpu.capabilities(), files);
    assert!(gpu.info(again).is_ok());
    assert_eq!(
        (gpu.info(instance), gpu.compute_info(compute)),
        (Err(INVALID_ARGUMENT), Err(INVALID_ARGUMENT))
    );
}

#[test]
fn compute_instances_share_a_gpu_instance() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let gpu = Gpu::up("h200-mig");
    let (lib, instance) = (&gpu.driver.lib, gpu.create_at(9, 4, 4).unwrap());
    // SAFETY: plain integers.
    let mut info: nvmlComputeInstanceProfileInfo_v2_t = unsafe { mem::zeroed() };
    info.version = version(136, 2);
    // SAFETY: valid pointers.
    let code = unsafe { lib.nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance, 1, 0, &raw mut info) };
    assert_eq!((code, info.id, info.sliceCount, info.instanceCount), (SUCCESS, 1, 2, 1));
    assert_eq!((info.multiprocessorCount, info.sharedCopyEngineCount), (32, 3));
    // SAFETY: NVML ends names with a NUL.
    assert_eq!(unsafe { CStr::from_ptr(info.name.as_ptr()) }, c"MIG 2c.3g.71gb");
    let left = |profile| {
        let mut count = 99;
        // SAFETY: valid pointers.
        let code = unsafe {
            lib.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, profile, &raw mut count)
        };
        (code, count)
    };
    assert_eq!([left(0), left(1), left(2)], [(SUCCESS, 3), (SUCCESS, 1), (SUCCESS, 1)]);
    assert_eq!(left(3), (INVALID_ARGUMENT, 99));
    let two = gpu.compute(instance, 1).unwrap();
    assert_eq!(gpu.compute_info(two), Ok((0, 1, 0, 2)));
    let (place, mut one) = (nvmlComputeInstancePlacement_t { start: 2, size: 1 }, null_mut());
    // SAFETY: valid pointers.
    let code = unsafe {
        lib.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, 0, &raw const place, &raw mut one)
    };
    assert_eq!((code, gpu.compute_info(one)), (SUCCESS, Ok((1, 0, 2, 1))));
    assert_eq!(gpu.compute(instance, 0), Err(INSUFFICIENT_RESOURCES));
    assert_eq!([left(0), left(1), left(2)], [(SUCCESS, 0), (SUCCESS, 0), (SUCCESS, 0)]);
    assert_eq!(gpu.capabilities(), ["gi1", "gi1/ci0", "gi1/ci1"]);
    let ids: Vec<_> = gpu.devices().into_iter().map(|(gi, ci, _)| (gi, ci)).collect();
    assert_eq!(ids, [(1, 0), (1, 1)]);
    assert_eq!(gpu.destroy_compute(two), SUCCESS);
    assert_eq!(gpu.compute_info(gpu.compute(instance, 0).unwrap()), Ok((0, 0, 0, 1)), "the id is used again");
}

#[test]
fn who_has_a_context_keeps_its_instance() {
    if !root_or_skip("MIG instances") {
        return;
    }
    let gpu = Gpu::up("h200-mig");
    let instance = gpu.create_at(14, 0, 2).unwrap();
    let (first, second) = (gpu.compute(instance, 0).unwrap(), gpu.compute(instance, 0).unwrap());
    let on = On { minor: 0, instance: Some((5, 1)) };
    let held = contexts::announce(&gpu.tag(), on, Kind::Client, 200).unwrap();
    assert_eq!((gpu.destroy_compute(second), gpu.destroy_compute(first)), (IN_USE, SUCCESS));
    assert_eq!(gpu.destroy(instance), IN_USE);
    let refused = gpu.driver.smi("mig -dci -gi 5");
    assert_eq!(
        String::from_utf8(refused.stdout).unwrap(),
        "Unable to destroy compute instance ID  1 from GPU  0 GPU instance ID  5: In use by another client\n\
         Failed to destroy compute instances: In use by another client\n"
    );
    assert_eq!(refused.status.code(), Some(19));
    gpu.ends(held);
    assert_eq!((gpu.destroy_compute(second), gpu.destroy(instance)), (SUCCESS, SUCCESS));
}
