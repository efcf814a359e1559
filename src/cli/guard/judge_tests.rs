use super::*;
use sublet_core::ledger::fixture::lease;
use sublet_core::ledger::{DaemonKey, Init, Job, LeaseState, SuspendStep, SuspendedProcess, Suspension};
use sublet_core::share::{Guarding, Suspend};

const GPU: &str = "GPU-1";
const MIB: u64 = 1 << 20;
/// The lease whose container has ended.
const GONE: u64 = 9;

fn rules() -> Guard {
    Guard { memory_tolerance: 100 * MIB, ..Guard::default() }
}

/// Lease number `n` on a shared server, with 1000 MiB and one process.
fn shared(n: u64) -> Lease {
    let server = Some(DaemonKey(GPU.to_owned()));
    let state = LeaseState::Active;
    let init = Some(Init {
        process: Process { pid: 1, start_time: n },
        pid_namespace: n,
        cgroup: None,
        cgroup_inode: None,
    });
    Lease { mode: Mode::Mps, daemon: server, memory_bytes: Some(1000 * MIB), state, init, ..lease(n, GPU) }
}

fn ledger(leases: Vec<Lease>) -> Ledger {
    Ledger { leases, ..Ledger::empty("boot") }
}

/// A client of `of`'s server, younger the higher its pid.
fn client(pid: i32, mib: u64, of: &Lease) -> Holder {
    Holder {
        process: Process { pid, start_time: u64::from(pid.unsigned_abs()) },
        name: "python3".to_owned(),
        memory_bytes: Some(mib * MIB),
        is_server: false,
        is_client: true,
        lease: Some(of.id.clone()),
    }
}

fn look(holders: Vec<Holder>) -> Vec<Look> {
    let gone = [shared(GONE).id].into();
    vec![Look { device: GPU.to_owned(), most_clients: Some(4), knows_clients: true, gone, holders }]
}

/// The judgements of `looks`, one after the other, each as (offence, pid).
fn judged(looks: &[Vec<Look>], ledger: &Ledger) -> Vec<Vec<(Offence, i32)>> {
    let mut judge = Judge::default();
    let brief = |verdict: Verdict| (verdict.offence, verdict.holder.process.pid);
    looks.iter().map(|look| judge.judge(look, ledger, &rules()).into_iter().map(brief).collect()).collect()
}

#[test]
fn each_of_several_devices_is_held_to_the_share_by_itself() {
    let both = Lease { devices: vec![GPU.to_owned(), "GPU-2".to_owned()], ..shared(1) };
    let ledger = ledger(vec![both.clone()]);
    let looks = |first: Vec<Holder>, second: Vec<Holder>| {
        let mut looks = look(first);
        looks.push(Look { device: "GPU-2".to_owned(), ..look(second).remove(0) });
        looks
    };
    // One worker for each GPU: 2000 MiB and two processes in all.
    let within = || looks(vec![client(10, 1000, &both)], vec![client(11, 1000, &both)]);
    assert_eq!(judged(&[within(), within()], &ledger), [[], []] as [[_; 0]; 2]);
    let past = || looks(vec![client(10, 1000, &both)], vec![client(11, 1200, &both)]);
    assert_eq!(judged(&[past(), past()], &ledger), [vec![], vec![(Offence::Memory, 11)]]);
}

