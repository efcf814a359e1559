//! Docker Swarm: whether it counts the shares that this node's GPUs hold.

use serde_json::Value;

use super::{Host, Outcome, fail, pass, shown, skip, warn};
use crate::setup::NAME;
use crate::setup::docker::{self as daemon_json, RESOURCE};
use crate::swarm::{counts, resources};
use sublet_core::text::safe;

const SETUP: &str = "sublet setup docker --swarm";

/// dockerd's restart ends the node's tasks.
const RESTART: &str =
    "docker node update --availability drain NODE, systemctl restart docker, then --availability active";

/// Checks what Swarm is told of named shares: by daemon.json, and by the running dockerd.
pub(super) fn shares(host: &Host<'_>) -> Outcome {
    let (dockerd, text) = host.dockerd();
    let file = shown(dockerd.file());
    let listed = match daemon_json::advertised(&text) {
        Ok(listed) => sorted(listed),
        Err(error) => return fail(format!("{file}: {error}"), format!("correct {file}")),
    };
    let running = dockerd_resources(host);
    if listed.is_empty() && running.as_ref().is_none_or(Vec::is_empty) {
        return skip("this node tells Swarm of no share");
    }
    let differs = running.filter(|running| *running != listed).map(|running| {
        let found = format!("dockerd tells Swarm of {}, daemon.json of {}", list(&running), list(&listed));
        warn(format!("{found}: it reads that at its start only"), RESTART)
    });
    if listed.is_empty() {
        return differs.unwrap_or_else(|| pass("no share"));
    }
    if let Some(stale) = stale(host, &listed) {
        return stale;
    }
    if dockerd.default_runtime(&text).as_deref() != Some(NAME) {
        return warn("services start with the default runtime, which is not sublet", SETUP);
    }
    differs.or_else(|| unmapped(host, &listed)).unwrap_or_else(|| pass(list(&listed)))
}

/// Whether daemon.json differs from what fits on the GPUs.
fn stale(host: &Host<'_>, listed: &[String]) -> Option<Outcome> {
    // Instances that would be created for a share are known to NVML alone.
    if host.quick && host.config.mig.dynamic {
        return None;
    }
    let inventory = host.inventory.as_ref().ok()?;
    let fits = sorted(resources(&counts(host.config, inventory).ok()?));
    let found = || format!("daemon.json has {}, but the GPUs hold {}", list(listed), list(&fits));
    (fits != listed).then(|| warn(found(), SETUP))
}

/// What the running dockerd tells Swarm of shares; `None` if it does not answer or was not asked.
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
        Err(error) => return Some(fail(error.clone(), "correct containers.toml")),
    };
    let mut shares = listed.iter().filter_map(|resource| resource.strip_prefix(RESOURCE)?.rsplit_once('='));
    let share = safe(shares.find(|(share, _)| !rules.iter().any(|rule| rule.share == *share))?.0);
    Some(warn(
        format!("no rule of containers.toml gives share {share}: a service that reserves it gets no GPU"),
        format!("add a [[container]] with service = \"…\" and share = \"{share}\" to containers.toml"),
    ))
}

/// dockerd lists them in any order.
fn sorted(mut resources: Vec<String>) -> Vec<String> {
    resources.sort();
    resources
}

fn list(resources: &[String]) -> String {
    let all: Vec<String> = resources.iter().map(|resource| safe(resource)).collect();
    if all.is_empty() { "no share".to_owned() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, passed, skipped, told as said};
    use super::*;
    use sublet_core::config_files::Containers;

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
    fn what_swarm_counts_is_what_the_gpus_hold_and_what_dockerd_has_read() {
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
        let (found, fix) = said(shares(&stale.host()), Warn);
        assert_eq!(found, "daemon.json has sublet-half=3, but the GPUs hold sublet-a=2, sublet-half=2");
        assert_eq!(fix, SETUP);
        let good = fake("[\"sublet-half=2\", \"fpga=1\", \"sublet-a=2\"]");
        let host = |ask| Host { ask, containers: Ok(Some(rules("half"))), ..good.host() };
        let (found, fix) = said(shares(&host(old)), Warn);
        assert!(
            found.starts_with("dockerd tells Swarm of sublet-half=1, daemon.json of sublet-a=2"),
            "{found}"
        );
        assert!(fix.contains("drain"), "{fix}");
        assert_eq!(passed(shares(&host(new))), "sublet-a=2, sublet-half=2");
        assert_eq!(passed(shares(&host(|_| None))), "sublet-a=2, sublet-half=2", "dockerd does not run");
        let undone = fake("[]");
        let (found, _) = said(shares(&Host { ask: new, ..undone.host() }), Warn);
        assert!(
            found.starts_with("dockerd tells Swarm of sublet-a=2, sublet-half=2, daemon.json of no share"),
            "{found}"
        );
    }

    #[test]
    fn a_share_that_no_service_gets_is_told() {
        let fake = fake("[\"sublet-a=2\", \"sublet-half=2\"]");
        let with = |containers| Host { containers, ..fake.host() };
        assert!(said(shares(&with(Ok(None))), Warn).0.contains("gives share a:"));
        let (found, fix) = said(shares(&with(Ok(Some(rules("other"))))), Warn);
        assert!(found.contains("gives share half:") && fix.contains("share = \"half\""), "{found}; {fix}");
        said(shares(&with(Err("containers.toml:1:1: broken".into()))), Fail);
        fake.file(
            "/etc/docker/daemon.json",
            "{\"node-generic-resources\": [\"sublet-a=2\", \"sublet-half=2\"]}",
        );
        assert!(said(shares(&fake.host()), Warn).0.contains("default runtime, which is not sublet"));
        fake.file("/etc/docker/daemon.json", "{\"node-generic-resources\": 1}");
        said(shares(&fake.host()), Fail);
    }
}
