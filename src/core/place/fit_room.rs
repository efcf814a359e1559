//! Whether a device has room now: its present use, and the turns, SMs, clients and memory that other leases leave.

use super::bookings::{Bookings, SERVER_BYTES};
use super::fit_rules::client_limit;
use super::want::{Misfit, Want, World};
use crate::inventory::Fact;
use crate::ledger::{DaemonState, Ledger};
use crate::share::Mode;
use crate::share::units::show_bytes;
use crate::text::safe;

impl Want<'_> {
    /// Memory of idle shared servers that will be ended for this use of their device ([`Ledger::conflicting_daemons`]).
    fn memory_of_conflicting(&self, ledger: &Ledger) -> u64 {
        let shared = ledger.daemons.iter().filter(|daemon| {
            let uuid = &self.device.uuid;
            daemon.serves(uuid) && daemon.key.0 == *uuid && daemon.state != DaemonState::Down
        });
        let unused = shared.filter(|daemon| ledger.on_daemon(&daemon.key).next().is_none());
        SERVER_BYTES * unused.filter(|daemon| self.daemon.as_ref() != Some(&daemon.key)).count() as u64
    }
}

/// A device has one use at a time. Beside an exclusive lease there may be no other process, with or without a lease.
pub(super) fn check_use(want: &Want<'_>, bookings: &Bookings, world: World<'_>) -> Result<(), Misfit> {
    match bookings.used_as {
        Some(Mode::Exclusive | Mode::Mig) => return Err(Misfit::now("is taken whole")),
        Some(used) if used != want.used_as => {
            let turns = if want.several && want.daemon.is_some() {
                ", and an MPS server for several devices takes turns (time-slice)"
            } else {
                ""
            };
            return Err(Misfit::now(format!("is in use as {used}{turns}")));
        }
        _ => {}
    }
    if !matches!(want.mode, Mode::Exclusive | Mode::Mig) {
        return Ok(());
    }
    if !want.device.knows_processes() {
        return Err(Misfit::not_reported(
            "cannot be given to one container alone: NVML does not tell which processes are on it",
        ));
    }
    let ours = world.ledger.daemons.iter().any(|daemon| daemon.serves(&want.device.uuid));
    let mut others = want.device.processes.iter().filter(|process| !(process.mps_server && ours));
    match others.find(|process| world.ledger.lease_of_process(process).is_none()) {
        Some(process) => Err(Misfit::as_reported(format!(
            "cannot be given to one container alone: process {} ({}) has a CUDA context on it without a \
             lease; end it first",
            process.pid,
            safe(&process.name)
        ))),
        None => Ok(()),
    }
}

/// Turns, SMs and clients.
pub(super) fn check_room(want: &Want<'_>, bookings: &Bookings, world: World<'_>) -> Result<(), Misfit> {
    let turns = world.config.limits.time_slice_max;
    if want.used_as == Mode::TimeSlice && bookings.leases >= turns as usize {
        let reason =
            format!("has {} containers taking turns ([limits] time_slice_max = {turns})", bookings.leases);
        return Err(if turns == 0 { Misfit::never(reason) } else { Misfit::now(reason) });
    }
    let sm = want.request.sm.filter(|_| want.used_as == Mode::Mps).unwrap_or_default();
    if sm > bookings.sm_free {
        return Err(Misfit::now(format!("has {} % SM left", bookings.sm_free)));
    }
    let limit = client_limit(want.device, &world.inventory.driver);
    let processes = bookings.processes.saturating_add(want.request.processes.get());
    if want.daemon.is_some() && processes > limit {
        let left = limit.saturating_sub(bookings.processes);
        return Err(Misfit::now(format!("has {left} of {limit} MPS clients left")));
    }
    Ok(())
}

/// Checks memory by the bookings and by NVML's last report. Returns whether it is within 10 % of the latter, so that a
/// refresh is needed.
pub(super) fn check_memory(want: &Want<'_>, world: World<'_>) -> Result<bool, Misfit> {
    // Unknown memory cannot be booked: `fit_rules::check_driver` refuses requests for memory.
    if want.books == 0 || want.device.unknown.contains_key(&Fact::Memory) {
        return Ok(false);
    }
    // The memory of servers that end before the container starts.
    let ending = want.memory_of_conflicting(world.ledger);
    let bookings = want.account.left_by_bookings().saturating_add(ending);
    if want.books > bookings {
        return Err(Misfit::now(format!(
            "has {} left to book, {} needed",
            show_bytes(bookings),
            show_bytes(want.books)
        )));
    }
    if want.mode == Mode::Mig {
        return Ok(false);
    }
    let free = want.account.left_by_driver().saturating_add(ending);
    if want.books > free {
        return Err(Misfit::as_reported(format!(
            "has {} free according to the driver, {} needed",
            show_bytes(free),
            show_bytes(want.books)
        )));
    }
    Ok(want.books > free / 10 * 9)
}
