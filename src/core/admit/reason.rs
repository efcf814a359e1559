//! One word for each kind of refusal, for machines: in JSON errors, events and metrics. docs/explain.md lists them.
//! Words may be added, and none is ever renamed.

use super::{AdmitError, JobError};
use crate::broker::client::BrokerError;
use crate::inventory::InventoryError;
use crate::mps::MpsError;

impl AdmitError {
    /// The word for the refusal.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Refused(refusal) if refusal.left_out => "gpu-lost",
            Self::Refused(refusal) if refusal.temporary => "no-room",
            Self::Refused(_) => "never-fits",
            Self::Unmade { temporary: true, .. } | Self::Job(JobError::NoPlace { .. }) => "no-room",
            Self::Unmade { .. } => "no-mig-device",
            Self::WouldMake { .. } => "mig-device-would-be-made",
            Self::Request(_)
            | Self::LateShared(_)
            | Self::LatePriority
            | Self::LateEnvironment(_)
            | Self::LateTmp
            | Self::NeedsShim => "bad-request",
            Self::Conflict(_) => "conflict",
            Self::Image(_) | Self::Storage(_) => "bad-image",
            Self::Spec(_)
            | Self::ForgedLease { .. }
            | Self::Edited
            | Self::Namespace(_)
            | Self::Record { .. } => "bad-bundle",
            Self::Cdi(_) => "cdi",
            Self::Inventory(error) => of_inventory(error),
            Self::Own(_) => "driver",
            Self::Mps(error) => of_mps(error),
            Self::NoDaemon(_) => "mps",
            Self::Node(_) => "device-nodes",
            Self::Job(_) => "job",
            Self::PolicyLimit(_) | Self::TooManyUnbound(_) | Self::NoDeviceAllowed => "policy",
            Self::Broker(error) => of_broker(error),
            Self::NoLease(_) | Self::NotHeld | Self::NotBound(_) | Self::Unbound { .. } => "no-lease",
            Self::Doubled(_) | Self::StillRunning { .. } | Self::LayoutChanged => "busy",
            Self::NoEngine => "engine-gone",
            Self::Ledger(_) | Self::Random(_) => "state",
        }
    }
}

/// The word for an inventory that cannot be had.
pub fn of_inventory(error: &InventoryError) -> &'static str {
    match error {
        InventoryError::NoDriver { .. } => "no-driver",
        InventoryError::FellOffTheBus { .. } => "gpu-lost",
        InventoryError::Missing { .. }
        | InventoryError::Stale { .. }
        | InventoryError::Corrupt { .. }
        | InventoryError::Untrusted { .. } => "no-inventory",
        InventoryError::Unreadable { .. } | InventoryError::Unwritable { .. } => "state",
    }
}

/// The word for an MPS daemon that does not serve.
pub fn of_mps(error: &MpsError) -> &'static str {
    match error {
        MpsError::Inventory(error) => of_inventory(error),
        MpsError::Ledger(_) => "state",
        _ => "mps",
    }
}

/// The word for `sublet serve`. What it refuses has no word of its own on the way here: its text says why.
pub fn of_broker(error: &BrokerError) -> &'static str {
    match error {
        BrokerError::Refused { .. } => "refused-by-service",
        _ => "no-service",
    }
}
