//! Which files of the driver a container may get, and which driver capability each belongs to.
//!
//! From the driver's README, chapter "Installed Components", of 535 to 580. The daemons
//! (nv-fabricmanager, nvidia-cuda-mps-*) and what needs an X server stay on the host.

use sublet_core::share::Capability::{self, Compute, Graphics, Utility, Video};

/// A library, by the names that containers use.
pub(super) struct Library {
    /// The name up to and including `.so`.
    pub stem: &'static str,
    /// The rest of the soname; `None` means the driver's version, and no shorter name exists.
    pub suffix: Option<&'static str>,
    /// Further names under which programs look for it.
    pub also: &'static [&'static str],
    pub capability: Capability,
}

const fn library(stem: &'static str, suffix: &'static str, capability: Capability) -> Library {
    Library { stem, suffix: Some(suffix), also: &[], capability }
}

const fn versioned(stem: &'static str, capability: Capability) -> Library {
    Library { stem, suffix: None, also: &[], capability }
}

/// Libraries of all releases from 535 on; each release has most of them.
pub(super) const LIBRARIES: &[Library] = &[
    library("libnvidia-ml.so", ".1", Utility),
    library("libnvidia-cfg.so", ".1", Utility),
    // `-lcuda` and Triton look for `libcuda.so`.
    Library { stem: "libcuda.so", suffix: Some(".1"), also: &["libcuda.so"], capability: Compute },
    library("libcudadebugger.so", ".1", Compute),
    library("libnvidia-ptxjitcompiler.so", ".1", Compute),
    library("libnvidia-nvvm.so", ".4", Compute),
    library("libnvidia-nvvm70.so", ".4", Compute),
    library("libnvidia-opencl.so", ".1", Compute),
    // Mesa's libgbm looks for a backend by the name of the kernel's driver.
    Library {
        stem: "libnvidia-allocator.so",
        suffix: Some(".1"),
        also: &["gbm/nvidia-drm_gbm.so"],
        capability: Compute,
    },
    library("libnvidia-sandboxutils.so", ".1", Compute),
    versioned("libnvidia-gpucomp.so", Compute),
    versioned("libnvidia-tileiras.so", Compute),
    versioned("libnvidia-pkcs11.so", Compute),
    versioned("libnvidia-pkcs11-openssl3.so", Compute),
    library("libnvcuvid.so", ".1", Video),
    library("libnvidia-encode.so", ".1", Video),
    library("libnvidia-opticalflow.so", ".1", Video),
    library("libvdpau_nvidia.so", ".1", Video),
    // If libglvnd finds no vendor, it asks for libGLX_indirect.
    Library {
        stem: "libGLX_nvidia.so",
        suffix: Some(".0"),
        also: &["libGLX_indirect.so.0"],
        capability: Graphics,
    },
    library("libEGL_nvidia.so", ".0", Graphics),
    library("libGLESv1_CM_nvidia.so", ".1", Graphics),
    library("libGLESv2_nvidia.so", ".2", Graphics),
    library("libnvidia-egl-gbm.so", ".1", Graphics),
    library("libnvidia-egl-wayland.so", ".1", Graphics),
    library("libnvidia-egl-wayland2.so", ".1", Graphics),
    library("libnvidia-egl-xcb.so", ".1", Graphics),
    library("libnvidia-egl-xlib.so", ".1", Graphics),
    library("libnvidia-fbc.so", ".1", Graphics),
    library("libnvidia-ngx.so", ".1", Graphics),
    library("libnvoptix.so", ".1", Graphics),
    versioned("libnvidia-eglcore.so", Graphics),
    versioned("libnvidia-glcore.so", Graphics),
    versioned("libnvidia-glsi.so", Graphics),
    versioned("libnvidia-glvkspirv.so", Graphics),
    versioned("libnvidia-rtcore.so", Graphics),
    versioned("libnvidia-tls.so", Graphics),
];

/// Programs that containers may get.
pub(super) const PROGRAMS: &[(&str, Capability)] =
    &[("nvidia-smi", Utility), ("nvidia-debugdump", Utility), ("nvidia-persistenced", Utility)];

/// Data files, at the same path in host and container. Packages differ in directory and name.
pub(super) const DATA: &[(&str, Capability)] = &[
    ("/etc/OpenCL/vendors/nvidia.icd", Compute),
    ("/usr/share/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", Graphics),
    ("/usr/share/vulkan/icd.d/nvidia_icd.aarch64.json", Graphics),
    ("/etc/vulkan/icd.d/nvidia_icd.json", Graphics),
    ("/usr/share/vulkan/implicit_layer.d/nvidia_layers.json", Graphics),
    ("/etc/vulkan/implicit_layer.d/nvidia_layers.json", Graphics),
    ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/99_nvidia_wayland2.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json", Graphics),
    ("/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json", Graphics),
    ("/usr/share/nvidia/nvoptix.bin", Graphics),
];
