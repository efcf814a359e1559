//! Opens a live container's device cgroup for its nodes: by `devices.allow` of cgroup v1, and in v2 by every device
//! program from the container's cgroup up to its systemd unit.
//!
//! A program is not compiled again from the bundle's rules, because runc and crun add rules that are not there. Its
//! instructions are kept, and new ones are put in front.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Component, Path};

use super::{NamespaceError, bpf, failed, filter, shown, systemd};
use crate::host::{CGROUP_MOUNT, unified_cgroups};
use crate::inventory::Node;

/// Lets processes in the cgroup of `pid` read and write `nodes`.
pub(super) fn open_devices(pid: i32, nodes: &[&Node]) -> Result<(), NamespaceError> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"));
    let table = table.map_err(|error| failed("read which cgroup it is in", error))?;
    let paths = Paths::parse(&table);
    let hierarchy = Path::new(CGROUP_MOUNT).join("devices");
    if let Some(below) = paths.devices.filter(|_| hierarchy.is_dir()) {
        allow_v1(&hierarchy, below, nodes)?;
    }
    match paths.unified {
        Some(below) => allow_v2(&unified_cgroups(Path::new(CGROUP_MOUNT)), below, nodes),
        None => Ok(()),
    }
}

/// The first of `nodes` that the device cgroup of `pid` denies; `None`: none, or it is unknown.
pub(super) fn first_denied(pid: i32, nodes: &[Node]) -> Option<&Node> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let paths = Paths::parse(&table);
    let by_v1 = paths.devices.and_then(|below| {
        let file =
            Path::new(CGROUP_MOUNT).join("devices").join(below.trim_start_matches('/')).join("devices.list");
        let list = fs::read_to_string(file).ok()?;
        nodes.iter().find(|node| !list.lines().any(|rule| opens(rule, node)))
    });
    by_v1.or_else(|| {
        let below = paths.unified?.trim_start_matches('/');
        let cgroup = File::open(unified_cgroups(Path::new(CGROUP_MOUNT)).join(below)).ok()?;
        let programs = bpf::query(cgroup.as_fd(), bpf::EFFECTIVE).ok()?.programs.into_iter();
        let programs: Vec<_> =
            programs.filter_map(|id| bpf::instructions(&bpf::program(id).ok()?).ok()).collect();
        let is_closed = |node: &&Node| programs.iter().any(|one| filter::allows(one, node) == Some(false));
        nodes.iter().find(is_closed)
    })
}

/// Whether a line of `devices.list`, as `c 195:* rwm` or `a *:* rwm`, lets `node` be read and written (cgroup v1).
fn opens(rule: &str, node: &Node) -> bool {
    let mut words = rule.split([' ', ':']);
    let mut is = |wanted: &dyn Fn(&str) -> bool| words.next().is_some_and(wanted);
    let number = |wanted: u32| move |word: &str| word == "*" || word.parse() == Ok(wanted);
    is(&|kind| kind == "a" || kind == "c")
        && is(&number(node.major))
        && is(&number(node.minor))
        && is(&|access| access.contains('r') && access.contains('w'))
}

/// /proc/PID/cgroup (cgroups(7)) without the root cgroups that every process is in.
#[derive(Debug, PartialEq)]
struct Paths<'a> {
    devices: Option<&'a str>,
    unified: Option<&'a str>,
}

impl<'a> Paths<'a> {
    fn parse(table: &'a str) -> Self {
        let mut paths = Self { devices: None, unified: None };
        for line in table.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let plain = Path::new(path).components().skip(1).all(|part| matches!(part, Component::Normal(_)));
            let path = Some(path).filter(|path| plain && path.len() > 1);
            match controllers {
                "" => paths.unified = path,
                other if other.split(',').any(|name| name == "devices") => paths.devices = path,
                _ => {}
            }
        }
        paths
    }
}

fn allow_v1(hierarchy: &Path, below: &str, nodes: &[&Node]) -> Result<(), NamespaceError> {
    let dir = hierarchy.join(below.trim_start_matches('/'));
    if let Some((unit, of_unit)) = unit(below) {
        let everything =
            fs::read_to_string(hierarchy.join(of_unit.trim_start_matches('/')).join("devices.list"));
        let limited = everything.is_ok_and(|list| list.trim() != "a *:* rwm");
        if limited && systemd::owns(unit, of_unit) {
            systemd::allow(unit, nodes)?;
        }
    }
    let file = dir.join("devices.allow");
    for node in nodes {
        let rule = format!("c {}:{} rw", node.major, node.minor);
        let written =
            OpenOptions::new().write(true).open(&file).and_then(|mut file| file.write_all(rule.as_bytes()));
        written.map_err(|error| failed(format!("write `{rule}` to {}", shown(&file)), error))?;
    }
    Ok(())
}

