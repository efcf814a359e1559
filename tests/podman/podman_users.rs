//! Podman containers in a user namespace of their own. Podman 5 mounts their root filesystem at the place that
//! config.json names in a mount namespace of the runtime's only, after the hook has run. By every entry point, with
//! both storage drivers. Runs in the root that tests/engines/enter gives.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::World;
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::podman::Podman;

const SHARE: &[&str] = &["sublet.sm=25", "sublet.memory=8GiB"];
const MAPPED: &[&str] = &["--uidmap=0:100000:65536"];
const HOLD: &[&str] = &["cuda-probe", "hold", "600"];

fn up(storage: &'static str) -> Podman {
    let world = World::simulated("h200", "");
    // The container's root is 100000 outside, and has to come by.
    std::fs::set_permissions(world.dir.path(), PermissionsExt::from_mode(0o711)).expect("chmod");
    Podman::up_on(world, storage)
}

/// Podman 4's config.json says where the root filesystem is.
fn names_it_itself(podman: &Podman) -> bool {
    let is_old = podman.done(&["version", "--format", "{{.Client.Version}}"]).starts_with("4.");
    if is_old {
        eprintln!("skipped: this Podman's config.json names the root filesystem itself");
    }
    is_old
}

fn is_share(info: &Value) {
    assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
}

fn run(podman: &Podman, entry_point: &[&str], verb: &[&str], name: &str, args: &[&str]) -> String {
    let all = Podman::arguments(verb, name, SHARE, MAPPED, args);
    podman.done(&[entry_point, &all[..]].concat())
}

/// Where the leases in the ledger say that their containers' root filesystems are.
fn root_filesystems(podman: &Podman) -> Vec<PathBuf> {
    let ledger = podman.ledger();
    let leases = ledger["leases"].as_array().cloned().unwrap_or_default();
    leases.iter().map(|lease| lease["container"]["rootfs"].as_str().expect("a path").into()).collect()
}

/// Two neighbours, a stop and a start, and one that is removed as it ends.
fn lives(podman: &Podman, entry_point: &[&str]) {
    for name in ["one", "two"] {
        let _ = run(podman, entry_point, &["run", "-d"], name, HOLD);
        is_share(&podman.event(name, "info"));
        is_share(&podman.exec_info(name, &[]));
    }
    let pid = podman.inspect("one", ".State.Pid");
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("a map");
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "100000", "65536"]);
    let roots = root_filesystems(podman);
    let storage = podman.world.dir.path().join("storage");
    let is_real = |root: &&PathBuf| root.starts_with(&storage) && root.join("bin").is_dir();
    assert_eq!(roots.iter().filter(is_real).count(), 2, "{roots:?}");
    assert_ne!(roots[0], roots[1]);
    podman.done(&["stop", "-t0", "one"]);
    assert_eq!(podman.world.leases().len(), 1);
    podman.done(&["stop", "-t0", "two"]);
    podman.assert_empty();
    podman.done(&["start", "one"]);
    assert_eq!(podman.world.leases().len(), 1);
    is_share(&podman.exec_info("one", &[]));
    let info = run(podman, entry_point, &["run", "--rm"], "rm", &["cuda-probe", "info"]);
    is_share(&serde_json::from_str(&info).expect("JSON"));
    podman.done(&["rm", "-f", "-t0", "one", "two"]);
    podman.assert_empty();
}

fn by_every_entry_point(storage: &'static str) {
    if skip_unless_engines() {
        return;
    }
    let podman = up(storage);
    lives(&podman, &[]);
    lives(&podman, &["--runtime=sublet"]);
    std::fs::remove_file(podman.world.dir.path().join("hooks/sublet.json")).expect("no hook");
    lives(&podman, &["--runtime=sublet"]);
}

#[test]
fn by_every_entry_point_with_vfs() {
    by_every_entry_point("vfs");
}

#[test]
fn by_every_entry_point_with_overlay() {
    by_every_entry_point("overlay");
}

