//! A1 to A4, A7 and A9: symbolic links in the image at paths that sublet or a low-level runtime reads or mounts, also
//! exchanged at run time, and volumes whose mounts could reach the host. With the shim, runc and crun mount; with the
//! hook, sublet does. Afterwards the host must be unchanged, and every mount must be inside the container.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use serde_json::json;
use sublet_e2e::{Bundle, Finished, World, bin_dir, eventually, skip_unless_root};

const SHARE: &[(&str, &str)] = &[("sublet.sm", "25")];
const SLEEP: &[&str] = &["/bin/sleep", "120"];
const DIR: &str =
    if cfg!(target_arch = "aarch64") { "/lib/aarch64-linux-gnu" } else { "/lib/x86_64-linux-gnu" };

/// The program that mounts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum EntryPoint {
    /// The low-level runtime, as the shim's config.json says.
    Shim,
    /// `sublet-hook`, in the container's mount namespace.
    Hook,
}

const DOORS: [EntryPoint; 2] = [EntryPoint::Shim, EntryPoint::Hook];

/// A world, and a directory in it that represents the host's files.
struct Host {
    world: World,
    canary: PathBuf,
    before: Vec<String>,
}

impl Host {
    fn new() -> Self {
        let world = World::simulated("h200", "");
        let canary = world.dir.path().join("canary");
        fs::create_dir_all(canary.join("dir")).expect("a directory");
        fs::write(canary.join("secret"), "of the host").expect("a file");
        // A file that looks like a mount point left behind by sublet.
        fs::write(canary.join("libcuda.so.1"), "").expect("a file");
        let mut host = Self { world, canary, before: Vec::new() };
        host.before = host.now();
        host
    }

    /// Everything below the canary, the mount table, and the files that mounts at wrong places would leave.
    fn now(&self) -> Vec<String> {
        let find = Command::new("find").arg(&self.canary).args(["-printf", "%p %y %s %m %l\n"]).output();
        let mut lines: Vec<_> =
            String::from_utf8_lossy(&find.expect("find").stdout).lines().map(str::to_owned).collect();
        lines.sort();
        let table = fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let dir = self.world.dir.path().to_string_lossy().into_owned();
        // Only this world's containers, because tests run in parallel.
        let ours =
            |line: &&str| line.contains(&dir) || line.contains("nvidia") || line.contains("/run/sublet");
        lines.extend(table.lines().filter(ours).map(str::to_owned));
        // Mount points that a runtime makes in the MPS directory are made on the host.
        let public = Command::new("find")
            .arg(self.world.state_dir())
            .args(["-path", "*/public/*", "!", "-name", "control"])
            .output();
        let public = public.expect("find");
        lines.extend(String::from_utf8_lossy(&public.stdout).lines().map(str::to_owned));
        let left = ["/run/sublet", "/run/opengl-driver", "/run/control", "/etc/control"];
        lines.extend(left.iter().filter(|path| Path::new(path).exists()).map(|path| (*path).to_owned()));
        lines
    }

    fn assert_unchanged(&self, what: &str) {
        assert_eq!(self.now(), self.before, "{what}: the host changed");
        let secret = fs::read_to_string(self.canary.join("secret")).expect("the canary");
        assert_eq!(secret, "of the host", "{what}");
    }

    /// Removes the empty files and directories that runc before 1.1.14 leaves outside the container if the path of a
    /// mount point is exchanged, whoever requested the mount (CVE-2024-45310). sublet cannot prevent it.
    fn clear_after_old_runc(&self) {
        let canary = self.canary.display().to_string();
        let left = || {
            // A directory of the canary that was used stays and changes its size.
            let path = |line: &String| line.split(' ').next().map(str::to_owned);
            let is_new = |line: &String| {
                line.starts_with(&canary) && !self.before.iter().any(|before| path(before) == path(line))
            };
            self.now().into_iter().rev().filter(is_new).collect::<Vec<_>>()
        };
        // A container that is ending may make another file in a directory that was just checked.
        let cleared = eventually(|| {
            for line in left() {
                match line.split(' ').collect::<Vec<_>>()[..] {
                    [path, "f", "0", ..] => drop(fs::remove_file(path)),
                    [path, "d", ..] => drop(fs::remove_dir(path)),
                    _ => panic!("not from runc: {line}"),
                }
            }
            left().is_empty()
        });
        assert!(cleared, "{:?}", left());
    }

    /// A file of the canary, as an absolute path.
    fn at(&self, name: &str) -> String {
        self.canary.join(name).display().to_string()
    }

    /// The same, up and out of the root filesystem.
    fn up_and_out(&self, name: &str) -> String {
        format!("{}{}", "../".repeat(20), &self.at(name)[1..])
    }

