//! Mount points in crafted root filesystems: which paths can be one, which a runtime would make, and which are cleaned away.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::resource::{Resource, setrlimit};
use serde_json::json;

use super::rootfs::{Root, TRIPLET, in_triplet, inventory, time_slice};
use crate::config::{Config, Inject};
use crate::ledger::{Ledger, Leftover, VolumeFiles};
use crate::oci::{ImageError, Tree, cleanup_mount_points, clear, clear_volume, filter_missing, inspect};

#[test]
fn mount_points_that_are_links_are_accepted() {
    let root = Root::debian();
    let libraries = format!("rootfs/usr/lib/{TRIPLET}");
    root.file(&format!("{libraries}/libcuda.so.1.1"), "old");
    root.link("libcuda.so.1.1", &format!("{libraries}/libcuda.so.1"));
    root.link("/nowhere/libcuda.so", &format!("{libraries}/libcuda.so"));
    assert_eq!(
        root.inspect(&json!({})).unwrap().created,
        [in_triplet("libcuda.so"), "/usr/bin/nvidia-smi".into()]
    );
}

/// A bind mount lands on the target of a link: another file of the image's would be covered.
#[test]
fn a_link_to_another_file_is_left_out_and_named() {
    let root = Root::debian();
    let libraries = format!("rootfs/usr/lib/{TRIPLET}");
    root.file("rootfs/usr/bin/busybox", "the image's");
    root.link("busybox", "rootfs/usr/bin/nvidia-smi");
    root.file(&format!("{libraries}/libcuda.so.418.56"), "");
    root.link("libcuda.so.418.56", &format!("{libraries}/libcuda.so.1"));
    root.link("libcuda.so.1", &format!("{libraries}/libcuda.so"));
    let image = root.inspect(&json!({})).unwrap();
    assert_eq!(image.left_out, [Path::new("/usr/bin/nvidia-smi")]);
    assert_eq!(image.created, Vec::<PathBuf>::new());
    assert_eq!(image.empty, [in_triplet("libcuda.so.1"), in_triplet("libcuda.so")]);
    assert!(image.warnings().iter().any(|line| line.ends_with(" needed): /usr/bin/nvidia-smi")));
    root.file("volume/sh", "the volume's");
    let over =
        json!({"mounts": [{"destination": "/usr/bin", "type": "bind", "source": root.path("volume")}]});
    root.link("sh", "volume/nvidia-smi");
    assert_eq!(root.inspect(&over).unwrap().left_out, [Path::new("/usr/bin/nvidia-smi")]);
}

