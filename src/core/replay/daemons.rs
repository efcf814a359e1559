//! The model `daemons`: leases, MPS daemons, limits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use sublet_model::checker::Model as _;
use sublet_model::daemons::{Actor, Daemons, State, Step};
use sublet_model::ledger::{self as model, Call, Life, Share};

use super::{Made, Processes, Replay, at_random, container_of, id, new_dir, note, print, walk, write_record};

use crate::admit::{Asks, place_in_order};
use crate::config::Config;
use crate::inventory::{ComputeMode, Inventory};
use crate::ledger::{
    ChangedComputeMode, Container, DaemonKey, DaemonState, DefaultLimits, DefaultMemoryLimit, Lease,
    LeaseState, Ledger, MpsDaemon, Scan, Store, Waiter,
};
use crate::mps::heal::errands;
use crate::mps::limits_and_state as limits;
use crate::place::accounts_tests::lease_of;
use crate::place::fixture::{GIB, device, host, request};
use crate::place::{Placement, SERVER_BYTES, bookings, place};
use crate::process::{Process, epoch_seconds};
use crate::request::Request;
use crate::share::{MIB, Memory, Mode, Percent};

/// A quarter of the SMs.
const QUARTER: u32 = 25_000;
/// A unit of the model's memory.
const UNIT: u64 = 10 * GIB;

/// The owner of a real process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Shim(usize),
    Delete(usize),
    Container(usize),
    Daemon(usize),
    Serve,
}

/// A real ledger and real processes beside the model's.
struct Real {
    dir: tempfile::TempDir,
    store: Store,
    config: Config,
    model: Daemons,
    processes: Processes<Who>,
    /// The containers' cgroups.
    populated: BTreeMap<usize, bool>,
}

fn key(device: usize) -> DaemonKey {
    DaemonKey(format!("GPU-{device}"))
}

fn alive(state: &State) -> Vec<Who> {
    let seen = state.seen();
    let of = |list: &[bool], who: fn(usize) -> Who| {
        let there = list.iter().enumerate().filter(|(_, there)| **there);
        there.map(|(n, _)| who(n)).collect::<Vec<_>>()
    };
    let run = seen.lives.map(|life| life == Life::Running);
    let serve = (state.serve != sublet_model::daemons::Pc::Off).then_some(Who::Serve);
    let mut all = of(&seen.shims, Who::Shim);
    all.extend(of(&seen.deletes, Who::Delete));
    all.extend(of(&run, Who::Container));
    all.extend(of(&seen.daemons, Who::Daemon));
    all.extend(serve);
    all
}

fn limits_of(limits: model::Limits) -> DefaultLimits {
    let memory = match limits.memory {
        model::UNLIMITED => DefaultMemoryLimit::Unlimited,
        units => DefaultMemoryLimit::Mebibytes(u64::from(units) * UNIT / MIB),
    };
    DefaultLimits { sm: Percent::from_thousandths(u32::from(limits.sm) * QUARTER), memory }
}

impl Real {
    fn path(&self, what: &str, container: usize) -> PathBuf {
        self.dir.path().join(format!("{what}-{container}"))
    }

    /// The devices `which`, with as much memory as the model's beside a server's own.
    fn inventory(&self, which: impl Iterator<Item = usize>) -> Inventory {
        let all = u64::from(model::MEMORY) * UNIT + SERVER_BYTES;
        let devices = which.map(|n| crate::inventory::Device {
            memory_bytes: all + self.config.limits.reserve,
            memory_free_bytes: all + GIB,
            ..device(u32::try_from(n).unwrap())
        });
        host(devices.collect())
    }

    fn names(&self, container: usize) -> Container {
        Container {
            uid: 0,
            id: format!("container-{container}"),
            bundle: self.path("bundle", container),
            rootfs: self.path("bundle", container).join("rootfs"),
            record: self.path("record", container),
        }
    }

    /// As when a lease is taken, on one of the `allowed` devices.
    fn place(&self, container: usize, allowed: &Inventory, ledger: &Ledger) -> Option<Placement> {
        let (request, id, names) = (self.request(container), id(container), self.names(container));
        let placement = place(&request, &id, allowed, ledger, &self.config).ok()?;
        let asks = Asks { id: &id, container: &names, by: None, request: &request };
        let host = self.inventory(0..self.model.devices);
        place_in_order(asks, placement, (allowed, &host), ledger, &self.config).ok()
    }

