//! Applies a plan: all of its steps, or none; and the fence, behind which layouts and instances are changed.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use super::{Compute, Driver, Instance, Mode, Plan, Span, Step};
use sublet_core::ledger::{Freed, Ledger, MigBusy, MigChange, Store};
use sublet_core::process::Process;

/// The outcome of a change that failed.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The change needs a GPU reset, which must be allowed explicitly.
    #[error(
        "GPU {index}: switching MIG mode needs a reset of the GPU: add --allow-reset; nothing was changed"
    )]
    Reset { index: u32 },
    /// A step failed before anything was changed.
    #[error("{cause}; nothing was changed")]
    Nothing { cause: String },
    /// A step failed, and the steps before it were undone.
    #[error("{cause}; every change was undone")]
    Undone { cause: String },
    /// A step failed, and undoing failed too.
    #[error("{cause}; and not every change could be undone: {left}")]
    Left { cause: String, left: String },
}

/// Carries out the plans in order. If a step fails, the completed steps are undone in reverse. Undone instances are
/// created again in their places with new UUIDs, which is why instances in use are in no plan.
///
/// # Errors
/// The step that failed, and the changes that could not be undone.
pub fn apply(plans: &[Plan], allow_reset: bool, driver: &mut dyn Driver) -> Result<(), ApplyError> {
    if let Some(plan) = plans.iter().find(|plan| plan.reset && !allow_reset) {
        return Err(ApplyError::Reset { index: plan.index });
    }
    let mut change = Change { driver, allow_reset, undo: Vec::new() };
    for plan in plans {
        for step in &plan.steps {
            if let Err(error) = change.step(plan, step) {
                return Err(change.back(format!("GPU {}: cannot {step}: {error}", plan.index)));
            }
        }
    }
    Ok(())
}

/// How to undo one step. The step may have happened or not: a call that fails may still have done its work.
enum Undo<'a> {
    Mode(Mode),
    Create(&'a Instance),
    CreateCompute(Span, &'a Compute),
    /// Destroys the instance that was created there.
    Destroy(Span),
    /// Destroys the compute instances that were created in the GPU instance there, apart from these ids.
    DestroyCompute(Span, Vec<u32>),
}

struct Change<'a, 'd> {
    driver: &'d mut dyn Driver,
    allow_reset: bool,
    undo: Vec<(&'a Plan, Undo<'a>)>,
}

impl<'a> Change<'a, '_> {
    /// Each step's undo is recorded before the step is tried.
    fn step(&mut self, plan: &'a Plan, step: &'a Step) -> anyhow::Result<()> {
        let gpu = &plan.gpu;
        match step {
            // If that needs a reset and none is allowed, it fails and the undo takes the request back.
            Step::Mode(on) => {
                self.undo.push((plan, Undo::Mode(self.driver.mode(gpu)?.context("it has no MIG mode")?)));
                self.driver.set_mode(gpu, *on)?;
                self.settle(gpu, *on)?;
            }
            Step::DestroyCompute { instance, compute, .. } => {
                let gi = self.same(plan, instance, Some(compute))?;
                self.undo.push((plan, Undo::CreateCompute(instance.span, compute)));
                self.driver.destroy_compute(gpu, gi, compute.ci)?;
            }
            Step::DestroyInstance { instance, .. } => {
                let gi = self.same(plan, instance, None)?;
                self.undo.push((plan, Undo::Create(instance)));
                self.driver.destroy_instance(gpu, gi)?;
            }
            Step::CreateInstance { profile, span, .. } => {
                ensure!(self.at(plan, *span)?.is_none(), MEANWHILE);
                self.undo.push((plan, Undo::Destroy(*span)));
                self.driver.create_instance(gpu, *profile, *span)?;
            }
            Step::CreateCompute { at, slices, span, .. } => {
                let now = self.at(plan, *at)?.context(MEANWHILE)?;
                let known = now.compute.iter().map(|one| one.ci).collect();
                self.undo.push((plan, Undo::DestroyCompute(*at, known)));
                self.driver.create_compute(gpu, now.gi, *slices, *span)?;
            }
        }
        Ok(())
    }

    /// Sees to it that the mode which was asked for is the current one, by a reset if it has to be.
    fn settle(&mut self, gpu: &str, on: bool) -> anyhow::Result<()> {
        let is_reached = |mode: Option<Mode>| mode.is_some_and(|mode| mode.current == on);
        if is_reached(self.driver.mode(gpu)?) {
            return Ok(());
        }
        ensure!(self.allow_reset, "it needs a reset of the GPU: add --allow-reset");
        self.driver.reset(gpu)?;
        ensure!(is_reached(self.driver.mode(gpu)?), "the reset did not switch it");
        Ok(())
    }

    /// The id of `instance`, if the plan was made for exactly this instance, and its compute instance too if given.
    fn same(&mut self, plan: &Plan, instance: &Instance, compute: Option<&Compute>) -> anyhow::Result<u32> {
        let now = self.at(plan, instance.span)?;
        let part = |now: &Instance| match compute {
            Some(old) => now.compute.iter().any(|new| new.ci == old.ci && new.uuid == old.uuid),
            None => now.compute.is_empty(),
        };
        let same = |now: &Instance| now.gi == instance.gi && now.profile == instance.profile && part(now);
        now.filter(same).map(|now| now.gi).context(MEANWHILE)
    }

    fn at(&mut self, plan: &Plan, span: Span) -> anyhow::Result<Option<Instance>> {
        Ok(self.driver.instances(&plan.gpu)?.into_iter().find(|one| one.span == span))
    }

    /// Undoes as much as possible.
    fn back(mut self, cause: String) -> ApplyError {
        let (mut undone, mut left) = (false, Vec::new());
        while let Some((plan, undo)) = self.undo.pop() {
            match self.undo(plan, &undo) {
                Ok(acted) => undone |= acted,
                Err(error) => left.push(format!("GPU {}: {}: {error}", plan.index, undo.described())),
            }
        }
        match (left.is_empty(), undone) {
            (true, false) => ApplyError::Nothing { cause },
            (true, true) => ApplyError::Undone { cause },
            (false, _) => ApplyError::Left { cause, left: left.join(", ") },
        }
    }

    /// Whether there was anything to undo.
    fn undo(&mut self, plan: &'a Plan, undo: &Undo<'a>) -> anyhow::Result<bool> {
        let gpu = &plan.gpu;
        match undo {
            Undo::Mode(found) => {
                if self.driver.mode(gpu)? == Some(*found) {
                    return Ok(false);
                }
                self.driver.set_mode(gpu, found.pending)?;
                // If a reset was pending when the change began, it is pending again.
                if self.driver.mode(gpu)? != Some(*found) {
                    self.settle(gpu, found.current)?;
                }
            }
            Undo::Create(old) => {
                if self.at(plan, old.span)?.is_some() {
                    return Ok(false);
                }
                self.driver.create_instance(gpu, old.profile, old.span)?;
            }
            Undo::CreateCompute(at, old) => {
                let now = self.at(plan, *at)?.context("its GPU instance is missing")?;
                if now.compute.iter().any(|one| one.span == old.span && one.slices == old.slices) {
                    return Ok(false);
                }
                self.driver.create_compute(gpu, now.gi, old.slices, Some(old.span))?;
            }
            Undo::Destroy(span) => {
                let Some(made) = self.at(plan, *span)? else { return Ok(false) };
                self.driver.destroy_instance(gpu, made.gi)?;
            }
            Undo::DestroyCompute(at, known) => {
                let Some(now) = self.at(plan, *at)? else { return Ok(false) };
                let made = now.compute.iter().find(|one| !known.contains(&one.ci));
                let Some(made) = made else { return Ok(false) };
                self.driver.destroy_compute(gpu, now.gi, made.ci)?;
            }
        }
        Ok(true)
    }
}

