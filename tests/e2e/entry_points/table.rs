//! The table of `tests/e2e/entry_points.rs`: what each request gets, in literals.

use sublet_e2e::entry_point::{Request, With};

/// A request and what it gets.
pub struct Row {
    pub request: Request,
    /// Runs meanwhile.
    pub beside: Option<Request>,
    pub gets: Gets,
    /// Where the environment cannot be set, as far as that is not the same on a server of its own.
    pub late: Option<Gets>,
    /// Where there is no device cgroup.
    pub rootless: Option<Gets>,
    /// The configuration may have a share of these keys.
    pub share: bool,
}

#[derive(Clone, Copy)]
pub enum Gets {
    Share(Share),
    /// Not ours.
    Nothing,
    /// With these words.
    Refused(&'static str),
    /// Not by this table, and why.
    Undecided(&'static str),
}

#[derive(Clone, Copy)]
pub struct Share {
    /// Device minors, in the order of CUDA's ordinals.
    pub minors: &'static [u32],
    /// What one process sees; nothing without libcuda.
    pub cuda: Option<Cuda>,
    pub server: Server,
    /// Some of the first process's environment.
    pub environment: &'static [&'static str],
    /// Beside the GPUs' own, nvidiactl and nvidia-uvm.
    pub more_nodes: &'static [&'static str],
    /// Of the driver's.
    pub files: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cuda {
    pub sm: u32,
    /// Free memory.
    pub mib: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// Time-slices of the driver's.
    None,
    /// The device's, with its ceiling.
    Shared(Cuda),
    /// A dedicated server.
    Own,
}

impl Gets {
    /// The same with a dedicated server.
    pub fn dedicated(self) -> Self {
        match self {
            Self::Share(share) if share.server != Server::None => {
                Self::Share(Share { server: Server::Own, ..share })
            }
            other => other,
        }
    }

