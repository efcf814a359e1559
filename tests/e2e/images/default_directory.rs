//! CUDA's default directory for MPS, /tmp/nvidia-mps: what lies over /tmp, and what may not be found there.

use std::path::{Path, PathBuf};

use serde_json::json;
use sublet_e2e::{Bundle, World, eventually, skip_unless_root, tree};

use super::{HOLD, SHARE, SLEEP, place};

const OTHER_DAEMON: &str = "a volume brings another MPS daemon's directory to /tmp/nvidia-mps";

/// Mounts `source` over the container's `destination`.
fn volume(bundle: &mut Bundle<'_>, source: &Path, destination: &str) {
    let mount =
        json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rw"]});
    bundle.spec["mounts"].as_array_mut().expect("mounts").push(mount);
}

/// The directory of a daemon that somebody started by hand.
fn anothers(world: &World) -> PathBuf {
    let pipe = world.dir.path().join("hosts/nvidia-mps");
    std::fs::create_dir_all(&pipe).expect("a directory");
    std::fs::write(pipe.join("control"), "").expect("a daemon's");
    pipe
}

#[test]
fn a_tmp_of_the_hosts_stays_clean() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("hosttmp", SHARE, HOLD);
    volume(&mut bundle, Path::new("/tmp"), "/tmp");
    let (info, warned) = bundle.up_heard();
    assert_eq!(info["mps"], json!(true), "by its environment");
    assert!(
        warned.contains("the container's /tmp is the host's, so its MPS directory is not at /tmp/nvidia-mps")
    );
    assert!(!Path::new("/tmp/nvidia-mps").exists());
    bundle.down();
    world.assert_empty();
}

/// As an image's VOLUME /tmp. A process that joins without the share's environment computes within the share, with each
/// entry point, and nothing stays in the volume.
#[test]
fn a_volume_at_tmp_has_the_default_directory_while_the_container_runs() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let tmp = world.dir.path().join("tmp");
    std::fs::create_dir(&tmp).expect("a directory");
    for stages in [&[][..], &["createRuntime", "poststop"], &["prestart", "poststop"]] {
        let mut bundle = world.bundle("volumetmp", SHARE, HOLD);
        volume(&mut bundle, &tmp, "/tmp");
        if !stages.is_empty() {
            bundle.hook(stages);
        }
        let (_, warned) = bundle.up_heard();
        assert!(!warned.contains("is the host's"), "{stages:?}: {warned}");
        let bare = bundle.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]).json();
        assert_eq!((&bare[0]["mps"], &bare[0]["sm"]), (&json!(true), &json!(32)), "{stages:?}: {bare:?}");
        bundle.down();
        assert!(tree(&tmp).is_empty(), "{stages:?}: {:?}", tree(&tmp));
        world.assert_empty();
    }
    std::fs::create_dir(tmp.join("nvidia-mps")).expect("its owner's");
    let mut bundle = world.bundle("volumetmp", SHARE, HOLD);
    volume(&mut bundle, &tmp, "/tmp");
    bundle.up_heard();
    bundle.down();
    assert!(tmp.join("nvidia-mps").is_dir(), "it was there before");
    world.assert_empty();
}

