//! Docker: its version, and whether it knows sublet.

use super::{Host, Outcome, fail, pass, shown, skip, version, warn};
use crate::names::WHY_WITHOUT_SHARE;
use crate::setup::dockerd::without_share;
use crate::setup::{NAME, docker as daemon_json, engine_files};
use crate::stack::drops_annotations;
use sublet_core::text::safe;

/// The first version with `--annotation`.
const OLDEST: u32 = 24;

/// Checks everything between `docker run` and the shim.
pub(super) fn docker(host: &Host<'_>) -> Outcome {
    if let Some(snap) = engine_files::docker_snap(&host.root) {
        return warn(
            format!("Docker is a snap ({}), which cannot run programs of the host", snap.display()),
            "apt install docker.io",
        );
    }
    if host.program("dockerd").is_none() {
        return skip("not installed");
    }
    let (dockerd, text) = host.dockerd();
    let file = shown(dockerd.file());
    let runtime = daemon_json::runtime(&text);
    let by_cdi = !host.config.share.is_empty() && daemon_json::has_cdi(&text).unwrap_or(false);
    match runtime.and_then(|runtime| dockerd.starts_with(&text).map(|()| runtime)) {
        Err(error) => fail(format!("{file}: {error}"), format!("correct {file}")),
        Ok(None) if dockerd.runtime().is_some() => daemon(host, &file),
        Ok(None) if by_cdi => pass("no runtime sublet; shares are used as CDI devices"),
        Ok(None) => warn(format!("{file} has no runtime sublet"), "sublet setup docker"),
        Ok(Some(path)) if host.program(&path).is_none() => fail(
            format!("runtime sublet is {}, which does not exist", safe(&path)),
            "sublet setup docker --undo, then sublet setup docker",
        ),
        Ok(Some(_)) => daemon(host, &file),
    }
}

/// Checks what the running daemon reports.
fn daemon(host: &Host<'_>, file: &str) -> Outcome {
    if host.quick {
        return pass("dockerd is told of the runtime sublet");
    }
    let Some(told) = (host.ask)(&["docker", "version", "--format", "{{.Server.Version}}"]) else {
        return warn("dockerd does not answer", "systemctl start docker");
    };
    let told = told.trim();
    if version(told).is_some_and(|parts| parts[0] < OLDEST) {
        return fail(
            format!("Docker {} does not know --annotation", safe(told)),
            format!(
                "install Docker {OLDEST} or later, or take shares by name: docs/docker.md, \"Without annotations\""
            ),
        );
    }
    let runtimes = (host.ask)(&["docker", "info", "--format", "{{json .Runtimes}}"]).unwrap_or_default();
    if !runtimes.contains("\"sublet\"") {
        return warn(format!("dockerd has not read {file} yet"), "systemctl reload docker");
    }
    let (dockerd, text) = host.dockerd();
    if dockerd.default_runtime(&text).as_deref() == Some(NAME) && host.config.runtime.without_share.is_none()
    {
        return warn(
            "sublet is dockerd's default runtime, so each container without a share is a line in [runtime] log",
            "sublet setup docker --default (or [runtime] without_share = \"run\")",
        );
    }
    let ledger = host.ledger.as_ref().ok();
    let without = ledger.map(|ledger| without_share(&host.root, ledger, host.config)).unwrap_or_default();
    if !without.is_empty() {
        return warn(
            format!("containers {WHY_WITHOUT_SHARE}: {}", without.join(", ")),
            "start them again with annotations, by a client that passes them on (Docker's API 1.43)",
        );
    }
    let compose = [&["docker", "compose", "version"][..], &["docker-compose", "version"]];
    if let Some(old) = compose.into_iter().find_map(host.ask).and_then(|version| drops_annotations(&version))
    {
        return warn(
            format!("Docker Compose {old} drops annotations, and with them the shares of its services"),
            "install Docker Compose 2.26 or later, or give shares without annotations: docs/docker.md",
        );
    }
    pass(format!("{}, runtime sublet", safe(told)))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, passed, skipped, told};
    use super::*;

    const FILE: &str = "/etc/docker/daemon.json";

    #[test]
    fn each_step_to_the_shim_is_looked_at() {
        let fake = Fake::new();
        assert_eq!(skipped(docker(&fake.host())), "not installed");
        fake.file("/var/snap/docker/x", "");
        assert!(told(docker(&fake.host()), Warn).0.starts_with("Docker is a snap"));
        fake.file("/usr/bin/dockerd", "");
        assert_eq!(told(docker(&fake.host()), Warn).1, "sublet setup docker");
        fake.file(FILE, " \n");
        assert_eq!(told(docker(&fake.host()), Warn).1, "sublet setup docker");
        fake.file(FILE, "{ \"runtimes\": ");
        assert!(told(docker(&fake.host()), Fail).0.contains("it is not valid JSON"));
        fake.file(FILE, r#"{"runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#);
        assert!(told(docker(&fake.host()), Fail).0.contains("which does not exist"));
        fake.file("/usr/bin/sublet-runtime", "");
        assert_eq!(told(docker(&fake.host()), Warn).1, "systemctl start docker");
        fake.file(FILE, r#"{"runtimes": {"sublet": {"path": "sublet-runtime"}}}"#);
        assert_eq!(told(docker(&fake.host()), Warn).1, "systemctl start docker");
        let old = Host { ask: |_| Some("20.10.24+dfsg1\n".into()), ..fake.host() };
        assert!(told(docker(&old), Fail).0.contains("does not know --annotation"));
        let unread = Host { ask: |_| Some("26.1.5\n".into()), ..fake.host() };
        assert_eq!(told(docker(&unread), Warn).1, "systemctl reload docker");
        let read = |argv: &[&str]| {
            Some(if argv[1] == "info" { r#"{"runc":{},"sublet":{}}"# } else { "26.1.5+dfsg1\n" }.to_owned())
        };
        assert_eq!(passed(docker(&Host { ask: read, ..fake.host() })), "26.1.5+dfsg1, runtime sublet");
        let compose = |argv: &[&str]| match argv[1] {
            "compose" => None,
            "info" => Some("\"sublet\"".to_owned()),
            _ if argv[0] == "docker-compose" => Some("Docker Compose version v2.24.5".to_owned()),
            _ => Some("26.1.5".to_owned()),
        };
        let (found, fix) = told(docker(&Host { ask: compose, ..fake.host() }), Warn);
        assert!(
            found.starts_with("Docker Compose 2.24.5 drops annotations") && fix.contains("2.26"),
            "{found}"
        );
        // What dockerd's command line says.
        fake.file("/proc/7/comm", "dockerd\n").file("/proc/7/cmdline", "dockerd\0--default-runtime\0runc\0");
        fake.file(
            FILE,
            r#"{"default-runtime": "sublet", "runtimes": {"sublet": {"path": "sublet-runtime"}}}"#,
        );
        assert!(told(docker(&fake.host()), Fail).0.contains("--default-runtime=runc of the running dockerd"));
        fake.file("/proc/7/cmdline", "dockerd\0--config-file=/x.json\0--add-runtime=sublet=sublet-runtime\0");
        assert_eq!(passed(docker(&Host { ask: read, ..fake.host() })), "26.1.5+dfsg1, runtime sublet");
    }

    #[test]
    fn shares_by_cdi_need_no_runtime() {
        let mut fake = Fake::new();
        fake.file("/usr/bin/dockerd", "").file(FILE, r#"{"features": {"cdi": true}}"#);
        told(docker(&fake.host()), Warn);
        fake.config.share.insert("small".into(), std::collections::BTreeMap::new());
        passed(docker(&fake.host()));
    }
}
