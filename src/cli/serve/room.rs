//! Makes room for starts that find none, by suspending containers that allow it, and brings these back when there is room
//! again, each in the order of those who wait. What is next is decided by [`Sight::next_step`]; its steps are taken here, one
//! after the other, on the thread for slow work. The ledger alone says who waits: a service that is started anew goes on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::bail;

use crate::policy_rule::rule_of;
use crate::suspend::{self, SuspendError};
use crate::usage::{self, Usage};
use sublet_core::admit::{Local, Room, RoomStep, Sight, refresh};
use sublet_core::config::{Config, PolicyRule};
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
    fn by_files(store: &Store, config: &'c Config) -> Option<Self> {
        let mut ledger = store.read().ok()?;
        ledger.forget_ended();
        let concerns = |lease: &Lease| lease.may_be_suspended() || lease.suspension.is_some();
        let inventory = ledger.leases.iter().any(concerns).then(|| last(config))?.ok()?;
        Some(Self { ledger, inventory, usage: None, config })
    }

    /// By the driver's word of now.
    fn by_driver(config: &'c Config) -> anyhow::Result<Self> {
        let ledger = Local::new(config).update(|ledger| {
            ledger.forget_ended();
            ledger.clone()
        })?;
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
            let is_known = usage.as_ref().map_or(Some(false), |usage| computes(lease, usage));
            is_known.or_else(|| is_new(lease).then_some(false))
        };
        let at_ms = now.saturating_add(milliseconds(time));
        // Not without the driver, which is every two seconds: the user database may be slow. What it may say is seen then.
        let any = || PolicyRule { suspend: true, displace: true, ..PolicyRule::default() };
        let rule_of = |uid| if usage.is_some() { rule_of(uid, config).ok().cloned() } else { Some(any()) };
        Sight { inventory, ledger, config, at_ms, is_busy: &is_busy, rule_of: &rule_of }.next_step()
    }
}

/// Whether a process of the lease computed in the last seconds; `None`: it has none on its GPU. Of one that did not, the driver has no
/// sample (H200, driver 580; docs/evidence/2026-11-28-h200x2-groups.md).
fn computes(lease: &Lease, usage: &Usage) -> Option<bool> {
    let used = usage.devices.get(lease.devices.first()?)?;
    let of_each = used.of_lease(lease).map(|process| process.sm_percent.is_some_and(|percent| percent > 0));
    of_each.reduce(|one, other| one || other)
}

/// Whether there may be a step to take, as far as is known without the driver.
pub(super) fn is_wanted(store: &Store, config: &Config) -> bool {
    let is_soon = in_vain().is_some_and(|at| at.elapsed() < LOOK_AGAIN);
    let seen = if is_soon { None } else { Seen::by_files(store, config) };
    seen.is_some_and(|seen| {
        let room = seen.next_step(Duration::ZERO);
        room.step.is_some() || room.refresh_first
    })
}

/// Takes the next step for those who wait, if there is one. Returns whether there may be more.
pub(super) fn take_step(config: &Config) -> anyhow::Result<bool> {
    if !is_wanted(&Store::open(&config.state_dir)?, config) {
        return Ok(false);
    }
    let note_vain = || *in_vain() = Some(Instant::now());
    let seen = Seen::by_driver(config).inspect_err(|_| note_vain())?;
    let Some(step) = seen.next_step(Duration::ZERO).step else {
        note_vain();
        return Ok(false);
    };
    if let Some(why) = take(&step, 0, config).inspect_err(|_| note_vain())? {
        tracing::warn!("{why}");
    }
    Ok(true)
}

