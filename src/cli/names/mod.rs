//! What people call the containers that hold leases: their engine's name and image, the Compose service or the pod that
//! they are part of, their systemd unit. Learnt from the engines' own files by the commands that show containers, never
//! while a container starts, and kept in `names.json` beside the ledger: an engine forgets a container that is removed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use nix::unistd::{Uid, User, geteuid};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use sublet_core::config::Config;
use sublet_core::fs::{read_if_trusted, replace};
use sublet_core::ledger::{Container, Lease, Ledger};
use sublet_core::oci::{self, JsonFile};
use sublet_core::process::epoch_seconds;
use sublet_core::request::labels_told;
use sublet_core::text::{is_engine_id, safe};

#[cfg(test)]
mod tests;

/// [`Stored::schema`].
const SCHEMA: &str = "sublet.names/1";

/// Names of this many leases that have ended are kept.
const ENDED: usize = 512;

/// Far more than [`ENDED`] and all leases of a host have, in bytes.
const LARGEST: u64 = 4 << 20;

/// The longest name, image, part and unit, in bytes: together with a container id of 64 digits 256.
const LONGEST: [usize; 4] = [48, 64, 40, 40];

/// Whose name it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// dockerd.
    Docker,
    /// Podman, of root or of a user.
    Podman,
    /// containerd's CRI.
    Containerd,
}

/// A container, as people know it. Texts are as the engine has them: they may hold anything, and are cut.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Name {
    /// `None`: no engine that is known has it.
    pub engine: Option<Engine>,
    /// The engine's name for it; empty without one.
    pub name: String,
    /// What it was started from, as the engine was told.
    pub image: String,
    /// `PROJECT/SERVICE` of Compose, or `NAMESPACE/POD`; empty if it is part of neither.
    pub part_of: String,
    /// The systemd unit that its first process runs in; empty without one.
    pub unit: String,
}

impl Name {
    /// With its texts no longer than [`LONGEST`]. Of an image the end is kept, which has the tag.
    fn cut(mut self) -> Self {
        let [name, image, part_of, unit] = LONGEST;
        for (text, longest) in [(&mut self.name, name), (&mut self.part_of, part_of), (&mut self.unit, unit)]
        {
            let end = (0..=longest.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
            text.truncate(end.unwrap_or_default());
        }
        let surplus = self.image.len().saturating_sub(image);
        let from = (surplus..=self.image.len()).find(|at| self.image.is_char_boundary(*at));
        self.image.drain(..from.unwrap_or_default());
        self
    }
}

/// A name in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// When the lease was last there, in seconds since the epoch.
    pub seen: u64,
    /// The container's id, by which refusals and the guard's actions are recorded; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// What people called it.
    #[serde(flatten)]
    pub name: Name,
}

/// `names.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    schema: String,
    /// By lease id.
    leases: BTreeMap<String, Known>,
}

/// The names of all containers that are known.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<String, Known>);

impl Names {
    /// Of those in `ledger`, as their engines have them now, and of those that have ended. A user without root learns
    /// the names of their own containers alone. What cannot be read or kept has no name: that is no reason to fail.
    pub(crate) fn learn(ledger: &Ledger, config: &Config) -> Self {
        let path = config.state_dir.join("names.json");
        let is_root = geteuid().is_root();
        let mut names = if is_root { Self::stored(&path) } else { Self::default() };
        let before = names.0.clone();
        // But for when they were seen.
        let texts = |(id, known): (&String, &Known)| (id.clone(), known.name.clone());
        names.note(ledger, epoch_seconds(), |lease| is_own(lease).then(|| learnt(lease)).flatten());
        if is_root && !names.0.iter().map(texts).eq(before.iter().map(texts)) {
            names.store(&path);
        }
        names
    }

    #[cfg(test)]
    pub(crate) fn for_test(lease: &Lease, name: Name) -> Self {
        let known = Known { seen: 0, container_id: lease.container.id.clone(), name };
        Self([(lease.id.to_string(), known)].into())
    }

    /// What the container of `lease` is called.
    pub fn of(&self, lease: &Lease) -> Option<&Name> {
        self.0.get(lease.id.as_str()).map(|known| &known.name)
    }

    /// What the container of the lease with this id is or was called.
    pub(crate) fn of_lease_id(&self, lease: &str) -> Option<&Name> {
        self.0.get(lease).map(|known| &known.name)
    }

    /// Those of leases that are not in `ledger` any more.
    fn of_ended(&self, ledger: &Ledger) -> impl Iterator<Item = (&str, &Known)> {
        let has_ended = |id: &str| !ledger.leases.iter().any(|lease| lease.id.as_str() == id);
        self.0.iter().map(|(id, known)| (id.as_str(), known)).filter(move |(id, _)| has_ended(id))
    }

