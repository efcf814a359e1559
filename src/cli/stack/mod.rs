//! Stacks: the services of a Compose file, or several Quadlet units, and whether all of them would get their shares
//! on this host together.

mod compose;
mod order;
mod quadlet;
#[cfg(test)]
mod tests;

use std::io::{self, Read as _};
use std::path::Path;

use serde_json::{Value, json};

use crate::cdi_spec;
use crate::mig::Foreseen;
use crate::names::{Name, Names};
use crate::preview::{Ahead, Whose, preview_after};
use crate::setup::docker::RESOURCE;
use sublet_core::admit::{AdmitError, RequestSource, book_for, request_by_cdi, request_of};
use sublet_core::config::Config;
use sublet_core::config_files::{Containers, Known};
use sublet_core::inventory::{GpuProcess, Inventory};
use sublet_core::ledger::{Container, Lease, LeaseId, Ledger};
use sublet_core::oci::cdi::KIND;
use sublet_core::place::{Placement, expected};
use sublet_core::request::{Request, has_sublet_annotations};
use sublet_core::share::Mode;
use sublet_core::text::{safe, safe_path};

pub(crate) use compose::drops_annotations;
pub use compose::read as compose;
pub use order::{Orders, orders};
pub use quadlet::read as quadlet;

/// More containers of a stack are a mistake.
const MOST: usize = 1000;

/// The largest file that is read, in bytes.
const LARGEST: u64 = 4 << 20;

/// The containers of a stack, in the order in which they would start.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Stack {
    /// One for each container.
    pub services: Vec<Service>,
    /// The engine's name for them together, so that those which run already are not counted twice.
    pub own: Own,
    /// The parts that were not looked at, one line each.
    pub remarks: Vec<String>,
}

/// How containers of a stack that run are recognized by the names that engines have for them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Own {
    /// There are none.
    #[default]
    None,
    /// They are part of this Compose project.
    Project(String),
    /// They run in these systemd units.
    Units(Vec<String>),
}

/// One container, as far as its share depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// Its name in the file, with a number if there are several of it.
    pub name: String,
    /// The same without the number: containers of one name are alike.
    pub of: String,
    /// All its annotations.
    pub annotations: std::collections::BTreeMap<String, String>,
    /// The warning about its labels, if some are meant as annotations that it does not have.
    pub label_warning: Option<String>,
    /// Its OCI runtime: a name of Docker's, or a path.
    pub runtime: Option<String>,
    /// Its devices, as the file names them: nodes, and CDI devices.
    pub devices: Vec<String>,
    /// Whether the engine itself is asked for GPUs.
    pub gpus: bool,
    /// Whether it is privileged.
    pub privileged: bool,
    /// Whether annotations alone make it a container of sublet's: Podman's hook needs no runtime.
    pub by_hook: bool,
    /// Its names in containers.toml, where that file applies: its name and image; `None` if they are not known.
    pub called: Option<(String, String)>,
    /// The version of a Docker Compose that does not pass its annotations on.
    pub annotations_dropped_by: Option<String>,
}

/// Why a stack cannot be read: the file, and the problem.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct StackError(String);

fn unusable(path: &Path, message: &str) -> StackError {
    StackError(format!("{}: {message}", safe_path(path)))
}

/// The text of a file that a user names.
fn text(path: &Path) -> Result<String, StackError> {
    let text = std::fs::File::open(path).and_then(|file| io::read_to_string(file.take(LARGEST)));
    let shown = safe_path(path);
    text.map_err(|error| StackError(format!("{shown} cannot be read: {error}")))
}

// Whether its containers fit: they are placed one after another, in memory, and each sees the bookings of those before it.