    fn bundle(&self, entry_point: EntryPoint, args: &[&str]) -> Bundle<'_> {
        let mut bundle = self.world.bundle("hostile", SHARE, args);
        if entry_point == EntryPoint::Hook {
            bundle.hook(&["createRuntime", "poststop"]);
        }
        bundle
    }

    /// Creates a container whose image has a link at `place` to `target`; whether it started. If it did, it has its
    /// share and none of the host's files.
    fn attack(&self, entry_point: EntryPoint, place: &str, target: &str, readonly: bool) -> bool {
        // A link in /proc has another target for the runtime than for the container, and the last mount hides the
        // earlier one.
        let reached = match (target.starts_with("/proc"), place) {
            (true, _) => "",
            (false, "/tmp/nvidia-mps") => "/tmp/nvidia-mps",
            (false, _) => "/run/sublet/mps",
        };
        let what = format!("{place} -> {target}");
        self.attack_with(entry_point, readonly, &what, reached, |bundle| link(bundle, place, target))
    }

    fn attack_with(
        &self,
        entry_point: EntryPoint,
        readonly: bool,
        what: &str,
        reached: &str,
        image: impl FnOnce(&Bundle<'_>),
    ) -> bool {
        let what = format!("{entry_point:?}: {what}{}", if readonly { ", read-only" } else { "" });
        let mut bundle = self.bundle(entry_point, SLEEP);
        bundle.spec["root"]["readonly"] = json!(readonly);
        image(&bundle);
        let created = bundle.create();
        if created.ok {
            if entry_point == EntryPoint::Shim {
                self.assert_sources(&bundle, &what);
            }
            assert!(bundle.start().ok, "{what}");
            self.assert_nothing_of_the_host(&bundle, &what);
            if !reached.is_empty() {
                assert_given(&bundle, reached, &what);
            }
        } else {
            assert!(!created.stderr.contains("panicked"), "{what}: {created:?}");
            assert!(!created.stderr.trim().is_empty(), "{what}: no word of why: {created:?}");
        }
        self.assert_unchanged(&what);
        bundle.down();
        self.assert_unchanged(&format!("{what}, after its end"));
        fs::remove_dir_all(&bundle.dir).expect("the next starts afresh");
        self.world.assert_empty();
        created.ok
    }

    fn assert_nothing_of_the_host(&self, bundle: &Bundle<'_>, what: &str) {
        let sh = |script: &str| bundle.exec(&["/bin/sh", "-c", script]);
        let canary = self.canary.display();
        let found = sh(&format!(
            "cat {canary}/secret /secret /run/secret /tmp/secret {DIR}/secret /usr/bin/secret {DIR}/libcuda.so.1"
        ));
        assert!(!found.stdout.contains("of the host"), "{what}: {found:?}");
        let table = sh("cat /proc/self/mountinfo").stdout;
        // mountinfo(5): the fourth field is the directory of the file system that is mounted.
        let shows = |line: &&str| {
            let fields: Vec<&str> = line.split(' ').collect();
            fields[3].contains("/canary") || (fields[4] != "/" && ["/run", "/etc"].contains(&fields[3]))
        };
        assert_eq!(table.lines().find(shows), None, "{what}");
    }

    /// sublet mounts files of the driver and of the state directory, and `sublet-share`.
    fn assert_sources(&self, bundle: &Bundle<'_>, what: &str) {
        let engines = bundle.spec["mounts"].as_array().expect("mounts").len();
        let driver = self.world.driver_root.as_ref().expect("simulated");
        let state = self.world.state_dir().join("mps");
        for mount in &bundle.config()["mounts"].as_array().expect("mounts")[engines..] {
            let source = Path::new(mount["source"].as_str().expect("a source"));
            let own = source == bin_dir().join("sublet-share");
            assert!(own || source.starts_with(driver) || source.starts_with(&state), "{what}: {mount}");
        }
    }
}

/// The container has the driver's library, if its image can have one, and its MPS directory at `reached`.
fn assert_given(bundle: &Bundle<'_>, reached: &str, what: &str) {
    let look =
        format!("[ ! -e {DIR}/libc.so.6 ] || grep -q ELF {DIR}/libcuda.so.1 && [ -S {reached}/control ]");
    let given = bundle.exec(&["/bin/sh", "-c", &look]);
    assert!(given.ok, "{what}: {given:?}");
}

/// `path` of the container, on the host.
fn inside(bundle: &Bundle<'_>, path: &str) -> PathBuf {
    bundle.dir.join("rootfs").join(path.trim_start_matches('/'))
}

/// Replaces the image's file at `place` by a link.
fn link(bundle: &Bundle<'_>, place: &str, target: &str) {
    let link = cleared(bundle, place);
    symlink(target, link).expect("a link of the image's");
}

