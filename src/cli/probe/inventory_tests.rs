//! Refusals that happen before NVML is asked. NVML itself is tested end to end.

use super::*;
use sublet_core::inventory::fixture::Root;

const DEVICES: &str = "Character devices:\n195 nvidia\n195 nvidiactl\n510 nvidia-uvm\n\nBlock devices:\n";

/// The error on one line, with the root's path removed.
fn refusal(root: &Root) -> String {
    let message = probe(&root.config()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message.replace(root.path().to_str().unwrap(), "ROOT")
}

fn library(root: &Root, name: &str) {
    let machine = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, machine, 0]);
    root.file(&format!("/usr/lib64/{name}"), header);
}

#[test]
fn no_driver() {
    assert_eq!(
        refusal(&Root::new()),
        "no NVIDIA driver is loaded: ROOT/proc/driver/nvidia/version is missing; install the driver or \
         load it with `modprobe nvidia`"
    );
}

#[test]
fn jetson_and_wsl() {
    let jetson = Root::new();
    jetson.file("/dev/nvmap", "");
    assert!(refusal(&jetson).starts_with("this is a Jetson (ROOT/dev/nvmap without /dev/nvidiactl)"));
    let wsl = Root::new();
    wsl.file("/dev/dxg", "");
    assert!(refusal(&wsl).starts_with("this is WSL2 (ROOT/dev/dxg)"));
}

#[test]
fn a_driver_older_than_535() {
    assert_eq!(
        refusal(&Root::with_driver("525.147.05")),
        "NVIDIA driver 525.147.05 is too old: sublet needs 535 or later; install a newer driver"
    );
}

#[test]
fn files_of_another_version_than_the_module() {
    let root = Root::with_driver("580.159.04");
    library(&root, "libcuda.so.590.44.01");
    library(&root, "libnvidia-ml.so.590.44.01");
    root.link("/usr/lib64/libcuda.so.1", "libcuda.so.590.44.01");
    root.link("/usr/lib64/libnvidia-ml.so.1", "libnvidia-ml.so.590.44.01");
    assert_eq!(
        refusal(&root),
        "the loaded NVIDIA kernel module is 580.159.04, but the driver's files are 590.44.01: reboot, or \
         reload the modules"
    );
}

#[test]
fn no_libcuda_and_no_nvml() {
    let root = Root::with_driver("580.159.04");
    root.file("/proc/devices", DEVICES);
    assert_eq!(
        refusal(&root),
        "libcuda.so.1 of driver 580.159.04 is not in any library directory below ROOT; Debian: apt \
         install libcuda1, Red Hat: dnf install nvidia-driver-cuda-libs"
    );
    library(&root, "libcuda.so.580.159.04");
    assert_eq!(
        refusal(&root),
        "libnvidia-ml.so.1 of driver 580.159.04 is not in any library directory below ROOT; Debian: apt \
         install libnvidia-ml1, Red Hat: dnf install nvidia-driver-cuda-libs"
    );
}

#[test]
fn a_module_that_is_not_loaded() {
    let root = Root::with_driver("580.159.04");
    library(&root, "libcuda.so.580.159.04");
    root.file("/proc/devices", "Character devices:\n195 nvidia\n");
    assert_eq!(
        refusal(&root),
        "the kernel module nvidia-uvm is not loaded (no nvidia-uvm in ROOT/proc/devices); run `modprobe \
         nvidia-uvm`, then `nvidia-modprobe -u -c0`"
    );
}

#[test]
fn an_nvml_that_cannot_be_loaded() {
    let root = Root::with_driver("580.159.04");
    library(&root, "libcuda.so.580.159.04");
    // An ELF header without content.
    library(&root, "libnvidia-ml.so.580.159.04");
    root.file("/proc/devices", DEVICES);
    assert!(refusal(&root).starts_with("NVML (ROOT/usr/lib64/libnvidia-ml.so.580.159.04) failed to load: "));
}
