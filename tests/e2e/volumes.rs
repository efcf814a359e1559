//! Volumes mounted over an image's library directory: the runtime makes mount points for the driver's files in them,
//! and a volume outlives its container. "file too short" is what the next one would get.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, skip_unless_root, tree};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const DIR: &str =
    if cfg!(target_arch = "aarch64") { "/lib/aarch64-linux-gnu" } else { "/lib/x86_64-linux-gnu" };

/// A volume with what the image has in its library directory, and an empty file of its owner's.
fn volume(world: &World) -> PathBuf {
    let volume = world.dir.path().join("volume");
    let bundle = world.bundle("donor", &[], HOLD);
    let image = bundle.dir.join("rootfs").join(DIR.trim_start_matches('/'));
    let copied = Command::new("cp").arg("-a").args([&image, &volume]).status();
    assert!(copied.expect("cp runs").success());
    std::fs::write(volume.join("libown.so"), "").expect("a file of the owner's");
    volume
}

fn with<'a>(world: &'a World, id: &str, volume: &Path) -> Bundle<'a> {
    let mut bundle = world.bundle(id, SHARE, HOLD);
    let mount =
        json!({"destination": DIR, "type": "bind", "source": volume, "options": ["rbind", "rprivate", "rw"]});
    bundle.spec["mounts"].as_array_mut().expect("mounts").push(mount);
    bundle
}

fn up(bundle: &Bundle<'_>) {
    bundle.up();
    let info = bundle.event("info");
    assert_eq!((info["error"].clone(), info["mps"].clone()), (Value::Null, json!(true)), "{info}");
}

#[test]
fn a_volume_is_left_as_it_was_and_serves_the_next_container() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let volume = volume(&world);
    let before = tree(&volume);
    for id in ["first", "second"] {
        let bundle = with(&world, id, &volume);
        up(&bundle);
        assert!(volume.join("libcuda.so.1").exists(), "a mount point is there while it runs");
        bundle.down();
        assert_eq!(tree(&volume), before, "after the {id}");
        world.assert_empty();
    }
    // This one was not deleted through sublet: the next command finds that it has ended.
    let mut killed = with(&world, "killed", &volume);
    up(&killed);
    killed.plain = true;
    killed.down();
    let _ = world.status();
    assert_eq!(tree(&volume), before, "after one that others deleted");
    world.assert_empty();
}

/// The hook mounts by itself, on a live container.
#[test]
fn a_volume_is_left_as_it_was_by_the_hook_too() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let volume = volume(&world);
    let before = tree(&volume);
    let mut bundle = with(&world, "hooked", &volume);
    bundle.hook(&["createRuntime", "poststop"]);
    up(&bundle);
    assert!(volume.join("libcuda.so.1").exists(), "a mount point is there while it runs");
    bundle.down();
    assert_eq!(tree(&volume), before);
    world.assert_empty();
}

/// Unlinking a file takes away every mount on it, in all mount namespaces.
#[test]
fn a_volume_that_another_container_has_too_is_cleared_after_both() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let volume = volume(&world);
    let before = tree(&volume);
    // The second has it by another path.
    let alias = world.dir.path().join("alias");
    symlink(&volume, &alias).expect("a link");
    let (one, two) = (with(&world, "one", &volume), with(&world, "two", &alias));
    up(&one);
    up(&two);
    one.down();
    let _ = world.status();
    assert!(volume.join("libcuda.so.1").exists(), "the second's mount is on it");
    let seen = two.exec(&["/bin/sh", "-c", &format!("grep -c ELF {DIR}/libcuda.so.1")]);
    assert!(seen.ok && seen.stdout != "0\n", "{seen:?}");
    two.down();
    assert_eq!(tree(&volume), before);
    world.assert_empty();
}

/// The volume is its owner's: what a link put in its place leads to stays as it is.
#[test]
fn nothing_is_removed_where_the_volume_is_not_any_more() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let volume = volume(&world);
    let outside = world.dir.path().join("outside");
    std::fs::create_dir(&outside).expect("a directory");
    std::fs::write(outside.join("libcuda.so.1"), "").expect("what sublet would take for its own");
    for by_link in [true, false] {
        let bundle = with(&world, "moved", &volume);
        up(&bundle);
        let aside = world.dir.path().join("aside");
        std::fs::rename(&volume, &aside).expect("moved");
        if by_link {
            symlink(&outside, &volume).expect("a link");
        } else {
            std::fs::rename(&outside, &volume).expect("another directory");
        }
        bundle.down();
        assert!(volume.join("libcuda.so.1").exists(), "{by_link}: removed outside");
        if by_link {
            std::fs::remove_file(&volume).expect("the link");
        } else {
            std::fs::rename(&volume, &outside).expect("back");
        }
        std::fs::rename(&aside, &volume).expect("back");
        world.assert_empty();
    }
}
