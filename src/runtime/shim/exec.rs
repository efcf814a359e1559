//! `exec`: the environment in config.json reaches only a container's first process. Later processes
//! get the same edits here, in a copy of the engine's process file or on the command line.
//!
//! The low-level runtime's record says that the container has a share, and its config.json says which. So `exec` needs
//! no inventory, and of the ledger only the record of its MPS daemon, if that can be read. Only a container that may have been
//! moved to another GPU since is looked for in the ledger, and a hook's container, whose record names no lease.

use std::cell::LazyCell;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{Call, Dialect, Exec};
use serde_json::Value;
use sublet_core::admit::{self, AdmitError, Leases};
use sublet_core::config::{self, Config, OWN_PREFIXES, WithoutDaemon};
use sublet_core::config_files::ConfigError;
use sublet_core::grant::{self, Environment, refused_beside};
use sublet_core::ledger::{
    LEASE_ANNOTATION, LEASE_RECORD_ANNOTATION, Lease, LeaseId, Record, Store, is_remote,
};
use sublet_core::mps;
use sublet_core::oci::{self, FileError, JsonFile};
use sublet_core::text::{safe, safe_path};

/// How long reading a process file may take if it is a pipe.
const FILE_LIMIT: Duration = Duration::from_secs(10);

/// Longest process file that is read. It holds the whole environment, which Linux limits to 6 MiB.
const LONGEST: usize = 16 << 20;

/// Above the descriptor numbers that `--preserve-fds` may refer to.
const HIGH: i32 = 500;

/// Gives a process that joins a container with a share the share's environment, or does not start it.
pub(super) fn exec<'a>(call: &Call<'a>, exec: &'a Exec) -> anyhow::Result<i32> {
    // Parsed only when needed, because most containers have no share.
    let config = LazyCell::new(|| call.files.config());
    let Some((id, record, share)) = find_target(call, exec, &config)? else { return call.pass_on() };
    let config = config.as_ref().ok();
    // Its options would replace config.json's environment, and a command line is shown to every user.
    let takes_none = exec.process.is_none() && exec.env.is_empty() && call.low_level.dialect == Dialect::Crun;
    let environment = match enter(&share, id, &record, config) {
        Ok(()) => share.moved.as_ref().filter(|_| !takes_none).unwrap_or(&share.environment).clone(),
        Err(error) if config.is_some_and(|config| config.mps.exec_without_daemon == WithoutDaemon::NoGpu) => {
            if takes_none {
                bail!(
                    "{error}; and crun takes an environment without a GPU only on its command line, which every user can \
                     read: pass the process with --process, or its variables with --env"
                );
            }
            sublet_core::process::confine::refuse_drivers().map_err(|error| {
                anyhow!(
                    "the process cannot be kept away from the GPU, which `[mps] exec_without_daemon` asks for: seccomp: \
                     {error}"
                )
            })?;
            call.warn(&format!("container {}: {error}: the process starts without the GPU", safe(id)));
            without_gpu(&share.environment)
        }
        Err(error) => return Err(error.into()),
    };
    let options = if let Some(file) = &exec.process {
        vec![option_form(exec, "process", "-p", "--process").into(), write_edited_copy(file, &environment)?]
    } else {
        let option = option_form(exec, "env", "-e", "--env");
        options(&environment, &share.environment, &exec.env, call.low_level.dialect, option)
    };
    let (before, behind) = call.args.split_at(exec.options_end);
    Err(call.become_low_level(&[before, &options, behind].concat()))
}

/// The option by its letter if the command line has it so: runc refuses both forms together.
fn option_form<'f>(exec: &Exec, name: &str, letter: &'f str, long: &'f str) -> &'f str {
    if exec.letters.contains(&name) { letter } else { long }
}

/// The container to join, by id and record, with its share.
type Target<'a> = (&'a str, PathBuf, Share);

