//! Places the containers of a stack one after another, in memory: each sees the bookings of those before it.

use super::ask::asked;
use super::{Own, Service, Stack};
use crate::names::{Name, Names};
use crate::preview::{Whose, preview};
use sublet_core::admit::{AdmitError, Candidate, lease_for};
use sublet_core::config::Config;
use sublet_core::config_files::Containers;
use sublet_core::grant::Image;
use sublet_core::inventory::{GpuProcess, Inventory};
use sublet_core::ledger::{Container, Lease, LeaseId, Ledger};
use sublet_core::place::Placement;
use sublet_core::process::Process;

/// Why a container of a stack would get no share.
#[derive(Debug, thiserror::Error)]
pub enum NotPlaced {
    /// It would be refused.
    #[error(transparent)]
    Refused(#[from] AdmitError),
    /// Its annotations would not be read.
    #[error("its runtime is {0}, which does not read its annotations: write `runtime: sublet`")]
    Runtime(String),
    /// Its CDI device is none of this host.
    #[error("{0}")]
    Cdi(String),
    /// Its share depends on what only Compose can resolve.
    #[error(
        "its share is that of its name or image in containers.toml, and these have variables: write them out"
    )]
    Unnamed,
    /// A MIG instance is needed, after one that would be created for another container.
    #[error(
        "a MIG instance would be created for a container before it, so whether there is room for one more cannot \
         be told before that"
    )]
    Unforeseen,
}

/// What becomes of one container.
#[derive(Debug)]
pub enum Outcome {
    /// It gets this share.
    Fits(Box<Placement>),
    /// It gets a MIG instance that is created when it starts; the text says which.
    Made(String),
    /// It asks for no share.
    AsksForNone,
    /// It gets none.
    Not(NotPlaced),
}

/// A container, and what becomes of it.
#[derive(Debug)]
pub struct Fitted {
    /// Its name in the stack.
    pub service: String,
    /// What becomes of it.
    pub outcome: Outcome,
}

/// Places `stack` beside the existing leases. `names` says which leases belong to the stack's own containers.
///
/// # Errors
/// There is no random number, or no /proc.
pub fn fit(
    stack: &Stack,
    containers: Option<&Containers>,
    (mut ledger, mut inventory): (Ledger, Inventory),
    names: &Names,
    whose: Whose,
    config: &Config,
) -> std::io::Result<(Vec<Fitted>, usize)> {
    let before = set_aside(&stack.own, &mut ledger, &mut inventory, names);
    let mut world = World { ledger, inventory, whose, config, makes: false };
    let each = |service: &Service| {
        let outcome = world.place(service, containers)?;
        Ok(Fitted { service: service.name.clone(), outcome })
    };
    Ok((stack.services.iter().map(each).collect::<std::io::Result<_>>()?, before))
}

struct World<'a> {
    ledger: Ledger,
    inventory: Inventory,
    whose: Whose,
    config: &'a Config,
    /// Whether a MIG instance would be created for a container before.
    makes: bool,
}

impl World<'_> {
    fn place(&mut self, service: &Service, containers: Option<&Containers>) -> std::io::Result<Outcome> {
        let request = match asked(service, containers, &self.inventory, self.config) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(Outcome::AsksForNone),
            Err(why) => return Ok(Outcome::Not(why)),
        };
        let id = LeaseId::random()?;
        match preview(&request, &id, &self.inventory, &self.ledger, self.whose, self.config) {
            Ok(placement) => {
                self.ledger.leases.push(self.lease(service, &placement, id)?);
                Ok(Outcome::Fits(Box::new(placement)))
            }
            Err(AdmitError::WouldMake { .. } | AdmitError::Unmade { .. }) if self.makes => {
                Ok(Outcome::Not(NotPlaced::Unforeseen))
            }
            Err(AdmitError::WouldMake { what, .. }) => {
                self.makes = true;
                Ok(Outcome::Made(what))
            }
            Err(error) => Ok(Outcome::Not(error.into())),
        }
    }

    fn lease(&self, service: &Service, placement: &Placement, id: LeaseId) -> std::io::Result<Lease> {
        let uid = if self.whose == Whose::Root { 0 } else { nix::unistd::geteuid().as_raw() };
        let container = Container {
            uid,
            id: service.name.clone(),
            bundle: "/".into(),
            rootfs: "/".into(),
            record: "/".into(),
        };
        let candidate = Candidate { container, owner: Process::current()?, engine: None };
        Ok(lease_for(&candidate, placement, &Image::default(), id, self.config))
    }
}

/// Takes the leases of the stack's own containers out, which run already, and what their processes use. Returns how
/// many there are.
fn set_aside(own: &Own, ledger: &mut Ledger, inventory: &mut Inventory, names: &Names) -> usize {
    let is_own = |name: &Name| match own {
        Own::Project(project) => name.part_of.split_once('/').is_some_and(|(of, _)| of == project),
        Own::Units(units) => units.contains(&name.unit),
    };
    let its: Vec<LeaseId> = ledger
        .leases
        .iter()
        .filter(|lease| names.of(lease).is_some_and(is_own))
        .map(|lease| lease.id.clone())
        .collect();
    for device in &mut inventory.devices {
        let is_its = |process: &GpuProcess| {
            ledger.lease_of_process(process).is_some_and(|lease| its.contains(&lease.id))
        };
        let used: u64 = device
            .processes
            .iter()
            .filter(|process| is_its(process))
            .map(|process| process.memory_bytes)
            .sum();
        device.memory_free_bytes = device.memory_free_bytes.saturating_add(used).min(device.memory_bytes);
        device.processes.retain(|process| !is_its(process));
    }
    ledger.leases.retain(|lease| !its.contains(&lease.id));
    its.len()
}

#[cfg(test)]
#[path = "fit_tests.rs"]
mod tests;
