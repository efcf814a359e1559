//! Where the driver's files are mounted: on what, what is left there, and where they cannot be.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, is_alive, programs, skip_unless_root, tree};

use super::{DIR, HOLD, SHARE, SLEEP, WHOLE, empty_files, inside, link, place};

#[test]
fn a_dangling_absolute_link_leaves_nothing_on_the_host() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("dangling", WHOLE, HOLD);
    let target = format!("{}-nowhere/libcuda.so.1", world.dir.path().display());
    link(&bundle, &format!("{DIR}/libcuda.so.1"), &target);
    bundle.up_heard();
    assert!(!Path::new(&target).parent().expect("a directory").exists(), "something is on the host");
    bundle.down();
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// A root filesystem from which another command is just about to remove an earlier container's mount points: unlinking
/// them under the new container would take its driver away, and it would leave its own behind.
#[test]
fn a_start_waits_for_whoever_removes_an_earlier_containers_mount_points() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("cleared", WHOLE, HOLD);
    bundle.up_heard();
    let ledger = world.state_dir().join("ledger.json");
    let read =
        || -> Value { serde_json::from_slice(&std::fs::read(&ledger).expect("a ledger")).expect("JSON") };
    let files = read()["mount_point_lists"][0].clone();
    bundle.down();
    let mut left = read();
    left["leftovers"] =
        json!([{"bundle": bundle.dir, "rootfs": bundle.dir.join("rootfs"), "mount_points": files}]);
    std::fs::write(&ledger, left.to_string()).expect("ledger.json");
    let files: Vec<String> = serde_json::from_value(files).expect("paths");
    for file in &files {
        place(&bundle, file, "");
    }
    let lock = std::fs::File::create(world.state_dir().join("clearing.lock")).expect("a file");
    let lock = Flock::lock(lock, FlockArg::LockExclusive).expect("nobody has it");
    std::thread::scope(|scope| {
        let created = scope.spawn(|| bundle.create());
        assert!(eventually(|| !world.booked().is_empty()), "no lease is taken");
        std::thread::sleep(Duration::from_millis(500));
        assert!(!world.runtime_root().join("cleared").exists(), "it was created meanwhile");
        for file in &files {
            std::fs::remove_file(inside(&bundle, file)).expect("it was there");
        }
        let mut cleared = read();
        cleared["leftovers"] = json!([]);
        std::fs::write(&ledger, cleared.to_string()).expect("ledger.json");
        drop(lock);
        let created = created.join().expect("no panic");
        assert!(created.ok, "{created:?}");
    });
    assert!(bundle.start().ok);
    assert_eq!(bundle.event("info")["error"], Value::Null);
    bundle.down();
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// containerd unmounts the root filesystem right after a delete, so it cannot be read then.
#[test]
fn a_delete_clears_what_another_command_has_freed_and_not_cleared_yet() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("freed", WHOLE, HOLD);
    bundle.up_heard();
    assert!(bundle.kill("KILL").ok);
    free_without_clearing(&world);
    assert_ne!(empty_files(&bundle), Vec::<String>::new());
    assert!(eventually(|| bundle.delete().ok), "its first process has ended");
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// The ledger as a command leaves it that has freed the only lease and has not yet cleared what its container left.
fn free_without_clearing(world: &World) {
    let ledger = world.state_dir().join("ledger.json");
    let mut freed: Value =
        serde_json::from_slice(&std::fs::read(&ledger).expect("ledger.json")).expect("JSON");
    let lease = freed["leases"].as_array_mut().expect("leases").pop().expect("one");
    let (place, files) = (&lease["container"], &freed["mount_point_lists"][0]);
    freed["leftovers"] =
        json!([{"bundle": place["bundle"], "rootfs": place["rootfs"], "mount_points": files}]);
    // Replaced, as sublet does: a process that has read it would not look into the same file again.
    let new = world.dir.path().join("freed.json");
    std::fs::write(&new, freed.to_string()).expect("a file");
    let moved = std::process::Command::new("mv").arg(new).arg(ledger).status().expect("mv runs");
    assert!(moved.success(), "the ledger is not replaced");
}

