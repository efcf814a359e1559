//! Admission, for every entry point: from a container's spec to a lease and an edited spec, and back.
//!
//! [`admit`] takes a lease when a container starts, [`end`] frees it when the container ends. A step
//! that fails undoes those before it. After a crash the next command cleans up,
//! because a lease is on disk before anything that depends on it exists.
//!
//! In a rootless engine, which may not change the state, each function asks `sublet serve` instead. Here it only
//! does what concerns the container itself: reading its root filesystem, editing its spec.

mod bind;
pub mod dynamic;
mod enter;
mod error;
mod fresh;
mod late;
mod refusals;
pub mod rootless;
pub mod take;
mod told;
mod wish;

use std::convert::Infallible;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::apply::{self, SpecError};
use crate::config::Config;
use crate::engine::Engine;
use crate::grant::{self, Grant};
use crate::hooks;
use crate::inventory;
use crate::ledger::{
    Container, Freed, LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, Lease, LeaseId, LeaseState, Ledger,
    LedgerError, Store,
};
use crate::mps;
use crate::process::Process;
use crate::request::Request;
use crate::storage;

use take::{Rootfs, Terms};

pub use bind::{abandon, bind, clear_unbound, hand_over};
pub use dynamic::clear_made;
pub use dynamic::{Answer as MakeAnswer, Ask as MakeAsk, PutOff, at_once};
pub use enter::{EnterError, Share, enter, enter_told, may_have_share, share_of};
pub use error::AdmitError;
pub use fresh::{confirmed_inventory, fresh_inventory, refresh};
pub use late::{Late, end_of, late};
pub use refusals::{RefusalRecord, record_told, refusals};
pub use rootless::{applies as is_brokered, own_status};
pub use take::lease_for;
pub use told::{admit_told, bind_told, free_told, mark_ending_by};
pub use wish::wish;

/// How long the last processes of an ended container may take to go.
const EMPTY_CGROUP: Duration = Duration::from_secs(5);

/// A container that an entry point brings.
#[derive(Debug)]
pub struct Candidate<'a> {
    /// Whose it is.
    pub container: Container,
    /// The process whose end without a container means that the lease is gone: the low-level runtime's.
    pub owner: Process,
    /// The share that the entry point's name means (`sublet-<share>`).
    pub share: Option<&'a str>,
    /// Who waits for it, where that can be told.
    pub engine: Option<&'a Engine>,
}