    /// No single GPU of this host could serve it, even if it were idle.
    pub fn fits_no_one(self) -> bool {
        matches!(self, Self::Refused(TOO_LARGE))
            || matches!(self, Self::Share(share) if share.minors.len() > 1)
    }
}

/// More than any GPU has.
const TOO_LARGE: &str = "MiB can be booked";

impl Cuda {
    /// What a process gets without any environment: all that the server holds by itself.
    pub fn by_server(self, server: Server) -> Self {
        match server {
            Server::Shared(ceiling) => ceiling,
            Server::None | Server::Own => self,
        }
    }
}

/// Of a GPU, for CUDA. A process sees less by contexts and servers.
pub const WHOLE_MIB: u64 = 143_155;

/// Nodes that a container can make for itself: one for each GPU of the host.
pub const MADE_BY_ITSELF: usize = 8;

const UTILITY: &[&str] = &["libnvidia-cfg.so.1", "libnvidia-ml.so.1", "nvidia-smi"];

/// Files of the driver that a container with the usual capabilities has.
pub const COMPUTE_UTILITY: &[&str] = &[
    "libcuda.so",
    "libcuda.so.1",
    "libcudadebugger.so.1",
    "libnvidia-allocator.so.1",
    "libnvidia-cfg.so.1",
    "libnvidia-gpucomp.so.580.159.04",
    "libnvidia-ml.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "nvidia-smi",
    "nvidia.icd",
];

const ALL: &[&str] = &[
    "10_nvidia.json",
    "10_nvidia_wayland.json",
    "15_nvidia_gbm.json",
    "99_nvidia_wayland2.json",
    "libEGL_nvidia.so.0",
    "libGLESv1_CM_nvidia.so.1",
    "libGLESv2_nvidia.so.2",
    "libGLX_nvidia.so.0",
    "libcuda.so",
    "libcuda.so.1",
    "libcudadebugger.so.1",
    "libnvcuvid.so.1",
    "libnvidia-allocator.so.1",
    "libnvidia-cfg.so.1",
    "libnvidia-egl-gbm.so.1",
    "libnvidia-egl-wayland.so.1",
    "libnvidia-egl-wayland2.so.1",
    "libnvidia-eglcore.so.580.159.04",
    "libnvidia-encode.so.1",
    "libnvidia-fbc.so.1",
    "libnvidia-glcore.so.580.159.04",
    "libnvidia-glsi.so.580.159.04",
    "libnvidia-glvkspirv.so.580.159.04",
    "libnvidia-gpucomp.so.580.159.04",
    "libnvidia-ml.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-opencl.so.1",
    "libnvidia-opticalflow.so.1",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-rtcore.so.580.159.04",
    "libnvidia-tls.so.580.159.04",
    "libnvoptix.so.1",
    "nvidia-drm_gbm.so",
    "nvidia-smi",
    "nvidia.icd",
    "nvidia_icd.json",
];

const fn request(name: &'static str, keys: &'static [(&'static str, &'static str)]) -> Request {
    Request { name, keys, with: With::Nothing }
}

/// A whole GPU, without MPS.
const SLICE: Share = Share {
    minors: &[0],
    cuda: Some(Cuda { sm: 132, mib: WHOLE_MIB }),
    server: Server::None,
    environment: &["CUDA_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void"],
    more_nodes: &[],
    files: COMPUTE_UTILITY,
};

/// A quarter of a GPU on its common server.
const QUARTER: Share = Share {
    cuda: Some(Cuda { sm: 32, mib: 8046 }),
    server: Server::Shared(Cuda { sm: 32, mib: 8046 }),
    environment: &[
        "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=8192M",
    ],
    ..SLICE
};

const fn row(request: Request, gets: Gets) -> Row {
    Row { request, beside: None, gets, late: None, rootless: None, share: true }
}

/// An annotation that no share of the configuration can have.
const fn annotated(request: Request, gets: Gets) -> Row {
    Row { share: false, ..row(request, gets) }
}

pub const ROWS: &[Row] = &[
    row(request("slice", &[("gpu", "0")]), Gets::Share(SLICE)),
    row(request("quarter", &[("gpu", "0"), ("sm", "25"), ("memory", "8GiB")]), Gets::Share(QUARTER)),
    Row {
        late: Some(Gets::Refused("sublet.isolation=shared does not work with a hook")),
        ..row(
            request("shared", &[("gpu", "0"), ("sm", "25"), ("memory", "8GiB"), ("isolation", "shared")]),
            Gets::Share(QUARTER),
        )
    },
    row(
        request("dedicated", &[("gpu", "0"), ("sm", "25"), ("memory", "8GiB"), ("isolation", "dedicated")]),
        Gets::Share(Share { server: Server::Own, ..QUARTER }),
    ),
    // Index 2 is minor 3.
    row(
        request("sm-alone", &[("gpu", "2"), ("sm", "12.5")]),
        Gets::Share(Share {
            minors: &[3],
            cuda: Some(Cuda { sm: 16, mib: WHOLE_MIB }),
            server: Server::Shared(Cuda { sm: 16, mib: WHOLE_MIB }),
            environment: &["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=12.5", "CUDA_VISIBLE_DEVICES=0"],
            ..SLICE
        }),
    ),
    // The driver holds the limit, by a server of the container's own.
    row(
        request("memory-alone", &[("gpu", "0"), ("memory", "4GiB")]),
        Gets::Share(Share {
            cuda: Some(Cuda { sm: 132, mib: 3582 }),
            server: Server::Own,
            environment: &["CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps", "SUBLET_MEMORY_BYTES=4294967296"],
            ..SLICE
        }),
    ),
    row(
        request("two-processes", &[("gpu", "0"), ("sm", "50"), ("memory", "8GiB"), ("processes", "2")]),
        Gets::Share(Share {
            cuda: Some(Cuda { sm: 32, mib: 3950 }),
            server: Server::Shared(Cuda { sm: 66, mib: 3823 }),
            environment: &[
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
            ],
            ..SLICE
        }),
    ),
    Row {
        late: Some(Gets::Refused("sublet.priority=low does not work with a hook")),
        ..row(
            request("low", &[("gpu", "1"), ("priority", "low")]),
            Gets::Share(Share {
                minors: &[1],
                server: Server::Shared(Cuda { sm: 132, mib: WHOLE_MIB }),
                environment: &["CUDA_MPS_CLIENT_PRIORITY=1"],
                ..SLICE
            }),
        )
    },
    row(
        request("alone", &[("gpu", "4"), ("mode", "exclusive")]),
        Gets::Share(Share { minors: &[4], ..SLICE }),
    ),
    // Indices 2 and 5 are minors 3 and 7.
    row(
        request("several", &[("gpu", "2,5"), ("mode", "time-slice")]),
        Gets::Share(Share { minors: &[3, 7], environment: &["CUDA_VISIBLE_DEVICES=0,1"], ..SLICE }),
    ),
    annotated(request("named", &[("share", "quarter")]), Gets::Share(QUARTER)),
    row(
        request("utility", &[("gpu", "0"), ("capabilities", "utility")]),
        Gets::Share(Share { cuda: None, files: UTILITY, ..SLICE }),
    ),
    row(
        request("all", &[("gpu", "0"), ("capabilities", "all")]),
        Gets::Share(Share {
            more_nodes: &["dri/card1", "dri/renderD128", "nvidia-modeset"],
            files: ALL,
            ..SLICE
        }),
    ),
    annotated(request("nothing", &[]), Gets::Nothing),
    row(request("too-large", &[("gpu", "0"), ("memory", "200GiB")]), Gets::Refused(TOO_LARGE)),
    Row {
        beside: Some(request("large", &[("gpu", "0"), ("sm", "70")])),
        // Dedicated servers take turns, so none of them books SMs.
        late: Some(Gets::Share(Share {
            cuda: Some(Cuda { sm: 52, mib: WHOLE_MIB }),
            server: Server::Own,
            ..SLICE
        })),
        ..row(request("too-many-sms", &[("gpu", "0"), ("sm", "40")]), Gets::Refused("30 % SM left"))
    },
    annotated(request("unknown-key", &[("smm", "25")]), Gets::Refused("sublet.smm")),
    annotated(request("no-number", &[("sm", "150")]), Gets::Refused("sublet.sm")),
    annotated(request("contradiction", &[("mode", "exclusive"), ("sm", "25")]), Gets::Refused("exclusive")),
    annotated(
        request("two-daemons", &[("gpu", "any:2"), ("sm", "25"), ("isolation", "shared")]),
        Gets::Refused("a process connects to one MPS daemon"),
    ),
    annotated(
        request("forged", &[("sm", "25"), ("lease", "0123456789abcdef")]),
        Gets::Refused("0123456789abcdef"),
    ),
    row(
        Request { with: With::Node, ..request("other-node", &[("gpu", "0")]) },
        Gets::Refused("/dev/nvidia6 in addition to its share"),
    ),
    Row {
        // Podman mounts the host's whole /dev then: it depends on what is there.
        rootless: Some(Gets::Undecided("without a device cgroup there is no rule that opens every device")),
        ..row(
            Request { with: With::Privileged, ..request("privileged", &[("gpu", "0")]) },
            Gets::Refused("may open every device of the host"),
        )
    },
];
