//! Names of containers and users, and the containers that run without a share.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use nix::unistd::{Uid, User};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use sublet_core::ledger::Ledger;
pub use sublet_core::names::*;
use sublet_core::oci::JsonFile;
use sublet_core::request::warn_of_labels;
use sublet_core::text::{cut, safe};

/// The name of user `uid`, else the number.
pub fn user(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Whose a container is, where root looks at one of a user's.
pub(crate) fn of_user(uid: u32) -> String {
    format!("of user {} (uid {uid})", user(uid))
}

/// Whom a share is for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct Owner {
    /// A user's name, or as it was given: it may hold anything.
    pub name: String,
    /// `user`: the kernel or Slurm says it; `claim`: `sublet.owner`; `label`: a label; `project`: Compose, or a pod's namespace.
    #[schemars(with = "String")]
    pub known_by: KnownBy,
}

/// How an owner is known, the surest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum KnownBy {
    /// The kernel or Slurm says which user it is.
    User,
    /// `sublet.owner` of root's container says so: whoever may use root's engine may write that.
    Claim,
    /// A label of root's container does (`[accounting] owner_labels`).
    Label,
    /// It is the Compose project or the pod's namespace.
    Project,
}

impl Owner {
    /// Of a container of `uid`, which `claim` is said of, and which is called `name`.
    pub(crate) fn known(uid: u32, claim: &str, name: Option<&Name>) -> Option<Self> {
        let owner =
            |name: &str, known_by| (!name.is_empty()).then(|| Self { name: name.to_owned(), known_by });
        if uid != 0 {
            return owner(&user(uid), KnownBy::User);
        }
        let labelled = || owner(&name?.owner, KnownBy::Label);
        let of_project = || owner(name?.part_of.split_once('/')?.0, KnownBy::Project);
        owner(claim, KnownBy::Claim).or_else(labelled).or_else(of_project)
    }

    /// For people: what is not known to be true says how it is known.
    pub(crate) fn words(&self) -> String {
        let name = cut(&self.name);
        if self.known_by == KnownBy::User { name } else { format!("{name} ({})", self.known_by) }
    }
}

/// Whom to show: `--user` and `--owner`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, clap::Args)]
pub(crate) struct Of {
    /// Only containers of this user's engine
    #[arg(long)]
    user: Option<String>,
    /// Only what is for this owner, however that is known
    #[arg(long)]
    owner: Option<String>,
}

impl Of {
    /// Whether both fit.
    pub(crate) fn has(&self, user: &str, owner: Option<&Owner>) -> bool {
        self.user.as_deref().is_none_or(|wanted| wanted == user)
            && self.owner.as_ref().is_none_or(|wanted| owner.is_some_and(|owner| owner.name == *wanted))
    }

    /// Whether either is given.
    pub(crate) const fn is_any(&self) -> bool {
        self.user.is_some() || self.owner.is_some()
    }
}

/// The remark on [`without_share`].
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

/// The container's name, if it runs and `sublet` is its runtime (moby, `container/container.go`, `toDisk`), and a
/// warning about its labels.
fn running_by_sublet(container: &Path) -> Option<String> {
    if read(&container.join("hostconfig.json"))?["Runtime"] != "sublet" {
        return None;
    }
    let record = read(&container.join("config.v2.json"))?;
    let name = record["Name"].as_str().filter(|_| record["State"]["Running"] == true)?;
    let labels = BTreeMap::deserialize(&record["Config"]["Labels"]).unwrap_or_default();
    let warning = warn_of_labels(&labels, "as --annotation").map(|warning| format!(" ({warning})"));
    Some(safe(name.strip_prefix('/').unwrap_or(name)) + &warning.unwrap_or_default())
}

fn read(file: &Path) -> Option<Value> {
    serde_json::from_slice(&JsonFile::read(file).ok()?.text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::ledger::Lease;
    use sublet_core::ledger::fixture::lease;

    #[test]
    fn an_owner_is_a_user_where_that_is_known_and_else_says_how_it_is_known() {
        let mut held = lease(1, "GPU-0");
        let name = Name { part_of: "shop/web".into(), owner: "vision".into(), ..Name::default() };
        let words = |held: &Lease, name: Option<&Name>| {
            let claim = held.claimed_owner.as_deref().unwrap_or_default();
            Owner::known(held.container.uid, claim, name).map(|owner| owner.words())
        };
        assert_eq!(words(&held, None), None);
        let of_project = Name { owner: String::new(), ..name.clone() };
        assert_eq!(words(&held, Some(&of_project)).as_deref(), Some("shop (project)"));
        assert_eq!(words(&held, Some(&name)).as_deref(), Some("vision (label)"));
        held.claimed_owner = Some("ana".to_owned());
        assert_eq!(words(&held, Some(&name)).as_deref(), Some("ana (claim)"));
        held.container.uid = 4_000_000_000;
        assert_eq!(words(&held, Some(&name)).as_deref(), Some("4000000000"), "a user has no claim");
        let of = |user: Option<&str>, owner: Option<&str>| Of {
            user: user.map(str::to_owned),
            owner: owner.map(str::to_owned),
        };
        let ana = Owner::known(0, "ana", None);
        assert!(of(None, None).has("root", None) && of(Some("root"), Some("ana")).has("root", ana.as_ref()));
        assert!(!of(Some("1"), None).has("root", None) && !of(None, Some("ana")).has("root", None));
    }

    #[test]
    fn a_label_or_a_project_of_any_length_and_with_control_characters_is_shown_short_and_safe() {
        let long = format!("\u{1b}[2J\n{}", "x".repeat(4096));
        let labelled = Name { owner: long.clone(), ..Name::default() };
        let of_project = Name { part_of: format!("{long}/web"), ..Name::default() };
        for name in [labelled, of_project] {
            let words = Owner::known(0, "", Some(&name)).unwrap().words();
            assert!(words.starts_with("\\u{1b}[2J") && words.len() < 200, "{words}");
            assert!(!words.contains(char::is_control), "{words:?}");
        }
    }

    #[test]
    fn those_that_run_by_sublet_and_hold_no_lease_are_named() {
        let root = tempfile::tempdir().unwrap();
        let container = |id: &str, runtime: &str, running: bool| {
            let dir = root.path().join("containers").join(id);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("hostconfig.json"), format!(r#"{{"Runtime": "{runtime}"}}"#)).unwrap();
            let record = format!(r#"{{"Name": "/of-{id}", "State": {{"Running": {running}}}}}"#);
            std::fs::write(dir.join("config.v2.json"), record).unwrap();
        };
        container("b", "sublet", true);
        container("a", "sublet", true);
        container("ended", "sublet", false);
        container("plain", "runc", true);
        container("named", "sublet-small", true);
        std::fs::write(root.path().join("containers/torn"), "").unwrap();
        let mut ledger = Ledger::empty("");
        assert_eq!(without_share(root.path(), &ledger), ["of-a", "of-b"]);
        let record = r#"{"Name": "/of-b", "State": {"Running": true}, "Config": {"Labels": {"a": "b", "sublet.sm": "25"}}}"#;
        std::fs::write(root.path().join("containers/b/config.v2.json"), record).unwrap();
        let of_b = "of-b (labels are not annotations: write as --annotation sublet.sm=25)";
        let mut held = lease(1, "GPU-0");
        held.container.id = "a".to_owned();
        ledger.leases.push(held);
        assert_eq!(without_share(root.path(), &ledger), [of_b]);
        assert_eq!(without_share(Path::new("/nonexistent"), &ledger), Vec::<String>::new());
    }
}