/// Why a container of a stack would get no share.
#[derive(Debug, thiserror::Error)]
pub enum NotPlaced {
    /// It would be refused.
    #[error(transparent)]
    Refused(#[from] AdmitError),
    /// Its annotations would not be read.
    #[error("its runtime is {0}, which does not read its annotations: write `runtime: sublet`")]
    Runtime(String),
    /// It has labels in place of annotations.
    #[error("{0}")]
    Labels(String),
    /// Its annotations would not reach the engine.
    #[error(
        "Docker Compose {0} drops its annotations: install Docker Compose 2.26 or later, or give it a runtime \
         sublet-SHARE, a CDI device or a rule in containers.toml"
    )]
    Dropped(String),
    /// Its CDI device is none of this host.
    #[error("{0}")]
    Cdi(String),
    /// Its share depends on variables that only Compose can resolve.
    #[error(
        "its share is that of its name or image in containers.toml, and these have variables: write them out"
    )]
    Unnamed,
    /// A part of a MIG instance is needed, perhaps of one that would be created for another container.
    #[error(
        "a MIG instance that several may share would be created for a container before it, so whether this one has \
         room there cannot be told before that"
    )]
    Unforeseen,
}

/// The outcome for one container.
#[derive(Debug)]
pub enum Outcome {
    /// It gets this share.
    Fits(Box<Placement>),
    /// It gets this share when containers of the stack before it, which allow that, are suspended for it.
    InTurns(Box<Placement>),
    /// It gets this MIG instance, which is created when it starts, and this share of it.
    Made(Box<(Foreseen, Placement)>),
    /// It asks for no share.
    AsksForNone,
    /// It gets none.
    Not(NotPlaced),
}

/// A container, and its outcome.
#[derive(Debug)]
pub struct Fitted {
    /// Its name in the stack.
    pub service: String,
    /// Its share, or why it gets none.
    pub outcome: Outcome,
}

impl Fitted {
    /// Whether others of the stack are suspended for it.
    pub fn is_in_turns(&self) -> bool {
        matches!(self.outcome, Outcome::InTurns(_))
    }
}

/// Places `stack` beside the existing leases. `names` says which leases belong to the stack's own containers.
pub fn fit(
    stack: &Stack,
    containers: Option<&Containers>,
    (mut ledger, mut inventory): (Ledger, Inventory),
    names: &Names,
    whose: Whose,
    config: &Config,
) -> io::Result<(Vec<Fitted>, usize)> {
    let before = set_aside(&stack.own, &mut ledger, &mut inventory, names);
    let suspendable = (whose == Whose::Root && config.suspend.on_demand).then(Vec::new);
    let ahead = Ahead::default();
    let mut world = World { ledger, inventory, whose, config, ahead, shares: false, suspendable };
    let each = |service: &Service| {
        Ok(Fitted { service: service.name.clone(), outcome: world.place(service, containers)? })
    };
    Ok((stack.services.iter().map(each).collect::<io::Result<_>>()?, before))
}

struct World<'a> {
    ledger: Ledger,
    inventory: Inventory,
    whose: Whose,
    config: &'a Config,
    /// The MIG instances that would be created for containers before.
    ahead: Ahead,
    /// Whether other containers may share one of these.
    shares: bool,
    /// The leases of containers before that are suspended for those behind; `None`: nobody is.
    suspendable: Option<Vec<LeaseId>>,
}

