//! What an image may contain, and its effect: with real runc and crun, seen from inside, with a look at the host
//! afterwards. Paths are those of the harness's Debian-like root filesystem.

mod default_directory;
mod mount_points;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use serde_json::json;
use sublet_e2e::{Bundle, World, skip_unless_root, tree};

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

/// A program with a loader in a store of the host's, as on `NixOS`, and driver capabilities that sublet has not.
#[test]
fn what_is_of_no_use_in_an_image_and_what_it_does_not_get_are_named_once() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let (usual, own) = if cfg!(target_arch = "aarch64") {
        ("/lib/ld-linux-aarch64.so.1", "/nix/ld-linux-aarch64.so.1")
    } else {
        ("/lib64/ld-linux-x86-64.so.2", "/nix64/ld-linux-x86-64.so.2")
    };
    let mut program = std::fs::read("/bin/sleep").expect("a program");
    let at = program.windows(usual.len()).position(|part| part == usual.as_bytes()).expect("a loader");
    program[at..at + own.len()].copy_from_slice(own.as_bytes());
    let smi = world.driver_root.as_ref().expect("simulated").join("usr/bin/nvidia-smi");
    // It may be a link to the program of all tests.
    std::fs::remove_file(&smi).expect("the host's nvidia-smi");
    std::fs::write(&smi, program).expect("the host's nvidia-smi");
    std::fs::set_permissions(&smi, PermissionsExt::from_mode(0o755)).expect("the host's nvidia-smi");
    assert!(world.sublet(&["refresh"]).status.success());
    let mut bundle = world.bundle("few", WHOLE, SLEEP);
    let env = bundle.spec["process"]["env"].as_array_mut().expect("env");
    env.push(json!("NVIDIA_DRIVER_CAPABILITIES=compute,utility,display,compat32"));
    let created = bundle.create();
    let lines: Vec<_> = created.stderr.lines().collect();
    let [not_served, left_out] = lines[..] else { panic!("{created:?}") };
    assert!(not_served.contains("NVIDIA_DRIVER_CAPABILITIES names display, compat32, for which nothing"));
    assert!(left_out.ends_with("as on NixOS: /usr/bin/nvidia-smi"), "{left_out}");
    assert!(bundle.start().ok);
    assert!(!bundle.exec(&["/bin/sh", "-c", "ls /usr/bin/nvidia-smi"]).ok, "it is left out");
    bundle.down();
    let with_loader = world.bundle("store", WHOLE, SLEEP);
    place(&with_loader, own, "");
    let created = with_loader.create();
    assert_eq!(created.stderr, "", "{created:?}");
    assert!(with_loader.destinations().contains(&"/usr/bin/nvidia-smi".to_owned()));
    assert!(with_loader.start().ok);
    with_loader.down();
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