    /// The leases that have ended whose container `text` means, the last one first, and what is known of it: by its name,
    /// its id, the lease's id, or a prefix of these.
    pub fn ended(&self, text: &str, ledger: &Ledger) -> Vec<(&str, &Known)> {
        let labels = |(id, known): (&str, &Known)| {
            [id.to_owned(), known.container_id.clone(), known.name.name.clone()]
        };
        let mut found = meant(text, &self.of_ended(ledger).collect::<Vec<_>>(), labels);
        found.sort_by_key(|(_, known)| std::cmp::Reverse(known.seen));
        found
    }

    fn note(&mut self, ledger: &Ledger, now: u64, learn: impl Fn(&Lease) -> Option<Name>) {
        for lease in &ledger.leases {
            let name = learn(lease).map(Name::cut);
            let known = self.0.remove(lease.id.as_str());
            if let Some(name) = name.or_else(|| known.map(|known| known.name)) {
                let container_id: String = lease.container.id.chars().take(64).collect();
                self.0.insert(lease.id.to_string(), Known { seen: now, container_id, name });
            }
        }
        let ended = self.of_ended(ledger).map(|(id, known)| (known.seen, id.to_owned()));
        let mut ended: Vec<(u64, String)> = ended.collect();
        ended.sort();
        let surplus = ended.len().saturating_sub(ENDED);
        for (_, id) in ended.drain(..surplus) {
            self.0.remove(&id);
        }
    }

    fn stored(path: &Path) -> Self {
        let text = read_if_trusted(path, LARGEST).unwrap_or_default();
        let stored = serde_json::from_slice::<Stored>(&text).ok().filter(|stored| stored.schema == SCHEMA);
        Self(stored.map(|stored| stored.leases).unwrap_or_default())
    }

    fn store(&self, path: &Path) {
        let stored = Stored { schema: SCHEMA.to_owned(), leases: self.0.clone() };
        let written = serde_json::to_vec(&stored).map_err(Into::into);
        if let Err(error) = written.and_then(|text| replace(path, &text, 0o600)) {
            tracing::debug!("cannot write names.json: {error}");
        }
    }
}

/// Whether this process may look at what the lease's paths lead to: those of a user's container are that user's word,
/// which root does not follow.
pub(crate) fn is_own(lease: &Lease) -> bool {
    let us = geteuid();
    if us.is_root() { !lease.brokered } else { lease.container.uid == us.as_raw() }
}

/// The name of user `uid`, else the number.
pub fn user(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// The text means no lease, or several.
#[allow(missing_docs, reason = "the message says what the fields are")]
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoLease {
    /// None.
    #[error("no container with a lease is called {0}: `sublet lease list` shows names and ids")]
    None(String),
    /// More than one.
    #[error("{text} means several containers: {}; give more of one of them", matches.join(", "))]
    Several { text: String, matches: Vec<String> },
}

/// Those of `all` that `text` means by one of their labels. What it names in full goes before what it is a prefix of.
fn meant<T: Copy>(text: &str, all: &[T], labels: impl Fn(T) -> [String; 3]) -> Vec<T> {
    let of = |means: &dyn Fn(&String) -> bool| -> Vec<T> {
        all.iter().copied().filter(|one| !text.is_empty() && labels(*one).iter().any(means)).collect()
    };
    let in_full = of(&|label| label == text);
    if in_full.is_empty() { of(&|label| label.starts_with(text)) } else { in_full }
}

/// The lease that `text` means.
pub fn lease_of<'l>(text: &str, ledger: &'l Ledger, names: &Names) -> Result<&'l Lease, NoLease> {
    let labels = |lease: &Lease| {
        let name = names.of(lease).map(|name| name.name.clone()).unwrap_or_default();
        [lease.id.to_string(), lease.container.id.clone(), name]
    };
    let found = meant(text, &ledger.leases.iter().collect::<Vec<_>>(), labels);
    match found[..] {
        [] => Err(NoLease::None(safe(text))),
        [one] => Ok(one),
        _ => {
            let shown = |lease: &&Lease| {
                let name = names.of(lease).map(|name| name.name.as_str()).filter(|name| !name.is_empty());
                format!("{} (lease {})", safe(name.unwrap_or(&lease.container.name())), lease.id)
            };
            Err(NoLease::Several { text: safe(text), matches: found.iter().map(shown).collect() })
        }
    }
}

// Engines' own records of a container. Nothing here says what a container may do: names are shown, and asked for.

/// Units that hold every container of an engine, and say nothing about one.
const ENGINES: [&str; 5] =
    ["docker.service", "containerd.service", "podman.service", "crio.service", "sublet.service"];

/// What people call the container of `lease`; `None` if nothing is known of it.
fn learnt(lease: &Lease) -> Option<Name> {
    let container = &lease.container;
    let by_engine = docker(container).or_else(|| podman(container)).or_else(|| kubernetes(container));
    let cgroup = lease.init.as_ref().and_then(|init| init.cgroup.as_deref());
    let unit = cgroup.and_then(unit).unwrap_or_default();
    if by_engine.is_none() && unit.is_empty() {
        return None;
    }
    Some(Name { unit, ..by_engine.unwrap_or_default() })
}

