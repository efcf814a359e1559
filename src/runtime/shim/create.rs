//! `create` and `run`: takes a lease for the container, edits config.json, becomes the low-level runtime.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context as _, anyhow, bail};
use serde_json::Value;

use super::{Call, Dialect, Start, containers_by_name};
use sublet_core::admit::{Admission, Candidate, Engine, Leases, RequestSource};
use sublet_core::config::WithoutShare;
use sublet_core::ledger::Container;
use sublet_core::log::Level;
use sublet_core::oci::hooks::{self, Stage};
use sublet_core::oci::{self, FileError, JsonFile};
use sublet_core::process::Process;
use sublet_core::process::inheritance::{self, effective_user};
use sublet_core::text::{safe, safe_path};

/// Admits the container if it asks for a share. `run` deletes the container without another command, so a hook must report
/// its end.
pub(super) fn create(call: &Call<'_>, start: &Start, is_run: bool) -> anyhow::Result<i32> {
    let Some(Asking { file, mut spec, mut source }) = find_request(call, start)? else {
        return call.pass_on();
    };
    if call.low_level.dialect == Dialect::Runc {
        source.annotations.remove(oci::KEEP_GROUPS);
    }
    let config = call.files.config()?;
    let engine = Engine::of(nix::unistd::getppid().as_raw());
    let (container, rootfs) = container(call, start, &spec)?;
    let (bundle, named) = (container.bundle.clone(), container.rootfs.clone());
    let leases = Leases::of(&config);
    let container = leases.locate_rootfs(container, &spec, &bundle)?;
    let candidate = Candidate {
        rootfs: (container.rootfs == named).then(|| Rc::new(rootfs)),
        container,
        owner: Process::current()
            .map_err(|error| anyhow!("cannot read when this process started (is /proc mounted?): {error}"))?,
        engine: engine.as_ref(),
    };
    match leases.admit(&candidate, &source, &mut spec)? {
        Admission::AlreadyGranted(_) | Admission::NoShare => call.pass_on(),
        Admission::Granted { lease, warnings } => {
            for warning in warnings {
                call.warn(&format!("container {}: {warning}", candidate.container.id));
            }
            // A lease that `sublet serve` holds is bound by a hook, because the service does not trust a user's record.
            let binds = leases.are_remote().then_some(Stage::CreateRuntime);
            let hooks: Vec<Stage> = binds.into_iter().chain(is_run.then_some(Stage::Poststop)).collect();
            let error = match candidate.check_wanted() {
                Ok(()) => become_edited(call, &file, spec, &hooks),
                Err(error) => error.into(),
            };
            if let Err(error) = leases.withdraw(&lease) {
                call.warn(&format!("container {}: {error}", candidate.container.id));
            }
            Err(error)
        }
    }
}

/// A container that asks for a share.
pub(super) struct Asking {
    file: JsonFile,
    spec: Value,
    source: RequestSource,
}

/// The container's request, if it asks for a share: by an annotation, a CDI device, a runtime named after a share, or a
/// rule of `containers.toml`. A pod's pause container never does.
///
/// If the runtime cannot read config.json either, the runtime reports that.
pub(super) fn find_request(call: &Call<'_>, start: &Start) -> anyhow::Result<Option<Asking>> {
    let share = call.share.clone();
    let Some(file) = read_spec(call, start, share.is_some())? else { return Ok(None) };
    if share.is_some() || file.mentions_sublet() {
        let spec = file.parse()?;
        if let Some(source) = RequestSource::of(&spec, bundle(start), share.as_deref())? {
            return Ok(Some(Asking { file, spec, source }));
        }
    }
    if let Some(share) = share_by_name(call, start, &file) {
        let spec = file.parse()?;
        let source = RequestSource::of(&spec, bundle(start), Some(&share))?;
        return Ok(source.map(|source| Asking { file, spec, source }));
    }
    check_without_share(call, start, &file)?;
    Ok(None)
}

/// Applies `[runtime] without_share` to a container that asks for no share. A pod's pause container is exempt.
fn check_without_share(call: &Call<'_>, start: &Start, file: &JsonFile) -> anyhow::Result<()> {
    let refuses = call.without_share == WithoutShare::Refuse;
    if !refuses && (call.without_share == WithoutShare::Run || !call.log.has_file()) {
        return Ok(());
    }
    // Most containers that ask for no share are no pod's, and parsing takes longer than all else that is done for them.
    let is_pause = match (refuses || file.may_be_pause()).then(|| file.parse()) {
        None => false,
        Some(Ok(spec)) => RequestSource::of(&spec, bundle(start), Some(""))?.is_none(),
        Some(Err(error)) if refuses => return Err(error.into()),
        // The runtime reports the error.
        Some(Err(_)) => true,
    };
    match (is_pause, refuses) {
        (true, _) => {}
        (false, true) => bail!(
            "no sublet.* annotation reached the runtime and no rule gives the container a share, and [runtime] \
             without_share refuses such containers: start it with annotations by a client that passes them on (Docker's \
             API 1.43 or later), or with another runtime"
        ),
        (false, false) => call.log.warn_in_files(&format!(
            "container {}: no sublet.* annotation reached the runtime and no rule gives it a share, so it gets no GPU \
             (clients of Docker's API before 1.43 drop annotations; [runtime] without_share)",
            safe(&call.line.id.as_ref().map(|id| id.to_string_lossy()).unwrap_or_default())
        )),
    }
    Ok(())
}

