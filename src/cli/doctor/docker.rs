//! Docker: its version, whether it knows sublet, and whether Swarm counts the shares that this node's GPUs hold.

use serde_json::Value;

use super::{Host, Outcome, fail, joined, pass, skip, version, warn};
use crate::names::WHY_WITHOUT_SHARE;
use crate::setup::docker::{self as daemon_json, RESOURCE, without_share};
use crate::setup::{NAME, engine_files};
use crate::stack::{counts, drops_annotations, resources};
use sublet_core::text::{safe, safe_path};

/// The first version with `--annotation`.
const OLDEST: u32 = 24;

/// Checks everything between `docker run` and the shim.
pub(super) fn docker(host: &Host<'_>) -> Outcome {
    if let Some(snap) = engine_files::docker_snap(&host.root) {
        return warn(format!("Docker is a snap ({}), which cannot run programs of the host", snap.display()))
            .fix("apt install docker.io");
    }
    if host.program("dockerd").is_none() {
        return skip("not installed");
    }
    let (dockerd, text) = host.dockerd();
    let file = safe_path(dockerd.file());
    let by_cdi = !host.config.share.is_empty() && daemon_json::has_cdi(&text).unwrap_or(false);
    match daemon_json::runtime(&text).and_then(|runtime| dockerd.starts_with(&text).map(|()| runtime)) {
        Err(error) => fail(format!("{file}: {error}")).fix(format!("correct {file}")),
        Ok(None) if dockerd.runtime().is_some() => daemon(host, &file),
        Ok(None) if by_cdi => pass("no runtime sublet; shares are used as CDI devices"),
        Ok(None) => warn(format!("{file} has no runtime sublet")).fix("sublet setup docker"),
        Ok(Some(path)) if host.program(&path).is_none() => {
            fail(format!("runtime sublet is {}, which does not exist", safe(&path)))
                .fix("sublet setup docker --undo, then sublet setup docker")
        }
        Ok(Some(_)) => daemon(host, &file),
    }
}

/// Checks the running daemon by its own reports.
fn daemon(host: &Host<'_>, file: &str) -> Outcome {
    if host.quick {
        return pass("dockerd is told of the runtime sublet");
    }
    let Some(answer) = (host.ask)(&["docker", "version", "--format", "{{.Server.Version}}"]) else {
        return warn("dockerd does not answer").fix("systemctl start docker");
    };
    let docker = answer.trim();
    if version(docker).is_some_and(|parts| parts[0] < OLDEST) {
        return fail(format!("Docker {} does not know --annotation", safe(docker))).fix(format!(
            "install Docker {OLDEST} or later, or take shares by name: docs/docker.md, \"Without \
             annotations\""
        ));
    }
    let runtimes = (host.ask)(&["docker", "info", "--format", "{{json .Runtimes}}"]).unwrap_or_default();
    if !runtimes.contains("\"sublet\"") {
        return warn(format!("dockerd has not read {file} yet")).fix("systemctl reload docker");
    }
    let (dockerd, text) = host.dockerd();
    if dockerd.default_runtime(&text).as_deref() == Some(NAME) && host.config.runtime.without_share.is_none()
    {
        let found = "sublet is dockerd's default runtime, so each container without a share is a line in \
                     [runtime] log";
        return warn(found).fix("sublet setup docker --default (or [runtime] without_share = \"run\")");
    }
    let ledger = host.ledger.as_ref().ok();
    let without = ledger.map(|ledger| without_share(&host.root, ledger, host.config)).unwrap_or_default();
    if !without.is_empty() {
        return warn(format!("containers {WHY_WITHOUT_SHARE}: {}", without.join(", ")))
            .fix("start them again with annotations, by a client that passes them on (Docker's API 1.43)");
    }
    let compose = [&["docker", "compose", "version"][..], &["docker-compose", "version"]];
    if let Some(old) = compose.into_iter().find_map(host.ask).and_then(|version| drops_annotations(&version))
    {
        let found =
            format!("Docker Compose {old} drops annotations, and with them the shares of its services");
        return warn(found)
            .fix("install Docker Compose 2.26 or later, or give shares without annotations: docs/docker.md");
    }
    pass(format!("{}, runtime sublet", safe(docker)))
}

