//! `sublet mig list|plan|apply|assert|export`: the MIG instances of GPUs, and layout files for them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Format};
use super::{mig_dynamic, mig_list};
use crate::mig::{self, ApplyError, Fence, Gpu, Layout, Nvml, Plan, Target, Uninterrupted};
use sublet_core::admit::{self, Local, fresh_inventory};
use sublet_core::config::Config;
use sublet_core::ledger::{Ledger, Store};

/// Subcommands of `sublet mig`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the MIG instances of each GPU, and the profiles it offers
    List {
        /// Output format
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Show what `apply` would do and what prevents it; changes nothing
    Plan {
        #[command(flatten)]
        file: LayoutFile,
        /// Output format
        #[arg(long, value_enum, default_value_t)]
        format: Format,
    },
    /// Create and destroy instances as a layout file says. Instances in use stay; all steps are done or none
    Apply {
        #[command(flatten)]
        file: LayoutFile,
        /// Reset a GPU if switching its MIG mode needs it
        #[arg(long)]
        allow_reset: bool,
    },
    /// Check a layout file: exit code 0 if the GPUs match it, 1 if not
    Assert {
        #[command(flatten)]
        file: LayoutFile,
    },
    /// Print the current instances as a layout file
    Export,
    /// Create an instance for a container; sublet's own programs call this
    #[command(hide = true)]
    Make,
    /// Destroy instances created for containers that have ended; sublet's own programs call this
    #[command(hide = true)]
    Clear,
}

/// Which layout.
#[derive(Debug, clap::Args)]
pub struct LayoutFile {
    /// A layout file in TOML, or in mig-parted's YAML; default: [mig] layout of the configuration
    file: Option<PathBuf>,
    /// The name of a configuration in mig-parted's YAML
    #[arg(long)]
    name: Option<String>,
}

