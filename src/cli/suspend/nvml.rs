//! NVML, for a step of a suspension: each answer is waited for with a limit. A driver may hang with a GPU that has nothing to do with
//! the question, and what is locked meanwhile would wait for ever.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::SuspendError;
use crate::probe;
use crate::usage::within;
use sublet_core::config::Config;
use sublet_core::inventory::Inventory;

/// How long NVML is waited for that is initialised: as long as a refresh is.
const LONGEST_START: Duration = Duration::from_secs(60);

/// How long one answer is waited for then.
const LONGEST_ANSWER: Duration = Duration::from_secs(10);

static ASKING: LazyLock<Arc<()>> = LazyLock::new(Arc::default);

/// NVML, which is asked with a limit.
pub(super) struct Asked(Arc<Nvml>);

impl Asked {
    /// NVML, and the `known` inventory with what it says of each GPU now, where each answers.
    pub(super) fn connect(
        known: Inventory,
        config: &Config,
    ) -> Result<(Self, Option<Inventory>), SuspendError> {
        let config = config.clone();
        let ask = move || {
            let (nvml, _) = probe::connect(&config).map_err(|error| error.to_string())?;
            let now = probe::renew(&known, &nvml).ok();
            Ok((Self(Arc::new(nvml)), now))
        };
        let unknown = |why| SuspendError::Unknown(format!("what runs on its GPU ({why})"));
        within(LONGEST_START, &ASKING, ask).map_err(unknown)
    }

    /// What it answers to `ask`.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Nvml) -> Result<T, NvmlError> + Send + 'static,
    ) -> Result<T, String> {
        let nvml = Arc::clone(&self.0);
        within(LONGEST_ANSWER, &ASKING, move || ask(&nvml).map_err(|error| error.to_string()))
    }
}