/// Reads config.json. `None`: the runtime will refuse it, or its container cannot ask for a share.
fn read_spec(call: &Call<'_>, start: &Start, has_share: bool) -> anyhow::Result<Option<JsonFile>> {
    let path = spec_path(start);
    // A transient failure (no descriptor left) must not stop a container without a share.
    let again = |error: FileError| if error.is_missing() { Err(error) } else { JsonFile::read(&path) };
    let error = match JsonFile::read(&path).or_else(again) {
        Ok(file) => return Ok(Some(file)),
        Err(error) => error,
    };
    // The runtime may read a file that sublet cannot read, and it may ask for a share.
    let may_be_ours = match &error {
        FileError::TooLarge { .. } => oci::mentions_sublet(&path),
        FileError::NotRegular { .. } => !path.is_dir(),
        _ => !error.is_missing(),
    };
    if has_share || may_be_ours {
        return Err(error.into());
    }
    call.log.write(Level::Info, &format!("{error}; it gets no GPU"));
    Ok(None)
}

/// The share in `containers.toml`. A mistake there must not stop containers that have nothing to do with
/// sublet. It is not known then which ones these are, so each container goes on without a share.
fn share_by_name(call: &Call<'_>, start: &Start, file: &JsonFile) -> Option<String> {
    let id = call.line.id.as_ref()?.to_str()?;
    // Engines give absolute bundles; without one there is no engine that knows the container's name.
    containers_by_name::share(id, start.bundle.as_deref()?, file).unwrap_or_else(|error| {
        let unknown = "no rule of containers.toml is applied, and it gets no GPU";
        call.warn(&format!("container {}: {error}; {unknown}", safe(id)));
        None
    })
}

/// crun resolves a relative `--config` from its working directory, and everything else from the bundle (create.c).
fn spec_path(start: &Start) -> PathBuf {
    match start.config.as_deref() {
        Some(config) if config != Path::new("config.json") => config.to_owned(),
        _ => bundle(start).join("config.json"),
    }
}

fn bundle(start: &Start) -> &Path {
    start.bundle.as_deref().unwrap_or(Path::new("."))
}

/// The container's names and paths, and its root filesystem, opened.
fn container(call: &Call<'_>, start: &Start, spec: &Value) -> anyhow::Result<(Container, OwnedFd)> {
    let (id, record) = call.container().context(
        "the command line does not name one container: exactly one id of letters, digits and . _ + - is needed",
    )?;
    let (bundle, _) = open_directory("bundle", bundle(start))?;
    let root = spec.pointer("/root/path").and_then(Value::as_str).context(
        "config.json has no root.path, which the OCI runtime specification requires: recreate the container",
    )?;
    let (rootfs, opened) = open_directory("root.path", &bundle.join(root))?;
    for (name, path) in [("bundle", &bundle), ("root.path", &rootfs), ("--root", &record)] {
        if path.to_str().is_none() {
            // It cannot be written as JSON.
            let path = safe_path(path);
            bail!(
                "{name} {path} is not UTF-8: give the container with a share a directory with another name"
            );
        }
    }
    Ok((Container { uid: effective_user(), id: id.to_owned(), bundle, rootfs, record }, opened))
}

fn open_directory(name: &str, path: &Path) -> anyhow::Result<(PathBuf, OwnedFd)> {
    let failed = |error| anyhow!("{name} {} cannot be used: {error}", safe_path(path));
    sublet_core::fs::open_directory(path).map_err(failed)
}

/// Writes the edited spec and becomes the low-level runtime. Returns only on failure, with the file restored.
fn become_edited(call: &Call<'_>, file: &JsonFile, spec: Value, hooks: &[Stage]) -> anyhow::Error {
    if let Err(error) = write_spec(call, file, spec, hooks) {
        return error;
    }
    let error = call.become_low_level(call.args);
    if let Err(error) = sublet_core::fs::replace(&file.path, &file.text, 0o644) {
        call.warn(&format!("cannot restore {}: {error}", safe_path(&file.path)));
    }
    error
}

/// Writes `spec` with sublet's `hooks`.
fn write_spec(call: &Call<'_>, file: &JsonFile, mut spec: Value, hooks: &[Stage]) -> anyhow::Result<()> {
    let program = if hooks.is_empty() { None } else { hooks::program() };
    match program {
        Some(program) => {
            for stage in hooks {
                hooks::add(&mut spec, *stage, &program, inheritance::honoured_config().as_deref())?;
            }
        }
        // Without it the lease would not be bound.
        None if hooks.contains(&Stage::CreateRuntime) => bail!(
            "sublet-hook is missing, and rootless containers need it: install it as /usr/libexec/sublet/sublet-hook"
        ),
        None if !hooks.is_empty() => {
            call.warn("sublet-hook is missing, so only the next sublet command frees the share");
        }
        None => {}
    }
    Ok(file.replace(&spec)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(bundle: Option<&str>, config: Option<&str>) -> Start {
        Start { bundle: bundle.map(Into::into), config: config.map(Into::into) }
    }

    #[test]
    fn the_file_that_is_edited() {
        assert_eq!(spec_path(&start(Some("/b"), None)), Path::new("/b/config.json"));
        assert_eq!(spec_path(&start(None, None)), Path::new("./config.json"));
        assert_eq!(spec_path(&start(Some("/b"), Some("/f.json"))), Path::new("/f.json"));
        assert_eq!(spec_path(&start(Some("/b"), Some("f.json"))), Path::new("f.json"));
        assert_eq!(spec_path(&start(Some("/b"), Some("config.json"))), Path::new("/b/config.json"));
    }
}
