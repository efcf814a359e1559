//! What an image may contain, and its effect: with real runc and crun, seen from inside, with a look at the host
//! afterwards. Paths are those of the harness's Debian-like root filesystem.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};
use sublet_e2e::{Bundle, World, eventually, skip_unless_root, tree};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const WHOLE: &[(&str, &str)] = &[("sublet.gpu", "0")];
const DIR: &str =
    if cfg!(target_arch = "aarch64") { "/lib/aarch64-linux-gnu" } else { "/lib/x86_64-linux-gnu" };

/// `path` of the container, on the host.
fn inside(bundle: &Bundle<'_>, path: &str) -> PathBuf {
    bundle.dir.join("rootfs").join(path.trim_start_matches('/'))
}

fn place(bundle: &Bundle<'_>, path: &str, text: &str) {
    let file = inside(bundle, path);
    std::fs::create_dir_all(file.parent().expect("a directory")).expect("directories");
    std::fs::write(file, text).expect("a file of the image's");
}

fn link(bundle: &Bundle<'_>, path: &str, target: &str) {
    let link = inside(bundle, path);
    std::fs::create_dir_all(link.parent().expect("a directory")).expect("directories");
    symlink(target, link).expect("a link of the image's");
}

/// Regular files of 0 bytes below the rootfs: what a mount point leaves.
fn empty_files(bundle: &Bundle<'_>) -> Vec<String> {
    let files = tree(&bundle.dir.join("rootfs")).into_iter();
    files
        .filter(|(_, (mode, size))| mode & 0o170_000 == 0o100_000 && *size == 0)
        .map(|(path, _)| path)
        .collect()
}

#[test]
fn a_link_in_the_image_is_followed_inside_the_rootfs() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("link", WHOLE, HOLD);
    place(&bundle, &format!("{DIR}/libcuda.so.530.30.02"), "the image's own");
    link(&bundle, &format!("{DIR}/libcuda.so.1"), "libcuda.so.530.30.02");
    let (info, _) = bundle.up_heard();
    let loaded = info["libcuda"].as_str().expect("a path");
    assert!([format!("{DIR}/libcuda.so.1"), format!("{DIR}/libcuda.so.530.30.02")].contains(&loaded.into()));
    bundle.down();
    let own = std::fs::read_to_string(inside(&bundle, &format!("{DIR}/libcuda.so.530.30.02")));
    assert_eq!(own.expect("it is still there"), "the image's own");
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

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
    let files = read()["leases"][0]["mount_points"].clone();
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
    let ledger = world.state_dir().join("ledger.json");
    let mut freed: Value =
        serde_json::from_slice(&std::fs::read(&ledger).expect("ledger.json")).expect("JSON");
    let lease = freed["leases"].as_array_mut().expect("leases").pop().expect("one");
    let (place, files) = (&lease["container"], &lease["mount_points"]);
    freed["leftovers"] =
        json!([{"bundle": place["bundle"], "rootfs": place["rootfs"], "mount_points": files}]);
    std::fs::write(&ledger, freed.to_string()).expect("ledger.json");
    assert_ne!(empty_files(&bundle), Vec::<String>::new());
    assert!(eventually(|| bundle.delete().ok), "its first process has ended");
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
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
        "the image has a directory at $LIB/libcuda.so.1, where a file of the driver's is mounted: remove it from \
         the image, or leave out the capability that brings the file (sublet.capabilities)"
    );
    std::fs::remove_dir(inside(&bundle, &format!("{DIR}/libcuda.so.1"))).expect("removed");
    place(&bundle, "/tmp/nvidia-mps", "a file");
    assert_eq!(
        bundle.refused(),
        "the image has a file at /tmp/nvidia-mps, where the MPS directory is mounted: remove it from the image"
    );
    world.assert_empty();
}

