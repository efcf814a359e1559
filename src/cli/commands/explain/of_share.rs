//! What a share gets, and with `--edits` what is done to a container for it. The share is given as text, by a bundle, or
//! by a name or image in containers.toml. And whether the services of a stack would all get theirs, one after another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use nix::unistd::geteuid;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};
use similar::TextDiff;

use super::super::reason::{self, ExplainError};
use super::super::tables::{self, Format};
use super::Arguments;
use super::answer::{Answer, sms};
use crate::names::Names;
use crate::preview::{EMPTY, Whose, emptied, may_be_out_of_date, preview, seen_ledger};
use crate::shown::sharing;
use crate::stack::{Fitted, NotPlaced, Orders, Outcome, Stack, fit, orders};
use sublet_core::admit::{RequestSource, lease_for, refresh, remove_earlier_grant, request_of};
use sublet_core::config::Config;
use sublet_core::config_files::{self, Known};
use sublet_core::grant::{Grant, Mount, grant, refused_beside};
use sublet_core::inventory::{Device, Inventory, Node};
use sublet_core::ledger::{Container, LEASE_ANNOTATION, LeaseId, Waiter};
use sublet_core::oci::{self, JsonFile, container_root, containers_by_name};
use sublet_core::place::Placement;
use sublet_core::process::Process;
use sublet_core::request::has_sublet_annotations;
use sublet_core::share::{Isolation, Mode, Percent};
use sublet_core::text::safe;

/// Runs it.
///
/// # Errors
/// A request that would be refused is refused here with the same words.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    let Arguments { bundle, annotations, share, name, image, service, .. } = arguments;
    let named = [name, image, service].into_iter().any(Option::is_some);
    if bundle.is_none() && annotations.is_empty() && share.is_empty() && !named {
        return Err(ExplainError::Nothing.into());
    }
    // A bundle that a user can name is their own.
    let whose = Whose::meant(arguments.rootless || arguments.bundle.is_some(), config);
    let (mut spec, rootfs) = read_spec(arguments)?;
    // The edits of sublet in the config.json of a container that was created are taken out.
    let earlier = oci::annotations(&spec)?.remove(LEASE_ANNOTATION);
    if earlier.is_some() {
        remove_earlier_grant(&mut spec)?;
    }
    let (source, given_by) = source(arguments, &spec)?;
    let request = request_of(&source, &spec, config)?;
    let inventory = whose.inventory(config)?;
    let tree = oci::Tree::open(&spec, &rootfs)?;
    let image = oci::inspect(&spec, &tree, &request, &inventory, config)?;
    let mut ledger = seen_ledger(config)?;
    ledger.leases.retain(|lease| earlier.as_deref() != Some(lease.id.as_str()));
    let (ledger, mut inventory) = emptied(arguments.empty, (ledger, inventory));
    let (uid, bundle) = (geteuid().as_raw(), arguments.bundle.clone().unwrap_or_default());
    // Its container may wait already.
    let is_its =
        |waiter: &&Waiter| bundle.canonicalize().is_ok_and(|bundle| waiter.container.bundle == bundle);
    let waits = ledger.waiters.iter().find(is_its);
    let id = waits.map_or_else(LeaseId::random, |waiter| Ok(waiter.id.clone()))?;
    let placement = preview(&request, &id, (&mut inventory, &ledger, arguments.empty), whose, config)?;
    let container = Container { uid, id: "explain".into(), bundle, rootfs, ..Container::default() };
    oci::check_no_other_daemon(&image, placement.daemon.is_some())?;
    let lease = lease_for(&container, Process::current()?, &placement, &image, id, config);
    let grant = grant(&placement, &lease, &request.capabilities, &image, &inventory, &request.over(config));
    oci::check_mps_directories(&spec, &tree, &grant)?;
    let mut answer = Answer::of(&request, &placement, &lease, &inventory);
    answer.warnings.clone_from(&grant.warnings);
    answer.warnings.extend(arguments.empty.then(|| EMPTY.to_owned()));
    match arguments.format {
        Format::Json => {
            let edits = arguments.edits.then(|| Edits::of(&grant));
            let whose = whose.word(config);
            tables::json(&Document { schema: "sublet.explain/1", whose, given_by, answer: &answer, edits })?;
        }
        Format::Table => {
            if let Some(given_by) = given_by {
                println!("{given_by}\n");
            }
            if let Some(whose) = whose.remark(config) {
                println!("{:<10} {whose}", "For");
            }
            println!("{answer}");
            match (arguments.edits, &arguments.bundle) {
                (false, _) => println!("\nWith --edits: its environment, device nodes and mounts."),
                (true, None) => print_edits(&grant),
                (true, Some(_)) => {
                    let before = serde_json::to_string_pretty(&spec)?;
                    oci::edit(&mut spec, &grant)?;
                    let after = serde_json::to_string_pretty(&spec)?;
                    let diff = TextDiff::from_lines(&before, &after);
                    let (mut diff, for_it) = (diff.unified_diff(), "config.json for this share");
                    let diff = diff.context_radius(2).header("config.json", for_it);
                    print!("\nEdits to config.json\n{diff}\n");
                }
            }
        }
    }
    Ok(())
}