#[test]
fn a_process_that_begins_to_compute_while_its_container_is_suspended_is_acted_on_and_no_other() {
    let at = |step| {
        let owner = Process { pid: 1, start_time: 1 };
        let processes =
            vec![SuspendedProcess { process: client(10, 0, &shared(1)).process, bytes: 500 * MIB }];
        let suspension = Some(Suspension { step, owner, processes, since_ms: 0, on_demand: false });
        Lease { mode: Mode::TimeSlice, daemon: None, memory_bytes: None, suspension, ..shared(1) }
    };
    let plain = |pid| Holder { is_client: false, ..client(pid, 500, &shared(1)) };
    let seen = || look(vec![plain(10), plain(11)]);
    let found = |lease: Lease| judged(&[seen(), seen()], &ledger(vec![lease]));
    assert_eq!(found(at(SuspendStep::Suspended)), [vec![], vec![(Offence::Suspended, 11)]]);
    assert_eq!(found(at(SuspendStep::Adding)), found(at(SuspendStep::Suspended)));
    for step in [SuspendStep::Suspending, SuspendStep::Resuming] {
        assert_eq!(found(at(step)), [[], []] as [[_; 0]; 2], "{step:?}");
    }
}

#[test]
fn a_process_beside_its_container_is_ended_and_one_that_moves_is_not() {
    let plain = |pid| Holder { is_client: false, ..client(pid, 500, &shared(1)) };
    let slice = Lease { mode: Mode::TimeSlice, daemon: None, memory_bytes: None, ..shared(1) };
    let elsewhere = || {
        let mut looks = look(vec![]);
        looks.push(Look { device: "GPU-2".to_owned(), ..look(vec![plain(10), plain(11)]).remove(0) });
        looks
    };
    let found = |lease: Lease| judged(&[elsewhere(), elsewhere()], &ledger(vec![lease]));
    let moved = Lease { known: vec!["GPU-2".into()], ..slice.clone() };
    let both = vec![(Offence::Elsewhere, 10), (Offence::Elsewhere, 11)];
    assert_eq!(found(moved), [vec![], both]);
    let processes = vec![SuspendedProcess { process: plain(10).process, bytes: 500 * MIB }];
    let (step, owner) = (SuspendStep::Resuming, Process { pid: 1, start_time: 1 });
    let suspension = Some(Suspension { step, owner, processes, since_ms: 0, on_demand: false });
    let devices = vec!["GPU-1".into(), "GPU-2".into()];
    assert_eq!(found(Lease { devices, suspension, ..slice }), [vec![], vec![(Offence::Elsewhere, 11)]]);
}

#[test]
fn whoever_keeps_to_the_share_is_left_alone() {
    let one = shared(1);
    let slice = Lease { mode: Mode::TimeSlice, daemon: None, memory_bytes: None, ..shared(2) };
    let server = Holder { is_server: true, is_client: false, lease: None, ..client(3, 66, &one) };
    let alone = Holder { is_client: false, ..client(20, 90_000, &slice) };
    let seen = || look(vec![client(10, 1100, &one), server.clone(), alone.clone()]);
    let ledger = ledger(vec![one.clone(), slice]);
    assert_eq!(judged(&[seen(), seen(), seen()], &ledger), [[], [], []] as [[_; 0]; 3]);
}

#[test]
fn memory_counts_for_the_container_and_ends_the_largest_of_those_that_grew() {
    let (one, two) = (Lease { processes: 2, ..shared(1) }, shared(2));
    let ledger = ledger(vec![one.clone(), two.clone()]);
    let neighbour = client(30, 1000, &two);
    let quiet = || look(vec![client(10, 900, &one), neighbour.clone()]);
    let grown = |mib| look(vec![client(10, 900, &one), client(11, mib, &one), neighbour.clone()]);
    assert_eq!(
        judged(&[quiet(), grown(201), grown(201)], &ledger)[1..],
        [vec![], vec![(Offence::Memory, 10)]]
    );
    // Process 11 keeps growing, so it is chosen although process 10 is larger.
    assert_eq!(judged(&[quiet(), grown(300), grown(400)], &ledger)[2], [(Offence::Memory, 11)]);
    assert_eq!(judged(&[quiet(), grown(200), grown(200)], &ledger)[2], []);
    // As many as needed, and no more.
    let many = || look((40..48).map(|pid| client(pid, 300, &one)).collect());
    let ended = judged(&[many(), many()], &ledger).remove(1);
    let ended = ended.into_iter().filter(|(offence, _)| *offence == Offence::Memory);
    assert_eq!(ended.map(|(_, pid)| pid).collect::<Vec<_>>(), [47, 46, 45, 44, 43]);
}