#[test]
fn mount_points_that_cannot_be_are_named() {
    let directory = Root::debian();
    directory.dir(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"));
    let error = directory.inspect(&json!({})).unwrap_err();
    let expected = format!("the image has a directory at /usr/lib/{TRIPLET}/libcuda.so.1, where");
    assert!(error.to_string().starts_with(&expected), "{error}");

    let looping = Root::debian();
    looping.link("nvidia-smi", "rootfs/usr/bin/nvidia-smi");
    let error = looping.inspect(&json!({})).unwrap_err();
    assert!(matches!(&error, ImageError::Unusable(path, _) if path == Path::new("/usr/bin/nvidia-smi")));

    let file = Root::debian();
    file.file("rootfs/run/sublet/mps", "");
    let error = file.inspect_with_mps(&json!({})).unwrap_err();
    assert!(matches!(&error, ImageError::NotDirectory(path) if path == Path::new("/run/sublet/mps")));
    assert!(file.inspect(&json!({})).is_ok());
}

#[test]
fn links_lead_nothing_into_a_directory_of_ours() {
    let volumes = json!({"mounts": [{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}]});
    let refused = [
        ("tmp", "/run/sublet/mps", "/tmp/nvidia-mps", "/run/sublet/mps"),
        ("tmp/nvidia-mps", "../run/sublet/mps/a", "/tmp/nvidia-mps", "/run/sublet/mps"),
        ("run/sublet/mps", "/tmp", "/tmp/nvidia-mps", "/run/sublet/mps"),
        ("run/sublet/mps", "/dev", "/dev", "/run/sublet/mps"),
        ("run", "/dev/../tmp/nvidia-mps", "/run/sublet/mps", "/tmp/nvidia-mps"),
        ("tmp/nvidia-mps", "/", "/run/sublet/mps", "/tmp/nvidia-mps"),
    ];
    for (place, target, inner, outer) in refused {
        let root = Root::debian();
        let _ = fs::remove_dir(root.path(&format!("rootfs/{place}")));
        root.link(target, &format!("rootfs/{place}"));
        let error = root.inspect_with_mps(&volumes).unwrap_err().to_string();
        let expected = format!("a link in the image puts {inner} in or below the mount at {outer}; fix: ");
        assert!(error.starts_with(&expected), "{place} -> {target}: {error}");
        assert!(root.inspect(&volumes).is_ok(), "{place} -> {target}, without a server");
    }
    for (place, target) in [
        ("tmp/nvidia-mps", "/run/sublet/mps"),
        ("run", "/var/run"),
        ("tmp", "/var/tmp"),
        ("tmp", "/run/sublet"),
    ] {
        let root = Root::debian();
        let _ = fs::remove_dir(root.path(&format!("rootfs/{place}")));
        root.link(target, &format!("rootfs/{place}"));
        root.inspect_with_mps(&volumes).unwrap();
    }
}

#[test]
fn a_tmpfs_takes_mount_points_and_leaves_none() {
    let root = Root::debian();
    let spec = json!({"mounts": [{"destination": "/usr/bin", "type": "tmpfs", "source": "tmpfs"}]});
    let created = root.inspect(&spec).unwrap().created;
    assert_eq!(created, [in_triplet("libcuda.so.1"), in_triplet("libcuda.so")]);
}

/// Bind-mounts the rootfs read-only in a mount namespace of this test's own thread.
fn make_read_only(path: &Path) -> nix::Result<()> {
    use nix::mount::{MsFlags, mount};
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    mount(Some(path), path, none, MsFlags::MS_BIND, none)?;
    mount(none, path, none, MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, none)
}

#[test]
fn a_read_only_rootfs_needs_every_mount_point() {
    let root = Root::debian();
    if make_read_only(&root.path("rootfs")).is_err() {
        eprintln!("skipped: a read-only mount needs root");
        return;
    }
    let named = |inspected: Result<(), ImageError>| match inspected {
        Err(ImageError::ReadOnly(paths)) => (paths.len(), 0),
        Err(ImageError::ReadOnlyMps(paths)) => (0, paths.len()),
        other => panic!("{other:?}"),
    };
    assert_eq!(named(root.inspect(&json!({})).map(drop)), (3, 0));
    // With the driver's files in place, the MPS directories are looked for where there is a daemon.
    let usr = json!({"mounts": [{"destination": "/usr", "type": "tmpfs", "source": "tmpfs"}]});
    assert_eq!(named(root.inspect_with_mps(&usr)), (0, 2));
    // A mount over it does not count, nor a file that another one injects.
    let tmpfs = json!({"mounts": [{"destination": "/usr", "type": "tmpfs", "source": "tmpfs"}]});
    assert!(root.inspect(&tmpfs).is_ok());
    let mut config = Config::default();
    config.driver.inject = Inject::None;
    assert!(root.inspect_as(&json!({}), &time_slice(), &config).is_ok());
}

#[test]
fn cleaning_takes_only_our_empty_files() {
    let root = Root::new();
    root.file("rootfs/usr/lib/empty", "");
    root.file("rootfs/usr/lib/full", "x");
    root.file("rootfs/usr/lib/twice", "");
    fs::hard_link(root.path("rootfs/usr/lib/twice"), root.path("rootfs/usr/lib/other")).unwrap();
    root.dir("rootfs/usr/lib/directory");
    root.fifo("rootfs/usr/lib/fifo");
    root.file("rootfs/opt/target", "");
    root.link("/opt/target", "rootfs/usr/lib/link");
    root.link("link", "rootfs/usr/lib/chain");
    root.link("loop", "rootfs/usr/lib/loop");
    let names = ["empty", "full", "twice", "directory", "fifo", "chain", "loop", "gone"];
    let paths = names.map(|name| Path::new("/usr/lib").join(name));
    assert_eq!(cleanup_mount_points(&root.path("rootfs"), &paths), 2);
    assert!(!root.path("rootfs/usr/lib/empty").exists());
    assert!(!root.path("rootfs/opt/target").exists());
    for kept in ["full", "twice", "other", "directory", "fifo", "link", "chain", "loop"] {
        assert!(fs::symlink_metadata(root.path("rootfs/usr/lib").join(kept)).is_ok(), "{kept}");
    }
    assert_eq!(cleanup_mount_points(&root.path("gone"), &paths), 0);
}

/// Another command removes what an earlier container left, after it was opened and before it is looked at. The runtime
/// makes it anew, so it is this container's to remove.
#[test]
fn a_mount_point_that_is_removed_while_it_is_looked_at_is_made_by_this_container() {
    let (root, path) = (Root::debian(), in_triplet("libcuda.so.1"));
    let file = root.path(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"));
    fs::write(&file, "").unwrap();
    let (rootfs, spec) = (root.path("rootfs"), json!({}));
    let tree = Tree::open(&spec, &rootfs).unwrap();
    tree.find(&path).unwrap();
    fs::remove_file(file).unwrap();
    let image = inspect(&spec, &tree, &time_slice(), &inventory(), &Config::default()).unwrap();
    assert_eq!(image.empty, std::slice::from_ref(&path));
    assert_eq!(filter_missing(&rootfs, &[&path]), [&path], "so the lease has it");
}

/// A process of its own, because it takes all of its descriptors.
#[test]
#[ignore = "run by mount_points_that_cannot_be_examined_without_descriptors_are_not_forgotten"]
fn without_descriptors() {
    let root = Root::new();
    root.file("rootfs/usr/lib/empty", "");
    root.file("volume/empty", "");
    let volume = fs::metadata(root.path("volume")).unwrap();
    let left = Leftover {
        bundle: root.path("bundle"),
        rootfs: root.path("rootfs"),
        mount_points: vec!["/usr/lib/empty".into(), "/usr/lib/gone".into()],
        volumes: vec![VolumeFiles {
            directory: root.path("volume"),
            device: volume.dev(),
            inode: volume.ino(),
            files: vec!["empty".into()],
        }],
    };
    let mut ledger = Ledger { leftovers: vec![left.clone()], ..Ledger::empty("boot") };
    setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
    let mut held: Vec<fs::File> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
    for free in 0..2 {
        ledger.forget(&[clear(&left)]);
        assert_eq!(ledger.leftovers, std::slice::from_ref(&left), "with {free} descriptors");
        held.pop();
    }
    ledger.forget(&[clear(&left)]);
    drop(held);
    assert!(ledger.leftovers.is_empty(), "{:?}", ledger.leftovers);
    for removed in ["rootfs/usr/lib/empty", "volume/empty"] {
        assert!(!root.path(removed).exists(), "{removed}");
    }
}

#[test]
fn mount_points_that_cannot_be_examined_without_descriptors_are_not_forgotten() {
    let test = "oci::tests::mount_points::without_descriptors";
    let done = Command::new(std::env::current_exe().unwrap()).args(["--exact", test, "--ignored"]).output();
    let done = done.unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn cleaning_never_leaves_the_rootfs() {
    let root = Root::new();
    root.file("outside/empty", "");
    let outside = root.path("outside");
    root.link(outside.to_str().unwrap(), "rootfs/absolute");
    root.link("../outside", "rootfs/relative");
    root.link("../../outside/empty", "rootfs/usr/file");
    let paths = ["/absolute/empty", "/relative/empty", "/usr/file", "/../outside/empty"].map(PathBuf::from);
    assert_eq!(cleanup_mount_points(&root.path("rootfs"), &paths), 0);
    assert!(root.path("outside/empty").exists());
    // Nor is a link in the rootfs's own place followed.
    symlink("outside", root.path("link")).unwrap();
    assert_eq!(cleanup_mount_points(&root.path("link"), &["/empty".into()]), 0);
    assert!(root.path("outside/empty").exists());
}

#[test]
fn cleaning_a_volume_follows_no_link() {
    let root = Root::new();
    root.file("outside/empty", "");
    root.file("volume/ours", "");
    root.file("volume/full", "x");
    root.file("volume/below/ours", "");
    root.file("volume/theirs", "");
    root.dir("volume/made");
    root.dir("volume/used/by-another");
    root.link("theirs", "volume/link");
    root.link(root.path("outside").to_str().unwrap(), "volume/away");
    root.link("../outside", "volume/relative");
    let place = |directory: &str| {
        let directory = root.path(directory).canonicalize().unwrap();
        let stat = fs::metadata(&directory).unwrap();
        let files = [
            "ours",
            "full",
            "below/ours",
            "link",
            "away/empty",
            "relative/empty",
            "../outside/empty",
            "made",
            "used",
            "gone",
        ];
        let files = files.map(PathBuf::from).into();
        VolumeFiles { directory, device: stat.dev(), inode: stat.ino(), files }
    };
    let volume = place("volume");
    // Another directory in its place, and a link to it.
    for other in [
        VolumeFiles { inode: volume.inode + 1, ..volume.clone() },
        VolumeFiles { device: volume.device + 1, ..volume.clone() },
    ] {
        clear_volume(&other);
    }
    root.link("volume", "linked");
    clear_volume(&VolumeFiles { directory: root.path("linked"), ..volume.clone() });
    assert!(root.path("volume/ours").exists() && root.path("volume/below/ours").exists());
    clear_volume(&volume);
    for ours in ["volume/ours", "volume/below/ours", "volume/made"] {
        assert!(!root.path(ours).exists(), "{ours}");
    }
    for kept in ["volume/full", "volume/used/by-another", "volume/theirs", "volume/link", "outside/empty"] {
        assert!(fs::symlink_metadata(root.path(kept)).is_ok(), "{kept}");
    }
}
