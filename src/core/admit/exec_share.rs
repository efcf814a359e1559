//! A process that joins a running container. The low-level runtime's record says that the container has a share, and
//! its config.json says which. So `exec` needs neither ledger nor inventory nor configuration.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{AdmitError, Leases, request_of_spec};
use crate::config::{self, Config};
use crate::config_files::ConfigError;
use crate::grant::{self, Environment};
use crate::ledger::{LEASE_ANNOTATION, Record};
use crate::mps;
use crate::oci::{self, FileError, JsonFile};
use crate::text::safe;

/// Why the share of a container cannot be determined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum EnterError {
    /// The runtime's record cannot be read.
    #[error(
        "it has a share of a GPU, and its record {} cannot be read ({why}): sublet starts no process in it \
         without knowing its share",
        safe(&path.to_string_lossy())
    )]
    Record { path: PathBuf, why: String },
    /// The config.json that it was created from cannot be read.
    #[error("it has a share of a GPU, and its config.json cannot be read: {0}")]
    Spec(#[from] FileError),
    /// That config.json belongs to another container, or was edited since.
    #[error(
        "it has the share of lease {}, but {} no longer says so: restore the file that it was created \
         with, or recreate the container",
        safe(lease),
        safe(&path.to_string_lossy())
    )]
    Changed { lease: String, path: PathBuf },
    /// It has sublet's annotations but no lease in them, so only the ledger knows its share.
    #[error("it has sublet.* annotations, but sublet cannot find out whether it has a share: {0}")]
    Undetermined(String),
}

/// The share of a process that joins a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// The edit to its environment.
    pub environment: Environment,
    /// The public directory of its MPS daemon on the host; `None`: the share needs no daemon.
    pub daemon: Option<PathBuf>,
}

/// The share of the container whose low-level runtime keeps its record in `record`; `None`: it has none.
///
/// # Errors
/// It has a share, or may have one, and it is unknown which.
pub fn find_share(
    uid: u32,
    id: &str,
    record: &Path,
    config: &Result<Config, ConfigError>,
) -> Result<Option<Share>, EnterError> {
    let unreadable = |why: String| EnterError::Record { path: record.to_owned(), why };
    let known = Record::read(record).map_err(|error| unreadable(safe(&error.to_string())))?;
    let names = default_names(config.as_ref().ok());
    let bundle = known.as_ref().and_then(|known| known.bundle.as_deref());
    if let Some(lease) = known.as_ref().and_then(|known| known.lease.as_deref()) {
        let spec = read_spec(record, bundle)?;
        let (path, spec) = spec.ok_or_else(|| unreadable("it names no bundle".to_owned()))?;
        if spec["annotations"][LEASE_ANNOTATION].as_str() != Some(lease) {
            return Err(EnterError::Changed { lease: lease.to_owned(), path });
        }
        return Ok(Some(share_of_spec(&spec, &names)));
    }
    find_in_ledger(uid, id, record, bundle, config)
}

/// Whether the runtime's record mentions sublet at all. The record is scanned and not parsed, because most containers
/// have no share. Without a record there is no such container, or its runtime keeps another kind of record. An existing
/// record that cannot be read may mention it: without its share a process would use the whole GPU.
///
/// # Errors
/// It mentions sublet, and is too large to be read.
pub fn may_have_share(record: &Path) -> Result<bool, EnterError> {
    for name in ["state.json", "config.json"] {
        let path = record.join(name);
        match JsonFile::read(&path) {
            Ok(file) => return Ok(file.mentions_sublet()),
            Err(error) if error.is_missing() => {}
            Err(FileError::TooLarge { .. }) if oci::mentions_sublet(&path) => {
                return Err(EnterError::Record { path, why: "it is larger than 16 MiB".to_owned() });
            }
            // The runtime cannot read it either.
            Err(FileError::TooLarge { .. } | FileError::NotRegular { .. }) => return Ok(false),
            Err(_) => return Ok(true),
        }
    }
    Ok(true)
}

/// The config.json that the container's runtime reads for `exec`: crun its own copy, runc the one in the bundle
/// (`getProcess` of runc's `utils_linux.go`, `libcrun_container_exec_process_file` of crun).
fn read_spec(record: &Path, bundle: Option<&Path>) -> Result<Option<(PathBuf, Value)>, EnterError> {
    let copy = record.join("config.json");
    let path = if copy.is_file() { Some(copy) } else { bundle.map(|bundle| bundle.join("config.json")) };
    path.map(|path| Ok((path.clone(), JsonFile::read(&path)?.parse()?))).transpose()
}

/// The share according to `spec`.
fn share_of_spec(spec: &Value, default_names: &[String]) -> Share {
    let env = spec.pointer("/process/env").and_then(Value::as_array).into_iter().flatten();
    let pairs = || env.clone().filter_map(Value::as_str).filter_map(|entry| entry.split_once('='));
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let set = pairs().filter(|(name, _)| config::is_own_name(name)).map(owned).collect();
    let is_default = |name: &str| default_names.iter().any(|known| known == name);
    let default = pairs().filter(|(name, _)| is_default(name)).map(owned).collect();
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    // sublet's mounts come last, and the last mount at a path lies on top.
    let daemon = mounts.rev().find(|mount| mount["destination"] == grant::MPS_DIR);
    let daemon = daemon.and_then(|mount| mount["source"].as_str()).map(PathBuf::from);
    let environment = Environment { set, default, remove_prefixes: grant::own_prefixes() };
    Share { environment, daemon }
}

