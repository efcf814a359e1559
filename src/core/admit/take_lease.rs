//! Takes a lease: chooses and books a device under one lock, or waits for one without holding a lock.

mod waiting_order;

use std::borrow::Cow;
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::local::Local;
use super::{AdmitError, Candidate, dynamic_mig, fresh_inventory, refresh, refresh_if_stale};
use crate::broker::client::{Broker, BrokerError};
use crate::broker::policy_limits::PolicyLimit;
use crate::broker::protocol::Ask;
use crate::config::{Config, Inject};
use crate::fs::is_absent;
use crate::grant::{Grant, Image};
use crate::inventory::{self, Device, Inventory, is_watched};
use crate::ledger::{
    Container, DaemonKey, Freed, Init, Job, Lease, LeaseId, LeaseState, Ledger, LedgerError, Scan, Store,
    Waiter,
};
use crate::mps;
use crate::oci::{self, Tree};
use crate::place::{Order, Placement, Refusal, World, find, may_make_room, named, place_within};
use crate::process::{Process, epoch_seconds, uptime_milliseconds};
use crate::request::Request;

pub(super) use waiting_order::limit_of;
pub use waiting_order::{Asks, book_waiter, place_in_order};

/// The pause between two attempts.
pub(super) const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The pause after an attempt that found no free share. Each attempt takes milliseconds of a processor and the ledger's
/// lock, so 50 waiting containers must not try ten times a second (tests/bench/run growth).
pub(super) fn retry_pause(waited: Duration) -> Duration {
    (waited / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
}

/// The time between two attempts to have an instance created. Each one asks the driver.
const MAKE_AGAIN: Duration = Duration::from_secs(1);

/// How long to try again, without `sublet.wait`, while MIG instances are created and destroyed.
const SETTLING: Duration = Duration::from_secs(20);

/// A lease in the ledger, and the data on which it was based.
pub(super) struct Taken {
    pub lease: Lease,
    pub placement: Placement,
    pub image: Image,
    /// The container's root filesystem, if this process examines it.
    tree: Option<Tree>,
    pub inventory: Inventory,
    /// Idle MPS daemons that must end before the container starts.
    pub conflicting_daemons: Vec<DaemonKey>,
}

impl Taken {
    /// Checks the mount points of `grant` in the container with this config.json, and creates those that its runtime may
    /// not create.
    pub fn check_mount_points(&self, spec: &Value, grant: &Grant) -> Result<(), AdmitError> {
        let Some(tree) = &self.tree else { return Ok(()) };
        oci::check_mps_directories(spec, tree, grant)?;
        Ok(oci::make_mount_points(tree, grant)?)
    }
}

/// The terms on which a share is taken, and how the image is examined.
#[derive(Clone, Copy)]
pub(super) enum Terms<'a> {
    /// Root's, by reading the root filesystem of this spec.
    OfSpec(&'a Value),
    /// Of a user whose process, the third, asks `sublet serve`, by the user's policy. The image is as they report it,
    /// which affects only their own container. The process waits, and asks again.
    Reported(&'a Image, Option<PolicyLimit<'a>>, Process),
    /// Root's, for the programs of a job, of which the second is the first process that needs a share. There is no image.
    OfJob(&'a Job, &'a Init),
}

impl<'a> Terms<'a> {
    /// The user's policy.
    const fn limit(self) -> Option<PolicyLimit<'a>> {
        if let Self::Reported(_, limit, _) = self { limit } else { None }
    }

    /// The process that waits, if it is another one.
    const fn asker(self) -> Option<Process> {
        if let Self::Reported(.., asker) = self { Some(asker) } else { None }
    }
}

/// The inventory with the devices that a user may have.
///
/// # Errors
/// The policy names devices that do not exist.
pub fn allowed_inventory<'i>(
    limit: Option<PolicyLimit<'_>>,
    inventory: &'i Inventory,
    config: &Config,
) -> Result<Cow<'i, Inventory>, AdmitError> {
    let Some(names) = limit.and_then(|limit| limit.rule.devices.as_ref()) else {
        return Ok(Cow::Borrowed(inventory));
    };
    let allowed: Vec<&Device> = names.iter().flat_map(|name| named(name, inventory, config)).collect();
    if allowed.is_empty() && inventory.left_out.is_empty() {
        return Err(AdmitError::NoDeviceAllowed);
    }
    // A user who may use a GPU may use its MIG devices.
    let may = |device: &&Device| {
        allowed.iter().any(|allowed| allowed.uuid == device.uuid || allowed.uuid == device.gpu())
    };
    let devices = inventory.devices.iter().filter(may).cloned().collect();
    Ok(Cow::Owned(Inventory { devices, ..inventory.clone() }))
}

