//! Finds the driver's programs, in the places of all distributions. No other code looks them up. Symbolic links below a
//! driver root are followed as if the root were `/`.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use crate::config::Driver;
use crate::fs::{examine, under};
use crate::process::sublet::PATH;

/// The MPS control program. It runs as the daemon that starts MPS servers, and it sends commands to such a daemon.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// The MPS server program. The control daemon looks for it only in its PATH (docs/evidence).
const SERVER: &str = "nvidia-cuda-mps-server";

/// Each entry has the directories of one way of installing the driver. The first directory that has a program wins.
const LAYOUTS: [&[&str]; 10] = [
    // Fedora, SUSE, Arch and NVIDIA's installer put everything in /usr/bin. Debian puts the server in /usr/sbin
    // (packages.debian.org: file list of nvidia-cuda-mps). The other directories are links to these, or belong to hosts
    // without merged /usr.
    &["/usr/bin", "/usr/sbin", "/bin", "/sbin"],
    // Debian, before its alternatives are set.
    &["/usr/lib/nvidia/current"],
    // NixOS: `hardware.nvidia` puts its programs into the system's program directory.
    &["/run/current-system/sw/bin"],
    &["/run/opengl-driver/bin"],
    // Talos (siderolabs/extensions, nvidia-pkgs: `--utility-prefix=/usr/local`), or an installer with the same option.
    &["/usr/local/bin", "/usr/local/sbin"],
    // Talos (siderolabs/extensions, nvidia-driver/userspace): beside its glibc.
    &["/usr/local/glibc/usr/bin"],
    // Where container hosts mount the driver; as on a host measured for this project (docs/evidence).
    &["/usr/local/nvidia/bin"],
    // Google Kubernetes Engine (container-engine-accelerators, nvidia-driver-installer).
    &["/home/kubernetes/bin/nvidia/bin"],
    // Container-Optimized OS (cos_gpu_installer: `-host-dir=/var/lib/nvidia`).
    &["/var/lib/nvidia/bin"],
    // Flatcar (coreos-overlay, setup-nvidia): the libraries are in /opt/nvidia.
    &["/opt/bin"],
];

/// The driver's MPS programs: those that are used, and other ones that are installed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MpsPrograms {
    /// `nvidia-cuda-mps-control`.
    pub control: Option<PathBuf>,
    /// `nvidia-cuda-mps-server`, of the same installation if one has both.
    pub server: Option<PathBuf>,
    /// Other files with these names.
    pub unused: Vec<PathBuf>,
}

/// Which MPS programs are missing, and where they were looked for.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum MissingPrograms {
    /// The driver is installed without them.
    #[error(
        "mode mps and memory limits need nvidia-cuda-mps-control, which is not installed below {}: \
         Debian: apt install nvidia-cuda-mps; elsewhere it comes with the driver's compute package (looked in {})",
        .driver.root.display(),
        list_searched(.driver)
    )]
    Control { driver: Box<Driver> },
    /// Only the control program is installed: the daemon would start and never have a server.
    #[error(
        "{} is installed, but nvidia-cuda-mps-server, which it starts, is not: install it from the same \
         package (Debian: apt install nvidia-cuda-mps), or link it into {} (looked below {} in {})",
        .control.display(),
        .control.parent().unwrap_or(.control).display(),
        .driver.root.display(),
        list_searched(.driver)
    )]
    Server { control: PathBuf, driver: Box<Driver> },
}

/// The directories of each installation, `[driver] search` first.
fn layouts(driver: &Driver) -> impl Iterator<Item = Vec<String>> {
    let named = driver.search.iter().map(|prefix| vec![format!("{prefix}/bin")]);
    named.chain(LAYOUTS.iter().map(|layout| layout.iter().map(|&dir| dir.to_owned()).collect()))
}

fn list_searched(driver: &Driver) -> String {
    layouts(driver).flatten().collect::<Vec<_>>().join(" ")
}

