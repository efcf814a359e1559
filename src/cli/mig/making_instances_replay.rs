//! The model `dynamic_mig` of tests/model, and [`Making`] itself: from every state in which one can begin, the same
//! calls to the driver, and before each the same ledger. So one that is killed leaves the same as in the model.

use std::collections::HashSet;

use sublet_model::Mutation;
use sublet_model::checker::visit;
use sublet_model::dynamic_mig::{self as model, At, CONTAINERS, Change, DynamicMig, PLACES, State};
use sublet_model::ledger::Life;

use super::super::Mode;
use super::super::fake_driver::{Double, h200, profile};
use super::*;
use sublet_core::ledger::dynamic_instance_fixture::dynamic_instance;
use sublet_core::ledger::fixture::lease;
use sublet_core::ledger::{Init, Lease, LeasedMigDevice, MigChange};
use sublet_core::place::Site;
use sublet_core::process::Process;

const GPU: &str = "GPU-0";
const DEAD: Process = Process { pid: i32::MAX, start_time: 1 };

/// A call that changes something, its place, and the ledger right before it.
type Call = (&'static str, usize, model::Ledger);

/// A driver in memory, and the calls to it.
struct Watched<'a> {
    driver: Double,
    store: &'a Store,
    calls: Vec<Call>,
}

impl Watched<'_> {
    fn note(&mut self, name: &'static str, place: u32) {
        self.calls.push((name, usize::try_from(place).unwrap(), view(&self.store.read().unwrap())));
    }

    fn place(&self, gi: u32) -> u32 {
        self.driver.gpus[0].instances.iter().find(|one| one.gi == gi).unwrap().span.start
    }
}

impl Driver for Watched<'_> {
    fn gpu(&mut self, gpu: &str) -> Answer<Gpu> {
        self.driver.gpu(gpu)
    }

    fn instances(&mut self, gpu: &str) -> Answer<Vec<Instance>> {
        self.driver.instances(gpu)
    }

    fn mode(&mut self, gpu: &str) -> Answer<Option<Mode>> {
        self.driver.mode(gpu)
    }

    fn set_mode(&mut self, _: &str, _: bool) -> Answer<()> {
        unreachable!("no instance needs it")
    }

    fn reset(&mut self, _: &str) -> Answer<()> {
        unreachable!("no instance needs it")
    }

    fn create_instance(&mut self, gpu: &str, profile: u32, span: Span) -> Answer<u32> {
        self.note("create_instance", span.start);
        self.driver.create_instance(gpu, profile, span)
    }

    fn destroy_instance(&mut self, gpu: &str, gi: u32) -> Answer<()> {
        self.note("destroy_instance", self.place(gi));
        self.driver.destroy_instance(gpu, gi)
    }

    fn create_compute(&mut self, gpu: &str, gi: u32, slices: u32, span: Option<Span>) -> Answer<()> {
        self.note("create_compute", self.place(gi));
        self.driver.create_compute(gpu, gi, slices, span)
    }

    fn destroy_compute(&mut self, gpu: &str, gi: u32, ci: u32) -> Answer<()> {
        self.note("destroy_compute", self.place(gi));
        self.driver.destroy_compute(gpu, gi, ci)
    }
}

fn id(container: usize) -> LeaseId {
    LeaseId::parse(&format!("{container:016x}")).unwrap()
}

fn container_of(lease: &LeaseId) -> usize {
    usize::from_str_radix(lease.as_str(), 16).unwrap()
}

fn awaited(container: usize, alive: bool) -> Awaited {
    let owner = if alive { Process::current().unwrap() } else { DEAD };
    Awaited { lease: id(container), container: format!("container-{container}"), owner }
}