/// Takes a share, waiting for one as long as the request allows.
pub(super) fn take(
    candidate: &Candidate<'_>,
    request: &Request,
    terms: Terms<'_>,
    store: &Store,
    local: Local<'_>,
) -> Result<Taken, AdmitError> {
    if matches!(terms, Terms::OfSpec(_)) {
        // If a record of the container cannot be found again, its lease would never end.
        let path = &candidate.container.record;
        if let Some(source) = path.symlink_metadata().err().filter(|error| !is_absent(error)) {
            return Err(AdmitError::Record { path: path.to_string_lossy().into_owned(), source });
        }
    }
    let id = LeaseId::random().map_err(AdmitError::Random)?;
    let mut search = Search {
        candidate,
        request,
        terms,
        id,
        store,
        local,
        scanned: Cell::new(false),
        waits: false,
        made: false,
        no_room_made: None,
        unexplained_ended: false,
    };
    let taken = search.run().map_err(|error| search.add_advice(error));
    // A user's process may ask again, and `sublet serve` may start one of Docker's again.
    let asker = terms.asker().filter(|_| terms.limit().is_some() && !request.wait.is_zero());
    let may_retry = || matches!(terms, Terms::OfSpec(_)) && candidate.container.is_dockers();
    let waits = |refused: &&AdmitError| refused.is_temporary() && (asker.is_some() || may_retry());
    if let Some(refused) = taken.as_ref().err().filter(waits) {
        search.note_waiter(refused, asker);
    }
    if local.config.mig.dynamic && taken.is_err() {
        local.release_instance(&search.id, store);
    } else if search.made {
        // The request may have been placed on another device in the end.
        local.destroy_unneeded(store);
    }
    taken
}

/// Why an attempt took no lease.
enum NotTaken {
    /// It depends on how much memory NVML last reported free.
    InventoryOld,
    /// After a loss of the ledger, an idle daemon alone may keep the device closed.
    UnexplainedDaemon,
    /// MIG instances were created or destroyed since the inventory was written.
    LayoutChanged,
    /// A MIG instance may be created for it. Otherwise this error is the answer.
    NoInstance(Box<(Order, AdmitError)>),
    /// Waiting helps only if it is temporary.
    Refused(AdmitError),
}

impl<E: Into<AdmitError>> From<E> for NotTaken {
    fn from(error: E) -> Self {
        Self::Refused(error.into())
    }
}

/// One request on its way to a lease.
struct Search<'a> {
    candidate: &'a Candidate<'a>,
    request: &'a Request,
    terms: Terms<'a>,
    /// Of the lease.
    id: LeaseId,
    store: &'a Store,
    local: Local<'a>,
    /// Whether an attempt has scanned for ended containers.
    scanned: Cell<bool>,
    /// Whether the ledger has it as a waiter.
    waits: bool,
    /// Whether a MIG instance was created for it.
    made: bool,
    /// Why `sublet serve` makes no room for it.
    no_room_made: Option<BrokerError>,
    /// Whether daemons that have been idle since the loss of the ledger have been ended.
    unexplained_ended: bool,
}

