//! Tests of the device nodes and the files of a grant.

use std::path::PathBuf;

use super::tests::{debian, granted, inventory, lease, placement, time_slice};
use super::*;
use crate::inventory::{DriverFile, FileKind};
use crate::place::fixture::part;
use crate::share::Capability;

fn destinations(grant: &Grant) -> Vec<&str> {
    grant.mounts.iter().map(|mount| mount.destination.to_str().unwrap()).collect()
}

#[test]
fn nodes_of_one_gpu_and_no_other() {
    let grant = granted(&lease(), &[Capability::Compute], &debian(), &Config::default());
    let nodes: Vec<_> = grant
        .nodes
        .iter()
        .map(|granted| (granted.node.path.to_str().unwrap(), granted.node.major, granted.node.minor))
        .collect();
    assert_eq!(
        nodes,
        [
            ("/dev/nvidiactl", 195, 255),
            ("/dev/nvidia-uvm", 510, 0),
            ("/dev/nvidia-uvm-tools", 510, 1),
            ("/dev/nvidia3", 195, 3),
        ]
    );
    assert_eq!(grant.masked_paths, [PathBuf::from("/proc/driver/nvidia/gpus/0000:86:00.0")]);
}

#[test]
fn graphics_brings_modeset_and_the_gpus_own_dri_nodes() {
    let mut config = Config::default();
    config.driver.root = "/sim".into();
    let grant = granted(&time_slice(), &[Capability::Graphics], &debian(), &config);
    let nodes: Vec<_> = grant.nodes[4..]
        .iter()
        .map(|granted| {
            let Node { path, major, minor } = &granted.node;
            (path.to_str().unwrap(), granted.source.to_str().unwrap(), *major, *minor)
        })
        .collect();
    assert_eq!(
        nodes,
        [
            ("/dev/nvidia-modeset", "/sim/dev/nvidia-modeset", 195, 254),
            ("/dev/dri/renderD128", "/sim/dev/dri/renderD128", 226, 128),
        ]
    );
}

#[test]
fn mig_devices_bring_their_own_caps_and_their_gpus_node_once() {
    let mut inventory = inventory();
    let gpu = inventory.devices[1].clone();
    for (n, caps) in [(7, [66, 67]), (8, [75, 76])] {
        let mut device = part(&gpu, n, "1g.18gb");
        let cap =
            |minor| Node { path: format!("/dev/nvidia-caps/nvidia-cap{minor}").into(), major: 241, minor };
        device.nodes.extend(caps.map(cap));
        inventory.devices.push(device);
    }
    let granted = |devices: [&str; 2]| {
        let lease = Lease { devices: devices.map(str::to_owned).to_vec(), ..time_slice() };
        let (placement, image) = (placement(&lease), debian());
        grant(&placement, &lease, &Capabilities::default(), &image, &inventory, &Config::default())
    };
    let both = granted(["MIG-7", "MIG-8"]);
    let minors: Vec<(u32, u32)> = both.nodes.iter().map(|node| (node.node.major, node.node.minor)).collect();
    assert_eq!(
        minors,
        [(195, 255), (510, 0), (510, 1), (195, 1), (241, 66), (241, 67), (241, 75), (241, 76)]
    );
    assert_eq!(both.masked_paths, [PathBuf::from("/proc/driver/nvidia/gpus/0000:3b:00.0")]);
    assert_eq!(both.env.set[0].1, "MIG-7,MIG-8");
}

#[test]
fn files_by_soname_into_the_libraries_directory() {
    let capabilities = [Capability::Compute, Capability::Utility];
    let grant = granted(&lease(), &capabilities, &debian(), &Config::default());
    assert_eq!(
        destinations(&grant),
        [
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so",
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
            "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so",
            "/usr/bin/nvidia-smi",
            "/run/sublet/mps",
            "/tmp/nvidia-mps",
        ]
    );
    assert_eq!(grant.mounts[1].source, PathBuf::from("/host/libcuda.so.1.580"));
    assert_eq!(grant.mounts[5].source, PathBuf::from("/run/sublet/mps/GPU-0/public"));
    assert_eq!(grant.mounts[6].source, PathBuf::from("/run/sublet/mps/GPU-0/public"));
    assert_eq!(grant.warnings, ["from the placement"]);
}

