//! The names of containers for people: their engine's name and image, the Compose service or the pod that they are part of,
//! their systemd unit. Learnt from the engines' own files, which do not hang as an engine's socket may, by commands that show
//! containers and where one is refused, never while one starts.
//!
//! Messages and records have ids, which tell other users nothing. Where they are shown, names take the ids' places
//! ([`Names::replace_ids`]). The names are kept in `names.json` beside the ledger, for root alone: an engine forgets a
//! container that is removed.

use std::collections::BTreeMap;
use std::path::{Component, Path};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::config_files::{self, Known as Recorded};
use crate::fs::{parse_json, read_if_trusted, replace};
use crate::ledger::{Container, Lease, Ledger, Store, is_remote, is_there, read_text};
use crate::oci::{JsonFile, container_root, containers_by_name};
use crate::process::{epoch_seconds, is_nested};
use crate::text::{cut, safe, short_id};

#[cfg(test)]
mod tests;

/// [`Stored::schema`].
const SCHEMA: &str = "sublet.names/1";

/// Names of this many leases that have ended are kept, and of as many refused containers.
const ENDED: usize = 512;

/// Far more than [`ENDED`] and all leases of a host have, in bytes.
const LARGEST: u64 = 4 << 20;

/// The longest name, image, part, unit and owner, in bytes: together with a container id of 64 digits 320.
const LONGEST: [usize; 5] = [48, 64, 40, 40, 64];

/// How long names are looked for: an engine waits where a container is refused. A container left out keeps its name.
const LIMIT: Duration = Duration::from_millis(500);

/// Whose name it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// `None`: no engine that is known has it.
    pub engine: Option<Engine>,
    /// The engine's name for it; empty without one.
    pub name: String,
    /// The image that it was started from, as the engine was given it.
    pub image: String,
    /// `PROJECT/SERVICE` of Compose, or `NAMESPACE/POD`; empty if it is part of neither.
    pub part_of: String,
    /// The systemd unit that its first process runs in; empty without one.
    pub unit: String,
    /// What the first of `[accounting] owner_labels` that it has says; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
}

impl Name {
    /// Its label for people: its name; its service, pod or unit where it has none.
    pub fn called(&self) -> Option<&str> {
        [&self.name, &self.part_of, &self.unit].into_iter().find(|text| !text.is_empty()).map(String::as_str)
    }

    /// With its texts no longer than [`LONGEST`]. Of an image the end is kept, which has the tag.
    fn cut(mut self) -> Self {
        let [name, image, part_of, unit, owner] = LONGEST;
        let texts = [&mut self.name, &mut self.part_of, &mut self.unit, &mut self.owner];
        for (text, longest) in texts.into_iter().zip([name, part_of, unit, owner]) {
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
    /// When the lease was last there, or the container was refused, in seconds since the epoch.
    pub seen: u64,
    /// The container's id, by which refusals and the guard's actions are recorded; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// Its name then.
    #[serde(flatten)]
    pub name: Name,
}

impl Known {
    fn of(container: &Container, name: Name, seen: u64) -> Self {
        Self { seen, container_id: container.id.chars().take(64).collect(), name }
    }
}

/// `names.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    schema: String,
    /// By lease id; of containers that were refused, by container id.
    leases: BTreeMap<String, Known>,
}

/// The names of all containers that are known.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeMap<String, Known>);

/// Those that this process, which ends then, learnt when it refused a container: engines' files are read once.
pub(crate) static REFUSED: OnceLock<Names> = OnceLock::new();

impl Names {
    /// [`Names::learn`] of the ledger of now, and of `refused`, a container that gets no lease.
    pub fn now(refused: Option<&Container>, config: &Config) -> Self {
        // Below a rootless engine root's files seem to be nobody's, and no store can be opened.
        let ledger = if is_remote(config) {
            parse_json(&read_text(&config.state_dir)).ok()
        } else {
            Store::open(&config.state_dir).and_then(|store| store.peek()).ok()
        };
        ledger.map(|ledger| Self::learn_with(refused, &ledger, config)).unwrap_or_default()
    }

    /// Of the containers in `ledger`, as their engines have them now, and of ended ones. A user without root learns
    /// the names of their own containers alone. Without a readable record there is no name, which is no reason to fail.
    pub fn learn(ledger: &Ledger, config: &Config) -> Self {
        Self::learn_with(None, ledger, config)
    }