/// The lease goes after the delete has seen it, while that waits for its turn to clear.
#[test]
fn a_delete_clears_what_another_command_frees_at_the_same_time() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("raced", WHOLE, HOLD);
    bundle.up_heard();
    let first = Pid::from_raw(bundle.pid());
    assert!(bundle.kill("KILL").ok && eventually(|| !is_alive(first)));
    let path = world.state_dir().join("clearing.lock");
    let lock = std::fs::File::create(&path).expect("a file");
    let lock = Flock::lock(lock, FlockArg::LockExclusive).expect("nobody has it");
    std::thread::scope(|scope| {
        let deleted = scope.spawn(|| bundle.delete());
        assert!(eventually(|| has_opened(&path)), "it does not clear");
        free_without_clearing(&world);
        drop(lock);
        let deleted = deleted.join().expect("no panic");
        assert!(deleted.ok, "{deleted:?}");
    });
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// Whether another program has the file open. A child of this one has it, too, until it executes its own.
fn has_opened(file: &Path) -> bool {
    let links = |path: &Path, to: &Path| std::fs::read_link(path).is_ok_and(|read| read == to);
    let own = std::env::current_exe().expect("a path");
    let processes = std::fs::read_dir("/proc").expect("/proc").flatten().map(|entry| entry.path());
    let descriptors = processes.filter(|one| !links(&one.join("exe"), &own)).map(|one| one.join("fd"));
    let mut open = descriptors.filter_map(|fds| std::fs::read_dir(fds).ok()).flatten().flatten();
    open.any(|fd| links(&fd.path(), file))
}

/// Without the shim no command but the hook at poststop is sure to be in time.
#[test]
fn a_hook_at_poststop_clears_what_another_command_has_freed_and_not_cleared_yet() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("hooked", WHOLE, SLEEP);
    bundle.hook(&["prestart", "poststop"]);
    bundle.up();
    assert!(bundle.kill("KILL").ok);
    free_without_clearing(&world);
    assert_ne!(empty_files(&bundle), Vec::<String>::new());
    assert!(eventually(|| bundle.delete().ok), "its first process has ended");
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// A runtime that is killed before it has written its record leaves a child that goes on. The runtime that deletes such a
/// container forgets it and ends nothing.
#[test]
fn a_delete_waits_for_the_child_of_a_killed_runtime_that_still_makes_mount_points() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("orphan", WHOLE, SLEEP);
    let name = world.dir.path().file_name().expect("a name").to_string_lossy().into_owned();
    let mount = Path::new("/sys/fs/cgroup");
    let hierarchy =
        if mount.join("cgroup.controllers").exists() { mount.to_owned() } else { mount.join("pids") };
    let cgroup = hierarchy.join(format!("{name}-orphan"));
    bundle.spec["linux"]["cgroupsPath"] = json!(format!("/{name}-orphan"));
    let (engine, goes_on) = (world.engine.program(), world.dir.path().join("goes-on"));
    let script = world.dir.path().join("killed").join(engine);
    std::fs::create_dir(script.parent().expect("it has one")).expect("a directory");
    std::fs::create_dir(&cgroup).expect("a cgroup");
    std::fs::write(&goes_on, "").expect("a file");
    let text = format!(
        "case \" $* \" in *' create '*) ;; *) exit 0 ;; esac\n\
         (while [ -e {0} ]; do sleep 0.02; done; : >{1}) >/dev/null 2>&1 &\n\
         echo $! >{2}/cgroup.procs\nkill -KILL $$\n",
        goes_on.display(),
        inside(&bundle, &format!("{DIR}/libcuda.so.1")).display(),
        cgroup.display()
    );
    programs::script(&script, &text);
    let config = std::fs::read_to_string(&world.config).expect("config.toml");
    let config = config
        .replace(&format!("low_level = [\"{engine}\"]"), &format!("low_level = [\"{}\"]", script.display()));
    std::fs::write(&world.config, config).expect("config.toml");
    assert!(!bundle.create().ok);
    std::thread::scope(|scope| {
        let deleted = scope.spawn(|| bundle.down());
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(world.booked(), [json!("orphan")], "its mount points are still made");
        std::fs::remove_file(&goes_on).expect("it was there");
        deleted.join().expect("no panic");
    });
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
    assert!(eventually(|| std::fs::remove_dir(&cgroup).is_ok()), "its cgroup is empty");
}

