//! What people call the containers that hold leases: their engine's name and image, the Compose service or the pod that
//! they are part of, their systemd unit. Learnt from the engines' own files by the commands that show containers, never
//! while a container starts, and kept in `names.json` beside the ledger: an engine forgets a container that is removed.

use std::collections::BTreeMap;
use std::path::Path;

use nix::unistd::{Uid, User, geteuid};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use sublet_core::config::Config;
use sublet_core::fs::{atomic, trusted};
use sublet_core::ledger::{Lease, Ledger};
use sublet_core::process::epoch_seconds;
use sublet_core::text::safe;

mod engines;
mod without_share;

pub(crate) use without_share::{WHY as WHY_WITHOUT_SHARE, without_share};

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
    fn cut(self) -> Self {
        let [name, image, part_of, unit] = LONGEST;
        let surplus = self.image.len().saturating_sub(image);
        let from =
            (surplus..=self.image.len()).find(|at| self.image.is_char_boundary(*at)).unwrap_or_default();
        let head = |text: &str, longest: usize| {
            let end = (0..=longest.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
            text[..end.unwrap_or_default()].to_owned()
        };
        Self {
            engine: self.engine,
            name: head(&self.name, name),
            image: self.image[from..].to_owned(),
            part_of: head(&self.part_of, part_of),
            unit: head(&self.unit, unit),
        }
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
        names.note(ledger, epoch_seconds(), |lease| is_own(lease).then(|| engines::name(lease)).flatten());
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
        let text = trusted::read_if_trusted(path, LARGEST).unwrap_or_default();
        let stored = serde_json::from_slice::<Stored>(&text).ok().filter(|stored| stored.schema == SCHEMA);
        Self(stored.map(|stored| stored.leases).unwrap_or_default())
    }

    fn store(&self, path: &Path) {
        let stored = Stored { schema: SCHEMA.to_owned(), leases: self.0.clone() };
        let written = serde_json::to_vec(&stored).map_err(Into::into);
        if let Err(error) = written.and_then(|text| atomic::replace(path, &text, 0o600)) {
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

#[cfg(test)]
mod tests {
    use sublet_core::ledger::fixture::lease;

    use super::*;

    fn ledger(numbers: &[u64]) -> Ledger {
        Ledger {
            leases: numbers.iter().map(|number| lease(*number, "GPU-0")).collect(),
            ..Ledger::empty("boot")
        }
    }

    fn named(name: &str) -> Name {
        Name { name: name.to_owned(), ..Name::default() }
    }

    #[test]
    fn stored_names_are_read_and_written_again_alike() {
        let stored = include_str!("../../../tests/formats/every-key/names.json");
        let stored: serde_json::Value = serde_json::from_str(stored).unwrap();
        let read: Stored = serde_json::from_value(stored.clone()).unwrap();
        assert_eq!(serde_json::to_value(read).unwrap(), stored);
    }

    #[test]
    fn what_an_engine_has_forgotten_keeps_its_name() {
        let mut names = Names::default();
        names.note(&ledger(&[1, 2]), 10, |_| Some(named("web")));
        names.note(&ledger(&[1]), 20, |_| None);
        assert_eq!(names.0.values().map(|known| known.seen).collect::<Vec<_>>(), [20, 10]);
        assert_eq!(names.of(&lease(2, "GPU-0")).map(|name| name.name.as_str()), Some("web"));
        names.note(&ledger(&[1]), 30, |_| Some(named("renamed")));
        assert_eq!(names.of(&lease(1, "GPU-0")).map(|name| name.name.as_str()), Some("renamed"));
    }

    #[test]
    fn names_of_those_that_ended_first_are_dropped() {
        let mut names = Names::default();
        for number in 0..600 {
            names.note(&ledger(&[number]), number, |_| Some(named("x")));
        }
        assert_eq!(names.0.len(), ENDED + 1);
        assert!(names.of(&lease(87, "GPU-0")).is_some() && names.of(&lease(86, "GPU-0")).is_none());
    }

    #[test]
    fn long_names_are_cut_between_characters() {
        let long = "ä".repeat(100);
        let name =
            Name { engine: None, name: long.clone(), image: long.clone(), part_of: long.clone(), unit: long };
        let cut = name.cut();
        let lengths = [&cut.name, &cut.image, &cut.part_of, &cut.unit].map(String::len);
        assert_eq!(lengths, LONGEST);
        let image = format!("registry.example/{}:tag", "x".repeat(100));
        assert!(Name { image, ..Name::default() }.cut().image.ends_with("x:tag"));
    }

    #[test]
    fn the_file_is_roots_alone_and_what_is_none_is_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("names.json");
        let mut names = Names::default();
        names.note(&ledger(&[1]), 10, |_| Some(named("a\u{1b}[31m")));
        names.store(&path);
        let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(Names::stored(&path), names);
        for text in ["", "{", "[]", r#"{"schema":"sublet.names/2","leases":{}}"#] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Names::stored(&path), Names::default(), "{text}");
        }
    }

    /// Leases 1 to 3; the containers are c1, c2 and c3, the first two named `web-1` and `web`.
    fn world() -> (Ledger, Names) {
        let leases = [1, 2, 3].map(|number| {
            let mut lease = lease(number, "GPU-0");
            lease.container.id = format!("c{number}");
            lease
        });
        let known = |name: &str| Known {
            seen: 0,
            container_id: String::new(),
            name: Name { name: name.to_owned(), ..Name::default() },
        };
        let names = [("web-1", 0), ("web", 1)].map(|(name, at)| (leases[at].id.to_string(), known(name)));
        (Ledger { leases: leases.to_vec(), ..Ledger::empty("boot") }, Names(names.into()))
    }

    #[test]
    fn a_name_an_id_and_a_unique_prefix_are_understood() {
        let (ledger, names) = world();
        let found = |text: &str| lease_of(text, &ledger, &names).map(|lease| lease.container.id.as_str());
        assert_eq!(found("web-1"), Ok("c1"));
        assert_eq!(found("web"), Ok("c2"), "in full, before the prefix of another");
        assert_eq!(found("web-"), Ok("c1"));
        assert_eq!(found("c3"), Ok("c3"));
        assert_eq!(found(ledger.leases[2].id.as_str()), Ok("c3"));
    }

    #[test]
    fn none_and_several_are_said() {
        let (ledger, names) = world();
        let error = |text: &str| lease_of(text, &ledger, &names).unwrap_err();
        assert_eq!(error("x\u{1b}"), NoLease::None("x\\u{1b}".to_owned()));
        assert_eq!(error(""), NoLease::None(String::new()));
        let NoLease::Several { matches, .. } = error("c") else { panic!("c means three") };
        assert_eq!(matches.len(), 3);
        assert!(
            matches[0].starts_with("web-1 (lease ") && matches[2].starts_with("c3 (lease "),
            "{matches:?}"
        );
    }

    #[test]
    fn a_container_that_has_ended_is_found_by_name_and_id_the_last_one_first() {
        let (ledger, mut names) = world();
        let mut end = |number: u64, name: &str| {
            let name = Name { name: name.to_owned(), ..Name::default() };
            let known = Known { seen: number, container_id: format!("c{number}"), name };
            names.0.insert(lease(number, "GPU-0").id.to_string(), known);
        };
        end(7, "job");
        end(9, "job");
        end(8, "jobs");
        let found = |text: &str| {
            names.ended(text, &ledger).into_iter().map(|(_, known)| &*known.container_id).collect::<Vec<_>>()
        };
        assert_eq!(found("job"), ["c9", "c7"], "in full, before what it is a prefix of");
        assert_eq!(found("jobs"), ["c8"]);
        assert_eq!(found("jo"), ["c9", "c8", "c7"]);
        assert_eq!(found("c7"), ["c7"]);
        assert_eq!((found("web"), found("")), (vec![], vec![]), "it has not ended");
    }
}
