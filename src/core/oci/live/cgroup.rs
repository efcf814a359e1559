//! Opens a live container's device cgroup for its nodes, or closes it: by `devices.allow` and `devices.deny` of cgroup v1,
//! and in v2 by every device program from the container's cgroup up to its systemd unit.
//!
//! A program is not compiled again from the bundle's rules, because runc and crun add rules that are not there. Its
//! instructions are kept, and new ones are put in front.
//!
//! systemd is given the devices of a container whose cgroup it manages (`SetUnitProperties`, `DeviceAllow`). At every
//! `daemon-reload` it writes its own device rules again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Component, Path};
use std::process::Command;
use std::time::Duration;

use super::{Access, NamespaceError, bpf, failed};
use crate::fs::under;
use crate::inventory::Node;
use crate::process::child::ChildError;
use crate::process::{CGROUP_MOUNT, cgroup_line, confine, sublet, unified_cgroups};
use crate::text::{safe, safe_path};

/// Opens `nodes` to processes in the cgroup of `pid`, or closes them. Those that are open already stay so.
pub(super) fn set_devices(pid: i32, nodes: &[&Node], access: Access) -> Result<(), NamespaceError> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup"));
    let table = table.map_err(|error| failed("read which cgroup it is in", error))?;
    let hierarchy = Path::new(CGROUP_MOUNT).join("devices");
    if let Some(below) = own_cgroup(&table, "devices").filter(|_| hierarchy.is_dir()) {
        set_v1(&hierarchy, below, nodes, access)?;
    }
    match own_cgroup(&table, "") {
        Some(below) => set_v2(&unified_cgroups(Path::new(CGROUP_MOUNT)), below, nodes, access),
        None => Ok(()),
    }
}