// Swarm.

const SETUP: &str = "sublet setup docker --swarm";

/// dockerd's restart ends the node's tasks.
const RESTART: &str =
    "docker node update --availability drain NODE, systemctl restart docker, then --availability active";

/// Checks the counts of named shares that Swarm gets: by daemon.json, and from the running dockerd.
pub(super) fn shares(host: &Host<'_>) -> Outcome {
    let (dockerd, text) = host.dockerd();
    let file = safe_path(dockerd.file());
    let listed = match daemon_json::advertised(&text) {
        Ok(listed) => sorted(listed),
        Err(error) => return fail(format!("{file}: {error}")).fix(format!("correct {file}")),
    };
    let running = dockerd_resources(host);
    if listed.is_empty() && running.as_ref().is_none_or(Vec::is_empty) {
        return skip("this node tells Swarm of no share");
    }
    let differs = running.filter(|running| *running != listed).map(|running| {
        let found = format!("dockerd tells Swarm of {}, daemon.json of {}", list(&running), list(&listed));
        warn(format!("{found}: it reads that at its start only")).fix(RESTART)
    });
    if listed.is_empty() {
        return differs.unwrap_or_else(|| pass("no share"));
    }
    if let Some(stale) = stale(host, &listed) {
        return stale;
    }
    if dockerd.default_runtime(&text).as_deref() != Some(NAME) {
        return warn("services start with the default runtime, which is not sublet").fix(SETUP);
    }
    differs.or_else(|| unmapped(host, &listed)).unwrap_or_else(|| pass(list(&listed)))
}

/// Whether daemon.json has other counts than fit on the GPUs.
fn stale(host: &Host<'_>, listed: &[String]) -> Option<Outcome> {
    // Instances that would be created for a share are known to NVML alone.
    if host.quick && host.config.mig.dynamic {
        return None;
    }
    let inventory = host.inventory.as_ref().ok()?;
    let fits = sorted(resources(&counts(host.config, inventory).ok()?));
    let found = || format!("daemon.json has {}, but the GPUs hold {}", list(listed), list(&fits));
    (fits != listed).then(|| warn(found()).fix(SETUP))
}

/// The shares that the running dockerd reports to Swarm; `None` if it does not answer or was not asked.
fn dockerd_resources(host: &Host<'_>) -> Option<Vec<String>> {
    host.program("dockerd")?;
    let answer = (host.ask)(&["docker", "info", "--format", "{{json .GenericResources}}"])?;
    let all: Option<Vec<Value>> = serde_json::from_str(answer.trim()).ok()?;
    let ours = all.unwrap_or_default().into_iter().filter_map(|resource| {
        let discrete = &resource["DiscreteResourceSpec"];
        let kind = discrete["Kind"].as_str().filter(|kind| kind.starts_with(RESOURCE))?;
        Some(format!("{kind}={}", discrete["Value"].as_i64()?))
    });
    Some(sorted(ours.collect()))
}

/// A share that Swarm counts and no rule gives to anybody.
fn unmapped(host: &Host<'_>, listed: &[String]) -> Option<Outcome> {
    let rules = match &host.containers {
        Ok(rules) => rules.as_ref().map_or(&[][..], |rules| &rules.container),
        Err(error) => return Some(fail(error.clone()).fix("correct containers.toml")),
    };
    let mut shares = listed.iter().filter_map(|resource| resource.strip_prefix(RESOURCE)?.rsplit_once('='));
    let share = safe(shares.find(|(share, _)| !rules.iter().any(|rule| rule.share == *share))?.0);
    let found =
        format!("no rule of containers.toml gives share {share}: a service that reserves it gets no GPU");
    let fix = format!("add a [[container]] with service = \"…\" and share = \"{share}\" to containers.toml");
    Some(warn(found).fix(fix))
}

