//! Creates instances for containers, and destroys them when no lease needs them. Every step is recorded in the ledger
//! before it is taken, so that the next command can finish the work of a killed one.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::profile_choice::{NotMade, choices, seen};
use super::{Answer, Compute, Driver, Gpu, Instance, Span};
use sublet_core::config::Policy;
use sublet_core::ledger::{Awaited, DynamicInstance, Freed, LeaseId, Ledger, LedgerError, Store};
use sublet_core::place::Order;
use sublet_core::text::safe;

/// How long the driver may take to notice that the last process has left an instance.
const LEAVING: Duration = Duration::from_secs(2);

/// The pause between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl From<anyhow::Error> for NotMade {
    fn from(error: anyhow::Error) -> Self {
        Self { reason: error.to_string(), temporary: true }
    }
}

/// Creates and destroys instances for containers, in the driver and in the ledger. Used only behind a
/// [`super::Fence`].
pub(crate) struct Making<'a> {
    /// The driver.
    pub driver: &'a mut dyn Driver,
    /// The ledger.
    pub store: &'a Store,
    /// Leases found ended on the way.
    pub freed: Freed,
    /// Whether any instance was created or destroyed.
    pub touched: bool,
}

impl<'a> Making<'a> {
    /// On `driver` and in `store`.
    pub fn new(driver: &'a mut dyn Driver, store: &'a Store) -> Self {
        Self { driver, store, freed: Freed::new(), touched: false }
    }

    /// Creates an instance for `order`, kept for `awaited`. If a step fails, the earlier steps are undone at once.
    ///
    /// # Errors
    /// There is no room, or the driver refuses. A partly created instance is destroyed again, or the message says that it
    /// was not.
    pub fn make(&mut self, order: &Order, awaited: &Awaited, policy: Policy) -> Result<(), NotMade> {
        let ledger = self.change(|ledger| ledger.clone())?;
        let gpus = seen(order, self.driver, &ledger)?;
        let choices = choices(order, &gpus, policy)?;
        let (mut tried, mut errors) = (BTreeSet::new(), Vec::new());
        // The driver may refuse on one GPU and agree on another.
        for choice in choices.iter().filter(|choice| tried.insert(&choice.gpu)) {
            let Some(error) = self.make_one(choice, awaited)? else { return Ok(()) };
            let gpu = gpus.iter().find(|gpu| gpu.uuid == choice.gpu);
            errors.push(format!("{}: {error}", gpu.map(Gpu::label).unwrap_or_default()));
        }
        Err(NotMade { reason: errors.join("; "), temporary: true })
    }

    /// Returns why the driver did not, if it fails; a partly created instance is destroyed then.
    fn make_one(&mut self, choice: &DynamicInstance, awaited: &Awaited) -> anyhow::Result<Option<String>> {
        let made = DynamicInstance { awaited: Some(awaited.clone()), ..choice.clone() };
        self.touched = true;
        self.change(|ledger| {
            // The driver reports the place as free, so an instance that is recorded there was destroyed by another
            // program.
            ledger.forget_dynamic_instance(&made);
            ledger.mig.dynamic_instances.push(made.clone());
        })?;
        let error = match self.steps(&made) {
            Err(error) if !error.is::<LedgerError>() => error,
            done => return done.map(|()| None),
        };
        let made = self.change(|ledger| ledger.dynamic_instance_mut(&made).cloned())?.unwrap_or(made);
        let left = self.unmake(&made)?;
        let left =
            left.map(|why| format!("; and what had been created is still there: {why}")).unwrap_or_default();
        Ok(Some(format!("a {} cannot be created: {error}{left}", made.label())))
    }

    fn steps(&mut self, made: &DynamicInstance) -> anyhow::Result<()> {
        let gi = self.driver.create_instance(&made.gpu, made.profile, Span::at(made.placement))?;
        self.note(made, |made| made.gi = Some(gi))?;
        self.driver.create_compute(&made.gpu, gi, made.slices, None)?;
        let now = self.driver.instances(&made.gpu)?.into_iter().find(|one| one.gi == gi);
        let part = now.and_then(|now| now.compute.into_iter().next());
        let uuid = part.map(|part| part.uuid).filter(|uuid| !uuid.is_empty());
        let uuid = uuid.context("the driver does not report its UUID")?;
        self.note(made, |made| made.uuid = Some(uuid))
    }

    /// Destroys every instance created for a container that no lease needs. `before` is called with its UUID first.
    /// One created for lease `anew` counts, too: an earlier `sublet mig make` for it was killed, and its remains
    /// may have the only place. Returns one line for each instance that is still there, with the reason.
    pub fn clear(&mut self, anew: Option<&LeaseId>, before: &mut dyn FnMut(&str)) -> Answer<Vec<String>> {
        let mut lines = Vec::new();
        let unneeded = self.change(|ledger| {
            if let Some(lease) = anew {
                ledger.stop_awaiting(lease);
            }
            ledger.mark_unneeded_for_removal()
        })?;
        for made in unneeded {
            made.uuid.iter().for_each(|uuid| before(uuid));
            if let Some(why) = self.unmake(&made)? {
                let (instance, gpu) = (made.label(), safe(&made.gpu));
                lines.push(format!(
                    "MIG instance {instance} of GPU {gpu}, created for a container that has ended, cannot be \
                     destroyed yet: {why}; the next command tries again"
                ));
            }
        }
        Ok(lines)
    }

