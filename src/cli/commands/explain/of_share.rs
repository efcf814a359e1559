//! What a share gets. The share is given as text, by a bundle, or by a name or image in containers.toml.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use super::super::explain_error::ExplainError;
use super::super::tables::{self, Format};
use super::answer::Answer;
use super::edits::Edits;
use super::{Arguments, edits, whose};
use crate::preview::{Whose, preview};
use sublet_core::admit::{
    Candidate, RequestSource, confirmed_inventory, is_remote, lease_for, remove_earlier_grant, request_of,
};
use sublet_core::config::Config;
use sublet_core::config_files::{self, Known};
use sublet_core::grant::grant;
use sublet_core::inventory::{self, Inventory};
use sublet_core::ledger::{Container, LEASE_ANNOTATION, LeaseId, Store};
use sublet_core::oci::{self, JsonFile, container_root, containers_by_name};
use sublet_core::process::Process;
use sublet_core::request::has_sublet_annotations;
use sublet_core::text::safe;

/// Runs it.
///
/// # Errors
/// A request that would be refused is refused here with the same words.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    let named = [&arguments.name, &arguments.image, &arguments.service].into_iter().any(Option::is_some);
    if arguments.bundle.is_none() && arguments.annotations().next().is_none() && !named {
        return Err(ExplainError::Nothing.into());
    }
    // A bundle that a user can name is their own.
    let whose = whose::whose(arguments.rootless || arguments.bundle.is_some(), config);
    let (mut spec, rootfs) = read_spec(arguments)?;
    // What sublet has put into the config.json of a container that was created is taken out.
    let earlier = oci::annotations(&spec)?.remove(LEASE_ANNOTATION);
    if earlier.is_some() {
        remove_earlier_grant(&mut spec)?;
    }
    let (source, given_by) = source(arguments, &spec)?;
    let request = request_of(&source, &spec, config)?;
    let mut inventory = inventory_for(whose, config)?;
    let tree = oci::Tree::open(&spec, &rootfs)?;
    let image = oci::inspect(&spec, &tree, &request, &inventory, config)?;
    let mut ledger = Store::open(&config.state_dir)?.peek()?;
    ledger.leases.retain(|lease| earlier.as_deref() != Some(lease.id.as_str()));
    let id = LeaseId::random()?;
    let placement = preview(&request, &id, &mut inventory, &ledger, whose, config)?;
    let container = Container {
        uid: nix::unistd::geteuid().as_raw(),
        id: "explain".into(),
        bundle: arguments.bundle.clone().unwrap_or_default(),
        rootfs,
        record: PathBuf::new(),
    };
    let candidate = Candidate { container, owner: Process::current()?, engine: None };
    oci::check_no_other_daemon(&image, placement.daemon.is_some())?;
    let lease = lease_for(&candidate, &placement, &image, id, config);
    let grant = grant(&placement, &lease, &request.capabilities, &image, &inventory, &request.over(config));
    oci::check_mps_directories(&spec, &tree, &grant)?;
    let answer = Answer::of(&request, &placement, &lease, &grant.warnings, &inventory);
    match arguments.format {
        Format::Json => {
            let edits = arguments.edits.then(|| Edits::of(&grant));
            let whose = whose::word(whose, config);
            tables::json(&Document { schema: "sublet.explain/1", whose, given_by, answer: &answer, edits })?;
        }
        Format::Table => {
            if let Some(given_by) = given_by {
                println!("{given_by}\n");
            }
            if let Some(whose) = whose::remark(whose, config) {
                println!("{:<10} {whose}", "For");
            }
            println!("{answer}");
            match (arguments.edits, &arguments.bundle) {
                (false, _) => println!("\nWith --edits: its environment, device nodes and mounts."),
                (true, None) => edits::print(&grant),
                (true, Some(_)) => {
                    let before = spec.clone();
                    oci::edit(&mut spec, &grant)?;
                    println!("\nEdits to config.json\n{}", edits::diff(&before, &spec)?);
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
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

/// The devices. They are those of root's containers, which do not come from `sublet serve`.
pub fn inventory_for(whose: Whose, config: &Config) -> anyhow::Result<Inventory> {
    Ok(match whose {
        Whose::Root if is_remote(config) => inventory::load(config)?,
        _ => confirmed_inventory(config)?,
    })
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
            let known = Known { name: text(&arguments.name), image: text(&arguments.image), service };
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
    for (key, value) in arguments.annotations() {
        annotations.insert(key.clone(), Value::String(value.clone()));
    }
    Ok((spec, rootfs))
}
