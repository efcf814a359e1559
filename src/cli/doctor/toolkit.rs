//! NVIDIA's Container Toolkit: sublet does not count the GPUs that it gives out.

use std::path::Path;

use super::{Host, Outcome, pass, shown, skip, warn};
use crate::setup::engine_files::drop_ins;

/// Where CDI specifications are.
const CDI: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Reports what the toolkit is set up to do.
pub(super) fn beside(host: &Host<'_>) -> Outcome {
    let (mut found, mut fix) = (Vec::new(), Vec::new());
    // Other programs' specifications that mount an MPS pipe directory.
    let files = CDI.iter().flat_map(|dir| {
        let dir = host.at(dir);
        [drop_ins(&dir, "json"), drop_ins(&dir, "yaml")].concat()
    });
    let mounts = |text: &str| text.contains("/nvidia-mps") && !text.contains("sublet/share");
    for file in files.filter(|file| std::fs::read_to_string(file).is_ok_and(|text| mounts(&text))) {
        let spec = shown(&Path::new("/").join(file.strip_prefix(&host.root).unwrap_or(&file)));
        found.push(format!("CDI specification {spec} mounts an MPS directory with its control sockets"));
        fix.push(format!(
            "nvidia-ctk cdi generate --output={spec}, while no MPS daemon uses /tmp/nvidia-mps"
        ));
    }
    let (dockerd, text) = host.dockerd();
    if dockerd.default_runtime(&text).as_deref() == Some("nvidia") {
        found.push(
            "nvidia is Docker's default runtime: images with NVIDIA_VISIBLE_DEVICES get whole GPUs"
                .to_owned(),
        );
        fix.push("sublet setup docker --default".to_owned());
    }
    let legacy = "/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json";
    if host.at(legacy).exists() {
        found.push(format!(
            "{legacy} gives Podman's containers whole GPUs if their environment asks for them"
        ));
        fix.push(format!("rm {legacy}"));
    }
    if !found.is_empty() {
        return warn(found.join("; "), fix.join(" && "));
    }
    let there = ["nvidia-container-runtime", "nvidia-ctk"].iter().find_map(|name| host.program(name));
    let Some(program) = there else { return skip("not installed") };
    pass(format!(
        "{} does not interfere; sublet does not count the GPUs that it gives to containers",
        shown(&program)
    ))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fake_host::{Fake, passed, skipped, told};
    use super::*;

    #[test]
    fn other_tools_that_give_gpus_are_named() {
        let fake = Fake::new();
        assert_eq!(skipped(beside(&fake.host())), "not installed");
        fake.file("/usr/bin/nvidia-ctk", "");
        assert!(passed(beside(&fake.host())).contains("does not interfere"));
        fake.file("/var/run/cdi/sublet.json", r#"{"kind": "sublet/share", "m": "/tmp/nvidia-mps"}"#);
        passed(beside(&fake.host()));
        fake.file("/etc/cdi/nvidia.yaml", "mounts:\n- hostPath: /tmp/nvidia-mps\n");
        let (found, _) = told(beside(&fake.host()), Warn);
        assert!(found.starts_with("CDI specification /etc/cdi/nvidia.yaml mounts"), "{found}");
        fake.file("/etc/docker/daemon.json", r#"{"default-runtime": "nvidia"}"#);
        let (found, fix) = told(beside(&fake.host()), Warn);
        assert!(found.contains("nvidia is Docker's default runtime"), "{found}");
        assert!(fix.ends_with("sublet setup docker --default"), "{fix}");
    }

    #[test]
    fn the_legacy_hook_is_named() {
        let fake = Fake::new();
        fake.file("/usr/share/containers/oci/hooks.d/oci-nvidia-hook.json", "{}");
        assert!(told(beside(&fake.host()), Warn).1.starts_with("rm /usr/share"));
    }
}