/// What is printed as JSON: keys may be added, never changed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Explain")]
pub struct Document<'a> {
    /// `sublet.explain/1`.
    schema: &'static str,
    /// Whose containers it is about: `root`, `docker` or `rootless`.
    #[serde(rename = "for")]
    whose: &'static str,
    /// The file that gives the share to a container without annotations, in a sentence.
    given_by: Option<String>,
    #[serde(flatten)]
    answer: &'a Answer,
    /// What is done to the container; with `--edits` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    edits: Option<Edits<'a>>,
}

/// The container's annotations, and the share that containers.toml gives to one without, with a line that says so.
fn source(arguments: &Arguments, spec: &Value) -> anyhow::Result<(RequestSource, Option<String>)> {
    let bundle = arguments.bundle.as_deref().unwrap_or(Path::new(""));
    let annotations = oci::own_annotations(spec, bundle)?;
    if has_sublet_annotations(&annotations) {
        return Ok((RequestSource { annotations, share: None }, None));
    }
    let share = match &arguments.bundle {
        Some(bundle) => {
            let bundle = bundle.canonicalize()?;
            let id = bundle.file_name().unwrap_or_default().to_string_lossy();
            containers_by_name::share(&id, &bundle, &JsonFile::read(&bundle.join("config.json"))?)?
        }
        None => config_files::load_containers()?.and_then(|containers| {
            let text = |given: &Option<String>| given.clone().unwrap_or_default();
            let service = arguments.service.clone();
            let (name, image) = (text(&arguments.name), text(&arguments.image));
            let known = Known { name, image, service, ..Known::default() };
            containers.share(&known).map(str::to_owned)
        }),
    };
    let path = config_files::containers_path().display().to_string();
    let Some(share) = share else { return Err(ExplainError::NoShare(path).into()) };
    let given_by = format!("It has no sublet.* annotation. {path} gives it share {}.", safe(&share));
    Ok((RequestSource { annotations, share: Some(share) }, Some(given_by)))
}

/// The bundle's spec, or a minimal one, with the given annotations added.
fn read_spec(arguments: &Arguments) -> anyhow::Result<(Value, PathBuf)> {
    let bare = json!({"ociVersion": "1.0.2", "process": {"env": []}, "root": {"path": "/"}});
    let (mut spec, rootfs) = match &arguments.bundle {
        None => (bare, PathBuf::from("/")),
        Some(bundle) => {
            let spec = JsonFile::read(&bundle.join("config.json"))?.parse()?;
            let root =
                spec.pointer("/root/path").and_then(Value::as_str).context("config.json has no root.path")?;
            let rootfs =
                container_root::podman_root_filesystem(bundle.join(root), &spec, &bundle.canonicalize()?)?;
            (spec, rootfs)
        }
    };
    let annotations = spec.as_object_mut().context("config.json is not a JSON object")?.entry("annotations");
    let annotations = annotations.or_insert_with(|| json!({}));
    let annotations =
        annotations.as_object_mut().context("`annotations` in config.json is not a JSON object")?;
    let given = arguments.annotations.iter().chain(&arguments.share);
    annotations.extend(given.map(|(key, value)| (key.clone(), value.clone().into())));
    Ok((spec, rootfs))
}

// The edits of a container for its share: environment, device nodes, mounts.

/// For people.
fn print_edits(grant: &Grant) {
    println!("\nEnvironment");
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

/// The same for machines.
#[derive(Debug, Serialize, JsonSchema)]
struct Edits<'a> {
    /// Variables that are set, whatever the image has.
    #[schemars(with = "BTreeMap<String, String>")]
    environment: Map<String, Value>,
    /// Variables that are set where the image has none of that name.
    #[schemars(with = "BTreeMap<String, String>")]
    environment_where_unset: Map<String, Value>,
    nodes: Vec<ShownNode>,
    /// All are read-only.
    mounts: Vec<ShownMount<'a>>,
    /// Paths that are empty in the container.
    hidden: &'a [PathBuf],
}

/// A device node.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ShownNode {
    path: PathBuf,
    major: u32,
    minor: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ShownMount<'a> {
    /// On the host.
    source: &'a Path,
    /// In the container.
    destination: &'a Path,
}

