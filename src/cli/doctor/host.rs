//! Checks of sublet's own parts (service, state) and of the host in general (runtimes, cgroups, clock, security modules).

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use nix::sys::statvfs::{FsFlags, statvfs};
use nix::sys::utsname::uname;
use nix::unistd::{Group, User};

use super::driver::{make_links, unlinked};
use super::{Host, Outcome, fail, joined, pass, skip, version, warn};
use crate::guard::{self, Sight};
use sublet_core::broker::client::{Broker, BrokerError};
use sublet_core::config::PolicyRule;
use sublet_core::fs::{check_kernel, is_selinux_enforcing, selinux};
use sublet_core::text::{safe, safe_path};

/// A service that takes longer to answer hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The oldest versions that the tests run.
const OLDEST: [(&str, [u32; 2]); 2] = [("runc", [1, 1]), ("crun", [1, 8])];

/// The start of 2025: the clock of a host with this program cannot be correct if it shows an earlier time.
const EARLIEST: u64 = 1_735_689_600;

/// Whether the kernel has the system calls that are needed. `mount_setattr(2)`, which the hook needs where a container
/// exists already, is known by the version: it has no harmless call.
pub(super) fn kernel(_: &Host<'_>) -> Outcome {
    let release = uname().map(|name| safe(&name.release().to_string_lossy())).unwrap_or_default();
    if let Err(error) = check_kernel() {
        return fail(safe(&error.to_string())).fix("boot a kernel of Linux 5.6 or later");
    }
    if version(&release).is_some_and(|has| has < vec![5, 12]) {
        return warn(format!(
            "Linux {release}: hooks at prestart and createRuntime, and CDI devices without the shim, need \
             5.12"
        ))
        .fix("start containers with sublet-runtime, or boot a newer kernel");
    }
    pass(format!("Linux {release}"))
}

/// Checks the low-level runtimes of `[runtime] low_level`.
pub(super) fn runtimes(host: &Host<'_>) -> Outcome {
    let names = &host.config.runtime.low_level;
    let there: Vec<_> = names.iter().filter_map(|name| host.program(name)).collect();
    let Some(first) = there.first() else {
        return fail(format!("none of {} is installed", safe(&names.join(", "))))
            .fix("apt install runc (or crun), or set [runtime] low_level");
    };
    let mut found = vec![format!("{} is taken", safe_path(first))];
    for program in &there {
        let answer = (host.ask)(&[&*program.to_string_lossy(), "--version"]).unwrap_or_default();
        let line = safe(answer.lines().next().unwrap_or_default());
        let is_older = |oldest: &[u32; 2]| version(&answer).is_some_and(|has| has[..] < oldest[..]);
        let oldest = OLDEST.iter().find(|(name, oldest)| answer.starts_with(name) && is_older(oldest));
        if let Some((_, [major, minor])) = oldest {
            return warn(format!("{line} is older than any tested version"))
                .fix(format!("install {major}.{minor} or later"));
        }
        found.extend(Some(line).filter(|line| !line.is_empty()));
    }
    pass(found.join("; "))
}

/// Checks the cgroup version, and whether the runtime supports it.
pub(super) fn cgroup(host: &Host<'_>) -> Outcome {
    let systemd = host.at("/run/systemd/system").is_dir();
    let driver = if systemd { "systemd's drivers" } else { "cgroupfs drivers" };
    if host.at("/sys/fs/cgroup/cgroup.controllers").exists() {
        return pass(format!("v2, {driver} by default"));
    }
    let names = &host.config.runtime.low_level;
    let first = names.iter().find(|name| name.contains('/') || host.program(name).is_some());
    if first.is_some_and(|name| name.ends_with("crun")) {
        return warn("v1 or hybrid, and crun refuses hybrid hosts")
            .fix("boot with systemd.unified_cgroup_hierarchy=1, or low_level = [\"runc\"]");
    }
    pass(format!("v1, {driver} by default"))
}