    fn request(&self, container: usize) -> Request {
        match self.model.shares[container] {
            Share::Mps { sm, memory } => Request {
                sm: Some(Percent::from_thousandths(u32::from(sm) * QUARTER)),
                memory: memory.map(|units| Memory::Bytes(u64::from(units) * UNIT)),
                ..request(Mode::Mps)
            },
            Share::Exclusive => request(Mode::Exclusive),
        }
    }

    /// Starts and ends processes, and writes the runtime's records, until all is as in `state`.
    fn follow(&mut self, state: &State) {
        self.processes.follow(&alive(state));
        for container in 0..self.model.shares.len() {
            let populated = matches!(state.lives[container], Life::Running | Life::FirstGone);
            if self.populated.insert(container, populated) != Some(populated) {
                let events = self.path("cgroup", container).join("cgroup.events");
                fs::write(events, format!("populated {}\nfrozen 0\n", u8::from(populated))).unwrap();
            }
            let record = self.path("record", container);
            if !state.records[container] {
                let _ = fs::remove_dir_all(&record);
            } else if !record.exists() {
                let init = self.processes.of(Who::Container(container));
                write_record(container, init, &record);
            }
        }
    }

    /// A record may name only cgroups of this host, where a test must not make any. So the lease gets a directory that
    /// looks like one as soon as its container's first process is known.
    fn move_to_cgroups(&self) {
        let mut ledger = self.store.read().unwrap();
        for lease in &mut ledger.leases {
            let Some(init) = lease.init.as_mut().filter(|init| init.cgroup.is_none()) else { continue };
            let container = container_of(&lease.id);
            init.cgroup = Some(self.path("cgroup", container));
        }
        fs::write(self.config.state_dir.join("ledger.json"), serde_json::to_vec(&ledger).unwrap()).unwrap();
    }

    /// Makes the change. Returns whether it succeeded.
    fn call(&mut self, who: Actor, call: Call) -> bool {
        match (who, call) {
            (Actor::Shim(container), _) => self.processes.start(Who::Shim(container)),
            (Actor::Delete(container), _) => self.processes.start(Who::Delete(container)),
            (Actor::Serve, _) => self.processes.start(Who::Serve),
            _ => {}
        }
        let change = |change: &dyn Fn(&mut Ledger) -> bool| self.store.change(change).unwrap().0;
        match call {
            Call::Reclaim => self.store.change(|_| ()).is_ok(),
            Call::Take(container, device) => self.take(container, device),
            Call::TakeNone(container) => {
                let host = self.inventory(0..self.model.devices);
                let look = |ledger: &mut Ledger| self.place(container, &host, ledger).ok_or(());
                self.store.update(look).unwrap().0.is_err()
            }
            Call::Wait(container) => {
                let request = Request { wait: Duration::from_secs(600), ..self.request(container) };
                let by = Some(self.processes.of(Who::Shim(container)));
                let waiter = Waiter::new(&id(container), &self.names(container), &request, "no room", by);
                change(&|ledger| {
                    ledger.add_waiter(waiter.clone());
                    true
                })
            }
            Call::MarkEnding(container) => {
                let (name, record) = (format!("container-{container}"), self.path("record", container));
                let deleter = self.processes.of(Who::Delete(container));
                let mark = |ledger: &mut Ledger| ledger.mark_ending(0, &name, &record, Some(deleter));
                self.store.change_with_scan(Scan::Brief, mark).unwrap().0.is_some()
            }
            Call::UnmarkEnding(container) => {
                let unmark = |ledger: &mut Ledger| ledger.unmark_ending(&id(container));
                self.store.change_with_scan(Scan::Brief, unmark).unwrap();
                self.store.read().unwrap().lease(&id(container)).is_some()
            }
            Call::Remove(container) => change(&|ledger| ledger.remove(&id(container)).is_some()),
            Call::ClaimStart(device) => change(&|ledger| ledger.claim_start(&key(device)).is_some()),
            Call::ClaimStop(device) => change(&|ledger| ledger.claim_stop(&key(device), false).is_ok()),
            Call::ForgetDaemon(device) => change(&|ledger| {
                ledger.forget_daemon(&key(device));
                true
            }),
            Call::AdjustBegin(device) => {
                change(&|ledger| limits::begin_adjusting(ledger, &key(device), None).is_some())
            }
            call => self.note(call),
        }
    }