#[test]
fn a_library_directory_may_be_a_link() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("usrmerge", WHOLE, HOLD);
    let triplet = DIR.trim_start_matches("/lib/");
    std::fs::rename(inside(&bundle, DIR), inside(&bundle, &format!("/usr/lib/{triplet}"))).expect("moved");
    link(&bundle, DIR, &format!("/usr/lib/{triplet}"));
    let (info, _) = bundle.up_heard();
    assert_eq!(info["libcuda"], json!(format!("{DIR}/libcuda.so.1")), "as the loader names it");
    assert!(bundle.destinations().contains(&format!("/usr/lib/{triplet}/libcuda.so.1")));
    bundle.down();
    world.assert_empty();
}

/// The driver's library once more, as an image with forward compatibility has one.
fn compat(world: &World, bundle: &Bundle<'_>) {
    let driver = world.driver_root.as_ref().expect("simulated");
    let triplet = DIR.trim_start_matches("/lib/");
    let library = driver.join("usr/lib").join(triplet).join("libcuda.so.1");
    place(bundle, "/usr/local/cuda/compat/libcuda.so.1", "");
    let target = inside(bundle, "/usr/local/cuda/compat/libcuda.so.1");
    std::fs::copy(library, target).expect("a second libcuda");
}

#[test]
fn the_images_own_libcuda_wins_with_a_warning() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut by_path = world.bundle("path", WHOLE, HOLD);
    compat(&world, &by_path);
    let env = by_path.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/cuda/compat"));
    let (info, warned) = by_path.up_heard();
    assert_eq!(info["libcuda"], json!("/usr/local/cuda/compat/libcuda.so.1"));
    assert_eq!(
        warned.trim_end(),
        "sublet-runtime: container path: the image's own /usr/local/cuda/compat/libcuda.so.1 (libcuda.so.1, found by \
         its LD_LIBRARY_PATH) is used instead of the libcuda of the host's driver 580.159.04: if CUDA fails, remove it \
         from LD_LIBRARY_PATH or from the image"
    );
    by_path.down();
    let by_cache = world.bundle("cache", WHOLE, HOLD);
    compat(&world, &by_cache);
    place(&by_cache, "/etc/ld.so.conf", "/usr/local/cuda/compat\n");
    let ldconfig =
        std::process::Command::new("/sbin/ldconfig").arg("-r").arg(inside(&by_cache, "/")).status();
    assert!(ldconfig.expect("ldconfig runs").success());
    let (info, warned) = by_cache.up_heard();
    assert_eq!(info["libcuda"], json!("/usr/local/cuda/compat/libcuda.so.1"));
    assert_eq!(
        warned.trim_end(),
        "sublet-runtime: container cache: the image's own /usr/local/cuda/compat/libcuda.so.1 (libcuda.so.1, found by \
         its /etc/ld.so.cache) is used instead of the libcuda of the host's driver 580.159.04: if CUDA fails, remove \
         it from LD_LIBRARY_PATH or from the image"
    );
    by_cache.down();
    world.assert_empty();
}

