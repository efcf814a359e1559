//! NVML, for a step of a suspension: each answer is waited for with a limit. A driver may hang with a GPU that has nothing to do with
//! the question, and what is locked meanwhile would wait for ever.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::SuspendError;
use crate::probe;
use crate::usage::within;
use sublet_core::config::Config;

/// How long NVML is waited for that is initialised: as long as a refresh is.
const LONGEST_START: Duration = Duration::from_secs(60);

/// How long one answer is waited for then.
const LONGEST_ANSWER: Duration = Duration::from_secs(10);

/// Who waits for an answer about the same GPU, or about [`HOST`]: one that hangs keeps nobody from asking about another.
static ASKING: Mutex<BTreeMap<String, Arc<()>>> = Mutex::new(BTreeMap::new());

/// NVML itself, or all GPUs.
pub(super) const HOST: &str = "";

fn asking(about: &str) -> Arc<()> {
    let mut all = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(about.to_owned()).or_default())
}

/// NVML, which is asked with a limit.
pub(super) struct Asked(Arc<Nvml>);

impl Asked {
    pub(super) fn connect(config: &Config) -> Result<Self, SuspendError> {
        let config = config.clone();
        let ask = move || probe::connect(&config).map(|(nvml, _)| nvml).map_err(|error| error.to_string());
        let unknown = |why| SuspendError::Unknown(format!("what runs on its GPU ({why})"));
        within(LONGEST_START, &asking(HOST), ask).map(|nvml| Self(Arc::new(nvml))).map_err(unknown)
    }

    /// What it answers to `ask`, which is `about` a GPU or [`HOST`].
    pub(super) fn ask<T: Send + 'static>(
        &self,
        about: &str,
        ask: impl FnOnce(&Nvml) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, String> {
        let nvml = Arc::clone(&self.0);
        within(LONGEST_ANSWER, &asking(about), move || ask(&nvml).map_err(|error| error.to_string()))
    }
}