#[test]
fn video_brings_the_descriptions_too() {
    let grant = granted(&time_slice(), &[Capability::Video], &debian(), &Config::default());
    assert_eq!(
        destinations(&grant),
        ["/usr/lib/x86_64-linux-gnu/libnvcuvid.so.1", "/usr/share/vulkan/icd.d/nvidia_icd.json"]
    );
}

#[test]
fn no_driver_file_where_another_injects_them() {
    let mut config = Config::default();
    config.driver.inject = Inject::None;
    let grant = granted(&lease(), &[Capability::Compute], &Image::default(), &config);
    assert_eq!(destinations(&grant), ["/run/sublet/mps", "/tmp/nvidia-mps"]);
    assert_eq!(grant.warnings, ["from the placement"]);
    assert!(!grant.env.default.iter().any(|(name, _)| name == "TRITON_LIBCUDA_PATH"));
}

#[test]
fn musl_gets_nodes_and_a_warning() {
    let grant = granted(&lease(), &[Capability::Compute], &Image::default(), &Config::default());
    assert_eq!(destinations(&grant), ["/run/sublet/mps", "/tmp/nvidia-mps"]);
    assert_eq!(grant.nodes.len(), 4);
    assert!(grant.warnings[1].contains("uses musl, or is static"), "{:?}", grant.warnings);
}

#[test]
fn nix_has_its_own_directory() {
    let image = Image { nix: true, ..Image::default() };
    let grant = granted(&time_slice(), &[Capability::Compute], &image, &Config::default());
    assert_eq!(destinations(&grant)[0], "/run/opengl-driver/lib/libcuda.so.1");
    assert_eq!(grant.warnings, ["from the placement"]);
}

#[test]
fn a_tmp_of_the_hosts_is_left_alone() {
    let image = Image { tmp_is_host: true, ..debian() };
    let grant = granted(&lease(), &[], &image, &Config::default());
    assert_eq!(destinations(&grant), ["/run/sublet/mps"]);
    assert!(grant.warnings[1].contains("/tmp/nvidia-mps"), "{:?}", grant.warnings);
}

#[test]
fn without_uvm_there_is_no_node_and_a_warning() {
    let mut inventory = inventory();
    inventory.driver.majors.uvm = None;
    let lease = time_slice();
    let none = Capabilities(Vec::new());
    let grant = grant(&placement(&lease), &lease, &none, &debian(), &inventory, &Config::default());
    let paths: Vec<_> = grant.nodes.iter().map(|granted| granted.node.path.to_str().unwrap()).collect();
    assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia3"]);
    assert!(grant.warnings[1].contains("nvidia-uvm"), "{:?}", grant.warnings);
}

#[test]
fn graphics_alone_brings_the_files_that_its_libraries_load() {
    let mut inventory = inventory();
    let library = |soname: &str, also: &[&str]| DriverFile {
        source: format!("/host/{soname}").into(),
        kind: FileKind::Library {
            soname: soname.into(),
            also: also.iter().map(|&name| name.to_owned()).collect(),
        },
        capability: Capability::Compute,
        needs: None,
    };
    let gbm = &["gbm/nvidia-drm_gbm.so"];
    inventory.files = vec![
        library("libnvidia-gpucomp.so.580.159.04", &[]),
        library("libnvidia-allocator.so.1", gbm),
        library("libnvidia-opencl.so.1", &[]),
    ];
    let lib = Path::new("/lib");
    let names = |capability| {
        let files = inventory.mounted_files(lib, &Capabilities(vec![capability]), Inject::Builtin);
        files.into_iter().map(|(_, path)| path.strip_prefix(lib).unwrap().to_owned()).collect::<Vec<_>>()
    };
    let of_graphics =
        ["libnvidia-gpucomp.so.580.159.04", "libnvidia-allocator.so.1", "gbm/nvidia-drm_gbm.so"];
    assert_eq!(names(Capability::Graphics), of_graphics.map(PathBuf::from));
    let of_compute = ["libnvidia-gpucomp.so.580.159.04", "libnvidia-allocator.so.1", "libnvidia-opencl.so.1"];
    assert_eq!(names(Capability::Compute), of_compute.map(PathBuf::from));
}