    fn learn_with(refused: Option<&Container>, ledger: &Ledger, config: &Config) -> Self {
        let path = config.state_dir.join("names.json");
        let (began, now, is_remote) = (Instant::now(), epoch_seconds(), is_remote(config));
        let mut names = if is_remote { Self::default() } else { Self::stored(&path) };
        // Of two that have one name, only present ones need their ids.
        names.0.values_mut().for_each(|known| known.seen = known.seen.min(now.saturating_sub(1)));
        let before = names.0.clone();
        let may_look = |lease: &Lease| is_own(lease, is_remote) && began.elapsed() < LIMIT;
        let labels = &config.accounting.owner_labels;
        names.note(ledger, now, |lease| may_look(lease).then(|| learnt(lease, labels)).flatten());
        let refused = refused.filter(|one| !one.id.is_empty());
        let refused = refused.and_then(|one| Some(Known::of(one, by_engine(one, labels)?.cut(), now)));
        names.0.extend(refused.map(|known| (known.container_id.clone(), known)));
        // But for when they were seen.
        let texts = |(id, known): (&String, &Known)| (id.clone(), known.name.clone());
        if !is_remote && !names.0.iter().map(texts).eq(before.iter().map(texts)) {
            names.store(&path, ledger);
        }
        names
    }

    /// Of one container.
    #[cfg(any(test, feature = "fixtures"))]
    pub fn for_test(lease: &Lease, name: Name) -> Self {
        Self([(lease.id.to_string(), Known::of(&lease.container, name, 0))].into())
    }

    /// The name of the container of `lease`.
    pub fn of(&self, lease: &Lease) -> Option<&Name> {
        self.of_id(lease.id.as_str())
    }

    /// The name, also a former one, of the container of the lease with this id, or of the refused one with this container id.
    pub fn of_id(&self, id: &str) -> Option<&Name> {
        self.0.get(id).map(|known| &known.name)
    }

    /// The ids of containers with this name that were refused.
    pub fn refused<'n>(&'n self, name: &'n str) -> impl Iterator<Item = &'n str> {
        let all = self.0.iter().filter(|(id, known)| **id == known.container_id);
        all.filter(move |(_, known)| known.name.name == name).map(|(id, _)| id.as_str())
    }

    /// `text` with the names of the containers of which it has the ids. Of two that run and have one name, it also
    /// keeps the ids.
    pub fn replace_ids(&self, text: &str) -> String {
        let replaced = |word: &str| {
            let name = self.called(id_in(word));
            name.map_or_else(|| word.to_owned(), |name| word.replacen(id_in(word), &name, 1))
        };
        text.split_inclusive(char::is_whitespace).map(replaced).collect()
    }

    /// [`Names::replace_ids`] of a record of a container of `uid`. Ids in another user's words get no names.
    pub fn replace_ids_of(&self, uid: u32, text: &str) -> String {
        if is_another(uid) { text.to_owned() } else { self.replace_ids(text) }
    }

    /// Whether `text` begins the id or the name of a container that is known here, or the id of its lease.
    pub fn knows(&self, text: &str) -> bool {
        let mut labels = self.0.iter().flat_map(|(id, known)| [id, &known.container_id, &known.name.name]);
        labels.any(|label| label.starts_with(text))
    }

    fn called(&self, id: &str) -> Option<String> {
        let is_its = |known: &&Known| is_id(id) && known.container_id.starts_with(id);
        let known = self.0.values().filter(is_its).max_by_key(|known| known.seen)?;
        let name = known.name.called()?;
        let is_twin = |other: &Known| other.seen == known.seen && other.container_id != known.container_id;
        let has_twin = self.0.values().any(|other| is_twin(other) && other.name.called() == Some(name));
        Some(if has_twin { format!("{} ({})", cut(name), short_id(id)) } else { cut(name) })
    }

    /// The names of leases and refused containers that are not in `ledger`.
    fn gone(&self, ledger: &Ledger) -> impl Iterator<Item = (&str, &Known)> {
        let is_there = |id: &str| ledger.leases.iter().any(|lease| lease.id.as_str() == id);
        self.0.iter().map(|(id, known)| (id.as_str(), known)).filter(move |(id, _)| !is_there(id))
    }

    /// The leases that have ended whose container `text` means, the last one first, and its record here: by its name,
    /// its id, the lease's id, or a prefix of these.
    pub fn ended(&self, text: &str, ledger: &Ledger) -> Vec<(&str, &Known)> {
        let labels = |(id, known): (&str, &Known)| {
            [id.to_owned(), known.container_id.clone(), known.name.name.clone()]
        };
        let ended = self.gone(ledger).filter(|(id, known)| *id != known.container_id);
        let mut found = meant(text, &ended.collect::<Vec<_>>(), labels);
        found.sort_by_key(|(_, known)| std::cmp::Reverse(known.seen));
        found
    }

    fn note(&mut self, ledger: &Ledger, now: u64, learn: impl Fn(&Lease) -> Option<Name>) {
        for lease in &ledger.leases {
            let name = learn(lease).map(Name::cut);
            let known = self.0.remove(lease.id.as_str());
            if let Some(name) = name.or_else(|| known.map(|known| known.name)) {
                self.0.insert(lease.id.to_string(), Known::of(&lease.container, name, now));
            }
        }
        self.thin_out(ledger);
    }

