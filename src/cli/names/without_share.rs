//! Docker's containers that were started with sublet's runtime and have no share, by Docker's own records: the shim keeps
//! none of them.

use std::ffi::OsString;
use std::path::Path;

use super::engines::read;
use sublet_core::ledger::Ledger;
use sublet_core::text::safe;

/// What is said of them.
pub(crate) const WHY: &str = "started with the runtime sublet, but without a share: no annotation reached it";

/// The names of those that run, of a dockerd with this data-root.
pub(crate) fn without_share(data_root: &Path, ledger: &Ledger) -> Vec<String> {
    let entries = std::fs::read_dir(data_root.join("containers")).into_iter().flatten().flatten();
    let holds_none = |id: OsString| !ledger.leases.iter().any(|lease| lease.container.id.as_str() == id);
    let holding_none = entries.filter(|entry| holds_none(entry.file_name()));
    let mut names: Vec<String> = holding_none.filter_map(|entry| running_by_sublet(&entry.path())).collect();
    names.sort();
    names
}

/// The container's name, if it runs and `sublet` is its runtime (moby, `container/container.go`, `toDisk`).
fn running_by_sublet(container: &Path) -> Option<String> {
    if read(&container.join("hostconfig.json"))?["Runtime"] != "sublet" {
        return None;
    }
    let record = read(&container.join("config.v2.json"))?;
    let name = record["Name"].as_str().filter(|_| record["State"]["Running"] == true)?;
    Some(safe(name.strip_prefix('/').unwrap_or(name)))
}

#[cfg(test)]
mod tests {
    use sublet_core::ledger::fixture::lease;

    use super::*;

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
        let mut held = lease(1, "GPU-0");
        held.container.id = "a".to_owned();
        ledger.leases.push(held);
        assert_eq!(without_share(root.path(), &ledger), ["of-b"]);
        assert_eq!(without_share(Path::new("/nonexistent"), &ledger), Vec::<String>::new());
    }
}
