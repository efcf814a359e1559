//! Creates instances for containers, and destroys them when no lease needs them. Every step is recorded in the ledger
//! before it is taken, so that the next command can finish the work of a killed one.

use std::time::{Duration, Instant};

use super::profile_choice::{Choice, NotMade, choices, seen};
use super::{Answer, Compute, Driver, DriverError, Gpu, Instance, Span};
use sublet_core::config::Policy;
use sublet_core::ledger::{Awaited, DynamicInstance, Freed, LeaseId, Ledger, LedgerError, Store};
use sublet_core::place::Order;
use sublet_core::text::safe;

/// How long the driver may take to notice that the last process has left an instance.
const LEAVING: Duration = Duration::from_secs(2);

/// The pause between two attempts.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl From<LedgerError> for NotMade {
    fn from(error: LedgerError) -> Self {
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
    /// There is no room, or the driver refuses. What had been created is destroyed again, or the message says that it
    /// was not.
    pub fn make(&mut self, order: &Order, awaited: &Awaited, policy: Policy) -> Result<(), NotMade> {
        let ledger = self.change(|ledger| ledger.clone())?;
        let gpus = seen(order, self.driver, &ledger)
            .map_err(|error| NotMade { reason: error.to_string(), temporary: true })?;
        let choices = choices(order, &gpus, policy)?;
        let (mut tried, mut errors) = (Vec::new(), Vec::new());
        for choice in &choices {
            // The driver may refuse on one GPU what it allows on another.
            if tried.contains(&&choice.gpu) {
                continue;
            }
            tried.push(&choice.gpu);
            match self.make_one(choice, awaited)? {
                Ok(()) => return Ok(()),
                Err(error) => {
                    let gpu = gpus.iter().find(|gpu| gpu.uuid == choice.gpu);
                    errors.push(format!("{}: {error}", gpu.map(Gpu::label).unwrap_or_default()));
                }
            }
        }
        Err(NotMade { reason: errors.join("; "), temporary: true })
    }

    /// The inner error is the driver's; what had been created is destroyed by then.
    fn make_one(&mut self, choice: &Choice, awaited: &Awaited) -> Result<Result<(), String>, LedgerError> {
        let made = DynamicInstance {
            gpu: choice.gpu.clone(),
            profile: choice.profile,
            name: choice.name.clone(),
            placement: (choice.span.start, choice.span.size),
            slices: choice.slices,
            awaited: Some(awaited.clone()),
            ..DynamicInstance::default()
        };
        self.touched = true;
        self.change(|ledger| {
            // The driver reports the place as free, so an instance that is recorded there was destroyed by another
            // program.
            ledger.forget_dynamic_instance(&made);
            ledger.mig.dynamic_instances.push(made.clone());
        })?;
        let Err(error) = self.steps(choice, &made)? else { return Ok(Ok(())) };
        let made = self.change(|ledger| ledger.dynamic_instance_mut(&made).cloned())?.unwrap_or(made);
        let left = self.unmake(&made)?;
        let left =
            left.map(|why| format!("; and what had been created is still there: {why}")).unwrap_or_default();
        Ok(Err(format!("a {} at {} cannot be created: {error}{left}", safe(&choice.name), choice.span)))
    }

    fn steps(&mut self, choice: &Choice, made: &DynamicInstance) -> Result<Result<(), String>, LedgerError> {
        let gi = match self.driver.create_instance(&choice.gpu, choice.profile, choice.span) {
            Ok(gi) => gi,
            Err(error) => return Ok(Err(error.to_string())),
        };
        self.note(made, |made| made.gi = Some(gi))?;
        let created = self.driver.create_compute(&choice.gpu, gi, choice.slices, None);
        let instances = created.and_then(|()| self.driver.instances(&choice.gpu));
        let uuid = instances.map(|instances| {
            let now = instances.into_iter().find(|one| one.gi == gi)?;
            now.compute.into_iter().next().map(|part| part.uuid).filter(|uuid| !uuid.is_empty())
        });
        match uuid {
            Ok(Some(uuid)) => self.note(made, |made| made.uuid = Some(uuid)).map(Ok),
            Ok(None) => Ok(Err("the driver does not report its UUID".to_owned())),
            Err(error) => Ok(Err(error.to_string())),
        }
    }

    /// Destroys every instance created for a container that no lease needs. `before` is called with its UUID first.
    /// What was created for lease `anew` counts, too: an earlier `sublet mig make` for it was killed, and what that left
    /// may have the only place. Returns one line for each instance that is still there, with the reason.
    pub fn clear(
        &mut self,
        anew: Option<&LeaseId>,
        before: &mut dyn FnMut(&str),
    ) -> Result<Vec<String>, LedgerError> {
        let mut lines = Vec::new();
        let unneeded = self.change(|ledger| {
            if let Some(lease) = anew {
                ledger.stop_awaiting(lease);
            }
            ledger.mark_unneeded_for_removal()
        })?;
        for made in unneeded {
            if let Some(uuid) = &made.uuid {
                before(uuid);
            }
            if let Some(why) = self.unmake(&made)? {
                lines.push(format!(
                    "MIG instance {} of GPU {}, created for a container that has ended, cannot be \
                     destroyed yet: {why}; the next command tries again",
                    made.label(),
                    safe(&made.gpu)
                ));
            }
        }
        Ok(lines)
    }

    /// Destroys the instance and forgets its record; returns why not, if it fails.
    fn unmake(&mut self, made: &DynamicInstance) -> Result<Option<String>, LedgerError> {
        let deadline = Instant::now() + if made.stuck.is_some() { Duration::ZERO } else { LEAVING };
        let mut made = DynamicInstance { going: true, ..made.clone() };
        self.write(&made)?;
        let why = loop {
            match self.destroy(&mut made)? {
                Ok(()) => {
                    self.touched = true;
                    self.change(|ledger| ledger.forget_destroyed(&made))?;
                    return Ok(None);
                }
                Err(error) if Instant::now() >= deadline => break error.to_string(),
                Err(_) => std::thread::sleep(LOOK_AGAIN),
            }
        };
        // The instance still has its compute instance, so from now on another program may be the one that empties it.
        made.emptied &= !self.is_whole(&made);
        made.stuck = Some(why.clone());
        self.write(&made)?;
        Ok(Some(why))
    }

    /// Destroys the instance of `made` if it exists and belongs to sublet. The inner error is the driver's.
    fn destroy(&mut self, made: &mut DynamicInstance) -> Result<Result<(), DriverError>, LedgerError> {
        let now = match there(made, self.driver) {
            Ok(now) => now.filter(|now| is_recorded_instance(made, now)),
            Err(error) => return Ok(Err(error)),
        };
        let Some(now) = now else { return Ok(Ok(())) };
        let part = now.compute.iter().find(|part| made.uuid.as_ref().is_none_or(|uuid| part.uuid == *uuid));
        let seen = recognized(made, &now, part);
        if seen != *made {
            self.write(&seen)?;
            *made = seen;
        }
        if let Some(Err(error)) = part.map(|part| self.driver.destroy_compute(&made.gpu, now.gi, part.ci)) {
            return Ok(Err(error));
        }
        // Compute instances of other programs in it keep the GPU instance.
        Ok(if now.compute.len() <= 1 { self.driver.destroy_instance(&made.gpu, now.gi) } else { Ok(()) })
    }

    /// Whether the driver lists the instance's compute instance.
    fn is_whole(&mut self, made: &DynamicInstance) -> bool {
        let is_part = |uuid: &String| made.uuid.as_ref() == Some(uuid);
        let now = there(made, self.driver).ok().flatten();
        now.is_some_and(|now| now.compute.iter().any(|part| is_part(&part.uuid)))
    }

    fn write(&mut self, made: &DynamicInstance) -> Result<(), LedgerError> {
        let DynamicInstance { gi, uuid, going, emptied, stuck, .. } = made.clone();
        // `awaited` is not written: other processes change it.
        self.note(made, |one| {
            (one.gi, one.uuid, one.going, one.emptied, one.stuck) = (gi, uuid, going, emptied, stuck);
        })
    }

    fn note(
        &mut self,
        made: &DynamicInstance,
        change: impl FnOnce(&mut DynamicInstance),
    ) -> Result<(), LedgerError> {
        self.change(|ledger| ledger.dynamic_instance_mut(made).map(change)).map(drop)
    }

    fn change<T>(&mut self, change: impl FnOnce(&mut Ledger) -> T) -> Result<T, LedgerError> {
        let (done, freed) = self.store.change(change)?;
        self.freed.extend(freed);
        Ok(done)
    }
}

/// The instance that is now in its place.
fn there(made: &DynamicInstance, driver: &mut dyn Driver) -> Answer<Option<Instance>> {
    let span = Span { start: made.placement.0, size: made.placement.1 };
    Ok(driver.instances(&made.gpu)?.into_iter().find(|one| one.span == span))
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

// What tests/model says of it, and what it does.
#[cfg(test)]
#[path = "making_instances_replay.rs"]
mod replay;