/// The place, with its parents and with nothing there.
fn cleared(bundle: &Bundle<'_>, place: &str) -> PathBuf {
    let at = inside(bundle, place);
    fs::create_dir_all(at.parent().expect("a directory")).expect("directories");
    if fs::symlink_metadata(&at).is_ok_and(|there| there.is_dir()) {
        fs::remove_dir_all(&at).expect("removed");
    } else {
        let _ = fs::remove_file(&at);
    }
    at
}

#[test]
fn a1_links_in_a_library_directory_show_nothing_of_the_host() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new();
    let targets = |name: &str| {
        let path = host.at(name);
        let by_proc = ["/proc/1/cwd", "/proc/self/root", "/proc/1/root"].map(|root| format!("{root}{path}"));
        [vec![path, host.up_and_out(name)], by_proc.to_vec()].concat()
    };
    let mut started = 0;
    for entry_point in DOORS {
        for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            for target in targets("secret") {
                started += usize::from(host.attack(entry_point, &format!("{DIR}/{library}"), &target, false));
            }
        }
        // A file whose place is a link to another file is left out. Where the link leads to nothing, one would be made.
        for target in targets("new") {
            host.attack(entry_point, &format!("{DIR}/libcuda.so"), &target, false);
        }
    }
    assert!(started >= 6, "{started}: links that lead to nothing but a path are followed inside");
}

#[test]
fn a2_what_a_driver_file_lands_on_is_inside() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new();
    let places = [DIR, &format!("{DIR}/libcuda.so.1"), "/usr/bin/nvidia-smi", "/tmp/nvidia-mps"];
    let mut started = 0;
    for entry_point in DOORS {
        for place in places {
            for target in ["/", "/run", "/etc", &host.at("dir")] {
                started += usize::from(host.attack(entry_point, place, target, false));
            }
        }
        // A mount point in the MPS directory is made in the daemon's directory.
        for (place, target) in
            [("/tmp", "/run/sublet/mps"), ("/run/sublet/mps", "/tmp"), ("/run/sublet/mps", "/dev")]
        {
            assert!(!host.attack(entry_point, place, target, false), "{entry_point:?}: {place} -> {target}");
        }
        // A file of the kernel is not a mount point for a driver file: the runtime may write there.
        let kernels = host.attack(entry_point, "/usr/bin/nvidia-smi", "/proc/version", false);
        assert!(entry_point == EntryPoint::Shim || !kernels, "mounted over /proc");
    }
    assert!(started > 4, "{started}");
}

#[test]
fn a3_parents_of_mount_points_lead_nowhere_else() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new();
    let out = host.at("dir");
    let targets = [
        out.clone(),
        host.at("new"),
        host.up_and_out("dir"),
        format!("/proc/self/root{out}"),
        "/proc/1/cwd".to_owned(),
    ];
    let mut started = 0;
    for entry_point in DOORS {
        for (number, place) in ["/run", "/run/sublet", "/tmp", "/usr/bin"].into_iter().enumerate() {
            for (target, readonly) in targets.iter().zip([false, true].into_iter().cycle().skip(number)) {
                started += usize::from(host.attack(entry_point, place, target, readonly));
            }
        }
    }
    assert!(started > 4, "{started}");
}

#[test]
fn a4_what_is_at_a_mount_point_already_is_refused_or_stays_inside() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new();
    let files = [format!("{DIR}/libcuda.so"), "/usr/bin/nvidia-smi".to_owned()];
    let directories = ["/tmp/nvidia-mps".to_owned(), "/run/sublet/mps".to_owned()];
    for entry_point in DOORS {
        for place in files.iter().chain(&directories) {
            for target in [host.at("new"), host.up_and_out("new"), host.at("dir/new"), host.at("secret")] {
                host.attack(entry_point, place, &target, false);
            }
        }
        for place in &files {
            let directory =
                |bundle: &Bundle<'_>| fs::create_dir(cleared(bundle, place)).expect("a directory");
            assert!(!host.attack_with(entry_point, false, &format!("{place} is a directory"), "", directory));
        }
        for place in &directories {
            let file = |bundle: &Bundle<'_>| fs::write(cleared(bundle, place), "x").expect("a file");
            assert!(!host.attack_with(entry_point, false, &format!("{place} is a file"), "", file));
        }
    }
}