impl Undo<'_> {
    /// The text that names the remains if this undo fails.
    fn described(&self) -> String {
        match self {
            Self::Mode(found) => {
                format!("MIG mode could not be switched back {}", if found.current { "on" } else { "off" })
            }
            Self::Create(old) => format!("the GPU instance that was at {} is missing", old.span),
            Self::CreateCompute(at, old) => {
                format!("compute instance {} of the GPU instance at {at} is missing", old.uuid)
            }
            Self::Destroy(span) => format!("the new GPU instance at {span} is still there"),
            Self::DestroyCompute(at, _) => {
                format!("a new compute instance in the GPU instance at {at} is still there")
            }
        }
    }
}

/// Why a step is not attempted.
const MEANWHILE: &str =
    "another program changed the GPU's instances meanwhile: look at `sublet mig list`, then try again";

/// Does `work` while these signals are blocked, so that no layout is left half done.
pub(crate) fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    let polite = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
    let before = polite.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let done = work();
    let _ = before.map(|before| before.thread_set_mask());
    done
}

/// Other processes create or destroy one instance each, which takes the driver a second or two.
const PATIENCE: Duration = Duration::from_secs(30);

/// The pause between two checks whether the other change is over.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Held while a layout changes. Dropping it or ending the process removes the fence.
pub(crate) struct Fence<'a> {
    store: &'a Store,
    owner: Process,
    /// `false`: nothing was changed behind the fence, so earlier inventories stay valid.
    pub changed: bool,
}

impl<'a> Fence<'a> {
    /// Raises the fence around `gpus`. Returns the ledger, which is final for those GPUs from then on, and the leases
    /// that were freed. Without GPUs the fence prevents other changes but no leases.
    ///
    /// A brief change of another process is waited for. A fence without GPUs waits for longer ones as well.
    ///
    /// # Errors
    /// Another change is under way, or the ledger cannot be written.
    pub fn raise(gpus: &[String], store: &'a Store) -> anyhow::Result<(Self, Ledger, Freed)> {
        let owner = Process::current().context("cannot read our own process's start time")?;
        let deadline = Instant::now() + PATIENCE;
        let mut all_freed = Freed::new();
        loop {
            let (begun, freed) = store.update(|ledger| {
                ledger.begin_mig(MigChange { gpus: gpus.to_vec(), owner })?;
                Ok::<_, MigBusy>(ledger.clone())
            })?;
            all_freed.extend(freed);
            match begun {
                Ok(ledger) => return Ok((Self { store, owner, changed: true }, ledger, all_freed)),
                Err(busy) if (busy.brief || gpus.is_empty()) && Instant::now() < deadline => {}
                Err(busy) => return Err(busy.into()),
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

impl Drop for Fence<'_> {
    fn drop(&mut self) {
        let ended = self.store.change(|ledger| ledger.end_mig(self.owner, self.changed));
        // The fence ends with this process at the latest.
        let _ = ended.inspect_err(|error| {
            tracing::warn!("the GPUs take no lease until this process has ended: {error}");
        });
    }
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
