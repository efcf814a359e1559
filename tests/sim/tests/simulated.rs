//! The simulated driver as the product uses it: created, queried through NVML, removed.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::sys::stat::{major, minor};
use nix::unistd::geteuid;
use nvidia_ml::layout::contexts::{self, Kind, On};
use nvidia_ml::layout::{Root, trailer};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{
    ComputeMode, GpuVirtualizationMode, P2pCapabilitiesIndex, P2pStatus, TopologyLevel,
};
use nvml_wrapper::enums::device::{DeviceArchitecture, SampleValue, UsedGpuMemory};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;

const MIB: u64 = 1 << 20;

/// A simulated driver, ended when dropped.
struct Driver {
    root: Root,
    parent: tempfile::TempDir,
}

impl Driver {
    fn up(topology: &str) -> Self {
        Self::up_from(&Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("topologies/{topology}.toml")))
    }

    fn up_from(topology: &Path) -> Self {
        let parent = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let dir = parent.path().join("root");
        let output = sim(&["up", "--topology", topology.to_str().unwrap(), "--root", dir.to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text.lines().last().unwrap(), dir.join("config.toml").to_str().unwrap());
        Self { root: Root::new(dir), parent }
    }

    fn library(&self) -> PathBuf {
        self.root.libraries().join("libnvidia-ml.so.1")
    }

    fn nvml(&self) -> Nvml {
        self.try_nvml().unwrap()
    }

    fn try_nvml(&self) -> Result<Nvml, NvmlError> {
        Nvml::builder().lib_path(self.library().as_os_str()).init()
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap()
    }

    fn smi(&self, arguments: &[&str]) -> String {
        let output = Command::new(self.root.join("usr/bin/nvidia-smi")).args(arguments).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn down(&self) -> Output {
        sim(&["down", "--root", self.root.dir().to_str().unwrap()])
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.down();
    }
}

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sublet-sim")).args(arguments).output().unwrap()
}

fn root_or_skip(what: &str) -> bool {
    let root = geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: {what}: needs root");
    }
    root
}

#[test]
fn an_h200_answers_with_what_was_measured() {
    let driver = Driver::up("h200");
    let nvml = driver.nvml();
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.159.04");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);
    assert_eq!(nvml.device_count().unwrap(), 1);
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.name().unwrap(), "NVIDIA H200");
    assert_eq!(device.uuid().unwrap(), "GPU-5b1e7000-0000-4000-8000-000000000100");
    assert_eq!(device.pci_info().unwrap().bus_id, "00000000:3B:00.0");
    assert_eq!(device.num_cores().unwrap(), 132 * 128);
    let capability = device.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (9, 0));
    assert_eq!(device.architecture().unwrap(), DeviceArchitecture::Hopper);
    let memory = device.memory_info().unwrap();
    assert_eq!((memory.total, memory.used, memory.free), (143_771 * MIB, 0, (143_771 - 500) * MIB));
    assert_eq!(device.compute_mode().unwrap(), ComputeMode::Default);
    assert_eq!(device.virtualization_mode().unwrap(), GpuVirtualizationMode::Bare);
    assert!(!device.is_display_active().unwrap());
    assert_eq!(device.mig_mode().unwrap().current, 0);
    assert_eq!(device.mig_device_count().unwrap(), 0);
    assert!(device.running_compute_processes().unwrap().is_empty());
}

#[test]
fn index_and_minor_differ_where_the_topology_says_so() {
    let driver = Driver::up("h200x8");
    let nvml = driver.nvml();
    let device = |index| nvml.device_by_index(index).unwrap();
    let minors: Vec<u32> = (0..8).map(|index| device(index).minor_number().unwrap()).collect();
    assert_eq!(minors, [0, 1, 3, 2, 4, 7, 6, 5]);
    let third = nvml.device_by_pci_bus_id("0000:3a:00.0").unwrap();
    assert_eq!((third.index().unwrap(), third.minor_number().unwrap()), (2, 3));
    assert_eq!(third.uuid().unwrap(), "GPU-5b1e7000-0000-4000-8000-000000000802");
    let information = driver.read("proc/driver/nvidia/gpus/0000:3a:00.0/information");
    assert!(information.contains("Device Minor: \t 3\n"), "{information}");
    assert!(information.contains("GPU UUID: \t GPU-5b1e7000-0000-4000-8000-000000000802\n"), "{information}");
}

