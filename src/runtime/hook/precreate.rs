//! `precreate`: Podman passes the whole config.json before it starts anything, and uses the one that the hook returns.
//! So the environment can be edited here, as by the shim. The container's pid is not known yet.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use nix::unistd::geteuid;
use serde_json::Value;

use sublet_core::admit::{Admission, AdmitError, Candidate, Engine, Leases, RequestSource};
use sublet_core::config::Config;
use sublet_core::ledger::{Container, LEASE_ANNOTATION, LeaseId, Store};
use sublet_core::log::{Level, Log, one_line};
use sublet_core::names::replace_ids;
use sublet_core::oci::JsonFile;
use sublet_core::oci::container_root::podman_id;
use sublet_core::oci::hooks::{self, Stage};
use sublet_core::process::{Process, confine, inheritance};

/// How long Podman may take to write config.json.
const INPUT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest config.json that is read, as for the shim.
const LONGEST: usize = 16 << 20;

/// Reads config.json from standard input and writes the one to use to standard output.
///
/// On a refusal this program does not fail, because Podman would show only its exit status. Instead it returns a
/// config.json that makes the container's creation fail with the reason.
pub(super) fn precreate(waits: Option<&Engine>, log: &Log) -> anyhow::Result<()> {
    // First of all, find the process that will be responsible for the lease.
    let engine = Process::find(confine::engine());
    let file = read()?;
    let mut spec = file.parse()?;
    let refusal = match admit(&spec, engine, waits, log) {
        Ok(true) => return Ok(()),
        Ok(false) => return print(&file.text),
        Err(error) => replace_ids(&error.to_string()),
    };
    report(log, Level::Error, &spec, &refusal);
    hooks::add_refusal(&mut spec, &one_line(&refusal))?;
    print(&serde_json::to_vec(&spec).map_err(not_returned)?)
}

fn read() -> anyhow::Result<JsonFile> {
    let text =
        sublet_core::bounded_input::read(std::io::stdin(), None, LONGEST, Instant::now() + INPUT_TIMEOUT)
            .map_err(|error| anyhow!("config.json on standard input: {error}"))?;
    ensure!(!text.trim_ascii().is_empty(), "config.json on standard input: it is empty");
    Ok(JsonFile { path: PathBuf::from("config.json from standard input"), text })
}

/// Takes a share for the container and passes Podman the edited config.json. `false`: it asks for none, or another entry
/// point has already given it one.
fn admit(spec: &Value, engine: Option<Process>, waits: Option<&Engine>, log: &Log) -> anyhow::Result<bool> {
    // Podman 5 runs the hook in the bundle.
    let bundle = std::env::current_dir().unwrap_or_default();
    let source = RequestSource::of(spec, &bundle, None).map_err(AdmitError::from)?;
    let Some(source) = source else { return Ok(false) };
    let config = sublet_core::config_files::load()?;
    source.check_without_shim(&config)?;
    let owner = Process::current()
        .map_err(|error| anyhow!("cannot read when this process started (is /proc mounted?): {error}"))?;
    let leases = Leases::of(&config);
    let container = leases.locate_rootfs(container(spec)?, spec, &bundle)?;
    let candidate = Candidate { container, rootfs: None, owner, engine: waits };
    let is_first = spec.pointer("/annotations").is_none_or(|all| all.get(LEASE_ANNOTATION).is_none());
    if let Some(engine) = engine.filter(|_| is_first) {
        leases.abandon(candidate.container.uid, &candidate.container.id, engine)?;
    }
    let mut edited = spec.clone();
    let Admission::Granted { lease, mut warnings } = leases.admit(&candidate, &source, &mut edited)? else {
        return Ok(false);
    };
    warnings.extend(pod_warning(spec, &config));
    for warning in warnings {
        report(log, Level::Warning, spec, &warning);
    }
    let finished = finish(edited, &lease, &leases, engine);
    if finished.is_err() {
        let _ = leases.withdraw(&lease).inspect_err(|error| tracing::warn!("{error}"));
    }
    finished.map(|()| true)
}

/// Adds sublet's hooks, makes `engine` responsible for the lease and passes the edited config.json to it.
fn finish(
    mut spec: Value,
    lease: &LeaseId,
    leases: &Leases<'_>,
    engine: Option<Process>,
) -> anyhow::Result<()> {
    let program = hooks::program().context(
        "sublet-hook cannot find its own program file; install it as /usr/libexec/sublet/sublet-hook",
    )?;
    for stage in [Stage::CreateRuntime, Stage::Poststop] {
        hooks::add(&mut spec, stage, &program, inheritance::honoured_config().as_deref())?;
    }
    // If the engine has ended, nothing reads the output.
    let engine = engine.filter(Process::is_alive).context("the engine that ran this hook has ended")?;
    let text = serde_json::to_vec(&spec).map_err(not_returned)?;
    leases.hand_over(lease, engine)?;
    print(&text)
}

