//! `SELinux`: containers may connect to their MPS daemon where the policy module `sublet` is in force, and nowhere else.
//! One that may not would not fail: a CUDA program that does not reach its daemon runs without limits.

use std::path::{Path, PathBuf};

use crate::inventory::under;

/// The package that brings the module, and what to do where there is none.
pub(crate) const FIX: &str =
    "install the package sublet-selinux (semodule -i /usr/share/selinux/packages/sublet.pp)";

/// Whether containers of the host at `root` cannot reach MPS daemons: `SELinux` enforces, without our module.
pub(crate) fn bars_mps(root: &Path) -> bool {
    is_enforcing(root) && !has_module(root)
}

/// `/sys/fs/selinux/enforce` says 1 (selinux(8)); there is none where `SELinux` is off.
pub(crate) fn is_enforcing(root: &Path) -> bool {
    std::fs::read_to_string(under(root, "/sys/fs/selinux/enforce")).is_ok_and(|text| text.trim() == "1")
}

/// Whether a module `sublet` is in a store of policies, and not switched off there (semodule(8)).
fn has_module(root: &Path) -> bool {
    let stores = ["/var/lib/selinux", "/etc/selinux"].map(|dir| under(root, dir));
    let mut modules = stores.iter().flat_map(|dir| children(dir)).map(|store| store.join("active/modules"));
    modules.any(|modules| {
        let is_off = modules.join("disabled/sublet").exists();
        !is_off && children(&modules).iter().any(|priority| priority.join("sublet").exists())
    })
}

fn children(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn mps_is_barred_where_selinux_enforces_without_the_module() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, content: &str| {
            let path = under(root.path(), path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        assert!(!bars_mps(root.path()), "no SELinux");
        file("/sys/fs/selinux/enforce", "0");
        assert!(!bars_mps(root.path()), "permissive");
        file("/sys/fs/selinux/enforce", "1");
        assert!(bars_mps(root.path()));
        file("/var/lib/selinux/targeted/active/modules/400/container/cil", "");
        assert!(bars_mps(root.path()));
        file("/var/lib/selinux/targeted/active/modules/400/sublet/cil", "");
        assert!(!bars_mps(root.path()));
        file("/var/lib/selinux/targeted/active/modules/disabled/sublet", "");
        assert!(bars_mps(root.path()));
    }
}