fn find_target<'e>(
    call: &Call<'e>,
    exec: &'e Exec,
    config: &impl std::ops::Deref<Target = Result<Config, ConfigError>>,
) -> anyhow::Result<Option<Target<'e>>> {
    // The runtime itself refuses a malformed id.
    let find = |id: &'e OsStr| -> anyhow::Result<Option<Target<'e>>> {
        let named = id.to_str().and_then(|id| Some((id, call.record(id)?)));
        let Some((id, record)) = named else { return Ok(None) };
        if !may_have_share(&record)? {
            return Ok(None);
        }
        let share = find_share(sublet_core::process::inheritance::effective_user(), id, &record, config)?;
        Ok(share.map(|share| (id, record, share)))
    };
    if let Some(id) = &call.line.id {
        return find(id);
    }
    let mut certain = None;
    for name in &exec.names {
        let Some(next) = find(name)? else { continue };
        if exec.process.is_none() || certain.is_some() {
            // It is of a later version of the runtime.
            bail!(
                "exec has an option that this sublet does not know, and one of the words after it is a container with a \
                 share of a GPU: pass the process with --process, or leave the option out"
            );
        }
        certain = Some(next);
    }
    Ok(certain)
}

/// As `share`, for a process that must not see any device.
fn without_gpu(share: &Environment) -> Environment {
    let mut environment = share.clone();
    environment.set.retain(|(name, _)| name != "CUDA_VISIBLE_DEVICES");
    environment.set.insert(0, ("CUDA_VISIBLE_DEVICES".to_owned(), String::new()));
    environment
}

/// Returns the path of a copy of `file` with the share's environment. The original is only read, because it belongs to the
/// caller or may be a pipe.
fn write_edited_copy(file: &Path, environment: &Environment) -> anyhow::Result<OsString> {
    let file = read_process_file(file)?;
    let mut process = file.parse()?;
    oci::edit_environment(&mut process, environment)?;
    let copied = serde_json::to_vec(&process).map_err(io::Error::from).and_then(|text| write_memfd(&text));
    Ok(copied.map_err(|error| anyhow!("the process file cannot be copied: {error}"))?.into())
}

/// Follows links, because `/dev/stdin` is one, often to a pipe.
fn read_process_file(path: &Path) -> anyhow::Result<JsonFile> {
    let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let text = opened
        .and_then(|file| sublet_core::bounded_input::read(file, None, LONGEST, Instant::now() + FILE_LIMIT));
    let failed = |why| anyhow!("the process file {} cannot be used: {why}", safe_path(path));
    Ok(JsonFile { path: path.to_owned(), text: text.map_err(failed)? })
}

/// Writes `text` to a file that survives exec(2). Returns a path by which the next program can open it.
fn write_memfd(text: &[u8]) -> io::Result<String> {
    let mut file = std::fs::File::from(memfd_create(c"sublet-process", MFdFlags::empty())?);
    file.write_all(text)?;
    // Kept open until the end, at a high number if the limit allows, otherwise at its own number.
    let number = match fcntl(&file, FcntlArg::F_DUPFD(HIGH)) {
        Ok(number) => number,
        Err(_) => std::os::fd::IntoRawFd::into_raw_fd(file),
    };
    Ok(format!("/proc/self/fd/{number}"))
}

/// Options in the form of `option`, to be placed after the user's own `given`. In both runtimes the last one counts.
///
/// runc adds the options to config.json's environment, which already has the share's (utils and `getProcess` in
/// exec.go). crun replaces that environment by the options (libcrun/container.c, `if (process->env_len)`). Without
/// options, both use config.json's.
fn options(
    environment: &Environment,
    share: &Environment,
    given: &[OsString],
    dialect: Dialect,
    option: &str,
) -> Vec<OsString> {
    if given.is_empty() && environment == share {
        return Vec::new();
    }
    let given = given.iter().map(|entry| entry.as_bytes().split(|byte| *byte == b'=').next());
    let is_given = |name: &str| given.clone().any(|given| given == Some(name.as_bytes()));
    let pair = |(name, value): &(String, String)| format!("{name}={value}");
    let defaults = environment.default.iter().filter(|(name, _)| !is_given(name)).filter_map(|default| {
        let is_refused = refused_beside(&default.0).is_some_and(is_given);
        match dialect {
            Dialect::Crun => (!is_refused).then(|| pair(default)),
            // No option removes a variable, but frameworks treat an empty one as unset.
            Dialect::Runc => is_refused.then(|| format!("{}=", default.0)),
        }
    });
    let entries = environment.set.iter().map(pair).chain(defaults);
    entries.flat_map(|entry| [OsString::from(option), OsString::from(entry)]).collect()
}