/// The container, as far as it is known. The hook that binds the lease adds the rest.
fn container(spec: &Value) -> anyhow::Result<Container> {
    let root = spec.pointer("/root/path").and_then(Value::as_str).map(PathBuf::from);
    let rootfs = root.filter(|root| root.is_absolute()).and_then(|root| root.canonicalize().ok());
    let rootfs = rootfs.context("root.path in config.json is not the absolute path of a directory")?;
    let id = Some(id(spec).to_owned()).filter(|id| !id.is_empty()).or_else(|| podman_id(&rootfs));
    Ok(Container { uid: geteuid().as_raw(), id: id.unwrap_or_default(), rootfs, ..Container::default() })
}

/// The container's id. Podman gives it only in the name of the cgroup (`…/libpod-<id>`, `…:libpod:<id>`,
/// `…/libpod-payload-<id>`). Empty if Podman creates no cgroup: then its storage tells.
pub(super) fn id(spec: &Value) -> &str {
    ids(spec).last().unwrap_or_default()
}

/// The pod's id. The cgroups of its containers are below its own (`…/<pod>/libpod-<id>`,
/// `…-libpod_pod_<pod>.slice:libpod:<id>`).
fn pod(spec: &Value) -> Option<&str> {
    let ids: Vec<&str> = ids(spec).collect();
    ids.len().checked_sub(2).map(|at| ids[at])
}

/// Podman's ids, 64 hex digits each, in the name of the cgroup.
fn ids(spec: &Value) -> impl Iterator<Item = &str> {
    let path = spec.pointer("/linux/cgroupsPath").and_then(Value::as_str).unwrap_or_default();
    let pieces = path.split(|character: char| !character.is_ascii_alphanumeric());
    pieces.filter(|piece| piece.len() == 64 && piece.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// A warning if another container of the same pod already has a share, because annotations of a pod apply to each of
/// its containers.
fn pod_warning(spec: &Value, config: &Config) -> Option<String> {
    let pod = pod(spec)?;
    let ledger = Store::open(&config.state_dir).ok()?.read().ok()?;
    let is_in_pod = |path: &PathBuf| path.to_string_lossy().contains(pod);
    let in_pod = |lease: &&sublet_core::ledger::Lease| {
        lease.init.as_ref().and_then(|init| init.cgroup.as_ref()).is_some_and(is_in_pod)
    };
    let other = ledger.leases.iter().find(in_pod)?;
    Some(format!(
        "container {} of the same pod holds a share too: with sublet.* annotations on the pod, each of its \
         containers gets its own share; sublet.KEY/NAME is for the container NAME alone",
        sublet_core::text::safe(&other.container.id)
    ))
}

/// [`super::report`], with the container's name.
fn report(log: &Log, level: Level, spec: &Value, message: &str) {
    let place = || container(spec).ok().map(|container| sublet_core::text::safe(&container.name()));
    let name = Some(id(spec).to_owned()).filter(|id| !id.is_empty()).or_else(place);
    let line = match name {
        Some(name) => format!("container {name}: {message}"),
        None => format!("a Podman container: {message}"),
    };
    super::report(log, level, &line);
}

fn not_returned(error: impl Into<io::Error>) -> anyhow::Error {
    anyhow!("cannot return config.json to Podman: {}", error.into())
}

fn print(text: &[u8]) -> anyhow::Result<()> {
    let mut output = std::io::stdout().lock();
    output.write_all(text).and_then(|()| output.flush()).map_err(not_returned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "452325ed5f7f35588a551450be5d67fde0f40a94317f3f8f8a275a3aebf20f2a";

    #[test]
    fn the_id_is_in_the_name_of_the_cgroup() {
        let paths = ["/libpod_parent/libpod-", "/a/b/libpod-payload-", "machine.slice:libpod:"];
        for path in paths {
            assert_eq!(id(&json!({"linux": {"cgroupsPath": format!("{path}{ID}")}})), ID, "{path}");
        }
        let in_pod = format!("/machine-libpod_pod_{}.slice:libpod:{ID}", ID.replace('4', "5"));
        let in_pod = json!({"linux": {"cgroupsPath": in_pod}});
        assert_eq!((id(&in_pod), pod(&in_pod)), (ID, Some(ID.replace('4', "5").as_str())));
        assert_eq!(pod(&json!({"linux": {"cgroupsPath": format!("/libpod-{ID}")}})), None);
        let foreign = [
            json!({}),
            json!({"linux": {"cgroupsPath": null}}),
            json!({"linux": {"cgroupsPath": "/user.slice"}}),
            json!({"linux": {"cgroupsPath": format!("/libpod-{}", &ID[1..])}}),
            json!({"linux": {"cgroupsPath": ["x"]}}),
        ];
        for other in foreign {
            assert_eq!(id(&other), "", "{other}");
        }
    }

    #[test]
    fn a_rootfs_is_absolute_and_there() {
        let dir = tempfile::tempdir().unwrap();
        let found = container(&json!({"root": {"path": dir.path()}})).unwrap();
        assert_eq!(found.rootfs, dir.path().canonicalize().unwrap());
        assert_eq!((found.id.as_str(), found.bundle.to_str()), ("", Some("")));
        for spec in
            [json!({}), json!({"root": {"path": "rootfs"}}), json!({"root": {"path": "/none/at/all"}})]
        {
            let error = container(&spec).unwrap_err().to_string();
            assert_eq!(error, "root.path in config.json is not the absolute path of a directory", "{spec}");
        }
    }
}