impl MpsPrograms {
    /// The programs that a daemon would use: of an installation that has both, otherwise the first of each.
    pub fn find(driver: &Driver) -> Self {
        let each = |name| -> Vec<Option<PathBuf>> {
            layouts(driver)
                .map(|layout| layout.iter().find_map(|dir| runnable(&driver.root, dir, name)))
                .collect()
        };
        let (controls, servers) = (each(CONTROL), each(SERVER));
        let whole = (0..controls.len()).find(|&at| controls[at].is_some() && servers[at].is_some());
        let taken = |found: &[Option<PathBuf>]| match whole {
            Some(at) => found[at].clone(),
            None => found.iter().flatten().next().cloned(),
        };
        let (control, server) = (taken(&controls), taken(&servers));
        let real = |path: &PathBuf| fs::canonicalize(path).ok();
        let known: Vec<_> = control.iter().chain(&server).filter_map(real).collect();
        let unused = controls.into_iter().chain(servers).flatten();
        let unused = unused.filter(|path| !real(path).is_some_and(|path| known.contains(&path))).collect();
        Self { control, server, unused }
    }

    /// Both programs.
    ///
    /// # Errors
    /// One is missing. `driver` is where they were looked for.
    pub fn both(&self, driver: &Driver) -> Result<(&Path, &Path), MissingPrograms> {
        let driver = || Box::new(driver.clone());
        let control = self.control.as_deref().ok_or_else(|| MissingPrograms::Control { driver: driver() })?;
        match self.server.as_deref() {
            Some(server) => Ok((control, server)),
            None => Err(MissingPrograms::Server { control: control.to_owned(), driver: driver() }),
        }
    }

    /// A PATH with which the control program finds this server first, and a wrapper the program that it wraps.
    pub fn path(&self) -> String {
        let mut dirs: Vec<&str> = Vec::new();
        let own = [&self.server, &self.control].into_iter().flatten();
        let own = own.filter_map(|program| program.parent()?.to_str());
        for dir in own.chain(PATH.split(':')) {
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        dirs.join(":")
    }
}

/// The path of a driver program, root included.
pub fn program(driver: &Driver, name: &str) -> Option<PathBuf> {
    programs(driver, name).next()
}

/// The paths of every installed program with this name, root included, in the order of preference.
pub fn programs(driver: &Driver, name: &str) -> impl Iterator<Item = PathBuf> {
    layouts(driver).flatten().filter_map(move |dir| runnable(&driver.root, &dir, name))
}

/// The program in `dir`. It is called by its name there, because wrappers and package managers depend on it, unless the
/// kernel would follow a link in the path out of `root`.
fn runnable(root: &Path, dir: &str, name: &str) -> Option<PathBuf> {
    let path = format!("{dir}/{name}");
    let real = resolve(root, &path)?;
    let found = examine(&real, || fs::metadata(&real))?;
    if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
        return None;
    }
    let named = under(root, &path);
    // The second one always exists.
    let is_same = fs::canonicalize(&named).ok() == fs::canonicalize(&real).ok();
    Some(if is_same { named } else { real })
}

/// As many links as Linux follows (`MAXSYMLINKS`, `path_resolution(7)`).
const MOST_LINKS: usize = 40;

/// The file that `path` leads to below `root`, root included; `None` if there is no such file.
///
/// Debian's driver is reached through absolute links in /etc/alternatives. With a driver root other than `/`, the
/// kernel would follow them out of that root.
pub fn resolve(root: &Path, path: &str) -> Option<PathBuf> {
    let mut todo = components(Path::new(path));
    let mut done = PathBuf::new();
    let mut links = 0;
    while let Some(name) = todo.pop_front() {
        if name == ".." {
            done.pop();
            continue;
        }
        let next = root.join(&done).join(&name);
        if !examine(&next, || std::fs::symlink_metadata(&next))?.is_symlink() {
            done.push(name);
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return None;
        }
        let target = examine(&next, || std::fs::read_link(&next))?;
        if target.is_absolute() {
            done.clear();
        }
        let mut rest = components(&target);
        rest.append(&mut todo);
        todo = rest;
    }
    Some(root.join(done))
}