#[test]
fn an_image_that_needs_a_newer_cuda_starts_with_one_warning_that_is_found_again() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("newer", WHOLE, SLEEP);
    compat(&world, &bundle);
    let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("NVIDIA_REQUIRE_CUDA=cuda>=99.1 brand=tesla,driver>=535,driver<536"));
    let created = bundle.create();
    let warning =
        "the image needs CUDA 99.1 (its NVIDIA_REQUIRE_CUDA), and the host's driver 580.159.04 has CUDA ";
    assert_eq!(created.stderr.matches(warning).count(), 1, "{created:?}");
    assert_eq!(created.stderr.lines().count(), 1, "{created:?}");
    let bundle_dir = bundle.dir.to_str().expect("UTF-8");
    for command in [
        &["status", "--last-error"][..],
        &["explain", "--container", "newer"],
        &["explain", "--bundle", bundle_dir],
    ] {
        let said = String::from_utf8(world.sublet(command).stdout).expect("UTF-8");
        let words: Vec<_> = said.split_whitespace().collect();
        assert!(words.join(" ").contains(warning), "{command:?}: {said}");
    }
    bundle.down();
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
        "the container's root filesystem (or a volume over it) is read-only and has no mount points for \
         the driver's files: create these as empty files in the image, with the directories /run/sublet/mps \
         and /tmp/nvidia-mps for MPS, or mount it writable: $LIB/libnvidia-ml.so.1 $LIB/libnvidia-cfg.so.1 \
         /usr/bin/nvidia-smi"
    );
    drop(mounted);
    let (_, missing) = line.rsplit_once(": ").expect("a list");
    for path in missing.split(' ') {
        place(&bundle, &path.replace("$LIB", DIR), "");
    }
    let mounted = ReadOnly::mount(&rootfs);
    assert_eq!(
        bundle.refused(),
        "the container's root filesystem (or a volume over it) is read-only and has no mount points for \
         the MPS daemon: create these directories in the image, or mount it writable: /run/sublet/mps \
         /tmp/nvidia-mps"
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

#[test]
fn a_container_prints_its_own_share() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "[grant]\ntell_neighbours = true\n");
    let other = world.bundle("other", SHARE, HOLD);
    other.up();
    let asked = [("sublet.sm", "25"), ("sublet.memory", "8GiB"), ("sublet.processes", "2")];
    let bundle = world.bundle("own", &asked, HOLD);
    bundle.up();
    // It has its context then.
    bundle.event("info");
    let status = world.status();
    let uuid = status["devices"][0]["uuid"].as_str().expect("a UUID").to_owned();
    let leases = status["leases"].as_array().expect("leases");
    let lease = leases.iter().find(|lease| lease["container_id"] == bundle.id.as_str()).expect("its lease");
    let used = lease["used"]["memory_bytes"].as_u64().filter(|used| *used > 0).expect("a context's memory");
    let used_mib = used >> 20;
    let lines = format!(
        "mode        mps\nSMs         12.5 % for each of 2 processes\nmemory      4 GiB for each of 2 processes\n\
         used        {used_mib} MiB\nneighbours  1 when this container started\ndevice      {uuid}\n"
    );
    assert_eq!(bundle.exec(&["/usr/bin/sublet-share"]).stdout, lines);
    let bare = bundle.exec(&["/bin/env", "-i", "/usr/bin/sublet-share"]);
    assert_eq!(bare.stdout, lines, "by the first process's environment");
    let json = bundle.exec(&["/usr/bin/sublet-share", "--format", "json"]).json();
    let expected = json!({
        "schema": "sublet.share/1", "mode": "mps", "devices": [uuid], "sm_percent": 12.5, "memory_bytes": 4_u64 << 30,
        "used_bytes": used, "processes": 2, "neighbours": 1
    });
    assert_eq!(json, [expected]);
    assert!(!bundle.exec(&["/bin/sh", "-c", ": >/usr/bin/sublet-share"]).ok, "it is mounted read-only");
    assert!(other.exec(&["/usr/bin/sublet-share"]).stdout.contains("neighbours  0 "));
    bundle.down();
    other.down();
    assert_eq!(empty_files(&bundle), Vec::<String>::new(), "its mount point is gone");
    let own = world.bundle("theirs", SHARE, HOLD);
    place(&own, "/usr/bin/sublet-share", "the image's");
    own.up();
    assert_eq!(own.exec(&["/bin/cat", "/usr/bin/sublet-share"]).stdout, "the image's");
    own.down();
    world.assert_empty();
}

