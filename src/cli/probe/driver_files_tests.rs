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
    find(&root.config().driver, VERSION, Machine::X86_64)
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
fn container_hosts_and_where_the_configuration_says() {
    for (libraries, programs, share) in [
        ("/usr/local/nvidia/lib64", "/usr/local/nvidia/bin", "/usr/local/nvidia/share"),
        (
            "/home/kubernetes/bin/nvidia/lib64",
            "/home/kubernetes/bin/nvidia/bin",
            "/home/kubernetes/bin/nvidia/share",
        ),
        ("/var/lib/nvidia/lib64", "/var/lib/nvidia/bin", "/var/lib/nvidia/share"),
        ("/opt/nvidia/lib64", "/opt/bin", "/opt/nvidia/share"),
        ("/usr/local/glibc/usr/lib", "/usr/local/bin", "/usr/local/glibc/usr/share"),
        ("/srv/driver/lib", "/srv/driver/bin", "/srv/driver/share"),
    ] {
        let root = Root::new();
        let library = format!("{libraries}/libcuda.so.580.159.04");
        let smi = format!("{programs}/nvidia-smi");
        let data = format!("{share}/vulkan/icd.d/nvidia_icd.json");
        root.file(&library, x86_64()).program_of(&smi, x86_64()).file(&data, "{}");
        let driver = Driver { search: vec!["/srv/driver".into()], ..root.config().driver };
        let expected = [
            ("libcuda.so.1", &library),
            ("nvidia-smi", &smi),
            ("/usr/share/vulkan/icd.d/nvidia_icd.json", &data),
        ];
        let expected = expected.map(|(name, path)| (name, path.trim_start_matches('/')));
        assert_eq!(summary(&root, &find(&driver, VERSION, Machine::X86_64)), pairs(&expected), "{libraries}");
    }
}

/// A program whose only program header is for its loader.
fn program_with_loader(loader: &str) -> Vec<u8> {
    let mut program = x86_64();
    program.resize(120, 0);
    // e_phoff, e_phentsize, e_phnum; p_type, p_offset, p_filesz.
    for (at, number) in [(32, 64), (54, 56), (56, 1), (64, 3), (72, 120), (96, loader.len() + 1)] {
        program[at] = u8::try_from(number).unwrap();
    }
    program.extend(loader.bytes().chain([0]));
    program
}

#[test]
fn nix_files_name_the_paths_of_its_store_that_they_need() {
    let root = Root::new();
    let smi = "/run/current-system/sw/bin/nvidia-smi";
    let library = "/nix/store/x-nvidia/lib/libEGL_nvidia.so.0";
    root.file(
        "/run/opengl-driver/share/glvnd/egl_vendor.d/10_nvidia.json",
        format!("{{\"ICD\":{{\"library_path\":\"{library}\"}}}}"),
    )
    .file("/run/opengl-driver/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1");
    let needs = |program: &[u8]| {
        root.program_of(smi, program);
        find_here(&root).files.into_iter().map(|file| file.needs).collect::<Vec<_>>()
    };
    let with = |loader: Option<&str>| [loader.map(PathBuf::from), None, Some(library.into())];
    let loader = "/nix/store/xyz-glibc-2.40/lib/ld-linux-x86-64.so.2";
    let program = program_with_loader(loader);
    assert_eq!(needs(&program), with(Some(loader)));
    assert_eq!(needs(&program_with_loader("/lib64/ld-linux-x86-64.so.2")), with(None));
    // Headers that lie.
    for (offset, length) in [(32, 8), (54, 2), (56, 2), (72, 8), (96, 8)] {
        let mut lies = program.clone();
        lies[offset..offset + length].fill(0xff);
        assert_eq!(needs(&lies).len(), 3, "{offset}");
    }
}

#[test]
fn arm64_takes_its_own_libraries_alone() {
    let root = Root::new();
    root.file("/usr/lib/aarch64-linux-gnu/libcuda.so.580.159.04", elf(2, 183))
        .file("/usr/lib64/libnvidia-ml.so.580.159.04", x86_64());
    assert_eq!(
        summary(&root, &find(&root.config().driver, VERSION, Machine::AARCH64)),
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
fn a_file_that_is_no_library_is_left_out() {
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