    /// Changes that are closures in the code, and have nothing to decide.
    fn note(&self, call: Call) -> bool {
        let change = |change: &dyn Fn(&mut Ledger) -> bool| self.store.change(change).unwrap().0;
        let daemon = |device: usize, what: &dyn Fn(&mut MpsDaemon)| {
            limits::note(&self.store, &key(device), what).unwrap();
            self.store.read().unwrap().daemon(&key(device)).is_some()
        };
        let process = |device| self.processes.find(Who::Daemon(device));
        match call {
            Call::NoteServing(device, limits) => daemon(device, &|daemon| {
                // It may have been killed since it was found.
                daemon.process = process(device).or(Some(Process { pid: i32::MAX, start_time: 1 }));
                daemon.state = DaemonState::Serving;
                (daemon.default_limits, daemon.answered_at) = (limits_of(limits), epoch_seconds());
            }),
            Call::NoteDown(device) => daemon(device, &|daemon| {
                (daemon.state, daemon.process) = (DaemonState::Down, None);
            }),
            Call::NoteAnswer(device) => {
                let ledger = self.store.read().unwrap();
                let known = ledger.daemon(&key(device)).unwrap();
                limits::note_answer(&self.store, known).is_ok()
            }
            Call::AdjustEnd(device, limits) => daemon(device, &|daemon| {
                (daemon.default_limits, daemon.answered_at) = (limits_of(limits), epoch_seconds());
                daemon.state = DaemonState::Serving;
            }),
            Call::LeaveMode(device) => change(&|ledger| {
                let unused = ledger.on_daemon(&key(device)).next().is_none();
                let daemon = ledger.daemons.iter_mut().find(|daemon| daemon.key == key(device));
                daemon.filter(|_| unused).map(|daemon| daemon.mode_left = true).is_some()
            }),
            Call::ModeEntered(device) => change(&|ledger| {
                let wanted = ledger.on_daemon(&key(device)).next().is_some();
                let daemon = ledger.daemons.iter_mut().find(|daemon| daemon.key == key(device));
                daemon.filter(|_| wanted).map(|daemon| daemon.mode_left = false).is_some()
            }),
            Call::RecordMode(device) => change(&|ledger| {
                let found = ComputeMode::Default;
                let changed = ChangedComputeMode { device: key(device).0, found };
                if !ledger.compute_modes.contains(&changed) {
                    ledger.compute_modes.push(changed);
                }
                true
            }),
            Call::ForgetMode(device) => change(&|ledger| {
                ledger.compute_modes.retain(|changed| changed.device != key(device).0);
                true
            }),
            Call::Keep => change(&|ledger| {
                ledger.keeper = Some(self.processes.of(Who::Serve));
                true
            }),
            Call::KeepNoMore => change(&|ledger| ledger.keeper.take().is_some()),
            _ => unreachable!("`call` makes it"),
        }
    }

    fn take(&self, container: usize, device: usize) -> bool {
        let (names, inventory) = (self.names(container), self.inventory(std::iter::once(device)));
        let owner = self.processes.of(Who::Shim(container));
        let taken = self.store.update(|ledger| {
            let placement = self.place(container, &inventory, ledger).ok_or(())?;
            let n = u64::try_from(container + 1).unwrap();
            ledger.waiters.retain(|waiter| waiter.id != id(container));
            let lease = Lease { container: names, owner, ..lease_of(n, placement) };
            ledger.insert(lease).map_err(drop)
        });
        taken.unwrap().0.is_ok()
    }

    /// The real ledger, in the model's words.
    fn view(&self) -> model::Ledger {
        let ledger = self.store.read().unwrap();
        let mut view = model::Ledger::EMPTY;
        for lease in &ledger.leases {
            let container = container_of(&lease.id);
            view.leases[container] = Some(self.lease_view(container, lease));
        }
        for n in 0..self.model.devices {
            view.daemons[n] = ledger.daemon(&key(n)).map(daemon_view);
            view.compute_modes[n] = ledger.compute_modes.iter().any(|changed| changed.device == key(n).0);
        }
        view.keeper = ledger.keeper.is_some();
        for (place, waiter) in (1..).zip(&ledger.waiters) {
            view.waiting[container_of(&waiter.id)] = place;
        }
        view
    }