/// hooks/prestart, where Podman's own stage is not set up.
fn only_hooks_of_the_runtimes(podman: &Podman) {
    let hooks = podman.world.dir.path().join("hooks");
    std::fs::remove_file(hooks.join("sublet.json")).expect("no precreate hook");
    for stage in ["createRuntime", "poststop"] {
        let mut hook = podman.hook();
        hook["hook"]["args"] = json!(["sublet-hook", stage]);
        hook["stages"] = json!([stage]);
        std::fs::write(hooks.join(format!("{stage}.json")), hook.to_string()).expect("the hook is written");
    }
}

#[test]
fn by_a_hook_of_the_runtimes_what_it_leaves_is_found() {
    if skip_unless_engines() {
        return;
    }
    let podman = up("vfs");
    only_hooks_of_the_runtimes(&podman);
    let _ = run(&podman, &[], &["run", "-d"], "late", HOLD);
    is_share(&podman.event("late", "info"));
    podman.done(&["stop", "-t0", "late"]);
    podman.assert_empty();
    podman.done(&["rm", "late"]);
}

/// Podman writes down elsewhere what lives until the next boot alone, and which volumes it makes files below.
#[test]
fn wherever_podman_has_written_down_its_container() {
    if skip_unless_engines() {
        return;
    }
    let podman = up("overlay");
    if names_it_itself(&podman) {
        return;
    }
    let volume = podman.world.dir.path().join("volume");
    std::fs::create_dir(&volume).expect("a directory");
    std::os::unix::fs::chown(&volume, Some(100_000), Some(100_000)).expect("chown");
    let volume = format!("--volume={}:/run", volume.display());
    let run = ["run", "--rm"];
    for (before, options) in [(&["--transient-store"][..], vec![]), (&[], vec![volume.as_str()])] {
        let all = Podman::arguments(&run, "c", SHARE, &[MAPPED, &options].concat(), &["cuda-probe", "info"]);
        let info = podman.done(&[before, &all[..]].concat());
        is_share(&serde_json::from_str(&info).expect("JSON"));
        podman.assert_empty();
    }
}

#[test]
fn explain_looks_into_the_root_filesystem_that_the_container_has() {
    if skip_unless_engines() {
        return;
    }
    let podman = up("vfs");
    podman.done(&Podman::arguments(&["run", "-d"], "plain", &[], MAPPED, &["sleep", "600"]));
    let file = PathBuf::from(podman.inspect("plain", ".OCIConfigPath"));
    let bundle = file.parent().and_then(Path::to_str).expect("a bundle");
    let told =
        podman.world.sublet(&["explain", "--edits", "--bundle", bundle, "--annotation", "sublet.sm=25"]);
    let text = String::from_utf8_lossy(&told.stdout);
    assert!(told.status.success() && text.contains("libcuda.so.1"), "{told:?}");
}

/// A directory that Podman's storage knows nothing of.
#[test]
fn a_root_filesystem_that_cannot_be_known_is_refused_with_what_to_do() {
    if skip_unless_engines() {
        return;
    }
    let podman = up("vfs");
    if names_it_itself(&podman) {
        return;
    }
    let rootfs = podman.world.dir.path().join("rootfs");
    let chown = ["-type", "d", "-exec", "chown", "100000:100000", "{}", "+"];
    assert!(Command::new("find").arg(&rootfs).args(chown).status().expect("find").success());
    let rootfs = rootfs.to_str().expect("UTF-8");
    for (entry_point, hooked) in
        [(&[][..], true), (&["--runtime=sublet"], true), (&["--runtime=sublet"], false)]
    {
        if !hooked {
            std::fs::remove_file(podman.world.dir.path().join("hooks/sublet.json")).expect("no hook");
        }
        let mut all = [entry_point, &["run", "--rm"], MAPPED].concat();
        all.extend(SHARE.iter().flat_map(|annotation| ["--annotation", annotation]));
        all.extend(["--rootfs", rootfs, "cuda-probe", "info"]);
        let refused = podman.cli(&all);
        let says = "leave out --uidmap and --userns";
        assert!(!refused.ok && refused.stderr.contains(says), "{refused:?}");
        let last = podman.world.sublet(&["status", "--last-error"]);
        assert!(String::from_utf8_lossy(&last.stdout).contains(says), "{last:?}");
    }
    podman.assert_empty();
}
