//! The model `dynamic_mig`: instances that are created for a container, and leases on them. The instances of the driver are as
//! the model says.

use std::path::PathBuf;

use sublet_model::Mutation;
use sublet_model::checker::{Model as _, Way, check};
use sublet_model::dynamic_mig::{self as model, Call, DynamicMig, PLACES, Pc, State, Step};
use sublet_model::ledger::Life;

use super::{Made, Processes, Replay, at_random, container_of, id, new_dir, note, print, walk, write_record};
use crate::config::Config;
use crate::inventory::{Device, Inventory};
use crate::ledger::dynamic_instance_fixture::dynamic_instance;
use crate::ledger::{
    Awaited, Container, DynamicInstance, Lease, LeaseState, Ledger, MigBusy, MigChange, Store,
};
use crate::place::accounts_tests::lease_of;
use crate::place::fixture::{device, host, part, request};
use crate::place::place;
use crate::request::Request;
use crate::share::Mode;

/// The owner of a real process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Shim(usize),
    Container(usize),
    /// `sublet mig make` or `clear`.
    Mig,
}

/// A GPU instance in the driver. Ids are given again, UUIDs are not.
struct Instance {
    gi: u32,
    /// Its compute instance.
    uuid: Option<String>,
}

/// Why `Search::look` finds nothing.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Changed,
    Refused,
}

/// A real ledger and real processes beside the model's.
struct Real {
    dir: tempfile::TempDir,
    store: Store,
    config: Config,
    model: DynamicMig,
    processes: Processes<Who>,
    driver: [Option<Instance>; PLACES],
    /// How many compute instances there have been.
    count: usize,
    /// The shims' readings of the driver.
    inventories: Vec<Inventory>,
}

fn alive(state: &State) -> Vec<Who> {
    let seen = state.seen();
    let shims = seen.shims.iter().enumerate().filter(|(_, runs)| **runs).map(|(n, _)| Who::Shim(n));
    let lives = state.lives.iter().enumerate().filter(|(_, life)| **life == Life::Running);
    let all = shims.chain(lives.map(|(n, _)| Who::Container(n)));
    all.chain(seen.change.then_some(Who::Mig)).collect()
}

fn at(place: usize) -> u32 {
    u32::try_from(place).unwrap()
}

/// A record of nothing more than its place.
fn recorded(place: usize) -> DynamicInstance {
    dynamic_instance(at(place), None)
}

fn name(container: usize) -> String {
    format!("container-{container}")
}

fn mig() -> Request {
    Request { mig: Some("1g.18gb".into()), ..request(Mode::Mig) }
}

impl Real {
    fn path(&self, what: &str, container: usize) -> PathBuf {
        self.dir.path().join(format!("{what}-{container}"))
    }

    /// Starts and ends processes, writes the runtime's records, and makes the same changes in the driver, until all is as in
    /// `state`.
    fn follow(&mut self, before: &State, state: &State) {
        self.processes.follow(&alive(state));
        for container in 0..self.model.containers {
            let record = self.path("record", container);
            if state.lives[container] == Life::Running && !record.exists() {
                write_record(container, self.processes.of(Who::Container(container)), &record);
            }
        }
        for place in 0..PLACES {
            self.follow_driver(place, state.driver[place]);
        }
        for container in 0..self.model.containers {
            let looked = matches!(state.pcs[container], Pc::Take { .. });
            if looked && !matches!(before.pcs[container], Pc::Take { .. }) {
                self.inventories[container] = self.inventory();
            }
        }
    }

    fn follow_driver(&mut self, place: usize, compute: Option<bool>) {
        let Some(compute) = compute else { return self.driver[place] = None };
        let gis: Vec<u32> = self.driver.iter().flatten().map(|one| one.gi).collect();
        let gi = (1..=at(PLACES)).find(|gi| !gis.contains(gi)).unwrap_or(0);
        let one = self.driver[place].get_or_insert(Instance { gi, uuid: None });
        if !compute {
            one.uuid = None;
        } else if one.uuid.is_none() {
            self.count += 1;
            one.uuid = Some(format!("MIG-{}", self.count));
        }
    }

    fn gpu() -> Device {
        Device { mig_enabled: true, ..device(0) }
    }

    fn mig_device(&self, place: usize) -> Option<Device> {
        let one = self.driver[place].as_ref()?;
        let mut device = part(&Self::gpu(), at(place), "1g.18gb");
        device.uuid = one.uuid.clone()?;
        device.mig_device.iter_mut().for_each(|mig_device| mig_device.gi = one.gi);
        Some(device)
    }

    /// As `sublet refresh` finds it.
    fn inventory(&self) -> Inventory {
        let mig_devices = (0..PLACES).filter_map(|place| self.mig_device(place));
        let devices = std::iter::once(Self::gpu()).chain(mig_devices).collect();
        Inventory { mig_changes: self.store.read().unwrap().mig.count, ..host(devices) }
    }

