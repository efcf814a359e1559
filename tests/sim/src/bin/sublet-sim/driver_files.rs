//! The driver's user-space files: libraries, programs, data, and the config file that points at them.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nvidia_ml::layout::topology::Topology;
use nvidia_ml::layout::{Root, trailer};

use super::{elf, write};

/// Libraries that are only mounted: name, and the version in the soname. An empty version is the driver's version.
const LIBRARIES: &[(&str, &str)] = &[
    ("libnvidia-ptxjitcompiler", "1"),
    ("libnvidia-nvvm", "4"),
    ("libnvidia-gpucomp", ""),
    ("libnvidia-opencl", "1"),
    ("libnvidia-cfg", "1"),
    ("libcudadebugger", "1"),
    ("libnvidia-encode", "1"),
    ("libnvcuvid", "1"),
    ("libnvidia-opticalflow", "1"),
    ("libEGL_nvidia", "0"),
    ("libGLX_nvidia", "0"),
    ("libGLESv1_CM_nvidia", "1"),
    ("libGLESv2_nvidia", "2"),
    ("libnvidia-egl-gbm", "1"),
    ("libnvidia-egl-wayland", "1"),
    ("libnvidia-egl-wayland2", "1"),
    ("libnvidia-eglcore", ""),
    ("libnvidia-glcore", ""),
    ("libnvidia-glsi", ""),
    ("libnvidia-tls", ""),
    ("libnvidia-glvkspirv", ""),
    ("libnvidia-rtcore", ""),
    ("libnvidia-allocator", "1"),
    ("libnvidia-fbc", "1"),
    ("libnvoptix", "1"),
];

const PROGRAMS: &[&str] = &["nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "cuda-probe"];

const DATA: &[(&str, &str)] = &[
    (
        "usr/share/vulkan/icd.d/nvidia_icd.json",
        r#"{"file_format_version":"1.0.1","ICD":{"library_path":"libGLX_nvidia.so.0","api_version":"1.4.312"}}"#,
    ),
    (
        "usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        r#"{"file_format_version":"1.0.0","ICD":{"library_path":"libEGL_nvidia.so.0"}}"#,
    ),
    (
        "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        r#"{"file_format_version":"1.0.0","ICD":{"library_path":"libnvidia-egl-gbm.so.1"}}"#,
    ),
    (
        "usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
        r#"{"file_format_version":"1.0.0","ICD":{"library_path":"libnvidia-egl-wayland.so.1"}}"#,
    ),
    (
        "usr/share/egl/egl_external_platform.d/99_nvidia_wayland2.json",
        r#"{"file_format_version":"1.0.0","ICD":{"library_path":"libnvidia-egl-wayland2.so.1"}}"#,
    ),
    ("etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1"),
];

/// Creates every file of the driver.
pub fn make(root: &Root, topology: &Topology) -> Result<()> {
    let version = topology.files();
    for (name, number) in LIBRARIES {
        stub(root, name, number, version)?;
    }
    for (name, artefact, links) in [
        ("libnvidia-ml", "libnvidia_ml.so", &["libnvidia-ml.so.1", "libnvidia-ml.so"]),
        ("libcuda", "libcuda.so", &["libcuda.so.1", "libcuda.so"]),
    ] {
        with_trailer(root, topology, &format!("{name}.so.{version}"), artefact, links)?;
    }
    for program in PROGRAMS {
        copy_program(root, program)?;
    }
    for (file, text) in DATA {
        write(root.join(file), format!("{text}\n"))?;
    }
    write(root.join(format!("usr/lib/firmware/nvidia/{version}/gsp_ga10x.bin")), "simulated\n")
}

fn stub(root: &Root, name: &str, number: &str, version: &str) -> Result<()> {
    let file = format!("{name}.so.{version}");
    let soname = if number.is_empty() { file.clone() } else { format!("{name}.so.{number}") };
    write(root.libraries().join(&file), elf::shared_object(&soname))?;
    if soname != file {
        symlink(&file, root.libraries().join(&soname))?;
    }
    Ok(())
}

/// The library that was built beside this program. If there is none, a library that has only the soname.
fn with_trailer(root: &Root, topology: &Topology, file: &str, artefact: &str, links: &[&str]) -> Result<()> {
    let target = root.libraries().join(file);
    let built = match built(artefact) {
        Some(built) => built,
        None => soname_only(root, file, artefact, links[0])?,
    };
    trailer::append(&built, &target, topology)?;
    let mut to = file;
    for link in links {
        symlink(to, root.libraries().join(link))?;
        to = link;
    }
    Ok(())
}

fn soname_only(root: &Root, file: &str, artefact: &str, soname: &str) -> Result<PathBuf> {
    warn_not_built(artefact, &format!("{file} has only its soname"));
    let empty = root.join("sim/empty.so");
    write(&empty, elf::shared_object(soname))?;
    Ok(empty)
}

fn warn_not_built(artefact: &str, result: &str) {
    eprintln!("sublet-sim: warning: {artefact} was not built (cargo build --workspace): {result}");
}

fn copy_program(root: &Root, program: &str) -> Result<()> {
    let Some(built) = built(program) else {
        warn_not_built(program, "left out");
        return Ok(());
    };
    let target = root.join("usr/bin").join(program);
    fs::copy(&built, &target).with_context(|| format!("{}", target.display()))?;
    Ok(fs::set_permissions(&target, fs::Permissions::from_mode(0o755))?)
}

/// Cargo's output beside this program or in `deps`, whichever is newer, because `cargo test` does not update the first.
fn built(artefact: &str) -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.parent()?.to_owned();
    let candidates = [beside.join(artefact), beside.join("deps").join(artefact)];
    let dated =
        candidates.into_iter().filter_map(|file| Some((file.metadata().ok()?.modified().ok()?, file)));
    dated.max().map(|(_, file)| file)
}

/// Writes the config file that makes sublet use this root.
pub fn config(root: &Root) -> Result<PathBuf> {
    let file = root.join("config.toml");
    let nvml = root.libraries().join("libnvidia-ml.so.1");
    let quoted = |path: &Path| serde_json::Value::from(path.display().to_string());
    let text = format!(
        "state_dir = {}\n\n[driver]\nroot = {}\nnvml = {}\n\n[cdi]\nspec = {}\n\n\
         [runtime]\nlow_level = [\"runc\", \"crun\"]\n",
        quoted(&root.join("run")),
        quoted(root.dir()),
        quoted(&nvml),
        quoted(&root.join("cdi/sublet.json"))
    );
    write(&file, text)?;
    Ok(file)
}