/// Docker's record (moby, `container/container.go`, `toDisk`), below the data root that the container's root filesystem
/// is in: `Name` begins with a slash, and `Config.Image` is what `docker run` was given.
pub(crate) fn docker(container: &Container) -> Option<Name> {
    let id = Some(&container.id).filter(|id| is_engine_id(id))?;
    let file = Path::new("containers").join(id).join("config.v2.json");
    let record =
        container.rootfs.ancestors().skip(1).map(|root| root.join(&file)).find(|path| path.exists())?;
    let record = read(&record)?;
    let (name, config) = (record["Name"].as_str()?, &record["Config"]);
    let label = |key: &str| config["Labels"][format!("com.docker.compose.{key}")].as_str();
    let part_of =
        label("project").zip(label("service")).map(|(project, service)| format!("{project}/{service}"));
    Some(Name {
        engine: Some(Engine::Docker),
        name: name.strip_prefix('/').unwrap_or(name).to_owned(),
        image: config["Image"].as_str()?.to_owned(),
        part_of: part_of.unwrap_or_default(),
        unit: String::new(),
    })
}

/// The list of Podman's storage (containers/storage, `containers.go`), in which the container's bundle is; of
/// containers that are removed when they end (`--rm`) there is another list.
fn podman(container: &Container) -> Option<Name> {
    let id = container.id.as_str();
    if !is_engine_id(id) || !container.bundle.ends_with(Path::new(id).join("userdata")) {
        return None;
    }
    let storage = container.bundle.ancestors().nth(2)?;
    let lists = ["containers.json", "volatile-containers.json"].map(|list| storage.join(list));
    let in_list = |list: &PathBuf| read(list)?.as_array()?.iter().find(|entry| entry["id"] == id).cloned();
    let entry = lists.iter().find_map(in_list)?;
    let metadata = entry["metadata"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Some(Name {
        engine: Some(Engine::Podman),
        name: text(&entry["names"][0]),
        image: text(&metadata.unwrap_or_default()["image-name"]),
        ..Name::default()
    })
}

/// Annotations of containerd's CRI, in a bundle of its own.
fn kubernetes(container: &Container) -> Option<Name> {
    let bundle = Path::new("io.containerd.runtime.v2.task/k8s.io").join(&container.id);
    if container.id.is_empty() || !container.bundle.ends_with(bundle) {
        return None;
    }
    let spec: Value = JsonFile::read(&container.bundle.join("config.json")).ok()?.parse().ok()?;
    let mut annotations = oci::annotations(&spec).ok()?;
    let mut take = |key: &str| annotations.remove(&format!("io.kubernetes.cri.{key}")).unwrap_or_default();
    let (namespace, pod) = (take("sandbox-namespace"), take("sandbox-name"));
    Some(Name {
        engine: Some(Engine::Containerd),
        name: take("container-name"),
        image: take("image-name"),
        part_of: if pod.is_empty() { pod } else { format!("{namespace}/{pod}") },
        unit: String::new(),
    })
}

fn read(file: &Path) -> Option<Value> {
    serde_json::from_slice(&JsonFile::read(file).ok()?.text).ok()
}

/// The innermost systemd service that a cgroup directory lies in (systemd.resource-control(5): one directory a unit).
fn unit(cgroup: &Path) -> Option<String> {
    let names = cgroup.components().rev().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let mut services = names.filter(|name| name.ends_with(".service"));
    let service = services.next()?;
    let says_nothing = ENGINES.contains(&service) || service.starts_with("user@");
    (!says_nothing).then(|| service.to_owned())
}

/// What is said of [`without_share`].
pub(crate) const WHY_WITHOUT_SHARE: &str =
    "started with the runtime sublet, but without a share: no annotation reached it";

/// The names of containers that run, were started with sublet's runtime and have no share, of a dockerd with this
/// data-root: by Docker's own records, because the shim keeps none of them.
pub(crate) fn without_share(data_root: &Path, ledger: &Ledger) -> Vec<String> {
    let entries = std::fs::read_dir(data_root.join("containers")).into_iter().flatten().flatten();
    let holds_none = |id: OsString| !ledger.leases.iter().any(|lease| lease.container.id.as_str() == id);
    let holding_none = entries.filter(|entry| holds_none(entry.file_name()));
    let mut names: Vec<String> = holding_none.filter_map(|entry| running_by_sublet(&entry.path())).collect();
    names.sort();
    names
}

/// The container's name, if it runs and `sublet` is its runtime (moby, `container/container.go`, `toDisk`), and what is to be
/// said of its labels.
fn running_by_sublet(container: &Path) -> Option<String> {
    if read(&container.join("hostconfig.json"))?["Runtime"] != "sublet" {
        return None;
    }
    let record = read(&container.join("config.v2.json"))?;
    let name = record["Name"].as_str().filter(|_| record["State"]["Running"] == true)?;
    let labels = BTreeMap::deserialize(&record["Config"]["Labels"]).unwrap_or_default();
    let told = labels_told(&labels, "as --annotation").map(|told| format!(" ({told})"));
    Some(safe(name.strip_prefix('/').unwrap_or(name)) + &told.unwrap_or_default())
}
