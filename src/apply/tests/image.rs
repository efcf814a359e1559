//! Looking into crafted root filesystems: every family's layout, and images that try to lead us out.

use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};

use crate::apply::{ImageError, cleanup_mount_points, inspect};
use crate::config::{Config, Inject};
use crate::grant::Image;
use crate::inventory::{Driver, DriverFile, FileKind, Fingerprint, Inventory, Majors};
use crate::request::{
    Capabilities, Capability, Devices, Isolation, Memory, Mode, Percent, Priority, Request,
};

#[cfg(target_arch = "x86_64")]
const TRIPLET: &str = "x86_64-linux-gnu";
#[cfg(target_arch = "aarch64")]
const TRIPLET: &str = "aarch64-linux-gnu";

/// A rootfs to be filled.
struct Root(tempfile::TempDir);

impl Root {
    fn new() -> Self {
        let root = Self(tempfile::tempdir().unwrap());
        root.dir("rootfs");
        root
    }

    /// Debian with merged /usr.
    fn debian() -> Self {
        let root = Self::new();
        root.libc(&format!("rootfs/usr/lib/{TRIPLET}"));
        root.link("usr/lib", "rootfs/lib");
        root.dir("rootfs/usr/bin");
        root.dir("rootfs/tmp");
        root
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn dir(&self, path: &str) {
        fs::create_dir_all(self.path(path)).unwrap();
    }

    fn file(&self, path: &str, content: impl AsRef<[u8]>) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn link(&self, target: &str, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }

    fn fifo(&self, path: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    }

    fn libc(&self, dir: &str) {
        self.file(&format!("{dir}/libc.so.6"), elf(2, machine()));
    }

    fn inspect_as(&self, spec: &Value, request: &Request, config: &Config) -> Result<Image, ImageError> {
        inspect(spec, &self.path("rootfs"), request, &inventory(), config)
    }

    fn inspect(&self, spec: &Value) -> Result<Image, ImageError> {
        self.inspect_as(spec, &time_slice(), &Config::default())
    }

    fn library_dir(&self) -> Option<PathBuf> {
        self.inspect(&json!({})).unwrap().library_dir
    }
}

fn machine() -> u16 {
    if cfg!(target_arch = "x86_64") { 62 } else { 183 }
}

fn elf(class: u8, machine: u16) -> Vec<u8> {
    let mut header = vec![0x7f, b'E', b'L', b'F', class, 1, 1];
    header.resize(64, 0);
    header[18..20].copy_from_slice(&machine.to_le_bytes());
    header
}

fn time_slice() -> Request {
    Request {
        devices: Devices::Any(NonZeroU32::MIN),
        mode: Some(Mode::TimeSlice),
        default_mode: Mode::TimeSlice,
        isolation: Isolation::Shared,
        sm: None,
        memory: None,
        mig: None,
        mig_caps: Vec::new(),
        priority: Priority::Normal,
        guard: None,
        processes: NonZeroU32::MIN,
        capabilities: Capabilities::default(),
        wait: Duration::ZERO,
    }
}

fn mps() -> Request {
    Request { mode: Some(Mode::Mps), ..time_slice() }
}

fn inventory() -> Inventory {
    let library = FileKind::Library { soname: "libcuda.so.1".to_owned(), also: Vec::new() };
    let program = FileKind::Program { name: "nvidia-smi".to_owned() };
    let file = |source: &str, kind, capability| DriverFile { source: source.into(), kind, capability };
    Inventory {
        schema: String::new(),
        fingerprint: Fingerprint {
            boot_id: String::new(),
            driver_version: String::new(),
            gpus: Vec::new(),
            mig: Vec::new(),
        },
        probed_at: 0,
        mig_changes: 0,
        driver: Driver {
            version: String::new(),
            cuda: (13, 0),
            simulated: false,
            mps_control: None,
            smi: None,
            majors: Majors::default(),
            mig_caps: [None, None],
        },
        devices: Vec::new(),
        files: vec![
            file("/host/libcuda.so.580", library, Capability::Compute),
            file("/host/nvidia-smi", program, Capability::Utility),
        ],
    }
}

fn in_triplet(name: &str) -> PathBuf {
    Path::new("/usr/lib").join(TRIPLET).join(name)
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
fn nix_is_told_by_its_store() {
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
fn what_is_missing_is_remembered() {
    let root = Root::debian();
    root.file(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"), "");
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
    assert!(matches!(&error, ImageError::Unusable { path, .. } if path == Path::new("/usr/bin/nvidia-smi")));

    let file = Root::debian();
    file.file("rootfs/run/sublet/mps", "");
    let error = file.inspect_as(&json!({}), &mps(), &Config::default()).unwrap_err();
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
        let error = root.inspect_as(&volumes, &mps(), &Config::default()).unwrap_err().to_string();
        let expected = format!(
            "by a link of the image's, {inner} comes to lie in or under what is mounted at {outer}: "
        );
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
        root.inspect_as(&volumes, &mps(), &Config::default()).unwrap();
    }
}

#[test]
fn a_rootfs_that_is_not_there_is_an_error() {
    let error =
        inspect(&json!({}), Path::new("/nonexistent"), &time_slice(), &inventory(), &Config::default());
    assert!(matches!(error, Err(ImageError::Rootfs { .. })));
}

#[test]
fn rival_libraries_are_named_once() {
    let root = Root::debian();
    root.file("rootfs/usr/local/cuda/compat/libcuda.so.1.1", "x");
    root.link("libcuda.so.1.1", "rootfs/usr/local/cuda/compat/libcuda.so.1");
    root.file("rootfs/opt/fwd/libcuda.so.1", "x");
    root.file(&format!("rootfs/usr/lib/{TRIPLET}/libcuda.so.1"), "");
    let cache = format!(
        "glibc-ld.so.cache1.1\0\x01\x02\0libcuda.so.1\0/usr/local/cuda/compat/libcuda.so.1\0\
         /usr/lib/{TRIPLET}/libcuda.so.1\0/gone/libcuda.so.1\0/opt/fwd/libcuda.so.1\0"
    );
    root.file("rootfs/etc/ld.so.cache", cache);
    let path = format!("LD_LIBRARY_PATH=relative::/opt/fwd/:/lib/{TRIPLET};/missing");
    let warnings = root.inspect(&json!({"process": {"env": [path]}})).unwrap().warnings;
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].starts_with("the image's own /opt/fwd/libcuda.so.1 (by its LD_LIBRARY_PATH) wins"));
    assert!(
        warnings[1]
            .starts_with("the image's own /usr/local/cuda/compat/libcuda.so.1 (by its /etc/ld.so.cache)")
    );
}

#[test]
fn a_huge_cache_is_read_to_its_bound() {
    let root = Root::debian();
    root.file("rootfs/opt/libcuda.so.1", "x");
    let mut cache = vec![0; 4 << 20];
    cache.extend_from_slice(b"\0/opt/libcuda.so.1\0");
    root.file("rootfs/etc/ld.so.cache", &cache);
    assert_eq!(root.inspect(&json!({})).unwrap().warnings, Vec::<String>::new());
    root.file("rootfs/etc/ld.so.cache", &cache[1024..]);
    assert_eq!(root.inspect(&json!({})).unwrap().warnings.len(), 1);
}

#[test]
fn tmp_of_the_host_is_seen() {
    let tmp = |mount: Value, root: &Root| root.inspect(&json!({"mounts": [mount]})).unwrap().tmp_is_host;
    let root = Root::debian();
    assert!(tmp(json!({"destination": "/tmp", "type": "bind", "source": "/tmp"}), &root));
    assert!(tmp(json!({"destination": "/tmp/", "source": "/srv", "options": ["rbind"]}), &root));
    assert!(!tmp(json!({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}), &root));
    assert!(!tmp(json!({"destination": "/tmp/x", "type": "bind", "source": "/tmp"}), &root));
    let linked = Root::new();
    linked.dir("rootfs/var/tmp");
    linked.link("var/tmp", "rootfs/tmp");
    assert!(tmp(json!({"destination": "/var/tmp", "type": "bind", "source": "/var/tmp"}), &linked));
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
    // Writable: the runtime makes the files in the volume, which is not ours to clean.
    let image = root.inspect(&volume(&["rbind", "rw"])).unwrap();
    assert_eq!(image.library_dir, Some(Path::new("/usr/lib").join(TRIPLET)));
    assert_eq!(image.created, [PathBuf::from("/usr/bin/nvidia-smi")]);
    // Read-only: named, all that are missing.
    let error = root.inspect(&volume(&["rbind", "ro"])).unwrap_err();
    let listed = format!(": /usr/lib/{TRIPLET}/libcuda.so.1 /usr/lib/{TRIPLET}/libcuda.so");
    assert!(error.to_string().ends_with(&listed), "{error}");
    root.file("volume/libcuda.so", "");
    root.link("libcuda.so", "volume/libcuda.so.1");
    assert!(root.inspect(&volume(&["rbind", "ro"])).is_ok());
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
    let memory = Request { memory: Some(Memory::Share(Percent::WHOLE)), ..time_slice() };
    let by_mode = Request { mode: None, ..time_slice() };
    let count = |request: &Request| match root.inspect_as(&json!({}), request, &Config::default()) {
        Err(ImageError::ReadOnly(paths)) => paths.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!([count(&time_slice()), count(&by_mode), count(&mps()), count(&memory)], [3, 3, 5, 5]);
    // What is mounted over it does not count, nor what another one injects.
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
