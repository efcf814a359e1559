//! Taking a share: a place is found and booked under one lock, or waited for with no lock held.

use std::time::{Duration, Instant};

use super::{AdmitError, Candidate, Wish, fresh_inventory, refresh, tidy};
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Doubled, Lease, LeaseId, LeaseState, Store};
use crate::place::{Placement, Refusal, place};
use crate::process::epoch_seconds;

/// Between two looks for a free share.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A lease in the ledger, and what it was decided by.
pub(super) struct Taken {
    pub lease: Lease,
    pub placement: Placement,
    pub inventory: Inventory,
}

/// Why one look found no share.
enum NotNow {
    RefreshFirst,
    Refused(Box<Refusal>),
    Doubled(Doubled),
}

/// Takes a share, waiting for one as long as the request says.
pub(super) fn take(
    candidate: &Candidate<'_>,
    wish: &Wish,
    store: &Store,
    config: &Config,
) -> Result<Taken, AdmitError> {
    let deadline = Instant::now() + wish.request.wait;
    let mut inventory = None;
    let mut refreshed = false;
    loop {
        match look(candidate, wish, &mut inventory, refreshed, store, config) {
            Ok(taken) => return Ok(taken),
            Err(Look::RefreshFirst) => {
                inventory = Some(refresh(config)?);
                refreshed = true;
            }
            Err(Look::Failed { error, temporary }) => {
                if !temporary || Instant::now() >= deadline {
                    return Err(error);
                }
                std::thread::sleep(LOOK_AGAIN.min(deadline.saturating_duration_since(Instant::now())));
                (inventory, refreshed) = (None, false);
            }
        }
    }
}

enum Look {
    RefreshFirst,
    Failed { error: AdmitError, temporary: bool },
}

/// One look: inventory, place, lease.
fn look(
    candidate: &Candidate<'_>,
    wish: &Wish,
    inventory: &mut Option<Inventory>,
    refreshed: bool,
    store: &Store,
    config: &Config,
) -> Result<Taken, Look> {
    let inventory = match inventory.take() {
        Some(inventory) => inventory,
        // A driver that is not up yet may come: `sublet.wait` waits for it too.
        None => fresh_inventory(config).map_err(|error| Look::Failed { error, temporary: true })?,
    };
    let failed = |error: AdmitError| Look::Failed { error, temporary: false };
    let id = LeaseId::random().map_err(|error| failed(AdmitError::Random(error)))?;
    let (booked, freed) = store
        .update(|ledger| {
            let placement = place(&wish.request, &id, &inventory, ledger, config).map_err(|refusal| {
                if refusal.refresh_first && !refreshed {
                    NotNow::RefreshFirst
                } else {
                    NotNow::Refused(refusal)
                }
            })?;
            if placement.refresh_first && !refreshed {
                return Err(NotNow::RefreshFirst);
            }
            let lease = lease_for(candidate, &placement, wish, id);
            ledger.insert(lease.clone()).map_err(NotNow::Doubled)?;
            Ok((lease, placement))
        })
        .map_err(|error| failed(error.into()))?;
    tidy(&freed, store, config);
    match booked {
        Ok((lease, placement)) => Ok(Taken { lease, placement, inventory }),
        Err(NotNow::RefreshFirst) => Err(Look::RefreshFirst),
        Err(NotNow::Refused(refusal)) => {
            Err(Look::Failed { temporary: refusal.temporary, error: refusal.into() })
        }
        Err(NotNow::Doubled(error)) => Err(failed(error.into())),
    }
}

/// The lease that a placement becomes.
#[must_use]
pub fn lease_for(candidate: &Candidate<'_>, placement: &Placement, wish: &Wish, id: LeaseId) -> Lease {
    Lease {
        id,
        container: candidate.container.clone(),
        devices: placement.devices.clone(),
        mode: placement.mode,
        isolation: placement.isolation,
        server: placement.server.clone(),
        sm: placement.sm,
        memory_bytes: placement.memory_bytes,
        processes: placement.processes,
        priority: placement.priority,
        state: LeaseState::Pending,
        owner: candidate.owner,
        init: None,
        since: epoch_seconds(),
        mount_points: wish.image.created.clone(),
    }
}
