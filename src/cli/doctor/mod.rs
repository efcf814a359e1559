//! The checks of `sublet doctor`, one function each. Roots and answers are parameters, so that tests can replace
//! them. The checks change nothing.

pub mod cuda;
mod docker;
mod driver;
#[cfg(test)]
mod fake_host;
mod host;
mod leases;
mod mps;
mod podman;
mod security;
mod slurm;
mod stray;
mod swarm;
mod toolkit;

pub(crate) use host::unknown;

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::Serialize;

use crate::setup::dockerd::Dockerd;
use crate::setup::engine_files::version;
use sublet_core::config::Config;
use sublet_core::config_files::{self, Containers};
use sublet_core::fs::under;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Ledger, LedgerError, Store};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// There is nothing to check here, or it cannot be known.
    Skip,
    /// As it should be.
    Pass,
    /// Something does not work, or may stop working.
    Warn,
    /// No container gets a share, or none of an engine that is installed.
    Fail,
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Check {
    /// The check's name, such as `device-nodes`.
    pub check: &'static str,
    /// The result.
    pub result: Verdict,
    /// What was found, in one line.
    pub found: String,
    /// The command to type or the action to take.
    pub fix: Option<String>,
}

/// A [`Check`] without its name.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outcome(Verdict, String, Option<String>);

fn pass(found: impl Into<String>) -> Outcome {
    Outcome(Verdict::Pass, found.into(), None)
}

fn skip(found: impl Into<String>) -> Outcome {
    Outcome(Verdict::Skip, found.into(), None)
}

fn warn(found: impl Into<String>, fix: impl Into<String>) -> Outcome {
    Outcome(Verdict::Warn, found.into(), Some(fix.into()))
}

fn fail(found: impl Into<String>, fix: impl Into<String>) -> Outcome {
    Outcome(Verdict::Fail, found.into(), Some(fix.into()))
}

/// The host that is checked.
#[derive(Debug)]
pub struct Host<'a> {
    /// The root of /etc, /proc and /usr; the driver's own files are below `[driver] root`.
    pub root: PathBuf,
    /// The configuration in force.
    pub config: &'a Config,
    /// Whether to read files only.
    pub quick: bool,
    /// Runs a program of this host and returns its standard output; `None` if it does not exist or fails.
    pub ask: fn(&[&str]) -> Option<String>,
    /// The driver's inventory, current or as last written, or why there is none.
    pub inventory: Result<Inventory, String>,
    /// The ledger as recorded.
    pub ledger: Result<Ledger, String>,
    /// The rules of containers.toml, if there is one.
    pub containers: Result<Option<Containers>, String>,
}

impl<'a> Host<'a> {
    /// This machine. `probe` asks NVML, whose calls may hang with the driver. With `quick` the inventory as last
    /// written is used and NVML is not asked.
    pub fn of(
        config: &'a Config,
        quick: bool,
        ask: fn(&[&str]) -> Option<String>,
        probe: fn() -> Result<Inventory, String>,
    ) -> Self {
        let inventory =
            if quick { inventory::load(config).map_err(|error| error.to_string()) } else { probe() };
        let ledger = || -> Result<Ledger, LedgerError> {
            // Opening the store would create the directory.
            if !config.state_dir.exists() {
                return Ok(Ledger::empty(""));
            }
            let store = Store::open(&config.state_dir)?;
            let ledger = store.peek()?;
            // Whether a container's lease is in a ledger on another file system. Only a check has the time to look for that
            // where there is a ledger.
            store.check_containers(&ledger)?;
            Ok(ledger)
        };
        Self {
            root: PathBuf::from("/"),
            config,
            quick,
            ask: if quick { |_| None } else { ask },
            inventory,
            ledger: ledger().map_err(|error| error.to_string()),
            containers: config_files::load_containers().map_err(|error| error.to_string()),
        }
    }

    fn at(&self, path: &str) -> PathBuf {
        under(&self.root, path)
    }

    fn driver(&self, path: &str) -> PathBuf {
        under(&self.config.driver.root, path)
    }

    fn text(&self, path: &str) -> Option<String> {
        std::fs::read(self.at(path)).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// How dockerd is started here, and its daemon.json.
    fn dockerd(&self) -> (Dockerd, String) {
        let dockerd = Dockerd::of(&self.root, self.ask, None);
        let text = dockerd.file().to_str().and_then(|file| self.text(file));
        (dockerd, text.unwrap_or_else(|| "{}".to_owned()))
    }

    /// A program's file; without a slash in its name, in the directories of administrators' PATH.
    fn program(&self, name: &str) -> Option<PathBuf> {
        if name.contains('/') {
            // Another path than an absolute one means something else in each engine's working directory.
            return Some(self.at(name)).filter(|path| name.starts_with('/') && path.is_file());
        }
        let directories = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];
        directories.iter().map(|dir| self.at(dir).join(name)).find(|path| path.is_file())
    }
}

type Test = fn(&Host<'_>) -> Outcome;

/// Every check. Those with `true` read only files and are part of a quick check.
const CHECKS: [(&str, bool, Test); 30] = [
    ("kernel", true, host::kernel),
    ("driver", true, driver::loaded),
    ("kernel-modules", true, driver::modules),
    ("device-nodes", true, driver::nodes),
    ("fabric-manager", true, driver::fabric),
    ("nvml", false, driver::nvml),
    ("inventory", true, driver::inventory),
    ("cap-nodes", true, driver::caps),
    ("dev-char", true, driver::links),
    ("persistence", true, driver::persistence),
    ("compute-modes", true, driver::compute_modes),
    ("mps-programs", true, mps::programs),
    ("stray-mps", false, stray::daemons),
    ("toolkit", true, toolkit::beside),
    ("runtimes", true, host::runtimes),
    ("docker", true, docker::docker),
    ("swarm", true, swarm::shares),
    ("slurm", false, slurm::jobs),
    ("podman", true, podman::hook),
    ("hook-files", true, podman::precreate),
    ("cgroup", true, host::cgroup),
    ("daemon-reload", true, host::daemon_reload),
    ("serve", true, host::serve),
    ("policy", true, host::policy),
    ("security", false, security::modules),
    ("state", true, host::state),
    ("clock", true, host::clock),
    ("leases", true, leases::without_containers),
    ("lost-nodes", true, leases::without_nodes),
    ("unleased", false, leases::containers_without),
];

/// Runs every check, or only the quick ones, in the order in which problems are best fixed.
pub fn run(host: &Host<'_>) -> Vec<Check> {
    let chosen = CHECKS.iter().filter(|(_, is_quick, _)| *is_quick || !host.quick);
    let run = |(check, _, test): &(&'static str, bool, Test)| {
        let Outcome(result, found, fix) = test(host);
        Check { check, result, found, fix }
    };
    chosen.map(run).collect()
}

/// A path as messages show it.
fn shown(path: &Path) -> String {
    sublet_core::text::safe(&path.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = CHECKS.iter().map(|(name, ..)| name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), CHECKS.len());
    }
}