/// dockerd lists them in any order.
fn sorted(mut resources: Vec<String>) -> Vec<String> {
    resources.sort();
    resources
}

fn list(resources: &[String]) -> String {
    let all = joined(resources.iter().map(|resource| safe(resource)), ", ");
    if all.is_empty() { "no share".to_owned() } else { all }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;
    use sublet_core::config_files::Containers;

    const FILE: &str = "/etc/docker/daemon.json";

    #[test]
    fn each_step_to_the_shim_is_looked_at() {
        let fake = Fake::new();
        assert_eq!(skipped(docker(&fake.host())), "not installed");
        fake.file("/var/snap/docker/x", "");
        assert!(finding(docker(&fake.host()), Warn).0.starts_with("Docker is a snap"));
        fake.file("/usr/bin/dockerd", "");
        assert_eq!(finding(docker(&fake.host()), Warn).1, "sublet setup docker");
        fake.file(FILE, " \n");
        assert_eq!(finding(docker(&fake.host()), Warn).1, "sublet setup docker");
        fake.file(FILE, "{ \"runtimes\": ");
        assert!(finding(docker(&fake.host()), Fail).0.contains("it is not valid JSON"));
        fake.file(FILE, r#"{"runtimes": {"sublet": {"path": "/usr/bin/sublet-runtime"}}}"#);
        assert!(finding(docker(&fake.host()), Fail).0.contains("which does not exist"));
        fake.file("/usr/bin/sublet-runtime", "");
        assert_eq!(finding(docker(&fake.host()), Warn).1, "systemctl start docker");
        fake.file(FILE, r#"{"runtimes": {"sublet": {"path": "sublet-runtime"}}}"#);
        assert_eq!(finding(docker(&fake.host()), Warn).1, "systemctl start docker");
        let old = Host { ask: |_| Some("20.10.24+dfsg1\n".into()), ..fake.host() };
        assert!(finding(docker(&old), Fail).0.contains("does not know --annotation"));
        let unread = Host { ask: |_| Some("26.1.5\n".into()), ..fake.host() };
        assert_eq!(finding(docker(&unread), Warn).1, "systemctl reload docker");
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
        let (found, fix) = finding(docker(&Host { ask: compose, ..fake.host() }), Warn);
        assert!(
            found.starts_with("Docker Compose 2.24.5 drops annotations") && fix.contains("2.26"),
            "{found}"
        );
        // Flags of dockerd's command line.
        fake.file("/proc/7/comm", "dockerd\n").file("/proc/7/cmdline", "dockerd\0--default-runtime\0runc\0");
        fake.file(
            FILE,
            r#"{"default-runtime": "sublet", "runtimes": {"sublet": {"path": "sublet-runtime"}}}"#,
        );
        assert!(
            finding(docker(&fake.host()), Fail).0.contains("--default-runtime=runc of the running dockerd")
        );
        fake.file("/proc/7/cmdline", "dockerd\0--config-file=/x.json\0--add-runtime=sublet=sublet-runtime\0");
        assert_eq!(passed(docker(&Host { ask: read, ..fake.host() })), "26.1.5+dfsg1, runtime sublet");
        // By hand: `sublet setup docker --default` sets without_share, too.
        fake.file("/x.json", r#"{"default-runtime": "sublet"}"#);
        let (found, fix) = finding(docker(&Host { ask: read, ..fake.host() }), Warn);
        assert!(
            found.starts_with("sublet is dockerd's default runtime") && fix.contains("--default"),
            "{found}"
        );
    }

    #[test]
    fn shares_by_cdi_need_no_runtime() {
        let mut fake = Fake::new();
        fake.file("/usr/bin/dockerd", "").file(FILE, r#"{"features": {"cdi": true}}"#);
        finding(docker(&fake.host()), Warn);
        fake.config.share.insert("small".into(), std::collections::BTreeMap::new());
        passed(docker(&fake.host()));
    }

    fn rules(share: &str) -> Containers {
        let rule = |share: &str| format!("[[container]]\nservice = \"web\"\nshare = \"{share}\"\n");
        let text = rule("a") + &rule(share);
        toml::from_str(&text).unwrap()
    }

    fn fake(resources: &str) -> Fake {
        let mut fake = Fake::new();
        fake.config = toml::from_str("[share.half]\nsm = 50\n[share.a]\nsm = 50\n").unwrap();
        let text = format!("{{\"default-runtime\": \"sublet\", \"node-generic-resources\": {resources}}}");
        fake.file("/usr/bin/dockerd", "").file("/etc/docker/daemon.json", &text);
        fake
    }

    #[test]
    fn swarm_counts_as_many_shares_as_the_gpus_hold_once_dockerd_has_read_them() {
        let old = |_: &[&str]| {
            let kept = r#"[{"NamedResourceSpec":{"Kind":"x","Value":"y"}},
                {"DiscreteResourceSpec":{"Kind":"sublet-half","Value":1}}]"#;
            Some(kept.to_owned())
        };
        let new = |_: &[&str]| {
            let kept = r#"[{"DiscreteResourceSpec":{"Kind":"sublet-half","Value":2}},
                {"DiscreteResourceSpec":{"Kind":"sublet-a","Value":2}}]"#;
            Some(kept.to_owned() + "\n")
        };
        let none = Fake::new();
        assert_eq!(skipped(shares(&none.host())), "this node tells Swarm of no share");
        let stale = fake("[\"sublet-half=3\", \"fpga=1\"]");
        let (found, fix) = finding(shares(&stale.host()), Warn);
        assert_eq!(found, "daemon.json has sublet-half=3, but the GPUs hold sublet-a=2, sublet-half=2");
        assert_eq!(fix, SETUP);
        let good = fake("[\"sublet-half=2\", \"fpga=1\", \"sublet-a=2\"]");
        let host = |ask| Host { ask, containers: Ok(Some(rules("half"))), ..good.host() };
        let (found, fix) = finding(shares(&host(old)), Warn);
        assert!(
            found.starts_with("dockerd tells Swarm of sublet-half=1, daemon.json of sublet-a=2"),
            "{found}"
        );
        assert!(fix.contains("drain"), "{fix}");
        assert_eq!(passed(shares(&host(new))), "sublet-a=2, sublet-half=2");
        assert_eq!(passed(shares(&host(|_| None))), "sublet-a=2, sublet-half=2", "dockerd does not run");
        let undone = fake("[]");
        let (found, _) = finding(shares(&Host { ask: new, ..undone.host() }), Warn);
        assert!(
            found.starts_with("dockerd tells Swarm of sublet-a=2, sublet-half=2, daemon.json of no share"),
            "{found}"
        );
    }

    #[test]
    fn a_share_that_no_service_gets_is_reported() {
        let fake = fake("[\"sublet-a=2\", \"sublet-half=2\"]");
        let with = |containers| Host { containers, ..fake.host() };
        assert!(finding(shares(&with(Ok(None))), Warn).0.contains("gives share a:"));
        let (found, fix) = finding(shares(&with(Ok(Some(rules("other"))))), Warn);
        assert!(found.contains("gives share half:") && fix.contains("share = \"half\""), "{found}; {fix}");
        finding(shares(&with(Err("containers.toml:1:1: broken".into()))), Fail);
        fake.file(
            "/etc/docker/daemon.json",
            "{\"node-generic-resources\": [\"sublet-a=2\", \"sublet-half=2\"]}",
        );
        assert!(finding(shares(&fake.host()), Warn).0.contains("default runtime, which is not sublet"));
        fake.file("/etc/docker/daemon.json", "{\"node-generic-resources\": 1}");
        finding(shares(&fake.host()), Fail);
    }
}
