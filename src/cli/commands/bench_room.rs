//! Whether every container of a cell gets a MIG device where `[mig] dynamic` creates those that are missing.

use crate::bench::{Cell, Sharing};
use crate::names::Names;
use crate::preview::Whose;
use crate::stack::{Fitted, NotPlaced, Outcome, Service, Stack, fit};
use sublet_core::admit::{AdmitError, confirmed_inventory};
use sublet_core::config::Config;

/// Why not all containers of `planned` would start on the GPU with this UUID; `None`: they would, or nothing would be
/// created for them.
pub fn lacking(planned: &Cell, gpu: &str, config: &Config) -> Option<String> {
    let is_made = config.mig.dynamic && planned.mode.sharing == Sharing::Mig && !planned.by_hand;
    if !is_made {
        return None;
    }
    refused(planned, gpu, config).unwrap_or_else(|error| Some(super::tables::chain(&error)))
}

fn refused(planned: &Cell, gpu: &str, config: &Config) -> anyhow::Result<Option<String>> {
    let (annotations, runtime) = (planned.annotations(gpu), Some("sublet".to_owned()));
    let service = Service { annotations, runtime, ..Service::default() };
    let stack = Stack { services: vec![service; planned.n as usize], ..Stack::default() };
    let world = (super::settled_ledger(config)?, confirmed_inventory(config)?);
    let (fitted, _) = fit(&stack, None, world, &Names::default(), Whose::callers(config), config)?;
    let refused = |(number, Fitted { outcome, .. }): (usize, Fitted)| match outcome {
        // The rest of that refusal is of the devices that are there.
        Outcome::Not(NotPlaced::Refused(AdmitError::Unmade { why, .. })) => {
            Some(format!("container {} gets no MIG device: {why}", number + 1))
        }
        Outcome::Not(why) => Some(format!("container {} would be refused: {why}", number + 1)),
        _ => None,
    };
    Ok((0..).zip(fitted).find_map(refused))
}