#[test]
fn a_time_slice_share_that_may_be_suspended_is_held_to_its_memory() {
    let one = Lease { mode: Mode::TimeSlice, daemon: None, suspend: Suspend::Allow, ..shared(1) };
    let ledger = ledger(vec![one.clone()]);
    let seen = |mib| look(vec![Holder { is_client: false, ..client(11, mib, &one) }]);
    assert_eq!(judged(&[seen(1200), seen(1200)], &ledger), [vec![], vec![(Offence::Memory, 11)]]);
    assert_eq!(judged(&[seen(1100), seen(1100)], &ledger), [[], []] as [[_; 0]; 2], "within the tolerance");
}

#[test]
fn a_moment_past_the_line_is_no_offence() {
    let one = shared(1);
    let ledger = ledger(vec![one.clone()]);
    let ending = look(vec![client(10, 1000, &one), client(11, 1000, &one)]);
    let after = || look(vec![client(11, 1000, &one)]);
    assert_eq!(judged(&[ending.clone(), after(), ending, after()], &ledger), vec![vec![]; 4]);
}

#[test]
fn a_mig_instance_limits_its_own_memory() {
    let one = Lease { mode: Mode::Mig, daemon: None, ..shared(1) };
    let ledger = ledger(vec![one.clone()]);
    let seen = || look(vec![Holder { is_client: false, ..client(10, 5000, &one) }]);
    assert_eq!(judged(&[seen(), seen()], &ledger), vec![vec![]; 2]);
}

#[test]
fn outside_its_server_without_a_lease_or_left_behind() {
    let one = shared(1);
    let gone = Lease { state: LeaseState::Ending, ..shared(GONE) };
    let ledger = ledger(vec![one.clone(), gone.clone()]);
    let beside = Holder { is_client: false, ..client(10, 1, &one) };
    let left = client(20, 1, &gone);
    let stranger = Holder { lease: None, ..client(30, 1, &one) };
    let seen = || look(vec![beside.clone(), left.clone(), stranger.clone()]);
    let found = [(Offence::Bypass, 10), (Offence::Left, 20), (Offence::Stranger, 30)];
    assert_eq!(judged(&[seen(), seen()], &ledger), [vec![], found.to_vec()]);
    // It may belong to a container that is starting.
    let starting = Lease { init: None, ..shared(3) };
    let starts = Ledger { leases: vec![one.clone(), gone.clone(), starting], ..ledger.clone() };
    assert_eq!(judged(&[seen(), seen()], &starts)[1], found[..2]);
    // For a while. And a user who takes a share and never binds it hides nobody.
    let mut judge = Judge::default();
    let mut pids = |ledger: &Ledger| {
        let found = judge.judge(&seen(), ledger, &rules());
        for since in judge.starting.values_mut() {
            *since = since.checked_sub(STARTING).unwrap_or(*since);
        }
        found.into_iter().map(|verdict| verdict.holder.process.pid).collect::<Vec<_>>()
    };
    assert_eq!([pids(&starts), pids(&starts), pids(&starts)], [vec![], vec![10, 20], vec![10, 20, 30]]);
    let mut brokered = starts.clone();
    brokered.leases[2].brokered = true;
    assert_eq!(judged(&[seen(), seen()], &brokered)[1], found);
    // Another process with the same pid is not suspected yet.
    let other = Holder { process: Process { pid: 10, start_time: 99 }, ..beside.clone() };
    let seen = |holder: &Holder| look(vec![holder.clone()]);
    assert_eq!(judged(&[seen(&beside), seen(&other)], &ledger), vec![vec![]; 2]);
}

