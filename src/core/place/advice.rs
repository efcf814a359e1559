//! Advice for a refused request: another GPU, or `sublet.isolation=dedicated`, and on which container.

use std::num::NonZeroU32;

use super::refusal::{list_some, short_id};
use super::select::{slots, wants_mig};
use super::want::World;
use super::{bookings::use_of, find};
use crate::ledger::{DaemonKey, Lease, LeaseId, Ledger};
use crate::request::Request;
use crate::share::{Devices, Isolation, Mode};

/// The ways out of a refusal, each of which has been tried. None of them takes a running container's share away.
pub(super) fn advice(request: &Request, id: &LeaseId, world: World<'_>) -> Vec<String> {
    let isolation =
        || advise_dedicated(request, id, world).or_else(|| advise_dedicated_for_holders(request, id, world));
    advise_other_gpu(request, id, world).into_iter().chain(isolation()).collect()
}

/// A GPU that would take the request, if the GPU that the request names exists and does not take it.
fn advise_other_gpu(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let Devices::These(named) = &request.devices else { return None };
    if named.len() != 1 || wants_mig(request) {
        return None;
    }
    slots(request, world.inventory, world.config).ok()?;
    let anywhere = Request { devices: Devices::Any(NonZeroU32::MIN), ..request.clone() };
    let found = find(&anywhere, id, world).ok()?;
    let device = world.inventory.device(found.devices.first()?)?;
    Some(format!("{} would take it: name that one, or leave out sublet.gpu", device.label()))
}

/// Where an MPS server of its own would fit and the device's common one does not.
fn advise_dedicated(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let alone = Request { isolation: Isolation::Dedicated, ..request.clone() };
    let fits = request.isolation == Isolation::Shared && find(&alone, id, world).is_ok();
    fits.then(|| "with sublet.isolation=dedicated it would fit, in turns with the others there".to_owned())
}

/// Where it would fit if the containers on a shared MPS server had servers of their own.
fn advise_dedicated_for_holders(request: &Request, id: &LeaseId, world: World<'_>) -> Option<String> {
    let apart = with_dedicated_servers(world.ledger);
    let found = find(request, id, World { ledger: &apart, ..world }).ok()?;
    let beside = |lease: &&Lease| {
        is_on_shared_server(lease) && lease.devices.iter().any(|uuid| found.devices.contains(uuid))
    };
    let others: Vec<String> = world.ledger.leases.iter().filter(beside).map(short_id).collect();
    let (those, them) = match others.len() {
        0 => return None,
        1 => ("that container", "it"),
        _ => ("those containers", "them"),
    };
    let named = list_some(others.into_iter(), ", ");
    Some(format!(
        "beside {named} it would fit if {those} had sublet.isolation=dedicated, in turns with {them}"
    ))
}

fn is_on_shared_server(lease: &Lease) -> bool {
    lease.daemon.is_some() && use_of(lease.mode, lease.isolation) == Mode::Mps
}

/// The ledger as it would be if every container under MPS had its own server.
fn with_dedicated_servers(ledger: &Ledger) -> Ledger {
    let mut apart = ledger.clone();
    for lease in apart.leases.iter_mut().filter(|lease| is_on_shared_server(lease)) {
        lease.isolation = Isolation::Dedicated;
        lease.daemon = Some(DaemonKey(lease.id.to_string()));
    }
    apart
}