impl Search<'_> {
    fn run(&mut self) -> Result<Taken, AdmitError> {
        let began = Instant::now();
        let mut refreshed = None;
        loop {
            self.candidate.check_wanted()?;
            let (failed, pause) = match self.try_take(refreshed.take()) {
                Ok(taken) => return Ok(taken),
                Err(NotTaken::UnexplainedDaemon) => {
                    self.unexplained_ended = true;
                    mps::end_unexplained(self.store, self.local.config)?;
                    refreshed = Some(refresh(self.local.config)?);
                    continue;
                }
                Err(NotTaken::InventoryOld) => {
                    refreshed = Some(refresh(self.local.config)?);
                    continue;
                }
                Err(NotTaken::LayoutChanged) if began.elapsed() < SETTLING => {
                    self.candidate.wait(SHORTEST_PAUSE);
                    refreshed = Some(refresh(self.local.config)?);
                    continue;
                }
                Err(NotTaken::NoInstance(order)) => match self.make_instance(*order) {
                    Err(error) if error.is_temporary() => (error, MAKE_AGAIN),
                    made => {
                        refreshed = Some(made?);
                        continue;
                    }
                },
                Err(NotTaken::LayoutChanged) => (AdmitError::LayoutChanged, SHORTEST_PAUSE),
                Err(NotTaken::Refused(error)) if !error.is_temporary() => return Err(error),
                Err(NotTaken::Refused(error)) => (error, retry_pause(began.elapsed())),
            };
            // A user's process asks again.
            let wait = if self.terms.asker().is_some() { Duration::ZERO } else { self.request.wait };
            let limit = self.local.config.suspend.limit;
            let makes_room = self.has_room_made(&failed, limit.saturating_sub(began.elapsed()));
            let left = if makes_room { wait.max(limit) } else { wait }.saturating_sub(began.elapsed());
            if left.is_zero() {
                return Err(failed);
            }
            tracing::debug!("looking again: {failed}");
            self.wait_in_order(&failed);
            self.candidate.wait(pause.min(left));
        }
    }

    /// Has an entry among those who wait, from now on.
    fn wait_in_order(&mut self, failed: &AdmitError) {
        if let (false, Ok(process)) = (std::mem::replace(&mut self.waits, true), Process::current()) {
            self.note_waiter(failed, Some(process));
        }
    }

    /// Has `sublet serve` suspend others, where that helps, and waits for it. Whether there is room by now, or will be within
    /// the time that is `left`.
    fn has_room_made(&mut self, failed: &AdmitError, left: Duration) -> bool {
        let is_full = matches!(failed, AdmitError::Refused(refusal) if refusal.temporary);
        let is_roots = matches!(self.terms, Terms::OfSpec(_));
        if left.is_zero() || !is_full || !is_roots || self.no_room_made.is_some() || !self.may_make_room() {
            return false;
        }
        tracing::info!("{failed}; `sublet serve` is asked to suspend others for it");
        self.wait_in_order(failed);
        let ask = Ask::MakeRoom { waiter: self.id.clone() };
        self.no_room_made = Broker::new(self.local.config).ask(&ask).err();
        self.no_room_made.is_none()
    }

    /// Whether others that may be suspended have what it needs.
    fn may_make_room(&self) -> bool {
        let config = self.local.config;
        let Ok(mut ledger) = self.store.peek() else { return false };
        ledger.waiters.retain(Waiter::is_there);
        ledger.leases.iter().any(Lease::may_be_suspended)
            && fresh_inventory(config).is_ok_and(|inventory| {
                let (ahead, _) = waiting_order::book_ahead(self.asks(), &inventory, &ledger, config);
                may_make_room(self.request, &self.id, (&inventory, &ahead, config), uptime_milliseconds())
            })
    }

    /// Puts it into the order of those who wait: this `process`, or for `None` the refused container. Where that fails, it
    /// waits all the same.
    fn note_waiter(&self, failed: &AdmitError, process: Option<Process>) {
        let (container, why) = (&self.candidate.container, failed.to_string());
        let mut waiter = Waiter::new(&self.id, container, self.request, &why, process);
        // While room is made for it, which may take that long.
        waiter.stay_for(self.local.config.suspend.limit);
        waiter.rule = self.terms.limit().map(|limit| limit.rule.clone());
        let noted = self.store.change_with_scan(Scan::None, |ledger| ledger.add_waiter(waiter));
        let _ = noted.inspect_err(|error| tracing::debug!("who waits cannot be written: {error}"));
    }

    /// Adds advice to a refusal, without the ledger's lock. Advice does not help a job.
    fn add_advice(&self, error: AdmitError) -> AdmitError {
        match error {
            AdmitError::Refused(bare) if !matches!(self.terms, Terms::OfJob(..)) => {
                let refusal = AdmitError::Refused(self.current_refusal().unwrap_or(bare));
                match &self.no_room_made {
                    None => refusal,
                    Some(BrokerError::NotRunning(..)) => refusal.with_room_by_service(false),
                    Some(BrokerError::Late(_)) => {
                        refusal.without_room("the time for it is over ([suspend] limit)")
                    }
                    Some(error) => refusal.without_room(&error.to_string()),
                }
            }
            AdmitError::Unmade { refused, why, temporary } => {
                AdmitError::Unmade { refused: Box::new(self.add_advice(*refused)), why, temporary }
            }
            error => error,
        }
    }

    /// The refusal by the present inventory and ledger; `None` if there is room by now, or they cannot be read.
    fn current_refusal(&self) -> Option<Box<Refusal>> {
        let config = self.local.config;
        let (inventory, ledger) = (fresh_inventory(config).ok()?, self.store.peek().ok()?);
        let ledger = ledger.seen_by(self.candidate.container.uid);
        let allowed = allowed_inventory(self.terms.limit(), &inventory, config).ok()?;
        let allows = |placement: &Placement| {
            self.terms.limit().is_none_or(|limit| limit.check(placement, &ledger).is_ok())
        };
        let refusal = place_within(self.request, &self.id, &allowed, &ledger, config, &allows).err();
        refusal.map(|refusal| refusal.of_policy(&allowed, &inventory))
    }

    /// Has an instance created, once. Returns the new inventory.
    fn make_instance(&mut self, (order, refused): (Order, AdmitError)) -> Result<Inventory, AdmitError> {
        let made = self.local.make_instance(order, &self.id, &self.candidate.container.name());
        made.map_err(|(why, temporary)| AdmitError::Unmade { refused: Box::new(refused), why, temporary })?;
        self.made = true;
        fresh_inventory(self.local.config)
    }

    const fn asks(&self) -> Asks<'_> {
        let container = &self.candidate.container;
        Asks { id: &self.id, container, by: self.terms.asker(), request: self.request }
    }

    /// One attempt: inventory, image, placement, lease. `refreshed` is a new inventory.
    fn try_take(&self, refreshed: Option<Inventory>) -> Result<Taken, NotTaken> {
        let Self { candidate, request, terms, store, local, .. } = *self;
        let config = local.config;
        if let Some(limit) = terms.limit() {
            limit.check_request(request, config)?;
        }
        let may_refresh = refreshed.is_none();
        // The driver may not be loaded yet: that is temporary, too. (The store is opened in a trusted directory only.)
        let fresh = || refresh_if_stale(inventory::load_beside(config, &[]), config);
        let inventory = refreshed.map_or_else(fresh, Ok)?;
        let (image, tree) = match terms {
            Terms::OfSpec(spec) => {
                let tree = candidate.open_tree(spec)?;
                (oci::inspect(spec, &tree, request, &inventory, config)?, Some(tree))
            }
            Terms::Reported(image, ..) => (image.clone(), None),
            Terms::OfJob(..) => (Image::default(), None),
        };
        // New instances get the ids of destroyed ones, and /proc then looks the same.
        let confirmed = !may_refresh || !inventory.devices.iter().any(Device::is_mig) || is_watched(config);
        let allowed = allowed_inventory(terms.limit(), &inventory, config)?;
        let asks = self.asks();
        // What Slurm gives to a job it keeps from others.
        let is_in_order = !matches!(terms, Terms::OfJob(..));
        let (booked, freed) = self.book(|ledger: &mut Ledger| {
            // Instances may have been destroyed and created again since, with the same ids.
            if inventory.mig_changes != ledger.mig.count {
                return Err(NotTaken::LayoutChanged);
            }
            let mut placement = find(request, &self.id, World { inventory: &allowed, ledger, config })
                .map_err(|refusal| self.classify(refusal, may_refresh, (&allowed, ledger)))?;
            if is_in_order && !ledger.waiters.is_empty() {
                placement = place_in_order(asks, placement, (&allowed, &inventory), ledger, config)?;
            }
            let unconfirmed = !placement.mig_devices.is_empty() && !confirmed;
            if unconfirmed || placement.refresh_first && may_refresh {
                return Err(NotTaken::InventoryOld);
            }
            if let Some(limit) = terms.limit() {
                limit.check(&placement, ledger)?;
            }
            if matches!(terms, Terms::Reported(..)) {
                ledger.check_unbound(candidate.container.uid)?;
            }
            oci::check_no_other_daemon(&image, placement.daemon.is_some())?;
            let mut lease =
                lease_for(&candidate.container, candidate.owner, &placement, &image, self.id.clone(), config);
            lease.mount_points = own_mount_points(&image, &candidate.container.rootfs, ledger).into();
            match terms {
                Terms::OfSpec(_) => lease.claimed_owner.clone_from(&request.owner),
                Terms::Reported(..) => lease = lease.brokered(),
                Terms::OfJob(job, init) => {
                    lease.state = LeaseState::Active;
                    (lease.init, lease.job) = (Some(init.clone()), Some(job.clone()));
                }
            }
            ledger.insert(lease.clone())?;
            ledger.stop_awaiting(&self.id);
            ledger.waiters.retain(|waiter| !waiter.is_of(&self.id, &candidate.container, asks.by));
            let conflicting_daemons = ledger.conflicting_daemons(&lease).cloned().collect();
            let to_be_cleared = ledger.has_files_to_clear(&lease);
            Ok((lease, placement, conflicting_daemons, to_be_cleared))
        })?;
        local.clean_up(&freed, store);
        let (lease, placement, conflicting_daemons, to_be_cleared) = booked?;
        if to_be_cleared {
            // From now on the lease keeps other processes from removing files there.
            if let Err(error) = store.clearing() {
                tracing::warn!("clearing.lock: {error}: files of an earlier container may still be removed");
            }
        }
        Ok(Taken { lease, placement, image, tree, inventory, conflicting_daemons })
    }

    /// Applies `change` to the ledger, the first time after a brief scan for ended containers. If there is no room then, it
    /// is applied after a full one.
    fn book<T>(
        &self,
        change: impl Fn(&mut Ledger) -> Result<T, NotTaken>,
    ) -> Result<(Result<T, NotTaken>, Freed), LedgerError> {
        let mut freed = Freed::new();
        if !self.scanned.replace(true) {
            let (booked, gone) = self.store.update_with_scan(Scan::Brief, &change)?;
            if booked.is_ok() {
                return Ok((booked, gone));
            }
            freed = gone;
        }
        let (booked, gone) = self.store.update(&change)?;
        freed.extend(gone);
        Ok((booked, freed))
    }

    fn classify(&self, refusal: Box<Refusal>, may_refresh: bool, of: (&Inventory, &Ledger)) -> NotTaken {
        let (allowed, ledger) = of;
        if !ledger.unexplained.is_empty() && !self.unexplained_ended {
            return NotTaken::UnexplainedDaemon;
        }
        if refusal.refresh_first && may_refresh {
            return NotTaken::InventoryOld;
        }
        if self.made {
            return refusal.into();
        }
        let config = self.local.config;
        match dynamic_mig::order_instance(self.request, self.terms.limit(), allowed, ledger, config) {
            Some(Ok(order)) => NotTaken::NoInstance(Box::new((order, refusal.into()))),
            Some(Err(error)) => error.into(),
            None => refusal.into(),
        }
    }
}