    /// Destroys the instance and forgets its record; returns why not, if it fails.
    fn unmake(&mut self, made: &DynamicInstance) -> anyhow::Result<Option<String>> {
        let deadline = Instant::now() + if made.stuck.is_some() { Duration::ZERO } else { LEAVING };
        let mut made = DynamicInstance { going: true, ..made.clone() };
        self.write(&made)?;
        let why = loop {
            match self.destroy(&mut made) {
                Ok(()) => {
                    self.touched = true;
                    self.change(|ledger| ledger.forget_destroyed(&made))?;
                    return Ok(None);
                }
                Err(error) if error.is::<LedgerError>() => return Err(error),
                Err(error) if Instant::now() >= deadline => break error.to_string(),
                Err(_) => std::thread::sleep(LOOK_AGAIN),
            }
        };
        // The instance still has its compute instance, so from now on another program may be the one that empties it.
        let now = there(&made, self.driver).ok().flatten();
        let is_part = |part: &Compute| made.uuid.as_ref() == Some(&part.uuid);
        made.emptied &= !now.is_some_and(|now| now.compute.iter().any(is_part));
        made.stuck = Some(why.clone());
        self.write(&made)?;
        Ok(Some(why))
    }

    /// Destroys the instance of `made` if it exists and belongs to sublet.
    fn destroy(&mut self, made: &mut DynamicInstance) -> anyhow::Result<()> {
        let now = there(made, self.driver)?.filter(|now| is_recorded_instance(made, now));
        let Some(now) = now else { return Ok(()) };
        let part = now.compute.iter().find(|part| made.uuid.as_ref().is_none_or(|uuid| part.uuid == *uuid));
        let seen = recognized(made, &now, part);
        if seen != *made {
            self.write(&seen)?;
            *made = seen;
        }
        part.map_or(Ok(()), |part| self.driver.destroy_compute(&made.gpu, now.gi, part.ci))?;
        // Compute instances of other programs in it keep the GPU instance.
        if now.compute.len() <= 1 { self.driver.destroy_instance(&made.gpu, now.gi) } else { Ok(()) }
    }

    fn write(&mut self, made: &DynamicInstance) -> anyhow::Result<()> {
        // `awaited` is not written: other processes change it.
        self.note(made, |one| *one = DynamicInstance { awaited: one.awaited.take(), ..made.clone() })
    }

    fn note(&mut self, made: &DynamicInstance, change: impl FnOnce(&mut DynamicInstance)) -> Answer<()> {
        self.change(|ledger| ledger.dynamic_instance_mut(made).map(change)).map(drop)
    }

    fn change<T>(&mut self, change: impl FnOnce(&mut Ledger) -> T) -> anyhow::Result<T> {
        let (done, freed) = self.store.change(change)?;
        self.freed.extend(freed);
        Ok(done)
    }
}

/// The instance that is now in its place.
fn there(made: &DynamicInstance, driver: &mut dyn Driver) -> Answer<Option<Instance>> {
    Ok(driver.instances(&made.gpu)?.into_iter().find(|one| one.span == Span::at(made.placement)))
}

/// `made` as the driver shows it, with `part` as its compute instance, right before that is destroyed. The next
/// command may destroy only this instance, or one that is empty by then.
fn recognized(made: &DynamicInstance, now: &Instance, part: Option<&Compute>) -> DynamicInstance {
    let uuid = part.map(|part| part.uuid.clone()).filter(|uuid| !uuid.is_empty());
    let nameless = part.is_some() && uuid.is_none();
    DynamicInstance {
        gi: Some(now.gi),
        emptied: made.emptied || !nameless,
        uuid: uuid.or_else(|| made.uuid.clone()),
        ..made.clone()
    }
}

/// Whether the instance is certainly the one that sublet created: ids and places are reused for other instances. One
/// without a recorded UUID has at most the compute instance that sublet was creating, and none before its id was
/// recorded. One with a recorded UUID is empty only if sublet emptied it.
fn is_recorded_instance(made: &DynamicInstance, now: &Instance) -> bool {
    let same = now.profile == made.profile && made.gi.is_none_or(|gi| gi == now.gi);
    let ours = match (&made.uuid, made.gi) {
        _ if now.compute.is_empty() => made.uuid.is_none() || made.emptied,
        (Some(uuid), _) => now.compute.iter().any(|part| part.uuid == *uuid),
        (None, Some(_)) if !made.emptied => matches!(&now.compute[..], [one] if one.slices == made.slices),
        (None, _) => false,
    };
    same && ours
}

#[cfg(test)]
#[path = "making_instances_tests.rs"]
mod tests;

// The model in tests/model, and this code beside it.
#[cfg(test)]
#[path = "making_instances_replay.rs"]
mod replay;
