//! The driver's MPS programs.

use super::{Host, Outcome, fail, pass, shown, warn};
use sublet_core::inventory::{MissingPrograms, MpsPrograms};

/// The package in Debian; other distributions include the programs in the driver's packages.
const INSTALL: &str = "apt install nvidia-cuda-mps (other distributions: part of the driver's packages)";

/// Whether both programs exist in the driver's version. The check uses what [`crate::mps`] would start now.
pub(super) fn programs(host: &Host<'_>) -> Outcome {
    let programs = MpsPrograms::find(&host.config.driver);
    let (control, server) = match programs.both(&host.config.driver) {
        Ok((control, server)) => (shown(control), shown(server)),
        Err(MissingPrograms::Control { .. }) => {
            return warn(
                "nvidia-cuda-mps-control is not installed, so mode mps and memory limits do not work",
                INSTALL,
            );
        }
        Err(missing) => return fail(missing.to_string(), INSTALL),
    };
    let mut found = format!("daemons run {control}, which starts {server}");
    if !programs.others.is_empty() {
        let others: Vec<String> = programs.others.iter().map(|path| shown(path)).collect();
        found = format!("{found}; not used: {}", others.join(", "));
    }
    let Ok(inventory) = &host.inventory else { return pass(found) };
    // The programs do not print their version, and a server serves no client of another version. For a package that is
    // only named in others' dependencies dpkg-query prints nothing.
    let package = (host.ask)(&["dpkg-query", "-W", "-f=${Version}", "nvidia-cuda-mps"]);
    match package {
        Some(version) if !version.is_empty() && !version.contains(&inventory.driver.version) => warn(
            format!(
                "nvidia-cuda-mps is version {}, the driver is {}",
                sublet_core::text::safe(&version),
                inventory.driver.version
            ),
            "apt install --only-upgrade nvidia-cuda-mps, or load the driver of the same version",
        ),
        _ => pass(found),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, passed, told};
    use super::*;

    #[test]
    fn both_programs_are_needed() {
        let fake = Fake::new();
        let control = "/usr/local/nvidia/bin/nvidia-cuda-mps-control";
        assert!(told(programs(&fake.host()), Warn).0.contains("is not installed"));
        fake.program(control);
        let (found, fix) = told(programs(&fake.host()), Fail);
        assert!(found.contains(fake.path(control).to_str().unwrap()), "{found}");
        assert!(found.contains("nvidia-cuda-mps-server, which it starts, is not"), "{found}");
        assert!(fix.starts_with("apt install nvidia-cuda-mps"));
        fake.program("/usr/sbin/nvidia-cuda-mps-server");
        let shown = |path: &str| fake.path(path).display().to_string();
        assert_eq!(
            passed(programs(&fake.host())),
            format!(
                "daemons run {}, which starts {}",
                shown(control),
                shown("/usr/sbin/nvidia-cuda-mps-server")
            )
        );
    }

    #[test]
    fn of_several_copies_the_first_whole_installation_is_used_and_the_others_are_named() {
        let fake = Fake::new();
        for dir in ["/usr/local/nvidia/bin", "/opt/bin"] {
            for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
                fake.program(&format!("{dir}/{name}"));
            }
        }
        fake.program("/usr/bin/nvidia-cuda-mps-control");
        let shown = |path: &str| fake.path(path).display().to_string();
        assert_eq!(
            passed(programs(&fake.host())),
            format!(
                "daemons run {}, which starts {}; not used: {}, {}, {}",
                shown("/usr/local/nvidia/bin/nvidia-cuda-mps-control"),
                shown("/usr/local/nvidia/bin/nvidia-cuda-mps-server"),
                shown("/usr/bin/nvidia-cuda-mps-control"),
                shown("/opt/bin/nvidia-cuda-mps-control"),
                shown("/opt/bin/nvidia-cuda-mps-server"),
            )
        );
    }

    #[test]
    fn the_package_is_of_the_drivers_version() {
        let fake = Fake::new();
        fake.program("/usr/bin/nvidia-cuda-mps-control").program("/usr/sbin/nvidia-cuda-mps-server");
        let other = Host { ask: |_| Some("535.216.03-1".into()), ..fake.host() };
        assert!(
            told(programs(&other), Warn)
                .0
                .starts_with("nvidia-cuda-mps is version 535.216.03-1, the driver is 580")
        );
        passed(programs(&Host { ask: |_| Some(String::new()), ..fake.host() }));
        passed(programs(&Host { ask: |_| Some("580.159.04-1".into()), ..fake.host() }));
        passed(programs(&Host { inventory: Err("no driver".into()), ..fake.host() }));
    }
}