#[test]
fn a_directory_where_a_file_of_ours_lands_is_refused() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("directory", SHARE, HOLD);
    std::fs::create_dir(inside(&bundle, &format!("{DIR}/libcuda.so.1"))).expect("a directory");
    let seen = bundle.refused().replace(DIR, "$LIB");
    assert_eq!(
        seen,
        "the image has a directory at $LIB/libcuda.so.1, where a driver's file is mounted; fix: remove it, or leave out \
         its capability (sublet.capabilities)"
    );
    std::fs::remove_dir(inside(&bundle, &format!("{DIR}/libcuda.so.1"))).expect("removed");
    place(&bundle, "/tmp/nvidia-mps", "a file");
    assert_eq!(
        bundle.refused(),
        "the image has a file at /tmp/nvidia-mps, where the MPS directory is mounted; fix: remove it (a \
         named share with `default_directory = false` has nothing at /tmp/nvidia-mps)"
    );
    world.assert_empty();
}

#[test]
fn a_read_only_root_works_where_the_layer_below_is_writable() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("readonly", SHARE, HOLD);
    bundle.spec["root"]["readonly"] = json!(true);
    let (info, _) = bundle.up_heard();
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)));
    assert!(!bundle.exec(&["/bin/sh", "-c", "echo > /x"]).ok, "the root is read-only");
    bundle.down();
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// A read-only mount of a directory over itself, taken off again.
struct ReadOnly(PathBuf);

