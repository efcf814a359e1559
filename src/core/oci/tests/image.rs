//! Looking into crafted root filesystems: every family's layout, and images that try to lead us out.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::rootfs::{Root, TRIPLET, elf, in_triplet, inspect_in, inventory, machine, time_slice};
use crate::config::Config;
use crate::grant::Image;
use crate::oci::image::room_for_share_program;
use crate::oci::rootfs::Tree;
use crate::oci::{ImageError, check_no_other_daemon, inspect};
use crate::request::Request;

#[test]
fn a_root_filesystem_that_is_open_is_not_looked_up_again() {
    let root = Root::debian();
    let (path, opened) = crate::fs::open_directory(&root.path("rootfs")).unwrap();
    std::fs::rename(&path, root.path("elsewhere")).unwrap();
    let tree = Tree::of_opened(&json!({}), opened.into(), &path).unwrap();
    let image = inspect(&json!({}), &tree, &time_slice(), &inventory(), &Config::default()).unwrap();
    assert_eq!(image.library_dir, Some(PathBuf::from(format!("/usr/lib/{TRIPLET}"))));
}

#[test]
fn each_familys_directory_is_found() {
    let debian = Root::debian();
    assert_eq!(debian.library_dir(), Some(in_triplet("").components().collect()));

    let old_debian = Root::new();
    old_debian.libc(&format!("rootfs/lib/{TRIPLET}"));
    assert_eq!(old_debian.library_dir(), Some(Path::new("/lib").join(TRIPLET)));

    let red_hat = Root::new();
    red_hat.libc("rootfs/usr/lib64");
    red_hat.link("usr/lib64", "rootfs/lib64");
    red_hat.file("rootfs/usr/lib/libc.so.6", elf(1, 3));
    assert_eq!(red_hat.library_dir(), Some("/usr/lib64".into()));

    let suse = Root::new();
    suse.dir("rootfs/usr/lib64");
    suse.libc("rootfs/lib64");
    assert_eq!(suse.library_dir(), Some("/lib64".into()));

    let arch = Root::new();
    arch.libc("rootfs/usr/lib");
    arch.link("lib", "rootfs/usr/lib64");
    assert_eq!(arch.library_dir(), Some("/usr/lib".into()));
}

#[test]
fn only_the_hosts_kind_of_libc_counts() {
    let alpine = Root::new();
    alpine.file("rootfs/lib/ld-musl-x86_64.so.1", elf(2, machine()));
    assert_eq!(alpine.inspect(&json!({})).unwrap(), Image::default());

    for (class, machine) in [(1, machine()), (2, 3), (2, 8)] {
        let root = Root::new();
        root.file("rootfs/usr/lib64/libc.so.6", elf(class, machine));
        assert_eq!(root.library_dir(), None, "{class} {machine}");
    }
    for content in ["", "\x7fELF", "/* GNU ld script */ GROUP ( /lib/libc.so.6 )"] {
        let root = Root::new();
        root.file("rootfs/usr/lib64/libc.so.6", content);
        assert_eq!(root.library_dir(), None);
    }
}

#[test]
fn an_image_with_a_nix_store_and_no_libc_is_nix() {
    let root = Root::new();
    root.dir("rootfs/nix/store");
    let image = root.inspect(&json!({})).unwrap();
    assert!(image.nix && image.library_dir.is_none());
    assert_eq!(
        image.created,
        ["/run/opengl-driver/lib/libcuda.so.1", "/run/opengl-driver/lib/libcuda.so", "/usr/bin/nvidia-smi"]
            .map(PathBuf::from)
    );
    let with_libc = Root::debian();
    with_libc.dir("rootfs/nix/store");
    assert!(!with_libc.inspect(&json!({})).unwrap().nix);
}

