//! `sublet mig list|plan|apply|assert|export`: the MIG instances of GPUs, and layout files for them.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail, ensure};
use schemars::JsonSchema;
use serde::Serialize;

use super::mig_list;
use super::tables::{self, Format, Output};
use crate::mig::{self, ApplyError, Fence, Gpu, Layout, Making, NotMade, Nvml, Plan, Target};
use crate::terminal::warn;
use sublet_core::admit::{Local, MakeAnswer, MakeAsk, fresh_inventory, is_remote};
use sublet_core::config::Config;
use sublet_core::inventory::{self, Device};
use sublet_core::ledger::{Ledger, Store};
use sublet_core::text::safe;

/// Subcommands of `sublet mig`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// List the MIG instances of each GPU, and the profiles it offers
    List(Output),
    /// Show what apply would do and what prevents it; changes nothing
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
    /// Check a layout file: exit code 0 if the GPUs match it, 1 if not, or if one does not tell
    Assert(LayoutFile),
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
        Command::List(Output { format }) => mig_list::run(*format, config)?,
        Command::Plan { file, format } => return show(file, *format, config),
        Command::Assert(file) => return assert(file, config),
        Command::Apply { file, allow_reset } => apply(file, *allow_reset, config)?,
        Command::Make => make(config)?,
        Command::Clear => changed(&Store::open(&config.state_dir)?, config, None)?,
        Command::Export => {
            let (gpus, _, ledger) = mig_list::seen(config)?;
            print!("{}", mig::export(&settled(&gpus, &ledger)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The layout asked for; `None` if none is named or configured.
fn read(file: &LayoutFile, config: &Config) -> anyhow::Result<Layout> {
    let path: Option<&Path> = file.file.as_deref().or(config.mig.layout.as_deref());
    let path = path.context("no layout is given: name a file, or set [mig] layout in the configuration")?;
    Layout::read(path, file.name.as_deref())
}

/// The GPUs without instances that were created for containers; those are removed automatically.
fn settled(gpus: &[Gpu], ledger: &Ledger) -> Vec<Gpu> {
    let mut gpus = gpus.to_vec();
    for gpu in &mut gpus {
        let made = gpu.made(ledger);
        gpu.instances.retain(|one| !made.contains(&one.span));
    }
    gpus
}

/// The plans for all GPUs that have a target.
fn plans(gpus: &[Gpu], targets: &[Target], ledger: &Ledger) -> Vec<anyhow::Result<Plan>> {
    let gpu = |target: &Target| {
        let gpu = gpus.iter().find(|gpu| gpu.uuid == target.gpu);
        gpu.with_context(|| format!("{} does not answer any more", safe(&target.gpu)))
    };
    let plan = |gpu: &Gpu, target: &Target| {
        // An instance created for a container does not count as a difference, unless it is in the way.
        mig::plan(gpu, &target.beside(gpu, &gpu.made(ledger))).or_else(|_| mig::plan(gpu, target))
    };
    targets.iter().map(|target| plan(gpu(target)?, target)).collect()
}

/// The plans that `apply` would make now, and the GPUs of the layout that it would pass over.
fn planned(file: &LayoutFile, config: &Config) -> anyhow::Result<(Vec<anyhow::Result<Plan>>, Vec<String>)> {
    let layout = read(file, config)?;
    let (gpus, inventory, ledger) = mig_list::seen(config)?;
    let plans = plans(&gpus, &mig::targets(&layout, &gpus, &inventory, config)?, &ledger);
    let silent = mig::silent(&layout, &gpus, &inventory, config);
    Ok((plans, silent.iter().map(Device::label).collect()))
}

fn show(file: &LayoutFile, format: Format, config: &Config) -> anyhow::Result<ExitCode> {
    let (plans, _) = planned(file, config)?;
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
    fn of(plan: &anyhow::Result<Plan>) -> Self {
        let steps = |plan: &Plan| PlannedSteps {
            gpu: plan.gpu.clone(),
            reset: plan.reset,
            steps: plan.steps.iter().map(ToString::to_string).collect(),
        };
        Self { obstacle: plan.as_ref().err().map(ToString::to_string), plan: plan.as_ref().ok().map(steps) }
    }
}

const MATCHES: &str = "matches the layout";

fn lines(plan: &anyhow::Result<Plan>) -> String {
    match plan {
        Err(obstacle) => obstacle.to_string(),
        Ok(plan) if plan.steps.is_empty() => format!("GPU {}: {MATCHES}", plan.index),
        Ok(plan) => {
            let reset = if plan.reset { " (needs a reset of the GPU: --allow-reset)" } else { "" };
            let first = format!("GPU {}: {} steps{reset}", plan.index, plan.steps.len());
            let steps = plan.steps.iter().map(|step| format!("  {step}"));
            [first].into_iter().chain(steps).collect::<Vec<_>>().join("\n")
        }
    }
}

fn assert(file: &LayoutFile, config: &Config) -> anyhow::Result<ExitCode> {
    let (mut plans, silent) = planned(file, config)?;
    plans.extend(silent.iter().map(|gpu| Err(anyhow!("{gpu} does not tell whether it {MATCHES}"))));
    let differs = |plan: &&Result<Plan, _>| !matches!(plan, Ok(plan) if plan.steps.is_empty());
    let differ: Vec<_> = plans.iter().filter(differs).collect();
    for plan in &differ {
        eprintln!("sublet: {}", lines(plan));
    }
    Ok(if differ.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn apply(file: &LayoutFile, allow_reset: bool, config: &Config) -> anyhow::Result<()> {
    ensure!(!is_remote(config), "only root can change MIG instances: run `sublet mig apply` as root");
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
        stop_servers(&device.uuid, &store, config);
    }
    let gpus = nvml.seen(&inventory, &ledger)?;
    let plans = plans(&gpus, &targets, &ledger).into_iter().collect::<Result<Vec<_>, _>>()?;
    // The file that keeps the instances as they were until the change is over.
    let kept = config.state_dir.join("mig-before.toml");
    let done = change(&plans, &settled(&gpus, &ledger), allow_reset, &mut nvml, &kept);
    // Leases wait for the fence and then see that the inventory is out of date, so the fence falls before the refresh.
    drop(fence);
    if let Err(error) = crate::refresh::refresh(config) {
        // The next container that starts tries the refresh again.
        eprintln!("sublet: warning: the inventory could not be refreshed: {}", tables::chain(&error));
    }
    Local::new(config).destroy_unneeded(&store);
    done?;
    if layout.path == kept {
        // The file has served its purpose. A change that was killed may have had nothing to undo.
        let _ = std::fs::remove_file(&layout.path);
    }
    for plan in &plans {
        match plan.steps.len() {
            0 => println!("GPU {}: {MATCHES}", plan.index),
            steps => println!("GPU {}: done, {steps} steps", plan.index),
        }
    }
    Ok(())
}

/// Makes the change. The instances as they were are written to the file `kept` first, so that a kill cannot lose them.
fn change(
    plans: &[Plan],
    gpus: &[Gpu],
    allow_reset: bool,
    nvml: &mut Nvml,
    kept: &Path,
) -> anyhow::Result<()> {
    let changed: Vec<Gpu> =
        gpus.iter().filter(|gpu| plans.iter().any(|plan| plan.gpu == gpu.uuid)).cloned().collect();
    if plans.iter().all(|plan| plan.steps.is_empty()) {
        return Ok(());
    }
    sublet_core::fs::replace(kept, mig::export(&changed).as_bytes(), 0o644)
        .with_context(|| format!("cannot write {}", kept.display()))?;
    match mig::uninterrupted(|| mig::apply(plans, allow_reset, nvml)) {
        Err(error @ ApplyError::Left { .. }) => {
            bail!(
                "{error}; the instances of before are written in {0}: `sublet mig apply {0}` restores them",
                kept.display()
            )
        }
        done => {
            std::fs::remove_file(kept).with_context(|| format!("cannot remove {}", kept.display()))?;
            Ok(done?)
        }
    }
}

// `sublet mig make|clear`: entry points run these for containers under `[mig] dynamic`. They are not meant for users.

/// Creates an instance for the ask on standard input and writes the answer to standard output.
fn make(config: &Config) -> anyhow::Result<()> {
    let mut text = String::new();
    std::io::stdin().take(1 << 16).read_to_string(&mut text).context("standard input")?;
    let ask: MakeAsk = serde_json::from_str(&text).context("only sublet's own programs call this command")?;
    let store = Store::open(&config.state_dir)?;
    let answer = match changed(&store, config, Some(&ask)) {
        Ok(()) => {
            // The waiting entry point reads the inventory, and so do all other programs.
            crate::refresh::refresh(config)?;
            MakeAnswer::Made
        }
        Err(error) => {
            let temporary = error.downcast_ref::<NotMade>().is_none_or(|error| error.temporary);
            MakeAnswer::NotMade { reason: super::tables::chain(&error), temporary }
        }
    };
    // The entry point that waited for the instance may have been killed meanwhile.
    Local::new(config).destroy_unneeded(&store);
    print!("{}\n", serde_json::to_string(&answer)?);
    Ok(())
}

/// While other users of the GPU are kept out: destroys the instances that no lease needs, then creates the requested
/// one.
fn changed(store: &Store, config: &Config, ask: Option<&MakeAsk>) -> anyhow::Result<()> {
    // The inventory as last written is enough: only the path of the driver's library is needed.
    let inventory = inventory::last(config).or_else(|_| fresh_inventory(config))?;
    let mut nvml = Nvml::open(config, &inventory)?;
    if let Some(ask) = ask {
        let mut ledger = store.read()?;
        ledger.stop_awaiting(&ask.awaited.lease);
        has_room(ask, &mut nvml, &ledger, config)?;
    }
    let (mut fence, _, freed) = Fence::raise(&[], store)?;
    Local::new(config).settle(&freed, store);
    let mut making = Making::new(&mut nvml, store);
    let made = mig::uninterrupted(|| {
        let awaited = ask.map(|ask| &ask.awaited.lease);
        warn(making.clear(awaited, &mut |uuid| stop_servers(uuid, store, config))?);
        Ok(ask.map_or(Ok(()), |ask| making.make(&ask.order, &ask.awaited, config.placement.policy))?)
    });
    fence.changed = making.touched;
    let freed = making.freed;
    drop(fence);
    Local::new(config).settle(&freed, store);
    made
}

/// Checks for room first: if there is none, other commands need not wait.
fn has_room(ask: &MakeAsk, nvml: &mut Nvml, ledger: &Ledger, config: &Config) -> Result<(), NotMade> {
    // Instances of other leases that come and go do not count, nor do driver errors that they cause.
    if ledger.has_unneeded() || ledger.mig.under_way.is_some() {
        return Ok(());
    }
    let foreseen = mig::foresee(&ask.order, nvml, ledger, config.placement.policy, &[]);
    foreseen.map_or(Ok(()), |foreseen| foreseen.map(drop))
}

/// A daemon ends before its device does, even if it would otherwise wait for its next lease (`[mps] idle`).
fn stop_servers(uuid: &str, store: &Store, config: &Config) {
    let Ok(ledger) = store.read() else { return };
    let of_device = ledger.daemons.iter().filter(|daemon| daemon.serves(uuid));
    for daemon in of_device.filter(|daemon| ledger.on_daemon(&daemon.key).next().is_none()) {
        let stopped = crate::mps_daemons::stop(&daemon.key, false, store, config);
        warn(stopped.unwrap_or_else(|error| vec![error.to_string()]));
    }
}
