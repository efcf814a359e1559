//! The driver's MPS programs.

use super::{Host, Outcome, pass, shown, warn};

/// Debian's packages; others have them in the driver's own.
const INSTALL: &str = "apt install nvidia-cuda-mps (other distributions: part of the driver's packages)";

/// Whether both are there, and of the driver's version.
pub(super) fn programs(host: &Host<'_>) -> Outcome {
    let Ok(inventory) = &host.inventory else { return pass("unknown without an inventory") };
    let Some(control) = &inventory.driver.mps_control else {
        return warn("nvidia-cuda-mps-control is not installed: no mode mps, no memory limits", INSTALL);
    };
    if !control.with_file_name("nvidia-cuda-mps-server").exists() {
        return warn(format!("{} has no nvidia-cuda-mps-server beside it", shown(control)), INSTALL);
    }
    // The programs themselves do not tell; the server serves no client of another version. dpkg-query prints nothing
    // of a package that it knows by others' dependencies alone.
    let package = (host.ask)(&["dpkg-query", "-W", "-f=${Version}", "nvidia-cuda-mps"]);
    match package {
        Some(version) if !version.is_empty() && !version.contains(&inventory.driver.version) => warn(
            format!(
                "nvidia-cuda-mps is {}, the driver {}",
                crate::text::safe(&version),
                inventory.driver.version
            ),
            "apt install --only-upgrade nvidia-cuda-mps, or load the driver of its version",
        ),
        _ => pass(shown(control)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::Warn;
    use super::super::fixture::{Fake, passed, told};
    use super::*;
    use crate::place::fixture::{device, host};

    #[test]
    fn both_programs_are_needed_in_the_drivers_version() {
        let fake = Fake::new();
        let mut inventory = host(vec![device(0)]);
        inventory.driver.mps_control = None;
        let with = |inventory| Host { inventory: Ok(inventory), ..fake.host() };
        assert!(told(programs(&with(inventory.clone())), Warn).0.contains("is not installed"));
        inventory.driver.mps_control = Some(fake.path("/usr/bin/nvidia-cuda-mps-control"));
        assert!(
            told(programs(&with(inventory.clone())), Warn).0.contains("no nvidia-cuda-mps-server beside it")
        );
        fake.file("/usr/bin/nvidia-cuda-mps-server", "");
        passed(programs(&with(inventory.clone())));
        let other = Host { ask: |_| Some("535.216.03-1".into()), ..with(inventory.clone()) };
        assert!(
            told(programs(&other), Warn).0.starts_with("nvidia-cuda-mps is 535.216.03-1, the driver 580")
        );
        let unpacked = Host { ask: |_| Some(String::new()), ..with(inventory.clone()) };
        passed(programs(&unpacked));
        let same = Host { ask: |_| Some("580.159.04-1".into()), ..with(inventory) };
        passed(programs(&same));
    }
}