#[test]
fn missing_mount_points_are_recorded() {
    let root = Root::debian();
    root.file(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"), "");
    let image = root.inspect(&json!({})).unwrap();
    assert_eq!(image.created, [in_triplet("libcuda.so"), "/usr/bin/nvidia-smi".into()]);
    assert_eq!(image.empty, [in_triplet("libcuda.so.1")], "the image's own, or of an earlier container");
    root.file(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"), "the image's own");
    let image = root.inspect(&json!({})).unwrap();
    assert_eq!(image.created, [in_triplet("libcuda.so"), "/usr/bin/nvidia-smi".into()]);
    assert_eq!(fs::read_dir(root.path("rootfs/usr/bin")).unwrap().count(), 0);
}

#[test]
fn links_lead_nowhere_but_into_the_rootfs() {
    let root = Root::new();
    // A libc that only someone who left the rootfs would see.
    root.libc("outside");
    let outside = root.path("outside");
    let outside = outside.to_str().unwrap();
    for target in [outside, "../../../outside", "/proc/self/root", "/proc/self/cwd"] {
        let link = root.path("rootfs/usr/lib64");
        root.link(target, "rootfs/usr/lib64");
        assert_eq!(root.library_dir(), None, "{target}");
        fs::remove_file(link).unwrap();
    }
    // `..` beyond the top stays at the top, an absolute link starts there.
    root.libc("rootfs/real");
    for target in ["../../../../real", "/real", "/../real"] {
        root.link(target, "rootfs/usr/lib64");
        assert_eq!(root.library_dir(), Some("/real".into()), "{target}");
        fs::remove_file(root.path("rootfs/usr/lib64")).unwrap();
    }
    assert_eq!(fs::read_dir(root.path("outside")).unwrap().count(), 1);
}

#[test]
fn a_libc_outside_is_not_read_through_a_link() {
    let root = Root::new();
    root.libc("outside");
    let target = root.path("outside/libc.so.6");
    root.link(target.to_str().unwrap(), "rootfs/usr/lib64/libc.so.6");
    assert_eq!(root.library_dir(), None);
}

#[test]
fn loops_fifos_and_devices_do_not_hold_us() {
    let root = Root::new();
    root.link("lib64", "rootfs/usr/lib64");
    root.fifo("rootfs/usr/lib/libc.so.6");
    root.fifo("rootfs/etc/ld.so.cache");
    assert_eq!(root.inspect(&json!({})).unwrap(), Image::default());
}

#[test]
fn a_rootfs_that_is_not_there_is_an_error() {
    let error =
        inspect_in(Path::new("/nonexistent"), &json!({}), &time_slice(), &inventory(), &Config::default());
    assert!(matches!(error, Err(ImageError::Rootfs { .. })));
}

#[test]
fn the_mount_over_tmp_decides_where_the_default_directory_is() {
    let root = Root::debian();
    let volume = root.path("volume");
    root.dir("volume");
    root.dir("rootfs/var/tmp");
    let look = |root: &Root, destination: &str, source: &Path, options: &[&str]| {
        let mount = json!({"destination": destination, "type": "bind", "source": source, "options": options});
        root.inspect(&json!({"mounts": [mount]})).unwrap()
    };
    let tmp = Path::new("/tmp");
    for (destination, options) in [("/tmp", &["rw"][..]), ("/tmp/", &["rbind"]), ("/tmp", &["ro"])] {
        assert!(look(&root, destination, tmp, options).tmp_is_host, "{destination}");
    }
    let of_its_own = look(&root, "/tmp", &volume, &["rbind", "rw"]);
    assert!(of_its_own.takes_default_directory());
    let made = of_its_own.tmp_volume.unwrap();
    assert_eq!((made.directory, made.files), (volume.canonicalize().unwrap(), vec!["nvidia-mps".into()]));
    for options in [["rbind", "ro"], ["bind", "rshared"]] {
        let closed = look(&root, "/tmp", &volume, &options);
        assert!(closed.tmp_is_closed && !closed.tmp_is_host, "{options:?}");
    }
    root.dir("volume/nvidia-mps");
    let there = look(&root, "/tmp", &volume, &["bind", "ro"]);
    assert!(there.takes_default_directory() && !there.other_daemon);
    assert_eq!(there.tmp_volume.unwrap().files, Vec::<PathBuf>::new());
    let elsewhere = look(&root, "/tmp/x", tmp, &["rbind"]);
    assert_eq!((elsewhere.takes_default_directory(), elsewhere.tmp_volume), (true, None));
    let linked = Root::debian();
    fs::remove_dir(linked.path("rootfs/tmp")).unwrap();
    linked.link("var/tmp", "rootfs/tmp");
    linked.dir("rootfs/var/tmp");
    assert!(look(&linked, "/var/tmp", tmp, &["rbind"]).tmp_is_host);
}

#[test]
fn another_daemons_directory_is_seen_however_it_comes_there() {
    let root = Root::debian();
    root.dir("daemon");
    root.link("/mps", "rootfs/tmp/nvidia-mps");
    let brings = |root: &Root, destination: &str, source: &str| {
        let mount = json!({"destination": destination, "type": "bind", "source": root.path(source)});
        let image = root.inspect(&json!({"mounts": [mount]})).unwrap();
        assert_eq!(check_no_other_daemon(&image, true).is_err(), image.other_daemon && image.tmp_is_host);
        assert_eq!(check_no_other_daemon(&image, false).is_err(), image.other_daemon);
        image.other_daemon
    };
    assert!(brings(&root, "/mps", "daemon"), "by a link of the image's");
    assert!(!brings(&root, "/mps/other", "daemon"));
    let plain = Root::debian();
    plain.dir("daemon");
    plain.dir("tmp/nvidia-mps");
    assert!(brings(&plain, "/tmp/nvidia-mps", "daemon"), "although no daemon runs yet");
    assert!(!brings(&plain, "/tmp", "tmp"), "an empty directory");
    plain.file("tmp/nvidia-mps/control", "");
    assert!(brings(&plain, "/tmp", "tmp"), "a daemon's");
    assert!(brings(&plain, "/tmp/nvidia-mps/control", "tmp/nvidia-mps/control"));
}

#[test]
fn capabilities_that_bring_nothing_are_named_once() {
    let root = Root::debian();
    let warned = |not_served: &[&str]| {
        let not_served = not_served.iter().map(|&word| word.to_owned()).collect();
        let request = Request { not_served, ..time_slice() };
        let (rootfs, config) = (root.path("rootfs"), Config::default());
        inspect_in(&rootfs, &json!({}), &request, &inventory(), &config).unwrap().warnings
    };
    let line = "the image's NVIDIA_DRIVER_CAPABILITIES names display, compat32, for which nothing is mounted";
    let seen = warned(&["display", "compat32"]);
    assert!(seen.len() == 1 && seen[0].starts_with(line), "{seen:?}");
    assert_eq!(warned(&[]), Vec::<String>::new());
}

#[test]
fn a_file_that_is_of_no_use_in_the_image_is_left_out_and_named() {
    let root = Root::debian();
    let loader = "/nix/store/xyz-glibc/lib/ld-linux-x86-64.so.2";
    let mut inventory = inventory();
    inventory.files[1].needs = Some(loader.into());
    let look = || {
        inspect_in(&root.path("rootfs"), &json!({}), &time_slice(), &inventory, &Config::default()).unwrap()
    };
    let image = look();
    assert_eq!(image.useless, [Path::new("/usr/bin/nvidia-smi")]);
    assert!(!image.created.contains(&PathBuf::from("/usr/bin/nvidia-smi")), "no mount point is made for it");
    assert!(image.warnings()[0].ends_with("as on NixOS: /usr/bin/nvidia-smi"), "{:?}", image.warnings());
    root.file(&format!("rootfs{loader}"), "");
    assert_eq!((look().useless, look().warnings()), (vec![], vec![]));
}

#[test]
fn volumes_over_the_library_directory_are_looked_into() {
    let root = Root::debian();
    root.libc("volume");
    let volume = |options: &[&str]| {
        json!({"mounts": [{
            "destination": format!("/lib/{TRIPLET}"), "type": "bind", "source": root.path("volume"),
            "options": options
        }]})
    };
    // Writable: the runtime makes the files in the volume.
    let image = root.inspect(&volume(&["rbind", "rw"])).unwrap();
    assert_eq!(image.library_dir, Some(Path::new("/usr/lib").join(TRIPLET)));
    assert_eq!(image.created, [PathBuf::from("/usr/bin/nvidia-smi")]);
    assert_eq!(image.volumes.len(), 1);
    assert_eq!(image.volumes[0].directory, root.path("volume").canonicalize().unwrap());
    assert_eq!(image.volumes[0].files, ["libcuda.so.1", "libcuda.so"].map(PathBuf::from));
    // Read-only: named, all that are missing.
    for options in
        [&["rbind", "rro"][..], &["rbind", "rw", "rro"], &["ro", "rrw", "rbind"], &["rw", "ro", "bind"]]
    {
        assert!(matches!(root.inspect(&volume(options)), Err(ImageError::ReadOnly(_))), "{options:?}");
    }
    assert!(root.inspect(&volume(&["rbind", "ro", "rw"])).is_ok(), "the last one counts");
    let error = root.inspect(&volume(&["rbind", "ro"])).unwrap_err();
    let listed = format!(": /usr/lib/{TRIPLET}/libcuda.so.1 /usr/lib/{TRIPLET}/libcuda.so");
    assert!(error.to_string().ends_with(&listed), "{error}");
    root.file("volume/libcuda.so", "");
    root.link("libcuda.so", "volume/libcuda.so.1");
    // An existing file is never removed, and still has a mount on it.
    let image = root.inspect(&volume(&["rbind", "ro"])).unwrap();
    assert_eq!((image.volumes.len(), image.volumes[0].files.len()), (1, 0));
}

#[test]
fn files_made_in_a_volume_are_known_by_their_real_paths() {
    let root = Root::debian();
    root.libc("volume/libs");
    root.dir("volume/real");
    root.link("/srv/real/cuda", "volume/libs/libcuda.so.1");
    root.link("/etc/cuda", "volume/libs/libcuda.so");
    let spec = json!({"mounts": [
        {"destination": format!("/usr/lib/{TRIPLET}"), "type": "bind", "source": root.path("volume/libs")},
        {"destination": "/srv", "type": "bind", "source": root.path("volume")},
        {"destination": "/usr/bin", "type": "bind", "source": root.path("volume/bin")}
    ]});
    root.dir("volume/bin");
    let image = root.inspect(&spec).unwrap();
    let found: Vec<_> = image
        .volumes
        .iter()
        .map(|volume| (volume.directory.strip_prefix(root.path("volume")).unwrap(), volume.files.as_slice()))
        .collect();
    let path = Path::new;
    assert_eq!(found, [(path("real"), &["cuda".into()][..]), (path("bin"), &["nvidia-smi".into()][..])]);
    assert_eq!(image.created, [PathBuf::from("/etc/cuda")], "a link of the volume's leads there");
}

#[test]
fn a_volume_does_not_lead_out_either() {
    let root = Root::new();
    root.libc("outside");
    root.dir("volume");
    let target = root.path("outside/libc.so.6");
    root.link(target.to_str().unwrap(), "volume/libc.so.6");
    let spec = json!({"mounts": [
        {"destination": "/usr/lib64", "type": "bind", "source": root.path("volume")}
    ]});
    assert_eq!(root.inspect(&spec).unwrap().library_dir, None);
}

#[test]
fn the_program_for_the_share_is_left_out_where_it_has_no_room() {
    let room = |root: &Root, spec: &Value| {
        let room = room_for_share_program(&Tree::open(spec, &root.path("rootfs")).unwrap());
        room.map(|points| (points.created, points.empty))
    };
    let path = PathBuf::from("/usr/bin/sublet-share");
    let debian = Root::debian();
    assert_eq!(room(&debian, &json!({})), Some((vec![path.clone()], vec![])));
    let volume = debian.path("volume");
    fs::create_dir_all(&volume).unwrap();
    let over = |destination: &str, options: &[&str]| json!({"mounts": [{"destination": destination, "source": volume, "type": "bind", "options": options}]});
    assert_eq!(room(&debian, &over("/usr/bin", &["rbind"])), None, "other containers may have the volume");
    assert_eq!(room(&debian, &over("/usr/bin/sublet-share", &["rbind"])), None, "something is there");
    debian.file("rootfs/usr/bin/sublet-share", "");
    let empty = Some((vec![], vec![path]));
    assert_eq!(room(&debian, &json!({})), empty, "perhaps a mount point of an earlier container");
    debian.file("rootfs/usr/bin/sublet-share", "#!/bin/sh");
    assert_eq!(room(&debian, &json!({})), None, "the image's own");
    let linked = Root::debian();
    linked.link("/etc/passwd", "rootfs/usr/bin/sublet-share");
    for content in ["root", ""] {
        linked.file("rootfs/etc/passwd", content);
        assert_eq!(room(&linked, &json!({})), None);
    }
    assert_eq!(room(&Root::new(), &json!({})), None, "an image without /usr/bin");
}
