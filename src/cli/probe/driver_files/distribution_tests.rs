//! Each distribution's layout, as small trees of ELF headers.

use super::*;
use sublet_core::inventory::fixture::Root;
use sublet_core::share::Capability;

const VERSION: &str = "580.159.04";

/// The first 20 bytes of a shared library: 64-bit or not, and for which machine.
fn elf(class: u8, machine: u8) -> Vec<u8> {
    let mut header = b"\x7fELF".to_vec();
    header.extend([class, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0, machine, 0]);
    header
}

fn x86_64() -> Vec<u8> {
    elf(2, 62)
}

fn find_here(root: &Root) -> Found {
    find(root.path(), VERSION, Machine::X86_64)
}

/// Everything that was found: soname (or name, or path), and the source below the root.
fn summary(root: &Root, found: &Found) -> Vec<(String, String)> {
    let relative = |path: &Path| path.strip_prefix(root.path()).unwrap().to_str().unwrap().to_owned();
    let name = |file: &DriverFile| match &file.kind {
        FileKind::Library { soname, .. } => soname.clone(),
        FileKind::Program { name } => name.clone(),
        FileKind::Data { path } => path.to_str().unwrap().to_owned(),
    };
    found.files.iter().map(|file| (name(file), relative(&file.source))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|&(name, path)| (name.to_owned(), path.to_owned())).collect()
}

#[test]
fn debian_with_its_alternatives() {
    let root = Root::new();
    let lib = "/usr/lib/x86_64-linux-gnu";
    root.file(&format!("{lib}/nvidia/current/libcuda.so.{VERSION}"), x86_64())
        .link(&format!("{lib}/nvidia/current/libcuda.so.1"), "libcuda.so.580.159.04")
        .link(&format!("{lib}/libcuda.so.1"), "/etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu")
        .link(
            "/etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu",
            "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
        )
        .file(&format!("{lib}/nvidia/current/libnvidia-ml.so.{VERSION}"), x86_64())
        .program_of("/usr/lib/nvidia/current/nvidia-smi", x86_64())
        .link("/usr/bin/nvidia-smi", "/etc/alternatives/nvidia--nvidia-smi")
        .link("/etc/alternatives/nvidia--nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi");
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libnvidia-ml.so.1", "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.580.159.04"),
            ("libcuda.so.1", "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.580.159.04"),
            ("nvidia-smi", "usr/lib/nvidia/current/nvidia-smi"),
        ])
    );
}

#[test]
fn red_hat_skips_the_32_bit_libraries() {
    let root = Root::new();
    root.file("/usr/lib64/libcuda.so.580.159.04", x86_64())
        .file("/usr/lib/libcuda.so.580.159.04", elf(1, 3))
        .file("/usr/lib/libnvidia-ml.so.580.159.04", elf(1, 3))
        .link("/usr/lib/libnvidia-ml.so.1", "libnvidia-ml.so.580.159.04")
        .file("/usr/lib64/vdpau/libvdpau_nvidia.so.580.159.04", x86_64());
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libcuda.so.1", "usr/lib64/libcuda.so.580.159.04"),
            ("libvdpau_nvidia.so.1", "usr/lib64/vdpau/libvdpau_nvidia.so.580.159.04"),
        ])
    );
}

#[test]
fn arch_where_lib64_is_a_link() {
    let root = Root::new();
    root.file("/usr/lib/libcuda.so.580.159.04", x86_64())
        .link("/usr/lib64", "lib")
        .file("/usr/lib/libnvidia-egl-wayland.so.1.1.20", x86_64())
        .link("/usr/lib/libnvidia-egl-wayland.so.1", "libnvidia-egl-wayland.so.1.1.20");
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libcuda.so.1", "usr/lib/libcuda.so.580.159.04"),
            ("libnvidia-egl-wayland.so.1", "usr/lib/libnvidia-egl-wayland.so.1.1.20"),
        ])
    );
}

#[test]
fn nix_where_everything_is_a_link_into_the_store() {
    let root = Root::new();
    let store = "/nix/store/abc-nvidia-x11-580.159.04/lib";
    root.link("/run/opengl-driver/lib", "/nix/store/def-graphics-drivers/lib")
        .link("/nix/store/def-graphics-drivers/lib/libcuda.so.1", &format!("{store}/libcuda.so.1"))
        .link(&format!("{store}/libcuda.so.1"), "libcuda.so.580.159.04")
        .file(&format!("{store}/libcuda.so.580.159.04"), x86_64())
        .link("/run/current-system/sw/bin/nvidia-smi", "/nix/store/abc-bin/bin/nvidia-smi")
        .program_of("/nix/store/abc-bin/bin/nvidia-smi", x86_64());
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libcuda.so.1", "nix/store/abc-nvidia-x11-580.159.04/lib/libcuda.so.580.159.04"),
            ("nvidia-smi", "nix/store/abc-bin/bin/nvidia-smi"),
        ])
    );
}