    fn lease_view(&self, container: usize, lease: &Lease) -> model::Lease {
        let owner = match self.processes.known.get(&Who::Shim(container)) {
            Some(shim) if *shim == lease.owner => model::Owner::Shim,
            _ => model::Owner::Delete,
        };
        let state = match lease.state {
            LeaseState::Pending => model::LeaseState::Pending,
            LeaseState::Active => model::LeaseState::Active,
            LeaseState::Ending => model::LeaseState::Ending,
            state => unreachable!("the model has no lease in state {state:?}"),
        };
        let device = lease.devices[0].strip_prefix("GPU-").unwrap().parse().unwrap();
        model::Lease { device, state, owner, init: lease.init.is_some() }
    }

    /// Compares the code's conclusions from the ledger with the model's.
    fn compare(&self, state: &State) {
        assert_eq!(self.view(), state.ledger, "(real, model)");
        let ledger = self.store.read().unwrap();
        let inventory = self.inventory(0..self.model.devices);
        let due = errands(&ledger, &self.config);
        for n in 0..self.model.devices {
            let shares = &self.model.shares;
            let wanted = state.ledger.wanted(n, shares);
            assert_eq!(ledger.wanted_default_limits(&key(n)), wanted.map(limits_of), "limits");
            let (mut sm, mut memory) = (0, 0);
            for share in state.ledger.on(n, shares) {
                if let Share::Mps { sm: quarters, memory: units } = share {
                    sm += u32::from(quarters) * QUARTER;
                    memory += u64::from(units.unwrap_or(0)) * UNIT;
                } else {
                    (sm, memory) = (100_000, inventory.devices[n].memory_bytes);
                }
            }
            let booked = bookings(&inventory.devices[n], &ledger, &self.config);
            let own = booked.memory_booked - memory;
            assert_eq!(booked.sm_booked.thousandths(), sm, "booked SMs");
            assert!(own == 0 || own == SERVER_BYTES, "booked memory: {own} too much");
            let waits = state.waits(n, &self.model);
            let stays = wanted.is_some() || waits && !state.ledger.compute_modes[n];
            let nothing = state.ledger.daemons[n].is_none() && !state.ledger.compute_modes[n];
            let expected = (!stays && !nothing).then_some(if waits { "Rest" } else { "Stop" });
            let found = due.iter().find(|(of, _)| *of == key(n)).map(|(_, errand)| format!("{errand:?}"));
            assert_eq!(found.as_deref(), expected, "what is due for device {n}");
        }
        for container in 0..self.model.shares.len() {
            let Some(lease) = ledger.lease(&id(container)) else { continue };
            let found: Vec<_> = ledger.conflicting_daemons(lease).cloned().collect();
            let expected = state.ledger.conflicting_daemons(container, &self.model.shares).map(key);
            assert_eq!(found, Vec::from_iter(expected), "in the way");
        }
    }
}

fn daemon_view(daemon: &MpsDaemon) -> model::Daemon {
    let state = match daemon.state {
        DaemonState::Starting => model::DaemonState::Starting,
        DaemonState::Serving => model::DaemonState::Serving,
        DaemonState::Stopping => model::DaemonState::Stopping,
        DaemonState::Down => model::DaemonState::Down,
        DaemonState::Fault => unreachable!("every daemon of the model answers"),
    };
    let memory = match daemon.default_limits.memory {
        DefaultMemoryLimit::Unlimited => model::UNLIMITED,
        DefaultMemoryLimit::Mebibytes(mebibytes) => u8::try_from(mebibytes * MIB / UNIT).unwrap(),
    };
    let sm = u8::try_from(daemon.default_limits.sm.thousandths() / QUARTER).unwrap();
    model::Daemon {
        state,
        process: daemon.process.is_some(),
        limits: model::Limits { sm, memory },
        answered: daemon.answered_at != 0,
        idle: daemon.idle_since.is_some(),
        mode_left: daemon.mode_left,
    }
}

