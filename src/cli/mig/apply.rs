//! Applies a plan: all of its steps, or none.

use super::{Compute, Driver, DriverError, Instance, Mode, Plan, Span, Step};

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
    /// A step failed, and what had been done was undone.
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
/// The step that failed, and what could not be undone.
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
    /// Destroys what was created there.
    Destroy(Span),
    /// Destroys what was created in the GPU instance there, apart from compute instances with these ids.
    DestroyCompute(Span, Vec<u32>),
}

struct Change<'a, 'd> {
    driver: &'d mut dyn Driver,
    allow_reset: bool,
    undo: Vec<(&'a Plan, Undo<'a>)>,
}

impl<'a> Change<'a, '_> {
    /// Each step's undo is recorded before the step is tried.
    fn step(&mut self, plan: &'a Plan, step: &'a Step) -> Result<(), String> {
        let gpu = &plan.gpu;
        match step {
            Step::Mode(on) => self.switch(plan, *on),
            Step::DestroyCompute { instance, compute, .. } => {
                let gi = self.same(plan, instance, Some(compute))?;
                self.undo.push((plan, Undo::CreateCompute(instance.span, compute)));
                said(self.driver.destroy_compute(gpu, gi, compute.ci))
            }
            Step::DestroyInstance { instance, .. } => {
                let gi = self.same(plan, instance, None)?;
                self.undo.push((plan, Undo::Create(instance)));
                said(self.driver.destroy_instance(gpu, gi))
            }
            Step::CreateInstance { profile, span, .. } => {
                if self.at(plan, *span)?.is_some() {
                    return Err(MEANWHILE.to_owned());
                }
                self.undo.push((plan, Undo::Destroy(*span)));
                said(self.driver.create_instance(gpu, *profile, *span)).map(drop)
            }
            Step::CreateCompute { at, slices, span, .. } => {
                let now = self.at(plan, *at)?.ok_or(MEANWHILE)?;
                let known = now.compute.iter().map(|one| one.ci).collect();
                self.undo.push((plan, Undo::DestroyCompute(*at, known)));
                said(self.driver.create_compute(gpu, now.gi, *slices, *span))
            }
        }
    }

    /// Switches the mode immediately. If that needs a reset and none is allowed, it fails and the undo takes the
    /// request back.
    fn switch(&mut self, plan: &'a Plan, on: bool) -> Result<(), String> {
        let found = said(self.driver.mode(&plan.gpu))?.ok_or("it has no MIG mode")?;
        self.undo.push((plan, Undo::Mode(found)));
        said(self.driver.set_mode(&plan.gpu, on))?;
        self.settle(&plan.gpu, on)
    }

    fn settle(&mut self, gpu: &str, on: bool) -> Result<(), String> {
        let reached = |driver: &mut dyn Driver| {
            said(driver.mode(gpu)).map(|mode| mode.is_some_and(|mode| mode.current == on))
        };
        if reached(self.driver)? {
            return Ok(());
        }
        if !self.allow_reset {
            return Err("it needs a reset of the GPU: add --allow-reset".to_owned());
        }
        said(self.driver.reset(gpu))?;
        if reached(self.driver)? { Ok(()) } else { Err("the reset did not switch it".to_owned()) }
    }

    /// The id of `instance`, if the plan was made for exactly this instance, and its compute instance too if given.
    fn same(&mut self, plan: &Plan, instance: &Instance, compute: Option<&Compute>) -> Result<u32, String> {
        let now = self.at(plan, instance.span)?;
        let part = |now: &Instance| match compute {
            Some(old) => now.compute.iter().any(|new| new.ci == old.ci && new.uuid == old.uuid),
            None => now.compute.is_empty(),
        };
        let same = |now: &Instance| now.gi == instance.gi && now.profile == instance.profile && part(now);
        now.filter(same).map(|now| now.gi).ok_or_else(|| MEANWHILE.to_owned())
    }

    fn at(&mut self, plan: &Plan, span: Span) -> Result<Option<Instance>, String> {
        Ok(said(self.driver.instances(&plan.gpu))?.into_iter().find(|one| one.span == span))
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
    fn undo(&mut self, plan: &'a Plan, undo: &Undo<'a>) -> Result<bool, String> {
        let gpu = &plan.gpu;
        match undo {
            Undo::Mode(found) => return self.mode_back(gpu, *found),
            Undo::Create(old) => {
                if self.at(plan, old.span)?.is_some() {
                    return Ok(false);
                }
                said(self.driver.create_instance(gpu, old.profile, old.span))?;
            }
            Undo::CreateCompute(at, old) => {
                let now = self.at(plan, *at)?.ok_or("its GPU instance is missing")?;
                if now.compute.iter().any(|one| one.span == old.span && one.slices == old.slices) {
                    return Ok(false);
                }
                said(self.driver.create_compute(gpu, now.gi, old.slices, Some(old.span)))?;
            }
            Undo::Destroy(span) => {
                let Some(made) = self.at(plan, *span)? else { return Ok(false) };
                said(self.driver.destroy_instance(gpu, made.gi))?;
            }
            Undo::DestroyCompute(at, known) => {
                let Some(now) = self.at(plan, *at)? else { return Ok(false) };
                let Some(made) = now.compute.iter().find(|one| !known.contains(&one.ci)) else {
                    return Ok(false);
                };
                said(self.driver.destroy_compute(gpu, now.gi, made.ci))?;
            }
        }
        Ok(true)
    }

    fn mode_back(&mut self, gpu: &str, found: Mode) -> Result<bool, String> {
        if said(self.driver.mode(gpu))? == Some(found) {
            return Ok(false);
        }
        said(self.driver.set_mode(gpu, found.pending))?;
        // If a reset was pending when the change began, it is pending again.
        if said(self.driver.mode(gpu))? != Some(found) {
            self.settle(gpu, found.current)?;
        }
        Ok(true)
    }
}

impl Undo<'_> {
    /// The text that names what is left if this undo fails.
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

/// The driver's message without the call, because the step describes it better.
fn said<T>(answer: Result<T, DriverError>) -> Result<T, String> {
    answer.map_err(|error| error.to_string())
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
