//! `exec`: config.json's environment reaches only a container's first process, so processes that come
//! later get the same edit here, in the engine's process file or on the command line.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::{Call, Dialect, Exec, RuntimeError, uid};
use crate::admit;
use crate::apply::{self, JsonFile};
use crate::grant::Environment;

/// Edits the environment of a process in a container with a lease.
pub(super) fn exec(call: &Call<'_>, exec: &Exec) -> Result<Infallible, RuntimeError> {
    // With neither, both runtimes take the environment of config.json, which has ours.
    if exec.process.is_none() && exec.env.is_empty() {
        return call.pass_on();
    }
    let Some(environment) = environment(call, exec) else {
        return call.pass_on();
    };
    if let Some(file) = &exec.process {
        edit(file, &environment)?;
        return call.pass_on();
    }
    let options = options(&environment, &exec.env, call.low_level.dialect);
    let (before, behind) = call.args.split_at(exec.options_end);
    Err(call.become_low_level(&[before, &options, behind].concat()))
}

/// What the container's lease asks for. An unreadable ledger must not stop the health checks of
/// containers that are not ours; a process of ours is then held by its MPS server's own limits.
fn environment(call: &Call<'_>, exec: &Exec) -> Option<Environment> {
    let id = exec.id.as_ref()?.to_str()?;
    let record = call.record(id)?;
    let config = call.config_with_leases()?;
    admit::exec_environment(uid(), id, &record, &config).unwrap_or_else(|error| {
        call.warn(&format!("container {}: {error}; exec goes on without its share", crate::text::safe(id)));
        None
    })
}

fn edit(file: &Path, environment: &Environment) -> Result<(), RuntimeError> {
    let file = JsonFile::read(file)?;
    let mut process = file.parse()?;
    apply::edit_environment(&mut process, environment)?;
    Ok(file.replace(&process)?)
}

/// `--env` options to stand behind the user's own `given`: in both runtimes the last one counts.
///
/// runc adds the options to config.json's environment, which has the defaults already (utils and
/// `getProcess` in exec.go); crun puts them in its place (libcrun/container.c, `if (process->env_len)`).
fn options(environment: &Environment, given: &[OsString], dialect: Dialect) -> Vec<OsString> {
    let is_given = |name: &str| given.iter().any(|entry| name_of(entry) == name.as_bytes());
    let defaults = environment.default.iter().filter(|(name, _)| dialect == Dialect::Crun && !is_given(name));
    environment
        .set
        .iter()
        .chain(defaults)
        .flat_map(|(name, value)| [OsString::from("--env"), OsString::from(format!("{name}={value}"))])
        .collect()
}

fn name_of(entry: &OsString) -> &[u8] {
    entry.as_bytes().split(|byte| *byte == b'=').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn options_for_the_command_line() {
        let environment = Environment {
            set: pairs(&[("CUDA_VISIBLE_DEVICES", "0")]),
            default: pairs(&[("XLA", "0.1"), ("XLB", "0.2")]),
            remove_prefixes: Vec::new(),
        };
        let given = ["XLA=0.9".into(), "CUDA_VISIBLE_DEVICES=3".into()];
        let runc = ["--env", "CUDA_VISIBLE_DEVICES=0"];
        assert_eq!(options(&environment, &given, Dialect::Runc), runc);
        let crun = ["--env", "CUDA_VISIBLE_DEVICES=0", "--env", "XLB=0.2"];
        assert_eq!(options(&environment, &given, Dialect::Crun), crun);
    }
}