/// Runs it.
///
/// # Errors
/// There is no driver, or the layout is invalid or does not fit these GPUs.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::List { format } => mig_list::run(*format, config),
        Command::Plan { file, format } => show(file, *format, config),
        Command::Apply { file, allow_reset } => apply(file, *allow_reset, config),
        Command::Assert { file } => assert(file, config),
        Command::Make => mig_dynamic::make(config),
        Command::Clear => mig_dynamic::clear(config),
        Command::Export => {
            let ledger = super::settled_ledger(config)?;
            let inventory = fresh_inventory(config)?;
            print!(
                "{}",
                mig::export(&settled(
                    &mig::seen(&mut Nvml::open(config, &inventory)?, &inventory, &ledger)?,
                    &ledger
                ))
            );
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The layout asked for; `None` if none is named or configured.
fn read(file: &LayoutFile, config: &Config) -> anyhow::Result<Layout> {
    let path: Option<&Path> = file.file.as_deref().or(config.mig.layout.as_deref());
    let path = path.context("no layout is given: name a file, or set [mig] layout in the configuration")?;
    Ok(Layout::read(path, file.name.as_deref())?)
}

/// The GPUs without instances that were created for containers; those are removed automatically.
fn settled(gpus: &[Gpu], ledger: &Ledger) -> Vec<Gpu> {
    let mut gpus = gpus.to_vec();
    for gpu in &mut gpus {
        let made = mig::made(gpu, ledger);
        gpu.instances.retain(|one| !made.contains(&one.span));
    }
    gpus
}

/// The plans for all GPUs that have a target.
fn plans(gpus: &[Gpu], targets: &[Target], ledger: &Ledger) -> Vec<Result<Plan, mig::Obstacle>> {
    let gpu = |target: &Target| gpus.iter().find(|gpu| gpu.uuid == target.gpu);
    let plan = |gpu: &Gpu, target: &Target| {
        // An instance created for a container does not count as a difference, unless it is in the way.
        let around = mig::plan(gpu, &target.beside(gpu, &mig::made(gpu, ledger)));
        around.or_else(|_| mig::plan(gpu, target))
    };
    targets.iter().filter_map(|target| Some(plan(gpu(target)?, target))).collect()
}

/// What `apply` would find and do now.
fn planned(file: &LayoutFile, config: &Config) -> anyhow::Result<Vec<Result<Plan, mig::Obstacle>>> {
    let layout = read(file, config)?;
    let ledger = super::settled_ledger(config)?;
    let inventory = fresh_inventory(config)?;
    let gpus = mig::seen(&mut Nvml::open(config, &inventory)?, &inventory, &ledger)?;
    let targets = mig::targets(&layout, &gpus, &inventory, config)?;
    Ok(plans(&gpus, &targets, &ledger))
}

fn show(file: &LayoutFile, format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let plans = planned(file, config)?;
    let refused = plans.iter().any(Result::is_err);
    match format {
        Format::Json => tables::json(&plans.iter().map(Planned::of).collect::<Vec<_>>())?,
        Format::Table if plans.is_empty() => println!("The layout matches no GPU of this host."),
        Format::Table => plans.iter().for_each(|plan| println!("{}", lines(plan))),
    }
    Ok(if refused { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What `apply` would do to a GPU, or why it would do nothing.
#[derive(Serialize, JsonSchema)]
pub struct Planned {
    /// Why there is no plan; null: there is one.
    obstacle: Option<String>,
    #[serde(flatten)]
    plan: Option<PlannedSteps>,
}

#[derive(Serialize, JsonSchema)]
struct PlannedSteps {
    /// UUID of the GPU.
    gpu: String,
    /// Whether the GPU has to be reset.
    reset: bool,
    /// Each in words, in order; empty: the GPU matches the layout.
    steps: Vec<String>,
}

impl Planned {
    fn of(plan: &Result<Plan, mig::Obstacle>) -> Self {
        let steps = |plan: &Plan| PlannedSteps {
            gpu: plan.gpu.clone(),
            reset: plan.reset,
            steps: plan.steps.iter().map(ToString::to_string).collect(),
        };
        Self { obstacle: plan.as_ref().err().map(ToString::to_string), plan: plan.as_ref().ok().map(steps) }
    }
}

fn lines(plan: &Result<Plan, mig::Obstacle>) -> String {
    match plan {
        Err(obstacle) => obstacle.to_string(),
        Ok(plan) if plan.steps.is_empty() => format!("GPU {}: matches the layout", plan.index),
        Ok(plan) => {
            let reset = if plan.reset { " (needs a reset of the GPU: --allow-reset)" } else { "" };
            let first = format!("GPU {}: {} steps{reset}", plan.index, plan.steps.len());
            let steps = plan.steps.iter().map(|step| format!("  {step}"));
            [first].into_iter().chain(steps).collect::<Vec<_>>().join("\n")
        }
    }
}

fn assert(file: &LayoutFile, config: &Config) -> anyhow::Result<ExitCode> {
    let plans = planned(file, config)?;
    let differ: Vec<_> =
        plans.iter().filter(|plan| !matches!(plan, Ok(plan) if plan.steps.is_empty())).collect();
    for plan in &differ {
        eprintln!("sublet: {}", lines(plan));
    }
    Ok(if differ.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn apply(file: &LayoutFile, allow_reset: bool, config: &Config) -> anyhow::Result<ExitCode> {
    if admit::is_remote(config) {
        bail!("only root can change MIG instances: run `sublet mig apply` as root");
    }
    let layout = read(file, config)?;
    super::settled_ledger(config)?;
    let inventory = fresh_inventory(config)?;
    let store = Store::open(&config.state_dir)?;
    let mut nvml = Nvml::open(config, &inventory)?;
    // Determines which GPUs to fence. Their instances are read again behind the fence.
    let targets = mig::targets(&layout, &nvml.gpus(&inventory)?, &inventory, config)?;
    let uuids: Vec<String> = targets.iter().map(|target| target.gpu.clone()).collect();
    let (fence, ledger, freed) = Fence::raise(&uuids, &store)?;
    Local::new(config).settle(&freed, &store);
    for device in inventory.devices.iter().filter(|device| uuids.iter().any(|gpu| gpu == device.gpu())) {
        mig_dynamic::stop_servers(&device.uuid, &store, config);
    }
    let gpus = mig::seen(&mut nvml, &inventory, &ledger)?;
    let plans = plans(&gpus, &targets, &ledger).into_iter().collect::<Result<Vec<_>, _>>()?;
    let done = change(&plans, &settled(&gpus, &ledger), allow_reset, &mut nvml, config);
    // Leases wait for the fence and then see that the inventory is out of date, so the fence falls before the refresh.
    drop(fence);
    if let Err(error) = crate::refresh::refresh(config) {
        // The next container that starts tries the refresh again.
        eprintln!("sublet: warning: the inventory could not be refreshed: {}", tables::chain(&error));
    }
    Local::new(config).destroy_unneeded(&store);
    done?;
    if layout.path() == before(config) {
        // The file has served its purpose. A change that was killed may have had nothing to undo.
        let _ = std::fs::remove_file(layout.path());
    }
    for plan in &plans {
        println!("{}", if plan.steps.is_empty() { lines(&Ok(plan.clone())) } else { summary(plan) });
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(plan: &Plan) -> String {
    format!("GPU {}: done, {} steps", plan.index, plan.steps.len())
}

/// The file that keeps the instances as they were until the change is over.
fn before(config: &Config) -> PathBuf {
    config.state_dir.join("mig-before.toml")
}

/// Makes the change. The instances as they were are written to a file first, so that a kill cannot lose them.
fn change(
    plans: &[Plan],
    gpus: &[Gpu],
    allow_reset: bool,
    nvml: &mut Nvml,
    config: &Config,
) -> anyhow::Result<()> {
    let changed: Vec<Gpu> =
        gpus.iter().filter(|gpu| plans.iter().any(|plan| plan.gpu == gpu.uuid)).cloned().collect();
    if plans.iter().all(|plan| plan.steps.is_empty()) {
        return Ok(());
    }
    let found = before(config);
    sublet_core::fs::atomic::replace(&found, mig::export(&changed).as_bytes(), 0o644)
        .with_context(|| format!("cannot write {}", found.display()))?;
    let held = Uninterrupted::begin();
    let done = mig::apply(plans, allow_reset, nvml);
    drop(held);
    match done {
        Err(error @ ApplyError::Left { .. }) => {
            let repair = format!(
                "{error}; the instances of before are written in {0}: `sublet mig apply {0}` restores them",
                found.display()
            );
            Err(anyhow::Error::msg(repair))
        }
        done => {
            std::fs::remove_file(&found).with_context(|| format!("cannot remove {}", found.display()))?;
            Ok(done?)
        }
    }
}