/// Why the share of a container cannot be determined.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnterError {
    /// The runtime's record cannot be read.
    #[error(
        "it has a share of a GPU, and its record {} cannot be read ({why}): sublet starts no process in it \
         without knowing its share",
        safe_path(path)
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
        safe_path(path)
    )]
    Changed { lease: String, path: PathBuf },
    /// It has sublet's annotations but no lease in them, so only the ledger knows its share.
    #[error("it has sublet.* annotations, but sublet cannot find out whether it has a share: {0}")]
    Undetermined(String),
}

/// The share of a process that joins a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Share {
    /// The edit to its environment.
    environment: Environment,
    /// The public directory of its MPS daemon on the host; `None`: the share needs no daemon.
    daemon: Option<PathBuf>,
    /// The edit as it is since the container was moved to another GPU.
    moved: Option<Environment>,
}

/// The share of the container whose low-level runtime keeps its record in `record`; `None`: it has none.
///
/// # Errors
/// It has a share, or may have one, and it is unknown which.
pub(super) fn find_share(
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
        let share = share_of_spec(&spec, &names);
        let ledger = config
            .as_ref()
            .ok()
            .filter(|_| may_have_moved(&spec))
            .and_then(|config| Store::open(&config.state_dir).and_then(|store| store.peek()).ok());
        let now = ledger.as_ref().and_then(|ledger| ledger.lease(&LeaseId::parse(lease)?));
        let moved = now.and_then(|now| since_move(&share.environment, &spec, now));
        return Ok(Some(Share { moved, ..share }));
    }
    find_in_ledger(uid, id, record, bundle, config)
}

/// Whether the runtime's record mentions sublet at all. The record is scanned and not parsed, because most containers
/// have no share. Without a record there is no such container, or its runtime keeps another kind of record. An existing
/// record that cannot be read may mention it: without its share a process would use the whole GPU.
///
/// # Errors
/// It mentions sublet, and is too large to be read.
pub(super) fn may_have_share(record: &Path) -> Result<bool, EnterError> {
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
    let environment = Environment { set, default, remove_prefixes: OWN_PREFIXES.map(String::from).to_vec() };
    Share { environment, daemon, moved: None }
}

/// Whether the container's GPU memory may be moved, by the lease in its config.json.
fn may_have_moved(spec: &Value) -> bool {
    let record = spec["annotations"][LEASE_RECORD_ANNOTATION].as_str();
    record.is_some_and(|record| record.contains("\"suspend\":"))
}

/// `environment` of config.json with the GPU that its lease has now; `None`: it is the same.
fn since_move(environment: &Environment, spec: &Value, now: &Lease) -> Option<Environment> {
    let record = spec["annotations"][LEASE_RECORD_ANNOTATION].as_str()?;
    let [old] = &Lease::from_annotation(record)?.devices[..] else { return None };
    let new = now.devices.first().filter(|new| *new != old)?;
    let replaced =
        |(name, value): &(String, String)| (name.clone(), value.replace(old.as_str(), new.as_str()));
    Some(Environment { set: environment.set.iter().map(replaced).collect(), ..environment.clone() })
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
            let asks = admit::asks_for_a_share(&spec, &annotations, None);
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
fn enter(share: &Share, id: &str, record: &Path, config: Option<&Config>) -> Result<(), AdmitError> {
    let Some(public) = &share.daemon else { return Ok(()) };
    let entered = match config {
        Some(config) if is_remote(config) => admit::enter_remotely(config, public, id, record),
        Some(config) => mps::ensure_answering(public, config).map_err(AdmitError::from),
        None => mps::ensure_answering(public, &Config::default()).map_err(AdmitError::from),
    };
    entered.map_err(|error| AdmitError::NoDaemon(Box::new(error)))
}

#[cfg(test)]
#[path = "exec_tests.rs"]
mod tests;
