//! Names of containers and users, and the containers that run without a share.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use nix::unistd::{Uid, User};
use serde::Deserialize as _;
use serde_json::Value;

use sublet_core::ledger::Ledger;
pub use sublet_core::names::*;
use sublet_core::oci::JsonFile;
use sublet_core::request::warn_of_labels;
use sublet_core::text::safe;

/// The name of user `uid`, else the number.
pub fn user(uid: u32) -> String {
    let user = User::from_uid(Uid::from_raw(uid)).ok().flatten();
    user.map_or_else(|| uid.to_string(), |user| user.name)
}

/// Whose a container is, where root looks at one of a user's.
pub(crate) fn of_user(uid: u32) -> String {
    format!("of user {} (uid {uid})", user(uid))
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
    use sublet_core::ledger::fixture::lease;

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
