//! `sublet status`: devices, leases, MPS daemons; `--last-error`: why the last container was refused.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::lease_table::{self, word};
use super::tables::{self, Format};
use super::user_view::Own;
use crate::mps_daemons::{self, Listed};
use crate::names::Names;
use sublet_core::admit::{confirmed_inventory, is_remote};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory, MigDevice};
use sublet_core::ledger::{DynamicInstance, Ledger, Store};
use sublet_core::place::bookings;
use sublet_core::share::Mode;
use sublet_core::text::safe;

/// Arguments of `sublet status`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Output format
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Show why the last container was refused
    #[arg(long)]
    last_error: bool,
}

/// Runs it.
///
/// # Errors
/// There is no driver, or no ledger.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if arguments.last_error {
        return last_error(arguments.format, config);
    }
    let ledger = super::settled_ledger(config)?;
    let inventory = confirmed_inventory(config)?;
    let names = Names::learn(&ledger, config);
    let daemons = mps_daemons::list(&Store::open(&config.state_dir)?, config)?;
    let own = is_remote(config).then(|| Own::ask(config));
    match arguments.format {
        Format::Json => {
            let mut document = document(&inventory, &ledger, &names, &daemons, config);
            if let Some(own) = own {
                document["own"] = json!(own);
            }
            tables::json(&document)?;
        }
        Format::Table => {
            print_tables(&inventory, &ledger, &names, &daemons, config);
            if let Some(own) = own {
                println!("\n{own}");
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn last_error(format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let last = super::own_refusals(config).pop();
    match (format, last) {
        (Format::Json, last) => tables::json(&last)?,
        (Format::Table, None) if is_remote(config) => println!("No container of yours has been refused."),
        (Format::Table, None) => println!("No container has been refused since boot."),
        (Format::Table, Some(last)) => {
            println!("{}  container {}: {}", tables::timestamp(last.time), last.container_id, last.reason);
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The schema `sublet.status/1`: keys may be added, never changed.
fn document(
    inventory: &Inventory,
    ledger: &Ledger,
    names: &Names,
    daemons: &[Listed],
    config: &Config,
) -> Value {
    let device = |device: &Device| device_json(device, inventory, ledger, config);
    json!({
        "schema": "sublet.status/1",
        "driver": {"version": inventory.driver.version, "simulated": inventory.driver.simulated},
        "devices": inventory.gpus().map(device).collect::<Vec<_>>(),
        "leases": lease_table::json(inventory, ledger, names),
        "mps": daemons,
        "guard": super::guard_report::document(config),
        "mig_made": ledger.mig.dynamic_instances.iter().map(|made| made_json(made, ledger)).collect::<Vec<_>>(),
    })
}

/// An instance that was created for a container.
fn made_json(made: &DynamicInstance, ledger: &Ledger) -> Value {
    let state = match (&made.awaited, made.going) {
        (_, true) => "going",
        (Some(_), false) if made.uuid.is_none() => "making",
        (Some(_), false) => "awaited",
        (None, false) if ledger.needs(made) => "leased",
        (None, false) => "left",
    };
    json!({
        "gpu": made.gpu,
        "profile": made.name,
        "placement": made.placement,
        "uuid": made.uuid,
        "state": state,
        "error": made.stuck,
    })
}

fn device_json(device: &Device, inventory: &Inventory, ledger: &Ledger, config: &Config) -> Value {
    let bookings = bookings(device, ledger, config);
    let mig = |(device, part): (&Device, &MigDevice)| mig_json(device, part, ledger, config);
    json!({
        "uuid": device.uuid,
        "index": device.index,
        "minor": device.minor,
        "name": device.name,
        "mode": mode(device, bookings.used_as),
        "memory_bytes": device.memory_bytes,
        "free": {"sm_percent": bookings.sm_free.as_f64(), "memory_bytes": bookings.memory_free},
        "mig_enabled": device.mig_enabled,
        "mig": inventory.mig_devices_of(&device.uuid).map(mig).collect::<Vec<_>>(),
        "drained": ledger.drained.contains(&device.uuid),
    })
}

/// What is free belongs to the GPU instance: its compute instances share its memory.
fn mig_json(device: &Device, part: &MigDevice, ledger: &Ledger, config: &Config) -> Value {
    let bookings = bookings(device, ledger, config);
    json!({
        "uuid": device.uuid,
        "profile": part.profile,
        "gi": part.gi,
        "ci": part.ci,
        "free": bookings.leases == 0,
        "number": device.number(),
        "mode": mode(device, bookings.used_as),
        "memory_bytes": device.memory_bytes,
        "sm_percent_free": bookings.sm_free.as_f64(),
        "memory_bytes_free": bookings.memory_free,
        "drained": ledger.drained.iter().any(|drained| *drained == device.uuid || drained == device.gpu()),
        "fault": part.fault,
        "dynamic": ledger.dynamic_instance(device).is_some(),
    })
}

fn mode(device: &Device, used_as: Option<Mode>) -> &'static str {
    if device.mig_enabled && !device.is_mig() { "mig" } else { used_as.map_or("idle", Mode::as_str) }
}

fn print_tables(inventory: &Inventory, ledger: &Ledger, names: &Names, daemons: &[Listed], config: &Config) {
    let simulated = if inventory.driver.simulated { "  SIMULATED" } else { "" };
    println!("Driver {}{simulated}\n", inventory.driver.version);
    println!("{}", device_table(inventory, ledger, config));
    println!("\n{}", lease_table::table(inventory, ledger, names, tables::terminal_width()));
    if !daemons.is_empty() {
        println!("\n{}", daemon_table(daemons, inventory));
    }
    for (made, why) in
        ledger.mig.dynamic_instances.iter().filter_map(|made| Some((made, made.stuck.as_ref()?)))
    {
        println!(
            "\nMIG instance {} of GPU {} was created for a container that has ended, and cannot be \
             destroyed yet: {}; every sublet command tries again",
            made.label(),
            safe(&made.gpu),
            safe(why)
        );
    }
    println!("\n{}", super::guard_report::lines(config).join("\n"));
}

fn device_table(inventory: &Inventory, ledger: &Ledger, config: &Config) -> String {
    let row = |device: &Device| {
        let bookings = bookings(device, ledger, config);
        let mut mode = mode(device, bookings.used_as).to_owned();
        if ledger.drained.iter().any(|drained| *drained == device.uuid || drained == device.gpu()) {
            mode.push_str(" (drained)");
        }
        vec![
            device.number(),
            device.kind().to_owned(),
            device.uuid.clone(),
            mode,
            bookings.leases.to_string(),
            format!("{} %", bookings.sm_free),
            format!("{} of {}", tables::memory(bookings.memory_free), tables::memory(device.memory_bytes)),
        ]
    };
    let rows = inventory.devices.iter().map(row).collect();
    tables::table(&["GPU", "NAME", "UUID", "MODE", "LEASES", "SM FREE", "MEMORY FREE"], rows)
}

/// The table of MPS daemons.
pub(super) fn daemon_table(daemons: &[Listed], inventory: &Inventory) -> String {
    let or_dash = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
    let row = |daemon: &Listed| {
        vec![
            daemon.key.to_string(),
            daemon.devices.iter().map(|uuid| device_label(uuid, inventory)).collect::<Vec<_>>().join(", "),
            daemon_state(daemon),
            or_dash(daemon.pid.map(|pid| pid.to_string())),
            format!("{} %", daemon.ceiling_percent),
            tables::memory_limit(daemon.ceiling_memory_bytes),
            or_dash(daemon.clients.map(|clients| clients.to_string())),
        ]
    };
    tables::table(
        &["MPS DAEMON", "GPU", "STATE", "PID", "SM CEILING", "MEMORY CEILING", "CLIENTS"],
        daemons.iter().map(row).collect(),
    )
}

/// The state, with the time that the daemon still waits for a lease.
fn daemon_state(daemon: &Listed) -> String {
    let state = word(&daemon.state);
    match (daemon.idle_seconds, daemon.ends_in_seconds) {
        (None, _) => state,
        (Some(idle), None) => format!("{state}, idle for {idle} s"),
        (Some(_), Some(left)) => format!("{state}, idle, ends in {left} s"),
    }
}

fn device_label(uuid: &str, inventory: &Inventory) -> String {
    inventory.device(uuid).map_or_else(|| uuid.to_owned(), Device::number)
}