/// The first of `nodes` that the device cgroup of `pid` denies; `None`: none, or it is unknown.
pub(super) fn first_denied(pid: i32, nodes: &[Node]) -> Option<&Node> {
    let table = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let by_v1 = own_cgroup(&table, "devices").and_then(|below| {
        let list = under(&Path::new(CGROUP_MOUNT).join("devices"), below).join("devices.list");
        let list = fs::read_to_string(list).ok()?;
        nodes.iter().find(|node| !list.lines().any(|rule| opens(rule, node)))
    });
    by_v1.or_else(|| {
        let cgroup = under(&unified_cgroups(Path::new(CGROUP_MOUNT)), own_cgroup(&table, "")?);
        let cgroup = File::open(cgroup).ok()?;
        let programs = bpf::query(cgroup.as_fd(), bpf::EFFECTIVE).ok()?.programs.into_iter();
        let programs: Vec<_> =
            programs.filter_map(|id| bpf::instructions(&bpf::program(id).ok()?).ok()).collect();
        let is_closed = |node: &&Node| programs.iter().any(|one| bpf::allows(one, node) == Some(false));
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

/// The path of a process in the hierarchy `controller`, by its /proc/PID/cgroup. `None`: it is in the root cgroup, as every
/// process is, or outside our cgroup namespace.
fn own_cgroup<'t>(table: &'t str, controller: &str) -> Option<&'t str> {
    let is_normal =
        |path: &str| Path::new(path).components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    cgroup_line(table, controller).filter(|path| path.len() > 1 && is_normal(path))
}

fn set_v1(hierarchy: &Path, below: &str, nodes: &[&Node], access: Access) -> Result<(), NamespaceError> {
    if let Some((unit, of_unit)) = unit(below) {
        let everything = fs::read_to_string(under(hierarchy, of_unit).join("devices.list"));
        let limited = everything.is_ok_and(|list| list.trim() != "a *:* rwm");
        if limited && is_of_systemd(unit, of_unit) {
            set_by_systemd(unit, nodes, access)?;
        }
    }
    let name = if access == Access::Open { "devices.allow" } else { "devices.deny" };
    let file = under(hierarchy, below).join(name);
    for node in nodes {
        let rule = format!("c {}:{} rw", node.major, node.minor);
        let written =
            OpenOptions::new().write(true).open(&file).and_then(|mut file| file.write_all(rule.as_bytes()));
        written.map_err(|error| failed(format!("write `{rule}` to {}", safe_path(&file)), error))?;
    }
    Ok(())
}

/// Every program must allow an access, also one of the cgroups above (cgroups(7), "devices").
fn set_v2(mount: &Path, below: &str, nodes: &[&Node], access: Access) -> Result<(), NamespaceError> {
    let owner = unit(below);
    let top = Path::new(owner.map_or("/", |(_, path)| path));
    for level in
        Path::new(below).ancestors().take_while(|level| level.parent().is_some() && level.starts_with(top))
    {
        let dir = mount.join(level.strip_prefix("/").unwrap_or(level));
        set_level(&dir, owner.filter(|(_, path)| level == Path::new(path)), nodes, access)?;
    }
    Ok(())
}

/// Opens one cgroup for the nodes, or closes it. A unit that may use every device has no program and is not changed: a first
/// `DeviceAllow` would close it for all other devices.
fn set_level(
    dir: &Path,
    unit: Option<(&str, &str)>,
    nodes: &[&Node],
    access: Access,
) -> Result<(), NamespaceError> {
    let opening = |error: io::Error| failed(format!("change the device cgroup {}", safe_path(dir)), error);
    let cgroup = File::open(dir).map_err(opening)?;
    let before = bpf::query(cgroup.as_fd(), 0).map_err(opening)?;
    let mut attached = before.clone();
    if let Some((unit, path)) = unit.filter(|_| !before.programs.is_empty()) {
        if is_of_systemd(unit, path) {
            set_by_systemd(unit, nodes, access)?;
            attached = bpf::query(cgroup.as_fd(), 0).map_err(opening)?;
        }
    }
    // A program that systemd has just attached already has the new rules.
    for id in attached.programs.iter().filter(|id| before.programs.contains(id)) {
        let replace = || {
            let old = bpf::program(*id)?;
            let new = bpf::load(&bpf::decide(nodes, access, &bpf::instructions(&old)?))?;
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

/// systemd answers within milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

/// The arguments of systemctl(1) that come before a unit, and before a unit and its rules.
const SHOW: [&str; 4] = ["show", "--property=ControlGroup", "--value", "--"];
const SET: [&str; 3] = ["set-property", "--runtime", "--"];
const RULE: &str = "DeviceAllow=/dev/char/";

/// Whether `unit` is systemd's and has the cgroup `below` (as /proc/PID/cgroup writes it).
fn is_of_systemd(unit: &str, below: &str) -> bool {
    // sd_booted(3).
    if !Path::new("/run/systemd/system").is_dir() {
        return false;
    }
    ask_systemd(&[&SHOW[..], &[unit]].concat()).is_ok_and(|answer| answer.trim() == below)
}

/// Adds `nodes` to the devices that `unit` may use, until it ends, or takes them away.
fn set_by_systemd(unit: &str, nodes: &[&Node], access: Access) -> Result<(), NamespaceError> {
    // systemctl(1) wants one rule at least.
    if nodes.is_empty() {
        return Ok(());
    }
    let rules: Vec<String> = nodes.iter().map(|node| rule(node, access)).collect();
    let mut arguments = [&SET[..], &[unit]].concat();
    arguments.extend(rules.iter().map(String::as_str));
    ask_systemd(&arguments).map(drop).map_err(|message| NamespaceError::Systemd(safe(unit), message))
}

/// By number, for which systemd needs no device node (`systemd.resource-control(5)`, `DeviceAllow`). A rule replaces an earlier
/// one of the same path, and none can be taken back: one that is closed may still be made by mknod, as in every container.
fn rule(node: &Node, access: Access) -> String {
    let letters = if access == Access::Open { "rw" } else { "m" };
    format!("{RULE}{}:{} {letters}", node.major, node.minor)
}

/// `systemctl` with `arguments`, if they are arguments that this module uses.
pub fn systemctl(arguments: &[&str]) -> Option<Command> {
    let unit = arguments.strip_prefix(&SHOW).filter(|rest| rest.len() == 1);
    let rules = arguments.strip_prefix(&SET).and_then(|rest| rest.split_first()).map(|(_, rules)| rules);
    let is_rule = |rule: &&str| rule.starts_with(RULE);
    (unit.is_some() || rules.is_some_and(|rules| rules.iter().all(is_rule))).then(|| with(arguments))
}

fn with(arguments: &[&str]) -> Command {
    let mut command = Command::new("systemctl");
    command.args(arguments).env_clear().env("PATH", sublet::PATH).current_dir("/");
    command
}

fn ask_systemd(arguments: &[&str]) -> Result<String, String> {
    let words: Vec<&str> = std::iter::once("systemctl").chain(arguments.iter().copied()).collect();
    match confine::run(&words, || with(arguments), "", LIMIT) {
        Ok(finished) if finished.status.success() => Ok(finished.stdout),
        Ok(finished) => Err(safe(finished.stderr.lines().last().unwrap_or("systemctl failed"))),
        Err(ChildError::Timeout) => Err(format!("no answer within {} s", LIMIT.as_secs())),
        Err(ChildError::Io(error)) => Err(format!("systemctl: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_found_in_every_layout() {
        let of = |table: &str| {
            (own_cgroup(table, "devices").map(str::to_owned), own_cgroup(table, "").map(str::to_owned))
        };
        let pair = |devices: Option<&str>, unified: Option<&str>| {
            (devices.map(str::to_owned), unified.map(str::to_owned))
        };
        let scope = "/machine.slice/libpod-1.scope/container";
        assert_eq!(of(&format!("0::{scope}\n")), pair(None, Some(scope)));
        assert_eq!(of("9:name=systemd:/\n5:devices:/c1\n0::/\n"), pair(Some("/c1"), None));
        assert_eq!(of("5:devices,misc:/a:b\n0::/u\n"), pair(Some("/a:b"), Some("/u")));
        assert_eq!(of("5:devices:/\n0::/../x\n"), pair(None, None), "outside our cgroup namespace");
        assert_eq!(of("garbage\n\n"), pair(None, None));
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

#[cfg(test)]
mod systemd_tests {
    use super::*;

    #[test]
    fn rules_name_devices_by_number() {
        let node = Node { path: "/dev/nvidia-caps/nvidia-cap1".into(), major: 241, minor: 1 };
        assert_eq!(rule(&node, Access::Open), "DeviceAllow=/dev/char/241:1 rw");
        assert_eq!(rule(&node, Access::Closed), "DeviceAllow=/dev/char/241:1 m");
    }
}
