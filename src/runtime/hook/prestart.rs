//! `prestart`, and `createRuntime` without a lease: the container's namespaces exist, its own program does not run
//! yet, and its config.json was not edited.

use std::path::{Path, PathBuf};

use anyhow::{anyhow, bail};
use serde_json::{Map, Value};

use super::{State, Status};
use sublet_core::admit::{self, Admission, Engine, RequestSource};
use sublet_core::ledger::Container;
use sublet_core::log::{Level, Log};
use sublet_core::oci::JsonFile;
use sublet_core::oci::cdi::Asked;
use sublet_core::process::Process;
use sublet_core::text::{safe, safe_path};
use sublet_core::{config_files, process};

/// Gives the container its share, if it asks for one: by its annotations, or `by_cdi`.
pub(super) fn prestart(
    state: &State,
    by_cdi: Option<&Asked>,
    engine: Option<&Engine>,
    log: &Log,
) -> anyhow::Result<()> {
    let id = safe(&state.id);
    let failed = |why: String| anyhow!("container {id}: {why}");
    let bundle = bundle(state).map_err(failed)?;
    let file = JsonFile::read(&bundle.join("config.json")).map_err(|error| failed(error.to_string()))?;
    if by_cdi.is_none() && !file.mentions_sublet() && !state.has_sublet_annotations() {
        return Ok(());
    }
    let mut spec = file.parse().map_err(|error| failed(error.to_string()))?;
    add_annotations(&mut spec, state);
    // The name of the hook in config.json also mentions sublet, so the spec decides.
    let source = RequestSource::of(&spec, &bundle, None).map_err(|error| failed(error.to_string()))?;
    if by_cdi.is_none() && source.is_none() {
        return Ok(());
    }
    let init = init(state).map_err(failed)?;
    // Without root's rights on the host it can change no device cgroup and enter no other namespaces.
    if !nix::unistd::geteuid().is_root() || process::is_nested() {
        bail!(
            "container {id}: a prestart hook or CDI device cannot give a rootless container its share, because the hook \
             may neither open devices nor enter other namespaces; use annotations, with Podman's precreate hook or \
             sublet-runtime"
        );
    }
    let config = config_files::load()?;
    let container = container(state, &bundle, &spec).map_err(failed)?;
    let report = |level, text: &str| log.write(level, &format!("container {id}: {text}"));
    let admitted = admit::admit_late(&container, init, &spec, by_cdi, engine, &config);
    let (admission, environment) = admitted.map_err(|error| failed(error.to_string()))?;
    match admission {
        Admission::NoShare => {}
        Admission::AlreadyGranted(lease) => report(Level::Debug, &format!("it already has lease {lease}")),
        Admission::Granted { warnings, .. } => {
            for warning in &warnings {
                report(Level::Warning, warning);
            }
        }
    }
    if let Some(environment) = environment {
        report(Level::Info, &environment);
    }
    Ok(())
}

/// Frees the lease of an ended container whose config.json names none.
pub(super) fn free_lease(state: &State) -> anyhow::Result<()> {
    let Some(bundle) = state.bundle.as_ref().and_then(|bundle| bundle.canonicalize().ok()) else {
        return Ok(());
    };
    let config = config_files::load()?;
    let container = identify(state, bundle);
    admit::end_late(&container, &config).map_err(|error| super::not_ended(state, &error))
}

fn bundle(state: &State) -> Result<PathBuf, String> {
    let bundle = state.bundle.as_ref().filter(|bundle| bundle.is_absolute());
    let bundle = bundle.ok_or("`bundle` in the state on standard input is not an absolute path")?;
    bundle.canonicalize().map_err(|error| format!("bundle {} cannot be used: {error}", safe_path(bundle)))
}

/// The first process, identified before anything else of it is read.
fn init(state: &State) -> Result<Process, String> {
    match state.status {
        Status::Creating | Status::Created => {}
        Status::Running => {
            return Err("it already runs, and a share can only be given before the start".to_owned());
        }
        Status::Stopped => return Err("it has stopped".to_owned()),
    }
    let pid = state.pid.filter(|&pid| pid > 0).ok_or("the state on standard input has no `pid`")?;
    Process::find(pid).ok_or_else(|| format!("its first process {pid} has ended"))
}

/// The annotations that the runtime reports take precedence, because the container was created with them.
fn add_annotations(spec: &mut Value, state: &State) {
    let Some(spec) = spec.as_object_mut() else { return };
    let entry = spec.entry("annotations").or_insert(Value::Null);
    if entry.is_null() {
        *entry = Value::Object(Map::new());
    }
    if let Some(annotations) = entry.as_object_mut() {
        annotations.extend(state.annotations().map(|(key, value)| (key.clone(), value.as_str().into())));
    }
}

fn container(state: &State, bundle: &Path, spec: &Value) -> Result<Container, String> {
    let root = spec.pointer("/root/path").and_then(Value::as_str).ok_or("config.json has no root.path")?;
    let root = bundle.join(root);
    let unusable = |error| format!("root.path {} cannot be used: {error}", safe_path(&root));
    let rootfs = root.canonicalize().map_err(unusable)?;
    Ok(Container { rootfs, ..identify(state, bundle.to_owned()) })
}

/// The names that identify the container. Hooks do not get the path of the runtime's record.
fn identify(state: &State, bundle: PathBuf) -> Container {
    let uid = nix::unistd::geteuid().as_raw();
    Container { uid, id: state.id.clone(), bundle, ..Container::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state(text: &Value) -> State {
        State::parse(text.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn annotations_of_the_runtime_win_over_the_file() {
        let state = state(&json!({"id": "c", "status": "creating", "annotations": {"a": "1", "b": "2"}}));
        for (mut spec, expected) in [
            (json!({"annotations": {"b": "x", "c": "3"}}), json!({"b": "2", "c": "3", "a": "1"})),
            (json!({"annotations": null}), json!({"a": "1", "b": "2"})),
            (json!({}), json!({"a": "1", "b": "2"})),
        ] {
            add_annotations(&mut spec, &state);
            assert_eq!(spec["annotations"], expected);
        }
    }

    #[test]
    fn a_state_without_a_process_or_of_a_running_container_is_refused() {
        let of = |more: &Value| {
            let mut text = json!({"id": "c", "status": "creating"});
            text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            init(&state(&text)).unwrap_err()
        };
        assert_eq!(of(&json!({})), "the state on standard input has no `pid`");
        assert_eq!(of(&json!({"pid": 0})), "the state on standard input has no `pid`");
        assert_eq!(of(&json!({"pid": i32::MAX})), "its first process 2147483647 has ended");
        assert_eq!(of(&json!({"status": "stopped", "pid": 1})), "it has stopped");
        assert!(of(&json!({"status": "running", "pid": 1})).starts_with("it already runs"));
        let no_bundle = state(&json!({"id": "c", "status": "creating", "bundle": "b"}));
        assert!(bundle(&no_bundle).unwrap_err().contains("not an absolute path"));
    }
}
