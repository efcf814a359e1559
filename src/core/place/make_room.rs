//! Which containers are suspended so that a request finds room: as few as possible, of one GPU. Pure.

use std::time::Duration;

use super::{Allows, World, find};
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::{Lease, LeaseId, LeaseState, Ledger, SuspendStep, Suspension};
use crate::process::Process;
use crate::request::Request;

/// What counts for the choice among containers that may be suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Suspendable {
    /// Whether it computes, by what the driver says of its processes. Idle ones are suspended first.
    pub is_busy: bool,
    /// When it came to its GPU, in milliseconds since boot. Those that have been there longest are suspended first.
    pub since_ms: u64,
}

impl Suspendable {
    /// `None`: at `at_ms` it has not been on its GPU for as long as `stay`.
    pub(crate) fn of(lease: &Lease, is_busy: bool, at_ms: u64, stay: Duration) -> Option<Self> {
        let since_ms = lease.on_gpu_since_ms();
        let stay_ms = u64::try_from(stay.as_millis()).unwrap_or(u64::MAX);
        (since_ms.saturating_add(stay_ms) <= at_ms).then_some(Self { is_busy, since_ms })
    }
}

/// The leases on one GPU without which `request` would find room: the fewest; of as many, those of which the fewest compute,
/// and then those that have been there longest. `judge` says of a lease whose share allows it whether it may be suspended
/// now. Only placements that a policy `allows` count. `None`: there is room, or suspending makes none.
pub(crate) fn whom_to_suspend(
    request: &Request,
    id: &LeaseId,
    (inventory, ledger, config): (&Inventory, &Ledger, &Config),
    allows: Allows<'_>,
    judge: &dyn Fn(&Lease) -> Option<Suspendable>,
) -> Option<Vec<LeaseId>> {
    let search = Search { request, id, world: World { inventory, ledger, config }, allows };
    if search.fits(&[], inventory.devices.first()?) {
        return None;
    }
    let chosen = inventory.gpus().filter_map(|gpu| search.on_gpu(gpu, ledger, judge));
    let rank = |chosen: &Vec<Ranked<'_>>| {
        let busy = chosen.iter().filter(|(rank, _)| rank.is_busy).count();
        (chosen.len(), busy, chosen.iter().map(|(rank, _)| rank.since_ms).max())
    };
    let best = chosen.min_by_key(rank)?;
    Some(best.into_iter().map(|(_, lease)| lease.id.clone()).collect())
}

/// Whether root's start of a container with this `request` would find room if `sublet serve` suspended others in time, as far
/// as this can be known without the driver.
pub fn may_make_room(
    request: &Request,
    id: &LeaseId,
    (inventory, ledger, config): (&Inventory, &Ledger, &Config),
    now_ms: u64,
) -> bool {
    let rules = &config.suspend;
    let by = now_ms.saturating_add(u64::try_from(rules.limit.as_millis()).unwrap_or(u64::MAX));
    let judge = |lease: &Lease| Suspendable::of(lease, false, by, rules.at_least);
    // One that is on its way back or out is there by then, or away.
    let mut then = ledger.clone();
    let is_on_its_way =
        |own: &Suspension| matches!(own.step, SuspendStep::Suspending | SuspendStep::Resuming);
    for lease in then.leases.iter_mut().filter(|lease| lease.devices.len() == 1) {
        lease.suspension.take_if(|own| is_on_its_way(own));
    }
    let world = (inventory, &then, config);
    let can = ledger.leases.iter().any(Lease::may_be_suspended);
    can && rules.on_demand && whom_to_suspend(request, id, world, &|_| true, &judge).is_some()
}

struct Search<'a> {
    request: &'a Request,
    id: &'a LeaseId,
    world: World<'a>,
    allows: Allows<'a>,
}

/// A lease, and what counts for the choice.
type Ranked<'l> = (Suspendable, &'l Lease);