/// The names of variables that a share sets only if they are absent.
fn default_names(config: Option<&Config>) -> Vec<String> {
    let env = config.map_or_else(|| Config::default().grant.env, |config| config.grant.env.clone());
    env.into_keys().chain([grant::TRITON_PATH.to_owned()]).collect()
}

/// Decides for a container whose record names no lease. A hook may have given it one that only the ledger knows.
fn find_in_ledger(
    uid: u32,
    id: &str,
    record: &Path,
    bundle: Option<&Path>,
    config: &Result<Config, ConfigError>,
) -> Result<Option<Share>, EnterError> {
    let spec = read_spec(record, bundle).ok().flatten().map(|(_, spec)| spec).unwrap_or_default();
    let found = match config {
        Ok(config) => Leases::of(config).ledger_of_hooks().map_err(|error| error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    let (config, ledger) = match (config, found) {
        (Ok(config), Ok(Some(ledger))) => (config, ledger),
        (_, Err(why)) => {
            let bundle = bundle.unwrap_or(Path::new(""));
            let annotations = oci::own_annotations(&spec, bundle).unwrap_or_default();
            // If not, sublet knows nothing about this container, so an error here does not concern it.
            let asks = request_of_spec::asks_for_a_share(&spec, &annotations, None);
            return if asks { Err(EnterError::Undetermined(why)) } else { Ok(None) };
        }
        _ => return Ok(None),
    };
    let Some(lease) = ledger.find_by_record(uid, id, record) else { return Ok(None) };
    let daemon = lease.daemon.as_ref().map(|key| key.public(&config.state_dir));
    // Runtimes other than runc and crun keep another kind of record.
    let own = JsonFile::read(&lease.container.bundle.join("config.json")).and_then(|file| file.parse());
    let spec = if spec.is_null() { own.unwrap_or_default() } else { spec };
    Ok(Some(Share { daemon, ..share_of_spec(&spec, &default_names(Some(config))) }))
}

/// Makes sure that the daemon of `share` answers, before a process joins its container.
///
/// # Errors
/// It does not answer and cannot be restarted at once.
pub fn enter(share: &Share, id: &str, record: &Path, config: Option<&Config>) -> Result<(), AdmitError> {
    let Some(public) = &share.daemon else { return Ok(()) };
    let entered = match config {
        Some(config) => Leases::of(config).enter(public, id, record),
        None => mps::ensure_answering(public, &Config::default()).map_err(AdmitError::from),
    };
    entered.map_err(|error| AdmitError::NoDaemon(Box::new(error)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn granted() -> Value {
        json!({
            "process": {"env": ["PATH=/bin", "CUDA_VISIBLE_DEVICES=0", "CUDA_MPS_PIPE_DIRECTORY=/run/sublet/mps",
                "SUBLET_DEVICES=GPU-1", "SUBLET_MEMORY_BYTES=9", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.1", "MINE=1"]},
            "mounts": [{"destination": "/run/sublet/mps", "source": "/elsewhere"},
                {"destination": "/run/sublet/mps", "source": "/run/sublet/mps/GPU-1/public"}],
            "annotations": {"sublet.sm": "25", "sublet.lease": "0123456789abcdef"},
        })
    }

    #[test]
    fn a_containers_own_config_json_tells_its_share() {
        let share = share_of_spec(&granted(), &default_names(Some(&Config::default())));
        let names =
            |pairs: &[(String, String)]| pairs.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(
            names(&share.environment.set),
            ["CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "SUBLET_DEVICES", "SUBLET_MEMORY_BYTES"]
        );
        assert_eq!(names(&share.environment.default), ["XLA_PYTHON_CLIENT_MEM_FRACTION"]);
        assert_eq!(share.daemon.as_deref(), Some(Path::new("/run/sublet/mps/GPU-1/public")));
    }

    fn record(lease: &str, bundle: &Path) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let labels = [format!("sublet.lease={lease}"), format!("bundle={}", bundle.display())];
        let state = json!({"init_process_pid": 1, "init_process_start": 1, "config": {"labels": labels}});
        std::fs::write(dir.path().join("state.json"), state.to_string()).unwrap();
        dir
    }

    #[test]
    fn what_it_was_made_from_has_to_be_its_own() {
        let (bundle, config) = (tempfile::tempdir().unwrap(), Ok(Config::default()));
        let of = |dir: &tempfile::TempDir| find_share(0, "c", dir.path(), &config);
        let speaks = |dir: &tempfile::TempDir| may_have_share(dir.path()).unwrap();
        let own = record("0123456789abcdef", bundle.path());
        assert!(matches!(of(&own), Err(EnterError::Spec(_))), "there is none");
        std::fs::write(bundle.path().join("config.json"), granted().to_string()).unwrap();
        assert!(speaks(&own) && of(&own).unwrap().unwrap().daemon.is_some());
        let other = record("00000000000000aa", bundle.path());
        assert!(matches!(of(&other), Err(EnterError::Changed { .. })));
        std::fs::write(own.path().join("state.json"), "{\"sublet.lease\":").unwrap();
        assert!(matches!(of(&own), Err(EnterError::Record { .. })));
        std::fs::write(own.path().join("state.json"), "{\"init_process_pid\":1}").unwrap();
        assert!(!speaks(&own));
        // A socket cannot be opened, as a record cannot for want of a descriptor.
        let unread = tempfile::tempdir().unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(unread.path().join("state.json")).unwrap();
        assert!(speaks(&unread), "it may have a share");
    }
}
