//! `sublet explain`: the request as understood, the placement, what it protects, the edits. Changes
//! nothing. With `--container`: why it was refused, or what it holds.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::lease_table;
use super::protection::{does_not_protect, protects};
use super::tables;
use crate::guard::{self, Event};
use crate::names::{Names, NoLease, lease_of};
use crate::preview::preview;
use sublet_core::admit::{Candidate, RequestSource, confirmed_inventory, lease_for, request_of};
use sublet_core::config::Config;
use sublet_core::config_files;
use sublet_core::grant::{Grant, grant, refused_beside};
use sublet_core::inventory::Inventory;
use sublet_core::ledger::{Container, LeaseId, Store};
use sublet_core::oci::containers_by_name;
use sublet_core::oci::podman_storage;
use sublet_core::oci::{self, JsonFile};
use sublet_core::place::Placement;
use sublet_core::process::Process;
use sublet_core::request::{Request, has_sublet_annotations};
use sublet_core::share::units::show_duration;
use sublet_core::share::{Devices, Guarding, Memory, Selector};
use sublet_core::text::safe;

/// Arguments of `sublet explain`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Explain the container of this OCI bundle, and show the edits to its config.json
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// The share, such as sm=25 memory=8GiB: short for --annotation sublet.sm=25 --annotation sublet.memory=8GiB
    #[arg(value_parser = super::share, value_name = "KEY=VALUE", conflicts_with_all = ["name", "image", "container"])]
    share: Vec<(String, String)>,
    /// An annotation of the container; overrides the bundle's
    #[arg(long = "annotation", value_parser = super::annotation, value_name = "KEY=VALUE")]
    annotations: Vec<(String, String)>,
    /// Explain what containers.toml gives to a container of this name
    #[arg(long, value_name = "NAME", conflicts_with_all = ["bundle", "annotations"])]
    name: Option<String>,
    /// Explain what containers.toml gives to a container of this image
    #[arg(long, value_name = "IMAGE", conflicts_with_all = ["bundle", "annotations"])]
    image: Option<String>,
    /// Explain a container that runs or was refused, by its name or id
    #[arg(long, value_name = "CONTAINER", conflicts_with_all = ["bundle", "annotations", "name", "image"])]
    container: Option<String>,
}

impl Arguments {
    /// In either form.
    fn annotations(&self) -> impl Iterator<Item = &(String, String)> {
        self.annotations.iter().chain(&self.share)
    }
}