/// Whether `systemctl daemon-reload` would take GPUs from running containers.
pub(super) fn daemon_reload(host: &Host<'_>) -> Outcome {
    if !host.at("/run/systemd/system").is_dir() {
        return skip("no systemd here");
    }
    let missing = unlinked(host);
    if missing.is_empty() {
        return pass("systemd finds every device node again");
    }
    warn(
        "`systemctl daemon-reload` takes GPUs away from running containers (\"Failed to initialize NVML: \
         Unknown Error\"), because systemd looks device rules up in /dev/char",
    )
    .fix(make_links(&missing))
}

/// Checks the service, which the guard, users without root and current CDI devices need. A quick check does not
/// connect to it: through its socket that would start the service.
pub(super) fn serve(host: &Host<'_>) -> Outcome {
    let sight = if host.config.guard.enabled { guard::sight(host.config) } else { Sight::All };
    let path = sublet_core::broker::socket(host.config);
    let Ok(there) = fs::metadata(&path) else { return without_socket(host, &sight) };
    if !there.file_type().is_socket() {
        return fail(format!("{} is not a socket", safe_path(&path)))
            .fix(format!("rm {} && systemctl restart sublet.socket", safe_path(&path)));
    }
    if let Some(Err(error)) = (!host.quick).then(|| Broker::answers(host.config, ANSWER_LIMIT)) {
        let is_down = matches!(error, BrokerError::NotRunning { .. });
        let unit = if is_down { "sublet.socket" } else { "sublet.service" };
        return warn(error.to_string()).fix(format!("systemctl restart {unit}"));
    }
    let verb = if host.quick { "is there" } else { "answers" };
    unguarded(&sight).unwrap_or_else(|| pass(format!("{} {verb}", safe_path(&path))))
}

fn without_socket(host: &Host<'_>, sight: &Sight) -> Outcome {
    if !host.config.policy.is_empty() {
        return warn("there is no socket, but [[policy]] allows users shares")
            .fix("systemctl enable --now sublet.socket sublet.service");
    }
    if !host.config.share.is_empty() {
        return warn("the service does not run, so the CDI devices of [share] are not kept current")
            .fix("systemctl enable --now sublet.service (or `sublet cdi generate` after each change)");
    }
    unguarded(sight).unwrap_or_else(|| pass("no socket; this configuration does not need it"))
}

/// Reports where the guard is blind.
fn unguarded(sight: &Sight) -> Option<Outcome> {
    match sight {
        Sight::All => None,
        Sight::Blind(why) => {
            let found = format!("the guard cannot watch everything: {}", safe(&why.join("; ")));
            Some(warn(found).fix("as it says"))
        }
        Sight::None => {
            let found = "the guard ([guard], part of the service) does not run: programs that tamper with their \
                         MPS limits are not stopped";
            Some(warn(found).fix("systemctl enable --now sublet.service (or [guard] enabled = false)"))
        }
    }
}

/// Checks the rules for users without root.
pub(super) fn policy(host: &Host<'_>) -> Outcome {
    let unknown = joined(host.config.policy.iter().filter_map(unknown), ", ");
    if !unknown.is_empty() {
        return warn(format!("[[policy]] names {unknown}")).fix("correct the names in /etc/sublet");
    }
    pass(match host.config.policy.len() {
        0 => "no rules: only root can take shares".to_owned(),
        count => format!("{count} rules; all their users and groups exist"),
    })
}

/// The user or group of a rule, if this host does not know it.
pub(crate) fn unknown(rule: &PolicyRule) -> Option<String> {
    let is_name = |name: &&String| *name != "*" && name.parse::<u32>().is_err();
    let (user, group) = (rule.user.as_ref().filter(is_name), rule.group.as_ref().filter(is_name));
    let user = user.filter(|name| !matches!(User::from_name(name), Ok(Some(_))));
    let group = group.filter(|name| !matches!(Group::from_name(name), Ok(Some(_))));
    user.map(|name| format!("user {}", safe(name)))
        .or_else(|| group.map(|name| format!("group {}", safe(name))))
}