impl Candidate<'_> {
    /// Whether the engine still waits for it.
    ///
    /// # Errors
    /// [`AdmitError::NoEngine`].
    pub fn check_wanted(&self) -> Result<(), AdmitError> {
        let gone = self.engine.is_some_and(Engine::is_gone) && !cfg!(sublet_without = "c5-engine");
        if gone { Err(AdmitError::NoEngine) } else { Ok(()) }
    }

    /// Waits before the next look for a share.
    fn wait(&self, pause: Duration) {
        match self.engine {
            Some(engine) => engine.wait(pause),
            None => std::thread::sleep(pause),
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub enum Admission {
    /// Not ours: nothing was touched.
    NotOurs,
    /// It carries a live lease of its own already: nothing was touched.
    AlreadyGranted(LeaseId),
    /// `spec` is edited and has to be written; on failure call [`withdraw`].
    Granted {
        /// The new lease.
        lease: LeaseId,
        /// For stderr and the log, one line each.
        warnings: Vec<String>,
    },
}

/// Whether the container that `spec` describes asks for a share, or comes for `share` without saying so.
///
/// # Errors
/// Its annotations are none.
pub fn is_ours(spec: &Value, share: Option<&str>) -> Result<bool, SpecError> {
    Ok(wish::is_ours(spec, &apply::annotations(spec)?, share))
}

/// `container` with its root filesystem as it can be looked into now: config.json may name a place where it is mounted
/// later.
///
/// # Errors
/// Nobody says where it is; `sublet status --last-error` has it.
pub fn located(
    container: Container,
    spec: &Value,
    bundle: &Path,
    config: &Config,
) -> Result<Container, AdmitError> {
    let found = storage::root_filesystem(container.rootfs.clone(), spec, bundle).map_err(AdmitError::from);
    if let Err(error) = &found {
        refusals::record(&container.name(), error, config);
    }
    Ok(Container { rootfs: found?, ..container })
}

/// Finds the container its share and edits `spec` for it.
///
/// # Errors
/// Any reason not to start it; nothing is left behind then, and `sublet status --last-error` has it.
pub fn admit(candidate: &Candidate<'_>, spec: &mut Value, config: &Config) -> Result<Admission, AdmitError> {
    let annotations = apply::annotations(spec)?;
    if !wish::is_ours(spec, &annotations, candidate.share) {
        return Ok(Admission::NotOurs);
    }
    let admitted = has_place_for_mounts(spec, &candidate.container, config).and_then(|()| match annotations
        .get(LEASE_ANNOTATION)
    {
        _ if rootless::applies(config) => rootless::admit(candidate, &annotations, spec, config),
        Some(id) => admit_again(id, candidate, spec, config),
        None => admit_ours(candidate, spec, config),
    });
    if let Err(error) = &admitted {
        refusals::record(&candidate.container.name(), error, config);
    }
    admitted
}

/// Whether what is mounted for the container stays in it, and what another entry point has mounted is seen there.
fn has_place_for_mounts(spec: &Value, container: &Container, config: &Config) -> Result<(), AdmitError> {
    apply::own_mount_namespace(spec)?;
    Ok(apply::uncovered(spec, &container.rootfs, &config.state_dir)?)
}

/// A spec that carries a lease: another entry point has been there, or its bundle is run once more.
fn admit_again(
    id: &str,
    candidate: &Candidate<'_>,
    spec: &mut Value,
    config: &Config,
) -> Result<Admission, AdmitError> {
    match granted_still(id, &candidate.container, config) {
        Ok(lease) => Ok(Admission::AlreadyGranted(lease)),
        Err(error @ AdmitError::ForgedLease { .. }) => {
            if !is_of_bundle(id, spec, &candidate.container) {
                return Err(error);
            }
            undo(spec)?;
            admit_ours(candidate, spec, config)
        }
        Err(error) => Err(error),
    }
}

/// [`already_granted`], and its daemon serves: it was ready when the lease was taken, which may be a while ago.
fn granted_still(id: &str, container: &Container, config: &Config) -> Result<LeaseId, AdmitError> {
    let lease = already_granted(id, container, config)?;
    if lease.server.is_some() {
        mps::ready(&lease, &Store::open(&config.state_dir)?, config)?;
    }
    Ok(lease.id)
}

/// A spec with a lease id is granted only if the ledger holds that live lease for this container: not one whose
/// container never came to be, which only the next command would free.
fn already_granted(id: &str, container: &Container, config: &Config) -> Result<Lease, AdmitError> {
    let (ledger, _) = read(&Store::open(&config.state_dir)?)?.settled();
    let granted = LeaseId::parse(id).and_then(|id| ledger.lease(&id).filter(|lease| holds(lease, container)));
    granted.cloned().ok_or_else(|| AdmitError::ForgedLease { id: id.to_owned() })
}

/// Whether lease `id` in `spec` was written into this very bundle's.
fn is_of_bundle(id: &str, spec: &Value, container: &Container) -> bool {
    let record = spec.pointer("/annotations").and_then(|all| all.get(LEASE_RECORD_ANNOTATION));
    let lease = record.and_then(Value::as_str).and_then(Lease::from_annotation);
    let bundle = &container.bundle;
    !bundle.as_os_str().is_empty()
        && lease.is_some_and(|lease| lease.id.as_str() == id && lease.container.bundle == *bundle)
}

/// Rids `spec` of what an earlier run of its bundle was granted.
fn undo(spec: &mut Value) -> Result<(), AdmitError> {
    if !apply::undo(spec) {
        return Err(AdmitError::Edited);
    }
    hooks::remove(spec);
    Ok(())
}

/// Between the hook that took a lease and the container, other entry points may be passed: one that knows the
/// container better than the lease does changes nothing either.
fn holds(lease: &Lease, container: &Container) -> bool {
    let held = &lease.container;
    let awaited = lease.is_unbound() && held.uid == container.uid;
    same(held, container) || awaited && (held.id.is_empty() || held.id == container.id)
}

fn same(a: &Container, b: &Container) -> bool {
    (a.uid, &a.id, &a.bundle) == (b.uid, &b.id, &b.bundle)
}

fn admit_ours(candidate: &Candidate<'_>, spec: &mut Value, config: &Config) -> Result<Admission, AdmitError> {
    let request = wish(spec, candidate.share, config)?;
    let store = Store::open(&config.state_dir)?.beside(&candidate.container.record);
    let terms = Terms { rootfs: Rootfs::OfSpec(spec), cap: None };
    let taken = wish::taken(take::take(candidate, &request, terms, &store, config), spec, config)?;
    let served = grant(&taken, &request, config).and_then(|grant| {
        apply::edit(spec, &grant)?;
        ready(&taken, &grant, &store, config)
    });
    if served.is_err() {
        give_back(&taken.lease, &store, config);
    }
    Ok(Admission::Granted { lease: taken.lease.id, warnings: served? })
}

/// What a container with this lease is given.
fn grant(taken: &take::Taken, request: &Request, config: &Config) -> Result<Grant, AdmitError> {
    let grant = grant::grant(
        &taken.placement,
        &taken.lease,
        &request.capabilities,
        &taken.image,
        &taken.inventory,
        config,
    );
    // A node that is missing would give a container that starts and finds no GPU.
    for granted in &grant.nodes {
        inventory::ensure_node(&config.driver.root, &granted.node)?;
    }
    Ok(grant)
}

/// Its daemon, last, after those in its way: none is started for a container that cannot be served. All the warnings
/// there are.
fn ready(
    taken: &take::Taken,
    grant: &Grant,
    store: &Store,
    config: &Config,
) -> Result<Vec<String>, AdmitError> {
    let mut warnings = mps::make_way(&taken.in_the_way, store)?;
    if taken.lease.server.is_some() {
        warnings.extend(mps::ready(&taken.lease, store, config)?);
    }
    warnings.extend(grant.warnings.iter().cloned());
    Ok(warnings)
}

/// Gives `lease` back before its container ever existed.
///
/// # Errors
/// The ledger cannot be written.
pub fn withdraw(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    if rootless::applies(config) {
        return rootless::withdraw(lease, config);
    }
    let store = Store::open(&config.state_dir)?;
    free(lease, &store, config)
}

/// [`withdraw`] where another error is on its way to the user already.
fn give_back(lease: &Lease, store: &Store, config: &Config) {
    if let Err(error) = free(&lease.id, store, config) {
        tracing::warn!(
            "lease {} could not be freed yet: {error}; the next sublet command frees it",
            lease.id
        );
    }
}

/// The container with this lease is gone: frees it once its cgroup is empty, then settles its server.
/// Unknown ids are no error: late ends come twice.
///
/// # Errors
/// The ledger cannot be read or written, or its processes do not go.
pub fn end(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    if rootless::applies(config) {
        return rootless::end(lease, config);
    }
    let store = Store::open(&config.state_dir)?;
    let ledger = read(&store)?;
    let Some(held) = ledger.lease(lease).cloned() else {
        clear_for_others(&ledger, &store);
        return Ok(());
    };
    let deadline = Instant::now() + EMPTY_CGROUP;
    while held.has_processes() {
        if Instant::now() > deadline {
            return Err(AdmitError::StillRunning {
                lease: lease.clone(),
                container: held.container.id.clone(),
            });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    free(lease, &store, config)
}

/// After the end of a container whose lease is `record` in its own annotations: a rootless user removes what
/// it left in the user's own files, whoever has freed the lease.
pub fn clear_after(record: &str, config: &Config) {
    if let Some(lease) = Lease::from_annotation(record).filter(|_| rootless::applies(config)) {
        rootless::clear_after(&lease, config);
    }
}

/// Takes `lease` out of the ledger and tidies up after it.
fn free(lease: &LeaseId, store: &Store, config: &Config) -> Result<(), AdmitError> {
    let (removed, mut freed) = store.update(|ledger| Ok::<_, Infallible>(ledger.remove(lease)))?;
    let Ok(removed) = removed;
    freed.extend(removed);
    tidy(&freed, store, config);
    if freed.is_empty() {
        clear_for_others(&read(store)?, store);
    }
    Ok(())
}

/// Another command has just freed the lease, as `ledger` has it: it may have done so too late to clear what hung on
/// it, or be killed.
fn clear_for_others(ledger: &Ledger, store: &Store) {
    if !ledger.clearable().is_empty() {
        clear_leftovers(store);
    }
    if ledger.has_unneeded() {
        clear_made(store);
    }
}

/// After leases were freed: settles their servers, removes the mount points they left in a rootfs and
/// what a killed shim left in a bundle, and destroys MIG instances that were made for them.
pub fn tidy(freed: &Freed, store: &Store, config: &Config) {
    if freed.is_empty() {
        return;
    }
    settle(freed, store, config);
    clear_made(store);
}

/// [`tidy`] as far as no MIG layout changes.
pub fn settle(freed: &Freed, store: &Store, config: &Config) {
    clear_leftovers(store);
    let mut settled = Vec::new();
    for lease in freed {
        let Some(key) = &lease.server else { continue };
        if settled.contains(&key) {
            continue;
        }
        settled.push(key);
        if let Err(error) = mps::settle(key, store, config) {
            tracing::warn!("{error}");
        }
    }
}

/// Removes what ended containers left, and only then forgets it: whoever is killed in between leaves the
/// rest to the next `sublet` command, or the next end of a container: a start has no time to look.
///
/// Some engines (containerd) unmount the root filesystem once the runtime has deleted the container, and
/// what was not removed before that cannot be reached any more. So this comes before anything that takes
/// time, and a delete does it too when another command has just freed the container's lease.
pub fn clear_leftovers(store: &Store) {
    let clearable = store.read().map(|ledger| ledger.clearable()).unwrap_or_default();
    if clearable.is_empty() {
        return;
    }
    for left in &clearable {
        crate::replace::sweep(&left.bundle);
        apply::clear(left);
    }
    let forgotten = store.update(|ledger| {
        ledger.forget(&clearable);
        Ok::<_, Infallible>(())
    });
    if let Err(error) = forgotten {
        tracing::warn!("{error}");
    }
}

/// Marks the lease of container `id` (of `uid`) as ending; the state it had comes back by [`unmark`].
///
/// # Errors
/// The ledger cannot be written.
pub fn mark_ending(
    uid: u32,
    id: &str,
    record: &Path,
    config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    if rootless::applies(config) {
        return rootless::mark_ending(id, record, config);
    }
    mark(uid, id, record, Process::current().ok(), config)
}

/// [`mark_ending`] where `deleter` deletes the container.
fn mark(
    uid: u32,
    id: &str,
    record: &Path,
    deleter: Option<Process>,
    config: &Config,
) -> Result<Option<LeaseId>, AdmitError> {
    let store = Store::open(&config.state_dir)?;
    // Wherever we are: a container that is not ours is none of our business, and the change below is refused.
    let ledger = store.peek().or_else(|_| read(&store))?;
    if ledger.of_record(uid, id, record).is_none() {
        clear_for_others(&ledger, &store);
        return Ok(None);
    }
    let (marked, freed) = store.update(|ledger| {
        let id = ledger.of_record(uid, id, record).map(|lease| lease.id.clone());
        if let Some(lease) = id.as_ref().and_then(|id| ledger.lease_mut(id)) {
            lease.state = LeaseState::Ending;
            // A container whose delete is killed is not ending: its owner's death will tell.
            if let (Some(_), Some(deleter)) = (&lease.init, deleter) {
                lease.owner = deleter;
            }
        }
        Ok::<_, Infallible>(id)
    })?;
    tidy(&freed, &store, config);
    let Ok(marked) = marked;
    Ok(marked)
}

/// A failed delete leaves the lease as it was.
///
/// # Errors
/// The ledger cannot be written.
pub fn unmark(lease: &LeaseId, config: &Config) -> Result<(), AdmitError> {
    if rootless::applies(config) {
        return rootless::unmark(lease, config);
    }
    let store = Store::open(&config.state_dir)?;
    let (Ok(()), freed) = store.update(|ledger| {
        if let Some(lease) = ledger.lease_mut(lease) {
            lease.state = if lease.init.is_some() { LeaseState::Active } else { LeaseState::Pending };
        }
        Ok::<_, Infallible>(())
    })?;
    tidy(&freed, &store, config);
    Ok(())
}

/// The ledger as it stands; one that cannot be read is rebuilt from what runs first.
///
/// # Errors
/// As [`Store::update`].
pub fn read(store: &Store) -> Result<Ledger, LedgerError> {
    match store.read() {
        Err(LedgerError::Corrupt { .. }) => {
            let (Ok(()), _freed) = store.update(|_| Ok::<_, Infallible>(()))?;
            store.read()
        }
        read => read,
    }
}
