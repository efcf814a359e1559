//! A root filesystem with busybox, the C library and the probe: everything that CUDA needs of an image.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::programs;

/// A template; bundles clone it by hard links.
pub struct Rootfs {
    dir: PathBuf,
}

impl Rootfs {
    /// Creates it in `dir`.
    #[must_use]
    pub fn minimal(dir: &Path, probe: &Path) -> Self {
        for sub in ["bin", "usr/bin", "usr/lib", "proc", "sys", "dev", "tmp", "run", "etc", "root"] {
            std::fs::create_dir_all(dir.join(sub)).expect("rootfs directory");
        }
        let busybox = ["/bin/busybox", "/usr/bin/busybox"].iter().map(Path::new).find(|path| path.exists());
        let busybox = busybox.expect("busybox is installed (Debian: busybox-static)");
        programs::copy(busybox, &dir.join("bin/busybox"));
        for name in [
            "sh", "cat", "sleep", "env", "ls", "true", "false", "mknod", "mount", "id", "kill", "stat",
            "grep",
        ] {
            std::os::unix::fs::symlink("busybox", dir.join("bin").join(name)).expect("busybox link");
        }
        copy_program(probe, dir, "usr/bin/cuda-probe");
        Self { dir: dir.to_owned() }
    }

    /// Writes all of it to the tar file `to`.
    pub fn archive(&self, to: &Path) {
        let made = Command::new("tar").arg("-C").arg(&self.dir).arg("-cf").arg(to).arg(".").status();
        assert!(made.expect("tar runs").success(), "tar");
    }

    /// Clones it to `target`: directories are new, files are shared by hard links.
    pub fn clone_to(&self, target: &Path) {
        let done = Command::new("cp").arg("-al").arg(&self.dir).arg(target).status().expect("cp runs");
        assert!(done.success(), "cp -al to {}", target.display());
    }
}

/// Copies a dynamic program into `rootfs` with the libraries that ldd lists, at the same paths as on the host.
pub fn copy_program(program: &Path, rootfs: &Path, to: &str) {
    programs::copy(program, &rootfs.join(to));
    let ldd = Command::new("ldd").arg(program).output().expect("ldd runs");
    let text = String::from_utf8_lossy(&ldd.stdout).into_owned();
    for library in text.split_whitespace().filter(|word| word.starts_with('/')) {
        let target = rootfs.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(target.parent().expect("a directory")).expect("library directory");
        if !target.exists() {
            std::fs::copy(library, &target).expect("library is copied");
        }
    }
    // On hosts with glibc before 2.34 libcuda itself needs libdl, libpthread and librt.
    for name in ["libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1"] {
        for dir in ["/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64"] {
            let (source, target) = (Path::new(dir).join(name), rootfs.join(&dir[1..]).join(name));
            if source.exists() && !target.exists() {
                std::fs::create_dir_all(target.parent().expect("a directory")).expect("library directory");
                std::fs::copy(source, target).expect("library is copied");
            }
        }
    }
}