/// The names in `path`, `..` among them.
fn components(path: &Path) -> VecDeque<OsString> {
    let is_name = |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_name).map(|part| part.as_os_str().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Root;
    use super::*;

    fn found(root: &Root) -> (Option<PathBuf>, Option<PathBuf>, Vec<PathBuf>) {
        let cut = |path: PathBuf| Path::new("/").join(path.strip_prefix(root.path()).unwrap());
        let driver = Driver { search: vec!["/srv/driver".to_owned()], ..root.config().driver };
        let MpsPrograms { control, server, unused } = MpsPrograms::find(&driver);
        (control.map(cut), server.map(cut), unused.into_iter().map(cut).collect())
    }

    fn install(root: &Root, dir: &str) {
        root.program(&format!("{dir}/{CONTROL}")).program(&format!("{dir}/{SERVER}"));
    }

    #[test]
    fn every_layout_has_its_pair() {
        for dir in ["/srv/driver/bin"].into_iter().chain(LAYOUTS.concat()) {
            let root = Root::new();
            install(&root, dir);
            let at = |name: &str| Some(Path::new(dir).join(name));
            assert_eq!(found(&root), (at(CONTROL), at(SERVER), Vec::new()), "{dir}");
        }
    }

    #[test]
    fn debian_has_the_server_among_the_administrators_programs() {
        let root = Root::new();
        root.program(&format!("/usr/bin/{CONTROL}")).program(&format!("/usr/sbin/{SERVER}"));
        let expected = (
            Some("/usr/bin/nvidia-cuda-mps-control".into()),
            Some("/usr/sbin/nvidia-cuda-mps-server".into()),
        );
        let (control, server, unused) = found(&root);
        assert_eq!(((control, server), unused), (expected, Vec::new()));
    }

    #[test]
    fn a_whole_installation_is_taken_before_half_of_one_and_the_rest_is_named() {
        let root = Root::new();
        root.program(&format!("/usr/bin/{CONTROL}"));
        install(&root, "/usr/local/nvidia/bin");
        install(&root, "/opt/bin");
        let (control, server, unused) = found(&root);
        assert_eq!(control.unwrap(), Path::new("/usr/local/nvidia/bin").join(CONTROL));
        assert_eq!(server.unwrap(), Path::new("/usr/local/nvidia/bin").join(SERVER));
        let named = [
            "/usr/bin/nvidia-cuda-mps-control",
            "/opt/bin/nvidia-cuda-mps-control",
            "/opt/bin/nvidia-cuda-mps-server",
        ];
        assert_eq!(unused, named.map(PathBuf::from));
    }

    #[test]
    fn halves_of_two_installations_are_a_whole() {
        let root = Root::new();
        root.program(&format!("/usr/local/bin/{CONTROL}")).program(&format!("/opt/bin/{SERVER}"));
        let (control, server, unused) = found(&root);
        assert_eq!(control.unwrap(), Path::new("/usr/local/bin").join(CONTROL));
        assert_eq!(server.unwrap(), Path::new("/opt/bin").join(SERVER));
        assert!(unused.is_empty());
    }

    #[test]
    fn the_daemon_finds_its_server_before_any_other() {
        let dirs = |control: &str, server: &str| {
            let programs = MpsPrograms {
                control: Some(control.into()),
                server: Some(server.into()),
                unused: Vec::new(),
            };
            programs.path()
        };
        assert_eq!(dirs("/opt/bin/c", "/opt/bin/s"), format!("/opt/bin:{PATH}"));
        assert_eq!(dirs("/usr/local/bin/c", "/opt/bin/s"), format!("/opt/bin:/usr/local/bin:{PATH}"));
        assert_eq!(dirs("/usr/bin/c", "/usr/sbin/s"), "/usr/sbin:/usr/bin:/sbin:/bin");
        assert_eq!(MpsPrograms::default().path(), PATH);
    }

    #[test]
    fn links_to_one_program_are_one_program() {
        let root = Root::new();
        install(&root, "/usr/bin");
        root.link("/bin", "usr/bin").link("/opt/bin", "../usr/bin");
        assert!(found(&root).2.is_empty());
    }

    #[test]
    fn nix_is_links_into_the_store_and_none_leads_out_of_the_root() {
        let root = Root::new();
        let store = "/nix/store/abc-nvidia-bin/bin";
        install(&root, store);
        root.link("/run/current-system/sw/bin", store);
        // With a root other than `/`, the kernel would look in the host's store.
        assert_eq!(found(&root).0.unwrap(), Path::new(store).join(CONTROL));
        let relative = Root::new();
        install(&relative, store);
        relative.link("/run/current-system/sw/bin", &format!("../../..{store}"));
        assert_eq!(found(&relative).0.unwrap(), Path::new("/run/current-system/sw/bin").join(CONTROL));
    }

    #[test]
    fn a_file_that_cannot_be_run_is_no_program() {
        let root = Root::new();
        root.file(&format!("/usr/bin/{CONTROL}"), "").file(&format!("/opt/bin/{CONTROL}/x"), "");
        root.link(&format!("/usr/sbin/{CONTROL}"), "/nowhere");
        assert_eq!(found(&root), (None, None, Vec::new()));
        let driver = root.config().driver;
        let missing = MpsPrograms::find(&driver).both(&driver).unwrap_err().to_string();
        assert!(missing.contains("apt install nvidia-cuda-mps") && missing.contains("/opt/bin"), "{missing}");
    }

    #[test]
    fn half_an_installation_is_named_with_where_the_rest_was_looked_for() {
        let root = Root::new();
        root.program(&format!("/usr/local/nvidia/bin/{CONTROL}"));
        let driver = root.config().driver;
        let missing = MpsPrograms::find(&driver).both(&driver).unwrap_err().to_string();
        let control = root.path().join("usr/local/nvidia/bin").join(CONTROL);
        assert!(missing.starts_with(control.to_str().unwrap()), "{missing}");
        for word in [SERVER, "/usr/sbin", "/home/kubernetes/bin/nvidia/bin", "apt install nvidia-cuda-mps"] {
            assert!(missing.contains(word), "{word}: {missing}");
        }
        assert!(!missing.contains('\n'));
    }
}