#[test]
fn surplus_clients_end_only_if_their_places_are_needed_and_the_youngest_first() {
    use Action::{Report, Terminate};
    let (one, two) = (shared(1), Lease { processes: 2, ..shared(2) });
    let ledger = ledger(vec![one.clone(), two.clone()]);
    let of_one = |count: i32| (10..10 + count).map(|pid| client(pid, 1, &one));
    let of_two = |count: i32| (30..30 + count).map(|pid| client(pid, 1, &two));
    let twice = |holders: Vec<Holder>| {
        let mut judge = Judge::default();
        judge.judge(&look(holders.clone()), &ledger, &rules());
        let found = judge.judge(&look(holders), &ledger, &rules());
        assert!(found.iter().all(|verdict| verdict.offence == Offence::Clients));
        found.iter().map(|verdict| (verdict.action, verdict.holder.process.pid)).collect::<Vec<_>>()
    };
    // There are four places. Two belong to the other container, whether it uses them or not.
    assert_eq!(twice(of_one(1).chain(of_two(2)).collect()), []);
    assert_eq!(twice(of_one(2).collect()), [(Report, 11)]);
    assert_eq!(twice(of_one(4).collect()), [(Terminate, 13), (Terminate, 12), (Report, 11)]);
    assert_eq!(twice(of_one(2).chain(of_two(2)).collect()), [(Report, 11)]);
    assert_eq!(twice(of_one(2).chain(of_two(3)).collect()), [(Terminate, 11), (Report, 32)]);
}

#[test]
fn a_lasting_surplus_is_asked_for_anew_only_at_first() {
    let one = shared(1);
    let ledger = ledger(vec![one.clone()]);
    let seen = |pids: std::ops::Range<i32>| look(pids.map(|pid| client(pid, 1, &one)).collect());
    let mut judge = Judge::default();
    let mut unsure = |pids| {
        judge.judge(&seen(pids), &ledger, &rules());
        judge.unsure.contains(GPU)
    };
    assert_eq!([unsure(10..11), unsure(10..12), unsure(10..12), unsure(10..13)], [false, true, false, false]);
    assert_eq!([unsure(10..10), unsure(10..12)], [false, true], "it is another time");
}

#[test]
fn strict_rules_want_no_place_to_be_missing() {
    let two = Lease { processes: 2, ..shared(2) };
    let ledger = ledger(vec![two.clone()]);
    let rules = Guard { strict_clients: true, ..rules() };
    let mut judge = Judge::default();
    let seen = look((30..33).map(|pid| client(pid, 1, &two)).collect());
    assert!(judge.judge(&seen, &ledger, &rules).is_empty());
    let found = judge.judge(&seen, &ledger, &rules);
    let brief: Vec<_> = found.iter().map(|verdict| (verdict.offence, verdict.holder.process.pid)).collect();
    assert_eq!(brief, [(Offence::Clients, 32)]);
    assert_eq!((found[0].used, found[0].allowed), (3, 2));
}

#[test]
fn an_offence_that_is_only_reported_is_found_all_the_same() {
    let one = shared(1);
    let ledger = ledger(vec![one.clone()]);
    let rules = Guard { memory: Action::Report, ..rules() };
    let mut judge = Judge::default();
    let seen = look(vec![client(10, 2000, &one)]);
    assert!(judge.judge(&seen, &ledger, &rules).is_empty());
    let found = judge.judge(&seen, &ledger, &rules).remove(0);
    assert_eq!((found.action, found.used, found.allowed), (Action::Report, 2000 * MIB, 1000 * MIB));
}

#[test]
fn if_the_driver_does_not_list_clients_no_process_is_outside() {
    let one = shared(1);
    let ledger = ledger(vec![one.clone()]);
    let seen = || {
        let mut looks = look(vec![Holder { is_client: false, ..client(10, 1, &one) }]);
        looks[0].knows_clients = false;
        looks
    };
    assert_eq!(judged(&[seen(), seen()], &ledger)[1], []);
}