#[test]
fn gpus_are_joined_as_the_topology_says() {
    let driver = Driver::up("h100x4-bridges");
    let nvml = driver.nvml();
    let device = |index| nvml.device_by_index(index).unwrap();
    let nvlink = |one, other| device(one).p2p_status(&device(other), P2pCapabilitiesIndex::NvLink).unwrap();
    assert_eq!((nvlink(0, 2), nvlink(3, 1)), (P2pStatus::Ok, P2pStatus::Ok));
    assert_eq!(nvlink(0, 1), P2pStatus::NotSupported);
    let ancestor = |one, other| device(one).topology_common_ancestor(device(other)).unwrap();
    assert_eq!((ancestor(0, 1), ancestor(0, 2)), (TopologyLevel::HostBridge, TopologyLevel::System));
    assert!(device(0).topology_common_ancestor(device(0)).is_err());
}

#[test]
fn mig_devices_are_those_of_the_worked_example() {
    let driver = Driver::up("a100x2-mig");
    let nvml = driver.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    assert_eq!(gpu.mig_mode().unwrap().current, 1);
    assert_eq!(gpu.mig_device_count().unwrap(), 7);
    let shape = |index| {
        let mig = gpu.mig_device_by_index(index).unwrap();
        let attributes = mig.attributes().unwrap();
        (mig.name().unwrap(), attributes.multiprocessor_count, attributes.memory_size_mb)
    };
    assert_eq!(shape(0), ("NVIDIA A100-PCIE-40GB MIG 4g.20gb".into(), 56, 20096));
    assert_eq!(shape(2), ("NVIDIA A100-PCIE-40GB MIG 1c.2g.10gb".into(), 14, 9984));
    assert!(matches!(gpu.mig_device_by_index(4), Err(NvmlError::NotFound)));
    assert!(matches!(gpu.mig_device_by_index(7), Err(NvmlError::InvalidArg)));
    let mig = nvml.device_by_uuid("MIG-5b1e7000-0000-5000-8000-000000000a04").unwrap();
    assert_eq!(mig.memory_info().unwrap().total, 4864 * MIB);
    assert_eq!(mig.mig_parent_device().unwrap().uuid().unwrap(), "GPU-5b1e7000-0000-4000-8000-000000000a00");
    assert!(matches!(gpu.mig_parent_device(), Err(NvmlError::InvalidArg)));
    let access = driver.read("proc/driver/nvidia/capabilities/gpu0/mig/gi9/access");
    assert!(access.starts_with("DeviceFileMinor: 84\n"), "{access}");
    let minors = driver.read("proc/driver/nvidia-caps/mig-minors");
    assert!(minors.starts_with("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n"));
    assert!(minors.contains("\ngpu0/gi3/ci1/access 32\n") && minors.contains("\ngpu1/gi0/access 138\n"));
}

#[test]
fn profiles_and_placements_are_told_with_mig_off() {
    let driver = Driver::up("h200");
    let nvml = driver.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let profile = device.profile_info(9).unwrap();
    assert_eq!((profile.id, profile.instance_count, profile.multiprocessor_count), (15, 4, 26));
    assert_eq!(profile.memory_size_mb, 33280);
    assert!(matches!(device.profile_info(5), Err(NvmlError::NotSupported)));
    assert!(matches!(device.profile_info(17), Err(NvmlError::InvalidArg)));
    assert!(matches!(device.possible_placements(77), Err(NvmlError::InvalidArg)));
}

#[test]
fn guests_and_old_cards_refuse_what_they_lack() {
    let driver = Driver::up("vgpu");
    let nvml = driver.nvml();
    let mut device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.virtualization_mode().unwrap(), GpuVirtualizationMode::Vgpu);
    let exclusive = device.set_compute_mode(ComputeMode::ExclusiveProcess);
    assert!(matches!(exclusive, Err(NvmlError::NotSupported)));
    drop(nvml);
    let driver = Driver::up("pascal");
    let nvml = driver.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.num_cores().unwrap(), 56 * 64);
    assert_eq!(device.architecture().unwrap(), DeviceArchitecture::Pascal);
    assert!(device.is_display_active().unwrap());
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.profile_info(0), Err(NvmlError::NotSupported)));
}