/// Checks the state directory and its ledger.
pub(super) fn state(host: &Host<'_>) -> Outcome {
    let dir = &host.config.state_dir;
    let path = safe_path(dir);
    let ledger = match &host.ledger {
        Err(error) => return fail(error.clone()).fix("sublet gc (see the message)"),
        Ok(ledger) => ledger,
    };
    if !dir.exists() {
        return pass(format!("{path} does not exist yet; the first command creates it"));
    }
    if statvfs(dir).is_ok_and(|at| at.flags().contains(FsFlags::ST_RDONLY)) {
        return fail(format!("{path} is on a read-only file system"))
            .fix("mount it writable, or set state_dir");
    }
    if !ledger.unexplained.is_empty() {
        let devices = safe(&ledger.unexplained.join(", "));
        return warn(format!("the ledger was rebuilt, and {devices} is used by processes without a lease"))
            .fix("end those processes, then run `sublet gc`");
    }
    pass(format!("{path}, {} leases", ledger.leases.len()))
}

/// Checks that the system clock is not behind recorded state.
pub(super) fn clock(host: &Host<'_>) -> Outcome {
    clock_at(host, SystemTime::now())
}

fn clock_at(host: &Host<'_>, now: SystemTime) -> Outcome {
    let fix = "timedatectl set-ntp true";
    if now < SystemTime::UNIX_EPOCH + Duration::from_secs(EARLIEST) {
        return warn("the clock is before 2025").fix(fix);
    }
    let ahead = |name: &&str| {
        let written = fs::metadata(host.config.state_dir.join(name)).and_then(|there| there.modified());
        written.is_ok_and(|written| written > now + Duration::from_secs(60))
    };
    match ["ledger.json", "inventory.json"].into_iter().find(ahead) {
        Some(name) => warn(format!("{name} has a time in the future: the clock was set back")).fix(fix),
        None => pass("the system clock is not behind recorded state"),
    }
}

// The kernel's security modules.

/// How many bytes at the end of a log are read.
const TAIL: u64 = 1 << 20;

const LOGS: [&str; 3] = ["/var/log/audit/audit.log", "/var/log/kern.log", "/var/log/syslog"];

/// Which modules are enforcing, and denials of accesses that sublet needs.
pub(super) fn security_modules(host: &Host<'_>) -> Outcome {
    if selinux::denies_mps_sockets(&host.root, &host.config.state_dir) {
        let found =
            "SELinux is enforcing without sublet's policy module, so shares with an MPS server are refused";
        return warn(found).fix(selinux::FIX);
    }
    if let Some(denial) = denial(host) {
        return warn(format!("denied: {}", safe(&denial)))
            .fix("ausearch -m avc -ts boot (AppArmor: journalctl -k -g DENIED)");
    }
    pass(match host.text("/sys/module/apparmor/parameters/enabled") {
        _ if is_selinux_enforcing(&host.root) => "SELinux is enforcing, with sublet's module; no denials",
        Some(text) if text.starts_with('Y') => "AppArmor; no denials",
        _ => "neither SELinux nor AppArmor",
    })
}

/// The latest denial that names sublet, from the journal or else a log. The journal is read newest first, because only
/// the beginning of a program's output is kept.
fn denial(host: &Host<'_>) -> Option<String> {
    let newest = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat", "-r", "-n", "5000"];
    let journal = (host.ask)(&newest).unwrap_or_default();
    let logs: String = LOGS.iter().filter_map(|log| tail(&host.at(log))).collect();
    let denied = |line: &&str| line.contains("avc:  denied") || line.contains("apparmor=\"DENIED\"");
    let ours = |line: &&str| ["sublet", "nvidia"].iter().any(|word| line.contains(word));
    let mut newest_first = journal.lines().chain(logs.lines().rev());
    newest_first.find(|line| denied(line) && ours(line)).map(str::to_owned)
}