/// A step that the real world can follow: a container's first process is known before it ends while other ones run.
fn can_follow(state: &State, step: &Step, after: &State) -> bool {
    let Actor::Container(container) = step.who else { return true };
    after.lives[container] != Life::FirstGone
        || state.ledger.leases[container].is_some_and(|lease| lease.init)
}

impl Replay for Real {
    type Model = Daemons;

    fn new(model: &Daemons) -> Self {
        let (dir, store) = new_dir();
        let config = Config { state_dir: dir.path().join("state"), ..Config::default() };
        for container in 0..model.shares.len() {
            fs::create_dir_all(dir.path().join(format!("bundle-{container}"))).unwrap();
            fs::create_dir_all(dir.path().join(format!("cgroup-{container}"))).unwrap();
        }
        let (processes, populated) = (Processes::new(), BTreeMap::new());
        Self { dir, store, config, model: model.clone(), processes, populated }
    }

    fn step(&mut self, _: &State, step: &Step, after: &State, made: &mut Made) {
        let Some((call, done)) = step.call else { return self.follow(after) };
        let real = self.call(step.who, call);
        self.move_to_cgroups();
        self.follow(after);
        note(made, call, done);
        assert_eq!(real, done, "whether it did what it says (real, model)");
        self.compare(after);
    }
}

fn mps(sm: u8, memory: Option<u8>) -> Share {
    Share::Mps { sm, memory }
}

fn model(shares: &[Share], devices: usize, serve: bool) -> Daemons {
    let (shares, waiters) = (shares.to_vec(), vec![1]);
    let (order, crashes) = (false, u8::MAX);
    Daemons { shares, devices, waiters, order, serve, children: true, crashes, mutation: None }
}

#[test]
fn the_model_and_the_ledger_say_the_same_after_every_kind_of_step() {
    let model = model(&[mps(1, Some(1)), mps(2, None)], 1, true);
    let (ways, mut made) = (model.ways(can_follow), Made::new());
    for way in &ways {
        walk::<Real>(&model, way, &mut made);
    }
    print("shortest ways", &ways, &made);
    let names: BTreeSet<&str> = made.keys().map(|(name, _)| name.as_str()).collect();
    // No room is found in the walks below.
    assert_eq!(names.len(), 19, "every change of the model is made: {names:?}");
    for name in ["MarkEnding", "Remove", "ClaimStart", "ClaimStop", "LeaveMode", "AdjustBegin"] {
        for done in [true, false] {
            assert!(made.contains_key(&(name.to_owned(), done)), "{name} {done} was not made");
        }
    }
}

#[test]
fn the_model_and_the_ledger_say_the_same_on_random_walks() {
    let models = [
        model(&[mps(1, Some(1)), mps(2, None), mps(1, Some(3))], 2, false),
        model(&[mps(1, Some(1)), Share::Exclusive, mps(3, Some(3))], 2, true),
        model(&[mps(3, None), mps(3, Some(2)), mps(2, Some(2))], 2, true),
        // On one device it is certain which one they get that wait before.
        Daemons {
            order: true,
            waiters: vec![1, 2],
            ..model(&[mps(3, Some(1)), mps(3, Some(2)), mps(2, None)], 1, false)
        },
    ];
    let (mut ways, mut made) = (Vec::new(), Made::new());
    for seed in 0..40 {
        let model = &models[seed % models.len()];
        let ended = |state: &State| {
            model.is_end(state) && state.asked[..model.shares.len()].iter().all(|asked| *asked)
        };
        ways.push(at_random(model, seed, can_follow, ended));
        walk::<Real>(model, &ways[seed], &mut made);
    }
    print("random walks", &ways, &made);
    for name in ["TakeNone", "Wait"] {
        assert!(made.contains_key(&(name.to_owned(), true)), "there always was room: {name}");
    }
}

#[test]
#[should_panic(expected = "the model and the ledger differ")]
fn a_model_that_is_wrong_differs_from_the_ledger() {
    let mutation = Some(sublet_model::Mutation::FreeBeforeEmpty);
    let wrong = Daemons { mutation, ..model(&[mps(1, Some(1))], 1, false) };
    for way in wrong.ways(can_follow) {
        walk::<Real>(&wrong, &way, &mut Made::new());
    }
}