#[test]
fn container_optimized_hosts() {
    let root = Root::new();
    root.file("/usr/local/nvidia/lib64/libcuda.so.580.159.04", x86_64())
        .program_of("/usr/local/nvidia/bin/nvidia-smi", x86_64());
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libcuda.so.1", "usr/local/nvidia/lib64/libcuda.so.580.159.04"),
            ("nvidia-smi", "usr/local/nvidia/bin/nvidia-smi"),
        ])
    );
}

#[test]
fn arm64_takes_its_own_libraries_alone() {
    let root = Root::new();
    root.file("/usr/lib/aarch64-linux-gnu/libcuda.so.580.159.04", elf(2, 183))
        .file("/usr/lib64/libnvidia-ml.so.580.159.04", x86_64());
    assert_eq!(
        summary(&root, &find(root.path(), VERSION, Machine::Aarch64)),
        pairs(&[("libcuda.so.1", "usr/lib/aarch64-linux-gnu/libcuda.so.580.159.04")])
    );
}

#[test]
fn a_library_without_a_short_name_keeps_its_full_one() {
    let root = Root::new();
    root.file("/usr/lib64/libnvidia-gpucomp.so.580.159.04", x86_64())
        .file("/usr/lib64/libnvidia-gpucomp.so.570.86.15", x86_64())
        .file("/usr/lib64/libnvidia-nvvm.so.4.0.0", x86_64())
        .link("/usr/lib64/libnvidia-nvvm.so.4", "libnvidia-nvvm.so.4.0.0");
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[
            ("libnvidia-nvvm.so.4", "usr/lib64/libnvidia-nvvm.so.4.0.0"),
            ("libnvidia-gpucomp.so.580.159.04", "usr/lib64/libnvidia-gpucomp.so.580.159.04"),
        ])
    );
}

#[test]
fn another_version_is_reported_and_not_given() {
    let root = Root::new();
    root.file("/usr/lib64/libcuda.so.590.44.01", x86_64())
        .link("/usr/lib64/libcuda.so.1", "libcuda.so.590.44.01");
    let found = find_here(&root);
    assert!(found.files.is_empty());
    assert_eq!(found.other_versions.into_iter().collect::<Vec<_>>(), ["590.44.01"]);
}

#[test]
fn the_right_version_elsewhere_beats_a_stale_link() {
    let root = Root::new();
    root.file("/usr/lib/x86_64-linux-gnu/libcuda.so.535.10", x86_64())
        .link("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcuda.so.535.10")
        .file("/usr/local/nvidia/lib64/libcuda.so.580.159.04", x86_64());
    let found = find_here(&root);
    assert_eq!(
        found.library("libcuda.so.1"),
        Some(root.path().join("usr/local/nvidia/lib64/libcuda.so.580.159.04").as_path())
    );
    assert!(found.other_versions.is_empty());
}

#[test]
fn what_is_no_library_is_left_out() {
    let root = Root::new();
    root.file("/usr/lib64/libcuda.so.580.159.04", "")
        .file("/usr/lib64/libnvidia-ml.so.580.159.04", "\x7fELF")
        .file("/usr/lib64/libnvcuvid.so.1/oops", "");
    assert!(find_here(&root).files.is_empty());
}

#[test]
fn libcuda_answers_to_both_names_and_each_file_has_its_capability() {
    let root = Root::new();
    root.file("/usr/lib64/libcuda.so.580.159.04", x86_64())
        .file("/usr/lib64/libnvidia-encode.so.580.159.04", x86_64())
        .file("/usr/lib64/libEGL_nvidia.so.580.159.04", x86_64())
        .file("/usr/lib64/libnvidia-ml.so.580.159.04", x86_64())
        .file("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1")
        .file("/usr/share/vulkan/icd.d/nvidia_icd.json", "{}")
        .program_of("/usr/bin/nvidia-smi", x86_64());
    let found = find_here(&root);
    let capabilities: Vec<Capability> = found.files.iter().map(|file| file.capability).collect();
    assert_eq!(
        capabilities,
        [
            Capability::Utility,
            Capability::Compute,
            Capability::Video,
            Capability::Graphics,
            Capability::Utility,
            Capability::Compute,
            Capability::Graphics,
        ]
    );
    let also = match &found.files[1].kind {
        FileKind::Library { also, .. } => also.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(also, ["libcuda.so"]);
}

/// Seen on a host: `/usr/bin/nvidia-smi` was a shell script that calls `/usr/local/nvidia/bin/nvidia-smi`, which does
/// not exist in a container under that name.
#[test]
fn a_script_is_passed_over_for_the_program_that_it_calls() {
    let root = Root::new();
    root.program_of("/usr/bin/nvidia-smi", "#!/bin/sh\nexec /usr/local/nvidia/bin/nvidia-smi \"$@\"\n");
    assert_eq!(summary(&root, &find_here(&root)), []);
    root.program_of("/usr/local/nvidia/bin/nvidia-smi", x86_64());
    assert_eq!(
        summary(&root, &find_here(&root)),
        pairs(&[("nvidia-smi", "usr/local/nvidia/bin/nvidia-smi")])
    );
}
