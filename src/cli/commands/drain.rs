//! `sublet drain|undrain`: whether a device takes new leases; and `drain --move`, which moves those that it has.

use anyhow::bail;

use super::status::label;
use crate::mig::uninterrupted;
use crate::names::Names;
use crate::suspend::{SuspendError, move_to};
use crate::terminal::warn;
use sublet_core::admit::{Local, fresh_inventory};
use sublet_core::config::{Config, Policy};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Lease, Store};
use sublet_core::place::bookings;
use sublet_core::text::in_lines;

/// Arguments of both.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Devices: an index, a UUID or its beginning, a PCI bus id, G:M (MIG device M of GPU G), an alias, all
    #[arg(required = true)]
    devices: Vec<String>,
}

/// Arguments of `sublet drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArguments {
    #[command(flatten)]
    all: Arguments,
    /// Move its containers to other GPUs, as sublet move does. Those that cannot be moved stay, and are named; exit code 1
    #[arg(long = "move")]
    moves: bool,
}

/// Drains, and moves containers away.
///
/// # Errors
/// A container stays. The others were moved.
pub fn run_drain(arguments: &DrainArguments, config: &Config) -> anyhow::Result<()> {
    let uuids = set_drained(&arguments.all, true, config)?;
    if !arguments.moves {
        return Ok(());
    }
    let inventory = fresh_inventory(config)?;
    let ledger = super::settled_ledger(config)?;
    let known = Names::learn(&ledger, config);
    let is_there = |lease: &&Lease| {
        let gpus = lease.mig_devices.iter().map(|mig_device| &mig_device.gpu);
        lease.devices.iter().chain(gpus).any(|uuid| uuids.contains(uuid))
    };
    let there: Vec<&Lease> = ledger.leases.iter().filter(is_there).collect();
    let mut stay = 0;
    for lease in &there {
        let name = label(lease, known.of(lease));
        match move_away(lease, &inventory, config) {
            Ok(to) => println!("Moved {name} to {to}."),
            Err(error) => {
                stay += 1;
                eprintln!("sublet: {}", in_lines(&format!("container {name} stays: {error}")));
            }
        }
    }
    if stay > 0 {
        bail!("{stay} of {} containers stay; fix: end them, or wait for their end", there.len());
    }
    Ok(())
}

/// Moves it to the first GPU that has room, in the order of `[placement] policy`. The GPU's name.
fn move_away(lease: &Lease, inventory: &Inventory, config: &Config) -> Result<String, SuspendError> {
    let ledger = Store::open(&config.state_dir)?.read()?;
    let is_candidate =
        |gpu: &&Device| !lease.devices.contains(&gpu.uuid) && !ledger.drained.contains(&gpu.uuid);
    let mut candidates: Vec<&Device> = inventory.gpus().filter(is_candidate).collect();
    candidates.sort_by_key(|gpu| bookings(gpu, &ledger, config).memory_free);
    if config.placement.policy == Policy::Spread {
        candidates.reverse();
    }
    let mut why = None;
    for gpu in candidates {
        match uninterrupted(|| move_to(&lease.id, &gpu.uuid, config)) {
            Ok(_) => return Ok(gpu.label()),
            // Of why none of them takes it, a lack of room says more than another model.
            Err(error @ (SuspendError::Refused(_) | SuspendError::OtherGpu(_))) => {
                let says_more = matches!(error, SuspendError::Refused(_));
                why = why.filter(|_| !says_more).or(Some(error));
            }
            Err(error) => return Err(error),
        }
    }
    Err(why.unwrap_or_else(|| {
        SuspendError::OtherGpu("another GPU; why: this host has none that takes leases".into())
    }))
}

/// Ends that.
pub fn run_undrain(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    set_drained(arguments, false, config).map(drop)
}

/// The UUIDs of the devices.
fn set_drained(arguments: &Arguments, drain: bool, config: &Config) -> anyhow::Result<Vec<String>> {
    let inventory = fresh_inventory(config)?.with_left_out();
    let mut uuids = Vec::new();
    for name in &arguments.devices {
        uuids.extend(super::devices(name, &inventory, config)?.into_iter().map(|device| device.uuid.clone()));
    }
    Local::new(config).update(|ledger| {
        ledger.drained.retain(|uuid| !uuids.contains(uuid));
        if drain {
            ledger.drained.extend(uuids.iter().cloned());
        }
    })?;
    // A daemon that waits for a lease on a drained device has no reason to wait.
    warn(sublet_core::mps::end_overdue(&Store::open(&config.state_dir)?, config));
    let now = if drain { "takes no new lease; its containers go on running" } else { "takes leases again" };
    for uuid in &uuids {
        println!("{uuid} {now}.");
    }
    Ok(uuids)
}