/// Every program must allow an access, also one of the cgroups above (cgroups(7), "devices").
fn allow_v2(mount: &Path, below: &str, nodes: &[&Node]) -> Result<(), NamespaceError> {
    let owner = unit(below);
    let top = Path::new(owner.map_or("/", |(_, path)| path));
    for level in
        Path::new(below).ancestors().take_while(|level| level.parent().is_some() && level.starts_with(top))
    {
        let dir = mount.join(level.strip_prefix("/").unwrap_or(level));
        let of_systemd = owner.filter(|(_, path)| level == Path::new(path));
        open_level(&dir, of_systemd, nodes)?;
    }
    Ok(())
}

/// Opens one cgroup for the nodes. A unit that may use every device has no program and is not changed: a first
/// `DeviceAllow` would close it for all other devices.
fn open_level(dir: &Path, unit: Option<(&str, &str)>, nodes: &[&Node]) -> Result<(), NamespaceError> {
    let opening = |error: io::Error| failed(format!("open the device cgroup {}", shown(dir)), error);
    let cgroup = File::open(dir).map_err(opening)?;
    let before = bpf::query(cgroup.as_fd(), 0).map_err(opening)?;
    let mut attached = before.clone();
    if let Some((unit, path)) = unit.filter(|_| !before.programs.is_empty()) {
        if systemd::owns(unit, path) {
            systemd::allow(unit, nodes)?;
            attached = bpf::query(cgroup.as_fd(), 0).map_err(opening)?;
        }
    }
    // A program that systemd has just attached already has the new rules.
    for id in attached.programs.iter().filter(|id| before.programs.contains(id)) {
        let replace = || {
            let old = bpf::program(*id)?;
            let new = bpf::load(&filter::allow(nodes, &bpf::instructions(&old)?))?;
            bpf::replace(cgroup.as_fd(), &attached, &old, &new)
        };
        replace().map_err(opening)?;
    }
    Ok(())
}

/// The innermost systemd unit that the cgroup `below` lies in, and the unit's own cgroup.
fn unit(below: &str) -> Option<(&str, &str)> {
    Path::new(below).ancestors().find_map(|level| {
        let name = level.file_name()?.to_str()?;
        let is_unit = [".scope", ".service"].iter().any(|suffix| name.ends_with(suffix));
        is_unit.then_some((name, level.to_str()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_found_in_every_layout() {
        let of = |devices, unified| Paths { devices, unified };
        let scope = "/machine.slice/libpod-1.scope/container";
        assert_eq!(Paths::parse(&format!("0::{scope}\n")), of(None, Some(scope)));
        assert_eq!(Paths::parse("9:name=systemd:/\n5:devices:/c1\n0::/\n"), of(Some("/c1"), None));
        assert_eq!(Paths::parse("5:devices,misc:/a:b\n0::/u\n"), of(Some("/a:b"), Some("/u")));
        assert_eq!(Paths::parse("5:devices:/\n0::/../x\n"), of(None, None), "outside our cgroup namespace");
        assert_eq!(Paths::parse("garbage\n\n"), of(None, None));
    }

    #[test]
    fn rules_of_cgroup_v1() {
        let node = Node { path: "/dev/nvidia0".into(), major: 195, minor: 0 };
        for rule in ["a *:* rwm", "c 195:0 rw", "c 195:* rwm", "c *:* rwm"] {
            assert!(opens(rule, &node), "{rule}");
        }
        for rule in ["", "b 195:0 rw", "c 195:1 rw", "c 1:0 rw", "c 195:0 r", "c *:* m"] {
            assert!(!opens(rule, &node), "{rule}");
        }
    }

    #[test]
    fn the_unit_is_the_innermost_one() {
        let scope = "/machine.slice/libpod-1.scope";
        assert_eq!(unit(&format!("{scope}/container")), Some(("libpod-1.scope", scope)));
        assert_eq!(unit(scope), Some(("libpod-1.scope", scope)));
        let docker = "/system.slice/docker.service/docker/abc";
        assert_eq!(unit(docker), Some(("docker.service", "/system.slice/docker.service")));
        assert_eq!(unit("/docker/abc"), None);
    }
}
