//! `sublet drain|undrain`: whether a device takes new leases, and whether a GPU that reported a fault is well again; and
//! `drain --move`, which moves the containers that it has.

use std::fs;
use std::time::SystemTime;

use anyhow::{Context as _, bail};

use super::status::label;
use crate::events::parse_moment;
use crate::mig::uninterrupted;
use crate::names::{Names, user};
use crate::sick_gpus;
use crate::suspend::{SuspendError, move_to};
use crate::terminal::warn;
use sublet_core::admit::{Local, fresh_inventory, refresh};
use sublet_core::config::{Config, Policy};
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::{Drain, LONGEST_REASON, Lease, Ledger, Store, WrongState};
use sublet_core::place::bookings;
use sublet_core::process::epoch_seconds;
use sublet_core::text::{in_lines, safe};

/// Arguments of `sublet drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArguments {
    /// Devices: an index, a UUID or its beginning, a PCI bus id, G:M (MIG device M of GPU G), an alias, all
    #[arg(required = true)]
    devices: Vec<String>,
    /// Why: status, events and refusals show it
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    /// It ends by itself then: 2026-11-23T07:00:00Z, 2026-11-23, or how long from now, as 2h
    #[arg(long, value_name = "TIME", value_parser = parse_until)]
    until: Option<u64>,
    /// Move its containers to other GPUs, as sublet move does. Those that cannot be moved stay, and are named; exit code 1
    #[arg(long = "move")]
    moves: bool,
}

/// Arguments of `sublet undrain`.
#[derive(Debug, clap::Args)]
pub struct UndrainArguments {
    /// Devices: an index, a UUID or its beginning, a PCI bus id, G:M (MIG device M of GPU G), an alias, all
    #[arg(required = true)]
    devices: Vec<String>,
    /// And a GPU that is unhealthy, because it reported a fault, is well again
    #[arg(long)]
    healthy: bool,
}

/// Runs `sublet drain`.
///
/// # Errors
/// A container stays that was to be moved. The others were moved.
pub fn drain(arguments: &DrainArguments, config: &Config) -> anyhow::Result<()> {
    let reason = arguments.reason.chars().take(LONGEST_REASON).collect();
    let (device, since, until) = (String::new(), epoch_seconds(), arguments.until);
    let new = Drain { device, reason, by: user(login_user()), since, until };
    let (uuids, _) = change(&arguments.devices, Some(&new), config)?;
    // A daemon that waits for a lease on a drained device has no reason to wait.
    warn(sublet_core::mps::end_overdue(&Store::open(&config.state_dir)?, config));
    for uuid in &uuids {
        println!("{uuid} takes no new lease; its containers go on running.");
    }
    if arguments.moves { move_containers(&uuids, config) } else { Ok(()) }
}

/// Moves the containers of these devices away.
fn move_containers(uuids: &[String], config: &Config) -> anyhow::Result<()> {
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
            // It has ended meanwhile.
            Err(SuspendError::Ended | SuspendError::State(WrongState::Gone)) => {}
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

/// Runs `sublet undrain`.
pub fn undrain(arguments: &UndrainArguments, config: &Config) -> anyhow::Result<()> {
    let (uuids, inventory) = change(&arguments.devices, None, config)?;
    if arguments.healthy {
        let all: Vec<String> = inventory.gpus().map(|gpu| gpu.uuid.clone()).collect();
        if !sick_gpus::declare_healthy(&uuids, &all, config).context("health.json")?.is_empty() {
            refresh(config)?;
        }
    }
    let now = fresh_inventory(config)?;
    for uuid in &uuids {
        match now.left_out.iter().find(|gone| gone.gpu.uuid == *uuid) {
            Some(gone) => println!("{uuid} is drained no longer. {}.", gone.sentence()),
            None => println!("{uuid} takes leases again."),
        }
    }
    Ok(())
}

/// Drains the devices as `new` says, or no longer. Returns their UUIDs, and all devices of the host.
fn change(
    names: &[String],
    new: Option<&Drain>,
    config: &Config,
) -> anyhow::Result<(Vec<String>, Inventory)> {
    let inventory = fresh_inventory(config)?.with_left_out();
    let all: Vec<String> = inventory.devices.iter().map(|device| device.uuid.clone()).collect();
    let drained = Store::open(&config.state_dir)?.peek()?.drained;
    let mut uuids = Vec::new();
    for name in names {
        // Of a device that is gone for good only the UUID is left.
        if new.is_none() && drained.contains(name) {
            uuids.push(name.clone());
            continue;
        }
        uuids.extend(super::devices(name, &inventory, config)?.into_iter().map(|device| device.uuid.clone()));
    }
    let new = uuids.iter().filter_map(|uuid| Some(Drain { device: uuid.clone(), ..new?.clone() })).collect();
    let change = |ledger: &mut Ledger| ledger.drain(&config.lasting_dir(), [&all, &uuids], new);
    Local::new(config)
        .update(change)?
        .context("nothing was changed, because it would not last over a reboot")?;
    Ok((uuids, inventory))
}

/// Who logged in, also where they became root since (`/proc/PID/loginuid`, which nobody can change again); else this process's
/// user.
fn login_user() -> u32 {
    let text = fs::read_to_string("/proc/self/loginuid").unwrap_or_default();
    let uid = text.trim().parse().ok().filter(|uid| *uid != u32::MAX);
    uid.unwrap_or_else(|| nix::unistd::getuid().as_raw())
}

/// A moment that is to come, in seconds since the epoch.
fn parse_until(text: &str) -> Result<u64, String> {
    let now = SystemTime::now();
    let ahead = humantime::parse_duration(text).ok().and_then(|ahead| now.checked_add(ahead));
    let until = ahead.map_or_else(|| parse_moment(text), Ok)?;
    let left = until.duration_since(now).map_err(|_| format!("{} has passed", safe(text)))?;
    Ok(epoch_seconds().saturating_add(left.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_a_date_or_a_duration_from_now() {
        let now = epoch_seconds();
        let in_two_hours = parse_until("2h").unwrap();
        assert!((now + 7200..now + 7300).contains(&in_two_hours), "{in_two_hours}");
        let then = parse_until("2126-11-23T07:00:00Z").unwrap();
        assert!((4_951_090_790..=4_951_090_800).contains(&then), "{then}");
        for text in ["2020-01-01", "soon", "", "\u{1b}[2J", "99999999999999years"] {
            assert!(parse_until(text).is_err(), "{text}");
        }
        assert!(parse_until("\u{1b}[2J").unwrap_err().starts_with("\\u{1b}[2J is no time"));
    }
}