impl World<'_> {
    fn place(&mut self, service: &Service, containers: Option<&Containers>) -> io::Result<Outcome> {
        let request = match asked(service, containers, &self.inventory, self.config) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(Outcome::AsksForNone),
            Err(why) => return Ok(Outcome::Not(why)),
        };
        // Whether it gets the whole instance.
        let alone = matches!(request.mode, None | Some(Mode::Mig));
        let before = self.ahead.instances.len();
        let id = LeaseId::random()?;
        let world = (&self.inventory, &self.ledger);
        match preview_after(&mut self.ahead, &request, &id, world, self.whose, self.config) {
            Ok(placement) => {
                self.book(service, &placement, &id);
                Ok(Outcome::Fits(Box::new(placement)))
            }
            Err(AdmitError::WouldMake { .. } | AdmitError::Unmade { .. }) if self.shares && !alone => {
                self.ahead.instances.truncate(before);
                Ok(Outcome::Not(NotPlaced::Unforeseen))
            }
            Err(error @ AdmitError::WouldMake { .. }) => {
                let Some(foreseen) = self.ahead.instances.last().cloned() else {
                    return Ok(Outcome::Not(error.into()));
                };
                self.shares |= !alone;
                let part = foreseen.leased(&self.inventory);
                let devices = vec![part.uuid.clone()];
                let placement = Placement { devices, mig_devices: vec![part], ..expected(&request) };
                self.book(service, &placement, &id);
                Ok(Outcome::Made(Box::new((foreseen, placement))))
            }
            Err(error) => match self.place_in_turn(&error, &request, &id) {
                Some(placement) => {
                    self.book(service, &placement, &id);
                    Ok(Outcome::InTurns(Box::new(placement)))
                }
                None => Ok(Outcome::Not(error.into())),
            },
        }
    }

    /// Its share without those on one GPU that may be suspended, if it is refused beside them: no room is made on two. They keep
    /// what they have booked: the next one is placed beside all of them.
    fn place_in_turn(&self, refused: &AdmitError, request: &Request, id: &LeaseId) -> Option<Placement> {
        let suspendable = self.suspendable.as_ref().filter(|_| refused.is_temporary())?;
        self.inventory.gpus().find_map(|gpu| {
            let goes = |lease: &Lease| lease.devices.contains(&gpu.uuid) && suspendable.contains(&lease.id);
            let mut rest = self.ledger.clone();
            rest.leases.retain(|lease| !goes(lease));
            let world = (&self.inventory, &rest);
            preview_after(&mut Ahead::default(), request, id, world, self.whose, self.config).ok()
        })
    }

    fn book(&mut self, service: &Service, placement: &Placement, id: &LeaseId) {
        let uid = if self.whose == Whose::Root { 0 } else { nix::unistd::geteuid().as_raw() };
        let (bundle, rootfs, record) = ("/".into(), "/".into(), "/".into());
        let container = Container { uid, id: service.name.clone(), bundle, rootfs, record };
        book_for((id, &container), placement, &mut self.ledger, self.config);
        if self.ledger.lease(id).is_some_and(Lease::may_be_suspended) {
            self.suspendable.iter_mut().for_each(|all| all.push(id.clone()));
        }
    }
}

/// Takes the leases of the stack's own containers out, which run already, the memory of their processes, and the entries of
/// those that wait. Returns how many run.
fn set_aside(own: &Own, ledger: &mut Ledger, inventory: &mut Inventory, names: &Names) -> usize {
    let is_own = |name: &Name| match own {
        Own::None => false,
        Own::Project(project) => name.part_of.split_once('/').is_some_and(|(of, _)| of == project),
        Own::Units(units) => units.contains(&name.unit),
    };
    let its = ledger.leases.iter().filter(|lease| names.of(lease).is_some_and(is_own));
    let its: Vec<LeaseId> = its.map(|lease| lease.id.clone()).collect();
    for device in &mut inventory.devices {
        let is_its = |process: &GpuProcess| {
            ledger.lease_of_process(process).is_some_and(|lease| its.contains(&lease.id))
        };
        let processes = device.processes.iter().filter(|process| is_its(process));
        let used: u64 = processes.map(|process| process.memory_bytes).sum();
        device.memory_free_bytes = device.memory_free_bytes.saturating_add(used).min(device.memory_bytes);
        device.processes.retain(|process| !is_its(process));
    }
    ledger.leases.retain(|lease| !its.contains(&lease.id));
    ledger.waiters.retain(|waiter| !names.of_id(&waiter.container.id).is_some_and(is_own));
    its.len()
}