#[test]
fn a_container_marked_as_ending_keeps_its_processes_until_it_has_ended() {
    let one = Lease { state: LeaseState::Ending, ..shared(1) };
    let ledger = ledger(vec![one.clone()]);
    let seen = || look(vec![client(10, 1, &one)]);
    assert_eq!(judged(&[seen(), seen()], &ledger)[1], []);
}

#[test]
fn on_a_device_of_another_lease_a_container_is_a_stranger() {
    let elsewhere = Lease { devices: vec!["GPU-2".to_owned()], ..shared(2) };
    let ledger = ledger(vec![shared(1), elsewhere.clone()]);
    let seen = || look(vec![client(10, 1, &elsewhere)]);
    assert_eq!(judged(&[seen(), seen()], &ledger)[1], [(Offence::Stranger, 10)]);
}

#[test]
fn a_share_is_held_as_it_says_and_no_less_than_the_configuration() {
    use Action::{Container, Report, Terminate};
    let found = |guard: Option<Guarding>, configured: Action| {
        let one = Lease { guard, ..shared(1) };
        let ledger = ledger(vec![one.clone()]);
        let rules = Guard { memory: configured, bypass: configured, ..rules() };
        let seen = || look(vec![client(10, 2000, &one), Holder { is_client: false, ..client(11, 1, &one) }]);
        let mut judge = Judge::default();
        judge.judge(&seen(), &ledger, &rules);
        judge.judge(&seen(), &ledger, &rules).into_iter().map(|verdict| verdict.action).collect::<Vec<_>>()
    };
    for (guard, configured, expected) in [
        (None, Terminate, Terminate),
        (Some(Guarding::AtLeast(Container)), Terminate, Container),
        (Some(Guarding::AtLeast(Terminate)), Container, Container),
        (Some(Guarding::AtLeast(Terminate)), Report, Terminate),
        (Some(Guarding::Exactly(Report)), Container, Report),
    ] {
        assert_eq!(found(guard, configured), [expected; 2], "{guard:?} where [guard] says {configured}");
    }
}

#[test]
fn of_ten_thousand_processes_each_is_judged_once() {
    let (one, two) = (shared(1), shared(2));
    let ledger = ledger(vec![one.clone(), two.clone()]);
    let seen = || {
        let beside = (10..10_010).map(|pid| Holder { is_client: false, ..client(pid, 0, &one) });
        look(beside.chain([client(5, 900, &two)]).collect())
    };
    let found = judged(&[seen(), seen()], &ledger).remove(1);
    let expected: Vec<_> = (10..10_010).map(|pid| (Offence::Bypass, pid)).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_job_and_its_containers_share_the_limits_of_the_job() {
    let slurm =
        |step: Option<&str>| Some(Job { id: 7, step: step.map(str::to_owned), uid: 1000, cgroup_inode: 1 });
    let job = Lease { job: slurm(None), ..shared(1) };
    let within = Lease { job: slurm(Some("0")), within: Some(job.id.clone()), ..shared(2) };
    let ledger = ledger(vec![job.clone(), within.clone()]);
    let both = |bare: u64, contained: u64| look(vec![client(10, bare, &job), client(11, contained, &within)]);
    assert_eq!(judged(&[both(500, 500), both(500, 500)], &ledger)[1], [(Offence::Clients, 11)]);
    // Neither is over its own limit, the job is: the younger one has grown last.
    let found = judged(&[both(600, 10), both(600, 600)], &ledger);
    assert!(!found[1].contains(&(Offence::Memory, 11)), "{found:?}");
    let found = judged(&[both(600, 10), both(600, 600), both(600, 700)], &ledger);
    assert!(found[2].contains(&(Offence::Memory, 11)), "{found:?}");
    assert!(!found[2].contains(&(Offence::Memory, 10)), "{found:?}");
}