    /// Drops the oldest beyond [`ENDED`]: of leases, and of refusals.
    fn thin_out(&mut self, ledger: &Ledger) {
        for refused in [false, true] {
            let ended = self.gone(ledger).filter(|(id, known)| (*id == known.container_id) == refused);
            let mut ended: Vec<_> = ended.map(|(id, known)| (known.seen, id.to_owned())).collect();
            ended.sort();
            let surplus = ended.len().saturating_sub(ENDED);
            for (_, id) in ended.drain(..surplus) {
                self.0.remove(&id);
            }
        }
    }

    fn stored(path: &Path) -> Self {
        let text = read_if_trusted(path, LARGEST).unwrap_or_default();
        let stored = parse_json::<Stored>(&text).ok().filter(|stored| stored.schema == SCHEMA);
        Self(stored.map(|stored| stored.leases).unwrap_or_default())
    }

    fn store(&mut self, path: &Path, ledger: &Ledger) {
        // Other processes may have stored theirs since these were read.
        self.0 = Self::stored(path).0.into_iter().chain(std::mem::take(&mut self.0)).collect();
        self.thin_out(ledger);
        let stored = Stored { schema: SCHEMA.to_owned(), leases: self.0.clone() };
        let written = serde_json::to_vec(&stored).map_err(Into::into);
        if let Err(error) = written.and_then(|text| replace(path, &text, 0o600)) {
            tracing::debug!("cannot write names.json: {error}");
        }
    }
}

/// Whether this process may look at the files at the lease's paths: paths of a user's container are that user's word,
/// which root does not follow. Below a rootless engine a process does not see which of them are its user's, and cannot
/// read the files of other users.
pub fn is_own(lease: &Lease, is_remote: bool) -> bool {
    let is_users = || lease.container.uid == geteuid().as_raw() || lease.brokered && is_nested();
    if is_remote { is_users() } else { !lease.brokered }
}

/// Whether root looks at records of a container of `uid`, a user: its id and all words are that user's, who may give
/// the id of another container.
pub fn is_another(uid: u32) -> bool {
    uid != 0 && uid != geteuid().as_raw()
}

/// `text`, an error, as [`Names::replace_ids`] has it by the names of now.
pub fn replace_ids(text: &str) -> String {
    let has_id = text.split_whitespace().any(|word| is_id(id_in(word)));
    let config = if has_id { config_files::load().ok() } else { None };
    let config = config.filter(|config| is_there(&config.state_dir));
    let Some(config) = config else { return text.to_owned() };
    REFUSED.get().map_or_else(|| Names::now(None, &config).replace_ids(text), |names| names.replace_ids(text))
}

/// `word` without the punctuation around it.
fn id_in(word: &str) -> &str {
    word.trim_matches(|character: char| !character.is_ascii_alphanumeric())
}

/// Whether it is an id as engines make them, whole or as messages have it ([`short_id`]).
pub fn is_id(text: &str) -> bool {
    matches!(text.len(), 12 | 64) && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
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

/// The items of `all` that `text` means by one of their labels. Full labels go before prefixes.
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

// Engines' own records of a container. Nothing here decides the rights of a container: names are shown, and asked for.

/// Units that hold every container of an engine, and say nothing about one.
const ENGINES: [&str; 5] =
    ["docker.service", "containerd.service", "podman.service", "crio.service", "sublet.service"];

/// The name of the container of `lease` for people; `None` if nothing is known of it.
fn learnt(lease: &Lease, owner_labels: &[String]) -> Option<Name> {
    let by_engine = by_engine(&lease.container, owner_labels);
    let cgroup = lease.init.as_ref().and_then(|init| init.cgroup.as_deref());
    let unit = cgroup.and_then(unit).unwrap_or_default();
    if by_engine.is_none() && unit.is_empty() {
        return None;
    }
    Some(Name { unit, ..by_engine.unwrap_or_default() })
}

/// As its engine's own record has it; one of `owner_labels` says whom it is for.
pub fn by_engine(container: &Container, owner_labels: &[String]) -> Option<Name> {
    let Container { id, bundle, rootfs, .. } = container;
    let docker = containers_by_name::docker_above(id, rootfs).ok().flatten();
    let podman = || container_root::podman_record(bundle, rootfs);
    let containerd = || {
        let file = bundle.ends_with(id).then(|| JsonFile::read(&bundle.join("config.json")))?.ok()?;
        containers_by_name::read_containerd(id, bundle, &file).ok().flatten()
    };
    let (engine, recorded) = (docker.map(|found| (Engine::Docker, found)))
        .or_else(|| Some((Engine::Podman, podman()?)))
        .or_else(|| Some((Engine::Containerd, containerd()?)))?;
    let Recorded { name, image, part_of, labels, .. } = recorded;
    let owner = owner_labels.iter().find_map(|label| labels.get(label)).cloned().unwrap_or_default();
    Some(Name { engine: Some(engine), name, image, part_of, unit: String::new(), owner })
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