#[cfg(test)]
mod links_tests {
    use super::super::fixture::Root;
    use super::*;

    #[test]
    fn absolute_links_stay_below_the_root() {
        let root = Root::new();
        root.file("/opt/real", "")
            .link("/etc/alternatives/a", "/opt/real")
            .link("/usr/a", "/etc/alternatives/a");
        assert_eq!(resolve(root.path(), "/usr/a"), Some(root.path().join("opt/real")));
    }

    #[test]
    fn no_number_of_parents_leaves_the_root() {
        let root = Root::new();
        root.file("/etc/passwd", "").link("/usr/lib/up", "../../../../../../etc/passwd");
        assert_eq!(resolve(root.path(), "/usr/lib/up"), Some(root.path().join("etc/passwd")));
    }

    #[test]
    fn a_linked_directory_is_followed() {
        let root = Root::new();
        root.file("/usr/lib/x", "").link("/lib", "usr/lib").link("/usr/lib/y", "x");
        assert_eq!(resolve(root.path(), "/lib/y"), Some(root.path().join("usr/lib/x")));
    }

    #[test]
    fn dangling_and_circular_links_lead_nowhere() {
        let root = Root::new();
        root.link("/a", "b").link("/b", "a").link("/c", "/nowhere");
        assert_eq!(resolve(root.path(), "/a"), None);
        assert_eq!(resolve(root.path(), "/c"), None);
        assert_eq!(resolve(root.path(), "/missing"), None);
    }
}
