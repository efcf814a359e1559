//! The bookings of a device, and whether it has room now: its present use, and the turns, SMs, clients and memory that
//! other leases leave.

use std::collections::BTreeSet;

use super::{Misfit, Want, World};
use crate::config::Config;
use crate::inventory::{Device, Driver, Fact};
use crate::ledger::{DaemonKey, DaemonState, Lease, Ledger};
use crate::share::{Isolation, MIB, Mode, Percent, show_bytes};
use crate::text::safe;

/// Device memory that an MPS server itself takes (measured; docs/evidence).
pub const SERVER_BYTES: u64 = 66 * MIB;

/// The bookings of one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Bookings {
    /// Its present use; `None`: idle. Dedicated MPS servers take turns, so their use is time-slice.
    pub used_as: Option<Mode>,
    /// Leases that share it.
    pub leases: usize,
    /// Sum of SM shares.
    pub sm_booked: Percent,
    /// SM share that a new lease may still take.
    pub sm_free: Percent,
    /// Sum of booked memory, MPS servers' own included, in bytes.
    pub memory_booked: u64,
    /// Memory that a new lease may still book, in bytes: the smaller of [`Account::left_by_bookings`] and
    /// [`Account::left_by_driver`].
    pub memory_free: u64,
    /// Sum of expected CUDA processes behind MPS servers.
    pub processes: u32,
}

impl Bookings {
    /// As `40 % SM`.
    pub(super) fn sm_left(&self) -> String {
        let sm = self.sm_free.min(Percent::WHOLE);
        if sm == Percent::default() { "no SMs".to_owned() } else { format!("{sm} % SM") }
    }
}

/// The bookings of `device`.
pub fn bookings(device: &Device, ledger: &Ledger, config: &Config) -> Bookings {
    Account::of(device, ledger, config).bookings()
}

/// A device's part of the ledger: it is looked through once, and asked several things.
pub(super) struct Account<'a> {
    device: &'a Device,
    ledger: &'a Ledger,
    config: &'a Config,
    /// Leases that are booked on it. What is suspended books nothing.
    booked: Vec<&'a Lease>,
    /// Leases that are booked on its memory, which the compute instances of a GPU instance share.
    on_memory: Vec<&'a Lease>,
    /// Whether one lease has all the memory: in mode exclusive, or on a MIG device that shares its memory with no other.
    has_everything: bool,
}

impl<'a> Account<'a> {
    pub(super) fn of(device: &'a Device, ledger: &'a Ledger, config: &'a Config) -> Self {
        let everything = |lease: &Lease| {
            lease.mode == Mode::Exclusive || lease.mode == Mode::Mig && lease.memory_bytes.is_none()
        };
        let (booked, on_memory) = (Vec::new(), Vec::new());
        let mut account = Self { device, ledger, config, booked, on_memory, has_everything: false };
        for lease in &ledger.leases {
            for uuid in device.sharing_memory().filter(|uuid| lease.books(uuid)) {
                let (on_it, booked) = (uuid == device.uuid, !ledger.is_booked_with_job(lease));
                account.has_everything |= on_it && everything(lease);
                account.on_memory.extend(booked.then_some(lease));
                account.booked.extend((on_it && booked).then_some(lease));
            }
        }
        account
    }

    pub(super) fn bookings(&self) -> Bookings {
        let leases = &self.booked;
        let used_as = leases.first().map(|lease| use_of(lease.mode, lease.isolation));
        let shares = leases.iter().filter_map(|lease| lease.sm).map(Percent::thousandths);
        let booked = shares.fold(0, u32::saturating_add);
        let left = self.config.sm_bookable().thousandths().saturating_sub(booked);
        let (sm_booked, sm_free) = match used_as {
            Some(Mode::Exclusive | Mode::Mig) => (Percent::WHOLE, Percent::default()),
            Some(Mode::TimeSlice) => (Percent::default(), Percent::WHOLE),
            Some(Mode::Mps) | None => (Percent::from_thousandths(booked), Percent::from_thousandths(left)),
        };
        let served = leases.iter().filter(|lease| lease.daemon.is_some());
        let whole = self.has_everything;
        Bookings {
            used_as,
            leases: leases.len(),
            sm_booked,
            sm_free,
            memory_booked: if whole { self.device.memory_bytes } else { self.memory_booked() },
            memory_free: self.left_by_bookings().min(self.left_by_driver()),
            processes: served.map(|lease| lease.processes).fold(0, u32::saturating_add),
        }
    }

