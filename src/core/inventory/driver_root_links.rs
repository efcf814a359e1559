//! Following symbolic links below a driver root, as if the root were `/`.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use crate::fs::examine;

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
    path.components()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
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
