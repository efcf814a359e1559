//! Places the containers of a stack one after another, in memory: each sees the bookings of those before it.

use super::ask::asked;
use super::{Own, Service, Stack};
use crate::mig::Foreseen;
use crate::names::{Name, Names};
use crate::preview::{Ahead, Whose, preview_after};
use sublet_core::admit::{AdmitError, Candidate, lease_for};
use sublet_core::config::Config;
use sublet_core::config_files::Containers;
use sublet_core::grant::Image;
use sublet_core::inventory::{GpuProcess, Inventory};
use sublet_core::ledger::{Container, Lease, LeaseId, Ledger};
use sublet_core::place::{Placement, expected};
use sublet_core::process::Process;
use sublet_core::share::Mode;

/// Why a container of a stack would get no share.
#[derive(Debug, thiserror::Error)]
pub enum NotPlaced {
    /// It would be refused.
    #[error(transparent)]
    Refused(#[from] AdmitError),
    /// Its annotations would not be read.
    #[error("its runtime is {0}, which does not read its annotations: write `runtime: sublet`")]
    Runtime(String),
    /// Its annotations would not reach the engine.
    #[error(
        "Docker Compose {0} drops its annotations: install Docker Compose 2.26 or later, or give it a runtime \
         sublet-SHARE, a CDI device or a rule in containers.toml"
    )]
    Dropped(String),
    /// Its CDI device is none of this host.
    #[error("{0}")]
    Cdi(String),
    /// Its share depends on what only Compose can resolve.
    #[error(
        "its share is that of its name or image in containers.toml, and these have variables: write them out"
    )]
    Unnamed,
    /// A part of a MIG instance is needed, perhaps of one that would be created for another container.
    #[error(
        "a MIG instance that several may share would be created for a container before it, so whether this one has \
         room there cannot be told before that"
    )]
    Unforeseen,
}

/// What becomes of one container.
#[derive(Debug)]
pub enum Outcome {
    /// It gets this share.
    Fits(Box<Placement>),
    /// It gets this MIG instance, which is created when it starts, and this share of it.
    Made(Box<(Foreseen, Placement)>),
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
pub fn fit(
    stack: &Stack,
    containers: Option<&Containers>,
    (mut ledger, mut inventory): (Ledger, Inventory),
    names: &Names,
    whose: Whose,
    config: &Config,
) -> std::io::Result<(Vec<Fitted>, usize)> {
    let before = set_aside(&stack.own, &mut ledger, &mut inventory, names);
    let mut world = World { ledger, inventory, whose, config, ahead: Ahead::default(), shares: false };
    let each = |service: &Service| {
        let outcome = world.place(service, containers)?;
        Ok(Fitted { service: service.name.clone(), outcome })
    };
    Ok((stack.services.iter().map(each).collect::<std::io::Result<_>>()?, before))
}

/// More containers of one share are not counted.
const MOST_OF_ONE: usize = 4096;

/// How many containers with the named share `share` the devices hold when nothing else is on them, and why not one more.
pub fn most(share: &str, inventory: &Inventory, config: &Config) -> std::io::Result<(usize, String)> {
    let annotations = [("sublet.share".to_owned(), share.to_owned())].into();
    let service = Service { name: share.to_owned(), annotations, by_hook: true, ..Service::default() };
    let (inventory, ledger, whose) = (inventory.idle(), Ledger::empty(""), Whose::Root);
    let mut world = World { ledger, inventory, whose, config, ahead: Ahead::default(), shares: false };
    for count in 0..MOST_OF_ONE {
        match world.place(&service, None)? {
            Outcome::Fits(_) | Outcome::Made(_) => {}
            Outcome::AsksForNone => return Ok((count, "it asks for nothing".to_owned())),
            Outcome::Not(why) => return Ok((count, why.to_string())),
        }
    }
    Ok((MOST_OF_ONE, "more are not counted".to_owned()))
}

struct World<'a> {
    ledger: Ledger,
    inventory: Inventory,
    whose: Whose,
    config: &'a Config,
    /// The MIG instances that would be created for containers before.
    ahead: Ahead,
    /// Whether others may share one of these.
    shares: bool,
}

impl World<'_> {
    fn place(&mut self, service: &Service, containers: Option<&Containers>) -> std::io::Result<Outcome> {
        let request = match asked(service, containers, &self.inventory, self.config) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(Outcome::AsksForNone),
            Err(why) => return Ok(Outcome::Not(why)),
        };
        // Whether it gets the whole instance.
        let alone = matches!(request.mode, None | Some(Mode::Mig));
        let before = self.ahead.instances.len();
        let id = LeaseId::random()?;
        let world = (&self.inventory, &self.ledger);
        match preview_after(&mut self.ahead, &request, &id, world, self.whose, self.config) {
            Ok(placement) => {
                self.ledger.leases.push(self.lease(service, &placement, id)?);
                Ok(Outcome::Fits(Box::new(placement)))
            }
            Err(AdmitError::WouldMake { .. } | AdmitError::Unmade { .. }) if self.shares && !alone => {
                self.ahead.instances.truncate(before);
                Ok(Outcome::Not(NotPlaced::Unforeseen))
            }
            Err(error @ AdmitError::WouldMake { .. }) => {
                let Some(foreseen) = self.ahead.instances.last().cloned() else {
                    return Ok(Outcome::Not(error.into()));
                };
                self.shares |= !alone;
                let part = foreseen.leased(&self.inventory);
                let devices = vec![part.uuid.clone()];
                let placement = Placement { devices, mig_devices: vec![part], ..expected(&request) };
                self.ledger.leases.push(self.lease(service, &placement, id)?);
                Ok(Outcome::Made(Box::new((foreseen, placement))))
            }
            Err(error) => Ok(Outcome::Not(error.into())),
        }
    }

    fn lease(&self, service: &Service, placement: &Placement, id: LeaseId) -> std::io::Result<Lease> {
        let uid = if self.whose == Whose::Root { 0 } else { nix::unistd::geteuid().as_raw() };
        let (bundle, rootfs, record) = ("/".into(), "/".into(), "/".into());
        let container = Container { uid, id: service.name.clone(), bundle, rootfs, record };
        let candidate = Candidate { container, owner: Process::current()?, engine: None };
        Ok(lease_for(&candidate, placement, &Image::default(), id, self.config))
    }
}

/// Takes the leases of the stack's own containers out, which run already, and what their processes use. Returns how
/// many there are.
fn set_aside(own: &Own, ledger: &mut Ledger, inventory: &mut Inventory, names: &Names) -> usize {
    let is_own = |name: &Name| match own {
        Own::None => false,
        Own::Project(project) => name.part_of.split_once('/').is_some_and(|(of, _)| of == project),
        Own::Units(units) => units.contains(&name.unit),
    };
    let its = ledger.leases.iter().filter(|lease| names.of(lease).is_some_and(is_own));
    let its: Vec<LeaseId> = its.map(|lease| lease.id.clone()).collect();
    for device in &mut inventory.devices {
        let is_its = |process: &GpuProcess| {
            ledger.lease_of_process(process).is_some_and(|lease| its.contains(&lease.id))
        };
        let processes = device.processes.iter().filter(|process| is_its(process));
        let used: u64 = processes.map(|process| process.memory_bytes).sum();
        device.memory_free_bytes = device.memory_free_bytes.saturating_add(used).min(device.memory_bytes);
        device.processes.retain(|process| !is_its(process));
    }
    ledger.leases.retain(|lease| !its.contains(&lease.id));
    its.len()
}

#[cfg(test)]
#[path = "fit_tests.rs"]
mod tests;
