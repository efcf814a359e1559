//! Makes room for starts that find none, by suspending containers that allow it, and brings these back when there is room
//! again, each in the order of those who wait. What is next is decided by [`Sight::next_step`]; its steps are taken here, one
//! after the other, on the thread for slow work. The ledger alone says who waits: a service that is started anew goes on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::suspend::{self, SuspendError};
use crate::usage::{self, Usage};
use sublet_core::admit::{Local, Room, RoomStep, Sight, refresh};
use sublet_core::config::Config;
use sublet_core::inventory::{Inventory, last};
use sublet_core::ledger::{Lease, LeaseId, Ledger, LedgerError, Store, Waiter};
use sublet_core::process::uptime_milliseconds;
use sublet_core::text::short_id;

/// After a look that found nothing to do, the driver is asked again only after this time.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// When a look at the driver found nothing to do.
static IN_VAIN: Mutex<Option<Instant>> = Mutex::new(None);

fn in_vain() -> MutexGuard<'static, Option<Instant>> {
    IN_VAIN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of the host.
struct Seen<'c> {
    ledger: Ledger,
    inventory: Inventory,
    /// By the driver; `None`: it was not asked, and each container may have processes.
    usage: Option<Usage>,
    config: &'c Config,
}

impl<'c> Seen<'c> {
    /// Without the driver, if anything in the ledger may be suspended or has been.
    fn by_files(config: &'c Config) -> Option<Self> {
        let ledger = Store::open(&config.state_dir).ok()?.read().ok()?;
        let concerns = |lease: &Lease| lease.may_be_suspended() || lease.suspension.is_some();
        let inventory = ledger.leases.iter().any(concerns).then(|| last(config))?.ok()?;
        Some(Self { ledger, inventory, usage: None, config })
    }

    /// By the driver's word of now.
    fn by_driver(config: &'c Config) -> anyhow::Result<Self> {
        let ledger = Local::new(config).update(|ledger| ledger.clone())?;
        let inventory = refresh(config)?;
        let usage = Some(usage::of_host(&ledger, &inventory, usage::SAMPLED, config));
        Ok(Self { ledger, inventory, usage, config })
    }

    /// What those who wait find after `time`. One that is new on its GPU by then may have begun to use it.
    fn next_step(&self, time: Duration) -> Room {
        let Self { ledger, inventory, usage, config } = self;
        let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let now = uptime_milliseconds();
        let is_new = |lease: &Lease| {
            let stays_until = lease.on_gpu_since_ms().saturating_add(milliseconds(config.suspend.at_least));
            !time.is_zero() && stays_until > now
        };
        let is_busy = |lease: &Lease| {
            let Some(usage) = usage else { return Some(false) };
            let used = usage.of_lease(lease, lease.devices.first()?, ledger);
            let runs = used.processes.is_some_and(|count| count > 0);
            // Where the driver does not say, it may compute.
            (runs || is_new(lease)).then_some(used.sm_percent != Some(0))
        };
        let at_ms = now.saturating_add(milliseconds(time));
        Sight { inventory, ledger, config, at_ms, is_busy: &is_busy }.next_step()
    }
}

/// Whether there may be a step to take, as far as is known without the driver.
pub(super) fn is_wanted(config: &Config) -> bool {
    let is_soon = in_vain().is_some_and(|at| at.elapsed() < LOOK_AGAIN);
    let seen = if is_soon { None } else { Seen::by_files(config) };
    seen.is_some_and(|seen| {
        let room = seen.next_step(Duration::ZERO);
        room.step.is_some() || room.refresh_first
    })
}

/// Takes the next step for those who wait, if there is one. Returns whether there may be more.
pub(super) fn take_step(config: &Config) -> anyhow::Result<bool> {
    if !is_wanted(config) {
        return Ok(false);
    }
    let Some(step) = Seen::by_driver(config)?.next_step(Duration::ZERO).step else {
        *in_vain() = Some(Instant::now());
        return Ok(false);
    };
    if let Some(why) = take(&step, config).inspect_err(|_| *in_vain() = Some(Instant::now()))? {
        tracing::warn!("{why}");
    }
    Ok(true)
}

/// Whether others that may be suspended now have what `waiter` needs, which has no entry yet, as far as is known without the
/// driver.
pub(super) fn may_find_room(waiter: &Waiter, config: &Config) -> bool {
    Seen::by_files(config).is_some_and(|mut seen| {
        seen.ledger.add_waiter(waiter.clone());
        seen.next_step(Duration::ZERO).step.is_some()
    })
}

/// Takes steps for those who wait until the one with entry `id` finds room.
///
/// # Errors
/// Why no room can be made for it. `Ok` where it finds room by now, or may do so in time.
pub(super) fn make_room(id: &LeaseId, config: &Config) -> anyhow::Result<()> {
    let until = Instant::now() + config.suspend.limit;
    let mut failed = None;
    loop {
        let mut seen = Seen::by_driver(config)?;
        let room = seen.next_step(Duration::ZERO);
        seen.ledger.waiters.retain(|waiter| waiter.id == *id);
        match room.step {
            _ if seen.ledger.waiters.is_empty() || room.placed.contains(id) => return Ok(()),
            Some(_) if Instant::now() >= until => bail!("the time for it is over ([suspend] limit)"),
            Some(step) => failed = take(&step, config)?.or(failed),
            None if seen.next_step(config.suspend.limit).step.is_some() => return Ok(()),
            None => match failed {
                Some(why) => bail!(why),
                None => bail!("what could be suspended does not use the GPU, or has just come back to it"),
            },
        }
    }
}

/// Takes `step`. Returns why it failed: the lease is then left alone for a while.
///
/// # Errors
/// That cannot be written down.
fn take(step: &RoomStep, config: &Config) -> Result<Option<String>, LedgerError> {
    let attempt = |lease: &LeaseId, verb: &str, done: Result<suspend::Done, SuspendError>| {
        let Some(why) = done.err().map(|error| error.to_string()) else { return Ok(None) };
        Local::new(config).update(|ledger| ledger.back_off(lease, config.suspend.at_least, &why))?;
        Ok(Some(format!("{} cannot be {verb}: {why}", name_of(lease, config))))
    };
    match step {
        RoomStep::Resume(lease) => attempt(lease, "resumed", suspend::resume(lease, None, config)),
        RoomStep::Suspend { leases, waiter } => {
            let suspend = |lease| {
                let what = format!("{} is being suspended to make room for it", name_of(lease, config));
                note(waiter, &what, config);
                attempt(lease, "suspended", suspend::suspend_on_demand(lease, config)).transpose()
            };
            leases.iter().find_map(suspend).transpose()
        }
    }
}

/// As messages have a container. Where people read them, its name stands in place of its id.
fn name_of(lease: &LeaseId, config: &Config) -> String {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.peek());
    let held = ledger.ok().and_then(|ledger| ledger.lease(lease).cloned());
    held.map_or_else(
        || format!("lease {lease}"),
        |held| format!("container {}", short_id(&held.container.name())),
    )
}

/// Writes down what is done for a start that waits; one without an entry is left out.
fn note(waiter: &LeaseId, what: &str, config: &Config) {
    let noted = Local::new(config).update(|ledger| {
        let entry = ledger.waiters.iter_mut().find(|entry| entry.id == *waiter);
        entry.map(|entry| what.clone_into(&mut entry.why))
    });
    let _ = noted.inspect_err(|error| tracing::debug!("{error}"));
}