/// Ends the exchanging process, however the test ends.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// CVE-2025-23359: a process swaps parts of the image, and of a volume that another container also has.
#[test]
fn a7_ten_thousand_swaps_lead_nowhere_else() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new();
    let volume = host.world.dir.path().join("volume");
    let rootfs = host.world.dir.path().join("bundles/hostile/rootfs");
    let libraries = rootfs.join(&DIR[1..]);
    let pairs = [
        (volume.join("bin"), volume.join("evil")),
        (libraries.clone(), libraries.with_file_name("evil")),
        (rootfs.join("tmp"), rootfs.join("evil")),
    ];
    let (count, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for (good, evil) in &pairs {
                    // Between two containers the paths do not exist.
                    let swapped = renameat2(AT_FDCWD, good, AT_FDCWD, evil, RenameFlags::RENAME_EXCHANGE);
                    count.fetch_add(u64::from(swapped.is_ok()), Ordering::Relaxed);
                }
            }
        });
        let _done = Done(&done);
        let mut round = 0;
        while round < 8 || count.load(Ordering::Relaxed) < 10_000 {
            for entry_point in DOORS {
                race(&host, entry_point, &volume, &format!("{entry_point:?}, round {round}"));
            }
            round += 1;
        }
    });
    host.world.assert_empty();
}

fn is_old_runc(world: &World) -> bool {
    let told = Command::new(world.engine.program()).arg("--version").output().expect("a runtime");
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let number =
        |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u32>();
    let version = told.lines().next().and_then(|line| line.strip_prefix("runc version "));
    version.is_some_and(|version| version.split('.').map_while(|part| number(part).ok()).lt([1, 1, 14]))
}

/// Creates one container while its paths are exchanged. It may be refused.
fn race(host: &Host, entry_point: EntryPoint, volume: &Path, what: &str) {
    fs::create_dir_all(volume.join("bin")).expect("the volume");
    symlink(&host.canary, volume.join("evil")).expect("a link");
    let mut bundle = host.bundle(entry_point, SLEEP);
    link(&bundle, "/usr/bin", "../srv/bin");
    let mount = json!({"destination": "/srv", "type": "bind", "source": volume, "options": ["rbind", "rw"]});
    bundle.spec["mounts"].as_array_mut().expect("mounts").push(mount);
    link(&bundle, "/lib/evil", &host.at(""));
    link(&bundle, "/evil", &host.at("dir"));
    let created = bundle.create();
    if created.ok && entry_point == EntryPoint::Shim {
        host.assert_sources(&bundle, what);
    }
    if entry_point == EntryPoint::Shim && is_old_runc(&host.world) {
        host.clear_after_old_runc();
    }
    host.assert_unchanged(what);
    bundle.down();
    host.assert_unchanged(&format!("{what}, after its end"));
    for dir in [volume, &bundle.dir] {
        let gone = || fs::remove_dir_all(dir).is_ok() || !dir.exists();
        assert!(eventually(gone), "the next starts afresh");
    }
}

/// A tmpfs with shared propagation to the host (`mount_namespaces(7)`), unmounted on drop.
struct Shared(PathBuf);

impl Shared {
    fn new(dir: PathBuf) -> Self {
        fs::create_dir_all(&dir).expect("a directory");
        let mount = |args: &[&str]| {
            let done = Command::new("mount").args(args).arg(&dir).status().expect("mount");
            assert!(done.success(), "{args:?}");
        };
        mount(&["-t", "tmpfs", "tmpfs"]);
        mount(&["--make-shared"]);
        Self(dir)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-R", "-l"]).arg(&self.0).status();
    }
}

#[test]
fn a9_shared_volumes_leave_no_mount_on_the_host() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::new();
    let volume = Shared::new(host.world.dir.path().join("volume"));
    host.before = host.now();
    for entry_point in DOORS {
        for (destination, propagation) in
            [("/run", "rshared"), ("/usr/bin", "rshared"), ("/run", "rslave"), ("/run", "rprivate")]
        {
            let what = format!("{entry_point:?}: {destination} {propagation}");
            let mut bundle = host.bundle(entry_point, SLEEP);
            bundle.spec["mounts"].as_array_mut().expect("mounts").push(json!({"destination": destination,
                "type": "bind", "source": volume.0, "options": ["rbind", propagation]}));
            if propagation == "rshared" {
                // As Docker does for such a volume. Otherwise nothing outside shares it.
                bundle.spec["linux"]["rootfsPropagation"] = json!("shared");
            }
            let created = bundle.create();
            assert_eq!(created.ok, propagation != "rshared", "{what}: {created:?}");
            assert!(created.ok || said(&host, &created, "shared with the host"), "{what}: {created:?}");
            host.assert_unchanged(&what);
            if created.ok {
                assert!(bundle.start().ok, "{what}");
                assert_given(&bundle, "/run/sublet/mps", &what);
            }
            host.assert_unchanged(&what);
            bundle.down();
            host.assert_unchanged(&format!("{what}, after its end"));
            fs::remove_dir_all(&bundle.dir).expect("the next starts afresh");
        }
    }
    drop(volume);
    host.world.assert_empty();
}

/// Whether the refusal says so. crun does not print hooks' output.
fn said(host: &Host, created: &Finished, why: &str) -> bool {
    let last = host.world.sublet(&["status", "--last-error"]);
    created.stderr.contains(why) || String::from_utf8_lossy(&last.stdout).contains(why)
}