/// The mount points that its runtime makes, which are removed when the container has ended. An existing empty file may
/// be one of an earlier container, which may be removed before this one is created.
fn own_mount_points(image: &Image, rootfs: &Path, ledger: &Ledger) -> Vec<PathBuf> {
    let made = ledger.filter_mount_points(rootfs, &image.empty);
    let foreign: Vec<&PathBuf> = image.empty.iter().filter(|path| !made.contains(path)).collect();
    let gone = if foreign.is_empty() { Vec::new() } else { oci::filter_missing(rootfs, &foreign) };
    image.created.iter().chain(made).chain(gone).cloned().collect()
}

/// Books in `ledger`, which is not written, the placement of a container as this lease.
pub fn book_for(of: (&LeaseId, &Container), placement: &Placement, ledger: &mut Ledger, config: &Config) {
    let nobody = Process { pid: 0, start_time: 0 };
    ledger.leases.push(lease_for(of.1, nobody, placement, &Image::default(), of.0.clone(), config));
}

/// The lease for a placement.
pub fn lease_for(
    container: &Container,
    owner: Process,
    placement: &Placement,
    image: &Image,
    id: LeaseId,
    config: &Config,
) -> Lease {
    let libraries = image.libraries().filter(|_| config.driver.inject == Inject::Builtin);
    let takes_default = placement.daemon.is_some() && image.takes_default_directory();
    let tmp_volume = image.tmp_volume.iter().filter(|_| takes_default);
    Lease {
        id,
        container: container.clone(),
        devices: placement.devices.clone(),
        mode: placement.mode,
        isolation: placement.isolation,
        daemon: placement.daemon.clone(),
        sm: placement.sm,
        memory_bytes: placement.memory_bytes,
        processes: placement.processes,
        priority: placement.priority,
        guard: placement.guard,
        suspend: placement.suspend,
        suspension: None,
        known: Vec::new(),
        resumed_ms: None,
        backoff: None,
        state: LeaseState::Pending,
        owner,
        init: None,
        bind_by: None,
        since: epoch_seconds(),
        mount_points: image.created.clone().into(),
        volumes: image.volumes.iter().chain(tmp_volume).cloned().collect(),
        library_dir: libraries.map(Path::to_owned),
        brokered: false,
        job: None,
        within: None,
        claimed_owner: None,
        mig_devices: placement.mig_devices.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_waited_for_long_looks_seldom() {
        let pauses =
            [0, 1600, 5000, 60_000].map(|waited| retry_pause(Duration::from_millis(waited)).as_millis());
        assert_eq!(pauses, [100, 200, 625, 1000]);
    }
}