fn tail(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok().filter(fs::Metadata::is_file)?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Shutdown, shutdown};

    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;

    #[test]
    fn a_runtime_is_there_and_new_enough() {
        let fake = Fake::new();
        assert!(finding(runtimes(&fake.host()), Fail).0.starts_with("none of runc, crun"));
        fake.file("/usr/bin/runc", "").file("/usr/bin/crun", "");
        let old = |argv: &[&str]| {
            Some(
                if argv[0].ends_with("runc") { "runc version 1.1.5\n" } else { "crun version 1.4.5\n" }
                    .into(),
            )
        };
        let host = Host { ask: old, ..fake.host() };
        // `crun` contains the word `run` only at its end.
        assert!(finding(runtimes(&host), Warn).0.starts_with("crun version 1.4.5 is older"));
        let host = Host { ask: |_| Some("runc version 1.1.5+ds1\ncommit: x\n".into()), ..fake.host() };
        assert!(passed(runtimes(&host)).contains("runc version 1.1.5+ds1"));
    }

    #[test]
    fn crun_wants_the_second_cgroups() {
        let mut fake = Fake::new();
        fake.file("/usr/bin/crun", "");
        assert!(finding(cgroup(&fake.host()), Warn).0.contains("crun refuses"));
        fake.config.runtime.low_level = vec!["runc".into()];
        passed(cgroup(&fake.host()));
        fake.file("/sys/fs/cgroup/cgroup.controllers", "");
        assert_eq!(passed(cgroup(&fake.host())), "v2, cgroupfs drivers by default");
    }

    #[test]
    fn a_daemon_reload_is_harmless_where_nodes_have_links() {
        let fake = Fake::new();
        fake.file("/proc/devices", "Character devices:\n195 nvidia\n");
        assert_eq!(skipped(daemon_reload(&fake.host())), "no systemd here");
        fake.file("/run/systemd/system/x", "");
        let (found, fix) = finding(daemon_reload(&fake.host()), Warn);
        assert!(found.starts_with("`systemctl daemon-reload` takes GPUs"), "{found}");
        assert_eq!(fix, "ln -s ../nvidiactl /dev/char/195:255");
        fake.file("/dev/char/195:255", "");
        passed(daemon_reload(&fake.host()));
    }

    #[test]
    fn the_service_is_there_where_it_is_needed() {
        let mut fake = Fake::new();
        let (found, fix) = finding(serve(&fake.host()), Warn);
        assert!(found.starts_with("the guard") && fix.contains("sublet.service"), "{found} {fix}");
        fake.config.guard.enabled = false;
        passed(serve(&fake.host()));
        fake.config.share.insert("small".into(), std::collections::BTreeMap::new());
        assert!(finding(serve(&fake.host()), Warn).1.contains("sublet.service"));
        fake.config.policy.push(PolicyRule { user: Some("*".into()), ..PolicyRule::default() });
        assert!(finding(serve(&fake.host()), Warn).1.contains("sublet.socket"));
        fake.file("/run/sublet/sublet.sock", "");
        assert!(finding(serve(&fake.host()), Fail).0.ends_with("is not a socket"));
    }

    #[test]
    fn a_service_is_asked_but_not_in_a_quick_look() {
        let mut fake = Fake::new();
        fake.file("/run/sublet/x", "");
        let listener = UnixListener::bind(fake.path("/run/sublet/sublet.sock")).unwrap();
        let quick = Host { quick: true, ..fake.host() };
        assert!(finding(serve(&quick), Warn).0.starts_with("the guard"));
        fake.config.guard.enabled = false;
        let quick = Host { quick: true, ..fake.host() };
        assert!(passed(serve(&quick)).ends_with("is there"));
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "nobody came");
        // A closed socket would stay open in a child that another test has just forked.
        shutdown(listener.as_raw_fd(), Shutdown::Both).unwrap();
        assert!(finding(serve(&fake.host()), Warn).0.contains("Connection refused"));
    }

    #[test]
    fn policies_name_people_who_exist() {
        let mut fake = Fake::new();
        passed(policy(&fake.host()));
        let rule = |user: &str| PolicyRule { user: Some(user.into()), ..PolicyRule::default() };
        fake.config.policy = vec![rule("root"), rule("*"), rule("4242")];
        passed(policy(&fake.host()));
        fake.config.policy.push(PolicyRule { group: Some("no-such-group".into()), ..PolicyRule::default() });
        fake.config.policy.push(rule("no-such-user"));
        let (found, _) = finding(policy(&fake.host()), Warn);
        assert_eq!(found, "[[policy]] names group no-such-group, user no-such-user");
    }

    #[test]
    fn a_ledger_that_cannot_be_used_fails() {
        let fake = Fake::new();
        assert!(passed(state(&fake.host())).ends_with("the first command creates it"));
        fake.file("/run/sublet/x", "");
        passed(state(&fake.host()));
        let mut host = fake.host();
        host.ledger.as_mut().unwrap().unexplained.push("GPU-0".into());
        assert!(finding(state(&host), Warn).0.contains("GPU-0 is used"));
        host.ledger = Err("ledger cannot be used".into());
        assert_eq!(finding(state(&host), Fail).0, "ledger cannot be used");
    }

    #[test]
    fn a_guard_that_does_not_see_all_says_why() {
        let blind = Sight::Blind(vec!["GPU 0 gives no list of processes\u{1b}".into()]);
        let (found, _) = finding(unguarded(&blind).unwrap(), Warn);
        assert_eq!(found, "the guard cannot watch everything: GPU 0 gives no list of processes\\u{1b}");
        assert!(unguarded(&Sight::All).is_none());
    }

    #[test]
    fn a_state_directory_that_another_user_may_write_fails() {
        let fake = Fake::new();
        fake.file("/run/sublet/x", "");
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(&fake.config.state_dir, open).unwrap();
        let host = Host::of(&fake.config, true, |_| None, || Err("not asked".into()));
        let (found, fix) = finding(state(&host), Fail);
        assert!(
            found.contains("others than its owner may write to it (uid") && fix.starts_with("sublet gc"),
            "{found} {fix}"
        );
    }

    #[test]
    fn a_clock_that_went_back_is_noticed() {
        let fake = Fake::new();
        assert_eq!(
            finding(clock_at(&fake.host(), SystemTime::UNIX_EPOCH), Warn).0,
            "the clock is before 2025"
        );
        passed(clock(&fake.host()));
        fake.file("/run/sublet/ledger.json", "");
        passed(clock(&fake.host()));
        let file = fs::File::options().write(true).open(fake.path("/run/sublet/ledger.json")).unwrap();
        file.set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
        assert!(finding(clock(&fake.host()), Warn).0.starts_with("ledger.json has a time in the future"));
    }

    #[test]
    fn selinux_needs_the_module() {
        let fake = Fake::new();
        assert_eq!(passed(security_modules(&fake.host())), "neither SELinux nor AppArmor");
        fake.file("/sys/fs/selinux/enforce", "1");
        assert!(finding(security_modules(&fake.host()), Warn).1.contains("sublet-selinux"));
        fake.file("/sys/fs/selinux/enforce", "0");
        passed(security_modules(&fake.host()));
    }

    #[test]
    fn denials_that_concern_sublet_are_shown() {
        let fake = Fake::new();
        fake.file("/var/log/kern.log", "x: apparmor=\"DENIED\" operation=\"open\" name=\"/etc/shadow\"\n");
        passed(security_modules(&fake.host()));
        fake.file(
            "/var/log/audit/audit.log",
            "type=AVC avc:  denied  { connectto } path=\"/run/sublet/mps/GPU-0/pipe/control\"\n",
        );
        let (found, _) = finding(security_modules(&fake.host()), Warn);
        assert!(found.starts_with("denied: type=AVC") && found.contains("/run/sublet/mps"), "{found}");
        let plain = Fake::new();
        let newest_first = |argv: &[&str]| {
            assert!(argv.contains(&"-r"), "{argv:?}");
            let line = |name: &str| format!("apparmor=\"DENIED\" name=\"{name}\"\n");
            Some(line("/dev/nvidia1") + &line("/dev/nvidia0"))
        };
        let journal = Host { ask: newest_first, ..plain.host() };
        assert!(finding(security_modules(&journal), Warn).0.contains("/dev/nvidia1"));
    }
}
