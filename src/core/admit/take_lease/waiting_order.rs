//! In which order those who wait get their shares. Who came first is first, among those for whom the same devices would do;
//! a later one, and a start that does not wait, is served before only with what those before could not use by now anyway.

use super::{allowed_inventory, book_for};
use crate::broker::policy_limits::PolicyLimit;
use crate::config::Config;
use crate::inventory::Inventory;
use crate::ledger::{Container, LeaseId, Ledger, Waiter};
use crate::place::{Placement, Refusal, World, advise_waiting, count_neighbours, find};
use crate::process::Process;
use crate::request::Request;
use crate::text::{add_fix, add_why};

/// Who asks for a share.
#[derive(Clone, Copy)]
pub struct Asks<'a> {
    /// The lease that it will have.
    pub id: &'a LeaseId,
    /// The container; empty for `sublet wait`.
    pub container: &'a Container,
    /// The process that waits, where neither of those tells which entry is its own.
    pub by: Option<Process>,
    /// For what.
    pub request: &'a Request,
}

/// `placement`, which the ledger has room for, or another one among the `allowed` devices, where earlier waiters need its
/// devices of the `host`.
///
/// # Errors
/// Those take all that it could have. Waiting helps.
pub fn place_in_order(
    asks: Asks<'_>,
    placement: Placement,
    (allowed, host): (&Inventory, &Inventory),
    ledger: &Ledger,
    config: &Config,
) -> Result<Placement, Box<Refusal>> {
    let (ahead, count) = book_ahead(asks, host, ledger, config);
    if count == 0 {
        return Ok(placement);
    }
    if let Ok(found) = find(asks.request, asks.id, World { inventory: allowed, ledger: &ahead, config }) {
        let neighbours = Some(count_neighbours(asks.id, &found.devices, ledger));
        return Ok(Placement { neighbours, ..found });
    }
    let ahead = if count == 1 { "one".to_owned() } else { count.to_string() };
    let why = format!("{ahead} came first, as `sublet status` shows");
    let message = add_why("no room: others wait for what is left", &why);
    let advice = advise_waiting(asks.request, config);
    let message = advice.iter().fold(message, |message, way| add_fix(&message, way));
    Err(Box::new(Refusal { temporary: true, ..Refusal::never(message) }))
}

/// The ledger, which is not written, in which those before the one who asks have what they would get of the `host` now; and how
/// many these are.
pub(super) fn book_ahead(
    asks: Asks<'_>,
    host: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> (Ledger, usize) {
    let before = ledger.waiters.iter().take_while(|one| !one.is_of(asks.id, asks.container, asks.by));
    // It starts refused containers of Docker's, and resumes those that made room.
    let serves = || ledger.keeper.is_some_and(|keeper| keeper.is_alive());
    let is_served = |one: &Waiter| match one.retry {
        Some(_) => config.retry.docker && serves(),
        None => ledger.lease(&one.id).is_none() || serves(),
    };
    // That their processes run was looked up with the ledger.
    let looks = |one: &&Waiter| one.is_due(ledger) && is_served(one);
    let mut ahead = ledger.clone();
    let count = before.filter(looks).filter(|one| book_waiter(one, &mut ahead, host, config)).count();
    (ahead, count)
}

/// Books in `ahead`, which is not written, what `waiter` would get of the `host` now. `false`: nothing, or it has that already.
pub fn book_waiter(waiter: &Waiter, ahead: &mut Ledger, host: &Inventory, config: &Config) -> bool {
    if ahead.lease(&waiter.id).is_some_and(|lease| !lease.is_suspended()) {
        return false;
    }
    let limit = limit_of(waiter);
    let placed = || {
        let (request, allowed) = (waiter.request()?, allowed_inventory(limit, host, config).ok()?);
        let world = World { inventory: &allowed, ledger: ahead, config };
        let placement = find(&request, &waiter.id, world).ok()?;
        limit.is_none_or(|limit| limit.check(&placement, ahead).is_ok()).then_some(placement)
    };
    let Some(placement) = placed() else { return false };
    book_for((&waiter.id, &waiter.container), &placement, ahead, config);
    true
}

/// By which policy it waits.
pub(in crate::admit) fn limit_of(waiter: &Waiter) -> Option<PolicyLimit<'_>> {
    waiter.rule.as_ref().map(|rule| PolicyLimit { uid: waiter.container.uid, rule })
}

#[cfg(test)]
#[path = "waiting_order_tests.rs"]
mod tests;