/// Whether there is room for `waiter`, which has no entry yet, beside those who wait, or others that may be suspended now have it,
/// as far as is known without the driver.
pub(super) fn may_find_room(waiter: &Waiter, config: &Config) -> bool {
    let seen = Store::open(&config.state_dir).ok().and_then(|store| Seen::by_files(&store, config));
    seen.is_some_and(|mut seen| {
        seen.ledger.add_waiter(waiter.clone());
        // Others before the first step, for whom there is room, have that first; the steps for the rest say nothing of its own. Who
        // is behind that step is not counted: it may then seem to find room that another one has.
        let placed = seen.next_step(Duration::ZERO).placed;
        let is_own = |one: &Waiter| one.id == waiter.id || one.process == waiter.process;
        seen.ledger.waiters.retain(|one| is_own(one) || placed.contains(&one.id));
        let room = seen.next_step(Duration::ZERO);
        // One that comes back has its room first, and may be suspended later on.
        room.step.is_some()
            || seen.ledger.waiters.iter().any(|one| is_own(one) && room.placed.contains(&one.id))
    })
}

/// Takes steps for those who wait until the one with entry `id` finds room, which user `uid` asks for.
///
/// # Errors
/// Why no room can be made for it. `Ok` where it finds room by now, or may do so in time.
pub(super) fn make_room(id: &LeaseId, uid: u32, config: &Config) -> anyhow::Result<()> {
    let until = Instant::now() + config.suspend.limit;
    let mut failed = None;
    loop {
        let mut seen = Seen::by_driver(config)?;
        let room = seen.next_step(Duration::ZERO);
        seen.ledger.waiters.retain(|waiter| waiter.id == *id);
        match room.step {
            _ if seen.ledger.waiters.is_empty() || room.placed.contains(id) => return Ok(()),
            Some(_) if Instant::now() >= until => bail!("the time for it is over ([suspend] limit)"),
            Some(step) => failed = take(&step, uid, config)?.or(failed),
            None if seen.next_step(config.suspend.limit).step.is_some() => return Ok(()),
            None => match failed {
                Some(why) => bail!(why),
                None => bail!("what could be suspended does not use the GPU, or has just come back to it"),
            },
        }
    }
}

/// Takes `step`. Returns why it failed, for user `uid`: the lease is then left alone for a while.
///
/// # Errors
/// That cannot be written down.
fn take(step: &RoomStep, uid: u32, config: &Config) -> Result<Option<String>, LedgerError> {
    let attempt = |lease: &LeaseId, verb: &str, done: Result<suspend::Done, SuspendError>| {
        let Err(error) = done else { return Ok(None) };
        // Host memory that others are copying to is theirs or free soon.
        let is_soon = matches!(error, SuspendError::HostMemory { .. }) && error.is_temporary();
        let at_least = if is_soon { Duration::ZERO } else { config.suspend.at_least };
        let why = error.to_string();
        Local::new(config).update(|ledger| ledger.back_off(lease, at_least, &why))?;
        Ok(Some(format!("{} cannot be {verb}: {why}", name_of(lease, uid, config))))
    };
    match step {
        RoomStep::Resume(lease) => attempt(lease, "resumed", suspend::resume(lease, None, config)),
        RoomStep::Suspend { leases, waiter } => {
            let suspend = |lease| {
                let what = format!("{} is being suspended to make room for it", name_of(lease, 0, config));
                note(waiter, &what, config);
                attempt(lease, "suspended", suspend::suspend_on_demand(lease, config)).transpose()
            };
            leases.iter().find_map(suspend).transpose()
        }
    }
}

/// As messages for user `uid` have a container. Where people read them, its name stands in place of its id.
fn name_of(lease: &LeaseId, uid: u32, config: &Config) -> String {
    let ledger = Store::open(&config.state_dir).and_then(|store| store.peek());
    match ledger.ok().as_ref().and_then(|ledger| ledger.lease(lease)) {
        None => format!("lease {lease}"),
        Some(held) if uid != 0 && held.container.uid != uid => "another user's container".to_owned(),
        Some(held) => format!("container {}", short_id(&held.container.name())),
    }
}