/// The ledger, in the model's words.
fn view(ledger: &Ledger) -> model::Ledger {
    let mut view = model::Ledger { under_way: ledger.mig.under_way.is_some(), ..model::Ledger::EMPTY };
    for lease in &ledger.leases {
        let place = usize::try_from(lease.mig_devices[0].placement.unwrap().0).unwrap();
        view.leases[container_of(&lease.id)] = Some(model::Lease { place, init: lease.init.is_some() });
    }
    for instance in &ledger.mig.dynamic_instances {
        view.instances[usize::try_from(instance.placement.0).unwrap()] = Some(model::DynamicInstance {
            gi: instance.gi.is_some(),
            uuid: instance.uuid.is_some(),
            awaited: instance.awaited.as_ref().map(|awaited| container_of(&awaited.lease)),
            going: instance.going,
            emptied: instance.emptied,
        });
    }
    view
}

/// A GPU with the model's places and the instances of `state`.
fn driver(state: &State) -> Double {
    let mut gpu = h200();
    for one in gpu.profiles.iter_mut().filter(|one| one.id == profile("1g.18gb")) {
        one.placements.truncate(PLACES);
    }
    let mut driver = Double::new(vec![gpu]);
    for (start, compute) in (0..).zip(state.driver) {
        let Some(compute) = compute else { continue };
        let gi = driver.create_instance(GPU, profile("1g.18gb"), Span { start, size: 1 }).unwrap();
        if compute {
            driver.create_compute(GPU, gi, 1, None).unwrap();
        }
    }
    driver
}

/// The ledger of `state`.
fn write_ledger(state: &State, driver: &Double, store: &Store) {
    let me = Process::current().unwrap();
    let seen = state.seen();
    let at = |place: usize| {
        let start = u32::try_from(place).unwrap();
        driver.gpus[0].instances.iter().find(|one| one.span.start == start)
    };
    let uuid = |place: usize| at(place).and_then(|one| one.compute.first()).map(|part| part.uuid.clone());
    let instance = |(place, one): (usize, model::DynamicInstance)| DynamicInstance {
        gi: one.gi.then(|| at(place).map_or(9, |one| one.gi)),
        uuid: one.uuid.then(|| uuid(place).unwrap_or_else(|| "MIG-old".into())),
        awaited: one.awaited.map(|container| awaited(container, seen.shims[container])),
        going: one.going,
        emptied: one.emptied,
        ..dynamic_instance(u32::try_from(place).unwrap(), None)
    };
    let lease = |(container, held): (usize, model::Lease)| {
        let place = held.place;
        let uuid = uuid(place).unwrap_or_else(|| "MIG-old".into());
        let placement = Some((u32::try_from(place).unwrap(), 1));
        let gi = at(place).map_or(9, |one| one.gi);
        let on =
            LeasedMigDevice { uuid, gpu: GPU.into(), gi, ci: 0, placement, sm: None, memory_bytes: None };
        let process = if state.lives[container] == Life::Running { me } else { DEAD };
        Lease {
            id: id(container),
            owner: if seen.shims[container] { me } else { DEAD },
            init: held.init.then_some(Init { process, pid_namespace: 0, cgroup: None, cgroup_inode: None }),
            mig_devices: vec![on.clone()],
            ..lease(u64::try_from(container).unwrap(), &on.uuid)
        }
    };
    let there = |all: [Option<model::DynamicInstance>; PLACES]| {
        all.into_iter().enumerate().filter_map(|(place, one)| Some((place, one?)))
    };
    let held =
        state.ledger.leases.into_iter().enumerate().filter_map(|(container, one)| Some((container, one?)));
    let written = store.change(|ledger| {
        ledger.leases = held.map(lease).collect();
        ledger.mig.dynamic_instances = there(state.ledger.instances).map(instance).collect();
        ledger.mig.under_way = state.ledger.under_way.then(|| MigChange { gpus: Vec::new(), owner: me });
    });
    written.unwrap();
}

