//! Taking a share: a place is found and booked under one lock, or waited for with no lock held.

use std::borrow::Cow;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{AdmitError, Candidate, fresh_inventory, refresh, tidy};
use crate::apply;
use crate::config::{Config, Inject};
use crate::grant::Image;
use crate::inventory::{Device, Inventory, is_watched};
use crate::ledger::{Lease, LeaseId, LeaseState, Ledger, Store};
use crate::place::{Placement, Refusal, named, place};
use crate::process::epoch_seconds;
use crate::request::Request;
use crate::serve::caps::Cap;

/// Between two looks for a free share.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// A lease in the ledger, and what it was decided by.
pub(super) struct Taken {
    pub lease: Lease,
    pub placement: Placement,
    pub image: Image,
    pub inventory: Inventory,
}

/// On what terms a share is taken: root's own, or those of a user who asks `sublet serve`.
#[derive(Clone, Copy)]
pub(super) struct Terms<'a> {
    pub rootfs: Rootfs<'a>,
    /// The user's policy.
    pub cap: Option<Cap<'a>>,
}

/// How the root filesystem is known.
#[derive(Clone, Copy)]
pub(super) enum Rootfs<'a> {
    /// By looking into that of this spec.
    OfSpec(&'a Value),
    /// By what its user says: it concerns their own container alone.
    #[cfg_attr(not(feature = "cli"), expect(dead_code, reason = "the service alone is told"))]
    Told(&'a Image),
}

impl Terms<'_> {
    fn check(&self, placement: &Placement, ledger: &Ledger) -> Result<(), Look> {
        let Some(Err(error)) = self.cap.map(|cap| cap.check(placement, ledger)) else { return Ok(()) };
        let temporary = error.is_temporary();
        let error = AdmitError::Cap(Box::new(error));
        Err(if temporary { Look::Temporary(error) } else { Look::Final(error) })
    }
}

/// The inventory with the devices that a user may have.
pub(super) fn allowed<'i>(
    cap: Option<Cap<'_>>,
    inventory: &'i Inventory,
    config: &Config,
) -> Result<Cow<'i, Inventory>, AdmitError> {
    let Some(names) = cap.and_then(|cap| cap.rule.devices.as_ref()) else {
        return Ok(Cow::Borrowed(inventory));
    };
    let allowed: Vec<&Device> = names.iter().flat_map(|name| named(name, inventory, config)).collect();
    if allowed.is_empty() {
        return Err(AdmitError::NoDeviceAllowed);
    }
    // Who may use a GPU may use its MIG devices.
    let may = |device: &&Device| {
        allowed.iter().any(|allowed| allowed.uuid == device.uuid || allowed.uuid == device.gpu())
    };
    let devices = inventory.devices.iter().filter(may).cloned().collect();
    Ok(Cow::Owned(Inventory { devices, ..inventory.clone() }))
}

/// Takes a share, waiting for one as long as the request says.
pub(super) fn take(
    candidate: &Candidate<'_>,
    request: &Request,
    terms: Terms<'_>,
    store: &Store,
    config: &Config,
) -> Result<Taken, AdmitError> {
    let deadline = Instant::now() + request.wait;
    let mut refreshed = None;
    loop {
        let failed = match look(candidate, request, terms, refreshed.take(), store, config) {
            Ok(taken) => return Ok(taken),
            Err(Look::RefreshFirst) => {
                refreshed = Some(refresh(config)?);
                continue;
            }
            Err(Look::Temporary(error)) if Instant::now() < deadline => error,
            Err(Look::Temporary(error) | Look::Final(error)) => return Err(error),
        };
        tracing::debug!("looking again: {failed}");
        std::thread::sleep(LOOK_AGAIN.min(deadline.saturating_duration_since(Instant::now())));
    }
}

/// Why one look found no share.
enum Look {
    /// It hangs on how much memory NVML last reported free.
    RefreshFirst,
    /// Waiting may help.
    Temporary(AdmitError),
    /// Nothing will change it.
    Final(AdmitError),
}

impl<E: Into<AdmitError>> From<E> for Look {
    fn from(error: E) -> Self {
        Self::Final(error.into())
    }
}

/// One look: inventory, image, place, lease. `refreshed` is an inventory of just now.
fn look(
    candidate: &Candidate<'_>,
    request: &Request,
    terms: Terms<'_>,
    refreshed: Option<Inventory>,
    store: &Store,
    config: &Config,
) -> Result<Taken, Look> {
    let may_refresh = refreshed.is_none();
    // A driver that is not up yet may come: `sublet.wait` waits for it too.
    let inventory = refreshed.map_or_else(|| fresh_inventory(config).map_err(Look::Temporary), Ok)?;
    let image = match terms.rootfs {
        Rootfs::OfSpec(spec) => {
            apply::inspect(spec, &candidate.container.rootfs, request, &inventory, config)?
        }
        Rootfs::Told(image) => image.clone(),
    };
    // Destroyed instances' ids are given to new ones, and /proc looks the same then.
    let confirmed = !may_refresh || !inventory.devices.iter().any(Device::is_mig) || is_watched(config);
    let allowed = allowed(terms.cap, &inventory, config)?;
    let id = LeaseId::random().map_err(AdmitError::Random)?;
    let (booked, freed) = store.update(|ledger| {
        // Instances may have been destroyed and made again since, under the same ids.
        if inventory.mig_changes != ledger.mig.count {
            let changed = Look::Temporary(AdmitError::LayoutChanged);
            return Err(if may_refresh { Look::RefreshFirst } else { changed });
        }
        let placement =
            place(request, &id, &allowed, ledger, config).map_err(|refusal| refused(refusal, may_refresh))?;
        let unconfirmed = !placement.parts.is_empty() && !confirmed;
        if unconfirmed || placement.refresh_first && may_refresh {
            return Err(Look::RefreshFirst);
        }
        terms.check(&placement, ledger)?;
        let brokered = matches!(terms.rootfs, Rootfs::Told(_));
        let lease = Lease { brokered, ..lease_for(candidate, &placement, &image, id, config) };
        ledger.insert(lease.clone())?;
        Ok((lease, placement))
    })?;
    tidy(&freed, store, config);
    let (lease, placement) = booked?;
    Ok(Taken { lease, placement, image, inventory })
}

fn refused(refusal: Box<Refusal>, may_refresh: bool) -> Look {
    match (refusal.refresh_first && may_refresh, refusal.temporary) {
        (true, _) => Look::RefreshFirst,
        (false, true) => Look::Temporary(refusal.into()),
        (false, false) => Look::Final(refusal.into()),
    }
}

/// The lease that a placement becomes.
#[must_use]
pub fn lease_for(
    candidate: &Candidate<'_>,
    placement: &Placement,
    image: &Image,
    id: LeaseId,
    config: &Config,
) -> Lease {
    let libraries = image.libraries().filter(|_| config.driver.inject == Inject::Builtin);
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
        bind_by: None,
        since: epoch_seconds(),
        mount_points: image.created.clone(),
        library_dir: libraries.map(Path::to_owned),
        brokered: false,
        parts: placement.parts.clone(),
    }
}