impl Search<'_> {
    /// The fewest on `gpu`.
    fn on_gpu<'l>(
        &self,
        gpu: &'l Device,
        ledger: &'l Ledger,
        judge: &dyn Fn(&Lease) -> Option<Suspendable>,
    ) -> Option<Vec<Ranked<'l>>> {
        let may = |lease: &&Lease| {
            lease.state == LeaseState::Active && lease.suspension.is_none() && lease.may_be_suspended()
        };
        let on_it = ledger.on_device(&gpu.uuid).filter(may);
        let mut ranked: Vec<Ranked<'_>> = on_it.filter_map(|lease| Some((judge(lease)?, lease))).collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        self.fewest(&ranked, gpu)
    }

    /// As few of `ranked` on `gpu` as do, the fewest busy ones among them, and the first that do. Of as many, those with most
    /// memory leave most room.
    fn fewest<'l>(&self, ranked: &[Ranked<'l>], gpu: &Device) -> Option<Vec<Ranked<'l>>> {
        if ranked.is_empty() || !self.fits(ranked, gpu) {
            return None;
        }
        let mut largest = ranked.to_vec();
        largest.sort_by_key(|(_, lease)| std::cmp::Reverse(self.memory(lease, gpu)));
        let counts = (1..=ranked.len()).flat_map(|count| (0..=count).map(move |busy| (count, busy)));
        let fits = |(count, busy): &(usize, usize)| {
            let all = complete(&[], &largest, (*count, *busy));
            all.len() == *count && self.fits(&all, gpu)
        };
        let counts = counts.into_iter().find(fits)?;
        let mut chosen: Vec<Ranked<'_>> = Vec::new();
        for one in ranked {
            let with: Vec<_> = chosen.iter().chain([one]).copied().collect();
            let all = complete(&with, &largest, counts);
            if all.len() == counts.0 && self.fits(&all, gpu) {
                chosen = with;
            }
        }
        Some(chosen)
    }

    /// What `lease` books or has of the GPU, in bytes.
    fn memory(&self, lease: &Lease, gpu: &Device) -> u64 {
        self.used(lease, gpu).max(lease.booked_memory().unwrap_or(0))
    }

    /// What it had at the last refresh.
    fn used(&self, lease: &Lease, gpu: &Device) -> u64 {
        let is_its = |found: Option<&Lease>| found.is_some_and(|found| found.id == lease.id);
        let own = gpu.processes.iter().filter(|process| is_its(self.world.ledger.lease_of_process(process)));
        own.map(|process| process.memory_bytes).fold(0, u64::saturating_add)
    }

    /// Whether the request would find room if these leases on `gpu` were suspended.
    fn fits(&self, leases: &[Ranked<'_>], gpu: &Device) -> bool {
        let (mut ledger, mut inventory) = (self.world.ledger.clone(), self.world.inventory.clone());
        for (_, lease) in leases {
            let nobody = Process { pid: 0, start_time: 0 };
            if let Some(lease) = ledger.lease_mut(&lease.id) {
                let step = SuspendStep::Suspended;
                let processes = Vec::new();
                lease.suspension =
                    Some(Suspension { step, owner: nobody, processes, since_ms: 0, on_demand: true });
            }
        }
        let freed = leases.iter().map(|(_, lease)| self.used(lease, gpu)).fold(0, u64::saturating_add);
        let is_out = |found: Option<&Lease>| found.is_some_and(Lease::is_suspended);
        for device in inventory.devices.iter_mut().filter(|device| device.uuid == gpu.uuid) {
            device.processes.retain(|process| !is_out(ledger.lease_of_process(process)));
            device.memory_free_bytes =
                device.memory_free_bytes.saturating_add(freed).min(device.memory_bytes);
        }
        let world = World { inventory: &inventory, ledger: &ledger, ..self.world };
        find(self.request, self.id, world).is_ok_and(|placement| (self.allows)(&placement))
    }
}