#[test]
fn wrong_arguments_have_the_right_errors() {
    let driver = Driver::up("a30-mig");
    let nvml = driver.nvml();
    assert!(matches!(nvml.device_by_index(1), Err(NvmlError::InvalidArg)));
    assert!(matches!(nvml.device_by_uuid("GPU-nobody"), Err(NvmlError::NotFound)));
    assert!(matches!(nvml.device_by_pci_bus_id("0000:01:00.0"), Err(NvmlError::NotFound)));
    assert!(matches!(nvml.device_by_pci_bus_id("nonsense"), Err(NvmlError::InvalidArg)));
    let mig = nvml.device_by_uuid("MIG-5b1e7000-0000-5000-8000-000000000301").unwrap();
    assert!(matches!(mig.compute_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(mig.mig_device_by_index(0), Err(NvmlError::NotSupported)));
}

#[test]
fn a_gpu_off_the_bus_is_lost() {
    let driver = Driver::up("h200");
    let nvml = driver.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let config = driver.root.join("sys/bus/pci/devices/0000:3b:00.0/config");
    assert_eq!(fs::read(&config).unwrap()[..2], [0xde, 0x10]);
    fs::write(&config, [0xff; 256]).unwrap();
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
}

#[test]
fn files_of_another_version_than_the_module_do_not_start() {
    let parent = tempfile::tempdir().unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/h200.toml");
    let changed = parent.path().join("upgraded.toml");
    let text = fs::read_to_string(shipped).unwrap();
    fs::write(&changed, format!("file_version = \"580.200.01\"\n{text}")).unwrap();
    let driver = Driver::up_from(&changed);
    assert!(matches!(driver.try_nvml(), Err(NvmlError::LibRmVersionMismatch)));
    assert!(driver.root.libraries().join("libcuda.so.580.200.01").exists());
    assert!(driver.read("proc/driver/nvidia/version").contains("Kernel Module  580.159.04  SIMULATED"));
}

#[test]
fn processes_share_one_compute_mode_and_time_slice() {
    if !root_or_skip("compute mode") {
        return;
    }
    let driver = Driver::up("h200");
    let uuid = "GPU-5b1e7000-0000-4000-8000-000000000100";
    let query = ["--query-gpu=compute_mode", "--format=csv,noheader"];
    assert_eq!(driver.smi(&query), "Default\n");
    let nvml = driver.nvml();
    nvml.device_by_index(0).unwrap().set_compute_mode(ComputeMode::ExclusiveProcess).unwrap();
    assert_eq!(driver.smi(&query), "Exclusive_Process\n");
    driver.smi(&["-i", uuid, "-c", "DEFAULT"]);
    assert_eq!(nvml.device_by_index(0).unwrap().compute_mode().unwrap(), ComputeMode::Default);
    driver.smi(&["compute-policy", "-i", uuid, "--set-timeslice", "2"]);
    assert_eq!(driver.smi(&["compute-policy", "--list"]), "GPU 0: timeslice 2\n");
    assert!(driver.read("sim/state.json").contains(&format!("\"timeslice\":{{\"{uuid}\":2}}")));
}

#[test]
fn contexts_are_listed_by_kind() {
    let driver = Driver::up("h200x8");
    let tag = trailer::read(&driver.library()).unwrap().tag;
    let hold = |minor, kind, mib| contexts::announce(&tag, On { minor, instance: None }, kind, mib).unwrap();
    let nvml = driver.nvml();
    let pid = std::process::id();
    let minor_7 = nvml.device_by_index(5).unwrap();
    let client = hold(7, Kind::Client, 144);
    let found = minor_7.running_compute_processes().unwrap();
    assert_eq!((found.len(), found[0].pid, found[0].gpu_instance_id), (1, pid, None));
    assert_eq!(found[0].used_gpu_memory, UsedGpuMemory::Used(144 * MIB));
    assert_eq!(minor_7.mps_running_compute_processes().unwrap()[0].pid, pid);
    assert_eq!(minor_7.memory_info().unwrap().free, (143_771 - 500 - 144) * MIB);
    drop(client);
    let _alone = hold(7, Kind::Compute, 516);
    assert_eq!(minor_7.running_compute_processes_count().unwrap(), 1);
    assert!(minor_7.mps_running_compute_processes().unwrap().is_empty());
    assert!(nvml.device_by_index(7).unwrap().running_compute_processes().unwrap().is_empty());
}

#[test]
fn nodes_have_the_numbers_of_the_real_ones() {
    if !root_or_skip("device nodes") {
        return;
    }
    let driver = Driver::up("a100x2-mig");
    let node = |name: &str| {
        let meta = fs::metadata(driver.root.join("dev").join(name)).unwrap();
        assert!(meta.file_type().is_char_device(), "{name}");
        let mode = if name.contains("cap") { 0o444 } else { 0o666 };
        assert_eq!(meta.mode() & 0o777, mode, "{name}");
        (major(meta.rdev()), minor(meta.rdev()))
    };
    assert_eq!(node("nvidiactl"), (195, 255));
    assert_eq!(node("nvidia1"), (195, 1));
    assert_eq!(node("nvidia-modeset"), (195, 254));
    assert_eq!((node("nvidia-uvm"), node("nvidia-uvm-tools")), ((510, 0), (510, 1)));
    assert_eq!((node("nvidia-caps/nvidia-cap84"), node("nvidia-caps/nvidia-cap85")), ((241, 84), (241, 85)));
    assert!(!driver.root.join("dev/nvidia-caps/nvidia-cap3").exists());
    let h200 = Driver::up("h200");
    let meta = fs::metadata(h200.root.join("dev/dri/renderD128")).unwrap();
    assert_eq!((major(meta.rdev()), minor(meta.rdev())), (226, 128));
    assert!(h200.root.join("sys/bus/pci/devices/0000:3b:00.0/drm/renderD128").is_dir());
    let devices = h200.read("proc/devices");
    for line in ["195 nvidia", "195 nvidiactl", "510 nvidia-uvm", "241 nvidia-caps"] {
        assert!(devices.lines().any(|found| found == line), "{line}: {devices}");
    }
}

/// This runs in a separate process, because a loaded library would stay loaded here.
#[test]
fn stand_in_libraries_load_by_their_soname() {
    let driver = Driver::up("h200");
    let names = "libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4 libEGL_nvidia.so.0 libnvidia-gpucomp.so.580.159.04 libcuda.so.1";
    for name in names.split(' ') {
        assert!(driver.root.libraries().join(name).exists(), "{name}");
        let output =
            Command::new("/bin/true").env("LD_PRELOAD", driver.root.libraries().join(name)).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{name}: {output:?}");
    }
    let topology = trailer::read(&driver.root.libraries().join("libcuda.so.1")).unwrap();
    assert_eq!((topology.gpu[0].sm_count, topology.gpu[0].cuda_total_mib), (132, 143_155));
}

#[test]
fn xids_are_reported_by_events_and_by_the_kernels_log() {
    let driver = Driver::up("h200x8");
    let nvml = driver.nvml();
    let (third, first) = (nvml.device_by_index(3).unwrap(), nvml.device_by_index(1).unwrap());
    let xid = |gpu: &str, number: &str, pid: &str, text: &str| {
        let output = sim(&["xid", gpu, number, pid, text, "--root", driver.root.dir().to_str().unwrap()]);
        assert!(output.status.success(), "{output:?}");
    };
    xid("3", "13", "-", "before");
    let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
    let types = third.supported_event_types().unwrap() & wanted;
    let set = third.register_events(types, nvml.create_event_set().unwrap()).unwrap();
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)), "it was before");
    xid("1", "31", "-", "of another GPU");
    let own = std::process::id().to_string();
    xid("3", "31", &own, "Ch 00000008");
    xid("3", "79", "-", "GPU has fallen off the bus.");
    for _ in 0..2 {
        let event = set.wait(1000).unwrap();
        assert_eq!(event.device.uuid().unwrap(), third.uuid().unwrap());
        assert_eq!(event.event_data, Some(XidError::Value(79)), "the last of them, for each");
    }
    let events = driver.read("sim/events") + "3 0\n";
    std::fs::write(driver.root.join("sim/events"), events).unwrap();
    let event = set.wait(1000).unwrap();
    assert_eq!((event.event_type, event.event_data), (EventTypes::DOUBLE_BIT_ECC_ERROR, None));
    assert!(matches!(set.wait(0), Err(NvmlError::Timeout)));
    // As the kernel writes it, without the function.
    let bus = |device: &nvml_wrapper::Device<'_>| {
        let nvml = device.pci_info().unwrap().bus_id.to_lowercase();
        nvml[4..nvml.len() - 2].to_owned()
    };
    let log = driver.read("dev/kmsg");
    let lines: Vec<&str> = log.lines().map(|line| line.split_once(';').unwrap().1).collect();
    assert!(lines[1].starts_with(&format!("NVRM: Xid (PCI:{}): 31, pid='<unknown>'", bus(&first))), "{log}");
    assert!(lines[2].contains(&format!("(PCI:{}): 31, pid={own}, name=", bus(&third))), "{log}");
    let guest = Driver::up("vgpu");
    let types = guest.nvml().device_by_index(0).unwrap().supported_event_types().unwrap();
    assert!(types.is_empty());
}