impl<'a> Edits<'a> {
    fn of(grant: &'a Grant) -> Self {
        let variables = |list: &[(String, String)]| {
            list.iter().map(|(name, value)| (name.clone(), value.clone().into())).collect()
        };
        let mount = |mount: &'a Mount| ShownMount { source: &mount.source, destination: &mount.destination };
        Self {
            environment: variables(&grant.env.set),
            environment_where_unset: variables(&grant.env.default),
            nodes: grant.nodes.iter().map(|granted| shown_node(granted.node.clone())).collect(),
            mounts: grant.mounts.iter().map(mount).collect(),
            hidden: &grant.masked_paths,
        }
    }
}

pub fn shown_node(Node { path, major, minor }: Node) -> ShownNode {
    ShownNode { path, major, minor }
}

// The services of a stack.

/// The exit code is 1 if a service would not get its share.
pub fn run_stack(stack: &Stack, arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    // A user's own Podman starts Quadlet's.
    let whose = Whose::meant(arguments.rootless || !arguments.quadlet.is_empty(), config);
    let mut inventory = whose.inventory(config)?;
    let ledger = seen_ledger(config)?;
    let names = Names::learn(&ledger, config);
    let containers = config_files::load_containers()?;
    let look = |stack: &Stack, inventory: &Inventory| {
        let world = emptied(arguments.empty, (ledger.clone(), inventory.clone()));
        fit(stack, containers.as_ref(), world, &names, whose, config)
    };
    let (mut fitted, mut running) = look(stack, &inventory)?;
    let wants_refresh = |one: &Fitted| matches!(&one.outcome, Outcome::Not(NotPlaced::Refused(error)) if may_be_out_of_date(error, config));
    if fitted.iter().any(wants_refresh) {
        inventory = refresh(config)?;
        (fitted, running) = look(stack, &inventory)?;
    }
    // Each may ask the driver, or the user database for a policy, or place those who wait.
    let is_slow = config.mig.dynamic || whose == Whose::User || !ledger.waiters.is_empty();
    let most = if is_slow { 1000 } else { 10_000 };
    let orders = orders(stack, &fitted, most, |stack| Ok(look(stack, &inventory)?.0))?;
    let mut remarks = stack.remarks.clone();
    remarks.extend(whose.remark(config).map(|whose| format!("this is about {whose}")));
    let run = || format!("{running} of its containers run already: what they hold was not counted twice");
    remarks.extend((running > 0).then(run));
    remarks.extend(arguments.empty.then(|| EMPTY.to_owned()));
    remarks.extend(tell_turns(&fitted));
    remarks.extend(orders.sentence.clone());
    for remark in &remarks {
        eprintln!("sublet: note: {remark}");
    }
    let services: Vec<_> = fitted.iter().map(|one| ServiceFit::of(one, &names, &inventory)).collect();
    let fits = services.iter().all(|one| one.fits);
    let (schema, remarks) = ("sublet.explain-stack/1", &remarks[..]);
    let document = StackDocument { schema, fits, services, orders, remarks };
    tables::print(arguments.format, &document, || names.replace_ids(&table(&fitted, &inventory)))?;
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What is said of those that fit in turns.
fn tell_turns(fitted: &[Fitted]) -> Option<String> {
    let in_turns = fitted.iter().filter(|one| one.is_in_turns());
    let names = in_turns.map(|one| safe(&one.service)).collect::<Vec<_>>().join(", ");
    let turns = || format!("{names} in turns: `sublet serve` suspends others of the stack to make room");
    (!names.is_empty()).then(turns)
}

/// What is printed as JSON: keys may be added, never changed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "ExplainStack")]
pub struct StackDocument<'a> {
    /// `sublet.explain-stack/1`.
    schema: &'static str,
    /// Whether all services would get their shares.
    fits: bool,
    services: Vec<ServiceFit<'a>>,
    #[serde(flatten)]
    orders: Orders,
    /// What is to be known beside it, in sentences.
    remarks: &'a [String],
}

/// A service, or one of its containers.
#[derive(Serialize, JsonSchema)]
struct ServiceFit<'a> {
    service: &'a str,
    /// Whether it would get its share. Also true if it asks for none.
    fits: bool,
    /// Whether others of the stack are suspended for it.
    in_turns: bool,
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
    fn of(fitted: &'a Fitted, names: &Names, inventory: &Inventory) -> Self {
        let placement = match &fitted.outcome {
            Outcome::Fits(placement) | Outcome::InTurns(placement) => Some(placement),
            _ => None,
        };
        let why = if let Outcome::Not(why) = &fitted.outcome { Some(why) } else { None };
        Self {
            service: &fitted.service,
            fits: why.is_none(),
            in_turns: fitted.is_in_turns(),
            asks: !matches!(fitted.outcome, Outcome::AsksForNone),
            gpus: placement.map_or(&[][..], |placement| &placement.devices),
            mode: placement.map(|placement| placement.mode),
            sm_percent: placement.and_then(|placement| placement.sm).map(Percent::as_f64),
            sm_count: placement.and_then(|placement| sm_count(placement, inventory)),
            memory_bytes: placement.and_then(|placement| placement.memory_bytes),
            error: why.map(|why| names.replace_ids(&why.to_string())),
            reason: why.map(reason::of_service),
        }
    }
}