/// `chosen` and the first of the `largest` that make it so many leases, so many of them busy. More or fewer: there are no such.
fn complete<'l>(
    chosen: &[Ranked<'l>],
    largest: &[Ranked<'l>],
    (count, busy): (usize, usize),
) -> Vec<Ranked<'l>> {
    let mut all = chosen.to_vec();
    let number = |all: &[Ranked<'_>], is_busy| all.iter().filter(|(rank, _)| rank.is_busy == is_busy).count();
    for one in largest {
        let most = if one.0.is_busy { busy } else { count - busy };
        if !all.contains(one) && number(&all, one.0.is_busy) < most {
            all.push(*one);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::fixture::{GIB, device, host, request};
    use super::super::tests::ledger;
    use super::*;
    use crate::ledger::fixture::lease;
    use crate::share::{Devices, Memory, Mode, Selector, Suspend};

    /// Lease `n` on `GPU-<gpu>` has `gib` booked.
    fn on(n: u64, gpu: u32, gib: u64, suspend: Suspend) -> Lease {
        Lease {
            state: LeaseState::Active,
            memory_bytes: Some(gib * GIB),
            suspend,
            ..lease(n, &format!("GPU-{gpu}"))
        }
    }

    fn asked(gib: u64) -> Request {
        let memory = Some(Memory::Bytes(gib * GIB));
        Request { memory, suspend: Suspend::Allow, ..request(Mode::TimeSlice) }
    }

    /// The numbers of the leases. Those in `busy` compute; lease 9 came first, lease 1 last.
    fn chosen(request: &Request, gpus: u32, leases: Vec<Lease>, busy: &[u64]) -> Option<Vec<u64>> {
        let (inventory, config) = (host((0..gpus).map(device).collect()), Config::default());
        let number = |id: &LeaseId| u64::from_str_radix(id.as_str(), 16).unwrap();
        let judge = |lease: &Lease| {
            let number = number(&lease.id);
            Some(Suspendable { is_busy: busy.contains(&number), since_ms: 100 - number })
        };
        let new = LeaseId::parse("00000000000000ff").unwrap();
        let ledger = ledger(leases);
        let found = whom_to_suspend(request, &new, (&inventory, &ledger, &config), &|_| true, &judge)?;
        Some(found.iter().map(number).collect())
    }

    #[test]
    fn a_start_may_find_room_where_the_last_one_is_on_its_way_back() {
        let (inventory, config) = (host(vec![device(0)]), Config::default());
        let new = LeaseId::parse("00000000000000ff").unwrap();
        let may = |step| {
            let owner = Process { pid: 1, start_time: 1 };
            let own = Suspension { step, owner, processes: Vec::new(), since_ms: 0, on_demand: true };
            let held = Lease { suspension: Some(own), resumed_ms: Some(0), ..on(1, 0, 60, Suspend::Allow) };
            may_make_room(&asked(60), &new, (&inventory, &ledger(vec![held]), &config), 60_000)
        };
        assert!(may(SuspendStep::Resuming) && may(SuspendStep::Suspending));
        assert!(!may(SuspendStep::Suspended), "there is room");
    }

    #[test]
    fn the_fewest_go_idle_ones_first_and_then_those_that_have_been_there_longest() {
        let allow = |n, gib| on(n, 0, gib, Suspend::Allow);
        let two = || vec![allow(1, 40), allow(2, 40)];
        assert_eq!(chosen(&asked(10), 1, two(), &[]), None, "there is room");
        assert_eq!(chosen(&asked(40), 1, two(), &[]), Some(vec![2]));
        assert_eq!(chosen(&asked(40), 1, two(), &[2]), Some(vec![1]));
        assert_eq!(chosen(&asked(90), 1, two(), &[]), Some(vec![2, 1]));
        assert_eq!(chosen(&asked(100), 1, two(), &[]), None, "more than can be booked");
        let small = || vec![allow(1, 60), allow(2, 15), allow(3, 15)];
        assert_eq!(chosen(&asked(60), 1, small(), &[1]), Some(vec![1]), "one that computes, not two");
        assert_eq!(chosen(&asked(20), 1, small(), &[]), Some(vec![3]));
        let many = || vec![allow(1, 15), allow(2, 15), allow(3, 30), allow(4, 25), allow(5, 1)];
        assert_eq!(
            chosen(&asked(71), 1, many(), &[3, 4]),
            Some(vec![2, 1, 3]),
            "of three, one that computes"
        );
    }

    #[test]
    fn one_gpu_is_emptied_and_no_container_that_does_not_allow_it() {
        let never = on(1, 0, 60, Suspend::Never);
        assert_eq!(chosen(&asked(60), 1, vec![never.clone(), on(2, 0, 30, Suspend::Allow)], &[]), None);
        let both =
            || vec![on(1, 0, 60, Suspend::Allow), on(2, 0, 30, Suspend::Allow), on(3, 1, 70, Suspend::Allow)];
        assert_eq!(chosen(&asked(90), 2, both(), &[3]), Some(vec![3]));
        let named = Request { devices: Devices::These(vec![Selector::Index(0)]), ..asked(90) };
        assert_eq!(chosen(&named, 2, both(), &[]), Some(vec![2, 1]));
        let mut other = never;
        (other.mode, other.suspend) = (Mode::Mps, Suspend::Allow);
        assert_eq!(chosen(&asked(60), 1, vec![other], &[]), None, "the driver suspends nothing under MPS");
    }

    #[test]
    fn a_whole_gpu_is_made_free_of_all_of_its_containers() {
        let leases = || vec![on(1, 0, 1, Suspend::Allow), on(2, 0, 1, Suspend::AllowMany)];
        let whole = request(Mode::Exclusive);
        assert_eq!(chosen(&whole, 1, leases(), &[]), Some(vec![2, 1]));
        let mut starting = leases();
        starting[0].state = LeaseState::Pending;
        assert_eq!(chosen(&whole, 1, starting, &[]), None);
    }

    proptest! {
        /// Whatever runs: only those go that allow it and are judged to, all of one GPU, and not one fewer would do.
        #[test]
        fn nobody_goes_in_vain(
            leases in prop::collection::vec((0_u32..2, 1_u64..50, 0_u8..3, any::<bool>()), 0..9),
            gib in 1_u64..99,
        ) {
            let all: Vec<Lease> = (1..).zip(&leases).map(|(n, (gpu, gib, kind, _))| {
                on(n, *gpu, *gib, [Suspend::Never, Suspend::Allow, Suspend::AllowMany][usize::from(*kind)])
            }).collect();
            let may = |lease: &Lease| {
                let number = usize::from_str_radix(lease.id.as_str(), 16).unwrap();
                leases[number - 1].3
            };
            let judge = |lease: &Lease| may(lease).then_some(Suspendable { is_busy: false, since_ms: 0 });
            let (inventory, config) = (host(vec![device(0), device(1)]), Config::default());
            let (new, before) = (LeaseId::parse("00000000000000ff").unwrap(), ledger(all));
            let request = asked(gib);
            let suspend = |ids: &[LeaseId]| {
                let mut after = before.clone();
                after.leases.retain(|lease| !ids.contains(&lease.id));
                find(&request, &new, World { inventory: &inventory, ledger: &after, config: &config }).is_ok()
            };
            let found = whom_to_suspend(&request, &new, (&inventory, &before, &config), &|_| true, &judge);
            let Some(found) = found else {
                let of_one = |gpu: &str| {
                    let may = |lease: &&Lease| lease.devices[0] == gpu && !lease.suspend.is_never() && may(lease);
                    before.leases.iter().filter(may).map(|lease| lease.id.clone()).collect::<Vec<_>>()
                };
                let none = suspend(&[]) || !(suspend(&of_one("GPU-0")) || suspend(&of_one("GPU-1")));
                prop_assert!(none);
                return Ok(());
            };
            prop_assert!(suspend(&found) && !suspend(&[]));
            for id in &found {
                let lease = before.lease(id).unwrap();
                prop_assert!(!lease.suspend.is_never() && may(lease));
                prop_assert_eq!(&lease.devices, &before.lease(&found[0]).unwrap().devices);
                let rest: Vec<_> = found.iter().filter(|other| *other != id).cloned().collect();
                prop_assert!(!suspend(&rest), "{:?} goes in vain", id);
            }
        }
    }
}