#[test]
fn a_gpus_state_lasts_until_a_reset() {
    if !root_or_skip("a reset") {
        return;
    }
    let driver = Driver::up("h200");
    let state = || {
        let nvml = driver.nvml();
        let device = nvml.device_by_index(0).unwrap();
        // The recovery action, and a counter that the GPU does not have.
        let values = device.field_values_for(&[FieldId(230), FieldId(38)]).unwrap();
        let action = values[0].as_ref().unwrap().value.as_ref().ok().cloned();
        assert!(values[1].as_ref().unwrap().value.is_err());
        (action, device.current_throttle_reasons().unwrap())
    };
    assert_eq!(state(), (Some(SampleValue::U32(0)), ThrottleReasons::NONE));
    fs::write(driver.root.join("sim/health"), "0 230 1\n0 slow 64\n1 230 2\n").unwrap();
    assert_eq!(state(), (Some(SampleValue::U32(1)), ThrottleReasons::HW_THERMAL_SLOWDOWN));
    driver.smi(&["-i", "0", "--gpu-reset"]);
    assert_eq!(state(), (Some(SampleValue::U32(0)), ThrottleReasons::NONE));
    assert_eq!(driver.read("sim/health"), "1 230 2\n");
}

#[test]
fn a_hopper_counts_the_errors_of_each_nvlink_and_not_of_all() {
    let driver = Driver::up("h200x8");
    fs::write(driver.root.join("sim/health"), "0 163/0 4\n0 163/1 8\n0 38 2\n").unwrap();
    let nvml = driver.nvml();
    // nvml-wrapper asks about link 0.
    let told = |index| {
        let device = nvml.device_by_index(index).unwrap();
        let values = device.field_values_for(&[38, 52, 59, 161, 162, 163].map(FieldId)).unwrap();
        values.into_iter().map(|value| value.unwrap().value.ok()).collect::<Vec<_>>()
    };
    let counts =
        |crc| [vec![None; 3], [0, 0, crc].map(|count| Some(SampleValue::U64(count))).to_vec()].concat();
    assert_eq!((told(0), told(1)), (counts(4), counts(0)));
}

