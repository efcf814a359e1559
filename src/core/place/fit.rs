//! Whether one device can serve a request: first the rules that waiting does not change, then the room that other
//! leases leave.

use super::bookings::{Account, Bookings, SERVER_BYTES, bookable, use_of};
use super::fit_room::{check_memory, check_room, check_use};
use super::fit_rules::{
    check_closed, check_compute_mode, check_driver, check_settings, check_share, client_limit,
};
use super::select::rule;
use super::want::{Misfit, Want, World};
use crate::config::{Config, Policy};
use crate::inventory::Device;
use crate::ledger::{DaemonKey, LeaseId};
use crate::request::Request;
use crate::share::units::MIB;
use crate::share::{Isolation, Mode};

/// A request's part of one device.
#[derive(Clone, Debug)]
pub(super) struct Fit {
    pub mode: Mode,
    pub isolation: Isolation,
    pub daemon: Option<DaemonKey>,
    pub memory_bytes: Option<u64>,
    pub refresh_first: bool,
    /// Whether the device already has this use.
    in_use: bool,
    /// The rest of its scarcest resource, in thousandths.
    left: u64,
    /// Memory left by the bookings, in bytes.
    memory_left: u64,
    /// Memory in bytes and SMs of a MIG device that the container gets whole. The smallest that fits is chosen.
    size: Option<(u64, u64)>,
    index: u32,
}

/// Fits `request` on `device`, which may be one of `several`.
pub(super) fn fit(
    request: &Request,
    id: &LeaseId,
    device: &Device,
    several: bool,
    world: World<'_>,
) -> Result<Fit, Misfit> {
    let want = build_want(request, id, device, several, world);
    check_closed(&want, world)?;
    world.ledger.explain_kept(id, device).map_or(Ok(()), |why| Err(Misfit::now(why)))?;
    check_settings(&want)?;
    check_driver(&want, world.inventory, world.config)?;
    check_compute_mode(&want, world.ledger)?;
    check_share(&want, &world.inventory.driver, world.config)?;
    let bookings = want.account.bookings();
    check_use(&want, &bookings, world)?;
    check_room(&want, &bookings, world)?;
    let refresh_first = check_memory(&want, world)?;
    Ok(build_fit(want, &bookings, refresh_first, world))
}

fn build_want<'a>(
    request: &'a Request,
    id: &LeaseId,
    device: &'a Device,
    several: bool,
    world: World<'a>,
) -> Want<'a> {
    let fixed = rule(device, world.config).and_then(|rule| rule.fixed_use);
    let default = if device.is_mig() { Mode::Mig } else { request.default_mode };
    let mode = request.mode.or(fixed).unwrap_or(default);
    let limited_turns = mode == Mode::TimeSlice && request.memory.is_some();
    // A process connects to one daemon, so a dedicated daemon serves all its devices.
    let own_server = limited_turns || several && mode == Mode::Mps;
    let isolation = if own_server { Isolation::Dedicated } else { request.isolation };
    let daemon = (mode == Mode::Mps || limited_turns).then(|| match isolation {
        Isolation::Dedicated => DaemonKey(id.to_string()),
        Isolation::Shared => DaemonKey(device.uuid.clone()),
    });
    let memory = match mode {
        Mode::Mig => shared_part(device, world.config),
        _ => request.memory.map(|memory| memory.on(device.memory_bytes)),
    };
    let account = Account::of(device, world.ledger, world.config);
    let new_server = daemon.as_ref().is_some_and(|key| !account.daemons().contains(key));
    let books = memory.unwrap_or(0).saturating_add(if new_server { SERVER_BYTES } else { 0 });
    let used_as = use_of(mode, isolation);
    Want { request, device, mode, isolation, used_as, daemon, memory, books, account, several }
}

/// The memory that is booked for a compute instance that one container has but that shares its memory with other instances.
/// Nothing enforces this part.
fn shared_part(device: &Device, config: &Config) -> Option<u64> {
    let shares = device.mig_device.as_ref().is_some_and(|mig_device| !mig_device.siblings.is_empty());
    shares.then(|| device.part_of(bookable(device, config)) / MIB * MIB)
}

fn build_fit(want: Want<'_>, bookings: &Bookings, refresh_first: bool, world: World<'_>) -> Fit {
    let World { inventory, config, .. } = world;
    let thousandths = |left: u64, all: u64| left.saturating_mul(1000) / all.max(1);
    let memory_left = want.account.left_by_bookings();
    let by_use = match want.used_as {
        Mode::Mps => {
            let limit = client_limit(want.device, &inventory.driver);
            let sms =
                thousandths(bookings.sm_free.thousandths().into(), config.sm_bookable().thousandths().into());
            sms.min(thousandths(limit.saturating_sub(bookings.processes).into(), limit.into()))
        }
        Mode::TimeSlice => {
            let turns = config.limits.time_slice_max;
            thousandths(u64::from(turns).saturating_sub(bookings.leases as u64), turns.into())
        }
        Mode::Exclusive | Mode::Mig => 1000,
    };
    let sms = u64::from(want.device.sm_count.unwrap_or(0));
    let size = (want.mode == Mode::Mig).then(|| (want.device.part_of(want.device.memory_bytes), sms));
    Fit {
        size,
        in_use: bookings.used_as.is_some(),
        left: by_use.min(thousandths(memory_left, bookable(want.device, config))),
        memory_left,
        index: want.device.index,
        mode: want.mode,
        isolation: want.isolation,
        daemon: want.daemon,
        memory_bytes: want.memory,
        refresh_first,
    }
}

impl Fit {
    /// The sort key: the device with the smallest one is taken first.
    pub(super) fn rank(&self, policy: Policy) -> (bool, u64, u64, u32) {
        if let Some((memory, sms)) = self.size {
            return (false, memory, sms, self.index);
        }
        match policy {
            Policy::Binpack => (!self.in_use, self.left, self.memory_left, self.index),
            Policy::Spread => {
                let most = |left: u64| u64::MAX - left;
                (false, most(self.left), most(self.memory_left), self.index)
            }
        }
    }
}