#[test]
fn images_without_glibc_get_nodes_and_environment() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("static", WHOLE, SLEEP);
    std::fs::remove_dir_all(inside(&bundle, DIR)).expect("no libc");
    let created = bundle.create();
    assert!(created.ok, "{created:?}");
    assert_eq!(
        created.stderr.trim_end(),
        "sublet-runtime: container static: the image has no glibc for the driver's libraries (it uses \
         musl, or is static), so it gets the device nodes and the environment, but no driver libraries; \
         use a glibc image for CUDA"
    );
    assert!(bundle.start().ok);
    let listed = bundle.exec(&["/bin/sh", "-c", "ls /dev | grep nvidia; echo $CUDA_VISIBLE_DEVICES"]);
    assert_eq!(listed.stdout, "nvidia-uvm\nnvidia-uvm-tools\nnvidia0\nnvidiactl\n0\n");
    let engines: Vec<_> = bundle.spec["mounts"].as_array().expect("mounts").iter().collect();
    let mut given = bundle.destinations();
    given.retain(|path| path != "/usr/bin/sublet-share");
    assert_eq!(given.len(), engines.len(), "no file of the driver's");
    assert!(
        bundle.exec(&["/usr/bin/sublet-share"]).stdout.starts_with("mode        time-slice\n"),
        "it is static"
    );
    bundle.down();
    world.assert_empty();
}

#[test]
fn nix_images_have_a_directory_of_their_own() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("nix", WHOLE, SLEEP);
    let store = inside(&bundle, "/nix/store/abc-glibc-2.40");
    std::fs::create_dir_all(&store).expect("a store");
    std::fs::rename(inside(&bundle, DIR), store.join("lib")).expect("moved");
    bundle.up();
    let listed = bundle.exec(&["/bin/sh", "-c", "ls /run/opengl-driver/lib | grep cuda"]);
    assert_eq!(listed.stdout, "libcuda.so\nlibcuda.so.1\nlibcudadebugger.so.1\n");
    bundle.down();
    assert_eq!(empty_files(&bundle), Vec::<String>::new());
    world.assert_empty();
}

/// Mounts `source` over the container's `destination`.
fn volume(bundle: &mut Bundle<'_>, source: &Path, destination: &str) {
    let mount =
        json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rw"]});
    bundle.spec["mounts"].as_array_mut().expect("mounts").push(mount);
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

/// A container with a volume for a daemon that somebody started by hand.
#[test]
fn no_container_is_the_client_of_another_daemon() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let pipe = world.dir.path().join("hosts/nvidia-mps");
    std::fs::create_dir_all(&pipe).expect("a directory");
    std::fs::write(pipe.join("control"), "").expect("a daemon's");
    let refused = "a volume brings the directory of another MPS daemon to the container's /tmp/nvidia-mps";
    for mode in ["time-slice", "exclusive"] {
        for (source, destination) in [(pipe.clone(), "/tmp/nvidia-mps"), (pipe.join(".."), "/tmp")] {
            let mut bundle = world.bundle("client", &[("sublet.mode", mode)], SLEEP);
            volume(&mut bundle, &source, destination);
            assert!(bundle.refused().starts_with(refused), "{mode} {destination}");
        }
    }
    let mut covered = world.bundle("covered", SHARE, HOLD);
    volume(&mut covered, &pipe, "/tmp/nvidia-mps");
    covered.up_heard();
    let bare = covered.exec(&["/bin/env", "-i", "/usr/bin/cuda-probe", "info"]).json();
    assert_eq!(bare[0]["sm"], json!(32), "its own daemon: {bare:?}");
    covered.down();
    assert_eq!(std::fs::read_dir(&pipe).expect("it is there").count(), 1);
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
    let mesa = format!("{DIR}/libGLX_mesa.so.0");
    let read = |bundle: &Bundle<'_>, path: &str| bundle.exec(&["/bin/cat", path]).stdout;
    for stages in [&[][..], &["createRuntime", "poststop"]] {
        let id = if stages.is_empty() { "links" } else { "hooked" };
        let mut bundle = world.bundle(id, &all, HOLD);
        place(&bundle, &mesa, "Mesa's");
        link(&bundle, &format!("{DIR}/libGLX_indirect.so.0"), "libGLX_mesa.so.0");
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
        let is_left_out = read(&bundle, "/usr/bin/nvidia-smi") == "busybox";
        assert_eq!(is_left_out, stages.is_empty());
        assert_eq!(warned.contains("/usr/bin/nvidia-smi"), is_left_out, "{warned}");
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
