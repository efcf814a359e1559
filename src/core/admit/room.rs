//! What those who wait need next, in their order: who was suspended for another comes back where there is room, and for who
//! has none others are suspended that allow it. Pure; `sublet serve` takes the steps.

use std::time::Duration;

use super::take_lease::{allowed_inventory, book_waiter, limit_of};
use crate::broker::policy_limits::PolicyLimit;
use crate::config::{Config, PolicyRule};
use crate::inventory::Inventory;
use crate::ledger::{Lease, LeaseId, Ledger, Waiter};
use crate::place::{Placement, Suspendable, check_resume, whom_to_suspend};

/// A step that makes room, or uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoomStep {
    /// Without these on their GPU, the waiter finds room.
    Suspend {
        /// Their leases.
        leases: Vec<LeaseId>,
        /// As in [`Waiter::id`].
        waiter: LeaseId,
    },
    /// This lease has room again.
    Resume(LeaseId),
}

/// What those who wait find.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// The next step.
    pub step: Option<RoomStep>,
    /// Starts for which there is room without it.
    pub placed: Vec<LeaseId>,
    /// Whether a new inventory may change what a suspended container finds.
    pub refresh_first: bool,
}

/// The state of the host, and what is known beyond it.
pub struct Sight<'a> {
    /// The devices.
    pub inventory: &'a Inventory,
    /// Who holds what, and who waits.
    pub ledger: &'a Ledger,
    /// `[suspend]`, among others.
    pub config: &'a Config,
    /// Milliseconds since boot.
    pub at_ms: u64,
    /// Whether a lease's processes compute; `None`: it has none on its GPU.
    pub is_busy: &'a dyn Fn(&Lease) -> Option<bool>,
    /// The `[[policy]]` of a user by uid; `None`: there is none for that user.
    pub rule_of: &'a dyn Fn(u32) -> Option<PolicyRule>,
}

impl Sight<'_> {
    /// Goes through those who wait, up to the first for whom there is something to do. Who finds room has it before those
    /// behind.
    pub fn next_step(&self) -> Room {
        let mut ahead = self.ledger.clone();
        let mut room = Room::default();
        for waiter in &self.ledger.waiters {
            room.step = match self.ledger.lease(&waiter.id) {
                _ if !waiter.is_due(self.ledger) => None,
                Some(lease) => self.step_back(lease, waiter, &ahead, &mut room.refresh_first),
                None if book_waiter(waiter, &mut ahead, self.inventory, self.config) => {
                    room.placed.push(waiter.id.clone());
                    None
                }
                None if waiter.starts() => self.make_room(waiter, &ahead, self.config.suspend.at_least),
                None => None,
            };
            if room.step.is_some() {
                break;
            }
        }
        room
    }

    /// For a container that was suspended for another.
    fn step_back(
        &self,
        lease: &Lease,
        waiter: &Waiter,
        ahead: &Ledger,
        refresh_first: &mut bool,
    ) -> Option<RoomStep> {
        let (_, own) = self.ledger.resumable(&lease.id).ok()?;
        let here = lease.devices.first()?;
        let Err(refusal) = check_resume(lease, here, own.bytes(), self.inventory, ahead, self.config) else {
            return Some(RoomStep::Resume(lease.id.clone()));
        };
        *refresh_first |= refusal.refresh_first;
        let turns = Some(self.config.suspend.turns).filter(|turns| !turns.is_zero())?;
        let stay = turns.max(self.config.suspend.at_least);
        let mut waiter = waiter.clone();
        waiter.rule = None;
        let of_root = self.make_room(&waiter, ahead, stay)?;
        if !lease.brokered {
            return Some(of_root);
        }
        // It displaces whom a start of its user's would. The user database may be slow: it is asked last.
        waiter.rule = Some((self.rule_of)(lease.container.uid)?);
        self.make_room(&waiter, ahead, stay)
    }

    /// Those that have been on their GPU for at least `stay` go.
    fn make_room(&self, waiter: &Waiter, ahead: &Ledger, stay: Duration) -> Option<RoomStep> {
        let limit = limit_of(waiter);
        let request = waiter.request().filter(|_| self.config.suspend.on_demand)?;
        let inventory = allowed_inventory(limit, self.inventory, self.config).ok()?;
        // What a suspended container will have is counted with its lease already.
        let limited = limit.filter(|_| ahead.lease(&waiter.id).is_none());
        let allows =
            |placement: &Placement| limited.is_none_or(|limit| limit.check(placement, ahead).is_ok());
        let judge = |lease: &Lease| {
            let is_busy = (self.is_busy)(lease)?;
            let may = may_displace(limit, lease) && lease.why_left_alone().is_none();
            Suspendable::of(lease, is_busy, self.at_ms, stay).filter(|_| may)
        };
        let world = (&*inventory, ahead, self.config);
        let leases = whom_to_suspend(&request, &waiter.id, world, &allows, &judge)?;
        Some(RoomStep::Suspend { leases, waiter: waiter.id.clone() })
    }
}

/// Whether a start by this policy may have the container of `lease` suspended.
fn may_displace(limit: Option<PolicyLimit<'_>>, lease: &Lease) -> bool {
    limit.is_none_or(|PolicyLimit { uid, rule }| {
        let is_own = lease.brokered && lease.container.uid == uid;
        if is_own { rule.suspend } else { rule.displace }
    })
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;