/// The SMs that it sees, the fewest of its devices.
fn sm_count(placement: &Placement, inventory: &Inventory) -> Option<u64> {
    placement.devices.iter().filter_map(|uuid| sms(placement.sm, inventory.device(uuid)?)).min()
}

fn table(fitted: &[Fitted], inventory: &Inventory) -> String {
    let rows = fitted.iter().map(|one| row(one, inventory)).collect();
    tables::table(&["SERVICE", "GPU", "MODE", "SM", "MEMORY", "RESULT"], rows)
}

fn row(fitted: &Fitted, inventory: &Inventory) -> Vec<String> {
    let dash = || "-".to_owned();
    let without = |mode: &str, result: String| [dash(), mode.to_owned(), dash(), dash(), result];
    let no_limit = || "no limit".to_owned();
    let cells = match &fitted.outcome {
        Outcome::Fits(placement) | Outcome::InTurns(placement) => {
            let number = |uuid: &String| inventory.device(uuid).map_or_else(|| uuid.clone(), Device::number);
            let count = sm_count(placement, inventory).map(|count| format!(" ({count})")).unwrap_or_default();
            let profile = placement.devices.first().and_then(|uuid| inventory.device(uuid)).map(Device::kind);
            let own_server = placement.isolation == Isolation::Dedicated && placement.daemon.is_some();
            [
                placement.devices.iter().map(number).collect::<Vec<_>>().join(", "),
                sharing(placement.mode, profile, own_server),
                placement.sm.map_or_else(no_limit, |sm| format!("{sm} %{count}")),
                placement.memory_bytes.map_or_else(no_limit, |bytes| format!("{} MiB", bytes >> 20)),
                if fitted.is_in_turns() { "fits in turns" } else { "fits" }.to_owned(),
            ]
        }
        Outcome::Made(made) => without("mig", format!("fits: a MIG instance is created, {}", made.0.label)),
        Outcome::AsksForNone => without("-", "asks for no share".to_owned()),
        Outcome::Not(why) => without("-", format!("NO: {why}")),
    };
    std::iter::once(safe(&fitted.service)).chain(cells).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sublet_core::ledger::Ledger;
    use sublet_core::place::fixture::{device, host};
    use sublet_core::place::place;
    use sublet_core::request;

    #[test]
    fn why_a_service_does_not_fit_stands_below_the_word() {
        let (inventory, config) = (host(vec![device(0)]), Config::default());
        let share = [("sublet.mode", "time-slice"), ("sublet.memory", "8GiB")];
        let share = share.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let request = request::parse(&share.into(), None, None, &config).unwrap();
        let id = LeaseId::parse("00000000000000ab").unwrap();
        let placement = place(&request, &id, &inventory, &Ledger::empty(""), &config).unwrap();
        let why = "Docker Compose 2.20 drops its annotations: install Docker Compose 2.26 or later";
        let outcomes = [
            ("web", Outcome::Fits(Box::new(placement.clone()))),
            ("image", Outcome::InTurns(Box::new(placement))),
            ("batch", Outcome::Not(NotPlaced::Cdi(why.to_owned()))),
        ];
        let fitted = outcomes.map(|(service, outcome)| Fitted { service: service.to_owned(), outcome });
        assert_eq!(
            tables::wrapped(&table(&fitted, &inventory), Some(80)).lines().collect::<Vec<_>>(),
            [
                "SERVICE  GPU  MODE                 SM        MEMORY    RESULT",
                "web      0    time-slice, own MPS  no limit  8192 MiB  fits",
                "image    0    time-slice, own MPS  no limit  8192 MiB  fits in turns",
                "batch    -    -                    -         -         NO: Docker Compose 2.20",
                "                                             drops its annotations: install",
                "                                             Docker Compose 2.26 or later",
            ]
        );
        let turns = "image in turns: `sublet serve` suspends others of the stack to make room";
        assert_eq!(tell_turns(&fitted).as_deref(), Some(turns));
        let in_turns = |one| ServiceFit::of(one, &Names::default(), &inventory).in_turns;
        assert_eq!(fitted.iter().map(in_turns).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(tell_turns(&fitted[..1]), None);
    }
}