/// [`Making`] from `state` on: its calls, the ledger at its end, whether it says that it has touched anything,
/// and whether it made the ordered instance.
fn really(state: &State, change: Change, store: &Store) -> (Vec<Call>, model::Ledger, bool, At) {
    let driver = driver(state);
    write_ledger(state, &driver, store);
    let mut driver = Watched { driver, store, calls: Vec::new() };
    let mut making = Making::new(&mut driver, store);
    let left = making.clear(change.order.map(id).as_ref(), &mut |_| {}).unwrap();
    assert_eq!(left, Vec::<String>::new());
    let made = change.order.map_or(Ok(()), |container| {
        let site = Site { gpu: GPU.into(), memory_bytes: 0, sms: 0, most: None };
        let order = Order { sites: vec![site], profile: Some("1g.18gb".into()) };
        making.make(&order, &awaited(container, state.seen().shims[container]), Policy::Binpack)
    });
    let touched = making.touched;
    let at = made.map_or_else(
        |error| {
            assert!(error.temporary, "{error}");
            At::Fail
        },
        |()| At::End,
    );
    (driver.calls, view(&store.read().unwrap()), touched, at)
}

/// The same in the model, where it chooses the same place.
fn expected(
    model: &DynamicMig,
    mut state: State,
    place: Option<usize>,
) -> (Vec<Call>, model::Ledger, bool, At) {
    let mut calls = Vec::new();
    loop {
        let change = state.change.unwrap();
        if matches!(change.at, At::End | At::Fail) {
            return (calls, state.ledger, change.touched, change.at);
        }
        let steps = model.changes(&state);
        let chosen = steps.iter().find(|(step, _)| steps.len() == 1 || Some(step.of) == place);
        let (step, after) = chosen.unwrap();
        if after.driver != state.driver {
            calls.push((step.what, step.of, state.ledger));
        }
        state = *after;
    }
}

/// Every state of `model` in which a change of instances begins, as far as it matters for that.
fn beginnings(model: &DynamicMig) -> Vec<(State, Change)> {
    let (mut found, mut known) = (Vec::new(), HashSet::new());
    visit(model, |state| {
        let Some(change) = state.change.filter(|change| change.at == At::Mark) else { return };
        // The ledger cannot have yet the part that it learns from the runtime's records.
        let learns = |container: usize| {
            let lease = state.ledger.leases[container];
            lease.is_some_and(|lease| !lease.init && state.lives[container] != Life::Never)
        };
        // A process counts if the ledger names it.
        let counts = |container: usize| {
            let ordered = change.order == Some(container);
            let held = state.ledger.leases[container].is_some();
            let shim = ordered || held || state.ledger.is_kept_for(container);
            let lives = held && state.lives[container] == Life::Running;
            (shim && state.seen().shims[container], lives)
        };
        let processes: [(bool, bool); CONTAINERS] = std::array::from_fn(counts);
        let key = (state.ledger, state.driver, change.order, processes);
        if !(0..CONTAINERS).any(learns) && known.insert(key) {
            found.push((*state, change));
        }
    });
    found
}

/// The first state from which the model and [`Making`] do not do the same.
fn difference(model: &DynamicMig) -> Result<usize, String> {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let store = Store::open(dir.path()).unwrap();
    let beginnings = beginnings(model);
    for (state, change) in &beginnings {
        let real = really(state, *change, &store);
        let created = real.0.iter().find(|(name, ..)| *name == "create_instance");
        let expected = expected(model, *state, created.map(|(_, place, _)| *place));
        if real != expected {
            return Err(format!("from {state:#?}\nreal: {real:#?}\nmodel: {expected:#?}"));
        }
    }
    Ok(beginnings.len())
}

fn model_of(mutation: Option<Mutation>) -> DynamicMig {
    DynamicMig { containers: 2, waiter: Some(1), crashes: u8::MAX, mutation }
}

#[test]
fn the_model_and_making_do_the_same() {
    println!("{} beginnings", difference(&model_of(None)).unwrap());
}

#[test]
fn models_that_are_wrong_do_something_else() {
    for mutation in [Mutation::RecordAfterCreate, Mutation::ForgetBeforeDestroy, Mutation::NeedByUuid] {
        let wrong = DynamicMig { crashes: 1, ..model_of(Some(mutation)) };
        assert!(difference(&wrong).is_err(), "{mutation:?}");
    }
}
