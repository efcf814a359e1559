//! Quadlet `.container` files with `Annotation=`, started and stopped by a real systemd: runs below
//! tests/engines/systemd. One H200: 132 SMs.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::docker::skip_unless_engines;
use sublet_e2e::podman::{IMAGE, Podman};
use sublet_e2e::{Finished, World, eventually};

fn systemctl(arguments: &[&str]) -> Finished {
    Finished::of(&Command::new("systemctl").args(arguments).output().expect("systemctl runs"))
}

fn done(arguments: &[&str]) {
    let finished = systemctl(arguments);
    assert!(finished.ok, "systemctl {arguments:?}: {finished:?}");
}

/// A unit in Quadlet's own directory, for as long as the test runs.
struct Unit(PathBuf);

impl Unit {
    fn write(podman: &Podman, name: &str, sm: &str) -> Self {
        let global: Vec<String> =
            podman.command().get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        let conf = podman.world.dir.path().join("containers.conf");
        let text = format!(
            "[Container]\nImage=localhost/{IMAGE}\nExec=cuda-probe hold 600\nContainerName={name}\nPull=never\n\
             Annotation=sublet.sm={sm}\nAnnotation=sublet.memory=8GiB\nGlobalArgs={}\n\
             [Service]\nEnvironment=CONTAINERS_CONF={} PODMAN_IGNORE_CGROUPSV1_WARNING=1\n",
            global.join(" "),
            conf.display()
        );
        let path = Path::new("/etc/containers/systemd").join(format!("{name}.container"));
        std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        std::fs::write(&path, text).expect("the unit is written");
        Self(path)
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_unit_has_the_share_of_its_annotations_while_it_runs() {
    if skip_unless_engines() {
        return;
    }
    if !Path::new("/run/systemd/system").exists() {
        eprintln!("skipped: needs tests/engines/systemd");
        return;
    }
    let podman = Podman::up(World::simulated("h200", ""));
    let _units = [Unit::write(&podman, "job", "25"), Unit::write(&podman, "large", "80")];
    done(&["daemon-reload"]);
    done(&["start", "job.service"]);
    for info in [podman.event("job", "info"), podman.exec_info("job", &["env", "-i"])] {
        assert_eq!((&info["error"], &info["mps"], &info["sm"]), (&Value::Null, &json!(true), &json!(32)));
    }
    let first = podman.lease(&podman.inspect("job", ".Id")).expect("a lease");
    assert_eq!(first["state"], "active");
    assert_eq!((&first["name"], &first["unit"]), (&json!("job"), &json!("job.service")));
    let refused = systemctl(&["start", "large.service"]);
    assert!(!refused.ok, "{refused:?}");
    let journal = Command::new("journalctl").args(["--no-pager", "-u", "large.service"]).output();
    let journal = Finished::of(&journal.expect("journalctl runs")).stdout;
    assert!(journal.contains("sublet refuses this container: no room for mps, 80 % SM"), "{journal}");
    done(&["restart", "job.service"]);
    let second = podman.lease(&podman.inspect("job", ".Id")).expect("a lease");
    assert_ne!(second["id"], first["id"]);
    assert_eq!(podman.world.leases().len(), 1);
    done(&["stop", "job.service"]);
    podman.assert_empty();
    // What systemd kills when a unit's own processes are killed.
    done(&["start", "job.service"]);
    done(&["kill", "--signal=KILL", "job.service"]);
    assert!(eventually(|| podman.world.leases().is_empty()), "{:?}", podman.world.leases());
    podman.assert_empty();
}