    fn memory_booked(&self) -> u64 {
        let leases = self.on_memory.iter().filter_map(|lease| lease.booked_memory());
        let daemons = SERVER_BYTES * self.daemons().len() as u64;
        leases.fold(daemons, u64::saturating_add)
    }

    /// Every MPS server that has or will have memory of the device, with or without a lease.
    pub(super) fn daemons(&self) -> BTreeSet<&'a DaemonKey> {
        let wanted = self.on_memory.iter().filter_map(|lease| lease.daemon.as_ref());
        let running = self.ledger.daemons.iter().filter(|daemon| {
            daemon.state != DaemonState::Down && self.device.sharing_memory().any(|uuid| daemon.serves(uuid))
        });
        wanted.chain(running.map(|daemon| &daemon.key)).collect()
    }

    /// Memory that is not booked.
    pub(super) fn left_by_bookings(&self) -> u64 {
        if self.has_everything {
            return 0;
        }
        bookable(self.device, self.config).saturating_sub(self.memory_booked())
    }

    /// The memory that NVML reported free at the last refresh, minus the leases' booked memory that was unused then.
    ///
    /// With `memory_overcommit` above 1 bookings are scaled down here too, while memory in use counts whole.
    pub(super) fn left_by_driver(&self) -> u64 {
        let unspent = self.on_memory.iter().map(|lease| unspent(lease, self.device, self.ledger));
        let seen = self.device.memory_users().filter(|process| process.mps_server).count();
        let unseen = self.daemons().len().saturating_sub(seen) as u64;
        let free = times(self.device.memory_free_bytes, self.config.limits.memory_overcommit.max(1.0));
        unspent.fold(free, u64::saturating_sub).saturating_sub(unseen * SERVER_BYTES)
    }
}

/// The use that a lease puts its device to.
pub(super) fn use_of(mode: Mode, isolation: Isolation) -> Mode {
    match (mode, isolation) {
        (Mode::Mps, Isolation::Dedicated) => Mode::TimeSlice,
        (mode, _) => mode,
    }
}

/// All that may ever be booked on `device`.
pub(super) fn bookable(device: &Device, config: &Config) -> u64 {
    times(device.memory_bytes.saturating_sub(config.limits.reserve), config.limits.memory_overcommit)
}

/// The unused part of `lease`'s booked memory at the last refresh.
fn unspent(lease: &Lease, device: &Device, ledger: &Ledger) -> u64 {
    let its = |found: Option<&Lease>| {
        found.is_some_and(|found| found.id == lease.id || found.within.as_ref() == Some(&lease.id))
    };
    let processes = device.memory_users().filter(|process| its(ledger.lease_of_process(process)));
    let used = processes.map(|process| process.memory_bytes).fold(0, u64::saturating_add);
    lease.booked_memory().unwrap_or(0).saturating_sub(used)
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bytes of device memory are far below 2^53, factors are positive, and `as` saturates"
)]
fn times(bytes: u64, factor: f64) -> u64 {
    // Without a factor the result is exact, because the bookings must not lose a byte.
    if (factor - 1.0).abs() < f64::EPSILON { bytes } else { (bytes as f64 * factor) as u64 }
}

/// Memory of idle shared servers that will be ended for this use of their device ([`Ledger::conflicting_daemons`]).
fn memory_of_conflicting(want: &Want<'_>, ledger: &Ledger) -> u64 {
    let shared = ledger.daemons.iter().filter(|daemon| {
        let uuid = &want.device.uuid;
        daemon.serves(uuid) && daemon.key.0 == *uuid && daemon.state != DaemonState::Down
    });
    let unused = shared.filter(|daemon| ledger.on_daemon(&daemon.key).next().is_none());
    SERVER_BYTES * unused.filter(|daemon| want.daemon.as_ref() != Some(&daemon.key)).count() as u64
}