/// Entrypoints that empty /tmp, or change its owner, under `set -e`.
#[test]
fn a_share_may_leave_tmp_alone() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[share.bare]\nsm = 25\ndefault_directory = false\n");
    let empties = &["/bin/sh", "-c", "set -e; rm -rf /tmp/*; chown -R 0 /tmp; exec cuda-probe hold 120"];
    let restless = world.bundle("restless", SHARE, empties);
    assert!(restless.create().ok && restless.start().ok);
    assert!(eventually(|| restless.delete().ok), "it ends at once");
    let bare = [("sublet.share", "bare")];
    let bundle = world.bundle("bare", &bare, empties);
    let (info, warned) = bundle.up_heard();
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)));
    let missing = "its share has default_directory = false, so its MPS directory is not at /tmp/nvidia-mps";
    assert!(warned.contains(missing), "{warned}");
    let joined = bundle.exec(&["/usr/bin/cuda-probe", "info"]).json();
    assert_eq!(joined[0]["sm"], json!(32), "{joined:?}");
    let explained = world.sublet(&["explain", "share=bare"]);
    assert!(String::from_utf8_lossy(&explained.stdout).contains(missing), "{explained:?}");
    bundle.down();
    // An entrypoint may also have left something there, and the container does not start again.
    let left = world.bundle("left", SHARE, HOLD);
    place(&left, "/tmp/nvidia-mps", "a file");
    assert!(left.refused().contains("a named share with `default_directory = false`"));
    let left = world.bundle("left", &bare, HOLD);
    place(&left, "/tmp/nvidia-mps", "a file");
    assert_eq!(left.up_heard().0["sm"], json!(32));
    left.down();
    let mut hooked = world.bundle("hooked", &bare, HOLD);
    hooked.hook(&["prestart", "poststop"]);
    assert!(!hooked.create().ok);
    let last = String::from_utf8(world.sublet(&["status", "--last-error"]).stdout).expect("UTF-8");
    assert!(
        last.contains("its share has default_directory = false, which does not work with a hook"),
        "{last}"
    );
    world.assert_empty();
}

/// The same in /run, where an entrypoint has to leave sublet's directory out, as docs/troubleshooting.md says.
#[test]
fn an_entrypoint_that_empties_run_leaves_sublets_directory_out() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let advised = "find /run -mindepth 1 -maxdepth 1 ! -name sublet -exec rm -rf {} +";
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/troubleshooting.md");
    assert!(std::fs::read_to_string(page).expect("the page").contains(advised));
    for (id, empty, goes_on) in [("restless", "rm -rf /run/*", false), ("advised", advised, true)] {
        let entrypoint = format!("set -e; {empty}; exec cuda-probe hold 120");
        let bundle = world.bundle(id, SHARE, &["/bin/sh", "-c", &entrypoint]);
        place(&bundle, "/run/app/pid", "of an earlier start");
        if goes_on {
            let (info, _) = bundle.up_heard();
            assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)));
            assert!(!bundle.dir.join("rootfs/run/app").exists());
            bundle.down();
        } else {
            assert!(bundle.create().ok && bundle.start().ok);
            assert!(eventually(|| bundle.delete().ok), "it ends at once");
        }
    }
    world.assert_empty();
}

/// A container with a volume for a daemon that somebody started by hand.
#[test]
fn no_container_is_the_client_of_another_daemon() {
    if skip_unless_root() {
        return;
    }
    for (topology, mode) in [("a100x2-mig", "mig"), ("h200", "time-slice"), ("h200", "exclusive")] {
        let world = World::simulated(topology, "");
        let pipe = anothers(&world);
        for (source, destination) in [(pipe.clone(), "/tmp/nvidia-mps"), (pipe.join(".."), "/tmp")] {
            let mut bundle = world.bundle("client", &[("sublet.mode", mode)], SLEEP);
            volume(&mut bundle, &source, destination);
            assert!(bundle.refused().starts_with(OTHER_DAEMON), "{mode} {destination}");
            for stage in ["createRuntime", "prestart"] {
                let mut hooked = world.bundle(stage, &[("sublet.mode", mode)], SLEEP);
                volume(&mut hooked, &source, destination);
                hooked.hook(&[stage, "poststop"]);
                let created = hooked.create();
                let last =
                    String::from_utf8(world.sublet(&["status", "--last-error"]).stdout).expect("UTF-8");
                let is_named = last.contains(OTHER_DAEMON) && last.contains(&format!("container {stage}"));
                assert!(!created.ok && is_named, "{mode} {destination}: {created:?}, {last}");
                let _ = hooked.delete();
            }
        }
        world.assert_empty();
    }
    let world = World::simulated("h200", "");
    let pipe = anothers(&world);
    let mut covered = world.bundle("covered", SHARE, HOLD);
    volume(&mut covered, &pipe, "/tmp/nvidia-mps");
    covered.up_heard();
    let bare = covered.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]).json();
    assert_eq!(bare[0]["sm"], json!(32), "its own daemon: {bare:?}");
    covered.down();
    assert_eq!(std::fs::read_dir(&pipe).expect("it is there").count(), 1);
    world.assert_empty();
}