/// The request of `service`, read as sublet would when it starts; `None` if it asks for no share.
fn asked(
    service: &Service,
    containers: Option<&Containers>,
    inventory: &Inventory,
    config: &Config,
) -> Result<Option<Request>, NotPlaced> {
    service.label_warning.clone().map_or(Ok(()), |warning| Err(NotPlaced::Labels(warning)))?;
    let mut source = RequestSource { annotations: service.annotations.clone(), share: None };
    let spec = spec(service);
    let prefix = format!("{KIND}=");
    if let Some(name) = service.devices.iter().find_map(|device| device.strip_prefix(&prefix)) {
        let listing = cdi_spec::list(config, inventory).map_err(|error| NotPlaced::Cdi(error.to_string()))?;
        let Some(named) = listing.devices.iter().find(|named| named.name == name) else {
            let without = listing.without.iter().find(|without| without.name == name);
            let why = without.map_or("`sublet cdi list` shows those there are", |without| &without.why);
            return Err(NotPlaced::Cdi(format!("there is no CDI device {prefix}{}: {why}", safe(name))));
        };
        return Ok(Some(request_by_cdi(&source, &spec, &named.asked, || Ok(inventory.clone()), config)?));
    }
    let has_annotations = has_sublet_annotations(&service.annotations);
    if let Some(version) = service.annotations_dropped_by.as_ref().filter(|_| has_annotations) {
        return Err(NotPlaced::Dropped(version.clone()));
    }
    // A runtime of sublet's may have the name of a share.
    let runtime = service.runtime.as_deref().map(|path| path.rsplit('/').next().unwrap_or(path));
    match (runtime, runtime.and_then(|name| name.strip_prefix("sublet"))) {
        (_, Some("" | "-runtime")) if has_annotations || service.by_hook => {}
        (_, Some("" | "-runtime")) => {
            if let Some(containers) = containers {
                let (name, image) = service.called.clone().ok_or(NotPlaced::Unnamed)?;
                source.share =
                    containers.share(&Known { name, image, ..Known::default() }).map(str::to_owned);
            }
        }
        (_, Some(share)) if share.starts_with('-') => source.share = Some(share[1..].to_owned()),
        (name, _) if has_annotations && !service.by_hook => {
            return Err(NotPlaced::Runtime(safe(name.unwrap_or("the engine's default"))));
        }
        _ => {}
    }
    if !has_annotations && source.share.is_none() {
        return Ok(None);
    }
    Ok(Some(request_of(&source, &spec, config)?))
}

/// A config.json like that which the engine would write, as far as it could contradict a share.
fn spec(service: &Service) -> Value {
    let nodes = service.devices.iter().filter(|device| device.starts_with('/'));
    let nodes: Vec<_> = nodes.map(|device| json!({"path": device.split(':').next(), "type": "c"})).collect();
    let cdi = service.devices.iter().filter(|device| device.starts_with("nvidia.com/"));
    let mut annotations = json!(service.annotations);
    for device in cdi {
        annotations["cdi.k8s.io/explained"] = json!(device);
    }
    let mut spec = json!({"annotations": annotations, "process": {"env": []}, "linux": {"devices": nodes}});
    if service.gpus {
        spec["hooks"] = json!({"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]});
        spec["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=all"]);
    }
    if service.privileged {
        spec["linux"]["resources"] = json!({"devices": [{"allow": true, "access": "rwm"}]});
    }
    spec
}

// A node's resources for Docker Swarm: how many containers of each named share its GPUs hold. Swarm counts each by itself.

/// More containers of one share are not counted.
const MOST_OF_ONE: usize = 4096;

/// How many containers of a named share fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Count {
    /// The share's name.
    pub share: String,
    /// On all devices, when nothing else is on them.
    pub fits: usize,
    /// Why not one more.
    pub why: String,
}

/// Each named share of `config` on the devices of `inventory`.
pub fn counts(config: &Config, inventory: &Inventory) -> io::Result<Vec<Count>> {
    config.share.keys().map(|share| count(share, inventory, config)).collect()
}

fn count(share: &str, inventory: &Inventory, config: &Config) -> io::Result<Count> {
    let annotations = [("sublet.share".to_owned(), share.to_owned())].into();
    let service = Service { name: share.to_owned(), annotations, by_hook: true, ..Service::default() };
    let (inventory, ledger, whose) = (inventory.idle(), Ledger::empty(""), Whose::Root);
    let ahead = Ahead::default();
    let mut world = World { ledger, inventory, whose, config, ahead, shares: false, suspendable: None };
    let full = |fits, why| Ok(Count { share: share.to_owned(), fits, why });
    for fits in 0..MOST_OF_ONE {
        if let Outcome::Not(why) = world.place(&service, None)? {
            return full(fits, why.to_string());
        }
    }
    full(MOST_OF_ONE, "more are not counted".to_owned())
}

/// The generic resources of dockerd for `counts`, such as `sublet-small=4`.
pub fn resources(counts: &[Count]) -> Vec<String> {
    let fitting = counts.iter().filter(|count| count.fits > 0);
    fitting.map(|Count { share, fits, .. }| format!("{RESOURCE}{share}={fits}")).collect()
}