/// A device has one use at a time. Beside an exclusive lease there may be no other process, with or without a lease.
pub(super) fn check_use(want: &Want<'_>, bookings: &Bookings, world: World<'_>) -> Result<(), Misfit> {
    match bookings.used_as {
        Some(Mode::Exclusive | Mode::Mig) => return Err(Misfit::now("is taken whole")),
        Some(used) if used != want.used_as => {
            let turns = if want.several && want.daemon.is_some() {
                "; why: an MPS server for several devices takes turns (time-slice)"
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
            "cannot be given to one container alone; why: NVML does not tell which processes are on it",
        ));
    }
    let ours = world.ledger.daemons.iter().any(|daemon| daemon.serves(&want.device.uuid));
    let mut foreign = want.device.processes.iter().filter(|process| !(process.mps_server && ours));
    match foreign.find(|process| world.ledger.lease_of_process(process).is_none()) {
        Some(process) => Err(Misfit::as_reported(format!(
            "cannot be given to one container alone; why: process {} ({}) has a CUDA context on it without a \
             lease; fix: end it first",
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
        let reason = format!(
            "has {} containers taking turns; why: [limits] time_slice_max = {turns}",
            bookings.leases
        );
        return Err(if turns == 0 { Misfit::never(reason) } else { Misfit::now(reason) });
    }
    let sm = want.request.sm.filter(|_| want.used_as == Mode::Mps).unwrap_or_default();
    if sm > bookings.sm_free {
        return Err(Misfit::now(format!("has {} left", bookings.sm_left())));
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
    // Unknown memory cannot be booked: `check_driver` of [`super::select`] refuses requests for memory.
    if want.books == 0 || want.device.unknown.contains_key(&Fact::Memory) {
        return Ok(false);
    }
    // The memory of servers that end before the container starts.
    let ending = memory_of_conflicting(want, world.ledger);
    let bookings = want.account.left_by_bookings().saturating_add(ending);
    let needed = || show_bytes(want.books);
    if want.books > bookings {
        return Err(Misfit::now(format!("has {} left to book, {} needed", show_bytes(bookings), needed())));
    }
    if want.mode == Mode::Mig {
        return Ok(false);
    }
    let free = want.account.left_by_driver().saturating_add(ending);
    if want.books > free {
        let free = show_bytes(free);
        return Err(Misfit::as_reported(format!(
            "has {free} free, {} needed; why: the driver says so, whatever is booked",
            needed()
        )));
    }
    Ok(want.books > free / 10 * 9)
}

/// The number of MPS clients that a device allows (CUDA MPS documentation, "Limitations": 16 before Volta, 48 since
/// Volta, 60 from CUDA 13.1; on a MIG device in proportion to its SMs).
pub fn client_limit(device: &Device, driver: &Driver) -> u32 {
    let whole = match () {
        () if device.is_before_volta() => 16,
        () if driver.cuda >= (13, 1) => 60,
        () => 48,
    };
    let sms = device.mig_device.as_ref().and_then(|mig_device| device.sm_count.zip(mig_device.gpu_sm_count));
    sms.map_or(whole, |(own, all)| (whole * own / all.max(1)).max(1))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{GIB, device, process};
    use super::*;
    use crate::ledger::fixture::lease;
    use crate::ledger::{Init, MpsDaemon};
    use crate::process::Process;

    fn with(leases: Vec<Lease>) -> Ledger {
        Ledger { leases, ..Ledger::empty("boot") }
    }

    fn shared(n: u64, sm: u32, gib: u64) -> Lease {
        Lease {
            mode: Mode::Mps,
            daemon: Some(DaemonKey("GPU-0".into())),
            sm: Some(Percent::from_thousandths(sm)),
            memory_bytes: Some(gib * GIB),
            processes: 2,
            ..lease(n, "GPU-0")
        }
    }

    #[test]
    fn an_idle_device_has_all_but_the_reserve() {
        let bookings = bookings(&device(0), &with(vec![]), &Config::default());
        assert_eq!((bookings.used_as, bookings.leases, bookings.processes), (None, 0, 0));
        assert_eq!(bookings.sm_free, Percent::from_thousandths(100_000));
        // 100 GiB in all, 512 MiB of them reserved.
        assert_eq!((bookings.memory_booked, bookings.memory_free), (0, 106_837_311_488));
    }

    #[test]
    fn shared_mps_books_sms_memory_and_one_server() {
        let ledger = with(vec![shared(1, 25_000, 8), shared(2, 12_500, 4)]);
        let bookings = bookings(&device(0), &ledger, &Config::default());
        assert_eq!(bookings.used_as, Some(Mode::Mps));
        assert_eq!(bookings.sm_booked, Percent::from_thousandths(37_500));
        assert_eq!(bookings.sm_free, Percent::from_thousandths(62_500));
        // 12 GiB and 66 MiB.
        assert_eq!(bookings.memory_booked, 12_954_107_904);
        assert_eq!(bookings.processes, 4);
    }

    #[test]
    fn dedicated_servers_take_turns_and_each_has_its_own_memory() {
        let dedicated = |n| Lease {
            isolation: Isolation::Dedicated,
            daemon: Some(DaemonKey(format!("{n:016x}"))),
            ..shared(n, 50_000, 1)
        };
        let bookings = bookings(&device(0), &with(vec![dedicated(1), dedicated(2)]), &Config::default());
        assert_eq!(bookings.used_as, Some(Mode::TimeSlice));
        assert_eq!(bookings.sm_booked, Percent::default());
        // 2 GiB and 132 MiB.
        assert_eq!(bookings.memory_booked, 2_285_895_680);
    }

    #[test]
    fn an_exclusive_lease_has_everything() {
        let whole = Lease { mode: Mode::Exclusive, ..lease(1, "GPU-0") };
        let bookings = bookings(&device(0), &with(vec![whole]), &Config::default());
        assert_eq!(bookings.sm_booked, Percent::from_thousandths(100_000));
        assert_eq!((bookings.sm_free, bookings.memory_free), (Percent::default(), 0));
        assert_eq!(bookings.memory_booked, 107_374_182_400);
    }

    #[test]
    fn overcommit_widens_the_accounts() {
        let mut config = Config::default();
        config.limits.sm_overcommit = 2.0;
        config.limits.memory_overcommit = 1.5;
        config.limits.reserve = 0;
        let bookings = bookings(&device(0), &with(vec![shared(1, 50_000, 8)]), &config);
        assert_eq!(bookings.sm_free, Percent::from_thousandths(150_000));
        // 150 GiB less 8 GiB and 66 MiB.
        assert_eq!(bookings.memory_free, 152_402_132_992);
    }

    #[test]
    fn foreign_use_is_not_free_and_memory_that_leases_use_is_not_taken_twice() {
        let init = Init {
            process: Process { pid: 70, start_time: 1 },
            pid_namespace: 4711,
            cgroup: Some("/sys/fs/cgroup/docker/one".into()),
            cgroup_inode: None,
        };
        let one = Lease { init: Some(init), ..shared(1, 25_000, 8) };
        let mut gpu = device(0);
        gpu.memory_free_bytes = 20 * GIB;
        let config = Config::default();
        // 20 GiB less 8 GiB and the server's 66 MiB, of which nothing is seen yet.
        assert_eq!(bookings(&gpu, &with(vec![one.clone()]), &config).memory_free, 12_815_695_872);
        gpu.processes = vec![process(71, 4711, 3 * GIB), process(80, 5, 30 * GIB)];
        gpu.processes.push(crate::inventory::GpuProcess { mps_server: true, ..process(81, 0, 66 * MIB) });
        // 20 GiB less the 5 GiB that it has not used.
        assert_eq!(bookings(&gpu, &with(vec![one]), &config).memory_free, 16_106_127_360);
    }

    #[test]
    fn a_server_that_still_runs_counts_though_nobody_uses_it() {
        let daemon = |state| MpsDaemon {
            key: DaemonKey("GPU-0".into()),
            devices: vec!["GPU-0".into()],
            process: None,
            state,
            default_limits: crate::ledger::DefaultLimits::NONE,
            answered_at: 0,
            idle_since: None,
            mode_left: false,
        };
        let booked = |state| {
            let ledger = Ledger { daemons: vec![daemon(state)], ..Ledger::empty("boot") };
            bookings(&device(0), &ledger, &Config::default()).memory_booked
        };
        assert_eq!(booked(DaemonState::Stopping), 69_206_016);
        assert_eq!(booked(DaemonState::Down), 0);
    }
}
