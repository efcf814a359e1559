//! The kernel's security modules: whether they are enforcing, and what they have denied.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use super::{Host, Outcome, pass, warn};
use sublet_core::fs::selinux;
use sublet_core::text::safe;

/// How many bytes at the end of a log are read.
const TAIL: u64 = 1 << 20;

const LOGS: [&str; 3] = ["/var/log/audit/audit.log", "/var/log/kern.log", "/var/log/syslog"];

/// Which modules are enforcing, and denials of what sublet needs.
pub(super) fn modules(host: &Host<'_>) -> Outcome {
    let enforcing = selinux::is_enforcing(&host.root);
    if selinux::denies_mps_sockets(&host.root, &host.config.state_dir) {
        return warn(
            "SELinux is enforcing without sublet's policy module, so shares with an MPS server are refused",
            selinux::FIX,
        );
    }
    if let Some(denial) = denial(host) {
        return warn(
            format!("denied: {}", safe(&denial)),
            "ausearch -m avc -ts boot (AppArmor: journalctl -k -g DENIED)",
        );
    }
    let apparmor =
        host.text("/sys/module/apparmor/parameters/enabled").is_some_and(|text| text.starts_with('Y'));
    pass(match (enforcing, apparmor) {
        (true, _) => "SELinux is enforcing, with sublet's module; no denials",
        (false, true) => "AppArmor; no denials",
        (false, false) => "neither SELinux nor AppArmor",
    })
}

/// The latest denial that names sublet, from the journal or else a log. The journal is read newest first, because only
/// the beginning of a program's output is kept.
fn denial(host: &Host<'_>) -> Option<String> {
    let journal =
        (host.ask)(&["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "cat", "-r", "-n", "5000"])
            .unwrap_or_default();
    let logs: String = LOGS.iter().filter_map(|log| tail(&host.at(log))).collect();
    let denied = |line: &&str| line.contains("avc:  denied") || line.contains("apparmor=\"DENIED\"");
    let ours = |line: &&str| ["sublet", "nvidia"].iter().any(|word| line.contains(word));
    let mut newest_first = journal.lines().chain(logs.lines().rev());
    newest_first.find(|line| denied(line) && ours(line)).map(str::to_owned)
}

fn tail(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok().filter(std::fs::Metadata::is_file)?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fake_host::{Fake, passed, told};
    use super::*;

    #[test]
    fn selinux_needs_the_module() {
        let fake = Fake::new();
        assert_eq!(passed(modules(&fake.host())), "neither SELinux nor AppArmor");
        fake.file("/sys/fs/selinux/enforce", "1");
        assert!(told(modules(&fake.host()), Warn).1.contains("sublet-selinux"));
        fake.file("/sys/fs/selinux/enforce", "0");
        passed(modules(&fake.host()));
    }

    #[test]
    fn denials_that_concern_sublet_are_shown() {
        let fake = Fake::new();
        fake.file("/var/log/kern.log", "x: apparmor=\"DENIED\" operation=\"open\" name=\"/etc/shadow\"\n");
        passed(modules(&fake.host()));
        fake.file(
            "/var/log/audit/audit.log",
            "type=AVC avc:  denied  { connectto } path=\"/run/sublet/mps/GPU-0/pipe/control\"\n",
        );
        let (found, _) = told(modules(&fake.host()), Warn);
        assert!(found.starts_with("denied: type=AVC") && found.contains("/run/sublet/mps"), "{found}");
        let plain = Fake::new();
        let newest_first = |argv: &[&str]| {
            assert!(argv.contains(&"-r"), "{argv:?}");
            let line = |name: &str| format!("apparmor=\"DENIED\" name=\"{name}\"\n");
            Some(line("/dev/nvidia1") + &line("/dev/nvidia0"))
        };
        let journal = Host { ask: newest_first, ..plain.host() };
        assert!(told(modules(&journal), Warn).0.contains("/dev/nvidia1"));
    }
}