/// Runs it.
///
/// # Errors
/// A request that would be refused is refused here with the same words.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if let Some(container) = &arguments.container {
        return explain_container(container, config);
    }
    let named = arguments.name.is_some() || arguments.image.is_some();
    if arguments.bundle.is_none() && arguments.annotations().next().is_none() && !named {
        bail!(
            "nothing to explain: give a share, such as sm=25 memory=8GiB, or --annotation KEY=VALUE, --bundle DIR, \
             --name NAME or --container CONTAINER"
        );
    }
    let (mut spec, rootfs) = read_spec(arguments)?;
    let source = source(arguments, &spec)?;
    let request = request_of(&source, &spec, config)?;
    print_request(&request);
    let inventory = confirmed_inventory(config)?;
    let image = oci::inspect(&spec, &rootfs, &request, &inventory, config)?;
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let id = LeaseId::random()?;
    let placement = preview(&request, &id, &inventory, &ledger, config)?;
    print_placement(&placement, &inventory);
    let candidate = candidate(arguments, rootfs)?;
    let lease = lease_for(&candidate, &placement, &image, id, config);
    let grant = grant(&placement, &lease, &request.capabilities, &image, &inventory, config);
    oci::check_mps_directories(&spec, &candidate.container.rootfs, &grant)?;
    if arguments.bundle.is_none() {
        print_grant(&grant);
    } else {
        let before = spec.clone();
        oci::edit(&mut spec, &grant)?;
        println!("Edits to config.json\n{}", diff(&before, &spec)?);
    }
    for warning in image.warnings.iter().chain(&placement.warnings) {
        println!("Warning: {warning}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The container's annotations, and the share that containers.toml gives to one without.
fn source(arguments: &Arguments, spec: &Value) -> anyhow::Result<RequestSource> {
    let annotations = oci::annotations(spec)?;
    if has_sublet_annotations(&annotations) {
        return Ok(RequestSource { annotations, share: None });
    }
    let share = match &arguments.bundle {
        Some(bundle) => {
            let bundle = bundle.canonicalize()?;
            let id = bundle.file_name().unwrap_or_default().to_string_lossy();
            containers_by_name::share(&id, &bundle, &JsonFile::read(&bundle.join("config.json"))?)?
        }
        None => config_files::load_containers()?.and_then(|containers| {
            let text = |given: &Option<String>| given.clone().unwrap_or_default();
            containers.share(&text(&arguments.name), &text(&arguments.image)).map(str::to_owned)
        }),
    };
    let path = config_files::containers_path();
    let Some(share) = share else {
        bail!(
            "it has no sublet.* annotation and no rule of {} matches it, so it gets no GPU",
            path.display()
        );
    };
    println!("It has no sublet.* annotation. {} gives it share {}.\n", path.display(), safe(&share));
    Ok(RequestSource { annotations, share: Some(share) })
}

/// The bundle's spec, or a minimal one, with the given annotations added.
fn read_spec(arguments: &Arguments) -> anyhow::Result<(Value, PathBuf)> {
    let (mut spec, rootfs) = match &arguments.bundle {
        None => (
            json!({"ociVersion": "1.0.2", "process": {"env": []}, "root": {"path": "/"}}),
            PathBuf::from("/"),
        ),
        Some(bundle) => {
            let spec = JsonFile::read(&bundle.join("config.json"))?.parse()?;
            let root =
                spec.pointer("/root/path").and_then(Value::as_str).context("config.json has no root.path")?;
            let rootfs = podman_storage::root_filesystem(bundle.join(root), &spec, &bundle.canonicalize()?)?;
            (spec, rootfs)
        }
    };
    let annotations = spec.as_object_mut().context("config.json is not a JSON object")?.entry("annotations");
    let annotations = annotations.or_insert_with(|| json!({}));
    let annotations =
        annotations.as_object_mut().context("`annotations` in config.json is not a JSON object")?;
    for (key, value) in arguments.annotations() {
        annotations.insert(key.clone(), Value::String(value.clone()));
    }
    Ok((spec, rootfs))
}

fn candidate(arguments: &Arguments, rootfs: PathBuf) -> anyhow::Result<Candidate<'static>> {
    let bundle = arguments.bundle.clone().unwrap_or_default();
    let container = Container {
        uid: nix::unistd::geteuid().as_raw(),
        id: "explain".into(),
        bundle,
        rootfs,
        record: PathBuf::new(),
    };
    Ok(Candidate { container, owner: Process::current()?, engine: None })
}

fn print_request(request: &Request) {
    let memory = |memory: Memory| match memory {
        Memory::Bytes(bytes) => tables::memory(bytes),
        Memory::Share(share) => format!("{share} % of the device"),
    };
    let mut rows = vec![
        ("devices", devices(&request.devices)),
        (
            "mode",
            request.mode.map_or_else(
                || format!("the device's own, else {}", request.default_mode),
                |mode| mode.to_string(),
            ),
        ),
        ("isolation", format!("{:?}", request.isolation).to_lowercase()),
        ("sm", request.sm.map_or_else(|| "no ceiling".into(), |sm| format!("at most {sm} %"))),
        ("memory", request.memory.map_or_else(|| "unlimited".into(), memory)),
        ("processes", request.processes.to_string()),
        ("priority", format!("{:?}", request.priority).to_lowercase()),
        ("wait", show_duration(request.wait)),
    ];
    if let Some(profile) = &request.mig {
        rows.push(("mig", profile.clone()));
    }
    if !request.mig_caps.is_empty() {
        rows.push((
            "mig-caps",
            request.mig_caps.iter().map(|cap| cap.as_str()).collect::<Vec<_>>().join(", "),
        ));
    }
    if let Some(guard) = request.guard {
        rows.push((
            "guard",
            match guard {
                Guarding::AtLeast(action) => format!("at least {action}"),
                Guarding::Exactly(action) => format!("{action}, as [share] says"),
            },
        ));
    }
    println!("Request");
    for (name, value) in rows {
        println!("  {name:<10} {value}");
    }
    println!();
}

fn devices(devices: &Devices) -> String {
    match devices {
        Devices::Any(count) if count.get() == 1 => "any".to_owned(),
        Devices::Any(count) => format!("any {count}"),
        Devices::All => "all".to_owned(),
        Devices::These(selectors) => selectors.iter().map(selector).collect::<Vec<_>>().join(", "),
    }
}

fn selector(selector: &Selector) -> String {
    match selector {
        Selector::Index(index) => format!("GPU {index}"),
        Selector::Uuid(text) | Selector::BusId(text) | Selector::MigUuid(text) => text.clone(),
        Selector::MigIndex(gpu, mig) => format!("MIG device {mig} of GPU {gpu}"),
        Selector::Name(name) => format!("the device named {name}"),
        Selector::Model(glob) => format!("a {glob}"),
    }
}

fn print_placement(placement: &Placement, inventory: &Inventory) {
    println!("Placement");
    for uuid in &placement.devices {
        let device = inventory.device(uuid);
        let (kind, label) = device.map_or(("", String::new()), |device| (device.kind(), device.label()));
        println!("  {uuid} {kind} ({label}), mode {}", placement.mode);
    }
    if let Some(daemon) = &placement.daemon {
        println!("  served by MPS daemon {daemon}{}", over_several(placement));
    }
    println!("\nThis share protects");
    for line in protects(placement) {
        println!("  + {line}");
    }
    println!("It does not protect");
    for line in does_not_protect(placement) {
        println!("  - {line}");
    }
    println!();
}

/// What an MPS server of several devices takes on each of them.
fn over_several(placement: &Placement) -> String {
    match (placement.devices.len(), placement.memory_bytes) {
        (0 | 1, _) => String::new(),
        (count, None) => format!(", its own, for all {count}"),
        (count, Some(bytes)) => format!(", its own, for all {count}, {} on each", tables::memory(bytes)),
    }
}

fn print_grant(grant: &Grant) {
    println!("Environment");
    for (name, value) in &grant.env.set {
        println!("  {name}={value}");
    }
    for (name, value) in &grant.env.default {
        let beside = refused_beside(name).map(|other| format!(", and {other} too")).unwrap_or_default();
        println!("  {name}={value} (where unset{beside})");
    }
    println!("Device nodes");
    for granted in &grant.nodes {
        println!("  {} {}:{}", granted.node.path.display(), granted.node.major, granted.node.minor);
    }
    println!("Mounts, read-only");
    for mount in &grant.mounts {
        println!("  {} from {}", mount.destination.display(), mount.source.display());
    }
    for path in &grant.masked_paths {
        println!("  {} hidden", path.display());
    }
}

fn diff(before: &Value, after: &Value) -> anyhow::Result<String> {
    let (before, after) = (serde_json::to_string_pretty(before)?, serde_json::to_string_pretty(after)?);
    let diff = similar::TextDiff::from_lines(&before, &after);
    Ok(diff.unified_diff().context_radius(2).header("config.json", "config.json for this share").to_string())
}

fn explain_container(text: &str, config: &Config) -> anyhow::Result<ExitCode> {
    let ledger = Store::open(&config.state_dir)?.peek()?;
    let names = Names::learn(&ledger, config);
    let held = match lease_of(text, &ledger, &names) {
        Ok(lease) => Some(lease),
        Err(NoLease::None(_)) => None,
        Err(several) => return Err(several.into()),
    };
    let id = held.map_or(text, |lease| lease.container.id.as_str());
    if let Some(lease) = held {
        let memory = tables::memory_limit(lease.memory_bytes);
        println!(
            "Container {} holds lease {}: mode {}, memory {memory}.",
            lease_table::label(lease, names.of(lease)),
            lease.id,
            lease.mode
        );
    }
    let refused: Vec<_> = super::own_refusals(config)
        .into_iter()
        .filter(|record| record.container_id.starts_with(id))
        .collect();
    for record in &refused {
        println!("{}  refused: {}", tables::timestamp(record.time), record.reason);
    }
    let is_its = |event: &Event| event.container_id.as_deref().is_some_and(|name| name.starts_with(id));
    let guarded: Vec<_> = guard::events(config).into_iter().filter(is_its).collect();
    for event in &guarded {
        println!("{}", super::guard_report::line(event));
    }
    if held.is_none() && refused.is_empty() && guarded.is_empty() {
        bail!(
            "container {} holds no lease, and neither a refusal nor an action of the guard is recorded for \
             it",
            safe(text)
        );
    }
    Ok(ExitCode::SUCCESS)
}
