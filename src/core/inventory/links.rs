//! How a host's GPUs are joined. It only helps to choose among GPUs that are alike otherwise: what the driver does not tell
//! costs nothing else.

use serde::{Deserialize, Serialize};

use super::Inventory;

/// How two GPUs are joined, by NVML's indices, the lower one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link(pub u32, pub u32, pub Join);

/// The way between two GPUs, the closest first. Beyond `NVLink` these are NVML's levels of a common ancestor
/// (nvml.h, `nvmlGpuTopologyLevel_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Join {
    /// Directly or through `NVSwitch`.
    Nvlink,
    /// They are on one board.
    Board,
    /// Through one `PCIe` switch.
    Switch,
    /// Through several `PCIe` switches, without a host bridge.
    Switches,
    /// Through a `PCIe` host bridge.
    HostBridge,
    /// Through the host bridges of one NUMA node.
    NumaNode,
    /// From one NUMA node to another.
    System,
}

impl Join {
    /// In words that follow what is joined.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Nvlink => "by NVLink",
            Self::Board => "on one board",
            Self::Switch => "by one PCIe switch",
            Self::Switches => "by several PCIe switches",
            Self::HostBridge => "by a PCIe host bridge",
            Self::NumaNode => "by the host bridges of one NUMA node",
            Self::System => "over several NUMA nodes",
        }
    }
}

impl Inventory {
    /// How the two GPUs with these indices are joined; `None`: the driver does not tell.
    pub(crate) fn join(&self, one: u32, other: u32) -> Option<Join> {
        let (low, high) = (one.min(other), one.max(other));
        let found = self.links.binary_search_by_key(&(low, high), |link| (link.0, link.1)).ok()?;
        Some(self.links[found].2)
    }

    /// The longest way between any two of the GPUs with these indices; `None`: the driver does not tell of all, or there are
    /// no two.
    pub fn widest_join(&self, gpus: &[u32]) -> Option<Join> {
        let pairs = gpus
            .iter()
            .enumerate()
            .flat_map(|(at, one)| gpus[at + 1..].iter().map(move |other| (one, other)));
        let ways: Option<Vec<Join>> = pairs.map(|(one, other)| self.join(*one, *other)).collect();
        ways?.into_iter().max()
    }
}