impl ReadOnly {
    fn mount(dir: &Path) -> Self {
        let mount = |arguments: &[&str]| {
            let status = std::process::Command::new("mount").args(arguments).arg(dir).status();
            assert!(status.expect("mount runs").success(), "mount {arguments:?} {}", dir.display());
        };
        mount(&["--bind", dir.to_str().expect("UTF-8")]);
        mount(&["-o", "remount,bind,ro"]);
        Self(dir.to_owned())
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_rootfs_on_a_read_only_mount_needs_its_mount_points() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("sealed", SHARE, HOLD);
    bundle.spec["annotations"]["sublet.capabilities"] = json!("utility");
    // What the runtime itself would make.
    for dir in ["dev", "proc", "sys"] {
        std::fs::create_dir_all(inside(&bundle, dir)).expect("a directory");
    }
    let rootfs = inside(&bundle, "/");
    let mounted = ReadOnly::mount(&rootfs);
    let line = bundle.refused().replace(DIR, "$LIB");
    assert_eq!(
        line,
        "its root filesystem or a volume is read-only, without mount points; fix: make it writable, or create these \
         as empty files (with MPS also the directories /run/sublet/mps and /tmp/nvidia-mps): \
         $LIB/libnvidia-ml.so.1 $LIB/libnvidia-cfg.so.1 /usr/bin/nvidia-smi"
    );
    drop(mounted);
    let (_, missing) = line.rsplit_once(": ").expect("a list");
    for path in missing.split(' ') {
        place(&bundle, &path.replace("$LIB", DIR), "");
    }
    let mounted = ReadOnly::mount(&rootfs);
    assert_eq!(
        bundle.refused(),
        "its root filesystem or a volume is read-only, without mount points for MPS; fix: make it writable, or \
         create: /run/sublet/mps \
         /tmp/nvidia-mps (a named share with `default_directory = false` has nothing at /tmp/nvidia-mps)"
    );
    drop(mounted);
    for path in ["/run/sublet/mps", "/tmp/nvidia-mps"] {
        std::fs::create_dir_all(inside(&bundle, path)).expect("a directory");
    }
    let _mounted = ReadOnly::mount(&rootfs);
    bundle.spec["process"]["args"] = json!(SLEEP);
    bundle.up();
    let found = bundle.exec(&[
        "/bin/sh",
        "-c",
        &format!("grep -q ELF {DIR}/libnvidia-ml.so.1 && ls /tmp/nvidia-mps"),
    ]);
    assert_eq!(found.stdout, "control\n");
    assert!(
        !bundle.exec(&["/usr/bin/sublet-share"]).ok,
        "there is no place for it, and the container starts"
    );
    bundle.down();
    world.assert_empty();
}

/// Debian's Mesa and busybox have such links, and a bind mount lands on what a link leads to.
#[test]
fn what_a_link_of_the_images_leads_to_is_not_covered() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let all = [("sublet.gpu", "0"), ("sublet.capabilities", "all")];
    let (mesa, indirect) = (format!("{DIR}/libGLX_mesa.so.0"), format!("{DIR}/libGLX_indirect.so.0"));
    let read = |bundle: &Bundle<'_>, path: &str| bundle.exec(&["/bin/cat", path]).stdout;
    for stages in [&[][..], &["createRuntime", "poststop"]] {
        let id = if stages.is_empty() { "links" } else { "hooked" };
        let mut bundle = world.bundle(id, &all, HOLD);
        place(&bundle, &mesa, "Mesa's");
        link(&bundle, &indirect, "libGLX_mesa.so.0");
        place(&bundle, "/usr/bin/busybox", "busybox");
        link(&bundle, "/usr/bin/nvidia-smi", "busybox");
        place(&bundle, "/etc/OpenCL/vendors/other.icd", "another's");
        link(&bundle, "/etc/OpenCL/vendors/nvidia.icd", "other.icd");
        if !stages.is_empty() {
            bundle.hook(stages);
        }
        let before = tree(&bundle.dir.join("rootfs"));
        let (_, warned) = bundle.up_heard();
        for (path, own) in [
            (mesa.as_str(), "Mesa's"),
            ("/usr/bin/busybox", "busybox"),
            ("/etc/OpenCL/vendors/other.icd", "another's"),
        ] {
            assert_eq!(read(&bundle, path), own, "{stages:?}");
        }
        // The hook mounts on the link itself.
        let is_left_out = stages.is_empty();
        for (path, images, drivers) in [
            (indirect.as_str(), "Mesa's", "libGLX_nvidia.so.0"),
            ("/usr/bin/nvidia-smi", "busybox", "ELF"),
            ("/etc/OpenCL/vendors/nvidia.icd", "another's", "libnvidia-opencl.so.1"),
        ] {
            let text = read(&bundle, path);
            assert_eq!(text == images, is_left_out, "{path}");
            assert_eq!(text.contains(drivers), !is_left_out, "{path}");
            assert_eq!(warned.contains(path), is_left_out, "{path}: {warned}");
        }
        if is_left_out {
            let last = String::from_utf8(world.sublet(&["status", "--last-error"]).stdout).expect("UTF-8");
            assert!(
                last.contains("container links, which was started: left out, because the image has a link")
            );
        }
        bundle.down();
        let after = tree(&bundle.dir.join("rootfs"));
        let changed: Vec<_> = before.iter().filter(|(path, was)| after.get(*path) != Some(was)).collect();
        assert!(changed.is_empty(), "{stages:?}: {changed:?}");
        world.assert_empty();
    }
}

#[test]
fn a_rootfs_that_outlives_its_container_is_as_it_was() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("persistent", &[("sublet.sm", "25"), ("sublet.capabilities", "all")], HOLD);
    place(&bundle, "/root/empty-before", "");
    // As the older tools left them in images that were built while they were in use.
    place(&bundle, &format!("{DIR}/libcuda.so.418.56"), "");
    link(&bundle, &format!("{DIR}/libcuda.so.1"), "libcuda.so.418.56");
    place(&bundle, "/usr/bin/nvidia-smi", "");
    let of_the_image = empty_files(&bundle);
    bundle.up_heard();
    assert!(empty_files(&bundle).len() > 10, "mount points are there: else this test shows nothing");
    bundle.down();
    assert_eq!(empty_files(&bundle), of_the_image);
    world.assert_empty();
}