    /// Makes the change. Returns whether it succeeded.
    fn call(&mut self, call: Call) -> bool {
        match call {
            Call::Reclaim | Call::NoteGoing(_) => self.store.change(|_| ()).is_ok(),
            Call::Take { container, place } => self.look(container, Some(place)).is_ok(),
            Call::TakeNone(container) => self.look(container, None) == Err(Look::Refused),
            Call::LayoutChanged(container) => self.look(container, None) == Err(Look::Changed),
            Call::AwaitNoMore(container) => self.change(|ledger| ledger.stop_awaiting(&id(container))),
            Call::Remove(container) => self.change(|ledger| drop(ledger.remove(&id(container)))),
            Call::BeginMig => self.begin_mig().is_ok(),
            Call::MigBusy => self.begin_mig().is_err_and(|busy| busy.brief),
            Call::EndMig { changed } => {
                let owner = self.processes.of(Who::Mig);
                self.change(|ledger| ledger.end_mig(owner, changed))
            }
            call => self.making(call),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Ledger)) -> bool {
        self.store.change(change).is_ok()
    }

    /// Changes that `Making` makes, as closures of its own.
    fn making(&self, call: Call) -> bool {
        let note = |place: usize, note: &dyn Fn(&mut DynamicInstance, &Instance)| {
            let one = self.driver[place].as_ref().unwrap();
            self.change(|ledger| note(ledger.dynamic_instance_mut(&recorded(place)).unwrap(), one))
        };
        match call {
            Call::MarkUnneeded(order) => self.change(|ledger| {
                if let Some(container) = order {
                    ledger.stop_awaiting(&id(container));
                }
                ledger.mark_unneeded_for_removal();
            }),
            Call::Record { place, awaited } => {
                let awaited = awaited.map(|container| Awaited {
                    lease: id(container),
                    container: name(container),
                    owner: self.processes.known[&Who::Shim(container)],
                });
                let made = DynamicInstance { awaited, ..recorded(place) };
                self.change(|ledger| {
                    ledger.forget_dynamic_instance(&made);
                    ledger.mig.dynamic_instances.push(made);
                })
            }
            Call::NoteGi(place) => note(place, &|made, one| made.gi = Some(one.gi)),
            Call::NoteUuid(place) => note(place, &|made, one| made.uuid.clone_from(&one.uuid)),
            Call::NoteSeen { place, .. } => note(place, &|made, one| {
                (made.gi, made.emptied) = (Some(one.gi), true);
                made.uuid = one.uuid.clone().or_else(|| made.uuid.take());
            }),
            Call::ForgetDestroyed(place) => self.change(|ledger| ledger.forget_destroyed(&recorded(place))),
            call => unreachable!("`call` makes {call:?}"),
        }
    }

    fn begin_mig(&mut self) -> Result<(), MigBusy> {
        self.processes.start(Who::Mig);
        let owner = self.processes.of(Who::Mig);
        self.store.update(|ledger| ledger.begin_mig(MigChange { gpus: Vec::new(), owner })).unwrap().0
    }

    /// `Search::look`, which takes the device at `place` if there are several.
    fn look(&self, container: usize, place: Option<usize>) -> Result<(), Look> {
        let mut inventory = self.inventories[container].clone();
        if let Some(place) = place {
            let is_there = |device: &Device| {
                device.mig_device.as_ref().is_none_or(|of| of.placement == Some((at(place), 1)))
            };
            inventory.devices.retain(is_there);
        }
        let names = Container {
            uid: 0,
            id: name(container),
            bundle: self.path("bundle", container),
            rootfs: self.path("bundle", container).join("rootfs"),
            record: self.path("record", container),
        };
        let owner = self.processes.of(Who::Shim(container));
        let taken = self.store.update(|ledger| {
            if inventory.mig_changes != ledger.mig.count {
                return Err(Look::Changed);
            }
            let placement = place_for(container, &inventory, ledger, &self.config)?;
            let mig_devices = placement.mig_devices.clone();
            let lease = lease_of(u64::try_from(container + 1).unwrap(), placement);
            ledger.insert(Lease { container: names, owner, mig_devices, ..lease }).unwrap();
            ledger.stop_awaiting(&id(container));
            Ok(())
        });
        taken.unwrap().0
    }

    /// The real ledger, in the model's words.
    fn view(&self) -> model::Ledger {
        let ledger = self.store.read().unwrap();
        let mut view = model::Ledger { under_way: ledger.mig.under_way.is_some(), ..model::Ledger::EMPTY };
        for lease in &ledger.leases {
            assert_ne!(lease.state, LeaseState::Lost);
            let place = usize::try_from(lease.mig_devices[0].placement.unwrap().0).unwrap();
            view.leases[container_of(&lease.id)] = Some(model::Lease { place, init: lease.init.is_some() });
        }
        for instance in &ledger.mig.dynamic_instances {
            let place = usize::try_from(instance.placement.0).unwrap();
            let one = model::DynamicInstance {
                gi: instance.gi.is_some(),
                uuid: instance.uuid.is_some(),
                awaited: instance.awaited.as_ref().map(|awaited| container_of(&awaited.lease)),
                going: instance.going,
                emptied: instance.emptied,
            };
            assert_eq!(view.instances[place].replace(one), None, "one record for a place");
        }
        view
    }

