//! The checks of `sublet doctor`, one function each. Roots and answers are parameters, so that tests can replace
//! them. The checks change nothing.

mod docker;
mod driver;
#[cfg(test)]
mod fake_host;
mod host;
mod leases;
mod podman;
mod slurm;

pub(crate) use host::unknown;
pub(crate) use podman::has_hook;

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::libcuda::{self, MPS_ENABLED, MULTIPROCESSOR_COUNT};
use crate::setup::Ask;
use crate::setup::docker::Dockerd;
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

/// A problem; the outcome has the remedy, too.
struct Wrong(Verdict, String);

impl Wrong {
    fn fix(self, fix: impl Into<String>) -> Outcome {
        Outcome(self.0, self.1, Some(fix.into()))
    }
}

fn warn(found: impl Into<String>) -> Wrong {
    Wrong(Verdict::Warn, found.into())
}

fn fail(found: impl Into<String>) -> Wrong {
    Wrong(Verdict::Fail, found.into())
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
    /// How programs of this host are asked.
    pub ask: Ask,
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
    pub fn of(config: &'a Config, quick: bool, ask: Ask, probe: fn() -> Result<Inventory, String>) -> Self {
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
    ("mps-programs", true, driver::mps_programs),
    ("stray-mps", false, leases::stray_daemons),
    ("toolkit", true, leases::toolkit),
    ("runtimes", true, host::runtimes),
    ("docker", true, docker::docker),
    ("swarm", true, docker::shares),
    ("slurm", false, slurm::jobs),
    ("podman", true, podman::hook),
    ("hook-files", true, podman::precreate),
    ("cgroup", true, host::cgroup),
    ("daemon-reload", true, host::daemon_reload),
    ("serve", true, host::serve),
    ("policy", true, host::policy),
    ("security", false, host::security_modules),
    ("state", true, host::state),
    ("clock", true, host::clock),
    ("leases", true, leases::without_containers),
    ("lost-nodes", true, leases::without_nodes),
    ("unleased", false, leases::containers_without),
];

/// Runs every check, or only the quick ones, in the order in which problems are best fixed.
pub fn run(host: &Host<'_>) -> Vec<Check> {
    let mut checks = Vec::new();
    for (check, _, test) in CHECKS.into_iter().filter(|(_, is_quick, _)| *is_quick || !host.quick) {
        let of_gpus = if check == "inventory" { driver::gpus(host) } else { Vec::new() };
        let outcomes = of_gpus.into_iter().map(|outcome| ("gpu", outcome)).chain([(check, test(host))]);
        checks.extend(outcomes.map(|(check, Outcome(result, found, fix))| Check {
            check,
            result,
            found,
            fix,
        }));
    }
    checks
}

/// All of them in one text.
fn joined(all: impl Iterator<Item = String>, between: &str) -> String {
    all.collect::<Vec<_>>().join(between)
}

/// What a CUDA program sees: the first device, as a context on it does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Seen {
    /// How many devices CUDA lists.
    pub devices: usize,
    /// Streaming multiprocessors that the context may use.
    pub sms: i32,
    /// The memory that can still be allocated.
    pub memory_free_bytes: u64,
    /// The device's memory.
    pub memory_total_bytes: u64,
    /// Whether the context is a client of an MPS server.
    pub mps: bool,
}

/// Creates a context on device 0 and queries it. The context exists until the process ends.
///
/// # Errors
/// There is no libcuda, or it answered with an error; one line.
pub fn look() -> Result<Seen, String> {
    let driver = libcuda::Driver::load()?;
    let devices = driver.count()?;
    let device = driver.context()?;
    let (memory_free_bytes, memory_total_bytes) = driver.memory()?;
    Ok(Seen {
        devices,
        sms: driver.attribute(MULTIPROCESSOR_COUNT, device)?,
        memory_free_bytes,
        memory_total_bytes,
        mps: driver.attribute(MPS_ENABLED, device)? != 0,
    })
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
