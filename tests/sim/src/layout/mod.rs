//! Where everything of a simulated driver lies below its root, and what its files say.
//!
//! `sublet-sim up` makes the root (called DIR here): `DIR/dev`, `DIR/proc`, `DIR/sys`, `DIR/usr`, `DIR/etc`
//! as the product finds them on a host, `DIR/run` for the product's state, and the simulation's own
//! `DIR/sim/{topology.json,state.json,lock}`.
//!
//! # The trailer
//! A container sees none of `DIR/sim`. `up` therefore appends to its copies of libcuda and libnvidia-ml one
//! line, after a newline: `SUBLETSIM` and the resolved [`topology::Topology`] as JSON, at first the same text
//! as `DIR/sim/topology.json` (ELF loaders ignore what follows the last section). [`trailer`] writes and
//! reads it. It follows MIG mode and MIG devices as they change; `topology.json` does not. Its shape (every
//! key is always there; GPUs stand in the order of NVML's index, not of the bus):
//!
//! ```json
//! {"tag":"0d1e2f3a","driver":"580.159.04","file_version":null,"cuda":"13.0",
//!  "majors":{"nvidia":195,"uvm":510,"caps":241},"cap_nodes":true,
//!  "gpu":[{"index":0,"minor":0,"uuid":"GPU-…","name":"NVIDIA H200","bus_id":"0000:3b:00.0",
//!          "memory_mib":143771,"cuda_total_mib":143155,"sm_count":132,"compute_capability":"9.0",
//!          "arch":"hopper","virtualization":"none","display":false,"dri":true,
//!          "mig_mode":"disabled","mig_table":"h200",
//!          "mig":[{"uuid":"MIG-…","profile":"1c.2g.35gb","gi":3,"ci":0,"gi_cap":30,"ci_cap":31,
//!                  "sm_count":16,"memory_mib":33280}]}],
//!  "process":[{"gpu":0,"name":"training","mib":516}]}
//! ```
//!
//! `compute_capability` is `major.minor`; `gi_cap` and `ci_cap` are N of `/dev/nvidia-caps/nvidia-cap<N>`;
//! `process[].gpu` is a device minor.

pub mod capabilities;
pub mod contexts;
pub mod instances;
pub mod state_file;
pub mod topology;
pub mod trailer;

use std::path::{Path, PathBuf};

/// The root of a simulated driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Root {
    /// The root at this directory, which must be absolute and canonical.
    #[must_use]
    pub const fn new(dir: PathBuf) -> Self {
        Self(dir)
    }

    /// The root that the calling program lies in, wherever a driver's layout has it; else `SUBLET_SIM_ROOT`.
    #[must_use]
    pub fn of_program() -> Option<Self> {
        let program = std::env::current_exe().ok()?;
        let above = program.ancestors().skip(1).map(|dir| Self(dir.to_owned()));
        above.into_iter().find(Self::exists).or_else(Self::from_env)
    }

    /// The root that a library file was laid out in: it is `DIR/usr/lib/<triplet>/<file>`; else
    /// `SUBLET_SIM_ROOT`.
    #[must_use]
    pub fn of_library(file: &Path) -> Option<Self> {
        Self::above(&file.canonicalize().ok()?, 4).or_else(Self::from_env)
    }

    fn above(file: &Path, levels: usize) -> Option<Self> {
        file.ancestors().nth(levels).map(|dir| Self(dir.to_owned())).filter(Self::exists)
    }

    fn from_env() -> Option<Self> {
        std::env::var_os("SUBLET_SIM_ROOT").map(|dir| Self(dir.into())).filter(Self::exists)
    }

    /// Whether `up` has been here.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.topology().exists()
    }

    /// The directory itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// `relative` below the root.
    #[must_use]
    pub fn join(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.0.join(relative)
    }

    /// The resolved topology.
    #[must_use]
    pub fn topology(&self) -> PathBuf {
        self.join("sim/topology.json")
    }

    /// While this file is there, MPS servers end as they start, with its text as the reason in their log;
    /// without text as with another driver's libcuda: not a word (docs/evidence).
    #[must_use]
    pub fn server_fault(&self) -> PathBuf {
        self.join("sim/mps-server-fault")
    }

    /// Where the driver's libraries lie.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
    }
}
