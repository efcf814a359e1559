//! Whether the services of a stack would all get their shares on this host, one after another.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::super::reason;
use super::super::tables::{self, Format};
use super::of_share::inventory_for;
use crate::names::Names;
use crate::preview::Whose;
use crate::stack::{Fitted, NotPlaced, Outcome, Stack, fit};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::Store;
use sublet_core::place::Placement;
use sublet_core::share::Percent;
use sublet_core::text::safe;

/// Runs it. The exit code is 1 if a service would not get its share.
///
/// # Errors
/// There is no driver, or no ledger.
pub fn run(stack: &Stack, whose: Whose, format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let inventory = inventory_for(whose, config)?;
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let names = Names::learn(&ledger, config);
    let containers = config_files::load_containers()?;
    let (fitted, running) =
        fit(stack, containers.as_ref(), (ledger, inventory.clone()), &names, whose, config)?;
    let mut remarks = stack.remarks.clone();
    remarks.extend(super::whose::remark(whose, config).map(|whose| format!("this is about {whose}")));
    if running > 0 {
        remarks
            .push(format!("{running} of its containers run already: what they hold was not counted twice"));
    }
    for remark in &remarks {
        eprintln!("sublet: note: {remark}");
    }
    match format {
        Format::Json => tables::json(&document(&fitted, &remarks, &inventory))?,
        Format::Table => println!("{}", table(&fitted, &inventory)),
    }
    Ok(if fitted.iter().all(fits) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fits(fitted: &Fitted) -> bool {
    !matches!(fitted.outcome, Outcome::Not(_))
}

/// The schema `sublet.explain-stack/1`: keys may be added, never changed.
fn document(fitted: &[Fitted], remarks: &[String], inventory: &Inventory) -> Value {
    json!({
        "schema": "sublet.explain-stack/1",
        "fits": fitted.iter().all(fits),
        "services": fitted.iter().map(|one| element(one, inventory)).collect::<Vec<_>>(),
        "remarks": remarks,
    })
}

fn element(fitted: &Fitted, inventory: &Inventory) -> Value {
    let placement = match &fitted.outcome {
        Outcome::Fits(placement) => Some(placement),
        _ => None,
    };
    let (error, reason) = match &fitted.outcome {
        Outcome::Not(why) => (Some(why.to_string()), Some(reason::of_service(why))),
        _ => (None, None),
    };
    json!({
        "service": fitted.service,
        "fits": fits(fitted),
        "asks": !matches!(fitted.outcome, Outcome::AsksForNone),
        "gpus": placement.map_or(&[][..], |placement| &placement.devices),
        "mode": placement.map(|placement| placement.mode),
        "sm_percent": placement.and_then(|placement| placement.sm).map(Percent::as_f64),
        "sm_count": placement.and_then(|placement| sm_count(placement, inventory)),
        "memory_bytes": placement.and_then(|placement| placement.memory_bytes),
        "error": error,
        "reason": reason,
    })
}

/// The SMs that it sees, the fewest of its devices.
fn sm_count(placement: &Placement, inventory: &Inventory) -> Option<u64> {
    let count = |device: &Device| match placement.sm {
        Some(sm) => device.sms_at(sm),
        None => device.sm_count.map(u64::from),
    };
    placement.devices.iter().filter_map(|uuid| count(inventory.device(uuid)?)).min()
}

fn table(fitted: &[Fitted], inventory: &Inventory) -> String {
    let rows = fitted.iter().map(|one| row(one, inventory)).collect();
    tables::table(&["SERVICE", "GPU", "MODE", "SM", "MEMORY", "RESULT"], rows)
}

fn row(fitted: &Fitted, inventory: &Inventory) -> Vec<String> {
    let dash = || "-".to_owned();
    let mut row = vec![safe(&fitted.service)];
    match &fitted.outcome {
        Outcome::Fits(placement) => {
            let number = |uuid: &String| inventory.device(uuid).map_or_else(|| uuid.clone(), Device::number);
            let count = sm_count(placement, inventory).map(|count| format!(" ({count})")).unwrap_or_default();
            row.extend([
                placement.devices.iter().map(number).collect::<Vec<_>>().join(", "),
                placement.mode.to_string(),
                placement.sm.map_or_else(|| "no limit".to_owned(), |sm| format!("{sm} %{count}")),
                placement
                    .memory_bytes
                    .map_or_else(|| "no limit".to_owned(), |bytes| format!("{} MiB", bytes >> 20)),
                "fits".to_owned(),
            ]);
        }
        Outcome::Made(what) => {
            row.extend([
                dash(),
                "mig".to_owned(),
                dash(),
                dash(),
                format!("fits: a MIG instance is created, {what}"),
            ]);
        }
        Outcome::AsksForNone => row.extend([dash(), dash(), dash(), dash(), "asks for no share".to_owned()]),
        Outcome::Not(why) => row.extend([dash(), dash(), dash(), dash(), does_not_fit(why)]),
    }
    row
}

fn does_not_fit(why: &NotPlaced) -> String {
    format!("NO: {why}")
}
