//! Whether a container that is suspended, or is to be moved, has room on a device.

use super::bookings::{check_memory, check_room, check_use};
use super::select::{build_want, check_closed, check_compute_mode};
use super::{Misfit, Refusal, World};
use crate::config::Config;
use crate::inventory::{Inventory, LeftOut};
use crate::ledger::{Lease, Ledger};
use crate::request::Request;
use crate::share::{MIB, Memory};
use crate::text::{add_fix, safe};

/// Checks whether there is room on device `uuid` for `lease`, which books nothing there, with `bytes` of memory: by what
/// administrators decided, the use of the device, the bookings, and the memory that NVML last reported free.
///
/// # Errors
/// Why there is none.
pub fn check_resume(
    lease: &Lease,
    uuid: &str,
    bytes: u64,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Result<(), Box<Refusal>> {
    let Some(device) = inventory.device(uuid) else {
        let gone = inventory.left_out.iter().find(|gone| gone.gpu.uuid == uuid);
        let message = gone.map_or_else(
            || format!("GPU {} is not served now: `sublet status` says why", safe(uuid)),
            LeftOut::sentence,
        );
        return Err(Box::new(Refusal { temporary: true, left_out: true, ..Refusal::never(message) }));
    };
    let asked =
        lease.request_of_return(bytes).map_err(|error| Box::new(Refusal::never(error.to_string())))?;
    // Also one that has its device whole: the driver's word counts.
    let whole = bytes.max(lease.memory_bytes.unwrap_or(0)).div_ceil(MIB) * MIB;
    let request = Request { memory: Some(Memory::Bytes(whole)), ..asked };
    let world = World { inventory, ledger, config };
    let want = build_want(&request, &lease.id, device, false, world);
    let bookings = want.account.bookings();
    let checked = check_closed(&want, world)
        .and_then(|()| check_compute_mode(&want, ledger))
        .and_then(|()| check_use(&want, &bookings, world))
        .and_then(|()| check_room(&want, &bookings, world))
        .and_then(|()| check_memory(&want, world).map(drop));
    checked.map_err(|Misfit { reason, temporary, refresh }| {
        let message = format!("{} {reason}", device.label());
        let has_way_out = !temporary || message.contains("fix: ");
        let waits = if lease.is_suspended() { ", or wait (--wait)" } else { " first" };
        let waits = &format!("end, move or suspend another container there{waits}");
        let refusal = Refusal::never(if has_way_out { message } else { add_fix(&message, waits) });
        Box::new(Refusal { temporary, refresh_first: refresh, ..refusal })
    })
}

/// Why the suspended container of `lease` does not come back, if it is not for a lack of room: what was tried last, or its GPU.
pub fn why_kept_away(
    lease: &Lease,
    (inventory, ledger, config): (&Inventory, &Ledger, &Config),
) -> Option<String> {
    let own = lease.suspension.as_ref().filter(|_| lease.is_suspended())?;
    if let Some(why) = lease.why_left_alone() {
        return Some(why.to_owned());
    }
    let checked = check_resume(lease, lease.devices.first()?, own.bytes(), inventory, ledger, config);
    checked.err().filter(|refusal| refusal.left_out || !refusal.temporary).map(|refusal| refusal.message)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::bookings::bookings;
    use super::super::fixture::{GIB, device, host};
    use super::super::tests::ledger;
    use super::*;
    use crate::config::{DeviceRule, Use};
    use crate::inventory::ComputeMode;
    use crate::ledger::fixture::lease;
    use crate::ledger::{LeaseState, SuspendStep, SuspendedProcess, Suspension};
    use crate::process::Process;
    use crate::share::Mode;

    /// Lease 1 is suspended with 20 GiB; its neighbours hold `gib` each.
    fn suspended(neighbours: &[(Mode, u64)]) -> Ledger {
        let owner = Process { pid: 1, start_time: 1 };
        let step = SuspendStep::Suspended;
        let out = Suspension { step, owner, processes: vec![], since_ms: 0, on_demand: false };
        let mut leases =
            vec![Lease { state: LeaseState::Active, suspension: Some(out), ..lease(1, "GPU-0") }];
        for (number, (mode, gib)) in (2..).zip(neighbours) {
            let memory_bytes = (*gib > 0).then_some(gib * GIB);
            leases.push(Lease { mode: *mode, memory_bytes, ..lease(number, "GPU-0") });
        }
        ledger(leases)
    }

    fn why(neighbours: &[(Mode, u64)], change: fn(&mut Inventory, &mut Config)) -> Option<(String, bool)> {
        let (mut inventory, mut config) = (host(vec![device(0)]), Config::default());
        change(&mut inventory, &mut config);
        let ledger = suspended(neighbours);
        let checked = check_resume(&ledger.leases[0], "GPU-0", 20 * GIB, &inventory, &ledger, &config);
        checked.err().map(|refusal| (refusal.message, refusal.temporary))
    }

    #[test]
    fn it_needs_its_memory_a_turn_and_a_device_of_its_use() {
        let as_is = |_: &mut Inventory, _: &mut Config| ();
        assert_eq!(why(&[(Mode::TimeSlice, 79)], as_is), None);
        let full = why(&[(Mode::TimeSlice, 80)], as_is).unwrap();
        assert!(
            full.0.starts_with("GPU 0 has 19968 MiB left to book, 20 GiB needed; fix: ") && full.1,
            "{full:?}"
        );
        let taken = why(&[(Mode::Exclusive, 0)], as_is).unwrap();
        assert!(taken.0.contains("is taken whole") && taken.1, "{taken:?}");
        let turns = why(&[(Mode::TimeSlice, 0)], |_, config| config.limits.time_slice_max = 1).unwrap();
        assert!(turns.0.contains("time_slice_max = 1"), "{turns:?}");
        let used = why(&[], |inventory, _| inventory.devices[0].memory_free_bytes = 19 * GIB).unwrap();
        assert!(used.0.contains("the driver says so") && used.1, "{used:?}");
        let mode = why(&[], |inventory, _| inventory.devices[0].compute_mode = ComputeMode::ExclusiveProcess);
        assert!(mode.unwrap().0.contains("compute mode"));
        let in_mig_mode = why(&[], |inventory, _| inventory.devices[0].mig_enabled = true).unwrap();
        assert!(in_mig_mode.0.contains("is in MIG mode") && !in_mig_mode.1, "{in_mig_mode:?}");
        let gone = why(&[], |inventory, _| inventory.devices.clear()).unwrap();
        assert!(gone.0.contains("not served now") && gone.1, "{gone:?}");
        let (inventory, config) = (host(vec![device(0)]), Config::default());
        let drained = Ledger { drained: vec!["GPU-0".into()], ..suspended(&[]) };
        let refusal =
            check_resume(&drained.leases[0], "GPU-0", GIB, &inventory, &drained, &config).unwrap_err();
        assert!(refusal.message.contains("sublet undrain 0") && !refusal.temporary, "{refusal:?}");
    }

    #[test]
    fn a_device_that_takes_nothing_keeps_it_away_and_a_full_one_lets_it_wait() {
        let (inventory, mut config) = (host(vec![device(0), device(1)]), Config::default());
        let why = |ledger: &Ledger, inventory: &Inventory, config: &Config| {
            why_kept_away(&ledger.leases[0], (inventory, ledger, config))
        };
        let (free, full) = (suspended(&[]), suspended(&[(Mode::Exclusive, 0)]));
        assert_eq!([&free, &full].map(|ledger| why(ledger, &inventory, &config)), [None, None]);
        let drained = Ledger { drained: vec!["GPU-0".into()], ..free.clone() };
        assert!(why(&drained, &inventory, &config).unwrap().starts_with("GPU 0 is drained"));
        let mut sick = inventory.clone();
        let (gpu, why_out) = (sick.devices.remove(0), "Xid 79".to_owned());
        sick.left_out.push(LeftOut { gpu, mig: Vec::new(), why: why_out, lost: false });
        assert_eq!(why(&free, &sick, &config).unwrap(), "GPU 0 is left out: Xid 79");
        let (matches, fixed_use) = ("0".to_owned(), Some(Use::None));
        config.device = vec![DeviceRule { matches, name: None, fixed_use, time_slice: None }];
        assert!(why(&free, &inventory, &config).unwrap().contains("use = \"none\""));
        let mut paused = free.clone();
        paused.back_off(&free.leases[0].id, Duration::from_secs(30), "it is paused");
        assert_eq!(why(&paused, &inventory, &Config::default()).unwrap(), "it is paused");
        let on_gpu = Ledger { leases: vec![Lease { suspension: None, ..free.leases[0].clone() }], ..drained };
        assert_eq!(why(&on_gpu, &inventory, &config), None, "it is not suspended");
    }

    /// What moves has both devices' room until it is there.
    #[test]
    fn one_that_moves_needs_room_on_the_other_device_and_keeps_its_own() {
        let (inventory, config, bytes) = (host(vec![device(0), device(1)]), Config::default(), 20 * GIB);
        let beside = Lease { memory_bytes: Some(85 * GIB), ..lease(2, "GPU-1") };
        let mine = Lease { state: LeaseState::Active, ..lease(1, "GPU-0") };
        let mut ledger = ledger(vec![mine, beside]);
        let check =
            |ledger: &Ledger| check_resume(&ledger.leases[0], "GPU-1", bytes, &inventory, ledger, &config);
        let full = check(&ledger).unwrap_err();
        assert!(
            full.temporary && full.message.ends_with("another container there first"),
            "{}",
            full.message
        );
        ledger.leases[1].memory_bytes = Some(60 * GIB);
        check(&ledger).unwrap();
        let id = ledger.leases[0].id.clone();
        let processes = vec![SuspendedProcess { process: Process { pid: 1, start_time: 1 }, bytes }];
        ledger.begin_suspending(&id, Process::current().unwrap(), processes, Some("GPU-1")).unwrap();
        for (uuid, booked) in [("GPU-0", 20), ("GPU-1", 80)] {
            let of = bookings(inventory.device(uuid).unwrap(), &ledger, &config);
            assert_eq!(of.memory_booked, booked * GIB, "{uuid}");
        }
    }
}