/// Writes down what is done for a start that waits; one without an entry is left out. So is a refused container of Docker's:
/// by the words of its refusal it is known as the one to be started ([`super::retry`]).
fn note(waiter: &LeaseId, what: &str, config: &Config) {
    let is_noted = |entry: &&mut Waiter| entry.id == *waiter && entry.retry.is_none();
    let noted = Local::new(config).update(|ledger| {
        let entry = ledger.waiters.iter_mut().find(is_noted);
        entry.map(|entry| what.clone_into(&mut entry.why))
    });
    let _ = noted.inspect_err(|error| tracing::debug!("{error}"));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::SystemTime;

    use sublet_core::inventory;
    use sublet_core::ledger::fixture::lease;
    use sublet_core::ledger::{LeaseState, SuspendedProcess};
    use sublet_core::place::fixture::{GIB, device, host as host_of};
    use sublet_core::process::Process;
    use sublet_core::request;
    use sublet_core::share::Suspend;

    use super::*;
    use crate::gpu_processes::Holder;
    use crate::usage::{DeviceUse, ProcessUse};

    fn host() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        (dir, config)
    }

    #[test]
    fn a_refused_container_keeps_the_words_by_which_it_is_known() {
        let (_dir, config) = host();
        let request = request::parse(&BTreeMap::new(), None, None, &config).unwrap();
        let waiter = |number, by| {
            let lease = lease(number, "GPU-0");
            Waiter::new(&lease.id, &lease.container, &request, "no room", by)
        };
        let both = [waiter(1, None), waiter(2, Process::current().ok())];
        let add = |ledger: &mut Ledger| both.iter().for_each(|waiter| ledger.add_waiter(waiter.clone()));
        Store::open(&config.state_dir).unwrap().change(add).unwrap();
        for waiter in &both {
            note(&waiter.id, "it is being made", &config);
        }
        let noted = Store::open(&config.state_dir).unwrap().read().unwrap().waiters;
        assert_eq!(
            noted.iter().map(|waiter| &*waiter.why).collect::<Vec<_>>(),
            ["no room", "it is being made"]
        );
    }

    #[test]
    fn the_room_that_is_made_for_one_who_waits_is_none_for_a_start_on_another_gpu() {
        let (_dir, config) = host();
        inventory::store(&config, &host_of(vec![device(0), device(1)]), SystemTime::now()).unwrap();
        let held = |number, gpu, suspend| Lease {
            state: LeaseState::Active,
            memory_bytes: Some(60 * GIB),
            resumed_ms: Some(0),
            suspend,
            ..lease(number, gpu)
        };
        let waiter = |number, gpu: &str, is_other: bool| {
            let keys = [("sublet.gpu", gpu), ("sublet.memory", "60GiB"), ("sublet.suspend", "allow")];
            let annotations = keys.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
            let request = request::parse(&annotations, None, None, &config).unwrap();
            let lease = lease(number, gpu);
            let by = if is_other { Some(Process { pid: 1, start_time: 1 }) } else { Process::current().ok() };
            let mut waiter = Waiter::new(&lease.id, &lease.container, &request, "no room", by);
            waiter.rule = Some(PolicyRule { displace: true, ..PolicyRule::default() });
            waiter
        };
        let fill = |ledger: &mut Ledger| {
            ledger.leases = vec![held(1, "GPU-0", Suspend::Allow), held(2, "GPU-1", Suspend::Never)];
            ledger.waiters = vec![waiter(3, "0", false)];
        };
        Store::open(&config.state_dir).unwrap().change(fill).unwrap();
        // It has its entry already, with another id.
        assert!(may_find_room(&waiter(4, "0", false), &config));
        assert!(may_find_room(&waiter(5, "0", true), &config), "it may be there for both");
        assert!(!may_find_room(&waiter(6, "1", true), &config));
        // There is room again for one that was suspended on demand, which is next.
        let me = Process::current().unwrap();
        let suspend = |ledger: &mut Ledger| {
            fill(ledger);
            let id = ledger.leases[0].id.clone();
            ledger.waiters.clear();
            ledger.begin_suspending(&id, me, vec![], None).unwrap();
            ledger.note_on_demand(&id);
            assert!(ledger.end_suspended(&id, me));
        };
        Store::open(&config.state_dir).unwrap().change(suspend).unwrap();
        assert!(may_find_room(&waiter(7, "0", true), &config));
        assert!(!may_find_room(&waiter(8, "1", true), &config));
    }

    #[test]
    fn without_the_driver_no_users_policy_is_asked_for() {
        let (_dir, mut config) = host();
        let hour = Duration::from_secs(3600);
        (config.suspend.turns, config.suspend.at_least) = (hour, hour);
        let held = |number| Lease {
            state: LeaseState::Active,
            memory_bytes: Some(60 * GIB),
            resumed_ms: Some(uptime_milliseconds()),
            suspend: Suspend::Allow,
            ..lease(number, "GPU-0")
        };
        let me = Process::current().unwrap();
        let mut ledger = Ledger { leases: vec![Lease { brokered: true, ..held(1) }], ..Ledger::empty("") };
        let id = ledger.leases[0].id.clone();
        ledger.begin_suspending(&id, me, vec![], None).unwrap();
        ledger.note_on_demand(&id);
        assert!(ledger.end_suspended(&id, me));
        ledger.leases.push(held(2));
        let inventory = host_of(vec![device(0)]);
        let mut seen = Seen { ledger, inventory, usage: None, config: &config };
        assert!(seen.next_step(2 * hour).step.is_some(), "there may be a policy by which it may");
        seen.usage = Some(Usage::default());
        assert_eq!(seen.next_step(2 * hour).step, None, "there is none");
    }

    #[test]
    fn a_process_that_has_ended_leaves_its_room_to_who_comes_back() {
        let (_dir, config) = host();
        let gpu = device(0);
        inventory::store(&config, &host_of(vec![gpu.clone()]), SystemTime::now()).unwrap();
        let me = Process::current().unwrap();
        let ended = Process { pid: i32::MAX, start_time: 1 };
        let processes = [(me, GIB), (ended, gpu.memory_bytes)]
            .map(|(process, bytes)| SuspendedProcess { process, bytes });
        let suspend = |ledger: &mut Ledger| {
            ledger.leases = vec![Lease { state: LeaseState::Active, ..lease(1, "GPU-0") }];
            let id = ledger.leases[0].id.clone();
            ledger.begin_suspending(&id, me, processes.to_vec(), None).unwrap();
            ledger.note_on_demand(&id);
            assert!(ledger.end_suspended(&id, me));
            id
        };
        let (id, _) = Store::open(&config.state_dir).unwrap().change(suspend).unwrap();
        let room = Seen::by_files(&Store::open(&config.state_dir).unwrap(), &config)
            .unwrap()
            .next_step(Duration::ZERO);
        assert_eq!(room.step, Some(RoomStep::Resume(id)));
    }

    #[test]
    fn a_container_of_whose_processes_the_driver_has_no_sample_is_idle() {
        let held = lease(1, "GPU-0");
        let of = |percents: &[Option<u32>]| {
            let holder = Holder {
                process: Process { pid: 4_000_000, start_time: 1 },
                name: String::new(),
                memory_bytes: None,
                is_server: false,
                is_client: false,
                lease: Some(held.id.clone()),
            };
            let process = |&sm_percent| ProcessUse { holder: holder.clone(), sm_percent };
            let used =
                DeviceUse { processes: percents.iter().map(process).collect(), ..DeviceUse::default() };
            let devices = BTreeMap::from([("GPU-0".to_owned(), used)]);
            computes(&held, &Usage { devices, ..Usage::default() })
        };
        assert_eq!([of(&[None]), of(&[Some(0)])], [Some(false); 2]);
        assert_eq!([of(&[Some(1)]), of(&[None, Some(40), None])], [Some(true); 2]);
        assert_eq!((of(&[]), computes(&held, &Usage::default())), (None, None));
    }

    #[test]
    fn another_users_container_is_not_named() {
        let (_dir, config) = host();
        let mut held = lease(1, "GPU-0");
        held.container.uid = 1001;
        let change = |ledger: &mut Ledger| ledger.leases.push(held.clone());
        Store::open(&config.state_dir).unwrap().change(change).unwrap();
        let name = |uid| name_of(&held.id, uid, &config);
        assert_eq!((name(0), name(1000)), (name(1001), "another user's container".to_owned()));
        assert!(name(0).starts_with("container "), "{}", name(0));
    }
}
