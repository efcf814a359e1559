//! Whether the services of a stack would all get their shares on this host, one after another.

use std::process::ExitCode;

use schemars::JsonSchema;
use serde::Serialize;

use super::super::reason;
use super::super::tables::{self, Format};
use super::of_share::inventory_for;
use crate::names::Names;
use crate::preview::{Whose, may_be_out_of_date};
use crate::stack::{Fitted, NotPlaced, Outcome, Stack, fit};
use sublet_core::admit::refresh;
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::ledger::Store;
use sublet_core::place::Placement;
use sublet_core::share::{Mode, Percent};
use sublet_core::text::safe;

/// Runs it. The exit code is 1 if a service would not get its share.
pub fn run(stack: &Stack, whose: Whose, format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let mut inventory = inventory_for(whose, config)?;
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let names = Names::learn(&ledger, config);
    let containers = config_files::load_containers()?;
    let look = |inventory: &Inventory| {
        let world = (ledger.clone(), inventory.clone());
        fit(stack, containers.as_ref(), world, &names, whose, config)
    };
    let (mut fitted, mut running) = look(&inventory)?;
    let wants_refresh = |one: &Fitted| matches!(&one.outcome, Outcome::Not(NotPlaced::Refused(error)) if may_be_out_of_date(error, config));
    if fitted.iter().any(wants_refresh) {
        inventory = refresh(config)?;
        (fitted, running) = look(&inventory)?;
    }
    let mut remarks = stack.remarks.clone();
    remarks.extend(super::whose::remark(whose, config).map(|whose| format!("this is about {whose}")));
    let run = || format!("{running} of its containers run already: what they hold was not counted twice");
    remarks.extend((running > 0).then(run));
    for remark in &remarks {
        eprintln!("sublet: note: {remark}");
    }
    let document = Document {
        schema: "sublet.explain-stack/1",
        fits: fitted.iter().all(fits),
        services: fitted.iter().map(|one| ServiceFit::of(one, &inventory)).collect(),
        remarks: &remarks,
    };
    tables::print(format, &document, || {
        let rows = fitted.iter().map(|one| row(one, &inventory)).collect();
        tables::table(&["SERVICE", "GPU", "MODE", "SM", "MEMORY", "RESULT"], rows)
    })?;
    Ok(if document.fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn fits(fitted: &Fitted) -> bool {
    !matches!(fitted.outcome, Outcome::Not(_))
}

/// What is printed as JSON: keys may be added, never changed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ExplainStack")]
pub struct Document<'a> {
    /// `sublet.explain-stack/1`.
    schema: &'static str,
    /// Whether all services would get their shares.
    fits: bool,
    services: Vec<ServiceFit<'a>>,
    /// What is to be known beside it, in sentences.
    remarks: &'a [String],
}

/// A service, or one of its containers.
#[derive(Serialize, JsonSchema)]
struct ServiceFit<'a> {
    service: &'a str,
    /// Whether it would get its share. Also true if it asks for none.
    fits: bool,
    /// Whether it asks for a share.
    asks: bool,
    /// UUIDs of the GPUs or MIG devices.
    gpus: &'a [String],
    /// `time-slice`, `mps`, `mig` or `exclusive`.
    #[schemars(with = "Option<String>")]
    mode: Option<Mode>,
    /// The limit on SMs.
    sm_percent: Option<f64>,
    /// The SMs that it sees, the fewest of its devices.
    sm_count: Option<u64>,
    /// The limit on memory.
    memory_bytes: Option<u64>,
    /// Why it does not fit.
    error: Option<String>,
    /// The word for that; docs/explain.md lists them all.
    reason: Option<&'static str>,
}

impl<'a> ServiceFit<'a> {
    fn of(fitted: &'a Fitted, inventory: &Inventory) -> Self {
        let placement = if let Outcome::Fits(placement) = &fitted.outcome { Some(placement) } else { None };
        let why = if let Outcome::Not(why) = &fitted.outcome { Some(why) } else { None };
        Self {
            service: &fitted.service,
            fits: fits(fitted),
            asks: !matches!(fitted.outcome, Outcome::AsksForNone),
            gpus: placement.map_or(&[][..], |placement| &placement.devices),
            mode: placement.map(|placement| placement.mode),
            sm_percent: placement.and_then(|placement| placement.sm).map(Percent::as_f64),
            sm_count: placement.and_then(|placement| sm_count(placement, inventory)),
            memory_bytes: placement.and_then(|placement| placement.memory_bytes),
            error: why.map(ToString::to_string),
            reason: why.map(reason::of_service),
        }
    }
}

/// The SMs that it sees, the fewest of its devices.
fn sm_count(placement: &Placement, inventory: &Inventory) -> Option<u64> {
    let count = |device: &Device| match placement.sm {
        Some(sm) => device.sms_at(sm),
        None => device.sm_count.map(u64::from),
    };
    placement.devices.iter().filter_map(|uuid| count(inventory.device(uuid)?)).min()
}

fn row(fitted: &Fitted, inventory: &Inventory) -> Vec<String> {
    let dash = || "-".to_owned();
    let no_limit = || "no limit".to_owned();
    let cells = match &fitted.outcome {
        Outcome::Fits(placement) => {
            let number = |uuid: &String| inventory.device(uuid).map_or_else(|| uuid.clone(), Device::number);
            let count = sm_count(placement, inventory).map(|count| format!(" ({count})")).unwrap_or_default();
            [
                placement.devices.iter().map(number).collect::<Vec<_>>().join(", "),
                placement.mode.to_string(),
                placement.sm.map_or_else(no_limit, |sm| format!("{sm} %{count}")),
                placement.memory_bytes.map_or_else(no_limit, |bytes| format!("{} MiB", bytes >> 20)),
                "fits".to_owned(),
            ]
        }
        Outcome::Made(made) => {
            let result = format!("fits: a MIG instance is created, {}", made.0.what);
            [dash(), "mig".to_owned(), dash(), dash(), result]
        }
        Outcome::AsksForNone => [dash(), dash(), dash(), dash(), "asks for no share".to_owned()],
        Outcome::Not(why) => [dash(), dash(), dash(), dash(), format!("NO: {why}")],
    };
    std::iter::once(safe(&fitted.service)).chain(cells).collect()
}