    /// Compares the code's conclusions from the ledger with the model's.
    fn compare(&self, state: &State) {
        assert_eq!(self.view(), state.ledger, "(real, model)");
        let (ledger, mutation) = (self.store.read().unwrap(), self.model.mutation);
        assert_eq!(ledger.has_unneeded(), state.ledger.has_unneeded(mutation), "has_unneeded");
        for instance in &ledger.mig.dynamic_instances {
            let place = usize::try_from(instance.placement.0).unwrap();
            assert_eq!(ledger.needs(instance), state.ledger.needs(place, mutation), "needs {place}");
        }
        for container in 0..self.model.containers {
            for place in 0..PLACES {
                let Some(device) = self.mig_device(place) else { continue };
                let real = ledger.explain_kept(&id(container), &device).is_some();
                let kept = state.ledger.is_kept_from(container, place, mutation);
                assert_eq!(real, kept, "kept from {container}: {place}");
            }
            if let Pc::Take { fresh, seen, .. } = state.pcs[container] {
                let inventory = &self.inventories[container];
                assert_eq!(inventory.mig_changes == ledger.mig.count, fresh, "inventory of {container}");
                let there = inventory.devices.iter().filter(|device| device.is_mig()).count();
                assert_eq!(there, seen.iter().filter(|there| **there).count(), "devices of {container}");
            }
        }
    }
}

fn place_for(
    container: usize,
    inventory: &Inventory,
    ledger: &Ledger,
    config: &Config,
) -> Result<crate::place::Placement, Look> {
    place(&mig(), &id(container), inventory, ledger, config).map_err(|_| Look::Refused)
}

impl Replay for Real {
    type Model = DynamicMig;

    fn new(model: &DynamicMig) -> Self {
        let (dir, store) = new_dir();
        let config = Config { state_dir: dir.path().join("state"), ..Config::default() };
        let inventories = vec![host(Vec::new()); model.containers];
        let (processes, driver) = (Processes::new(), [const { None }; PLACES]);
        Self { dir, store, config, model: *model, processes, driver, count: 0, inventories }
    }

    fn step(&mut self, before: &State, step: &Step, after: &State, made: &mut Made) {
        if let Some((call, outdates)) = step.call {
            let count = self.store.read().unwrap().mig.count;
            let done = self.call(call);
            note(made, call, done);
            assert!(done, "{call:?} did not do what it says");
            let outdated = self.store.read().unwrap().mig.count != count;
            assert_eq!(outdated, outdates, "whether inventories are out of date (real, model)");
        }
        self.follow(before, after);
        self.compare(after);
    }
}

const fn any(_: &State, _: &Step, _: &State) -> bool {
    true
}

fn model(containers: usize) -> DynamicMig {
    DynamicMig { containers, waiter: Some(1), crashes: u8::MAX, mutation: None }
}

#[test]
fn the_model_and_the_ledger_say_the_same_after_every_kind_of_step() {
    let model = model(2);
    let (ways, mut made) = (model.ways(), Made::new());
    for way in &ways {
        walk::<Real>(&model, way, &mut made);
    }
    print("shortest ways", &ways, &made);
    let names: Vec<&str> = made.keys().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.len(), 16, "every change of the model is made: {names:?}");
}

#[test]
fn the_model_and_the_ledger_say_the_same_on_random_walks() {
    let (mut ways, mut made) = (Vec::new(), Made::new());
    for seed in 0..60 {
        let model = model(2 + seed % 2);
        let ended = |state: &State| {
            let asked = state.asked[..model.containers].iter().all(|asked| *asked);
            model.is_end(state) && asked
        };
        ways.push(at_random(&model, seed, any, ended));
        walk::<Real>(&model, &ways[seed], &mut made);
    }
    print("random walks", &ways, &made);
}

/// The way on which `mutation` breaks an invariant of the model.
fn to_broken(mutation: Mutation) -> (DynamicMig, Way<DynamicMig>) {
    let wrong = DynamicMig { crashes: 2, waiter: Some(0), mutation: Some(mutation), ..model(2) };
    let (_, way) = check(&wrong, true).broken.unwrap_or_else(|| panic!("{mutation:?} is not found"));
    (wrong, way)
}

#[test]
fn models_that_are_wrong_differ_from_the_ledger() {
    for mutation in [
        Mutation::ForgetBeforeDestroy,
        Mutation::DestroyLeased,
        Mutation::NeedByUuid,
        Mutation::LeaseGoing,
        Mutation::AwaitDead,
        Mutation::AwaitFailed,
        Mutation::ForgetQuietly,
        Mutation::TrustOldInventory,
    ] {
        let (wrong, way) = to_broken(mutation);
        let walked = std::panic::catch_unwind(|| walk::<Real>(&wrong, &way, &mut Made::new()));
        assert!(walked.is_err(), "{mutation:?}: the ledger does the same");
    }
}
