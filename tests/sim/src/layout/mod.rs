//! The files of a simulated driver below its root, and their content.
//!
//! `sublet-sim up` makes the root (called DIR here): `DIR/dev`, `DIR/proc`, `DIR/sys`, `DIR/usr`, `DIR/etc`
//! as the product finds them on a host, `DIR/run` for the product's state, and the simulator's files
//! `DIR/sim/{topology.json,state.json,lock}`.
//!
//! # The trailer
//! A container does not see `DIR/sim`. Therefore `up` appends one line to its copies of libcuda and libnvidia-ml,
//! after a newline: `SUBLETSIM` and the resolved [`topology::Topology`] as JSON. At first this is the text of
//! `DIR/sim/topology.json` (ELF loaders ignore data after the last section). [`trailer`] writes and reads it. It is
//! updated when MIG mode or MIG devices change; `topology.json` is not. Its format (every key is always present; GPUs
//! are in the order of NVML's index, not of the bus):
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
pub mod health;
pub mod instances;
pub mod state_file;
pub mod topology;
pub mod trailer;

use std::io;
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

    /// The root that contains the calling program, in any driver layout; otherwise `SUBLET_SIM_ROOT`.
    #[must_use]
    pub fn of_program() -> Option<Self> {
        let program = std::env::current_exe().ok()?;
        let above = program.ancestors().skip(1).map(|dir| Self(dir.to_owned()));
        above.into_iter().find(Self::exists).or_else(Self::from_env)
    }

    /// The root that contains a library file, in any driver layout; otherwise `SUBLET_SIM_ROOT`. `None`: a container, which
    /// has neither.
    ///
    /// # Errors
    /// The file or its directories cannot be examined. On a host they would be taken for a container's otherwise, whose
    /// driver has every setting as at first.
    pub fn of_library(file: &Path) -> io::Result<Option<Self>> {
        let file = match file.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            canonical => canonical?,
        };
        for dir in file.ancestors().skip(1) {
            let root = Self(dir.to_owned());
            if root.topology().try_exists()? {
                return Ok(Some(root));
            }
        }
        Ok(Self::from_env())
    }

    fn from_env() -> Option<Self> {
        std::env::var_os("SUBLET_SIM_ROOT").map(|dir| Self(dir.into())).filter(Self::exists)
    }

    /// Whether `up` has run here.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.topology().exists()
    }

    /// The directory itself.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// The path `relative` below the root.
    #[must_use]
    pub fn join(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.0.join(relative)
    }

    /// The resolved topology.
    #[must_use]
    pub fn topology(&self) -> PathBuf {
        self.join("sim/topology.json")
    }

    /// While this file exists, MPS servers end when they start, with its text as the reason in their log. If it is
    /// empty they log nothing, as with a libcuda of another driver version (docs/evidence).
    #[must_use]
    pub fn server_fault(&self) -> PathBuf {
        self.join("sim/mps-server-fault")
    }

    /// The directory of the driver's libraries.
    #[must_use]
    pub fn libraries(&self) -> PathBuf {
        self.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_cannot_be_examined_is_not_taken_for_a_containers() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name: &str| Root::of_library(&dir.path().join(name));
        assert_eq!(of("libcuda.so").unwrap(), None);
        // ENAMETOOLONG, in place of what lasts only for a moment.
        assert!(of(&"x".repeat(300)).is_err());
    }
}
