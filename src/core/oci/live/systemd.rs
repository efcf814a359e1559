//! Reports to systemd the devices of a container whose cgroup it manages (`SetUnitProperties`, `DeviceAllow`). At
//! every `daemon-reload` systemd writes its own device rules again.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::NamespaceError;
use crate::inventory::Node;
use crate::process::child::ChildError;
use crate::process::{confine, sublet};

/// systemd answers within milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

/// The arguments of systemctl(1) that come before a unit, and before a unit and its rules.
const SHOW: [&str; 4] = ["show", "--property=ControlGroup", "--value", "--"];
const SET: [&str; 3] = ["set-property", "--runtime", "--"];
const RULE: &str = "DeviceAllow=/dev/char/";

/// Whether `unit` is systemd's and has the cgroup `below` (as /proc/PID/cgroup writes it).
pub(super) fn owns(unit: &str, below: &str) -> bool {
    // sd_booted(3).
    if !Path::new("/run/systemd/system").is_dir() {
        return false;
    }
    systemctl(&[&SHOW[..], &[unit]].concat()).is_ok_and(|answer| answer.trim() == below)
}

/// Adds `nodes` to the devices that `unit` may use, until it ends.
pub(super) fn allow(unit: &str, nodes: &[&Node]) -> Result<(), NamespaceError> {
    let rules: Vec<String> = nodes.iter().map(|node| rule(node)).collect();
    let mut arguments = [&SET[..], &[unit]].concat();
    arguments.extend(rules.iter().map(String::as_str));
    systemctl(&arguments)
        .map(drop)
        .map_err(|message| NamespaceError::Systemd { unit: crate::text::safe(unit), message })
}

/// By number, for which systemd needs no device node (`systemd.resource-control(5)`, `DeviceAllow`).
fn rule(node: &Node) -> String {
    format!("{RULE}{}:{} rw", node.major, node.minor)
}

/// `systemctl` with `arguments`, if they are arguments that this module uses.
pub fn command(arguments: &[&str]) -> Option<Command> {
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

fn systemctl(arguments: &[&str]) -> Result<String, String> {
    let words: Vec<&str> = std::iter::once("systemctl").chain(arguments.iter().copied()).collect();
    match confine::run(&words, || with(arguments), "", LIMIT) {
        Ok(finished) if finished.status.success() => Ok(finished.stdout),
        Ok(finished) => Err(crate::text::safe(finished.stderr.lines().last().unwrap_or("systemctl failed"))),
        Err(ChildError::Timeout) => Err(format!("no answer within {} s", LIMIT.as_secs())),
        Err(ChildError::Io(error)) => Err(format!("systemctl: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_devices_by_number() {
        let node = Node { path: "/dev/nvidia-caps/nvidia-cap1".into(), major: 241, minor: 1 };
        assert_eq!(rule(&node), "DeviceAllow=/dev/char/241:1 rw");
    }
}