#[test]
fn a_container_asks_nvml_without_the_root() {
    let driver = Driver::up("h200");
    let copy = driver.parent.path().join("libnvidia-ml.so.1");
    fs::copy(driver.library(), &copy).unwrap();
    let nvml = Nvml::builder().lib_path(copy.as_os_str()).init().unwrap();
    assert_eq!(nvml.device_by_index(0).unwrap().minor_number().unwrap(), 0);
}

#[test]
fn down_ends_the_hosts_processes_and_leaves_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/h200.toml");
    let changed = parent.path().join("busy.toml");
    let text = fs::read_to_string(shipped).unwrap();
    fs::write(&changed, format!("{text}\n[[process]]\ngpu = 0\nname = \"training\"\nmib = 2048\n")).unwrap();
    let driver = Driver::up_from(&changed);
    let nvml = driver.nvml();
    let found = nvml.device_by_index(0).unwrap().running_compute_processes().unwrap();
    assert_eq!(found[0].used_gpu_memory, UsedGpuMemory::Used(2048 * MIB));
    let pid = found[0].pid;
    assert_eq!(fs::read_to_string(format!("/proc/{pid}/comm")).unwrap(), "training\n");
    let output = driver.down();
    assert!(output.status.success(), "{output:?}");
    assert!(!driver.root.dir().exists());
    assert!(fs::read_link(format!("/proc/{pid}/exe")).is_err());
    assert!(driver.down().status.success(), "a second down is no error");
}

#[test]
fn only_simulated_drivers_are_laid_out_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "years").unwrap();
    let dir_name = dir.path().to_str().unwrap();
    let down = sim(&["down", "--root", dir_name]);
    assert_eq!(down.status.code(), Some(1));
    let topology = concat!(env!("CARGO_MANIFEST_DIR"), "/topologies/h200.toml");
    let up = sim(&["up", "--topology", topology, "--root", dir_name]);
    assert_eq!(up.status.code(), Some(1));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
