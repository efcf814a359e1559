//! The nodes of a container that moves: those of every GPU that its processes have known while a step is taken, and of its own
//! alone otherwise. A child of this program does it, `sublet nodes`: it has one thread, and no more rights than the hook that gives
//! a container its nodes when that is created.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::driver::{bound_child, hold};
use sublet_core::config_files;
use sublet_core::grant::gpu_nodes;
use sublet_core::inventory;
use sublet_core::ledger::{Lease, LeaseId, Store};
use sublet_core::oci;
use sublet_core::process::confine::{self, Rights, Side};
use sublet_core::process::{Process, sublet};
use sublet_core::text::safe;

/// systemd may be asked twice, for ten seconds each.
const LIMIT: Duration = Duration::from_secs(40);

/// Arguments of `sublet nodes`, which is no command for people.
#[derive(Debug, clap::Args)]
pub struct NodesArguments {
    lease: String,
    owner_pid: i32,
    owner_start_time: u64,
    /// The GPUs whose nodes the container is to have, of those that it has or has known
    gpus: Vec<String>,
}

/// Has a child give the container of `lease` the nodes of `gpus`, and take those of the others away that it knows. `owner` takes the
/// step.
pub(super) fn set_nodes(lease: &LeaseId, gpus: &[&str], owner: Process) -> Result<(), String> {
    let [pid, start_time] = [owner.pid.to_string(), owner.start_time.to_string()];
    let words = [&["nodes", lease.as_str(), &pid, &start_time], gpus].concat();
    let set = sublet::run(&words, LIMIT).map(drop);
    set.map_err(|error| format!("its device nodes cannot be changed: {error}"))
}

/// The child.
///
/// # Errors
/// The nodes are not as they are to be.
pub fn run(arguments: &NodesArguments) -> anyhow::Result<()> {
    // The process that does the work ends with this one.
    bound_child(u32::try_from(LIMIT.as_secs())?)?;
    let systemctl = |words: &[&str]| -> Option<Command> {
        if let ["systemctl", arguments @ ..] = words { oci::systemctl(arguments) } else { None }
    };
    match confine::fork_worker(Rights::Running, systemctl)? {
        Side::Worker => change(arguments),
        Side::Waited(true) => Ok(()),
        // It has said why.
        Side::Waited(false) => std::process::exit(1),
    }
}

fn change(arguments: &NodesArguments) -> anyhow::Result<()> {
    let config = config_files::load()?;
    let ledger = Store::open(&config.state_dir)?.read()?;
    let id = LeaseId::parse(&arguments.lease).context("no lease id")?;
    let lease = ledger.lease(&id).context("its lease has ended")?;
    let init = lease.init.as_ref().context("its first process is not known")?.process;
    // As for the driver's calls: a change that nobody waits for any more must not come after another one.
    let _held = hold(&config.state_dir.join("suspend.lock"), init.pid)?;
    let owner = Process { pid: arguments.owner_pid, start_time: arguments.owner_start_time };
    ensure!(owner.is_alive(), "the process that asks for it has ended");
    let inventory = inventory::last(&config)?.with_left_out();
    let mut gpus = Vec::new();
    for uuid in all_gpus(lease) {
        let is_given = arguments.gpus.iter().any(|given| given == uuid);
        match inventory.device(uuid) {
            Some(gpu) => gpus.push(gpu_nodes(gpu, is_given, &config)),
            None if is_given => bail!("GPU {}, which its processes have known, is gone", safe(uuid)),
            None => {}
        }
    }
    Ok(oci::set_gpus(&gpus, init, !lease.brokered)?)
}

/// The GPUs that the container has, and those that its processes have known.
pub(super) fn all_gpus(lease: &Lease) -> BTreeSet<&str> {
    lease.devices.iter().chain(&lease.known).map(String::as_str).collect()
}
